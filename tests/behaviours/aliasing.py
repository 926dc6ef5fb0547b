"""Arrays that are one: outputs that are inputs or each other, an input that is passed twice, and views of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from behaviours.behaviour import (
    assert_as_jax,
    assert_near,
    assert_pulls_back_as_jax,
    behaviour,
    counts,
    primitives,
    refusal,
)
from corpus.program import normal
from jointcut import aot
from jointcut.partition.errors import CallError
from jointcut.wrappers.metadata.schemas import OutputType
from regenerate import regenerated

X, Y = normal(20, 3), normal(21, 3)
M = normal(22, 2, 3)
ONE = jnp.float32(1)


def output_infos(function, *args, **options):
    """What one look taught us of the outputs."""
    return aot.function(function, **options).trace(*args).metadata.output_info


def shared(function, *args):
    """Type and base of each output."""
    return [(info.output_type, info.base_idx) for info in output_infos(function, *args)]


def steps(info):
    """The names of the operations from the base to an output."""
    return [view.op for view in info.view_meta_sequence]


def assert_regenerated(function, *args):
    """Every output that shares something is made anew from its base, and the same steps work on other numbers."""
    outputs = jax.tree.leaves(function(*args))
    inputs = jax.tree.leaves(args)
    for out, info in zip(outputs, output_infos(function, *args), strict=True):
        if info.output_type in (OutputType.alias_of_input, OutputType.is_input):
            assert_near(regenerated(info, inputs[info.base_idx]), out)
        elif info.output_type is OutputType.alias_of_intermediate_base_is_user_output:
            assert_near(regenerated(info, outputs[info.base_idx]), out)


# ------------------------------------------------------------------------------------------------ identity


@behaviour("output aliasing / is_input: an output is an input", "The very same array is handed back, by every way in.")
def an_input_comes_back_as_itself():
    made = aot.function(lambda x, y: (x, jnp.sin(x) * y, {"y": y}))
    compiled = made.trace(X, Y).partition().compile()
    for out in (made(X, Y), made.vjp(X, Y)[0], compiled.vjp(X, Y)[0], compiled.forward(X, Y)[0]):
        assert out[0] is X and out[2]["y"] is Y
        assert_near(out[1], jnp.sin(X) * Y)


@behaviour(
    "output aliasing / is_input beside a gradient", "Aux that is an input is that input, in one executable or two."
)
def an_input_comes_back_as_aux():
    def loss(x, y):
        return jnp.sum(jnp.sin(x) * y), {"x": x, "y": y}

    made = aot.function(loss, has_aux=True)
    cut = made.trace(X, Y).partition()
    for way in (made.value_and_grad, cut.compile(1).value_and_grad, cut.compile(2).value_and_grad):
        (value, aux), gradient = way(X, Y)
        assert aux["x"] is X and aux["y"] is Y
        assert_near((value, gradient), jax.value_and_grad(lambda x: loss(x, Y)[0])(X))


@behaviour("output aliasing / is_input costs nothing", "What is handed back is no result of the compiled program.")
def what_is_handed_back_is_no_result_of_the_program():
    traced = aot.function(lambda x, y: (x, jnp.sin(y), x)).trace(X, Y)
    assert sorted(traced.handed_back) == [0, 2]
    (forward, _) = traced.partition().compile(2).programs
    assert len(forward.output_shardings) == 1


@behaviour("output aliasing / an input is returned several times", "Each place holds the same array.")
def an_input_comes_back_several_times():
    def thrice(x):
        return x, [x, jnp.sin(x)]

    first, (second, third) = aot.function(thrice)(X)
    assert first is X and second is X
    assert_near(third, jnp.sin(X))
    assert shared(thrice, X)[:2] == [(OutputType.is_input, 0)] * 2
    assert_pulls_back_as_jax(thrice, X)


@behaviour(
    "output aliasing / the gradient of an input that is returned", "Its cotangent is added to what comes another way."
)
def an_input_that_is_returned_has_a_gradient():
    assert_pulls_back_as_jax(lambda x, y: (x, jnp.sin(x) * y), X, Y)
    assert_pulls_back_as_jax(lambda x: x, X)


@behaviour(
    "output aliasing / an input of integers is returned", "Integers, Booleans and keys come back as themselves too."
)
def inputs_without_derivative_come_back_as_themselves():
    given = {"n": jnp.arange(3), "mask": X > 0, "key": jax.random.key(0)}
    out = aot.function(lambda given, x: (given, jnp.sin(x)))(given, X)[0]
    assert all(out[name] is given[name] for name in given)


@behaviour("output aliasing / is_input under another compiler", "Inside jax.jit XLA decides; the numbers are the same.")
def identity_inside_somebodys_jit_is_xlas_affair():
    made = aot.function(lambda x, y: (x, jnp.sin(x) * y))
    assert_near(jax.jit(made)(X, Y), (X, jnp.sin(X) * Y))
    assert_near(jax.jit(made.vjp)(X, Y)[0], (X, jnp.sin(X) * Y))


@behaviour(
    "output aliasing / an input that is no array is returned", "A number or a numpy array comes back as a JAX array."
)
def a_numpy_array_comes_back_as_a_jax_array():
    out = aot.function(lambda x, n: (x, n))(np.asarray(X), 2)
    assert all(isinstance(leaf, jax.Array) for leaf in out)
    assert_near(out, (X, 2))


@behaviour("output aliasing / outputs that are one", "The same value returned twice is one array.")
def one_value_returned_twice_is_one_array():
    def twice(x):
        y = jnp.sin(x)
        return y, {"again": y}, jnp.cos(x)

    made = aot.function(twice)
    for first, second, _ in (made(X), made.vjp(X)[0], made.trace(X).partition().compile().vjp(X)[0]):
        assert first is second["again"]
    assert shared(twice, X) == [
        (OutputType.non_alias, None),
        (OutputType.alias_of_intermediate_base_is_user_output, 0),
        (OutputType.non_alias, None),
    ]
    assert_pulls_back_as_jax(twice, X)


@behaviour("output aliasing / outputs that are one, as aux", "The loss returned as aux is the loss itself.")
def the_loss_may_be_its_own_aux():
    def loss(x):
        value = jnp.sum(jnp.sin(x))
        return value, {"loss": value}

    (value, aux), gradient = aot.function(loss, has_aux=True).value_and_grad(X)
    assert value is aux["loss"]
    assert_near(gradient, jnp.cos(X))


@behaviour("output aliasing / cotangents of one value at two outputs", "They are added.")
def cotangents_of_one_value_are_added():
    def twice(x):
        y = jnp.sin(x)
        return y, y

    _, pullback = aot.function(twice).vjp(X)
    assert_near(pullback((Y, 3 * Y))[0], 4 * Y * jnp.cos(X))


# ------------------------------------------------------------------------------------------------ views


@behaviour("output aliasing / views of inputs", "Each view is known as one, with its base and its steps.")
def views_of_inputs_are_known():
    def views(x, m):
        return x[::-1], m.T, m.reshape(6), x[1:], jnp.broadcast_to(x, (2, 3)), x[None, :], m[:, ::2]

    infos = output_infos(views, X, M)
    assert [info.output_type for info in infos] == [OutputType.alias_of_input] * 7
    assert [info.base_idx for info in infos] == [0, 1, 1, 0, 0, 0, 1]
    kinds = [["rev"], ["transpose"], ["reshape"], ["slice"], ["broadcast_in_dim"], ["broadcast_in_dim"], ["slice"]]
    assert [steps(info) for info in infos] == kinds
    assert_regenerated(views, X, M)
    assert_pulls_back_as_jax(views, X, M)


@behaviour("output aliasing / a view of a view", "The steps are replayed one after the other.")
def a_view_of_a_view_is_replayed():
    def view(m):
        return jnp.squeeze(m.T[1:, None].transpose(2, 1, 0)[::-1, :, :1], 2)

    (info,) = output_infos(view, M)
    assert (info.output_type, info.base_idx) == (OutputType.alias_of_input, 0)
    assert len(steps(info)) >= 4
    assert_near(regenerated(info, M), view(M))
    assert_near(regenerated(info, 2 * M + 1), view(2 * M + 1))
    assert_pulls_back_as_jax(view, M)


@behaviour(
    "output aliasing / a view has a buffer of its own",
    "A view comes out of the program; only an input itself does not.",
)
def a_view_has_a_buffer_of_its_own():
    given = X + 0
    out = aot.function(lambda x: x[::-1])(given)
    given.delete()
    assert_near(out, X[::-1])


@behaviour("output aliasing / a step that computes is no view", "What computes something ends the chain.")
def what_computes_is_no_view():
    kinds = shared(lambda x: ((x * 2)[::-1], jnp.sort(x), x.astype(jnp.bfloat16), jnp.sin(x)), X)
    assert kinds == [(OutputType.non_alias, None)] * 4


@behaviour("output aliasing / views of intermediates", "Two views of one value share a base of their own.")
def views_of_intermediates_share_a_base():
    def views(x, y):
        h, g = jnp.sin(x), jnp.exp(y)
        return h[::-1], h[None], g[1:], g.reshape(3, 1), (x * y)[::-1]

    kinds = shared(views, X, Y)
    assert [kind for kind, _ in kinds] == [OutputType.alias_of_intermediate] * 4 + [OutputType.non_alias]
    bases = [base for _, base in kinds]
    assert bases[0] == bases[1] != bases[2] == bases[3]
    assert_pulls_back_as_jax(views, X, Y)


@behaviour("output aliasing / an intermediate and its view", "The view is one of the earlier output.")
def a_value_and_its_view_are_returned():
    def views(x):
        h = jnp.sin(x)
        return h, h[::-1], h[::-1][1:], jnp.cos(h)

    infos = output_infos(views, X)
    assert [info.output_type for info in infos] == [
        OutputType.non_alias,
        OutputType.alias_of_intermediate_base_is_user_output,
        OutputType.alias_of_intermediate_base_is_user_output,
        OutputType.non_alias,
    ]
    assert_regenerated(views, X)
    assert_pulls_back_as_jax(views, X)


@behaviour(
    "output aliasing / a view and then its intermediate", "The order of outputs does not matter for the gradient."
)
def a_view_is_returned_before_its_base():
    def views(x):
        h = jnp.sin(x)
        return h[::-1], h

    assert_regenerated(views, X)
    assert_pulls_back_as_jax(views, X)
    first, second = aot.function(views)(X)
    assert_near((first, second), views(X))


@behaviour(
    "output aliasing / multi-output views", "All pieces of a split are known, and their gradients are put together."
)
def pieces_of_an_array_are_returned():
    def pieces(m):
        return list(jnp.split(m, 3, axis=1)), [m[0], m[1]]

    assert_regenerated(pieces, M)
    assert_pulls_back_as_jax(pieces, M)


@behaviour(
    "output aliasing / multi-output views of an intermediate",
    "Pieces of a computed value have the gradient of the whole.",
)
def pieces_of_an_intermediate_are_returned():
    assert_pulls_back_as_jax(lambda m: jnp.split(jnp.sin(m), 3, axis=1), M)
    assert_pulls_back_as_jax(lambda m: (jnp.split(jnp.sin(m), 3, axis=1)[1], jnp.sin(m)), M)


@behaviour("output aliasing / an input and a view of it", "The input is itself, the view a view of it.")
def an_input_and_its_view_are_returned():
    def both(x):
        return x[::-1], x, jnp.sin(x)

    assert shared(both, X) == [(OutputType.alias_of_input, 0), (OutputType.is_input, 0), (OutputType.non_alias, None)]
    assert aot.function(both)(X)[1] is X
    assert_pulls_back_as_jax(both, X)


@behaviour("output aliasing / which outputs are aliases is known", "Metadata lists them by position.")
def metadata_lists_the_aliases():
    metadata = aot.function(lambda x: (jnp.sin(x), x, x[::-1], jnp.cos(x))).trace(X).metadata
    aliases = [i for i, info in enumerate(metadata.output_info) if info.output_type is not OutputType.non_alias]
    assert aliases == [1, 2]
    assert metadata.num_outputs == 4


@behaviour("output aliasing / a detached alias", "A view behind stop_gradient has no gradient and the right numbers.")
def a_stopped_view_carries_no_gradient():
    def both(x):
        return lax.stop_gradient(x)[::-1], jnp.sin(x)

    out, pullback = aot.function(both).vjp(X)
    assert_near(out, both(X))
    assert_near(pullback((Y, Y))[0], jnp.cos(X) * Y)


@behaviour(
    "output aliasing / an alias of an input that is not differentiated", "It carries no cotangent, and is itself."
)
def an_alias_of_an_integer_input():
    def both(x, n):
        return jnp.sum(jnp.sin(x)), (n, n[::-1])

    n = jnp.arange(3)
    (_, (same, reversed_n)), _ = aot.function(both, has_aux=True).value_and_grad(X, n)
    assert same is n
    assert_near(reversed_n, n[::-1])
    infos = output_infos(both, X, n, has_aux=True)
    assert [info.requires_grad for info in infos] == [True, False, False]


@behaviour("output aliasing / alias of a captured array", "A closed-over array may be returned, and is no input.")
def a_captured_array_is_returned():
    captured = jnp.arange(3.0)
    made = aot.function(lambda x: (captured, jnp.sin(x) * captured))
    assert_near(made(X), (captured, jnp.sin(X) * captured))
    assert_near(made.vjp(X)[0], (captured, jnp.sin(X) * captured))
    assert made.trace(X).metadata.output_info[0].output_type is not OutputType.is_input


@behaviour("output aliasing / a loop hands its input through", "What a scan carries unchanged has the right gradient.")
def a_loop_hands_its_input_through():
    def looped(x, m):
        (kept, last), rows = lax.scan(lambda c, row: ((c[0], c[1] * row), row), (x, x), m)
        return kept, last, rows

    assert_near(aot.function(looped)(X, M), looped(X, M))
    assert_pulls_back_as_jax(looped, X, M)


@behaviour("output aliasing / a reshape that copies", "Reshape, ravel and swapaxes have JAX's numbers on any layout.")
def reshapes_of_transposed_arrays():
    assert_pulls_back_as_jax(lambda m: (m.T.reshape(6), jnp.ravel(m.T), jnp.swapaxes(m, 0, 1)), M)


@behaviour(
    "output aliasing / views of what the backward reads",
    "The backward reads the output moved back: gradients are JAX's.",
)
def views_of_what_the_backward_reads():
    square = normal(24, 3, 3)

    def views(x):
        h = jnp.exp(x @ x)
        return h.T, h[::-1], h.reshape(9), h[:, None, ::-1], jnp.sin(h)

    assert_pulls_back_as_jax(views, square)
    assert_pulls_back_as_jax(lambda x: jnp.exp(x @ x).T[::-1], square)
    assert_pulls_back_as_jax(lambda x: jnp.exp(x @ x).T, lax.complex(square, square))
    assert_pulls_back_as_jax(lambda x: lax.scan(lambda h, _: (jnp.exp(h @ h * 0.1), h.T), x, None, 3), square)


@behaviour("output aliasing / views of random keys", "They are views like those of numbers.")
def views_of_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    info, _ = output_infos(lambda x, keys: (keys[::-1], jnp.sin(x)), X, keys)
    assert (info.output_type, info.base_idx) == (OutputType.alias_of_input, 1)
    again = jax.random.key_data(regenerated(info, keys))
    assert_near(again, jax.random.key_data(keys)[::-1])


# ------------------------------------------------------------------------------------------------ aliased inputs


def product(a, b):
    """A function that is not symmetric in its arguments."""
    return jnp.sum(a * jnp.sin(b))


@behaviour("aliased inputs / the same tensor twice", "Each argument has its own gradient, as in jax.grad.")
def the_same_array_twice_as_arguments():
    assert_as_jax(product, X, X, argnums=(0, 1))
    assert_as_jax(product, X, X, argnums=1)
    assert_pulls_back_as_jax(product, X, X)


@behaviour(
    "aliased inputs / duplicates are taken out", "The program has one input, and metadata knows the other place."
)
def a_duplicate_enters_the_program_once():
    traced = aot.function(product, argnums=(0, 1)).trace(X, X)
    assert [info.duplicate_of for info in traced.metadata.input_info] == [None, 0]
    assert counts(traced.joint) == (2, 3)  # array and cotangent in, loss and two gradients out
    assert counts(traced.partition().forward)[0] == 1


@behaviour("aliased inputs / duplicates in a tree", "Two places of one tree, and an argument beside it.")
def the_same_array_twice_in_a_tree():
    def loss(tree, x):
        return jnp.sum(tree["a"] * jnp.sin(tree["b"][0]) * jnp.exp(x))

    assert_as_jax(loss, {"a": X, "b": [X]}, Y)
    assert_as_jax(loss, {"a": X, "b": [X]}, X, argnums=(0, 1))


@behaviour("aliased inputs / duplicates, torture case", "Three places, other arrays between, some places unused.")
def the_same_array_three_times_among_others():
    def loss(a, b, c, d, e):
        return jnp.sum(a * jnp.sin(c) * jnp.exp(e) + b)

    traced = aot.function(loss, argnums=(0, 1, 2, 3, 4)).trace(X, Y, X, Y, X)
    assert [info.duplicate_of for info in traced.metadata.input_info] == [None, None, 0, 1, 0]
    assert_as_jax(loss, X, Y, X, Y, X, argnums=(0, 1, 2, 3, 4))
    assert_as_jax(loss, X, Y, X, Y, X, argnums=(4, 2))


@behaviour("aliased inputs / the left one is differentiated", "One place is differentiated, the other is a constant.")
def one_of_two_places_is_differentiated():
    assert_near(aot.function(product, argnums=0).grad(X, X), jnp.sin(X))
    assert_near(aot.function(product, argnums=1).grad(X, X), X * jnp.cos(X))
    assert_near(jax.grad(aot.function(product), 1)(X, X), X * jnp.cos(X))


@behaviour("aliased inputs / duplicates under another compiler", "Under jax.jit one tracer at two places is one array.")
def the_same_array_twice_inside_jit():
    made = aot.function(product, argnums=(0, 1))
    want = jax.jit(jax.value_and_grad(product, (0, 1)))(X, X)
    assert_near(jax.jit(lambda x: made.value_and_grad(x, x))(X), want)
    assert_near(jax.grad(lambda x: made(x, x))(X), jax.grad(lambda x: product(x, x))(X))
    assert_near(jax.jit(lambda x: made.vjp(x, x)[1](ONE))(X), want[1])


@behaviour(
    "aliased inputs / a program that was made without duplicates",
    "Called with one array twice, it has the right gradients.",
)
def a_program_for_two_arrays_takes_one_twice():
    made = aot.function(product, argnums=(0, 1))
    for a, b in ((X, Y), (X, X), (Y, X), (Y, Y)):
        assert_near(made.value_and_grad(a, b), jax.jit(jax.value_and_grad(product, (0, 1)))(a, b))
    compiled = made.trace(X, Y).partition().compile()
    assert_near(compiled.value_and_grad(X, X), jax.value_and_grad(product, (0, 1))(X, X))


@behaviour("aliased inputs / invalid dupe", "A program made for one array twice refuses two arrays.")
def a_program_for_one_array_twice_refuses_two():
    for executables in (1, 2):
        compiled = aot.function(product, argnums=(0, 1)).trace(X, X).partition().compile(executables)
        assert_near(compiled.value_and_grad(Y, Y), jax.value_and_grad(product, (0, 1))(Y, Y))
        for way in (compiled.value_and_grad, compiled.forward, compiled.vjp):
            assert refusal(CallError, way, X, Y) == (
                "args[1] was the same array as args[0] when traced, and is another one now.\n"
                "Trace and compile for this call too, or call the function itself, which does so by need."
            )


@behaviour("aliased inputs / duplicates of integers", "An array of integers at two places enters once as well.")
def the_same_integers_twice():
    n = jnp.arange(3)
    assert_as_jax(lambda x, a, b: jnp.sum(jnp.sin(x)[a] * x[b]), X, n, n)


@behaviour(
    "aliased inputs / an array that is passed and captured", "Captured it is a constant, passed it is differentiated."
)
def an_array_is_passed_and_captured():
    captured = X
    assert_as_jax(lambda x: jnp.sum(jnp.sin(x) * captured), captured)


@behaviour("aliased inputs / duplicates that are returned", "Both outputs are the one array.")
def a_duplicate_is_returned():
    first, second, _ = aot.function(lambda a, b: (b, a, a * jnp.sin(b)))(X, X)
    assert first is X and second is X
    assert_pulls_back_as_jax(lambda a, b: (b, a, a * jnp.sin(b)), X, X)


@behaviour("aliased inputs / overlapping storages", "Slices of one array are arrays of their own.")
def slices_of_one_array_are_different_arrays():
    base = normal(23, 4)
    assert_as_jax(product, base[:3], base[1:], argnums=(0, 1))


@behaviour("aliased inputs / equal values are no duplicates", "Python numbers and small equal arrays are told apart.")
def equal_numbers_are_no_duplicates():
    metadata = aot.function(lambda a, b: a * b).trace(2.0, 2.0).metadata
    assert [info.duplicate_of for info in metadata.input_info] == [None, None]
    assert_as_jax(lambda a, b: a * jnp.sin(b), 2.0, 2.0, argnums=(0, 1))


@behaviour("aliased inputs / a donated duplicate", "An array passed twice is not given up, where plain JAX would fail.")
def a_duplicate_is_not_donated():
    given = X + 0
    got = aot.function(product, argnums=(0, 1), donate_argnums=(0,)).value_and_grad(given, given)
    assert_near(got, jax.jit(jax.value_and_grad(product, (0, 1)))(X, X))
    assert not given.is_deleted()


@behaviour(
    "misc / duplicated_arguments_on_tensor_overlap",
    "One call with and one without duplicates get programs of their own.",
)
def calls_with_and_without_duplicates_alternate():
    traces = []

    def loss(a, b):
        traces.append(None)
        return product(a, b)

    made = aot.function(loss, argnums=(0, 1))
    for _ in range(3):
        made.value_and_grad(X, Y)
        made.value_and_grad(X, X)
    settled = len(traces)
    made.value_and_grad(X, Y)
    made.value_and_grad(Y, Y)
    assert len(traces) == settled


@behaviour("misc / merged computations of duplicates", "What is computed of one array twice is computed once.")
def what_is_computed_twice_of_one_array_is_computed_once():
    traced = aot.function(lambda a, b: jnp.sum(jnp.tanh(a) * jnp.tanh(b))).trace(X, X)
    assert primitives(traced.partition().forward).count("tanh") == 1
    apart = aot.function(lambda a, b: jnp.sum(jnp.tanh(a) * jnp.tanh(b))).trace(X, Y)
    assert primitives(apart.partition().forward).count("tanh") == 2


@behaviour(
    "output aliasing / outputs alias the right input of several", "Of equal inputs each output is the one it was."
)
def outputs_are_the_right_input_of_equal_ones():
    a, b, c = X + 0, X + 0, X + 0
    out = aot.function(lambda a, b, c: (c, a, jnp.sin(b), b))(a, b, c)
    assert out[0] is c and out[1] is a and out[3] is b


@behaviour(
    "output aliasing / an alias under vmap and grad", "Composed with JAX's transformations the numbers are JAX's."
)
def aliases_under_transformations():
    def both(x):
        return x, jnp.sin(x), x[::-1]

    made, rows = aot.function(both), jnp.stack([X, Y])
    assert_near(jax.vmap(made)(rows), jax.vmap(both)(rows))
    assert_near(jax.jvp(made, (X,), (Y,)), jax.jvp(both, (X,), (Y,)))
    assert_near(jax.jacrev(made)(X), jax.jit(jax.jacrev(both))(X))


@behaviour(
    "output aliasing / an output changed by the caller",
    "Deleting what a program made does not touch the caller's arrays.",
)
def deleting_an_output_touches_nothing_else():
    given = X + 0
    out, view = aot.function(lambda x: (jnp.sin(x), x.reshape(3, 1)))(given)
    out.delete()
    view.delete()
    assert_near(given, X)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(out)
