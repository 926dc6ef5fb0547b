"""Trace the function and its gradient as one jaxpr.

The forward is traced first, with everything that `jax.vjp` needs for the backward as extra results; then the backward
is traced on those. Laid end to end they are the joint program, and it is known which equation came from which phase.
Calls are opened, constants become inputs, and what both phases compute is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jointcut.partition.errors import TraceError, message
from jointcut.partition.program import jaxprs
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite import simplify, sparse, views
from jointcut.wrappers.arguments import objects
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in import alias, refs
from jointcut.wrappers.built_in.flatten import Outcome
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.wrapper import flat_form_of


@dataclass(frozen=True)
class Results:
    """What a function returns, flat: `avals` of all outputs, behind the first ones those of `aux`, then the states.

    `out_tree` is the tree of what is differentiated, `aux_tree` that of the `num_aux` outputs of `aux` (None without
    `has_aux`). A state is what the function wrote to an object that it was given: `states` has the flat position of its
    argument, and its path.
    """

    avals: tuple[Any, ...]
    out_tree: Any
    aux_tree: Any
    num_aux: int
    repeated: tuple[tuple[int, int], ...] = ()  # outputs that are the same object as an earlier one, and which
    states: tuple[tuple[int, str], ...] = ()

    @classmethod
    def flat(cls, out: Any, has_aux: bool) -> tuple[list[Any], Results]:
        """Flatten what the user's function returned; raises `TraceError` where `has_aux` asks for a pair in vain."""
        out, states, paths = (out.result, out.states, out.paths) if isinstance(out, Outcome) else (out, {}, ())
        if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
            cure = "Return (output, aux), or leave has_aux out."
            raise TraceError(message("has_aux=True", f"needs a pair, but the function returned {_shown(out)}.", cure))
        main, aux = out if has_aux else (out, None)
        (main, aux), _ = objects.taken_apart((main, aux))
        main_leaves, main_tree = jax.tree.flatten(main)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        leaves = [*main_leaves, *aux_leaves]
        repeated = alias.repeated(leaves)
        avals = tuple(map(jax.typeof, (*leaves, *states.values())))
        written = tuple(zip(states, paths, strict=True))
        results = cls(avals, main_tree, aux_tree if has_aux else None, len(aux_leaves), repeated, written)
        refs.refuse_results(results.tree, leaves)
        return [*leaves, *states.values()], results

    @property
    def num_returned(self) -> int:
        """How many outputs the function returned itself: all but the states."""
        return len(self.avals) - len(self.states)

    @property
    def main(self) -> tuple[Any, ...]:
        """The types of the outputs outside aux."""
        return self.avals[: self.num_returned - self.num_aux]

    @cached_property
    def holds_objects(self) -> bool:
        """Whether objects that can be written are among what is returned."""
        return objects.stand_in(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))

    @property
    def paths(self) -> tuple[str, ...]:
        """How the user reaches each output, `result['loss']`; a state by its argument, `args[0].count.value`."""
        return (*tree_paths("result", self.tree), *(path for _, path in self.states))

    @property
    def tree(self) -> Any:
        """The tree of all that the function returns, a pair with `has_aux`."""
        if self.aux_tree is None:
            return self.out_tree
        return jax.tree_util.treedef_tuple((self.out_tree, self.aux_tree))

    @property
    def with_cotangent(self) -> tuple[bool, ...]:
        """Which outputs can carry a cotangent: floating-point ones, outside aux."""
        main = len(self.main)
        return tuple(is_inexact(a.dtype) and i < main for i, a in enumerate(self.avals))

    def given_back(self, outputs: Sequence[Any], bound: Bound) -> tuple[Any, Any]:
        """The function's output and its aux (None without `has_aux`) in trees; states are written to their objects.

        Raises `CallError` for an object that must not be written here; then none is.
        """
        count = self.num_returned - self.num_aux
        if self.states:
            places = (place for place, _ in self.states)
            bound.write(dict(zip(places, outputs[self.num_returned :], strict=True)))
        main = jax.tree.unflatten(self.out_tree, outputs[:count])
        aux = None
        if self.aux_tree is not None:
            aux = jax.tree.unflatten(self.aux_tree, outputs[count : self.num_returned])
        return objects.built((main, aux))[0] if self.holds_objects else (main, aux)


