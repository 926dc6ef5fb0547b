"""Compile a function and its gradient ahead of time.

Start with the decorator `aot.function`; `help(aot.function)` lists its options. `aot.explain` reports what any function
keeps for its backward. `aot.is_differentiable` reports what stops its gradient. `aot.load` runs an exported function.
`aot.debug` checks each half while it runs. `aot.first_nonfinite` finds the op that makes a NaN, and what cures it.

Where to add what:

- an option of `aot.function`: a field in `choices/options`, and a line in the docstring of `function`;
- a figure of a report: `report/lists` and `report/sections`; what XLA says is read in `report/liveness`;
- a cure of a NaN: a pattern in `cures/patterns`;
- a command: `command/cli`;
- another way in which programs are found, such as a service: a function that returns a `Runner`, as in `calls/cached`;
- an error: `partition/errors`, for all folders.

Files, in reading order:

    hooks: Hold hooks, and tell which of them can be traced.
    choices: Read what a user may choose: a memory budget, and the options of `aot.function`.
    derivatives: Functions whose derivatives stay finite, and equal PyTorch's.
    loops: Run loops backwards in memory that does not depend on how long they run.
    progress: Show the user what runs, and for how long.
    cache: Keep compiled programs on disk for other processes.
    trace: Trace a function and its gradient, and describe their inputs and outputs.
    run: Compile the halves, run them, and pass residuals from forward to backward.
    update: Update parameters inside the backward.
    fitting: Find a plan that fits a budget, and remember it.
    cures: Find what makes a call finite that was not, and try it by running the call.
    export: Write a cut pair to a folder that others can run, and read one back.
    report: Show what a partition keeps and computes again, by XLA's own account, and what less memory would cost.
    stages: Take a function through its stages: `Traced`, `Cut`, `Compiled`.
    calls: Find or compile the programs of a call, and run them.
    function: The decorator, and the object it returns.
    tape: Run a function eagerly, and capture its whole backward as one compiled program.
    explain: Tell what any function, decorated or not, keeps for its backward, and whether it has a gradient.
    nonfinite: Find the first op of a call that makes a NaN or an infinity, and what cures it.
    command: Serve the command line: `jointcut explain`, `export`, `show`, `run` and `cache`.
"""

from jointcut.aot import derivatives as derivatives  # a room, whose names stand on pages of their own
from jointcut.aot.choices.conventions import Conventions as Conventions
from jointcut.aot.choices.conventions import conventions as conventions
from jointcut.aot.choices.options import Options as Options
from jointcut.aot.choices.policies import MUST_OFFLOAD as MUST_OFFLOAD
from jointcut.aot.choices.policies import MUST_RECOMPUTE as MUST_RECOMPUTE
from jointcut.aot.choices.policies import MUST_SAVE as MUST_SAVE
from jointcut.aot.choices.policies import PREFER_OFFLOAD as PREFER_OFFLOAD
from jointcut.aot.choices.policies import PREFER_RECOMPUTE as PREFER_RECOMPUTE
from jointcut.aot.choices.policies import PREFER_SAVE as PREFER_SAVE
from jointcut.aot.choices.policies import SAVE_AS as SAVE_AS
from jointcut.aot.choices.scopes import budget as budget
from jointcut.aot.choices.target import Target as Target
from jointcut.aot.choices.target import target as target
from jointcut.aot.cures.found import Cure as Cure
from jointcut.aot.cures.found import NonFinite as NonFinite
from jointcut.aot.explain import explain as explain
from jointcut.aot.explain import is_differentiable as is_differentiable
from jointcut.aot.export.loaded import Loaded as Loaded
from jointcut.aot.export.loaded import load as load
from jointcut.aot.fitting.pareto import Pareto as Pareto
from jointcut.aot.function import Function as Function
from jointcut.aot.function import function as function
from jointcut.aot.hooks.hook import Hook as Hook
from jointcut.aot.loops.expected import trips as trips
from jointcut.aot.loops.loops import Stacked as Stacked
from jointcut.aot.loops.loops import fori_loop as fori_loop
from jointcut.aot.loops.loops import while_loop as while_loop
from jointcut.aot.loops.loops import while_loop_stack_output as while_loop_stack_output
from jointcut.aot.loops.scans import scan as scan
from jointcut.aot.nonfinite import first_nonfinite as first_nonfinite
from jointcut.aot.progress.progress import progress as progress
from jointcut.aot.report.report import Report as Report
from jointcut.aot.stages.compiled import Compiled as Compiled
from jointcut.aot.stages.cut import Cut as Cut
from jointcut.aot.stages.debug import debug as debug
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
from jointcut.partition.errors import PolicyError as PolicyError
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
    "BudgetError",
    "CacheError",
    "Capture",
    "Compiled",
    "Conventions",
    "Cure",
    "Cut",
    "Function",
    "Hook",
    "Loaded",
    "NonFinite",
    "NonFiniteError",
    "Options",
    "Pareto",
    "PolicyError",
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
    "conventions",
    "debug",
    "explain",
    "first_nonfinite",
    "fori_loop",
    "function",
    "hooked",
    "is_differentiable",
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
