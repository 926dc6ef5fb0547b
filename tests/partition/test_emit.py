"""Both halves together mean, bit for bit, what the joint program means, and say where each op comes from."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.meaning import verify_meaning
from jointcut import aot
from jointcut.partition import parse
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import run
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.jax import jaxprs, runtime, user_source
from jointcut.partition.program.roles import Role
from jointcut.partition.split import split
from oracle import STRATEGIES
from programs import EVERY_PROGRAM, named

MEANT = [
    "two_layers",
    "layer_norm",
    "scan_with_constants",
    "scan_without_xs",
    "scan_with_several_carries",
    "reverse_scan",
    "scan_of_no_steps",
    "scan_of_one_step",
    "nested_scans",
    "triply_nested_scans",
    "scan_with_ys_used_outside",
    "scan_with_counter",
    "scan_feeding_scan",
    "scan_of_counts_alone",
    "while_loop_counts",
    "cond_on_data",
    "contraction",
    "complex_weights",
    "empty_arrays",
    "output_is_input",
    "output_twice",
    "several_outputs",
    "captured_constants",
    "unused_inputs",
    "constant_function",
    "checkpoint_around_scan",
    "checkpoints_in_a_row",
    "reparametrised_sample",
    "integer_and_key_leaves",
    "custom_vjp_in_scan",
    "scan_in_cond",
    "internal_reference",
    "float64_scan",
    "weak_types",
]


@pytest.fixture(scope="module", autouse=True)
def little_optimisation() -> Iterator[None]:
    """What runs as one op (a scan, a cond) is compiled as one: bit for bit then asks XLA not to fuse inside."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def some(value, draws):
    """Numbers for one input of a joint program."""
    shape, dtype = value.shape, value.payload.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape)
    if jax.dtypes.issubdtype(dtype, np.inexact):
        return jnp.asarray(draws.uniform(0.5, 1.5, shape)).astype(dtype)
    return jnp.asarray(draws.integers(0, 2, shape)).astype(dtype)


#: Every program by the first strategy, every third by the other too, and all by both with JOINTCUT_EVERY_PROGRAM.
CASES = [(name, STRATEGIES[0]) for name in MEANT]
CASES += [(name, STRATEGIES[1]) for name in MEANT[:: 1 if EVERY_PROGRAM else 3]]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_the_halves_mean_what_the_joint_program_means(name, strategy, traced):
    source = traced(name)
    with named(name).precision():
        halves = split(source.joint, source.program.roles, strategy)
        draws = np.random.default_rng(7)
        args = [some(halves.graph.values[v], draws) for v, _ in halves.graph.inputs]
        verify_meaning(source.joint, halves.graph, halves.halves, *args)


def test_a_product_that_runs_again_in_a_loop_means_the_same_but_for_rounding():
    """XLA compiles a loop's body as one, and another way where the product stands in the backward.

    How it rounds differs from machine to machine. In 64 bits no rounding hides a wrong number.
    """
    program = named("checkpointed_scan_body")
    with jax.enable_x64(True):
        args = [jnp.asarray(arg, jnp.float64) for arg in program.args]
        source = aot.function(program.function, argnums=program.argnums).trace(*args)
        for strategy in STRATEGIES:
            halves = split(source.joint, source.program.roles, strategy)
            draws = np.random.default_rng(7)
            args = [some(halves.graph.values[v], draws) for v, _ in halves.graph.inputs]
            primals = len(halves.graph.role_inputs(Role.PRIMAL))
            with jax.disable_jit():
                wanted = runtime.evaluate(source.joint, *args)
                outputs, gradients = run(halves.halves, halves.graph, args[:primals], args[primals:])
            for got, want in zip((*outputs, *gradients), wanted, strict=True):
                assert got.dtype == np.float64
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-13 * np.max(np.abs(want)))


