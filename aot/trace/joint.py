"""Trace the function and its gradient as one jaxpr.

The forward is traced first, with the residuals of `jax.vjp` as extra results. Then the backward is traced on these.
Joined end to end, they are the joint program; the position of the boundary tells forward and backward equations apart.
Calls are inlined, constants become inputs, and a computation in both phases is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any

import jax
import numpy as np

from jointcut.aot.loops import plain
from jointcut.aot.options.conventions import JAX, Conventions
from jointcut.aot.trace.formulas.changes import Change, formulas_in, guards_in
from jointcut.aot.trace.formulas.rewrite import with_formulas
from jointcut.aot.trace.primal import Primal, Results, copied, primal
from jointcut.aot.trace.residuals import Residuals
from jointcut.partition.bodies.read import read
from jointcut.partition.errors import TraceError, message
from jointcut.partition.plans.backend import PORTABLE, Backend
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime
from jointcut.partition.program.roles import Role, Roles, Tile
from jointcut.partition.rewrite import guard, names, regions, repeats, simplify, views
from jointcut.partition.split import cut_within
from jointcut.partition.tiles.layouts import Laid, Layout
from jointcut.partition.tiles.tile import with_tile
from jointcut.wrappers import stack
from jointcut.wrappers.built_in.flatten import Outcome
from jointcut.wrappers.metadata.descriptors import Descriptors
from jointcut.wrappers.wrapper import JointPass, flat_form_of


def constant_key(constant: Any) -> Any:
    """Return a key of a constant across traces; numpy arrays are compared by value, since traces copy them."""
    if isinstance(constant, np.ndarray):
        return constant.shape, str(constant.dtype), constant.tobytes()
    return id(constant)


@dataclass(frozen=True)
class Joint:
    """The joint program `(constants, leaves, cotangents) -> (outputs, gradients)` of one function.

    `closed` has no constants of its own: `consts`, the arrays that function and derivative close over, are its leading
    inputs. Gradients are in the order of the differentiated leaves. Each gradient at a position in `sparse` is two
    results, the rows of a table and their places. `differentiated` has the differentiated arguments, counted from the
    last (-1), since constants may precede them. `is_as_jax` says that conditionals and values stay as JAX wrote them.
    `changes` are the rules by which derivatives may differ from JAX's. `layout` tells how the inputs lie on a mesh.
    `is_updated` says that an update has replaced the gradients by new values. If regions under `jax.checkpoint` are
    open in `closed`, or a pass of the user's has rewritten it, `unopened` is JAX's own joint program, with constants of
    its own.
    """

    closed: Any
    roles: Roles
    consts: tuple[Any, ...]
    results: Results
    sparse: frozenset[int] = frozenset()
    differentiated: tuple[int, ...] = ()
    is_as_jax: bool = False
    changes: tuple[Change, ...] = ()
    layout: Layout | None = field(default=None, compare=False)
    is_updated: bool = False
    unopened: Joint | None = field(default=None, compare=False, repr=False)

    def with_tile(self, tile: Tile, backend: Backend = PORTABLE) -> Joint:
        """Return the program with rows in blocks for a backend; plain JAX's step stays the one without.

        Raises `PlanError` where the program has no such rows.
        """
        cut = partial(cut_within, backend)
        closed, roles = with_tile(self.closed, self.roles, tile, cut, backend.holds_products, self.layout)
        return replace(self, closed=closed, roles=roles, unopened=self.plain)

    @property
    def plain(self) -> Joint:
        """The joint program of plain JAX's step."""
        return self if self.unopened is None or self.is_updated else self.unopened

    @cached_property
    def graph(self) -> Graph:
        """The program as ops and values, without cheaper forms of the values; bytes are those of one device."""
        graph = read(self.closed, self.roles, opens_once=not self.is_as_jax)
        return graph if self.laid is None else self.laid.on_each(graph)

    @property
    def has_traced_consts(self) -> bool:
        """Whether the function closes over values of an outer trace, so that its program must not be cached."""
        return any(map(runtime.is_tracer, self.consts))

    @property
    def is_train(self) -> bool:
        """Whether there is a backward: something is differentiated, and something can carry a cotangent."""
        return Role.GRADIENT in self.roles.outputs and Role.COTANGENT in self.roles.inputs

    @cached_property
    def fixed_bytes(self) -> int:
        """The bytes of arguments, results and gradients, needed under any plan; replaced arrays count once.

        On a mesh these are the bytes of one device.
        """
        jaxpr, _ = jaxprs.opened(self.closed)
        results = set(jaxprs.variables(jaxpr.outvars))
        kept = {v for i, v in enumerate(jaxpr.invars) if i not in self.roles.replaced}
        parts = self.laid.parts if self.laid is not None else lambda v: 1
        return sum(-(-abstract.aval_bytes(v.aval) // parts(v)) for v in kept | results)

    @cached_property
    def unreduced(self) -> str:
        """The path of the first input that is a sum over devices not added up yet, or has such a gradient; or empty."""
        inputs = zip(jaxprs.opened(self.closed)[0].invars, self.roles.input_paths, strict=False)
        return next((path for v, path in inputs if meshes.is_unreduced(v.aval)), "")

    @cached_property
    def laid(self) -> Laid | None:
        """How the values lie on a mesh, by arguments, types and each `jax.shard_map`; None where they lie on none."""
        layout = Layout.within(self.closed) if self.layout is None else self.layout
        return layout.laid(self.closed) if layout is not None and layout.is_known else None

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
    program is the function alone, and no derivative is traced.

    The function is traced again as a jaxpr if the backward contains the user's `jax.checkpoint`, or if the function
    contains an op that JAX does not run backwards and `plain.reversible` does. Its regions under `jax.checkpoint` are
    opened and marked, such ops are replaced, and that jaxpr is differentiated. The same happens if the `conventions`
    are not JAX's: with `formulas`, and with guards on the backward's products (see `guard`).
    """
    places = range(len(leaves)) if places is None else places
    if not any(mask):
        return _inference(primal(lambda *xs: function(*(xs[p] for p in places)), leaves, has_aux), paths)
    differentiated = tuple(i - len(mask) for i, on in enumerate(mask) if on)
    unopened = None
    if conventions == JAX:
        try:
            program, has_checkpoint = _joint(function, leaves, has_aux, mask, paths, places, JAX)
        except (ValueError, NotImplementedError) as error:
            if not plain.can_be_reversible(error):
                raise
        else:
            if not has_checkpoint:
                layout = Layout.among((*program.consts, *leaves))
                return replace(program, differentiated=differentiated, layout=layout)
            unopened = program
    source = primal(function, [leaves[p] for p in places], has_aux)
    closed = plain.reversible(with_formulas(regions.inlined(source.closed), conventions), conventions.zero_cotangent)
    count = len(source.consts)
    names = [*(f"constant {i}" for i in range(count)), *paths]
    shifted = [*range(count), *(count + p for p in places)]
    with plain.refusing(closed):
        entered, on = [*source.consts, *leaves], [False] * count + list(mask)
        program, _ = _joint(_as_traced(source, closed, has_aux), entered, has_aux, on, names, shifted, conventions)
    changed = (*formulas_in(closed), *guards_in(program.closed))
    program = replace(
        program, consts=(*program.consts, *source.consts), layout=Layout.among((*program.consts, *entered))
    )
    return replace(program, differentiated=differentiated, changes=changed, unopened=unopened)


def rewritten(program: Joint, passes: Sequence[JointPass], describe: Callable[[Joint], Descriptors]) -> Joint:
    """Return the program after the user's passes, the first one first; plain JAX's step stays the one without.

    A program without a backward is not cut, and stays as it is. Raises `TraceError` for a pass that returns a program
    of other inputs, outputs or effects, or one whose outputs read a cotangent.
    """
    if not program.is_train:
        return program
    plain = program.plain
    for each in passes:
        made = stack.rewritten(each, program.closed, describe(program))
        if made is not program.closed:
            program = replace(_rewritten(f"before_cut of {type(each).__name__}", program, made), unopened=plain)
    return program


def _rewritten(where: str, program: Joint, made: Any) -> Joint:
    """Return the program with a rewritten jaxpr, whose constants become leading inputs."""
    jaxpr, consts = jaxprs.opened(simplify.inlined(made))
    roles, old = program.roles, jaxprs.opened(program.closed)[0]
    invars, count = [*jaxpr.constvars, *jaxpr.invars], len(consts) + len(program.consts)
    front, back = _in_phases(where, old.eqns[: roles.forward_ops], old.eqns[roles.forward_ops :], jaxpr, roles.inputs)
    late = {v for eqn in back for v in eqn.outvars} | {*jaxpr.invars[roles.inputs.index(Role.COTANGENT) :]}
    for v, role in zip(jaxpr.outvars, roles.outputs, strict=True):
        if role is Role.OUTPUT and not isinstance(v, jaxprs.Literal) and v in late:
            cure = "Compute the outputs from the inputs alone: the forward runs before there are cotangents."
            what = f"returned a program whose output_{jaxpr.outvars.index(v) + 1} reads a cotangent."
            raise TraceError(message(where, what, cure))
    eqns, outvars, boundary = simplify.merged([*front, *back], jaxpr.outvars, len(front))
    places = simplify.live(eqns, outvars).places
    paths = (*(f"constant {i}" for i in range(count)), *roles.input_paths[len(program.consts) :])
    roles = replace(
        roles,
        inputs=(*(Role.PRIMAL for _ in consts), *roles.inputs),
        forward_ops=sum(i in places for i in range(boundary)),
        input_paths=paths,
    )
    closed = jaxprs.build(invars, outvars, [eqns[i] for i in sorted(places)])
    return replace(program, closed=closed, roles=roles, consts=(*copied(consts), *program.consts))


def _in_phases(
    where: str, forward: Sequence[Any], backward: Sequence[Any], jaxpr: Any, roles: Sequence[Role]
) -> tuple[list[Any], list[Any]]:
    """Return the equations of a rewritten jaxpr by phase: what needs no cotangent is the forward's.

    Equations with effects stay in the phase in which they were, in their order.
    """
    before = [(eqn.primitive.name, False) for eqn in forward if eqn.effects]
    before += [(eqn.primitive.name, True) for eqn in backward if eqn.effects]
    names = [eqn.primitive.name for eqn in jaxpr.eqns if eqn.effects]
    if names != [name for name, _ in before]:
        shown, had = (", ".join(each) or "none" for each in (names, [name for name, _ in before]))
        what = f"returned a program with the effects {shown}, and was given one with {had}."
        raise TraceError(message(where, what, "Keep the equations that have effects, in their order."))
    late = {v for v, role in zip(jaxpr.invars, roles, strict=True) if role is Role.COTANGENT}
    phases, phased = iter(before), ([], [])
    for eqn in jaxpr.eqns:
        reads = not late.isdisjoint(jaxprs.variables(eqn.invars))
        name, is_late = next(phases) if eqn.effects else ("", reads)
        if reads and not is_late:
            what = f"returned a program in which {name}, an effect of the forward, reads a cotangent."
            raise TraceError(message(where, what, "Keep the equations that have effects, with their operands."))
        late.update(eqn.outvars if is_late else ())
        phased[is_late].append(eqn)
    return phased


def _as_traced(source: Primal, closed: Any, has_aux: bool) -> Callable[..., Any]:
    """Return the traced function, running another jaxpr with the same results."""
    results = source.results

    def again(*xs: Any) -> Any:
        out = runtime.evaluate(closed, *xs)
        main, tree, end = len(results.main), results.num_in_tree, results.num_returned
        trees = jax.tree.unflatten(results.out_tree, out[:main])
        whole = (trees, jax.tree.unflatten(results.aux_tree, out[main:tree])) if has_aux else trees
        written = dict(zip((place for place, _ in results.states), out[end:], strict=True))
        return Outcome(whole, written, tuple(path for _, path in results.states), results.grown, out[tree:end])

    return again


def _inference(source: Primal, paths: Sequence[str]) -> Joint:
    """Return the program of a function without derivative: `(constants, leaves) -> outputs`."""
    jaxpr, consts = jaxprs.opened(simplify.inlined(source.closed))
    eqns, outvars, boundary = simplify.merged(jaxpr.eqns, jaxpr.outvars, len(jaxpr.eqns))
    invars = [*jaxpr.constvars, *jaxpr.invars]
    values = (*copied(consts), *source.consts)
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
        [abstract.struct(v.aval) for v in jaxprs.opened(front)[0].outvars[len(results.avals) :]],
        [leaves[i] for i in residuals.references],
        [abstract.struct(abstract.cotangent_aval(a)) for a, on in cotangents if on],
    )
    has_checkpoint, front, back = regions.has_regions(back), simplify.inlined(front), simplify.inlined(back)
    if (guards := conventions.zero_cotangent) != "jax":
        back = guard.guarded(front, back, len(results.avals), {*compress(places, mask)}, guards == "everywhere")
    return joined(names.by_name(front), back, residuals.references, results, paths), has_checkpoint


def joined(front: Any, back: Any, references: Sequence[int], results: Results, paths: Sequence[str]) -> Joint:
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
    outvars, joined = [*first.outvars[:num_outputs], *gradients], [*first.eqns, *late]
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
    return Joint(jaxprs.build(invars, outvars, eqns), roles, copied(values), results)
