"""Steps by `eqx.filter_jit`, `nnx.jit` and other functions around a jitted one are weighed as their own program."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jointcut import aot
from jointcut.aot.ratchet.session import Session, Settings
from jointcut.aot.ratchet.weigh import weighed
from jointcut.partition.errors import CallError, TraceError

SGD = optax.sgd(1e-3, momentum=0.9)
X = jnp.ones((512, 64))


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    act: object = jax.nn.gelu  # a leaf that is no array

    def __call__(self, x):
        for layer in self.layers:
            x = x + self.act(layer(x))
        return x


class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def update(model, state, x):
    value, gradients = eqx.filter_value_and_grad(loss)(model, x)
    updates, state = SGD.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, value


def train(model, optimizer, x):
    value, gradients = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
    optimizer.update(model, gradients)  # written to what was given, and not returned
    return value


def of_equinox():
    model = Net([eqx.nn.Linear(64, 64, key=key) for key in jax.random.split(jax.random.key(0))])
    return model, SGD.init(eqx.filter(model, eqx.is_array)), X


def of_flax():
    model = FlaxNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param), X


STEPS = {
    "equinox": (eqx.filter_jit(update), of_equinox),
    "equinox, donating": (eqx.filter_jit(update, donate="all-except-first"), of_equinox),
    "flax": (nnx.jit(train), of_flax),
    "flax, donating": (nnx.jit(train, donate_argnums=(0, 1)), of_flax),
}


def figures(name):
    step, arguments = STEPS[name]
    return weighed(step, arguments(), {})


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", STEPS)
def test_the_step_of_a_library_takes_what_the_library_compiles(name):
    step, arguments = STEPS[name]
    theirs = step.lower(*arguments()).compile().compiled.memory_analysis()
    parts = theirs.argument_size_in_bytes, theirs.output_size_in_bytes, theirs.temp_size_in_bytes
    found = figures(name)
    assert found.figures["peak_bytes"] == sum(parts) - theirs.alias_size_in_bytes
    assert found.figures["temp_bytes"] == theirs.temp_size_in_bytes
    assert {array.line.partition(":")[0] for array in found.at_peak if array.bytes > 1e5} == {__file__}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("library", ["equinox", "flax"])
def test_donated_arrays_are_seen(library):
    kept, donated = (figures(name).figures["peak_bytes"] for name in (library, f"{library}, donating"))
    assert donated < kept


def test_a_function_around_a_jitted_one_is_that_one():
    step = jax.jit(lambda w, x: w - jnp.tanh(x @ w).T @ x, donate_argnums=0)

    @functools.wraps(step)
    def logged(w, x):
        return step(w, x)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert weighed(logged, (w, X), {}).figures == weighed(step, (w, X), {}).figures


def test_a_plain_function_may_take_what_is_no_array():
    model, _, _ = of_equinox()
    theirs = eqx.filter_jit(loss).lower(model, X).compile().compiled.memory_analysis()
    assert weighed(loss, (model, X), {}).figures["temp_bytes"] == theirs.temp_size_in_bytes


def test_what_cannot_be_traced_is_refused_by_name():
    async def later(x):
        return x

    def lazily(x):
        yield x

    def refused(function):
        with pytest.raises((TraceError, CallError)) as error:
            weighed(function, (X,), {})
        return str(error.value).replace(f"{__file__}:", "")

    name, line = later.__qualname__.rpartition(".")[0], later.__code__.co_firstlineno
    is_async = "is async, so that its call runs nothing.\nTake `async` away, and await around the call."
    assert refused(later) == refused(jax.jit(later)) == f"{name}.later at {line} {is_async}"
    cure = "is a generator, whose call runs nothing.\nReturn the values: in a list, or by jax.lax.scan."
    assert refused(lazily) == f"{name}.lazily at {line + 3} {cure}"
    assert refused(jax.jit(jnp.sin).lower(X).compile()) == (
        "the function is a compiled program, which cannot be traced.\n"
        "Give the function that it was compiled from, and the same arguments."
    )
    assert refused(3) == (
        "peak(...) is of type int, which cannot be called.\n"
        "Give a function and its arguments: peak(step, params, batch)."
    )


@pytest.mark.parametrize("ask", ["peak", "doctor"])
def test_an_error_of_the_step_leads_from_the_test_to_its_line(ask, tmp_path):
    def wrong(x):
        return x @ jnp.ones((5,))

    with pytest.raises(TypeError, match="contracting dimensions") as error:
        if ask == "peak":
            Session.of(Settings(tmp_path / "peaks.json", tmp_path)).weigh("a test", None, None, wrong, X)
        else:
            aot.doctor(memory="1MB").check(wrong, X)
    assert {Path(frame.filename).name for frame in traceback.extract_tb(error.value.__traceback__)} == {
        Path(__file__).name
    }


@pytest.mark.parametrize("is_watched", [False, True], ids=["asked", "watched"])
@pytest.mark.parametrize("library", ["equinox", "flax"])
def test_the_doctor_names_the_loss_and_the_donation_of_a_library(library, is_watched, capsys):
    step, arguments = STEPS[library]
    doctor = aot.doctor(memory="400kB")
    if is_watched:
        jax.clear_caches()  # it sees what is compiled
        with doctor:
            step(*arguments())
        text = capsys.readouterr().err
    else:
        text = str(doctor.check(step, *arguments()))
    loss_name, donation, name = {
        "equinox": ("loss", 'donate="all", where update is jitted', "state"),
        "flax": ("<lambda>", "donate_argnums=(0, 1), where train is jitted", "optimizer"),
    }[library]
    assert f"wait from the forward of {loss_name} for its backward" in text
    assert f"donation: the results are of the types of model (33.3 kB) and {name} (33.3 kB)" in text
    assert f"  {donation}\n  compiled with it: " in text
