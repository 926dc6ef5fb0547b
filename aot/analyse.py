"""Run the function on shapes to learn what it reads, writes and aliases.

The run is the trace of the joint program, which spends no FLOP: its equations are read once forth and once back. From
them come the records of `wrappers.metadata`, which wrappers, signatures and explanations go by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jointcut.aot.joint import Joint
from jointcut.partition import jaxprs, rewrite
from jointcut.partition.roles import Role
from jointcut.wrappers import containers
from jointcut.wrappers.metadata import (
    VIEWS,
    InputAliasInfo,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    ViewAndMutationMeta,
    ViewMeta,
    plain_metas,
)
from jointcut.wrappers.refs import reads_and_writes
from jointcut.wrappers.tree import Bound

_DRAWS = ("random_bits", "random_split", "random_fold_in", "random_wrap", "threefry2x32", "rng_bit_generator")


def analyse(program: Joint, bound: Bound, wanted: Collection[int], donated: Collection[int]) -> ViewAndMutationMeta:
    """The records of one traced call; `wanted` (differentiated) and `donated` are flat positions of arguments."""
    jaxpr, _ = jaxprs.opened(program.closed)
    start = len(program.consts)
    uses = _Uses.of(jaxpr, program.roles.forward_ops)
    returned = program.results.avals[: program.results.num_returned]
    outs = containers.metas(program.results.tree, [plain_meta(i, a) for i, a in enumerate(returned)])
    states = {place for place, _ in program.results.states}
    inputs = [jaxpr.invars[start + place] for place in bound.places]
    return ViewAndMutationMeta(
        input_info=tuple(
            InputAliasInfo(
                path=path,
                is_read=var in uses.read,
                requires_grad=i in wanted,
                mutates_data=var in uses.written or i in states,
                mutates_in_backward=var in uses.written_late,
                is_reference=jaxprs.is_reference(var.aval),
                keep_input_mutations=i not in states,
                is_donated=i in donated,
                duplicate_of=bound.duplicates.get(i),
                consumes_key=var in uses.drawn,
            )
            for i, (path, var) in enumerate(zip(bound.paths(), inputs, strict=True))
        ),
        output_info=tuple(_output_infos(program, jaxpr, inputs, [inputs[i] for i in wanted])),
        subclass_inp_meta=containers.metas(bound.tree, [plain_meta(i, v.aval) for i, v in enumerate(inputs)]),
        subclass_fw_graph_out_meta=outs,
        subclass_tangent_meta=tuple(m for m in outs if any(program.carries[p.unwrapped_idx] for p in plain_metas(m))),
        traced_tangents=tuple(_tangents(jaxpr, program.roles.inputs)),
        is_train=program.is_train,
        num_constants=start,
        tokens=uses.tokens,
        num_backward_tokens=uses.num_backward_tokens,
        effects=uses.effects,
    )


def plain_meta(index: int, aval: Any) -> PlainTensorMeta:
    """The type of one flat array (what a reference holds, for a reference), at a position."""
    inner = getattr(aval, "inner_aval", aval)
    sharding = getattr(inner, "sharding", None)
    shown = str(sharding) if jaxprs.is_explicit(sharding) else None
    return PlainTensorMeta(index, tuple(inner.shape), inner.dtype, bool(getattr(inner, "weak_type", False)), shown)


def _tangents(jaxpr: Any, roles: Sequence[Role]) -> Iterator[PlainTensorMeta]:
    ends = [v for v, role in zip(jaxpr.invars, roles, strict=True) if role is Role.COTANGENT]
    return (plain_meta(i, v.aval) for i, v in enumerate(ends))


# ------------------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class _Uses:
    """What the equations of a joint program do to its inputs, and to the world outside."""

    read: frozenset[Any]
    written: frozenset[Any]
    written_late: frozenset[Any]
    drawn: frozenset[Any]
    tokens: tuple[str, ...]
    num_backward_tokens: int
    effects: tuple[str, ...]

    @classmethod
    def of(cls, jaxpr: Any, boundary: int | None) -> _Uses:
        """Read the live equations, the first `boundary` of which are the forward's."""
        eqns = list(enumerate(jaxpr.eqns))
        boundary = len(eqns) if boundary is None else boundary
        live = rewrite.live(jaxpr.eqns, jaxpr.outvars)
        written: tuple[set[Any], set[Any]] = set(), set()
        tokens: tuple[list[str], list[str]] = [], []
        effects: set[str] = set()
        for i, eqn in eqns:
            if not eqn.effects:
                continue
            written[i >= boundary].update(var for var, is_written in reads_and_writes(eqn) if is_written)
            tokens[i >= boundary].extend(jaxprs.effect_names(eqn, ordered=True))
            effects.update(jaxprs.effect_names(eqn))
        drawn = frozenset(v for i, eqn in eqns if i in live.places for v in _drawn(eqn))
        return cls(
            read=live.read,
            written=frozenset(written[0]),
            written_late=frozenset(written[1]),
            drawn=drawn,
            tokens=tuple(tokens[0]),
            num_backward_tokens=len(tokens[1]),
            effects=tuple(sorted(effects)),
        )


