"""What the cut saves and computes again: counts, correctness, randomness, effects, and plans of the user's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun

from behaviours.behaviour import assert_near, assert_pulls_back_as_jax, behaviour, counts, primitives, refusal
from corpus.program import normal
from jointcut import aot
from jointcut.partition import Graph, Plan, parse, show
from jointcut.partition.errors import PlanError, StrategyError
from jointcut.partition.prices.rules import Verdict
from refusals import cut_under

X, Y = normal(70, 3), normal(71, 3)
M = normal(72, 4, 3)
S = normal(73, 3, 3)
ONE = jnp.float32(1)


def cut(function, *args, strategy="min_cut", argnums=0, **options):
    """A function cut in two."""
    return aot.function(function, argnums=argnums, strategy=strategy, **options).trace(*args).partition()


def save_nothing(graph: Graph) -> Plan:
    """Compute everything again."""
    return Plan.of(graph, [])


def assert_same_gradients(function, *args, argnums=0, strategies=("min_cut", "save_all")):
    """Under each strategy the gradients are JAX's."""
    want = jax.jit(jax.value_and_grad(function, argnums))(*args)
    for strategy in strategies:
        assert_near(aot.function(function, argnums=argnums, strategy=strategy).value_and_grad(*args), want)


def cos_cos_cos(x):
    """Three elementwise ops in a row."""
    return jnp.cos(jnp.cos(jnp.cos(x)))


def normed(x, scale, shift):
    """A layer norm."""
    mean, var = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + shift


# ------------------------------------------------------------------------------------------------ correctness


@behaviour(
    "recompute correctness / sin(sin(a)) + b", "Forward and both gradients equal eager's, whatever is recomputed."
)
def recomputation_changes_no_number():
    def loss(a, b):
        return jnp.sum((jnp.sin(jnp.sin(a)) + b) ** 2)

    assert_same_gradients(loss, X, Y, argnums=(0, 1), strategies=("min_cut", "save_all", save_nothing))


@behaviour("recompute correctness / every set of saved values", "Any plan that closes has the same gradients.")
def every_plan_has_the_same_gradients():
    def loss(x):
        return jnp.sum(jnp.tanh(jnp.sin(x) * x) ** 2)

    want, traced = jax.grad(loss)(X), aot.function(loss).trace(X)
    forward = [v.id for v in traced.graph.values if v.maker is not None and v.shape == (3,)]
    for chosen in [[v] for v in forward[:4]] + [forward[:2]]:
        made = traced.partition(lambda graph, chosen=chosen: Plan.of(graph, chosen))
        assert len(jaxpr_as_fun(made.forward)(X)) == counts(made.forward)[1]
        assert_near(made.compile(2).value_and_grad(X)[1], want)


@behaviour("recompute correctness / a second layer", "Products are saved, what is cheap between them is recomputed.")
def products_are_saved_and_cheap_ops_recomputed():
    def loss(x, a, b):
        return jnp.sum(jax.nn.relu(x @ a) @ b)

    made = cut(loss, M, S, S.T, argnums=(0, 1, 2))
    assert primitives(made.forward).count("dot_general") == 2
    assert primitives(made.backward).count("dot_general") == 4
    assert_same_gradients(loss, M, S, S.T, argnums=(0, 1, 2))


# ------------------------------------------------------------------------------------------------ counts


@behaviour(
    "exact I/O counts / cos(cos(cos x)) under min-cut",
    "Forward 1 in 2 out; the backward reads saved, input, cotangent.",
)
def counts_of_three_cosines():
    made = cut(cos_cos_cos, X)
    assert (counts(made.forward), counts(made.backward)) == ((1, 2), (3, 1))
    assert [r.kind for r in made.residuals] == ["saved", "input"]
    assert made.plan.bytes_saved == X.nbytes


@behaviour(
    "exact I/O counts / a + b + c + d, then cos twice", "Summed over rows: forward 4 in 2 out, backward 2 in 4 out."
)
def counts_of_a_sum_of_four():
    made = cut(
        lambda a, b, c, d: jnp.cos(jnp.cos(jnp.sum(a + b + c + d, 0))), M, M + 1, M + 2, M + 3, argnums=(0, 1, 2, 3)
    )
    assert (counts(made.forward), counts(made.backward)) == ((4, 2), (2, 4))


@behaviour(
    "exact I/O counts / inputs are free", "Elementwise, nothing is saved: the caller holds the four inputs anyway."
)
def counts_where_inputs_are_enough():
    made = cut(lambda a, b, c, d: jnp.cos(jnp.cos(a + b + c + d)), M, M + 1, M + 2, M + 3, argnums=(0, 1, 2, 3))
    assert (counts(made.forward), counts(made.backward)) == ((4, 1), (5, 4))
    assert made.plan.saved == ()


