"""Say where an equation comes from, in the names that the user gave.

An equation has a name stack (jit names, `jax.named_scope`, the modules of Flax and Haiku) and a stack of Python calls.
`names` makes one path of both. Where most equations stand below one name, as in Flax and Haiku, the name stack alone
is the path. Elsewhere the path is the user's functions, then the name stack. Calls inside libraries are left out.
"""

from __future__ import annotations

import os
import re
import site
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from jointcut.partition.program.jax import user_source
from jointcut.partition.program.jax.jaxprs import Equation

#: Names of transformations that JAX writes around a name.
_WRAPPING = re.compile(r"(?:jit|jvp|transpose|vmap|pmap|linearize|remat|checkpoint)\(")

#: Names that the user did not give.
_NOBODY = frozenset(
    ("", "<module>", "<lambda>", "body", "checkpoint", "closed_call", "cond", "dynamic_index_in_dim")
    + ("dynamic_update_index_in_dim", "remat", "rematted_computation", "while")
)

#: The beginning of a name on a name stack that says how often the loops under it are expected to run.
TRIPS_SCOPE = "jointcut.trips="
#: The beginning of a name that says how many bytes the equations under it may keep, and under which line.
BUDGET_SCOPE = "jointcut.budget="
#: The beginning of a name that puts an equation into a region under `jax.checkpoint`, with the number of regions around
#: that region. The endings say that the region lets the equation be saved, or hands it on as a result.
REGION_SCOPE, SAVED, RESULT = "jointcut.checkpoint=", ".saved", ".result"

_OURS = TRIPS_SCOPE, BUDGET_SCOPE, REGION_SCOPE
_REGION = re.compile(re.escape(REGION_SCOPE) + r"(\d+)(\.saved|\.result)?")

_SHARE = 0.6  # of the equations: a first name with at least this share is taken for the model


@dataclass(frozen=True)
class Name:
    """One name of a path: a "module" (or jit, or named scope), a "call" of a function, or a "loop".

    `at` is the line that runs within a call: it tells one call of a function from the next.
    """

    kind: str
    text: str
    at: str = ""


@dataclass(frozen=True)
class Place:
    """The origin of an equation: its name stack and the user's calls, outermost first, and the user's line."""

    modules: tuple[str, ...] = ()
    calls: tuple[Name, ...] = ()
    line: str = ""


NOWHERE = Place()


def line_of(eqn: Equation) -> str:
    """`file:line (function)` of the user's code that led to an equation, or else of a library's; empty if unknown."""
    return _line(list(user_source.calls_of(eqn)))


def line_at(source: Any) -> str:
    """As `line_of`, for a `user_source.source_here` that one of our functions took when the user's code called it."""
    ours = our_folders()
    return _line(list(dropwhile(lambda call: call.startswith(ours), user_source.calls_at(source))))


def place_of(eqn: Equation) -> Place:
    """Return the place of an equation."""
    return place(user_source.scope_of(eqn), user_source.calls_of(eqn))


def place(name_stack: str, calls: Iterable[str]) -> Place:
    """Return the place for a name stack and calls (`file:line (function)`, the innermost first)."""
    frames = list(calls)
    users = [call for call in _before_us(frames) if not call.startswith(_libraries())]
    return Place(modules_of(name_stack), calls_of(tuple(users)), _line(frames))


def _before_us(calls: Iterable[str]) -> list[str]:
    """The innermost calls, up to the first one of jointcut's own, which is left out.

    An equation that a loop of ours makes comes from where the loop was called.
    """
    frames = list(calls)
    if frames and frames[0].startswith(f"{our_folders()[0]}loops{os.sep}"):
        frames = dropwhile(lambda call: call.startswith(our_folders()), frames)
    return list(takewhile(lambda call: not call.startswith(our_folders()), frames))


def user_line(eqn: Equation) -> str:
    """The innermost call that made an equation and is not one of jointcut's own, or an empty text."""
    return next((call for call in user_source.calls_of(eqn) if not call.startswith(our_folders())), "")


def _line(calls: Sequence[str]) -> str:
    """The innermost call in the user's own code, or else the innermost call in a library."""
    frames = _before_us(calls)
    return next((call for call in frames if not call.startswith(_libraries())), next(iter(frames), ""))


