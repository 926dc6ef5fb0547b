"""Follow a schedule: say what stands for each value at each level of the program.

`emit` follows it to write equations, `replay` to count bytes. Both see a value as an *atom*: a variable there, the
number of a buffer here. At the top a value is itself; within a loop it is a constant of the loop or a step of a stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from jointcut.partition.lower.steps import (
    Enter,
    Fetch,
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
    Wait,
    Write,
)
from jointcut.partition.program.graph import LITERAL, STEP, TOP, Graph, Op, Region, Value
from jointcut.partition.stored.forms import FORMS

Atom = TypeVar("Atom")


@dataclass
class Followed(ABC, Generic[Atom]):
    """One region while its steps are followed; `env` maps value ids to atoms at this level.

    Of a loop's body, `consts` and `xs` are the atoms that it takes from around: values read whole, and stacks read step
    by step. `unchanged` are carried values that each step hands on as they are: they are read whole. `before` are the
    atoms of values that wait, to be put back. `held` are those that stand for a value once a cotangent is there,
    `written` those that are in memory for their readers. `on_host` are the values whose atom here is in host memory,
    `forms` those whose atom is in other forms, with these as they were taken. `copies` are the atoms with which values
    leave that are copied or stored, `away` and `left` say of these what `on_host` and `forms` say of the others.
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
    on_host: set[int] = field(default_factory=set)
    forms: dict[int, tuple[str, ...]] = field(default_factory=dict)
    copies: dict[int, Atom] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    left: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @abstractmethod
    def fresh(self, v: int, loop: int) -> Atom:
        """A new atom for a value as it is seen from a loop around its own: a stack of it, or the value itself."""

    @abstractmethod
    def literal(self, payload: Any) -> Atom:
        """The atom of a constant that is written in the program."""

    @abstractmethod
    def barrier(self, atoms: Sequence[Atom]) -> list[Atom]:
        """The atoms of the same arrays once all of them are there and in memory."""

    @abstractmethod
    def rounded(self, v: int) -> Atom:
        """The atom of a value at the precision of its type."""

    @abstractmethod
    def after(self, atom: Atom, cotangent: int) -> Atom:
        """The atom of the same array once a cotangent is there."""

    @abstractmethod
    def packed(self, v: int, form: str) -> Atom:
        """The atom of a value, as it would leave now, in one more form."""

    @abstractmethod
    def unpacked(self, v: int, atom: Atom) -> Atom:
        """The atom of a value that is brought back from the last of its forms."""

    @abstractmethod
    def copied_out(self, v: int) -> Atom:
        """The atom of a copy in host memory of a value as it would leave now."""

    @abstractmethod
    def copied_in(self, v: int, atom: Atom) -> Atom:
        """The atom of a copy in the device's memory of one in host memory."""

    @abstractmethod
    def op(self, op: Op, apart: bool) -> None:
        """Run one op."""

    @abstractmethod
    def loop(self, step: Enter) -> None:
        """Run one loop."""

    @abstractmethod
    def keep(self, step: Keep) -> None:
        """Run one loop, and keep where its segments start."""

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
        """The atom of a value as it leaves this level: copied or stored, if it is."""
        return self.copies[v] if v in self.copies else self.want(v)

    def forms_left(self, v: int) -> tuple[str, ...]:
        """The forms in which a value leaves this level."""
        return self.left.get(v, ()) if v in self.copies else self.forms.get(v, ())

    def stack(self, values: Iterable[int], inner: Followed[Any]) -> None:
        """Note where, and in which forms, the stacks are that a loop makes of values; `inner` is its body."""
        for v in values:
            if v in (inner.away if v in inner.copies else inner.on_host):
                self.on_host.add(v)
            if forms := inner.forms_left(v):
                self.forms[v] = forms

    @contextmanager
    def on_device(self, values: Iterable[int]) -> Iterator[None]:
        """While this lasts, values are on the device here: their last steps', of loops in two parts."""
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
                case Wait():
                    self.wait(step.value, step.cotangent)
                case Settle():
                    self.define(step.cotangent, self.barrier([self.want(v) for v in (step.cotangent, *step.values)])[0])
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
            if self.before and not _is_ahead(step):
                self.env.update(self.before)
                self.before.clear()

    def wait(self, v: int, cotangent: int) -> None:
        """Hold a value back until a cotangent is there; as before, where it waited for the same one already."""
        atom = self.want(v)
        self.before.setdefault(v, atom)
        if (v, cotangent) not in self.held:
            # One barrier for each value: a common one lets XLA:CPU overlap fewer kernels, and held more in memory.
            self.held[v, cotangent] = self.barrier([atom, self.want(cotangent)])[0]
        self.define(v, self.held[v, cotangent])

    def write(self, v: int) -> None:
        """Keep XLA from fusing a value into what reads it from here on."""
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
        """Bring what leaves of a value to a form."""
        forms = (*self.left.get(v, ()), form)
        self.copies[v] = self.packed(v, form)
        self.left[v] = forms

    def restore(self, step: Restore) -> None:
        """Bring a value back from a form, if it is in it."""
        v, atom = step.value, self.want(step.value)
        forms = self.forms.get(v, ())
        if forms[-1:] != (step.form,):
            return
        atom = atom if step.cotangent is None else self.after(atom, step.cotangent)
        self.define(v, self.unpacked(v, atom))
        self.forms[v] = forms[:-1]


def _is_ahead(step: Step) -> bool:
    """Whether a step belongs to the next op that does not run again."""
    is_again = isinstance(step, Run | Enter) and step.again
    return is_again or isinstance(step, Wait | Settle | Write | Round | Fetch | Restore)


def flat(atoms: Iterable[Any]) -> list[Any]:
    """The variables of atoms, of which each is one, or several where a value is in other forms."""
    return [var for atom in atoms for var in (atom if isinstance(atom, tuple) else (atom,))]


def in_forms(value: Value, forms: Sequence[str]) -> Value:
    """A value with the bytes and dtype that it has in some forms; a form that is not of `stored` changes neither."""
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


def lengths_between(graph: Graph, v: int, loop: int) -> list[int]:
    """The lengths of the loops between a value and a loop around its own: the axes of its stack as seen from there."""
    lengths: list[int] = []
    home = graph.values[v].loop
    while home not in (loop, TOP):
        lengths.insert(0, graph.loops[home].length)
        home = graph.loops[home].parent
    return lengths
