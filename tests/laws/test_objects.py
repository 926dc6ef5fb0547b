"""An NNX module or an Equinox module in the signature changes nothing of what a program means, and what is written to
the first arrives once, in every way of calling.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jointcut import aot
from jointcut.partition.errors import ArtefactError, CallError
from oracle import assert_same, loss, plain
from programs import CORPUS, EVERY_PROGRAM

# Programs differ in what stands in the function, and the law is about what stands around it: a few of each family.
# (Python's numbers in an Equinox module are fixed.)
PROGRAMS = [
    program
    for program in CORPUS
    if "grad" not in program.lacks and program.name not in ("python_numbers", "weak_types")
]


def some_programs(start):
    return pytest.mark.parametrize("program", PROGRAMS[start::24], ids=lambda program: program.name)


class Held(nnx.Module):
    """The differentiated arguments of a program as parameters, and a count of its calls."""

    def __init__(self, arguments):
        self.arguments = nnx.data(jax.tree.map(nnx.Param, arguments))
        self.calls = nnx.Variable(jnp.int32(0))

    def opened(self):
        return jax.tree.map(lambda p: p[...], self.arguments, is_leaf=lambda x: isinstance(x, nnx.Param))


class Frozen(eqx.Module):
    """The same in an Equinox module, among leaves that are no arrays."""

    arguments: tuple
    activation: object
    name: str
    scale: float
    on: bool


def chosen(program):
    argnums = (program.argnums,) if isinstance(program.argnums, int) else program.argnums
    return tuple(n % len(program.args) for n in argnums)


def gradients(program, function):
    return jax.value_and_grad(loss(program, function), argnums=chosen(program))


def refilled(program, values):
    """The program's arguments with others in the places of those that are differentiated."""
    args = list(program.args)
    for place, value in zip(chosen(program), values, strict=True):
        args[place] = value
    return args


@pytest.mark.filterwarnings("ignore:through is not cut here:UserWarning")  # where the program is sharded_map
@some_programs(0)
def test_an_nnx_module_is_differentiated_and_written(program):
    with program.precision():

        @aot.function
        def through(held):
            held.calls[...] += 1
            return loss(program, program.function)(*refilled(program, held.opened()))

        held = Held(tuple(program.args[n] for n in chosen(program)))
        value, gradient = through.value_and_grad(held)
        assert isinstance(gradient, Held) and held.calls[...] == 1
        assert_same((value, gradient.opened()), plain(program, gradients), program)
        value, gradient = nnx.jit(through.value_and_grad)(held)
        assert held.calls[...] == 2
        assert_same((value, gradient.opened()), plain(program, gradients), program, slack=10)


@pytest.mark.filterwarnings("ignore:through is not cut here:UserWarning")  # where the program is sharded_map
@some_programs(12)
def test_an_equinox_module_is_differentiated_where_it_holds_arrays(program):
    with program.precision():

        def through(frozen):
            assert frozen.on is True and frozen.name == "held" and isinstance(frozen.scale, float)
            return frozen.activation(loss(program, program.function)(*refilled(program, frozen.arguments)))

        frozen = Frozen(tuple(program.args[n] for n in chosen(program)), jax.jit(lambda x: x), "held", 2.0, True)
        value, gradient = aot.function(through).value_and_grad(frozen)
        assert (gradient.activation, gradient.name, gradient.scale, gradient.on) == (None,) * 4
        assert_same((value, gradient.arguments), plain(program, gradients), program)


# ----------------------------------------------------------------------------------------- every way of calling


