"""Cut each kind of op that runs on a tape into a forward, its residuals and a backward.

An op is a primitive, a call of a `jax.jit` function, or a call of an `aot.function`. When an op of a kind runs for the
first time, its forward and backward are traced and cut as one joint program. A call of an `aot.function` is cut by its
own plan. So a tape keeps only the residuals that the backward of an op reads. Each is an input, an output, or an array
that the forward saves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jointcut.aot.cache.fingerprint import fingerprint, foreign_rules
from jointcut.aot.cache.known import is_versioned, module_of
from jointcut.aot.hooks.closures import values_now
from jointcut.aot.hooks.islands import NEEDS_NUMBERS
from jointcut.aot.stages.padding.named import NamedSizes
from jointcut.aot.stages.padding.padded import padded_joint
from jointcut.aot.trace.analyse import depending
from jointcut.aot.trace.joint import joint
from jointcut.partition.errors import IdentityError
from jointcut.partition.lower.emit import Halves
from jointcut.partition.program.jax import abstract, eager, jaxprs, own_primitives, runtime, side_effects
from jointcut.partition.program.primitives import BARRIER, CONVERSION, RENAMING, REPEATING, SAME_NUMBERS
from jointcut.partition.program.sizes import names_in
from jointcut.partition.split import split
from jointcut.wrappers.built_in.autograd import JITTED
from jointcut.wrappers.built_in.zeros import Backwards
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.table import Table

KEPT_RECORDS = 4096

#: Ops that keep zeros unchanged.
_SAME_NUMBERS = (REPEATING | RENAMING | SAME_NUMBERS | {"transpose"}) - {BARRIER}

_count = itertools.count()


@dataclass(frozen=True, eq=False)
class Record:
    """One kind of op, for given types of its inputs and given differentiated inputs.

    Attributes:
        id: a number of its own.
        name: the name of the op, such as `tanh`, or of the called function; an `aot.function` is `loss#3`, numbered.
        run: from the flat inputs to the outputs and the saved arrays.
        num_outputs: the number of outputs.
        routes: where each residual comes from: `"constant"`, `"input"`, `"output"` or `"saved"`, and its place there.
        consts: the arrays that the op closes over.
        wanted: positions of the inputs that get a gradient.
        moving: for each output, whether a gradient depends on it.
        cotangents: positions of the outputs that have a cotangent, in the order of the backward.
        backward: from residuals and cotangents (None: zero) to the gradients of the inputs in `wanted`.
        types: the types of the residuals.
        closed: the op as a program.
        same: for each output the input that it is, if the op only hands its inputs on, such as a cast to the same type.
    """

    id: int
    name: str
    run: Callable[..., list[Any]]
    num_outputs: int
    routes: tuple[tuple[str, int], ...]
    consts: tuple[Any, ...]
    wanted: tuple[int, ...]
    moving: tuple[bool, ...]
    cotangents: tuple[int, ...]
    backward: Callable[[Sequence[Any], Sequence[Any | None]], list[Any | None]]
    types: tuple[Any, ...]
    closed: Any = None
    same: tuple[int, ...] = ()


def _not_run(*flat: Any) -> list[Any]:
    raise AssertionError("this op does not run")


def _handed_on(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    del residuals
    return list(cotangents)


@functools.cache
def identity(count: int) -> Record:
    """Return the record of a step that passes `count` cotangents on: the start or the end of a call with hooks."""
    places = tuple(range(count))
    return Record(-count, "call", _not_run, count, (), (), places, (True,) * count, places, _handed_on, ())


#: The record of ops whose derivative rules need numbers, and therefore run as islands.
NUMBERS = identity(0)


@functools.cache
def crossing(name: str, gradients: tuple[Any, ...], count: int, cotangents: tuple[int, ...]) -> Record:
    """Return the record of an island with `count` outputs; its gradients are zeros, which its hook replaces."""

    def zeros(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        del residuals, cotangents
        return [abstract.full(aval, 0) for aval in gradients]

    wanted, moving = tuple(range(len(gradients))), tuple(i in cotangents for i in range(count))
    return Record(next(_count), name, _not_run, count, (), (), wanted, moving, cotangents, zeros, ())


@dataclass(frozen=True, eq=False)
class KnownOp:
    """What is known of an op with a key.

    Attributes:
        record: its record.
        stores: the values that its function stored as side effects.
        names: the sizes that the record takes before its inputs, if it runs on padded arrays.
        outputs: the types of its outputs, with these names.
    """

    record: Record
    stores: Sequence[Any] = ()
    names: tuple[str, ...] = ()
    outputs: tuple[Any, ...] = ()


class Records:
    """The kinds of ops that have run on a tape, and the values that their functions stored as side effects."""

    def __init__(self) -> None:
        """Start with none."""
        self._known: Table[KnownOp] = Table(KEPT_RECORDS)
        self._alike: Table[Record] = Table(KEPT_RECORDS)

    def of(
        self,
        op: eager.Operation,
        inputs: Sequence[Any],
        mask: tuple[bool, ...],
        context: Any,
        sizes: NamedSizes | None = None,
    ) -> KnownOp:
        """Return the kind of an op for some inputs; `mask` says which are differentiated.

        With `sizes`, the record of an op that reads a size runs on arrays padded to their bucket.
        """
        avals = tuple(map(jax.typeof, inputs))
        if op.key is None:
            kind = self._tried(op, avals, mask, context, sizes)
            op.left_behind()
            return kind
        ran: list[bool] = []

        def make() -> KnownOp:
            kind = self._tried(op, avals, mask, context, sizes)
            ran.append(True)
            return replace(kind, stores=op.left_behind())

        read = [values_now(rule.f) for rule in op.functions if not is_versioned(module_of(rule.f))]
        kind = self._known.of((op.key, *read, avals, mask, context, sizes and sizes.key), make)
        if op.functions and not ran and kind.record is not NUMBERS:
            op.leave_behind(kind.stores)
        return kind

    def _tried(
        self, op: eager.Operation, avals: Sequence[Any], mask: tuple[bool, ...], context: Any, sizes: NamedSizes | None
    ) -> KnownOp:
        """Return what is known of a new op: the record `NUMBERS` if a rule of the user needs numbers."""
        try:
            return self._made(op, avals, mask, context, sizes)
        except NEEDS_NUMBERS:
            if not op.functions:
                raise
            return KnownOp(NUMBERS)

    def _made(
        self, op: eager.Operation, avals: Sequence[Any], mask: tuple[bool, ...], context: Any, sizes: NamedSizes | None
    ) -> KnownOp:
        """Return a new record, or the record of an op with an equal program."""
        closed = _program(op, avals)
        if sizes is not None and (names := tuple(sorted(names_in(closed)))):
            return self._sized(op, closed, avals, mask, context, names, sizes)
        is_rare = not (op.functions or any(map(jaxprs.may_hold_jaxpr, op.params.values())))
        return KnownOp(self._same((closed, mask, context), lambda: _record(op, closed, avals, mask), is_rare))

    def _sized(
        self,
        op: eager.Operation,
        closed: Any,
        avals: Sequence[Any],
        mask: tuple[bool, ...],
        context: Any,
        names: tuple[str, ...],
        sizes: NamedSizes,
    ) -> KnownOp:
        """Return the kind of an op on padded arrays."""
        paths = [f"operand {i}" for i in range(len(avals))]
        wanted = (False,) * len(names) + mask

        def make() -> Record:
            whole, structs = functools.partial(runtime.evaluate, closed), list(map(abstract.struct, avals))
            program = padded_joint(joint(whole, structs, False, mask, paths), names, sizes.bucket)

            def made() -> Record:
                halves = _unheld(split(program.closed, program.roles, "min_cut").halves)
                record = _made_of(op, program.closed, halves, program.consts, program.results.avals, wanted)
                return replace(record, same=tuple(len(names) + i for i in _handed(closed)))

            known = program.closed, (wanted, program.roles.forward_ops), context
            return self._same(known, made, bool(program.consts))

        record = self._same((closed, (mask, sizes.key), context), make, bool(jaxprs.opened(closed)[1]))
        return KnownOp(record, (), names, tuple(closed.out_avals))

    def _same(self, program: tuple[Any, Any, Any], make: Callable[[], Record], is_rare: bool = False) -> Record:
        """Return the record of an equal program, or make it."""
        closed, mask, context = program
        if is_rare or foreign_rules(closed):
            return make()
        try:
            key = fingerprint(program=closed, mask=mask)
        except IdentityError:
            return make()
        return self._alike.of((key, context), make)


def _program(op: eager.Operation, avals: Sequence[Any]) -> Any:
    """Return the op as a closed jaxpr, with values in the place of the references that it makes."""

    def whole(*flat: Any) -> list[Any]:
        out = op.bind(*flat)
        return list(out) if op.multiple else [out]

    return side_effects.pure(jax.make_jaxpr(whole)(*map(abstract.struct, avals)))


def _record(op: eager.Operation, closed: Any, avals: Sequence[Any], mask: tuple[bool, ...]) -> Record:
    halves, consts, outputs = _halves(op, closed, avals, mask)
    return _made_of(op, closed, halves, consts, outputs, mask)


def _made_of(
    op: eager.Operation, closed: Any, halves: Halves, consts: Sequence[Any], outputs: Sequence[Any], mask: Any
) -> Record:
    backward, _ = jaxprs.opened(halves.backward)
    count = len(halves.residuals)
    moved = depending(backward.eqns, backward.invars[count:])
    makers = {v: eqn for eqn in backward.eqns for v in eqn.outvars}
    depends = [not isinstance(v, jaxprs.Literal) and v in moved for v in backward.outvars]
    carried = [on or not _is_zero(v, makers) for on, v in zip(depends, backward.outvars, strict=True)]
    differentiated = [i for i, on in enumerate(mask) if on]
    kept = [n for n, on in enumerate(carried) if on]
    halves = replace(halves, backward=jaxprs.build(backward.invars, [backward.outvars[n] for n in kept], backward.eqns))
    backwards = Backwards(halves, JITTED)
    cotangents = tuple(i for i, aval in enumerate(outputs) if differentiated and is_inexact(aval.dtype))
    ignores = carried != depends  # a user's rule whose gradient does not depend on the cotangent
    read = {i: on or ignores for i, on in zip(cotangents, backwards.read, strict=True)}
    return Record(
        next(_count),
        getattr(op.params.get("rules"), "name", "") or op.params.get("name") or op.name,
        jax.jit(functools.partial(runtime.evaluate, halves.forward)),
        len(outputs),
        tuple(_route(r, len(consts)) for r in halves.residuals),
        tuple(consts),
        tuple(differentiated[n] for n in kept),
        tuple(read.get(i, False) for i in range(len(outputs))),
        cotangents,
        backwards,
        tuple(v.aval for v in backward.invars[:count]),
        closed,
        _handed(closed),
    )


def _handed(closed: Any) -> tuple[int, ...]:
    """Return the input that each output of a program is; nothing if one is computed."""
    jaxpr, _ = jaxprs.opened(closed)
    inputs = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == CONVERSION and not isinstance(v := eqn.invars[0], jaxprs.Literal):
            before, after = (x.aval.update(weak_type=False) for x in (v, eqn.outvars[0]))
            inputs.update({eqn.outvars[0]: inputs[v]} if v in inputs and before == after else {})
    places = tuple(-1 if isinstance(v, jaxprs.Literal) else inputs.get(v, -1) for v in jaxpr.outvars)
    return () if -1 in places else places


def _is_zero(v: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether the program writes a gradient as a constant zero."""
    while not isinstance(v, jaxprs.Literal):
        eqn = makers.get(v)
        if eqn is None or eqn.primitive.name not in _SAME_NUMBERS:
            return False
        v = eqn.invars[0]
    return not np.any(np.asarray(v.val))


