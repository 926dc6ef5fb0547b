"""Make primitives of our own, with rules for JAX's transformations."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import util as _util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jointcut.partition.program.jax.abstract import full, struct, tangent_aval
from jointcut.partition.program.jax.jaxprs import (
    ClosedJaxpr,
    Equation,
    Var,
    constants_first,
    fresh,
    inner_primitives,
    opened,
)
from jointcut.partition.program.jax.runtime import evaluate

WHILE = "while"  # the primitive of JAX's loops


def mapped(closed: ClosedJaxpr, axis: Any, dims: Sequence[int | None]) -> tuple[ClosedJaxpr, list[Any], list[Any]]:
    """A jaxpr over one more axis, given its position in each input (None where an input does not have the axis).

    Returns a jaxpr without constants, the values of its new leading inputs, and the axis's position in each output.
    """
    made, out_dims = _batching.batch_jaxpr2(closed, axis, tuple(dims))
    jaxpr, consts = opened(made)
    if consts:
        made = constants_first(jaxpr)
    return made, consts, list(out_dims)


def with_axis(axis: Any, dim: int | None, aval: Any) -> Any:
    """The abstract value with the mapped axis at a position; unchanged if that is None."""
    return aval if dim is None else _core.unmapped_aval(axis.size, dim, aval, axis.explicit_mesh_axis)


class CallRules(abc.ABC):
    """How one of our calls is run, differentiated and mapped. The jaxpr in its parameters says what it computes."""

    @abc.abstractmethod
    def run(self, *flat: Any) -> list[Any]:
        """The outputs, computed outside of all transformations."""

    @abc.abstractmethod
    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """The outputs and their tangents; None stands for a tangent that is zero."""

    @abc.abstractmethod
    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """The same function over one more axis, as in `mapped`, and the axis's position in each output."""

    @property
    @abc.abstractmethod
    def forward(self) -> CallRules:
        """The rules for `jax.linearize`, which asks for no backward."""

    #: The function that is called, by name and number: `loss#3`; empty where nobody gave one.
    name: str = ""

    #: The number of leading inputs in which the call is not linear; None if it is not known to be linear in the others.
    constants: int | None = None

    def halves(self, mask: tuple[bool, ...]) -> tuple[Any, Sequence[Any]] | None:
        """The forward and backward for some differentiated inputs, and the constants that they take first.

        Returns None, as it does by default, where the call is differentiated by its `jvp`.
        """
        del mask

    def nested(self) -> Any:
        """The step of a loop that is cut on its own (`bodies.Nested`); None for other calls."""
        return None

    def with_checkpoints(self, number: int) -> CallRules:
        """The call of a loop, or of its way back, with another number of checkpoints; only if `nested` says so."""
        raise NotImplementedError

    def runs(self) -> Sequence[tuple[ClosedJaxpr, int]] | None:
        """The programs that a call runs, each with its expected number of runs; None for its jaxpr, once."""
        return None

    def parted(self, known: Sequence[Any | None]) -> tuple[list[Any], Callable[..., list[Any]]] | None:
        """The leading outputs, computed from the known inputs, and a function of the other inputs for the rest.

        An input that is not known is None in `known`. Returns None, as it does by default, where every output needs
        every input.
        """
        del known

    def __init_subclass__(cls) -> None:
        """Make JAX's caches hold objects of this class weakly, although they are parameters of a primitive."""
        _util.weakref_cache_key_types.add(cls)


def nested_in(eqn: Equation) -> Any:
    """As `CallRules.nested`; None for an equation that is no such call."""
    rules = eqn.params.get("rules")
    return rules.nested() if isinstance(rules, CallRules) else None


def with_checkpoints(eqn: Equation, number: int) -> Equation:
    """As `CallRules.with_checkpoints`; arrays of other types are new variables."""
    rules = eqn.params["rules"].with_checkpoints(number)
    inner, _ = opened(rules.closed)

    def renewed(mine: Sequence[Any], its: Sequence[Any]) -> list[Any]:
        return [old if old.aval.shape == v.aval.shape else fresh(v.aval) for old, v in zip(mine, its, strict=True)]

    invars, outvars = renewed(eqn.invars, inner.invars), renewed(eqn.outvars, inner.outvars)
    return eqn.replace(invars=invars, outvars=outvars, params={"jaxpr": rules.closed, "rules": rules})


