"""Read the three source folders as text, and complain where they break the rules of the house.

The sources are parsed, never imported. A rule is a generator of complaints; a complaint says where, what is
wrong, and what to do about it. `test_story.py` runs the rules, and plants a fault for each to see it found.

The order of files is the list in each folder's `__init__` docstring, one line per file, four spaces in, below
a line at the margin (without which the formatter takes the four spaces away):

Files, in reading order:

    graph: Hold the joint program as ops and values.

A subfolder is one line of its parent's list, and keeps a list of its own.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

FOLDERS = ("partition", "wrappers", "aot")  # each may import those before it
DOOR = "partition/program/jax/"
INSIDES = ("jaxlib", "jax.extend", "jax.interpreters")
VERSIONS = ("jax.version", "jax.__version__", "jax.__version_info__")
MOST_ENTRIES = 14  # of a folder: a dozen, and a little
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 40

# Confessed exceptions to the caps: "folder/file.py", also a room's `__init__.py`, or "folder/file.py:function": why.
EXCUSED: dict[str, str] = {
    "aot/__init__.py": "the rooms of a call, of features and of tools, as the design names them: 17",
}

LISTED = re.compile(r"^ {4}(\w+): ([A-Z].*[.?])$", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


# ---------------------------------------------------------------- what the rules look at


@dataclass(frozen=True)
class Source:
    """One source file: its path from the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def doc(self) -> str:
        return (ast.get_docstring(self.tree, clean=False) or "").lstrip()

    @property
    def sentence(self) -> str:
        """The first line of the docstring: what the list of its folder quotes."""
        return self.doc.partition("\n")[0].rstrip()

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]

    @property
    def module(self) -> str:
        return "jointcut." + self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    @cached_property
    def typing_lines(self) -> frozenset[int]:
        """Lines under `if TYPE_CHECKING:`."""
        tests = [node for node in self.tree.body if isinstance(node, ast.If)]
        alone = [node for node in tests if ast.unparse(node.test) == "TYPE_CHECKING"]
        return frozenset(n for node in alone for n in range(node.lineno, (node.end_lineno or 0) + 1))

    @property
    def imports(self) -> Iterator["Import"]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    bound = (alias.asname, alias.name) if alias.asname else (first, first)
                    yield Import(node, alias.name, *bound)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module + "." if node.module else "")
                for alias in node.names:
                    yield Import(node, base + alias.name, alias.asname or alias.name, base + alias.name)


@dataclass(frozen=True)
class Import:
    """One imported name, dots included; `import jax.numpy as jnp` binds jnp, which means jax.numpy."""

    node: ast.stmt
    name: str
    binds: str
    means: str

    @property
    def line(self) -> int:
        return self.node.lineno


@dataclass(frozen=True)
class House:
    """All sources of the three folders, and the order in which they are read."""

    sources: tuple[Source, ...]

    @cached_property
    def modules(self) -> dict[str, Source]:
        return {source.module: source for source in self.sources}

    @cached_property
    def order(self) -> dict[str, int]:
        """Module -> position: folders along the arrow, files as listed, `__init__` after its own files."""
        names = [name for folder in FOLDERS for name in self._walk(f"jointcut.{folder}")]
        return {name: position for position, name in enumerate(names)}

    def listed(self, module: str) -> dict[str, str]:
        """File -> sentence, as the docstring of a package lists them; nothing if the module is no package."""
        source = self.modules.get(module)
        return dict(LISTED.findall(source.doc)) if source and source.is_package else {}

    def _walk(self, module: str) -> Iterator[str]:
        for name in self.listed(module):
            yield from self._walk(f"{module}.{name}")
        yield module

    def own_imports(self, source: Source) -> Iterator[tuple[int, str]]:
        """Yield (line, module) for each module of this house that `source` imports, wherever it does."""
        for item in source.imports:
            name = item.name
            while name and name not in self.modules:
                name = name.rpartition(".")[0]
            if name:
                yield item.line, name


