"""Search for a plan once for all ways of calling.

A search compiles several plans. Its result is kept in the process under everything that it depends on: the function,
the differentiated arguments, the budget, the prices of ops, and JAX's settings. Other ways of calling the function
(`value_and_grad`, a stage, `explain`, an export, `jax.grad` inside a `jit`) find it there. If the program is the same
and compiled in the same way, the plan is used unchanged, and nothing is compiled for it. If only the function is the
same, the plan is compiled once, as it will run there, and used if it holds the budget; otherwise there is another
search. With a cache the plans are also noted for other processes (`notes`), but not for `budget="device"`.

A refusal names the smallest peak that was found, and `budget=0.0` takes it. Its plan is kept as well: a budget of that
peak, or of hardly more, takes one compilation.

Threads that want the same plan wait for one search.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax

from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import WithoutRules
from jointcut.aot.cache.sketch import sketch
from jointcut.aot.options.limits import Limit, Room, room_for
from jointcut.aot.options.options import Options
from jointcut.aot.planning.budgets.attempts import Attempt, Fitted, Ways, Weighed, followed, summary
from jointcut.aot.planning.budgets.fit import default_plan, fit, of_default, prices
from jointcut.aot.planning.budgets.notes import Held, Note, PlainNote
from jointcut.aot.planning.budgets.shares import shared, told
from jointcut.aot.progress.progress import Stage, tell
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.trace.joint import Joint
from jointcut.partition.errors import IdentityError, PlanError
from jointcut.partition.figures import counted
from jointcut.partition.plans import planfile
from jointcut.partition.plans.matching import moved
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.cost import CostModel, Roofline
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role, Tile
from jointcut.partition.rewrite import simplify
from jointcut.partition.search.budget import Planner

MOST_KEPT = 64  # places of plans; the least recently used is forgotten first

#: The smallest plan of an earlier search is taken for a budget whose room is at most this factor of its memory.
HARDLY_MORE = 1.03

_T = TypeVar("_T")


@dataclass(frozen=True)
class Wanted(Generic[_T]):
    """A request for a plan of one program within one budget, for one way of calling.

    Attributes:
        name: of the function.
        program, options, budget: the joint program, the options of the function, and the budget.
        graph: of the joint program.
        leaves: the arguments of the call, as far as they are known.
        way: how plans are compiled; see the function `way`.
        planner: makes the planner of the graph.
        ways: how plans are compiled, and weighed.
        take: gives the same as `ways.measure` for a plan with known figures, without compiling.
        plain: begins to compile plain JAX's step, for its memory.
        forms, is_moved: the values that may wait in a smaller form, and whether the graph is of a `moved` request.
    """

    name: str
    program: Joint
    options: Options
    budget: Limit
    graph: Graph
    leaves: tuple[Any, ...]
    way: str
    planner: Callable[[], Planner]
    ways: Ways[_T]
    take: Callable[[Plan, Held], Weighed[_T]]
    plain: Callable[[], Future[ProgramMemory]]
    forms: tuple[tuple[int, str], ...] = ()
    is_moved: bool = False


def way(options: Options, executables: int, ours: bool) -> str:
    """Return a name for how plans are compiled: how many programs, which donations (none in a `jit`), XLA's options."""
    own = options.donated, options.keep_unused, *(options.compiler_options or ())
    return repr((executables, *(own if ours else (((), ()), False))))


def forget() -> None:
    """Forget all plans found in this process."""
    with _LOCK:
        _PLACES.clear()


def settled(wanted: Wanted[_T]) -> Fitted[_T]:
    """Return a known plan that still holds this budget, or else the result of a search.

    Raises `BudgetError` as `fit` does.
    """
    shared_by = wanted.budget, wanted.program, wanted.options.sharing
    with told(*shared_by):
        return _settled(replace(wanted, budget=shared(*shared_by)))


def settled_by_default(wanted: Wanted[_T]) -> Fitted[_T] | None:
    """Return the default plan, known or compiled, if it holds the budget; None where it does not."""
    shared_by = wanted.budget, wanted.program, wanted.options.sharing
    with told(*shared_by):
        wanted = replace(wanted, way=f"{wanted.way}, by default", budget=shared(*shared_by))
        lookup = Lookup.of(wanted)
        with lookup.place.lock, Stage("search", wanted.name) as now:
            if (known := _taken(wanted, lookup, now)) is not None:
                return known
            planner = wanted.planner()
            fitted = of_default(planner, room_within(wanted, lookup), wanted.ways, default_plan(planner.problem))
            return fitted and _kept(wanted, lookup, fitted, now, "took the default plan in")


