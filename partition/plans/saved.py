"""List the saved values of a plan as rows, and group rows that read the same."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.packing.forms import plain_bytes
from jointcut.partition.program.graph import Form

_AMOUNT = re.compile(r"[\d.,]+ [kMGT]?B| and \d+ more")  # amounts in a reason, which differ from layer to layer


#: The memory of the device, as `Saved.memory` names it.
DEVICE = "device"


class _Told(Protocol):
    """A row about an array: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def bytes(self) -> int: ...

    @property
    def reason(self) -> str: ...


_Row = TypeVar("_Row", bound=_Told)


@dataclass(frozen=True)
class Saved:
    """One value that the forward hands to the backward.

    Attributes:
        value: its id in the graph.
        shape, dtype: the type of one copy.
        copies: the trips of its loops.
        bytes: the bytes of all copies together.
        op: the primitive that makes it.
        scope: the name stack under which it was traced.
        source: the user's line.
        reason: why it is saved rather than recomputed.
        memory: where it waits, `"device"` or `"pinned_host"`.
        form: the smaller form in which it waits, such as `"bfloat16"`; empty where it waits in no form.
        host_steps: if it is offloaded in part, the number of steps of its outermost loop whose copies wait in host
            memory. These are the first steps of the forward; the copies of the others wait on the device. Else 0.
        loop_steps: the number of steps of that loop; 0 where it is not offloaded in part.
    """

    value: int
    shape: tuple[int, ...]
    dtype: str
    copies: int
    bytes: int
    op: str
    scope: str
    source: str
    reason: str
    memory: str = DEVICE
    form: str = ""
    host_steps: int = 0
    loop_steps: int = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether it waits in host memory."""
        return self.memory != DEVICE

    @property
    def host_bytes(self) -> int:
        """The bytes that wait in host memory."""
        if not self.is_offloaded:
            return 0
        return self.bytes * self.host_steps // self.loop_steps if self.loop_steps else self.bytes

    @property
    def plain_bytes(self) -> int:
        """Bytes of all copies as plain floats, whatever the form."""
        return self.copies * plain_bytes(self.shape, self.dtype)

    @property
    def why(self) -> str:
        """Why it is saved, in which form it waits, and that it is offloaded, if it is."""
        form = f"as {self.form}, " if self.form else ""
        part = f"steps 0..{self.host_steps} of {self.loop_steps} " * bool(self.loop_steps)
        return f"{f'{part}offloaded, ' * self.is_offloaded}{form}{self.reason}"

    def __str__(self) -> str:
        """The value's type, where it is made and why it is saved, on one line."""
        trips = f"{self.copies} x " if self.copies > 1 else ""
        return f"{trips}{self.dtype}{list(self.shape)} {self.op} {self.source}: {self.why}"


@dataclass(frozen=True)
class PackedBytes:
    """The effect of a user's functions on saved values: how many arrays they pack, and the bytes before and after.

    `plain_bytes` counts the arrays as they reach the functions, in a smaller form if they have one.
    """

    values: int
    bytes: int
    plain_bytes: int

    def __str__(self) -> str:
        """`pack keeps 4 values in 45.1 kB instead of 90.1 kB`."""
        sizes = f"{human_bytes(self.bytes)} instead of {human_bytes(self.plain_bytes)}"
        return f"pack keeps {counted(self.values, 'value')} in {sizes}"


@dataclass(frozen=True)
class GradientError:
    """The measured error of smaller forms, if a bound on the error of the gradient permits them.

    Attributes:
        most: the bound, relative to the gradient.
        relative: the error that was measured; None where none was.
        are_drawn: whether the arguments were drawn at random, since no call's were known.
        unused: why no value waits in a smaller form; empty where some do.
    """

    most: float
    relative: float | None = None
    are_drawn: bool = False
    unused: str = ""

    def __str__(self) -> str:
        """The error and the bound, or why no form is used."""
        if self.unused or self.relative is None:
            return f"no smaller form is used: {self.unused}"
        where = "arguments drawn at random" if self.are_drawn else "the arguments of the call"
        return f"relative error of the gradient {self.relative:.1e}, at most {self.most:.1e}: measured at {where}"


def alike(rows: Iterable[_Row], **apart: Any) -> list[list[_Row]]:
    """Group rows that read the same; the group of most bytes comes first.

    Within a group the fields in `apart` may differ, and so may the amounts in the reasons.
    """
    groups: dict[Any, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[replace(row, reason=_AMOUNT.sub("", row.reason), **apart)].append(row)
    return sorted(groups.values(), key=lambda own: -sum(row.bytes for row in own))


def grouped(saved: Iterable[Saved]) -> list[list[Saved]]:
    """Group saved values that read the same, such as values of equal layers; the group of most bytes comes first."""
    return alike(saved, value=0, scope="")


def listed(saved: Iterable[Saved]) -> Iterator[tuple[int, str]]:
    """The lines that list saved values, one for each group that reads the same: its bytes and its text."""
    for own in grouped(saved):
        times = f"{len(own)} times " if len(own) > 1 else ""
        yield sum(s.bytes for s in own), f"{times}{own[0]}"


def in_smaller_forms(saved: Iterable[Saved]) -> Iterator[str]:
    """A line for each smaller form in which saved values wait: how many, and how many fewer bytes are kept."""
    forms: dict[str, list[Saved]] = defaultdict(list)
    for s in saved:
        if s.form:
            forms[s.form].append(s)
    for form, own in forms.items():
        size, plain = sum(s.bytes for s in own), sum(s.plain_bytes for s in own)
        yield f"kept as {form}: {counted(len(own), 'value')}, {human_bytes(size)} instead of {human_bytes(plain)}"


def in_cheaper_forms(forms: Iterable[Form]) -> Iterator[str]:
    """A text for each kind of cheaper form: how many values have it, and how many fewer bytes are kept."""
    kinds: dict[str, list[Form]] = defaultdict(list)
    for form in forms:
        kinds[form.kind].append(form)
    for kind, own in kinds.items():
        less = sum(form.bytes_less for form in own)
        yield f"{kind}: {counted(len(own), 'value')}{f', {human_bytes(less)} less' * bool(less)}"
