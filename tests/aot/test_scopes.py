"""`aot.budget`: no plan keeps more of a part than it says, and what cannot be kept is refused with the least."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.options.limits import Limit
from jointcut.aot.options.policies import read_policy
from jointcut.partition.errors import BudgetError, PlanError, PolicyError
from jointcut.partition.lower.memory.replay import handed_bytes
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.prices.allowances import bounds_of
from jointcut.partition.search.mincut import STRATEGIES
from jointcut.wrappers.record import Record
from oracle import assert_same, cotangents, plain_vjp
from programs import CORPUS, EVERY_PROGRAM

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((6, 64, 64)) / 16).astype(np.float32)
X = RNG.standard_normal((32, 64)).astype(np.float32)
STACK, ONE = 6 * X.nbytes, X.nbytes


def step(h, w):
    return jnp.tanh(jnp.tanh(h @ w) @ w) + jnp.sin(h), None


def loss_within(size, start=lambda f, h, w: f(h, w)):
    """A loss of which a part keeps at most so many bytes; `start` calls the part."""

    def part(h, w):
        with aot.budget(size):
            return lax.scan(step, h, w)[0]

    def loss(w, x):
        h = start(part, jnp.tanh(x @ w[0]), w)
        return jnp.sum(jnp.tanh(h @ w[1]) ** 2)

    return loss


def kept(cut):
    """What each part keeps, by the plan's own account."""
    problem, plan = cut.split.problem, cut.plan
    return [problem.kept_bytes(bound, set(plan.values).difference(plan.offloaded)) for bound in problem.bounds]


# ------------------------------------------------------------------------------------------------- what is promised


@pytest.mark.parametrize("strategy", [*STRATEGIES, "budget"])
def test_parts_keep_at_most_their_bytes_and_gradients_stay(strategy):
    how = {"budget": 0.5} if strategy == "budget" else {"strategy": strategy}
    want = jax.grad(loss_within("1GB"))(W, X)
    found = []
    between = (4 * STACK, 3 * STACK) if EVERY_PROGRAM else ()
    for size in (1 << 30, *between, 2 * STACK + ONE, STACK + ONE):
        cut = aot.function(loss_within(size), **how).trace(W, X).partition()
        (bytes_kept,) = kept(cut)
        assert bytes_kept <= size
        found.append(bytes_kept)
        np.testing.assert_allclose(cut.compile().value_and_grad(W, X)[1], want, rtol=1e-4, atol=1e-6)
    assert found[-1] == STACK + ONE and (strategy == "budget" or found == sorted(found, reverse=True))


#: Of this one no step can be traced, only a vjp.
SOME = [p for p in CORPUS if p.name != "integers_to_differentiate"][:: 1 if EVERY_PROGRAM else 9]


@pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)
def test_all_of_a_program_in_half_of_the_bytes_or_a_refusal(program):
    bound = partial(program.function, **program.kwargs)
    with program.precision():
        plain = aot.function(bound, argnums=program.argnums, has_aux=program.has_aux, strategy="min_cut")
        half = max(2, plain.trace(*program.args).partition().plan.bytes_saved // 2)

        def marked(*args):
            with aot.budget(half):
                return bound(*args)

        function = aot.function(marked, has_aux=program.has_aux, strategy="min_cut")
        try:
            out, pullback, *aux = function.vjp(*program.args)
        except BudgetError as error:
            assert re.match(r"aot.budget is .* for what is made under test_scopes.py:\d+, which keeps ", str(error))
            return
        want_out, want_aux, want, _ = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        assert_same(pullback(cotangents(out, 1)), want, program)
        for cut in (function.trace(*program.args).partition(how) for how in ("min_cut", "best")):
            assert all(found <= half for found in kept(cut))


def test_no_plan_of_the_menu_hands_over_more_not_even_in_segments():
    """What is outside of the part is here the product of the first layer and that of the last."""
    traced = aot.function(loss_within(2 * STACK + ONE)).trace(W, X)
    (bound,) = traced.problem.bounds
    assert len(traced.planner.menu) > 3
    for candidate in traced.planner.menu:
        plan = candidate.plan
        around = sum(s.bytes for s in plan.saved if s.value not in bound.values)
        assert handed_bytes(traced.graph, schedule(traced.problem, plan)) - around <= bound.most_bytes


def test_marks_survive_transformations():
    starts = {
        "jit": lambda f, h, w: jax.jit(f)(h, w),
        "checkpoint": lambda f, h, w: jax.checkpoint(f)(h, w),
        "vmap": lambda f, h, w: jax.vmap(f, (0, None))(h[:, None], w)[:, 0],
        "scan": lambda f, h, w: lax.scan(lambda c, _: (f(c, w), None), h, None, length=1)[0],
    }
    for name, start in starts.items():
        traced = aot.function(loss_within(1 << 30, start)).trace(W, X)
        (bound,) = traced.problem.bounds
        assert sum(traced.problem.prices[v] for v in bound.values) >= (ONE if name == "checkpoint" else STACK)
    part = jax.jit(lambda h, w: lax.scan(step, h, w)[0])
    part(X, W)  # traced before it is marked

    def outside(w, x):
        with aot.budget("1GB"):
            return jnp.sum(part(x, w))

    assert len(aot.function(outside).trace(W, X).problem.bounds) == 1
    size = STACK + ONE
    twice = jax.jit(jax.vmap(jax.grad(aot.function(loss_within(size))), (None, 0)))(W, np.stack([X, X / 2]))
    np.testing.assert_allclose(twice[0], jax.grad(loss_within("1GB"))(W, X), rtol=1e-4, atol=1e-6)
    with pytest.raises(BudgetError):
        jax.grad(aot.function(loss_within(STACK)))(W, X)


def test_nested_parts_and_keys_of_policies_all_hold():
    def loss(w, x):
        with aot.budget(4 * ONE):
            h = jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])
            with aot.budget(ONE), jax.named_scope("inner"):
                h = jnp.tanh(jnp.tanh(h @ w[2]) @ w[3])
            h = jnp.tanh(jnp.tanh(h @ w[4]) @ w[5])
        return jnp.sum(h**2)

    want = jax.grad(loss)(W, X)
    free = aot.function(loss, strategy="min_cut").trace(W, X).partition()
    assert kept(free) == [3 * ONE, ONE]
    cut = aot.function(loss, policy={"inner": aot.budget(2), "tanh": aot.budget("20kB")}).trace(W, X).partition()
    assert [found <= most for found, most in zip(kept(cut), (4 * ONE, ONE, 2, 20_000), strict=True)] == [True] * 4
    np.testing.assert_allclose(cut.compile().value_and_grad(W, X)[1], want, rtol=1e-4, atol=1e-6)
    lines = [re.sub(r":\d+", ":LINE", line) for line in cut.plan.remarks if line.startswith("aot.budget")]
    assert lines == [
        "aot.budget of 32.8 kB for what is made under test_scopes.py:LINE: 16.4 kB kept",
        "aot.budget of 8.19 kB for what is made under test_scopes.py:LINE: 0 B kept",
        "aot.budget of 2 B for policy['inner']: 0 B kept",
        "aot.budget of 20.0 kB for policy['tanh']: 16.4 kB kept",
    ]
    assert set(lines) <= {re.sub(r":\d+", ":LINE", line) for line in cut.explain(measure=False).remarks}


