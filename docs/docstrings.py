"""Turn docstrings, which are plain text with a little Markdown, into what Sphinx reads.

Sphinx's autodoc takes reStructuredText, where a star or an underscore can be markup. Here only five things are: code in
backticks, *emphasis*, lists, examples after `>>>`, and indented code. All else is made to stand for itself, so that no
sentence of a docstring can break the site. Code that is a name becomes a link where the site has what it names.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

_SPAN = re.compile(r"(`+)([^`]+)\1|(?<![\w*])(\*[^\s*](?:[^*]*[^\s*])?\*)(?![\w*])")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_SPECIAL = re.compile(r"[\\*`|]|(?<=\w)_(?!\w)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
_SECTION = re.compile(r"(Args|Attributes|Raises):")
_ENTRY = re.compile(r"([*\w]+(?:, [*\w]+)*): (.*)")
_NOTHING: Mapping[str, str] = {}
_WAY_BACK = re.compile(r'(<a class="viewcode-back" href=")([^"#]*)#([^"]*)')
_FIELDS = {"Args": "param", "Raises": "raises"}


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx to call what is below."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    app.connect("env-check-consistency", _look_up_once)
    app.connect("missing-reference", partial(_resolve, {}))
    app.connect("html-page-context", _mend_ways_back)
    app.add_post_transform(_Builtins)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def markup(text: str, written: Mapping[str, str] = _NOTHING) -> str:
    r"""One paragraph in reStructuredText; `written` says how some names are, in place of a link.

    >>> print(markup("Raises `CallError` where *x* is not 2*y or `a b`s."))
    Raises `CallError` where *x* is not 2\*y or ``a b``\ s.
    """
    out, at = [], 0
    for match in _SPAN.finditer(text):
        out.append(_plain(text[at : match.start()]))
        code = " ".join((match[2] or "").split())
        quoted = written.get(code) or (f"`{code}`" if _NAME.fullmatch(code) else f"``{code}``")
        out.append(match[3] or _apart(quoted, text[: match.start()][-1:], text[match.end() :][:1]))
        at = match.end()
    return "".join([*out, _plain(text[at:])])


def _plain(text: str) -> str:
    return _SPECIAL.sub(lambda match: "\\" + match[0], text)


def _apart(quoted: str, before: str, after: str) -> str:
    """Code with the invisible spaces that reStructuredText wants where a letter stands right beside it."""
    start = "" if not before or before.isspace() or before in "([{<'\"-/:" else "\\ "
    end = "" if not after or after.isspace() or after in "-.,:;!?'\")]}>/" else "\\ "
    return f"{start}{quoted}{end}"


# ------------------------------------------------------------------------------------------------------- docstrings


def rst(lines: list[str], written: Mapping[str, str] = _NOTHING) -> list[str]:
    """A docstring in reStructuredText, without its `Attributes`, which stand beside the attributes themselves."""
    out: list[str] = []
    for kind, block in _blocks(lines):
        if kind == "code":
            out += ["::", ""]
        if kind == "prose":
            out += _prose(block, written)
        elif kind in _FIELDS:
            out += [f":{_FIELDS[kind]} {_plain(name)}: {markup(text, written)}" for name, text in _entries(block)]
        elif kind != "Attributes":
            out += block
        out.append("")
    return out


def attributes(doc: str) -> dict[str, str]:
    r"""What a class docstring says of each attribute, in reStructuredText.

    >>> attributes("A place.\n\nAttributes:\n    x, y: how far\n        it is.")
    {'x': 'How far it is.', 'y': 'How far it is.'}
    """
    told = [entry for kind, block in _blocks(doc.splitlines()) if kind == "Attributes" for entry in _entries(block)]
    return {name: markup(text[:1].upper() + text[1:]) for name, text in told}


def attributes_of(owner: type) -> dict[str, str]:
    """What a class and those it extends say of their attributes."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        found |= attributes(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
    return found


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The parts of a docstring in order: prose, code, verbatim (examples, and what follows `::`), and sections."""
    rest, is_literal = list(lines), False
    while rest:
        if not rest[0].strip():
            rest.pop(0)
            continue
        block = list(takewhile(str.strip, rest))
        section = _SECTION.fullmatch(block[0])
        if section:
            block = [block[0], *takewhile(_depth, block[1:])]
            yield section[1], block[1:]
        elif block[0].startswith(">>>") or (is_literal and _depth(block[0])):
            yield "verbatim", block
        else:
            yield "code" if _depth(block[0]) >= 4 else "prose", block
        is_literal = block[-1].endswith("::") or (is_literal and _depth(block[0]) > 0)
        rest = rest[len(block) :]


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _prose(block: list[str], written: Mapping[str, str]) -> list[str]:
    """A paragraph, and the lists in it, each item of which gets an empty line before it."""
    out: list[str] = []
    for line in markup("\n".join(block), written).splitlines():
        if _ITEM.match(line) and out:
            out.append("")
        out.append(line)
    return out


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The names of a section, each with what is said of it."""
    joined: list[str] = []
    for line in lines:
        if _depth(line) == _depth(lines[0]):
            joined.append(line.strip())
        else:
            joined[-1] += " " + line.strip()
    for entry in joined:
        if match := _ENTRY.fullmatch(entry):
            yield from ((name, match[2]) for name in match[1].split(", "))


