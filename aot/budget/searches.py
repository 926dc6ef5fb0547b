"""Search for a plan once for all ways of calling.

A search compiles several plans. What it finds is kept in the process under all that it depends on: what the function
computes, what is differentiated, the budget, the prices of ops, and JAX's settings. Another way of calling, be it
`value_and_grad`, a stage, `explain`, an export, or a `jax.grad` inside somebody's `jit`, finds it there. If its program
is the same and compiled in the same way, the plan is taken as it is, and nothing is compiled for it. If only the
function is the same, the plan is compiled once, as it will run there, and taken where it holds the budget; only where
it does not there is another search. With a cache the plans are noted for other processes as well (`notes`).

Threads that ask for the same wait for one search. What the device has free (`budget="device"`) is not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax

from jointcut.aot.budget.fit import Attempt, Fitted, Room, Weighed, fit, followed, prices, room_for
from jointcut.aot.budget.notes import Held, Note
from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import WithoutRules
from jointcut.aot.cache.sketch import sketch
from jointcut.aot.limits import Limit
from jointcut.aot.options import Options
from jointcut.aot.progress.progress import Stage, size, tell
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import IdentityError, PlanError
from jointcut.partition.figures import counted
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.cost import CostModel, Roofline
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite import simplify
from jointcut.partition.search.budget import Planner

MOST_KEPT = 32  # searches, of which the one that was asked for longest ago goes first

_T = TypeVar("_T")


@dataclass(frozen=True)
class Wanted(Generic[_T]):
    """A plan that is wanted for one program within one budget, for one way of calling.

    Attributes:
        name: of the function.
        program, options, budget: what is cut, and how.
        graph: the joint program's.
        leaves: the arguments, where they are at hand.
        way: how plans are compiled, apart from the program; see `way`.
        planner: gives the plans of the graph.
        measure: compiles a plan.
        take: makes the same of a plan whose figures are known, and compiles nothing.
        plain_bytes: compiles plain JAX's step, for the temporaries that it takes.
    """

    name: str
    program: Joint
    options: Options
    budget: Limit
    graph: Graph
    leaves: tuple[Any, ...]
    way: str
    planner: Callable[[], Planner]
    measure: Callable[[Plan], Weighed[_T]]
    take: Callable[[Plan, Held], Weighed[_T]]
    plain_bytes: Callable[[], int]


def way(options: Options, executables: int, ours: bool) -> str:
    """How plans are compiled: as how many programs, and with which arguments given up.

    Inside somebody's `jit` (not `ours`) no argument is given up.
    """
    return repr((executables, *((options.donated, options.keep_unused) if ours else (((), ()), False))))


def summary(plan: Plan) -> str:
    """A plan in a few words: `12 values, 4.2 MB saved, 31 ops recomputed`."""
    return (
        f"{counted(len(plan.values), 'value')}, {size(plan.bytes_saved)} saved, "
        f"{counted(len(plan.recomputed), 'op')} recomputed"
    )


def forget() -> None:
    """Forget all plans that were found in this process, so that they are searched for again."""
    with _LOCK:
        _PLACES.clear()


def settled(wanted: Wanted[_T]) -> Fitted[_T]:
    """The plan that held this budget before, where one is known and still does, or else what a search finds.

    Raises `BudgetError` as `fit` does.
    """
    asked = _Asked.of(wanted)
    with asked.place.lock, Stage("search", wanted.name) as now:
        noted = () if asked.note is None else asked.note.read()
        for held in noted:
            asked.place.found.setdefault((held.program, held.way), _Found(held))
        fitted = _taken(wanted, asked, now) or _checked(wanted, asked, now) or _searched(wanted, asked, now)
        mine = asked.place.found[asked.key].held
        if asked.note is not None and mine not in noted:
            asked.note.write([*(held for held in noted if (held.program, held.way) != asked.key), mine])
        return fitted


# ------------------------------------------------------------------------------------------------- what is known


@dataclass(frozen=True)
class _Found:
    """A plan that held the budget, and the plans that were tried for it; None where another process did."""

    held: Held
    trail: tuple[Attempt, ...] | None = None


@dataclass
class _Place:
    """What is known of one function under one budget, by the name of its program and the way of compiling it.

    `plain_bytes` are the temporaries of plain JAX's step by the types of the program, once they were asked for. `model`
    is the cost model, held so that no other object gets its id.
    """

    model: CostModel
    lock: threading.RLock = field(default_factory=threading.RLock)
    found: dict[tuple[str, str], _Found] = field(default_factory=dict)
    plain_bytes: dict[str, int] = field(default_factory=dict)


_PLACES: OrderedDict[str, _Place] = OrderedDict()
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Asked:
    """Where to look: the place in this process, the key within it, and the place on disk if there is one.

    `types` names the types of the program's inputs and outputs: with these and the function given, two programs differ
    in the order of their backward at most, and plain JAX's step takes the same.
    """

    place: _Place
    key: tuple[str, str]
    types: str
    note: Note | None

    @classmethod
    def of(cls, wanted: Wanted[Any]) -> _Asked:
        """Name what the search depends on; what has no name gets a place that nobody else finds."""
        model, program, budget = prices(wanted.options), wanted.program, wanted.budget
        if wanted.options.passes:  # which decide what XLA compiles, and have no name
            return cls(_Place(model), ("", wanted.way), "", None)
        roles = tuple(role.name for role in (*program.roles.inputs, *program.roles.outputs))
        parts = {
            "kind": "plan",
            "function": WithoutRules(_forward(program)),
            "differentiated": program.differentiated,
            "sparse": tuple(sorted(program.sparse)),
            "budget": (budget.fraction, budget.peak_bytes),
            "environment": environment(),
        }
        jaxpr, _ = jaxprs.opened(program.closed)
        avals = tuple(str(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars))
        try:
            types = sketch(roles=roles, avals=avals, placed=_placed(wanted))
            key = sketch(program=program.closed, types=types), wanted.way
            at = sketch(model=model if isinstance(model, Roofline) else id(model), **parts)
        except IdentityError:
            return cls(_Place(model), ("", wanted.way), "", None)
        if budget.of_device:
            return cls(_Place(model), key, types, None)
        note = Note.of(wanted.options, f"{wanted.name} plan within {budget}", {**parts, "model": model})
        return cls(_place(at, model), key, types, note)


def _place(at: str, model: CostModel) -> _Place:
    with _LOCK:
        place = _PLACES.setdefault(at, _Place(model))
        _PLACES.move_to_end(at)
        while len(_PLACES) > MOST_KEPT:
            _PLACES.popitem(last=False)
        return place


def _forward(program: Joint) -> Any:
    """The function alone, out of its joint program."""
    jaxpr, _ = jaxprs.opened(program.closed)
    given = [v for v, role in zip(jaxpr.invars, program.roles.inputs, strict=True) if role is Role.PRIMAL]
    ends = [v for v, role in zip(jaxpr.outvars, program.roles.outputs, strict=True) if role is Role.OUTPUT]
    eqns = jaxpr.eqns[: program.roles.forward_ops]
    return jaxprs.build(given, ends, [eqns[i] for i in sorted(simplify.live(eqns, ends).places)])


def _placed(wanted: Wanted[Any]) -> tuple[tuple[int, Any], ...]:
    """Which arguments do not just lie in the memory of one device, and where they lie instead."""
    found = ((i, getattr(leaf, "sharding", None)) for i, leaf in enumerate(wanted.leaves))
    return tuple((i, where) for i, where in found if where is not None and not _is_usual(where))


def _is_usual(where: jax.sharding.Sharding) -> bool:
    devices = list(where.device_set)
    return len(devices) == 1 and where.memory_kind in (None, devices[0].default_memory().kind)


# ------------------------------------------------------------------------------------------- three ways to a plan


def _taken(wanted: Wanted[_T], asked: _Asked, now: Stage) -> Fitted[_T] | None:
    """The plan that was weighed here before, as the same program compiled in the same way."""
    known = asked.place.found.get(asked.key)
    if known is None or known.trail is None:
        return None
    plan = _read(known.held, wanted.graph)
    if plan is None:
        return None
    told = f"for {wanted.budget}: {plan.strategy}, {summary(plan)}"
    now.ends(lambda: f"took the plan of an earlier search in {now} and compiled none, {told}")
    return Fitted(plan, wanted.take(plan, known.held), known.trail)


def _checked(wanted: Wanted[_T], asked: _Asked, now: Stage) -> Fitted[_T] | None:
    """A plan that held the budget elsewhere, if it does here: in another process, or compiled in another way."""
    now.says(lambda: "checking the plan of an earlier search")
    for plan, most_bytes in _elsewhere(wanted, asked):
        weighed = wanted.measure(plan)
        if weighed.activation_bytes <= (_room(wanted, asked)(weighed) if most_bytes is None else most_bytes):
            return _kept(wanted, asked, followed(plan, weighed), now, "checked the plan of an earlier search in")
    return None


def _elsewhere(wanted: Wanted[Any], asked: _Asked) -> Iterator[tuple[Plan, int | None]]:
    """The plans that held the budget elsewhere, each once.

    One that another process compiled in this very way comes first, with the temporaries that it took there.
    """
    mine, found = asked.place.found.get(asked.key), list(asked.place.found.values())
    seen: set[Any] = set()
    for known in sorted(found, key=lambda known: known is not mine):
        plan = _read(known.held, wanted.graph)
        if plan is not None and (plan.values, plan.segments) not in seen:
            seen.add((plan.values, plan.segments))
            yield plan, known.held.activation_bytes if known is mine else None


def _searched(wanted: Wanted[_T], asked: _Asked, now: Stage) -> Fitted[_T]:
    planner = wanted.planner()
    fitted = fit(planner, wanted.budget, _room(wanted, asked), wanted.measure)
    return _kept(wanted, asked, fitted, now, f"searched {planner.num_replayed} plans in")


def _read(held: Held, graph: Graph) -> Plan | None:
    """The plan in this graph; None where the two differ too much."""
    try:
        return planfile.loads(held.plan, graph)
    except PlanError:
        return None


def _room(wanted: Wanted[Any], asked: _Asked) -> Room:
    def plain_bytes() -> int:
        known = asked.place.plain_bytes
        if asked.types not in known:
            tell(lambda: "compiling plain JAX, to compare")
            known[asked.types] = wanted.plain_bytes()
        return known[asked.types]

    return room_for(wanted.budget, wanted.leaves, wanted.program.fixed_bytes, plain_bytes)


def _kept(wanted: Wanted[_T], asked: _Asked, fitted: Fitted[_T], now: Stage, how: str) -> Fitted[_T]:
    """Remember in this process what was found, and tell it."""
    weighed, plan, count = fitted.measured, fitted.plan, len(fitted.trail)
    figures = weighed.peak_bytes, weighed.activation_bytes, weighed.compile_ms
    held = Held(*asked.key, planfile.dumps(plan, wanted.graph), *figures)
    asked.place.found[asked.key] = _Found(held, fitted.trail)
    now.ends(lambda: f"{how} {now} and compiled {count}, for {wanted.budget}: {plan.strategy}, {summary(plan)}")
    return fitted
