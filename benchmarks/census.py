"""Count what the product is made of, by reading its files: lines, imports, entries of folders, names that stand twice.

    python -m benchmarks.census             # the house's table
    python -m benchmarks.census --by-room   # lines of each room and their change against main: `make lint` prints them

The product may have as many lines as `product_lines` in `pyproject.toml` says, and no more: a change that needs more
raises the number, and its line in the changelog says for what. Nothing is imported of the product.
"""

import argparse
import ast
import io
import subprocess
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDERS = ("aot", "partition", "wrappers")
MANY = 8  # rooms that a room imports; more are told by name


@dataclass(frozen=True)
class File:
    """One file of the product: its path from the root, and its text."""

    path: str
    text: str

    @property
    def folder(self) -> str:
        """The folder that it lies in."""
        return self.path.rpartition("/")[0]

    @property
    def room(self) -> str:
        """The room that it belongs to: `aot/loops` for all below it, the file itself directly in a top folder."""
        return room_of(self.path)

    @property
    def module(self) -> str:
        """Its name for imports, without `jointcut.`."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """All of its lines."""
        return len(self.text.splitlines())

    @cached_property
    def kinds(self) -> Counter[str]:
        """Its lines by kind; what lies in a docstring is of the docstring, blank or not."""
        docs, imports = set[int](), set[int]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports |= _span(node)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                docs |= _span(node.body[0])
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        remarks = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}
        kinds = (
            dict.fromkeys(docs, "docstrings") | dict.fromkeys(imports, "imports") | dict.fromkeys(remarks, "comments")
        )
        lines = enumerate(self.text.splitlines(), 1)
        return Counter(kinds.get(n, "code" if line.strip() else "blank") for n, line in lines)

    @property
    def imports(self) -> set[str]:
        """The names of this product that it imports, without `jointcut.`."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module]
        names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        return {name.removeprefix("jointcut.") for name in names if name.startswith("jointcut.")}


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census", description=__doc__.partition("\n")[0])
    parser.add_argument("--by-room", action="store_true", help="lines of each room, and their change against main")
    console = Console(width=120, highlight=False)
    if parser.parse_args().by_room:
        console.print(by_room(files()))
        console.print(verdict(sum(file.lines for file in files()), allowed()), soft_wrap=True)
    else:
        console.print(house_table(files()))


def files(root: Path = ROOT) -> list[File]:
    """The files of the product."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [File(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


def room_of(path: str) -> str:
    """`aot/loops` for `aot/loops/sweep/steps.py`, `aot/tape.py` for itself."""
    return "/".join(path.split("/")[:2])


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


# -------------------------------------------------------------------------------------------------------- the ratchet


def allowed(root: Path = ROOT) -> int:
    """The most lines that the product may have."""
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["jointcut"]["product_lines"]


def verdict(lines: int, most: int) -> str:
    """What is to be done about the number of lines."""
    if lines > most:
        cure = f"take out {lines - most}, or set product_lines = {lines} and say in CHANGELOG.md what they buy"
        return f"The product has {lines} lines, and pyproject.toml allows {most}: {cure}."
    held = f"The product has {lines} lines of the {most} that pyproject.toml allows"
    return f"{held}; set product_lines = {lines}, so that they stay away." if lines < most else f"{held}."


def by_room(files: Sequence[File]) -> Table:
    """Lines of each room, and how many came or went since main where git knows it."""
    counts, change = Counter[str](), changes()
    for file in files:
        counts[file.room] += file.lines
    table = Table("room", box=box.SIMPLE_HEAD)
    for heading in ("lines", "against main"):
        table.add_column(heading, justify="right")
    for room in sorted({*counts, *change}):
        table.add_row(room, str(counts[room]), "" if not change.get(room) else f"{change[room]:+}")
    total = "unknown" if not change and main_branch() is None else f"{sum(change.values()):+}"
    table.add_row("all", str(counts.total()), total)
    return table


def changes() -> Mapping[str, int]:
    """Lines added less lines taken out since main, by room; nothing where git does not know it."""
    base, counts = main_branch(), Counter[str]()
    if base is None:
        return counts
    for line in _git("diff", "--numstat", "--no-renames", base, "--", *FOLDERS).splitlines():
        added, gone, path = line.split("\t")
        if path.endswith(".py"):
            counts[room_of(path)] += int(added) - int(gone)
    for path in _git("ls-files", "--others", "--exclude-standard", "--", *FOLDERS).splitlines():
        if path.endswith(".py"):
            counts[room_of(path)] += len((ROOT / path).read_text("utf-8").splitlines())
    return counts


def main_branch() -> str | None:
    """The commit at which this work left main, as the server has it or else as it is here."""
    for name in ("origin/main", "main"):
        if base := _git("merge-base", "HEAD", name).strip():
            return base
    return None


def _git(*words: str) -> str:
    """What git prints; nothing where there is no git, no repository or no such branch."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


