"""An op costs the longer of computing and moving, and only where it would run again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jointcut.partition.bodies.read import read
from jointcut.partition.errors import PlanError
from jointcut.partition.prices.cost import LINK_S, Roofline, op_seconds, recompute_seconds, saving_bytes
from jointcut.partition.prices.flops import flops, moved_bytes
from jointcut.partition.prices.targets import CHIPS
from jointcut.partition.program.graph import LITERAL, OPEN_LOOP, STEP
from jointcut.partition.program.primitives import WEIGHTS
from jointcut.partition.program.roles import Move, Roles
from jointcut.partition.program.sides import classify
from jointcut.partition.program.text import parse

RATES = Roofline(flops_per_s=1e12, elementwise_per_s=1e10, bytes_per_s=1e11)

TEXT = """
    loop 1 x5
    loop 2 x3 in 1
    primal %0:float32[5,8]
    cotangent %1:float32[]
    %2:float32[8] = literal
    %3:float32[8]@1 = step %0
    %4:float32[8] %5:float32[8]@1 = loop %2 %6 body 1 of loop 1 {
        #6 %7:float32[8] %8:float32[8]@2 = loop %5 %9 body 2 of loop 2 {
            #8 %9:float32[8] = exp %8
            next %9
        }
        #7 %6:float32[8] = mul %7 %3
        next %6
    }
    #3 %10:float32[] = reduce_sum %4
    %11:float32[8] = sort %4
    backward:
    %12:float32[8] = mul %1 %11
    output %10
    gradient %12
"""


def joint(function, *shapes, dtype=np.float32):
    """The graph of a forward alone, whose results are all outputs."""
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return read(closed, Roles.simple(len(shapes), 0, len(closed.out_avals), 0))


def only(graph, name):
    (op,) = [op for op in graph.ops if op.name == name]
    return op


@dataclass
class Fixed:
    """A user's own model."""

    answer: object

    def seconds(self, graph, op):
        return self.answer

    def saving_seconds(self, num_bytes):
        return 2e-9 * num_bytes


# ---------------------------------------------------------------- the roofline

HEAVY = {
    "dot_general": (jnp.dot, (8, 16), (16, 4)),
    "dot_general of long rows": (jnp.dot, (512, 512), (512, 512)),
    "sort": (lambda x: lax.sort(x), (4, 64)),
    "conv_general_dilated": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (2, 3, 8, 8), (5, 3, 3, 3)),
    "cumsum": (lambda x: lax.cumsum(x), (64,)),
    "reduce_max": (lambda x: jnp.max(x, axis=0), (64, 3)),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_op_takes_the_longer_of_computing_and_moving(name):
    function, *shapes = HEAVY[name]
    graph = joint(function, *shapes)
    op = only(graph, name.split()[0])
    rate = RATES.flops_per_s if op.name in ("dot_general", "conv_general_dilated") else RATES.elementwise_per_s
    taken = max(flops(op.payload) / rate, moved_bytes(op.payload) / RATES.bytes_per_s)
    assert 0 < RATES.seconds(graph, op) == pytest.approx(taken)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(HEAVY)), st.floats(1.0, 1e3), st.sampled_from(["flops", "elementwise", "bytes"]))
def test_a_faster_device_is_never_slower_and_one_faster_in_all_is_faster_by_as_much(name, factor, which):
    function, *shapes = HEAVY[name]
    graph = joint(function, *shapes)
    op = only(graph, name.split()[0])
    one = replace(RATES, **{f"{which}_per_s": factor * getattr(RATES, f"{which}_per_s")})
    every = Roofline(factor * RATES.flops_per_s, factor * RATES.elementwise_per_s, factor * RATES.bytes_per_s)
    assert one.seconds(graph, op) <= RATES.seconds(graph, op)
    assert every.seconds(graph, op) == pytest.approx(RATES.seconds(graph, op) / factor)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["exp", "add", "neg", "tanh", "sqrt"]), st.integers(1, 4096))
def test_an_elementwise_op_is_fused_and_moves_nothing(name, size):
    graph = joint(lambda x: x + x if name == "add" else getattr(lax, name)(x), (size,))
    expected = size * WEIGHTS.get(name, 1.0) / RATES.elementwise_per_s
    assert RATES.seconds(graph, only(graph, name)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.reshape(-1), "reshape"),
        (lambda x: jnp.broadcast_to(x, (9, 4, 8)), "broadcast_in_dim"),
        (lambda x: lax.slice(x, (1, 0), (3, 8)), "slice"),
    ],
)
def test_movement_in_order_is_free(function, name):
    graph = joint(function, (4, 8))
    assert RATES.seconds(graph, only(graph, name)) == 0


