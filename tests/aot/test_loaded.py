"""A loaded pair: in a process that does not have the model's source, and given what it cannot take."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.trace.shapes import shapes
from jointcut.partition.errors import CallError, TraceError

X = np.float32([0.1, -0.4, 0.9])
AGAIN = "Export for these arguments too, or pass what it was exported for."
SHAPE = "Export for this shape too, or for any: aot.shapes makes sizes that are known later."


@pytest.fixture
def reloaded(tmp_path):
    """Export a function and load it again."""

    def run(function, *args, platforms="cpu", order=1, sizes=None, named=None, **options):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        made = aot.function(function, **options)
        made.export(path, *args, platforms=platforms, order=order, sizes=sizes, **(named or {}))
        return aot.load(path)

    return run


def told(run, error=CallError):
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def loss(weights, x):
    return jnp.sum(jnp.tanh(x @ weights["w"]) ** 2) + jnp.sum(weights["b"])


WEIGHTS = {"w": np.float32([[0.3, -0.2], [0.1, 0.5], [0.7, 0.4]]), "b": X}


# ------------------------------------------------------------------------------------------------- another process


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """A class that the other process does not have."""

    weight: Any
    bias: Any

    def __call__(self, x):
        return jnp.tanh(x @ self.weight + self.bias)


@dataclass(frozen=True)
class Settings:
    """A static argument of a class that the other process does not have either."""

    power: int


def model_loss(model, x, settings):
    hidden = model(x)
    return jnp.mean(hidden**settings.power), {"model": model, "hidden": hidden}


STRANGER = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from dataclasses import dataclass
from jointcut import aot

@dataclass(frozen=True)
class Settings:
    power: int

folder, inputs, out = sys.argv[1:]
held = dict(np.load(inputs))
x = held.pop("x")
run, given = aot.load(folder), (x, Settings(2))
(value, aux), gradient = run.value_and_grad(held, *given)
_, pullback, _ = run.vjp(held, *given)
_, again = jax.jit(lambda weights: jax.value_and_grad(run, has_aux=True)(weights, *given))(held)
weights = held
for _ in range(5):
    gradients, _ = run.grad(weights, *given)
    weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients)
found = {"called": run(held, *given)[0], "value": value, "hidden": aux["hidden"], "kept": aux["model"]["bias"]}
for name, tree in {"g": gradient, "pulled": pullback(jnp.float32(1)), "jitted": again, "trained": weights}.items():
    found |= {f"{name} {key}": leaf for key, leaf in tree.items()}
assert "tests" not in " ".join(sys.modules) and not any("test_loaded" in name for name in sys.modules)
np.savez(out, **found)
"""


def test_a_process_without_the_models_source_calls_differentiates_and_trains(tmp_path):
    model, x, settings = Model(WEIGHTS["w"], X[:2]), np.float32(np.outer(X, X)), Settings(2)
    live = aot.function(model_loss, has_aux=True, static_argnums=2)
    live.export(tmp_path / "model", model, x, settings)
    np.savez(tmp_path / "inputs.npz", x=x, weight=model.weight, bias=model.bias)
    (tmp_path / "stranger.py").write_text(STRANGER)
    paths = [str(tmp_path / name) for name in ("stranger.py", "model", "inputs.npz", "out.npz")]
    done = subprocess.run([sys.executable, "-W", "error", *paths], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as held:
        found = dict(held)
    (value, aux), gradient = live.value_and_grad(model, x, settings)
    trained = model
    for _ in range(5):
        trained = jax.tree.map(lambda w, g: w - 0.5 * g, trained, live.grad(trained, x, settings)[0])
    want = {"called": value, "value": value, "hidden": aux["hidden"], "kept": model.bias}
    for name, tree in {"g": gradient, "pulled": gradient, "jitted": gradient, "trained": trained}.items():
        want |= {f"{name} weight": tree.weight, f"{name} bias": tree.bias}
    assert found.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


# ------------------------------------------------------------------------------------------- calls that do not fit


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            ({**WEIGHTS, "w": np.ones((4, 2), np.float32)}, X),
            {},
            f"args[0]['w'] is float32[4,2], but it was exported for float32[3,2].\n{SHAPE}",
        ),
        ((WEIGHTS, X.astype(np.int32)), {}, f"args[1] is int32[3], but it was exported for float32[3].\n{AGAIN}"),
        (({"w": WEIGHTS["w"]}, X), {}, "args[0]['b'] is missing.\nGive it too: float32[3]."),
        (
            ({"w": WEIGHTS["w"], "bias": WEIGHTS["b"]}, X),
            {},
            "args[0]['b'] is missing.\nGive it too: float32[3]. In its place stands args[0]['bias'].",
        ),
        (
            ({**WEIGHTS, "c": X}, X),
            {},
            "args[0]['c'] is no argument that loss was exported with.\nLeave it out, or export with it.",
        ),
        (
            (WEIGHTS,),
            {},
            "loss takes 2 positional arguments, and 1 was given.\nGive too: args[1], float32[3].",
        ),
        (
            (),
            {},
            "loss takes 2 positional arguments, and 0 were given.\n"
            "Give too: args[0]['b'], float32[3]; args[0]['w'], float32[3,2]; args[1], float32[3].",
        ),
        (
            (WEIGHTS, X, X),
            {},
            "loss takes 2 positional arguments, and 3 were given.\nLeave out args[2], or export for more arguments.",
        ),
        (
            (WEIGHTS, X),
            {"more": X},
            "kwargs['more'] is no argument that loss was exported with.\nLeave it out, or export with it.",
        ),
    ],
    ids=["shape", "dtype", "missing", "misnamed", "unknown", "few", "none", "many", "keyword"],
)
def test_arguments_that_do_not_fit_are_told_by_their_paths(args, kwargs, message, reloaded):
    loaded = reloaded(loss, WEIGHTS, X)
    for call in (loaded, loaded.value_and_grad, loaded.vjp, jax.jit(loaded)):
        assert told(lambda call=call: call(*args, **kwargs)) == message


