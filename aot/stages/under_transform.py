"""Cut a program inside an outer transformation, within the budget of its options."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from jointcut.aot.choices.limits import Limit, limit
from jointcut.aot.choices.options import Options, wanted_plan
from jointcut.aot.choices.policies import has_forms
from jointcut.aot.fitting.attempts import Fitted, Ways, Weighed
from jointcut.aot.fitting.checkpoints import in_budget
from jointcut.aot.fitting.fit import planner_for
from jointcut.aot.fitting.notes import Held
from jointcut.aot.fitting.scales import Scales
from jointcut.aot.fitting.searches import Wanted, settled, way
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.run.meshed import lowered
from jointcut.aot.run.spilled import refuse_spill
from jointcut.aot.run.weigh import begin
from jointcut.aot.stages.offloading import problem_for
from jointcut.aot.trace.joint import Joint
from jointcut.partition.lower import verify
from jointcut.partition.nesting.read import read
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program import jaxprs
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Role
from jointcut.partition.search.forms.choose import formed
from jointcut.partition.split import Split, halved


def cut_inside(program: Joint, options: Options, name: str) -> Split:
    """Cut a joint program; the memory for a budget is measured on both halves in one program.

    The memory of the surrounding program is not known here. A plan found by another way of calling is tried before a
    search (see `searches`). Raises as `Traced.partition`, and `CallError` for a function that spills.
    """
    if options.spill is not None:
        refuse_spill(name)
    how, program = wanted_plan(options), replace(program, policy=options.policy)
    if how.budget is None:
        is_as_jax = how.strategy == "save_all" and options.policy is None
        graph = read(program.closed, program.roles) if is_as_jax else _formed(program, options, how.keeps_forms)
        problem = problem_for(graph, options, program.differentiated, () if how.keeps_forms else None)
        return halved(problem, how.strategy, options.passes)
    budget = limit(how.budget)
    fitted = in_budget(program, budget, lambda form: _fitted(form, options, name, budget, program.plain.closed))
    return fitted.measured.made


def _formed(program: Joint, options: Options, keeps_forms: bool = False) -> Graph:
    """The graph of a program with the cheaper forms of values."""
    is_exact = keeps_forms or has_forms(options.policy)
    return formed(read(program.to_cut, program.roles), is_exact, options.cost_of_forms)


def _fitted(program: Joint, options: Options, name: str, budget: Limit, plain: Any) -> Fitted[Split]:
    """The cut of a joint program whose compiled step holds a budget; `plain` is what a fraction is of."""
    problem = problem_for(_formed(program, options), options, program.differentiated)
    primals = program.roles.inputs.count(Role.PRIMAL)

    def cut(plan: Plan) -> Split:
        return halved(problem, lambda graph: plan, options.passes)

    def program_of(plan: Plan) -> Any:
        pair = cut(plan)
        return lambda *flat: verify.run(pair.halves, pair.graph, flat[:primals], seeds(flat[primals:]))

    scales = Scales(lambda plan: lowered(program_of(plan), program.closed))

    def measure(plan: Plan) -> Weighed[Split]:
        """The program of the caller is compiled later, so that nothing is compiled to run here."""
        return replace(scales.weigh([plan])[0].result(), made=cut(plan))

    def take(plan: Plan, held: Held) -> Weighed[Split]:
        return Weighed(cut(plan), held.peak_bytes, held.activation_bytes, held.compile_ms)

    wanted = Wanted(
        name=name,
        program=program,
        options=options,
        budget=budget,
        graph=problem.graph,
        leaves=(),
        way=way(options, 1, False),
        planner=lambda: planner_for(problem, options),
        ways=Ways(measure, scales.weigh, compiles=False),
        take=take,
        plain=lambda: _plain_memory(plain, len(program.roles.inputs) - primals),
    )
    return settled(wanted)


def _plain_memory(plain: Any, num_cotangents: int) -> Future[ProgramMemory]:
    """Begin to weigh plain JAX's step, whose last inputs are so many cotangents."""

    def whole(*flat: Any) -> list[Any]:
        first = len(flat) - num_cotangents
        return jaxprs.evaluate(plain, *flat[:first], *seeds(flat[first:]))

    return begin(lowered(whole, plain))


def seeds(cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents for measuring a program: the constant 1 for a scalar output, as in `jax.grad`.

    Inside `jax.shard_map` it stays an argument, since it may differ between devices.
    """
    is_loss = len(cotangents) == 1 and cotangents[0].shape == () and jaxprs.manual_mesh() is None
    return [jaxprs.full(c.aval, 1) for c in cotangents] if is_loss else list(cotangents)