def test_movement_out_of_order_takes_reading_and_writing():
    graph = joint(lambda x: x.T, (4, 8))
    assert RATES.seconds(graph, only(graph, "transpose")) == 2 * 4 * 32 / RATES.bytes_per_s


def test_a_call_of_cheap_ops_is_fused_and_one_with_a_heavy_op_is_not():
    cheap, heavy = joint(jax.jit(lambda x: jnp.tanh(x) + x), (4, 4)), joint(jax.jit(lambda x: x.T @ x), (4, 4))
    (call,) = cheap.ops
    assert RATES.seconds(cheap, call) == pytest.approx(16 * (WEIGHTS["tanh"] + 1) / RATES.elementwise_per_s)
    (call,) = heavy.ops
    assert RATES.seconds(heavy, call) == 4 * 16 * (2 + 3) / RATES.bytes_per_s


def test_a_kernel_that_says_nothing_takes_its_bytes():
    kernel = jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((100,), np.float32))
    graph = joint(kernel, (100,))
    assert RATES.seconds(graph, only(graph, "ffi_call")) == 800 / RATES.bytes_per_s


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan, 10**400, True, None, "fast"])
def test_a_rate_by_which_nothing_can_be_divided_is_refused(rate):
    with pytest.raises(PlanError) as error:
        Roofline(1.0, rate, 1.0)
    assert str(error.value) == (
        f"Roofline.elementwise_per_s is {rate!r}, not a positive number.\n"
        "Give what the device does in a second, or measure it."
    )


@pytest.mark.parametrize("kind", [int, np.int64, np.float32, np.float64])
def test_a_rate_may_be_any_kind_of_number(kind):
    graph = joint(jnp.dot, (8, 16), (16, 4))
    rates = Roofline(kind(1000), kind(1000), kind(1000))
    assert rates.seconds(graph, graph.ops[0]) == pytest.approx(Roofline(1e3, 1e3, 1e3).seconds(graph, graph.ops[0]))


# ---------------------------------------------------------------- ops of a graph text

SAME = {
    "dot_general": (jnp.dot, [(8, 16), (16, 4)]),
    "sort": (lambda x: lax.sort(x), [(4, 64)]),
    "exp": (jnp.exp, [(4, 64)]),
    "transpose": (lambda x: x.T, [(4, 64)]),
    "concatenate": (lambda x: lax.concatenate([x, x], 0), [(100, 8)]),
    "reduce_max": (lambda x: jnp.max(x, axis=0), [(64, 3)]),
    "cumsum": (lambda x: lax.cumsum(x), [(64,)]),
    "scatter-add": (lambda x, i, y: x.at[i.astype(np.int32)].add(y), [(100, 8), (3,), (3, 8)]),
}


@pytest.mark.parametrize("name", SAME)
def test_an_op_without_its_equation_takes_as_long_where_shapes_decide(name):
    function, shapes = SAME[name]
    graph = joint(function, *shapes)
    op = only(graph, name)
    assert RATES.seconds(graph, replace(op, payload=None)) == pytest.approx(RATES.seconds(graph, op))


def test_a_call_without_its_equation_runs_each_primitive_inside_once():
    graph = parse("primal %0:float32[8]\n%1:float32[8] = jit %0 holds exp mul tanh\noutput %1")
    expected = 8 * (WEIGHTS["exp"] + 1 + WEIGHTS["tanh"]) / RATES.elementwise_per_s
    assert RATES.seconds(graph, graph.ops[0]) == pytest.approx(expected)


def test_complex_numbers_of_a_text_take_four_times_as_long():
    real, both = (parse(f"primal %0:{t}[8]\n%1:{t}[8] = mul %0 %0\noutput %1") for t in ("float32", "complex64"))
    assert RATES.seconds(both, both.ops[0]) == 4 * RATES.seconds(real, real.ops[0])


@pytest.mark.parametrize(
    "line", ["dot_general", "dot_general %0", "sort _", "conv_general_dilated %0", "pallas_call %0"]
)
def test_an_op_of_a_text_with_operands_left_out_has_a_price(line):
    graph = parse(f"primal %0:float32[8]\n%1:float32[8] = {line}\noutput %1")
    assert 0 < RATES.seconds(graph, graph.ops[0]) < 1


# ---------------------------------------------------------------- recomputation


