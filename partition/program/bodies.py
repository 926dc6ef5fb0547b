"""Describe an op that holds a program: its kind, and what its operands and results mean.

A loop is such an op, as are a branch and a call. `Inside` says this of an equation, in its own variables, and `Body` of
an op of the graph, in values. A `Kind` makes the one of an equation, and writes equations. A new kind is a file with a
class (as `scans` is) and a line in `kinds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SCAN = "scan"  # the kind that graph text takes for granted

#: What an equation reads: whole, as starts of carried values, and slice by slice.
Operands = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]


class Carry(NamedTuple):
    """A value that each step hands to the next: its variable in the program, the operand from which it starts, what a
    step makes of it, and the equation's result, which the last step leaves.
    """

    variable: Any
    start: Any
    following: Any
    result: Any


@dataclass(frozen=True)
class Inside:
    """The program inside an equation, and how it meets the equation's operands and results.

    Attributes:
        trips: how often the program runs, None where only a run can tell.
        program: a jaxpr, and the constants that it has of its own.
        whole: variables that stand for an operand in every step, each with the operand.
        carries: what each step hands to the next.
        sliced: variables that stand for one step's slice of an operand, each with the operand.
        stacks: what the program makes in each step, each with the result that stacks it.
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
    """The program that an op of the graph holds, where it lies open in regions.

    The ops in it read values of the regions around by their ids, and slices of stacks as made by a `step`. So of the
    op's operands only the starts of carried values are listed here.

    Attributes:
        op: id of the op.
        kind: a name of `kinds.KINDS`.
        regions: ids of the regions that the op runs.
        loop: id of the loop in whose steps they run.
        trips: how often they run each time, None where only a run can tell.
        starts: from what the carried values start, None for a literal.
        carried_in: the carried values as a step finds them.
        carried: as it hands them to the next step, None for a literal.
        carried_out: as the last step leaves them.
        stacks: the values of the steps that the op returns stacked.
        own: those among them that no op of the body makes: a constant, repeated.
        repeated: the atoms that these repeat.
        inside: the same of the equation; None where the graph was read from text.
        taken: for starts of stacks that the steps write slice by slice, the slice as a step finds it.
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

    @property
    def region(self) -> int:
        """The region of an op that runs one. Raises `ValueError` where it runs several."""
        (region,) = self.regions
        return region


#: What the user calls a loop of JAX's that has no reverse mode there; its place follows.
LOOP_OF_JAX = "the lax.while_loop"


@dataclass(frozen=True)
class Nested:
    """The step of a loop that is cut on its own: a joint program, whose halves run one after the other in each step.

    A loop whose trips only a run can tell keeps checkpoints, so its steps share no values with the program around it.

    Attributes:
        trips: how often it is expected to run, None where nobody said.
        graph: the joint program of one step.
        plan: what the forward half of a step keeps for the backward half; None where the graph was read from text.
        name: what the user calls the loop.
        checkpoints: how many checkpoints the loop may keep.
        checkpoint_bytes: the bytes of one.
        is_adjustable: whether it keeps fewer under a budget, since nobody said how many.
    """

    trips: int | None
    graph: Any
    plan: Any = field(default=None, compare=False)
    name: str = field(default="", compare=False)
    checkpoints: int = field(default=0, compare=False)
    checkpoint_bytes: int = field(default=0, compare=False)
    is_adjustable: bool = field(default=False, compare=False)

    @property
    def is_of_jax(self) -> bool:
        """Whether the user wrote a loop of JAX's, through which plain JAX has no gradient."""
        return self.name.startswith(LOOP_OF_JAX)


class Kind(ABC):
    """How equations of one primitive are read and written."""

    @abstractmethod
    def inside(self, eqn: Any) -> Inside:
        """The program in an equation: `loops` opens it, and `memory` counts what stays closed by it."""

    @abstractmethod
    def equation(self, like: Any, program: Any, operands: Operands, results: Sequence[Any]) -> Any:
        """An equation like another that runs another program, a closed jaxpr.

        The program reads what is whole, carried values and slices, and returns carried values and what is stacked.
        `operands` and `results` stand in the same order; the equation may have an order of its own.
        """


@dataclass(frozen=True)
class Apart:
    """The last steps of a forward that runs in segments otherwise.

    Attributes:
        steps: how many they are.
        eqn: the forward equation as it runs them, which stacks more. From where it starts does not matter.
        same: the places, among the stacks of `eqn`, of those that the equation of the segments has.
    """

    steps: int
    eqn: Any
    same: tuple[int, ...]


class DividingKind(Kind):
    """A kind whose equations can also be written in segments."""

    @abstractmethod
    def sweep(self, eqn: Any, kept: Sequence[int], length: int, apart: Apart | None = None) -> tuple[Any, list[Any]]:
        """The program in the place of a forward equation that runs it in segments of `length` steps, and the atoms that
        it reads.

        It returns the results, then the starts of all segments, each stacked, then those of a shorter last one. `kept`
        are the places of the carries whose starts it returns. The steps `apart` are in no segment. The further stacks
        of these steps come last.
        """

    @abstractmethod
    def parts(
        self, forward: Any, parts: Sequence[Any], given: Sequence[Sequence[bool]], apart: Sequence[bool], last: int
    ) -> tuple[Any, list[Any]]:
        """The program in the place of an equation that runs in two parts, and the atoms that it reads.

        The second of the `parts` runs the `last` steps of the `forward`, the first all others; both are written for all
        steps. `given` says of each part which of what it slices is there for its own steps alone: behind the atoms the
        program reads these, of the first part and then of the second. It returns the results. Of the stacks those that
        are `apart` come last: those of the first part, then those of the second.
        """

    @abstractmethod
    def unwind(
        self, reruns: Sequence[Any], back: Any, fed: Sequence[int | None], lengths: Sequence[int], last: int = 0
    ) -> tuple[Any, list[Any]]:
        """The program in the place of a backward equation that runs in segments, and the atoms that it reads.

        `reruns` are forward equations, one for each of the `lengths`: the last makes the stacks that `back` takes
        slices of, those before it their carries alone. `fed` says for all that `back` slices which of these stacks it
        is, None for what is none of them. Behind the atoms the program reads the starts of all segments, those of a
        shorter last one, and all the stacks of the `last` steps of the forward, which are in no segment.
        """
