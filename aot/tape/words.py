"""Say in words why a backward had to be captured anew."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jointcut.aot.hooks.hook import Place
from jointcut.aot.tape.roll import RolledSweep
from jointcut.aot.tape.sweep import Sweep
from jointcut.partition.figures import counted
from jointcut.partition.program.places import line_at

FIRST = "the first call"


@dataclass(frozen=True)
class Sketch:
    """What is compared of a structure.

    Attributes:
        arrays: the type of each array among the arguments, by path.
        ops: the ops, in the order in which they ran: the user's line and the name.
        hooks: the hooks, in words.
        fate: what becomes of the gradients.
        loop: the number of ops of a block of its loop, 0 without one.
    """

    arrays: dict[str, str]
    ops: tuple[tuple[str, str], ...]
    hooks: tuple[str, ...]
    fate: str
    loop: int = 0

    @classmethod
    def of(cls, sweep: Sweep, arrays: dict[str, str], fate: str) -> Sketch:
        """The sketch of a sweep, and of the arguments of its call."""
        block = sweep.block if isinstance(sweep, RolledSweep) else ()
        nodes = [*sweep.nodes, *block]
        ops = tuple((_line(node.source), node.record.name) for node in reversed(nodes) if node.record is not None)
        called = [*sweep.called, *(sweep.inner if isinstance(sweep, RolledSweep) else ())]
        places = (hook for hook in called if isinstance(hook, Place))
        return cls(arrays, ops, tuple(f"{place.kind} {place.named}" for place in places), fate, len(block))


def why(new: Sketch, known: Sequence[Sketch]) -> str:
    """Why a structure is none of those that are known: what differs from the nearest of them."""
    if not known:
        return FIRST
    nearest = min(known, key=lambda old: _distance(new, old))
    if new.loop and new.loop not in [sketch.loop for sketch in known]:
        return f"equal blocks of {counted(new.loop, 'op')} are a loop"
    differences = [*_arrays(new, nearest), *_lines(new, nearest), *_hooks(new, nearest)]
    if not differences and new.ops != nearest.ops:
        differences = list(_order(new, nearest))
    if new.fate != nearest.fate:
        differences.append(f"gradients are {new.fate}, not {nearest.fate}")
    return "; ".join(differences[:2]) or "ops read other values, or other arguments get a gradient"


def _distance(new: Sketch, old: Sketch) -> int:
    other = sum(1 for path in {*new.arrays, *old.arrays} if new.arrays.get(path) != old.arrays.get(path))
    counts, before = Counter(new.ops), Counter(old.ops)
    counts.subtract(before)
    return 1000 * other + sum(map(abs, counts.values())) + len(set(new.hooks) ^ set(old.hooks))


def _arrays(new: Sketch, old: Sketch) -> Iterator[str]:
    """`x: float32[8, 7] instead of [8, 6]`."""
    for path, now in new.arrays.items():
        before = old.arrays.get(path)
        if before is None:
            yield f"{path} is new: {now}"
        elif before != now:
            same = now.partition("[")[0] == before.partition("[")[0]
            yield f"{path}: {now} instead of {before.partition('[')[1] + before.partition('[')[2] if same else before}"
    yield from (f"{path} is gone" for path in old.arrays if path not in new.arrays)


def _lines(new: Sketch, old: Sketch) -> Iterator[str]:
    """`24 steps instead of 23 in train.py:41`: of the lines that ran another number of times, the first one."""
    now, before = _runs(new), _runs(old)
    for line in dict.fromkeys((*now, *before)):
        if line and now.get(line, 0) != before.get(line, 0):
            yield f"{counted(now.get(line, 0), 'step')} instead of {before.get(line, 0)} in {line}"
            return


def _runs(sketch: Sketch) -> dict[str, int]:
    """How often each line ran, by the op that ran the fewest times in it."""
    names: dict[str, Counter[str]] = {}
    for line, name in sketch.ops:
        names.setdefault(line, Counter())[name] += 1
    return {line: min(counts.values()) for line, counts in names.items()}


def _hooks(new: Sketch, old: Sketch) -> Iterator[str]:
    yield from (f"the hook {hook} is new" for hook in new.hooks if hook not in old.hooks)
    yield from (f"the hook {hook} is gone" for hook in old.hooks if hook not in new.hooks)


def _order(new: Sketch, old: Sketch) -> Iterator[str]:
    for (line, name), (_, before) in zip(new.ops, old.ops, strict=False):
        if name != before:
            yield f"{name} instead of {before} in {line}"
            return
    yield "the same ops in another order"


def _line(source: Any) -> str:
    """The user's line, `train.py:41`, without its folder and function."""
    place = line_at(source) if source is not None else ""
    return re.sub(r" \(.*\)$", "", Path(place).name)
