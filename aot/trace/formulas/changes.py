"""List the rules that changed derivatives, with their source lines.

A formula or a guarded product is a call, and its name contains the rule. So the rules are found again in a jaxpr, and
no list has to pass through every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jointcut.partition.program.jax import jaxprs, user_source
from jointcut.partition.rewrite.product import GUARD, is_test_of_guard

#: Starts the names of formulas, and of the products of `guard`; no function of the user has a dot in its name.
_PREFIX = "derivatives."
_GUARDED = GUARD.removeprefix(_PREFIX)


@dataclass(frozen=True)
class Change:
    """A rule, which is a field of `Conventions`, with the user's line where it was used, and the number of uses."""

    rule: str
    line: str
    count: int


def ruled(function: Callable[..., Any], rule: str) -> Callable[..., Any]:
    """Return the function under the name of a rule."""

    def formula(*operands: Any) -> Any:
        return function(*operands)

    formula.__name__ = f"{_PREFIX}{rule}"
    return formula


def is_ruled(eqn: Any) -> bool:
    """Whether an equation calls a formula or a guarded product."""
    return str(eqn.params.get("name", "")).startswith(_PREFIX)


def formulas_in(closed: Any) -> tuple[Change, ...]:
    """Return the formulas in a function, by rule and line, in the order found; one in a loop counts once."""
    return _counted(rule for rule in _found(jaxprs.opened(closed)[0], "") if rule[0] != _GUARDED)


def guards_in(closed: Any) -> tuple[Change, ...]:
    """Return the guarded products in a program, by line."""
    return _counted(rule for rule in _found(jaxprs.opened(closed)[0], "") if rule[0] == _GUARDED)


def _counted(rules: Iterable[tuple[str, str]]) -> tuple[Change, ...]:
    return tuple(Change(rule, line, count) for (rule, line), count in Counter(rules).items())


def _found(jaxpr: Any, caller: str) -> Iterator[tuple[str, str]]:
    """Yield rules with their lines; a rule without a line of the user's has the line of the call around it."""
    for eqn in jaxpr.eqns:
        name, line = str(eqn.params.get("name", "")), user_source.source_of(eqn) or caller
        if is_ruled(eqn):
            yield name.removeprefix(_PREFIX), line
        elif is_test_of_guard(eqn):
            yield _GUARDED, line
        else:
            for body in jaxprs.inner_jaxprs(eqn):
                yield from _found(body, line)
