"""Each function of `aot.derivatives` is found where it belongs, and nowhere else, and has the same values there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut.aot.stages.cures.formula import Replacing
from jointcut.aot.stages.cures.patterns import FORMULAS
from jointcut.aot.stages.cures.trials import _merged
from jointcut.aot.trace.primal import primal
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.places import user_line
from jointcut.partition.rewrite import simplify

X, Y = jnp.array([0.3, 0.8, 1.4]), jnp.array([0.5, 0.2, 0.9])
A = jnp.array([[2.0, 0.5], [0.5, 1.0]])
FORMS = {
    "log_softmax(x)": lambda x: jnp.log(jax.nn.softmax(x)),
    "log_sigmoid(x)": lambda x: jnp.log(1 / (1 + jnp.exp(-x))),
    "logsumexp(x)": lambda x: jnp.log(jnp.sum(jnp.exp(x), keepdims=True)),
    "softplus(x)": lambda x: jnp.log1p(jnp.exp(x)),
    "logaddexp(x, y)": lambda x: jnp.log(jnp.exp(x) + jnp.exp(Y)),
    "softmax(x)": lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)),
    "sigmoid(x)": lambda x: jnp.exp(x) / (1 + jnp.exp(x)),
    "xlogy(x, y)": lambda x: jnp.log(x) * Y,
    "xlog1py(x, y)": lambda x: x * jnp.log1p(Y),
    "sinc(x / pi)": lambda x: jnp.sin(x) / x,
    "normalize(x)": lambda x: x / jnp.linalg.norm(x),
    "hypot(x, y)": lambda x: jnp.hypot(x, Y),
    "std(x)": lambda x: jnp.sqrt(jnp.var(x)),
    "norm(x)": lambda x: jnp.sqrt(jnp.dot(x, x)),
    "cdist(x, y)": lambda x: jnp.sqrt(jnp.maximum(jnp.dot(x, x) - 2 * jnp.dot(x, Y) + jnp.dot(Y, Y), 0.0)),
    "rsqrt(x)": lax.rsqrt,
    "power(x, y)": lambda x: x**-2,
    "arctan2(y, x)": lambda x: jnp.arctan2(x, Y),
    "prod(x)": jnp.prod,
    "logcumsumexp(x)": lax.cumlogsumexp,
}
OF_MATRICES = {
    "linalg.svd(x)": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "linalg.qr(x)": lambda a: jnp.linalg.qr(a)[1],
    "linalg.slogdet(x)": lambda a: jnp.linalg.slogdet(a)[1],
    "linalg.det(x)": lambda a: jnp.linalg.det(a * 1.5),
    "linalg.inv(x)": jnp.linalg.inv,
    "linalg.pinv(x)": jnp.linalg.pinv,
    "linalg.cholesky(x)": jnp.linalg.cholesky,
}


def replaced(name, function, x):
    """The program of a function, with a formula at every one of its lines; and how often it was found."""
    formula = next(f for f in FORMULAS if f.name == name)
    source = primal(function, [x], False)
    closed = source.closed if formula.is_named else _merged(simplify.inlined(source.closed))
    count = 0
    for line in sorted({user_line(eqn) for eqn in jaxprs.opened(closed)[0].eqns}):
        jaxpr, consts = jaxprs.opened(closed)
        replacing = Replacing(formula, line)
        closed, count = jaxprs.ClosedJaxpr(replacing.through(jaxpr), consts), count + replacing.count
    return runtime.evaluate(closed, *source.consts, x)[0], count


@pytest.mark.parametrize("name", [*FORMS, *OF_MATRICES])
def test_a_formula_is_found_once_and_has_the_values_of_what_it_replaces(name):
    function, x = (FORMS[name], X) if name in FORMS else (OF_MATRICES[name], A)
    got, count = replaced(name, function, x)
    assert count == 1
    np.testing.assert_allclose(got, function(x), rtol=2e-5, atol=1e-6)


OTHERS = {
    "softmax(x)": lambda x: jnp.exp(x) / jnp.sum(jnp.exp(Y)),
    "sinc(x / pi)": lambda x: jnp.sin(x) / Y,
    "normalize(x)": lambda x: x / jnp.linalg.norm(Y),
    "norm(x)": lambda x: jnp.sqrt(jnp.dot(x, Y)),
    "cdist(x, y)": lambda x: jnp.sqrt(jnp.maximum(x, 0.0)),
    "std(x)": lambda x: jnp.sqrt(jnp.sum(x * x)),
    "softplus(x)": lambda x: jnp.log(2 + jnp.exp(x)),
    "log_softmax(x)": lambda x: jnp.log(x / jnp.sum(x)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_alike_is_left_alone(name):
    assert replaced(name, OTHERS[name], X)[1] == 0
