"""Weigh a GPT in a scan and unrolled, under XLA's scheduler that hides latency, on one GPU and on eight.

    python -m benchmarks.latency                                # half an hour or so
    python -m benchmarks.latency --targets h100x8 --heads tied
    python -m benchmarks.latency --resume                       # go on where a run was stopped

The batch has 16 rows of 512 words for each device, and is sharded over the devices; parameters lie whole on each.
That scheduler defers the products for weights (openxla/xla#45753). For several H100s XLA turns it on by itself, since
it has a model of them; `no model` is the scheduler with its older estimates. Temporaries are of one device, by XLA's
account; the GPUs need not be here. Figures go to `benchmarks/results/latency-jaxVERSION.json` one by one.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, memory_of, wide_console
from benchmarks.programs import gpt
from benchmarks.programs.program import Wrap, identity
from jointcut import aot

RESULTS = Path(__file__).parent / "results"
VOCABULARY, ROWS = 8192, 16
CONFIG = gpt.Config(layers=12, width=512, heads=8, context=512, dropout=0.0)

PLAIN, CHECKPOINT, DEFAULT, LEAST = "plain JAX", "jax.checkpoint around each block", "default", "budget=0.0"
WAYS = (PLAIN, CHECKPOINT, DEFAULT, LEAST)
HEADS = ("tied", "untied")
SCAN, UNROLLED = "scan", "unrolled"

HIDES, HAS_MODEL = "xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_enable_analytical_sol_latency_estimator"
SCHEDULERS: dict[str, dict[str, bool]] = {
    "without": {HIDES: False, HAS_MODEL: False},
    "with": {HIDES: True},
    "no model": {HIDES: True, HAS_MODEL: False},
}


@dataclass(frozen=True)
class Row:
    """The temporaries of one step on one device; where a budget was refused, None and the least that was found."""

    target: str
    head: str
    way: str
    form: str
    scheduler: str
    temp_bytes: int | None
    least_bytes: int | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What was measured."""
        return self.target, self.head, self.way, self.form, self.scheduler


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latency", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--targets", nargs="+", default=["h100", "h100x8"], metavar="TARGET")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--resume", action="store_true", help="keep what was measured before")
    options, path = parser.parse_args(), RESULTS / f"latency-jax{jax.__version__}.json"
    known = {row.key: row for row in read(path)}
    asked = [
        (t, h, w, f) for t in options.targets for h in options.heads for w in options.ways for f in (SCAN, UNROLLED)
    ]
    for target, head, way, form in tqdm(asked, unit="step", disable=None):
        if options.resume and all((target, head, way, form, scheduler) in known for scheduler in SCHEDULERS):
            continue
        known |= {row.key: row for row in measured(aot.target(target), head, way, form)}
        write(path, list(known.values()))
    for target in options.targets:
        for head in options.heads:
            rows = [row for row in known.values() if (row.target, row.head) == (target, head)]
            wide_console(150).print(table_of(f"{target}, {head} head: MB of temporaries", rows))


# ------------------------------------------------------------------------------------------------------- the model


def init(key: Array, config: gpt.Config) -> gpt.Params:
    """The parameters of the suite's GPT, with a vocabulary of words."""
    std = config.width**-0.5
    params = {**gpt.init(key, config), "embed": std * jax.random.normal(key, (VOCABULARY, config.width))}
    return params if config.tied else {**params, "head": std * jax.random.normal(key, (config.width, VOCABULARY))}


def loss(params: gpt.Params, batch: Array, config: gpt.Config, wrap: Wrap = identity) -> Array:
    """The cross entropy of the next word, without dropout."""
    return gpt.loss(params, batch, jax.random.key(0), config, wrap)


def arguments(goal: aot.Target, config: gpt.Config) -> tuple[Any, Any]:
    """The types of the parameters, whole on each device, and of the batch, sharded over the devices."""
    params = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((ROWS * goal.count, config.context + 1), jnp.int32)
    if goal.count == 1:
        return jax.tree.map(goal.placed, (params, batch))
    mesh = goal.mesh((goal.count,), ("data",))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    return jax.tree.map(lambda leaf: leaf.update(sharding=whole), params), batch.update(sharding=rows)


# --------------------------------------------------------------------------------------------------- what it takes


def measured(goal: aot.Target, head: str, way: str, form: str) -> Iterator[Row]:
    """A step in one way and one form, under each scheduler."""
    config = replace(CONFIG, tied=head == "tied", scan=form == SCAN)
    try:
        lowered = lowered_as(way, partial(loss, config=config), arguments(goal, config))
    except aot.BudgetError as error:
        yield from (Row(goal.name, head, way, form, name, None, error.least_bytes) for name in SCHEDULERS)
        return
    for name, flags in SCHEDULERS.items():
        yield Row(goal.name, head, way, form, name, memory_of(lowered.compile(compiler_options={**flags})).temp)


def lowered_as(way: str, function: Callable[..., Array], structs: tuple[Any, Any]) -> Lowered:
    """A step in one way. Raises `BudgetError` where no plan was found for a budget."""
    if way in (PLAIN, CHECKPOINT):
        wrap = jax.checkpoint if way == CHECKPOINT else identity
        return jax.jit(jax.value_and_grad(partial(function, wrap=wrap))).trace(*structs).lower()
    traced = aot.function(function).trace(*structs)
    cut = traced.partition(budget=0.0) if way == LEAST else traced.partition()
    return cut.jits.lowered("step")


def read(path: Path) -> list[Row]:
    """What a file holds; nothing where there is none."""
    return [Row(**row) for row in json.loads(path.read_text("utf-8"))["rows"]] if path.exists() else []


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write what was measured so far."""
    kept = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """A line for each way; under each scheduler the step in a scan, unrolled, and the latter over the former."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("way")
    for scheduler in SCHEDULERS:
        for heading in (SCAN, UNROLLED, ""):
            table.add_column(f"{scheduler if heading == SCAN else ''}\n{heading}", justify="right")
    known = {(row.way, row.form, row.scheduler): row for row in rows}
    for way in WAYS:
        found = [[known.get((way, form, name)) for form in (SCAN, UNROLLED)] for name in SCHEDULERS]
        table.add_row(way, *(cell for pair in found for cell in cells(pair)))
    return table


def cells(pair: Sequence[Row | None]) -> Iterator[str]:
    """The cells of one way under one scheduler."""
    sizes = [None if row is None else row.temp_bytes for row in pair]
    for row, size in zip(pair, sizes, strict=True):
        least = "" if row is None or row.least_bytes is None else f"refused: {row.least_bytes / 1e6:,.0f}"
        yield least if size is None else f"{size / 1e6:,.0f}"
    scan, unrolled = sizes
    yield f"{unrolled / scan:.2f}" if scan and unrolled else ""


if __name__ == "__main__":
    main()
