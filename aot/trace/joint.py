"""Trace the function and its gradient as one jaxpr.

The forward is traced first, with the residuals of `jax.vjp` as extra results. Then the backward is traced on these.
Joined end to end, they are the joint program; the position of the boundary tells forward and backward equations apart.
Calls are inlined, constants become inputs, and a computation in both phases is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import numpy as np

from jointcut.aot.choices.conventions import JAX, Conventions
from jointcut.aot.loops import plain
from jointcut.aot.trace.formulas.changes import Change, formulas_in, guards_in
from jointcut.aot.trace.formulas.rewrite import with_formulas
from jointcut.aot.trace.residuals import Residuals
from jointcut.partition.branches import cut_branches
from jointcut.partition.errors import TraceError, message
from jointcut.partition.prices.policies import Policy
from jointcut.partition.program import jaxprs
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.rewrite import guard, hooks, names, regions, repeats, simplify, views
from jointcut.wrappers.arguments import fixed, objects
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in import alias, refs
from jointcut.wrappers.built_in.flatten import Outcome
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.wrapper import flat_form_of


@dataclass(frozen=True)
class Results:
    """The flat results of a function: `avals` of its outputs, then those of `aux`, then those of the states.

    `out_tree` is the tree of the outputs, `aux_tree` that of the `num_aux` outputs of `aux` (None without `has_aux`). A
    state is a value that the function wrote to an object among its arguments: `states` has the flat position and path
    of that argument. If it changed more than arrays, `grown` has the new structure; the arrays are the last of `aux`.
    """

    avals: tuple[Any, ...]
    out_tree: Any
    aux_tree: Any
    num_aux: int
    repeated: tuple[tuple[int, int], ...] = ()  # an output, and the earlier output that is the same object
    states: tuple[tuple[int, str], ...] = ()
    grown: objects.Grown | None = None

    @classmethod
    def flat(cls, out: Any, has_aux: bool) -> tuple[list[Any], Results]:
        """Flatten the result of the user's function; raises `TraceError` if it is not a pair despite `has_aux`."""
        outcome = out if isinstance(out, Outcome) else Outcome(out)
        out, states = outcome.result, outcome.states
        if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
            cure = "Return (output, aux), or leave has_aux out."
            raise TraceError(message("has_aux=True", f"needs a pair, but the function returned {_shown(out)}.", cure))
        main, aux = out if has_aux else (out, None)
        (main, aux), _ = objects.taken_apart((main, aux))
        main, aux = fixed.fixed_results((main, aux)) if has_aux else (fixed.fixed_results(main), None)
        main_leaves, main_tree = jax.tree.flatten(main)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        leaves = [*main_leaves, *aux_leaves, *outcome.parts]
        repeated = alias.repeated(leaves)
        avals = tuple(map(jax.typeof, (*leaves, *states.values())))
        written, aux_tree = tuple(zip(states, outcome.paths, strict=True)), aux_tree if has_aux else None
        results = cls(avals, main_tree, aux_tree, len(leaves) - len(main_leaves), repeated, written, outcome.grown)
        refs.refuse_results(results.tree, leaves)
        return [*leaves, *states.values()], results

    @property
    def num_returned(self) -> int:
        """The number of outputs without the states."""
        return len(self.avals) - len(self.states)

    @property
    def num_in_tree(self) -> int:
        """The number of outputs that the caller gets: without the states, and the arrays of objects that have grown."""
        return self.num_returned - (len(self.grown.paths) if self.grown else 0)

    @property
    def main(self) -> tuple[Any, ...]:
        """The types of the outputs outside aux."""
        return self.avals[: self.num_returned - self.num_aux]

    @cached_property
    def holds_objects(self) -> bool:
        """Whether the result contains objects that can be written to."""
        return objects.stand_in(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))

    @cached_property
    def holds_fixed(self) -> bool:
        """Whether the result contains leaves that are not arrays, such as the functions of a module."""
        return fixed.stand_in(jax.tree.unflatten(self.tree, range(self.tree.num_leaves)))

    @cached_property
    def cotangent_tree(self) -> Any:
        """The tree of a cotangent of the outputs: None in the place of what is not an array."""
        if not self.holds_fixed:
            return self.out_tree
        return jax.tree.structure(fixed.gradients(jax.tree.unflatten(self.out_tree, range(self.out_tree.num_leaves))))

    @property
    def paths(self) -> tuple[str, ...]:
        """The user's path of each output, `result['loss']`, and of each state, `args[0].count.value`."""
        grown = self.grown.paths if self.grown else ()
        return (*tree_paths("result", self.tree), *grown, *(path for _, path in self.states))

    @property
    def tree(self) -> Any:
        """The tree of the function's whole result, a pair with `has_aux`."""
        if self.aux_tree is None:
            return self.out_tree
        return jax.tree_util.treedef_tuple((self.out_tree, self.aux_tree))

    @property
    def with_cotangent(self) -> tuple[bool, ...]:
        """Whether each output can carry a cotangent: if it is floating-point and outside aux."""
        main = len(self.main)
        return tuple(is_inexact(a.dtype) and i < main for i, a in enumerate(self.avals))

    def given_back(self, outputs: Sequence[Any], bound: Bound) -> tuple[Any, Any]:
        """The function's output and its aux (None without `has_aux`) in trees; states are written to their objects.

        Raises `CallError`, and writes nothing, if one of the objects must not be written here.
        """
        count = self.num_returned - self.num_aux
        if self.states:
            places = (place for place, _ in self.states)
            bound.write(dict(zip(places, outputs[self.num_returned :], strict=True)))
        if self.grown is not None:
            bound.refill(self.grown, outputs[self.num_in_tree : self.num_returned])
        main = jax.tree.unflatten(self.out_tree, outputs[:count])
        aux = None
        if self.aux_tree is not None:
            aux = jax.tree.unflatten(self.aux_tree, outputs[count : self.num_in_tree])
        main, aux = objects.built((main, aux))[0] if self.holds_objects else (main, aux)
        return fixed.released((main, aux)) if self.holds_fixed else (main, aux)


