"""What is exported and loaded again answers as the function that it was made from."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax

from jointcut import aot
from jointcut.aot.export.export import PLATFORMS
from jointcut.partition.errors import CallError
from oracle import assert_same, called, cotangents, plain, plain_vjp, value_and_grad
from programs import CORPUS, named

# One program of each kind by default; with JOINTCUT_EVERY_PROGRAM=1 all of them, which takes five minutes.
# fmt: off
PICKED = frozenset([
    "scan_with_constants", "float64_weights", "integer_and_key_leaves", "none_leaves", "keyword_arguments",
    "output_is_input", "same_array_twice", "auxiliary_output", "two_argnums", "weak_types",
    "integers_to_differentiate", "internal_reference",
])
# fmt: on
EVERY_PROGRAM = "JOINTCUT_EVERY_PROGRAM" in os.environ
PROGRAMS = [program for program in CORPUS if EVERY_PROGRAM or program.name in PICKED]
every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
X = np.float32([0.1, -0.4, 0.9])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The artefact of a program of the corpus, exported once."""

    @cache
    def once(program):
        function = aot.function(program.function, argnums=differentiated(program), has_aux=program.has_aux)
        path = tmp_path_factory.mktemp("artefacts") / program.name
        with program.precision():
            function.export(path, *program.args, platforms="cpu", **program.kwargs)
        return path, aot.load(path)

    return once


@pytest.fixture
def reloaded(tmp_path):
    """Export a function and load it again."""

    def run(function, *args, platforms="cpu", order=1, named=None, **options):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        made = aot.function(function, **options)
        return aot.load(made.export(path, *args, platforms=platforms, order=order, **(named or {})))

    return run


def differentiated(program):
    return () if "grad" in program.lacks else program.argnums


def in_argnums(program, pulled):
    """Of the gradients of all arguments those that an artefact has."""
    chosen = differentiated(program)
    return pulled[chosen] if isinstance(chosen, int) else tuple(pulled[place] for place in chosen)


def same(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6), got, want)


# ------------------------------------------------------------------------------------------- laws over the corpus


@every_program
def test_a_loaded_function_and_its_gradients_under_jit_answer_as_jax(program, exported):
    """One program holds every way to ask for a gradient, so that XLA compiles once."""
    (_, loaded), scalar = exported(program), program.scalar and "grad" not in program.lacks
    with program.precision():

        def asked(*args):
            found = [loaded(*args, **program.kwargs)]
            if scalar:
                found += [loaded.value_and_grad(*args, **program.kwargs), value_and_grad(program, loaded)(*args)]
            return found

        want = [plain(program, called), *[plain(program, value_and_grad) if scalar else None] * 2 * scalar]
        assert_same(jax.jit(asked)(*program.args), want, program)


@every_program
def test_vjp_pulls_back_as_jax_and_more_than_once(program, exported):
    _, loaded = exported(program)
    with program.precision():
        out, pullback, *aux = loaded.vjp(*program.args, **program.kwargs)
        want_out, want_aux, *want = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        for seed in (1, 2, 1):
            assert_same(pullback(cotangents(out, seed)), in_argnums(program, want[seed - 1]), program)


@every_program
def test_every_array_of_the_programs_is_described_in_order(program, exported):
    path, loaded = exported(program)
    contract, found = loaded.contract, {}
    for name, entry in contract.programs.items():
        data = (path / entry["file"]).read_bytes()
        with program.precision():
            found[name] = export.deserialize(bytearray(data))
    types = {name: ([kind(a) for a in p.in_avals], [kind(a) for a in p.out_avals]) for name, p in found.items()}
    inputs, outputs = described(contract.inputs), described(contract.outputs)
    assert types["inference"] == (inputs, outputs)
    if contract.is_train:
        saved = [r for r in contract.residuals if r.kind == "saved"]
        assert types["forward"][0] == inputs and types["forward"][1][: len(outputs)] == outputs
        assert [types["forward"][1][len(outputs) + r.index] for r in saved] == described(saved)
        taken = described([*contract.residuals, *contract.tangents])
        assert types["backward"] == (taken, described(contract.gradients))


