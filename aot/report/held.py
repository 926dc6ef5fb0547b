"""Say what a compiled program holds at each step, in the words of whoever wrote the model.

The same form as the replay of a plan, `Lifetimes`, but as XLA assigned it: the steps are its instructions, in its
order, and the bytes are those of its temp allocation. Each instruction still knows the name stack and the Python calls
that it was traced in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

from jointcut.aot.report.instructions import Instruction, Program
from jointcut.aot.report.schedule import Assignment, Value
from jointcut.partition.lower.lifetimes import Lifetime, Lifetimes, Moment
from jointcut.partition.program.places import Place, place
from jointcut.partition.program.roles import Side

_BACKWARD = "transpose("  # in the name of what a cotangent flows through


def held(compiled: Any) -> Lifetimes | None:
    """What a `jax.stages.Compiled` holds at each of its instructions; None where its device tells no assignment.

    A loop's body stands in the row once. The backward begins where the names of instructions best divide into those
    before that carry no cotangent and those after that do.
    """
    found = Assignment.of(compiled)
    if found is None:
        return None
    program, times = found.program, sorted(set(found.executed))
    made = [program.instructions[found.schedule.order[time]] for time in times]
    boundary, trips, where = _boundary(made), Counter(found.executed), _places(program)
    moments = tuple(
        Moment(
            _op(i),
            Side.FORWARD if step < boundary else Side.BACKWARD,
            where(i.name, i.frame),
            trips[time],
        )
        for step, (i, time) in enumerate(zip(made, times, strict=True))
    )
    return Lifetimes(moments, tuple(_buffers(found, times, program, where)))


def one_after_the_other(forward: Lifetimes, backward: Lifetimes, residuals: Sequence[Lifetime]) -> Lifetimes:
    """Two programs as one row; what the first hands to the second is alive throughout."""
    count = len(forward.moments)
    moments = [
        *(replace(m, side=Side.FORWARD) for m in forward.moments),
        *(replace(m, side=Side.BACKWARD) for m in backward.moments),
    ]
    moved = [replace(b, first=b.first + count, last=b.last + count) for b in backward.buffers]
    kept = [replace(b, first=0, last=len(moments) - 1) for b in residuals] if moments else []
    return Lifetimes(tuple(moments), (*kept, *forward.buffers, *moved))


def _places(program: Program) -> Any:
    @cache
    def where(name: str, frame: int) -> Place:
        stack, _, _ = name.partition("/")[2].rpartition("/")  # without the jitted function, and without the primitive
        return place(stack, program.frames.of(frame))

    return where


def _boundary(made: Sequence[Instruction]) -> int:
    """Where to divide the instructions so that the shares that carry a cotangent differ most in the two parts.

    The least variance within the parts, as where a regression tree divides; what runs again carries none, and stands
    in the backward. Barriers and what has no name count for nothing.
    """
    named = [step for step, i in enumerate(made) if i.is_users]
    late = list(accumulate((_BACKWARD in made[step].name for step in named), initial=0))
    if not late[-1]:
        return len(made)

    def between(count: int) -> float:
        before, after = late[count], late[-1] - late[count]
        return before**2 / max(count, 1) + after**2 / (len(named) - count)

    return named[max(range(len(named)), key=between)]


def _buffers(found: Assignment, times: Sequence[int], program: Program, where: Any) -> Iterator[Lifetime]:
    """The values as buffers, by what writes them; of two that share a place at one time, the bytes are the later one's.

    What a loop fills is said to be made by what the loop's body writes there, from the time that the room is made, what
    XLA arranges anew by what it arranges, and what it makes for an op of the user's by that op.
    """
    pieces: dict[tuple[int, int, Instruction], int] = defaultdict(int)
    filled = program.filled()
    for size, value, start, end in _slots(found.values):
        first, last = bisect_left(times, start), bisect_right(times, end) - 1
        if first <= last:
            author = filled.get(value.maker) or program.writer(value.maker, value.index)
            known = program.named(author)
            if not known.is_placed:
                known = program.reader(value.maker) or known
            pieces[first, last, known] += size
    for (first, last, i), size in sorted(pieces.items(), key=lambda piece: piece[0][:2]):
        yield Lifetime(size, "", _op(i), where(i.name, i.frame), first, last)


def _op(i: Instruction) -> str:
    """The primitive that an instruction was lowered from, or its own name."""
    name = i.name.rpartition("/")[2]
    return i.opcode if "(" in name or not name else name


def _slots(values: Sequence[Value]) -> Iterator[tuple[int, Value, int, int]]:
    """Size, value, start and end of each stay of a value in a range of addresses that it shares with others whole."""
    bounds = sorted({edge for v in values for edge in (v.offset, v.offset + v.size)})
    rank = {bound: i for i, bound in enumerate(bounds)}
    stays: dict[int, list[Value]] = defaultdict(list)
    for value in values:
        for slot in range(rank[value.offset], rank[value.offset + value.size]):
            stays[slot].append(value)
    for slot, own in stays.items():
        for value, start, end in _newest(own):
            yield bounds[slot + 1] - bounds[slot], value, start, end


def _newest(own: Sequence[Value]) -> Iterator[tuple[Value, int, int]]:
    """When each of the values in one place is the newest there, of those that begin together the longest-lived."""
    waiting = sorted(own, key=lambda v: (v.start, v.end), reverse=True)
    alive: list[Value] = []  # the newest last
    since = 0
    for time in sorted({edge for v in own for edge in (v.start, v.end + 1)}):
        before = alive[-1] if alive else None
        alive = [v for v in alive if v.end >= time]
        while waiting and waiting[-1].start == time:
            alive.append(waiting.pop())
        after = alive[-1] if alive else None
        if after is not before:
            if before is not None:
                yield before, since, time - 1
            since = time