class Net(nnx.Module):
    """All kinds of state: running statistics, a stream of random numbers, and a layer that is there twice."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.square = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.square

    def __call__(self, x):
        return self.again(nnx.relu(self.square(self.drop(self.norm(self.first(x))))))


X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


def net():
    return Net(nnx.Rngs(0))


def error(model, x):
    return jnp.mean(jnp.square(model(x) - 1.0))


def trained(step, wrap=lambda f: f):
    """Losses of three steps, and everything that the model holds after them."""
    model = net()

    @wrap
    def once(model, x):
        value, gradient = step(model, x)
        params, moved = nnx.state(model, nnx.Param), nnx.state(gradient, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, moved))
        return value

    return [once(model, X) for _ in range(3)], nnx.state(model)


def close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def by_plain_nnx():
    return trained(nnx.value_and_grad(error))


def by_vjp(function):
    def step(model, x):
        value, pullback = function.vjp(model, x)
        return value, pullback(jnp.float32(1.0))[0]

    return step


def compiled(executables):
    return aot.function(error).trace(net(), X).partition().compile(executables).value_and_grad


#: Each makes a step of a function of ours, and says what to wrap around it.
WAYS = {
    "value_and_grad": lambda cut: (cut.value_and_grad,),
    "vjp": lambda cut: (by_vjp(cut),),
    "nnx.value_and_grad": lambda cut: (nnx.value_and_grad(cut),),
    "nnx.grad, called within": lambda cut: (nnx.value_and_grad(lambda m, x: cut(m, x)),),
    "value_and_grad in nnx.jit": lambda cut: (cut.value_and_grad, nnx.jit),
    "vjp in nnx.jit": lambda cut: (by_vjp(cut), nnx.jit),
    "nnx.value_and_grad in nnx.jit": lambda cut: (nnx.value_and_grad(cut), nnx.jit),
    "compiled, one program": lambda _: (compiled(1),),
    "compiled, two programs": lambda _: (compiled(2),),
    "within a budget": lambda _: (aot.function(error, budget="1 MB").value_and_grad,),
}


@pytest.mark.parametrize("way", WAYS)
def test_state_is_written_in_every_way_of_calling(way, by_plain_nnx):
    close(trained(*WAYS[way](aot.function(error))), by_plain_nnx)


def test_state_is_written_in_debug_mode(by_plain_nnx):
    with aot.debug():
        close(trained(aot.function(error).value_and_grad), by_plain_nnx)


def test_state_is_written_by_cached_programs(by_plain_nnx, tmp_path):
    for _ in range(2):
        kept = aot.function(error, cache=tmp_path)
        close(trained(kept.value_and_grad), by_plain_nnx)
        close(trained(by_vjp(kept)), by_plain_nnx)


def test_state_is_written_by_an_artefact(by_plain_nnx, tmp_path):
    path = aot.function(error).export(tmp_path / "net", net(), X, platforms="cpu")
    loaded = aot.load(path)
    states = [(o.path, o.kind) for o in loaded.contract.outputs if o.kind == "state"]
    assert states == [
        ("args[0].drop.rngs.count", "state"),
        ("args[0].norm.mean", "state"),
        ("args[0].norm.var", "state"),
    ]
    close(trained(loaded.value_and_grad), by_plain_nnx)
    close(trained(nnx.value_and_grad(loaded), nnx.jit), by_plain_nnx)


def test_a_call_alone_writes_state():
    cut, plain_model, ours = aot.function(error), net(), net()
    close([cut(ours, X), cut(ours, X)], [error(plain_model, X), error(plain_model, X)])
    close(nnx.state(ours), nnx.state(plain_model))


# ------------------------------------------------------------------------------------------- every transformation


class Layer(nnx.Module):
    """A residual layer with all kinds of state, which can be stacked."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.norm(self.linear(x))))


def one():
    return Layer(nnx.Rngs(0))


def three():
    return nnx.split_rngs(splits=3)(nnx.vmap(Layer))(nnx.Rngs(0))


def applied(layer, x):
    return layer(x)


def square_sum(f):
    return lambda layer, x: jnp.sum(jnp.square(f(layer, x)))


def scanned(f):
    return nnx.scan(lambda layer, x: f(layer, x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)


TRANSFORMATIONS = {
    "jit": (one, lambda f: nnx.jit(f)),
    "grad": (one, lambda f: nnx.grad(square_sum(f))),
    "grad of remat": (one, lambda f: nnx.grad(square_sum(nnx.remat(f)))),
    "scan": (three, scanned),
    "grad of scan": (three, lambda f: nnx.jit(nnx.grad(square_sum(scanned(f))))),
    "vmap": (three, lambda f: nnx.vmap(f, in_axes=(0, None))),
    "grad of vmap": (three, lambda f: nnx.grad(square_sum(nnx.vmap(f, in_axes=(0, None))))),
    "vmap of grad": (three, lambda f: nnx.vmap(nnx.grad(square_sum(f)), in_axes=(0, None))),
    "cond": (one, lambda f: lambda m, x: nnx.cond(x[0, 0] > 9, lambda m: f(m, x), lambda m: f(m, -x), m)),
    "fori_loop": (one, lambda f: lambda m, x: nnx.fori_loop(0, 3, lambda i, c: (c[0], f(*c)), (m, x))[1]),
}


#: Without a gradient each does a part of what another does.
PARTS = () if EVERY_PROGRAM else ("jit", "grad", "scan", "vmap")


@pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if name not in PARTS])
def test_nnx_transformations_carry_state_through_a_cut_function(name):
    make, transformed = TRANSFORMATIONS[name]
    results = []
    for run in (nnx.jit(transformed(applied)), transformed(aot.function(applied))):
        model = make()
        out = run(model, X)
        results.append((out, nnx.state(model)))
    close(results[1], results[0])


