"""Name a compilation by everything that could change it.

A compiled program on disk is found again by another process under a key, and two computations that could have different
results must never share one. `fingerprint` makes it of named parts: the traced program, the options it is compiled
with, and the `environment` in which that happens.

>>> fingerprint(limit=3, names=("a", "b")) == fingerprint(names=("a", "b"), limit=3)
True
>>> fingerprint(limit=3, names=("a", "b")) == fingerprint(limit=3.0, names=("a", "b"))
False
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from jointcut.aot.cache.encode import RULES, Encoder, pack
from jointcut.aot.cache.environment import environment as environment
from jointcut.partition.errors import IdentityError
from jointcut.partition.program import jaxprs

_FORMAT = "jointcut fingerprint 1"  # changes with the encoding


@dataclass(frozen=True)
class WithoutRules:
    """A jaxpr that nobody will differentiate or map any more: what it still holds of rules for that does not count."""

    jaxpr: Any


def fingerprint(**parts: Any) -> str:
    """The sha256, in hex, of named parts: plain data, trees, arrays, shardings, jaxprs and records of these.

    A part may be `WithoutRules(jaxpr)`. To be the key of something that was compiled it needs `environment()` among
    its parts, which says what the names of JAX's own functions stand for. Raises `IdentityError` for anything that has
    no name and no content which another process would know, such as a callback or a derivative rule of the user's.
    """
    written = [pack("part", name.encode(), _part(name, parts[name])) for name in sorted(parts)]
    return hashlib.sha256(pack(_FORMAT, *written)).hexdigest()


def _part(name: str, value: Any) -> bytes:
    if isinstance(value, WithoutRules):
        return pack("without rules", Encoder(name, rules=False).value(value.jaxpr))
    return Encoder(name).value(value)


def foreign_rules(closed: Any) -> tuple[str, ...]:
    """The rules in a jaxpr, however deep, that have no identity: `rule at file.py:12`, sorted.

    A rule is a Python function: that of a `jax.custom_vjp`, or the policy of a `jax.checkpoint`. It decides the
    gradient, and the jaxpr of a program that is not differentiated yet does not show it. JAX's own (that of `relu`,
    say) are known by name, and those with a `cache_key` by that. Where there are others `fingerprint` refuses the
    jaxpr; that of the derivative, in which the rules have been traced, can be given as `WithoutRules`.
    """
    todo, seen, found = [jaxprs.opened(closed)[0]], set[int](), set[str]()
    while todo:
        jaxpr = todo.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            todo.extend(jaxprs.inner_jaxprs(eqn))
            for param in RULES.get(eqn.primitive.name, ()):
                if not _has_identity(param, eqn.params[param]):
                    found.add(_name(eqn, eqn.params[param]))
    return tuple(sorted(found))


def _has_identity(param: str, rule: Any) -> bool:
    try:
        Encoder(param, in_program=True).value(rule)
    except IdentityError:
        return False
    return True


def _name(eqn: Any, rule: Any) -> str:
    info = getattr(rule, "debug_info", None)
    return f"{eqn.primitive.name} at {jaxprs.source_of(eqn)}" if info is None else info.func_src_info