@lru_cache(maxsize=4096)
def modules_of(name_stack: str) -> tuple[str, ...]:
    """The names of a name stack, without transformations.

    >>> modules_of("transpose(jvp(Bert))/block_0/vmap(vmap(LayerNorm_1))")
    ('Bert', 'block_0', 'LayerNorm_1')
    >>> modules_of("jvp()")
    ()
    """
    text: list[str] = []
    is_wrapping: list[bool] = []  # for each parenthesis that is open
    at = 0
    while at < len(name_stack):
        if wrapping := _WRAPPING.match(name_stack, at):
            is_wrapping.append(True)
            at = wrapping.end()
            continue
        c = name_stack[at]
        at += 1
        if c == "(":
            is_wrapping.append(False)
        if c == ")" and is_wrapping and is_wrapping.pop():
            continue
        text.append(c)
    names = "".join(text).split("/")
    return tuple(name for name in names if name not in _NOBODY and not name.startswith(_OURS))


def region_scope(depth: int, what: str) -> str:
    """A name for a name stack: a region under `jax.checkpoint` in `depth` others, and `SAVED`, `RESULT` or no text."""
    return f"{REGION_SCOPE}{depth}{what}"


@lru_cache(maxsize=4096)
def regions_of(name_stack: str, what: str = "") -> frozenset[str]:
    """The depths of the regions under `jax.checkpoint` around an equation; with `what`, only of regions so marked.

    >>> stack = "jvp(jointcut.checkpoint=0)/jointcut.checkpoint=1.saved"
    >>> sorted(regions_of(stack)), sorted(regions_of(stack, SAVED))
    (['0', '1'], ['1'])
    """
    found = _REGION.findall(name_stack) if REGION_SCOPE in name_stack else []
    return frozenset(depth for depth, is_what in found if what in ("", is_what))


@lru_cache(maxsize=4096)
def calls_of(calls: tuple[str, ...]) -> tuple[Name, ...]:
    """Calls (`file:line (function)`, the innermost first) as names, the outermost first; `__call__` is its class.

    >>> [name.text for name in calls_of(("gpt.py:9 (norm)", "gpt.py:7 (Block.__call__)", "gpt.py:3 (<lambda>)"))]
    ['Block', 'norm']
    """
    path = []
    for call in reversed(calls):
        line, _, function = call.rpartition(" (")
        text = function.removesuffix(")").removesuffix(".__call__").rpartition(".")[2]
        if text not in _NOBODY:
            path.append(Name("call", text, line))
    return tuple(path)


def names(places: Sequence[Place]) -> list[tuple[Name, ...]]:
    """Return one path for each place of a program."""
    first = Counter(p.modules[0] for p in places if p.modules)
    known = sum(p != NOWHERE for p in places)
    if first and first.most_common(1)[0][1] >= _SHARE * known:
        return [_modules(p) for p in places]
    return _completed([(*p.calls, *_modules(p)) for p in places])


def _completed(paths: Sequence[tuple[Name, ...]]) -> list[tuple[Name, ...]]:
    """Complete the paths of ops that were moved out of a loop: they lack the calls around the loop's body.

    They get the calls that stand above the same name in other paths.
    """
    firsts = Counter(path[0].text for path in paths if path)
    main = firsts.most_common(1)[0][0] if firsts else ""
    around: dict[str, tuple[Name, ...]] = {}
    for path in paths:
        if path and path[0].text == main:
            for depth, name in enumerate(path):
                around.setdefault(name.text, path[:depth])
    return [(*around.get(path[0].text, ()), *path) if path else path for path in paths]


def _modules(place: Place) -> tuple[Name, ...]:
    return tuple(Name("module", text) for text in place.modules)


@lru_cache(maxsize=1)
def our_folders() -> tuple[str, ...]:
    """The folders of jointcut's own sources, each with a separator at its end."""
    root = Path(__file__).parents[2]
    return tuple(f"{root / folder}{os.sep}" for folder in ("aot", "partition", "wrappers"))


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Folders that hold installed packages and Python's own."""
    kinds = ("purelib", "platlib", "stdlib", "platstdlib")
    folders = [*map(sysconfig.get_path, kinds), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(sorted({f"{Path(folder)}{os.sep}" for folder in folders if folder}))
