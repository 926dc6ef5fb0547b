"""Measure the search: how near to the certified bound its cuts come, whether they are optimal, and how long it takes.

    python -m benchmarks.fronts                    # all programs and depths: a quarter of an hour on two cores
    python -m benchmarks.fronts gru ode            # some programs, and nothing else
    python -m benchmarks.fronts --polish 0         # no integer programs for the large graphs
    python -m benchmarks.fronts --menu             # time replaying all plans of large graphs too: minutes more

For each program eight budgets in bytes saved, evenly spread between the fewest and those of the last choice of its
front. A gap is how far the seconds recomputed lie above the bound; with polish, an integer program has some seconds for
each budget. Most programs are small: so programs at their large size and deep stacks of blocks follow, traced from
shapes alone. On small graphs, the suite's at tiny size and random ones, the choice is compared with the optimum of an
integer program over all nodes and arcs, which knows nothing of the front. Last, each step from a function to the plans
for a budget is timed on graphs of 10,000 and 100,000 equations, by the clock and by the processor; nothing is compiled.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, wide_console
from benchmarks.methods import count_equations, forget
from benchmarks.optima import Exact, exact_of, small_networks
from benchmarks.polish import polished
from benchmarks.programs import PROGRAMS, SIZES, Program, gpt, load, mlp, resnet, vit
from benchmarks.scaling import DEPTHS
from jointcut import aot
from jointcut.aot.planning.budgets.rates import rates
from jointcut.partition.search.budget import Planner
from jointcut.partition.search.candidates import Candidate, ranked
from jointcut.partition.search.front import Front, front

RESULTS = Path(__file__).parent / "results"
BUDGETS = 8
LARGE_OPS = 5000  # in graphs above it, gaps are promised to be small
LAW_BUDGETS = 200
MB = 1e6

#: Programs that have more than `LARGE_OPS` ops at their large size.
LARGE = ("gpt-unrolled", "mamba", "vae", "diffusion", "flax-linen", "equinox")


@dataclass(frozen=True)
class Quality:
    """One front: ops of the graph, seconds to build it, how many choices it has, and the gaps at each budget.

    `polish_s` is what a budget takes with polish. `rises` counts those of `LAW_BUDGETS` at which more bytes gave more
    seconds, or a cut above the budget.
    """

    name: str
    ops: int
    front_s: float
    choices: int
    budgets_bytes: tuple[int, ...]
    gaps: tuple[float, ...]
    polished_gaps: tuple[float, ...]
    polish_s: float
    rises: int


@dataclass(frozen=True)
class Timing:
    """Seconds of each step for one graph, by the clock and by the processor, and what the steps gave."""

    equations: int
    ops: int
    plans: int
    clock_s: dict[str, float]
    processor_s: dict[str, float]
    rises: int


def main() -> None:
    """Measure, print, write."""
    options = parse_options()
    console = wide_console(150)
    whole = not options.named
    quality = [quality_of(program, options.polish) for program in progress(suite(options))]
    console.print(quality_table(quality))
    exact = [exact_of(name, net) for name, net in progress(small_networks())] if whole else []
    timings = [time_steps(layers, options.menu) for layers in progress(DEPTHS[1:])] if whole else []
    if whole:
        console.print(exact_table(exact))
        console.print(timing_table(timings))
    for line in summary(quality, exact, timings):
        console.print(line)
    where = machine() | {"size": options.size, "rates": asdict(rates()), "polish_s": options.polish}
    name = f"fronts-{where['backend']}-py{where['python']}-jax{where['jax']}.json"
    path = (RESULTS if whole and options.size != "tiny" else Path(tempfile.mkdtemp())) / name
    figures = {"quality": quality, "exact": exact, "timings": timings}
    record = {"machine": where} | {key: [asdict(row) for row in rows] for key, rows in figures.items()}
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"Written to {path}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fronts", description=__doc__.partition("\n")[0])
    parser.add_argument("named", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all when none")
    parser.add_argument("--size", choices=SIZES, default="small", help="how large the programs are (%(default)s)")
    parser.add_argument("--polish", type=float, default=3.0, help="seconds for each budget (%(default)g)")
    parser.add_argument("--menu", action="store_true", help="time replaying all plans, which pareto() does")
    options = parser.parse_args()
    if unknown := sorted(set(options.named) - set(PROGRAMS)):
        parser.error(f"unknown program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    return options


def progress(items: Iterable[Any]) -> Iterator[Any]:
    """The items, with a bar."""
    with tqdm(list(items), disable=None) as bar:
        yield from bar


# ------------------------------------------------------------------------------------------------- programs


def suite(options: argparse.Namespace) -> Iterator[Callable[[], Program]]:
    """Builders of the programs to measure: the suite's, and where none is named, large and deep ones."""
    yield from (partial(load, name, options.size) for name in options.named or PROGRAMS)
    if not options.named and options.size != "tiny":
        yield from (partial(by_shapes, f"{name} large", partial(load, name, "large")) for name in LARGE)
        yield from (partial(by_shapes, name, build) for name, build in DEEP.items())


