"""Write the arrays of a step as a profile that pprof reads: bytes by the user's functions and lines.

A sample is the arrays that one op makes in one stack of calls. It has two values: the bytes that are alive at the peak
of the temporaries, and the bytes that the forward saves for the backward. `pprof -diff_base` compares two profiles. The
numbers of fields are those of `profile.proto` of pprof; nothing in a profile depends on when it was written.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.program.places import Place

_LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?: \((?P<function>.*)\))?", re.DOTALL)

#: The numbers of the fields of a profile.
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRING, _COMMENT, _DEFAULT = 1, 2, 4, 5, 6, 13, 14


@dataclass(frozen=True)
class Call:
    """A line of the user's code that runs within a function."""

    function: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Made:
    """Arrays of one type that an op makes: the calls that led to it, innermost first, and the bytes of both kinds."""

    calls: tuple[Call, ...]
    op: str
    type: str
    peak_bytes: int = 0
    saved_bytes: int = 0


def pprof(lives: Lifetimes, saved: Iterable[tuple[str, str, str, int]], comment: str) -> bytes:
    """Return the profile of the arrays at the peak of a program, and of its saved ones, gzipped.

    A saved array is the line that made it, its op, its type and its bytes. It stands under the calls that lead to the
    same line elsewhere in the program.
    """
    alive = lives.alive(lives.peak) if lives.moments else ()
    arrays = [Made(_calls(buffer.place), buffer.op, buffer.type, peak_bytes=buffer.bytes) for buffer in alive]
    stacks = {part.place.line: _calls(part.place) for part in (*lives.moments, *lives.buffers)}
    for line, op, type_, size in saved:
        arrays.append(Made(stacks.get(line) or (_call(line),), op, type_, saved_bytes=size))
    return gzip.compress(_Profile().of(arrays, comment), mtime=0)


def _calls(place: Place) -> tuple[Call, ...]:
    """Return the calls that led to a place, the innermost first; where there are none, its line or modules."""
    calls = tuple(_call(f"{name.at} ({name.text})") for name in reversed(place.calls))
    return calls or (_call(place.line or "/".join(place.modules)),)


def _call(text: str) -> Call:
    match = _LINE.fullmatch(text)
    if match is None:
        return Call(text or "(no known line)")
    return Call(match["function"] or "(no function)", match["file"], int(match["line"]))


@dataclass
class _Profile:
    """The tables of a profile: texts, functions and lines have numbers."""

    texts: dict[str, int] = field(default_factory=lambda: {"": 0})
    functions: dict[tuple[str, str], int] = field(default_factory=dict)
    locations: dict[Call, int] = field(default_factory=dict)

    def of(self, arrays: Sequence[Made], comment: str) -> bytes:
        """Return the profile of some arrays."""
        kinds = [_whole(1, self._text(kind)) + _whole(2, self._text("bytes")) for kind in ("at_peak", "saved")]
        default, said = self._text("at_peak"), self._text(comment)
        parts = [_message(_SAMPLE_TYPE, kind) for kind in kinds]
        parts += [_message(_SAMPLE, self._sample(made, sizes)) for made, sizes in _summed(arrays).items()]
        parts += [_message(_LOCATION, self._location(call, number)) for call, number in self.locations.items()]
        parts += [_message(_FUNCTION, self._function(*pair)) for pair in self.functions.items()]
        parts += [_message(_STRING, text.encode()) for text in self.texts]
        return b"".join([*parts, _whole(_COMMENT, said), _whole(_DEFAULT, default)])

    def _sample(self, made: Made, sizes: Sequence[int]) -> bytes:
        numbers = [self.locations.setdefault(call, len(self.locations) + 1) for call in made.calls]
        labels = [(self._text(key), self._text(text)) for key, text in (("op", made.op), ("type", made.type))]
        told = b"".join(_message(3, _whole(1, key) + _whole(2, text)) for key, text in labels)
        return _message(1, b"".join(map(_varint, numbers))) + _message(2, b"".join(map(_varint, sizes))) + told

    def _location(self, call: Call, number: int) -> bytes:
        function = self.functions.setdefault((call.function, call.file), len(self.functions) + 1)
        return _whole(1, number) + _message(4, _whole(1, function) + _whole(2, call.line))

    def _function(self, key: tuple[str, str], number: int) -> bytes:
        name, file = map(self._text, key)
        return _whole(1, number) + _whole(2, name) + _whole(3, name) + _whole(4, file)

    def _text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


def _summed(arrays: Iterable[Made]) -> dict[Made, tuple[int, int]]:
    """Return the bytes of both kinds of arrays of one type, op and stack, the first met first."""
    found: dict[Made, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for made in arrays:
        key = Made(made.calls, made.op, made.type)
        at_peak, kept = found[key]
        found[key] = at_peak + made.peak_bytes, kept + made.saved_bytes
    return found


# ---------------------------------------------------------------------------------------------- protocol buffers


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _whole(name: int, number: int) -> bytes:
    """A field with a whole number; 0 is the default, and is left out."""
    return _varint(name << 3) + _varint(number) if number else b""


def _message(name: int, content: bytes) -> bytes:
    return _varint(name << 3 | 2) + _varint(len(content)) + content
