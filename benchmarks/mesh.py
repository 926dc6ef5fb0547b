"""Weigh steps in `jax.jit` over eight devices, on axes that XLA lays out: temporaries, gradients and collectives.

    python -m benchmarks.mesh                      # eight devices of the host
    python -m benchmarks.mesh FSDP --quick         # rows whose name has this word; unrolled layers alone
    python -m benchmarks.mesh --target h100x8      # compiled for devices that need not be here; or v5e-8

A GPT and a mixture of experts of six layers, in a scan and unrolled, in five layouts that only the arguments name.
Plain JAX, ours in the user's jit, and ours called. Bytes are temporaries of one device by XLA's account. Collectives
are those that the compiled step runs, with the bytes that they make. Width 64 on the host, 512 where nothing runs.

Where ours run more, the last column says whether the plan names them: each array that the compiled step exchanges more,
for its line of the model. What only the report of the compiled step names is said apart.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.table import Table

from benchmarks.measure import memory_of, wide_console
from benchmarks.mesh_figures import Named
from benchmarks.parallel import (
    LAYERS,
    TIME,
    WIDTH,
    Moves,
    Shapes,
    Weights,
    arguments,
    block,
    expert_block,
    in_words,
    listed,
    matrices,
    moves,
    of_experts,
    relative_error,
    through,
)
from jointcut import aot
from jointcut.aot.report.compare.collectives import Collectives
from jointcut.aot.report.compare.exchanges import exchanges
from jointcut.aot.run.compile import compiled
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.runs import repeated

RESULTS = Path(__file__).parent / "results"
MODELS: dict[str, tuple[Callable[[Array, Weights], Array], Shapes]] = {
    "GPT": (block, matrices),
    "MoE": (expert_block, of_experts),
}
#: Width and length of a sequence: on the host, and where nothing runs, large enough for temporaries in HBM.
SMALL, LARGE = (WIDTH, TIME), (512, 256)


@dataclass(frozen=True)
class Layout:
    """How a model lies on devices: the mesh, the batch, and the place of an axis for each matrix of a layer."""

    sizes: tuple[int, ...]
    batch: P
    split: dict[str, tuple[str, int]]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return ("d", "m")[: len(self.sizes)]

    def spec(self, name: str, rank: int, is_stacked: bool) -> P:
        """Where the matrix of this name lies; a stack has one more axis in front."""
        axis, at = self.split.get(name, ("", 0))
        places = [None] * rank
        return P(*[None] * is_stacked, *(axis if axis and i == at % rank else None for i in range(len(places))))


_LAST = dict.fromkeys(("qkv", "out", "router", "gate", "up", "down"), ("d", -1))
_HEADS = {"qkv": ("m", -1), "out": ("m", -2)}
LAYOUTS = {
    "data parallel": Layout((8,), P("d"), {}),
    "FSDP": Layout((8,), P("d"), _LAST),
    "tensor parallel": Layout((2, 4), P("d"), {**_HEADS, "gate": ("m", -1), "up": ("m", -1), "down": ("m", -2)}),
    "sequence parallel": Layout((2, 4), P("d", "m"), {}),
    "experts": Layout((2, 4), P("d"), dict.fromkeys(("gate", "up", "down"), ("m", 0))),
}


def named(found: Collectives, plan: Plan) -> Named:
    """Compare what a compiled step exchanges more with what the report of it and the plan say."""
    kinds = {
        kind
        for kind, (count, size) in found.ours.totals.items()
        for plain in [found.plain.totals.get(kind, (0, 0))]
        if count > plain[0] or size > plain[1]
    }
    counts = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
    for side, rows in zip(counts, (found.ours.rows, found.plain.rows), strict=True):
        for row in rows:
            side[row.kind, row.line] += row.count if row.kind in kinds else 0
    arrays = counts[0] - counts[1]
    graph = plan.problem.graph if plan.problem is not None else None
    told = () if graph is None else repeated(graph, plan.reruns(graph), dict(plan.segments))
    foreseen = Counter[tuple[str, str]]()
    for each in (each for rows in told for each in rows):
        foreseen[each.kind, each.op.source] += each.count
    pieces = sum(n for kind, n in found.pieces.items() if kind in kinds)
    reported = Counter({(row.kind, row.line): row.count - row.plain_count for row in found.more if row.line})
    return Named(arrays.total() + pieces, (arrays & reported).total() + pieces, (arrays & foreseen).total())


@dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: the model, how it is laid out, and how its layers are written.
        plain, in_jit, called: temporaries of plain JAX, of ours in the user's jit, and of ours called.
        error: the largest difference of a gradient, relative to the largest of it; None where nothing runs.
        moves: the collectives of the three.
        named: what ours in jit and ours called exchange more, and how many of these are named.
        seconds: how long the row took to measure.
    """

    name: str
    plain: int
    in_jit: int
    called: int
    error: float | None
    moves: tuple[Moves, Moves, Moves]
    named: tuple[Named, Named]
    seconds: float


def loss(layer: Callable[[Array, Weights], Array], weights: Any, x: Array) -> Array:
    """The mean square of the stream after all layers."""
    return jnp.mean(jnp.square(through(layer, weights, x)))