def by_shapes(name: str, build: Callable[[], Program]) -> Program:
    """A program whose arguments are shapes: nothing is drawn, and no memory taken."""
    found: list[Program] = []

    def arguments() -> tuple[Any, ...]:
        found.append(build())
        return found[0].arguments

    shapes = jax.eval_shape(arguments)
    return replace(found[0], name=name, arguments=shapes)


def deep_gpt() -> Program:
    """A hundred blocks, written one after the other."""
    return gpt.of("gpt", gpt.Config(layers=100, width=1024, heads=16, context=1024, scan=False), rows=8)


def deep_mlp() -> Program:
    """Two hundred hidden layers."""
    config = mlp.Config(rows=8192, features=1024, width=1024, layers=200, classes=1000)
    features, labels = jnp.zeros((config.rows, config.features)), jnp.zeros(config.rows, int)
    return Program("mlp", "", mlp.loss, (mlp.init(jax.random.key(0), config), features, labels))


def deep_resnet() -> Program:
    """Eighty bottleneck blocks in four stages."""
    config = resnet.Config(64, 224, 64, (8, 24, 40, 8), 1000)
    images = jnp.zeros((config.rows, config.side, config.side, resnet.CHANNELS))
    arguments = (*resnet.init(jax.random.key(0), config), images, jnp.zeros(config.rows, int))
    return Program("resnet", "", partial(resnet.loss, config=config), arguments, has_aux=True)


def deep_vit() -> Program:
    """A hundred blocks."""
    config = vit.Config(64, 224, 16, 768, 12, 100, 1000)
    images = jnp.zeros((config.rows, config.side, config.side, vit.CHANNELS))
    arguments = (vit.init(jax.random.key(0), config), images, jnp.zeros(config.rows, int))
    return Program("vit", "", partial(vit.loss, config=config), arguments)


DEEP = {
    "gpt, 100 blocks": deep_gpt,
    "mlp, 200 layers": deep_mlp,
    "resnet, 80 blocks": deep_resnet,
    "vit, 100 blocks": deep_vit,
}


# ------------------------------------------------------------------------------------------------- gaps to the bound


def quality_of(build: Callable[[], Program], polish_seconds: float) -> Quality:
    """The gaps of one program."""
    forget()
    program = build()
    planner = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments).planner
    net = planner.network
    start = time.perf_counter()
    found = front(net, planner.most_bytes_per_s)
    first, last = found.choices[0].bytes, found.choices[-1].bytes
    found.best(first)  # the first question takes what is ready for all others
    built = time.perf_counter()
    budgets = [int(b) for b in np.linspace(first, last, BUDGETS)]
    gaps = tuple(gap(found, b, 0.0) for b in budgets)
    begin = time.perf_counter()
    polished = tuple(gap(found, b, polish_seconds) for b in budgets)
    end = time.perf_counter()
    many = [int(b) for b in np.linspace(first, last, LAW_BUDGETS)]
    return Quality(
        name=program.name,
        ops=len(planner.graph.ops),
        front_s=built - start,
        choices=len(found.choices),
        budgets_bytes=tuple(budgets),
        gaps=gaps,
        polished_gaps=polished,
        polish_s=(end - begin) / BUDGETS,
        rises=broken_laws(found, many),
    )


def gap(found: Front, budget_bytes: int, polish_seconds: float) -> float:
    """How far the seconds of the choice for a budget lie above the bound, as a share of the bound."""
    choice, bound = polished(found, budget_bytes, polish_seconds), found.bound_seconds(budget_bytes)
    assert choice is not None and choice.bytes <= budget_bytes
    if choice.seconds <= bound:
        return 0.0
    return choice.seconds / bound - 1 if bound else math.inf


def broken_laws(found: Front, budgets: Sequence[int]) -> int:
    """At how many budgets more bytes give more seconds, or a cut of more bytes than allowed."""
    seconds, broken = math.inf, 0
    for budget in budgets:
        choice = found.best(budget)
        assert choice is not None
        broken += choice.bytes > budget or choice.seconds > seconds
        seconds = choice.seconds
    return broken


# ------------------------------------------------------------------------------------------------- seconds of each step