@behaviour("exact I/O counts / layer norm", "Three in and three gradients out; statistics are saved, not the rows.")
def counts_of_a_layer_norm():
    args = M, X, Y
    made = cut(normed, *args, argnums=(0, 1, 2))
    assert (counts(made.forward), counts(made.backward)) == ((3, 3), (5, 3))
    assert {s.shape for s in made.plan.saved} == {(4, 1)}
    assert_pulls_back_as_jax(normed, *args)


@behaviour(
    "exact I/O counts / the default partitioner", "save_all: the backward reads saved values and cotangents only."
)
def counts_of_save_all():
    made = cut(cos_cos_cos, X, strategy="save_all")
    assert (counts(made.forward), counts(made.backward)) == ((1, 4), (4, 1))
    assert made.plan.recomputed == ()


@behaviour(
    "exact I/O counts / outputs are not saved twice", "A residual that is an output is handed over as that output."
)
def an_output_is_not_saved_again():
    made = cut(lambda x: jnp.exp(x @ x), S)
    assert [r.kind for r in made.residuals] == ["output", "input"]
    assert (counts(made.forward), counts(made.backward)) == ((1, 1), (3, 1))


@behaviour(
    "exact I/O counts / an output that is a view of what is saved",
    "The view is moved back: nothing is saved beside it.",
)
def a_view_of_a_saved_value_is_moved_back():
    def turned(x):
        h = jnp.exp(x @ x)
        return h.T[::-1].reshape(9)

    made = cut(turned, S)
    assert made.plan.bytes_saved == 0
    assert_pulls_back_as_jax(turned, S)


@behaviour(
    "default vs min-cut / fewer values are saved", "min_cut saves no more bytes than save_all, and proves its bound."
)
def min_cut_saves_no_more_than_save_all():
    for function, args in ((cos_cos_cos, (M,)), (normed, (M, X, Y)), (lambda x: jnp.tanh(x @ x) @ x, (S,))):
        least, most = (cut(function, *args, strategy=name).plan for name in ("min_cut", "save_all"))
        assert least.bytes_saved <= most.bytes_saved
        assert least.bytes_saved == least.bound_bytes
        assert most.recomputed == ()


@behaviour("default vs min-cut / the same gradients", "Both strategies answer as JAX.")
def both_strategies_answer_alike():
    assert_same_gradients(lambda x: jnp.sum(cos_cos_cos(x) ** 2), M)
    assert_same_gradients(lambda x, g, b: jnp.sum(normed(x, g, b) ** 3), M, X, Y, argnums=(0, 1, 2))


@behaviour(
    "default vs min-cut / order of saved values", "Residuals stand in program order, and the forward returns them so."
)
def residuals_stand_in_program_order():
    for strategy in ("min_cut", "save_all"):
        made = cut(normed, M, X, Y, strategy=strategy, argnums=(0, 1, 2))
        assert list(made.plan.values) == sorted(made.plan.values)
        saved = [r.index for r in made.residuals if r.kind == "saved"]
        assert saved == sorted(saved) and len(saved) == len(made.plan.saved)


@behaviour("default vs min-cut / determinism", "Two traces of one function are cut alike.")
def two_traces_are_cut_alike():
    first, second = (cut(normed, M, X, Y, argnums=(0, 1, 2)) for _ in range(2))
    assert first.plan == second.plan
    assert show(first.split.graph) == show(second.split.graph)


# ------------------------------------------------------------------------------------------------ the backward in two


@behaviour("split backward / gradients of inputs and of weights", "Two programs of one backward give what one gives.")
def the_backward_in_two_programs():
    def layer(weights, x):
        return jnp.tanh(x @ weights) ** 2

    made = cut(layer, S, M, argnums=(0, 1))
    _, residuals = made.compile(2).forward(S, M)
    seed = jnp.ones((4, 3))
    backward = jaxpr_as_fun(made.backward)
    halves = [jax.jit(lambda *flat, k=k: backward(*flat)[k]) for k in (0, 1)]
    assert_near(tuple(half(*residuals, seed) for half in halves), jax.vjp(layer, S, M)[1](seed))


@behaviour("split backward / one program for each argument", "The gradients by each argument alone are those by both.")
def one_program_for_each_argument():
    def loss(weights, x):
        return jnp.sum(jnp.tanh(x @ weights) ** 2)

    made = aot.function(loss, argnums=(0, 1))
    alone = tuple(aot.function(loss, argnums=i).grad(S, M) for i in (0, 1))
    assert_near(alone, made.grad(S, M))


