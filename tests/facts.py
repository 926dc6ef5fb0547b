"""Count the places outside the table of primitives that name primitives: private tables, and comparisons of names.

    PYTHONPATH=tests:. python -m facts        # how many, and where; of another checkout: python -m facts FOLDER

A private table is a set, tuple or list of names. Functions or positions of operands by name are rules, not facts, and
no table. `partition/test_primitives.py` keeps the list of private tables that are left.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house import House, Source, house_at
from jointcut.partition.program.primitives import TABLE

DISPLAY = ast.Set | ast.Tuple | ast.List
HOME = "partition/program/primitives.py"

#: Names that are words of other trades too: a display of these alone says nothing of primitives.
ELSEWHERE = frozenset({"copy", "get", "max", "min", "name", "sort", "split", "sum"})


@dataclass(frozen=True)
class Found:
    """One display or comparison: where, and its text."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def strings(node: ast.AST) -> list[str]:
    """The strings that a display, or a constant, holds."""
    items = node.elts if isinstance(node, DISPLAY) else [node]
    return [x.value for x in items if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def tables(source: Source) -> Iterator[Found]:
    """The private tables of a file."""
    compared = {id(side) for node in compares(source) for side in node.comparators}
    for node in ast.walk(source.tree):
        if isinstance(node, DISPLAY) and id(node) not in compared:
            names = strings(node)
            known = [name for name in names if name in TABLE]
            if len(known) > 1 and len(known) > len(names) / 2 and not ELSEWHERE.issuperset(known):
                yield Found(source.path, node.lineno, ast.unparse(node))


def comparisons(source: Source) -> Iterator[Found]:
    """The comparisons of a file with names of primitives."""
    for node in compares(source):
        names = [name for side in (node.left, *node.comparators) for name in strings(side)]
        if names and all(name in TABLE for name in names):
            yield Found(source.path, node.lineno, ast.unparse(node))


def compares(source: Source) -> list[ast.Compare]:
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.Compare)]


def counted(house: House) -> tuple[list[Found], list[Found]]:
    """The private tables and the comparisons of all sources but the table itself."""
    sources = [source for source in house.sources if source.path != HOME]
    return [x for s in sources for x in tables(s)], [x for s in sources for x in comparisons(s)]


def main() -> None:
    """Print both lists and their lengths."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for what, found in zip(("private tables", "comparisons"), counted(house_at(root)), strict=True):
        lines = [*map(str, found), f"{what}: {len(found)} in {len({x.path for x in found})} files"]
        sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
