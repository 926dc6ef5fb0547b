"""The largest size of an axis: near the truth, in few compilations, and held by the step that was compiled.

Rows run together here; `test_largest_in_blocks` is about larger sizes with rows in blocks.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.planning import weighing
from jointcut.aot.planning.budgets import searches
from jointcut.aot.planning.size_search import MOST_COMPILED
from jointcut.aot.run.runnable import Runnable
from jointcut.aot.trace.shapes import concrete
from jointcut.partition.errors import BudgetError, CallError, PlanError


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def perceptron(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def attention(layers, x):
    for q, k, v, o in layers:
        shares = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ q, x @ k) / 6.0)
        x = x + jnp.einsum("bts,bsd->btd", shares, x @ v) @ o
    return jnp.mean(x**2)


def scanned(ws, x):
    def layer(h, w):
        return h + jnp.tanh(jnp.sin(h) @ w), None

    return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)


ROWS = aot.shapes("b, 32", "float32")
PERCEPTRON = perceptron, ([struct(32, 32)] * 4, ROWS)
ATTENTION = attention, ([[struct(32, 32)] * 4] * 2, aot.shapes("b, 16, 32", "float32"))
SCANNED = scanned, (struct(16, 32, 32), ROWS)
PROGRAMS = {"perceptron": PERCEPTRON, "attention": ATTENTION, "scanned": SCANNED}


largest = partial(aot.largest, tiles=False)


@pytest.fixture
def compiled(monkeypatch):
    """The steps that are compiled."""
    steps, compile_one = [], Runnable.compile
    monkeypatch.setattr(Runnable, "compile", lambda self, count: (steps.append(self), compile_one(self, count))[1])
    return steps


def of_size(args, size, **sizes):
    return jax.tree.map(lambda leaf: concrete(leaf, {"b": size, **sizes}), args)


def holds(function, args, size, budget):
    try:
        step = aot.function(function, budget=budget, tiles=False).trace(*of_size(args, size)).partition().compile()
    except BudgetError:
        return False
    assert step.peak_bytes <= budget
    return True


def truth(function, args, budget):
    """The largest size that holds, by bisection: each size is searched for and compiled."""
    low, high = 1, 2
    while holds(function, args, high, budget):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(function, args, middle, budget) else (low, middle)
    return low


@pytest.mark.parametrize("budget", [250_000, 2_000_000])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("weighs", [True, False])
def test_the_size_is_the_largest_within_two_per_cent_after_four_compilations(
    monkeypatch, compiled, name, budget, weighs
):
    function, args = PROGRAMS[name]
    most = truth(function, args, budget)
    searches.forget()
    compiled.clear()
    if not weighs:
        monkeypatch.setattr(weighing, "can_weigh", lambda goal=None: False)
    found = largest(function, "b", budget, *args)
    assert 1 <= len(compiled) <= (1 if weighs else MOST_COMPILED)
    assert min(0.98 * most, most - 1) <= found.size <= most
    assert found.peak_bytes == found.cut.compile().peak_bytes <= budget
    assert [row.size for row in found.tried if row.fits and row.how == "compiled"][-1] == found.size


def test_the_step_that_is_found_computes_the_gradient_of_the_function():
    function, args = SCANNED
    found = largest(function, "b", "400kB", *args)
    keys = jax.random.split(jax.random.key(0), 2)
    given = [jax.random.normal(k, leaf.shape) / 4 for k, leaf in zip(keys, of_size(args, found.size), strict=True)]
    got, want = found.cut.compile().value_and_grad(*given), jax.value_and_grad(function)(*given)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5 * max(1.0, float(jnp.max(jnp.abs(other)))))


def test_the_plan_that_is_found_is_the_plan_of_the_function_at_that_size(compiled):
    function, args = PERCEPTRON
    found = largest(function, "b", "1MB", *args)
    compiled.clear()
    cut = aot.function(function, budget="1MB").trace(*of_size(args, found.size)).partition()
    assert not compiled, "the search was made"
    assert cut.plan.values == found.plan.values


def test_a_budget_that_is_roomy_for_a_size_and_too_small_for_the_next_has_the_fastest_plan():
    weights, batch = [struct(8, 8)] * 8, aot.shapes("b*1024, 8", "float32")
    found = largest(perceptron, "b", "500kB", weights, batch)
    fastest = aot.function(perceptron, budget="500kB").trace(weights, concrete(batch, {"b": found.size})).partition()
    assert not holds(perceptron, (weights, batch), found.size + 1, 500_000)
    assert found.plan.seconds == fastest.plan.seconds


def test_sizes_keep_the_constraints_and_other_sizes_their_numbers():
    args = PERCEPTRON[1][0], aot.shapes("b, t, 32", "float32")
    free = largest(perceptron, "b", "1MB", *args, sizes={"t": 4})
    bound = largest(perceptron, "b", "1MB", *args, sizes={"t": 4}, constraints=("mod(b, 8) == 0",))
    most = largest(perceptron, "b", "1MB", *args, sizes={"t": 4}, constraints=("b <= 40",))
    assert free.cut.traced.bound.leaves[-1].shape == (free.size, 4, 32)
    assert {row.size % 8 for row in bound.tried} == {0}
    assert abs(bound.size - free.size) <= 8 + 0.02 * free.size
    assert most.size == 40


def test_allowed_sizes_may_be_far_apart():
    function, args = PERCEPTRON
    free, far = (largest(function, "b", "6MB", *args, constraints=c) for c in ((), ("mod(b, 3000) == 0",)))
    assert {row.size % 3000 for row in far.tried} == {0}
    assert far.size > 3000 and -0.02 * free.size <= free.size - far.size <= 3000 + 0.02 * free.size
    assert not holds(function, args, far.size + 3000, 6_000_000)


def test_options_are_of_the_function():
    function, args = PERCEPTRON
    both = largest(function, "b", "1MB", *args, argnums=(0, 1))
    ours = aot.largest(aot.function(function, budget="1MB", argnums=(0, 1), tiles=False), "b", None, *args)
    assert both == ours and both.cut.traced.options.argnums == (0, 1)
    alone = largest(function, "b", "1MB", *args)
    assert both.step_seconds / both.size > alone.step_seconds / alone.size, "the gradient of the batch takes time"


def test_a_result_is_a_record_and_a_table():
    function, args = SCANNED
    found = largest(function, "b", "1MB", *args)
    assert aot.Largest.from_json(found.to_json()) == found
    first, header, *rows = str(found).splitlines()
    assert first == f"scanned: b={found.size:,} is the largest size within 1,000,000 bytes"
    assert header.split() == ["b", "peak", "of", "budget", "step", "step", "/", "b", "plan"]
    assert [int(row.split()[0].replace(",", "")) for row in rows] == sorted(row.size for row in found.tried)
    (marked,) = (row for row in rows if "  compiled       largest  " in row)
    assert marked.split()[0] == f"{found.size:,}"
    for row in found.tried:
        assert row.fits == (row.peak_bytes <= 1_000_000)
        assert row.seconds_per_example * row.size == pytest.approx(row.step_seconds)
    assert {row.how for row in found.tried} == {"predicted", "weighed", "compiled"}


# ------------------------------------------------------------------------------------------------------- refusals


def refused(error, *args, **options):
    with pytest.raises(error) as caught:
        aot.largest(*args, **options)
    return str(caught.value)


def test_a_budget_that_not_even_one_holds_is_refused_with_what_is_alive():
    function, args = PERCEPTRON
    least = aot.function(function).trace(*of_size(args, 1)).partition(budget=0.0).compile()
    searches.forget()
    text = refused(BudgetError, function, "b", "20kB", *args)
    first, second, *alive, last = text.splitlines()
    assert first == "budget of 20,000 bytes cannot be met, not even with b=1."
    assert second.startswith(f"The smallest peak found is {least.peak_bytes:,} bytes (")
    assert second.endswith(
        f"plans tried): {least.peak_bytes - least.activation_bytes:,} are arguments and results, "
        f"{least.activation_bytes:,} temporaries."
    )
    assert alive[0] == "Alive there, by the model:" and len(alive) > 1
    assert last == "Give at least that much."
    with pytest.raises(BudgetError) as caught:
        aot.largest(function, "b", "20kB", *args)
    assert caught.value.least_bytes == least.peak_bytes


FREE = aot.shapes("b, t", "float32")


@pytest.mark.parametrize(
    ("error", "axis", "args", "options", "text"),
    [
        (CallError, "batch", (FREE,), {}, "axis is 'batch', which stands in no argument's shape.\n"
         "Known names: 'b', 't'."),
        (CallError, "b", (struct(2, 3),), {}, "total has no argument with a size that is a name, such as 'b'.\n"
         "Give an argument one: aot.shapes('b, 128', jnp.float32)."),
        (CallError, "b", (FREE,), {}, "sizes lacks 't', which args[0]: float32[b,t] has.\n"
         "Give a number for each name: the plan is made for these, the programs run with any."),
        (CallError, "b", (FREE,), {"sizes": {"b": 4, "t": 2}}, "sizes names 'b', whose size is looked for.\n"
         "Leave it out."),
        (CallError, "b", (FREE,), {"sizes": {"t": 2}, "constraints": ("b <= 0",)},
         "constraints allow no size of 'b' from 1 to 65,536.\n"
         "Give conditions that a size meets, such as 'mod(b, 8) == 0'."),
        (CallError, "b", (FREE,), {"sizes": {"t": 2}, "constraints": ("s >= 2",)},
         "constraints hold 's >= 2', but 's' stands in no argument's shape.\nKnown names: 'b', 't'."),
        (CallError, "b", (FREE,), {"sizes": {"t": 2}, "constraints": ("b is even",)},
         "constraints cannot be taken: Constraint parsing error: must contain one of '==' or '>=' or '<='\n"
         "Write them as jax.export does: 'b >= 2', 't <= 4*b', 'mod(t, 8) == 0'."),
        (PlanError, "b", (FREE,), {"strategy": "min_cut"}, "strategy and budget are given together.\n"
         "Give one: each of them decides the plan."),
    ],
)  # fmt: skip
def test_what_has_no_largest_size_is_refused(error, axis, args, options, text):
    def total(x):
        return jnp.sum(jnp.sin(x))

    assert refused(error, total, axis, "1MB", *args, **options) == text


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (0.5, "budget of 50% of plain JAX's activations grows with the size, and no size is the largest.\n"
         "Give bytes, such as '24GiB', or a target, whose memory is taken."),
        (None, "budget='device' asks what the device has free, and cpu does not say.\n"
         "Give a number of bytes, such as '8GiB'."),
    ],
)  # fmt: skip
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget, text):
    assert refused(BudgetError, PERCEPTRON[0], "b", budget, *PERCEPTRON[1]) == text


def test_the_options_of_an_aot_function_are_its_own():
    assert refused(CallError, aot.function(perceptron), "b", "1MB", *PERCEPTRON[1], argnums=1) == (
        "perceptron is an aot.function, which has its own options, and argnums is given.\n"
        "Leave it out, or give the plain function."
    )