# ------------------------------------------------------------------------------------------------ ops and text


@behaviour("getitem and golden text / several results of one op", "They are cut one by one; the op runs once.")
def results_of_one_op_are_cut_one_by_one():
    made = cut(lambda x: jnp.sum(jnp.sin(jnp.linalg.qr(x)[1])), S)
    assert primitives(made.forward).count("qr") == 1
    assert "qr" not in primitives(made.backward)
    assert_same_gradients(lambda x: jnp.sum(jnp.sin(lax.top_k(x * x, 2)[0])), X)
    assert_same_gradients(lambda x: jnp.sum(jnp.linalg.slogdet(x @ x.T + jnp.eye(3))[1]), S)


@behaviour("getitem and golden text / the text of a graph", "cos(cos x) reads as it is written here, and is read back.")
def the_text_of_a_graph():
    graph = aot.function(lambda x: jnp.cos(jnp.cos(x))).trace(X).graph
    assert show(graph).strip().splitlines() == [
        'primal %0:float32[3] "args[0]"',
        'cotangent %1:float32[3] "cotangent 0"',
        "%2:float32[3] = cos %0",
        "%3:float32[3] = sin %0",
        "%4:float32[3] = cos %2",
        "%5:float32[3] = sin %2",
        "backward:",
        "%6:float32[3] = neg %1",
        "%7:float32[3] = mul %6 %5",
        "%8:float32[3] = neg %7",
        "%9:float32[3] = mul %8 %3",
        "output %4",
        "gradient %9",
    ]
    assert show(parse(show(graph))) == show(graph)


@behaviour(
    "getitem and golden text / the text of a plan", "Totals first, then each saved value with its line and reason."
)
def the_text_of_a_plan():
    first, second = str(cut(lambda x: jnp.sum(jnp.sin(x @ x)), S).plan).splitlines()
    assert first.startswith("min_cut: 1 value, 36 bytes saved; ")
    assert "float32[3, 3]" in second and "partitioning.py" in second


# ------------------------------------------------------------------------------------------------ custom partitioner


@behaviour(
    "custom partitioner / a function of the user's is called",
    "Once for each signature, with the graph; its plan is used.",
)
def a_strategy_of_the_users_is_called():
    seen = []

    def mine(graph: Graph) -> Plan:
        seen.append(graph)
        return Plan.of(graph, [], strategy="mine")

    made = aot.function(lambda x: jnp.sum(cos_cos_cos(x)), strategy=mine)
    for _ in range(3):
        made.value_and_grad(X)
    assert len(seen) == 1 and isinstance(seen[0], Graph)
    made.value_and_grad(normal(74, 4))
    assert len(seen) == 2
    assert repr(made).endswith(": mine>")
    assert made.trace(X).partition().plan.strategy == "mine"


@behaviour("custom partitioner / cos cos saves its input only", "A plan that saves nothing recomputes from the input.")
def a_plan_that_saves_nothing():
    made = cut(lambda x: jnp.cos(jnp.cos(x)), X, strategy=save_nothing)
    assert (counts(made.forward), counts(made.backward)) == ((1, 1), (2, 1))
    assert [p for p in primitives(made.backward) if p in ("cos", "sin")] == ["cos", "sin", "sin"]
    assert_near(made.compile().vjp(X)[1](Y), jax.vjp(lambda x: jnp.cos(jnp.cos(x)), X)[1](Y)[0])


@behaviour("custom partitioner / a plan by hand", "The values that are named are saved, in that order.")
def a_plan_by_hand():
    traced = aot.function(lambda x: jnp.sum(cos_cos_cos(x))).trace(X)
    sines = [op.outputs[0] for op in traced.graph.ops if op.name == "sin"]
    made = traced.partition(lambda graph: Plan.of(graph, sines))
    assert list(made.plan.values) == sines
    assert made.plan.recomputed == ()
    assert "cos" not in primitives(made.backward)


@behaviour("custom partitioner / it returns something else", "Refused, with its name and what to return.")
def a_strategy_that_returns_no_plan():
    def mine(graph):
        return [v.id for v in graph.values]

    assert refusal(StrategyError, aot.function(cos_cos_cos).trace(X).partition, mine) == (
        "strategy mine returned list, not a Plan.\nReturn Plan.of(graph, saved=[...]) from jointcut.partition."
    )