def test_what_is_no_array_is_told(reloaded):
    loaded = reloaded(loss, WEIGHTS, X)
    assert told(lambda: loaded.value_and_grad({**WEIGHTS, "b": "x"}, X)) == (
        "args[0]['b'] is a str, not an array.\nGive float32[3]."
    )


def test_static_arguments_must_be_those_of_the_export(reloaded):
    def powered(x, power, *, act):
        return jnp.sum(act(x) ** power)

    loaded = reloaded(powered, X, 3, named={"act": jnp.tanh}, static_argnums=1, static_argnames="act")
    assert told(lambda: loaded(X, 2, act=jnp.tanh)) == f"args[1] is static and 2, but it was 3 at export.\n{AGAIN}"
    assert told(lambda: loaded(X, 3.0, act=jnp.tanh)) == f"args[1] is static and 3.0, but it was 3 at export.\n{AGAIN}"
    missing = told(lambda: loaded(X, 3))
    assert (
        missing == f"kwargs['act'] is static and was not given.\nGive {loaded.contract.statics[1].value}, as at export."
    )
    other = told(lambda: loaded(X, 3, act=jnp.abs))
    assert other.startswith("kwargs['act'] is static and <") and " at 0x" not in other


def test_sizes_that_are_names_must_go_together(reloaded):
    def weighed(w, x, y):
        return jnp.sum((x @ w) * y)

    loaded = reloaded(weighed, X, shapes("b, 3", "float32"), shapes("b", "float32"), sizes={"b": 2})
    assert float(loaded(X, np.ones((5, 3), np.float32), np.ones(5, np.float32))) == pytest.approx(5 * X.sum())
    message = told(lambda: loaded(X, np.ones((5, 3), np.float32), np.ones(4, np.float32)))
    assert message == "args[2] has size 4 where b stands, and b = 5.\nGive arrays whose sizes go together."
    message = told(lambda: loaded(X, np.ones((5, 4), np.float32), np.ones(5, np.float32)))
    assert message == f"args[1] is float32[5,4], but it was exported for float32[b,3].\n{SHAPE}"


def test_a_cotangent_must_be_that_of_the_output(reloaded):
    _, pullback = reloaded(loss, WEIGHTS, X).vjp(WEIGHTS, X)
    assert told(lambda: pullback(X)) == (
        "cotangent is float32[3], the output float32[].\n"
        "Give a cotangent with the structure, shapes and dtypes of the output (float0 or zeros for integers)."
    )


def test_value_and_grad_needs_one_number(reloaded):
    loaded = reloaded(lambda x: 2 * x, X)
    assert told(lambda: loaded.value_and_grad(X), TraceError) == (
        "<lambda> returned float32[3]: value_and_grad needs a real scalar.\n"
        "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
    )


# ------------------------------------------------------------------------------------------------- transformations


