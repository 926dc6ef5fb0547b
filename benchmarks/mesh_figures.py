"""Lay out what `benchmarks.mesh`, `shards` and `mesh_budgets` stored of eight devices.

These are temporaries of a device over plain JAX's, what devices exchange, and which budgets hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]
#: For each kind of collective how many there are, and the bytes that they make.
Moves = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Named:
    """What a step exchanges more than plain JAX.

    Attributes:
        more: the arrays that are more for a line of the model, and the collectives that are more since XLA joins fewer
            arrays in one.
        in_report: how many of them the report of the compiled step names with a line, or as pieces.
        in_plan: how many of them the plan names, by their kind and line, before anything is compiled.
    """

    more: int
    in_report: int
    in_plan: int

    def __str__(self) -> str:
        """How many are named; nothing where nothing is more.

        >>> [str(Named(*each)) for each in ((0, 0, 0), (12, 12, 12), (12, 12, 3), (12, 6, 6))]
        ['', 'all', 'all, 9 in the report alone', '6 of 12']
        """
        if self.in_report < self.more:
            return f"{self.in_report} of {self.more}"
        alone = self.more - self.in_plan
        return "" if not self.more else f"all, {alone} in the report alone" if alone else "all"


def rows_of(file: str) -> list[Row]:
    """The rows that were measured on the host, `mesh`, or for a target, such as `mesh-h100x8`."""
    return json.loads((RESULTS / f"{file}.json").read_text("utf-8"))["rows"]


def cells(file: str) -> Iterator[list[str]]:
    """For each program its plain temporaries, ours in jit and called over these, the collectives of the three, and how
    many of those that are more are named.
    """
    for row in rows_of(file):
        plain, *ours = row["moves"]
        kinds = ", ".join(f"{number} {kind}" for kind, (number, _) in sorted(plain.items()))
        shares = (f"{row[way] / row['plain']:.2f}" for way in ("in_jit", "called"))
        texts = (exchanged(plain, each) for each in ours)
        told = "; ".join(dict.fromkeys(str(Named(**each)) for each in row["named"])) if "named" in row else "not asked"
        yield [row["name"], f"{row['plain'] / 1e6:,.0f} MB", *shares, kinds, *texts, told]


def exchanged(plain: Moves, ours: Moves) -> str:
    """The collectives that are not as plain JAX's, with their bytes over its; "equal" where all are.

    >>> exchanged({"all-reduce": (2, 40), "all-gather": (3, 60)}, {"all-reduce": (3, 50), "all-gather": (6, 60)})
    '6 all-gather, as many bytes; 3 all-reduce, 1.25 of the bytes'
    """
    texts = [f"{ours.get(k, (0, 0))[0]} {k}, {_bytes(k, plain, ours)}" for k in _other(plain, ours)]
    return "; ".join(texts) or "equal"


def _other(plain: Moves, ours: Moves) -> list[str]:
    return [kind for kind in sorted({*plain, *ours}) if tuple(ours.get(kind, (0, 0))) != tuple(plain.get(kind, (0, 0)))]


def _bytes(kind: str, plain: Moves, ours: Moves) -> str:
    sizes = [moves.get(kind, (0, 0))[1] for moves in (plain, ours)]
    if sizes[0] == sizes[1]:
        return "as many bytes"
    return f"{sizes[1] / sizes[0]:.2f} of the bytes" if sizes[0] else "none in plain JAX"


def shares(file: str) -> list[float]:
    """Temporaries over plain JAX's, in jit and called, of each program."""
    return [row[way] / row["plain"] for row in rows_of(file) for way in ("in_jit", "called")]


def error(file: str) -> str:
    """The largest difference of a gradient, relative to the largest number in it."""
    return f"{max(row['error'] for row in rows_of(file)):.0e}"


def more(file: str) -> str:
    """In how many rows devices exchange more bytes than plain JAX's in the user's jit, of how many."""
    rows = rows_of(file)
    sizes = [[sum(size for _, size in each.values()) for each in row["moves"][:2]] for row in rows]
    return f"{sum(ours > plain for plain, ours in sizes)} of {len(rows)}"


def in_shard_map(layers: str) -> list[float]:
    """The temporaries of losses that are one `shard_map`, on eight devices, over plain's."""
    return [row["ours"] / row["plain"] for row in rows_of("shards") if row["name"].endswith(layers)]


def is_met(row: Row) -> bool:
    """Whether a step takes no more than its budget; for rows of `mesh-budgets`."""
    return row["taken"] is not None and row["taken"] <= row["budget"] * row["plain"]


def is_first(row: Row) -> bool:
    """Whether the first plan that was weighed or compiled for it holds the budget, too."""
    return is_met(row) and row["tries"][0][1]


def budgets() -> Iterator[list[str]]:
    """For each way and budget how many rows there are, hold it, and do so at the first plan; and what they take."""
    rows = rows_of("mesh-budgets")
    for way, budget in sorted({(row["way"], row["budget"]) for row in rows}):
        own = [row for row in rows if (row["way"], row["budget"]) == (way, budget)]
        shares = [row["taken"] / row["plain"] for row in own if row["taken"] is not None]
        counts = (len(own), sum(map(is_met, own)), sum(map(is_first, own)))
        yield [f"{way}, budget {budget}", *map(str, counts), f"{min(shares):.2f} to {max(shares):.2f}"]


def held(is_held: Callable[[Row], bool]) -> str:
    """How many of all budgets are held so, such as at the first plan."""
    rows = rows_of("mesh-budgets")
    return f"{sum(map(is_held, rows))} of {len(rows)}"


def gathering(name: str) -> str:
    """The temporaries of FSDP with few rows in one way."""
    rows = json.loads((RESULTS / "shards.json").read_text("utf-8"))["gathers"]
    return f"{next(row['temp_bytes'] for row in rows if row['name'] == name) / 1e6:.2f} MB"
