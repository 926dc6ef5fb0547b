"""Each stage shows what it holds, its figures agree with one another, and they are better than plain JAX's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.run.compile import ProgramMemory
from jointcut.partition.errors import RecordError

LAYERS, BATCH, LENGTH, WIDTH, HEADS = 4, 4, 32, 32, 2
W = jnp.arange(6.0).reshape(3, 2) / 5
X = jnp.arange(12.0).reshape(4, 3) / 7


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def normed(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def block(x, p):
    """A block of a transformer, attention and two layers, each behind a norm."""
    q, k, v = (jnp.einsum("btd,dhe->bhte", normed(x), p[name]) for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bhte,bhse->bhts", q, k) / 4, -1)
    x = x + jnp.einsum("bhts,bhse,hed->btd", scores, v, p["o"])
    return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]


def unrolled(layers, x):
    for p in layers:
        x = block(x, p)
    return jnp.mean(x**2)


def scanned(layers, x):
    return jnp.mean(lax.scan(lambda x, p: (block(x, p), None), x, layers)[0] ** 2)


def layers():
    draws, part = np.random.default_rng(0), WIDTH // HEADS
    shapes = dict.fromkeys(("q", "k", "v"), (WIDTH, HEADS, part))
    shapes |= {"o": (HEADS, part, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    each = [{k: draws.normal(size=s).astype(np.float32) / 8 for k, s in shapes.items()} for _ in range(LAYERS)]
    return jax.tree.map(jnp.asarray, each)


LIST = layers()
STACK = jax.tree.map(lambda *xs: jnp.stack(xs), *LIST)
INPUT = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)), jnp.float32)


# ---------------------------------------------------------------- trace and partition


@pytest.mark.parametrize("args", [(W, X), (jax.ShapeDtypeStruct((3, 2), "float32"), X)], ids=["arrays", "shapes"])
def test_a_trace_computes_nothing_and_holds_no_array(args):
    traced = aot.function(loss).trace(*args)
    assert [(a.shape, a.dtype) for a in traced.in_avals] == [((3, 2), jnp.float32), ((4, 3), jnp.float32)]
    assert not [leaf for leaf in traced.bound.leaves if isinstance(leaf, jax.Array)]
    assert [slot.path for slot in traced.convention.inputs] == ["args[0]", "args[1]"]
    assert_near(traced.partition().compile().value_and_grad(W, X), jax.value_and_grad(loss)(W, X))


def test_the_joint_program_is_what_it_says():
    traced = aot.function(loss, argnums=(0, 1)).trace(W, X)
    value, *gradients = jax.core.eval_jaxpr(*_opened(traced.joint), W, X, jnp.float32(1))
    assert_near((value, tuple(gradients)), jax.value_and_grad(loss, (0, 1))(W, X))


def _opened(closed):
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
def test_the_two_jaxprs_run_by_hand(strategy):
    cut = aot.function(loss).trace(W, X).partition(strategy)
    value, *saved = jax.core.eval_jaxpr(*_opened(cut.forward), W, X)
    places = {"input": [W, X], "output": [value], "saved": saved}
    kept = [places[r.kind][r.index] for r in cut.residuals]
    (gradient,) = jax.core.eval_jaxpr(*_opened(cut.backward), *kept, jnp.float32(1))
    assert_near((value, gradient), jax.value_and_grad(loss)(W, X))


def test_a_plan_lists_what_is_saved_and_from_where():
    cut = aot.function(unrolled).trace(LIST, INPUT).partition()
    assert cut.plan.saved
    assert cut.plan.bytes_saved == sum(record.bytes for record in cut.plan.saved)
    assert all(record.bytes == 4 * np.prod(record.shape) for record in cut.plan.saved if record.dtype == "float32")
    assert all(record.reason and "test_stages.py" in record.source for record in cut.plan.saved)


def test_min_cut_saves_less_than_jax_does_and_recomputes_no_product():
    traced = aot.function(unrolled).trace(LIST, INPUT)
    ours, jaxs = traced.partition(), traced.partition("save_all")
    assert ours.plan.bytes_saved <= 0.5 * jaxs.plan.bytes_saved
    assert jaxs.plan.recomputed == ()
    again = {traced.graph.ops[i].name for i in ours.plan.recomputed}
    assert again
    assert "dot_general" not in again


# ---------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def compiled():
    """The loop over layers, compiled: as one program, as two, and with what JAX keeps."""
    traced = aot.function(scanned).trace(STACK, INPUT)
    cut = traced.partition()
    made = {"one": cut.compile(), "two": cut.compile(2), "save_all": traced.partition("save_all").compile()}
    assert {name: m.executables for name, m in made.items()} == {"one": 1, "two": 2, "save_all": 1}
    return made


@pytest.fixture(scope="module")
def plain():
    """The loop over layers as plain JAX compiles it."""
    return jax.jit(jax.value_and_grad(scanned)).lower(STACK, INPUT).compile()


@pytest.mark.parametrize("how", ["one", "two"])
def test_timings_tell_of_every_stage(compiled, how):
    timings = compiled[how].timings
    assert min(timings.trace_ms, timings.cut_ms, timings.emit_ms, timings.compile_ms) > 0
    assert len(compiled[how].programs) == compiled[how].executables


def test_residual_bytes_are_those_of_the_plan(compiled):
    made = compiled["two"]
    memory = made.memory
    assert memory.residual_bytes == made.cut.plan.bytes_saved
    _, kept = made.forward(STACK, INPUT)
    handed = [x for x, r in zip(kept, made.cut.residuals, strict=True) if r.kind == "saved"]
    assert sum(x.nbytes for x in handed) == memory.residual_bytes
    assert memory.forward.output_bytes >= memory.residual_bytes
    assert memory.backward.argument_bytes >= memory.residual_bytes
    assert compiled["save_all"].cut.plan.bytes_saved > 2 * memory.residual_bytes


def test_the_step_is_accounted_for(compiled):
    one, two = compiled["one"].memory, compiled["two"].memory
    assert one.activation_bytes == one.step.temp_bytes
    assert one.peak_bytes == one.step.peak_bytes
    assert two.step is None
    assert two.activation_bytes == max(two.forward.temp_bytes, two.backward.temp_bytes) + two.residual_bytes
    held = sum(x.nbytes for x in (*jax.tree.leaves(STACK), INPUT))
    assert min(one.peak_bytes, two.peak_bytes) > held + two.residual_bytes
    assert 0.8 < two.activation_bytes / one.activation_bytes < 1.25


@pytest.mark.parametrize("how", ["one", "two"])
def test_min_cut_needs_less_memory_than_save_all_and_than_plain_jax(compiled, plain, how):
    ours, jaxs = compiled[how].memory, ProgramMemory.of(compiled["save_all"].programs[0])
    assert ours.activation_bytes <= 0.6 * jaxs.temp_bytes
    assert ours.activation_bytes <= 0.6 * plain.memory_analysis().temp_size_in_bytes
    assert ours.peak_bytes < jaxs.peak_bytes


def test_flops_count_a_loop_by_its_trips(compiled):
    cost = compiled["one"].cost
    tokens = BATCH * LENGTH
    products = 2 * tokens * (4 * WIDTH * WIDTH + 8 * WIDTH * WIDTH) + 4 * tokens * LENGTH * WIDTH
    assert LAYERS * products <= cost.forward_flops <= 1.5 * LAYERS * products
    assert 1.9 * cost.forward_flops <= cost.backward_flops <= 2.5 * cost.forward_flops


def test_compiled_programs_give_the_gradients(compiled, plain):
    want = plain(STACK, INPUT)
    for made in compiled.values():
        assert_near(made.value_and_grad(STACK, INPUT), want)
    value, kept = compiled["two"].forward(STACK, INPUT)
    gradients = compiled["two"].backward(kept, jnp.float32(1))
    assert_near((value, gradients), (want[0], jax.tree.leaves(want[1])))


# ---------------------------------------------------------------- compiled by hand


def test_the_backward_overwrites_residuals_and_never_what_the_caller_holds():
    def deep(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    w, x = jnp.eye(64), jnp.ones((64, 64))
    made = aot.function(deep, argnums=(0, 1)).trace(w, x).partition("save_all").compile(2)
    _, kept = made.forward(w, x)
    assert_near(tuple(made.backward(kept, jnp.float32(1))), jax.grad(deep, (0, 1))(w, x))
    assert made.memory.backward.alias_bytes == sum(x.nbytes for x in kept if x.is_deleted()) > 0
    assert not w.is_deleted()
    assert not x.is_deleted()
    made.value_and_grad(w, x)
    assert not w.is_deleted()
    assert not x.is_deleted()


def test_forward_and_backward_of_a_function_that_is_no_loss():
    def linear(w, x):
        return {"y": x @ w, "w": w, "n": jnp.arange(2)}

    made = aot.function(linear, argnums=(0, 1)).trace(W, X).partition().compile(2)
    out, kept = made.forward(W, X)
    assert_near(out, linear(W, X))
    _, pullback = jax.vjp(lambda w, x: [linear(w, x)[name] for name in ("w", "y")], W, X)
    seeds = [jnp.ones_like(W), jnp.ones((4, 2))]
    assert_near(tuple(made.backward(kept, *seeds)), pullback(seeds))


def test_compiled_calls_with_options():
    def aux(n, w, *, x):
        y = x @ w
        return jnp.sum(y**n), {"y": y}

    made = aot.function(aux, argnums=1, has_aux=True, static_argnums=0).trace(3, W, x=X).partition().compile()
    assert_near(made.value_and_grad(3, W, x=X), jax.value_and_grad(aux, 1, has_aux=True)(3, W, x=X))
    assert_near(made.forward(3, W, x=X)[0], aux(3, W, x=X))


def test_unused_arguments_are_dropped_unless_asked_for():
    def ignores(w, x, unused):
        return loss(w, x)

    args = (W, X, jnp.ones(100))
    figures = [
        aot.function(ignores, keep_unused=keep).trace(*args).partition().compile().memory.step.argument_bytes
        for keep in (False, True)
    ]
    assert figures[1] - figures[0] == 400


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_captured_constants_are_inputs_of_the_compiled_programs(kind):
    table = kind(np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32))

    @aot.function
    def reads(v):
        return jnp.sum(jnp.tanh(table @ v) ** 2)

    v = jnp.ones(300)
    traced = reads.trace(v)
    assert [(c.shape, c.dtype) for c in traced.consts] == [((300, 300), jnp.float32)]
    made = traced.partition().compile()
    assert made.memory.step.argument_bytes == 4 * (300 * 300 + 300)
    assert len(made.programs[0].as_text()) < 40_000
    assert_near(made.value_and_grad(v), jax.value_and_grad(reads.__wrapped__)(v))
    if isinstance(table, jax.Array):
        assert traced.consts[0] is table


# ---------------------------------------------------------------- inside somebody's jit


@pytest.fixture(scope="module")
def plain_unrolled_bytes():
    """Temporaries of the unrolled layers under plain JAX."""
    return temp_bytes(jax.value_and_grad(unrolled))


def temp_bytes(function):
    return jax.jit(function).lower(LIST, INPUT).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("how", ["jax.value_and_grad(f)", "f.value_and_grad"])
def test_the_saving_survives_in_the_users_own_jit(how, plain_unrolled_bytes):
    made = aot.function(unrolled)
    step = {"jax.value_and_grad(f)": jax.value_and_grad(made), "f.value_and_grad": made.value_and_grad}[how]
    assert temp_bytes(step) <= 0.75 * plain_unrolled_bytes


def test_configuration_and_figures_come_back_from_json():
    cut = aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w)), argnums=(0,)).trace(jnp.ones((3, 2)), jnp.ones((4, 3)))
    compiled = cut.partition().compile()
    records = (cut.options, compiled.memory, compiled.cost, compiled.timings, compiled.cut.signature, cut.metadata)
    for record in records:
        assert type(record).from_json(record.to_json()) == record
        assert max(map(len, str(record).splitlines())) <= 140
    assert repr(cut).startswith("<Traced <lambda>: 2 inputs, 1 output, ")
    assert repr(compiled.cut).startswith("<Cut <lambda>: ")
    assert repr(compiled).startswith("<Compiled <lambda>: 1 executable, ")


def test_a_strategy_without_a_name_has_no_json():
    options = aot.function(lambda w: jnp.sum(w), strategy=lambda graph: graph).trace(jnp.ones(3)).options
    with pytest.raises(RecordError) as caught:
        options.to_json()
    assert str(caught.value) == (
        "Options.strategy is a function, which has no JSON form.\n"
        "Give the class auxiliary data of numbers, strings, tuples and dicts, so that it can be written."
    )


def test_a_cut_shows_its_schedule_as_text():
    made = aot.function(loss).trace(W, X).partition()
    text = str(made.schedule)
    assert text.startswith("forward:\n    run #0 dot_general\n")