@cache
def house_at(root: Path) -> House:
    """Read every source below the three folders of `root`, once."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return House(tuple(Source(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths))


# ---------------------------------------------------------------- rule 1: folders, one arrow


def folders_follow_the_arrow(house: House) -> Iterator[str]:
    for source in house.sources:
        allowed = FOLDERS[: FOLDERS.index(source.folder) + 1]
        for line, module in house.own_imports(source):
            folder = module.split(".")[1]
            if folder not in allowed:
                yield (
                    f"{source.path}:{line}: imports {module}, against aot -> wrappers -> partition; "
                    f"move what you need down into {source.folder}/, or this code up into {folder}/"
                )


def own_imports_are_absolute(house: House) -> Iterator[str]:
    for source in house.sources:
        for item in source.imports:
            if item.name.split(".")[0] in ("", *FOLDERS):
                cure = "jointcut." + item.name.lstrip(".")
                yield f"{source.path}:{item.line}: imports {item.name}; write the full name, like {cure}"


def own_imports_stand_at_the_top(house: House) -> Iterator[str]:
    for source in house.sources:
        inside = {id(node) for function in source.functions for node in ast.walk(function)}
        for item in source.imports:
            if id(item.node) in inside and item.name.split(".")[0] == "jointcut":
                yield (
                    f"{source.path}:{item.line}: imports {item.name} inside a function; import at the top, "
                    "and if that makes a cycle, move the shared part into a file above both"
                )


# ---------------------------------------------------------------- rule 2: files, one list


def every_file_is_listed(house: House) -> Iterator[str]:
    for folder in FOLDERS:
        if f"jointcut.{folder}" not in house.modules:
            yield f"{folder}/__init__.py: missing; write one whose docstring lists the files of {folder}/"
    for source in house.sources:
        if source.module not in house.order:
            parent, _, name = source.module.rpartition(".")
            init = parent.removeprefix("jointcut.").replace(".", "/") + "/__init__.py"
            line = f"    {name}: {source.sentence or 'Its first docstring line.'}"
            yield f"{source.path}: not listed; add the line `{line}` to the docstring of {init}"


def rooms_are_small(house: House) -> Iterator[str]:
    for source in house.sources:
        entries = len(house.listed(source.module))
        if entries > MOST_ENTRIES and source.path not in EXCUSED:
            yield f"{source.path}: lists {entries} entries, at most {MOST_ENTRIES}; give some a room of their own"


def every_listed_file_exists(house: House) -> Iterator[str]:
    for source in house.sources:
        for name in house.listed(source.module):
            if f"{source.module}.{name}" not in house.modules:
                yield f"{source.path}: lists {name}, which is not there; take out the line, or write the file"


def the_list_quotes_first_lines(house: House) -> Iterator[str]:
    for source in house.sources:
        for name, sentence in house.listed(source.module).items():
            file = house.modules.get(f"{source.module}.{name}")
            if file and file.sentence != sentence:
                yield (
                    f"{source.path}: lists {name} as {sentence!r}, but {file.path} opens with "
                    f"{file.sentence!r}; make the two the same"
                )


def files_import_only_from_above(house: House) -> Iterator[str]:
    for source in house.sources:
        for line, module in house.own_imports(source):
            if source.module not in house.order or module not in house.order:
                continue  # every_file_is_listed speaks of these
            if line in source.typing_lines:
                continue  # a record may say of which type it holds what makes it; nothing is imported when it runs
            same_folder = module.split(".")[1] == source.folder
            if same_folder and house.order[module] >= house.order[source.module]:
                yield (
                    f"{source.path}:{line}: imports {module}, which is not above it in the list of "
                    f"{source.folder}/__init__.py; reorder the list, or move the shared part up"
                )


# ---------------------------------------------------------------- rule 3: one door to JAX's insides


def only_the_door_opens_jax(house: House) -> Iterator[str]:
    for source in house.sources:
        if source.path.startswith(DOOR):
            continue
        bound = {item.binds: item.means for item in source.imports}
        chains = (node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute))
        reached = {(node.lineno, dotted(node, bound)) for node in chains}
        reached |= {(item.line, item.name) for item in source.imports}
        for line, name in sorted(reached):
            if is_inside_jax(name):
                yield (
                    f"{source.path}:{line}: reaches {name}; only {DOOR} may touch JAX's insides or its "
                    "version: give it a function that does this, and call that"
                )


def dotted(node: ast.expr, bound: dict[str, str]) -> str:
    """Spell out a chain of attributes: `j.extend.core` is `jax.extend.core` where `j` is bound to jax."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    root = bound.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([root, *reversed(parts)]) if root else ""


