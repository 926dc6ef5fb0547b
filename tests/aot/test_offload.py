"""Residuals in host memory: where they lie, what is told of them, and what is refused in which words."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.aot.planning import offloading
from jointcut.partition import Plan, diff
from jointcut.partition.errors import PlanError, PolicyError, VerifyError
from jointcut.partition.lower import writer
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import Backend
from jointcut.partition.program.jax import abstract, barriers, jaxprs, runtime

W = np.linspace(-0.5, 0.5, 5 * 16 * 16, dtype=np.float32).reshape(5, 16, 16)
X = np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16)
AWAY = {"hidden": aot.MUST_OFFLOAD, "first": aot.PREFER_OFFLOAD}
FEW, STACK = 64 * 16 * 4, 5 * 64 * 16 * 4  # bytes of an activation, and of a stack of it


def loss(w, x):
    def step(h, w):
        return checkpoint_name(jnp.tanh(h @ w), "hidden") + jnp.sin(h), None

    return jnp.sum(lax.scan(step, checkpoint_name(jnp.tanh(x), "first"), w)[0] ** 2)


def offloading_loss(**options):
    return aot.function(loss, argnums=(0, 1), **{"policy": AWAY, **options})


def kinds_of(arrays):
    return [x.sharding.memory_kind for x in arrays if isinstance(x, jax.Array)]


def assert_gradients(got):
    want = jax.value_and_grad(loss, argnums=(0, 1))(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


# ----------------------------------------------------------------------------------------------- where they lie


def test_residuals_really_lie_in_host_memory():
    _, pullback = offloading_loss().vjp(W, X)
    there = [x for x in pullback.residuals if abstract.lies_on_host(getattr(x, "sharding", None))]
    assert sorted(x.shape for x in there) == [(5, 64, 16), (64, 16)]
    compiled = offloading_loss().trace(W, X).partition().compile(2)
    _, residuals = compiled.forward(W, X)
    assert sorted(kinds_of(residuals)) == ["device", "device", "pinned_host", "pinned_host"]
    assert set(kinds_of(compiled.backward(residuals, np.float32(1)))) == {"device"}


def test_gradients_are_differentiated_again():
    """The cotangent of a copy in host memory goes back to the device."""
    first = [lambda w, f=f: jnp.sum(jax.grad(f, argnums=0)(w, X) ** 2) for f in (offloading_loss(), loss)]
    found, want = (jax.grad(f)(W) for f in first)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


def test_memory_tells_the_two_memories_apart():
    """XLA:CPU counts all as the device's: what lies in host memory is taken out by its type."""
    away, kept = (offloading_loss(policy=p).trace(W, X).partition().compile(2).memory for p in (
        AWAY, {"hidden": aot.MUST_SAVE, "first": aot.MUST_SAVE}))  # fmt: skip
    assert away.host_bytes == away.host_residual_bytes == FEW + STACK
    assert away.forward.host_bytes == away.backward.host_bytes == FEW + STACK
    assert (kept.host_bytes, kept.host_residual_bytes, kept.forward.host_bytes) == (0, 0, 0)
    assert kept.residual_bytes - away.residual_bytes == FEW + STACK
    assert kept.forward.output_bytes - away.forward.output_bytes == FEW + STACK
    assert kept.backward.argument_bytes - away.backward.argument_bytes == FEW + STACK
    assert kept.peak_bytes - away.peak_bytes >= FEW + STACK


def test_a_replay_counts_both_memories():
    traced = offloading_loss().trace(W, X)
    away, planner = traced.partition("min_cut").plan, traced.planner
    kept = Plan.of(traced.graph, away.values)
    assert planner.rows(away).host_bytes == FEW + STACK and planner.rows(kept).host_bytes == 0
    assert planner.rows(kept).peak_bytes - planner.rows(away).peak_bytes >= STACK


