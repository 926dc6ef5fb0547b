"""Read a policy: make constraints from its demands on the values that its keys name.

A policy is a row of rules, or a policy of JAX's own (`jax.checkpoint_policies`). A rule is a key (see `keys`) and a
`CheckpointPolicy`, or a `SaveAs`, which gives the form in which values wait.

If several keys name a value, a MUST goes before a PREFER; then a `checkpoint_name` goes before a predicate, and a
predicate before scopes and primitives; then the key that comes first is taken. Two different MUSTs of the same kind
contradict each other. Of several forms, the form of the first key in this order is taken, whatever else is demanded of
the value. A `KeepAtMost` is on the values of its key together (see `allowances`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jointcut.partition.bodies.read import read
from jointcut.partition.errors import PolicyError, message
from jointcut.partition.figures import counted
from jointcut.partition.packing.forms import FORMS, SaveAs
from jointcut.partition.prices.keys import Array, Key, arrays_of, how_named, names_nothing, renames, shown, title
from jointcut.partition.prices.rules import (
    CheckpointPolicy,
    Constraint,
    KeepAtMost,
    Verdict,
    judge,
    not_offloaded,
    packed,
)
from jointcut.partition.program.graph import Graph, Op, Value
from jointcut.partition.program.jax.abstract import HOST
from jointcut.partition.program.jax.jaxprs import Equation, Jaxpr, constants_first, inner_jaxprs, opened
from jointcut.partition.program.jax.user_source import asked
from jointcut.partition.program.primitives import CALLS, COND, WITH_BODIES
from jointcut.partition.program.roles import Role, Roles, Side
from jointcut.partition.program.sides import Sides, classify, reached

Rule = tuple[Key, CheckpointPolicy | SaveAs | KeepAtMost]

#: Rules in order, or a policy of JAX's.
Policy = tuple[Rule, ...] | Callable[..., Any]

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

_HOLDING = CALLS | WITH_BODIES | {"shard_map"}

_CURES = {
    CheckpointPolicy.MUST_SAVE: "Ask for MUST_RECOMPUTE or nothing there, or take the value out of what forbids it.",
    CheckpointPolicy.MUST_OFFLOAD: "Ask for MUST_SAVE, MUST_RECOMPUTE or nothing there.",
    CheckpointPolicy.MUST_RECOMPUTE: "Ask for MUST_SAVE or nothing there; PREFER_RECOMPUTE yields to such a rule.",
}


def constraints_of(policy: Policy, graph: Graph, *, in_nested: bool = True) -> tuple[Constraint, ...]:
    """Return the constraints that a policy puts on the values of a program's forward.

    Nothing is offloaded from the branches of a conditional: they share the space of their values. `in_nested` says
    whether the compiler moves values out of loops that are inside loops.

    Raises `PolicyError` where a key names nothing, where two MUSTs demand different things of a value, and where a MUST
    demands something that a rule forbids. Such a MUST saves a value that the user's `jax.checkpoint` keeps out. Or it
    computes again a value that is made by an effect, by devices that talk to each other, or by a loop for readers
    outside. No MUST may name a value in a step of `aot.while_loop` and the like, which computes again all values that
    its checkpoints do not hold. A closed op is not run again if it holds a value that must be saved. A value that must
    wait in host memory may not be inside a closed op. JAX's policies yield to such rules.
    """
    arrays = _Arrays(graph, classify(graph), in_nested)
    if callable(policy):
        return tuple(arrays.of_jax(policy))
    found = [(array, _strongest(graph, array, policy, list(arrays.keys_of(array, policy)))) for array in arrays.all]
    _refuse_musts(policy, (step.graph for step in graph.nested.values()), "a step of a loop that is cut on its own")
    _refuse_musts(policy, _closed_branches(graph), "a conditional that is not cut")
    for place, (key, _) in enumerate(policy):
        if place in arrays.met:
            continue
        inner = list(_inside(graph))
        if all(how_named(key, array, body) is None for array, body in inner):
            names_nothing(key, [*arrays.all, *(array for array, _ in inner)])
    demanded = [c for array, rule in found if rule is not None for c in arrays.demanded(array, *rule)]
    return *arrays.closed(policy, demanded), *demanded


def forms_of(policy: Policy | None, graph: Graph) -> tuple[tuple[int, str], ...]:
    """Return the values of a program's forward that a policy gives a form, each with the name of the form.

    Outputs of the function get no form, and neither do arrays that the form would not make smaller. A carried value has
    the form of its update. A value that a conditional keeps has the form that its branches gave it. Raises
    `PolicyError` where a key names no array that its form makes smaller.
    """
    if policy is None or callable(policy):
        return ()
    arrays, forms = _Arrays(graph, classify(graph)), dict[int, str]()
    useful = set[int]()
    for array in arrays.all if any(isinstance(demand, SaveAs) for _, demand in policy) else ():
        for _, place in sorted(arrays.keys_of(array, policy), reverse=True):
            if isinstance(demand := policy[place][1], SaveAs):
                mine = () if _is_kept_by_branches(array, arrays) else array.values
                smaller = [v for v in mine if _is_smaller(graph.values[v], demand.dtype)]
                forms.update(dict.fromkeys(smaller, demand.dtype))
                useful.update([place] * bool(smaller))
    for place, (key, demand) in enumerate(policy):
        if isinstance(demand, SaveAs) and place in arrays.met and place not in useful:
            what = f"is {demand.name}, and no array that it names is of floats that take fewer bytes so."
            raise PolicyError(message(f"policy[{shown(key)}]", what, "Name other values, or take a smaller form."))
    for body in graph.bodies.values():
        for found, end, out in zip(body.carried_in, body.carried, body.carried_out, strict=True):
            if end in forms:
                forms |= {found: forms[end], out: forms[end]}
    left_out = arrays.sides.outputs
    return tuple((v, form) for v, form in sorted(forms.items()) if v not in left_out and not arrays.sides.is_late(v))


def without_effect(policy: Policy | None, graph: Graph) -> Iterator[str]:
    """A line for each key of a form that names values in steps which are cut on their own: there it has no effect."""
    rules = () if policy is None or callable(policy) else policy
    steps = [step.graph for step in graph.nested.values()]
    inner = [(array, body) for body in steps for array in arrays_of(body, classify(body))]
    for key, demand in rules:
        if isinstance(demand, SaveAs):
            named = [body.values[array.values[-1]] for array, body in inner if how_named(key, array, body) is not None]
            if number := sum(_is_smaller(value, demand.dtype) for value in named):
                what = f"{counted(number, 'value')} in steps of a loop, which keep them for their own backward alone"
                cure = "name 'while_loop_with_checkpoints' for what the loop keeps"
                yield f"{demand.name} by {shown(key)} has no effect on {what}: {cure}"


def _closed_branches(graph: Graph) -> Iterator[Graph]:
    """The branches of the forward's closed conditionals whose results conditionals of the backward read."""
    for op in graph.ops:
        if op.origin is not Side.FORWARD or op.payload is None or COND not in {op.name, *op.inner}:
            continue
        readers = (graph.ops[i] for v in op.outputs for i in graph.consumers[v])
        if any(reader.origin is Side.BACKWARD and COND in {reader.name, *reader.inner} for reader in readers):
            yield from map(_read, inner_jaxprs(op.payload) if op.name == COND else _conditionals(op.payload))