def is_inside_jax(name: str) -> bool:
    first, *rest = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in rest)
    return (first == "jax" and private) or any(f"{name}.".startswith(f"{door}.") for door in INSIDES + VERSIONS)


# ---------------------------------------------------------------- caps, docstrings, types


def files_are_short(house: House) -> Iterator[str]:
    for source in house.sources:
        if source.lines > MOST_FILE_LINES and source.path not in EXCUSED:
            yield f"{source.path}: {source.lines} lines, at most {MOST_FILE_LINES}; split the two ideas"


def function_lines(function: Function) -> int:
    """Count a function's lines from `def` to its end, its docstring left out."""
    doc = function.body[0] if ast.get_docstring(function) is not None else None
    doc_lines = (doc.end_lineno or 0) - doc.lineno + 1 if doc else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc_lines


def functions_are_short(house: House) -> Iterator[str]:
    for source in house.sources:
        for function in source.functions:
            lines = function_lines(function)
            if lines > MOST_FUNCTION_LINES and f"{source.path}:{function.name}" not in EXCUSED:
                yield (
                    f"{source.path}:{function.lineno}: {function.name} has {lines} lines without its "
                    f"docstring, at most {MOST_FUNCTION_LINES}; give its steps names of their own"
                )


def excuses_are_needed(house: House) -> Iterator[str]:
    needed = {source.path for source in house.sources if source.lines > MOST_FILE_LINES}
    needed |= {
        f"{source.path}:{function.name}"
        for source in house.sources
        for function in source.functions
        if function_lines(function) > MOST_FUNCTION_LINES
    }
    needed |= {source.path for source in house.sources if len(house.listed(source.module)) > MOST_ENTRIES}
    for where in sorted(EXCUSED.keys() - needed):
        yield f"EXCUSED names {where}, which needs no excuse; take out the line"


def public_names_have_docstrings(house: House) -> Iterator[str]:
    for source in house.sources:
        if not source.sentence.endswith((".", "?")):
            yield f"{source.path}: opens with {source.sentence!r}; open with a sentence in a docstring"
        for node, name in public_names(source.tree):
            if not ast.get_docstring(node) and not is_explained_elsewhere(node):
                yield f"{source.path}:{node.lineno}: {name} has no docstring; say what it is for, or hide it"


def public_names(scope: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[Definition, str]]:
    for node in scope.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node, prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from public_names(node, f"{prefix}{node.name}.")


def is_explained_elsewhere(node: Definition) -> bool:
    """Say whether another definition carries the docstring: of an overload, a setter, an override."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(decorators & {"overload", "setter", "override"})


def everything_is_typed(house: House) -> Iterator[str]:
    for source in house.sources:
        classes = (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))
        methods = {id(node) for owner in classes for node in owner.body}
        for function in source.functions:
            if parts := untyped_parts(function, id(function) in methods):
                yield f"{source.path}:{function.lineno}: {function.name} leaves {', '.join(parts)} untyped"


def untyped_parts(function: Function, is_method: bool) -> list[str]:
    spec = function.args
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    positional = [*spec.posonlyargs, *spec.args][1 if is_method and not static else 0 :]
    starred = [argument for argument in (spec.vararg, spec.kwarg) if argument]
    parts = [arg.arg for arg in [*positional, *spec.kwonlyargs, *starred] if arg.annotation is None]
    return parts if function.returns else [*parts, "the return"]


RULES: tuple[Callable[[House], Iterator[str]], ...] = (
    folders_follow_the_arrow,
    own_imports_are_absolute,
    own_imports_stand_at_the_top,
    every_file_is_listed,
    rooms_are_small,
    every_listed_file_exists,
    the_list_quotes_first_lines,
    files_import_only_from_above,
    only_the_door_opens_jax,
    files_are_short,
    functions_are_short,
    excuses_are_needed,
    public_names_have_docstrings,
    everything_is_typed,
)
