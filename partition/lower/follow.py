"""Follow a schedule: say what stands for each value at each level of the program.

`emit` follows it to write equations, `replay` to count bytes. Both see a value as an *atom*: a variable there, the
number of a buffer here. At the top a value is itself; within a loop it is a constant of the loop or a step of a stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeGuard, TypeVar

from jointcut.partition.lower.steps import (
    Delay,
    Enter,
    Fetch,
    Fork,
    Hold,
    Keep,
    Offload,
    Parts,
    Restore,
    Round,
    Run,
    Segments,
    Settle,
    Step,
    Store,
    Update,
    Wait,
    Waiting,
    Write,
    runs,
)
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.program.graph import LITERAL, STEP, Graph, Op, Region, Value

Atom = TypeVar("Atom")


@dataclass
class Followed(ABC, Generic[Atom]):
    """One region while its steps are followed.

    Attributes:
        env: the atom of each value at this level, by value id.
        consts, xs: for a loop's body, the atoms taken from around it: values read whole, and stacks read step by step.
        unchanged: carried values that each step hands on unchanged; they are read whole.
        before: the atoms of values that wait, to be put back.
        held: the atoms that stand for a value once a cotangent is there.
        written: the atoms that are in memory for their readers.
        late: the values that the next step's stacks wait for.
        on_host: the values whose atom at this level is in host memory.
        forms: the values whose atom is in other forms, each with its forms in the order taken.
        copies: the atoms with which copied or stored values leave.
        away, left: like `on_host` and `forms`, but for `copies`.
    """

    graph: Graph
    region: Region
    parent: Self | None
    env: dict[int, Atom] = field(default_factory=dict)
    consts: dict[int, Atom] = field(default_factory=dict)
    xs: dict[int, Atom] = field(default_factory=dict)
    unchanged: frozenset[int] = frozenset()
    before: dict[int, Atom] = field(default_factory=dict)
    held: dict[tuple[int, int], Atom] = field(default_factory=dict)
    written: set[Atom] = field(default_factory=set)
    late: Delay | None = None
    on_host: set[int] = field(default_factory=set)
    forms: dict[int, tuple[str, ...]] = field(default_factory=dict)
    copies: dict[int, Atom] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    left: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @abstractmethod
    def fresh(self, v: int, loop: int) -> Atom:
        """A new atom for a value as a loop around its own loop sees it: a stack of the value, or the value itself."""

    @abstractmethod
    def literal(self, payload: Any) -> Atom:
        """The atom of a constant that is written in the program."""

    @abstractmethod
    def barrier(self, atoms: Sequence[Atom]) -> list[Atom]:
        """The atoms of the same arrays once all arrays are there and in memory."""

    @abstractmethod
    def rounded(self, v: int) -> Atom:
        """The atom of a value at the precision of its type."""

    @abstractmethod
    def after(self, atom: Atom, cotangent: int) -> Atom:
        """The atom of the same array once a cotangent is there."""

    @abstractmethod
    def packed(self, v: int, form: str) -> Atom:
        """The atom of a leaving value in one more form."""

    @abstractmethod
    def unpacked(self, v: int, atom: Atom) -> Atom:
        """The atom of a value that is brought back from the last of its forms."""

    @abstractmethod
    def copied_out(self, v: int) -> Atom:
        """The atom of a copy of a leaving value in host memory."""

    @abstractmethod
    def copied_in(self, v: int, atom: Atom) -> Atom:
        """The atom of a device copy of an atom in host memory."""

    @abstractmethod
    def op(self, op: Op, apart: bool) -> None:
        """Run one op."""

    @abstractmethod
    def loop(self, step: Enter) -> None:
        """Run one loop."""

    @abstractmethod
    def fork(self, step: Fork) -> None:
        """Run an op whose regions run at most once."""

    @abstractmethod
    def keep(self, step: Keep) -> None:
        """Run one loop, and keep the carried values where its segments start."""

    @abstractmethod
    def segments(self, step: Segments) -> None:
        """Run one loop's backward in segments."""

    @abstractmethod
    def parts(self, step: Parts) -> None:
        """Run one loop in two parts."""

    def define(self, v: int, atom: Atom) -> Atom:
        """Let an atom stand for a value from here on; returns the atom."""
        self.env[v] = atom
        return atom

    def want(self, v: int) -> Atom:
        """The atom that stands for a value at this level, fetched from the level around it if need be."""
        if v in self.env:
            return self.env[v]
        graph, value = self.graph, self.graph.values[v]
        maker = graph.maker_of(v)
        if maker is not None and maker.name == LITERAL:
            return self.define(v, self.literal(maker.payload))
        assert self.parent is not None, f"{graph.where(v)} is not at hand"
        around = value.loop  # the innermost loop around both the value and this region
        while around not in graph.ancestors[self.region.loop]:
            around = graph.loops[around].parent
        if around != self.region.loop or v in self.unchanged:
            if self.parent.has_on_host(v):  # a loop inside this one takes it step by step
                self.on_host.add(v)
            self.consts[v] = self.fresh(v, around)
            return self.define(v, self.consts[v])
        stack = maker.inputs[0] if maker is not None and maker.name == STEP else v
        holder = self.region.holder
        own = None if holder is None else graph.bodies[holder].taken.get(stack)
        if own is not None and own in self.env:  # the body writes this stack
            return self.define(v, self.env[own])
        if self.parent.has_on_host(stack):
            self.on_host.add(v)
        if forms := self.parent.forms_of(stack):
            self.forms[v] = forms
        self.xs[stack] = self.fresh(v, self.region.loop)
        return self.define(v, self.xs[stack])

    def has_on_host(self, v: int) -> bool:
        """Whether a value, or the steps of it that a loop around this level takes, are in host memory here."""
        if v in self.on_host or v in self.env or self.parent is None:
            return v in self.on_host
        return self.parent.has_on_host(v)

    def forms_of(self, v: int) -> tuple[str, ...]:
        """The forms of a value's atom here, or of the steps of it that a loop around this level takes."""
        if v in self.forms or v in self.env or self.parent is None:
            return self.forms.get(v, ())
        return self.parent.forms_of(v)

    def leaving(self, v: int) -> Atom:
        """The atom with which a value leaves this level: its copy if it is copied or stored."""
        return self.copies[v] if v in self.copies else self.want(v)

    def forms_left(self, v: int) -> tuple[str, ...]:
        """The forms in which a value leaves this level."""
        return self.left.get(v, ()) if v in self.copies else self.forms.get(v, ())

    def stack(self, values: Iterable[int], inner: Followed[Any]) -> None:
        """Record where a loop's stacks are and in which forms; `inner` is the loop's body."""
        for v in values:
            if v in (inner.away if v in inner.copies else inner.on_host):
                self.on_host.add(v)
            if forms := inner.forms_left(v):
                self.forms[v] = forms

    @contextmanager
    def on_device(self, values: Iterable[int]) -> Iterator[None]:
        """Treat values as being on the device within this context: the last steps of loops in two parts are."""
        away = self.on_host.intersection(values)
        self.on_host -= away
        yield
        self.on_host |= away

    def run(self, steps: Iterable[Step]) -> None:
        """Follow steps, in order."""
        ops = self.graph.ops
        for step in steps:
            match step:
                case Run():
                    self.op(ops[step.op], step.apart)
                case Enter():
                    self.loop(step)
                case Fork():
                    self.fork(step)
                case Wait() | Hold() | Delay() | Settle() | Update():
                    self.waiting(step)
                case Write():
                    self.write(step.value)
                case Round():
                    self.define(step.value, self.rounded(step.value))
                case Offload():
                    self.copies[step.value] = self.copied_out(step.value)
                    self.away.add(step.value)
                case Fetch():
                    self.fetch(step)
                case Store():
                    self.store(step.value, step.form)
                case Restore():
                    self.restore(step)
                case Keep():
                    self.keep(step)
                case Segments():
                    self.segments(step)
                case Parts():
                    self.parts(step)
            if self.late is not step:
                self.late = None
            if self.before and not is_ahead(step):
                self.env.update(self.before)
                self.before.clear()

    def waiting(self, step: Waiting) -> None:
        """Let something wait."""
        match step:
            case Wait():
                self.wait(step.value, step.cotangent)
            case Hold():
                self.hold(step.values)
            case Delay():
                self.late = step
            case Settle():
                self.define(step.cotangent, self.barrier([self.want(v) for v in (step.cotangent, *step.values)])[0])
            case Update():
                held = self.barrier([self.want(v) for v in (*step.waiting, *step.made)]) if step.waiting else []
                self.env.update(zip(step.waiting, held, strict=False))

    def wait(self, v: int, cotangent: int) -> None:
        """Hold a value back until a cotangent is there; if it waited for the same one before, keep that barrier."""
        atom = self.want(v)
        self.before.setdefault(v, atom)
        if (v, cotangent) not in self.held:
            # One barrier for each value: a common one lets XLA:CPU overlap fewer kernels, and held more in memory.
            self.held[v, cotangent] = self.barrier([atom, self.want(cotangent)])[0]
        self.define(v, self.held[v, cotangent])

    def hold(self, values: Sequence[int]) -> None:
        """Hold values back until all of them are there."""
        atoms = [self.want(v) for v in values]
        for v, atom, held in zip(values, atoms, self.barrier(atoms), strict=True):
            self.before.setdefault(v, atom)
            self.define(v, held)

    def write(self, v: int) -> None:
        """Keep XLA from fusing a value into its later readers."""
        atom = self.want(v)
        if atom not in self.written:
            self.written.add(self.define(v, self.barrier([atom])[0]))

    def fetch(self, step: Fetch) -> None:
        """Copy a value in from host memory, if it is there."""
        atom = self.want(step.value)
        if step.value not in self.on_host:
            return
        if step.cotangent is not None:
            atom = self.after(atom, step.cotangent)
        self.on_host.discard(step.value)
        self.define(step.value, self.copied_in(step.value, atom))

    def store(self, v: int, form: str) -> None:
        """Bring a leaving value to a form."""
        forms = (*self.left.get(v, ()), form)
        self.copies[v] = self.packed(v, form)
        self.left[v] = forms

    def restore(self, step: Restore) -> None:
        """Bring a value back from a form, if it is in that form."""
        v, atom = step.value, self.want(step.value)
        forms = self.forms.get(v, ())
        if forms[-1:] != (step.form,):
            return
        atom = atom if step.cotangent is None else self.after(atom, step.cotangent)
        self.define(v, self.unpacked(v, atom))
        self.forms[v] = forms[:-1]