def _is_kept_by_branches(array: Array, arrays: _Arrays) -> bool:
    """Whether a conditional makes an array only for its backward."""
    readers = {i for v in array.values for i in arrays.graph.consumers[v]}
    return array.op.name == COND and bool(readers) and readers <= arrays.sides.backward


def _is_smaller(value: Value, form: str) -> bool:
    return FORMS[form].is_smaller(value.shape, value.dtype)


def _refuse_musts(policy: Sequence[Rule], graphs: Iterable[Graph], where: str) -> None:
    musts = [(key, demand) for key, demand in policy if isinstance(demand, CheckpointPolicy) and demand.is_must]
    for graph in graphs if musts else ():
        for array in arrays_of(graph, classify(graph)):
            for key, demand in musts:
                if how_named(key, array, graph) is not None:
                    what = f"is {demand.name} by {shown(key)}, but in {where}."
                    cure = "Name other values, or ask for a PREFER: no plan chooses what is kept there."
                    raise PolicyError(message(f"policy: {graph.where(array.values[-1])}", what, cure))


@dataclass(frozen=True)
class _Closed:
    """An array in a program that an op holds closed, that program, and the op's results that are this array."""

    array: Array
    body: Graph
    results: tuple[int, ...]


def _closed_in(op: Op) -> Iterator[_Closed]:
    """The arrays in the programs that an op holds closed; a call returns some of them."""
    for body in map(_read, inner_jaxprs(op.payload)):
        outputs = body.role_outputs(Role.OUTPUT) if op.name in CALLS else ()
        result_of = dict(zip(outputs, op.outputs, strict=True)) if len(outputs) == len(op.outputs) else {}
        for array in arrays_of(body, classify(body)):
            yield _Closed(array, body, tuple(result_of[v] for v in array.values if v in result_of))
        for inner in _closed_ops(body):
            for found in _closed_in(inner):
                yield replace(found, results=tuple(result_of[v] for v in found.results if v in result_of))


