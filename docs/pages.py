"""Write the pages that follow from the sources: the reference by task, the command line, the order of reading.

Nothing here repeats what a docstring says: a page names classes and functions, and Sphinx's autodoc puts their
docstrings in. `tasks` says which names belong together.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import click
from docstrings import attributes_of, markup
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import object_description
from sphinx.util.typing import get_type_hints, stringify_annotation
from tasks import TASKS, Task

from jointcut.aot import derivatives
from jointcut.aot.command import main
from jointcut.partition import errors

#: The three folders in the order in which they are read, each with what its list says of it.
FOLDERS = {
    "partition": "It stands on its own: it takes any joint jaxpr, and knows nothing of the trees that a caller passes.",
    "wrappers": "What lies between the caller's convention and plain arrays. To use jointcut nothing of it is needed; "
    "it is for those who write a wrapper of their own, or read what `Cut.metadata` says.",
    "aot": "What a user imports: `from jointcut import aot`.",
}
_READING = (
    "The code is written to be read from top to bottom. A file opens with a sentence that says what it does, and uses "
    "only what stands above it in these lists; whoever follows them meets nothing that was not explained before."
)
_BY_TASK = "All public names, by what one does with them. A name leads to what it takes and returns."
_RECORDS = (
    "A class without parentheses is a frozen dataclass: the attributes that stand first, in their order, are what its "
    "constructor takes."
)
_LISTED = re.compile(r"^ {4}(\w+): ([A-Z].*[.?])$", re.MULTILINE)
_SENTENCE = re.compile(r".*?[.?](?=\s|$)", re.DOTALL)
Origin = tuple[str | None, str | None]  # the module in which something is made, and its name there
# What of a class is shown: all that is public, and how it is called; what it has from Python's own classes is not.
_MEMBERS = (
    ":members:",
    ":undoc-members:",
    ":inherited-members: Enum,tuple,str,int",
    ":special-members: __call__,__iter__,__len__",
)


@dataclass(frozen=True)
class Listed:
    """One line of a folder's list: a module, the sentence that it opens with, and how deep it lies."""

    module: str
    sentence: str
    depth: int

    @property
    def line(self) -> str:
        """Its item in a list of reStructuredText."""
        name = self.module.split(".", 2)[2]
        return f"{'  ' * self.depth}* ``{name}``: {markup(self.sentence)}"


def pages() -> dict[str, str]:
    """The text of every page that is made of the sources, by its path."""
    if lost := sorted(set(offered()) - {name for task in TASKS for name in task.names}):
        raise ValueError(f"{', '.join(lost)} is public and stands in no task: give it a place in docs/tasks.py")
    made = {"order-of-reading.rst": _order_of_reading(), "command-line.rst": _command_line()}
    made |= {"api/index.rst": _by_task(), "api/errors.rst": _errors(), "api/derivatives.rst": _derivatives()}
    met: set[Origin] = {_origin(item_of(name)) for task in TASKS for name in task.names}
    return made | {f"api/{task.slug}.rst": _page(task, met) for task in TASKS}


# ------------------------------------------------------------------------------------------------ what is documented


def listed(folder: str, depth: int = 0) -> Iterator[Listed]:
    """The files of a folder in reading order, those of a subfolder below it."""
    package = f"jointcut.{folder}"
    for name, sentence in _LISTED.findall(import_module(package).__doc__ or ""):
        yield Listed(f"{package}.{name}", sentence, depth)
        yield from listed(f"{folder}.{name}", depth + 1)


