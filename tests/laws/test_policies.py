"""What a policy demands holds in every plan, at every budget, and changes no gradient."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

from benchmarks.policies import broken, musts
from jointcut import aot
from jointcut.partition import Plan, Problem
from jointcut.partition.errors import PolicyError
from jointcut.partition.prices.constraints import constraints_of
from jointcut.partition.program.jax import runtime
from jointcut.partition.search.best import RATES, STRATEGIES
from jointcut.partition.search.budget import Planner
from oracle import assert_same
from programs import CORPUS, EVERY_PROGRAM, named

POLICIES = jax.checkpoint_policies
SOME = [program for program in CORPUS[:: 1 if EVERY_PROGRAM else 3] if "grad" not in program.lacks]


def under_policy(program):
    """The problem of a program under such a policy."""
    with program.precision():
        traced = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux).trace(
            *program.args, **program.kwargs
        )
    free = traced.problem
    constraints = constraints_of(musts(free.graph, free.sides), free.graph)
    return Problem.of(free.graph, RATES["cpu"], constraints, free.backend)


@pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)
def test_a_must_holds_in_every_plan(program):
    """At every budget the plan is one of the planner's, at no budget one of the strategies'."""
    problem = under_policy(program)
    planner = Planner(problem)
    plans = [*planner.plans(), *(strategy(problem) for strategy in STRATEGIES.values())]
    assert plans
    for plan in plans:
        assert broken(problem, plan) == []
    times = [planner.fastest(most).step_seconds for most in sorted({c.peak_bytes for c in planner.menu})]
    assert times == sorted(times, reverse=True), "more budget is slower"


# ---------------------------------------------------------------------------------------------- wherever it stands


def marked(h):
    """What is marked is 1 for all numbers above 6, which nothing else here is."""
    with jax.named_scope("part"):
        y = checkpoint_name(lax.erf(h), "here")
    return h + jnp.sin(y) * y


def ruled(h):
    """The forward rule calls the function itself, which then stays closed."""
    mark = jax.custom_vjp(lambda h: checkpoint_name(lax.erf(h), "here"))
    mark.defvjp(lambda h: (mark(h),) * 2, lambda y, ct: (ct * y,))
    with jax.named_scope("part"):
        return h + jnp.sin(mark(h))


def looped_by(step):
    return lambda h: lax.scan(lambda h, _: (step(h), None), h, None, length=3)[0]


def counted_loop(h):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, marked(c[1])), (0, h))[1]


BY_NAME = POLICIES.save_only_these_names("here")
PLACES = {
    "jit": jax.jit(jax.jit(marked)),
    "checkpoint": jax.checkpoint(marked),
    "checkpoint by name": jax.checkpoint(marked, policy=BY_NAME),
    "scan": looped_by(marked),
    "scan in scan": looped_by(looped_by(marked)),
    "checkpoint in scan": looped_by(jax.checkpoint(marked)),
    "cond": lambda h: lax.cond(h[0] > 0, marked, jnp.sin, h),
    "cond in scan": looped_by(lambda h: lax.cond(h[0] > 0, marked, jnp.sin, h)),
    "vmap of jit": jax.vmap(jax.jit(marked)),
    "vmap of cond": jax.vmap(lambda h: lax.cond(h > 0, marked, jnp.sin, h)),
    "custom_vjp": ruled,
    "while": counted_loop,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_must_holds_or_is_refused_wherever_its_value_stands(place):
    x, refused = jnp.linspace(6.0, 7.0, 8), []
    keys = ["here", "part", "erf"] if EVERY_PROGRAM else [["here", "part", "erf"][len(place) % 3]]
    for key in keys:
        for demand in (aot.MUST_SAVE, aot.MUST_RECOMPUTE, aot.MUST_OFFLOAD):
            function = aot.function(lambda x: jnp.sum(jnp.exp(-PLACES[place](x))), policy={key: demand})
            try:
                made = function.trace(x).partition()
            except PolicyError:
                refused.append(demand)
                continue
            _, *kept = jax.jit(lambda *flat, made=made: runtime.evaluate(made.forward, *flat))(*made.traced.consts, x)
            is_kept = any(r.dtype == np.float32 and r.size >= x.size and bool((r == 1).all()) for r in kept)
            is_away = any(s.memory != "device" for s in made.plan.saved)
            assert is_kept is (demand is not aot.MUST_RECOMPUTE), (key, demand)
            assert ("erf" in str(made.backward)) is not is_kept, (key, demand)
            assert is_away is (demand is aot.MUST_OFFLOAD), (key, demand)
    assert aot.MUST_RECOMPUTE not in refused or place == "while"


# ----------------------------------------------------------------------------------------------- what it means


W = np.linspace(-0.5, 0.5, 3 * 16).reshape(3, 4, 4).astype(np.float32)
X = np.linspace(-1, 1, 8).reshape(2, 4).astype(np.float32)


def looped(w, x):
    def step(h, w):
        with jax.named_scope("mlp"):
            h = checkpoint_name(jnp.tanh(h @ w), "hidden")
        return checkpoint_name(h + jnp.sin(h), "stream"), None

    with jax.named_scope("stack"):
        return jnp.sum(lax.scan(step, x, w)[0] ** 2)


def branched(w, x):
    y = lax.cond(x[0, 0] < 0, lambda x: checkpoint_name(jnp.tanh(x), "inner") ** 2, jnp.sin, x @ w[0])
    return jnp.sum(jnp.exp(y))


def unrolled(w, x):
    for row in w:
        with jax.named_scope("mlp"):
            x = x + checkpoint_name(jnp.tanh(x @ row), "hidden")
    return jnp.sum(x**2)


GRADIENTS = [
    (looped, {"hidden": aot.MUST_SAVE}),
    (looped, {"stack/mlp": aot.MUST_RECOMPUTE}),
    (looped, {"hidden": aot.PREFER_RECOMPUTE, "cos": aot.PREFER_SAVE}),
    (looped, POLICIES.save_only_these_names("hidden")),
    (branched, {"inner": aot.MUST_SAVE}),
    (branched, {"inner": aot.MUST_RECOMPUTE, "dot_general": aot.MUST_RECOMPUTE}),
    (unrolled, POLICIES.nothing_saveable),
    (unrolled, {"hidden": aot.MUST_SAVE, "dot_general": aot.MUST_RECOMPUTE}),
]


@pytest.mark.parametrize(
    ("function", "policy", "budget"),
    [*((*case, None) for case in GRADIENTS), *((*case, 0.0) for case in GRADIENTS[:3])],
)
def test_gradients_are_those_of_jax(function, policy, budget):
    got = aot.function(function, argnums=(0, 1), policy=policy, budget=budget).value_and_grad(W, X)
    want = jax.value_and_grad(function, argnums=(0, 1))(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), got, want)


def test_regions_of_the_user_keep_their_meaning_beside_a_policy():
    program = named("checkpoint_by_name")
    function = aot.function(program.function, policy={"kept": aot.MUST_SAVE, "tanh": aot.PREFER_RECOMPUTE})
    out, pullback = function.vjp(*program.args)
    want_out, want = jax.vjp(program.function, *program.args)
    assert_same((out, pullback(jnp.ones_like(out))), (want_out, want(jnp.ones_like(out))), program)


def residuals_of_jax(function, policy):
    """The types of what `jax.checkpoint` saves, without arguments and constants."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        print_saved_residuals(jax.checkpoint(function, policy=policy), W, X)
    lines = [line for line in said.getvalue().splitlines() if " from " not in line.split("]", 1)[1][:6]]
    return Counter(re.match(r"\w+\[[\d,]*\]", line).group() for line in lines)


