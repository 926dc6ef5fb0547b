"""Read the programs of README and docs, and run them.

A fence of Python that imports `aot` begins a program, and the fences after it go on with it. A fence of text that
follows one at once is what it prints.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from jointcut import aot

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BEGINS = "from jointcut import aot\n"
_FENCE = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"^##? (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """One fence: the line that it starts at, its code, and what stands below as printed, if anything does."""

    line: int
    code: str
    printed: str | None


@dataclass(frozen=True)
class Example:
    """One program of a page, under the title that stands above its first fence."""

    page: Path
    title: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.page.stem}: {self.title}"

    @property
    def code(self) -> str:
        """All of it."""
        return "\n".join(part.code for part in self.parts)

    @property
    def imports(self) -> set[str]:
        """What it imports, by the first part of the name."""
        nodes = list(ast.walk(ast.parse(self.code)))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        return {name.partition(".")[0] for name in names}


def examples(page: Path) -> Iterator[Example]:
    """The programs of a page, in order."""
    text, parts, title = page.read_text("utf-8"), [], ""
    for found in _FENCE.finditer(text):
        if parts and BEGINS in found["code"]:
            yield Example(page, title, tuple(parts))
            parts = []
        if not parts:
            title = _TITLE.findall(text[: found.start()])[-1]
        parts.append(Part(text[: found.start("code")].count("\n"), found["code"], found["printed"]))
    if parts:
        yield Example(page, title, tuple(parts))


def run(example: Example) -> list[str]:
    """Run a program as it stands; return what is printed otherwise than the page says."""
    space, complaints = {"__name__": "example"}, []
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' own
        warnings.simplefilter("error", aot.UncutWarning)
        for part in example.parts:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * part.line + part.code, str(example.page), "exec"), space)
            if part.printed is not None and not _is_same(part.printed, out.getvalue()):
                complaints.append(f"{example.page}:{part.line}: prints\n{out.getvalue()}and not\n{part.printed}")
    return complaints


def _is_same(told: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(told, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