def public(module: ModuleType) -> list[str]:
    """The names that a folder offers: its `__all__`, or what its `__init__` brings in that is no module."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return list(names)
    return sorted(name for name, item in vars(module).items() if name[0] != "_" and not inspect.ismodule(item))


def offered() -> list[str]:
    """The public names of the three folders as `aot.function`, without the errors, which have a page of their own."""
    names = [f"{folder}.{name}" for folder in FOLDERS for name in public(import_module(f"jointcut.{folder}"))]
    return [name for name in names if not _is_error(item_of(name))]


def item_of(name: str) -> Any:
    """What a public name, such as `aot.function`, stands for."""
    folder, _, own = name.rpartition(".")
    return getattr(import_module(f"jointcut.{folder}"), own)


def _is_error(item: Any) -> bool:
    return inspect.isclass(item) and issubclass(item, BaseException)


def _origin(item: Any) -> Origin:
    return getattr(item, "__module__", None), getattr(item, "__name__", None)


def met_in(item: Any) -> Iterator[type]:
    """Our classes that a function, or what is public of a class, takes or returns, in order."""
    own = [value for name, value in vars(item).items() if name[0] != "_"] if inspect.isclass(item) else []
    for each in (item, *own):
        function = each.fget if isinstance(each, property) else getattr(each, "func", each)
        if inspect.isfunction(function) or inspect.isclass(function):
            yield from (found for hint in get_type_hints(function).values() for found in _classes(hint))


def _classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and hint.__module__.startswith("jointcut."):
        yield hint
    for inner in get_args(hint):
        yield from _classes(inner)


def sentence(name: str) -> str:
    """The first sentence of what is said of a public name, on one line, in reStructuredText."""
    words = _comment(name) or inspect.getdoc(item_of(name)) or ""
    found = _SENTENCE.match(words)
    return markup(" ".join((found[0] if found else words).split()))


def _comment(name: str) -> str:
    """What stands in a comment above a constant, where it is made."""
    if callable(item_of(name)):
        return ""
    own = name.rpartition(".")[2]
    for module in sorted(found for found in sys.modules if found.startswith("jointcut.")):
        if hasattr(sys.modules[module], own) and (
            said := ModuleAnalyzer.for_module(module).find_attr_docs().get(("", own))
        ):
            return "\n".join(said).strip()
    return ""


# ------------------------------------------------------------------------------------------------------- the pages


def _titled(title: str, *parts: str, under: str = "=") -> str:
    return "\n\n".join([f"{title}\n{under * len(title)}", *filter(None, parts)]) + "\n"


def _line(name: str) -> str:
    """A public name as one item of a list: a link, and its sentence."""
    return f"* :py:obj:`{name} <jointcut.{name}>`: {sentence(name)}"


def _by_task() -> str:
    """The first page of the reference: each task with its names."""
    parts = [_BY_TASK]
    for task in TASKS:
        parts.append(_titled(task.title, f"{markup(task.sentence)} :doc:`More <{task.slug}>`.", under="-"))
        parts.append("\n".join(map(_line, task.names)))
    others = {
        "derivatives": "Functions with JAX's names and values, whose derivatives stay finite.",
        "errors": "What each error and warning means, and what to do.",
        "/command-line": "`jointcut explain`, `diff`, `largest`, `doctor`, `export`, `show` and `cache`.",
    }
    slugs = [*(task.slug for task in TASKS), "derivatives", "errors"]
    tree = ".. toctree::\n   :hidden:\n\n" + "\n".join(f"   {slug}" for slug in slugs)
    more = "\n".join(f"* :doc:`{name}`: {markup(words)}" for name, words in others.items())
    return _titled("The reference, by task", *parts, _titled("Functions, errors, commands", more, under="-"), tree)


def _page(task: Task, met: set[Origin]) -> str:
    """A task: its guides, its names at a glance, each with all that is said of it, and the records that they give.

    `met` has all that stands on some page already, and grows by what this one shows.
    """
    guides = ", ".join(f":doc:`/{guide}`" for guide in task.guides)
    shown = [_shown(name) for name in task.names]
    records = []
    for name in task.names:
        for record in met_in(item_of(name)):
            if _origin(record) not in met and not _is_error(record):
                met.add(_origin(record))
                records.append(_as_class(record, f"{record.__module__}.{record.__qualname__}"))
    given = _titled("What these take and return", *records, under="-") if records else ""
    opening = f"{markup(task.sentence)} Told in {guides}."
    return _titled(task.title, opening, "\n".join(map(_line, task.names)), _RECORDS, *shown, given)


def _shown(name: str) -> str:
    """The directive that shows one class, function or constant."""
    item, whole = item_of(name), f"jointcut.{name}"
    if not callable(item):
        return f".. py:data:: {whole}\n\n   " + markup(_comment(name)).replace("\n", "\n   ")
    return _as_class(item, whole) if inspect.isclass(item) else f".. autofunction:: {whole}"


def _as_class(item: type, whole: str) -> str:
    own = _fields(item)
    options = [f"   {option}" for option in (*_MEMBERS, f":exclude-members: {','.join(own)}")]
    return "\n".join([f".. autoclass:: {whole}", *options, *own.values()])


def _fields(record: type) -> dict[str, str]:
    """The fields of a dataclass as directives, each with its type, its default, and what the class says of it.

    Autodoc would find no words for them: they stand in the docstring of the class, under `Attributes`.
    """
    if not is_dataclass(record):
        return {}
    hints, told = get_type_hints(record), attributes_of(record)
    public_ones = [field for field in fields(record) if field.name[0] != "_"]
    return {field.name: _field(field, hints[field.name], told.get(field.name, "")) for field in public_ones}


def _field(field: Field[Any], hint: Any, words: str) -> str:
    lines = ["", f".. py:attribute:: {field.name}", f"   :type: {stringify_annotation(hint, 'smart')}"]
    if field.default is not MISSING:
        lines.append(f"   :value: {object_description(field.default)}")
    return "\n   ".join([*lines, "", f"   {words}"])


def _errors() -> str:
    """All errors and warnings, those that `aot` offers under that name."""
    names = [name for name, item in vars(errors).items() if _is_error(item) and item.__module__ == errors.__name__]
    ours = set(public(import_module("jointcut.aot")))
    wholes = [f"jointcut.aot.{name}" if name in ours else f"{errors.__name__}.{name}" for name in names]
    about = f".. automodule:: {errors.__name__}\n   :no-index:"
    return _titled("Errors", about, *(f".. autoexception:: {whole}\n   :show-inheritance:" for whole in wholes))


def _derivatives() -> str:
    """The functions of `aot.derivatives`, by the rooms that make them, in their order."""
    rooms: dict[str, list[str]] = {}
    for module in (derivatives, derivatives.linalg):
        for name in public(module):
            room = getattr(module, name).__module__.removeprefix(f"{derivatives.__name__}.").partition(".")[0]
            rooms.setdefault(room, []).append(f"{module.__name__}.{name}")
    parts = []
    for each in (each for each in listed("aot.derivatives") if each.module.rpartition(".")[2] in rooms):
        room = each.module.rpartition(".")[2]
        shown = [f".. autofunction:: {whole}" for whole in rooms[room]]
        parts.append(_titled(room.capitalize(), markup(each.sentence), *shown, under="-"))
    return _titled("Derivatives that stay finite", f".. automodule:: {derivatives.__name__}", *parts)


# ------------------------------------------------------------------------------------------ files, and the command line


def _order_of_reading() -> str:
    """Every file with its sentence, in the order in which the code is read."""
    parts = []
    for folder, note in FOLDERS.items():
        opening = markup((import_module(f"jointcut.{folder}").__doc__ or "").partition("\n")[0])
        parts.append(_titled(f"{folder}/", opening, markup(note), _items(list(listed(folder))), under="-"))
    return _titled("The order of reading", _READING, *parts)


def _items(files: list[Listed]) -> str:
    """A list of files, with the empty lines that reStructuredText wants where the depth changes."""
    out, deep = [], 0
    for file in files:
        out += [file.line] if file.depth == deep else ["", file.line]
        deep = file.depth
    return "\n".join(out)


def _command_line() -> str:
    """The help of every command, as the commands themselves give it."""
    return _titled("The command line", *_helps(main, None, "jointcut"))


def _helps(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    context = command.make_context(name, ["--help"], parent, resilient_parsing=True)
    lines = command.get_help(context).splitlines()
    text = "\n".join(f"   {line}".rstrip() for line in lines)
    yield _titled(context.command_path, f".. code-block:: none\n\n{text}", under="-")
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None:
                yield from _helps(found, context, inner)
