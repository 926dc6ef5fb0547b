"""Name the first op that made a NaN or an infinity.

`is_finite` is the cheap question, asked after every run in debug mode. `first_nonfinite` is the search once the answer
is no: it runs a jaxpr again, one equation at a time, also inside calls, the taken branch of a `cond` and the steps of
loops, and keeps beside every array that is not finite the ops to blame for it. What follows from that:

- An op that hands on a NaN or an infinity of its operands is not to blame, and neither is one whose bad numbers a
  `where` has taken out again. Only what reaches a result counts.
- Infinities that were passed in or written in the program (the -inf of a mask, the start of a max) are legitimate, but
  who makes a NaN of them is to blame, and so is who takes a NaN that is written in the program.
- Who makes an infinity of finite numbers is to blame for all that comes of it.
- A NaN is worse than an infinity: a NaN is traced to the op that made the first NaN, if there is one, and to the one
  that made the first infinity otherwise.

Whether an op made its bad numbers or handed them on is found out by running it again with harmless numbers in the place
of the bad ones that it was given. In one array that holds bad numbers of several ops the earliest counts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.partition.program import jaxprs
from jointcut.wrappers.metadata.convention import is_inexact

_INF, _NAN = 1, 2  # how bad a number is; 0 is finite
_KINDS = {_INF: "Inf", _NAN: "NaN"}
_CALLS = {  # name -> the parameter that holds what is called
    **dict.fromkeys(("jit", "jointcut_call", "jointcut_waiting", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
# Not run on numbers that the program never had: users' code, what may not end, what a singular matrix breaks.
_AS_GIVEN = {"pure_callback", "while", "cholesky", "custom_linear_solve", "triangular_solve", "tridiagonal_solve"}
_FILLERS = (0.5, 2.0)  # hardly an op makes bad numbers of both: log1p, acosh, atanh and pow do of one at most


@dataclass(frozen=True)
class Culprit:
    """The op that turned good numbers into bad ones, where it stands, and what it was given."""

    primitive: str
    source: str
    scope: str
    kind: str  # "NaN" or "Inf"
    steps: tuple[int, ...]  # of the loops around it, outermost first, counted from 0
    operands: tuple[str, ...]  # "float32[4] in [-1, 3]"

    def __str__(self) -> str:
        """One sentence: `log made a NaN out of float32[4] in [-1, 3] at model.py:12 (loss), scope jvp(block)`."""
        text = f"{self.primitive} made {'a NaN' if self.kind == 'NaN' else 'an infinity'}"
        more = [f"{len(self.operands) - 4} more"] if len(self.operands) > 4 else []
        text += f" out of {_listed([*self.operands[:4], *more])}" if self.operands else ""
        text += f" at {self.source}" if self.source else ""
        text += f", scope {self.scope}" if self.scope else ""
        if self.steps:
            plural = "s" if len(self.steps) > 1 else ""
            order = "outermost first, " if plural else ""
            text += f", in step{plural} {_listed(self.steps)} of the loop{plural} around it ({order}counted from 0)"
        return text + "."


@dataclass(frozen=True)
class _Blame:
    """A culprit, and its place in the order of execution."""

    order: int
    culprit: Culprit


@dataclass(frozen=True)
class _Known:
    """An array, how bad its worst number is, and for each kind of badness made in it the first to blame.

    What is not known, because it depends on an effect that must not happen again, is None in its place.
    """

    array: Any
    kind: int = 0
    blame: Mapping[int, _Blame] = field(default_factory=dict)


_Values = Sequence[_Known | None]


@dataclass(frozen=True)
class _Here:
    """Where the walk stands: the clock, and of what is around it the steps of loops, the scope and the source."""

    clock: Iterator[int]
    steps: tuple[int, ...] = ()
    scope: str = ""
    source: str = ""

    def within(self, eqn: jaxprs.Equation, step: int | None = None) -> _Here:
        """Inside what an equation holds; of a loop, at one step."""
        steps = self.steps if step is None else (*self.steps, step)
        return _Here(self.clock, steps, self.scope_of(eqn), self.source_of(eqn))

    def scope_of(self, eqn: jaxprs.Equation) -> str:
        """The name stack of an equation, whose own starts at the jaxpr that holds it."""
        return "/".join(filter(None, (self.scope, jaxprs.scope_of(eqn))))

    def source_of(self, eqn: jaxprs.Equation) -> str:
        """The user's line that made an equation; inside a function of a library, the line that called it."""
        return jaxprs.source_of(eqn) or self.source