def keep_least(wanted: Wanted[Any], plan: Plan, weighed: Weighed[Any], lookup: Lookup | None = None) -> None:
    """Keep the smallest plan of a program: a budget of hardly more then compiles this one alone."""
    lookup = lookup or Lookup.of(wanted)
    if lookup.least is not None:
        lookup.least.keep(_held(wanted, lookup, plan, weighed), lambda: planfile.dumps(plan, wanted.graph))


def keep(wanted: Wanted[Any], fitted: Fitted[Any]) -> None:
    """Keep a plan that holds the budget: the same request then takes it, and compiles nothing to find it."""
    lookup = Lookup.of(wanted)
    lookup.place.known[lookup.key] = _FoundPlan(_held(wanted, lookup, fitted.plan, fitted.measured), fitted.trail)


def _settled(wanted: Wanted[_T]) -> Fitted[_T]:
    lookup = Lookup.of(wanted)
    known = lookup.place.known
    with lookup.place.lock, Stage("search", wanted.name) as now:
        noted = () if lookup.note is None else lookup.note.read()
        for held in noted:
            known.setdefault((held.program, held.way), _FoundPlan(held))
        known_plan = _taken(wanted, lookup, now) or _checked(wanted, lookup, now) or _smallest(wanted, lookup, now)
        fitted = known_plan or _searched(wanted, lookup, now)
        chosen = known[lookup.key].held
        if lookup.note is not None and chosen not in noted:
            lookup.note.add(chosen, planfile.dumps(fitted.plan, wanted.graph))
        return fitted


# ----------------------------------------------------------------------------------------------------- known plans


@dataclass(frozen=True)
class _FoundPlan:
    """A plan that held the budget, and the plans tried for it; None if another process searched."""

    held: Held
    trail: tuple[Attempt, ...] | None = None


@dataclass
class _KnownPlans:
    """The known plans of one function under one budget, by the name of the program and the way of compiling it.

    `plain_bytes` holds the temporaries of plain JAX's step by the types of the program, once computed. `tiles` holds
    the rows that ran in blocks where no other plan held the budget, by the name of the program. `model` is the cost
    model, held so that no other object gets its id.
    """

    model: CostModel
    lock: threading.RLock = field(default_factory=threading.RLock)
    known: dict[tuple[str, str], _FoundPlan] = field(default_factory=dict)
    plain_bytes: dict[str, int] = field(default_factory=dict)
    tiles: dict[str, tuple[Tile, ...]] = field(default_factory=dict)


_PLACES: OrderedDict[str, _KnownPlans] = OrderedDict()
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Least:
    """The place of a program's smallest plan, once one was looked for: in this process, and on disk if `note`."""

    place: _KnownPlans
    key: tuple[str, str]
    note: Callable[[], Note | None]

    def read(self) -> Held | None:
        """Return the smallest plan; None where none was looked for."""
        if (known := self.place.known.get(self.key)) is not None:
            return known.held
        noted = () if (note := self.note()) is None else note.read()
        return next((held for held in noted if (held.program, held.way) == self.key), None)

    def keep(self, held: Held, text: Callable[[], str]) -> None:
        """Keep the plan in place of another; `text` makes its text for the disk."""
        self.place.known[self.key] = _FoundPlan(held)
        if (note := self.note()) is not None:
            note.add(held, text())