def _shown(out: Any) -> str:
    if isinstance(out, jax.Array) or jaxprs.is_tracer(out):
        return f"one array, {jax.typeof(out).str_short()}"
    return f"{len(out)} values" if isinstance(out, tuple | list) else f"a {type(out).__name__}"


@dataclass(frozen=True)
class Primal:
    """The user's function as a flat jaxpr `(constants, leaves) -> outputs`, and the constants that it closes over."""

    closed: Any
    consts: tuple[Any, ...]
    results: Results

    @property
    def has_references(self) -> bool:
        """Whether the function is given a `jax.Ref`, touched or not, or makes one of its own."""
        jaxpr, _ = jaxprs.opened(self.closed)
        given = any(jaxprs.is_reference(v.aval) for v in jaxpr.invars)
        return given or any(map(jaxprs.touches_references, jaxpr.eqns))


def primal(function: Callable[..., Any], leaves: Sequence[Any], has_aux: bool) -> Primal:
    """Trace a flat function to a jaxpr without constants; what runs under `jax.checkpoint` gets a scope of its own."""
    found: list[Results] = []

    @flat_form_of(function)
    def flat(*xs: Any) -> list[Any]:
        out, results = Results.flat(function(*xs), has_aux)
        found[:] = [results]
        return out

    jaxpr, consts = jaxprs.opened(simplify.marked(jax.make_jaxpr(flat)(*leaves)))
    closed = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return Primal(closed, _as_they_are(consts), found[0])


def _as_they_are(consts: Sequence[Any]) -> tuple[Any, ...]:
    """Constants as `jax.jit` takes them: those of numpy as they are now, whatever their owner writes there later."""
    return tuple(c.copy() if isinstance(c, np.ndarray) else c for c in consts)


def constant_key(constant: Any) -> Any:
    """What tells a constant of one trace from others, in another trace too: of an array of numpy's there are copies."""
    if isinstance(constant, np.ndarray):
        return constant.shape, str(constant.dtype), constant.tobytes()
    return id(constant)


@dataclass(frozen=True)
class Joint:
    """The joint program `(constants, leaves, cotangents) -> (outputs, gradients)` of one function.

    `closed` has no constants of its own: `consts` are the arrays that function and derivative close over, as leading
    inputs. Gradients are those of the leaves that were asked for, in order; those at the places `sparse` among them are
    two results each, the rows of a table and their places. `differentiated` says which arguments were asked for, by
    their places counted from the last one (-1), since constants may stand before them.
    """

    closed: Any
    roles: Roles
    consts: tuple[Any, ...]
    results: Results
    sparse: frozenset[int] = frozenset()
    differentiated: tuple[int, ...] = ()

    @property
    def has_traced_consts(self) -> bool:
        """Whether the function closes over values of an outer trace, so that its program must not be kept."""
        return any(map(jaxprs.is_tracer, self.consts))

    @property
    def is_train(self) -> bool:
        """Whether there is a backward: something is differentiated, and something can carry a cotangent."""
        return Role.GRADIENT in self.roles.outputs and Role.COTANGENT in self.roles.inputs

    @property
    def fixed_bytes(self) -> int:
        """What a step takes whatever it saves: arguments, results and gradients."""
        jaxpr, _ = jaxprs.opened(self.closed)
        results = [v for v in jaxpr.outvars if not isinstance(v, jaxprs.Literal)]
        return sum(jaxprs.aval_bytes(v.aval) for v in {*jaxpr.invars, *results})

    @property
    def carries(self) -> tuple[bool, ...]:
        """Which outputs have a cotangent among the inputs: none where there is no backward."""
        return self.results.with_cotangent if self.is_train else (False,) * len(self.results.avals)

    @property
    def uses_references(self) -> bool:
        """Whether the program reads or writes a `jax.Ref`."""
        return any(map(jaxprs.touches_references, jaxprs.opened(self.closed)[0].eqns))


