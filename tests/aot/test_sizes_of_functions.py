"""One pair of halves for all sizes of an axis, with the results of plain JAX at the true size."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError
from varying import LAWS, NEEDING, PERCEPTRON, WIDTH, W, assert_close, drawn, normalised, of, perceptron

SIZES = (3, 5, 1, 17)


def rows(w, x):
    return {"rows": jnp.tanh(x @ w), "given": x}


def deep(params, x):
    (w, b), (v, _) = params
    with jax.named_scope("block_0"):
        h = jnp.tanh(x @ w + b)
    h = checkpoint_name(jnp.sin(h @ v), "kept")
    return jnp.mean(jax.checkpoint(lambda h: jnp.tanh(jnp.sin(h) @ v))(h) ** 2)


def squares(f):
    return lambda w, x: jnp.sum(f(w, x)["rows"] ** 2)


@pytest.mark.parametrize("name", [name for name in LAWS if name != "branching"])
def test_values_and_gradients_at_all_sizes_are_those_of_jax_by_one_pair(name):
    function, params, calls = LAWS[name]
    cut = aot.function(function, sizes="dynamic")
    for given in calls:
        assert_close(cut.value_and_grad(params, *given), jax.value_and_grad(function)(params, *given))
    assert len(cut.sizes) == 1 and str(cut.sizes).endswith(", 3 sizes"), cut.sizes
    (out, pull), (want, known) = cut.vjp(params, *calls[-1]), jax.vjp(function, params, *calls[-1])
    assert_close((out, pull(jnp.ones_like(out))), (want, known(jnp.ones_like(want))))


def test_float64_agrees_to_twelve_digits():
    with jax.enable_x64(True):
        w, cut = jnp.asarray(W, jnp.float64), aot.function(normalised, sizes="dynamic")
        for n in (3, 5, 17):
            x = jnp.asarray(drawn((n, WIDTH)), jnp.float64)
            assert_close(cut.value_and_grad(w, x), jax.value_and_grad(normalised)(w, x), rtol=1e-12)
        assert len(cut.sizes) == 1


def test_outputs_have_the_true_sizes_and_what_only_moves_keeps_its_bits():
    cut = aot.function(rows, sizes="dynamic")
    for n in SIZES:
        (x,) = of((n, WIDTH))
        assert cut(W, x)["given"] is x
        moved = aot.function(lambda w, x: (x[::-1], jnp.concatenate([x, w]), x.T.reshape(-1)), sizes="dynamic")
        for m in (n + 1, n):
            for a, b in zip(moved(W, drawn((m, WIDTH))), moved._function(W, drawn((m, WIDTH))), strict=True):
                np.testing.assert_array_equal(a, b)
        (out, pull), (want, known) = cut.vjp(W, x), jax.vjp(rows, W, x)
        ones = jax.tree.map(jnp.ones_like, want)
        assert_close((out, pull(ones)), (want, known(ones)))
        twice = jax.tree.map(lambda ct: jnp.stack([ct, 2 * ct]), ones)
        assert_close(jax.vmap(pull)(twice), jax.vmap(known)(twice))
    assert [line.split(" of ")[0] for line in str(cut.sizes).splitlines()[1:]] == ["  0: call", "  1: pair"]


WAYS = {
    "grad": lambda f, w, x: jax.grad(squares(f))(w, x),
    "grad of rows that depend on it": lambda f, w, x: jax.grad(lambda w: squares(f)(w, jnp.sin(x @ w)))(w),
    "value and grad": lambda f, w, x: jax.value_and_grad(squares(f), (0, 1))(w, x),
    "jacrev": lambda f, w, x: jax.jacrev(f)(w, x)["rows"],
    "jacfwd": lambda f, w, x: jax.jacfwd(f)(w, x)["rows"],
    "linearize": lambda f, w, x: jax.linearize(lambda w: f(w, x)["rows"], w)[1](w),
    "hessian": lambda f, w, x: jax.hessian(squares(f))(w, x),
    "grad of grad": lambda f, w, x: jax.grad(lambda w: jnp.sum(jax.grad(squares(f))(w, x) ** 2))(w),
    "jit of grad": lambda f, w, x: jax.jit(jax.grad(squares(f)))(w, x),
    "vmap of grad": lambda f, w, x: jax.vmap(jax.grad(squares(f)), (None, 0))(w, x[:, None]),
}


@pytest.mark.parametrize("way", WAYS)
def test_transformations_around_it_are_those_of_jax(way):
    cut = aot.function(rows, sizes="dynamic")
    for n in (3, 5, 2):
        assert_close(WAYS[way](cut, W, drawn((n, WIDTH))), WAYS[way](rows, W, drawn((n, WIDTH))), rtol=1e-5)
    is_shared = way in list(WAYS)[:4]
    assert len(cut.sizes) == is_shared, cut.sizes


def test_in_jax_grad_a_value_of_the_trace_that_it_closes_over_has_its_gradient():
    def loss(w, of_function):
        inner = of_function(lambda x: jnp.sum(jnp.sin(x @ w)))
        return sum(inner(drawn((n, WIDTH)) * jnp.sum(w)) for n in (3, 5, 4))

    got = jax.grad(lambda w: loss(w, lambda f: aot.function(f, sizes="dynamic")))(W)
    assert_close(got, jax.grad(lambda w: loss(w, lambda f: f))(W), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.0},
        {"budget": "1MB"},
        {"strategy": "save_all"},
        {"strategy": "min_cut"},
        {"policy": {"block_*": aot.MUST_RECOMPUTE}},
        {"policy": {"kept": aot.MUST_SAVE}},
        {"derivatives": "pytorch"},
        {"argnums": (0, 1)},
        {"donate_argnums": 0},
    ],
    ids=str,
)
def test_it_goes_with_budgets_strategies_policies_and_donation(options):
    cut, plain = aot.function(deep, sizes="dynamic", **options), jax.value_and_grad(deep, options.get("argnums", 0))
    for n in SIZES:
        (x,) = of((n, WIDTH))
        assert_close(cut.value_and_grad(jax.tree.map(jnp.copy, PERCEPTRON), x), plain(PERCEPTRON, x))
    assert len(cut.sizes) == 1


def test_rows_of_a_table_are_as_many_as_were_read():
    function, params, calls = LAWS["embedding"]
    cut = aot.function(function, sizes="dynamic", sparse_gradients="args[0]['table']")
    for given in calls:
        grads = cut.grad(params, *given)
        assert grads["table"].nse == len(given[0])
        assert_close(grads["table"].todense(), jax.grad(function)(params, *given)["table"])
    assert len(cut.sizes) == 1


def test_gradients_are_added_and_updates_made_at_all_sizes():
    def descend(gradients, state, params):
        moved = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moved), moved

    adding, updating = (aot.function(perceptron, sizes="dynamic") for _ in range(2))
    refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), PERCEPTRON)
    ours, theirs, sums = jax.tree.map(jnp.copy, PERCEPTRON), PERCEPTRON, jax.tree.map(jnp.zeros_like, PERCEPTRON)
    state, known = (jax.tree.map(jnp.zeros_like, PERCEPTRON) for _ in range(2))
    for n in SIZES:
        (x,) = of((n, WIDTH))
        adding.accumulate_into(refs)(PERCEPTRON, x)
        sums = jax.tree.map(jnp.add, sums, jax.grad(perceptron)(PERCEPTRON, x))
        _, ours, state = updating.value_and_update(ours, state, x, update=descend)
        theirs, known = descend(jax.grad(perceptron)(theirs, x), known, theirs)
    assert_close((jax.tree.map(lambda ref: ref[...], refs), ours), (sums, theirs), rtol=1e-5)
    assert len(adding.sizes) == len(updating.sizes) == 1


def test_a_module_of_flax_takes_its_statistics_from_the_true_rows():
    nnx = pytest.importorskip("flax.nnx")

    def made(**options):
        layer, norm = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(1))
        return norm, aot.function(lambda norm, x: jnp.mean(jnp.tanh(norm(layer(x))) ** 2), filter=nnx.Param, **options)

    (ours, cut), (theirs, plain) = made(sizes="dynamic"), made()
    for n in SIZES:
        (x,) = of((n, WIDTH))
        assert_close(cut.value_and_grad(ours, x), plain.value_and_grad(theirs, x))
        assert_close(ours.var[...], theirs.var[...])
    assert len(cut.sizes) == 1


@pytest.mark.parametrize("name", NEEDING)
def test_a_size_that_is_needed_as_a_number_has_a_program_each_and_the_line_is_told(name):
    function, said = NEEDING[name]
    cut = aot.function(function, sizes="dynamic")
    for n in (3, 6, 9, 6):
        (x,) = of((n, WIDTH))
        assert_close(cut.value_and_grad(W, x), jax.value_and_grad(function)(W, x))
    told = re.sub(r"py:\d+", "py:N", str(cut.sizes))
    assert told == (
        f"<lambda>: 0 programs for sizes that vary\n"
        f"  axis 0 of args[1] has a program for each size: {said} (varying.py:N)"
    )


def test_references_and_callbacks_have_a_program_for_each_size():
    seen, held = [], jax.new_ref(jnp.zeros(()))

    def counted(w, x, ref):
        ref[...] += jax.lax.stop_gradient(jnp.sum(x))
        return jnp.sum(x @ w)

    def watched(w, x):
        jax.debug.callback(lambda h: seen.append(h.shape), x @ w)
        return jnp.sum(x @ w)

    adding, watching, total = aot.function(counted, sizes="dynamic"), aot.function(watched, sizes="dynamic"), 0.0
    for n in (3, 5):
        (x,) = of((n, WIDTH))
        adding.grad(W, x, held)
        watching.grad(W, x)
        total += jnp.sum(x)
    jax.effects_barrier()
    np.testing.assert_allclose(held[...], total, rtol=1e-5)
    assert seen == [(3, WIDTH), (5, WIDTH)]
    assert str(adding.sizes).splitlines()[1] == (
        "  axis 0 of args[1] has a program for each size: "
        "counted reads or writes a jax.Ref, which holds an array of the true size."
    )


def test_only_the_size_that_is_needed_as_a_number_has_a_program_each():
    def loss(w, x, steps):
        return jnp.mean(x @ w) + sum(jnp.sum(step * w) for step in steps)

    cut = aot.function(loss, sizes="dynamic")
    for n, m in ((3, 2), (5, 3), (9, 3), (7, 3), (8, 2)):
        given = of((n, WIDTH), (m, WIDTH))
        assert_close(cut.value_and_grad(W, *given), jax.value_and_grad(loss)(W, *given))
    assert re.findall(r": step of (.*)", str(cut.sizes)) == [
        "args[1]: float32[s0,4] (s0 up to 64), 3 sizes",
        "args[1]: float32[s0,4] (s0 up to 64), 1 size",
    ]


def test_what_stands_behind_the_true_end_reaches_nothing():
    def loss(w, x):
        return jnp.sum(jnp.log(x) @ w / jnp.linalg.norm(x, axis=1, keepdims=True))

    cut = aot.function(loss, argnums=(0, 1), sizes="dynamic")
    for n in SIZES:
        x = jnp.abs(drawn((n, WIDTH))) + 0.1
        assert_close(cut.value_and_grad(W, x), jax.value_and_grad(loss, (0, 1))(W, x), rtol=1e-5)
    assert len(cut.sizes) == 1


def test_random_sizes_of_a_ragged_batch_are_served_by_few_programs():
    def states(w, x):
        return jax.lax.scan(lambda h, y: (jnp.tanh(h @ w + y),) * 2, jnp.zeros(WIDTH), x)[1]

    def loss(w, sequences):
        return sum(jnp.mean(states(w, x) ** 2) for x in sequences) / len(sequences)

    cut, rng = aot.function(loss, sizes="dynamic"), np.random.default_rng(5)
    for step in range(12):
        batch = [drawn((n, WIDTH), step) for n in rng.integers(1, 201, 3)]
        assert_close(cut.value_and_grad(W, batch), jax.value_and_grad(loss)(W, batch), rtol=1e-5)
    assert len(cut.sizes) <= 3, cut.sizes


def test_exports_and_stages_have_the_sizes_that_they_are_given(tmp_path):
    cut = aot.function(perceptron, sizes="dynamic")
    path = cut.export(tmp_path / "pair", PERCEPTRON, aot.shapes("b, 4", "float32"), sizes={"b": 8})
    (x,) = of((5, WIDTH))
    assert_close(aot.load(path).value_and_grad(PERCEPTRON, x), jax.value_and_grad(perceptron)(PERCEPTRON, x))
    for n in (3, 5):
        assert cut.trace(PERCEPTRON, *of((n, WIDTH))).partition().traced.bound.leaves[-1].shape == (n, WIDTH)


def test_one_of_several_processes_is_refused(monkeypatch):
    cut = aot.function(perceptron, sizes="dynamic")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(CallError) as caught:
        cut.grad(PERCEPTRON, *of((3, WIDTH)))
    assert str(caught.value) == (
        "sizes='dynamic' is for one process, and these are 4, which may see different sizes.\n"
        "Leave it out, and pad arrays to sizes that all share."
    )


BESIDE = {
    "check": "nonfinite",
    "saved_arrays": aot.saved_arrays(lambda x: x, lambda x: x),
    "devices": 8,
    "cache": True,
    "spill": "folder",
    "error": 0.01,
    "tiles": {"args[1]": 4},
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_sees_arrays_of_one_size_is_refused_by_name(name):
    with pytest.raises(TraceError) as caught:
        aot.function(perceptron, sizes="dynamic", **{name: BESIDE[name]})
    said = f"{name} is given beside sizes, with which ops run on padded arrays, without {name}.\nGive one of them."
    assert str(caught.value) == said


def test_a_folder_for_all_functions_does_not_keep_sizes_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("JOINTCUT_CACHE_DIR", str(tmp_path))
    for options in ({}, {"cache": False}, {"tiles": False}):
        cut = aot.function(perceptron, sizes="dynamic", **options)
        for size in SIZES:
            cut.value_and_grad(PERCEPTRON, drawn((size, WIDTH)))
        assert len(cut.sizes) == 1
    assert not list(tmp_path.iterdir())


def test_another_choice_is_refused():
    with pytest.raises(TraceError) as caught:
        aot.function(perceptron, sizes="any")
    assert str(caught.value) == "sizes 'any' is unknown.\nKnown names: 'dynamic'."
