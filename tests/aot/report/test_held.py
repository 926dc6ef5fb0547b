"""What a compiled program holds: XLA's own account up to gaps, in the user's lines, a loop's body once."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from benchmarks.alive import live_bytes, occupied
from drawn import rows
from jointcut.aot.report.held import _slots, held, one_after_the_other
from jointcut.aot.report.liveness import HeldValue, Liveness
from jointcut.aot.run.compile import ProgramMemory
from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.program.roles import Side
from programs import EVERY_PROGRAM

quick = settings(deadline=None, max_examples=100 if EVERY_PROGRAM else 40, derandomize=True, database=None)

#: XLA begins each value at a multiple of so many bytes, and leaves a small share of the allocation between values.
ALIGNMENT, GAPS = 64, 0.03


def check(compiled) -> None:
    """The laws of what a compiled program holds."""
    life, found, temp_bytes = held(compiled), Liveness.of(compiled), ProgramMemory.of(compiled).temp_bytes
    most = max(life.totals, default=0)
    assert most == max(live_bytes(found), default=0)
    assert most <= temp_bytes <= most + ALIGNMENT * len(found.values) + GAPS * temp_bytes
    assert all(0 <= b.first <= b.last < len(life.moments) and b.bytes > 0 for b in life.buffers)
    assert len(life.moments) == len(set(found.executed))
    assert [m.side for m in life.moments] == sorted((m.side for m in life.moments), key=[*Side].index)
    unknown = sum(b.bytes for b in life.alive(life.peak) if not b.place.line)
    assert unknown <= GAPS * most  # copies and rooms that XLA made bear the line of what they are for


@pytest.mark.parametrize("name", ["mlp", "lstm", "gnn"])
def test_the_most_that_a_program_of_the_suite_holds_is_its_temp_allocation_up_to_gaps(name, suite):
    traced = suite(name)
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        for compiled in (*traced.partition().compile().programs, traced.plain_program):
            check(compiled)


# ------------------------------------------------------------------------------------ lines


MATRIX = jax.ShapeDtypeStruct((128, 128), "float32")


def step_of(function, *structs):
    return jax.jit(jax.value_and_grad(function)).lower(*structs).compile()


def layer(w, x):
    y = x @ w
    return jnp.tanh(y) * jnp.sin(y)


def stacked(weights, x):
    def body(c, w):
        y = layer(w, c)
        return y, jnp.sum(y)

    c, sums = lax.scan(body, x, weights)
    return jnp.sum(c) + jnp.sum(sums)


def line_of(function, text) -> str:
    """`file:line` of the first line of a function with a text in it."""
    code = function.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()[code.co_firstlineno - 1 :]
    return f"{code.co_filename}:{code.co_firstlineno + next(i for i, line in enumerate(lines) if text in line)} "


def scanned(length) -> Lifetimes:
    return held(step_of(stacked, jax.ShapeDtypeStruct((length, 128, 128), "float32"), MATRIX))


def test_every_line_that_a_step_bears_is_one_of_this_file():
    life = scanned(6)
    lines = [m.place.line for m in life.moments if m.place.line]
    assert len(lines) > len(life.moments) / 2
    assert all(line.startswith(f"{__file__}:") for line in lines)
    assert any(line.startswith(line_of(layer, "x @ w")) for line in lines)


def test_the_body_of_a_loop_stands_in_the_row_once_and_says_how_often_it_runs():
    few, many = scanned(6), scanned(24)
    assert len(few.moments) == len(many.moments)
    assert {m.trips for m in few.moments} == {1, 6}
    assert [m.trips for m in many.moments] == [{1: 1, 6: 24}[m.trips] for m in few.moments]


def test_the_stacks_of_a_scan_stand_at_the_lines_of_the_body_that_make_them():
    """The stacks are 24 matrices each; nothing else is larger than one."""
    life = scanned(24)
    stacks = [b for b in life.buffers if b.bytes >= 24 * 4 * 128 * 128]
    known = {line_of(layer, "x @ w"), line_of(layer, "jnp.tanh"), line_of(stacked, "layer(w, c)")}
    assert stacks
    assert all(any(b.place.line.startswith(line) for line in known) for b in stacks)


def test_the_forward_comes_before_the_backward_and_both_know_their_scopes():
    def loss(w, x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    life = held(step_of(loss, MATRIX, MATRIX))
    forward = [m.place.modules for m in life.moments if m.side is Side.FORWARD and m.op in ("dot_general", "tanh")]
    assert forward == [("first",), ("first",), ("second",), ("second",)]
    backward = [m.place.modules for m in life.moments if m.side is Side.BACKWARD and m.place.modules]
    assert backward == sorted(backward, reverse=True) and set(backward) == {("first",), ("second",)}


def test_a_device_that_tells_no_assignment_holds_nothing_that_we_know():
    class Silent:
        def memory_analysis(self):
            return object()

    assert held(Silent()) is None


# ------------------------------------------------------------------------------------ two programs


@quick
@given(rows(), rows(), rows())
def test_what_the_first_program_hands_to_the_second_is_alive_throughout(first, second, third):
    residuals = third.buffers
    life = one_after_the_other(first, second, residuals)
    kept = sum(b.bytes for b in residuals)
    assert life.totals == tuple(kept + total for total in (*first.totals, *second.totals))
    assert life.boundary == len(first.moments)
    assert [m.op for m in life.moments] == [m.op for m in (*first.moments, *second.moments)]


def test_two_programs_that_do_nothing_hold_nothing():
    empty = Lifetimes((), ())
    assert one_after_the_other(empty, empty, ()) == empty


# ------------------------------------------------------------------------------------ shared places

places = st.lists(
    st.builds(
        lambda offset, size, span: HeldValue(0, (), 8 * offset, 8 * size, *span),
        st.integers(0, 6),
        st.integers(1, 5),
        st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted),
    ),
    max_size=8,
)


@quick
@given(places)
def test_the_stays_of_values_cover_each_byte_that_is_taken_once(some):
    stays = list(_slots(some))
    totals = [sum(size for size, _, start, end in stays if start <= time <= end) for time in range(13)]
    assert totals == occupied(some, 13)
    assert all(v.start <= start <= end <= v.end for _, v, start, end in stays)


@quick
@given(places)
def test_of_values_that_share_a_place_the_newest_has_it(some):
    stays = list(_slots(some))
    for time in range(13):
        newest = {}
        for v in sorted((v for v in some if v.start <= time <= v.end), key=lambda v: (v.start, v.end)):
            newest.update((byte, v.start) for byte in range(v.offset, v.offset + v.size))
        by_start = {}
        for size, v, start, end in stays:
            if start <= time <= end:
                by_start[v.start] = by_start.get(v.start, 0) + size
        assert by_start == {start: list(newest.values()).count(start) for start in set(newest.values())}
