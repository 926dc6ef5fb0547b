"""Decide what may be saved and what may be recomputed, with a reason.

Each rule gives a `Verdict` for one value. Both answers may be no (then the cut must stop before it, at what the value
is computed from), but only for a value that the backward does not read itself. What runs in the forward anyway and is
*heavy* is not run again, nor is a chain of transcendental functions; what only the backward needs is run where the cut
says, once, heavy or not. Ops that are not known to be cheap count as heavy: a wrong guess then costs bytes, never
seconds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jointcut.partition.classify import Facts
from jointcut.partition.graph import LITERAL, SCAN, STEP, TOP, Graph, Op, Value
from jointcut.partition.roles import Side

#: The name that tracing puts on the name stack of what runs under the user's `jax.checkpoint`.
CHECKPOINT_SCOPE = "jax.checkpoint"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: One instruction or a short polynomial per element. (Not `igamma`, `lgamma` and the like, which are series.)
ELEMENTWISE = _names(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
    is_finite le le_to log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square
    optimization_barrier or polynomial population_count pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor"""
)

#: Elements copied, repeated or picked, and keys derived from keys.
MOVEMENT = _names(
    """axis_index broadcast broadcast_in_dim broadcast_to concatenate create_token dynamic_slice
    dynamic_update_slice empty expand_dims gather iota pad pvary random_clone random_fold_in
    random_seed random_split random_unwrap random_wrap reduced_vary_cast reduced_vary_cast_p reshape rev
    sharding_constraint slice split squeeze stack tile transpose unstack vary_unreduced_cast vary_unreduced_cast_p
    zeros_like"""
)

#: They read more than they return: saving is cheap, and running them again breaks a fusion in two.
REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")

#: They talk to other devices, which must all take part.
COLLECTIVES = _names(
    """all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pgather pmax pmin ppermute psum
    psum2 psum_invariant psum_scatter ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter"""
)

#: Calls that stay closed for the sake of their derivative; what is inside decides.
CALLS = _names(
    """custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr closed_call core_call jit jointcut_call jointcut_waiting
    pjit"""
)

CHEAP = ELEMENTWISE | MOVEMENT