def runs_of(eqn: Equation) -> Sequence[tuple[ClosedJaxpr, int]] | None:
    """As `CallRules.runs`; None for an equation that is no such call."""
    rules = eqn.params.get("rules")
    return rules.runs() if isinstance(rules, CallRules) else None


@dataclass(frozen=True)
class Early:
    """The part of a call that can run before all inputs are known: it takes `inputs` and gives the first outputs."""

    prim: Any
    jaxpr: ClosedJaxpr
    rules: CallRules
    inputs: slice


def call_primitive(name: str, early: Callable[[Any], Early] | None = None) -> Any:
    """A primitive `p(*flat, jaxpr=ClosedJaxpr, rules=CallRules)`: a jaxpr with rules of its own.

    `early` returns, for the rules of a call, the part of the call that `jax.checkpoint` can run at once.
    """
    prim = jex.Primitive(name)
    prim.multiple_results = True
    prim.def_impl(lambda *flat, rules, **params: rules.run(*flat))
    prim.to_lojax = lambda *flat, rules, **params: rules.run(*flat)  # JAX 0.12 asks for it where a body has a `nonzero`
    prim.def_effectful_abstract_eval(_call_abstract)
    ad.primitive_jvps[prim] = _call_jvp
    ad.primitive_transposes[prim] = functools.partial(_call_transpose, prim)
    _ad.primitive_linearizations[prim] = functools.partial(_call_linearized, prim)
    pe.custom_partial_eval_rules[prim] = functools.partial(_call_parted, prim)
    if early is not None:
        pe.partial_eval_jaxpr_custom_rules[prim] = functools.partial(_call_under_checkpoint, early)
    batching.fancy_primitive_batchers[prim] = functools.partial(_call_mapped, prim)
    _checkify.error_checks[prim] = _call_checked
    mlir.register_lowering(prim, mlir.lower_fun(_call_evaluated, multiple_results=True))
    return prim


