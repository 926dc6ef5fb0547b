"""Compile a function and its gradient ahead of time.

Start with the decorator `aot.function`; `help(aot.function)` lists its options. `aot.explain` reports what any function
keeps for its backward. `aot.is_differentiable` reports what stops its gradient. `aot.load` runs an exported function.
`aot.debug` checks each half while it runs. `aot.first_nonfinite` finds the op that makes a NaN, and what cures it.
`aot.doctor` says why a step does not fit into memory, `aot.collectives` what its devices exchange.

Where to add what:

- an option of `aot.function`: a field in `options/options`, and a line in the docstring of `function`;
- a figure of a report: `report/lists` and `report/sections`; XLA's own account is read in `report/liveness`;
- a cure of a NaN: a pattern in `stages/cures/patterns`;
- a command: `command/cli`;
- another way to find programs, such as a service: a function that returns a `Runner`, as in `call/cached`;
- an error: `partition/errors`, for all folders.

Files, in reading order. First the user's choices, and the parts that a function may have:

    hooks: Hold hooks, traced into programs or called back.
    options: Read a user's choices: a memory budget, and the options of `aot.function`.
    progress: Show the user which stage runs, and for how long.
    cache: Keep compiled programs on disk for other processes.
    derivatives: Functions whose derivatives stay finite, and equal PyTorch's.
    loops: Run loops backwards in memory that does not depend on how long they run.

Then a call, in its order, with the tools that its stages offer:

    trace: Trace a function and its gradient, and describe their inputs and outputs.
    update: Update parameters inside the backward.
    run: Compile the halves, run them, and pass residuals from forward to backward.
    planning: Plan a program wherever it is called: one request, one answer.
    report: Show the values that a partition saves and recomputes, by XLA's own account, and the cost of less memory.
    export: Write a cut pair to a folder that others can run, and read one back.
    stages: Take a function through its stages: `Traced`, `Cut`, `Compiled`.
    call: The decorator and its calls: find or compile the programs of a call, and run them.

Around them:

    tape: Run a function eagerly, and capture its whole backward as one compiled program.
    ratchet: Hold the memory of tested steps: a step that takes more than its record fails its test.
    command: Serve the command line: `jointcut explain`, `diff`, `largest`, `doctor`, `export`, `show` and `cache`.
    package: Be the package `jointcut`: its version, and its three folders, each imported when it is first asked for.
"""

