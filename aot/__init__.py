"""Compile a function and its gradient ahead of time.

`aot.function` is where to start, as a decorator; `help(aot.function)` lists its options. `aot.explain` tells what any
function keeps for its backward, `aot.is_differentiable` what stops its gradient, `aot.load` runs what was exported,
`aot.debug` checks each half while it runs.

Files, in reading order:

    screens: Draw one line in a terminal or in a notebook and take it away, or write it now and then elsewhere.
    progress: Tell the user which stage runs and how long it has run.
    limits: Say what a budget means in bytes.
    cache: Keep compiled programs for other processes: what names them, and the folder that holds them.
    shapes: Give arguments sizes that are known later.
    options: List every choice a user can make, with its default.
    compile: Lower and compile the two jaxprs for a device.
    rates: Measure what a device computes and moves in a second.
    joint: Trace the function and its gradient as one jaxpr.
    trees: Put flat results back into the caller's trees.
    analyse: Run the function on shapes to learn what it reads, writes and aliases.
    blame: Say of JAX's errors whose function and argument they are about, and what helps.
    bound: Bind the calls of one function, each once, and find what was made for calls like it.
    jits: Jit the flat programs of one signature, and compile each once.
    pullback: Hold a forward's residuals until the cotangent comes.
    runner: Run the programs of one signature in the caller's own trees.
    flat: Run flat programs: as part of the trace around us, jitted, or compiled ahead of time.
    axes: Open axes of matplotlib where it is installed, and keep what was drawn.
    pareto: Show what each budget would cost.
    fit: Compile plans until one fits the budget.
    notes: Remember on disk which plans held a budget.
    searches: Search for a plan once for all ways of calling.
    uncut: Say, once for each function, where plain JAX runs in the place of a cut, and why.
    meshed: Compile for all devices of a mesh what was traced for one of them, inside `jax.shard_map`.
    inside: Cut a program that runs inside somebody's transformation, within the budget of its options.
    signature: Describe a pair by names and positions.
    gradient: Give the pair of halves in the form of TorchScript's `Gradient`, for whoever drives them by hand.
    checked: Run a call half by half, and check everything that can be checked.
    compiled: Run a compiled cut in the caller's own trees, and tell what XLA says of it.
    descriptors: Describe every array that enters or leaves an exported pair.
    contract: Say in JSON how an exported pair is called.
    agreement: Check that all that a contract says goes together.
    guide: Tell a stranger how to run an exported pair.
    pair: Hold what is exported: a traced call, its halves, and what each of their arrays is.
    artefact: Write a folder whole or not at all, and read back only what was written.
    programs: Read exported programs, and refuse one that is not what the contract says.
    export: Export a cut pair as programs that others can run.
    report: Show what a partition keeps, what it computes again, and what less memory would cost.
    cut: Hold one cut: the plan, the two jaxprs, and what their inputs and outputs mean to the caller.
    traced: Hold one traced call: what every later stage needs to know of it.
    escapes: Find traced values that a function kept outside of itself.
    wanted: Say which leaves of a call are differentiated.
    pipeline: Lead a function through every stage, in order, on one screen.
    alone: Run a function alone, forward only: nothing is differentiated and nothing cut.
    symbolic: Cut a function whose arguments have symbolic sizes.
    exportable: Trace and cut a function for export, at the sizes of its arguments or for any.
    stored: Run a call by programs that another process compiled.
    keeper: Look up what another process compiled, and compile what none did.
    flow: Ask whether a gradient can flow through a function, and where it stops.
    method: Bind a function of ours to an instance.
    written: Write what an exported function wrote to its objects into what stands for them in a call.
    loaded: Run an exported pair without the source of its model.
    function: The decorator, and the object it returns.
    explain: Tell what any function keeps for its backward, whether it is one of ours or not.
    differentiable: Answer whether a function can be differentiated, whether it is one of ours or not.
    command: Serve the command line: `jointcut explain`, `export`, `show`, `run` and `cache`.
"""

from jointcut.aot.checked import debug as debug
from jointcut.aot.compiled import Compiled as Compiled
from jointcut.aot.cut import Cut as Cut
from jointcut.aot.explain import explain as explain
from jointcut.aot.explain import is_differentiable as is_differentiable
from jointcut.aot.function import Function as Function
from jointcut.aot.function import function as function
from jointcut.aot.loaded import Loaded as Loaded
from jointcut.aot.loaded import load as load
from jointcut.aot.options import Options as Options
from jointcut.aot.pareto import Pareto as Pareto
from jointcut.aot.progress import progress as progress
from jointcut.aot.report.report import Report as Report
from jointcut.aot.shapes import shapes as shapes
from jointcut.aot.traced import Traced as Traced
from jointcut.partition.errors import ArtefactError as ArtefactError
from jointcut.partition.errors import BudgetError as BudgetError
from jointcut.partition.errors import CacheError as CacheError
from jointcut.partition.errors import UncutWarning as UncutWarning
from jointcut.wrappers.containers import register_container as register_container

__all__ = [
    "ArtefactError",
    "BudgetError",
    "CacheError",
    "Compiled",
    "Cut",
    "Function",
    "Loaded",
    "Options",
    "Pareto",
    "Report",
    "Traced",
    "UncutWarning",
    "debug",
    "explain",
    "function",
    "is_differentiable",
    "load",
    "progress",
    "register_container",
    "shapes",
]


def __dir__() -> list[str]:
    """The public names alone."""
    return __all__