def _call_evaluated(*flat: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> list[Any]:
    del rules
    return evaluate(jaxpr, *flat)


def _call_abstract(*avals: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> tuple[list[Any], Any]:
    del avals, rules
    inner, _ = opened(jaxpr)
    return [v.aval for v in inner.outvars], inner.effects


def _call_jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, rules: CallRules) -> Any:
    del jaxpr
    outs, moved = rules.jvp(primals, [None if type(t) is ad.Zero else t for t in tangents])
    zeros = (ad.Zero(tangent_aval(jax.typeof(out))) for out in outs)
    return outs, [zero if t is None else t for zero, t in zip(zeros, moved, strict=True)]


def _call_linearized(prim: Any, is_vjp: bool, nonzeros: Any, *primals: Any, rules: CallRules, **params: Any) -> Any:
    chosen = rules if is_vjp else rules.forward
    return _ad.fallback_linearize_rule(prim, is_vjp, nonzeros, *primals, rules=chosen, **params)


def _call_parted(prim: Any, trace: Any, *tracers: Any, rules: CallRules, **params: Any) -> Any:
    known = [t.pval.get_known() for t in tracers]
    parted = None if all(x is not None for x in known) else rules.parted(known)
    if parted is None:
        return trace.default_process_primitive(prim, tracers, {**params, "rules": rules})
    values, rest = parted
    with _core.set_current_trace(trace):
        return [*values, *rest(*(t for t, x in zip(tracers, known, strict=True) if x is None))]


def _call_under_checkpoint(
    early: Callable[[Any], Early], saveable: Any, unknown: Any, at_hand: Any, eqn: Equation
) -> Any:
    """Run the early call at once where its inputs are known. The whole call, with that part, is left for later."""
    del saveable
    first = early(eqn.params["rules"])
    outputs = eqn.outvars[: len(opened(first.jaxpr)[0].outvars)]
    waits = any(unknown[first.inputs])
    params = {"jaxpr": first.jaxpr, "rules": first.rules}
    now = eqn.replace(primitive=first.prim, invars=eqn.invars[first.inputs], outvars=outputs, params=params)
    late = [waits or i >= len(outputs) for i in range(len(eqn.outvars))]
    needed = [v for v, here in zip(eqn.invars, at_hand, strict=True) if isinstance(v, Var) and not here]
    return None if waits else now, eqn, late, [True] * len(late), needed


def _call_mapped(prim: Any, axis: Any, operands: Any, dims: Any, *, rules: CallRules, **params: Any) -> Any:
    if all(d is None for d in dims):
        outs = prim.bind(*operands, rules=rules, **params)
        return outs, [None] * len(outs)
    call, out_dims = rules.mapped(axis, tuple(dims))
    return call(*operands), out_dims


def _call_transpose(prim: Any, cts: Any, *operands: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> list[Any]:
    asked = [ad.is_undefined_primal(x) for x in operands]

    def linear(*xs: Any) -> list[Any]:
        given = iter(xs)
        return evaluate(jaxpr, *(next(given) if wanted else x for wanted, x in zip(asked, operands, strict=True)))

    avals = [x.aval for x, wanted in zip(operands, asked, strict=True) if wanted]
    if any(eqn.primitive.name == WHILE or WHILE in inner_primitives(eqn) for eqn in opened(jaxpr)[0].eqns):
        return _transposed_by_derivative(functools.partial(prim.bind, jaxpr=jaxpr, rules=rules), cts, asked, operands)
    if rules.constants is None or any(asked[: rules.constants]):
        transposed = jax.linear_transpose(linear, *map(struct, avals))
    else:  # it may test its inputs for zero: JAX transposes the derivative of that, but not the test
        transposed = jax.vjp(linear, *(full(aval, 0) for aval in avals))[1]
    back = iter(transposed([ad.instantiate_zeros(ct) for ct in cts]))
    return [next(back) if wanted else None for wanted in asked]


def _transposed_by_derivative(
    call: Callable[..., Any], cts: Sequence[Any], asked: Sequence[bool], operands: Sequence[Any]
) -> list[Any]:
    """The transpose of a call that holds loops, which JAX cannot transpose: its derivative is the linear map itself."""
    zeros = [full(x.aval, 0) for x, wanted in zip(operands, asked, strict=True) if wanted]

    def linear(*xs: Any) -> list[Any]:
        given = iter(xs)
        return call(*(next(given) if wanted else x for wanted, x in zip(asked, operands, strict=True)))

    outs, pull = jax.vjp(linear, *zeros)
    inexact = (jnp.issubdtype(out.dtype, jnp.inexact) for out in outs)
    triples = zip(outs, cts, inexact, strict=True)
    back = iter(
        pull([ad.instantiate_zeros(ct) if on else np.zeros(out.shape, jax.dtypes.float0) for out, ct, on in triples])
    )
    return [next(back) if wanted else None for wanted in asked]


def _call_checked(*given: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> Any:
    del rules
    front = len(given) - len(opened(jaxpr)[0].invars)
    *context, error, enabled = given[:front]  # JAX 0.12 puts a context in front
    return _checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *given[front:])


@dataclass(frozen=True, eq=False)
class LinearRules:
    """The functions that define a linear map: the avals of its results, its value and its transpose.

    All take `(residuals, linear)` as flat lists, except `transpose`, which takes `(residuals, cotangents)`. There None
    stands for a zero, in the cotangents and in the results. `twice` is called when the map itself is differentiated.
    That is then done through `apply`.
    """

    avals: Callable[..., list[Any]]
    apply: Callable[..., list[Any]]
    transpose: Callable[..., list[Any | None]]
    twice: Callable[[], None] = lambda: None

    def mapped(self, axis: Any, residuals: Sequence[int | None], linear: Sequence[int | None]) -> LinearRules:
        """The same map over one more axis, given its position in each operand (None: absent); it leads each result."""
        over = functools.partial(
            jax.vmap, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name or None
        )

        def inner(avals: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
            pairs = zip(avals, dims, strict=True)
            return [a if d is None else _core.mapped_aval(axis.size, d, a) for a, d in pairs]

        def avals(given: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
            outs = self.avals(inner(given, residuals), inner(moved, linear))
            return [_core.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in outs]

        def apply(given: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
            return over(self.apply, in_axes=(list(residuals), list(linear)))(list(given), list(moved))

        def transpose(given: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
            back = over(self.transpose, in_axes=(list(residuals), 0))(list(given), list(cotangents))
            pairs = zip(back, linear, strict=True)
            return [ct if ct is None else ct.sum(0) if d is None else jnp.moveaxis(ct, 0, d) for ct, d in pairs]

        return LinearRules(avals, apply, transpose, self.twice)


def leaving_primitive(name: str) -> Any:
    """A primitive `p(*values, number=int, returns=avals)` at which a program is left for other work."""
    prim = jex.Primitive(name)
    prim.multiple_results = True
    prim.def_abstract_eval(lambda *avals, number, returns: list(returns))
    return prim


def elementwise_primitive(name: str, function: Callable[..., Any]) -> Any:
    """A primitive `p(x, dtype=dtype)` that computes `function(x, dtype)`, and whose derivative is just a conversion.

    A `jax.custom_jvp` will not do: in the steps of a loop JAX 0.10 forgets it for second derivatives.
    """
    prim = jex.Primitive(name)
    prim.def_impl(jax.jit(function, static_argnums=1, static_argnames="dtype"))
    prim.def_abstract_eval(lambda x, *, dtype: x.update(dtype=jnp.dtype(dtype), weak_type=False))
    ad.primitive_jvps[prim] = lambda xs, ts, *, dtype: (prim.bind(*xs, dtype=dtype), _converted(ts[0], dtype))
    batching.defvectorized(prim)
    mlir.register_lowering(prim, mlir.lower_fun(function, multiple_results=False))
    return prim


def _converted(tangent: Any, dtype: Any) -> Any:
    return ad.Zero(tangent.aval.update(dtype=jnp.dtype(dtype))) if type(tangent) is ad.Zero else tangent.astype(dtype)


def linear_primitive(name: str) -> Any:
    """A primitive `p(*residuals, *linear, rules=LinearRules, num_residuals=n)` that is linear in its last operands.

    Reverse mode calls `rules.transpose`; forward mode and lowering follow `rules.apply`.
    """
    prim = jex.Primitive(name)
    prim.multiple_results = True

    def apply(*operands: Any, rules: LinearRules, num_residuals: int) -> list[Any]:
        return rules.apply(operands[:num_residuals], operands[num_residuals:])

    def abstract(*avals: Any, rules: LinearRules, num_residuals: int) -> list[Any]:
        return rules.avals(avals[:num_residuals], avals[num_residuals:])

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        params["rules"].twice()
        filled = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(lambda *xs: apply(*xs, **params), tuple(primals), tuple(filled))

    def transpose(cts: Any, *operands: Any, rules: LinearRules, num_residuals: int) -> list[Any]:
        linear = operands[num_residuals:]
        known = [None if type(ct) is ad.Zero else ct for ct in cts]
        back = rules.transpose(operands[:num_residuals], known)
        return [None] * num_residuals + [
            (ad.Zero(x.aval) if b is None else b) if ad.is_undefined_primal(x) else None
            for b, x in zip(back, linear, strict=True)
        ]

    def batch(axis: Any, operands: Any, dims: Any, *, rules: LinearRules, num_residuals: int) -> Any:
        if all(d is None for d in dims):
            outs = prim.bind(*operands, rules=rules, num_residuals=num_residuals)
            return outs, [None] * len(outs)
        over = rules.mapped(axis, dims[:num_residuals], dims[num_residuals:])
        outs = prim.bind(*operands, rules=over, num_residuals=num_residuals)
        return outs, [0] * len(outs)

    prim.def_impl(lambda *operands, **params: jax.jit(lambda *xs: apply(*xs, **params))(*operands))
    prim.def_abstract_eval(abstract)
    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose
    batching.fancy_primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(apply, multiple_results=True))
    return prim


_util.weakref_cache_key_types.add(LinearRules)
