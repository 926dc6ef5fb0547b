"""Decide which values may be saved and which may be recomputed, with a reason.

Each value gets a `Verdict`. A verdict may forbid both saving and recomputing a value, if the backward does not read the
value itself. Then no op that reads the value may run in the backward either. A *heavy* op of the forward is not run
again, nor is the end of a chain of transcendental functions. An op that only the backward needs runs once, on the side
that the cut chooses, heavy or not. Ops that are not known to be cheap count as heavy: a wrong guess then costs bytes,
never seconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from jointcut.partition.bodies.checkpoints import adjustable_loops
from jointcut.partition.program.graph import BRANCHES, LITERAL, ONCE, OPEN, OPEN_LOOP, SHARDS, STEP, Graph, Op, Value
from jointcut.partition.program.places import RESULT, SAVED, regions_of
from jointcut.partition.program.primitives import (
    ANYWHERE,
    CALLS,
    CHEAP,
    CHECKPOINT_SCOPE,
    COLLECTIVES,
    DEAR,
    REDUCTIONS,
)
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sides import Sides

#: The number of transcendental functions for each element from which a chain is not run twice. Softplus has two. If it
#: is saved, the suite's interatomic potential takes 0.97 of plain JAX's time instead of 1.06, its simulated robots 0.87
#: instead of 1.05.
_TOO_DEAR = 2

#: The reason why a value of a region under `jax.checkpoint` is not saved.
KEPT_OUT = "jax.checkpoint keeps it out"

_IN_ORDER = CHEAP - ANYWHERE  # without ops that read from anywhere: the cache does not help these


@dataclass(frozen=True)
class Verdict:
    """The rules that forbid saving or recomputing one value, in words; an empty text forbids nothing.

    `is_costly` says that the rule against recomputing is a rule of cost, which a budget may overrule.
    """

    not_saved: str = ""
    not_recomputed: str = ""
    is_costly: bool = False

    @property
    def why_under_budget(self) -> str:
        """The reason why the value is saved where a budget may overrule the rules of cost."""
        if self.not_recomputed and not self.is_costly:
            return f"not recomputed: {self.not_recomputed}"
        return "at this budget its bytes cost less than computing it again"


class CheckpointPolicy(enum.Enum):
    """A user's demand on a value (PyTorch's `torch.utils.checkpoint.CheckpointPolicy`)."""

    MUST_SAVE = "must save"
    """It is never computed again: the forward hands it over wherever the backward has a use for it."""
    PREFER_SAVE = "prefer to save"
    """Computing it again counts as more than it takes; see `Problem.weighed`."""
    MUST_RECOMPUTE = "must recompute"
    """It is never saved: the backward computes it again."""
    PREFER_RECOMPUTE = "prefer to recompute"
    """Computing it again counts as no time, and where only bytes count, saving it as more than it takes."""
    MUST_OFFLOAD = "must offload"
    """It is never computed again: it waits in host memory wherever the backward has a use for it."""
    PREFER_OFFLOAD = "prefer to offload"
    """Where it is saved it waits in host memory, and computing it again counts as more than it takes."""

    @property
    def is_must(self) -> bool:
        """Whether it holds under every budget, and is no price."""
        return self.name.startswith("MUST")

    @property
    def is_must_keep(self) -> bool:
        """Whether the value is never computed again."""
        return self in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_OFFLOAD)

    @property
    def is_for_host(self) -> bool:
        """Whether the value waits in host memory if it is saved."""
        return self.name.endswith("OFFLOAD")


@dataclass(frozen=True)
class KeepAtMost:
    """A demand on values: together they keep at most this many bytes in the device's memory between the halves."""

    most_bytes: int

    @property
    def name(self) -> str:
        """The demand in the user's words."""
        return f"budget({self.most_bytes})"


#: The number of loops around a value of an outermost loop, the top of the program included.
_IN_ONE_LOOP = 2