def _shown(out: Any) -> str:
    if isinstance(out, jax.Array) or jaxprs.is_tracer(out):
        return f"one array, {jax.typeof(out).str_short()}"
    return f"{len(out)} values" if isinstance(out, tuple | list) else f"a {type(out).__name__}"


@dataclass(frozen=True)
class Primal:
    """The user's function as a flat jaxpr `(constants, leaves) -> outputs`, and its constants."""

    closed: Any
    consts: tuple[Any, ...]
    results: Results

    @property
    def has_references(self) -> bool:
        """Whether the function has a `jax.Ref` among its inputs, used or not, or makes one."""
        jaxpr, _ = jaxprs.opened(self.closed)
        among_inputs = any(jaxprs.is_reference(v.aval) for v in jaxpr.invars)
        return among_inputs or any(map(jaxprs.touches_references, jaxpr.eqns))


def primal(function: Callable[..., Any], leaves: Sequence[Any], has_aux: bool) -> Primal:
    """Trace a flat function to a jaxpr without constants."""
    traced: list[Results] = []

    @flat_form_of(function)
    def flat(*xs: Any) -> list[Any]:
        out, results = Results.flat(function(*xs), has_aux)
        traced[:] = [results]
        return out

    jaxpr, consts = jaxprs.opened(jax.make_jaxpr(flat)(*leaves))
    closed = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return Primal(closed, _copied(consts), traced[0])


def _copied(consts: Sequence[Any]) -> tuple[Any, ...]:
    """Copy numpy constants, so that later writes of their owner have no effect, as in `jax.jit`."""
    return tuple(c.copy() if isinstance(c, np.ndarray) else c for c in consts)


def constant_key(constant: Any) -> Any:
    """A key that identifies a constant across traces; numpy arrays are compared by value, since traces copy them."""
    if isinstance(constant, np.ndarray):
        return constant.shape, str(constant.dtype), constant.tobytes()
    return id(constant)


