"""What PyTorch's tests of compiled autograd claim, as behaviours of `aot.tape`; names of its tests stand in brackets.

From `test/inductor/test_compiled_autograd.py`, and those tests of `test_autograd.py` which it runs again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from behaviours.behaviour import assert_near, behaviour, refusal
from jointcut import aot
from jointcut.partition.errors import CallError, NonFiniteError

KEYS = jax.random.split(jax.random.key(0), 8)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def layers():
    """Two linear layers of four features."""
    return [{"w": jax.random.normal(KEYS[i], (4, 4)), "b": jax.random.normal(KEYS[i + 2], (4,))} for i in range(2)]


def network(params, x):
    for layer in params:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.sum(x)


# -------------------------------------------------------------------------------------------------- captures


@behaviour(
    "captures / a network's gradients by a captured backward are those of eager (basic)",
    "A tape has the gradients of jax.grad, and one capture.",
)
def a_captured_backward_has_the_gradients_of_eager():
    taped = aot.tape(network)
    assert_near(taped.grad(layers(), X), jax.jit(jax.grad(network))(layers(), X))
    assert taped.captures.made == 1


@behaviour("captures / an equal backward is not captured again (cache_hit)", "The second call is a hit.")
def an_equal_backward_is_a_hit():
    taped = aot.tape(network)
    for scale in (1.0, 2.0, 3.0):
        taped.grad(jax.tree.map(lambda x, s=scale: s * x, layers()), X)
    assert [(c.why, c.hits) for c in taped.captures] == [("the first call", 2)]


@behaviour(
    "captures / compiled forwards keep their own backward graphs (torch_compile, and its api with each backend)",
    "The backward half of a call of aot.function or jax.jit is a part of the captured backward.",
)
def compiled_calls_keep_their_halves():
    for decorator in (aot.function, jax.jit):
        inner = decorator(network)
        taped = aot.tape(lambda p, x, inner=inner: inner(p, x) * 2)
        for _ in range(2):
            assert_near(taped.grad(layers(), X), jax.jit(jax.grad(lambda p: 2 * network(p, X)))(layers()))
        assert taped.captures.made == 1


@behaviour(
    "captures / only what asks for it is captured, also beside other models (multiple_torch_compile)",
    "Each taped function has captures of its own, and plain JAX is not touched.",
)
def captures_belong_to_their_function():
    first, second = aot.tape(network), aot.tape(network)
    first.grad(layers(), X)
    jax.grad(network)(layers(), X)
    assert (len(first.captures), len(second.captures)) == (1, 0)


@behaviour(
    "captures / Python that a compiler would break at runs in the forward (torch_compile_graph_break, graph_break2)",
    "The forward runs on numbers: float, print and numpy are no breaks, and the backward is one program.",
)
def python_in_the_forward_breaks_nothing():
    @aot.tape
    def loss(w):
        h = jnp.sin(w)
        scale = 2.0 if float(h[0]) > np.asarray(h).mean() else 3.0
        return jnp.sum(h * scale)

    assert_near(loss.grad(jnp.arange(3.0)), 3 * jnp.cos(jnp.arange(3.0)))
    assert "jointcut_hook" not in loss.captures[0].text


@behaviour(
    "captures / a backward is captured although the forward ran before (torch_compile_only_backward_call)",
    "The pullback of vjp captures at its first call.",
)
def a_pullback_captures_at_its_first_call():
    taped = aot.tape(lambda x: jnp.sum(x**2))
    _, pullback = taped.vjp(X)
    assert len(taped.captures) == 0
    assert_near(pullback(jnp.float32(1.0)), (2 * X,))
    assert len(taped.captures) == 1


@behaviour(
    "captures / a changed shape is a new graph with the shape as the reason (dynamic_shapes, verbose_logs_cpp)",
    "Sizes are static: each shape is captured, and captures say which argument changed.",
)
def a_new_shape_is_captured_and_said():
    taped = aot.tape(network)
    for rows in (10, 11, 10):
        taped.grad(layers(), jnp.ones((rows, 4)))
    assert [c.why for c in taped.captures] == ["the first call", "args[1]: float32[11,4] instead of [10,4]"]


@behaviour(
    "captures / the log names each node (verbose_logs_graph, verbose_logs_aot_id, aot_dispatcher_nodes)",
    "The captured backward is a Graph whose ops have the names of the functions that ran.",
)
def the_text_of_a_capture_names_its_ops():
    @jax.jit
    def encode(x):
        return jnp.tanh(x)

    taped = aot.tape(lambda x: jnp.sum(encode(x) @ jnp.ones((4, 1))))
    taped.grad(X)
    assert [op.name for op in taped.captures[0].graph.ops][:2] == ["broadcast_in_dim", "dot_general"]
    assert "encode" in str([eqn.source_info.name_stack for eqn in taped.captures[0].jaxpr.jaxpr.eqns])


@behaviour(
    "captures / other inputs are asked for, so another graph (no_output_nodes_different_leaves_will_recompile)",
    "What gets a gradient is part of the structure.",
)
def other_differentiated_arguments_are_another_structure():
    def product(x, y, chosen):
        x, y = (a if i == chosen else jax.lax.stop_gradient(a) for i, a in enumerate((x, y)))
        return jnp.sum(x * y)

    taped = aot.tape(product, argnums=(0, 1))
    for chosen in (0, 1, 0):
        assert_near(taped.grad(X, X + 1, chosen), jax.grad(product, (0, 1))(X, X + 1, chosen))
    assert taped.captures.made == 2


# ------------------------------------------------------------------------------------------------- accumulation


@behaviour(
    "accumulation / a parameter that is read at several places gets the sum (implicit_add)",
    "One gradient, the sum of its parts.",
)
def parts_of_a_gradient_are_added():
    def loss(y, x):
        return jnp.sum(jax.nn.sigmoid(x * y + jnp.sin(y) + jnp.cos(y)))

    taped = aot.tape(loss)
    for x in (X[:1], 2 * X[1:], X[:1]):
        assert_near(taped.grad(X[:1] + 1, x), jax.grad(loss)(X[:1] + 1, x))
    assert taped.captures.made == 1


@behaviour(
    "accumulation / gradients of all leaves, or of some, of which others are not even run (output_nodes_all_leaves, "
    "output_nodes_some_leaves, no_output_nodes_all_leaves, no_output_nodes_some_leaves)",
    "Only what argnums names is differentiated, and rules of other values do not run.",
)
def only_what_is_asked_for_is_differentiated():
    @jax.custom_vjp
    def unreachable(x):
        return x

    def fail(residuals, ct):
        raise AssertionError("a backward that nobody asked for")

    unreachable.defvjp(lambda x: (x, None), fail)

    def loss(y, z):
        return jnp.sum(jax.nn.sigmoid(unreachable(y) * z))

    y, z = X + 1, X - 2
    assert_near(aot.tape(loss, argnums=1).grad(y, z), jax.grad(lambda z: jnp.sum(jax.nn.sigmoid(y * z)))(z))


@behaviour(
    "accumulation / gradients add up over backwards without zeroing (accumulate_without_zero)",
    "References keep the sum over calls, with one capture.",
)
def gradients_add_up_in_references():
    taped, refs = aot.tape(network), jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), layers())
    for _ in range(3):
        taped.accumulate_into(refs)(layers(), X)
    want = jax.tree.map(lambda g: 3 * g, jax.jit(jax.grad(network))(layers(), X))
    assert_near(jax.tree.map(lambda ref: ref[...], refs), want, rtol=1e-4)
    assert taped.captures.made == 1


@behaviour(
    "accumulation / a gradient that is there is written in place (inplace_grad_update)",
    "The reference that is passed is the one that is added to, from what it holds.",
)
def a_reference_is_added_to_from_what_it_holds():
    ref = jax.new_ref(jnp.full(3, 5.0))
    aot.tape(lambda x: jnp.sum(3 * x)).accumulate_into(ref)(jnp.ones(3))
    assert ref[...].tolist() == [8.0, 8.0, 8.0]


@behaviour(
    "accumulation / products without bias are exact (accumulate_grad_accuracy)",
    "Two layers without biases have the gradients of jax.grad.",
)
def layers_without_bias_are_as_exact():
    def loss(p):
        return jnp.sum(X @ p[0] @ p[1])

    params = [jax.random.normal(KEYS[5], (4, 1)), jax.random.normal(KEYS[6], (1, 2))]
    assert_near(aot.tape(loss).grad(params), jax.jit(jax.grad(loss))(params))


# ---------------------------------------------------------------------------------------------------- hooks


@behaviour(
    "hooks / a hook on a parameter scales its gradient, with one capture (tensor_grad_hook1)",
    "A traced hook of on_cotangent is part of the program, also if it is written anew for each call.",
)
def a_hook_on_a_parameter():
    def loss(params, x):
        first = dict(params[0], w=aot.on_cotangent(params[0]["w"], lambda g: g * 2, traced=True))
        return network([first, params[1]], x)

    taped = aot.tape(loss)
    for _ in range(3):
        got = taped.grad(layers(), X)
    want = jax.jit(jax.grad(network))(layers(), X)
    assert_near(got, [dict(want[0], w=2 * want[0]["w"]), want[1]])
    assert taped.captures.made == 1


@behaviour(
    "hooks / a hook before a node changes what it gets (tensor_grad_hook2, grad_fn_prehooks)",
    "pre_hook of aot.hooked gets the cotangents of a call's output, and its result goes on.",
)
def a_hook_before_the_backward_of_a_call():
    summed = aot.hooked(jnp.sum, pre_hook=lambda ct: ct + 1)
    for made in (aot.tape, aot.function):
        assert_near(made(lambda x: summed(x**2)).grad(X), 4 * X)


@behaviour(
    "hooks / a hook after a node changes what it made, and sees what it got (tensor_grad_hook3)",
    "post_hook of aot.hooked gets gradients and cotangents, and its result goes on.",
)
def a_hook_after_the_backward_of_a_call():
    summed = aot.hooked(jnp.sum, post_hook=lambda gradients, ct: (jnp.sin(gradients[0]) + ct,))
    for made in (aot.tape, aot.function):
        assert_near(made(lambda x: summed(3 * x)).grad(X), 3 * (jnp.sin(jnp.ones_like(X)) + 1))


@behaviour(
    "hooks / a hook that returns None changes nothing, and asserts in it hold (hook_none, hooks)",
    "The hook is called back with arrays, once for each backward.",
)
def a_hook_without_a_result_changes_nothing():
    seen = []

    def look(g):
        assert g.shape == X.shape
        seen.append(float(g.sum()))

    taped = aot.tape(lambda x: jnp.sum(aot.on_cotangent(jnp.sin(x), look)))
    for _ in range(2):
        assert_near(taped.grad(X), jnp.cos(X))
    assert seen == [8.0, 8.0]


@behaviour(
    "hooks / a hook that is removed is not called (grad_fn_prehooks_remove_hooks)",
    "aot.Hook.remove has an effect on the next backward, also from inside a hook.",
)
def a_hook_may_remove_itself():
    calls = []

    def once(g):
        calls.append(1)
        hook.remove()

    hook = aot.Hook(once)
    for made in (aot.tape, aot.function):
        loss = made(lambda x: jnp.sum(aot.on_cotangent(x * 2, hook)))
        for _ in range(2):
            jax.block_until_ready(loss.grad(X))
    assert calls == [1]


@behaviour(
    "hooks / a hook of a node with several outputs sees all of them (grad_fn_prehooks_multiple_outputs)",
    "pre_hook gets the tree of the output, with zeros for what is not read.",
)
def a_hook_sees_all_outputs():
    seen = []
    both = aot.hooked(lambda x: (jnp.sin(x), x * 3), pre_hook=lambda cts: seen.append([ct.tolist() for ct in cts]))
    aot.tape(lambda x: jnp.sum(both(x)[1])).grad(jnp.ones(2))
    assert seen == [[[0.0, 0.0], [1.0, 1.0]]]


@behaviour(
    "hooks / after accumulation a hook sees the finished gradient (post_accumulate_grad_hook_e2e, _gets_cleaned_up)",
    "post_accumulate is called once all parts are added; an update of the parameter belongs there.",
)
def a_hook_after_accumulation_sees_the_sum():
    seen = []
    taped = aot.tape(lambda w: jnp.sum(aot.post_accumulate(w, lambda g: seen.append(g.tolist())) * 2 + w))
    taped.grad(jnp.ones(2))
    assert seen == [[3.0, 3.0]]


@behaviour(
    "hooks / hooks on a gradient run before those after accumulation (post_accumulate_grad_hook_ordering, "
    "accumulate_grad_posthooks_can_observe_tensor_prehook)",
    "post_accumulate sees what on_cotangent made, whichever was set first.",
)
def hooks_on_a_gradient_run_before_those_after_it():
    log = []

    def loss(w):
        w = aot.post_accumulate(w, lambda g: log.append(float(g)))
        return aot.on_cotangent(w, lambda g: g * 10) * 2

    for made in (aot.tape, aot.function):
        jax.block_until_ready(made(loss).grad(1.0))
    assert log == [20.0, 20.0]


@behaviour(
    "hooks / a hook that returns another shape is refused (invalid_gradients, hooks with validate_outputs)",
    "The error names the hook, its value, both types and what to return.",
)
def a_hook_of_another_shape_is_refused():
    def wrong(g):
        return g[:1]

    text = refusal(CallError, aot.tape(lambda x: jnp.sum(aot.on_cotangent(jnp.sin(x), wrong))).grad, X)
    assert "returned float32[1,4], but is set (on_cotangent) on float32[2,4]" in text


@behaviour(
    "hooks / what a hook closes over is an input of the graph (verbose_logs_aot_dispatcher_nodes_hop)",
    "Arrays of the forward that a traced hook reads are read in the backward with their numbers.",
)
def a_hook_may_read_values_of_the_forward():
    def loss(x):
        y = jnp.sin(x)
        offset = jax.lax.stop_gradient(y + 1)
        return jnp.sum(jnp.sin(aot.on_cotangent(y, lambda g: g + offset, traced=True)))

    assert_near(aot.tape(loss).grad(X), (jnp.cos(jnp.sin(X)) + jnp.sin(X) + 1) * jnp.cos(X))


# ------------------------------------------------------------------------------------------------- saved values


@behaviour(
    "saved values / hooks pack what is saved and unpack it once (unpack_hooks_exec_count, saving_variable_to_disk)",
    "pack runs as ops save, unpack when the backward reads, each once for each array.",
)
def what_is_saved_is_packed_and_unpacked_once():
    log = []

    def pack(x):
        log.append("pack")
        return np.asarray(x)

    def unpack(x):
        log.append("unpack")
        return jnp.asarray(x)

    @aot.tape
    def loss(x):
        with aot.saved_arrays(pack, unpack):
            h = jnp.sin(x)
        h = aot.on_cotangent(h, lambda g: log.append("h"))
        with aot.saved_arrays(lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float32)):
            return jnp.sum(h * h)

    assert_near(loss.grad(X), 2 * jnp.sin(X) * jnp.cos(X), rtol=1e-2)
    assert log == ["pack", "h", "unpack"]


@behaviour(
    "saved values / a hook on the loss runs before anything is unpacked (saved_tensor_unpack_hook_ordering)",
    "unpack stands at the op that reads, after the hooks of all values behind it.",
)
def hooks_of_the_loss_run_before_unpacking():
    log = []

    def unpack(x):
        log.append("unpack")
        return jnp.asarray(x)

    @aot.tape
    def loss(x, y):
        with aot.saved_arrays(np.asarray, unpack):
            product = x * y
        return aot.on_cotangent(jnp.sum(product), lambda g: log.append("loss"))

    assert_near(loss.grad(X, X + 1), X + 1)
    assert log == ["loss", "unpack"]


@behaviour(
    "saved values / a kept graph runs backward again (keep_graph_simple, keep_graph_usage_after_compiled)",
    "A pullback runs as often as it is called, captured or not.",
)
def a_kept_tape_runs_backward_again():
    _, pullback = aot.tape(lambda x: x**2).vjp(jnp.float32(2.0))
    for _ in range(2):
        assert pullback(jnp.float32(1.0)) == (4.0,)
        with aot.tape.disabled():
            assert pullback(jnp.float32(1.0)) == (4.0,)


@behaviour(
    "saved values / a freed graph is refused (backward_twice_without_saved_values)",
    "After release the pullback says that its residuals are gone.",
)
def a_released_tape_is_refused():
    _, pullback = aot.tape(lambda x: x**2).vjp(jnp.float32(2.0))
    pullback.release()
    assert refusal(CallError, pullback, 1.0).startswith("The pullback of <lambda> was released, and its residuals")


# --------------------------------------------------------------------------------------------- custom functions


def own_sine():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return sine


@behaviour(
    "custom functions / what a custom function saves is an input of the graph (custom_fn_saved_tensors, "
    "autograd_cpp_node_saved)",
    "Residuals of a custom_vjp are inputs: other values are hits, other lengths are captures.",
)
def a_custom_rule_keeps_its_residuals():
    sine = own_sine()
    taped = aot.tape(lambda x: jnp.sum(sine(x)))
    for length in (10, 100, 10, 100):
        x = jnp.arange(float(length))
        assert_near(taped.grad(x), jnp.cos(x))
    assert taped.captures.made == 2


@behaviour(
    "custom functions / several saved arrays and several gradients (custom_fn_saved_multiple_tensors, "
    "custom_fn_saved_multiple_tensors_dedup, custom_fn_multiple_grads)",
    "Each residual is kept once, and each result has its cotangent.",
)
def a_custom_rule_of_several_values():
    @jax.custom_vjp
    def pair(x, y):
        return jnp.sin(x), jnp.sin(y)

    def backward(saved, cts):
        x, again, y = saved
        return cts[0] * jnp.cos(x) * again / again, cts[1] * jnp.cos(y)

    pair.defvjp(lambda x, y: ((jnp.sin(x), jnp.sin(y)), (x, x, y)), backward)

    def loss(x, y):
        a, b = pair(x, y)
        return jnp.sum(a * b)

    x, y = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)
    plain = jax.grad(lambda x, y: jnp.sum(jnp.sin(x) * jnp.sin(y)), (0, 1))(x, y)
    assert_near(aot.tape(loss, argnums=(0, 1)).grad(x, y), plain)


@behaviour(
    "custom functions / sizes that a function notes (custom_fn_saved_shape_tensor, custom_fn_saved_attr)",
    "Shapes are static in a rule, as everywhere in JAX.",
)
def a_custom_rule_reads_shapes():
    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, x), lambda x, ct: (ct * x.shape[0],))
    taped = aot.tape(lambda x: jnp.sum(scaled(x)))
    for length in (10, 100, 10):
        assert taped.grad(jnp.ones(length)).tolist() == [float(length)] * length


@behaviour(
    "custom functions / inputs that are no arrays (custom_fn_non_variable_input)",
    "Arguments of a rule that are no floats get no gradient.",
)
def a_custom_rule_with_an_integer():
    @jax.custom_vjp
    def times(x, n):
        return x * n

    times.defvjp(lambda x, n: (x * n, n), lambda n, ct: (ct * n, None))
    assert aot.tape(lambda x: jnp.sum(times(x, 3))).grad(jnp.ones(2)).tolist() == [3.0, 3.0]


@behaviour(
    "custom functions / two functions of one form are two graphs (custom_fn_with_same_graph, autograd_cpp_node_id, "
    "custom_fn_dynamically_defined_class)",
    "Rules are told apart by what they compute, so that each has its own gradient.",
)
def custom_rules_of_one_form_are_told_apart():
    def create(factor):
        @jax.custom_vjp
        def f(x):
            return x

        f.defvjp(lambda x: (x, None), lambda _, ct: (ct * factor,))
        return f

    taped = aot.tape(lambda x, f: jnp.sum(f(x)))
    first, second = create(2.0), create(5.0)
    got = [taped.grad(jnp.ones(2), f).tolist() for f in (first, second, first, second)]
    assert got == [[2.0, 2.0], [5.0, 5.0]] * 2


@behaviour(
    "custom functions / a number that the function computes with compiles nothing anew "
    "(autograd_cpp_node_saved_float, autograd_cpp_node_saved_int)",
    "Python numbers that enter are inputs of the program.",
)
def python_numbers_are_inputs():
    taped = aot.tape(lambda x, z: jnp.sum(x * x * z))
    for z in (1.1, 2.2, 3.3, 1.1):
        assert_near(taped.grad(X, z), 2 * X * z)
    assert taped.captures.made == 1


@behaviour(
    "custom functions / a function that behaves otherwise from call to call (autograd_cpp_node_data_dependent)",
    "Decisions on numbers are part of the structure, found again when they come again.",
)
def decisions_on_numbers_are_structure():
    taped = aot.tape(lambda x: jnp.sum(jnp.sin(x) if float(x[0]) > 0 else x * 2))
    for sign in (1, -1, 1, -1):
        taped.grad(sign * jnp.ones(3))
    assert (taped.captures.made, [c.hits for c in taped.captures]) == (2, [1, 1])


# ----------------------------------------------------------------------------------------------------- around


@behaviour(
    "around the tape / a backward twice differentiated (hessian_vector, custom_autograd_repeated_grad_grad)",
    "A tape around a tape records its captured backward.",
)
def a_second_derivative_goes_through_a_capture():
    taped = aot.tape(lambda x: jnp.sum(x**3))
    second = aot.tape(lambda x: jnp.sum(taped.grad(x) * X))
    assert_near(second.grad(X + 2), 6 * (X + 2) * X)


@behaviour(
    "around the tape / derivatives of high order, each captured once (higher_order_gradients)",
    "Four tapes around each other give four derivatives, and a second run captures nothing.",
)
def four_derivatives_are_captured_once():
    orders = [aot.tape(lambda x: x**3)]
    for _ in range(3):
        orders.append(aot.tape(orders[-1].grad))
    for _ in range(2):
        assert [float(order.grad(jnp.float32(2.0))) for order in orders] == [12.0, 12.0, 6.0, 0.0]
        assert [order.captures.made for order in orders] == [1, 1, 1, 1]


@behaviour(
    "around the tape / what a backward does beside its result stays in the graph (dont_dce_side_effects)",
    "A rule whose backward calls out, or draws, does so once in each captured backward.",
)
def side_effects_of_a_backward_stay():
    seen = []

    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda g: seen.append(float(g.sum())), g)
        return (g,)

    same.defvjp(lambda x: (x, None), backward)
    for made in (aot.tape, aot.function):
        loss = made(lambda x: jnp.sum(same(x) * 2))
        for _ in range(2):
            jax.block_until_ready(loss.grad(X))
            jax.effects_barrier()
    assert seen == [16.0] * 4


@behaviour(
    "around the tape / a checkpointed call keeps what enters it (checkpointing_simple, checkpointing_sac)",
    "A jax.checkpoint on a tape has the gradients of plain JAX, and keeps no value that it computes.",
)
def a_checkpoint_keeps_what_enters():
    taped = aot.tape(jax.checkpoint(network))
    assert_near(taped.grad(layers(), X), jax.jit(jax.grad(network))(layers(), X))
    assert taped.captures[0].residual_bytes <= sum(x.nbytes for x in jax.tree.leaves((layers(), X)))


@behaviour(
    "around the tape / a custom backward that makes a NaN is named (anomaly_mode_backward, anomaly_mode_grad)",
    "check='nonfinite' names the rule's op and the backward, not the op that reads it.",
)
def a_nan_of_a_custom_backward_is_named():
    @jax.custom_vjp
    def bad(x):
        return x

    bad.defvjp(lambda x: (x, None), lambda _, g: (jnp.full_like(g, jnp.nan),))
    text = refusal(NonFiniteError, aot.tape(lambda x: jnp.sum(bad(x) * 3), check="nonfinite").grad, X)
    assert text.startswith("The backward of <lambda> is not finite: "), text
    assert bool(jnp.all(jnp.isnan(aot.tape(lambda x: jnp.sum(bad(x) * 3)).grad(X))))


@behaviour(
    "around the tape / anomaly mode names the op that made a NaN (anomaly_detect_nan, anomaly_mode_no_check_nan)",
    "With check='nonfinite' the first op is raised with its line; without it nothing is looked at.",
)
def the_first_nan_is_named():
    assert "sqrt made an infinity" in refusal(NonFiniteError, aot.tape(jnp.sqrt, check="nonfinite").grad, 0.0)
    assert aot.tape(jnp.sqrt).grad(0.0) == np.inf


@behaviour(
    "around the tape / a backward inside a backward (simple_reentrant, reentrant_with_leaf_variable_hook)",
    "A hook that is called back may take gradients itself, by the same or another tape.",
)
def a_hook_may_go_backward_itself():
    inner, seen = aot.tape(lambda x: jnp.sum(x**2)), []
    outer = aot.tape(lambda x: jnp.sum(aot.on_cotangent(jnp.sin(x), lambda g: seen.append(inner.grad(g).tolist()))))
    outer.grad(jnp.zeros(2))
    assert seen == [[2.0, 2.0]]


@behaviour(
    "around the tape / an error in a backward leaves the next one whole (reentrant_child_error, "
    "custom_function_exception)",
    "What a hook raises reaches the caller as it is, and the next call runs.",
)
def an_error_in_a_hook_leaves_the_tape_whole():
    fails = [True]

    def hook(g):
        if fails[0]:
            raise KeyError("mine")

    taped = aot.tape(lambda x: jnp.sum(aot.on_cotangent(jnp.sin(x), hook)))
    with pytest.raises(KeyError, match="mine"):
        taped.grad(X)
    fails[0] = False
    assert_near(taped.grad(X), jnp.cos(X))


@behaviour(
    "around the tape / randomness of a checkpointed call is that of the forward (trace_run_with_rng_state)",
    "Random numbers are a function of a key: recomputed or not, they are the same.",
)
def recomputed_dropout_draws_the_same():
    @jax.checkpoint
    def dropped(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x), 0)

    def loss(x):
        return jnp.sum(dropped(x, KEYS[0]) * dropped(x, KEYS[1]))

    assert_near(aot.tape(loss).grad(X), jax.jit(jax.grad(loss))(X))


@behaviour(
    "around the tape / views and what is read of them (setitem, select_sum, index_backward_does_not_save_tensor)",
    "Indexing and .at updates are ops like others, and keep no array but their indices.",
)
def indexing_is_an_op_like_others():
    def loss(x):
        y = x.at[0].set(x[1] * 2)
        return jnp.sum(y[jnp.array([0, 1, 1])] ** 2)

    assert_near(aot.tape(loss).grad(X), jax.jit(jax.grad(loss))(X))


@behaviour(
    "around the tape / inputs that nothing reads (unrelated_inputs, grad_materialize_grads)",
    "Their gradient is an array of zeros.",
)
def unread_inputs_have_zeros():
    got = aot.tape(lambda x, y: jnp.sum(x), argnums=(0, 1)).grad(X, X)
    assert_near(got, (jnp.ones_like(X), jnp.zeros_like(X)))
