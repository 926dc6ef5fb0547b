"""Inputs that are written: a `jax.Ref` is written in place; arrays are not, but their buffers can be given up."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from behaviours.behaviour import assert_near, behaviour, refusal
from corpus.program import normal
from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from jointcut.wrappers.metadata.schemas import InputAliasInfo, MutationType

X, Y = normal(10, 3), normal(11, 3)
ONE = jnp.float32(1)


def zeros() -> jax.Ref:
    """A reference to three zeros."""
    return jax.new_ref(jnp.zeros(3))


def counter() -> jax.Ref:
    """A reference to the integer zero."""
    return jax.new_ref(jnp.int32(0))


def counted(x, ref):
    """A loss that counts its calls."""
    ref[...] += 1
    return jnp.sum(jnp.sin(x) ** 2)


def noted(x, ref):
    """A loss that writes down a value without derivative."""
    hidden = jnp.sin(x)
    ref[...] = lax.stop_gradient(hidden)
    return jnp.sum(hidden**3)


def plain(x):
    """The same loss, without the writing."""
    return jnp.sum(jnp.sin(x) ** 3)


# ------------------------------------------------------------------------------------------------ writes


@behaviour(
    "input mutation / an input is written", "A jax.Ref has the new value after the call, and the gradient is JAX's."
)
def a_reference_is_written():
    ref = zeros()
    made = aot.function(noted)
    assert_near(made.value_and_grad(X, ref), jax.value_and_grad(plain)(X))
    assert_near(ref[...], jnp.sin(X))
    ref[...] = jnp.zeros(3)
    assert_near(made(X, ref), plain(X))
    assert_near(ref[...], jnp.sin(X))


@behaviour("input mutation / which inputs are written is known", "Metadata names the Ref, and where it is written.")
def metadata_tells_what_is_written():
    metadata = aot.function(noted).trace(X, zeros()).metadata
    array, ref = metadata.input_info
    assert (array.mutation_type, array.is_reference) == (MutationType.NOT_MUTATED, False)
    assert (ref.mutation_type, ref.is_reference) == (MutationType.MUTATED_IN_GRAPH, True)
    assert (ref.mutates_data, ref.requires_grad, ref.mutates_in_backward) == (True, False, False)


@behaviour("input mutation / writes that are kept out of the graph", "A pure program returns the new state instead.")
def a_write_may_be_kept_out_of_the_graph():
    info = InputAliasInfo("args[0]", True, False, mutates_data=True, is_reference=True)
    assert info.mutation_type is MutationType.MUTATED_IN_GRAPH
    assert replace(info, keep_input_mutations=False).mutation_type is MutationType.MUTATED_OUT_GRAPH
    assert replace(info, mutates_data=False, keep_input_mutations=False).mutation_type is MutationType.NOT_MUTATED


@behaviour("input mutation / part of an input is written", "Elements and slices are written one after the other.")
def parts_of_a_reference_are_written():
    def loss(x, ref):
        ref[0] = lax.stop_gradient(x[2])
        ref[1:] = lax.stop_gradient(x[1:] * 2) + ref[1:]
        return jnp.sum(jnp.sin(x) * ref[...])

    ref = jax.new_ref(Y)
    want = jnp.concatenate([X[2:], X[1:] * 2 + Y[1:]])
    value, gradient = aot.function(loss).value_and_grad(X, ref)
    assert_near(ref[...], want)
    assert_near((value, gradient), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * want))(X))


@behaviour("input mutation / the written value is returned as well", "Result and reference hold the same numbers.")
def a_written_value_is_returned():
    def loss(x, ref):
        hidden = jnp.sin(x) * 2
        ref[...] = lax.stop_gradient(hidden)
        return jnp.sum(hidden**2), (hidden, ref[...])

    ref = zeros()
    (value, (hidden, read)), gradient = aot.function(loss, has_aux=True).value_and_grad(X, ref)
    assert_near((value, gradient), jax.value_and_grad(lambda x: jnp.sum((2 * jnp.sin(x)) ** 2))(X))
    for seen in (hidden, read, ref[...]):
        assert_near(seen, 2 * jnp.sin(X))


@behaviour("input mutation / a counter", "Forward runs count, pullbacks do not, whoever asks.")
def a_counter_counts_forward_runs():
    ref, made = counter(), aot.function(counted)
    runs = [
        lambda: made(X, ref),
        lambda: made.value_and_grad(X, ref),
        lambda: made.grad(X, ref),
        lambda: jax.grad(made)(X, ref),
        lambda: jax.jit(made)(X, ref),
        lambda: jax.jit(jax.grad(made))(X, ref),
        lambda: jax.jit(made.value_and_grad)(X, ref),
    ]
    for count, run in enumerate(runs, 1):
        run()
        assert ref[...] == count
    _, pullback = made.vjp(X, ref)
    assert ref[...] == len(runs) + 1
    pullback(ONE)
    pullback(ONE)
    assert ref[...] == len(runs) + 1


@behaviour("input mutation / a counter in compiled programs", "One executable or two count alike.")
def a_counter_counts_in_compiled_programs():
    for executables in (1, 2):
        ref = counter()
        run = aot.function(counted).trace(X, ref).partition().compile(executables)
        run.value_and_grad(X, ref)
        run.value_and_grad(X, ref)
        run.forward(X, ref)
        run.vjp(X, ref)[1](ONE)
        assert ref[...] == 4


@behaviour("input mutation / an input is written several times", "Reads see the write before them; the last one stays.")
def the_last_write_stays():
    def loss(x, ref):
        ref[...] = lax.stop_gradient(x)
        first = ref[...]
        ref[...] = first * 10
        return jnp.sum(jnp.sin(x) * first * ref[...])

    ref = zeros()
    want = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * X * X * 10))(X)
    assert_near(aot.function(loss).value_and_grad(X, ref), want)
    assert_near(ref[...], X * 10)


@behaviour(
    "input mutation / saved before it is written", "The backward reads what the forward read, not what was written."
)
def the_backward_sees_the_value_before_the_write():
    def scaled(x, ref):
        y = jnp.sin(x * ref[...])
        ref[...] *= 10
        return y * ref[...]

    ref = jax.new_ref(Y)
    _, pullback = aot.function(scaled).vjp(X, ref)
    want = jax.vjp(lambda x: jnp.sin(x * Y) * Y * 10, X)[1](X)[0]
    assert_near(pullback(X)[0], want)
    assert_near(pullback(X)[0], want)
    assert_near(ref[...], Y * 10)


@behaviour(
    "input mutation / written between forward and backward", "What the caller writes then does not reach the backward."
)
def the_caller_writes_between_forward_and_backward():
    ref = jax.new_ref(Y)
    made = aot.function(lambda x, ref: jnp.sin(x * ref[...]))
    want = jax.vjp(lambda x: jnp.sin(x * Y), X)[1](X)[0]
    _, pullback = made.vjp(X, ref)
    _, compiled_pullback = made.trace(X, ref).partition().compile().vjp(X, ref)
    ref[...] = jnp.zeros(3)
    assert_near(pullback(X)[0], want)
    assert_near(compiled_pullback(X), want)


@behaviour(
    "input mutation / what was read before keeps its value", "An array read from a Ref is a copy of that moment."
)
def an_array_read_before_the_write_stays():
    ref = jax.new_ref(Y)
    before = ref[...]
    aot.function(noted).value_and_grad(X, ref)
    assert_near(before, Y)


@behaviour("input mutation / mutation hidden from autograd", "What is read from a Ref is a constant.")
def what_is_read_from_a_reference_is_a_constant():
    def loss(x, ref):
        ref[...] = lax.stop_gradient(x)
        return jnp.sum(jnp.sin(x) * ref[...])

    _, gradient = aot.function(loss).value_and_grad(X, zeros())
    assert_near(gradient, jnp.cos(X) * X)


@behaviour("input mutation / mutation under no_grad", "A call without derivative may write anything.")
def without_derivative_anything_may_be_written():
    def loss(x, ref):
        ref[...] = jnp.sin(x)
        return jnp.sum(x)

    ref = zeros()
    assert_near(aot.function(loss)(X, ref), jnp.sum(X))
    assert_near(ref[...], jnp.sin(X))


@behaviour("input mutation / a value that needs a gradient is written", "Refused, with the way out.")
def a_differentiated_value_is_not_written():
    def careless(x, ref):
        ref[...] = jnp.sin(x)
        return jnp.sum(x)

    made = aot.function(careless)
    for way in (made.value_and_grad, made.grad, made.vjp, made.trace, jax.grad(made), jax.jit(jax.grad(made))):
        assert refusal(TraceError, way, X, zeros()) == (
            "careless writes a value that is differentiated into a jax.Ref that is not.\n"
            "Write jax.lax.stop_gradient(value): statistics and counters need no derivative."
        )


@behaviour(
    "input mutation / a leaf that needs a gradient is written",
    "A Ref cannot be differentiated: refused, with its path.",
)
def a_reference_is_not_differentiated():
    made = aot.function(lambda weights: jnp.sum(weights["w"][...] ** 2))
    for way in (made.value_and_grad, made.grad, made.trace):
        assert refusal(TraceError, way, {"w": jax.new_ref(X)}) == (
            "args[0]['w'] is a jax.Ref: value_and_grad differentiates arrays.\n"
            "Leave it out of argnums=0, or pass what it holds, ref[...], and differentiate that."
        )


@behaviour("input mutation / the written input has no gradient", "A Ref among the arguments of vjp gets a float0 zero.")
def the_cotangent_of_a_reference_is_float0():
    cotangents = aot.function(counted).vjp(X, counter())[1](ONE)
    assert_near(cotangents[0], jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(X))
    assert (cotangents[1].dtype, cotangents[1].shape) == (jax.dtypes.float0, ())


@behaviour("input mutation / the same input is passed twice and written", "Refused: two names for one Ref.")
def a_reference_is_not_passed_twice():
    def loss(x, refs):
        refs[0][...] = refs[1][...] + 1
        return jnp.sum(x)

    ref, made = zeros(), aot.function(loss)
    for way in (made, made.value_and_grad, made.vjp, made.trace, jax.grad(made)):
        assert refusal(CallError, way, X, [ref, ref]) == (
            "args[1][1] is the same jax.Ref as args[1][0].\n"
            "Pass it once: a function that writes through two names could not tell which write comes last."
        )


@behaviour("input mutation / the written input is returned", "Refused: the caller has the Ref itself.")
def a_reference_is_not_returned():
    made = aot.function(lambda x, ref: {"sum": jnp.sum(x), "ref": ref})
    aux = aot.function(lambda x, ref: (jnp.sum(x), ref), has_aux=True)
    what = "is a jax.Ref, which a compiled function cannot return.\n"
    cure = "Return what it holds, ref[...]; the caller has the reference itself."
    for way in (made, made.vjp, made.trace):
        assert refusal(TraceError, way, X, zeros()) == f"result['ref'] {what}{cure}"
    assert refusal(TraceError, aux.value_and_grad, X, zeros()) == f"result[1] {what}{cure}"


# ------------------------------------------------------------------------------------------------ places


@behaviour("input mutation / batch norm running statistics", "Ten steps of training leave the statistics of plain JAX.")
def batch_norm_keeps_running_statistics():
    def loss(weights, stats, rows):
        hidden = rows @ weights
        mean, var = jnp.mean(hidden, 0), jnp.var(hidden, 0)
        stats["mean"][...] = 0.9 * stats["mean"][...] + 0.1 * lax.stop_gradient(mean)
        stats["var"][...] = 0.9 * stats["var"][...] + 0.1 * lax.stop_gradient(var)
        return jnp.sum(jnp.tanh((hidden - mean) * lax.rsqrt(var + 1e-3)) ** 3)

    def trained(value_and_grad):
        weights, stats = normal(12, 3, 2), {"mean": jax.new_ref(jnp.zeros(2)), "var": jax.new_ref(jnp.ones(2))}
        for step in range(10):
            _, gradient = value_and_grad(weights, stats, normal(step, 4, 3))
            weights = weights - 0.1 * gradient
        return weights, stats["mean"][...], stats["var"][...]

    assert_near(trained(aot.function(loss).value_and_grad), trained(jax.jit(jax.value_and_grad(loss))), rtol=1e-4)


@behaviour(
    "input mutation / batch norm in evaluation", "A static switch leaves the statistics alone, and metadata says so."
)
def batch_norm_in_evaluation_writes_nothing():
    def normed(x, mean, train):
        if train:
            mean[...] = lax.stop_gradient(0.5 * (mean[...] + x))
        return jnp.sum(jnp.sin(x - mean[...]))

    made = aot.function(normed, static_argnums=2)
    ref = jax.new_ref(Y)
    made.value_and_grad(X, ref, False)
    assert_near(ref[...], Y)
    kinds = [made.trace(X, ref, train).metadata.input_info[1].mutation_type for train in (False, True)]
    assert kinds == [MutationType.NOT_MUTATED, MutationType.MUTATED_IN_GRAPH]


@behaviour("input mutation / an input in a tree is written", "References stand in trees beside arrays and integers.")
def a_reference_stands_in_a_tree():
    def loss(state, x):
        state["stats"][0][...] += 1
        return jnp.sum(jnp.sin(state["w"] * x)) * state["stats"][1]

    def tree():
        return {"w": Y, "stats": [jax.new_ref(jnp.zeros(())), jnp.float32(2)]}

    made, state = aot.function(loss, argnums=1), tree()
    want = jax.value_and_grad(lambda x: 2 * jnp.sum(jnp.sin(Y * x)))(X)
    assert_near(made.value_and_grad(state, X), want)
    assert_near(made.value_and_grad(state, X), want)
    assert state["stats"][0][...] == 2
    assert [info.path for info in made.trace(state, X).metadata.input_info if info.mutates_data] == [
        "args[0]['stats'][0]"
    ]


@behaviour(
    "input mutation / a captured variable is written",
    "A closed-over Ref is written in every call, not only in the first.",
)
def a_reference_that_is_closed_over_is_written():
    ref = counter()
    made = aot.function(lambda x: counted(x, ref))
    runs = (made, made.value_and_grad, lambda x: made.vjp(x)[1](ONE), jax.grad(made), jax.jit(made))
    for count, run in enumerate((*runs, *runs), 1):
        run(X)
        assert ref[...] == count
    ref[...] = jnp.int32(100)
    made.value_and_grad(X)
    assert ref[...] == 101


@behaviour("input mutation / a captured variable is read", "What the caller writes between calls is seen by the next.")
def a_reference_that_is_closed_over_is_read_anew():
    ref = jax.new_ref(Y)
    made = aot.function(lambda x: jnp.sum(jnp.sin(x * ref[...])))
    for held in (Y, 2 * Y):
        ref[...] = held
        want = jax.value_and_grad(lambda x, held=held: jnp.sum(jnp.sin(x * held)))(X)
        assert_near(made.value_and_grad(X), want)
        assert_near(jax.value_and_grad(made)(X), want)


@behaviour("input mutation / an input is written in a loop", "In a scan the write of one step is read by the next.")
def a_reference_is_written_in_a_scan():
    def loss(x, ref):
        def step(h, row):
            h = jnp.sin(h * row)
            ref[...] += lax.stop_gradient(h)
            return h, ref[0]

        h, seen = lax.scan(step, x, normal(13, 4, 3))
        return jnp.sum(h**2), seen

    def run(value_and_grad):
        ref = zeros()
        return value_and_grad(X, ref), ref[...]

    want = run(jax.jit(jax.value_and_grad(loss, has_aux=True)))
    assert_near(run(aot.function(loss, has_aux=True).value_and_grad), want)
    assert_near(run(jax.value_and_grad(aot.function(loss), has_aux=True)), want)


@behaviour(
    "input mutation / an input is written in one branch", "In a cond the Ref changes where that branch is taken."
)
def a_reference_is_written_in_a_branch():
    def loss(x, ref):
        def yes(x):
            ref[...] += 1
            return jnp.sin(x)

        return jnp.sum(lax.cond(x[0] > 0, yes, jnp.exp, x))

    made, ref = aot.function(loss), counter()
    for sign, count in ((1, 1), (-1, 1), (1, 2)):
        x = sign * jnp.abs(X)
        want = jax.jit(jax.value_and_grad(lambda x: jnp.sum(lax.cond(x[0] > 0, jnp.sin, jnp.exp, x))))(x)
        assert_near(made.value_and_grad(x, ref), want)
        assert ref[...] == count
    jax.grad(made)(jnp.abs(X), ref)
    assert ref[...] == 3


@behaviour(
    "input mutation / an input is written in a while loop", "A loop without derivative writes as often as it turns."
)
def a_reference_is_written_in_a_while_loop():
    def doubled(x, ref):
        def body(x):
            ref[...] += 1
            return x * 2

        return lax.while_loop(lambda x: jnp.max(x) < 10, body, x)

    ref, made = counter(), aot.function(doubled)
    assert_near(made(jnp.ones(3), ref), jnp.full(3, 16.0))
    assert ref[...] == 4


@behaviour("input mutation / an intermediate is written", "A Ref made inside is differentiated through.")
def a_reference_of_the_functions_own_is_differentiated_through():
    def loss(x):
        ref = jax.new_ref(jnp.zeros(3))
        for i in range(3):
            ref[i] = jnp.sin(x[i]) + ref[max(i - 1, 0)]
        return jnp.sum(ref[...] ** 2)

    made = aot.function(loss)
    want = jax.jit(jax.value_and_grad(loss))(X)
    assert_near(made.value_and_grad(X), want)
    assert_near(jax.value_and_grad(made)(X), want)
    assert_near(made.vjp(X)[1](ONE)[0], want[1])


@behaviour(
    "input mutation / an output read from a written intermediate requires grad",
    "Metadata says that an output read from a Ref of the function's own can carry a cotangent.",
)
def an_output_read_from_a_written_reference_can_carry_a_cotangent():
    def loss(x):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = jnp.sin(x)
        return jnp.sum(ref[...] ** 2)

    traced = aot.function(loss).trace(X)
    assert traced.metadata.output_info[0].requires_grad
    assert traced.partition().signature.backward_signature.loss_output == "output_1"


@behaviour("input mutation / a random state is advanced", "A Ref of a key gives other numbers at each call.")
def a_stream_of_keys_is_a_reference():
    def loss(x, stream):
        stream[...], key = jax.random.split(stream[...])
        return jnp.sum(jnp.sin(x * jax.random.normal(key, x.shape)))

    made, stream = aot.function(loss), jax.new_ref(jax.random.key(0))
    key = jax.random.key(0)
    for _ in range(2):
        key, now = jax.random.split(key)
        want = jax.jit(jax.value_and_grad(lambda x, now=now: jnp.sum(jnp.sin(x * jax.random.normal(now, x.shape)))))(X)
        assert_near(made.value_and_grad(X, stream), want)
        assert bool(jnp.all(jax.random.key_data(stream[...]) == jax.random.key_data(key)))
    assert made.trace(X, stream).metadata.input_info[1].mutates_data


@behaviour("input mutation / under vmap", "A Ref with a batch is written row by row; one without refuses, as in JAX.")
def a_mapped_reference_is_written_row_by_row():
    rows, made = jnp.stack([X, Y]), aot.function(noted)
    ref = jax.new_ref(jnp.zeros((2, 3)))
    assert_near(jax.vmap(jax.grad(made))(rows, ref), jax.vmap(jax.grad(plain))(rows))
    assert_near(ref[...], jnp.sin(rows))
    for function in (made, noted):
        with pytest.raises(Exception, match="set/swap operation with vmapped value on an unbatched array reference"):
            jax.vmap(function, (0, None))(rows, zeros())


@behaviour(
    "input mutation / in a step that accumulates gradients",
    "A training step writes gradients into a Ref, under jax.jit.",
)
def gradients_are_accumulated_in_a_reference():
    made, total = aot.function(lambda w, x: jnp.sum(jnp.sin(w * x))), zeros()

    @jax.jit
    def step(total, w, x):
        value, gradient = made.value_and_grad(w, x)
        total[...] += gradient
        return value

    step(total, X, Y)
    step(total, X, 2 * Y)
    want = jax.grad(lambda w: jnp.sum(jnp.sin(w * Y)) + jnp.sum(jnp.sin(w * 2 * Y)))(X)
    assert_near(total[...], want)


@behaviour(
    "input mutation / in a scan of training steps", "A captured Ref counts the steps of a scan, by either gradient."
)
def a_counter_in_a_scan_of_steps():
    ref = counter()
    made = aot.function(lambda w: counted(w, ref))

    def trained(value_and_grad):
        def step(w, _):
            value, gradient = value_and_grad(w)
            return w - 0.1 * gradient, value

        return jax.jit(lambda w: lax.scan(step, w, None, 3))(X)

    want = trained(jax.value_and_grad(lambda w: jnp.sum(jnp.sin(w) ** 2)))
    for count, way in ((3, made.value_and_grad), (6, jax.value_and_grad(made))):
        assert_near(trained(way), want)
        assert ref[...] == count


@behaviour(
    "input mutation / one compiled function calls another",
    "The write of the inner function happens once for each call.",
)
def a_function_of_ours_inside_another():
    ref = counter()
    inner = aot.function(lambda x: counted(x, ref))
    outer = aot.function(lambda x: inner(x) * 2)
    want = jax.grad(lambda x: 2 * jnp.sum(jnp.sin(x) ** 2))(X)
    assert_near(outer.grad(X), want)
    assert_near(jax.grad(outer)(X), want)
    outer(X)
    assert ref[...] == 3


@behaviour(
    "input mutation / under activation checkpointing", "What jax.checkpoint runs again writes the same once more."
)
def a_reference_is_written_under_checkpoint():
    def loss(x, ref):
        def layer(x):
            ref[...] = lax.stop_gradient(x)
            return jnp.sin(x * x)

        return jnp.sum(jax.checkpoint(layer)(x))

    ref = zeros()
    assert_near(aot.function(loss).value_and_grad(X, ref), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x * x)))(X))
    assert_near(ref[...], X)


@behaviour(
    "input mutation / whatever is saved", "What is read from a Ref is saved and not read again, under each strategy."
)
def reads_are_saved_under_each_strategy():
    def loss(x, ref):
        y = jnp.sin(x * ref[...])
        ref[...] *= 10
        return jnp.sum(y * ref[...])

    want = jax.grad(lambda x: jnp.sum(jnp.sin(x * Y) * Y * 10))(X)
    for strategy in ("min_cut", "save_all"):
        assert_near(aot.function(loss, strategy=strategy).grad(X, jax.new_ref(Y)), want)


# ------------------------------------------------------------------------------------------------ donation


@behaviour(
    "input mutation / a functional update takes the buffer", "A donated input is gone, its new state is the result."
)
def a_donated_input_is_updated():
    def loss(w, x):
        return jnp.sum(jnp.sin(w * x)), w - 0.5 * x

    made = aot.function(loss, has_aux=True, donate_argnums=(0,))
    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(X, Y)
    for way in (made.value_and_grad, made.trace(X, Y).partition().compile().value_and_grad):
        given = X + 0
        assert_near(way(given, Y), want)
        assert given.is_deleted()
    assert [info.is_donated for info in made.trace(X, Y).metadata.input_info] == [True, False]


@behaviour("input mutation / an input is named to be overwritten", "donate_argnames gives up a keyword argument.")
def a_donated_input_has_a_name():
    made = aot.function(lambda x, *, state: state + x, donate_argnames="state")
    state = Y + 0
    assert_near(made(X, state=state), X + Y)
    assert state.is_deleted()


@behaviour("input mutation / one input is to be overwritten", "donate_argnums takes an integer as in jax.jit, also 0.")
def the_first_input_is_donated_by_its_number():
    state = X + 0
    aot.function(lambda state, x: state + x, donate_argnums=0)(state, Y)
    assert state.is_deleted()


@behaviour("input mutation / an input that is overwritten is returned", "A donated input comes back as a new array.")
def a_donated_input_comes_back_as_a_new_array():
    given = X + 0
    made = aot.function(lambda w, x: (w, w - x), donate_argnums=(0,))
    first, second = made(given, Y)
    assert given.is_deleted() and first is not given
    assert_near((first, second), (X, X - Y))


@behaviour(
    "input mutation / an input is needed by the backward", "vjp keeps donated inputs, since the pullback reads them."
)
def vjp_keeps_donated_inputs():
    given = X + 0
    out, pullback = aot.function(lambda w, x: jnp.sin(w) * x, donate_argnums=(0,)).vjp(given, Y)
    assert not given.is_deleted()
    assert_near((out, pullback(Y)), (jnp.sin(X) * Y, jax.vjp(lambda w, x: jnp.sin(w) * x, X, Y)[1](Y)))


@behaviour("input mutation / an input stays as it was", "An array that is not donated has its numbers and its buffer.")
def other_inputs_stay():
    given = X + 0
    aot.function(lambda w: jnp.sum(jnp.sin(w))).value_and_grad(given)
    assert_near(given, X)


# ------------------------------------------------------------------------------------------------ in the backward


@jax.custom_vjp
def stashed(ref, x):
    """The identity, whose backward writes the cotangent into a reference."""
    return x


def _stash(ref, cotangent):
    ref[...] = cotangent
    return None, cotangent


stashed.defvjp(lambda ref, x: (x, ref), _stash)


def stashing(x, ref):
    """A loss that writes a cotangent down."""
    return jnp.sum(jnp.sin(stashed(ref, jnp.sin(x))) * 2)


def plain_stash():
    """Gradient and written cotangent by plain JAX."""
    ref = zeros()
    gradient = jax.grad(stashing)(X, ref)
    return gradient, ref[...]


@behaviour(
    "backward mutation / an input is written in the backward", "A custom rule writes a Ref when the cotangent comes."
)
def a_reference_is_written_in_the_backward():
    gradient, written = plain_stash()
    ref, made = zeros(), aot.function(stashing)
    assert_near(made.value_and_grad(X, ref)[1], gradient)
    assert_near(ref[...], written)
    info = made.trace(X, ref).metadata.input_info[1]
    assert (info.mutates_data, info.mutates_in_backward) == (False, True)


@behaviour(
    "backward mutation / the forward alone writes nothing", "The Ref changes at the pullback, each time it is called."
)
def the_write_of_the_backward_waits_for_it():
    _, written = plain_stash()
    ref = zeros()
    _, pullback = aot.function(stashing).vjp(X, ref)
    assert_near(ref[...], jnp.zeros(3))
    pullback(ONE)
    assert_near(ref[...], written)
    pullback(2 * ONE)
    assert_near(ref[...], 2 * written)


def assert_compiled_backward_writes(executables):
    """A compiled pair writes the Ref once the backward has run, and only then."""
    _, written = plain_stash()
    ref = zeros()
    aot.function(stashing).trace(X, ref).partition().compile(executables).value_and_grad(X, ref)
    assert_near(ref[...], written)


@behaviour("backward mutation / in one compiled program", "The Ref is written once the step has run.")
def the_backward_of_a_compiled_step_writes():
    assert_compiled_backward_writes(1)


@behaviour(
    "backward mutation / in a compiled backward",
    "The Ref is written once the backward has run.",
)
def a_compiled_backward_writes():
    assert_compiled_backward_writes(2)


@behaviour(
    "backward mutation / with create_graph",
    "jax.grad of a function of ours writes what jax.grad of the function writes.",
)
def jax_grad_writes_in_the_backward():
    gradient, written = plain_stash()
    for transform in (lambda f: f, jax.jit):
        ref = zeros()
        with pytest.warns(aot.UncutWarning, match="^stashing is not cut here, and plain JAX runs: it hands a jax.Ref"):
            found = transform(jax.grad(aot.function(stashing)))(X, ref)
        assert_near(found, gradient)
        assert_near(ref[...], written)


@behaviour(
    "backward mutation / the cotangent is not written", "The caller's cotangent has its numbers after the pullback."
)
def the_cotangent_stays_as_it_was():
    made, seed = aot.function(lambda x: jnp.sin(x) * 2), Y + 0
    made.vjp(X)[1](seed)
    made.trace(X).partition().compile(2).vjp(X)[1](seed)
    assert_near(seed, Y)


@behaviour(
    "backward mutation / the forward's input is not written", "Inputs that the backward reads again stay as they were."
)
def the_forwards_input_stays_as_it_was():
    given = X + 0
    made = aot.function(lambda x: jnp.sin(x) * 2)
    made.vjp(given)[1](Y)
    made.trace(given).partition().compile(2).vjp(given)[1](Y)
    assert_near(given, X)


@behaviour(
    "backward mutation / the forward's output is not written", "An output that the backward reads stays as it was."
)
def the_forwards_output_stays_as_it_was():
    made = aot.function(jnp.exp)
    for out, pullback in (made.vjp(X), made.trace(X).partition().compile(2).vjp(X)):
        pullback(Y)
        assert_near(out, jnp.exp(X))


@behaviour(
    "backward mutation / a side effect of the backward", "A callback in a custom backward runs once for each pullback."
)
def a_callback_of_the_backward_runs_once():
    seen = []

    @jax.custom_vjp
    def watched(x):
        return jnp.sin(x)

    def backward(x, ct):
        jax.debug.callback(lambda ct: seen.append(np.asarray(ct)), ct)
        return (ct * jnp.cos(x),)

    watched.defvjp(lambda x: (jnp.sin(x), x), backward)
    made = aot.function(lambda x: jnp.sum(watched(x) * 3))
    made.value_and_grad(X)
    jax.effects_barrier()
    assert len(seen) == 1
    _, pullback = made.vjp(X)
    jax.effects_barrier()
    assert len(seen) == 1
    pullback(ONE)
    jax.effects_barrier()
    assert len(seen) == 2


@behaviour(
    "backward mutation / second derivatives beside a write", "The Hessian of a loss that writes statistics is JAX's."
)
def second_derivatives_beside_a_write():
    made, ref = aot.function(noted), zeros()
    got = jax.grad(lambda x: jnp.sum(jax.grad(made)(x, ref) ** 2))(X)
    assert_near(got, jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(plain)(x) ** 2)))(X))
    assert_near(ref[...], jnp.sin(X))
