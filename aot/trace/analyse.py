"""Find the inputs that a traced function reads, writes and aliases.

The equations of the joint program are read once forwards and once backwards; nothing is computed. The results are the
records of `wrappers.metadata`, for wrappers, signatures and explanations.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jointcut.aot.trace.joint import Joint
from jointcut.aot.trace.primal import Results
from jointcut.partition.program.jax import abstract, jaxprs, side_effects
from jointcut.partition.program.primitives import CALLS, COND, DRAWING, ENCLOSING, RULED, SCAN
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite import simplify
from jointcut.wrappers.arguments import containers
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in import alias, refs
from jointcut.wrappers.metadata.schemas import (
    SOURCES,
    InputAliasInfo,
    Meta,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    ViewAndMutationMeta,
    plain_meta,
    plain_metas,
)
from jointcut.wrappers.metadata.view_meta import VIEWS, ViewMeta

_HOLDS = (SCAN, COND)  # their bodies show which result depends on which operand


def analyse(program: Joint, bound: Bound, known: Sequence[InputAliasInfo]) -> ViewAndMutationMeta:
    """Return the records of one traced call; `known` are the records of its arguments from before the trace."""
    jaxpr, _ = jaxprs.opened(program.closed)
    start = len(program.consts)
    uses = _Uses.of(jaxpr, program.roles.forward_ops)
    tangents = program.results.tangents() if program.is_train else ()
    flat = tuple(meta for meta in tangents if meta.unwrapped_idx is not None)
    taken = tuple(plain_meta(i, v.aval) for i, v in enumerate(_cotangents(program, jaxpr)))
    assert flat == taken, "the backward takes the cotangents that its callers are asked for"
    states = {place for place, _ in program.results.states}
    inputs = [jaxpr.invars[start + place] for place in bound.places]
    infos = [uses.of_input(info, var) for info, var in zip(known, inputs, strict=True)]
    for i in states:
        infos[i] = replace(infos[i], mutates_data=True, keep_input_mutations=False)
    returnable = alias.returnable(inputs, [i for i, info in enumerate(known) if info.is_donated])
    constants = jaxpr.invars[:start]
    return ViewAndMutationMeta(
        input_info=tuple(infos),
        output_info=tuple(_output_infos(program, jaxpr, returnable, uses.read)),
        subclass_inp_meta=bound.described.metas,
        subclass_fw_graph_out_meta=program.results.described.metas,
        subclass_tangent_meta=_in_containers(tangents, program.results),
        traced_tangents=flat,
        is_train=program.is_train,
        constant_info=tuple(uses.of_input(_constant(i, var), var) for i, var in enumerate(constants)),
        constant_meta=tuple(plain_meta(i, var.aval) for i, var in enumerate(constants)),
        tokens=uses.tokens,
        num_backward_tokens=uses.num_backward_tokens,
        effects=uses.effects,
    )


def _in_containers(tangents: Sequence[PlainTensorMeta], results: Results) -> tuple[Meta, ...]:
    """Return the cotangents of plain arrays, and of the containers in which any array has one."""
    metas = containers.Described.of(results.tree, tangents[: results.num_in_tree]).metas if tangents else ()
    return tuple(meta for meta in metas if any(plain.unwrapped_idx is not None for plain in plain_metas(meta)))


def _cotangents(program: Joint, jaxpr: Any) -> list[Any]:
    """Return the inputs that are cotangents."""
    return [v for v, role in zip(jaxpr.invars, program.roles.inputs, strict=True) if role is Role.COTANGENT]


# ------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class _Uses:
    """The effects of a joint program, on its inputs and outside; `read` holds inputs only."""

    read: frozenset[Any]
    written: frozenset[Any]
    written_late: frozenset[Any]
    drawn: frozenset[Any]
    tokens: tuple[str, ...]
    num_backward_tokens: int
    effects: tuple[str, ...]

    @classmethod
    def of(cls, jaxpr: Any, boundary: int | None) -> _Uses:
        """Read the equations; the first `boundary` belong to the forward (None: all)."""
        eqns = list(enumerate(jaxpr.eqns))
        boundary = len(eqns) if boundary is None else boundary
        live = simplify.live(jaxpr.eqns, jaxpr.outvars)
        written: tuple[set[Any], set[Any]] = set(), set()
        tokens: tuple[list[str], list[str]] = [], []
        effects: set[str] = set()
        read_references: set[Any] = set()
        for i, eqn in eqns:
            if not eqn.effects:
                continue
            written[i >= boundary].update(refs.written(eqn))
            read_references.update(refs.read(eqn, live.read))
            tokens[i >= boundary].extend(side_effects.effect_names(eqn, ordered=True))
            effects.update(side_effects.effect_names(eqn))
        arrays = {v for v in jaxpr.invars if v in live.read and not abstract.is_reference(v.aval)}
        alive = (eqn for i, eqn in eqns if i in live.places)
        drawn = frozenset(v for eqn in alive for v in _drawn(eqn)) if any(map(_may_be_key, arrays)) else frozenset()
        return cls(
            read=frozenset(arrays | read_references),
            written=frozenset(written[0]),
            written_late=frozenset(written[1]),
            drawn=drawn,
            tokens=tuple(dict.fromkeys(tokens[0])),
            num_backward_tokens=len(set(tokens[1])),
            effects=tuple(sorted(effects)),
        )

    def of_input(self, known: InputAliasInfo, var: Any) -> InputAliasInfo:
        """Return the record of an input, with the effects of the program on it."""
        return replace(
            known,
            is_read=var in self.read,
            mutates_data=var in self.written,
            mutates_in_backward=var in self.written_late,
            consumes_key=var in self.drawn,
        )


def _constant(i: int, var: Any) -> InputAliasInfo:
    return InputAliasInfo(f"constant {i}", False, False, is_reference=abstract.is_reference(var.aval))


def _may_be_key(var: Any) -> bool:
    """Whether a variable may be a random key: one of JAX's key types, or raw words."""
    return not abstract.is_plain(var.aval) or var.aval.dtype == np.uint32


