"""Name the first op that made a NaN or an infinity.

In debug mode `is_finite` checks the results of every run. If they are not finite, `first_nonfinite` runs the jaxpr
again, one equation at a time, also inside calls, the taken branch of a `cond` and the steps of loops. With each array
that is not finite it keeps the ops to blame. The rules:

- An op is to blame only if its bad numbers reach a result. An op that passes on bad operands is not to blame, and
  neither is an op whose bad numbers a `where` removes.
- Infinities that are passed in, or are constants of the program (the -inf of a mask, the start of a max), are
  legitimate. An op that makes a NaN of them is to blame, and so is an op that takes a NaN constant.
- An op that makes an infinity of finite numbers is to blame for everything that follows from it.
- A NaN is traced to the op that made the first NaN or, if there is none, to the op that made the first infinity.

An op may make bad numbers or pass them on. To tell the two apart, it runs again with harmless numbers instead of its
bad operands. If several ops are to blame for an array, the earliest is named.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.program.jax import abstract, jaxprs, side_effects, user_source
from jointcut.partition.program.places import our_folders, user_line
from jointcut.partition.program.primitives import AS_GIVEN, COND, SCAN, WHILE
from jointcut.wrappers.built_in.culprit import Culprit, described
from jointcut.wrappers.metadata.convention import is_inexact

_INF, _NAN = 1, 2  # how bad a number is; 0 is finite
_KINDS = {_INF: "Inf", _NAN: "NaN"}
_CALLS = {  # name -> the parameter that holds the called jaxpr
    **dict.fromkeys(("jit", "jointcut_call", "jointcut_half", "jointcut_waiting", "remat2"), "jaxpr"),
    **dict.fromkeys(("while_loop", "while_loop_backward", "while_loop_with_checkpoints"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
_CHECKPOINTED = {"while_loop_backward", "while_loop_with_checkpoints"}
_FILLERS = (0.5, 2.0)  # few ops make bad numbers of both; log1p, acosh, atanh and pow make them of at most one


@dataclass(frozen=True)
class _Blame:
    """A culprit, and its place in the order of execution."""

    order: int
    culprit: Culprit


@dataclass(frozen=True)
class _KnownArray:
    """An array, the kind of its worst number, and the first op to blame for each kind.

    A value that depends on an effect is unknown, since the effect must not happen again: None takes its place.
    """

    array: Any
    kind: int = 0
    blame: Mapping[int, _Blame] = field(default_factory=dict)


_Values = Sequence[_KnownArray | None]


@dataclass(frozen=True)
class _Here:
    """A place in the walk: the clock, the steps of the loops around it, its scope and source.

    Inside a loop of ours with checkpoints, whose steps several loops run, `depth` is the number of loops around it.
    """

    clock: Iterator[int]
    steps: tuple[int, ...] = ()
    scope: str = ""
    source: str = ""
    depth: int | None = None

    def within(self, eqn: jaxprs.Equation, step: int | None = None) -> _Here:
        """Return the place inside an equation; for a loop, at one step."""
        depth = len(self.steps) if eqn.primitive.name in _CHECKPOINTED else self.depth
        before = self.steps[:depth] if self.is_ours(eqn) else self.steps
        steps = self.steps if step is None else (*before, step)
        return _Here(self.clock, steps, self.scope_of(eqn), self.source_of(eqn), depth)

    def is_ours(self, eqn: jaxprs.Equation) -> bool:
        """Whether a loop runs the steps of a loop with checkpoints."""
        if self.depth is None or eqn.primitive.name != WHILE:
            return False
        body = jaxprs.opened(eqn.params["body_jaxpr"])[0].debug_info
        return any(folder in str(body.func_src_info) for folder in our_folders())

    def scope_of(self, eqn: jaxprs.Equation) -> str:
        """Return the whole name stack of an equation; its own stack starts at the jaxpr that holds it."""
        return "/".join(filter(None, (self.scope, user_source.scope_of(eqn))))

    def source_of(self, eqn: jaxprs.Equation) -> str:
        """Return the user's line that made an equation; inside a library, the line that called the library."""
        return user_line(eqn) or self.source


