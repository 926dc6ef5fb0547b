"""Let a flat program be one call to JAX's transformations, with rules of its own.

`Plain` is a jaxpr that JAX differentiates. `Program` is a jaxpr with a derivative of its own: `halved` runs its forward
and returns a linear map, and `pushed` returns outputs and tangents at once. `Waiting` runs neither until the direction
of differentiation is known. So forward mode does not pay for residuals, and effects happen once. `Linearised` is a
program under `jax.linearize` whose products are guarded.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jointcut.partition.program.jax import abstract, jaxprs, own_primitives, runtime
from jointcut.partition.rewrite import guard, simplify
from jointcut.partition.rewrite.slopes import sloped
from jointcut.wrappers.built_in.zeros import filled
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.table import Table

Mask = tuple[bool, ...]

_linear_p = own_primitives.linear_primitive("jointcut_linearised")
_waiting_p = own_primitives.call_primitive("jointcut_waiting", lambda rules: rules.early)


class Plain(own_primitives.CallRules):
    """A jaxpr that JAX itself differentiates, with products guarded if `guards`."""

    def __init__(self, closed: Any, guards: bool = False) -> None:
        """Take the jaxpr, which has no constants."""
        self.closed, self.guards = closed, guards
        self._run = runtime.inlined(lambda *flat: runtime.evaluate(closed, *flat))  # JAX prints a partial

    def run(self, *flat: Any) -> list[Any]:
        """See `CallRules.run`."""
        return self._run(*flat)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """See `CallRules.jvp`."""
        mask, picked = picked_of(primals, tangents)
        return pushed_through(self.closed, mask, primals, picked, self.guards)

    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """See `CallRules.mapped`."""
        closed, consts, out_dims = own_primitives.mapped(self.closed, axis, dims)
        return functools.partial(runtime.evaluate, closed, *consts), out_dims

    @property
    def forward(self) -> own_primitives.CallRules:
        """See `CallRules.forward`."""
        return self


class Program(Plain):
    """A jaxpr with a derivative of its own. `prim` is the primitive that it is called by."""

    def __init__(self, prim: Any, closed: Any, guards: bool = False) -> None:
        """Take the primitive, made by `own_primitives.call_primitive`, and the jaxpr, which has no constants."""
        super().__init__(closed, guards)
        self.prim = prim
        self._waiting: Table[Waiting] = Table()

    def __call__(self, *flat: Any) -> list[Any]:
        """Run the jaxpr, or its form under the current transformation."""
        return self.prim.bind(*flat, jaxpr=self.closed, rules=self)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """See `CallRules.jvp`; the program waits until the direction is known."""
        mask, picked = picked_of(primals, tangents)
        if not picked:
            return self(*primals), [None] * len(jaxprs.opened(self.closed)[0].outvars)
        return self._waiting.of(mask, lambda: Waiting(self, mask))(primals, picked)

    @abc.abstractmethod
    def halved(self, mask: Mask, primals: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any | None]]]:
        """Run the forward with residuals; return outputs, and the linear map from input to output tangents."""

    def pushed(self, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any | None]]:
        """Return outputs and tangents, None for an output without one; the default is JAX's own derivative."""
        return pushed_through(self.closed, mask, primals, tangents, self.guards)


class Waiting(Plain):
    """A call of a program for outputs and tangents, until the direction of differentiation is known.

    Forward mode computes outputs and tangents together, so that effects happen once. In reverse mode JAX separates
    known values from unknown ones; then the program's forward runs instead, and the linear map gives the tangents.
    """

    def __init__(self, program: Program, mask: Mask) -> None:
        """Take the program, and one flag for each input: whether it is differentiated."""
        primal, _ = jaxprs.opened(program.closed)
        tangents = [abstract.tangent_aval(v.aval) for v, wanted in zip(primal.invars, mask, strict=True) if wanted]
        moving: list[bool] = []

        def push(*flat: Any) -> list[Any]:
            outs, moved = program.pushed(mask, flat[: len(mask)], flat[len(mask) :])
            moving.extend(t is not None for t in moved)
            return [*outs, *(t for t in moved if t is not None)]

        structs = [*abstract.input_structs(program.closed), *map(abstract.struct, tangents)]
        jaxpr, self._consts = jaxprs.opened(jax.make_jaxpr(push)(*structs))
        closed = jaxprs.constants_first(jaxpr)
        super().__init__(sloped(closed) if program.guards else closed, program.guards)
        self._mask, self._program, self._moving, self._outvars = mask, program, tuple(moving), primal.outvars
        inputs = slice(len(self._consts), len(self._consts) + len(mask))
        self.early = own_primitives.Early(program.prim, program.closed, program, inputs)

    def __call__(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any | None]]:
        """Return the outputs and their tangents."""
        outs = _waiting_p.bind(*self._consts, *primals, *tangents, jaxpr=self.closed, rules=self)
        moved = iter(outs[len(self._outvars) :])
        return outs[: len(self._outvars)], [next(moved) if moves else None for moves in self._moving]

    def parted(self, known: Sequence[Any | None]) -> tuple[list[Any], Callable[..., list[Any]]] | None:
        """See `CallRules.parted`; return the halves if all primals are known, else None."""
        end = self.early.inputs.stop
        if any(x is None for x in known[:end]):
            return None
        outputs, move = self._program.halved(self._mask, known[self.early.inputs])

        def rest(*unknown: Any) -> list[Any]:
            tangents = iter(unknown)
            moved = move(*(next(tangents) if t is None else t for t in known[end:]))
            pairs = zip(moved, self._outvars, self._moving, strict=True)
            inexact = [(t, abstract.tangent_aval(v.aval)) for t, v, moves in pairs if moves]
            return filled([t for t, _ in inexact], [aval for _, aval in inexact])

        return outputs, rest