def not_offloaded(graph: Graph, sides: Sides, v: int, *, in_nested: bool = True) -> str:
    """The reason why a value of the forward cannot wait in host memory, in words; empty where it can.

    `in_nested` says whether the compiler moves values out of loops that are inside loops.
    """
    if v in sides.outputs:
        return "it is an output, which the caller gets in the device's memory"
    if v not in graph.arrays:
        return "it is no array of numbers"
    around = [graph.loops[loop].rivals for loop in graph.ancestors[graph.values[v].loop]]
    if max(around) > 1:
        return "it is made in a conditional, whose branches share the space of what they keep"
    if max(around) == 1:
        return "it is made in a jax.shard_map, which hands over all that it keeps in the device's memory"
    if not in_nested and len(graph.ancestors[graph.values[v].loop]) > _IN_ONE_LOOP:
        return "it is made in a loop inside a loop, and the compiler for this device fails to move such values"
    return ""


@dataclass(frozen=True)
class Constraint:
    """A demand on one value.

    Attributes:
        value: its id in the graph.
        demand: the demand.
        reason: the reason, in words; the plan tells it.
        is_asked: whether a user asked for it; only then a plan tells that it has no effect.
        is_costly: whether the rules of cost still apply to a value that must be computed again if it is read.
    """

    value: int
    demand: CheckpointPolicy
    reason: str
    is_asked: bool = True
    is_costly: bool = False


def must_keep(constraints: Iterable[Constraint], *, is_asked: bool = False) -> frozenset[int]:
    """The values that must never be computed again; with `is_asked`, only those that a user named."""
    return frozenset(c.value for c in constraints if c.demand.is_must_keep and (c.is_asked or not is_asked))


def packed(graph: Graph, values: Container[int]) -> dict[int, int]:
    """What keeps some of these values in another form: the value that is kept so, by the one that is kept instead."""
    return {form.source: form.value for form in graph.forms if graph.is_packed(form, values)}


def told_to_keep(graph: Graph, sides: Sides, constraints: Iterable[Constraint]) -> Sides:
    """The sides, with the values that a user wants kept added to the values that the backward reads.

    A value is added if the backward can use it: if it reads the value, or computes something from it without another
    value that is to be kept.
    """
    asked = must_keep(constraints, is_asked=True)
    kept = asked.union(packed(graph, asked))
    useful = set(sides.wanted)
    for op in reversed(graph.ops) if asked else ():
        is_ours = op.name not in OPEN and op.id not in sides.backward
        if is_ours and any(v in useful and v not in kept for v in op.outputs):
            useful.update(op.inputs)
    return replace(sides, wanted=sides.wanted | (useful & kept))


def judge(graph: Graph, sides: Sides, constraints: Iterable[Constraint] = ()) -> list[Verdict]:
    """Return the verdict on every value; a value that exists only in the backward gets an empty verdict."""
    constraints = tuple(constraints)
    outputs = frozenset(v for v, _ in graph.outputs if v is not None)
    rules = _Rules(_too_dear(graph, sides), rerunnable(graph), outputs, _checkpointed(graph, constraints))
    verdicts = [_verdict(graph, sides, value, rules) for value in graph.values]
    for c in _asked_by_regions(graph, sides):
        verdicts[c.value] = _demanded(verdicts[c.value], c, False)
    for c in constraints:
        if graph.values[c.value].maker is not None:
            verdicts[c.value] = _demanded(verdicts[c.value], c, c.value in sides.escaping)
    return verdicts


def _demanded(verdict: Verdict, c: Constraint, escapes: bool) -> Verdict:
    """The verdict on a value under a demand, which goes before the rules of cost.

    A value that `escapes` its loop is computed again with the whole loop or not at all, whatever is demanded of it.
    """
    is_hard = bool(verdict.not_recomputed) and (escapes or not verdict.is_costly)
    if c.demand.is_must_keep:
        return Verdict("", c.reason)
    if c.demand is CheckpointPolicy.MUST_RECOMPUTE:
        return replace(verdict, not_saved=c.reason) if is_hard or c.is_costly else Verdict(c.reason)
    if c.demand in (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_OFFLOAD):
        return verdict if is_hard or verdict.not_saved else Verdict("", c.reason, True)
    if c.demand is CheckpointPolicy.PREFER_RECOMPUTE:
        return verdict if is_hard else Verdict(verdict.not_saved)
    return verdict