def kind(aval):
    return aval.shape, str(aval.dtype)


def described(found):
    return [(d.shape, d.dtype) for d in found]


@pytest.mark.parametrize("name", ["integer_and_key_leaves", "auxiliary_output", "weak_types"])
def test_value_and_grad_outside_of_jit_answers_as_jax(name, exported):
    program = named(name)
    _, loaded = exported(program)
    value, gradients = plain(program, value_and_grad)
    assert_same(loaded.value_and_grad(*program.args), (value, gradients), program)
    assert_same(loaded.grad(*program.args), (gradients, value[1]) if program.has_aux else gradients, program)
    assert_same(value_and_grad(program, loaded)(*program.args), (value, gradients), program)


@pytest.mark.parametrize("name", ["checkpointed_scan_body", "captured_constants", "pallas_kernel"])
def test_programs_are_lowered_for_platforms_that_are_not_here(name, tmp_path):
    program = named(name)
    function = aot.function(program.function, argnums=program.argnums)
    path = function.export(tmp_path / "all", *program.args)
    loaded = aot.load(path)
    assert loaded.contract.platforms == PLATFORMS
    for half in ("inference", "forward", "backward"):
        assert export.deserialize(bytearray((path / f"{half}.stablehlo").read_bytes())).platforms == PLATFORMS
        assert "stablehlo." in (path / f"{half}.mlir").read_text()
    assert_same(loaded.value_and_grad(*program.args), plain(program, value_and_grad), program)


@pytest.mark.parametrize("name", ["scan_with_constants", "cond_on_data"])
def test_hessian_vector_products_of_order_two_are_those_of_the_live_function(name, tmp_path):
    program = named(name)
    function = aot.function(program.function, argnums=program.argnums)
    loaded = aot.load(function.export(tmp_path / "twice", *program.args, platforms="cpu", order=2))

    def product(f):
        def slope(*args):
            gradients = jax.grad(f, argnums=program.argnums)(*args)
            return sum(jnp.vdot(jnp.sin(g), g) for g in jax.tree.leaves(gradients))

        return jax.jit(jax.grad(slope, argnums=program.argnums))(*program.args)

    assert_same(product(loaded), product(function), program, slack=10)


@pytest.mark.parametrize("order", [2, 3])
def test_derivatives_of_every_order_follow_the_conventions_of_the_function(order, tmp_path):
    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x) * jnp.sum(x), 0.0)) ** 2

    def safe(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)) * jnp.sum(x), 0.0)) ** 2

    def derived(f):
        for _ in range(order):
            f = jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))
        return f

    x = jnp.array([0.0, 1.0, 2.0])
    function = aot.function(loss, derivatives="finite")
    loaded = aot.load(function.export(tmp_path / "finite", x, platforms="cpu", order=order))
    assert not np.isfinite(derived(loss)(x)).all(), "JAX's own would do"
    np.testing.assert_allclose(derived(loaded)(x), derived(safe)(x), rtol=1e-4)


# --------------------------------------------------------------------------------------------- trees and arguments


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


class Network(eqx.Module):
    dense: eqx.nn.Linear
    act: object = eqx.field(static=True)

    def __call__(self, x):
        return self.act(self.dense(x))


def of_module(module, x):
    return jnp.sum(module(x) ** 2)


def of_pair(pair, x):
    return jnp.sum(pair.left * pair.right * x)


def modules():
    network = Network(eqx.nn.Linear(3, 2, key=jax.random.key(0)), jnp.tanh)
    dense = {"weight": network.dense.weight, "bias": network.dense.bias}
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    held = {name: getattr(linear, name)[...] for name in ("kernel", "bias")}
    pair = Pair(jnp.asarray(X), jnp.asarray(X + 1))
    return {
        "equinox": (of_module, network, {"dense": dense}),
        "flax": (of_module, linear, held),
        "named tuple": (of_pair, pair, {"left": pair.left, "right": pair.right}),
    }