#: A polynomial or more per element. XLA computes other elementwise ops anew within the loop of each reader, not these.
DEAR = _names(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow
    sin sinh tan tanh"""
)
FUSED = ELEMENTWISE - DEAR

#: So many of them for each element, one upon the other, are not worth running twice. Softplus is two, and saving it the
#: suite's interatomic potential takes 0.97 of plain's time instead of 1.06, its simulated robots 0.87 instead of 1.05.
_TOO_DEAR = 2

#: A gather moves elements too, but reads them from anywhere, past the cache.
_IN_ORDER = CHEAP - {"gather"}


@dataclass(frozen=True)
class Verdict:
    """What may be done with one value: each rule that forbids something, in words; empty where nothing does.

    `is_costly` says that the rule against recomputing is one of cost, which a budget may overrule.
    """

    not_saved: str = ""
    not_recomputed: str = ""
    is_costly: bool = False


class Demand(enum.Enum):
    """What somebody asks for one value, over what the cut would choose."""

    SAVE = "must save"
    RECOMPUTE = "must recompute"
    OFFLOAD = "may offload"


@dataclass(frozen=True)
class Constraint:
    """A demand on one value, with its reason. `OFFLOAD` permits host memory, which no plan uses yet."""

    value: int
    demand: Demand
    reason: str


def judge(graph: Graph, facts: Facts, constraints: Iterable[Constraint] = ()) -> list[Verdict]:
    """The verdict on every value that exists in the forward; values of the backward get an empty one."""
    rules = _Rules(_too_dear(graph, facts), rerunnable(graph), frozenset(v for v, _ in graph.outputs if v is not None))
    verdicts = [_verdict(graph, facts, value, rules) for value in graph.values]
    for c in constraints:
        if c.demand is Demand.SAVE and graph.values[c.value].maker is not None:
            verdicts[c.value] = Verdict("", c.reason)
        elif c.demand is Demand.RECOMPUTE:
            verdicts[c.value] = replace(verdicts[c.value], not_saved=c.reason)
    return verdicts


@dataclass(frozen=True)
class _Rules:
    """What is found once for a graph: the ops that end a dear chain, the scans that may run again, the outputs."""

    dear: frozenset[int]
    rerunnable: frozenset[int]
    outputs: frozenset[int]


def _verdict(graph: Graph, facts: Facts, value: Value, rules: _Rules) -> Verdict:
    if facts.is_late(value.id):
        return Verdict()
    if value.maker is None:
        return Verdict("", "it is an input")
    op = graph.ops[value.maker]
    if why := _never_again(graph, facts, value, op, rules):
        return Verdict(_not_saved(facts, value, op), why)
    if op.id in rules.dear:
        return Verdict(_not_saved(facts, value, op), "it ends a chain of transcendental functions", True)
    if op.name == SCAN:
        return Verdict(_not_saved(facts, value, op), "a loop is not run twice", True)
    if value.id in facts.escaping and op.name not in (STEP, LITERAL):
        return Verdict(_not_saved(facts, value, op), "it is read outside the loop that makes it", True)
    why = heavy(graph, op) if op.id in facts.forward and op.name not in (STEP, LITERAL) else ""
    return Verdict(_not_saved(facts, value, op), why, bool(why))


def _not_saved(facts: Facts, value: Value, op: Op) -> str:
    if op.name == STEP:
        return "it is one step of a stack, and the stack can be saved"
    if op.name == LITERAL:
        return "it is a literal"
    if value.id not in facts.wanted and CHECKPOINT_SCOPE in op.scope:
        return "jax.checkpoint keeps it out"
    return ""


def _never_again(graph: Graph, facts: Facts, value: Value, op: Op, rules: _Rules) -> str:
    """Why an op may not run in the backward too, whatever that would save.

    A loop inside a loop may: a step of the outer one then holds its stacks for as long as it lasts. An outermost loop
    would hold in the backward what it was to save; it runs in segments instead (`segments`).
    """
    if op.name == SCAN and op.id not in rules.rerunnable:
        return "a loop is not run twice"
    if (
        op.name not in (STEP, LITERAL)
        and value.id in facts.escaping
        and not _escapes_into_step(graph, value, op, rules)
    ):
        return "it is read outside the loop that makes it"
    if op.effects:
        return f"{op.name} has an effect, which must happen once"
    talks = sorted(COLLECTIVES & {op.name, *op.inner})
    return f"{talks[0]} talks to other devices" if talks else ""


def _too_dear(graph: Graph, facts: Facts) -> frozenset[int]:
    """Cheap ops of the forward that end a chain with `_TOO_DEAR` transcendental functions for each element.

    One that is computed for fewer elements, then broadcast, counts for as much less. A chain begins anew after its end,
    and at what a loop carries from step to step: that is often kept for its own sake.
    """
    carried = {v for region in graph.regions for v in region.carried}
    ends: set[int] = set()
    counts: dict[int, float] = {}  # by value, for each element
    for op in graph.ops:
        if op.id not in facts.forward or op.name not in CHEAP | CALLS or heavy(graph, op):
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
    """Ids of the forward scans that may run again in a step of the loop around them: nothing in them must run once."""
    run_once = (op for op in graph.ops if op.effects or COLLECTIVES & {op.name, *op.inner})
    closed = {region for op in run_once for region in graph.around[op.region]}
    bodies = {scan: body.id for scan, body in graph.bodies.items() if body.origin is Side.FORWARD}
    return frozenset(i for i, body in bodies.items() if graph.loop_of(graph.ops[i]) != TOP and body not in closed)


def _escapes_into_step(graph: Graph, value: Value, op: Op, rules: _Rules) -> bool:
    """Whether a value is read outside its loop only in the step of the loop around it, which may run the loop again."""
    scan = graph.regions[op.region].scan
    if op.name == SCAN or scan not in rules.rerunnable:
        return False
    near = {value.loop, graph.loops[value.loop].parent}
    readers = [graph.ops[c] for c in graph.consumers[value.id]]
    # A scan reads from its own body what it hands to its next step.
    loops = (graph.bodies[c.id].loop if c.name == SCAN else graph.loop_of(c) for c in readers)
    return value.id not in rules.outputs and near.issuperset(loops)


def light(graph: Graph, op: Op) -> bool:
    """Whether an op may run several times: it is elementwise, or moves elements in order, or is a call of such ops."""
    return op.name in _IN_ORDER or (op.name in CALLS and not heavy(graph, op))


def heavy(graph: Graph, op: Op) -> str:
    """Why an op is not worth running twice, or an empty text where it is cheap."""
    if op.name in CHEAP:
        return ""
    if op.name in REDUCTIONS:
        read = max((graph.values[v].bytes for v in op.inputs), default=0)
        kept = sum(graph.values[v].bytes for v in op.outputs)
        return "it reduces more than it returns" if kept < read else ""
    if op.name in CALLS and op.inner:
        costly = sorted(op.inner - CHEAP - CALLS)
        return f"it holds {costly[0]}, which is heavy" if costly else ""
    return f"{op.name} is heavy"
