"""Let JAX's transformations use the forward and backward programs.

Inside a user's `jax.grad`, `jax.vmap` or `jax.jit` a decorated function is one call with its own rules:

- `jax.grad` tells the differentiated inputs. The joint program is cut for these, the forward half runs, and a linear
  map gives the tangents. Reverse mode transposes this map into the backward half. Forward mode (`jax.jvp`,
  `jax.jacfwd`) differentiates the function itself.
- `jax.vmap` makes a new program with one more axis, which is cut when it is differentiated.
- A function with effects is differentiated when the direction is known, so that its effects happen once.

So reverse, forward and mixed modes work to any order, mapped or not. JAX differentiates the halves themselves, unless
they have derivatives of their own, as in `half`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, jaxprs, own_primitives, runtime, side_effects
from jointcut.wrappers.built_in.programs import Linearised, Mask, Plain, Program, picked_of, pushed_through
from jointcut.wrappers.built_in.zeros import Backwards
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.table import Table

#: Cuts a jaxpr for a mask of its inputs; returns its graph, its halves, and the leading constants of the halves.
Cutter = Callable[[Any, Mask], tuple[Graph, Halves, tuple[Any, ...]]]


@dataclass(frozen=True)
class Wrap:
    """The way in which a half is differentiated: it wraps the half's flat function.

    `run` is `jax.jit`, or gives the function a derivative of its own. It also takes the number of residuals, the
    leading inputs of a backward, after which it is linear; None for any other function. With `guards`, the products of
    tangents are guarded in forward mode.
    """

    run: Callable[[Callable[..., list[Any]], int | None], Callable[..., list[Any]]]
    guards: bool = False

    def __call__(self, flat: Callable[..., list[Any]], constants: int | None = None) -> Callable[..., list[Any]]:
        """Return the function that runs."""
        return self.run(flat, constants)


JITTED = Wrap(lambda flat, _: runtime.inlined(flat))

CALL = "jointcut_call"  # the name of the primitive of a call

_call_p = own_primitives.call_primitive(CALL)
_half_p = own_primitives.call_primitive("jointcut_half")
_linear_p = own_primitives.linear_primitive("jointcut_linear")


def differentiable(
    primal: Any, cut: Cutter, twice: Callable[[], None] = lambda: None, wrap: Wrap = JITTED, name: str = ""
) -> Callable[..., list[Any]]:
    """Return a flat function that runs the jaxpr `primal`, and is differentiated through the halves from `cut`.

    `cut` takes `primal`, or its form under `jax.vmap`, and one flag for each flat input: whether it is differentiated.
    A mapped program may have more constants, as leading inputs. `twice` is called if the derivative is differentiated
    again in forward mode, which plain JAX does. `wrap` takes both halves, and the function of outputs and tangents in
    forward mode, and decides how they are differentiated. `name` is that of `CallRules`.
    """
    program = _Program(_call_p, primal, cut, twice, wrap)
    program.name = name
    return program


def half(
    flat: Callable[..., list[Any]], constants: int | None, change: Callable[[Any], Any], cut: Cutter, wrap: Wrap
) -> Callable[..., Any]:
    """Return a half as a flat function that is differentiated through halves of its own, made on demand.

    It is traced at its first call, for each type of its arguments, and `change` rewrites the jaxpr. In forward mode JAX
    differentiates this jaxpr. `constants` is as in `Wrap`; `cut` and `wrap` are as in `differentiable`. Programs inline
    such a call (`inlined`).
    """
    made: Table[_Program] = Table()

    def run(*xs: Any) -> list[Any]:
        def make() -> _Program:
            closed = jax.make_jaxpr(flat)(*map(abstract.struct, types))
            return _Program(_half_p, change(closed), cut, lambda: None, wrap, True, constants)

        types = tuple(map(jax.typeof, xs))
        return made.of(types, make)(*xs)

    return run


@dataclass(frozen=True)
class Differential:
    """The two halves for one set of differentiated inputs, and the rules of the linear map between them.

    Both halves are jitted inline: compiled on their own, or part of a surrounding `jax.jit`. `extra` are their leading
    constants. `moving` flags the outputs that have a tangent: floating-point outputs that depend on differentiated
    inputs.
    """

    forward: Callable[..., tuple[list[Any], list[Any]]]
    extra: tuple[Any, ...]
    moving: tuple[bool, ...]
    rules: own_primitives.LinearRules

    @classmethod
    def of(
        cls, primal: Any, mask: Mask, cut: tuple[Graph, Halves, tuple[Any, ...]], twice: Callable[[], None], wrap: Wrap
    ) -> Differential:
        """Return the two halves of one cut, with their leading constants."""
        graph, halves, extra = cut
        outvars = jaxprs.opened(primal)[0].outvars
        whole = wrap(lambda *flat: list(itertools.chain(*verify.run_forward(halves, graph, flat))))

        def forward(flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = whole(*flat)
            return results[: len(outvars)], results[len(outvars) :]

        backwards = Backwards(halves, wrap)
        read = iter(backwards.read)
        moving = tuple(is_inexact(v.aval.dtype) and next(read) for v in outvars)
        return cls(forward, extra, moving, _rules(primal, mask, moving, backwards, twice, wrap))


class _Program(Program):
    """A jaxpr, the halves of its cuts as its derivative, and its mapped forms."""

    def __init__(
        self, prim: Any, closed: Any, cut: Cutter, twice: Callable[[], None], wrap: Wrap, waits: bool = False,
        constants: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(prim, closed, wrap.guards)
        self.constants = constants
        self._cut, self._twice, self._wrap = cut, twice, wrap
        self._waits = waits or any(map(side_effects.has_effects, jaxprs.opened(closed)[0].eqns))
        self._differentials: Table[Differential] = Table()
        self._mapped: Table[tuple[_Program, list[Any], list[Any]]] = Table()

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """See `CallRules.jvp`; a half, or a program with effects, waits until the direction is known."""
        mask, picked = picked_of(primals, tangents)
        if self._waits or not picked:
            return super().jvp(primals, tangents)
        outputs, move = self.halved(mask, primals)
        return outputs, move(*picked)

    def halves(self, mask: Mask) -> tuple[Halves, Sequence[Any]]:
        """See `CallRules.halves`; these are the halves of the cut."""
        _, halves, extra = self._cut(self.closed, mask)
        return halves, extra

    def halved(self, mask: Mask, primals: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any | None]]]:
        """Run the forward half; return its outputs, and the linear map from input tangents to output tangents."""

        def make() -> Differential:
            return Differential.of(self.closed, mask, self._cut(self.closed, mask), self._twice, self._wrap)

        this = self._differentials.of(mask, make)
        outputs, residuals = this.forward([*this.extra, *primals])

        def move(*tangents: Any) -> list[Any | None]:
            if not any(this.moving):
                return [None] * len(this.moving)
            known = [*residuals, *primals]
            moved = iter(_linear_p.bind(*known, *tangents, rules=this.rules, num_residuals=len(known)))
            return [next(moved) if moves else None for moves in this.moving]

        return outputs, move

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """See `CallRules.mapped`; the mapped program is made once for each axis."""

        def make() -> tuple[_Program, list[Any], list[Any]]:
            closed, consts, out_dims = own_primitives.mapped(self.closed, axis, dims)
            constants = None if self.constants is None else self.constants + len(consts)
            program = _Program(self.prim, closed, self._cut, self._twice, self._wrap, self._waits, constants)
            program.name = self.name
            return program, consts, out_dims

        program, consts, out_dims = self._mapped.of((axis, dims), make)
        return functools.partial(program, *consts), out_dims

    @property
    def forward(self) -> own_primitives.CallRules:
        """See `CallRules.forward`; the derivative first computes all parts that need no tangent."""
        return Linearised(self) if self.guards else Plain(self.closed)


def _rules(
    primal: Any,
    mask: Mask,
    moving: tuple[bool, ...],
    backwards: Backwards,
    twice: Callable[[], None],
    wrap: Wrap,
) -> own_primitives.LinearRules:
    """Return the linear map from input tangents to tangents of `moving` outputs, and its transpose, as rules."""
    count = len(backwards.halves.residuals)
    avals_of = [v.aval for v in jaxprs.opened(primal)[0].outvars]

    def avals(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        del residuals, linear
        return [abstract.tangent_aval(aval) for aval, moves in zip(avals_of, moving, strict=True) if moves]

    @wrap
    def tangents(*flat: Any) -> list[Any]:
        _, moved = pushed_through(primal, mask, flat[: len(mask)], flat[len(mask) :], wrap.guards)
        return [t for t, moves in zip(moved, moving, strict=True) if moves]

    def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        return tangents(*residuals[count:], *linear)

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
        moved = iter(cotangents)
        full = [
            next(moved) if moves else None
            for aval, moves in zip(avals_of, moving, strict=True)
            if is_inexact(aval.dtype)
        ]
        return backwards(list(residuals[:count]), full)

    return own_primitives.LinearRules(avals, apply, transpose, twice)