def is_finite(values: Sequence[Any]) -> bool:
    """Whether all floating and complex arrays among some values are finite, asked of the device in one program."""
    floats = [x for x in values if _is_float(x)]
    return not floats or bool(_all_finite(floats))


def first_nonfinite(closed: Any, args: Sequence[Any]) -> Culprit | None:
    """Run a jaxpr on concrete arrays, and name the first op to blame for a result that is not finite.

    Results with a NaN come before those with an infinity. None means that all results are finite now (a compiled
    program may round otherwise), or that what is bad in them was passed in (an argument, an array constant), is an
    infinity written in the program, or went through an effect. Effects do not happen again: a print or a callback with
    effects is left out and a reference is neither read nor written, so that nothing is known of what depends on their
    results. A pure callback is called, as JAX may do at any time.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        results = _walk(closed, [_known(x) for x in args], _Here(itertools.count()))
    bad = [x for x in results if x is not None and x.blame]
    for kind in (_NAN, _INF):
        blame = _first([x.blame for x in bad if x.kind == kind])
        if blame:
            return blame.get(kind, min(blame.values(), key=lambda b: b.order)).culprit
    return None


def _walk(closed: Any, operands: _Values, here: _Here) -> list[_Known | None]:
    """Run a jaxpr one equation at a time, forgetting each value after its last use."""
    jaxpr, consts = jaxprs.opened(closed)
    given: list[_Known | None] = [*map(_known, consts), *operands]
    env: dict[Any, _Known | None] = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def read(atom: jaxprs.Atom) -> _Known | None:
        return _known(atom.val) if isinstance(atom, jaxprs.Literal) else env[atom]

    for eqn, finished in zip(jaxpr.eqns, _last_uses(jaxpr), strict=True):
        results = _run(eqn, [_guarded(eqn, read(atom), atom, here) for atom in eqn.invars], here)
        env.update(zip(eqn.outvars, results, strict=True))
        for var in finished:
            env.pop(var, None)
    return [read(atom) for atom in jaxpr.outvars]


def _last_uses(jaxpr: jaxprs.Jaxpr) -> list[list[Any]]:
    """For each equation the variables that nothing after it reads."""
    later = {atom for atom in jaxpr.outvars if not isinstance(atom, jaxprs.Literal)}
    finished = []
    for eqn in reversed(jaxpr.eqns):
        met = {a for a in (*eqn.invars, *eqn.outvars) if not isinstance(a, jaxprs.Literal)}
        finished.append(list(met - later))
        later |= met
    return finished[::-1]


def _guarded(eqn: jaxprs.Equation, operand: _Known | None, atom: jaxprs.Atom, here: _Here) -> _Known | None:
    """An operand; where it is a NaN written in the program, the op that takes it is to blame."""
    if operand is None or operand.kind != _NAN or not isinstance(atom, jaxprs.Literal):
        return operand
    return replace(operand, blame={_NAN: _blame(eqn, _NAN, [operand], here)})


def _run(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """Run one equation: go into what it holds, or run it as an op unless effects or unknown operands forbid it."""
    name = eqn.primitive.name
    if name in _CALLS:
        return _walk(eqn.params[_CALLS[name]], operands, here.within(eqn))
    if name == "cond":
        return _branch(eqn, operands, here)
    known = [x for x in operands if x is not None]
    runs = len(known) == len(operands) and not jaxprs.has_effects(eqn)
    if name in ("scan", "while") and eqn.params.get("length") != 0:
        # A compiled loop is far quicker than its steps one by one, and mostly finite.
        whole = [_known(x) for x in _bind(eqn, [x.array for x in known])] if runs else None
        if whole is not None and not any(x.kind for x in whole):
            return whole
        return _scan(eqn, operands, here) if name == "scan" else _while(eqn, operands, here)
    return _op(eqn, known, here) if runs else [None] * len(eqn.outvars)


def _branch(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """The branch of a `cond` that its index takes."""
    index, *rest = operands
    if index is None:
        return [None] * len(eqn.outvars)
    branches = eqn.params["branches"]
    return _walk(branches[min(max(int(index.array), 0), len(branches) - 1)], rest, here.within(eqn))


def _scan(eqn: jaxprs.Equation, operands: _Values, here: _Here) -> _Values:
    """Every step of a scan; a step's number is its place in the stacked arrays, also where the scan runs in reverse."""
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
    """Every step of a while loop, for as long as its condition is known and holds."""
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = operands[:first], operands[first:second], operands[second:]
    for step in itertools.count():
        inside = here.within(eqn, step)
        going = _walk(eqn.params["cond_jaxpr"], [*cond_consts, *carry], inside)[0]
        if going is None:
            break
        if not bool(going.array):
            return carry
        carry = _walk(eqn.params["body_jaxpr"], [*body_consts, *carry], inside)
    return [None] * len(eqn.outvars)


