"""Write the pages that follow from the sources: the reference, the command line, the order of reading.

Nothing here repeats what a docstring says: a page names modules, classes and functions, and Sphinx's autodoc puts
their docstrings in. The lists of the `__init__` files are the table of contents.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import click
from docstrings import attributes_of, markup
from sphinx.util.inspect import object_description
from sphinx.util.typing import get_type_hints, stringify_annotation

from jointcut.aot.command import main
from jointcut.partition import errors

#: The three folders in the order in which they are read, each with what its page says of it.
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
_RECORDS = (
    "A class without parentheses is a frozen dataclass: the attributes that stand first, in their order, are what its "
    "constructor takes."
)
_LISTED = re.compile(r"^ {4}(\w+): ([A-Z].*[.?])$", re.MULTILINE)
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
    def page(self) -> str:
        """Where its page is, from the root of the site and without a suffix."""
        return "files/" + self.title.replace(".", "/")

    @property
    def title(self) -> str:
        """What it is called where its folder is not told: `aot.cache.folder`."""
        return self.module.removeprefix("jointcut.")

    @property
    def line(self) -> str:
        """Its item in a list of reStructuredText."""
        name = self.title.partition(".")[2]
        return f"{'  ' * self.depth}* :doc:`{name} </{self.page}>`: {markup(self.sentence)}"


def pages() -> dict[str, str]:
    """The text of every page that is made of the sources, by its path."""
    made = {"how-it-works.rst": _how_it_works(), "command-line.rst": _command_line(), "api/errors.rst": _errors()}
    made |= {f"api/{folder}.rst": _folder(folder) for folder in FOLDERS}
    files, offered = [file for folder in FOLDERS for file in listed(folder)], _offered()
    around = zip([None, *files[:-1]], files, [*files[1:], None], strict=True)
    return made | {f"{file.page}.rst": _file(file, offered, before, after) for before, file, after in around}


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


def defined(module: ModuleType) -> list[str]:
    """The public classes and functions that a file makes itself, in its own order."""
    own = {name: item for name, item in vars(module).items() if name[0] != "_" and callable(item)}
    return [name for name, item in own.items() if _origin(item) == (module.__name__, name)]


def _origin(item: Any) -> Origin:
    return getattr(item, "__module__", None), getattr(item, "__name__", None)


def _offered() -> dict[Origin, str]:
    """Where the folders offer what their files make: the public name, by the file and the name there."""
    found: dict[Origin, str] = {(errors.__name__, name): f"{errors.__name__}.{name}" for name in _error_names()}
    for folder in FOLDERS:
        module = import_module(f"jointcut.{folder}")
        found |= {_origin(getattr(module, name)): f"{module.__name__}.{name}" for name in public(module)}
    return found


def _error_names() -> list[str]:
    return [name for name in defined(errors) if inspect.isclass(getattr(errors, name))]


# ------------------------------------------------------------------------------------------------------- the pages


def _titled(title: str, *parts: str, under: str = "=") -> str:
    return "\n\n".join([f"{title}\n{under * len(title)}", *filter(None, parts)]) + "\n"


def _items(files: list[Listed]) -> str:
    """A list of files, with the empty lines that reStructuredText wants where the depth changes."""
    out, deep = [], 0
    for file in files:
        out += [file.line] if file.depth == deep else ["", file.line]
        deep = file.depth
    return "\n".join(out)


def _shown(module: ModuleType, name: str) -> str:
    """The directive that shows one class, function or constant."""
    item, whole = getattr(module, name), f"{module.__name__}.{name}"
    if not callable(item):
        return f".. autodata:: {whole}\n   :no-value:"
    if not inspect.isclass(item):
        return f".. autofunction:: {whole}"
    if issubclass(item, BaseException):
        return f".. autoexception:: {whole}\n   :show-inheritance:"
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


def _how_it_works() -> str:
    """The order of reading, which is the tutorial."""
    parts = []
    for folder, note in FOLDERS.items():
        opening = markup((import_module(f"jointcut.{folder}").__doc__ or "").partition("\n")[0])
        parts.append(_titled(f"{folder}/", opening, markup(note), _items(list(listed(folder))), under="-"))
    return _titled("How it works", _READING, *parts)


def _folder(folder: str) -> str:
    """What a folder offers: functions, then classes, then errors; its files, where it offers nothing by itself."""
    module = import_module(f"jointcut.{folder}")
    names = sorted(public(module), key=lambda name: (_rank(getattr(module, name)), name.lower()))
    opening = markup((module.__doc__ or "").partition("\n")[0])
    files = "" if names else _items(list(listed(folder)))
    shown = [_shown(module, name) for name in names]
    return _titled(f"jointcut.{folder}", opening, markup(FOLDERS[folder]), files or _RECORDS, *shown)


def _rank(item: Any) -> int:
    if not inspect.isclass(item):
        return 0
    return 2 if issubclass(item, BaseException) else 1


def _errors() -> str:
    about = f".. automodule:: {errors.__name__}\n   :no-index:"
    return _titled("Errors", about, *(_shown(errors, name) for name in _error_names()))


def _file(file: Listed, offered: dict[Origin, str], before: Listed | None, after: Listed | None) -> str:
    """One file: its docstring, links to what it makes that stands elsewhere, and all else that it makes.

    These pages stay out of the navigation, which would grow to the length of the lists on every page of the site.
    """
    name, module = file.module, import_module(file.module)
    about = f".. automodule:: {name}" + ("\n   :no-index:" if name in offered.values() else "")
    links = [f":py:obj:`{offered[name, own]}`" for own in defined(module) if (name, own) in offered]
    elsewhere = f"Made here, shown elsewhere: {', '.join(links)}." if links else ""
    shown = [_shown(module, own) for own in defined(module) if (name, own) not in offered]
    near = [
        (f"{word} :doc:`{near.title} </{near.page}>`") for word, near in (("Before", before), ("Next", after)) if near
    ]
    ways = f".. rst-class:: ways\n\n{' · '.join([*near, 'all files: :doc:`/how-it-works`'])}"
    return ":orphan:\n\n" + _titled(file.title, about, elsewhere, *shown, ways)


# ------------------------------------------------------------------------------------------------ the command line


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