@pytest.mark.parametrize(
    ("way", "budget"),
    [
        *((way, None) for way in ("value_and_grad", "compiled", "one program", "jit", "vmap", "cache", "debug")),
        ("value_and_grad", 0.9),
        ("jit", 0.9),
    ],
)
def test_every_way_of_calling_gives_the_gradients(way, budget, tmp_path):
    function = offloading_loss(budget=budget)
    if way == "value_and_grad":
        assert_gradients(function.value_and_grad(W, X))
    elif way == "compiled":
        run = function.trace(W, X).partition().compile()
        assert run.executables == 2
        assert_gradients(run.value_and_grad(W, X))
    elif way == "one program":
        assert_gradients(function.trace(W, X).partition().compile(1).value_and_grad(W, X))
    elif way == "jit":
        assert_gradients(jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(W, X))
    elif way == "vmap":
        value, grads = jax.vmap(jax.value_and_grad(function, argnums=(0, 1)), in_axes=(None, 0))(W, X[None])
        assert_gradients((value[0], (grads[0][0], grads[1][0])))
    elif way == "cache":
        for _ in range(2):  # the second reads what the first wrote
            assert_gradients(offloading_loss(cache=tmp_path).value_and_grad(W, X))
    else:
        with aot.debug():
            assert_gradients(function.value_and_grad(W, X))


def test_an_artefact_offloads(tmp_path):
    folder = offloading_loss().export(tmp_path / "artefact", W, X, platforms=("cpu", "cuda"))
    assert_gradients(aot.load(folder).value_and_grad(W, X))


def test_for_a_gpu_each_step_of_a_loop_is_moved_inside_the_loop():
    """The moves are calls that XLA:GPU knows: of one step of a stack, and of the other value, but of no stack."""
    halves = offloading_loss().trace(W, X).partition().split.halves
    for closed in (halves.forward, halves.backward):
        program = jax.jit(functools.partial(runtime.evaluate, closed)).trace(*abstract.input_structs(closed))
        lines = program.lower(lowering_platforms=("cuda",)).as_text().splitlines()
        moves = [line.rpartition("->")[2].strip() for line in lines if "annotate_device_placement" in line]
        assert moves == ["tensor<64x16xf32>"] * 2


# ----------------------------------------------------------------------------------------------- what is told


def test_plan_schedule_file_diff_and_report_tell_what_is_offloaded():
    traced = offloading_loss().trace(W, X)
    cut = traced.partition("min_cut")
    plan, kept = cut.plan, Plan.of(traced.graph, cut.plan.values)
    assert plan.bytes_offloaded == FEW + STACK and len(plan.offloaded) == 2
    assert plan.bytes_saved + plan.bytes_offloaded == kept.bytes_saved
    assert "2 values, 24,576 bytes offloaded to host memory" in str(plan)
    assert ": offloaded, not recomputed: MUST_OFFLOAD by 'hidden'" in str(plan)
    text = planfile.dumps(plan, traced.graph)
    assert planfile.loads(text, traced.graph) == plan != kept
    assert text.count('"memory": "pinned_host"') == 2 and '"memory"' not in planfile.dumps(kept, traced.graph)
    assert diff(kept, plan).delta_bytes == -(FEW + STACK) and str(diff(kept, plan)).count("offloaded") == 2
    report = cut.explain(measure=False)
    assert "offloaded to host memory" in str(report) and report.totals.offloaded_bytes == FEW + STACK
    assert [row["memory"] for row in report.to_dict()["saved"]].count("pinned_host") == 2
    assert "offloaded, not recomputed: MUST_OFFLOAD by 'hidden'" in report.html
    assert any("keeps them on the device" in note for note in plan.to_policy().notes)


def test_a_preference_that_is_not_followed_is_told():
    graph = offloading_loss().trace(W, X).graph
    problem = offloading_loss(policy={"hidden": aot.PREFER_OFFLOAD}).trace(W, X).problem
    values = offloading_loss().trace(W, X).partition("min_cut").plan.values
    assert graph.values == problem.graph.values
    on_device = Plan.of(problem, values, offloaded=())
    assert "overruled PREFER_OFFLOAD by 'hidden'" in str(on_device) and "it keeps 20.5 kB on the device" in str(
        on_device
    )
    again = offloading_loss(policy={"hidden": aot.PREFER_OFFLOAD, "tanh": aot.MUST_RECOMPUTE})
    assert not again.trace(W, X).partition("min_cut").plan.offloaded


