"""Tie the forward and backward programs into jax.grad.

Inside somebody's `jax.grad`, `jax.vmap` or `jax.jit` a function of ours is a call with rules of its own:

- `jax.grad` asks which inputs are differentiated; the joint program is cut for just those, the forward half runs, and
  the tangents leave through a linear map that knows both directions: reverse mode transposes it into the backward
  half, forward mode (`jax.jvp`, `jax.jacfwd`) differentiates the function itself;
- `jax.vmap` makes the function over one more axis another program of ours: what is differentiated later is cut as it
  is then;
- a function with effects is differentiated when it is known in which direction, so that its effects happen once.

So reverse, forward and mixed modes all work, mapped or not, to any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Graph
from jointcut.wrappers.built_in.zeros import Backwards, filled
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.table import Table

Mask = tuple[bool, ...]

#: Cuts a jaxpr for a mask of its inputs; returns its graph and halves, and the constants that the halves start with.
Cutter = Callable[[Any, Mask], tuple[Graph, Halves, tuple[Any, ...]]]

_call_p = jaxprs.call_primitive("jointcut_call")
_waiting_p = jaxprs.call_primitive("jointcut_waiting", lambda rules: rules.early)
_linear_p = jaxprs.linear_primitive("jointcut_linear")


def differentiable(primal: Any, cut: Cutter, twice: Callable[[], None] = lambda: None) -> Callable[..., list[Any]]:
    """A flat function that runs the jaxpr `primal` and differentiates through the halves that `cut` returns.

    `cut` is given `primal`, or what `jax.vmap` makes of it, and one flag per flat input, whether a derivative with
    respect to it is asked for. A mapped program may have more constants: they are its leading inputs. `twice` is called
    where the derivative is differentiated once more in forward mode, by plain JAX.
    """
    return _Program(primal, cut, twice)


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
    def of(
        cls, primal: Any, mask: Mask, cut: tuple[Graph, Halves, tuple[Any, ...]], twice: Callable[[], None]
    ) -> Differential:
        """The two halves of one cut, with the constants that they start with."""
        graph, halves, extra = cut
        forward = jax.jit(functools.partial(verify.run_forward, halves, graph), inline=True)
        backwards = Backwards(halves, functools.partial(jax.jit, inline=True))
        read = iter(backwards.read)
        moving = tuple(is_inexact(v.aval.dtype) and next(read) for v in jaxprs.opened(primal)[0].outvars)
        return cls(forward, extra, moving, _rules(primal, mask, moving, backwards, twice))


class _Plain(jaxprs.CallRules):
    """A jaxpr that JAX itself differentiates."""

    def __init__(self, closed: Any) -> None:
        self.closed = closed
        self._run = jax.jit(lambda *flat: jaxprs.evaluate(closed, *flat), inline=True)  # of a partial JAX prints it

    def run(self, *flat: Any) -> list[Any]:
        """As `CallRules.run`."""
        return self._run(*flat)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """As `CallRules.jvp`."""
        mask, picked = _picked(primals, tangents)
        return _pushed(self.closed, mask, primals, picked)

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`."""
        made, consts, out_dims = jaxprs.mapped(self.closed, axis, dims)
        return functools.partial(jaxprs.evaluate, made, *consts), out_dims

    @property
    def forward(self) -> jaxprs.CallRules:
        """As `CallRules.forward`."""
        return self


class _Program(_Plain):
    """A jaxpr with the halves of its cuts as its derivative, and the programs that `jax.vmap` made of it."""

    def __init__(self, closed: Any, cut: Cutter, twice: Callable[[], None]) -> None:
        super().__init__(closed)
        self._cut, self._twice = cut, twice
        self._has_effects = any(map(jaxprs.has_effects, jaxprs.opened(closed)[0].eqns))
        self._differentials: Table[Differential] = Table()
        self._waiting: Table[_Waiting] = Table()
        self._mapped: Table[tuple[_Program, list[Any], list[Any]]] = Table()

    def __call__(self, *flat: Any) -> list[Any]:
        """Run the jaxpr, or what the transformation at hand makes of it."""
        return _call_p.bind(*flat, jaxpr=self.closed, rules=self)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """As `CallRules.jvp`: by the halves, where there are effects as soon as it is known that they are wanted."""
        mask, picked = _picked(primals, tangents)
        if not picked:
            return self(*primals), [None] * len(jaxprs.opened(self.closed)[0].outvars)
        if not self._has_effects:
            outputs, move = self.halved(mask, primals)
            return outputs, move(*picked)
        return self._waiting.of(mask, lambda: _Waiting(self, mask))(primals, picked)

    def halved(self, mask: Mask, primals: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any | None]]]:
        """Run the forward half; return its outputs, and the linear map from the chosen tangents to theirs."""

        def made() -> Differential:
            return Differential.of(self.closed, mask, self._cut(self.closed, mask), self._twice)

        this = self._differentials.of(mask, made)
        outputs, residuals = this.forward([*this.extra, *primals])

        def move(*tangents: Any) -> list[Any | None]:
            if not any(this.moving):
                return [None] * len(this.moving)
            known = [*residuals, *primals]
            moved = iter(_linear_p.bind(*known, *tangents, rules=this.rules, num_residuals=len(known)))
            return [next(moved) if moves else None for moves in this.moving]

        return outputs, move

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """As `CallRules.mapped`: another program of ours, made once for one axis."""

        def made() -> tuple[_Program, list[Any], list[Any]]:
            closed, consts, out_dims = jaxprs.mapped(self.closed, axis, dims)
            return _Program(closed, self._cut, self._twice), consts, out_dims

        program, consts, out_dims = self._mapped.of((axis, dims), made)
        return functools.partial(program, *consts), out_dims

    @property
    def forward(self) -> jaxprs.CallRules:
        """As `CallRules.forward`: JAX's own derivative, which computes what it can before a tangent is there."""
        return _Plain(self.closed)