def _closed_ops(graph: Graph) -> Iterator[Op]:
    """The ops of the forward that hold a program of the user's closed; a kernel is not such a program."""
    for op in graph.ops:
        if op.name in _HOLDING and op.origin is Side.FORWARD and op.payload is not None and op.id not in graph.nested:
            yield op


def _inside(graph: Graph) -> Iterator[tuple[Array, Graph]]:
    """The arrays in programs that ops of the forward hold closed, each with its program."""
    for body in (step.graph for step in graph.nested.values()):
        yield from ((array, body) for array in arrays_of(body, classify(body)))
        yield from _inside(body)
    for op in _closed_ops(graph):
        yield from ((found.array, found.body) for found in _closed_in(op))


def _conditionals(eqn: Equation) -> Iterator[Jaxpr]:
    """The branches of the outermost conditionals in an equation."""
    for body in inner_jaxprs(eqn):
        for inner in body.eqns:
            yield from inner_jaxprs(inner) if inner.primitive.name == COND else _conditionals(inner)


def _read(body: Jaxpr) -> Graph:
    """A jaxpr as a program without a backward."""
    closed = constants_first(body)
    jaxpr, _ = opened(closed)
    return read(closed, Roles((Role.PRIMAL,) * len(jaxpr.invars), (Role.OUTPUT,) * len(jaxpr.outvars), len(jaxpr.eqns)))


