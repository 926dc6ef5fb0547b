"""Weigh and time steps whose rows run in blocks, since one array is the peak of plain JAX.

    python -m benchmarks.below_floor                     # all parts: half an hour on two cores
    python -m benchmarks.below_floor head edges          # some of them, by the names in `PARTS`
    python -m benchmarks.below_floor --target h100       # memory alone, for a device that need not be here

Memory is XLA's account, of plain JAX's temporaries where nothing else is said. Steps of the full size are only weighed:
nothing of that size is made. Steps of a smaller size also run: times are over plain JAX's in interleaved rounds, and
gradients are compared with plain JAX's. A refused budget shows the least that was found, in red, as all that misses
its mark. A run of all parts is kept in `benchmarks/results/`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax.microbatching as micro
from jax import Array, lax
from rich import box
from rich.table import Table

from benchmarks.measure import Seconds, machine, memory_of, time_together, wide_console
from benchmarks.methods import count_equations
from benchmarks.programs import gpt, mlp
from jointcut import aot
from jointcut.partition.errors import BudgetError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROUNDS, COMPILATIONS = 9, 5
GROWTH = 1.1  # of the bytes that a larger step may take

Loss = Callable[..., Array]


@dataclass(frozen=True)
class Case:
    """A loss at one size.

    `arguments` are types, of which the first `count` are differentiated. Integers are drawn below `labels`. The step is
    run if it `is_run`, that is, if it takes seconds at most.
    """

    name: str
    loss: Loss
    arguments: tuple[Any, ...]
    count: int = 1
    is_run: bool = False
    labels: int = 2

    @property
    def argnums(self) -> tuple[int, ...]:
        """The arguments that are differentiated."""
        return tuple(range(self.count))

    def drawn(self) -> tuple[Any, ...]:
        """Arguments of the types: a tenth of normal numbers, and labels."""
        leaves, tree = jax.tree.flatten(self.arguments)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return tree.unflatten(
            jax.random.randint(key, leaf.shape, 0, self.labels)
            if jnp.issubdtype(leaf.dtype, jnp.integer)
            else 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        )


@dataclass(frozen=True)
class Row:
    """One step: by its budget, by blocks that were asked for, or as it was written by hand.

    Bytes are the least found where a budget is refused. `most` and `most_time` are the marks for its `share` of plain
    JAX's temporaries and for its `time` over plain JAX's. `error` is the largest difference of a gradient, relative to
    its largest number. None if it is not run.
    """

    part: str
    case: str
    way: str
    temp_bytes: int
    share: float
    peak_share: float
    is_held: bool = True
    tiles: tuple[str, ...] = ()
    search_s: float = 0.0
    most: float | None = None
    time: float | None = None
    most_time: float | None = None
    error: float | None = None
    equations: int = 0
    compile_s: float = 0.0

    @property
    def is_small(self) -> bool:
        """Whether it takes no more memory than it may."""
        return self.is_held and self.share <= (self.most or float("inf"))

    @property
    def is_fast(self) -> bool:
        """Whether it takes no more time than it may."""
        return (self.time or 0.0) <= (self.most_time or float("inf"))


# ---------------------------------------------------------------------------------------------- measure one step


def measured(part: str, case: Case, target: str | None, way: str = "", **options: Any) -> Row:
    """The step of a case under options, beside plain JAX's; it is run if the case is and there is no target."""
    function = aot.function(case.loss, argnums=case.argnums, target=target, **options)
    plain = aot.function(case.loss, argnums=case.argnums, target=target).trace(*case.arguments).plain_memory
    way, start = way or f"budget {options['budget']:g}", time.perf_counter()
    try:
        cut = function.trace(*case.arguments).partition()
    except BudgetError as error:
        peak, seconds = error.least_bytes or 0, time.perf_counter() - start
        temp = peak - (plain.peak_bytes - plain.temp_bytes)
        return Row(part, case.name, way, temp, temp / plain.temp_bytes, peak / plain.peak_bytes, False, (), seconds)
    seconds = time.perf_counter() - start
    step = cut.fitted.measured if cut.fitted else cut.compile()
    temp, peak = step.activation_bytes, step.peak_bytes
    tiles = tuple(str(tile).replace(f"{ROOT}/", "") for tile in cut.plan.tiles)
    shares = temp / plain.temp_bytes, peak / plain.peak_bytes
    row = Row(part, case.name, way, temp, *shares, True, tiles, seconds)
    return row if target or not case.is_run else next(run([row], case, [cut.compile().value_and_grad]))