def test_a_policy_of_jax_offloads_as_jax_does():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"],
        offload_src="device", offload_dst="pinned_host")  # fmt: skip
    function = offloading_loss(policy=policy)
    plan = function.trace(W, X).partition("min_cut").plan
    assert [s.op for s in plan.saved if s.is_offloaded] == ["name"] and plan.bytes_offloaded == STACK
    assert_gradients(function.value_and_grad(W, X))


def test_a_loop_whose_values_are_offloaded_does_not_run_in_segments():
    plans = list(offloading_loss().trace(W, X).planner.plans())
    assert plans and not any(plan.segments for plan in plans) and all(plan.offloaded for plan in plans)


# ----------------------------------------------------------------------------------------------- what is refused


def refused(policy, function=loss, error=PolicyError):
    with pytest.raises(error) as caught:
        aot.function(function, policy=policy).trace(W, X).partition("min_cut")
    return re.sub(r"%\d+:", "%:", re.sub(r" at \S+:\d+ \(.*?\)\)", ")", str(caught.value)))


def test_a_device_without_host_memory_is_refused_with_what_it_has(monkeypatch):
    monkeypatch.setattr(runtime, "memory_kinds", lambda: ("device", "unpinned_host"))
    assert refused({"hidden": aot.MUST_OFFLOAD}) == (
        "policy: %:5xfloat32[64,16] (name) is MUST_OFFLOAD by 'hidden', and the device has no pinned_host memory; it "
        "has device, unpinned_host.\nKeep values on the device, or ask for MUST_RECOMPUTE."
    )


def test_an_output_and_a_value_in_a_conditional_are_refused():
    assert refused({"out": aot.MUST_OFFLOAD}, lambda w, x: checkpoint_name(jnp.sum(jnp.tanh(w)), "out")) == (
        "policy: %:float32[] (name) is MUST_OFFLOAD by 'out', but it is an output, which the caller gets in the "
        "device's memory.\nAsk for MUST_SAVE, MUST_RECOMPUTE or nothing there."
    )

    def branched(w, x):
        return jnp.sum(lax.cond(x[0, 0] < 0, lambda x: checkpoint_name(jnp.tanh(x), "inner") ** 2, jnp.sin, x @ w[0]))

    assert refused({"inner": aot.MUST_OFFLOAD}, branched) == (
        "policy: %:float32[64,16] (name) is MUST_OFFLOAD by 'inner', but it is made in a conditional, whose branches "
        "share the space of what they keep.\nAsk for MUST_SAVE, MUST_RECOMPUTE or nothing there."
    )
    preferred = aot.function(branched, policy={"inner": aot.PREFER_OFFLOAD})
    np.testing.assert_allclose(preferred.value_and_grad(W, X)[1], jax.grad(branched)(W, X), rtol=2e-5, atol=2e-5)


def nested_loss(w, x):
    def outer(h, w):
        h, _ = lax.scan(lambda h, _: (checkpoint_name(jnp.tanh(h @ w), "inner"), None), h, length=3)
        return checkpoint_name(jnp.sin(h), "outer") ** 2, None

    return jnp.sum(lax.scan(outer, x, w)[0])


def test_on_a_gpu_what_a_loop_inside_a_loop_makes_stays_on_the_device(monkeypatch):
    """XLA:GPU cannot compile such moves; what the outer loop makes is moved."""
    policy = {"inner": aot.PREFER_OFFLOAD, "outer": aot.MUST_OFFLOAD}
    here = aot.function(nested_loss, argnums=(0, 1), policy=policy).trace(W, X).partition().plan
    monkeypatch.setattr(Backend, "here", lambda: Backend.of(("cuda",)))
    there = aot.function(nested_loss, argnums=(0, 1), policy=policy).trace(W, X).partition().plan
    assert (len(here.offloaded), len(there.offloaded)) == (2, 1)
    assert refused({"inner": aot.MUST_OFFLOAD}, nested_loss) == (
        "policy: %:15xfloat32[64,16] (name) is MUST_OFFLOAD by 'inner', but it is made in a loop inside a loop, and "
        "the compiler for this device fails to move such values.\nAsk for MUST_SAVE, MUST_RECOMPUTE or nothing there."
    )