@behaviour("custom partitioner / a name that is not known", "Refused, with the known names and the nearest.")
def a_strategy_without_a_name():
    assert refusal(StrategyError, aot.function, jnp.sin, strategy="min-cut") == (
        "strategy 'min-cut' is unknown.\n"
        "Known names: 'best', 'min_cut', 'save_all'. Did you mean 'min_cut'? "
        "A function Graph -> Plan is welcome as well."
    )


# ------------------------------------------------------------------------------------------------ randomness


def dropped(x, key):
    """Dropout, and the value itself."""
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x) * 2, 0) + x)


@behaviour("preserved randomness / dropout(x) + x", "The backward has the forward's mask, whatever is saved.")
def the_backward_has_the_forwards_mask():
    key = jax.random.key(3)
    assert_same_gradients(dropped, normal(75, 4, 5), key, strategies=("min_cut", "save_all", save_nothing))


@behaviour(
    "preserved randomness / random numbers are not drawn again", "The Boolean mask is saved: a byte for each element."
)
def random_numbers_are_not_drawn_again():
    made = cut(dropped, M, jax.random.key(0))
    assert [(s.dtype, s.bytes) for s in made.plan.saved] == [("bool", M.size)]
    drawing = {"random_bits", "threefry2x32", "random_wrap"}
    assert drawing & set(primitives(made.forward))
    assert not drawing & set(primitives(made.backward))


@behaviour("preserved randomness / another generator", "Masks of the rbg generator are those of the forward as well.")
def another_generator():
    assert_same_gradients(dropped, M, jax.random.key(1, impl="rbg"), strategies=("min_cut", "save_all", save_nothing))


@behaviour("preserved randomness / another key at each call", "Other keys give other masks; the same key the same.")
def keys_decide():
    made = aot.function(dropped)
    first, again, other = (made.grad(normal(76, 8, 8), jax.random.key(n)) for n in (0, 0, 1))
    assert_near(first, again)
    assert not np.allclose(first, other)


@behaviour("preserved randomness / in a loop", "Each step of a scan has its own mask, forth and back.")
def masks_in_a_loop():
    def loss(x, key):
        def step(h, key):
            return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), jnp.sin(h) * 2, h), None

        return jnp.sum(lax.scan(step, x, jax.random.split(key, 4))[0])

    assert_same_gradients(loss, X, jax.random.key(0))


@behaviour("preserved randomness / key inputs are known", "Metadata says from which key is drawn.")
def metadata_tells_the_keys_that_are_drawn_from():
    infos = aot.function(lambda x, key, other: dropped(x, key)).trace(M, jax.random.key(0), jax.random.key(1)).metadata
    assert [info.consumes_key for info in infos.input_info] == [False, True, False]


# ------------------------------------------------------------------------------------------------ refusals


@behaviour(
    "unbounded error finder / a value that may be neither saved nor recomputed", "It is named, with both reasons."
)
def both_reasons_are_named():
    assert refusal(PlanError, cut_under, {3: Verdict("too big", "too slow")}) == (
        "%3:float32[8] (sin) may not be saved (too big) and may not be recomputed (too slow).\n"
        "Lift one of the two rules."
    )


@behaviour("unbounded error finder / a path of such values", "The cut is refused, with the ends of the path.")
def a_path_of_forbidden_values():
    with pytest.raises(PlanError, match=r"%2.* may not be recomputed, and nothing from it to %3.* may be saved"):
        cut_under({2: Verdict("too big", "too slow"), 3: Verdict("too big", "")})


@behaviour("unbounded error finder / no path", "Where some value on the path may be saved, there is a cut.")
def a_path_with_a_value_that_may_be_saved():
    assert cut_under({2: Verdict("too big", "too slow"), 3: Verdict("", "")}).weight == 32
    assert cut_under({2: Verdict("", "too slow"), 3: Verdict("too big", "")}).weight == 32


@behaviour(
    "unbounded error finder / a plan by hand that does not close", "The value is named, and why it is not recomputed."
)
def a_plan_by_hand_that_does_not_close():
    def looped(x):
        return jnp.sum(lax.scan(lambda h, _: (jnp.sin(h), None), x, None, 3)[0] ** 2)

    said = refusal(PlanError, aot.function(looped).trace(X).partition, save_nothing)
    first, second = said.splitlines()
    assert "partitioning.py" in first and first.endswith("is neither saved nor can it be recomputed.")
    assert second.startswith("Save it, or save what the backward computes from it. It is not recomputed because ")


# ------------------------------------------------------------------------------------------------ effects


def called(seen, x):
    """An effectful op with one result."""

    def host(x):
        seen.append(None)
        return np.sin(x)

    return io_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=False)


