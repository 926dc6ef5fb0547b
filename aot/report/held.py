"""List the arrays that a compiled program holds at each step, by the user's modules and source lines.

The result is a `Lifetimes`, like the replay of a plan. The steps are XLA's instructions in XLA's order, and the bytes
are the bytes of its temp allocation. Modules and lines come from the name stack and Python calls of each instruction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

from jointcut.aot.report.instructions import Instruction, Instructions
from jointcut.aot.report.liveness import HeldValue, Liveness
from jointcut.partition.lower.memory.lifetimes import Lifetime, Lifetimes, Moment
from jointcut.partition.program.places import Place, place
from jointcut.partition.program.roles import Side

_BACKWARD = "transpose("  # in the names of instructions that carry a cotangent


def held(compiled: Any) -> Lifetimes | None:
    """Return the arrays alive at each instruction of a `jax.stages.Compiled`; None if its device does not say."""
    liveness = Liveness.of(compiled)
    return None if liveness is None else lifetimes_of(liveness)


def lifetimes_of(liveness: Liveness) -> Lifetimes:
    """Return the arrays alive at each instruction.

    A loop's body is listed once. The names of instructions tell the step where the backward begins (`_boundary`).
    """
    instructions, times = liveness.instructions, liveness.times
    executed = [instructions.by_id[liveness.order.instructions[time]] for time in times]
    boundary, trips, place_of = _boundary(executed), Counter(liveness.executed), _places(instructions)
    moments = tuple(
        Moment(_op(i), Side.FORWARD if step < boundary else Side.BACKWARD, place_of(i), trips[time])
        for step, (i, time) in enumerate(zip(executed, times, strict=True))
    )
    return Lifetimes(moments, tuple(_buffers(liveness, times, place_of)))


def one_after_the_other(forward: Lifetimes, backward: Lifetimes, residuals: Sequence[Lifetime]) -> Lifetimes:
    """Join two programs, the forward before the backward; the residuals are alive throughout."""
    count = len(forward.moments)
    moments = [
        *(replace(m, side=Side.FORWARD) for m in forward.moments),
        *(replace(m, side=Side.BACKWARD) for m in backward.moments),
    ]
    moved = [replace(b, first=b.first + count, last=b.last + count) for b in backward.buffers]
    throughout = [replace(b, first=0, last=len(moments) - 1) for b in residuals] if moments else []
    return Lifetimes(tuple(moments), (*throughout, *forward.buffers, *moved))


def _places(instructions: Instructions) -> Callable[[Instruction], Place]:
    @cache
    def place_at(name: str, frame: int) -> Place:
        stack, _, _ = name.partition("/")[2].rpartition("/")  # without the jitted function and the primitive
        return place(stack, instructions.frames.of(frame))

    return lambda instruction: place_at(instruction.name, instruction.frame)


def _boundary(executed: Sequence[Instruction]) -> int:
    """Return the step that best divides the instructions into a part without cotangents and a part with them.

    It minimises the variance within the two parts, as a regression tree does, since recomputed instructions carry no
    cotangent. Only instructions of the user's code count.
    """
    named = [step for step, i in enumerate(executed) if i.is_users]
    late = list(accumulate((_BACKWARD in executed[step].name for step in named), initial=0))
    if not late[-1]:
        return len(executed)

    def between(count: int) -> float:
        before, after = late[count], late[-1] - late[count]
        return before**2 / max(count, 1) + after**2 / (len(named) - count)

    return named[max(range(len(named)), key=between)]


def _buffers(liveness: Liveness, times: Sequence[int], place_of: Callable[[Instruction], Place]) -> Iterator[Lifetime]:
    """Yield the values as buffers, with the op that writes them; bytes that two values share belong to the later value.

    An array that a loop fills belongs to the instruction of the body that writes it, from its allocation on. A copy
    belongs to the copied op. An array that XLA adds for an op of the user belongs to this op.
    """
    sizes: dict[tuple[int, int, Instruction, str], int] = defaultdict(int)
    instructions = liveness.instructions
    filled = instructions.filled()
    for size, value, start, end in _slots(liveness.values):
        first, last = bisect_left(times, start), bisect_right(times, end) - 1
        if first <= last:
            writer = filled.get(value.maker) or instructions.writer(value.maker, value.index)
            owner = instructions.named(writer)
            if not owner.is_placed:
                owner = instructions.reader(value.maker) or owner
            sizes[first, last, owner, instructions.by_id[value.maker].type(value.index)] += size
    for (first, last, i, type_), size in sorted(sizes.items(), key=lambda item: item[0][:2]):
        yield Lifetime(size, type_, _op(i), place_of(i), first, last)


def _op(i: Instruction) -> str:
    """Return the primitive that an instruction was lowered from, or its own name."""
    name = i.name.rpartition("/")[2]
    return i.opcode if "(" in name or not name else name


def _slots(values: Sequence[HeldValue]) -> Iterator[tuple[int, HeldValue, int, int]]:
    """Yield size, value, start and end of each stay of a value in a slot; each value covers whole slots."""
    bounds = sorted({edge for v in values for edge in (v.offset, v.offset + v.size)})
    rank = {bound: i for i, bound in enumerate(bounds)}
    sharing: dict[int, list[HeldValue]] = defaultdict(list)
    for value in values:
        for slot in range(rank[value.offset], rank[value.offset + value.size]):
            sharing[slot].append(value)
    for slot, sharers in sharing.items():
        for value, start, end in _newest(sharers):
            yield bounds[slot + 1] - bounds[slot], value, start, end


def _newest(values: Sequence[HeldValue]) -> Iterator[tuple[HeldValue, int, int]]:
    """Yield the times when each value of a slot is the newest; if values begin together, the longest-lived counts."""
    waiting = sorted(values, key=lambda v: (v.start, v.end), reverse=True)
    alive: list[HeldValue] = []  # the newest last
    since = 0
    for time in sorted({edge for v in values for edge in (v.start, v.end + 1)}):
        before = alive[-1] if alive else None
        alive = [v for v in alive if v.end >= time]
        while waiting and waiting[-1].start == time:
            alive.append(waiting.pop())
        after = alive[-1] if alive else None
        if after is not before:
            if before is not None:
                yield before, since, time - 1
            since = time
