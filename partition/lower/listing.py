"""The schedule: the steps of both halves, in the order in which they run, and its text.

    forward:
        run #0 exp
        loop #1 stacks %5 {
            run #2 mul
            run #3 sin
        }
    handed: %5
    backward:
        wait %0 for %1
        again #0 exp
        loop #4 stacks %11 {
            again #3 cos
            run #5 mul
        }

A number after `#` is an op of the graph, a number after `%` a value. A loop whose trips only a run can tell runs back
`from 12 checkpoints`. `emit` writes these steps and decides nothing, and `replay` counts their bytes.

A parameter is updated as soon as its gradient is complete. Values that later ops of the backward read wait for it
(`update args[0]['w'] by %31:float32[8] (sub at model.py:12), before %7 %9`). If the backward runs twice, the first
sweep makes numbers instead, such as norms of gradients. The cotangent of the second waits for these (`settle %1 after
%15`).

For a compiler that puts gradients off, a cotangent waits for the gradients that are complete (`settle %9 after %7 %8`).
A compiler that runs first what is ready first needs three more steps (see `among/waits`, also for `zeros apart`). A
loop of the backward makes its stacks once values are there (`stacks after %7:float32[8] (mul at model.py:12)`). A
region that runs again as a whole first has all values that it reads (`hold ...`). A key waits for an array
(`wait %3 for %7`).

A value that waits in host memory is copied there where it is made (`offload %5`), and back ahead of its reader (`fetch
%5`, or `fetch %5 after %1` once a cotangent is there), in a loop step by step. A value that waits in a smaller form is
brought to it after the step that makes it (`store %5 as bfloat16`) and back ahead of its first reader (`restore %5 from
bfloat16`). A conditional has a block for each branch. The values that its branches keep are handed over as the first
of them:

    branches #7 {
        branch 0 keeps %12 {
            run #9 sin
        }
        branch 1 keeps %15 %16 {
            ...
        }
    }

A loop in segments has two blocks around it:

    keep %2 every 8 steps {
        loop #1 stacks {
            ...
        }
    }
    segments of 8 steps from %2 {
        again loop #1 stacks %5 {
            ...
        }
        loop #4 stacks %11 {
            ...
        }
    }

If its last steps are not in segments, the forward has the loop twice, the second time as those steps run it:

    keep %2 every 8 steps but the last 12 {
        loop #1 stacks {
            ...
        }
        loop #1 stacks %5 {
            ...
        }
    }
    segments of 8 steps from %2 after the last 12 {
        ...
    }

A loop may offload the values of its first steps and keep the values of its last ones on the device. Such a loop appears
twice in each half: once for the first steps, once for the last. The values after `parts of` are not joined between the
two.

    parts of %5 but the last 4 {
        loop #1 stacks %5 {
            ...
            offload %5
        }
        loop #1 stacks %5 {
            ...
        }
    }
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jointcut.partition.figures import counted
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
    Zeros,
    loops_of,
    moved,
    runs,
)
from jointcut.partition.program.graph import Graph


@dataclass(frozen=True)
class Schedule:
    """The steps of both halves, and the values that the forward hands to the backward.

    Attributes:
        forward: steps of the forward.
        handed: ids of values. The program's inputs and the values that `Keep` keeps are handed over too. They are not
            listed, unless they are stored in another form.
        backward: steps of the backward.
        graph: the graph that holds the ids. It names the ops when the schedule prints, and is not compared.
    """

    forward: tuple[Step, ...]
    handed: tuple[int, ...]
    backward: tuple[Step, ...]
    graph: Graph = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return the text shown above."""
        forward, backward = (_lines(steps, self.graph, "    ") for steps in (self.forward, self.backward))
        handed = f"handed:{_values(self.handed)}"
        return "".join(f"{line}\n" for line in ("forward:", *forward, handed, "backward:", *backward))

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The values that leave for the backward in host memory."""
        return frozenset(step.value for step in moved(self.forward) if isinstance(step, Offload))

    @cached_property
    def steps_apart(self) -> dict[int, int]:
        """The values that are handed over in two parts, each with the number of steps in the first part."""
        loops = ((step, self.graph.bodies[step.first.op].loop) for step in self.forward if isinstance(step, Parts))
        return {v: self.graph.loops[loop].length - step.last for step, loop in loops for v in step.values}

    @cached_property
    def stored(self) -> dict[int, tuple[str, ...]]:
        """The values that leave for the backward in other forms, each with its forms in the order taken."""
        forms: dict[int, tuple[str, ...]] = {}
        for step in moved(self.forward):
            if isinstance(step, Store):
                forms[step.value] = (*forms.get(step.value, ()), step.form)
        return forms

    @property
    def waits(self) -> bool:
        """Whether residuals must wait for the cotangents if both halves are one program, so that less stays alive."""
        return self.runs_again or bool(self.stored)

    @property
    def runs_again(self) -> bool:
        """Whether the backward computes anything that the forward computes too."""
        early = {step.op for step in runs(self.forward)}
        return any(step.again and step.op in early for step in runs(self.backward))


def _values(values: Iterable[int]) -> str:
    return "".join(f" %{v}" for v in values)


def _lines(steps: Iterable[Step], graph: Graph, pad: str) -> Iterator[str]:
    for step in steps:
        match step:
            case Run():
                words = "again" if step.again else "run"
                loop = graph.nested.get(step.op)
                back = f" from {counted(loop.checkpoints, 'checkpoint')}" if loop and loop.checkpoints else ""
                yield f"{pad}{words}{' apart' * step.apart} #{step.op} {graph.ops[step.op].name}{back}"
            case Wait() | Hold() | Delay() | Settle() | Update():
                yield f"{pad}{_waiting(step, graph)}"
            case Zeros():
                yield f"{pad}zeros apart {step.dtype}[{','.join(map(str, step.shape))}]"
            case Write() | Round() | Offload():
                yield f"{pad}{type(step).__name__.lower()} %{step.value}"
            case Store():
                yield f"{pad}store %{step.value} as {step.form}"
            case Fetch() | Restore():
                form = f" from {step.form}" if isinstance(step, Restore) else ""
                late = "" if step.cotangent is None else f" after %{step.cotangent}"
                yield f"{pad}{type(step).__name__.lower()} %{step.value}{form}{late}"
            case Enter():
                head = f"{'again ' * step.again}loop #{step.op} stacks{_values(step.stacks)}"
                yield from _block(head, step.steps, graph, pad)
            case Fork():
                yield f"{pad}{'again ' * step.again}{graph.ops[step.op].name} #{step.op} {{"
                for i, branch in enumerate(step.branches):
                    yield from _block(f"branch {i} keeps{_values(branch.stacks)}", branch.steps, graph, pad + "    ")
                yield f"{pad}}}"
            case Keep():
                apart = f" but the last {step.last}" if step.last else ""
                head = f"keep{_values(step.starts)} every {step.length} steps{apart}"
                yield from _block(head, loops_of(step), graph, pad)
            case Segments():
                apart = f" after the last {step.last}" if step.last else ""
                head = f"segments of {step.length} steps from{_values(step.starts)}{apart}"
                yield from _block(head, [step.rerun, step.then], graph, pad)
            case Parts():
                head = f"parts of{_values(step.values)} but the last {step.last}"
                yield from _block(head, [step.first, step.rest], graph, pad)


def _waiting(step: Waiting, graph: Graph) -> str:
    match step:
        case Wait():
            return f"wait %{step.value} for %{step.cotangent}"
        case Settle():
            return f"settle %{step.cotangent} after{_values(step.values)}"
        case Update():
            made, late = ", ".join(map(graph.where, step.made)), f", before{_values(step.waiting)}" * bool(step.waiting)
            return f"update {graph.values[step.parameter].label or f'%{step.parameter}'} by {made}{late}"
        case Hold():
            return f"hold {', '.join(map(graph.where, step.values))}"
        case Delay():
            left = f" but{_values(step.left)}" if step.left else ""
            return f"stacks{left} after {', '.join(map(graph.where, step.values))}"


def _block(head: str, steps: Iterable[Step], graph: Graph, pad: str) -> Iterator[str]:
    yield f"{pad}{head} {{"
    yield from _lines(steps, graph, pad + "    ")
    yield f"{pad}}}"