def run(rows: Sequence[Row], case: Case, steps: Sequence[Callable[..., Any]]) -> Iterator[Row]:
    """The rows with the times of their steps, all in the same rounds, and the errors of their gradients."""
    arguments, plain = case.drawn(), plain_step(case)
    calls = {row.way: partial(step, *arguments) for row, step in zip(rows, steps, strict=True)}
    timed = time_together({"plain": partial(plain, *arguments)} | calls, "plain", ROUNDS)
    want = jax.tree.leaves(plain(*arguments)[1])
    for row in rows:
        pairs = zip(jax.tree.leaves(calls[row.way]()[1]), want, strict=True)
        error = max(float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)) for a, b in pairs)
        yield replace(row, error=error, time=timed[row.way].ratio.median)


def plain_step(case: Case) -> Any:
    """Plain JAX's value and gradient."""
    return jax.jit(jax.value_and_grad(case.loss, case.argnums))


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


# -------------------------------------------------------------------------------- a linear layer with cross entropy


def cross_entropy(w: Array, x: Array, y: Array) -> Array:
    """A linear layer with cross entropy, its logits in float32."""
    logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])


def head_case(width: int, words: int, tokens: int, dtype: Any = jnp.float32, is_run: bool = False) -> Case:
    """A linear layer with cross entropy, of which both factors are differentiated."""
    arguments = struct(width, words, dtype=dtype), struct(tokens, width, dtype=dtype), struct(tokens, dtype=jnp.int32)
    name = f"{width:,} x {words:,} over {tokens:,} tokens, {jnp.dtype(dtype)}"
    return Case(name, cross_entropy, arguments, 2, is_run, words)


