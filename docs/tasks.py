"""Say what one does with jointcut, and which public names are for it: the table of contents of the reference.

Each public name of the three folders stands in one task. `pages` refuses to build the site where one stands in none,
so a new name gets its place here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One page of the reference.

    Attributes:
        slug: the name of the page's file.
        title: its title.
        sentence: what it is for.
        guides: the guides that tell of it, by the names of their files.
        names: the public names, in the order in which they are met; `aot.function` for `jointcut.aot.function`.
    """

    slug: str
    title: str
    sentence: str
    guides: tuple[str, ...]
    names: tuple[str, ...]


def _task(slug: str, title: str, sentence: str, guides: str, names: str) -> Task:
    return Task(slug, title, sentence, tuple(guides.split()), tuple(names.split()))


TASKS = (
    _task(
        "differentiate",
        "Differentiate",
        "Cut a function and its gradient, and call it at once or stage by stage.",
        "calling use-it-with many-devices",
        "aot.function aot.Function aot.Options aot.Traced aot.Cut aot.Lowered aot.Compiled aot.is_differentiable "
        "aot.shapes aot.register_container aot.progress",
    ),
    _task(
        "budget",
        "Hold a budget",
        "Give a step, or a part of it, so many bytes; find the largest size that fits.",
        "budgets largest-batch out-of-memory",
        "aot.budget aot.largest aot.Largest aot.Pareto",
    ),
    _task(
        "policy",
        "Say what is kept",
        "Keep, drop, offload or shrink values by name, scope or primitive.",
        "policies from-checkpoint",
        "aot.MUST_SAVE aot.PREFER_SAVE aot.MUST_RECOMPUTE aot.PREFER_RECOMPUTE aot.MUST_OFFLOAD aot.PREFER_OFFLOAD "
        "aot.SAVE_AS aot.saved_arrays partition.CheckpointPolicy",
    ),
    _task(
        "look",
        "Look",
        "See what takes the memory, by lines of your source, and what changed.",
        "reports out-of-memory after-an-upgrade many-devices",
        "aot.explain aot.Report aot.Diff aot.Measured aot.MeasuredPlans aot.doctor aot.Doctor aot.Diagnosis "
        "aot.Cause aot.collectives aot.Collectives aot.Axes",
    ),
    _task(
        "target",
        "Plan for a device that is not here",
        "Name a GPU or TPU, and plan, weigh and compile for it.",
        "targets",
        "aot.target aot.Target",
    ),
    _task(
        "export",
        "Export and load",
        "Run a pair that `Function.export` wrote, without the model's source.",
        "artefacts",
        "aot.load aot.Loaded",
    ),
    _task(
        "loops",
        "Loops",
        "Loops that have a reverse mode, in memory that does not grow with their trips.",
        "loops",
        "aot.while_loop aot.fori_loop aot.scan aot.while_loop_stack_output aot.Stacked aot.trips aot.count_trips",
    ),
    _task(
        "tape",
        "Tape",
        "Run a function eagerly, and compile its whole backward as one program.",
        "tape",
        "aot.tape aot.Taped aot.Capture",
    ),
    _task(
        "hooks",
        "Hooks",
        "Functions of yours that see cotangents and complete gradients while the backward runs.",
        "tape",
        "aot.on_cotangent aot.hooked aot.post_accumulate aot.Hook",
    ),
    _task(
        "nans",
        "NaNs",
        "Find the op that makes a NaN, and choose the derivative at singular points.",
        "nans derivatives",
        "aot.first_nonfinite aot.NonFinite aot.Cure aot.debug aot.conventions aot.Conventions",
    ),
    _task(
        "plans",
        "Programs and plans",
        "Cut any joint jaxpr, and read, compare and write its graph and its plan.",
        "adding",
        "partition.split partition.Split partition.Graph partition.Op partition.Value partition.Plan partition.Saved "
        "partition.diff partition.show partition.parse partition.graph_page partition.Role partition.Roles "
        "partition.Side",
    ),
    _task(
        "search",
        "A search or prices of your own",
        "Find plans with other prices, other rules or another method.",
        "adding",
        "partition.Problem partition.Planner partition.min_cut partition.save_all partition.CostModel "
        "partition.Roofline partition.Constraint partition.HalfPass",
    ),
    _task(
        "wrappers",
        "Wrappers",
        "What lies between a caller's trees and objects, and the plain arrays of a compiled program.",
        "adding",
        "wrappers.CompilerWrapper wrappers.JointPass wrappers.rerun wrappers.pre_compile wrappers.Descriptors "
        "wrappers.Convention wrappers.Slot wrappers.slots wrappers.Target",
    ),
)