def joint(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    has_aux: bool,
    mask: Sequence[bool],
    paths: Sequence[str],
    places: Sequence[int] | None = None,
) -> Joint:
    """Trace forward and backward of a flat function for the arguments chosen by `mask`.

    `places` says for each argument of the function which of the `leaves` stands there (by default each its own), and
    `paths` what the leaves are called: an array that stands at two places is one input with a gradient for each place.
    Without any chosen leaf nothing needs a gradient: the program is the function alone, and no derivative is traced.
    Where the user's `jax.checkpoint` shows in the backward, the function is traced once more as a jaxpr whose
    equations know that they stand under it, and that is differentiated.
    """
    places = range(len(leaves)) if places is None else places
    if not any(mask):
        return _inference(primal(lambda *xs: function(*(xs[p] for p in places)), leaves, has_aux), paths)
    differentiated = tuple(i - len(mask) for i, on in enumerate(mask) if on)
    made, has_checkpoint = _joint(function, leaves, has_aux, mask, paths, places)
    if not has_checkpoint:
        return replace(made, differentiated=differentiated)
    source = primal(function, [leaves[p] for p in places], has_aux)
    count = len(source.consts)
    results = source.results

    def again(*xs: Any) -> Any:
        out = jaxprs.evaluate(source.closed, *xs)
        main, end = len(results.main), results.num_returned
        trees = jax.tree.unflatten(results.out_tree, out[:main])
        whole = (trees, jax.tree.unflatten(results.aux_tree, out[main:end])) if has_aux else trees
        written = dict(zip((place for place, _ in results.states), out[end:], strict=True))
        return Outcome(whole, written, tuple(path for _, path in results.states))

    names = [*(f"constant {i}" for i in range(count)), *paths]
    shifted = [*range(count), *(count + p for p in places)]
    made, _ = _joint(again, [*source.consts, *leaves], has_aux, [False] * count + list(mask), names, shifted)
    return replace(made, consts=(*made.consts, *source.consts), differentiated=differentiated)


def with_rows(program: Joint, chosen: Mapping[int, str]) -> Joint:
    """The program with some gradients, by their places among all, taken apart into rows and places.

    `chosen` gives their paths. Raises `TraceError` for one that is more than a sum of rows.
    """
    jaxpr, _ = jaxprs.opened(program.closed)
    count = len(program.results.avals)
    ends, eqns = list(jaxpr.outvars[:count]), list(jaxpr.eqns)
    for k, end in enumerate(jaxpr.outvars[count:]):
        found = sparse.scatters(jaxpr.eqns, end) if k in chosen else None
        if k not in chosen:
            ends.append(end)
        elif found is not None:
            more, pair = sparse.taken_apart(found, end.aval)
            eqns.extend(more)
            ends.extend(pair)
        else:
            what = "has a gradient that is not a sum of rows: only a table that is read by rows, table[indices], has."
            raise TraceError(message(chosen[k], what, "Take it out of sparse_gradients."))
    roles = program.roles
    outputs = (Role.OUTPUT,) * count + (Role.GRADIENT,) * (len(ends) - count)
    live = simplify.live(eqns, ends).places
    boundary = None if roles.forward_ops is None else sum(i in live for i in range(roles.forward_ops))
    return replace(
        program,
        closed=jaxprs.build(jaxpr.invars, ends, [eqns[i] for i in sorted(live)]),
        roles=replace(roles, outputs=outputs, forward_ops=boundary),
        sparse=frozenset(chosen),
    )


def _inference(source: Primal, paths: Sequence[str]) -> Joint:
    """The program of a function that nothing is differentiated of: `(constants, leaves) -> outputs`."""
    jaxpr, consts = jaxprs.opened(simplify.inlined(source.closed))
    eqns, ends, boundary = simplify.merged(jaxpr.eqns, jaxpr.outvars, len(jaxpr.eqns))
    invars = [*jaxpr.constvars, *jaxpr.invars]
    values = (*_as_they_are(consts), *source.consts)
    roles = Roles(
        (Role.PRIMAL,) * len(invars),
        (Role.OUTPUT,) * len(ends),
        boundary,
        (*(f"constant {i}" for i in range(len(values))), *paths),
    )
    return Joint(jaxprs.build(invars, ends, eqns), roles, values, source.results)