def is_ahead(step: Step) -> bool:
    """Whether a step belongs to the next op that does not run again."""
    is_again = isinstance(step, Run | Enter | Fork) and step.again
    return is_again or isinstance(step, Waiting | Write | Round | Fetch | Restore)


def read_by(graph: Graph, step: Step) -> set[int]:
    """The values that an op, a loop or a conditional reads, whole or step by step; no other step reads any."""
    read = {v for run in runs([step]) for v in graph.ops[run.op].inputs}
    stacks = set(map(graph.whole, read))
    while not stacks <= read:
        read |= stacks
        stacks = set(map(graph.whole, stacks))
    return read


def made_by(graph: Graph, step: Step) -> tuple[int, ...]:
    """The values that an op, a loop or a conditional makes; no other step makes any."""
    if not isinstance(step, Run | Enter | Fork):
        return ()
    return (*graph.ops[step.op].outputs, *(() if isinstance(step, Run) else step.stacks))


def runs_once(step: Step, graph: Graph) -> TypeGuard[Fork]:
    """Whether a step runs one program, once, as a `jax.shard_map` at the top does."""
    return isinstance(step, Fork) and graph.bodies[step.op].loop in graph.once


def with_steps(step: Fork, steps: Iterable[Step]) -> Fork:
    """An op whose program runs once, with other steps in it."""
    (program,) = step.branches
    return replace(step, branches=(replace(program, steps=tuple(steps)),))


