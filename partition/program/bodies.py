"""Describe an op that holds a program: its kind, and what its operands and results mean.

A loop is such an op, and so is a conditional. `Inside` describes the program of an equation, in the equation's
variables. `Body` describes the program of a graph's op, in values. A `Kind` makes the `Inside` of an equation, and
writes equations. Programs that run at most once for each run of their equation, such as branches, are read and written
by an `OnceKind`. A new kind is a file with a class (as `scans` and `branches` are) and a line in `kinds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jointcut.partition.program.primitives import SCAN as SCAN  # the kind that graph text assumes

#: The operands of an equation: read whole, as starts of carried values, and slice by slice.
Operands = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]


class Carry(NamedTuple):
    """A value that each step hands to the next.

    It has its variable in the program, the operand that it starts from, the value that a step computes for it, and the
    equation's result, which the last step leaves.

    `slice` is for a stack that the steps write slice by slice: it is the variable of the step's own slice. Other
    equations of the step read it instead of the stack. A read beside the loop that writes the stack would need a copy
    of the stack.
    """

    variable: Any
    start: Any
    following: Any
    result: Any
    slice: Any = None


@dataclass(frozen=True)
class Inside:
    """The program inside an equation, and how it meets the equation's operands and results.

    Attributes:
        trips: how often the program runs; None where only a run can tell.
        program: a jaxpr, with its own constants.
        whole: variables that stand for an operand in every step, each with the operand.
        carries: the values that each step hands to the next.
        sliced: variables that stand for one step's slice of an operand, each with the operand.
        stacks: the values that the program makes in each step, each with the result that stacks it.
    """

    trips: int | None
    program: Any
    constants: tuple[Any, ...] = ()
    whole: tuple[tuple[Any, Any], ...] = ()
    carries: tuple[Carry, ...] = ()
    sliced: tuple[tuple[Any, Any], ...] = ()
    stacks: tuple[tuple[Any, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """The program that an op of the graph holds, where the graph holds it in regions.

    Its ops read values of outer regions by their ids, and slices of stacks as results of a `step`. So of the op's
    operands only the starts of carried values are listed here.

    Attributes:
        op: id of the op.
        kind: a name of `kinds.KINDS`.
        regions: ids of the regions that the op runs.
        loop: id of the loop in whose steps they run.
        trips: how often they run each time; None where only a run can tell.
        starts: the starts of the carried values, None for a literal.
        carried_in: the carried values as a step finds them.
        carried: the carried values as a step hands them to the next, None for a literal.
        carried_out: the carried values as the last step leaves them.
        stacks: the values of the steps that the op returns stacked.
        own: the stacks among them that no op of the body makes: a constant, repeated.
        repeated: the atoms that these stacks repeat.
        inside: the `Inside` of the equation; None where the graph was read from text.
        taken: for starts of stacks that the steps write slice by slice, the slice as a step finds it (`Carry.slice`).
        ends: if the regions run at most once, the values that each hands out as the op's results, in order; None for a
            literal.
        places: if the regions run at most once, the places of the op's results among the results of its equation.
        views: the parts that the regions see of values around them, if they see parts, by value.
    """

    op: int
    kind: str
    regions: tuple[int, ...]
    loop: int
    trips: int | None
    starts: tuple[int | None, ...] = ()
    carried_in: tuple[int, ...] = ()
    carried: tuple[int | None, ...] = ()
    carried_out: tuple[int, ...] = ()
    stacks: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    repeated: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    inside: Inside | None = field(default=None, compare=False, repr=False)
    taken: Mapping[int, int] = field(default_factory=dict, compare=False, repr=False)
    ends: tuple[tuple[int | None, ...], ...] = ()
    places: tuple[int, ...] = field(default=(), compare=False, repr=False)
    views: Mapping[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def region(self) -> int:
        """The region of an op that runs one. Raises `ValueError` where it runs several."""
        (region,) = self.regions
        return region


#: The user's name for a loop of JAX that has no reverse mode there; the place of the loop follows.
LOOP_OF_JAX = "the lax.while_loop"

#: The primitive of a loop that leaves checkpoints for the ops that run it back.
CHECKPOINTED = "while_loop_with_checkpoints"


@dataclass(frozen=True)
class Nested:
    """The step of a loop that is cut on its own: a joint program, whose halves run one after the other in each step.

    A loop whose trips only a run can tell keeps checkpoints, so its steps share no values with the program around it.

    Attributes:
        trips: how often it is expected to run; None where nobody said.
        graph: the joint program of one step.
        plan: the plan of a step; None where the graph was read from text.
        name: the user's name for the loop.
        checkpoints: the number of checkpoints that the loop may keep, without a budget.
        checkpoint_bytes: the bytes of one checkpoint.
        rows: the operands of the op, by their places, that have a row for each checkpoint; none if the number was given
            by a user.
        most: the number of checkpoints that a budget may give it; none besides if it is no more than `checkpoints`.
    """

    trips: int | None
    graph: Any
    plan: Any = field(default=None, compare=False)
    name: str = field(default="", compare=False)
    checkpoints: int = field(default=0, compare=False)
    checkpoint_bytes: int = field(default=0, compare=False)
    rows: tuple[int, ...] = ()
    most: int = field(default=0, compare=False)

    @property
    def is_adjustable(self) -> bool:
        """Whether it may keep another number of checkpoints under a budget."""
        return bool(self.rows)

    @property
    def is_of_jax(self) -> bool:
        """Whether the user wrote a loop of JAX that has no gradient in plain JAX."""
        return self.name.startswith(LOOP_OF_JAX)


class Kind(ABC):
    """How equations of one primitive are read and written."""

    @abstractmethod
    def inside(self, eqn: Any) -> Inside:
        """The program in an equation: `loops` opens it, and `memory` counts programs that stay closed."""

    @abstractmethod
    def equation(self, like: Any, program: Any, operands: Operands, results: Sequence[Any]) -> Any:
        """An equation like another that runs another program, a closed jaxpr.

        The program reads whole operands, carried values and slices. It returns carried values and values to stack.
        `operands` and `results` stand in the same order; the equation may have an order of its own.
        """


#: The parts of operands and of results that a program sees; empty where it sees all of them.
Views = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True)
class Once:
    """The programs inside an equation that run at most once each, and the operands that they read.

    Attributes:
        programs: jaxprs without constants. Of several, such as branches, one runs.
        operands: the operands of each program, in the order of its inputs.
        chosen_by: the operand that chooses the program; None where there is one program.
        views: the parts of operands and results that a program reads and makes, if it sees only parts.
    """

    programs: tuple[Any, ...]
    operands: tuple[Any, ...]
    chosen_by: Any = None
    views: Views = ((), ())


class Kept(ABC):
    """How an equation hands over the values that its programs keep for the backward.

    Attributes:
        avals: the types of the values handed over, as seen around the equation.
    """

    avals: tuple[Any, ...]

    @property
    def inside(self) -> tuple[Any, ...]:
        """The types as programs of the backward see them."""
        return self.avals

    @property
    def views(self) -> tuple[Any, ...]:
        """The parts of them that programs see; empty where they see all."""
        return ()

    @abstractmethod
    def pack(self, program: int, atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Equations for a program that turn its kept values into the values handed over, and these values."""

    @abstractmethod
    def unpack(self, program: int, atoms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Equations for a program of the backward that make the values its forward program kept, and these values."""


class OnceKind(ABC):
    """How to read and write equations of one primitive, whose programs run at most once.

    Attributes:
        op: the name of such an op in a graph.
    """

    op: str

    @abstractmethod
    def once(self, eqn: Any) -> Once | None:
        """The programs in an equation; None where it must stay closed."""

    @abstractmethod
    def equation(
        self, like: Any, programs: Sequence[Any], chosen_by: Any, operands: Sequence[Any], results: Any, views: Views
    ) -> Any:
        """An equation like another that runs other programs: closed jaxprs, which all read the same operands.

        `results` are the types of its results; `views` are the parts of operands and results that the programs see.
        """

    @abstractmethod
    def keep(self, like: Any, kept: Sequence[Sequence[Any]]) -> Kept:
        """How an equation hands over the values that each of its programs keeps, by their types."""


@dataclass(frozen=True)
class Apart:
    """The last steps of a forward that otherwise runs in segments.

    Attributes:
        steps: their number.
        eqn: the forward equation of these steps, which stacks more. Its starts do not matter.
        same: for each stack of the segments' equation, its place among the stacks of `eqn`.
    """

    steps: int
    eqn: Any
    same: tuple[int, ...]


class DividingKind(Kind):
    """A kind whose equations can also be written in segments."""

    @abstractmethod
    def sweep(self, eqn: Any, kept: Sequence[int], length: int, apart: Apart | None = None) -> tuple[Any, list[Any]]:
        """The program that runs a forward equation in segments of `length` steps, and the atoms that it reads.

        The program takes the place of the equation. It returns the results, then the starts of all segments, each
        stacked, then the starts of a shorter last segment. `kept` are the places of the carries whose starts it
        returns. The steps `apart` are in no segment. The further stacks of these steps come last.
        """

    @abstractmethod
    def parts(
        self, forward: Any, parts: Sequence[Any], given: Sequence[Sequence[bool]], apart: Sequence[bool], last: int
    ) -> tuple[Any, list[Any]]:
        """The program that runs an equation in two parts, and the atoms that it reads.

        The program takes the place of the equation. The second of the `parts` runs the `last` steps of the `forward`,
        the first runs all others; both are written for all steps. `given` says for each part which sliced operands
        exist for its own steps only. The program reads these operands after the atoms: first those of the first part,
        then those of the second. It returns the results. The stacks that are `apart` come last: first those of the
        first part, then those of the second.
        """

    @abstractmethod
    def unwind(
        self, reruns: Sequence[Any], back: Any, fed: Sequence[int | None], lengths: Sequence[int], last: int = 0
    ) -> tuple[Any, list[Any]]:
        """The program that runs a backward equation in segments, and the atoms that it reads.

        The program takes the place of the equation. `reruns` are forward equations, one for each of the `lengths`. The
        last one makes the stacks that `back` slices; the others make only their carries. `fed` gives for each sliced
        operand of `back` its place among these stacks, None for any other operand. After the atoms the program reads
        the starts of all segments, then the starts of a shorter last segment, then all stacks of the `last` steps of
        the forward, which are in no segment.
        """
