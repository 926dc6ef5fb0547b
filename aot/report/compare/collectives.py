"""Compare what devices exchange in a step with plain JAX, and say what is more, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.console import RenderableType

from jointcut.aot.report import tabular
from jointcut.aot.report.compare.exchanges import Exchange, Exchanges, Gathered
from jointcut.aot.report.sections import section, sentence
from jointcut.partition.drawing.picture import short
from jointcut.partition.figures import counted, human_bytes

JSON = dict[str, Any]

_AGAIN = "computed again for the backward, which costs less memory than keeping its result"
_ONCE_MORE = "the backward gathers once more what the forward had gathered"
_WAITING = "as layers wait for each other and XLA joins fewer"
_PIECES = f"as many bytes in more pieces, {_WAITING}"
_PER = " per device"
_SHOWN = 8  # lines


@dataclass(frozen=True)
class More:
    """What devices exchange more than in plain JAX, for one line of the user's.

    Attributes:
        kind: the collective, as XLA names it.
        op: the primitives that it is for.
        line: the user's line, as `file:line (function)`.
        count, plain_count: how many arrays, here and in plain JAX.
        bytes, plain_bytes: their bytes on each device, here and in plain JAX.
        why: why they are more.
    """

    kind: str
    op: str
    line: str
    count: int
    plain_count: int
    bytes: int
    plain_bytes: int
    why: str

    def __str__(self) -> str:
        """`all-gather for dot_general at model.py:12: 12 arrays, 6.29 MB per device (plain JAX 6, 3.15 MB): ...`."""
        plain = (
            f"plain JAX {self.plain_count:,}, {human_bytes(self.plain_bytes)}" if self.plain_count else "plain JAX 0"
        )
        where = f"{self.kind} for {self.op} at {short(self.line) or 'no known line'}"
        return f"{where}: {counted(self.count, 'array')}, {human_bytes(self.bytes)}{_PER} ({plain}): {self.why}"


@dataclass(frozen=True)
class Collectives:
    """What the devices of a compiled step exchange, beside the same step in plain JAX; `print` it.

    Attributes:
        ours, plain: what is exchanged in each: `totals` by kind, `rows` by line, and the arrays that are gathered
            `whole` although each device keeps a part.
    """

    ours: Exchanges
    plain: Exchanges

    @cached_property
    def more(self) -> tuple[More, ...]:
        """The lines for which more is exchanged than in plain JAX, most bytes first; none where no kind takes more."""
        ours, plain = _by_line(self.ours), _by_line(self.plain)
        kinds = {kind for kind, (count, size) in self.ours.totals.items() if _is_more(count, size, self._plain(kind))}
        fewer = defaultdict[str, Counter[str]](Counter)
        for (kind, line), rows in plain.items():
            fewer[line] += Counter({kind: _sums(rows)[0] - _sums(ours.get((kind, line), []))[0]})
        found = [
            _more(rows, plain.get(key, []), fewer[key[1]])
            for key, rows in ours.items()
            if key[0] in kinds and _is_more(*_sums(rows), _sums(plain.get(key, [])))
        ]
        return tuple(sorted(found, key=lambda row: (row.plain_bytes - row.bytes, row.kind, row.line)))

    @cached_property
    def pieces(self) -> dict[str, int]:
        """By kind, how many collectives are more than in plain JAX since XLA joins fewer arrays in one."""
        joined = [Counter({row.kind: 0 for row in side.rows}) for side in (self.ours, self.plain)]
        for side, found in zip((self.ours, self.plain), joined, strict=True):
            found.update({kind: -count for kind, (count, _) in side.totals.items()})
            for row in side.rows:
                found[row.kind] += row.count
        here, there = joined
        return {kind: there[kind] - here[kind] for kind in here if 0 <= here[kind] < there[kind]}

    @property
    def whole(self) -> tuple[Gathered, ...]:
        """The arrays that are gathered whole although each device keeps a part, largest first."""
        return self.ours.whole

    def __bool__(self) -> bool:
        """Whether the devices exchange anything."""
        return bool(self.ours.totals or self.plain.totals)

    def __str__(self) -> str:
        """Return one line for each kind, and one for each line of the user's with more than plain JAX."""
        return tabular.written(self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        yield tabular.headline("What devices exchange" if self else "The devices exchange nothing")
        yield from tabular.notes(self.remarks)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The same as sentences; none where nothing is exchanged."""
        if not self:
            return ()
        kinds = sorted({*self.ours.totals, *self.plain.totals})
        told = [self._total(kind) for kind in kinds]
        rest = [f"{len(self.more) - _SHOWN:,} lines more exchange more than in plain JAX"] * (len(self.more) > _SHOWN)
        groups = Counter((each.type, each.bytes, each.op, each.line) for each in self.whole)
        return (
            f"devices exchange {'; '.join(told)}",
            *map(str, self.more[:_SHOWN]),
            *rest,
            *(_whole(Gathered(*key), count) for key, count in groups.most_common(_SHOWN)),
        )

    def _plain(self, kind: str) -> tuple[int, int]:
        return self.plain.totals.get(kind, (0, 0))

    def _total(self, kind: str) -> str:
        here, there = self.ours.totals.get(kind, (0, 0)), self._plain(kind)
        text = f"{counted(here[0], kind)}, {human_bytes(here[1])}{_PER}" if here[0] else f"no {kind}"
        if here == there:
            return f"{text} (as plain JAX)"
        why = f": {counted(count, 'piece')} more, {_WAITING}" if (count := self.pieces.get(kind, 0)) else ""
        return f"{text} (plain JAX {there[0]:,}{f', {human_bytes(there[1])}' * bool(there[0])}{why})"

    # ------------------------------------------------------------------------------------- in files and pictures

    def to_dict(self) -> JSON:
        """Return totals, what is more and what is gathered whole as plain JSON."""
        more, whole = ([asdict(row) for row in rows] for rows in (self.more, self.whole))
        return {"totals": self.ours.totals, "plain": self.plain.totals, "more": more, "whole": whole}

    @property
    def section(self) -> JSON:
        """The section of a page: each line, here and in plain JAX."""
        ours, plain, told = _by_line(self.ours), _by_line(self.plain), {(m.kind, m.line): m.why for m in self.more}
        cells = []
        for key in sorted({*ours, *plain}, key=lambda key: -_sums(ours.get(key, []))[1]):
            rows = ours.get(key) or plain[key]
            pairs = [_sums(side.get(key, [])) for side in (ours, plain)]
            figures = [(f"{count:,}, {human_bytes(size)}" if count else "", size) for count, size in pairs]
            cells.append([key[0], *figures, f"{_ops(rows)} at {short(key[1])}", told.get(key, "")])
        lead = " ".join(map(sentence, (self.remarks[0], *(_whole(each, 1) for each in self.whole[:_SHOWN]))))
        columns = f"collective, >here{_PER}, >plain JAX{_PER}, for, why more"
        return section("exchanged", "What devices exchange", lead, columns, cells)


def _by_line(side: Exchanges) -> dict[tuple[str, str], list[Exchange]]:
    found: dict[tuple[str, str], list[Exchange]] = {}
    for row in side.rows:
        found.setdefault((row.kind, row.line), []).append(row)
    return found


def _sums(rows: list[Exchange]) -> tuple[int, int]:
    return sum(row.count for row in rows), sum(row.bytes for row in rows)


def _is_more(count: int, size: int, plain: tuple[int, int]) -> bool:
    return count > plain[0] or size > plain[1]


def _ops(rows: list[Exchange]) -> str:
    return " and ".join(dict.fromkeys(row.op for row in rows))


def _more(rows: list[Exchange], plain: list[Exchange], spared: Counter[str]) -> More:
    """Say what is more for one line, and why; `spared` are the other collectives that plain JAX alone has there."""
    kind, line = rows[0].kind, rows[0].line
    (count, size), (plain_count, plain_size) = _sums(rows), _sums(plain)
    again, before = (sum(row.count for row in side if not row.is_backward) for side in (rows, plain))
    if spared and not plain:
        why = f"in place of {' and '.join(counted(number, other) for other, number in sorted(spared.items()))}"
    elif size > plain_size:
        why = _ONCE_MORE if kind == "all-gather" and again <= before else _AGAIN  # in a scan all is one backward
    else:
        why = _PIECES
    return More(kind, _ops(rows), line, count, plain_count, size, plain_size, why)


def _whole(each: Gathered, count: int) -> str:
    """Say that an array is gathered whole, and what helps."""
    many = f"{count} x " if count > 1 else ""
    where = f"{each.op} at {short(each.line) or 'no known line'}"
    return (
        f"{many}{each.type}, {human_bytes(each.bytes)}{_PER}, is gathered whole for {where}, and each device keeps a "
        'part: XLA knows no other way from one sharding to the other ("involuntary full rematerialization"). Lay both '
        "along the same axes, or go through a sharding between them"
    )