def _joint(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    has_aux: bool,
    mask: Sequence[bool],
    paths: Sequence[str],
    places: Sequence[int],
) -> tuple[Joint, bool]:
    kept, found = _Residuals(), list[Results]()

    @flat_form_of(function)
    def forward(*entered: Any) -> tuple[list[Any], list[Any]]:
        xs = [entered[p] for p in places]

        @flat_form_of(function)
        def chosen(*picked: Any) -> tuple[list[Any], list[Any]]:
            given = iter(picked)
            out = function(*(next(given) if on else x for x, on in zip(xs, mask, strict=True)))
            flat, results = Results.flat(out, has_aux)
            found[:] = [results]
            pairs = list(zip(flat, results.with_cotangent, strict=True))
            return [x for x, on in pairs if on], [x for x, on in pairs if not on]

        main, pull, rest = jax.vjp(chosen, *(x for x, on in zip(xs, mask, strict=True) if on), has_aux=True)
        main, rest = iter(main), iter(rest)
        return [next(main) if on else next(rest) for on in found[0].with_cotangent], kept.take(pull, entered)

    front = jax.make_jaxpr(forward)(*leaves)
    results = found[0]
    cotangents = zip(results.avals, results.with_cotangent, strict=True)
    back = jax.make_jaxpr(lambda residuals, refs, cts: kept.pull(residuals, refs)(cts))(
        [jaxprs.struct(v.aval) for v in jaxprs.opened(front)[0].outvars[len(results.avals) :]],
        [leaves[i] for i in kept.references],
        [jaxprs.struct(jaxprs.cotangent_aval(a)) for a, on in cotangents if on],
    )
    return _joined(front, back, kept.references, results, paths), simplify.holds(back, "remat2")


@dataclass
class _Residuals:
    """What the pullback of `jax.vjp` holds, taken apart: arrays are handed over, references stay where they are.

    A reference cannot be the result of a program, so its place among the inputs is kept instead (an integer), or the
    reference itself where the function closes over it.
    """

    tree: Any = None
    places: tuple[Any, ...] = ()

    def take(self, pull: Any, inputs: Sequence[Any]) -> list[Any]:
        """The arrays, in order."""
        leaves, self.tree = jax.tree.flatten(pull)
        self.places = tuple(_place(leaf, inputs) for leaf in leaves)
        return [leaf for leaf, place in zip(leaves, self.places, strict=True) if place is None]

    @property
    def references(self) -> list[int]:
        """Places of the references among the inputs."""
        return [place for place in self.places if isinstance(place, int)]

    def pull(self, arrays: Sequence[Any], references: Sequence[Any]) -> Any:
        """The pullback on other arrays and references."""
        a, r = iter(arrays), iter(references)
        leaves = (next(a) if p is None else next(r) if isinstance(p, int) else p for p in self.places)
        return self.tree.unflatten(leaves)


def _place(leaf: Any, inputs: Sequence[Any]) -> Any:
    if not jaxprs.is_reference(jax.typeof(leaf)):
        return None
    return next((i for i, x in enumerate(inputs) if x is leaf), leaf)


def _joined(front: Any, back: Any, references: Sequence[int], results: Results, paths: Sequence[str]) -> Joint:
    """Lay the backward's equations behind the forward's; constants of either become inputs."""
    num_outputs = len(results.avals)
    first, first_consts = jaxprs.opened(simplify.inlined(front))
    second, second_consts = jaxprs.opened(simplify.inlined(back))
    handed = [*first.outvars[num_outputs:], *(first.invars[i] for i in references)]
    rename = dict(zip(second.invars[: len(handed)], handed, strict=True))
    known = {id(c): v for v, c in zip(first.constvars, first_consts, strict=True)}
    shared = [id(c) in known for c in second_consts]  # a reference may enter a program only once
    rename |= {v: known[id(c)] for v, c in zip(second.constvars, second_consts, strict=True) if id(c) in known}
    late, gradients = simplify.renamed(second, rename)
    cotangents = second.invars[len(handed) :]
    ends = [*first.outvars[:num_outputs], *gradients]
    eqns, ends, boundary = simplify.merged([*first.eqns, *late], ends, len(first.eqns))
    given = [*first.constvars, *second.constvars, *first.invars]
    eqns, boundary = views.read_back(eqns, boundary, given, ends[:num_outputs])
    consts = [*first.constvars, *(v for v, twice in zip(second.constvars, shared, strict=True) if not twice)]
    values = [*first_consts, *(c for c, twice in zip(second_consts, shared, strict=True) if not twice)]
    invars = [*consts, *first.invars, *cotangents]
    roles = Roles(
        (Role.PRIMAL,) * (len(consts) + len(first.invars)) + (Role.COTANGENT,) * len(cotangents),
        (Role.OUTPUT,) * num_outputs + (Role.GRADIENT,) * len(gradients),
        boundary,
        (*(f"constant {i}" for i in range(len(consts))), *paths, *_cotangent_paths(cotangents)),
    )
    return Joint(jaxprs.build(invars, ends, eqns), roles, _as_they_are(values), results)


def _cotangent_paths(cotangents: Sequence[Any]) -> list[str]:
    return [f"cotangent {i}" for i in range(len(cotangents))]