def _at(x: _Known | None, step: int) -> _Known | None:
    """One step of a stacked value."""
    if x is None:
        return None
    one = _known(_slice(x.array, step))
    return replace(one, blame=x.blame) if one.kind else one


def _stacked(column: _Values) -> _Known | None:
    """The values of all steps as one; it is not known unless all of them are."""
    known = [x for x in column if x is not None]
    if len(known) < len(column):
        return None
    arrays = [x.array for x in known]
    # One program that joins thousands of arrays takes XLA minutes to compile.
    plain = jaxprs.is_plain(jax.typeof(arrays[0]))
    array = jnp.asarray(np.stack([np.asarray(x) for x in arrays])) if plain else jnp.stack(arrays)
    return _Known(array, max(x.kind for x in known), _first([x.blame for x in known]))


def _op(eqn: jaxprs.Equation, operands: Sequence[_Known], here: _Here) -> list[_Known]:
    """Run an equation that holds nothing to go into, and blame it for the bad numbers that it made."""
    arrays = _bind(eqn, [x.array for x in operands])
    results = [_known(x) for x in arrays]
    if not any(x.kind for x in results):
        return results
    traced = _traced(eqn, operands, [_marks(x) for x in arrays])
    blames = (_blames(eqn, operands, *pair, here) for pair in zip(results, traced, strict=True))
    return [replace(x, blame=blame) for x, blame in zip(results, blames, strict=True)]


@dataclass(frozen=True)
class _Trace:
    """How bad the numbers are that an op made itself in one result, and which bad operands it handed on there."""

    own: int
    handed: Sequence[int]


def _traced(eqn: jaxprs.Equation, operands: Sequence[_Known], marks: Sequence[np.ndarray]) -> list[_Trace]:
    """Trace each result of an op that has something bad in it.

    The op made itself what stays bad when the bad numbers of all operands are replaced, whatever they are replaced by,
    and it hands on an operand with which alone something else of the result becomes bad.
    """
    bad = [i for i, x in enumerate(operands) if x.kind]
    if not bad:
        return [_Trace(int(m.max(initial=0)), []) for m in marks]
    if _AS_GIVEN & {eqn.primitive.name, *jaxprs.inner_primitives(eqn)}:
        return [_Trace(0, bad) for _ in marks]
    cleaned = [_marked(eqn, operands, bad, filler) for filler in _FILLERS]
    alone = [marks if len(bad) == 1 else _marked(eqn, operands, [j for j in bad if j != i]) for i in bad]
    traced = []
    for k, both in enumerate(zip(*cleaned, strict=True)):
        own = np.minimum(*both)
        found = [i for i, one in zip(bad, alone, strict=True) if np.any((one[k] > 0) & (own == 0))]
        everyone = [] if own.any() else bad  # such as the minimum of two infinities, which takes both
        traced.append(_Trace(int(own.max(initial=0)), found or everyone))
    return traced