@dataclass(frozen=True)
class Joint:
    """The joint program `(constants, leaves, cotangents) -> (outputs, gradients)` of one function.

    `closed` has no constants of its own: `consts`, the arrays that function and derivative close over, are its leading
    inputs. Gradients are in the order of the differentiated leaves. Those at positions in `sparse` are two results
    each, the rows of a table and their places. `differentiated` has the differentiated arguments, counted from the last
    (-1), since constants may precede them. `is_as_jax` says that conditionals and values stay as JAX wrote them; else
    conditionals are cut, under `policy`. `changes` are the rules by which derivatives may differ from JAX's.
    `is_updated` says that an update has put new values in the places of the gradients. `unopened` is JAX's own
    joint program, with constants of its own, where `closed` is of a function whose regions under `jax.checkpoint` are
    open.
    """

    closed: Any
    roles: Roles
    consts: tuple[Any, ...]
    results: Results
    sparse: frozenset[int] = frozenset()
    differentiated: tuple[int, ...] = ()
    is_as_jax: bool = False
    changes: tuple[Change, ...] = ()
    policy: Policy | None = None
    is_updated: bool = False
    unopened: Joint | None = field(default=None, compare=False, repr=False)

    @property
    def plain(self) -> Joint:
        """The joint program of plain JAX's step."""
        return self if self.unopened is None or self.is_updated else self.unopened

    @cached_property
    def to_cut(self) -> Any:
        """The program as it is cut: `closed`, with the branches of its conditionals cut already (see `branches`)."""
        ahead = self.roles.forward_ops
        return self.closed if self.is_as_jax or ahead is None else cut_branches(self.closed, ahead, self.policy)

    @property
    def has_traced_consts(self) -> bool:
        """Whether the function closes over values of an outer trace, so that its program must not be cached."""
        return any(map(jaxprs.is_tracer, self.consts))

    @property
    def is_train(self) -> bool:
        """Whether there is a backward: something is differentiated, and something can carry a cotangent."""
        return Role.GRADIENT in self.roles.outputs and Role.COTANGENT in self.roles.inputs

    @property
    def fixed_bytes(self) -> int:
        """Bytes of arguments, results and gradients, needed under any plan; what is replaced counts once."""
        jaxpr, _ = jaxprs.opened(self.closed)
        results = {v for v in jaxpr.outvars if not isinstance(v, jaxprs.Literal)}
        kept = {v for i, v in enumerate(jaxpr.invars) if i not in self.roles.replaced}
        return sum(jaxprs.aval_bytes(v.aval) for v in kept | results)

    @property
    def carries(self) -> tuple[bool, ...]:
        """Whether each output has a cotangent among the inputs; all False without a backward."""
        return self.results.with_cotangent if self.is_train else (False,) * len(self.results.avals)


def joint(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    has_aux: bool,
    mask: Sequence[bool],
    paths: Sequence[str],
    places: Sequence[int] | None = None,
    conventions: Conventions = JAX,
) -> Joint:
    """Trace forward and backward of a flat function for the arguments chosen by `mask`.

    `places` gives the index in `leaves` of each argument of the function (by default its own). An array at two places
    is one input with a gradient for each place. `paths` are the names of the leaves. If `mask` chooses none, the
    program is the function alone, and no derivative is traced. If the backward contains the user's `jax.checkpoint`,
    or the function a `lax.while_loop` that is differentiated, the function is traced again as a jaxpr. Its regions
    under `jax.checkpoint` are opened and marked, its loops are replaced by ours, and that jaxpr is differentiated. So
    it is if the `conventions` are not JAX's: with `formulas`, and with the backward's products guarded (see `guard`).
    """
    places = range(len(leaves)) if places is None else places
    if not any(mask):
        return _inference(primal(lambda *xs: function(*(xs[p] for p in places)), leaves, has_aux), paths)
    differentiated = tuple(i - len(mask) for i, on in enumerate(mask) if on)
    unopened = None
    if conventions == JAX:
        try:
            program, has_checkpoint = _joint(function, leaves, has_aux, mask, paths, places, JAX)
        except ValueError as error:
            if not plain.is_about_loops(error):
                raise
        else:
            if not has_checkpoint:
                return replace(program, differentiated=differentiated)
            unopened = program
    source = primal(function, [leaves[p] for p in places], has_aux)
    closed = plain.looped(with_formulas(regions.inlined(source.closed), conventions), conventions.zero_cotangent)
    count = len(source.consts)
    names = [*(f"constant {i}" for i in range(count)), *paths]
    shifted = [*range(count), *(count + p for p in places)]
    with plain.refusing(closed):
        entered, on = [*source.consts, *leaves], [False] * count + list(mask)
        program, _ = _joint(_as_traced(source, closed, has_aux), entered, has_aux, on, names, shifted, conventions)
    changed = (*formulas_in(closed), *guards_in(program.closed))
    consts = *program.consts, *source.consts
    return replace(program, consts=consts, differentiated=differentiated, changes=changed, unopened=unopened)


def _as_traced(source: Primal, closed: Any, has_aux: bool) -> Callable[..., Any]:
    """The function that was traced, which runs another jaxpr of the same results."""
    results = source.results

    def again(*xs: Any) -> Any:
        out = jaxprs.evaluate(closed, *xs)
        main, tree, end = len(results.main), results.num_in_tree, results.num_returned
        trees = jax.tree.unflatten(results.out_tree, out[:main])
        whole = (trees, jax.tree.unflatten(results.aux_tree, out[main:tree])) if has_aux else trees
        written = dict(zip((place for place, _ in results.states), out[end:], strict=True))
        return Outcome(whole, written, tuple(path for _, path in results.states), results.grown, out[tree:end])

    return again