# ------------------------------------------------------------------------------------------------- hooks of Sphinx


class _Builtins(SphinxPostTransform):
    """Leave Python's own types as words: Sphinx would link `bytes` to the first attribute of that name."""

    default_priority = 5  # before Sphinx looks for what a name means, at 10

    def run(self, **kwargs: Any) -> None:
        """Replace what refers to a builtin by its text."""
        for node in list(self.document.findall(pending_xref)):
            if node.get("reftype") == "class" and node["reftarget"] in dir(builtins):
                node.replace_self(node.children)


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite one docstring."""
    lines[:] = rst(lines, _files_beside(name) if what == "module" else _parameters(obj))


def _parameters(item: Any) -> Mapping[str, str]:
    """The arguments of a function as plain code; of a class its docstring speaks as of attributes, which are links."""
    if inspect.isclass(item) or not callable(item):
        return {}
    return {name: f"``{name}``" for name in inspect.signature(item).parameters}


def _files_beside(module: str) -> Mapping[str, str]:
    """The files of a module's folder as links."""
    beside = [name for name in sys.modules if _folder(name) == _folder(module)]
    return {name.rpartition(".")[2]: f":py:mod:`{name.rpartition('.')[2]} <{name}>`" for name in beside}


def _folder(module: str) -> str:
    return module.rpartition(".")[0]


def _signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, None] | None:
    """Leave out how a record is made: from its attributes, which stand below it in the same order."""
    return ("", None) if what == "class" and is_dataclass(obj) else None


def _look_up_once(app: Sphinx, env: BuildEnvironment) -> None:
    """Remember what is found for a name, now that all pages are read: a search goes through all names of the site."""
    domain = env.get_domain("py")
    domain.find_obj = cache(domain.find_obj)  # pyright: ignore[reportAttributeAccessIssue]


def _resolve(
    names: dict[str, list[str]], app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.reference | None:
    """Link a name that is written shorter than it is: `CallError`, `Cut.plan`, `aot.load`.

    A single word in lower case is left alone: most such words are arguments, or parts of records. `names` holds all
    names by their last words, from the first call on.
    """
    target = node["reftarget"]
    if node.get("refdomain") != "py" or (target.islower() and "." not in target):
        return None
    known = env.get_domain("py").objects  # pyright: ignore[reportAttributeAccessIssue]
    for name in () if names else known:
        names.setdefault(_last_word(name), []).append(name)
    if name := _ends_with(known, names.get(_last_word(target), []), target):
        entry = known[name]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)
    return None


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _ends_with(known: dict[str, Any], names: list[str], target: str) -> str | None:
    """The shortest of some known names that ends with the one that is looked for."""
    found = (name for name in names if name.endswith(f".{target}") and not known[name].aliased)
    return min(found, key=lambda name: (name.count("."), name), default=None)


def _mend_ways_back(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Point the links of a page of source code at what they document.

    Where some names of a file are shown as the file's and some as the folder's, Sphinx's viewcode takes one for all.
    """
    module = pagename.removeprefix("_modules/").replace("/", ".")
    known = app.env.get_domain("py").objects  # pyright: ignore[reportAttributeAccessIssue]

    def mended(match: re.Match[str]) -> str:
        start, page, anchor = match.groups()
        parts = anchor.split(".")
        names = [f"{place}.{'.'.join(parts[i:])}" for i in range(len(parts)) for place in (module, _folder(module))]
        places = [
            known[name].node_id for name in names if name in known and page.endswith(f"{known[name].docname}.html")
        ]
        return f"{start}{page}#{(places or [anchor])[0]}"

    if pagename.startswith("_modules/"):
        context["body"] = _WAY_BACK.sub(mended, context["body"])