@dataclass(frozen=True)
class _Rules:
    """Facts worked out once for a graph: the ops that end a dear chain, the scans that may run again, the outputs.

    `checkpointed` are the loops that keep fewer checkpoints rather than run again.
    """

    dear: frozenset[int]
    rerunnable: frozenset[int]
    outputs: frozenset[int]
    checkpointed: frozenset[int]


def _verdict(graph: Graph, sides: Sides, value: Value, rules: _Rules) -> Verdict:
    if sides.is_late(value.id):
        return Verdict()
    if value.maker is None:
        return Verdict("", "it is an input")
    op = graph.ops[value.maker]
    if why := _never_again(graph, sides, value, op, rules):
        return Verdict(_not_saved(sides, value, op), why)
    if op.id in rules.dear:
        return Verdict(_not_saved(sides, value, op), "it ends a chain of transcendental functions", True)
    if op.name in OPEN:
        return Verdict(_not_saved(sides, value, op), _not_twice(op), True)
    if value.id in sides.escaping and op.name not in (STEP, LITERAL):
        return Verdict(_not_saved(sides, value, op), "it is read outside the loop that makes it", True)
    why = heavy(graph, op) if op.id in sides.forward and op.name not in (STEP, LITERAL) else ""
    return Verdict(_not_saved(sides, value, op), why, bool(why))


_OPENED = {OPEN_LOOP: "loop", BRANCHES: "conditional", SHARDS: "jax.shard_map"}


def _not_twice(op: Op) -> str:
    return f"a {_OPENED[op.name]} is not run twice"


def _not_saved(sides: Sides, value: Value, op: Op) -> str:
    if op.name == STEP:
        return "it is one step of a stack, and the stack can be saved"
    if op.name == LITERAL:
        return "it is a literal"
    if value.id not in sides.wanted and CHECKPOINT_SCOPE in op.scope and not regions_of(op.scope):
        return KEPT_OUT
    return ""


def _asked_by_regions(graph: Graph, sides: Sides) -> Iterator[Constraint]:
    """The demands of regions under `jax.checkpoint`: to save only their results and the values their policies allow."""
    for op in graph.ops:
        results = regions_of(op.scope, RESULT)
        if not (regions := regions_of(op.scope) - regions_of(op.scope, SAVED)):
            continue
        for v in op.outputs:
            if sides.is_late(v) or v in sides.escaping or v in sides.outputs:
                continue
            if regions - results:
                yield Constraint(v, CheckpointPolicy.MUST_RECOMPUTE, KEPT_OUT)
            else:
                yield Constraint(v, CheckpointPolicy.PREFER_SAVE, "it is the result of a jax.checkpoint")


def _never_again(graph: Graph, sides: Sides, value: Value, op: Op, rules: _Rules) -> str:
    """The reason why an op may not run in the backward too, whatever that would save; an empty text where it may.

    A loop inside a loop may run again: its stacks are then alive only during one step of the outer loop. An outermost
    loop may not: in the backward it would hold all the stacks that it was not to save. It runs in segments instead (see
    `reruns`). A loop with checkpoints would hold these too. It keeps fewer instead.
    """
    if op.id in rules.checkpointed:
        return "a loop keeps fewer checkpoints rather than run twice"
    if op.name in OPEN and op.id not in rules.rerunnable:
        return _not_twice(op)
    if (
        op.name not in (STEP, LITERAL)
        and value.id in sides.escaping
        and not _escapes_into_step(graph, value, op, rules)
    ):
        return "it is read outside the loop that makes it"
    if op.effects:
        return f"{op.name} has an effect, which must happen once"
    talks = sorted(COLLECTIVES & op.inner)
    return f"{talks[0]} talks to other devices" if talks else ""