# ------------------------------------------------------------------------------------------------------ the whole house


def house_table(files: Sequence[File]) -> Table:
    """One line for each thing that is counted."""
    table = Table("what", "how many", box=box.SIMPLE_HEAD)
    for name, figure in house_rows(files):
        table.add_row(name, figure)
    return table


def house_rows(files: Sequence[File]) -> Iterator[tuple[str, str]]:
    """Files and lines by kind, arrows between rooms, who imports most, full folders, names that stand twice."""
    kinds = sum((file.kinds for file in files), Counter[str]())
    sizes = sorted(file.lines for file in files)
    yield "files", f"{len(files)}: median {sizes[len(sizes) // 2]} lines, largest {sizes[-1]}"
    yield "lines", f"{kinds.total()}: {_listed(kinds.most_common())}"
    reached = arrows(files)
    for folder in FOLDERS:
        inside = sum(f"{folder}/" in there for here, rooms in reached.items() for there in rooms if folder in here)
        yield f"arrows between rooms of {folder}/", str(inside)
    busy = [(room, len(rooms)) for room, rooms in reached.items() if len(rooms) > MANY]
    yield f"rooms that import more than {MANY}", f"{len(busy)}: {_listed(sorted(busy, key=lambda r: (-r[1], r[0])))}"
    importing = Counter({file.path: len({_owner(name, files) for name in file.imports}) for file in files})
    yield "files that import most files", _listed(importing.most_common(5))
    entries = Counter(e.rpartition("/")[0] for e in {file.path.removesuffix("/__init__.py") for file in files})
    yield "folders with most entries", _listed((f, n) for f, n in entries.most_common(5) if f)
    twice = {"file": Counter(Path(file.path).name for file in files if Path(file.path).stem != "__init__")}
    twice["class"] = Counter(
        node.name for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)
    )
    for kind, names in twice.items():
        several = [(name, n) for name, n in names.most_common() if n > 1]
        yield f"{kind} names that stand twice", f"{len(several)}: {_listed(several[:8])}{', …' * (len(several) > 8)}"


def arrows(files: Sequence[File]) -> dict[str, set[str]]:
    """For each room the other rooms that its files import from."""
    found: dict[str, set[str]] = {file.room: set() for file in files}
    for file in files:
        found[file.room] |= {room_of(_owner(name, files)) for name in file.imports}
    return {room: rooms - {room} for room, rooms in found.items()}


def _owner(name: str, files: Sequence[File]) -> str:
    """The path of the file that an imported name comes from."""
    known = {file.module: file.path for file in files}
    return next(known[part] for n in count() if (part := name.rsplit(".", n)[0]) in known)


def _listed(pairs: Iterable[tuple[str, int]]) -> str:
    """`stages 28, tape 19`."""
    return ", ".join(f"{name} {number}" for name, number in pairs)


if __name__ == "__main__":
    main()
