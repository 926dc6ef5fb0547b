"""Run on eight devices of the host: what compiled steps exchange is told by line, beside plain JAX.

Warnings are errors here as they are in the tests.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.parallel import attention, moves, norm
from claims import tell
from jointcut import aot
from jointcut.aot.report.compare.collectives import Collectives
from jointcut.aot.report.compare.exchanges import Exchange, Exchanges, exchanges
from jointcut.aot.report.held import held
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.runs import repeated
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.search.best import exchanging_less
from jointcut.partition.search.budget import Planner

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
DRAWS = np.random.default_rng(0)
W = [DRAWS.normal(size=(64, 64)).astype("f") / 8 for _ in range(3)]
X = DRAWS.normal(size=(8, 32, 64)).astype("f")


def on(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def attending(ws, x):
    """Queries are rows of a device, keys those of all."""
    for w in ws:
        q, k = x @ w, jnp.tanh(x @ (w + w.T))
        x = x + jax.nn.softmax(jnp.einsum("btf,bsf->bts", q, k)) @ k
    return jnp.mean(x**2)


def layers(ws, x):
    for w in ws:
        x = jnp.sin(jnp.tanh(x @ w) + x)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.sin(jnp.tanh(x @ w) + x), None), x, jnp.stack(ws))[0] ** 2)


SEQUENCE = [on(GRID, P(), w) for w in W], on(GRID, P("a", "b"), X)
SHARDED = [on(LINE, P(None, "d"), w) for w in W], on(LINE, P("d"), X)


def updated(function):
    """A step of the user's in which automatic axes do not tell where arrays lie."""

    def step(ws, x):
        value, grads = jax.value_and_grad(function)(ws, x)
        return value, [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

    return step


def counted(function, *args):
    return moves(jax.jit(function).lower(*args).compile().as_text())


def what_a_step_exchanges_is_counted_here_and_in_plain_jax():
    for function, args in ((attending, SEQUENCE), (layers, SHARDED), (scanned, SHARDED)):
        found = aot.collectives(updated(aot.function(function)), *args)
        assert found.ours.totals == counted(updated(aot.function(function)), *args), (function, found)
        assert found.plain.totals == counted(updated(function), *args), (function, found)
        for side in (found.ours, found.plain):
            assert sum(row.bytes for row in side.rows) == side.bytes > 0
            assert all("exchanged.py:" in row.line for row in side.rows), side.rows
        assert all(row.bytes > row.plain_bytes or row.count > row.plain_count for row in found.more)
        assert bool(found.more) == any(
            n > plain[0] or size > plain[1]
            for kind, (n, size) in found.ours.totals.items()
            for plain in [found.plain.totals.get(kind, (0, 0))]
        ), found


def what_is_exchanged_more_is_told_by_line_with_a_reason():
    found = aot.collectives(jax.jit(updated(aot.function(attending))), *SEQUENCE)
    (row,) = found.more
    line = attending.__code__.co_firstlineno + 4
    assert row.line == f"{__file__}:{line} (attending)" and row.kind == "all-gather", row
    assert row.count > row.plain_count > 0 and row.bytes > row.plain_bytes > 0, row
    assert f"all-gather for {row.op} at mesh/exchanged.py:{line} (attending): {row.count} arrays, " in str(row)
    assert str(row).endswith("the backward gathers once more what the forward had gathered"), row
    text = " ".join(str(found).split())
    assert text.startswith(f"What devices exchange Devices exchange {row.count} all-gathers, "), text
    assert f"(plain JAX {row.plain_count}, " in text and "(as plain JAX)" in text, text
    everything = aot.function(attending, policy={"*": aot.MUST_RECOMPUTE})
    again = aot.collectives(updated(everything), *SEQUENCE).more
    assert any("computed again for the backward" in row.why for row in again), again


def heads(ws, x):
    """Keys and values that are saved, and scores that run again: the backward reads the keys for both."""
    for w in 2 * ws:
        x = x + attention(x, {"qkv": (w, w.T, w + w.T), "out": w}, 4)
        x = x + jnp.tanh(jnp.tanh(norm(x) @ w) @ w.T) @ w
    return jnp.mean(x**2)


def what_is_saved_in_parts_is_gathered_once_more_late_and_is_told():
    cut = aot.function(heads, policy={"reshape": aot.MUST_SAVE, "exp": aot.MUST_RECOMPUTE}).trace(*SEQUENCE).partition()
    graph, plan, program = cut.split.graph, cut.plan, cut.compile().programs[0]
    plain = jax.jit(jax.value_and_grad(heads)).lower(*SEQUENCE).compile()
    found = Collectives(exchanges([program]), exchanges([plain]))
    assert [side.totals["all-gather"][0] for side in (found.ours, found.plain)] == [24, 12], found
    _, whole = repeated(graph, plan.reruns(graph))
    assert sum(row.count for row in whole) == sum(row.count - row.plain_count for row in found.more) == 12, found
    assert {row.op.source for row in whole} == {row.line for row in found.more}, (whole, found.more)
    (line,) = [line for line in plan.remarks if "once more" in line]
    at = [f"dot_general at {row.line}" for row in sorted(found.more, key=lambda row: row.line)]
    assert line == (
        f"devices exchange 393.2 kB once more, in 12 all-gathers: {' and '.join(at)} read whole in the backward what "
        "each device keeps a part of"
    ), line
    alive = held(program)
    late = [b for b in alive.buffers if b.bytes == 4 * 32 * 64 * 4 and b.first >= alive.boundary]
    most = max(sum(b.first <= step <= b.last for b in late) for step in range(len(alive.moments)))
    assert 0 < most < 12, (most, len(late))


def routed(ws, x):
    """The experts of each token, by `top_k`, whose operand XLA gathers."""
    for w in ws:
        gates, chosen = lax.top_k(jax.nn.softmax(jnp.tanh(x @ w)), 2)
        x = x + jnp.sin(jnp.sum(gates[..., None] * jax.nn.one_hot(chosen, 64), axis=-2) * x)
    return jnp.mean(x**2)


def queued(ws, x):
    """Rows that lie on several devices are put behind each other: XLA gathers them."""
    for w in ws:
        halves = jnp.tanh(x @ w).reshape(8, 32, 2, 32).transpose(0, 2, 1, 3).reshape(8, 64, 32)
        x = x + jnp.sin(jnp.cumsum(jnp.exp(-jnp.square(halves)), axis=1)).reshape(8, 32, 64)
    return jnp.mean(x**2)


def a_reshape_that_puts_another_axis_first_gathers():
    cut = aot.function(queued, policy={"*": aot.PREFER_RECOMPUTE}).trace(*SEQUENCE).partition()
    graph = cut.split.graph
    assert {graph.ops[i].name for move in graph.moves for i, _ in move.readers} >= {"reshape"}, graph.moves


def small_results_are_kept_if_devices_would_exchange_something_again_for_them():
    args = [on(GRID, P(), w) for w in W], on(GRID, P("a"), X)
    problem = aot.function(routed).trace(*args).partition().split.problem
    graph, planner = problem.graph, Planner(problem.timed(Roofline(1e11, 1e10, 1e10)))
    assert {graph.ops[move.op].name for move in graph.moves if move.kind == "all-gather"} == {"top_k"}, graph.moves
    nothing = Plan.of(problem, [])
    kept = exchanging_less(planner, nothing)
    assert {s.op for s in kept.saved} == {"top_k"} and len(kept.saved) == 6, kept
    assert {s.reason for s in kept.saved} == {"devices would exchange something again for it"}, kept
    told = [[line for line in plan.remarks if "once more" in line] for plan in (nothing, kept)]
    assert "in 3 all-gathers: top_k at" in told[0][0] and not told[1], told
    assert exchanging_less(planner, kept) is kept
    tiny = replace(problem, prices=tuple(10**9 for _ in problem.prices))
    assert exchanging_less(Planner(tiny.timed(Roofline(1e11, 1e10, 1e10))), nothing) is nothing


def pieces_are_told_apart_from_arrays():
    def side(pieces, arrays):
        rows = [Exchange("all-reduce", "dot_general", "a.py:1 (f)", True, arrays, 800)] if arrays else []
        return Exchanges({"all-reduce": (pieces, 800)} if pieces else {}, tuple(rows))

    assert Collectives(side(4, 8), side(1, 8)).pieces == {"all-reduce": 3}
    (line,) = Collectives(side(4, 8), side(1, 8)).remarks
    assert line == (
        "devices exchange 4 all-reduces, 800 B per device (plain JAX 1, 800 B: 3 pieces more, as layers wait for "
        "each other and XLA joins fewer)"
    ), line
    assert Collectives(side(4, 8), side(1, 5)).pieces == {}
    assert Collectives(side(4, 8), side(0, 0)).pieces == Collectives(side(1, 8), side(4, 8)).pieces == {}


def a_report_tells_the_same_of_the_step_that_it_compiled():
    report = aot.function(attending).explain(*SEQUENCE)
    assert report.collectives is not None and report.collectives.more
    told = report.to_dict()["collectives"]
    assert told["totals"]["all-gather"] == report.collectives.ours.totals["all-gather"], told
    assert "devices exchange" in " ".join(report.remarks), report.remarks
    (section,) = [each for each in report.sections if each["id"] == "exchanged"]
    assert any(row[0] == "all-gather" and "once more" in row[4] for row in section["rows"]), section
    plain = aot.explain(attending, *SEQUENCE)
    assert plain.collectives is not None and not plain.collectives.more
    alone = aot.function(attending).explain(W, X)
    assert alone.collectives is None and "exchange" not in " ".join(alone.remarks)


def logged(call):
    """The result of a call, and what was written to standard error, also by XLA."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            result = call()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return result, file.read().decode()


def constrained(first, second):
    def function(x):
        y = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(GRID, first))
        return jnp.cos(lax.with_sharding_constraint(y, NamedSharding(GRID, second)))

    return function


PAIRS = [
    (P(("a", "b"), None), P(None, "a"), True),
    (P("a", None), P(None, "b"), True),
    (P(None, "a"), P("b", None), True),
    (P(("a", "b"), None), P("a", None), False),
    (P("a", "b"), P("b", "a"), False),
    (P("a", None), P("b", None), False),
]


def an_array_that_is_gathered_whole_is_told_where_xla_logs_it():
    x = jax.ShapeDtypeStruct((16, 32), "float32")
    for first, second, is_whole in PAIRS:
        function = constrained(first, second)
        placed = x.update(sharding=NamedSharding(GRID, first))
        program, log = logged(lambda function=function, placed=placed: jax.jit(function).lower(placed).compile())
        whole = exchanges([program]).whole
        assert bool(whole) == is_whole == ("nvoluntary full rematerialization" in log), (first, second, whole, log)
        for each in whole:
            line = constrained.__code__.co_firstlineno + 3
            assert (each.type, each.bytes) == ("float32[16,32]", 2048), each
            assert each.line == f"{__file__}:{line} (constrained.<locals>.function)", each
    found = aot.collectives(constrained(*PAIRS[0][:2]), x.update(sharding=NamedSharding(GRID, PAIRS[0][0])))
    assert (
        f"float32[16,32], 2.05 kB per device, is gathered whole for sharding_constraint at mesh/exchanged.py:{line} "
        "(constrained.<locals>.function), and each device keeps a part: XLA knows no other way from one sharding to "
        'the other ("involuntary full rematerialization"). Lay both along the same axes, or go through a sharding '
        "between them"
    ) in found.remarks, found.remarks


def a_part_that_the_user_takes_is_no_such_array():
    def body(x):
        whole = lax.all_gather(x, "d", axis=0, tiled=True)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index("d"), 1, axis=1)

    mapped = jax.shard_map(body, mesh=LINE, in_specs=P("d"), out_specs=P(None, "d"))
    found = exchanges([jax.jit(mapped).lower(jnp.ones((16, 8))).compile()])
    assert found.totals == {"all-gather": (1, 512)} and not found.whole, found


CLAIMS = [
    what_a_step_exchanges_is_counted_here_and_in_plain_jax,
    what_is_exchanged_more_is_told_by_line_with_a_reason,
    what_is_saved_in_parts_is_gathered_once_more_late_and_is_told,
    a_reshape_that_puts_another_axis_first_gathers,
    small_results_are_kept_if_devices_would_exchange_something_again_for_them,
    pieces_are_told_apart_from_arrays,
    a_report_tells_the_same_of_the_step_that_it_compiled,
    an_array_that_is_gathered_whole_is_told_where_xla_logs_it,
    a_part_that_the_user_takes_is_no_such_array,
]


if __name__ == "__main__":
    tell(CLAIMS)
