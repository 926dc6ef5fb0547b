"""Tie the forward and backward programs into jax.grad.

Inside somebody's `jax.grad`, `jax.vmap` or `jax.jit` a function of ours is a `jax.custom_jvp` call. Its rule asks which
inputs are differentiated, cuts the joint program for just those, runs the forward half, and returns tangents through a
linear map that knows both directions: reverse mode transposes it into the backward half, forward mode
(`jax.jvp`, `jax.jacfwd`) differentiates the function itself. So reverse, forward and mixed modes all work, to any
order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jointcut.partition import jaxprs, verify
from jointcut.partition.emit import Halves
from jointcut.partition.graph import Graph
from jointcut.wrappers.convention import is_inexact
from jointcut.wrappers.table import Table
from jointcut.wrappers.zeros import Backwards

_linear_p = jaxprs.linear_primitive("jointcut_linear")


@dataclass(frozen=True)
class Differential:
    """The two halves for one set of differentiated inputs, and the rules of the linear map between them.

    Both halves are jitted, so that they are compiled when nobody's `jax.jit` is around, and open when one is. `moving`
    says which outputs have a tangent: floating-point ones on which something differentiated has an effect.
    """

    forward: Callable[..., tuple[list[Any], list[Any]]]
    extra: tuple[Any, ...]
    moving: tuple[bool, ...]
    rules: jaxprs.LinearRules

    @classmethod
    def of(cls, primal: Any, mask: tuple[bool, ...], cut: tuple[Graph, Halves, tuple[Any, ...]]) -> Differential:
        """The two halves of one cut, with the constants that they start with."""
        graph, halves, extra = cut
        forward = jax.jit(functools.partial(verify.forward, halves, graph), inline=True)
        backwards = Backwards(halves, functools.partial(jax.jit, inline=True))
        read = iter(backwards.read)
        moving = tuple(is_inexact(v.aval.dtype) and next(read) for v in jaxprs.opened(primal)[0].outvars)
        return cls(forward, extra, moving, _rules(primal, mask, moving, backwards))


def differentiable(
    primal: Any, cut: Callable[[tuple[bool, ...]], tuple[Graph, Halves, tuple[Any, ...]]]
) -> Callable[..., list[Any]]:
    """A flat function that runs the jaxpr `primal` and differentiates through the halves that `cut` returns.

    `cut` takes one flag per flat input, whether a derivative with respect to it is asked for; beside graph and halves
    it returns the constants of the derivative, which are leading inputs of the halves.
    """
    known: Table[Differential] = Table()
    evaluate = jax.jit(functools.partial(jaxprs.evaluate, primal), inline=True)

    @jax.custom_jvp
    def call(*flat: Any) -> list[Any]:
        return evaluate(*flat)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        mask = tuple(map(_moves, primals, tangents))
        this = known.of(mask, lambda: Differential.of(primal, mask, cut(mask)))
        outputs, residuals = this.forward([*this.extra, *primals])
        operands = [*residuals, *primals, *(t for t, wanted in zip(tangents, mask, strict=True) if wanted)]
        count = len(residuals) + len(primals)
        moved = iter(_linear_p.bind(*operands, rules=this.rules, num_residuals=count) if any(this.moving) else ())
        pairs = zip(outputs, this.moving, strict=True)
        return outputs, [next(moved) if moves else _no_tangent(out) for out, moves in pairs]

    call.defjvp(rule, symbolic_zeros=True)
    return call


def _rules(primal: Any, mask: tuple[bool, ...], moving: tuple[bool, ...], backwards: Backwards) -> jaxprs.LinearRules:
    """The linear map from the tangents of the chosen inputs to those of the outputs that move, and its transpose."""
    count = len(backwards.halves.residuals)
    avals_of = [v.aval for v in jaxprs.opened(primal)[0].outvars]

    def avals(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        del residuals, linear
        return [jaxprs.tangent_aval(aval) for aval, moves in zip(avals_of, moving, strict=True) if moves]

    def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        primals = residuals[count:]

        def chosen(*xs: Any) -> list[Any]:
            given = iter(xs)
            full = [next(given) if wanted else x for x, wanted in zip(primals, mask, strict=True)]
            outs = jaxprs.evaluate(primal, *full)
            return [out for out, moves in zip(outs, moving, strict=True) if moves]

        picked = tuple(x for x, wanted in zip(primals, mask, strict=True) if wanted)
        return jax.jvp(chosen, picked, tuple(linear))[1]

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        given = iter(cotangents)
        full = [
            next(given) if moves else None
            for aval, moves in zip(avals_of, moving, strict=True)
            if is_inexact(aval.dtype)
        ]
        return backwards(list(residuals[:count]), full)

    return jaxprs.LinearRules(avals, apply, transpose)


def _moves(primal: Any, tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and is_inexact(_dtype(primal))


def _dtype(x: Any) -> Any:
    aval: Any = jax.typeof(x)
    return aval.dtype


def _no_tangent(x: Any) -> Any:
    """The tangent of an output that nothing differentiated has an effect on."""
    if not is_inexact(_dtype(x)):
        return np.zeros(jax.typeof(x).shape, jax.dtypes.float0)
    return SymbolicZero(jaxprs.tangent_aval(jax.typeof(x)))
