"""Messages are split into their fields, a byte that values share counts once, and loops are shown once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from benchmarks.alive import live_bytes, merged, occupied
from jointcut.aot.report.frames import Frames
from jointcut.aot.report.liveness import HeldValue, Liveness
from jointcut.aot.report.wire import decode, number, packed, text, varint

quick = settings(deadline=None, max_examples=80, derandomize=True, database=None)


# ------------------------------------------------------------------------------------ messages


def written(number_: int) -> bytes:
    """One variable-length integer, as the encoding of protocol buffers has it: seven bits a byte, the lowest first."""
    found = bytearray()
    while True:
        number_, low = number_ >> 7, number_ & 127
        found.append(low | (128 if number_ else 0))
        if not number_:
            return bytes(found)


def field(name: int, value: int | bytes) -> bytes:
    """One numbered field."""
    if isinstance(value, int):
        return written(name << 3) + written(value)
    return written(name << 3 | 2) + written(len(value)) + value


names = st.integers(1, 60)
whole = st.integers(0, 2**64 - 1)


@quick
@given(whole, st.binary(max_size=4))
def test_an_integer_reads_back_and_tells_where_it_ends(value, behind):
    assert varint(written(value) + behind, 0) == (value, len(written(value)))


@quick
@given(st.lists(st.tuples(names, whole | st.binary(max_size=300)), max_size=12))
def test_a_message_is_split_into_its_fields_in_order(fields):
    found = decode(b"".join(field(*f) for f in fields))
    assert dict(found) == {name: [v for n, v in fields if n == name] for name, _ in fields}


@quick
@given(names, st.lists(whole, max_size=20))
def test_repeated_integers_read_alike_packed_or_not(name, values):
    apart = decode(b"".join(field(name, v) for v in values))
    together = decode(field(name, b"".join(map(written, values))))
    assert list(packed(apart, name)) == list(packed(together, name)) == values


def test_fields_of_fixed_size_are_stepped_over_and_absent_ones_are_nothing():
    message = decode(written(3 << 3 | 1) + bytes(range(8)) + written(4 << 3 | 5) + bytes(4) + field(5, b"tanh"))
    assert message[3] == [bytes(range(8))] and message[4] == [bytes(4)]
    assert (text(message, 5), text(message, 6), number(message, 7)) == ("tanh", "", 0)


# ------------------------------------------------------------------------------------ places

spans = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)
values = st.lists(
    st.builds(
        lambda offset, size, span: HeldValue(0, (), 8 * offset, 8 * size, *span),
        st.integers(0, 6),
        st.integers(1, 5),
        spans,
    ),
    max_size=8,
)


@quick
@given(values)
def test_a_byte_that_values_share_counts_once(some):
    taken = [{b for v in some if v.start <= t <= v.end for b in range(v.offset, v.offset + v.size)} for t in range(13)]
    assert occupied(some, 13) == list(map(len, taken))


@quick
@given(st.sets(spans.map(tuple), min_size=1, max_size=8))
def test_intervals_are_joined_where_they_overlap(some):
    found = list(merged(some))
    covered = {t for low, high in some for t in range(low, high + 1)}
    assert {t for low, high in found for t in range(low, high + 1)} == covered
    assert sum(high - low + 1 for low, high in found) == len(covered)


# ------------------------------------------------------------------------------------ programs


def compiled(function, *structs):
    return jax.jit(function).lower(*structs).compile()


MATRIX = jax.ShapeDtypeStruct((64, 64), "float32")


def looped(length):
    def program(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), jnp.sin(c @ w)), x, length=length)

    return Liveness.of(compiled(program, MATRIX, MATRIX))


def test_a_body_stands_in_the_row_once_and_in_the_bytes_as_often_as_it_runs():
    few, many = looped(4), looped(40)
    assert len(few.order.instructions) == len(many.order.instructions)
    one = (len(many.executed) - len(few.executed)) / 36
    assert one > 0 and one == int(one)
    assert max(map(many.executed.count, many.executed)) == 40
    assert set(few.executed) == set(many.executed)


def test_a_loop_inside_a_loop_is_not_repeated_again():
    def program(w, x):
        def inner(c):
            return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), c, length=5)[0]

        return lax.scan(lambda c, _: (inner(c), None), x, length=3)[0]

    found = Liveness.of(compiled(program, MATRIX, MATRIX))
    assert {found.executed.count(time) for time in found.executed} <= {1, 3}


def test_every_value_lives_within_the_row_and_its_allocation():
    found = looped(4)
    assert found.values and all(0 <= v.start <= v.end <= len(found.order.instructions) for v in found.values)
    assert all(v.size > 0 for v in found.values)
    assert len(live_bytes(found)) == len(found.executed)


def test_the_calls_of_an_instruction_name_this_file_innermost_first():
    def inner(x):
        return jnp.tanh(x) @ x

    def outer(x):
        return inner(x)

    instructions = Liveness.of(compiled(outer, MATRIX)).instructions
    frames = [instructions.frames.of(i.frame) for i in instructions.by_id.values() if i.name.endswith("tanh")]
    own = [call.rpartition("(")[2].rstrip(")").rpartition(".")[2] for call in frames[0] if __file__ in call]
    assert own[:2] == ["inner", "outer"]


def test_a_program_without_frames_has_no_calls():
    assert Frames.read(decode(b"")).of(0) == ()


def test_a_device_that_tells_no_assignment_has_none():
    class Silent:
        def memory_analysis(self):
            return object()

    assert Liveness.of(Silent()) is None
    with pytest.raises(AttributeError):
        Liveness.of(object())
