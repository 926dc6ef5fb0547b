"""Budgets and policies on a tape: the step of what ran is one program of `aot.function`."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from oracle import assert_same, cotangents, plain_vjp
from programs import CORPUS, EVERY_PROGRAM

W = [jax.random.normal(jax.random.key(i), (32, 32)) / 5 for i in range(5)]
X = jax.random.normal(jax.random.key(9), (256, 32))


def net(weights, x, most=1e9):
    h = x
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            h = jnp.tanh(h @ w)
            h = h * jax.nn.sigmoid(h)
        if float(jnp.max(h)) > most:
            break
    return jnp.mean(jnp.where(h > 0, h, 0.1 * h) ** 2)


def step_of(function, number=-1):
    """The cut of the step that a structure was captured as."""
    return list(function.captures)[number].backward.traced.partition()


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.0])
def test_a_step_holds_its_budget_by_the_account_of_xla_and_has_the_gradients_of_jax(budget):
    function = aot.tape(net, budget=budget)
    value, gradients = function.value_and_grad(W, X)
    want, wanted = jax.value_and_grad(lambda w: net_without_breaks(w, X))(W)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert_near(gradients, wanted)
    compiled, plain = step_of(function).compile(), step_of(function).traced.plain_memory
    assert compiled.activation_bytes <= (budget or 0.45) * plain.temp_bytes
    assert_near(function.grad(W, X), wanted)
    assert [(c.hits, c.residual_bytes) for c in function.captures] == [(1, 0)]


def test_bytes_of_the_whole_step_are_held():
    least = aot.tape(net, budget=0.0)
    least.grad(W, X)
    peak = step_of(least).compile().peak_bytes
    function = aot.tape(net, budget=int(1.1 * peak))
    function.grad(W, X)
    assert peak <= step_of(function).compile().peak_bytes <= 1.1 * peak


def test_a_budget_that_nothing_holds_is_refused_as_by_a_function():
    with pytest.raises(aot.BudgetError) as refused:
        aot.tape(net, budget=0.0005).grad(W, X)
    text = str(refused.value)
    assert text.startswith("budget of 0.05% of plain JAX's activations cannot be met.\nThe smallest peak found is ")
    assert re.search(
        r"\nGive at least that much \(\d+% of plain JAX's activations\), a smaller batch, or budget=0\.0 ", text
    )


def net_without_breaks(weights, x):
    h = x
    for w in weights:
        h = jnp.tanh(h @ w)
        h = h * jax.nn.sigmoid(h)
    return jnp.mean(jnp.where(h > 0, h, 0.1 * h) ** 2)


def assert_near(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------- policies


def test_what_must_be_saved_and_computed_again_is_by_its_scope():
    function = aot.tape(net, policy={"layer_1": aot.MUST_SAVE, "layer_3": aot.MUST_RECOMPUTE})
    assert_near(function.grad(W, X), jax.grad(lambda w: net_without_breaks(w, X))(W))
    plan = step_of(function).plan
    scopes = [s.scope for s in plan.saved]
    assert sum("layer_1" in scope for scope in scopes) >= 4
    assert not any("layer_3" in scope for scope in scopes)


def test_a_policy_that_contradicts_a_rule_or_names_nothing_is_refused():
    with pytest.raises(aot.PolicyError, match="names no value of the forward"):
        aot.tape(net, policy={"no_such_layer": aot.MUST_SAVE}).grad(W, X)
    with pytest.raises(aot.PolicyError):
        aot.tape(net, policy=3)


def test_each_op_is_of_its_own_line_and_scope():
    function = aot.tape(net, budget=1.0)
    function.grad(W, X)
    tanhs = [op for op in step_of(function).split.graph.ops if op.name == "tanh"]
    assert len({str(op.payload.source_info.name_stack) for op in tanhs}) == len(W)


# ------------------------------------------------------------------------------------- structures, results


def test_a_structure_is_captured_once_and_another_one_says_why():
    function = aot.tape(net, budget=1.0)
    for weights, most in ((W, 1e9), (W, 1e8), (W[:3], 1e9), (W, -1.0)):
        function.grad(weights, X, most)
    whys = [capture.why for capture in function.captures]
    assert len(whys) == 3 and whys[0] == "the first call"
    assert whys[2].startswith("1 step instead of ")
    assert "tanh" in function.captures[0].text and function.captures[0].jaxpr.eqns


def test_masks_and_other_arrays_without_gradient_are_computed_again_and_not_held():
    function = aot.tape(net, budget=1.0)
    function.grad(W, X)
    held = function.captures[0].backward.types[1]
    assert sorted(a.shape for a in held) == [(), (), (256, 32)]  # two numbers, and the batch


def test_a_pullback_may_be_called_twice_and_released():
    function = aot.tape(lambda w, x: (jnp.sin(x @ w), jnp.sum(w)), policy={"dot_general": aot.MUST_SAVE})
    out, pullback = function.vjp(W[0], X)
    want, pull = jax.vjp(lambda w, x: (jnp.sin(x @ w), jnp.sum(w)), W[0], X)
    assert_near(out, want)
    for scale in (1.0, 2.0):
        cotangent = jax.tree.map(lambda x, scale=scale: scale * jnp.ones_like(x), want)
        assert_near(pullback(cotangent), pull(cotangent))
    pullback.release()
    with pytest.raises(CallError, match="was released"):
        pullback(want)


def test_gradients_are_added_to_references():
    function = aot.tape(net, budget=1.0)
    refs = [jax.new_ref(jnp.ones_like(w)) for w in W]
    value = function.accumulate_into(refs)(W, X)
    wanted = jax.grad(lambda w: net_without_breaks(w, X))(W)
    assert_near([ref[...] for ref in refs], [1 + g for g in wanted])
    np.testing.assert_allclose(value, net(W, X), rtol=1e-5)
    assert "added to references" in str(function.captures[0].sketch.fate)


def test_an_update_is_a_part_of_the_step():
    def update(gradients, state, params):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), jax.tree.map(lambda s: s + 1, state)

    function = aot.tape(net, budget=1.0)
    wanted = jax.grad(lambda w: net_without_breaks(w, X))(W)
    for _ in range(2):
        params, state = [jnp.copy(w) for w in W], [jnp.zeros(()) for _ in W]
        _, params, state = function.value_and_update(params, state, X, update=update)
        assert_near(params, [w - 0.1 * g for w, g in zip(W, wanted, strict=True)])
        assert [float(s) for s in state] == [1.0] * len(W)
    assert len(function.captures) == 1


def test_aux_and_several_arguments_are_as_without_a_budget():
    function = aot.tape(lambda w, x: (jnp.sum(jnp.sin(x @ w)), "aux"), argnums=(0, 1), has_aux=True, budget=1.0)
    (value, aux), gradients = function.value_and_grad(W[0], X)
    assert aux == "aux" and value.shape == ()
    assert_near(gradients, jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)), argnums=(0, 1))(W[0], X))


def test_calls_of_jit_and_of_functions_are_cut_with_the_rest():
    block = jax.jit(lambda h, w: jnp.tanh(h @ w) * jax.nn.gelu(h))
    inner = aot.function(lambda h, w: jnp.sin(h @ w))

    def whole(w, x):
        return jnp.sum(inner(block(block(x, w[0]), w[1]), w[2]) ** 2)

    function = aot.tape(whole, budget=0.9)
    assert_near(function.grad(W, X), jax.grad(whole)(W, X))
    assert step_of(function).plan.recomputed or step_of(function).plan.saved


def test_without_a_gradient_no_program_is_made():
    function = aot.tape(lambda w: jnp.sum(jax.lax.stop_gradient(w)), budget=1.0)
    assert not np.any(function.grad(W[0])) and len(function.captures) == 0


SOME = [program for program in CORPUS if program.name not in ("internal_reference",)]
SOME = SOME if EVERY_PROGRAM else SOME[::9]


@pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)
def test_the_corpus_answers_as_jax(program):
    with program.precision():
        bound = partial(program.function, **program.kwargs)
        taped = aot.tape(bound, has_aux=program.has_aux, policy=jax.checkpoint_policies.everything_saveable)
        out, pullback, *aux = taped.vjp(*program.args)
        want_out, want_aux, want_first, want_second = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        assert_same(pullback(cotangents(out, 1)), want_first, program)
        assert_same(pullback(cotangents(out, 2)), want_second, program)


# ------------------------------------------------------------------------------------------------- inside


def test_inside_a_jit_it_is_a_function_with_that_budget():
    function = aot.tape(net_without_breaks, budget=0.6)
    wanted = jax.grad(net_without_breaks)(W, X)
    assert_near(jax.jit(function.grad)(W, X), wanted)
    assert_near(jax.jit(jax.grad(function))(W, X), wanted)
    assert_near(jax.jit(lambda w: function.vjp(w, X)[1](1.0)[0])(W), wanted)


# ------------------------------------------------------------------------------------------------ refusals


def test_an_effect_that_would_come_twice_is_refused_and_a_print_is_not(capfd):
    @jax.jit
    def told(x):
        jax.debug.print("sum {}", jnp.sum(x))
        return jnp.sin(x)

    @jax.jit
    def called(x):
        y = io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)
        return jnp.sin(x) * y

    aot.tape(lambda w: jnp.sum(told(w)), budget=1.0).grad(W[0])
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum ") == 1
    with pytest.raises(
        CallError,
        match=r"has the effect OrderedIO at .*: by a budget, policy or another option it would come twice\.\nMove",
    ):
        aot.tape(lambda w: jnp.sum(called(w)), budget=1.0).grad(W[0])


@pytest.mark.parametrize("kind", ["on_cotangent", "post_accumulate", "hooked", "saved_arrays"])
def test_hooks_are_refused(kind):
    def loss(w):
        if kind == "hooked":
            return jnp.sum(aot.hooked(jnp.sin, pre_hook=lambda c: c)(w))
        if kind == "saved_arrays":
            with aot.saved_arrays(lambda x: x, lambda x: x):
                return jnp.sum(jnp.sin(w))
        return jnp.sum(jnp.sin(getattr(aot, kind)(w, lambda g: g)))

    with pytest.raises(CallError) as refused:
        aot.tape(loss, budget=1.0).grad(W[0])
    assert str(refused.value).startswith(
        f"{kind} is used in loss, a tape whose ops are one program, by its budget, policy or another option.\n"
        "Use it in an aot.function with these options, or on a tape without."
    )


def test_options_that_need_a_backward_of_their_own_are_refused_beside():
    for name, given in (("check", "nonfinite"), ("roll", True)):
        with pytest.raises(TraceError) as refused:
            aot.tape(net, budget=0.5, **{name: given})
        assert str(refused.value) == (
            f"{name} is given beside budget, with which the tape runs as one program, without {name}.\n"
            "Give one of them."
        )
    with pytest.raises(aot.BudgetError, match=r"no fraction from 0\.0 to 1\.0"):
        aot.tape(net, budget=2.5)


PLANS = {
    "offload within a budget": {"offload": True, "budget": 0.3},
    "one value must wait at the host": {"policy": {"tanh": aot.MUST_OFFLOAD}},
}


def rows(plan):
    """The values of a plan, without their lines."""
    return [re.sub(r" /\S+ \(\w+\):| :", ":", line) for line in plan.splitlines() if line.startswith(" ")]


@pytest.mark.parametrize("given", PLANS.values(), ids=PLANS)
def test_a_plan_of_a_tape_is_that_of_the_function_with_the_same_options(given):
    taped, function = aot.tape(net_without_breaks, **given), aot.function(net_without_breaks, **given)
    assert_near(taped.grad(W, X), jax.grad(net_without_breaks)(W, X))
    mine, theirs = str(step_of(taped).plan), str(function.trace(W, X).partition().plan)
    assert rows(mine) == rows(theirs), "the same values wait at the same place, for the same reason"
    assert len(taped.captures) == 1


def test_a_strategy_cuts_the_program_of_a_tape():
    taped = aot.tape(net_without_breaks, strategy="save_all")
    assert_near(taped.grad(W, X), jax.grad(net_without_breaks)(W, X))
    assert str(step_of(taped).plan).startswith("save_all: ")


def test_a_target_that_is_not_here_is_refused_before_the_function_runs():
    ran = []
    taped = aot.tape(lambda w: ran.append(w) or jnp.sum(w), target="h100")
    with pytest.raises(aot.TargetError) as refused:
        taped.grad(W[0])
    assert str(refused.value) == (
        "<lambda> is planned for h100, and there is no NVIDIA H100 80GB HBM3 here to run it.\n"
        "Leave the target out, or call aot.function(...).trace: a tape plans what it ran."
    )
    assert not ran


def test_options_that_a_tape_does_not_have_are_refused_by_name():
    with pytest.raises(TraceError) as refused:
        aot.tape(net, donate_argnums=0)
    assert str(refused.value) == (
        "donate_argnums is an option of aot.function, and a tape does not have it.\n"
        "Leave it out, or give it to an aot.function that the function calls."
    )
    with pytest.raises(TraceError) as refused:
        aot.tape(net, budgets=0.5)
    assert str(refused.value) == (
        "aot.tape has no option 'budgets'.\n"
        "Known names: 'argnums', 'budget', 'check', 'has_aux', 'offload', 'policy', 'roll', 'sizes', 'strategy', "
        "'target'. Did you mean 'budget'?"
    )


def test_op_by_op_a_tape_has_no_budget():
    with aot.tape.disabled():
        function = aot.tape(net, budget=0.01)
        assert_near(function.grad(W, X), jax.grad(lambda w: net_without_breaks(w, X))(W))