@pytest.mark.parametrize("library", ["equinox", "flax", "named tuple"])
def test_dicts_can_stand_for_a_module_and_gradients_come_in_the_structure_given(library, reloaded):
    function, module, plainly = modules()[library]
    loaded = reloaded(function, module, X)
    value, gradient = jax.value_and_grad(function)(module, X)
    same(loaded.value_and_grad(module, X), (value, gradient))
    assert type(jax.grad(loaded)(module, X)) is type(module)
    by_name = loaded.grad(plainly, X)
    assert jax.tree.structure(by_name) == jax.tree.structure(plainly)
    by_path = {path.split("].")[1]: g for path, g in gradients_by_path(loaded, gradient, X).items()}
    given = {jax.tree_util.keystr(k, simple=True, separator="."): g for k, g in jax.tree.leaves_with_path(by_name)}
    same(given, by_path)


def gradients_by_path(loaded, gradient, x):
    names = [info.path for info in loaded.contract.inputs if info.kind == "parameter"]
    return dict(zip(names, jax.tree.leaves(gradient), strict=True)) if len(x) else {}


def test_a_result_comes_in_the_classes_of_the_function(reloaded):
    def function(pair):
        return Pair(jnp.sum(pair.left), None), [pair.right, {"twice": 2 * pair.left}]

    pair = Pair(X, X + 1)
    loaded = reloaded(function, pair)
    same(loaded(pair), function(pair))
    out, pullback = loaded.vjp(pair)
    same(pullback(out), jax.vjp(function, pair)[1](out)[0])


def test_keys_of_dicts_may_be_any_and_names_of_functions_too(reloaded):
    def größe(tree):
        return jnp.sum(tree["a'b"] * tree["\n"]) + jnp.sum(tree["é"][-1] ** 2 + tree["é"][7])

    tree = {"a'b": X, "\n": X + 1, "é": {-1: X, 7: X}}
    loaded = reloaded(größe, tree)
    same(loaded.value_and_grad(tree), jax.value_and_grad(größe)(tree))
    assert loaded.contract.name == "größe"
    same(reloaded(partial(größe), tree).grad(tree), jax.grad(größe)(tree))


def test_static_arguments_are_those_of_the_export_wherever_their_objects_lie(reloaded):
    def function(x, power, *, act):
        return jnp.sum(act(x) ** power)

    loaded = reloaded(function, X, 3, named={"act": jax.nn.relu}, static_argnums=1, static_argnames="act")
    want = jax.value_and_grad(partial(function, power=3, act=jax.nn.relu))(X)
    same(loaded.value_and_grad(X, 3, act=jax.nn.relu), want)
    assert all(" at 0x" not in static.value for static in loaded.contract.statics)


def test_without_a_derivative_the_pullback_gives_zeros_or_nothing(reloaded):
    counted, bare = reloaded(lambda x: jnp.sum(x > 0), X), reloaded(lambda x: 2 * x, X, argnums=())
    assert counted.vjp(X)[1](np.zeros((), jax.dtypes.float0)).tolist() == [0.0, 0.0, 0.0]
    assert bare.vjp(X)[1](X) == () and list(bare.contract.programs) == ["inference"]