@behaviour("effectful ops / one result", "What an effectful op returns is saved, and the op runs once.")
def the_result_of_an_effectful_op_is_saved():
    seen = []

    def loss(x):
        y = called(seen, lax.stop_gradient(x))
        return jnp.sum(jnp.sin(x * y))

    made = cut(loss, X)
    assert primitives(made.forward).count("io_callback") == 1
    assert "io_callback" not in primitives(made.backward)
    assert [s.op for s in made.plan.saved] == ["io_callback"]
    value, gradient = made.compile().value_and_grad(X)
    jax.block_until_ready(gradient)
    assert len(seen) == 1
    assert_near((value, gradient), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x * lax.stop_gradient(jnp.sin(x)))))(X))


@behaviour("effectful ops / a tree of results", "Each result that the backward reads is saved.")
def the_results_of_an_effectful_op_are_saved():
    def loss(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        a, (b, _) = io_callback(
            lambda x: (np.sin(x), (np.cos(x), np.asarray(x))), (shape, (shape, shape)), lax.stop_gradient(x)
        )
        return jnp.sum(jnp.sin(x * a) + jnp.cos(x * b))

    made = cut(loss, X)
    assert [s.op for s in made.plan.saved] == ["io_callback", "io_callback"]
    want = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x * jnp.sin(X)) + jnp.cos(x * jnp.cos(X)))))(X)
    assert_near(made.compile().value_and_grad(X)[1], want)


@behaviour(
    "effectful ops / tokens shift no input", "Ordered effects are named in metadata; inputs stay where they are."
)
def tokens_shift_no_input():
    table = normal(77, 3)

    def loss(x, y):
        jax.debug.callback(lambda x: None, x, ordered=True)
        return jnp.sum(jnp.sin(x * y) * table)

    traced = aot.function(loss, argnums=(0, 1)).trace(X, Y)
    assert len(traced.metadata.tokens) == 1
    assert traced.metadata.num_backward_tokens == 0
    assert traced.metadata.num_constants == 1
    made = traced.partition()
    assert counts(made.forward)[0] == 3
    assert made.signature.input_tokens == made.signature.output_tokens == traced.metadata.tokens
    assert_near(
        made.compile().value_and_grad(X, Y)[1], jax.grad(lambda x, y: jnp.sum(jnp.sin(x * y) * table), (0, 1))(X, Y)
    )


@behaviour("effectful ops / an effect without a result", "It stays in the forward though nothing reads it.")
def an_effect_without_a_result_stays():
    seen = []

    def loss(x):
        jax.debug.callback(lambda: seen.append(None))
        return jnp.sum(jnp.sin(x))

    made = aot.function(loss)
    made.value_and_grad(X)
    made(X)
    _, pullback = made.vjp(X)
    pullback(ONE)
    jax.effects_barrier()
    assert len(seen) == 3


# ------------------------------------------------------------------------------------------------ fewer bits


@jax.custom_vjp
def coarse(x):
    """The sine, whose derivative is computed from x in int8."""
    return jnp.sin(x)


def _coarse_forward(x):
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.sin(x), (jnp.round(x / scale).astype(jnp.int8), scale)


coarse.defvjp(_coarse_forward, lambda kept, ct: (ct * jnp.cos(kept[0].astype(jnp.float32) * kept[1]),))


@behaviour("quantised activations / saved in int8", "A custom rule that keeps int8 numbers and a scale is saved so.")
def what_a_custom_rule_quantises_is_saved_so():
    made = cut(lambda x: jnp.sum(coarse(x @ x)), S)
    assert sorted((s.dtype, s.shape) for s in made.plan.saved) == [("float32", ()), ("int8", (3, 3))]
    assert made.plan.bytes_saved == 9 + 4
    want = jax.jit(jax.grad(lambda x: jnp.sum(coarse(x @ x))))(S)
    assert_near(made.compile().value_and_grad(S)[1], want)
    assert_near(want, jax.grad(lambda x: jnp.sum(jnp.sin(x @ x)))(S), rtol=0.1, atol=0.1)


@behaviour("quantised activations / duplicate outputs", "A value used twice is quantised once, with one scale.")
def a_value_used_twice_is_quantised_once():
    def loss(x):
        h = x @ x
        return jnp.sum(coarse(h)) + jnp.sum(coarse(h) * 3)

    made = cut(loss, S)
    assert primitives(made.traced.joint).count("round") == primitives(made.forward).count("round") == 1
    assert [s.dtype for s in made.plan.saved].count("int8") == 1
    assert_near(made.compile().value_and_grad(S), jax.jit(jax.value_and_grad(loss))(S))