def once(graph: Graph, steps: Iterable[Step]) -> Iterator[Step]:
    """The steps that run once: those at the top, each before the steps of its program if that runs once too."""
    for step in steps:
        yield step
        if runs_once(step, graph):
            yield from once(graph, step.branches[0].steps)


def changed(graph: Graph, steps: Iterable[Step], change: Callable[[Step], Step]) -> tuple[Step, ...]:
    """The same steps, those that run once changed."""
    inner = (
        with_steps(step, changed(graph, step.branches[0].steps, change)) if runs_once(step, graph) else step
        for step in steps
    )
    return tuple(map(change, inner))


def flat(atoms: Iterable[Any]) -> list[Any]:
    """The variables of atoms: one each, or several for a value in other forms."""
    return [var for atom in atoms for var in (atom if isinstance(atom, tuple) else (atom,))]


def in_forms(value: Value, forms: Sequence[str]) -> Value:
    """A copy of a value with the bytes and dtype of its forms; a form that is not of `packing` changes neither."""
    for form in forms:
        if form in FORMS:
            value = replace(value, dtype=FORMS[form].dtype, bytes=FORMS[form].bytes(value.shape, value.dtype))
    return value


def segments_of(graph: Graph, step: Keep) -> int:
    """How many segments a loop has."""
    return -(-(steps_of(graph, step.loop) - step.last) // step.length)


def steps_of(graph: Graph, step: Enter) -> int:
    """How many steps a loop has."""
    return graph.loops[graph.bodies[step.op].loop].length


def results_of(graph: Graph, step: Enter) -> tuple[int, ...]:
    """The values that a loop makes, in the order of its results."""
    body = graph.bodies[step.op]
    return (*body.carried_out, *step.stacks, *body.own)