@dataclass
class _Arrays:
    graph: Graph
    sides: Sides
    in_nested: bool = True
    met: set[int] = field(default_factory=set)  # places of rules that named something

    @cached_property
    def all(self) -> list[Array]:
        """The arrays of the forward that the user's ops make."""
        return list(arrays_of(self.graph, self.sides))

    @cached_property
    def useful(self) -> frozenset[int]:
        """The values that the backward reads, itself or to compute others."""
        return frozenset(reached(self.sides.wanted, self.graph.made_from))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdicts of the rules without any demand."""
        return judge(self.graph, self.sides)

    @cached_property
    def held(self) -> list[tuple[Op, _Closed]]:
        """The arrays that ops of the forward hold closed, each with its op."""
        return [(op, found) for op in _closed_ops(self.graph) for found in _closed_in(op)]

    @cached_property
    def returned(self) -> dict[int, list[_Closed]]:
        """The arrays that calls hold closed, by the call's result that is this array."""
        found: dict[int, list[_Closed]] = defaultdict(list)
        for _, closed in self.held:
            for v in closed.results:
                found[v].append(closed)
        return dict(found)

    def keys_of(self, array: Array, policy: Sequence[Rule]) -> Iterator[tuple[int, int]]:
        """The way in which each key names an array, and the key's place; keys that do not name it are left out.

        The result of a call also has the names that the array has inside the call.
        """
        inner = [closed for v in array.values for closed in self.returned.get(v, ())]
        for place, (key, demand) in enumerate(policy):
            if array.is_forward or demand in _RECOMPUTE:
                ways = [how_named(key, array, self.graph), *(how_named(key, c.array, c.body) for c in inner)]
                known = [how for how in ways if how is not None]
                if known:
                    self.met.add(place)
                    yield min(known), place

    def closed(self, policy: Sequence[Rule], others: Iterable[Constraint]) -> Iterator[Constraint]:
        """The constraints of MUSTs on arrays that stay inside closed ops: such an op is not run again.

        A value that must be computed again needs no constraint, since it is never saved. A key that names the op as
        well means its results. `others` are the constraints on other values.
        """
        musts = [(k, d) for k, d in policy if isinstance(d, CheckpointPolicy) and d.is_must_keep]
        again = {c.value: c.reason for c in others if c.demand is CheckpointPolicy.MUST_RECOMPUTE}
        mine = {array.op.id: array for array in self.all}
        for op, closed in self.held if musts else ():
            for key, demand in musts:
                if closed.results or how_named(key, closed.array, closed.body) is None:
                    continue
                if op.id in mine and how_named(key, mine[op.id], self.graph) is not None:
                    continue
                reason = f"holds a value that is {demand.name} by {shown(key)}"
                for v in op.outputs:
                    why = "which stays inside" if demand.is_for_host else f"and is {again[v]}" if v in again else ""
                    if why:
                        where = f"policy: {self.graph.where(v)}"
                        raise PolicyError(message(where, f"{reason}, {why}.", _CURES[demand]))
                    if not self.forbidden(v, demand):
                        yield Constraint(v, demand, f"it {reason}", is_asked=False)

    def demanded(self, array: Array, demand: CheckpointPolicy, key: str) -> Iterator[Constraint]:
        """The constraints that a rule puts on an array."""
        reason = f"{demand.name} by {key}"
        for v in self.bound(array, demand):
            if demand is CheckpointPolicy.PREFER_OFFLOAD and self.not_offloaded(v):
                continue
            if demand.is_must and (why := self.forbidden(v, demand)):
                where = self.graph.where(v)
                raise PolicyError(message(f"policy: {where}", f"is {reason}, but {why}.", _CURES[demand]))
            yield Constraint(v, demand, reason)

    def bound(self, array: Array, demand: CheckpointPolicy) -> tuple[int, ...]:
        """The values of an array that a demand is on: a demand to recompute is on all, a demand to save on one."""
        if demand not in _RECOMPUTE:
            return (self.last(array),)
        return *array.values, *packed(self.graph, array.values)

    def last(self, array: Array) -> int:
        """The value of an array that ops read other than its names."""
        for v in reversed(array.values):
            if not all(renames(self.graph.ops[i]) for i in self.graph.consumers[v]):
                return v
        return array.values[-1]

    def forbidden(self, v: int, demand: CheckpointPolicy) -> str:
        """The rule against a MUST, in words; empty where there is none."""
        verdict = self.verdicts[v]
        if demand.is_must_keep:
            return verdict.not_saved or self.not_offloaded(v) * demand.is_for_host
        if v not in self.useful:
            return ""
        if v in self.sides.escaping:
            return verdict.not_recomputed
        return "" if verdict.is_costly else verdict.not_recomputed

    def not_offloaded(self, v: int) -> str:
        """Why a value cannot wait in host memory, in words; empty where it can."""
        return not_offloaded(self.graph, self.sides, v, in_nested=self.in_nested)

    def of_jax(self, policy: Callable[..., Any]) -> Iterator[Constraint]:
        """The constraints of a policy of JAX's on each array: save it if the backward reads it, or compute it again."""
        key = title(policy)
        for array in self.all:
            answers = [asked(policy, op.payload) for op in map(self.graph.maker_of, array.values) if op and op.payload]
            demand = CheckpointPolicy.MUST_SAVE if any(answers) else CheckpointPolicy.MUST_RECOMPUTE
            for memory in (answer for answer in answers if isinstance(answer, str)):
                if memory != HOST:
                    what = f"asks to move {self.graph.where(array.values[-1])} to {memory!r}."
                    raise PolicyError(message(f"policy {key}", what, f"Offload to {HOST!r}."))
                if not self.not_offloaded(self.last(array)):
                    demand = CheckpointPolicy.MUST_OFFLOAD
            for v in self.bound(array, demand):
                if not self.forbidden(v, demand) and (array.is_forward or demand in _RECOMPUTE):
                    yield Constraint(v, demand, f"{demand.name} by {key}")


def _strongest(
    graph: Graph, array: Array, policy: Sequence[Rule], keys: Sequence[tuple[int, int]]
) -> tuple[CheckpointPolicy, str] | None:
    """The rule that holds for an array, and its key in words; None where no key names it.

    Raises `PolicyError` where two MUSTs of the same kind contradict each other.
    """
    demands = {place: demand for _, place in keys if isinstance(demand := policy[place][1], CheckpointPolicy)}
    row = sorted((not demands[place].is_must, how, place) for how, place in keys if place in demands)
    if not row:
        return None
    prefers, how, first = row[0]
    key, demand = policy[first][0], demands[first]
    for other in (place for *same, place in row if same == [prefers, how] and not prefers):
        if demands[other] is not demand:
            where, second, against = graph.where(array.values[-1]), policy[other][0], demands[other]
            what = f"is {demand.name} by {shown(key)} and {against.name} by {shown(second)}."
            cure = "Make one of them a PREFER, or name the value by a checkpoint_name, which goes before other keys."
            raise PolicyError(message(f"policy: {where}", what, cure))
    return demand, shown(key)