def is_finite(values: Sequence[Any]) -> bool:
    """Whether all floating-point and complex arrays among the values are finite; one program computes it."""
    floats = [x for x in values if _is_float(x)]
    return not floats or bool(_all_finite(floats))


def first_nonfinite(closed: Any, args: Sequence[Any]) -> Culprit | None:
    """Run a jaxpr on concrete arrays, and name the first op to blame for a result that is not finite.

    Results with a NaN come before results with an infinity. The function returns None if all results are finite now,
    since a compiled program may round differently. It also returns None if the bad numbers were passed in (an argument,
    an array constant), are infinite constants of the program, or depend on an effect. Effects do not happen again:
    prints and callbacks with effects are skipped, references are neither read nor written, and values that depend on
    them are unknown. A pure callback is called, as JAX may do at any time.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        results = _walk(closed, [_known(x) for x in args], _Here(itertools.count()))
    bad = [x for x in results if x is not None and x.blame]
    for kind in (_NAN, _INF):
        blame = _first([x.blame for x in bad if x.kind == kind])
        if blame:
            return blame.get(kind, min(blame.values(), key=lambda b: b.order)).culprit
    return None


def _walk(closed: Any, operands: _Values, here: _Here) -> list[_KnownArray | None]:
    """Run a jaxpr one equation at a time, and drop each value after its last use."""
    jaxpr, consts = jaxprs.opened(closed)
    inputs: list[_KnownArray | None] = [*map(_known, consts), *operands]
    env: dict[Any, _KnownArray | None] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read(atom: jaxprs.Atom) -> _KnownArray | None:
        return _known(atom.val) if isinstance(atom, jaxprs.Literal) else env[atom]

    for eqn, finished in zip(jaxpr.eqns, _last_uses(jaxpr), strict=True):
        results = _run(eqn, [_guarded(eqn, read(atom), atom, here) for atom in eqn.invars], here)
        env.update(zip(eqn.outvars, results, strict=True))
        for var in finished:
            env.pop(var, None)
    return [read(atom) for atom in jaxpr.outvars]


def _last_uses(jaxpr: jaxprs.Jaxpr) -> list[list[Any]]:
    """Return, for each equation, the variables that are not read after it."""
    later = set(jaxprs.variables(jaxpr.outvars))
    finished = []
    for eqn in reversed(jaxpr.eqns):
        met = set(jaxprs.variables((*eqn.invars, *eqn.outvars)))
        finished.append(list(met - later))
        later |= met
    return finished[::-1]


def _guarded(eqn: jaxprs.Equation, operand: _KnownArray | None, atom: jaxprs.Atom, here: _Here) -> _KnownArray | None:
    """Return an operand; if it is a NaN constant of the program, blame the op that takes it."""
    if operand is None or operand.kind != _NAN or not isinstance(atom, jaxprs.Literal):
        return operand
    return replace(operand, blame={_NAN: _blame(eqn, _NAN, [operand], here)})


def _run(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """Run one equation: walk its bodies, or run it as an op unless it has effects or unknown operands."""
    name = eqn.primitive.name
    if name in _CALLS:
        return _walk(eqn.params[_CALLS[name]], operands, here.within(eqn))
    if name == COND:
        return _branch(eqn, operands, here)
    known = [x for x in operands if x is not None]
    runs = len(known) == len(operands) and not side_effects.has_effects(eqn)
    if name in (SCAN, WHILE) and eqn.params.get("length") != 0:
        # A compiled loop is usually finite, and much faster than its steps one by one.
        whole = [_known(x) for x in _bind(eqn, [x.array for x in known])] if runs else None
        if whole is not None and not any(x.kind for x in whole):
            return whole
        return _scan(eqn, operands, here) if name == SCAN else _while(eqn, operands, here)
    return _op(eqn, known, here) if runs else [None] * len(eqn.outvars)


def _branch(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """Run the branch of a `cond` that its index takes."""
    index, *rest = operands
    if index is None:
        return [None] * len(eqn.outvars)
    branches = eqn.params["branches"]
    return _walk(branches[min(max(int(index.array), 0), len(branches) - 1)], rest, here.within(eqn))


def _scan(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """Run every step of a scan; the number of a step is its place in the stacked arrays, also in reverse."""
    layout = jaxprs.scan_layout(eqn)
    first = layout.num_consts + layout.num_carry
    consts, carry, xs = operands[: layout.num_consts], operands[layout.num_consts : first], operands[first:]
    rows: list[_Values] = [()] * layout.length
    for step in reversed(range(layout.length)) if layout.reverse else range(layout.length):
        row = [_at(x, step) for x in xs]
        results = _walk(eqn.params["jaxpr"], [*consts, *carry, *row], here.within(eqn, step))
        carry, rows[step] = results[: layout.num_carry], results[layout.num_carry :]
    return [*carry, *(_stacked(column) for column in zip(*rows, strict=True))]


def _while(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """Run the steps of a while loop, as long as its condition is known and true."""
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:first], operands[first:second], operands[second:]
    for count in itertools.count():
        step = int(carry[0].array) if here.is_ours(eqn) and carry and _is_number(carry[0]) else count
        inside = here.within(eqn, step)
        going = _walk(eqn.params["cond_jaxpr"], [*cond_consts, *carry], inside)[0]
        if going is None:
            break
        if not bool(going.array):
            return carry
        carry = _walk(eqn.params["body_jaxpr"], [*body_consts, *carry], inside)
    return [None] * len(eqn.outvars)


def _is_number(x: _KnownArray | None) -> TypeGuard[_KnownArray]:
    return x is not None and jnp.issubdtype(x.array.dtype, jnp.integer) and not x.array.shape


def _at(x: _KnownArray | None, step: int) -> _KnownArray | None:
    """Return one step of a stacked value."""
    if x is None:
        return None
    one = _known(_slice(x.array, step))
    return replace(one, blame=x.blame) if one.kind else one


def _stacked(column: _Values) -> _KnownArray | None:
    """Return the stacked values of all steps; None unless all are known."""
    known = [x for x in column if x is not None]
    if len(known) < len(column):
        return None
    arrays = [x.array for x in known]
    # XLA takes minutes to compile one program that joins thousands of arrays.
    plain = abstract.is_plain(jax.typeof(arrays[0]))
    array = jnp.asarray(np.stack([np.asarray(x) for x in arrays])) if plain else jnp.stack(arrays)
    return _KnownArray(array, max(x.kind for x in known), _first([x.blame for x in known]))


def _op(eqn: jaxprs.Equation, operands: Sequence[_KnownArray], here: _Here) -> list[_KnownArray]:
    """Run an equation without bodies, and blame it for the bad numbers that it makes."""
    arrays = _bind(eqn, [x.array for x in operands])
    results = [_known(x) for x in arrays]
    if not any(x.kind for x in results):
        return results
    traced = _traced(eqn, operands, [_marks(x) for x in arrays])
    blames = (_blames(eqn, operands, *pair, here) for pair in zip(results, traced, strict=True))
    return [replace(x, blame=blame) for x, blame in zip(results, blames, strict=True)]


@dataclass(frozen=True)
class _Trace:
    """For one result: the kind of the worst number that the op itself made, and the bad operands that it passed on."""

    own: int
    handed: Sequence[int]


def _traced(eqn: jaxprs.Equation, operands: Sequence[_KnownArray], marks: Sequence[np.ndarray]) -> list[_Trace]:
    """Trace each result of an op with a bad result.

    The op itself made the numbers that stay bad with every replacement of the bad operands. It passed on an operand if
    this operand alone makes other numbers of the result bad.
    """
    bad = [i for i, x in enumerate(operands) if x.kind]
    if not bad:
        return [_Trace(int(m.max(initial=0)), []) for m in marks]
    if AS_GIVEN & {eqn.primitive.name, *jaxprs.inner_primitives(eqn)}:
        return [_Trace(0, bad) for _ in marks]
    cleaned = [_marked(eqn, operands, bad, filler) for filler in _FILLERS]
    alone = [marks if len(bad) == 1 else _marked(eqn, operands, [j for j in bad if j != i]) for i in bad]
    traced = []
    for k, both in enumerate(zip(*cleaned, strict=True)):
        own = np.minimum(*both)
        handed = [i for i, one in zip(bad, alone, strict=True) if np.any((one[k] > 0) & (own == 0))]
        everyone = [] if own.any() else bad  # such as the minimum of two infinities, which needs both
        traced.append(_Trace(int(own.max(initial=0)), handed or everyone))
    return traced


def _blames(
    eqn: jaxprs.Equation, operands: Sequence[_KnownArray], result: _KnownArray, trace: _Trace, here: _Here
) -> Mapping[int, _Blame]:
    """Return the ops to blame for a result: the ops behind operands passed on, and this op for its own numbers."""
    if not result.kind:
        return {}
    handed = [operands[i] for i in trace.handed]
    blame, kind = _first([x.blame for x in handed]), trace.own
    if not kind and not blame and result.kind == _NAN and all(x.kind == _INF for x in handed):
        kind = _NAN  # made of legitimate infinities
    return _first([blame, {kind: _blame(eqn, kind, operands, here)}]) if kind else blame


def _first(blames: Sequence[Mapping[int, _Blame]]) -> dict[int, _Blame]:
    """Return the earliest op to blame for each kind."""
    every = [(kind, one) for blame in blames for kind, one in blame.items()]
    return dict(sorted(every, key=lambda pair: -pair[1].order))


def _blame(eqn: jaxprs.Equation, kind: int, operands: Sequence[_KnownArray], here: _Here) -> _Blame:
    texts = tuple(described(x.array) for x in operands)
    source, scope = here.source_of(eqn), here.scope_of(eqn)
    culprit = Culprit(eqn.primitive.name, source, scope, _KINDS[kind], here.steps, texts)
    return _Blame(next(here.clock), culprit)


def _bind(eqn: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
    """Run one equation under the settings that it was traced with."""
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _marked(
    eqn: jaxprs.Equation, operands: Sequence[_KnownArray], cleaned: Sequence[int], filler: float = 0.5
) -> list[np.ndarray]:
    """Return the marks of an op's results, with the bad numbers of the `cleaned` operands replaced."""
    arrays = [_cleaned(x.array, filler) if i in cleaned else x.array for i, x in enumerate(operands)]
    return [_marks(x) for x in _bind(eqn, arrays)]