def _drawn(eqn: Any) -> Iterator[Any]:
    """The operands of an equation that it draws random numbers from, also in the bodies of loops and branches."""
    if eqn.primitive.name in _DRAWS:
        yield from (v for v in eqn.invars[:1] if not isinstance(v, jaxprs.Literal))
        return
    for body in jaxprs.inner_jaxprs(eqn):
        inner = {v for e in body.eqns for v in _drawn(e)}
        offset = len(eqn.invars) - len(body.invars)  # a branch does not take the index
        if offset in (0, 1):
            operands = zip(eqn.invars[offset:], body.invars, strict=True)
            yield from (v for v, own in operands if own in inner and not isinstance(v, jaxprs.Literal))


# ------------------------------------------------------------------------------------------------------ outputs


def _output_infos(
    program: Joint, jaxpr: Any, inputs: Sequence[Any], wanted: Sequence[Any]
) -> Iterator[OutputAliasInfo]:
    """What each output shares with an input or with an earlier output."""
    ends = jaxpr.outvars[: program.results.num_returned]
    makers = {
        v: eqn for eqn in jaxpr.eqns[: program.roles.forward_ops] if eqn.primitive.name in VIEWS for v in eqn.outvars
    }
    chains = [_chain(v, makers) for v in ends]
    roots = [root for root, _ in chains]
    places = {v: i for i, v in enumerate(inputs) if not jaxprs.is_reference(v.aval)}
    moved = _reached(jaxpr.eqns[: program.roles.forward_ops], wanted)
    views_of = Counter(root for root in roots if not isinstance(root, jaxprs.Literal))
    shared = [root for root, count in views_of.items() if count > 1]
    names = program.results.paths
    for i, (end, (root, views)) in enumerate(zip(ends, chains, strict=True)):
        kind, base = OutputType.non_alias, None
        if isinstance(root, jaxprs.Literal):
            views = ()
        elif root in places:
            kind, base = (OutputType.alias_of_input if views else OutputType.is_input), places[root]
        elif (twin := _earlier(ends, chains, i)) is not None:
            kind = OutputType.alias_of_intermediate_base_is_user_output
            base, views = twin, views[len(chains[twin][1]) :]
        elif root in shared and views:
            kind, base = OutputType.alias_of_intermediate, shared.index(root)
        else:
            views = ()
        can = program.carries[i] and not isinstance(end, jaxprs.Literal) and end in moved
        yield OutputAliasInfo(names[i], kind, base, can, _raw_type(end.aval), views)


def _raw_type(aval: Any) -> str:
    return "array" if jaxprs.is_plain(aval) else "key"


def _chain(var: Any, makers: dict[Any, Any]) -> tuple[Any, tuple[ViewMeta, ...]]:
    """The value that a variable is a view of, and the steps from there."""
    views: list[ViewMeta] = []
    while not isinstance(var, jaxprs.Literal) and var in makers:
        eqn = makers[var]
        if isinstance(eqn.invars[0], jaxprs.Literal):
            break
        arguments = tuple((name, eqn.params[name]) for name in VIEWS[eqn.primitive.name])
        views.insert(0, ViewMeta(eqn.primitive.name, tuple(var.aval.shape), arguments))
        var = eqn.invars[0]
    return var, tuple(views)


def _earlier(ends: Sequence[Any], chains: Sequence[Any], i: int) -> int | None:
    """The earlier output that output `i` is, or is a view of, if there is one."""
    root, views = chains[i]
    for j in range(i):
        other, steps = chains[j]
        if other is root and views[: len(steps)] == steps and not isinstance(ends[j], jaxprs.Literal):
            return j
    return None


def _reached(eqns: Sequence[Any], starts: Sequence[Any]) -> set[Any]:
    """The variables that depend on some of `starts`, and those themselves."""
    found = set(starts)
    for eqn in eqns:
        if not found.isdisjoint(v for v in eqn.invars if not isinstance(v, jaxprs.Literal)):
            found.update(eqn.outvars)
            found.update(var for var, is_written in reads_and_writes(eqn) if is_written)
    return found