from jointcut.aot import derivatives as derivatives  # a room, whose names stand on pages of their own
from jointcut.aot.call.decorator import function as function
from jointcut.aot.call.doctor.causes import Cause as Cause
from jointcut.aot.call.doctor.doctor import Diagnosis as Diagnosis
from jointcut.aot.call.doctor.doctor import Doctor as Doctor
from jointcut.aot.call.doctor.doctor import doctor as doctor
from jointcut.aot.call.explain import collectives as collectives
from jointcut.aot.call.explain import explain as explain
from jointcut.aot.call.explain import is_differentiable as is_differentiable
from jointcut.aot.call.function import Function as Function
from jointcut.aot.call.largest import Largest as Largest
from jointcut.aot.call.largest import largest as largest
from jointcut.aot.call.nonfinite import first_nonfinite as first_nonfinite
from jointcut.aot.export.loaded import Loaded as Loaded
from jointcut.aot.export.loaded import load as load
from jointcut.aot.hooks.hook import Hook as Hook
from jointcut.aot.loops.expected import trips as trips
from jointcut.aot.loops.loops import Stacked as Stacked
from jointcut.aot.loops.loops import fori_loop as fori_loop
from jointcut.aot.loops.loops import while_loop as while_loop
from jointcut.aot.loops.loops import while_loop_stack_output as while_loop_stack_output
from jointcut.aot.loops.plain import count_trips as count_trips
from jointcut.aot.loops.scans import scan as scan
from jointcut.aot.options.conventions import Conventions as Conventions
from jointcut.aot.options.conventions import conventions as conventions
from jointcut.aot.options.options import Options as Options
from jointcut.aot.options.policies import MUST_OFFLOAD as MUST_OFFLOAD
from jointcut.aot.options.policies import MUST_RECOMPUTE as MUST_RECOMPUTE
from jointcut.aot.options.policies import MUST_SAVE as MUST_SAVE
from jointcut.aot.options.policies import PREFER_OFFLOAD as PREFER_OFFLOAD
from jointcut.aot.options.policies import PREFER_RECOMPUTE as PREFER_RECOMPUTE
from jointcut.aot.options.policies import PREFER_SAVE as PREFER_SAVE
from jointcut.aot.options.policies import SAVE_AS as SAVE_AS
from jointcut.aot.options.scopes import budget as budget
from jointcut.aot.options.target import Target as Target
from jointcut.aot.options.target import target as target
from jointcut.aot.planning.budgets.pareto import Pareto as Pareto
from jointcut.aot.progress.progress import progress as progress
from jointcut.aot.report.compare.collectives import Collectives as Collectives
from jointcut.aot.report.compare.diff import Diff as Diff
from jointcut.aot.report.report import Report as Report
from jointcut.aot.stages.axes import Axes as Axes
from jointcut.aot.stages.cures.found import Cure as Cure
from jointcut.aot.stages.cures.found import NonFinite as NonFinite
from jointcut.aot.stages.cut import Compiled as Compiled
from jointcut.aot.stages.cut import Cut as Cut
from jointcut.aot.stages.cut import Lowered as Lowered
from jointcut.aot.stages.debug import debug as debug
from jointcut.aot.stages.measured import Measured as Measured
from jointcut.aot.stages.measured import MeasuredPlans as MeasuredPlans
from jointcut.aot.stages.traced import Traced as Traced
from jointcut.aot.tape.attach import hooked as hooked
from jointcut.aot.tape.attach import on_cotangent as on_cotangent
from jointcut.aot.tape.attach import post_accumulate as post_accumulate
from jointcut.aot.tape.attach import saved_arrays as saved_arrays
from jointcut.aot.tape.captures import Capture as Capture
from jointcut.aot.tape.tape import Taped as Taped
from jointcut.aot.tape.tape import tape as tape
from jointcut.aot.trace.shapes import shapes as shapes
from jointcut.partition.errors import ArtefactError as ArtefactError
from jointcut.partition.errors import BudgetError as BudgetError
from jointcut.partition.errors import CacheError as CacheError
from jointcut.partition.errors import NonFiniteError as NonFiniteError
from jointcut.partition.errors import PeakError as PeakError
from jointcut.partition.errors import PolicyError as PolicyError
from jointcut.partition.errors import ProcessError as ProcessError
from jointcut.partition.errors import RoomError as RoomError
from jointcut.partition.errors import SpillError as SpillError
from jointcut.partition.errors import TargetError as TargetError
from jointcut.partition.errors import UncachedWarning as UncachedWarning
from jointcut.partition.errors import UncheckedWarning as UncheckedWarning
from jointcut.partition.errors import UncutWarning as UncutWarning
from jointcut.wrappers.arguments.containers import register_container as register_container

__all__ = [
    "MUST_OFFLOAD",
    "MUST_RECOMPUTE",
    "MUST_SAVE",
    "PREFER_OFFLOAD",
    "PREFER_RECOMPUTE",
    "PREFER_SAVE",
    "SAVE_AS",
    "ArtefactError",
    "Axes",
    "BudgetError",
    "CacheError",
    "Capture",
    "Cause",
    "Collectives",
    "Compiled",
    "Conventions",
    "Cure",
    "Cut",
    "Diagnosis",
    "Diff",
    "Doctor",
    "Function",
    "Hook",
    "Largest",
    "Loaded",
    "Lowered",
    "Measured",
    "MeasuredPlans",
    "NonFinite",
    "NonFiniteError",
    "Options",
    "Pareto",
    "PeakError",
    "PolicyError",
    "ProcessError",
    "Report",
    "RoomError",
    "SpillError",
    "Stacked",
    "Taped",
    "Target",
    "TargetError",
    "Traced",
    "UncachedWarning",
    "UncheckedWarning",
    "UncutWarning",
    "budget",
    "collectives",
    "conventions",
    "count_trips",
    "debug",
    "doctor",
    "explain",
    "first_nonfinite",
    "fori_loop",
    "function",
    "hooked",
    "is_differentiable",
    "largest",
    "load",
    "on_cotangent",
    "post_accumulate",
    "progress",
    "register_container",
    "saved_arrays",
    "scan",
    "shapes",
    "tape",
    "target",
    "trips",
    "while_loop",
    "while_loop_stack_output",
]


def __dir__() -> list[str]:
    """The public names alone."""
    return __all__