def test_a_policy_of_jax_that_names_another_memory_is_refused():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "unpinned_host")
    assert refused(policy) == (
        "policy offload_dot_with_no_batch_dims.<locals>.policy asks to move %:5xfloat32[64,16] (dot_general) to "
        "'unpinned_host'.\nOffload to 'pinned_host'."
    )


def test_a_plan_that_contradicts_itself_or_the_policy_is_refused():
    traced = offloading_loss().trace(W, X)
    values = traced.partition("min_cut").plan.values
    with pytest.raises(
        PlanError, match=r"is saved on the device by the plan, and may not be: MUST_OFFLOAD by 'hidden'"
    ):
        traced.partition(plan=Plan.of(traced.graph, values))
    other = next(v.id for v in traced.graph.values if v.maker is not None and v.id not in values)
    with pytest.raises(PlanError, match=rf"plan.offloaded\[%{other}\] is not saved.\nOffload values of plan.saved."):
        Plan.of(traced.graph, values, offloaded=[other])
    text = planfile.dumps(Plan.of(traced.graph, values, offloaded=values[:1]), traced.graph)
    with pytest.raises(PlanError, match=r"plan.saved\[0\].memory is \"disk\", not \"pinned_host\""):
        planfile.loads(text.replace('"memory": "pinned_host"', '"memory": "disk"'), traced.graph)


# ------------------------------------------------------------------------------------ the first time on a device


@pytest.fixture
def unseen(monkeypatch, tmp_path):
    monkeypatch.setenv("JOINTCUT_RATES", str(tmp_path / "rates.json"))
    monkeypatch.setattr(offloading, "_CHECKED", set())
    runs = []
    compare = offloading._compare
    monkeypatch.setattr(offloading, "_compare", lambda: runs.append(compare()))
    return runs


def test_the_first_offload_on_a_device_is_checked_and_noted(unseen, monkeypatch):
    offloading_loss(check_offload=False).trace(W, X).partition("min_cut")
    aot.function(loss, policy={"hidden": aot.MUST_SAVE}).trace(W, X).partition("min_cut")
    assert len(unseen) == 0
    for _ in range(2):
        offloading_loss().trace(W, X).partition("min_cut")
    assert len(unseen) == 1
    monkeypatch.setattr(offloading, "_CHECKED", set())  # as in another process
    offloading_loss().trace(W, X).partition("min_cut")
    assert len(unseen) == 1


def test_wrong_gradients_are_found(unseen, monkeypatch):
    moved = barriers.moved

    def wrong(var, to_host):
        """A copy that reverses its elements, as a fault of an XLA might."""
        if to_host or not var.aval.shape:
            return moved(var, to_host)
        _, copy = moved(var, to_host)
        closed = jax.make_jaxpr(lambda x: lax.rev(jax.device_put(x, jax.memory.Space.Device), (0,)))(
            abstract.struct(var.aval)
        )
        call = jax.make_jaxpr(lambda x: jax.jit(lambda x: runtime.evaluate(closed, x)[0])(x))(abstract.struct(var.aval))
        (eqn,) = jaxprs.opened(call)[0].eqns
        return eqn.replace(invars=[var], outvars=[copy]), copy

    monkeypatch.setattr(writer.barriers, "moved", wrong)
    with pytest.raises(VerifyError) as error:
        offloading_loss().trace(W, X).partition("min_cut")
    assert re.sub(r"\d\.\d+e[+-]\d+", "N", str(error.value)) == (
        "Offloading on cpu gives gradients that differ by N from those of the same step without.\n"
        "Update jaxlib, or take the OFFLOADs out of the policy; check_offload=False skips this check."
    )
