"""Hooks on what is saved, in `aot.function`: where they run, what they are given, and what is refused."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition.errors import ArtefactError, CallError, TraceError

W = np.linspace(-0.5, 0.5, 5 * 16 * 16, dtype=np.float32).reshape(5, 16, 16)
X = np.linspace(-1, 1, 128 * 16, dtype=np.float32).reshape(128, 16)


def loss(w, x):
    def step(h, w):
        return checkpoint_name(jnp.tanh(h @ w), "hidden") + jnp.sin(h), None

    return jnp.sum(lax.scan(step, x, w)[0] ** 2) + jnp.sum(x * x * w[0, 0])


def same(x):
    return x


def half(x):
    return x.astype(jnp.float16)


def whole(x):
    return x.astype(jnp.float32)


def packed(pack, unpack, which=None, **options):
    return aot.function(loss, saved_arrays=aot.saved_arrays(pack, unpack, which), **options)


WANT = jax.grad(loss)(W, X)
PLAIN = aot.function(loss).trace(W, X).partition()

# ----------------------------------------------------------------------------------------------- where they run


@pytest.mark.parametrize("which", ["intermediates", "no_params", "all"])
def test_plan_and_report_tell_the_bytes_of_what_is_packed(which):
    cut = packed(half, whole, which).trace(W, X).partition()
    found = cut.plan.packed
    assert found.bytes * 2 == found.plain_bytes and found.bytes == cut.split.residual_bytes
    assert found.values == len(cut.plan.values) + {"intermediates": 0, "no_params": 1, "all": 2}[which]
    assert PLAIN.plan.packed is None and str(found) in cut.plan.remarks


def test_a_report_and_a_plan_within_a_budget_tell_packed_bytes():
    cut = packed(half, whole, budget=0.0).trace(W, X).partition()
    found, report = cut.plan.packed, cut.explain(measure=False)
    assert found.bytes == cut.split.residual_bytes and report.to_dict()["packed"]["bytes"] == found.bytes
    assert f"P{str(found)[1:]}." in str(report)


def test_packed_bytes_count_behind_smaller_forms_and_for_what_is_called_back():
    policy = {"*": aot.SAVE_AS("bfloat16")}
    both = packed(lambda x: (x, x), lambda two: two[0], policy=policy).trace(W, X).partition()
    assert both.plan.packed.bytes == both.split.residual_bytes == 2 * both.plan.bytes_saved
    assert both.plan.packed.plain_bytes == both.plan.bytes_saved
    called = packed(lambda x: np.asarray(x)[:1], lambda x: x, "intermediates").trace(W, X)
    with pytest.raises(CallError):
        called.partition()


def test_functions_that_jax_can_trace_are_part_of_the_halves_and_run_late():
    cut = packed(half, whole).trace(W, X).partition()
    assert cut.split.residual_bytes * 2 == PLAIN.split.residual_bytes and cut.plan == PLAIN.plan
    assert "pure_callback" not in f"{cut.forward} {cut.backward}"
    lines = [line.strip() for line in str(cut.schedule).splitlines()]
    unpacked = [i for i, line in enumerate(lines) if line.startswith("restore") and " from hook" in line]
    assert len(unpacked) == len(cut.plan.values)
    for i in unpacked:  # before its reader, or before it waits for a cotangent with it
        v = re.findall(r"%\d+", lines[i])[0]
        assert lines[i + 1].startswith((f"wait {v} ", "run #", "again #", "loop #", "restore", "write"))


@pytest.mark.parametrize("which", [None, "intermediates", "no_params", "all"])
def test_gradients_are_those_of_the_arrays_that_come_back(which):
    function = packed(half, whole, which)
    assert 0 < relative_error(function.grad(W, X), WANT) < 1e-3
    np.testing.assert_array_equal(packed(same, same, which).grad(W, X), packed(same, same, which).vjp(W, X)[1](1.0)[0])
    two = np.stack([W, W / 2]), np.stack([X, X])
    found = jax.jit(jax.vmap(jax.grad(function)))(*two)
    assert 0 < relative_error(found, jax.vmap(jax.grad(loss))(*two)) < 1e-3
    assert relative_error(packed(same, same, which).grad(W, X), aot.function(loss).grad(W, X)) < 1e-6


def test_an_array_that_is_passed_twice_is_one_input():
    def product(x, y):
        return jnp.sum(jnp.sin(x) * jnp.tanh(y @ x))

    for which in ("intermediates", "no_params", "all"):
        function = aot.function(product, saved_arrays=aot.saved_arrays(same, same, which))
        got = function.vjp(W[0], W[0])[1](1.0)
        for a, b in zip(got, jax.grad(product, (0, 1))(W[0], W[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_filters_choose_what_is_packed():
    shapes = {}
    for which in ("intermediates", "no_params", "all"):
        _, pullback = packed(half, whole, which).trace(W, X).partition().compile(2).vjp(W, X)
        shapes[which] = sorted(x.shape for x in pullback.saved if x.dtype == jnp.float16)
        inputs = [x.shape for x in pullback.inputs]
        assert (X.shape in inputs) == (which == "intermediates") and (W.shape in inputs) == (which != "all")
    assert shapes["no_params"] == sorted([*shapes["intermediates"], X.shape])
    assert shapes["all"] == sorted([*shapes["no_params"], W.shape])


def test_other_functions_are_called_back_with_numpy_arrays():
    log = []

    def pack(x):
        log.append(("pack", type(x), x.shape))
        return {"numbers": np.asarray(x, np.float16), "shape": np.array(x.shape)}

    def unpack(kept):
        log.append(("unpack", type(kept["numbers"]), kept["numbers"].shape))
        return (
            kept["numbers"].reshape(kept["shape"] if kept["shape"].any() else kept["numbers"].shape).astype("float32")
        )

    function = packed(pack, unpack)
    cut = function.trace(W, X).partition()
    assert "pure_callback" in str(cut.forward) and "pure_callback" in str(cut.backward)
    log.clear()
    assert 0 < relative_error(function.grad(W, X), WANT) < 1e-3
    kinds = [kind for kind, *_ in log]
    assert kinds.count("pack") == kinds.count("unpack") >= 5 and {t for _, t, _ in log} == {np.ndarray}
    assert {s for _, _, s in log} == {(128, 16)}
    assert 0 < relative_error(jax.jit(jax.vmap(jax.grad(function)))(W[None], X[None])[0], WANT) < 1e-3


def test_hooks_are_given_what_waits_in_its_form_and_nest_with_offloading():
    seen = []

    def pack(x):
        seen.append((x.dtype.name, x.shape))
        return x

    policy = {"hidden": (aot.MUST_OFFLOAD, aot.SAVE_AS("int8")), "*": aot.SAVE_AS("bfloat16")}
    function = packed(pack, same, policy=policy)
    cut = function.trace(W, X).partition()
    assert set(seen) == {("int8", (128, 16)), ("float32", (1, 16)), ("bfloat16", (128, 16))}
    text = str(cut.schedule)
    assert re.search(r"store (%\d+) as int8\n +store \1 as hook\n +offload \1\n", text)
    assert re.search(r"fetch (%\d+)\n +restore \1 from hook\n +restore \1 from int8\n", text)
    np.testing.assert_array_equal(cut.compile(2).value_and_grad(W, X)[1], function.grad(W, X))
    assert 0 < relative_error(function.grad(W, X), WANT) < 1e-2


def test_traced_hooks_are_exported_and_differentiated_again(tmp_path):
    function = packed(lambda x: x.astype(jnp.bfloat16), whole)
    loaded = aot.load(function.export(tmp_path / "artefact", W, X))
    np.testing.assert_allclose(loaded.value_and_grad(W, X)[1], function.grad(W, X), rtol=1e-4, atol=1e-5)
    found = jax.grad(lambda w: jnp.sum(jax.grad(function)(w, X) ** 2))(W)
    assert 0 < relative_error(found, jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, X) ** 2))(W)) < 2e-2


def test_what_passes_through_hooks_is_not_kept_in_the_cache(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jointcut"):
        packed(half, whole, cache=tmp_path / "cache").grad(W, X)
    told = "loss (step) is not kept in the cache: what it saves passes through functions of yours."
    assert caplog.messages == [told]


# ------------------------------------------------------------------------------------------------ what is refused


def refused(pack, unpack):
    with pytest.raises(CallError) as error:
        packed(pack, unpack).trace(W, X).partition()
    return re.sub(r"\S*test_saved_arrays.py", "FILE", str(error.value))


def test_another_dtype_that_comes_back_is_refused():
    assert re.fullmatch(
        r"saved_arrays: %\d+:5xfloat32\[128,16\] \(\w+ at FILE:\d+ \(.*\)\) is packed as float32\[128,16\], and same "
        r"at FILE:\d+ gives back float16\[128,16\]\.\nReturn float32\[128,16\] from unpack\.",
        refused(half, same),
    )


def test_another_shape_that_comes_back_is_refused_also_from_a_call_back():
    log = []

    def unpack(x):
        log.append(x)
        return x[:1]

    assert re.fullmatch(
        r"saved_arrays: %\d+:5xfloat32\[128,16\] \(\w+ at FILE:\d+ \(.*\)\) is packed as float32\[128,16\], and "
        r"\S+unpack at FILE:\d+ gives back float32\[1,16\]\.\nReturn float32\[128,16\] from unpack\.",
        refused(same, unpack),
    )


def test_what_is_no_array_is_refused():
    assert re.fullmatch(
        r"saved_arrays: \S+<lambda> at FILE:\d+ returned a str for float32\[128,16\]\.\n"
        r"Return arrays, of shapes and dtypes that depend on those of its argument alone\.",
        refused(lambda x: "file.npy", same),
    )


def test_bad_options_are_refused_at_once():
    with pytest.raises(CallError) as error:
        aot.saved_arrays(same, 3)
    assert str(error.value) == (
        "saved_arrays unpack is a int, which cannot be called.\nGive two functions, pack(array) and unpack(packed)."
    )
    with pytest.raises(CallError) as error:
        aot.saved_arrays(same, same, "params")
    assert str(error.value) == (
        "saved_arrays which='params' is unknown.\n"
        "Known names: 'all', 'intermediates', 'no_params'. Did you mean 'no_params'?"
    )
    with pytest.raises(TraceError) as error:
        aot.function(loss, saved_arrays=(same, same))
    assert str(error.value) == "saved_arrays is a tuple.\nGive aot.saved_arrays(pack, unpack)."


def test_a_call_back_is_not_exported(tmp_path):
    function = packed(np.asarray, same)
    with pytest.raises(ArtefactError) as error:
        function.export(tmp_path / "artefact", W, X)
    assert str(error.value) == (
        "loss has saved_arrays that are called back, in this process.\n"
        "Export without them, or give functions that JAX can trace."
    )
    assert not (tmp_path / "artefact").exists()


def test_a_tape_packs_all_that_it_saves():
    @aot.tape
    def taped(x):
        with aot.saved_arrays(same, same, "no_params"):
            return jnp.sum(jnp.sin(x))

    with pytest.raises(CallError) as error:
        taped.grad(X)
    assert str(error.value) == (
        "saved_arrays has which='no_params' on a tape, where all that is saved is packed.\n"
        "Leave which out, or give it to aot.function."
    )
