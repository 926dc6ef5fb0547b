"""What a second pair of eyes found: each of these failed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition import Plan
from jointcut.partition.errors import CallError, DerivativeError, JointcutError, PlanError, StrategyError, TraceError

W = jnp.arange(6.0).reshape(3, 2) / 5
X = jnp.arange(12.0).reshape(4, 3) / 7


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def power(n, w):
    return jnp.sum(w**n)


@pytest.mark.parametrize("way", ["__call__", "value_and_grad", "vjp"])
def test_equal_static_values_of_other_types_are_other_signatures(way):
    def kind(w, k):
        return jnp.sum(w) * {bool: 2.0, int: 5.0, float: 1.0}[type(k)]

    call = getattr(aot.function(kind, static_argnums=1), way)
    got = [float(jax.tree.leaves(call(jnp.ones(1), k))[0]) for k in (1, 1.0, True)]
    assert got == [5.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({"static_argnums": 1}, (W,), {"k": 2.0}),
        ({"static_argnames": "k"}, (W, 2.0), {}),
    ],
    ids=["number by keyword", "name by position"],
)
@pytest.mark.parametrize("way", ["__call__", "value_and_grad", "vjp"])
def test_static_arguments_are_found_by_either_name(way, options, args, kwargs):
    getattr(aot.function(lambda w, k: jnp.sum(w) * k, **options), way)(*args, **kwargs)


@pytest.mark.parametrize("static", [0, 1])
def test_vjp_with_static_arguments(static):
    args = (3, W) if static == 0 else (W, 3)
    f = power if static == 0 else lambda w, n: power(n, w)
    _, pullback = aot.function(f, argnums=1 - static, static_argnums=static).vjp(*args)
    np.testing.assert_allclose(pullback(1.0)[1 - static], 3 * W**2, rtol=1e-5, atol=1e-6)


def test_unknown_static_names_are_refused():
    with pytest.raises(ValueError, match="nope"):
        aot.function(loss, static_argnames="nope").value_and_grad(W, X)


def test_a_captured_array_is_not_baked_into_the_programs_of_value_and_grad_and_vjp():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(300, 300)), jnp.float32)
    made = aot.function(lambda v: jnp.sum(jnp.tanh(table @ v) ** 2))
    v = jnp.ones(300)
    jits = made.trace(v).partition().jits
    for name in ("step", "forward"):
        assert len(jits.jitted[name].lower(*jits.takes[name]()).as_text()) < 40_000


def test_an_eager_gradient_is_traced_once():
    traces = []
    made = aot.function(lambda w, x: (traces.append(None), loss(w, x))[1])
    for _ in range(3):
        jax.grad(made)(W, X)
    assert len(traces) == 1


@pytest.mark.parametrize("function", [lambda w: (jnp.sum(w),), lambda w: {"loss": jnp.sum(w)}])
def test_a_scalar_in_a_container_is_no_loss(function):
    with pytest.raises(TypeError):
        aot.function(function).value_and_grad(W)


@pytest.mark.parametrize("out", [lambda s: s, lambda s: (s,), lambda s: (s, 1, 2)], ids=["scalar", "one", "three"])
def test_has_aux_needs_a_pair(out):
    def f(w):
        return out(jnp.sum(w))

    with pytest.raises(TypeError):
        jax.value_and_grad(f, has_aux=True)(W)
    with pytest.raises(TraceError, match="has_aux"):
        aot.function(f, has_aux=True).value_and_grad(W)


@pytest.mark.parametrize(
    "run",
    [
        lambda f: f.value_and_grad(W, [2.0]),
        lambda f: f.vjp(W, [2.0]),
        lambda f: jax.jit(lambda w: f.value_and_grad(w, [2.0]))(W),
        lambda f: f.value_and_grad(W, ([2.0],)),
        lambda f: f.trace(W, [2.0]),
    ],
    ids=["vag", "vjp", "inside jit", "deep", "trace"],
)
def test_unhashable_static_is_jaxs_type(run):
    f = aot.function(lambda w, k: jnp.sum(w) * 2, static_argnums=1)
    with pytest.raises(JointcutError) as caught:
        run(f)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("ct", [(W,), jnp.ones(3), W.astype(jnp.bfloat16)], ids=["tree", "shape", "dtype"])
def test_wrong_cotangent_is_jaxs_type(ct):
    with pytest.raises(ValueError):
        jax.vjp(lambda w: w * 2, W)[1](ct)
    with pytest.raises(ValueError):
        aot.function(lambda w: w * 2).vjp(W)[1](ct)


def test_float0_of_wrong_shape():
    with pytest.raises(JointcutError):
        aot.function(lambda w: (w, jnp.arange(3))).vjp(W)[1]((W, np.zeros(7, jax.dtypes.float0)))


def test_string_cotangent():
    with pytest.raises(JointcutError):
        aot.function(lambda w: {"a": w}).vjp(W)[1]({"a": "s"})


@pytest.mark.parametrize(
    "options",
    [
        {"argnums": -1, "static_argnums": 1},
        {"argnums": 1, "static_argnums": -1},
        {"argnums": 1, "static_argnames": "k"},
    ],
    ids=str,
)
def test_overlap_found_whatever_the_spelling(options):
    with pytest.raises(TraceError, match="both name"):
        aot.function(lambda w, k: jnp.sum(w) * k, **options).value_and_grad(W, 2.0)


@pytest.mark.parametrize("argnums", [None, (0, 0), (0, -2)], ids=str)
def test_argnums_nonsense(argnums):
    with pytest.raises(TraceError):
        aot.function(loss, argnums=argnums).value_and_grad(W, X)


def test_no_argnums_is_a_value_without_gradients():
    value, gradients = aot.function(loss, argnums=()).value_and_grad(W, X)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-5, atol=1e-6)
    assert gradients == ()


def test_users_own_not_implemented_error_is_not_a_missing_derivative():
    def f(w):
        raise NotImplementedError("todo in my model")

    with pytest.raises(NotImplementedError) as caught:
        aot.function(f).value_and_grad(W)
    assert not isinstance(caught.value, DerivativeError)


def test_plan_with_unknown_value():
    with pytest.raises(PlanError, match=r"plan.saved\[%99999\] does not exist"):
        aot.function(loss).trace(W, X).partition(lambda g: Plan.of(g, [99999]))


def test_strategy_unhashable():
    with pytest.raises(StrategyError):
        aot.function(loss, strategy=["min_cut"])


def test_static_difference_names_path():
    c = aot.function(lambda w, k: jnp.sum(w) * k, static_argnums=1).trace(W, 2.0).partition().compile()
    with pytest.raises(CallError, match=r"args\[1\]"):
        c.value_and_grad(W, 3.0)


def test_compiled_has_vjp():
    aot.function(loss).trace(W, X).partition().compile().vjp(W, X)


def test_default_compile_of_nonscalar():
    c = aot.function(lambda w: w * 2).trace(W).partition().compile()
    assert c.executables == 2


def test_trace_errors_name_users_function():
    def branches(x):
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        aot.function(branches).value_and_grad(1.0)
    assert "branches" in str(caught.value) and "joint.py" not in str(caught.value)


def test_note_on_plain_call():
    def branches(x):
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        aot.function(branches)(1.0)
    assert any("jointcut" in n for n in caught.value.__notes__)


def test_range_argnums():
    aot.function(loss, argnums=range(2)).value_and_grad(W, X)


def test_executables_true():
    with pytest.raises(CallError):
        aot.function(loss).trace(W, X).partition().compile(executables=True)


def test_object_array_message():
    with pytest.raises(TraceError, match="dtype"):
        aot.function(loss).value_and_grad(W, np.array(["a"]))


def test_float32_spacing():
    with pytest.raises(CallError, match=r"float32\[3,2\]"):
        aot.function(lambda w: w * 2).vjp(W)[1](jnp.ones(3))
