"""Read and write jaxprs and equations, as every version of JAX has them."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax.extend import core as jex
from jax.interpreters import partial_eval as pe

try:  # JAX 0.11 and later describe a scan's operands by flat trees
    _flattree = importlib.import_module("jax._src.flattree")
except ModuleNotFoundError:  # JAX 0.10
    _flattree = None


Jaxpr = jex.Jaxpr
ClosedJaxpr = jex.ClosedJaxpr
Equation = jex.JaxprEqn
Literal = jex.Literal
Var = jex.Var
Atom = Any  # Var | Literal


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """The atoms that are no literals, in order."""
    return (v for v in atoms if not isinstance(v, Literal))


def is_zero(atom: Atom) -> bool:
    """Whether an atom is a literal of zeros."""
    return isinstance(atom, Literal) and not np.any(np.asarray(atom.val))


def opened(closed: Any) -> tuple[Any, list[Any]]:
    """Return the open jaxpr and its constants, whichever form this version of JAX gives."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


@dataclass(frozen=True)
class ScanLayout:
    """How a scan equation's operands and results divide into constants, carry and per-step values."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    body: Jaxpr
    body_consts: tuple[Any, ...]

    def parts(self, atoms: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Divide operands, or inputs of the body, into constants, carry and per-step values."""
        first, last = self.num_consts, self.num_consts + self.num_carry
        return list(atoms[:first]), list(atoms[first:last]), list(atoms[last:])


def scan_layout(eqn: Equation) -> ScanLayout:
    """Read a scan equation's parameters, as JAX 0.10 or as JAX 0.11 and later write them."""
    params = eqn.params
    if "ft_in" in params:
        num_consts, num_carry = (len(list(part)) for part in params["ft_in"].unpack()[:2])
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    body, body_consts = opened(params["jaxpr"])
    return ScanLayout(num_consts, num_carry, params["length"], params["reverse"], body, tuple(body_consts))


def inner_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Yield every jaxpr that an equation holds in its parameters."""
    if not any(map(may_hold_jaxpr, eqn.params.values())):
        return
    for closed in jex.jaxprs_in_params(eqn.params):
        yield opened(closed)[0]


def may_hold_jaxpr(param: Any) -> bool:
    """Whether a parameter of an equation holds a jaxpr."""
    if isinstance(param, tuple | list):
        return any(map(may_hold_jaxpr, param))
    return isinstance(param, Jaxpr | ClosedJaxpr)


def inner_primitives(eqn: Equation) -> frozenset[str]:
    """Names of all primitives inside an equation's own jaxprs, however deep."""
    names: set[str] = set()
    stack = list(inner_jaxprs(eqn))
    while stack:
        for inner in stack.pop().eqns:
            names.add(inner.primitive.name)
            stack.extend(inner_jaxprs(inner))
    return frozenset(names)


def touches_references(eqn: Equation) -> bool:
    """Whether the equation reads or writes a `jax.Ref` that it was given."""
    return any(hasattr(effect, "input") for effect in eqn.effects)


def fresh(aval: Any) -> Var:
    """A new variable of the given abstract value."""
    return Var(aval)


def is_dropped(var: Any) -> bool:
    """Whether an equation's result is thrown away."""
    return isinstance(var, jex.DropVar)


def rebound(eqn: Equation, invars: Sequence[Atom], outvars: Sequence[Var]) -> Equation:
    """The same equation with other operands and results; effects on references are moved to the new operands."""
    effects: Any = eqn.effects
    if touches_references(eqn):
        renamed = {old: new for old, new in zip(eqn.invars, invars, strict=True) if isinstance(old, Var)}
        effects = {e.replace(renamed[e.input]) if hasattr(e, "input") else e for e in effects}
    return eqn.replace(invars=list(invars), outvars=list(outvars), effects=effects)


