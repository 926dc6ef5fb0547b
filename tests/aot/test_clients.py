"""Clients that know nothing of jointcut train from an artefact, and reach what JAX reaches from the function."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jointcut import aot

CLIENTS = Path(__file__).parent.parent / "clients"
STEPS, RATE = 5, 0.1


def attending(weights, x):
    """A scan over layers, each with a softmax."""

    def layer(hidden, held):
        scores = jax.nn.softmax(hidden @ held @ hidden.T, axis=-1)
        return hidden + jnp.tanh(scores @ hidden), jnp.sum(scores**2)

    last, seen = jax.lax.scan(layer, x @ weights["in"], weights["layers"])
    return jnp.mean(last**2) + 0.01 * jnp.sum(seen) + jnp.sum(weights["bias"] ** 2)


TABLE = jnp.asarray(np.cos(np.arange(12.0)).reshape(3, 4), jnp.bfloat16)


def closing(weights, x):
    """The same of inputs that pass through a constant of the function's own."""
    return attending(weights, jnp.tanh(x @ TABLE.astype(jnp.float32)) @ TABLE.T.astype(jnp.float32))


def arguments():
    draws = np.random.default_rng(0)
    shapes = {"in": (3, 4), "layers": (3, 4, 4), "bias": (2,), "x": (5, 3)}
    made = {name: 0.5 * draws.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return made, made.pop("x")


@pytest.fixture
def client(tmp_path):
    """Run a client on the artefact of a function: the arrays that it wrote."""

    def run(name, function, *rest, platforms):
        weights, x = arguments()
        aot.function(function).export(tmp_path / "model", weights, x, platforms=platforms)
        given = {f"args[0][{key!r}]": leaf for key, leaf in weights.items()}
        np.savez(tmp_path / "inputs.npz", **given, **{"args[1]": x})
        command = [CLIENTS / name, tmp_path / "model", tmp_path / "inputs.npz", *rest, tmp_path / "out.npz"]
        done = subprocess.run(
            [sys.executable, "-W", "error", *map(str, command)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / "out.npz") as held:
            return dict(held)

    return run


def test_a_client_of_jax_alone_trains_to_the_parameters_of_optax(client):
    found = client("only_jax.py", closing, STEPS, RATE, platforms=("cpu", "tpu"))
    weights, x = arguments()
    optimiser, losses = optax.sgd(RATE), []
    state, step = optimiser.init(weights), jax.jit(jax.value_and_grad(closing))
    for _ in range(STEPS):
        value, gradients = step(weights, x)
        updates, state = optimiser.update(gradients, state, weights)
        weights, losses = optax.apply_updates(weights, updates), [*losses, float(value)]
    np.testing.assert_allclose(found.pop("losses"), losses, rtol=1e-5)
    assert found.keys() == {f"args[0][{key!r}]" for key in weights}
    for key, leaf in weights.items():
        np.testing.assert_allclose(found[f"args[0][{key!r}]"], leaf, rtol=1e-5, atol=1e-5, err_msg=key)


def test_one_step_of_the_client_of_jax_alone_is_the_gradient(client):
    found = client("only_jax.py", attending, 1, 1.0, platforms="cpu")
    weights, x = arguments()
    gradients = jax.grad(attending)(weights, x)
    for key, leaf in gradients.items():
        moved = weights[key] - found[f"args[0][{key!r}]"]
        np.testing.assert_allclose(moved, leaf, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.skipif(
    importlib.util.find_spec("iree") is None or importlib.util.find_spec("iree.compiler") is None,
    reason="iree.compiler is not installed: pip install 'jointcut[iree]'",
)
def test_iree_runs_both_halves_without_jax_and_gives_the_gradients_of_jax(client):
    found = client("with_iree.py", attending, platforms="cpu")
    value, gradients = jax.value_and_grad(attending)(*arguments())
    np.testing.assert_allclose(found["result"], value, rtol=1e-5)
    for key, leaf in gradients.items():
        np.testing.assert_allclose(found[f"args[0][{key!r}]"], leaf, rtol=1e-5, atol=1e-5, err_msg=key)


def test_clients_stay_short_enough_to_read():
    for name in ("only_jax.py", "with_iree.py"):
        text = (CLIENTS / name).read_text()
        assert len(text.splitlines()) <= 60 and "import jointcut" not in text and "from jointcut" not in text