def _known(x: Any) -> _KnownArray:
    return _KnownArray(x, int(_worst(x)) if _is_float(x) else 0)


def _is_float(x: Any) -> bool:
    aval: Any = jax.typeof(x)
    return abstract.is_plain(aval) and is_inexact(aval.dtype)


def _marks(x: Any) -> np.ndarray:
    """Return the kind of each number of an array: 0, `_INF` or `_NAN`."""
    return np.asarray(_badness(x)) if _is_float(x) else np.zeros((), np.int8)


@jax.jit
def _all_finite(arrays: Sequence[Any]) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(_wide(x))) for x in arrays]).all()


@jax.jit
def _worst(x: Any) -> jax.Array:
    return jnp.max(_badness(x), initial=0)


@jax.jit
def _badness(x: Any) -> jax.Array:
    wide = _wide(x)
    return jnp.where(jnp.isnan(wide), jnp.int8(_NAN), jnp.where(jnp.isinf(wide), jnp.int8(_INF), jnp.int8(0)))


@functools.partial(jax.jit, static_argnums=1)
def _cleaned(x: Any, filler: float) -> jax.Array:
    return jnp.where(jnp.isfinite(_wide(x)), x, jnp.asarray(filler, jnp.asarray(x).dtype))


@jax.jit
def _slice(x: Any, step: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, step, keepdims=False)


def _wide(x: Any) -> jax.Array:
    """Convert an array to a dtype that supports `isnan` and `isinf`: narrow dtypes become float32."""
    array = jnp.asarray(x)
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array
