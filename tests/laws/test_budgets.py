"""Whatever the budget, a function means the same, draws the same, does all once, and XLA's account keeps to it."""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from corpus.draws import masked_in_nested_scans, masked_in_scan, masked_twice
from jointcut import aot
from jointcut.partition.errors import BudgetError
from jointcut.partition.prices.cost import Roofline
from larger import larger
from oracle import assert_same, cotangents, loss, plain, plain_vjp, value_and_grad
from programs import EVERY_PROGRAM, named

ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
SMALL = [
    "auxiliary_output", "checkpointed_scan_body", "cond_in_scan", "convolutions", "dropout_in_nested_scans",
    "internal_reference", "nested_scans",
]  # fmt: skip
LARGE = ["elman", "checkpointed_scan_body", "unrolled_layers"]
PROGRAMS = [*map(named, SMALL), *map(larger, LARGE)]
IDS = [*SMALL, *(f"large {name}" for name in LARGE)]
BUDGETS = ["the least", "half", "midway"]


def function_of(program, budget=None):
    options = {"argnums": program.argnums, "has_aux": program.has_aux, "budget": budget, "cost": ROOFLINE}
    return aot.function(program.function, **options)


@cache
def traced(program):
    with program.precision():
        return function_of(program).trace(*program.args, **program.kwargs)


@cache
def midway(program):
    """Bytes between the least that is found and what the default plan takes."""
    least, default = traced(program).partition(budget=0.0).compile(), traced(program).partition().compile()
    return (least.peak_bytes + max(default.peak_bytes, least.peak_bytes)) // 2


def budget_of(program, name):
    return {"the least": lambda: 0.0, "half": lambda: 0.5, "midway": lambda: midway(program)}[name]()


def met(budget, run):
    """What `run` answers for a budget, or, where that is refused, for the smallest peak that the error names."""
    try:
        return budget, run(budget)
    except BudgetError as error:
        named_peak = re.search(r"smallest peak found is ([\d,]+) bytes", str(error))
        assert named_peak, str(error)
        peak = int(named_peak[1].replace(",", ""))
        assert isinstance(budget, float) or peak > budget
        return peak, run(peak)


# ------------------------------------------------------------------------------------ the figures


#: Each budget for the large programs, and one in turn for a small one; all with JOINTCUT_EVERY_PROGRAM.
WITHIN = [
    pytest.param(program, name, id=f"{IDS[n]}-{name}")
    for n, program in enumerate(PROGRAMS)
    for k, name in enumerate(BUDGETS)
    if EVERY_PROGRAM or n >= len(SMALL) or n % 3 == k
]


@pytest.mark.parametrize(("program", "name"), WITHIN)
def test_xla_s_account_is_within_the_budget(program, name):
    """A fraction is of what plain JAX's temporaries take, a number of bytes of the whole step."""
    with program.precision():
        stage = traced(program)
        budget, cut = met(budget_of(program, name), lambda budget: stage.partition(budget=budget))
        made = cut.compile()
        if isinstance(budget, float):
            least = min(a.activation_bytes for a in made.trail)
            assert made.activation_bytes <= (budget * stage.plain_memory.temp_bytes if budget else least)
        else:
            assert made.peak_bytes <= budget
        assert made.executables == 1
        assert (made.peak_bytes, made.activation_bytes) == (made.memory.step.peak_bytes, made.memory.step.temp_bytes)
        assert sum(not a.weighed for a in made.trail) <= 2  # the default plan, and the one that holds
        chosen = [a for a in made.trail if a.promised_bytes == cut.plan.peak_bytes and a.strategy == cut.plan.strategy]
        assert [(a.peak_bytes, a.activation_bytes, a.fits) for a in chosen][-1:] == [
            (made.peak_bytes, made.activation_bytes, True)
        ]
        assert_same(made.value_and_grad(*program.args, **program.kwargs), plain(program, value_and_grad), program)


@pytest.mark.parametrize("program", PROGRAMS if EVERY_PROGRAM else PROGRAMS[1::2], ids=lambda program: program.name)
def test_half_is_refused_only_where_the_least_takes_more(program):
    with program.precision():
        stage = traced(program)
        half = stage.plain_memory.temp_bytes / 2
        least = stage.partition(budget=0.0).compile().activation_bytes
        try:
            made = stage.partition(budget=0.5).compile()
        except BudgetError:
            assert least > half
        else:
            assert made.activation_bytes <= half


# ------------------------------------------------------------------------------------ the results