def test_halves_for_xla_cpu_mean_the_same_but_for_rounding(traced):
    """A call is compiled as one op, hence the rounding."""
    source = traced("two_layers")
    halves = split(source.joint, source.program.roles, nothing_saved)
    draws = np.random.default_rng(7)
    args = [some(halves.graph.values[v], draws) for v, _ in halves.graph.inputs]
    outputs, gradients = run(halves.on(CPU).halves, halves.graph, args[:-1], args[-1:])
    for got, want in zip([*outputs, *gradients], runtime.evaluate(source.joint, *args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def nothing_saved(graph):
    return Plan.of(graph, [])


def equations(closed):
    return jaxprs.opened(closed)[0].eqns


def within(closed):
    """The equations in the bodies of a jaxpr's scans."""
    scans = [eqn for eqn in equations(closed) if eqn.primitive.name == "scan"]
    return [eqn for scan in scans for eqn in jaxprs.scan_layout(scan).body.eqns]


def test_a_cotangent_goes_on_unheld_when_recomputation_waits_for_it(traced):
    """Only what starts the recomputation waits, each value behind a barrier of its own."""
    source = traced("two_layers")
    backward = split(source.joint, source.program.roles, nothing_saved, backend=PORTABLE).halves.backward
    barriers = [eqn for eqn in equations(backward) if eqn.primitive.name == "optimization_barrier"]
    read = {v for eqn in equations(backward) for v in eqn.invars if not isinstance(v, jaxprs.Literal)}
    assert len(barriers) > 1
    for held, cotangent in (eqn.outvars for eqn in barriers):
        assert held in read
        assert cotangent not in read


# ------------------------------------------------------------------------------------ where an op comes from


def scoped(x, weight):
    with jax.named_scope("wave"):
        hidden = jnp.sin(x @ weight)  # the line of the sine
    return jnp.sum(hidden * hidden)


def test_a_recomputed_op_keeps_the_users_scope_and_line():
    square = np.ones((4, 4), np.float32)
    backward = aot.function(scoped).trace(square, square).partition("min_cut").backward
    (sine,) = [eqn for eqn in equations(backward) if eqn.primitive.name == "sin"]
    assert user_source.scope_of(sine) == "jvp(wave)"
    line = scoped.__code__.co_firstlineno + 2
    assert user_source.source_of(sine) == f"{__file__}:{line} (scoped)"


def scoped_step(h, row):
    with jax.named_scope("wave"):
        return jnp.sin(h * row) ** 2, None


def test_a_recomputed_op_of_a_loop_keeps_the_users_scope_and_line():
    table = np.ones((4, 3), np.float32)
    function = aot.function(lambda x, rows: jnp.sum(lax.scan(scoped_step, x, rows)[0]))
    cut = function.trace(np.ones(3, np.float32), table).partition("min_cut")
    assert [s.op for s in cut.plan.saved if s.copies == 4] == ["mul"]
    recomputed = [eqn for eqn in within(cut.backward) if eqn.primitive.name == "sin"]
    assert recomputed
    line = scoped_step.__code__.co_firstlineno + 2
    for eqn in recomputed:
        assert "wave" in user_source.scope_of(eqn)
        assert user_source.source_of(eqn) == f"{__file__}:{line} (scoped_step)"


# ------------------------------------------------------------------------------------ the shape of the halves


def test_the_forward_hands_over_what_the_plan_saves_and_the_backward_reads_nothing_else(traced):
    cut = traced("two_layers").partition("save_all")
    forward, backward = jaxprs.opened(cut.forward)[0], jaxprs.opened(cut.backward)[0]
    saved = [r for r in cut.residuals if r.kind == "saved"]
    assert len(forward.outvars) == 1 + len(cut.plan.saved) == 1 + len(saved)
    assert [v.aval.shape for v in forward.outvars[1:]] == [
        (*[s.copies] * (s.copies != 1), *s.shape) for s in cut.plan.saved
    ]
    read = {v for eqn in backward.eqns for v in eqn.invars if not isinstance(v, jaxprs.Literal)}
    assert set(backward.invars[: len(cut.residuals)]) <= read


def test_an_output_that_the_backward_reads_is_not_handed_over_twice():
    cut = aot.function(lambda x: jnp.exp(x)).trace(np.float32(1)).partition("save_all")
    assert [r.kind for r in cut.residuals] == ["output"]
    assert len(jaxprs.opened(cut.forward)[0].outvars) == 1


def test_what_the_backward_does_not_read_leaves_no_stack_in_the_forward(traced):
    """JAX's own forward scan stacks seven residuals here."""
    cut = traced("nested_scans").partition("min_cut")
    scans = [eqn for eqn in equations(cut.forward) if eqn.primitive.name == "scan"]
    assert len(scans) == 1
    stacked = len(scans[0].outvars) - jaxprs.scan_layout(scans[0]).num_carry
    looped = [s for s in cut.plan.saved if s.copies != 1]
    assert stacked <= len(looped) + 1  # and the ys that the user sums


def test_half_precision_is_rounded_where_it_is_made_for_both_sides(traced):
    cut = traced("bfloat16_weights").partition("min_cut")
    assert cut.plan.recomputed
    rounded = [eqn for eqn in equations(cut.forward) if eqn.primitive.name == "reduce_precision"]
    half = [s for s in cut.plan.saved if s.dtype == "bfloat16" and s.op == "dot_general"]
    assert len(rounded) >= len(half) > 0


def test_a_graph_that_was_read_from_text_cannot_be_written():
    graph = parse(
        """
        primal %0:float32[8]
        cotangent %1:float32[8]
        %2:float32[8] = sin %0
        backward:
        %3:float32[8] = mul %1 %2
        gradient %3"""
    )
    plan = Plan.of(graph, [2])
    with pytest.raises(PlanError) as refused:
        emit(graph, schedule(Problem.of(graph), plan))
    assert str(refused.value) == (
        "The graph was read from text, so it has no equations that halves could be written of.\n"
        "Trace a function; of text, plans are made by min_cut and Front."
    )
