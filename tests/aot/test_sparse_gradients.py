"""The gradient of a table that is read by rows comes as a sparse array of those rows, and costs no table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

from jointcut import aot
from jointcut.partition.errors import TraceError

TABLE = jnp.linspace(-1, 1, 30).reshape(10, 3)
IDS = jnp.array([[1, 2, 1], [9, -1, 1]])
W = jnp.linspace(0.3, 0.9, 9).reshape(3, 3)


def params():
    return {"table": TABLE, "w": W}


READS = {
    "indexed": lambda p, ids: jnp.sum(jnp.tanh(p["table"][ids] @ p["w"])),
    "taken": lambda p, ids: jnp.sum(jnp.tanh(jnp.take(p["table"], ids, axis=0, mode="clip") @ p["w"])),
    "twice": lambda p, ids: jnp.sum(p["table"][ids] ** 2) + jnp.sum(jnp.sin(p["table"][ids[0]]) @ p["w"]),
    "outside": lambda p, ids: jnp.sum(jnp.take(p["table"], ids * 5, axis=0, mode="fill", fill_value=0.0) ** 2),
    "no rows": lambda p, ids: jnp.sum(p["table"][ids[:0]] ** 2) + jnp.sum(p["w"]),
    "not read": lambda p, ids: jnp.sum(p["w"] ** 2),
    "below zero": lambda p, ids: jnp.sum(p["table"].at[ids - 3].get(mode="fill", fill_value=0.0) ** 2),
    "below zero, not wrapped": lambda p, ids: jnp.sum(
        p["table"].at[ids].get(mode="fill", fill_value=0.0, wrap_negative_indices=False) ** 2
    ),
    "far below zero": lambda p, ids: jnp.sum(p["table"][ids - 10] ** 2),
    "small integers": lambda p, ids: jnp.sum(p["table"][ids.astype(jnp.int8)] ** 2),
    "clipped": lambda p, ids: jnp.sum(p["table"].at[ids * 5].get(mode="clip") ** 2),
    "under checkpoint": lambda p, ids: jnp.sum(jax.checkpoint(lambda t: jnp.tanh(t[ids]) ** 2)(p["table"])),
    "bfloat16": lambda p, ids: jnp.sum(p["table"][ids].astype(jnp.bfloat16)).astype(jnp.float32),
}

WAYS = {
    "value_and_grad": lambda f, *args: f.value_and_grad(*args),
    "in a jit": lambda f, *args: jax.jit(f.value_and_grad)(*args),
    "compiled": lambda f, *args: f.trace(*args).partition().compile().value_and_grad(*args),
    "compiled in two": lambda f, *args: f.trace(*args).partition().compile(executables=2).value_and_grad(*args),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_rows_add_up_to_the_gradient(read, way):
    function = aot.function(read, sparse_gradients="args[0]['table']")
    value, gradient = way(function, params(), IDS)
    want_value, want = jax.value_and_grad(read)(params(), IDS)
    np.testing.assert_allclose(value, want_value, rtol=1e-5, atol=1e-6)
    assert isinstance(gradient["table"], sparse.BCOO)
    assert gradient["table"].shape == TABLE.shape
    np.testing.assert_allclose(gradient["table"].todense(), want["table"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient["w"], want["w"], rtol=1e-4, atol=1e-5)


def test_the_backward_makes_no_array_of_the_tables_size():
    table = jnp.ones((100_000, 8))

    def loss(table, ids):
        return jnp.sum(jnp.tanh(table[ids]))

    dense = aot.function(loss).trace(table, IDS).partition().compile().memory
    rows = aot.function(loss, sparse_gradients="args[0]").trace(table, IDS).partition().compile().memory
    assert dense.step.output_bytes >= table.nbytes
    assert rows.step.output_bytes + rows.step.temp_bytes < 10_000


def test_metadata_says_that_a_plain_array_gets_a_container():
    traced = aot.function(READS["indexed"], sparse_gradients=["args[0]['table']"]).trace(params(), IDS)
    assert [str(meta) for meta in traced.subclass_metadata.grad_input_metas] == [
        "BCOO(data: float32[6,3], indices: int32[6,1])",
        "float32[3,3]",
    ]


def test_the_gradient_contract_counts_rows_and_places():
    function = aot.function(READS["indexed"], sparse_gradients="args[0]['table']")
    cut = function.trace(params(), IDS).partition()
    found = cut.gradient
    inputs = [TABLE, W, IDS]
    outputs = jax.core.eval_jaxpr(found.f.jaxpr if hasattr(found.f, "jaxpr") else found.f, found.f.consts, *inputs)
    captured = [*(inputs[i] for i in found.df_input_captured_inputs)]
    captured += [outputs[i] for i in found.df_input_captured_outputs]
    df = found.df
    rows, places, w = jax.core.eval_jaxpr(
        df.jaxpr if hasattr(df, "jaxpr") else df, df.consts, *(jnp.float32(1) for _ in found.df_input_vjps), *captured
    )
    assert found.df_output_vjps == (0, 0, 1)
    want = jax.grad(READS["indexed"])(params(), IDS)
    np.testing.assert_allclose(sparse.BCOO((rows, places), shape=TABLE.shape).todense(), want["table"], rtol=1e-4)
    np.testing.assert_allclose(w, want["w"], rtol=1e-4)
    assert cut.signature.backward_signature.gradients_to_parameters == {
        "gradient_1": "args[0]['table']",
        "gradient_2": "args[0]['table']",
        "gradient_3": "args[0]['w']",
    }


def test_vjp_stays_that_of_jax():
    function = aot.function(READS["indexed"], sparse_gradients="args[0]['table']")
    _, pullback = function.vjp(params(), IDS)
    np.testing.assert_allclose(
        pullback(jnp.float32(1))[0]["table"], jax.grad(READS["indexed"])(params(), IDS)["table"], rtol=1e-4
    )


NO_ROWS = {
    "read whole": lambda p, ids: jnp.sum(p["table"] ** 2) + jnp.sum(p["table"][ids]),
    "scaled": lambda p, ids: jnp.sum((2.0 * p["table"])[ids] ** 2),
    "one row": lambda p, ids: jnp.sum(p["table"][ids[0, 0]] ** 2),  # JAX slices there
    "columns": lambda p, ids: jnp.sum(p["table"][:, ids[0] % 3] ** 2),
    "parts of rows": lambda p, ids: jnp.sum(
        lax.gather(
            p["table"],
            ids.reshape(-1, 1),
            lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)),
            (1, 2),
        )
        ** 2
    ),
    "in a loop": lambda p, ids: lax.scan(lambda c, i: (c + jnp.sum(p["table"][i] ** 2), None), 0.0, ids)[0],
}


@pytest.mark.parametrize("read", NO_ROWS.values(), ids=NO_ROWS)
def test_a_gradient_that_is_more_than_rows_is_refused(read):
    with pytest.raises(TraceError) as caught:
        aot.function(read, sparse_gradients="args[0]['table']").value_and_grad(params(), IDS)
    assert str(caught.value) == (
        "args[0]['table'] has a gradient that is not a sum of rows: only a table that is read by rows, "
        "table[indices], has.\nTake it out of sparse_gradients."
    )


def test_an_unknown_path_is_refused():
    with pytest.raises(TraceError) as caught:
        aot.function(READS["indexed"], sparse_gradients="args[0]['tabel']").value_and_grad(params(), IDS)
    assert str(caught.value) == (
        "sparse_gradients names args[0]['tabel'].\n"
        """Known names: "args[0]['table']", "args[0]['w']". Did you mean "args[0]['table']"?"""
    )
