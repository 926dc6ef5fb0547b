"""Inputs and outputs of which some carry no derivative; cotangents that are zero; derivatives of derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

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
from jointcut.partition.errors import CallError, TraceError

X, Y = normal(30, 3), normal(31, 3)
N = jnp.arange(3)
ONE = jnp.float32(1)
FLOAT0 = np.zeros(3, jax.dtypes.float0)


# ------------------------------------------------------------------------------------------------ inputs


@behaviour("requires_grad mixtures / some inputs do not need it", "Arguments outside argnums are constants.")
def some_arguments_are_differentiated():
    def loss(x, y, z):
        return jnp.sum(jnp.sin(x * y) * z)

    for argnums in (1, (2, 0), -1, (0, 1, 2)):
        assert_as_jax(loss, X, Y, X + Y, argnums=argnums)
    infos = aot.function(loss, argnums=(0, 2)).trace(X, Y, X + Y).metadata.input_info
    assert [info.requires_grad for info in infos] == [True, False, True]


@behaviour(
    "requires_grad mixtures / no work for inputs that do not need it", "Their gradient is not in the joint program."
)
def no_gradient_is_computed_in_vain():
    def loss(a, b):
        return jnp.sum(jnp.sin(a @ b))

    a, b = normal(32, 2, 3), normal(33, 3, 2)
    products = [
        primitives(aot.function(loss, argnums=argnums).trace(a, b).joint).count("dot_general")
        for argnums in (0, 1, (0, 1))
    ]
    assert products == [2, 2, 3]


@behaviour("requires_grad mixtures / integer inputs", "vjp gives float0 zeros for integers, Booleans and keys.")
def inputs_without_derivative_get_float0():
    def scaled(x, n, mask, key):
        return jnp.where(mask, jnp.sin(x)[n] * jax.random.normal(key, (3,)), x)

    args = (X, N, X > 0, jax.random.key(0))
    assert_pulls_back_as_jax(scaled, *args)
    cotangents = aot.function(scaled).vjp(*args)[1](X)
    assert [ct.dtype == jax.dtypes.float0 for ct in cotangents] == [False, True, True, True]


@behaviour("requires_grad mixtures / an integer is asked for its gradient", "Refused, with path, dtype and way out.")
def an_integer_is_not_differentiated():
    made = aot.function(lambda weights: jnp.sum(jnp.sin(weights["w"])), argnums=0)
    for way in (made.value_and_grad, made.grad, made.trace):
        assert refusal(TraceError, way, {"n": N, "w": X}) == (
            "args[0]['n'] is int32: value_and_grad differentiates floating-point arguments.\n"
            "Say which arrays are differentiated, as filter=lambda x: x.dtype == jnp.float32, convert it, or use vjp."
        )


@behaviour(
    "requires_grad mixtures / unused inputs", "An input that nothing reads has a zero gradient of its own shape."
)
def an_unused_input_has_a_zero_gradient():
    def loss(weights, x, other):
        return jnp.sum(jnp.sin(weights["used"]))

    weights = {"used": X, "unused": normal(34, 2, 2)}
    assert_as_jax(loss, weights, Y, N, argnums=(0, 1))
    assert_pulls_back_as_jax(loss, weights, Y, N)
    infos = aot.function(loss).trace(weights, Y, N).metadata.input_info
    assert {info.path: info.is_read for info in infos} == {
        "args[0]['unused']": False,
        "args[0]['used']": True,
        "args[1]": False,
        "args[2]": False,
    }


@behaviour("requires_grad mixtures / an input used only by its shape", "It is not read, and its gradient is zero.")
def an_input_of_which_only_the_shape_is_used():
    def loss(x, like):
        return jnp.sum(jnp.sin(x) * jnp.ones_like(like))

    assert_as_jax(loss, X, Y, argnums=(0, 1))
    assert [info.is_read for info in aot.function(loss).trace(X, Y).metadata.input_info] == [True, False]


@behaviour("requires_grad mixtures / detached inputs", "What passes stop_gradient only has a zero gradient.")
def a_stopped_input_has_a_zero_gradient():
    assert_as_jax(lambda x, y: jnp.sum(jnp.sin(x) * lax.stop_gradient(y)), X, Y, argnums=(0, 1))
    assert_as_jax(lambda x: jnp.sum(lax.stop_gradient(jnp.sin(x))), X)


@behaviour("requires_grad mixtures / a detached input is used as it is too", "Only the other use is differentiated.")
def an_input_is_used_stopped_and_as_it_is():
    assert_as_jax(lambda x: jnp.sum(jnp.sin(x) * lax.stop_gradient(jnp.exp(x))), X)


@behaviour(
    "requires_grad mixtures / different inputs at each call",
    "jax.grad by other arguments cuts anew, rightly each time.",
)
def one_function_is_differentiated_by_other_arguments():
    def loss(x, y):
        return jnp.sum(jnp.sin(x) * jnp.exp(y))

    made = aot.function(loss)
    for argnums in (0, 1, (0, 1), 0, (1, 0)):
        assert_near(jax.grad(made, argnums)(X, Y), jax.grad(loss, argnums)(X, Y))


# ------------------------------------------------------------------------------------------------ outputs


@behaviour("requires_grad mixtures / integer outputs", "They take a float0 cotangent, and carry none in metadata.")
def integer_outputs_carry_no_cotangent():
    def several(x):
        return jnp.sin(x), jnp.argmax(x), x > 0

    assert_pulls_back_as_jax(several, X)
    infos = aot.function(several).trace(X).metadata.output_info
    assert [info.requires_grad for info in infos] == [True, False, False]


@behaviour("requires_grad mixtures / outputs that do not need it", "A float output of constants carries no cotangent.")
def outputs_of_constants_carry_no_cotangent():
    def several(x, y):
        return jnp.sin(x), jnp.cos(y), jnp.ones(2)

    infos = aot.function(several).trace(X, Y).metadata.output_info
    assert [info.requires_grad for info in infos] == [True, False, False]
    assert_pulls_back_as_jax(several, X, Y)


@behaviour(
    "requires_grad mixtures / outputs made under no_grad",
    "An output behind stop_gradient takes a cotangent and ignores it.",
)
def stopped_outputs_ignore_their_cotangent():
    def several(x):
        return jnp.sin(x), lax.stop_gradient(jnp.exp(x))

    assert_pulls_back_as_jax(several, X)
    _, pullback = aot.function(several).vjp(X)
    assert_near(pullback((X, 100 * X)), pullback((X, 0 * X)))


@behaviour("requires_grad mixtures / aux", "Extras beside the loss are not differentiated, whatever they are.")
def aux_is_not_differentiated():
    def loss(x, y):
        h = jnp.sin(x) * y
        return jnp.sum(h**2), {"h": h, "n": jnp.argmax(h), "none": None, "x": x}

    assert_as_jax(loss, X, Y, has_aux=True)
    infos = aot.function(loss, has_aux=True).trace(X, Y).metadata.output_info
    assert [(info.path, info.requires_grad) for info in infos] == [
        ("result[0]", True),
        ("result[1]['h']", False),
        ("result[1]['n']", False),
        ("result[1]['x']", False),
    ]


@behaviour("requires_grad mixtures / aux of vjp and grad", "Both hand it over beside the pullback or the gradient.")
def aux_of_vjp_and_of_grad():
    def loss(x):
        return jnp.sum(jnp.sin(x)), {"h": jnp.cos(x)}

    made = aot.function(loss, has_aux=True)
    want, jax_pull, want_aux = jax.vjp(loss, X, has_aux=True)
    out, pullback, aux = made.vjp(X)
    assert_near((out, aux, pullback(ONE)), (want, want_aux, jax_pull(ONE)))
    assert_near(made.grad(X), (jnp.cos(X), {"h": jnp.cos(X)}))


@behaviour("requires_grad mixtures / has_aux without a pair", "Refused, with what was returned.")
def has_aux_needs_a_pair():
    def loss(x):
        return jnp.sum(x), x, x

    assert refusal(TraceError, aot.function(loss, has_aux=True).value_and_grad, X) == (
        "has_aux=True needs a pair, but the function returned 3 values.\nReturn (output, aux), or leave has_aux out."
    )


@behaviour("requires_grad mixtures / a gradient that is zero", "Outputs of constants pull anything back to zero.")
def constants_pull_back_to_zero():
    assert_pulls_back_as_jax(lambda x: (jnp.ones(2), jnp.arange(2)), X)
    assert_as_jax(lambda x: jnp.sum(jnp.ones(2)), X)


@behaviour("requires_grad mixtures / an output that is a literal", "A number of the program has zero gradients.")
def a_literal_has_zero_gradients():
    assert_as_jax(lambda x: jnp.float32(3), X)
    assert_as_jax(lambda x: (jnp.sum(jnp.sin(x)), 3.0), X, has_aux=True)


# ------------------------------------------------------------------------------------------------ inference


@behaviour("requires_grad mixtures / nothing needs a gradient", "There is no joint program: metadata says inference.")
def nothing_to_differentiate_makes_no_joint_program():
    traced = aot.function(lambda nothing, x: jnp.sum(jnp.sin(x))).trace({}, X)
    assert not traced.metadata.is_train
    assert traced.subclass_metadata.grad_input_metas is None
    assert primitives(traced.joint) == ["sin", "reduce_sum"]
    cut = traced.partition()
    assert (counts(cut.forward), counts(cut.backward), cut.plan.saved) == ((1, 1), (0, 0), ())
    assert cut.signature.backward_signature is None
    assert_near(cut.compile().value_and_grad({}, X), jax.value_and_grad(lambda a, x: jnp.sum(jnp.sin(x)))({}, X))


@behaviour(
    "requires_grad mixtures / an inference graph without float outputs", "No output can carry a cotangent: no backward."
)
def no_output_to_differentiate_makes_no_joint_program():
    traced = aot.function(lambda x: jnp.argmax(jnp.sin(x))).trace(X)
    assert not traced.metadata.is_train
    assert traced.metadata.traced_tangents == ()


@behaviour(
    "requires_grad mixtures / an inference graph with inputs that need it", "A call runs the forward and saves nothing."
)
def a_call_saves_nothing():
    made = aot.function(lambda x, y: jnp.tanh(x * y) ** 2)
    text = jax.jit(made).lower(X, Y)
    assert len(jax.tree.leaves(text.out_info)) == 1
    assert_near(made(X, Y), jnp.tanh(X * Y) ** 2)


@behaviour(
    "requires_grad mixtures / training and inference of one function", "They alternate, each with programs of its own."
)
def training_and_inference_alternate():
    made = aot.function(lambda x: jnp.sum(jnp.sin(x)))
    for _ in range(2):
        assert_near(made(X), jnp.sum(jnp.sin(X)))
        assert_near(made.value_and_grad(X), (jnp.sum(jnp.sin(X)), jnp.cos(X)))


@behaviour("requires_grad mixtures / inner grad", "A gradient taken inside the function is differentiated.")
def a_gradient_inside_is_differentiated():
    def energy(x):
        return jnp.sum(jnp.sin(x) ** 3)

    def loss(x):
        return jnp.sum(jax.grad(energy)(x) ** 2)

    assert_as_jax(loss, X)
    assert_near(aot.function(lambda x: jnp.sum(aot.function(energy).grad(x) ** 2)).grad(X), jax.jit(jax.grad(loss))(X))


@behaviour("requires_grad mixtures / grad_context", "jvp and linearize inside the function are differentiated.")
def forward_mode_inside_is_differentiated():
    def loss(x, v):
        out, tangent = jax.jvp(jnp.sin, (x,), (v,))
        _, linear = jax.linearize(jnp.exp, x)
        return jnp.sum(out * tangent) + jnp.sum(linear(v))

    assert_as_jax(loss, X, Y, argnums=(0, 1))


# ------------------------------------------------------------------------------------------------ tangents


def pair(x, y):
    """Two outputs, each of which needs something else."""
    return jnp.sin(x) * y, jnp.exp(y)


@behaviour("tangents / an output without a gradient", "A float0 cotangent is a zero, also of a float output.")
def a_float0_cotangent_is_zero():
    _, pullback = aot.function(pair).vjp(X, Y)
    want = jax.vjp(pair, X, Y)[1]
    assert_near(pullback((X, FLOAT0)), want((X, 0 * X)))
    assert_near(pullback((FLOAT0, X)), want((0 * X, X)))
    assert_near(pullback((FLOAT0, FLOAT0)), want((0 * X, 0 * X)))


@behaviour("tangents / undefined gradients are materialised or not", "A SymbolicZero is a zero that is never made.")
def a_symbolic_zero_is_zero():
    zero = SymbolicZero(jax.typeof(X))
    _, pullback = aot.function(pair).vjp(X, Y)
    want = jax.vjp(pair, X, Y)[1]
    assert_near(pullback((X, zero)), want((X, 0 * X)))
    assert_near(pullback((zero, X)), want((0 * X, X)))


@behaviour("tangents / a zero cotangent saves work", "What only the missing cotangent feeds is not in the program.")
def a_zero_cotangent_saves_work():
    def two(a, b):
        return jnp.sum(jnp.sin(a @ b)), jnp.sum(jnp.tanh(a @ a))

    a, b = normal(35, 3, 3), normal(36, 3, 3)
    _, pullback = aot.function(two).vjp(a, b)
    products = []
    for seeds in ((ONE, ONE), (ONE, np.zeros((), jax.dtypes.float0)), (np.zeros((), jax.dtypes.float0), ONE)):
        jaxpr = jax.make_jaxpr(lambda seeds=seeds: pullback(seeds))()
        products.append(primitives(jaxpr).count("dot_general"))
    assert products == [4, 2, 2]


@behaviour("tangents / zeros inside jax.grad", "Where jax.grad reads one output of several, the others are zeros.")
def jax_grad_reads_one_output_of_several():
    made = aot.function(pair)
    for i in (0, 1):
        want = jax.jit(jax.grad(lambda x, y, i=i: jnp.sum(pair(x, y)[i] ** 2), (0, 1)))(X, Y)
        assert_near(jax.grad(lambda x, y, i=i: jnp.sum(made(x, y)[i] ** 2), (0, 1))(X, Y), want)


@behaviour("tangents / cotangents of the expected type", "Metadata tells the type of each cotangent.")
def metadata_tells_the_types_of_cotangents():
    def several(x, z):
        return x * 2, jnp.argmax(x), z * z, (x * 2).astype(jnp.bfloat16)

    metadata = aot.function(several, argnums=(0, 1)).trace(X, lax.complex(X, Y)).metadata
    assert [str(m) for m in metadata.traced_tangents] == ["float32[3]", "complex64[3]", "bfloat16[3]"]
    assert [m.unwrapped_idx for m in metadata.subclass_tangent_meta] == [0, 1, 2]


@behaviour("tangents / a cotangent of another type", "Refused with its path, its type and that of the output.")
def a_cotangent_of_another_type_is_refused():
    cure = "Give a cotangent with the structure, shapes and dtypes of the output (float0 or zeros for integers)."
    made = aot.function(lambda x: {"a": jnp.sin(x)})
    for _, pullback in (made.vjp(X), made.trace(X).partition().compile().vjp(X)):
        said = refusal(CallError, pullback, {"a": X.astype(jnp.bfloat16)})
        assert said.replace(" ", "") == f"cotangent['a'] is bfloat16[3], the output float32[3].\n{cure}".replace(
            " ", ""
        )
        assert refusal(CallError, pullback, X).startswith("The cotangent has the structure PyTreeDef(*), the output ")


@behaviour("tangents / a strided cotangent", "A cotangent of any origin is taken: a view, a broadcast, numpy's.")
def a_cotangent_of_any_origin_is_taken():
    m = normal(37, 2, 3)
    out, pullback = aot.function(lambda m: jnp.sin(m).T).vjp(m)
    want = jax.vjp(lambda m: jnp.sin(m).T, m)[1]
    seed = np.asarray(out)[::-1].copy()
    for given in (jnp.broadcast_to(ONE, (3, 2)), out[::-1], seed, np.asfortranarray(seed)):
        assert_near(pullback(given), want(jnp.asarray(given)))


@behaviour("tangents / retain_graph: the backward is run twice", "A pullback may be called again and again.")
def a_pullback_is_called_twice():
    _, pullback = aot.function(pair).vjp(X, Y)
    want = jax.vjp(pair, X, Y)[1]
    for scale in (1, 2, 1):
        assert_near(pullback((scale * X, Y)), want((scale * X, Y)))


@behaviour(
    "tangents / the backward is run twice without retain_graph",
    "A compiled pullback says that it has given up its residuals.",
)
def a_compiled_pullback_is_called_once():
    def squared(x):
        return jnp.sin(x) * x

    _, pullback = aot.function(squared).trace(X).partition().compile().vjp(X)
    want = jax.vjp(squared, X)[1](Y)[0]
    assert_near(pullback(Y), want)
    assert refusal(CallError, pullback, Y) == (
        "The pullback of squared was called before, and its residuals' memory has become the gradients.\n"
        "Say pullback(cotangent, keep_residuals=True) at every call but the last."
    )


@behaviour("tangents / retain_graph=True", "keep_residuals leaves a compiled pullback its residuals for another call.")
def a_compiled_pullback_keeps_its_residuals():
    def product(a, b):
        return jnp.sin(a @ b) @ b

    a, b = normal(38, 3, 3), normal(39, 3, 3)
    _, pullback = aot.function(product, argnums=(0, 1)).trace(a, b).partition().compile().vjp(a, b)
    want = jax.vjp(product, a, b)[1]
    assert_near(pullback(a, keep_residuals=True), want(a))
    assert_near(pullback(b, keep_residuals=True), want(b))
    assert_near(pullback(a), want(a))
    assert refusal(CallError, pullback, a, keep_residuals=True).startswith("The pullback of product was called before")


@behaviour("tangents / a refused cotangent", "After a refusal the compiled pullback can still be called.")
def a_refused_cotangent_uses_nothing_up():
    _, pullback = aot.function(jnp.sin).trace(X).partition().compile().vjp(X)
    refusal(CallError, pullback, (X,))
    assert_near(pullback(Y), jnp.cos(X) * Y)


# ------------------------------------------------------------------------------------------------ double backward


def cubed(x, y):
    """A function whose second and third derivatives are not zero."""
    return jnp.sum(jnp.sin(x) ** 3 * jnp.exp(y))


@behaviour(
    "double backward / a gradient is differentiated", "jax.grad of jax.grad of a function of ours, to third order."
)
def derivatives_of_derivatives():
    made = aot.function(cubed)
    assert_near(jax.hessian(made)(X, Y), jax.jit(jax.hessian(cubed))(X, Y))
    assert_near(jax.jacrev(jax.grad(made), 1)(X, Y), jax.jit(jax.jacrev(jax.grad(cubed), 1))(X, Y))

    def third(f):
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jax.grad(f)(x, Y)))(x)))

    assert_near(third(made)(X), third(cubed)(X))


@behaviour(
    "double backward / our own gradient is differentiated", "value_and_grad and vjp of ours compose with jax.grad."
)
def our_own_gradient_is_differentiated():
    made = aot.function(cubed)
    want = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(cubed)(x, Y) ** 2)))(X)
    assert_near(jax.grad(lambda x: jnp.sum(made.grad(x, Y) ** 2))(X), want)
    assert_near(jax.grad(lambda x: jnp.sum(made.vjp(x, Y)[1](ONE)[0] ** 2))(X), want)
    assert_near(jax.jit(jax.grad(lambda x: jnp.sum(made.grad(x, Y) ** 2)))(X), want)


@behaviour(
    "double backward / a gradient by the cotangent", "The pullback is linear in its cotangent, and knows its transpose."
)
def a_pullback_is_differentiated_by_its_cotangent():
    _, pullback = aot.function(pair).vjp(X, Y)
    _, want = jax.vjp(pair, X, Y)
    seeds = (X, Y)
    assert_near(jax.jvp(pullback, (seeds,), (seeds,)), jax.jvp(lambda s: tuple(want(s)), (seeds,), (seeds,)))


@behaviour("double backward / forward over reverse", "Hessian-vector products are JAX's.")
def hessian_vector_products():
    made = aot.function(cubed)
    got = jax.jvp(lambda x: jax.grad(made)(x, Y), (X,), (Y,))
    assert_near(got, jax.jvp(lambda x: jax.grad(cubed)(x, Y), (X,), (Y,)))


@behaviour("double backward / under vmap", "Gradients for each example of a batch.")
def gradients_for_each_example():
    made, rows = aot.function(cubed), normal(40, 4, 3)
    want = jax.vmap(jax.grad(cubed), (0, None))(rows, Y)
    assert_near(jax.vmap(jax.grad(made), (0, None))(rows, Y), want)
    assert_near(jax.vmap(made.grad, (0, None))(rows, Y), want)