def test_what_runs_again_is_counted_over_all_trips_and_what_runs_once_is_free():
    graph = parse(TEXT)
    sides = classify(graph)
    taken = recompute_seconds(graph, sides, Fixed(1.0))
    trips = {"mul": 5, "exp": 15, "reduce_sum": 1}
    for op in graph.ops:
        forward = op.id in sides.forward and op.name not in (STEP, LITERAL, OPEN_LOOP)
        assert taken[op.id] == (trips[op.name] if forward else 0)
    assert {op.name for op in graph.ops if taken[op.id]} == set(trips)
    assert taken[only(graph, "sort").id] == 0  # only the backward needs it


def test_a_step_a_literal_and_a_loop_take_no_time():
    graph = parse(TEXT)
    free = [op for op in graph.ops if op.name in (STEP, LITERAL, OPEN_LOOP)]
    assert {op.name for op in free} == {STEP, LITERAL, OPEN_LOOP}
    assert all(RATES.seconds(graph, op) == op_seconds(graph, op, Fixed(7.0)) == 0 for op in free)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1e3))
def test_the_figure_that_an_op_carries_wins_over_the_model(figure):
    graph = parse(f"primal %0:float32[8]\n%1:float32[8] = exp %0 takes {figure!r}s\noutput %1")
    assert op_seconds(graph, graph.ops[0], Fixed(7.0)) == figure
    assert recompute_seconds(graph, classify(graph), RATES) == [figure]


@pytest.mark.parametrize("answer", [math.nan, math.inf, -1e-9, None, "fast", 10**400, 1j, np.complex64(1), True])
def test_a_model_that_returns_no_time_is_refused_by_the_name_of_the_value(answer):
    graph = parse("primal %0:float32[8]\n%1:float32[8] = exp %0\noutput %1")
    with pytest.raises(PlanError) as error:
        recompute_seconds(graph, classify(graph), Fixed(answer))
    assert str(error.value) == (
        f"%1:float32[8] (exp) takes {answer!r} seconds, says Fixed.\nGive a finite number of seconds, not below zero."
    )


def test_an_op_without_results_is_named_by_its_number():
    graph = parse("primal %0:float32[8]\n= io_callback %0 effects\noutput %0")
    with pytest.raises(PlanError) as error:
        recompute_seconds(graph, classify(graph), Fixed(-1.0))
    assert str(error.value) == (
        "op 0 (io_callback) takes -1.0 seconds, says Fixed.\nGive a finite number of seconds, not below zero."
    )


@pytest.mark.parametrize("number", [1, np.float32(0.5), np.float64(0.25)])
def test_any_kind_of_number_is_welcome(number):
    graph = parse("primal %0:float32[8]\n%1:float32[8] = exp %0\noutput %1")
    (taken,) = recompute_seconds(graph, classify(graph), Fixed(number))
    assert taken == number and type(taken) is float


# ---------------------------------------------------------------- bytes


def test_saving_costs_a_copy_per_trip_and_inputs_and_outputs_are_free():
    graph = parse(TEXT)
    prices = saving_bytes(graph, classify(graph))
    assert (prices[0], prices[1], prices[10]) == (0, 0, 0)
    assert (prices[4], prices[6], prices[9]) == (32, 5 * 32, 15 * 32)


GATHER = parse("primal %0:float32[125000000]\n%1:float32[1000000000] = all_gather %0\noutput %1")


@pytest.mark.parametrize(("name", "bytes_per_s"), [("h100", 0.8 * 900e9 / 2), ("l4", 0.8 * 32e9), ("v5e", None)])
def test_what_moves_among_devices_takes_the_time_of_the_links(name, bytes_per_s):
    rates = CHIPS[name].rates
    rate = rates.link_bytes_per_s if bytes_per_s is None else bytes_per_s
    assert math.isclose(rates.seconds(GATHER, GATHER.ops[0]), LINK_S + 4e9 / rate)


class Counted(tuple):
    """Moves that count how often all of them are looked at."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_all_prices_together_look_at_all_moves_once():
    graph = parse(TEXT)
    busy = [op.id for op in graph.ops if op.name not in (STEP, LITERAL, OPEN_LOOP)]
    moves = Counted(Move(op, "all-gather", 8_000) for op in busy)
    moved, alone = replace(graph, moves=moves), replace(graph)
    for op in busy:
        more = op_seconds(moved, moved.ops[op], RATES) - op_seconds(alone, alone.ops[op], RATES)
        assert more == pytest.approx(LINK_S + 8_000 / RATES.moved_per_s)
    assert busy and moves.walks == 1
