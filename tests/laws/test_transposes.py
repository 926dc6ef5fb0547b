"""The transpose of a pullback is the forward derivative, wherever plain JAX can transpose its own pullback."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import bicgstab, cg

from jointcut import aot
from oracle import assert_same, is_inexact
from programs import CORPUS, EVERY_PROGRAM, named

OPTIONS = ({}, {"budget": 0.0}, {"policy": jax.checkpoint_policies.nothing_saveable}, {"derivatives": "finite"})
A_FEW = ("two_layers", "nested_scans", "complex_weights", "cond_in_scan", "bfloat16_weights", "dropout_in_scan")


def of_moving_parts(program, function):
    """The function of the inexact arrays of its arguments, which returns those of its output; and these arrays."""
    leaves, tree = jax.tree.flatten(program.args)
    chosen = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def moving(xs):
        given = dict(zip(chosen, xs, strict=True))
        args = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        out = function(*args, **program.kwargs)
        return [y for y in jax.tree.leaves(out[0] if program.has_aux else out) if is_inexact(y)]

    return moving, [jnp.asarray(leaves[i], jax.dtypes.result_type(leaves[i])) for i in chosen]


def transposed(function, xs, tangents, wrap=lambda pull: pull):
    out, pullback = jax.vjp(function, xs)
    return jax.linear_transpose(wrap(lambda cts: pullback(cts)[0]), out)(tangents)[0]


@pytest.mark.parametrize("program", CORPUS if EVERY_PROGRAM else [*map(named, A_FEW)], ids=lambda program: program.name)
def test_the_transpose_of_the_pullback_is_the_forward_derivative(program):
    if "jvp" in program.lacks:
        return
    number = CORPUS.index(program)
    options, wrap = OPTIONS[number % 4], (jax.jit, lambda pull: pull)[number // 4 % 2]
    with program.precision():
        plain, xs = of_moving_parts(program, program.function)
        everything = tuple(range(len(program.args)))
        ours, _ = of_moving_parts(
            program, aot.function(program.function, argnums=everything, has_aux=program.has_aux, **options)
        )
        tangents = [jnp.cos(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype) for x in xs]
        got = jax.jit(partial(transposed, ours, wrap=wrap))(xs, tangents)
        assert_same(got, jax.jvp(plain, (xs,), (tangents,))[1], program, slack=10)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "default"))
@pytest.mark.parametrize("program", list(map(named, A_FEW)), ids=lambda program: program.name)
def test_the_transpose_of_the_linearised_function_is_the_pullback(program, options):
    with program.precision():
        plain, xs = of_moving_parts(program, program.function)
        everything = tuple(range(len(program.args)))
        ours, _ = of_moving_parts(
            program, aot.function(program.function, argnums=everything, has_aux=program.has_aux, **options)
        )

        def by_both(function, xs):
            out, along = jax.linearize(function, xs)
            cts = [jnp.cos(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype) for y in out]
            return cts, along(xs), jax.linear_transpose(along, xs)(cts)[0]

        cts, moved, back = jax.jit(partial(by_both, ours))(xs)
        assert_same(moved, jax.jvp(plain, (xs,), (xs,))[1], program, slack=10)
        assert_same(back, jax.vjp(plain, xs)[1](cts)[0], program, slack=10)


A = np.eye(3, dtype=np.float32) * 4 + np.arange(9, dtype=np.float32).reshape(3, 3) / 9
X = jnp.array([0.2, 0.5, 1.0])


def curved(x):
    return A @ x + jnp.sin(x * x)


@pytest.mark.parametrize("options", [{}, {"derivatives": "finite"}], ids=str)
def test_solvers_take_a_pullback_and_are_differentiated_through_it(options):
    def solutions(function, x):
        def pull(ct):
            return jax.vjp(function, x)[1](ct)[0]

        def squared(v):
            return pull(jax.linearize(function, x)[1](v))

        return [bicgstab(pull, X)[0], cg(squared, X)[0]]

    got, want = (
        jax.jit(jax.value_and_grad(lambda x, f=f: sum(map(jnp.sum, solutions(f, x)))))(X)
        for f in (aot.function(curved, **options), curved)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3)


def test_a_complex_solver_takes_the_adjoint_of_a_derivative():
    weights = jax.lax.complex(A, A.T / 4)

    def holomorphic(z):
        return weights @ z + 0.1 * z * z

    def solved(function):
        z = jax.lax.complex(X, X[::-1])

        def squared(v):
            forward = jax.jvp(function, (z,), (v,))[1]
            return jax.vjp(function, z)[1](forward.conj())[0].conj()

        return cg(squared, z)[0]

    np.testing.assert_allclose(solved(aot.function(holomorphic)), solved(holomorphic), rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"derivatives": "finite"}], ids=str)
def test_the_pullback_of_the_method_is_transposed_and_differentiated_too(options):
    out, pullback = aot.function(curved, **options).vjp(X)
    want = jax.jvp(curved, (X,), (X,))[1]
    for got in (
        jax.linear_transpose(lambda ct: pullback(ct)[0], out)(X)[0],
        jax.vjp(lambda ct: pullback(ct)[0], out)[1](X)[0],
        jax.vmap(jax.linear_transpose(lambda ct: pullback(ct)[0], out))(X[None])[0][0],
        jax.linear_transpose(jax.linearize(lambda ct: pullback(ct)[0], out)[1], out)(X)[0],
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_forward_that_is_not_linear_is_still_refused():
    finite = aot.function(jnp.sin, derivatives="finite")
    with pytest.raises(NotImplementedError, match="for 'sin' not implemented"):
        jax.linear_transpose(lambda x: jax.vjp(finite, x)[0], X)(X)