class Linearised(Plain):
    """A program under `jax.linearize`, with guards; all parts that need no tangent are computed at once.

    The rest is one call, since a guard tests tangents for zero, which JAX cannot transpose. The program's halves give
    the transpose.
    """

    def __init__(self, program: Program) -> None:
        """Take the program."""
        super().__init__(program.closed, guards=True)
        self._program = program
        self._parted: Table[tuple[Any, Any, own_primitives.LinearRules, list[bool]]] = Table()

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """See `CallRules.jvp`."""
        mask, picked = picked_of(primals, tangents)
        if not picked:
            return super().jvp(primals, tangents)
        first, consts, rules, moves = self._parted.of(mask, lambda: self._parts(mask))
        outs = self.run(*primals)
        known = [*runtime.evaluate(first, *consts, *primals), *primals]
        moved = iter(_linear_p.bind(*known, *picked, rules=rules, num_residuals=len(known)))
        return outs, [next(moved) if on else None for on in moves]

    def _parts(self, mask: Mask) -> tuple[Any, Any, own_primitives.LinearRules, list[bool]]:
        """Return the program of the residuals, its constants, the linear map, and whether each output has a tangent."""
        primal, _ = jaxprs.opened(self.closed)
        structs = abstract.input_structs(self.closed)
        tangents = [abstract.tangent_aval(v.aval) for v, on in zip(primal.invars, mask, strict=True) if on]
        moves: list[bool] = []

        def push(*flat: Any) -> list[Any]:
            _, moved = pushed_through(self.closed, mask, flat[: len(mask)], flat[len(mask) :], guards=True)
            moves.extend(t is not None for t in moved)
            return [t for t in moved if t is not None]

        traced = jax.make_jaxpr(push)(*structs, *map(abstract.struct, tangents))
        jaxpr, consts = jaxprs.opened(sloped(simplify.inlined(traced)))
        first, rest = simplify.parted(jaxpr, len(tangents))
        return first, consts, self._rules(mask, rest, len(tangents)), moves

    def _rules(self, mask: Mask, rest: Any, count: int) -> own_primitives.LinearRules:
        """Return the linear map of `rest`, which reads its residuals, and then the primals."""
        num_kept = len(jaxprs.opened(rest)[0].invars) - count

        def avals(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
            del residuals, linear
            return [v.aval for v in jaxprs.opened(rest)[0].outvars]

        def apply(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
            return runtime.evaluate(rest, *residuals[:num_kept], *linear)

        def transpose(residuals: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
            primals = residuals[num_kept:]
            _, move = self._program.halved(mask, primals)
            given = [
                abstract.struct(abstract.tangent_aval(jax.typeof(x))) for x, on in zip(primals, mask, strict=True) if on
            ]
            transposed = jax.linear_transpose(lambda *ts: [t for t in move(*ts) if t is not None], *given)
            return list(transposed(filled(cotangents, avals((), ()))))

        return own_primitives.LinearRules(avals, apply, transpose)


def picked_of(primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[Mask, list[Any]]:
    """Return flags of the differentiated inputs, and their tangents."""
    mask = tuple(t is not None and is_inexact(dtype_of(x)) for x, t in zip(primals, tangents, strict=True))
    return mask, [t for t, wanted in zip(tangents, mask, strict=True) if wanted]


def pushed(
    function: Callable[..., list[Any]], mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any | None]]:
    """Return outputs of a flat function and their tangents by JAX's derivative; None if an output can have none."""

    def chosen(*differentiated: Any) -> list[Any]:
        xs = iter(differentiated)
        return function(*(next(xs) if on else x for x, on in zip(primals, mask, strict=True)))

    picked = tuple(x for x, on in zip(primals, mask, strict=True) if on)
    outs, moved = jax.jvp(chosen, picked, tuple(tangents))
    return outs, [t if is_inexact(dtype_of(out)) else None for out, t in zip(outs, moved, strict=True)]


def pushed_through(
    closed: Any, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any], guards: bool
) -> tuple[list[Any], list[Any | None]]:
    """Do the same as `pushed` for a jaxpr; with `guards`, zero times infinity is zero in every product of a tangent."""
    function = functools.partial(runtime.evaluate, closed)
    if not guards:
        return pushed(function, mask, primals, tangents)
    moves: list[bool] = []

    def push(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        outs, moved = pushed(function, mask, primals, tangents)
        moves.extend(t is not None for t in moved)
        return [*outs, *(t for t in moved if t is not None)]

    traced = jax.make_jaxpr(push)(list(primals), list(tangents))
    results = runtime.evaluate(guard.guarded_tangents(traced, len(tangents)), *primals, *tangents)
    moved = iter(results[len(moves) :])
    return results[: len(moves)], [next(moved) if on else None for on in moves]


def dtype_of(x: Any) -> Any:
    """Return the dtype of an array or tracer."""
    aval: Any = jax.typeof(x)
    return aval.dtype