def _blames(
    eqn: jaxprs.Equation, operands: Sequence[_Known], result: _Known, trace: _Trace, here: _Here
) -> Mapping[int, _Blame]:
    """Who is to blame for a result: those of the operands handed on, and the op for what it made."""
    if not result.kind:
        return {}
    handed = [operands[i] for i in trace.handed]
    blame, made = _first([x.blame for x in handed]), trace.own
    if not made and not blame and result.kind == _NAN and all(x.kind == _INF for x in handed):
        made = _NAN  # of legitimate infinities
    return _first([blame, {made: _blame(eqn, made, operands, here)}]) if made else blame


def _first(blames: Sequence[Mapping[int, _Blame]]) -> dict[int, _Blame]:
    """The earliest to blame for each kind."""
    every = [(kind, one) for blame in blames for kind, one in blame.items()]
    return dict(sorted(every, key=lambda pair: -pair[1].order))


def _blame(eqn: jaxprs.Equation, kind: int, operands: Sequence[_Known], here: _Here) -> _Blame:
    described = tuple(_described(x.array) for x in operands)
    source, scope = here.source_of(eqn), here.scope_of(eqn)
    culprit = Culprit(eqn.primitive.name, source, scope, _KINDS[kind], here.steps, described)
    return _Blame(next(here.clock), culprit)


def _bind(eqn: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
    """Run one equation under the settings that it was traced with."""
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _marked(
    eqn: jaxprs.Equation, operands: Sequence[_Known], cleaned: Sequence[int], filler: float = 0.5
) -> list[np.ndarray]:
    """The marks of an op's results with the bad numbers of some operands replaced."""
    arrays = [_cleaned(x.array, filler) if i in cleaned else x.array for i, x in enumerate(operands)]
    return [_marks(x) for x in _bind(eqn, arrays)]


def _known(x: Any) -> _Known:
    return _Known(x, int(_worst(x)) if _is_float(x) else 0)


def _is_float(x: Any) -> bool:
    aval: Any = jax.typeof(x)
    return jaxprs.is_plain(aval) and is_inexact(aval.dtype)


def _marks(x: Any) -> np.ndarray:
    """How bad each number of an array is."""
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
    """An array in a format that has all of the tests: the narrow ones fit into float32."""
    array = jnp.asarray(x)
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def _described(x: Any) -> str:
    """`float32[4] in [-1, 3]`, `float32[] = 0`, `complex64[2] of magnitude in [0, 1]`, `key<fry>[]`."""
    aval: Any = jax.typeof(x)
    text = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    if not jaxprs.is_plain(aval) or 0 in aval.shape:
        return text
    numbers = np.asarray(x)
    if jnp.issubdtype(numbers.dtype, np.complexfloating):
        text, numbers = f"{text} of magnitude", np.abs(numbers)
    numbers = numbers.astype(np.float64 if is_inexact(numbers.dtype) else np.int64)
    digits = ".4g" if is_inexact(numbers.dtype) else "d"
    if not numbers.shape:
        return f"{text} = {numbers[()]:{digits}}"
    real = numbers[~np.isnan(numbers)]
    found = [f"in [{real.min():{digits}}, {real.max():{digits}}]"] if real.size else []
    return f"{text} {' or '.join([*found, *['NaN'][: numbers.size - real.size]])}"


def _listed(items: Sequence[Any]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