def head(target: str | None) -> Iterator[Row]:
    """Two budgets, and blocks that are asked for; times where the width is as large a part."""
    cases = [head_case(4096, 50_257, 8192, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    for case in cases if target else [*cases, head_case(1024, 8192, 2048, is_run=True)]:
        for share, most_time in ((0.34, 1.12), (0.16, 1.4)):
            yield replace(measured("head", case, target, budget=share), most=share, most_time=most_time)
        for number in (8, 16, 64):
            yield measured("head", case, target, f"{number} blocks", tiles={"args[1]": number})


# ----------------------------------------------------------------------------------------------- a large vocabulary


def vocabulary_case(words: int, is_tied: bool) -> Case:
    """A GPT of 4 layers over 1,024 tokens."""
    config = gpt.Config(layers=4, width=256, heads=4, context=256, dropout=0.0, tied=is_tied)
    params = jax.eval_shape(lambda: gpt.init(jax.random.key(0), config))
    wide = {"embed": struct(words, 256)} | ({} if is_tied else {"head": struct(256, words)})

    def loss(params: Any, batch: Array) -> Array:
        return gpt.loss(params, batch, jax.random.key(1), config)

    name = f"{words:,} words, {'tied' if is_tied else 'untied'}"
    return Case(name, loss, (params | wide, struct(4, 257, dtype=jnp.int32)), 1, words <= 8000, words)


def vocabulary(target: str | None) -> Iterator[Row]:
    """Temporaries for 8,000 words, and those for 64,000 words that may be a tenth more."""
    for is_tied in (False, True):
        few = measured("vocabulary", vocabulary_case(8000, is_tied), target, budget=0.25)
        yield replace(few, most=0.25)
        case = vocabulary_case(64_000, is_tied)
        plain = aot.function(case.loss, target=target).trace(*case.arguments).plain_memory
        room = int(GROWTH * few.temp_bytes)
        budget = plain.peak_bytes - plain.temp_bytes + room
        row = measured("vocabulary", case, target, f"{room / 1e6:.0f} MB of temporaries", budget=budget)
        yield replace(row, most=room / plain.temp_bytes)


# ------------------------------------------------------------------------------------------------ edges of a graph


def messages(params: Any, nodes: Array, edges: Array, ends: Array, rounds: int) -> Array:
    """Messages along edges: of both ends and the edge, through two layers, summed at a node."""
    for p in params[:rounds]:
        both = jnp.concatenate([nodes[ends[0]], nodes[ends[1]], edges], axis=1)
        sent = jnp.tanh(jnp.tanh(both @ p["in"]) @ p["out"])
        nodes = nodes + jax.ops.segment_sum(sent, ends[1], len(nodes)) @ p["node"]
    return jnp.mean(nodes**2)


def edges(target: str | None) -> Iterator[Row]:
    """A quarter of the temporaries, for one and three rounds of messages."""
    width, nodes, count = 64, 1000, 60_000
    layer = {"in": struct(3 * width, width), "out": struct(width, width), "node": struct(width, width)}
    for rounds in (1, 3):
        types = [layer] * rounds, struct(nodes, width), struct(count, width), struct(2, count, dtype=jnp.int32)
        name = f"{count:,} edges of {width}, {nodes:,} nodes, rounds: {rounds}"
        case = Case(name, partial(messages, rounds=rounds), types, 1, True, nodes)
        for budget, most_time in ((0.25, 1.15), (0.1, None)):
            yield replace(measured("edges", case, target, budget=budget), most=budget, most_time=most_time)


# ------------------------------------------------------------------------------------------------------- attention


def attended(w: Array, out: Array, x: Array) -> Array:
    """A layer of causal attention with 4 heads over one sequence, written out."""
    q, k, v = jnp.split((x @ w).reshape(len(x), 4, -1), 3, axis=-1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    shown = jnp.tril(jnp.ones((len(x), len(x)), bool))
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(shown, scores, -jnp.inf), axis=-1), v)
    return jnp.mean((mixed.reshape(len(x), -1) @ out) ** 2)


def attention(target: str | None) -> Iterator[Row]:
    """Budgets that grow as the tokens do, where plain JAX's memory grows as their square."""
    first: Row | None = None
    for tokens, budget in ((2048, 0.12), (4096, 0.06), (8192, 0.03)):
        types = struct(256, 768), struct(256, 256), struct(tokens, 256)
        case = Case(f"{tokens:,} tokens, 4 heads", attended, types, 2, tokens == 2048)
        row = measured("attention", case, target, budget=budget)
        first = first or row
        grown = GROWTH * first.temp_bytes * tokens / 2048
        yield replace(row, most=min(budget, grown * row.share / row.temp_bytes), most_time=1.2)


# --------------------------------------------------------------------------------------------------- many or few blocks


def mlp_case() -> Case:
    """The multilayer perceptron of the suite."""
    made = mlp.program("small")
    types = jax.tree.map(lambda leaf: struct(*leaf.shape, dtype=leaf.dtype), made.arguments)
    return Case("mlp of the suite", mlp.loss, types, 1, False, 64)


def blocks(target: str | None) -> Iterator[Row]:
    """Eight blocks and sixty-four: equations, and seconds of the processor for XLA, in turns."""
    for case in (head_case(1024, 8192, 2048), mlp_case()):
        seconds: dict[int, list[float]] = {8: [], 64: []}
        for _ in range(COMPILATIONS):
            for number, several in seconds.items():
                cut, start = cut_of(case, target, number), Seconds.now()
                cut.compile()
                several.append(start.since.processor)
        for number, several in seconds.items():
            cut = cut_of(case, target, number)
            row = measured("blocks", case, target, f"{number} blocks", tiles={"args[1]": number})
            equations = sum(count_equations(half.jaxpr) for half in (cut.forward, cut.backward))
            yield replace(row, equations=equations, compile_s=median(several))


def cut_of(case: Case, target: str | None, number: int) -> aot.Cut:
    """Our step with rows in blocks."""
    function = aot.function(case.loss, argnums=case.argnums, target=target, tiles={"args[1]": number})
    return function.trace(*case.arguments).partition()


# ----------------------------------------------------------------------------------------------------- beside by hand


def split(blocks: int, data: Iterable[Array]) -> tuple[Array, ...]:
    """Data with its rows in blocks."""
    return tuple(each.reshape(blocks, -1, *each.shape[1:]) for each in data)


def chunked(blocks: int, w: Array, *data: Array) -> Array:
    """The cross entropy of chunks of tokens in a scan, each under `jax.checkpoint`."""
    step = jax.checkpoint(lambda total, own: (total + cross_entropy(w, *own), None))
    return lax.scan(step, jnp.float32(0), split(blocks, data))[0] / blocks


def accumulated(loss: Loss, blocks: int, weights: Any, *data: Array) -> Any:
    """The mean of the values and gradients of microbatches, by a scan."""
    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, weights)

    def step(total: Any, own: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, *own)), None

    return jax.tree.map(lambda total: total / blocks, lax.scan(step, zeros, split(blocks, data))[0])