#: `value_and_grad` within each budget is compared above, where XLA's account of it is read.
TURNS = [
    ("auxiliary_output", "jit of grad", "the least"),
    ("auxiliary_output", "vjp", "half"),
    ("checkpointed_scan_body", "jit of grad", "midway"),
    ("checkpointed_scan_body", "vjp", "the least"),
    ("cond_in_scan", "jit of grad", "midway"),
    ("convolutions", "vjp", "midway"),
    ("dropout_in_nested_scans", "jit of grad", "the least"),
    ("internal_reference", "jit of grad", "midway"),
    ("internal_reference", "vjp", "half"),
    ("nested_scans", "vjp", "the least"),
    ("large elman", "jit of grad", "half"),
    ("large checkpointed_scan_body", "vjp", "midway"),
]


@pytest.mark.parametrize(("program", "way", "name"), TURNS)
def test_values_and_gradients_are_those_of_jax(program, way, name):
    program = PROGRAMS[IDS.index(program)]
    with program.precision():
        met(budget_of(program, name), partial(RUN[way], program))


def slope(program, function):
    return jax.grad(loss(program, function), argnums=program.argnums)


def run_jit_of_grad(program, budget):
    got = jax.jit(slope(program, function_of(program, budget)))(*program.args)
    assert_same(got, plain(program, slope), program)


def run_vjp(program, budget):
    bound = partial(program.function, **program.kwargs)
    function = aot.function(bound, has_aux=program.has_aux, budget=budget, cost=ROOFLINE)
    out, pullback, *aux = function.vjp(*program.args)
    want_out, want_aux, want_first, want_second = plain_vjp(program)
    assert_same((out, aux), (want_out, want_aux), program)
    assert_same(pullback(cotangents(out, 1)), want_first, program)
    assert_same(pullback(cotangents(out, 2)), want_second, program)


RUN = {"jit of grad": run_jit_of_grad, "vjp": run_vjp}


# ------------------------------------------------------------------------------------ the draws

X = jnp.linspace(0.5, 1.5, 8 * 256).reshape(8, 256)
DRAWS = [(masked_twice, "rbg"), (masked_in_scan, "threefry2x32"), (masked_in_nested_scans, "threefry2x32")]


def kept_by(masks):
    """Where no mask dropped anything."""
    return np.all(np.reshape(masks, (-1, *X.shape)), axis=0)