ASKED = {
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_saveable,
    "dots without batch dims": POLICIES.dots_with_no_batch_dims_saveable,
    "one name": POLICIES.save_only_these_names("hidden"),
    "other names": POLICIES.save_any_names_but_these("hidden"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_policy_of_jax_saves_what_jax_saves(name):
    plan = aot.function(unrolled, argnums=(0, 1), policy=ASKED[name]).trace(W, X).partition("min_cut").plan
    ours = Counter(f"{s.dtype.replace('float', 'f')}[{','.join(map(str, s.shape))}]" for s in plan.saved)
    assert ours == residuals_of_jax(unrolled, ASKED[name])


def test_an_array_and_its_name_are_saved_once():
    """JAX saves the product as well, for the derivative of `tanh`, which reads the array without its name."""
    policy = POLICIES.save_from_both_policies(POLICIES.dots_saveable, POLICIES.save_only_these_names("hidden"))
    plan = aot.function(unrolled, argnums=(0, 1), policy=policy).trace(W, X).partition("min_cut").plan
    assert [s.op for s in plan.saved] == ["name"] * 3
    assert residuals_of_jax(unrolled, policy).total() == 6


# ----------------------------------------------------------------------------------------------- in JAX's own words


def types_of(saved):
    return Counter(f"{s.dtype.replace('float', 'f')}[{','.join(map(str, s.shape))}]" for s in saved)


def layered(w, x):
    for row in w:
        with jax.named_scope("mlp"):
            x = jnp.sin(checkpoint_name(x @ row, "hidden"))
    return jnp.sum(x**2)


@pytest.mark.parametrize("function", [unrolled, layered])
def test_a_plan_as_a_policy_of_jax_saves_the_same(function):
    cut = aot.function(function, argnums=(0, 1)).trace(W, X).partition("min_cut")
    policy = cut.plan.to_policy()
    assert policy.is_exact
    assert residuals_of_jax(function, policy) == types_of(cut.plan.saved)
    pasted = {}
    exec(str(policy).replace("f = jax.checkpoint(f, policy=policy)", ""), pasted)
    assert residuals_of_jax(function, pasted["policy"]) == residuals_of_jax(function, policy)


def test_a_policy_of_jax_names_what_has_a_name_unless_the_derivative_reads_it_without():
    traced = {f: aot.function(f, argnums=(0, 1)).trace(W, X) for f in (unrolled, layered)}
    of = {f: trace.partition("min_cut").plan.to_policy() for f, trace in traced.items()}
    assert (of[unrolled].names, of[unrolled].primitives) == ((), ("tanh",))
    assert (of[layered].names, of[layered].primitives) == (("hidden",), ())


def test_a_policy_of_jax_goes_on_the_body_of_a_loop():
    policy = aot.function(looped).trace(W, X).partition("min_cut").plan.to_policy()
    assert policy.primitives == ("tanh",) and len(policy.loops) == 1
    assert policy.bytes_missing == policy.bytes_extra == 32  # outside of the loop JAX keeps what it keeps
    assert "# around the body of the loop at " in str(policy) and "prevent_cse=False" in str(policy)


def test_a_policy_of_jax_says_what_it_cannot_say():
    def similar(w, x):
        return jnp.sum(jnp.exp(jnp.sin(x @ w[0]) @ w[1]) * jnp.cos(x @ w[0]))

    graph = aot.function(similar).trace(W, X).graph
    first, _ = (op.outputs[0] for op in graph.ops if op.name == "dot_general" and op.origin.value == "forward")
    policy = Plan.of(graph, [first], dropped=()).to_policy()
    assert [row.bytes for row in policy.missing + policy.extra] == [32]
    assert not policy.is_exact and str(policy).startswith("# ")