@pytest.mark.parametrize("name", ["filter_grad", "filter_jit", "filter_vmap", "within"])
def test_equinox_transformations_take_a_cut_function(name):
    model = eqx.nn.MLP(3, "scalar", 4, 2, activation=jnp.tanh, key=jax.random.key(0))

    def mean(model, x, mode="mean", doubled=False):
        assert mode == "mean" and isinstance(doubled, bool)
        return jnp.mean(jax.vmap(model)(x)) * (2 if doubled else 1)

    wraps = {
        "filter_grad": lambda f: eqx.filter_value_and_grad(partial(f, doubled=True)),
        "filter_jit": lambda f: eqx.filter_jit(eqx.filter_value_and_grad(f)),
        "filter_vmap": lambda f: eqx.filter_vmap(eqx.filter_grad(f), in_axes=(None, 0)),
        "within": lambda f: eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x: f(m, x, "mean", True))),
    }
    x = X[None] if name == "filter_vmap" else X
    close(wraps[name](aot.function(mean))(model, x), eqx.filter_jit(wraps[name](mean))(model, x))


class Changing(nnx.Module):
    """A module of which a function may change more than arrays."""

    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.seen, self.buffer, self.number = nnx.List([]), nnx.Variable(jnp.zeros(3)), 0

    def __call__(self, x):
        return jnp.sum(self.drop(self.linear(x)) ** 2)


def sows(model, x):
    model.sow(nnx.Intermediate, "hidden", x)
    return model(x)


def makes_a_module_at_the_first_call(model, x):
    if not hasattr(model, "lazy"):
        model.lazy = nnx.Linear(3, 3, rngs=nnx.Rngs(2))
    return model(model.lazy(x))


def appends_and_removes(model, x):
    model.seen.append(nnx.Variable(x))
    if hasattr(model, "buffer"):
        del model.buffer
    return model(x)


def changes_types_and_numbers(model, x):
    model.buffer, model.number, model.also = nnx.Cache(x), model.number + 1, model.linear
    return model(x)


CHANGES = (sows, makes_a_module_at_the_first_call, appends_and_removes, changes_types_and_numbers)


SOWS = pytest.mark.filterwarnings("ignore:Using 'Module.sow")


@SOWS
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("way", ["method", "transformation"])
def test_what_a_function_adds_to_an_object_or_takes_away_is_so_after_the_call(change, way):
    ours, results = aot.function(change), []
    for step in (nnx.value_and_grad(change), ours.value_and_grad if way == "method" else nnx.value_and_grad(ours)):
        model = Changing()
        linear, values = model.linear, [step(model, jnp.arange(3.0))[0] for _ in range(2)]
        assert model.linear is linear
        form, state = nnx.split(model)
        results.append((form, jax.tree.leaves((drawn(state), values))))
    assert results[0][0] == results[1][0]
    for mine, its in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4)


def drawn(state):
    """A state with the bits of its keys."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)


@SOWS
def test_an_object_that_a_function_adds_to_is_left_as_it_was_where_that_is_refused(tmp_path):
    cut, model = aot.function(sows), Changing()
    before = nnx.split(model)
    with pytest.raises(CallError, match=r"args\[0\].buffer is written by the function, but was made outside"):
        jax.grad(lambda x: cut(model, x))(jnp.ones(3))
    with pytest.raises(ArtefactError) as refusal:
        cut.export(tmp_path / "artefact", model, jnp.ones(3))
    assert str(refusal.value) == (
        "sows adds parts to objects or takes them away, which an exported program cannot do.\n"
        "Call the function once, and export after that, if it adds them only once."
    )
    after = nnx.split(model)
    assert before[0] == after[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, drawn(before[1]), drawn(after[1])))