@dataclass(frozen=True)
class Lookup:
    """The places of known plans: in this process, with the key there, and on disk if there is a note.

    `types` names the types of the program's inputs and outputs. Programs of one function with the same types differ at
    most in the order of their backward, so plain JAX's step needs the same bytes for them. The smallest plan is kept
    in `least`.
    """

    place: _KnownPlans
    key: tuple[str, str]
    types: str
    note: Note | None
    plain: PlainNote | None = None
    least: _Least | None = None

    @classmethod
    def of(cls, wanted: Wanted[Any]) -> Lookup:
        """Name everything that the search depends on; a search without a name gets a place of its own."""
        model, program, budget = prices(wanted.options), wanted.program, wanted.budget
        if wanted.options.passes:  # they change what XLA compiles, and have no name
            return cls(_KnownPlans(model), ("", wanted.way), "", None)
        roles = tuple(role.name for role in (*program.roles.inputs, *program.roles.outputs))
        parts = {
            "kind": "plan",
            "function": WithoutRules(_forward(program)),
            "differentiated": program.differentiated,
            "sparse": tuple(sorted(program.sparse)),
            "policy": wanted.options.policy,
            **({"offload": True} if wanted.options.offload else {}),
            **({"forms": wanted.forms} if wanted.forms else {}),
            **({"moved": True} if wanted.is_moved else {}),
            **({"target": wanted.options.goal.name} if wanted.options.goal else {}),
            "environment": environment(),
        }
        jaxpr, _ = jaxprs.opened(program.closed)
        avals = tuple(str(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars))
        bounds = budget.fraction, budget.peak_bytes
        try:
            types = sketch(roles=roles, avals=avals, placed=_placed(wanted), layout=str(program.layout))
            key = sketch(program=program.closed, updates=str(program.roles.updates), types=types), wanted.way
            named = {"model": model if isinstance(model, Roofline) else id(model), **parts}
            place = _place(sketch(budget=bounds, **named), model)
            smallest = _place(sketch(budget="least", key=key, **named), model)
        except IdentityError:
            return cls(_KnownPlans(model), ("", wanted.way), "", None)

        def note(label: str, which: Any) -> Note | None:
            return Note.of(wanted.options, f"{wanted.name} {label}", {**parts, "budget": which, "model": model})

        least = _Least(smallest, key, partial(note, "smallest plan", "least"))
        if budget.of_device:
            return cls(place, key, types, None, least=least)
        plain_parts = {**parts, "kind": "plain", "types": types}
        plain = PlainNote.of(wanted.options, f"{wanted.name} plain JAX", plain_parts) if budget.fraction else None
        return cls(place, key, types, note(f"plan within {budget}", bounds), plain, least)


def _place(name: str, model: CostModel) -> _KnownPlans:
    with _LOCK:
        place = _PLACES.setdefault(name, _KnownPlans(model))
        _PLACES.move_to_end(name)
        while len(_PLACES) > MOST_KEPT:
            _PLACES.popitem(last=False)
        return place


def _forward(program: Joint) -> Any:
    """Return the function alone, taken from its joint program."""
    jaxpr, _ = jaxprs.opened(program.closed)
    primals = [v for v, role in zip(jaxpr.invars, program.roles.inputs, strict=True) if role is Role.PRIMAL]
    outputs = [v for v, role in zip(jaxpr.outvars, program.roles.outputs, strict=True) if role is Role.OUTPUT]
    eqns = jaxpr.eqns[: program.roles.forward_ops]
    return jaxprs.build(primals, outputs, [eqns[i] for i in sorted(simplify.live(eqns, outputs).places)])


def _placed(wanted: Wanted[Any]) -> tuple[tuple[int, Any], ...]:
    """Return the positions and shardings of the arguments that are not in the default memory of one device."""
    shardings = ((i, getattr(leaf, "sharding", None)) for i, leaf in enumerate(wanted.leaves))
    return tuple((i, sharding) for i, sharding in shardings if sharding is not None and not _is_usual(sharding))


def _is_usual(sharding: jax.sharding.Sharding) -> bool:
    devices, kind = list(sharding.device_set), sharding.memory_kind
    return len(devices) == 1 and (kind is None or kind == devices[0].default_memory().kind)


# ------------------------------------------------------------------------------------------- three ways to a plan


def _taken(wanted: Wanted[_T], lookup: Lookup, now: Stage) -> Fitted[_T] | None:
    """Return the plan of an earlier search in this process, for the same program compiled in the same way."""
    known = lookup.place.known.get(lookup.key)
    if known is None or known.trail is None:
        return None
    plan = known.held.within(wanted.graph)
    if plan is None:
        return None
    text = f"for {wanted.budget}: {plan.strategy}, {summary(plan)}"
    now.ends(lambda: f"took the plan of an earlier search in {now} and compiled none, {text}")
    return Fitted(plan, wanted.take(plan, known.held), known.trail)


