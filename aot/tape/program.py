"""Write a backward as one jaxpr, and compile the parts between its hooks.

Without hooks that are called back there is one part. Such a hook divides the program. The part before it runs; then the
hook is called with real arrays on the caller's thread; then the next part takes the hook's results. So hooks are called
in order and exactly once, and their errors reach the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.tape.walk import Structure, Walk
from jointcut.partition.bodies.read import read
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, jaxprs, own_primitives, runtime
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite import simplify

_left_p = own_primitives.leaving_primitive("jointcut_hook")


@dataclass(frozen=True)
class Part:
    """A part of the program. After each part except the last, a hook is called.

    Attributes:
        run: the compiled part.
        reads, makes: the numbers of the values that the part takes and returns.
        hook: the number of the hook, None at the end.
        given, returned: the numbers of the values that the hook takes and returns.
    """

    run: Callable[..., list[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    hook: int | None = None
    given: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Divided:
    """A program divided by its hooks, and its leading constants."""

    parts: Sequence[Part]
    consts: tuple[Any, ...]

    @classmethod
    def of(cls, closed: Any, consts: tuple[Any, ...], donated: tuple[int, ...] = ()) -> Divided:
        """Divide and compile a jaxpr.

        If there is one part, it may overwrite the inputs `donated`, counted after the constants.
        """
        jaxpr, _ = jaxprs.opened(closed)
        numbers = {v: i for i, v in enumerate(jaxpr.invars)}
        return cls(_parts(jaxpr, numbers, tuple(len(consts) + i for i in donated)), consts)

    def __call__(self, inputs: Sequence[Any], hooks: Sequence[Callable[[Sequence[Any]], list[Any]]]) -> list[Any]:
        """Run the parts; `hooks` are the hooks of this run, by number."""
        parts = self.parts
        if len(parts) == 1:
            return parts[0].run(*self.consts, *inputs)
        values: dict[int, Any] = dict(enumerate((*self.consts, *inputs)))
        for part in parts:
            values.update(zip(part.makes, part.run(*(values[i] for i in part.reads)), strict=True))
            if part.hook is not None:
                results = hooks[part.hook]([values[i] for i in part.given])
                values.update(zip(part.returned, results, strict=True))
        return [values[i] for i in parts[-1].makes]


@dataclass(frozen=True)
class Backward:
    """The program of one structure.

    Attributes:
        structure: the structure that it runs.
        closed: the jaxpr `(constants, references, residuals, cotangents) -> gradients`.
        consts: arrays that hooks close over.
        reached: the leaves that have a gradient.
        count: the number of its residuals.
        num_refs: the number of its references.
        donated: inputs that it may overwrite, if no hook divides it.
    """

    structure: Structure
    closed: Any
    consts: tuple[Any, ...]
    reached: tuple[int, ...]
    count: int
    num_refs: int
    donated: tuple[int, ...] = ()

    @classmethod
    def of(cls, structure: Structure, flat: Sequence[Any], cotangents: Sequence[Any], refs: Sequence[Any]) -> Backward:
        """Trace the backward for residuals and cotangents of these types."""
        reached: list[int] = []
        there = [ref for ref in refs if ref is not None]

        def whole(there: Sequence[Any], flat: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            given = iter(there)
            walk = Walk(structure, flat, leave, refs=[None if ref is None else next(given) for ref in refs])
            results = walk(cotangents)
            reached[:] = [i for i, x in enumerate(results) if x is not None]
            return [results[i] for i in reached]

        structs = [[abstract.struct(jax.typeof(x)) for x in xs] for xs in (there, flat, cotangents)]
        traced = jax.make_jaxpr(whole)(*structs)
        jaxpr, consts = jaxprs.opened(traced)
        closed = jaxprs.constants_first(jaxpr)
        return cls(structure, closed, tuple(consts), tuple(reached), len(flat), len(there))

    @cached_property
    def parts(self) -> Divided:
        """The compiled parts; the first run compiles them."""
        return Divided.of(self.closed, self.consts, self.donated)

    def __call__(self, inputs: Sequence[Any], hooks: Sequence[Callable[[Sequence[Any]], list[Any]]]) -> list[Any]:
        """Run the program on references, residuals and cotangents; `hooks` are the hooks of this run, by number."""
        return self.parts(inputs, hooks)

    @cached_property
    def graph(self) -> Graph:
        """The program as ops and values; its primals are the constants, references and residuals."""
        closed = simplify.inlined(self.closed)
        jaxpr, _ = jaxprs.opened(closed)
        kept = self.structure.kept_by
        named = {"constant": len(self.consts), "reference": self.num_refs, "residual": self.count}
        primals = [f"{name} {i}" for name, count in named.items() for i in range(count)]
        primals[len(primals) - self.count :] = [f"residual {i}{kept.get(i, '')}" for i in range(self.count)]
        cotangents = [f"cotangent {i}" for i in range(len(jaxpr.invars) - len(primals))]
        inputs = (Role.PRIMAL,) * len(primals) + (Role.COTANGENT,) * len(cotangents)
        outputs = (Role.GRADIENT,) * len(jaxpr.outvars)
        return read(closed, Roles(inputs, outputs, 0, (*primals, *cotangents)))


def leave(number: int, arrays: Sequence[Any], returns: Sequence[Any]) -> list[Any]:
    """Leave the traced program to call the hook `number`."""
    return _left_p.bind(*arrays, number=number, returns=tuple(returns))


def _parts(jaxpr: Any, numbers: dict[Any, int], donated: tuple[int, ...]) -> list[Part]:
    """Return the parts of a jaxpr between the hooks that are called back."""
    ends = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is _left_p]
    parts: list[Part] = []
    start, atoms = 0, list(jaxpr.outvars)
    for end in ends:
        eqn, stretch = jaxpr.eqns[end], jaxpr.eqns[start:end]
        needed = _vars([*(v for later in jaxpr.eqns[end:] for v in later.invars), *atoms])
        outputs = [*(v for v in _made(stretch) if v in needed), *(v for v in eqn.invars if not _is_var(v))]
        parts.append(_part(stretch, outputs, numbers, eqn))
        start = end + 1
    last = jaxpr.eqns[start:]
    if not ends:
        program = jaxprs.build(jaxpr.invars, atoms, last)
        return [Part(_compiled(program, donated), tuple(numbers.values()), ())]
    parts.append(_part(last, atoms, numbers, None))
    return parts


def _part(eqns: Sequence[Any], outputs: Sequence[Any], numbers: dict[Any, int], eqn: Any) -> Part:
    made = set(_made(eqns))
    read = dict.fromkeys(v for e in eqns for v in e.invars if _is_var(v) and v not in made)
    read.update(dict.fromkeys(v for v in outputs if _is_var(v) and v not in made))
    reads = tuple(numbers[v] for v in read)
    program = jaxprs.build(list(read), outputs, eqns)
    makes = tuple(_number(v, numbers) for v in outputs)
    if eqn is None:
        return Part(_compiled(program), reads, makes)
    given = tuple(_number(v, numbers) for v in eqn.invars)
    returned = tuple(_number(v, numbers) for v in eqn.outvars)
    return Part(_compiled(program), reads, makes, eqn.params["number"], given, returned)


def _compiled(program: Any, donated: tuple[int, ...] = ()) -> Callable[..., list[Any]]:
    return jax.jit(lambda *flat: runtime.evaluate(program, *flat), donate_argnums=donated)


def _number(v: Any, numbers: dict[Any, int]) -> int:
    key = v if _is_var(v) else id(v)
    return numbers.setdefault(key, len(numbers))


def _made(eqns: Sequence[Any]) -> list[Any]:
    return [v for eqn in eqns for v in eqn.outvars]


def _vars(atoms: Sequence[Any]) -> set[Any]:
    return {v for v in atoms if _is_var(v)}


def _is_var(v: Any) -> bool:
    return not isinstance(v, jaxprs.Literal)
