"""Hold a loop as two jaxprs, and derive other loops from it: its tangent, its form under `jax.vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jointcut.partition.errors import DerivativeError, message
from jointcut.partition.program.jax import abstract, jaxprs, own_primitives, runtime, side_effects, user_source
from jointcut.partition.rewrite import simplify
from jointcut.partition.rewrite.slopes import sloped
from jointcut.wrappers.built_in.programs import Mask, pushed_through
from jointcut.wrappers.metadata.convention import is_inexact


@dataclass(frozen=True, eq=False)
class Parts:
    """Predicate and body of a loop, both jaxprs of `num_consts` constants and then the carry."""

    cond: Any
    body: Any
    num_consts: int

    @property
    def avals(self) -> list[Any]:
        """The types of constants and carry."""
        return [v.aval for v in jaxprs.opened(self.body)[0].invars]

    @property
    def carry(self) -> list[Any]:
        """The types of the carry."""
        return self.avals[self.num_consts :]

    def alive(self, consts: Sequence[Any], carry: Sequence[Any]) -> Any:
        """Evaluate the predicate."""
        return runtime.evaluate(self.cond, *consts, *carry)[0]

    def step(self, consts: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
        """Evaluate the body."""
        return runtime.evaluate(self.body, *consts, *carry)

    def run(self, *flat: Any) -> list[Any]:
        """Run the loop itself, as `lax.while_loop`."""
        consts, init = flat[: self.num_consts], list(flat[self.num_consts :])
        return lax.while_loop(lambda c: self.alive(consts, c), lambda c: self.step(consts, c), init)

    @cached_property
    def quiet(self) -> Any:
        """The body without its prints, for steps that are run again."""
        return side_effects.silenced(self.body)

    def refuse_effects(self, name: str) -> None:
        """Raise `DerivativeError`, which blames `name`, if the body has an effect other than printing."""
        for eqn in jaxprs.opened(self.quiet)[0].eqns:
            effects = side_effects.effect_names(eqn)
            if effects:
                what = f"has the effect {effects[0]}, in {user_source.source_of(eqn)}; so the loop has no derivative."
                cure = "Steps would be run again. Return the value in the carry, and have the effect after the loop."
                raise DerivativeError(message(name, what, cure))

    @cached_property
    def depends(self) -> list[frozenset[int]]:
        """Return, for each part of the new carry, the inputs of the body that it has a derivative with respect to."""
        return _depends(simplify.inlined(self.quiet))

    def moving(self, mask: Mask) -> list[int]:
        """Return the parts of the carry that have a derivative with respect to the inputs in `mask`."""
        return sorted(i - self.num_consts for i in self._reached(mask) if i >= self.num_consts)

    def _reached(self, mask: Mask) -> set[int]:
        reached = {i for i, on in enumerate(mask) if on}
        while True:
            found = {self.num_consts + i for i, sources in enumerate(self.depends) if sources & reached}
            if found <= reached:
                return reached
            reached |= found

    def moved_by(self, outputs: set[int], moving: Sequence[int]) -> list[int]:
        """Return the `moving` parts of the carry on which these outputs of the loop depend, themselves included."""
        reached = set(outputs)
        while True:
            sources = frozenset[int]().union(*(self.depends[i] for i in reached))
            found = {i for i in moving if self.num_consts + i in sources}
            if found <= reached:
                return sorted(reached)
            reached |= found

    def tangent(self, mask: Mask, guards: bool = False) -> Parts:
        """Return the loop that also carries tangents; with `guards` zero times infinity is zero in their products.

        Its constants are the constants of this loop, then the tangents of the constants in `mask`. Its carry is the
        carry of this loop, then the tangents of the `moving` parts.
        """
        count, moving = self.num_consts, self.moving(mask)
        marks = (*mask[:count], *(i in moving for i in range(len(self.carry))))
        avals = [abstract.tangent_aval(a) for a, on in zip(self.avals, marks, strict=True) if on]
        moved = sum(mask[:count])

        def push(*flat: Any) -> list[Any]:
            primals, tangents = self._split(flat, moved)
            outs, moves = pushed_through(self.body, marks, primals, tangents, guards)
            pairs = zip(moving, avals[moved:], strict=True)
            return [*outs, *(abstract.typed(moves[i], aval) for i, aval in pairs)]

        def alive(*flat: Any) -> list[Any]:
            return runtime.evaluate(self.cond, *self._split(flat, moved)[0])

        order = [*self.avals[:count], *avals[:moved], *self.carry, *avals[moved:]]
        body = traced(push, order)
        return Parts(traced(alive, order), sloped(body) if guards else body, count + moved)

    def _split(self, flat: Sequence[Any], moved: int) -> tuple[list[Any], list[Any]]:
        """Return values and tangents of the operands of the tangent loop, which has `moved` tangents of constants."""
        start, end = self.num_consts + moved, self.num_consts + moved + len(self.carry)
        consts, tangents = flat[: self.num_consts], flat[self.num_consts : start]
        return [*consts, *flat[start:end]], [*tangents, *flat[end:]]

    def counted(self) -> Parts:
        """Return the loop that also counts its trips, in the last part of its carry."""
        avals = [*self.avals, jax.core.ShapedArray((), jnp.int32)]
        cond = traced(lambda *flat: runtime.evaluate(self.cond, *flat[:-1]), avals)
        body = traced(lambda *flat: [*runtime.evaluate(self.body, *flat[:-1]), flat[-1] + 1], avals)
        return Parts(cond, body, self.num_consts)

    def once(self) -> Parts:
        """Return the loop that makes at most one trip, only if the last part of its carry is true, which it clears."""
        avals = [*self.avals, jax.core.ShapedArray((), jnp.bool_)]
        cond = traced(lambda *flat: [flat[-1] & runtime.evaluate(self.cond, *flat[:-1])[0]], avals)
        body = traced(lambda *flat: [*runtime.evaluate(self.body, *flat[:-1]), jnp.bool_(False)], avals)
        return Parts(cond, body, self.num_consts)

    def mapped(self, axis: Any, dims: Sequence[int | None]) -> tuple[Parts, list[bool]]:
        """Return the loop over one more axis, and which parts of its carry have the axis, as their first.

        Each lane makes its own number of trips. A lane that has finished keeps its values. The body runs on with it,
        but on the inputs of a lane that has not finished. The body was made for these inputs, so no infinity or NaN
        arises that would be multiplied by zero in a derivative. If the body communicates along the axis, it sees
        the lane's own values, as in JAX. Then the products of its derivative are guarded (`rules.Loop.over`).
        """
        consts, has = list(dims[: self.num_consts]), [d is not None for d in dims[self.num_consts :]]
        while True:
            given = (*consts, *(0 if on else None for on in has))
            dims = own_primitives.mapped(self.body, axis, given)[2]
            found = [a or d is not None for a, d in zip(has, dims, strict=True)]
            if own_primitives.mapped(self.cond, axis, given)[2][0] is not None:
                found = [True] * len(has)
                break
            if found == has:
                return self._together(axis, given, has), has
            has = found
        return self._lanes(axis, (*consts, *(0 for _ in has))), found

    def _together(self, axis: Any, dims: Sequence[int | None], has: Sequence[bool]) -> Parts:
        """Return the mapped loop whose lanes make the same number of trips."""
        avals = self._mapped_avals(axis, dims)
        outs = [0 if on else None for on in has]
        body = over(axis, functools.partial(runtime.evaluate, self.body), dims, outs)
        cond = over(axis, functools.partial(runtime.evaluate, self.cond), dims, [None])
        return Parts(traced(cond, avals), traced(body, avals), self.num_consts)

    def _lanes(self, axis: Any, dims: Sequence[int | None]) -> Parts:
        """Return the mapped loop whose lanes make trips of their own."""
        avals, count = self._mapped_avals(axis, dims), self.num_consts
        alive = over(axis, functools.partial(runtime.evaluate, self.cond), dims, [0])
        step = over(axis, functools.partial(runtime.evaluate, self.body), dims, [0] * len(self.carry))
        is_shared = talks(self.body, axis)

        def body(*flat: Any) -> list[Any]:
            lives = alive(*flat)[0]
            one = jnp.argmax(lives)
            pairs = zip(flat, dims, strict=True)
            safe = flat if is_shared else [x if d is None else _safe(lives, one, x, d) for x, d in pairs]
            return [chosen(lives, new, old) for new, old in zip(step(*safe), flat[count:], strict=True)]

        return Parts(traced(lambda *flat: [jnp.any(alive(*flat)[0])], avals), traced(body, avals), count)

    def _mapped_avals(self, axis: Any, dims: Sequence[int | None]) -> list[Any]:
        return [own_primitives.with_axis(axis, d, a) for a, d in zip(self.avals, dims, strict=True)]


def traced(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """Return the jaxpr of a flat function."""
    return jax.make_jaxpr(function)(*map(abstract.struct, avals))


def over(axis: Any, function: Callable[..., Any], dims: Sequence[int | None], outs: Any) -> Callable[..., Any]:
    """Return the flat function over an axis that JAX maps over."""
    if not any(d is not None for d in dims):
        return function
    names = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name or None}
    return jax.vmap(function, in_axes=tuple(dims), out_axes=outs, **names)


def led(axis: Any, num_consts: int, dims: Sequence[int | None], has: Sequence[bool], flat: Sequence[Any]) -> list[Any]:
    """Return the operands of a mapped loop: the carry has the axis as its first, or not at all."""
    consts, init = flat[:num_consts], flat[num_consts:]
    pairs = zip(init, dims[num_consts:], has, strict=True)
    return [*consts, *(_lead(axis, x, d) if on else x for x, d, on in pairs)]


def _lead(axis: Any, x: Any, dim: int | None) -> Any:
    return lax.broadcast(x, (axis.size,)) if dim is None else jnp.moveaxis(x, dim, 0)


def talks(closed: Any, axis: Any) -> bool:
    """Whether a jaxpr communicates along an axis."""
    return any(axis.name == getattr(effect, "name", None) for effect in jaxprs.opened(closed)[0].effects)


def _safe(lives: Any, one: Any, x: Any, dim: int) -> Any:
    """Return the operand with finished lanes replaced by lane `one`."""
    spare = lax.stop_gradient(lax.dynamic_index_in_dim(x, one, dim))
    return chosen(lives, x, jnp.broadcast_to(spare, x.shape), dim)


def chosen(lives: Any, new: Any, old: Any, dim: int = 0) -> Any:
    """Return the first array for lanes that are alive, the second for the others; the lanes are axes from `dim` on."""
    return lax.select(lax.broadcast_in_dim(lives, new.shape, range(dim, dim + lives.ndim)), new, old)


def _depends(closed: Any) -> list[frozenset[int]]:
    jaxpr, _ = jaxprs.opened(closed)
    env = {v: frozenset([i]) if is_inexact(v.aval.dtype) else frozenset[int]() for i, v in enumerate(jaxpr.invars)}

    def sources(atom: Any) -> frozenset[int]:
        return frozenset() if isinstance(atom, jaxprs.Literal) else env.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        found = frozenset[int]().union(*map(sources, eqn.invars))
        stops = eqn.primitive.name == "stop_gradient"
        for v in eqn.outvars:
            env[v] = found if is_inexact(getattr(v.aval, "dtype", None)) and not stops else frozenset()
    return [sources(v) for v in jaxpr.outvars]
