"""Answer a request once for all processes that hold the arrays of a program.

Where `jax.distributed` joins processes, each of them asks for the plan of the same program. The first one plans, and
the others take its plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jointcut.aot.cache import environment
from jointcut.aot.cache.sketch import equations
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import wanted_plan
from jointcut.aot.planning.agreed import Asked, agreed, hash_of, is_deciding
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.weighing import Answer
from jointcut.aot.progress.progress import Stage
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.saved import GradientError
from jointcut.partition.program.jax import processes, user_source
from jointcut.partition.split import Strategy

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OWN = ("cache", "spill")  # options that name folders, which may be others on each process


def answered(
    request: Request, strategy: Strategy | None = None, budget: Budget | None = None, plan: Plan | str | None = None
) -> Answer:
    """Return the answer to a request as `Request.answered` does, the same on all processes that hold its arrays.

    The error of smaller forms is not measured there, since one process cannot run the step. Raises `ProcessError`, on
    all of them, where one asks for something else, fails or ends.
    """
    if is_deciding() or not processes.are_many():
        return request.answered(strategy, budget, plan)
    trace, placed = request.trace, processes.arguments()
    if trace is not None:
        placed += zip(trace.bound.paths(), trace.bound.leaves, strict=True)
    consts = () if trace is None else trace.consts
    if len(group := processes.holders((*consts, *(x for _, x in placed)))) == 1:
        return request.answered(strategy, budget, plan)
    given = {"strategy": strategy, "budget": budget, "plan": plan}
    how, alone, most = wanted_plan(request.options, strategy, budget, plan), request.alone, request.options.error
    if most is not None:
        alone = alone.under(replace(request.options, error=None))

    def made() -> tuple[Answer, str]:
        return _with_text(alone.answered(strategy, budget, plan))

    def taken(text: str) -> tuple[Answer, str]:
        form = json.loads(text)
        planned = alone.as_jax if form["as_jax"] else alone if how.budget is None else alone.for_budgets
        return _with_text(planned.answered(plan=form["plan"]))

    with Stage("agree", request.name) as now:
        answer, text = agreed(group, _asked(request, placed, given), made, taken)
        now.ends(lambda: f"{len(group)} processes agreed in {now} on the plan {hash_of(text)}")
    if most is None or how.keeps_forms:
        return answer
    unused = GradientError(most, unused="several processes run the step")
    return replace(answer, split=replace(answer.split, plan=replace(answer.plan, gradient_error=unused)))


def _with_text(answer: Answer) -> tuple[Answer, str]:
    form = {"as_jax": answer.request.program.is_as_jax, "plan": planfile.dumps(answer.plan, answer.split.graph)}
    return answer, json.dumps(form)


def _asked(request: Request, placed: Sequence[tuple[str, Any]], given: dict[str, Any]) -> Asked:
    """Return what is asked for, as the processes of one program compare it; addresses in memory do not count."""
    chosen = vars(request.options) | {name: value for name, value in given.items() if value is not None}
    facts = {f"the version of {name}": version for name, version in environment.versions()}
    facts["jointcut's own source"] = environment.SOURCES[:16]
    facts |= {f"the sharding of {path}": lies for path, x in placed if (lies := processes.layout(x))}
    facts |= {f"the option {name}": _ADDRESS.sub("", repr(x)) for name, x in chosen.items() if name not in _OWN}
    steps = [(_place(eqn), key) for eqn, key in equations(request.program.closed)]
    return Asked(request.name, facts, request.graph, steps)


def _place(eqn: Any) -> str:
    source = user_source.source_of(eqn)
    return f"{eqn.primitive.name}{f' at {source}' if source else ''}"