def test_a_derivative_that_was_not_exported_is_refused_and_says_how_to_export_it(reloaded):
    loaded = reloaded(loss, WEIGHTS, X)
    assert told(lambda: jax.grad(loaded, argnums=1)(WEIGHTS, X)) == (
        "args[1] is differentiated, but loss was exported for argnums=0.\n"
        "Export with argnums that hold it, or use stop_gradient."
    )
    twice = "loss was exported to be differentiated once, and is differentiated twice.\nExport it with order=2."

    def slope(gradient):
        return lambda weights: jnp.sum(gradient(weights, X)["w"] ** 2)

    for gradient in (loaded.grad, jax.grad(loaded), jax.jit(jax.grad(loaded))):
        assert told(lambda gradient=gradient: jax.grad(slope(gradient))(WEIGHTS)) == twice


@pytest.mark.parametrize("order", [1, 2])
def test_a_batch_and_forward_mode_are_refused_with_what_to_do(order, reloaded):
    loaded = reloaded(loss, WEIGHTS, X, order=order)
    rows = np.stack([X, X])
    no_batch = (
        "loss was exported for one example, and jax.vmap gives it a batch, as jax.jacrev and jax.hessian do.\n"
        "Export jax.vmap of the function, or go through the examples with jax.lax.map."
    )
    for call in (loaded, jax.grad(loaded), loaded.value_and_grad):
        assert told(lambda call=call: jax.vmap(call, in_axes=(None, 0))(WEIGHTS, rows)) == no_batch
        looped = jax.lax.map(lambda row, call=call: call(WEIGHTS, row), rows)
        assert jax.tree.leaves(looped)[0].shape[0] == 2
    assert told(lambda: jax.jvp(lambda weights: loaded(weights, X), (WEIGHTS,), (WEIGHTS,))) == (
        "loss was exported for reverse mode, and is differentiated in forward mode (jvp, jacfwd, hessian).\n"
        "Use jax.grad or jax.vjp, or the function that it was exported from."
    )


def test_a_batch_is_refused_of_a_jitted_call_too(reloaded):
    loaded = reloaded(loss, WEIGHTS, X)
    message = told(lambda: jax.vmap(jax.jit(jax.grad(loaded)), in_axes=(None, 0))(WEIGHTS, np.stack([X, X])))
    assert message.startswith("loss was exported for one example")


# ----------------------------------------------------------------------------------------------- where it is loaded


def test_a_platform_that_it_was_not_exported_for_is_refused(reloaded):
    loaded = reloaded(loss, WEIGHTS, X, platforms=("tpu", "cuda"))
    message = (
        "loss was exported for tpu, cuda, and this process runs on cpu.\nExport it with platforms that hold 'cpu'."
    )
    for call in (loaded, loaded.value_and_grad, loaded.vjp):
        assert told(lambda call=call: call(WEIGHTS, X)) == message


def test_64_bit_types_that_are_switched_off_are_told(tmp_path):
    with jax.enable_x64(True):
        wide = np.float64([1.0, 2.0])
        shift = jnp.float64([0.1, 0.2])
        aot.function(lambda x: jnp.sum(x * shift)).export(tmp_path / "wide", wide, platforms="cpu")
    loaded = aot.load(tmp_path / "wide")
    assert told(lambda: loaded(wide)) == (
        "<lambda> was exported with 64-bit types (primals_1: float64[2]), and this process has them switched off.\n"
        'Switch them on: jax.config.update("jax_enable_x64", True), or JAX_ENABLE_X64=1 in the environment.'
    )
    with jax.enable_x64(True):
        assert float(loaded(wide)) == pytest.approx(0.5, rel=1e-12)
        assert loaded.grad(wide).dtype == np.float64


# -------------------------------------------------------------------------------------------------------- filters


FILTERED = {
    "a tree of booleans": ({"filter": {"a": True, "b": False}}, ({"a": X, "b": X}, X)),
    "a predicate": ({"filter": lambda x: x.ndim > 1}, ({"a": X[None], "b": X}, X)),
    "none": ({}, ({"a": X, "b": X}, X)),
    "none, and one argument of two": ({"argnums": 1}, ({"a": X, "b": X}, X)),
    "after a static argument": (
        {"filter": {"a": False, "b": True}, "argnums": 1, "static_argnums": 0},
        (2, {"a": X, "b": X}, X),
    ),
}


@pytest.mark.parametrize(("options", "args"), FILTERED.values(), ids=FILTERED)
def test_a_filter_survives_the_export(options, args, reloaded):
    def product(*args):
        *_, tree, x = args
        return jnp.sum(tree["a"] * tree["b"] * x)

    ours, loaded = aot.function(product, **options), reloaded(product, *args, **options)
    got, want = loaded.value_and_grad(*args)[1], ours.value_and_grad(*args)[1]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