def _drawn(eqn: Any) -> Iterator[Any]:
    """Yield the operands from which an equation draws random numbers, including in bodies of loops and branches."""
    if eqn.primitive.name in DRAWING:
        yield from jaxprs.variables(eqn.invars[:1])
        return
    for body in jaxprs.inner_jaxprs(eqn):
        inner = {v for e in body.eqns for v in _drawn(e)}
        offset = len(eqn.invars) - len(body.invars)  # a branch does not take the index
        if offset in (0, 1):
            operands = zip(eqn.invars[offset:], body.invars, strict=True)
            yield from (v for v, parameter in operands if parameter in inner and not isinstance(v, jaxprs.Literal))


# ------------------------------------------------------------------------------------------------------ outputs


def _output_infos(
    program: Joint, jaxpr: Any, returnable: Mapping[Any, int], read: Collection[Any]
) -> Iterator[OutputAliasInfo]:
    """Yield one record for each output; it shares `returnable` inputs alone. `read` are the inputs that are read."""
    results = program.results
    outputs = jaxpr.outvars[: results.num_returned]
    chains = _OutputViews.of(jaxpr.eqns[: program.roles.forward_ops], outputs, dict(results.repeated))
    handed_back = alias.handed_back(returnable, outputs, results.repeated)
    carrying = _carrying(program, jaxpr, read)
    for i, path in enumerate(results.paths[: results.num_returned]):
        root, views = chains.of_outputs[i]
        kind, base = OutputType.non_alias, None
        if i in handed_back:
            kind, base, views = SOURCES[handed_back[i].source], handed_back[i].alias, ()
        elif root in returnable:
            kind, base = OutputType.alias_of_input, returnable[root]
        elif (other := chains.base_of(i)) is not None:
            kind, base = OutputType.alias_of_intermediate_base_is_user_output, other
            views = views[len(chains.of_outputs[other][1]) :]
        elif views and root in chains.shared:
            kind, base = OutputType.alias_of_intermediate, chains.shared.index(root)
        else:
            views = ()
        yield OutputAliasInfo(path, kind, base, i in carrying, views)


def _carrying(program: Joint, jaxpr: Any, read: Collection[Any]) -> set[int]:
    """Return the positions of outputs whose cotangents reach a gradient, or a reference that the backward writes."""
    targets = set(jaxprs.variables(jaxpr.outvars[len(program.results.avals) :]))
    carrying = (i for i, on in enumerate(program.carries) if on)
    cotangents = [(i, v) for i, v in zip(carrying, _cotangents(program, jaxpr), strict=True) if v in read]
    backward = jaxpr.eqns[program.roles.forward_ops :]
    if not any(eqn.primitive.name in _HOLDS for eqn in backward):
        return {i for i, _ in cotangents}
    targets |= {v for v in jaxpr.invars if abstract.is_reference(v.aval)}
    return {i for i, v in cotangents if not targets.isdisjoint(depending(backward, [v]))}


def depending(eqns: Sequence[Any], starts: Collection[Any]) -> set[Any]:
    """Return the variables in `starts` and all that depend on them; bodies of loops and branches are read."""
    reached = set(starts)
    for eqn in eqns:
        places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, jaxprs.Literal) and v in reached]
        if places:
            reached.update(eqn.outvars[i] for i in _through(eqn, places))
            reached.update(refs.written(eqn))
    return reached


def _through(eqn: Any, places: Sequence[int]) -> Iterator[int]:
    """Return the positions of the results of an equation that depend on the operands at `places`."""
    count = len(eqn.outvars)
    if eqn.primitive.name == COND and 0 not in places:
        branches = [_body_results(body, [i - 1 for i in places]) for body in jaxprs.inner_jaxprs(eqn)]
        return iter(set().union(*branches))
    if eqn.primitive.name != SCAN:
        return iter(range(count))
    layout = jaxprs.scan_layout(eqn)
    reached, results, before = set(places), set[int](), -1
    while len(reached) > before:  # until the carry reaches no other value
        before = len(reached)
        results = _body_results(layout.body, reached)
        reached |= {layout.num_consts + i for i in results if i < layout.num_carry}
    return iter(results if layout.length else range(count))


