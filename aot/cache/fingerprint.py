"""Compute the key of a compilation from everything that could change it.

Another process finds a compiled program on disk under its key. Two computations that could have different results must
never share a key. `fingerprint` computes it from named parts: the traced program, its options, and the `environment`.

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
from jointcut.partition.program.jax import jaxprs, user_source

_FORMAT = "jointcut fingerprint 1"  # changes with the encoding


@dataclass(frozen=True)
class WithoutRules:
    """A jaxpr that will not be differentiated or mapped again: its derivative and batching rules are ignored."""

    jaxpr: Any


def fingerprint(**parts: Any) -> str:
    """Return the sha256, in hex, of named parts: plain data, trees, arrays, shardings, jaxprs and records of these.

    A part may be `WithoutRules(jaxpr)`. The key of a compiled program needs `environment()` among its parts, which
    holds the versions of JAX's own functions. Raises `IdentityError` for an object that another process cannot identify
    by name or content, such as a user's callback or derivative rule.
    """
    encoded = [pack("part", name.encode(), _part(name, parts[name])) for name in sorted(parts)]
    return hashlib.sha256(pack(_FORMAT, *encoded)).hexdigest()


def _part(name: str, value: Any) -> bytes:
    if isinstance(value, WithoutRules):
        return pack("without rules", Encoder(name, rules=False).value(value.jaxpr))
    return Encoder(name).value(value)


def foreign_rules(closed: Any) -> tuple[str, ...]:
    """Return the rules without identity in a jaxpr and its inner jaxprs: `rule at file.py:12`, sorted.

    A rule is a Python function, such as the backward of a `jax.custom_vjp` or the policy of a `jax.checkpoint`. It
    decides the gradient, but is invisible in the jaxpr of a program that is not differentiated yet. JAX's own rules (as
    for `relu`) are identified by name, others by their `cache_key`. `fingerprint` refuses a jaxpr with any other rule.
    The jaxpr of the derivative, in which the rules have been traced, can be given as `WithoutRules`.
    """
    todo, seen, rules = [jaxprs.opened(closed)[0]], set[int](), set[str]()
    while todo:
        jaxpr = todo.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            todo.extend(jaxprs.inner_jaxprs(eqn))
            for param in RULES.get(eqn.primitive.name, ()):
                if not _has_identity(param, eqn.params[param]):
                    rules.add(_name(eqn, eqn.params[param]))
    return tuple(sorted(rules))


def _has_identity(param: str, rule: Any) -> bool:
    try:
        Encoder(param, in_program=True).value(rule)
    except IdentityError:
        return False
    return True


def _name(eqn: Any, rule: Any) -> str:
    info = getattr(rule, "debug_info", None)
    return f"{eqn.primitive.name} at {user_source.source_of(eqn)}" if info is None else info.func_src_info