def reading(eqn: Equation, invars: Sequence[Atom]) -> Equation:
    """The equation with other operands; the equation itself where they are its own."""
    return eqn if are_same(invars, eqn.invars) else rebound(eqn, invars, eqn.outvars)


def are_same(these: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(these) == len(others) and all(map(operator.is_, these, others))


def written(
    constvars: Sequence[Var], invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Equation],
    effects: Iterable[Any], debug_info: Any,
) -> Jaxpr:  # fmt: skip
    """An open jaxpr of its parts. It says whether it holds an op that JAX has to lower first, such as a `nonzero`."""
    is_high = any(eqn.primitive.is_high(*(v.aval for v in eqn.invars), **eqn.params) for eqn in eqns)
    inputs = list(constvars), list(invars)
    return Jaxpr(*inputs, list(outvars), list(eqns), frozenset(effects), debug_info, is_high=is_high)


def build(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Equation]) -> ClosedJaxpr:
    """A closed jaxpr without constants, made from its parts; its effects are the effects of its equations."""
    inputs = set(invars)
    effects = {e for eqn in eqns for e in eqn.effects if getattr(e, "input", None) in (None, *inputs)}
    return ClosedJaxpr(written([], invars, outvars, eqns, effects, no_debug_info(invars, outvars)), [])


def constants_first(jaxpr: Jaxpr) -> ClosedJaxpr:
    """A closed jaxpr without constants, whose leading inputs stand for the constants of a jaxpr."""
    return build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


def no_debug_info(invars: Sequence[Var], outvars: Sequence[Atom]) -> jex.DebugInfo:
    """The debug information of a jaxpr that comes from nobody's function."""
    names = tuple(f"in{i}" for i in range(len(invars)))
    return jex.DebugInfo("jointcut", "jointcut", names, tuple(f"out{i}" for i in range(len(outvars))))


def check(closed: ClosedJaxpr) -> None:
    """Run JAX's own type checker over a jaxpr where `jax_enable_checks` asks for it; raises where it is malformed."""
    if _config.enable_checks.value:
        jex.check_jaxpr(opened(closed)[0])


def pruned(closed: ClosedJaxpr, wanted: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """A jaxpr that computes only the wanted outputs from only the inputs that they need, and a flag for each input."""
    jaxpr, consts = opened(closed)
    less, used = pe.dce_jaxpr(opened(constants_first(jaxpr))[0], list(wanted))
    count = len(consts)
    front = less.invars[: sum(used[:count])]
    values = [c for c, on in zip(consts, used[:count], strict=True) if on]
    rest = less.invars[len(front) :]
    open_ = written(front, rest, less.outvars, less.eqns, less.effects, no_debug_info(rest, less.outvars))
    return ClosedJaxpr(open_, values), list(used[count:])


def scan(
    like: Equation,
    body: ClosedJaxpr,
    consts: Sequence[Atom],
    carry: Sequence[Atom],
    xs: Sequence[Atom],
    outvars: Sequence[Var],
) -> Equation:
    """A scan equation over a new body, with the length, direction, name stack and source of an old one."""
    params = dict(like.params, jaxpr=body)
    num_ys = len(outvars) - len(carry)
    if "ft_in" in params:
        assert _flattree is not None
        pack, nones = _flattree.pack, _flattree.nones
        params["ft_in"] = pack((nones(len(consts)), nones(len(carry)), nones(len(xs))))
        params["ft_out"] = pack((nones(len(carry)), nones(num_ys)))
    else:
        params.update(num_consts=len(consts), num_carry=len(carry))
    effects = frozenset(opened(body)[0].effects)
    return like.replace(invars=[*consts, *carry, *xs], outvars=list(outvars), params=params, effects=effects)


def version() -> tuple[int, ...]:
    """The version of JAX as numbers."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def barriers_expand(platform: str) -> bool:
    """Whether XLA expands optimisation barriers before scheduling unless a compiler option forbids it.

    XLA:CPU does so up to JAX 0.11.
    """
    return platform == "cpu" and version() < (0, 12)
