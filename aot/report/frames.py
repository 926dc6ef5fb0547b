"""Read the Python calls that traced the instructions of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass

from jointcut.aot.report.wire import Message, decode, number
from jointcut.partition.program.cells import call_text


@dataclass(frozen=True)
class Frames:
    """The Python calls that traced instructions; `of(frame)` lists them, innermost first."""

    files: tuple[str, ...]
    functions: tuple[str, ...]
    locations: tuple[tuple[int, int, int], ...]  # file, function, line
    parents: tuple[tuple[int, int], ...]  # location, and the frame of the caller

    @classmethod
    def read(cls, module: Message) -> Frames:
        """Read a `StackFrameIndexProto`; its ids count from 1, and 0 means none."""
        index = decode(module[17][0]) if 17 in module else {}
        locations = [decode(raw) for raw in index.get(3, [])]
        frames = [decode(raw) for raw in index.get(4, [])]
        return cls(
            tuple(raw.decode() for raw in index.get(1, [])),
            tuple(raw.decode() for raw in index.get(2, [])),
            tuple((number(location, 1), number(location, 2), number(location, 3)) for location in locations),
            tuple((number(frame, 1), number(frame, 2)) for frame in frames),
        )

    def of(self, frame: int) -> tuple[str, ...]:
        """Return the calls of a frame as `file:line (function)`, innermost first."""
        calls: list[str] = []
        while frame:
            location, frame = self.parents[frame - 1]
            file, function, line = self.locations[location - 1]
            calls.append(call_text(self.files[file - 1], line, self.functions[function - 1]))
        return tuple(calls)
