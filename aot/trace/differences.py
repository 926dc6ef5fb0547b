"""Say in words where one program first differs from another.

>>> import jax
>>> square, cube = (jax.make_jaxpr(lambda x, n=n: x**n)(1.0) for n in (2, 3))
>>> first_difference(cube, square, "model.py:7")
'integer_pow in <doctest jointcut.aot.trace.differences[1]>:1: y is 3 instead of 2'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.places import line_of

_LONGEST = 60  # characters of a parameter


def first_difference(new: Any, old: Any, line: str) -> str:
    """Return where a jaxpr differs from another, in words, or nothing; `line` is that of an op without its own."""
    return next(_of_programs(jaxprs.opened(new)[0], jaxprs.opened(old)[0], line), "")


def short_line(call: str) -> str:
    """Return the user's line without folder and function: `train.py:41`."""
    return re.sub(r" \(.*\)$", "", Path(call).name)


def _of_programs(new: Any, old: Any, line: str) -> Iterator[str]:
    pairs = zip((*new.constvars, *new.invars), (*old.constvars, *old.invars), strict=False)
    numbers: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
    for n, (v, w) in enumerate(pairs):
        numbers[0][v], numbers[1][w] = n, n
    for eqn, before in zip(new.eqns, old.eqns, strict=False):
        where = short_line(line_of(eqn)) or line
        if eqn.primitive.name != before.primitive.name:
            yield f"{eqn.primitive.name} instead of {before.primitive.name} in {where}"
            return
        yield from _of_params(eqn, before, where)
        yield from _of_operands(eqn, before, where, numbers)
        for v, w in zip(eqn.outvars, before.outvars, strict=False):
            numbers[0][v] = numbers[1][w] = len(numbers[0])
    if len(new.eqns) != len(old.eqns):
        yield f"{len(new.eqns)} ops instead of {len(old.eqns)} inside {line}"


def _of_params(eqn: Any, before: Any, where: str) -> Iterator[str]:
    """`integer_pow in model.py:7: y is 3 instead of 2`; functions among the parameters are not compared."""
    for name, value in eqn.params.items():
        other = before.params.get(name)
        if jaxprs.may_hold_jaxpr(value) or callable(value) or callable(other):
            continue
        now, then = (re.sub(r"\s+", " ", str(x))[:_LONGEST] for x in (value, other))
        if now != then:
            yield f"{eqn.primitive.name} in {where}: {name} is {now} instead of {then}"
    for inner, other in zip(jaxprs.inner_jaxprs(eqn), jaxprs.inner_jaxprs(before), strict=False):
        yield from _of_programs(inner, other, where)


def _of_operands(eqn: Any, before: Any, where: str, numbers: tuple[dict[Any, int], dict[Any, int]]) -> Iterator[str]:
    for v, w in zip(eqn.invars, before.invars, strict=False):
        now, then = v.aval.str_short(), w.aval.str_short()
        fixed = [isinstance(x, jaxprs.Literal) for x in (v, w)]
        if all(fixed):
            now, then = str(v.val), str(w.val)
        elif any(fixed) or numbers[0].get(v) != numbers[1].get(w):
            now, then = "another value", "that before"
        if now != then:
            yield f"{eqn.primitive.name} in {where} reads {now} instead of {then}"