class _Waiting(_Plain):
    """Outputs and tangents of a program with effects, until it is known in which direction they are wanted.

    Forward mode runs both as they stand, and so the effects once. Where JAX parts what is known from what is not, as it
    does for reverse mode, the forward half of a cut runs instead, with the linear map for the rest.
    """

    def __init__(self, program: _Program, mask: Mask) -> None:
        invars, self._outvars = (getattr(jaxprs.opened(program.closed)[0], ends) for ends in ("invars", "outvars"))
        tangents = [jaxprs.tangent_aval(v.aval) for v, wanted in zip(invars, mask, strict=True) if wanted]

        def push(*flat: Any) -> list[Any]:
            outs, moved = _pushed(program.closed, mask, flat[: len(mask)], flat[len(mask) :])
            return [*outs, *(t for t in moved if t is not None)]

        structs = [*jaxprs.input_structs(program.closed), *map(jaxprs.struct, tangents)]
        jaxpr, self._consts = jaxprs.opened(jax.make_jaxpr(push)(*structs))
        super().__init__(jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns))
        self._mask, self._program = mask, program
        inputs = slice(len(self._consts), len(self._consts) + len(mask))
        self.early = jaxprs.Early(_call_p, program.closed, program, inputs)

    def __call__(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any | None]]:
        """The outputs and their tangents."""
        outs = _waiting_p.bind(*self._consts, *primals, *tangents, jaxpr=self.closed, rules=self)
        moved = iter(outs[len(self._outvars) :])
        return outs[: len(self._outvars)], [next(moved) if is_inexact(v.aval.dtype) else None for v in self._outvars]

    def parted(self, known: Sequence[Any | None]) -> tuple[list[Any], Callable[..., list[Any]]] | None:
        """As `CallRules.parted`: the halves, where all primals are known."""
        end = self.early.inputs.stop
        if any(x is None for x in known[:end]):
            return None
        outputs, move = self._program.halved(self._mask, known[self.early.inputs])

        def rest(*unknown: Any) -> list[Any]:
            given = iter(unknown)
            moved = move(*(next(given) if t is None else t for t in known[end:]))
            inexact = [(t, v.aval) for t, v in zip(moved, self._outvars, strict=True) if is_inexact(v.aval.dtype)]
            return filled([t for t, _ in inexact], [jaxprs.tangent_aval(aval) for _, aval in inexact])

        return outputs, rest


def _picked(primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[Mask, list[Any]]:
    """Which inputs are differentiated, and their tangents."""
    mask = tuple(t is not None and is_inexact(_dtype(x)) for x, t in zip(primals, tangents, strict=True))
    return mask, [t for t, wanted in zip(tangents, mask, strict=True) if wanted]


def _pushed(
    primal: Any, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any | None]]:
    """Outputs of a jaxpr and their tangents, as JAX differentiates it; None for those that can have none."""

    def chosen(*xs: Any) -> list[Any]:
        given = iter(xs)
        return jaxprs.evaluate(primal, *(next(given) if on else x for x, on in zip(primals, mask, strict=True)))

    picked = tuple(x for x, on in zip(primals, mask, strict=True) if on)
    outs, moved = jax.jvp(chosen, picked, tuple(tangents))
    return outs, [t if is_inexact(_dtype(out)) else None for out, t in zip(outs, moved, strict=True)]


def _rules(
    primal: Any, mask: Mask, moving: tuple[bool, ...], backwards: Backwards, twice: Callable[[], None]
) -> jaxprs.LinearRules:
    """The linear map from the tangents of the chosen inputs to those of the outputs that move, and its transpose."""
    count = len(backwards.halves.residuals)
    avals_of = [v.aval for v in jaxprs.opened(primal)[0].outvars]

    def avals(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        del residuals, linear
        return [jaxprs.tangent_aval(aval) for aval, moves in zip(avals_of, moving, strict=True) if moves]

    def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        _, moved = _pushed(primal, mask, residuals[count:], linear)
        return [t for t, moves in zip(moved, moving, strict=True) if moves]

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        given = iter(cotangents)
        full = [
            next(given) if moves else None
            for aval, moves in zip(avals_of, moving, strict=True)
            if is_inexact(aval.dtype)
        ]
        return backwards(list(residuals[:count]), full)

    return jaxprs.LinearRules(avals, apply, transpose, twice)


def _dtype(x: Any) -> Any:
    aval: Any = jax.typeof(x)
    return aval.dtype