def by_optax(loss: Loss, blocks: int, weights: Any, *data: Array) -> Any:
    """The same by Optax."""
    step, places = jax.value_and_grad(loss), tuple(range(1, len(data) + 1))
    return micro.microbatch(step, places, len(data[0]) // blocks, micro.AccumulationType.MEAN)(weights, *data)


def by_hand(target: str | None) -> Iterator[Row]:
    """Ours beside splitting by hand, in eight blocks."""
    case = head_case(1024, 8192, 2048)
    only = replace(case, count=1, name=f"{case.name}, w alone")
    sums = {"accumulated in a scan": accumulated, "optax.microbatch": by_optax}
    for each in (case, only, mlp_case()) if target is None else ():
        ways = {way: partial(f, each.loss, 8) for way, f in sums.items()}
        if each.count == 2:
            ways = {"lax.scan + jax.checkpoint": jax.value_and_grad(partial(chunked, 8), each.argnums)}
        plain = memory_of(plain_step(each).lower(*each.arguments).compile())
        rows = [measured("by-hand", each, target, "jointcut", tiles={"args[1]": 8})]
        steps = [cut_of(each, target, 8).compile().value_and_grad]
        for way, step in ways.items():
            steps.append(jax.jit(step).lower(*each.arguments).compile())
            own = memory_of(steps[-1])
            rows.append(Row("by-hand", each.name, way, own.temp, own.temp / plain.temp, own.peak / plain.peak))
        yield from run(rows, each, steps)


_PARTS = (head, vocabulary, edges, attention, blocks, by_hand)
PARTS: Mapping[str, Callable[[str | None], Iterator[Row]]] = {f.__name__.replace("_", "-"): f for f in _PARTS}


# ------------------------------------------------------------------------------------------------------------ print


def table(rows: Iterable[Row]) -> Table:
    """The rows as a table; what misses its mark is red."""
    shown = Table(box=box.SIMPLE)
    heads = (
        *("case", "way", "temps MB", "÷ plain", "peak ÷", "time ÷"),
        *("error", "search", "equations", "XLA", "rows in blocks"),
    )
    for name in heads:
        shown.add_column(name, justify="left" if name in ("case", "way", "rows in blocks") else "right")
    for row in rows:
        share = f"{row.share:.3f}" if row.is_small else f"[red]{row.share:.3f}[/]"
        ratio = "" if row.time is None else f"{row.time:.2f}" if row.is_fast else f"[red]{row.time:.2f}[/]"
        error = "" if row.error is None else f"{row.error:.0e}"
        sizes = f"{row.temp_bytes / 1e6:,.1f}", share, f"{row.peak_share:.3f}", ratio, error, f"{row.search_s:.0f} s"
        more = (f"{row.equations:,}", f"{row.compile_s:.2f} s") if row.equations else ("", "")
        shown.add_row(row.case, row.way, *sizes, *more, "\n".join(map(short, row.tiles)) if row.is_held else "refused")
    return shown


def short(tile: str) -> str:
    """A tile without the op and line of its array."""
    array, _, blocks = tile.rpartition(": ")
    return f"{blocks.replace(', each forward with its backward', ', at once')} of {array.partition(' of ')[0]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts that the command line asks for, print a table, and keep the rows of a run of all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--target", help="a device that need not be here, such as h100")
    given = parser.parse_args(argv)
    if unknown := sorted(set(given.parts).difference(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    console, rows = wide_console(220), list[Row]()
    for name in given.parts or PARTS:
        for row in PARTS[name](given.target):
            rows.append(row)
            console.print(table([row]))
    console.print(table(rows))
    if not given.parts:
        text = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        name = f"below-floor{'-' + given.target if given.target else ''}.json"
        (RESULTS / name).write_text(json.dumps(text, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
