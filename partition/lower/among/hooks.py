"""Call the hooks of complete gradients as soon as these are there: move their steps forward in the backward."""

from __future__ import annotations

from collections.abc import Iterable

from jointcut.partition.lower.steps import Enter, Fork, Keep, Parts, Run, Segments, Step, runs
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax.side_effects import called_back
from jointcut.partition.program.roles import Role
from jointcut.partition.rewrite.hooks import CalledBack, Stage, called_early


def hooked_early(graph: Graph, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Move the hooks on a backward's results forward; other hooks keep their order."""
    stages = [_stage(graph, step) for step in steps]
    if not any(stage.calls_back for stage in stages):
        return tuple(stage.stage for stage in stages)
    return tuple(called_early(stages, graph.results(Role.GRADIENT)))


def _stage(graph: Graph, step: Step) -> Stage[Step]:
    if isinstance(step, Run):
        op = graph.ops[step.op]
        back = None if op.payload is None or not op.effects else called_back(op.payload)
        return Stage(step, op.inputs, op.outputs, isinstance(back, CalledBack))
    inside = [*runs([step])] if isinstance(step, Enter | Fork | Keep | Segments | Parts) else []
    reads = {v for run in inside for v in graph.ops[run.op].inputs}
    makes = {v for run in inside for v in graph.ops[run.op].outputs}
    return Stage(step, reads | {graph.outermost(v) for v in reads}, makes, False)