def _body_results(body: Any, places: Collection[int]) -> set[int]:
    flow = depending(body.eqns, [body.invars[i] for i in places])
    return {i for i, v in enumerate(body.outvars) if not isinstance(v, jaxprs.Literal) and v in flow}


@dataclass(frozen=True)
class _OutputViews:
    """The view of each output: the value that it is a view of (its root), and the steps from there.

    Attributes:
        of_outputs: root and steps of each output; a literal has none.
        shared: the roots of more than one output.
    """

    of_outputs: list[tuple[Any, tuple[ViewMeta, ...]]]
    shared: list[Any]

    @classmethod
    def of(cls, eqns: Sequence[Any], outputs: Sequence[Any], repeated: Collection[int]) -> _OutputViews:
        """Follow each output back through the equations that only move elements; values in `repeated` count once."""
        makers = {v: eqn for eqn in eqns if eqn.primitive.name in VIEWS for v in eqn.outvars}
        chains = [(None, ()) if isinstance(v, jaxprs.Literal) else _chain(v, makers) for v in outputs]
        counts = Counter(root for i, (root, _) in enumerate(chains) if root is not None and i not in repeated)
        return cls(chains, [root for root, count in counts.items() if count > 1])

    def base_of(self, i: int) -> int | None:
        """Return the output that output `i` is a view of, or None; of several, the nearest to the root."""
        root, views = self.of_outputs[i]
        bases = [
            (len(steps), j)
            for j, (other, steps) in enumerate(self.of_outputs)
            if root is not None and other is root and len(steps) < len(views) and views[: len(steps)] == steps
        ]
        return min(bases)[1] if bases else None


def _chain(var: Any, makers: dict[Any, Any]) -> tuple[Any, tuple[ViewMeta, ...]]:
    """Return the value that a variable is a view of, and the steps from there."""
    views: list[ViewMeta] = []
    while var in makers and not isinstance(makers[var].invars[0], jaxprs.Literal):
        eqn = makers[var]
        views.insert(0, ViewMeta(eqn.primitive.name, tuple(var.aval.shape), tuple(_arguments(eqn, var))))
        var = eqn.invars[0]
    return var, tuple(views)


def _arguments(eqn: Any, var: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments, without the array, of the operation that makes `var`; see `ViewMeta`."""
    if eqn.primitive.name == "dynamic_slice":
        starts = eqn.invars[1 : 1 + len(var.aval.shape)]
        yield "start_indices", tuple(int(v.val) if isinstance(v, jaxprs.Literal) else None for v in starts)
    for name in VIEWS[eqn.primitive.name]:
        value = eqn.params[name]
        yield name, tuple(map(operator.index, value)) if name == "sizes" else value
    if eqn.primitive.name == "split":
        yield "index", eqn.outvars.index(var)


# ----------------------------------------------------------------------------- views with a derivative of their own


def may_be_ruled(metadata: ViewAndMutationMeta) -> bool:
    """Whether an output is a view of an input, and a gradient flows back from it."""
    return any(info.output_type is OutputType.alias_of_input and info.requires_grad for info in metadata.output_info)


def with_ruled_views(metadata: ViewAndMutationMeta, closed: Any) -> ViewAndMutationMeta:
    """Return the records, with the views by functions that have derivatives of their own marked as such.

    `closed` is the function's own jaxpr, since a joint program does not tell who wrote its equations.
    """
    jaxpr, _ = jaxprs.opened(closed)
    infos = (
        replace(info, output_type=OutputType.custom_function_view)
        if info.output_type is OutputType.alias_of_input and _root(jaxpr, var)[1]
        else info
        for info, var in zip(metadata.output_info, jaxpr.outvars, strict=False)  # states follow
    )
    return replace(metadata, output_info=tuple(infos))


def _root(jaxpr: Any, var: Any) -> tuple[Any, bool]:
    """Follow a view to the value that it is a view of, and say whether a rule of derivatives stands on the way."""
    makers, is_ruled = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}, False
    while not isinstance(var, jaxprs.Literal) and (eqn := makers.get(var)) is not None:
        bodies = list(jaxprs.inner_jaxprs(eqn)) if eqn.primitive.name in CALLS | ENCLOSING else []
        if bodies:
            root, inner = _root(bodies[0], bodies[0].outvars[eqn.outvars.index(var)])
            is_ruled |= inner or eqn.primitive.name in RULED
            if root not in bodies[0].invars:
                break
            var = eqn.invars[len(eqn.invars) - len(bodies[0].invars) + bodies[0].invars.index(root)]
        elif eqn.primitive.name in VIEWS:
            var = eqn.invars[0]
        else:
            break
    return var, is_ruled