def test_what_a_policy_offloads_counts_as_nothing_and_scopes_do_not_see_marks():
    policy = {"scan/*": aot.PREFER_SAVE, "tanh": aot.MUST_OFFLOAD}
    with pytest.raises(PolicyError, match="names no value"):
        aot.function(loss_within(STACK), policy=policy).trace(W, X).partition()
    cut = aot.function(loss_within(STACK + ONE), policy={"tanh": aot.MUST_OFFLOAD}).trace(W, X).partition()
    assert kept(cut)[0] <= STACK + ONE and cut.plan.bytes_offloaded >= 2 * STACK


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_part_that_cannot_keep_so_little_is_refused_with_the_least():
    with pytest.raises(BudgetError) as error:
        aot.function(loss_within("50kB")).grad(W, X)
    text = re.sub(
        r"test_scopes.py:\d+", "test_scopes.py:LINE", re.sub(r"%\d+", "%N", re.sub(r"/\S*/", "", str(error.value)))
    )
    assert text == (
        "aot.budget is 50.0 kB for what is made under test_scopes.py:LINE, which keeps 57.3 kB at the least.\n"
        "Give it more, or less to do: the largest is %N:6xfloat32[32,64] (loop at test_scopes.py:LINE "
        "(loss_within.<locals>.part)), which is saved: a loop is not run twice."
    )
    aot.function(loss_within(STACK + ONE)).grad(W, X)


def test_a_plan_made_elsewhere_that_keeps_more_is_refused():
    traced = aot.function(loss_within("1GB"), strategy="save_all").trace(W, X)
    plan = traced.partition().plan
    with pytest.raises(PlanError) as error:
        aot.function(loss_within(STACK + ONE)).trace(W, X).partition(plan=plan)
    assert re.search(r" is saved by the plan, and may not be: aot.budget of 57.3 kB for what is made", str(error.value))


@pytest.mark.parametrize("size", [-1, 1, True, "12 apples", "3", 2.5, None])
def test_bad_sizes_are_refused_as_those_of_a_budget(size):
    with pytest.raises(BudgetError) as error:
        aot.budget(size)
    with pytest.raises(BudgetError) as same:
        aot.function(step, budget=size if size is not None else [])
    assert str(error.value) == str(same.value).replace("[], of type list", "None, of type NoneType")


def test_shares_and_the_device_are_no_bytes_of_a_part():
    for size, shown in ((0.5, Limit(fraction=0.5)), ("device", Limit(of_device=True))):
        with pytest.raises(BudgetError) as error:
            aot.budget(size)
        assert str(error.value) == (
            f"aot.budget is {shown}, and a part of a program needs a number.\n"
            "Give bytes: an int, or a text such as '300MiB'."
        )
    with pytest.raises(PolicyError, match=r"policy\['nowhere'\] names no value of the forward"):
        aot.function(loss_within("1GB"), policy={"nowhere": aot.budget("1GB")}).trace(W, X).partition()


def test_a_budget_is_a_record_and_changes_nothing_outside():
    assert repr(aot.budget("1kB")) == "aot.budget(1000)" and aot.budget("1kB") == aot.budget(1000)
    assert isinstance(aot.budget("1kB"), Record)
    rules = read_policy({"a": aot.budget("1kB")})
    assert rules == (("a", aot.budget(1000)),)
    size = aot.budget("1kB")
    with size, size:  # one object can be entered again
        assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0
    assert not bounds_of(None, aot.function(lambda x: jnp.sum(jnp.sin(x))).trace(X).graph)