def _checkpointed(graph: Graph, constraints: Iterable[Constraint]) -> frozenset[int]:
    """The loops whose number of checkpoints may be chosen, but for those that must run again."""
    told = {graph.values[c.value].maker for c in constraints if c.demand is CheckpointPolicy.MUST_RECOMPUTE}
    return frozenset(i for i in adjustable_loops(graph) if i not in told and not regions_of(graph.ops[i].scope))


def _too_dear(graph: Graph, sides: Sides) -> frozenset[int]:
    """Cheap ops of the forward that end a chain with `_TOO_DEAR` transcendental functions for each element.

    A function that is computed for fewer elements, then broadcast, counts for that fraction. Counting starts again from
    zero after the end of a chain, and at carried values of a loop: those are often saved for other reasons.
    """
    carried = {v for body in graph.bodies.values() for v in body.carried}
    ends: set[int] = set()
    counts: dict[int, float] = {}  # by value, for each element
    for op in graph.ops:
        if op.id not in sides.forward or op.name not in CHEAP | CALLS or heavy(graph, op):
            continue
        size = max((math.prod(graph.values[v].shape) for v in op.outputs), default=0)
        own = len(op.inner & DEAR) if op.name in CALLS else int(op.name in DEAR)
        read = (counts[v] * min(1.0, math.prod(graph.values[v].shape) / max(size, 1)) for v in op.inputs if v in counts)
        count = own + max(read, default=0.0)
        if own and count >= _TOO_DEAR:
            ends.add(op.id)
            count = 0.0
        counts.update((v, count) for v in op.outputs if v not in carried)
    return frozenset(ends)


def rerunnable(graph: Graph) -> frozenset[int]:
    """Ids of the forward's ops with open bodies that may run again: no op in them must run once.

    These are scans in a step of the loop around them, and conditionals.
    """
    forward = (graph.ops[i] for i in graph.bodies if graph.ops[i].origin is Side.FORWARD)
    bodies = {op.id: graph.bodies[op.id] for op in forward if op.name in ONCE or graph.is_in_steps(op)}
    if not bodies:
        return frozenset()
    run_once = (op for op in graph.ops if op.effects or COLLECTIVES & {op.name, *op.inner})
    closed = {region for op in run_once for region in graph.around[op.region]}
    return frozenset(i for i, body in bodies.items() if closed.isdisjoint(body.regions))


def _escapes_into_step(graph: Graph, value: Value, op: Op, rules: _Rules) -> bool:
    """Whether a value is read outside its loop only in the step of the loop around it, which may run the loop again."""
    scan = graph.regions[op.region].holder
    if op.name in OPEN or scan not in rules.rerunnable:
        return False
    near = {value.loop, graph.loops[value.loop].parent}
    readers = [graph.ops[c] for c in graph.consumers[value.id]]
    # A scan also reads, from its own body, the values that it hands to its next step.
    loops = (graph.bodies[c.id].loop if c.name in OPEN else graph.loop_of(c) for c in readers)
    return value.id not in rules.outputs and near.issuperset(loops)


def light(graph: Graph, op: Op) -> bool:
    """Whether an op may run several times: it is elementwise, or moves elements in order, or is a call of such ops."""
    return op.name in _IN_ORDER or (op.name in CALLS and not heavy(graph, op))


def heavy(graph: Graph, op: Op) -> str:
    """The reason why an op is not worth running twice; an empty text where it is cheap."""
    if op.name in CHEAP:
        return ""
    if op.name in REDUCTIONS:
        read = max((graph.values[v].bytes for v in op.inputs), default=0)
        kept = sum(graph.values[v].bytes for v in op.outputs)
        return "it reduces more than it returns" if kept < read else ""
    if op.name in COLLECTIVES:
        return f"{op.name} talks to other devices"
    if op.name in CALLS and op.inner:
        costly = sorted(op.inner - CHEAP - CALLS)
        return f"it holds {costly[0]}, which is heavy" if costly else ""
    return f"{op.name} is heavy"