def _inference(source: Primal, paths: Sequence[str]) -> Joint:
    """The program of a function without derivative: `(constants, leaves) -> outputs`."""
    jaxpr, consts = jaxprs.opened(simplify.inlined(source.closed))
    eqns, outvars, boundary = simplify.merged(jaxpr.eqns, jaxpr.outvars, len(jaxpr.eqns))
    invars = [*jaxpr.constvars, *jaxpr.invars]
    values = (*_copied(consts), *source.consts)
    roles = Roles(
        (Role.PRIMAL,) * len(invars),
        (Role.OUTPUT,) * len(outvars),
        boundary,
        (*(f"constant {i}" for i in range(len(values))), *paths),
    )
    return Joint(jaxprs.build(invars, outvars, eqns), roles, values, source.results)


def _joint(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    has_aux: bool,
    mask: Sequence[bool],
    paths: Sequence[str],
    places: Sequence[int],
    conventions: Conventions,
) -> tuple[Joint, bool]:
    residuals, traced = Residuals(), list[Results]()

    @flat_form_of(function)
    def forward(*entered: Any) -> tuple[list[Any], list[Any]]:
        xs = [entered[p] for p in places]

        @flat_form_of(function)
        def chosen(*picked: Any) -> tuple[list[Any], list[Any]]:
            differentiated = iter(picked)
            out = function(*(next(differentiated) if on else x for x, on in zip(xs, mask, strict=True)))
            flat, results = Results.flat(out, has_aux)
            traced[:] = [results]
            pairs = list(zip(flat, results.with_cotangent, strict=True))
            return [x for x, on in pairs if on], [x for x, on in pairs if not on]

        main, pull, rest = jax.vjp(chosen, *(x for x, on in zip(xs, mask, strict=True) if on), has_aux=True)
        main, rest = iter(main), iter(rest)
        return [next(main) if on else next(rest) for on in traced[0].with_cotangent], residuals.take(pull, entered)

    front, results = jax.make_jaxpr(forward)(*leaves), traced[0]
    cotangents = zip(results.avals, results.with_cotangent, strict=True)
    back = jax.make_jaxpr(lambda arrays, refs, cts: residuals.pull(arrays, refs)(cts))(
        [jaxprs.struct(v.aval) for v in jaxprs.opened(front)[0].outvars[len(results.avals) :]],
        [leaves[i] for i in residuals.references],
        [jaxprs.struct(jaxprs.cotangent_aval(a)) for a, on in cotangents if on],
    )
    has_checkpoint, front, back = regions.has_regions(back), simplify.inlined(front), simplify.inlined(back)
    if (guards := conventions.zero_cotangent) != "jax":
        back = guard.guarded(front, back, len(results.avals), {*compress(places, mask)}, guards == "everywhere")
    return _joined(names.by_name(front), back, residuals.references, results, paths), has_checkpoint


def _joined(front: Any, back: Any, references: Sequence[int], results: Results, paths: Sequence[str]) -> Joint:
    """Append the backward's equations to the forward's, with all calls opened; the constants of both become inputs."""
    num_outputs = len(results.avals)
    first, first_consts = jaxprs.opened(front)
    second, second_consts = jaxprs.opened(back)
    residuals = [*first.outvars[num_outputs:], *(first.invars[i] for i in references)]
    rename = dict(zip(second.invars[: len(residuals)], residuals, strict=True))
    known = {id(c): v for v, c in zip(first.constvars, first_consts, strict=True)}
    shared = [id(c) in known for c in second_consts]  # a reference may be an input of a program only once
    rename |= {v: known[id(c)] for v, c in zip(second.constvars, second_consts, strict=True) if id(c) in known}
    late, gradients = simplify.renamed(second, rename)
    cotangents = second.invars[len(residuals) :]
    outvars, joined = [*first.outvars[:num_outputs], *gradients], [*first.eqns, *hooks.called_early(late, gradients)]
    eqns, outvars, boundary = simplify.merged(joined, outvars, len(first.eqns))
    eqns, boundary = repeats.repeated_inside(eqns, outvars, boundary)
    inputs = [*first.constvars, *second.constvars, *first.invars]
    eqns, boundary = views.read_back(eqns, boundary, inputs, outvars[:num_outputs])
    consts = [*first.constvars, *(v for v, twice in zip(second.constvars, shared, strict=True) if not twice)]
    values = [*first_consts, *(c for c, twice in zip(second_consts, shared, strict=True) if not twice)]
    invars = [*consts, *first.invars, *cotangents]
    roles = Roles(
        (Role.PRIMAL,) * (len(consts) + len(first.invars)) + (Role.COTANGENT,) * len(cotangents),
        (Role.OUTPUT,) * num_outputs + (Role.GRADIENT,) * len(gradients),
        boundary,
        (*(f"constant {i}" for i in range(len(consts))), *paths, *(f"cotangent {i}" for i in range(len(cotangents)))),
    )
    return Joint(jaxprs.build(invars, outvars, eqns), roles, _copied(values), results)