def test_a_table_read_by_rows_has_a_sparse_gradient_and_a_dense_one_in_jax_grad(reloaded):
    table, places = jnp.asarray(np.arange(8, dtype=np.float32).reshape(4, 2)), jnp.asarray([1, 3, 1])

    def function(table, places):
        return jnp.sum(table[places] ** 3)

    loaded = reloaded(function, table, places, sparse_gradients="args[0]")
    want = jax.grad(function)(table, places)
    same(loaded.grad(table, places).todense(), want)
    assert loaded.grad(table, places).nse == 3
    same(jax.grad(loaded)(table, places), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4", "int8", "bool", "complex64"])
def test_constants_of_every_type_are_held(dtype, reloaded):
    constant = jnp.asarray([1, 0, 1], dtype)

    def function(x):
        return jnp.sum(x * jnp.real(constant).astype(jnp.float32))

    loaded = reloaded(function, X)
    assert [i.dtype for i in loaded.contract.inputs] == [dtype, "float32"]
    same(loaded.value_and_grad(X), jax.value_and_grad(function)(X))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_keys_are_constants_too(implementation, reloaded):
    key = jax.random.key(3, impl=implementation)

    def function(x):
        return jnp.sum(x * jax.random.normal(key, (3,)))

    same(reloaded(function, X).value_and_grad(X), jax.value_and_grad(function)(X))


# ------------------------------------------------------------------------------------------------------- training


def test_five_steps_of_adam_reach_the_parameters_of_the_live_function(tmp_path):
    program = named("two_layers")
    weights, *batch = program.args
    live = aot.function(program.function)
    loaded = aot.load(live.export(tmp_path / "model", weights, *batch, platforms="cpu"))
    optimiser = optax.adamw(1e-2)

    @jax.jit
    def stepped(held, state, gradients):
        updates, state = optimiser.update(gradients, state, held)
        return optax.apply_updates(held, updates), state

    def trained(gradient):
        held, state = weights, optimiser.init(weights)
        for _ in range(5):
            held, state = stepped(held, state, gradient(held, *batch))
        return held

    with jax.numpy_dtype_promotion("standard"):  # as optax has it
        want = trained(live.grad)
        same(trained(loaded.grad), want, rtol=1e-6)
        same(trained(jax.jit(jax.grad(loaded))), want, rtol=1e-6)


def test_the_code_in_the_readme_runs(tmp_path):
    program = named("captured_constants")
    path = aot.function(program.function).export(tmp_path / "model", *program.args, platforms="cpu")
    text = (path / "README.md").read_text().replace("this/folder", str(path))
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    known = {"arguments": program.args, "leaves": jax.tree.leaves(program.args)}
    for block in blocks:
        exec(block, known)
    value, gradient = plain(program, value_and_grad)
    assert_same((known["value"], known["gradients"][0]), (value, gradient), program)
    assert_same(known["outputs"][0], value, program)


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])


def test_a_state_of_nnx_is_told_without_boxes_and_given_as_a_state_or_as_its_pure_dict(reloaded):
    graph, state = nnx.split(TwoLayers(nnx.Rngs(0)))

    def loss(state, x):
        first, second = nnx.merge(graph, state).layers
        return jnp.sum(second(jnp.tanh(first(x))) ** 2)

    loaded, plainly = reloaded(loss, state, X), nnx.to_pure_dict(state)
    names = [f"args[0]['layers'][{i}]['{name}']" for i in (0, 1) for name in ("bias", "kernel")]
    assert [i.path for i in loaded.contract.inputs] == [*names, "args[1]"]
    assert [g.path for g in loaded.contract.gradients] == names
    assert list(loaded.contract.graph_signature.parameters) == names
    value, gradient = jax.value_and_grad(loss)(state, X)
    same(loaded.value_and_grad(state, X), (value, gradient))
    same(loaded.value_and_grad(plainly, X), (value, nnx.to_pure_dict(gradient)))
    del plainly["layers"][1]["bias"]
    with pytest.raises(CallError) as refused:
        loaded(plainly, X)
    assert str(refused.value) == "args[0]['layers'][1]['bias'] is missing.\nGive it too: float32[2]."


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
def test_a_loop_may_run_as_often_as_the_caller_has_rows(strategy, tmp_path):
    def loss(weights, rows):
        def step(h, row):
            return jnp.tanh(h @ weights + row), h

        return jnp.sum(lax.scan(step, jnp.zeros(3), rows)[0])

    rows = aot.shapes("n, 3", "float32")
    function = aot.function(loss, strategy=strategy)
    loaded = aot.load(function.export(tmp_path / "model", jnp.eye(3), rows, sizes={"n": 7}, platforms="cpu"))
    traced = function.trace(jnp.eye(3), jnp.ones((7, 3)))
    planned = replace(traced, program=replace(traced.program, is_as_jax=True)).partition().plan  # both stacks
    assert loaded.contract.saved_bytes == planned.bytes_saved > 0
    arguments = jnp.eye(3), jnp.ones((5, 3))
    same(loaded.value_and_grad(*arguments), jax.value_and_grad(loss)(*arguments))
