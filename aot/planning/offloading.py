"""Set up the planning problem of a program, and check first that offloaded values come back unchanged.

XLA has returned wrong gradients, without an error, where residuals of a scan were offloaded on a GPU (openxla/xla
46231). So a new kind of device or version of jaxlib is checked first. A small step is run twice, once with all its
residuals in host memory and once with none there, and the gradients are compared. A success is noted in the file of the
device's rates (see `aot/planning/budgets/rates`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.options.limits import default_device
from jointcut.aot.options.options import Options, demands
from jointcut.aot.options.policies import has_forms, read_policy, stored_forms
from jointcut.aot.options.target import Target, backend_for, memory_for, rates_for
from jointcut.aot.planning.budgets.rates import device_name, on_a_thread, rates
from jointcut.aot.planning.budgets.rates_file import note, noted
from jointcut.aot.planning.budgets.scoped import bounded
from jointcut.aot.progress.progress import Stage
from jointcut.aot.trace.joint import Joint
from jointcut.partition.bodies.read import read
from jointcut.partition.errors import VerifyError, message
from jointcut.partition.lower import verify
from jointcut.partition.packing.packing import WHICH, Hooks
from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.allowances import bounds_of
from jointcut.partition.prices.constraints import without_effect
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.prices.rules import CheckpointPolicy
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax.runtime import tracing
from jointcut.partition.program.roles import Role, Roles
from jointcut.partition.search.forms.exact import chosen_from, kept_exact, without_form
from jointcut.partition.search.mincut import save_all
from jointcut.partition.split import Split, halved

_CHECKED: set[str] = set()
_LOCK = threading.Lock()

#: The relative difference that XLA's rounding may cause, to the largest gradient.
_TOLERANCE = 1e-4

_STEPS, _ROWS, _SIDE = 5, 8, 128  # of the step that is run


def problem_for(
    graph: Graph, options: Options, differentiated: Sequence[int] = (), forms: Sequence[tuple[int, str]] | None = None
) -> Problem:
    """Return the planning problem of a joint program for the target of the options, under their policy and hooks.

    `differentiated` are the program's differentiated inputs, counted among its primals. `forms` are added to the forms
    of the policy; None if there are none, and a plan brings none.

    Raises `PolicyError` for a policy that does not fit, `BudgetError` for a part that cannot keep as little as its
    budget, and `VerifyError` where offloaded values come back wrong.
    """
    is_exact = forms is None and not has_forms(options.policy)
    forms = (*stored_forms(options.policy, graph), *(forms or ()))
    asked = demands(options, graph)
    if not is_exact:
        plain = Problem.of(graph)
        again = frozenset(c.value for c in asked if c.demand is CheckpointPolicy.MUST_RECOMPUTE)
        asked = (*kept_exact(plain, again), *asked)
        left_out = without_form(plain) | chosen_from(plain, again)
        forms = tuple((v, form) for v, form in forms if v not in left_out)
    goal = options.goal
    problem = Problem.of(graph, constraints=asked, backend=backend_for(goal), forms=forms)
    problem = replace(problem, rates=_rates(goal, problem.backend))
    problem = bounded(problem, bounds_of(read_policy(options.policy), graph))
    problem = replace(problem, remarks=tuple(without_effect(read_policy(options.policy), graph)))
    if (saving := options.saved_arrays) is not None:
        primals = graph.role_inputs(Role.PRIMAL)
        params = frozenset(primals[i] for i in differentiated)
        problem = replace(problem, hooks=Hooks(saving.packing, saving.which or WHICH[0], params))
    if (spill := options.spilled) is not None:
        problem = replace(problem, hooks=Hooks(spill.packing, WHICH[0], frozenset()))
    if (problem.to_host or options.offload) and options.check_offload and (goal is None or goal.is_here):
        check()
    return problem


def _rates(goal: Target | None, backend: Backend) -> CostModel | None:
    """Return the rates by which the default plan is chosen; a device whose rates nobody knows is measured once.

    None for a CPU, whose plan does not depend on the machine, and where several processes would each measure their own.
    """
    known = rates_for(goal)
    if known is not None or backend.name == "cpu" or jax.process_count() > 1:
        return known
    return rates()


def on_devices(problem: Problem, goal: Target | None, program: Joint) -> Problem:
    """Return the problem with the memory of one device, and a remark where there are several devices.

    Inside a trace of JAX's the device is not known.
    """
    if not tracing() and (memory_bytes := memory_for(goal)) is not None:
        problem = replace(problem, room_bytes=max(0, memory_bytes - program.fixed_bytes))
    if (count := problem.graph.devices) == 1:
        return problem
    return replace(problem, remarks=(*problem.remarks, f"all bytes are those of one of {count} devices"))


def check() -> None:
    """Compare a step that offloads with one that does not, unless that was done before on such a device.

    Raises `VerifyError` where the gradients differ.
    """
    name = f"offload, {device_name(default_device())}"
    with _LOCK:
        if name in _CHECKED:
            return
        if noted(name) is None:
            with Stage("check", "offloading"):
                on_a_thread(_compare)
            note(name, {"offload": "checked"})
        _CHECKED.add(name)


def _compare() -> None:
    rows = np.linspace(-1, 1, _STEPS * _SIDE * _SIDE, dtype=np.float32).reshape(_STEPS, _SIDE, _SIDE)
    x = np.linspace(0, 1, _ROWS * _SIDE, dtype=np.float32).reshape(_ROWS, _SIDE)
    closed = jax.make_jaxpr(_joint)(rows, x, np.float32(1))
    problem = Problem.of(read(closed, Roles.simple(2, 1, 1, 2)), backend=Backend.here())
    kept = save_all(problem)
    away = [v for v in kept.values if not problem.not_offloaded(v)]
    plans = kept, Plan.of(problem, kept.values, offloaded=away)
    want, found = (_gradients(halved(problem, lambda graph, plan=plan: plan), rows, x) for plan in plans)
    for a, b in zip(want, found, strict=True):
        error = float(np.abs(a - b).max() / np.abs(a).max())
        if not error <= _TOLERANCE:
            what = f"gives gradients that differ by {error:.1e} from those of the same step without."
            cure = "Update jaxlib, or take the OFFLOADs out of the policy; check_offload=False skips this check."
            raise VerifyError(message(f"Offloading on {default_device().device_kind}", what, cure))


def _joint(rows: Any, x: Any, cotangent: Any) -> Any:
    """Run a step like those that XLA got wrong: a scan, whose residuals the backward reads in reverse."""

    def step(h: Any, row: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ row) + jnp.sin(h), None

    value, pullback = jax.vjp(lambda rows, x: jnp.sum(jnp.cos(lax.scan(step, jnp.tanh(x), rows)[0])), rows, x)
    return value, *pullback(cotangent)


def _gradients(split: Split, *primals: Any) -> list[np.ndarray]:
    """Return the gradients by one program, then by two programs that pass residuals."""
    graph, halves, one = split.graph, split.halves, [np.float32(1)]
    both = jax.jit(lambda *primals: verify.run(halves, graph, primals, one)[1])
    _, residuals = jax.jit(lambda *primals: verify.run_forward(halves, graph, primals))(*primals)
    backward = jax.jit(lambda *residuals: verify.run_backward(halves, residuals, one))
    return [*map(np.asarray, (*both(*primals), *backward(*residuals)))]