@pytest.mark.parametrize(("function", "generator"), DRAWS, ids=[function.__name__ for function, _ in DRAWS])
def test_masks_are_those_of_jax_bit_for_bit_at_every_budget(function, generator):
    """In the forward, where they are returned, and in the backward, where they are the zeros of the gradient."""
    key = jax.random.key(3, impl=generator)
    (want, want_masks), want_gradients = jax.jit(jax.value_and_grad(function, has_aux=True))(X, key)
    kept = kept_by(want_masks)
    assert 0.05 < kept.mean() < 0.7
    for made in compiled_within_budgets(aot.function(function, has_aux=True, cost=ROOFLINE).trace(X, key)):
        (value, masks), gradients = made.value_and_grad(X, key)
        np.testing.assert_array_equal(masks, want_masks)
        np.testing.assert_array_equal(np.asarray(gradients) != 0, kept)
        np.testing.assert_allclose(gradients, want_gradients, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(value, want, rtol=1e-4)


def compiled_within_budgets(traced):
    """All that is compiled on the way to the least budget, to a larger one, and to one that everything fits."""
    least, default = traced.partition(budget=0.0).compile(), traced.partition().compile()
    top = max(default.peak_bytes, least.peak_bytes)
    for budget in ((top + least.peak_bytes) // 2, 4 * top):
        assert traced.partition(budget=budget).compile().peak_bytes <= budget
    made = [aot.Cut(**vars(weighed.made)).compile() for weighed in traced.request.weighing._compiled.values()]
    assert any(c.cut.plan.runs_again for c in made)
    return made


def test_masks_agree_where_the_halves_run_apart_and_inside_jit():
    key = jax.random.key(4)
    _, want = masked_in_scan(X, key)
    compiled = aot.function(masked_in_scan, has_aux=True, budget=0.0, cost=ROOFLINE)
    out, pullback, masks = compiled.vjp(X, key)
    gradients, _ = pullback(jnp.ones_like(out))
    inside, masks_inside = jax.jit(jax.grad(compiled, has_aux=True))(X, key)
    for got, gradient in ((masks, gradients), (masks_inside, inside)):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.asarray(gradient) != 0, kept_by(want))


def test_a_gradient_within_the_model_is_planned_for_a_budget():
    """Its cotangent is a number, with which a vector is multiplied."""

    def forces(x):
        return jnp.sum(jnp.sin(jax.grad(lambda x: 0.5 * x @ jnp.diag(x) @ x)(x)))

    x = jnp.arange(1.0, 5.0)
    np.testing.assert_allclose(aot.function(forces, budget="1MB").grad(x), jax.grad(forces)(x), rtol=1e-5)


# ------------------------------------------------------------------------------------ a large table


def embedded(table, weights, tokens):
    h = table[tokens]
    for weight in weights:
        h = h + jnp.tanh(jnp.sin(h) @ weight)
    return jnp.sum(h**2)


def table_and_rest(rows):
    draws = np.random.default_rng(0)
    table = jax.ShapeDtypeStruct((rows, 32), "float32")
    weights = [jnp.asarray(draws.normal(size=(32, 32)).astype(np.float32) / 8) for _ in range(4)]
    return table, weights, jnp.asarray(draws.integers(0, 100, 512).astype(np.int32))


def described(plan, rows):
    """What is saved and how much runs again, whatever the number of rows."""
    saved = [(s.value, s.op, tuple("rows" if d == rows else d for d in s.shape), s.dtype) for s in plan.saved]
    return saved, plan.recomputed, plan.deferred, plan.segments


def test_a_table_of_many_rows_changes_nothing_in_what_a_fraction_saves_of_the_rest():
    chosen = {}
    for rows in (100, 100_000):
        traced = aot.function(embedded, argnums=(0, 1), cost=ROOFLINE).trace(*table_and_rest(rows))
        plans = [met(fraction, lambda b, t=traced: t.partition(budget=b).plan) for fraction in (0.0, 0.8)]
        chosen[rows] = [described(plan, rows) for _, plan in plans]
    assert chosen[100] == chosen[100_000]
    assert len({repr(plan) for plan in chosen[100]}) > 1


# ------------------------------------------------------------------------------------ what happens once


class Counted:
    """Counts how often a program comes by."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return np.asarray(x)

    def taken(self):
        jax.effects_barrier()
        calls, self.calls = self.calls, 0
        return calls


def told(counter, x):
    """The first number of an array, by way of the host."""
    return io_callback(counter, jax.ShapeDtypeStruct((), "float32"), lax.stop_gradient(x[0, 0]), ordered=False)


def counted_loss(counter):
    """Notes and writes to a reference between operations so cheap that a budget would recompute them."""

    def loss(x, ref):
        for _ in range(2):
            h = jnp.exp(jnp.sin(x))
            ref[...] += lax.stop_gradient(jnp.mean(h))
            x = jnp.tanh(h) * h * told(counter, h)
        return jnp.sum(x**2)

    return loss


def counted_scan(counter):
    """Notes in the body of a loop long enough to run in segments, and a write after it."""

    def loss(x, ref):
        def step(h, _):
            e = jnp.exp(jnp.sin(h))
            return jnp.tanh(e) * e * jnp.tanh(told(counter, e)), None

        last, _ = lax.scan(step, x, None, length=12)
        ref[...] += lax.stop_gradient(jnp.mean(last))
        return jnp.sum(jnp.exp(jnp.sin(last)))

    return loss


both_losses = pytest.mark.parametrize(("make", "times"), [(counted_loss, 2), (counted_scan, 12)], ids=["line", "scan"])


@both_losses
def test_effects_happen_once_at_every_budget(make, times):
    counter = Counted()
    function = make(counter)
    reference = jax.new_ref(jnp.float32(0))
    want = jax.grad(function)(X, reference)
    mean = float(reference[...])
    counter.taken()
    traced = aot.function(function, cost=ROOFLINE).trace(X, jax.new_ref(jnp.float32(0)))
    for made in compiled_within_budgets(traced):
        mine = jax.new_ref(jnp.float32(0))
        _, got = made.value_and_grad(X, mine)
        assert counter.taken() == times, made.cut.plan.strategy
        np.testing.assert_allclose(mine[...], mean, rtol=1e-3)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)  # twelve steps of exp


@both_losses
def test_effects_happen_once_inside_jit_and_where_the_halves_run_apart(make, times):
    counter = Counted()
    function = aot.function(make(counter), budget=0.0, cost=ROOFLINE)
    mine = jax.new_ref(jnp.float32(0))
    jax.jit(jax.grad(function))(X, mine)
    assert counter.taken() == times
    once = float(mine[...])
    out, pullback = function.vjp(X, mine)
    assert counter.taken() == times
    for _ in range(2):
        pullback(jnp.ones_like(out))
    assert counter.taken() == 0
    np.testing.assert_allclose(mine[...], 2 * once, rtol=1e-5)
