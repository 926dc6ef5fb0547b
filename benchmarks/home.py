"""Measure jointcut where people work: in NNX, Equinox and HuggingFace Flax, on meshes, under vmap, in their own jit.

    python -m benchmarks.home                  # everything: half an hour on two cores
    python -m benchmarks.home libraries mesh   # of `libraries`, `mesh`, `examples`, `search`, `compile`

*Activations* are XLA's temporaries of the compiled step, *peak* counts arguments and results as well. Time is the
median ratio of interleaved runs. The figures are kept in `benchmarks/results/home.json`.
"""

import argparse
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import machine, memory_of, time_together, wide_console
from benchmarks.methods import build_inside, build_plain
from benchmarks.programs import PROGRAMS, load
from jointcut import aot

RESULTS = Path(__file__).parent / "results" / "home.json"
MB = 1e6
Rows = list[dict[str, Any]]


def main() -> None:
    """Run the parts that are asked for, print a table of each, and keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.home", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7, help="timing rounds (%(default)s)")
    parser.add_argument("--devices", type=int, default=8, help="host devices of the mesh (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    console = wide_console(120)
    warnings.filterwarnings("ignore", category=FutureWarning)
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for part in options.parts:
        rows = PARTS[part](options)
        show(console, part, rows)
        kept[part] = {"rows": rows, "machine": machine()}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def show(console: Console, part: str, rows: Rows) -> None:
    """One table of a part's rows."""
    table = Table(title=part, box=box.SIMPLE_HEAD)
    for heading, value in rows[0].items():
        table.add_column(heading, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(x if isinstance(x, str) else f"{x:.3g}" for x in row.values()))
    console.print(table)


# ------------------------------------------------------------------------------------------------------- libraries


def libraries(options: argparse.Namespace) -> Rows:
    """Each model trained in each way, plain and cut: losses, memory and time.

    Each in a process of its own: what ran before in a process moves its times by a tenth.
    """
    from benchmarks.home_models import HOMES

    command = [sys.executable, "-m", "benchmarks.home_way", str(options.rounds)]
    places = [(str(i), way) for i, make in enumerate(HOMES) for way in make().ways]
    found = (subprocess.run([*command, *place], check=True, stdout=subprocess.PIPE) for place in places)
    return [json.loads(process.stdout) for process in found]


# ------------------------------------------------------------------------------------------------------------ mesh


def mesh(options: argparse.Namespace) -> Rows:
    """Bytes for each device of a mesh, in a process of its own that has so many."""
    flags = f"--xla_force_host_platform_device_count={options.devices}"
    command = [sys.executable, "-m", "benchmarks.home_mesh"]
    found = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, check=True, stdout=subprocess.PIPE)
    return json.loads(found.stdout)


# -------------------------------------------------------------------------------------------------------- examples


def network(params: Any, x: jax.Array) -> jax.Array:
    """The loss of one example `(width,)`: eight layers with a gelu and a normalisation each."""
    for w in params:
        x = jax.nn.gelu(x @ w)
        x = (x - jnp.mean(x)) * jax.lax.rsqrt(jnp.var(x) + 1e-6)
    return jnp.mean(jnp.square(x))


def examples(options: argparse.Namespace) -> Rows:
    """Gradients of each example, and of the mean over examples, beside the cut around the whole."""
    keys = jax.random.split(jax.random.key(0), 9)
    params = [jax.random.normal(key, (128, 128)) / 11 for key in keys[1:]]
    x = jax.random.normal(keys[0], (64, 128))
    wide = jax.random.normal(keys[0], (4096, 128))
    cut = aot.function(network)

    def mean(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, x: jnp.mean(jax.vmap(f, (None, 0))(params, x))

    each = {name: jax.vmap(jax.grad(f), (None, 0)) for name, f in (("plain", network), ("cut", cut))}
    whole = {
        "plain": jax.grad(mean(network)),
        "cut": jax.grad(mean(cut)),
        "cut around": jax.grad(aot.function(mean(network))),
    }
    rows: Rows = []
    for title, ways, batch in (("vmap(grad(f))", each, x), ("grad(vmap(f).mean())", whole, wide)):
        made = {name: jax.jit(f).lower(params, batch).compile() for name, f in ways.items()}
        calls = {n: partial(c, params, batch) for n, c in made.items()}
        timing = time_together(calls, "plain", 5 * options.rounds)  # the steps are short
        base = memory_of(made["plain"])
        for name, compiled in made.items():
            memory = memory_of(compiled)
            rows.append(
                {
                    "gradient": title,
                    "of": name,
                    "activations MB": memory.temp / MB,
                    "activations ÷": memory.temp / base.temp,
                    "peak ÷": memory.peak / base.peak,
                    "time ÷": timing[name].ratio.median,
                }
            )
    return rows


# ---------------------------------------------------------------------------------------------------------- search


def search(options: argparse.Namespace) -> Rows:
    """The seconds of the first search for a budget, and of what other ways of calling search after it."""
    del options
    program = load("gpt-scan", "small")
    function = aot.function(program.loss, has_aux=program.has_aux, budget=0.3)
    arguments = program.arguments
    ways = {
        "loss.value_and_grad": lambda: function.value_and_grad(*arguments),
        "trace().partition()": lambda: function.trace(*arguments).partition(),
        "jax.jit(loss.value_and_grad)": lambda: jax.jit(function.value_and_grad)(*arguments),
        "jax.jit(jax.value_and_grad(loss))": lambda: jax.jit(jax.value_and_grad(function))(*arguments),
        "loss.explain": lambda: function.explain(*arguments),
    }
    rows: Rows = []
    told = Told()
    for name, call in ways.items():
        start = time.perf_counter()
        with told:
            jax.block_until_ready(jax.tree.leaves(call()))
        whole = time.perf_counter() - start
        rows.append({"way": name, "what the log says of the search": told.text, "call s": whole})
    return rows


class Told(logging.Handler):
    """Keeps what jointcut logs of its searches."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line that ends a search."""
        if re.search(r"(searched|took|checked) .* compiled ", message := record.getMessage()):
            self.text = re.sub(r"[,;:] .*", "", message.partition(": ")[2] or message)

    def __enter__(self) -> None:
        self.text = "none"
        log = logging.getLogger("jointcut")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("jointcut").removeHandler(self)


# --------------------------------------------------------------------------------------------------------- compile


def compiling(options: argparse.Namespace) -> Rows:
    """Seconds until a step in the user's own jit is compiled, over plain JAX's."""
    rows: Rows = []
    for name in PROGRAMS:
        program = load(name, "small")
        seconds: dict[str, list[float]] = {"plain": [], "cut": []}
        for _ in range(max(1, options.rounds // 3)):
            for key, build in (("plain", build_plain), ("cut", partial(build_inside, strategy="best"))):
                seconds[key].append(build(program).ready_s)
        plain, ours = min(seconds["plain"]), min(seconds["cut"])
        rows.append({"program": name, "plain s": plain, "in own jit s": ours, "÷": ours / plain})
    mean = math.exp(sum(math.log(row["÷"]) for row in rows) / len(rows))
    return [*rows, {"program": "geometric mean", "plain s": math.nan, "in own jit s": math.nan, "÷": mean}]


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "libraries": libraries,
    "mesh": mesh,
    "examples": examples,
    "search": search,
    "compile": compiling,
}


if __name__ == "__main__":
    main()