def time_steps(layers: int, with_menu: bool) -> Timing:
    """A deep unrolled GPT of width 8, from the function to the plans for a budget, without compiling any."""
    clock: dict[str, float] = {}
    processor: dict[str, float] = {}

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        start, start_processor = time.perf_counter(), time.process_time()
        yield
        clock[step] = time.perf_counter() - start
        processor[step] = time.process_time() - start_processor

    program = gpt.of("scaling", gpt.Config(layers=layers, width=8, heads=2, context=8, scan=False), rows=1)
    _ = rates()
    forget()
    with timed("trace"):
        traced = aot.function(program.loss).trace(*program.arguments)
    with timed("read the graph"):
        graph = traced.graph
    with timed("price, build the network"):
        planner: Planner = traced.planner
        _ = planner.network
    with timed("front"):
        choices = planner.front.choices
    with timed("one choice"):
        choice = planner.front.best((choices[0].bytes + choices[-1].bytes) // 2)
    assert choice is not None
    with timed("its plan"):
        plan = planner.plan(choice, "front")
    with timed("schedule and replay it"):
        budget_bytes = planner.candidate(plan).peak_bytes
    with timed("list the plans"):
        candidates = planner.by_time(budget_bytes)
    with timed("the fastest for this peak"):
        _ = next(c for c in candidates if c.peak_bytes <= budget_bytes)
    menu = ()
    if with_menu:
        with timed("the menu: many plans, replayed"):
            menu = planner.menu
    return Timing(count_equations(traced.joint), len(graph.ops), len(menu), clock, processor, _rises(menu))


def _rises(menu: Sequence[Candidate]) -> int:
    """How many plans are no better than the next one in time, or in peak: none should be."""
    pairs = list(zip(ranked(menu), ranked(menu)[1:], strict=False))
    return sum(less.step_seconds < more.step_seconds or less.peak_bytes > more.peak_bytes for more, less in pairs)


# ------------------------------------------------------------------------------------------------- tables


def quality_table(rows: Sequence[Quality]) -> Table:
    """Gaps by program."""
    headings = ("program", "ops", "front\nms", "choices", "saved, from\nMB", "to\nMB", "mean\ngap", "worst\ngap",
                "mean,\npolished", "worst,\npolished", "polish\ns")  # fmt: skip
    table = table_with(headings, "Recomputed seconds above the bound, at eight budgets")
    for r in rows:
        table.add_row(
            r.name, str(r.ops), f"{1e3 * r.front_s:.0f}", str(r.choices), f"{r.budgets_bytes[0] / MB:.1f}",
            f"{r.budgets_bytes[-1] / MB:.1f}", f"{np.mean(r.gaps):.2%}", f"{max(r.gaps):.2%}",
            f"{np.mean(r.polished_gaps):.2%}", f"{max(r.polished_gaps):.2%}", f"{r.polish_s:.2f}",
        )  # fmt: skip
    return table


def exact_table(rows: Sequence[Exact]) -> Table:
    """Small graphs beside their optima."""
    table = table_with(("graph", "nodes", "budgets", "proven", "equal", "equal\nunpolished"), "Optima of small graphs")
    for r in rows:
        table.add_row(r.name, *(str(n) for n in (r.nodes, r.budgets, r.proven, r.equal, r.equal_unpolished)))
    return table


def timing_table(rows: Sequence[Timing]) -> Table:
    """Steps beside what they take."""
    sizes = [f"{r.equations} equations\n{unit}" for r in rows for unit in ("s", "s of processor")]
    table = table_with(("step", *sizes), "From a function to the plans for a budget")
    for step in rows[0].clock_s:
        table.add_row(step, *(f"{taken[step]:.2f}" for r in rows for taken in (r.clock_s, r.processor_s)))
    return table


def table_with(headings: Sequence[str], title: str) -> Table:
    """An empty table; what follows the first column is set to the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table


def summary(quality: Sequence[Quality], exact: Sequence[Exact], timings: Sequence[Timing]) -> Iterator[str]:
    """What all rows say together."""
    for title, rows in (("all graphs", quality), (f"above {LARGE_OPS} ops", [q for q in quality if q.ops > LARGE_OPS])):
        for how, gaps in (
            ("gap", [g for q in rows for g in q.gaps]),
            ("gap polished", [g for q in rows for g in q.polished_gaps]),
        ):
            if gaps:
                yield f"{how}, {title}: {np.mean(gaps):.2%} on average, {max(gaps):.2%} at worst, {len(rows)} graphs"
    rises, tried = sum(q.rises for q in quality), LAW_BUDGETS * len(quality)
    yield f"budgets at which more bytes give more seconds: {rises} of {tried}"
    if exact:
        optimal = sum(e.equal == e.proven > 0 for e in exact)
        yield f"small graphs whose choices are all optimal: {optimal} of {len(exact)}"
        yield f"their budgets: {sum(e.equal for e in exact)} optimal of {sum(e.proven for e in exact)} proven"
    for t in timings:
        planning = sum(t.clock_s.values()) - t.clock_s["trace"]
        yield (
            f"{t.equations} equations: front {t.clock_s['front']:.2f} s; from the joint graph to a plan for a budget "
            f"{planning:.1f} s, {t.plans} plans replayed; {t.rises} of them break a law"
        )


if __name__ == "__main__":
    main()