def laid(layout: Layout, mesh: Mesh, shapes: dict[str, tuple[int, ...]], is_scan: bool) -> tuple[Any, Any]:
    """The shardings of weights and batch."""
    of_layer = {name: NamedSharding(mesh, layout.spec(name, len(shape), is_scan)) for name, shape in shapes.items()}
    return of_layer if is_scan else [of_layer] * LAYERS, NamedSharding(mesh, layout.batch)


def setting(
    model: str, layout: Layout, is_scan: bool, goal: aot.Target | None = None
) -> tuple[Callable[..., Array], tuple[Any, Any]]:
    """The loss of a model, and its arguments laid over eight devices: arrays, or types where nothing runs."""
    layer, shapes = MODELS[model]
    kinds = (AxisType.Auto,) * len(layout.sizes)
    mesh = (
        jax.make_mesh(layout.sizes, layout.axes, axis_types=kinds)
        if goal is None
        else goal.mesh(layout.sizes, layout.axes)
    )
    width, length = SMALL if goal is None else LARGE
    weights, x = arguments(width, length, shapes)
    args, places = (weights if is_scan else listed(weights), x), laid(layout, mesh, shapes(width), is_scan)
    if goal is None:
        return partial(loss, layer), jax.device_put(args, places)
    types = jax.tree.map(lambda a, to: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), args, places)
    return partial(loss, layer), types


def measure(name: str, model: str, layout: Layout, is_scan: bool, goal: aot.Target | None) -> Row:
    """The figures of one program."""
    start = time.perf_counter()
    function, args = setting(model, layout, is_scan, goal)
    cut = aot.function(function, target=goal)
    steps = [
        compiled(jax.jit(f).lower(*args), goal)
        for f in (jax.value_and_grad(function), lambda *a: cut.value_and_grad(*a))
    ]
    ours = cut.trace(*args).partition().compile()
    called = ours.cut.jits.compiled("step")
    error = None if goal else relative_error(cut.value_and_grad(*args)[1], steps[0](*args)[1])
    steps.append(called)
    texts, found = tuple(moves(step.as_text() or "") for step in steps), [exchanges([step]) for step in steps]
    assert [side.totals for side in found] == [*texts], "the report counts what stands in the text"
    told = tuple(named(Collectives(side, found[0]), ours.cut.plan) for side in found[1:])
    temps = (memory_of(step).temp for step in steps)
    return Row(name, *temps, error, texts, told, time.perf_counter() - start)


def table_of(rows: list[Row], where: str) -> Table:
    """A line for each program."""
    title = f"Layouts of jit over {where}, temporaries of a device"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for head in (
        "",
        "plain",
        "in jit",
        "called",
        "error",
        "collectives: plain",
        "in jit",
        "called",
        "named by the plan",
    ):
        table.add_column(head, justify="left" if not head or head == "collectives: plain" else "right")
    for row in rows:
        shares = (f"{size / row.plain:.2f}" if row.plain else f"{size:,} B" for size in (row.in_jit, row.called))
        error = "" if row.error is None else f"{row.error:.0e}"
        plain, *ours = row.moves
        texts = ("equal" if moved == plain else in_words(moved) for moved in ours)
        told = "; ".join(dict.fromkeys(map(str, row.named)))
        table.add_row(row.name, f"{row.plain / 1e6:.1f} MB", *shares, error, in_words(plain), *texts, told)
    return table


def programs(words: list[str], is_quick: bool) -> dict[str, tuple[str, Layout, bool]]:
    """The programs whose names have all of these words."""
    found = {
        f"{model}, {way}, {'scan' if is_scan else 'unrolled'}": (model, layout, is_scan)
        for model in MODELS
        for way, layout in LAYOUTS.items()
        for is_scan in (True, False)
        if (way != "experts" or model == "MoE") and not (is_quick and is_scan)
    }
    return {name: how for name, how in found.items() if all(word in name for word in words)}


def main() -> None:
    """Measure, print a table, and keep each row; rows that are stored and not measured stay as they are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the rows to measure; all when none")
    parser.add_argument("--target", type=aot.target, help="as aot.target takes it: h100x8, v5e-8; the host when none")
    parser.add_argument("--quick", action="store_true", help="unrolled layers alone")
    options = parser.parse_args()
    where, name_of_file = "eight devices of the host", "mesh"
    if options.target is not None:
        where, name_of_file = options.target.name, f"mesh-{options.target.name}"
    rows = []
    for name, (model, layout, is_scan) in programs(options.words, options.quick).items():
        rows.append(measure(name, model, layout, is_scan, options.target))
        store(RESULTS / f"{name_of_file}.json", rows[-1])
        print(f"{name}: {rows[-1].seconds:.0f} s", flush=True)
    wide_console(200).print(table_of(rows, where))


def store(path: Path, row: Row) -> None:
    """Put a row in the place of the one of its name, in the order of all programs."""
    rows = {}
    if path.exists():
        rows = {stored["name"]: stored for stored in json.loads(path.read_text("utf-8"))["rows"]}
    rows[row.name] = asdict(row)
    rows = [rows[name] for name in programs([], is_quick=False) if name in rows]
    path.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