def _checked(wanted: Wanted[_T], lookup: Lookup, now: Stage) -> Fitted[_T] | None:
    """Return a plan of another process or another way of compiling, if it holds the budget here too."""
    now.says(lambda: "checking the plan of an earlier search")
    for plan, most_bytes in _elsewhere(wanted, lookup):
        weighed = wanted.ways.measure(plan)
        if weighed.activation_bytes <= (room_within(wanted, lookup)(weighed) if most_bytes is None else most_bytes):
            return _kept(wanted, lookup, followed(plan, weighed), now, "checked the plan of an earlier search in")
    return None


def _elsewhere(wanted: Wanted[Any], lookup: Lookup) -> Iterator[tuple[Plan, int | None]]:
    """Yield the plans that held the budget elsewhere, each once.

    A plan that another process compiled in the same way comes first, with the bytes of its temporaries there.
    """
    same_way = lookup.place.known.get(lookup.key)
    seen: set[Any] = set()
    for known in sorted(lookup.place.known.values(), key=lambda known: known is not same_way):
        plan = known.held.within(wanted.graph)
        if plan is not None and plan.key not in seen:
            seen.add(plan.key)
            yield plan, known.held.activation_bytes if known is same_way else None


def _smallest(wanted: Wanted[_T], lookup: Lookup, now: Stage) -> Fitted[_T] | None:
    """Return the smallest plan of a search for another budget, if this budget leaves about as much room as it takes."""
    held = None if lookup.least is None else lookup.least.read()
    plan = None if held is None else held.within(wanted.graph)
    if held is None or plan is None:
        return None
    room = room_within(wanted, lookup)
    left = room(Weighed(None, held.peak_bytes, held.activation_bytes, held.compile_ms))
    if not held.activation_bytes <= left <= HARDLY_MORE * held.activation_bytes:
        return None
    now.says(lambda: "checking the smallest plan of an earlier search")
    weighed = wanted.ways.measure(plan)
    if weighed.activation_bytes > room(weighed):
        return None
    return _kept(wanted, lookup, followed(plan, weighed), now, "checked the smallest plan of an earlier search in")


def _searched(wanted: Wanted[_T], lookup: Lookup, now: Stage) -> Fitted[_T]:
    room = room_within(wanted, lookup)
    planner = wanted.planner()
    found_least = partial(keep_least, wanted, lookup=lookup)
    fitted = fit(planner, wanted.budget, room, wanted.ways, default_plan(planner.problem), found_least)
    return _kept(wanted, lookup, fitted, now, f"searched {counted(planner.num_replayed, 'plan')} in")


def room_within(wanted: Wanted[Any], lookup: Lookup) -> Room:
    """Return a budget as bytes of temporaries."""
    known, types = lookup.place.plain_bytes, lookup.types
    if types not in known and lookup.plain is not None and (noted := lookup.plain.known()) is not None:
        known[types] = noted
    begun = wanted.plain() if wanted.budget.fraction and types not in known else None

    def plain_bytes() -> int:
        if begun is not None and types not in known:
            tell(lambda: "compiling plain JAX, to compare")
            known[types] = begun.result().temp_bytes
            if lookup.plain is not None:
                lookup.plain.keep(known[types])
        return known[types]

    goal = wanted.options.goal
    device_bytes = None if goal is None else goal.memory_bytes
    return room_for(wanted.budget, wanted.leaves, wanted.program.fixed_bytes, plain_bytes, device_bytes)


def _kept(wanted: Wanted[_T], lookup: Lookup, fitted: Fitted[_T], now: Stage, how: str) -> Fitted[_T]:
    """Remember the plan in this process, and report it."""
    weighed, plan = fitted.measured, fitted.plan
    tried = sum(attempt.weighed for attempt in fitted.trail)
    done = f"weighed {tried} and compiled {len(fitted.trail) - tried}"
    lookup.place.known[lookup.key] = _FoundPlan(_held(wanted, lookup, plan, weighed), fitted.trail)
    now.ends(lambda: f"{how} {now}, {done}, for {wanted.budget}: {plan.strategy}, {summary(plan)}")
    return fitted


def _held(wanted: Wanted[Any], lookup: Lookup, plan: Plan, weighed: Weighed[Any]) -> Held:
    bare, there = replace(plan, problem=None, nested=(), overruled=(), packed=None), wanted.graph.bare

    def within(graph: Graph) -> Plan | None:
        try:
            return moved(bare, there, graph)
        except PlanError:
            return None

    return Held(*lookup.key, within, weighed.peak_bytes, weighed.activation_bytes, weighed.compile_ms)