def _halves(
    op: eager.Operation, closed: Any, avals: Sequence[Any], mask: tuple[bool, ...]
) -> tuple[Halves, Sequence[Any], Sequence[Any]]:
    """Return the two halves of an op, their leading constants, and the types of its outputs."""
    rules = op.params.get("rules")
    known = rules.halves(mask) if isinstance(rules, own_primitives.CallRules) else None
    if known is not None:
        halves, consts = known
        return halves, consts, [v.aval for v in jaxprs.opened(op.params["jaxpr"])[0].outvars]
    paths = [f"operand {i}" for i in range(len(avals))]
    whole = functools.partial(runtime.evaluate, closed)
    program = joint(whole, [abstract.struct(aval) for aval in avals], False, mask, paths)
    cut = split(program.closed, program.roles, "min_cut")
    return _unheld(cut.halves), program.consts, program.results.avals


def _unheld(halves: Halves) -> Halves:
    """Return the halves without barriers: one op recomputes little, and the backward is compiled as a whole."""
    backward, _ = jaxprs.opened(halves.backward)
    names: dict[Any, Any] = {}
    eqns = []
    for eqn in backward.eqns:
        invars = [v if isinstance(v, jaxprs.Literal) else names.get(v, v) for v in eqn.invars]
        if eqn.primitive.name == BARRIER:
            names.update(zip(eqn.outvars, invars, strict=True))
        else:
            eqns.append(jaxprs.rebound(eqn, invars, eqn.outvars))
    outvars = [v if isinstance(v, jaxprs.Literal) else names.get(v, v) for v in backward.outvars]
    return replace(halves, backward=jaxprs.build(backward.invars, outvars, eqns), waits=False)


def _route(residual: Any, num_consts: int) -> tuple[str, int]:
    if residual.kind != "input":
        return residual.kind, residual.index
    place = residual.index - num_consts
    return ("input", place) if place >= 0 else ("constant", residual.index)
