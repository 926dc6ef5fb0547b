"""`aot.doctor` tells one array that is the peak, with the rows that run in blocks; and what a schedule holds."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.alive import live_bytes
from jointcut import aot
from jointcut.aot.call.doctor.late import barred
from jointcut.aot.call.doctor.scheduled import scheduled
from jointcut.aot.report.liveness import Liveness
from jointcut.partition.program.jax.jaxprs import inner_jaxprs
from jointcut.partition.program.places import line_of

pytestmark = pytest.mark.usefixtures("compiled_anew")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def told(found):
    """A text without the numbers of its lines."""
    return re.sub(r"\.py:\d+", ".py", str(found))


def head(w, x, labels):
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


HEAD = struct(64, 2048), struct(1024, 64), struct(1024, dtype=jnp.int32)


def ranked(w, x):
    y = x @ w
    gaps = jnp.abs(y - jax.lax.stop_gradient(y).T)
    least = jnp.sort(jax.lax.stop_gradient(gaps), axis=1)[:, :4].sum(axis=1)
    return jnp.sum(least * jnp.sum(y**2, axis=1))


RANKED = struct(16, 1), struct(1024, 16)

ONE_ARRAY = """\
one array: 4.19 MB of 4.21 MB of temporaries at the peak are one array, of sort at aot/test_doctor_arrays.py (ranked).
  ranked = aot.function(ranked, budget="1.00 MB")
  compiled with it: 336.6 kB, which fits
  rows in blocks: float32[1024,1024] of stop_gradient at aot/test_doctor_arrays.py (ranked): 16 blocks along axis 0"""


def test_one_array_of_a_loss_runs_in_blocks_within_a_budget():
    found = aot.doctor("1MB").check(jax.grad(ranked), *RANKED)
    assert told("\n".join(found.causes[-1].told(found.memory_bytes))) == ONE_ARRAY
    assert [cause.name for cause in found.causes] == ["one array"]


def test_a_budget_that_runs_rows_in_blocks_is_told_with_them():
    residuals, one_array = aot.doctor("3MB").check(jax.grad(head), *HEAD).causes
    assert residuals.peak_bytes is not None and residuals.peak_bytes < 3e6
    assert told("\n".join(residuals.told(int(3e6))[3:])) == (
        "  rows in blocks: float32[1024,2048] of scatter-add at aot/test_doctor_arrays.py (head): "
        "16 blocks along axis 0, each forward with its backward"
    )
    assert one_array.told(1)[1] == "  With the budget above, its rows run in blocks."


def test_where_the_arguments_take_all_the_least_is_told_in_blocks():
    residuals, _ = aot.doctor("100kB").check(jax.grad(head), *HEAD).causes
    assert residuals.peak_bytes is not None and residuals.peak_bytes < 3e6
    assert residuals.cure == "head = aot.function(head, budget=0.1)" and residuals.blocks


def test_an_array_that_no_budget_divides_is_left_to_the_user():
    found = aot.doctor("100kB").check(jax.grad(aot.function(head, tiles=False)), *HEAD)
    assert found.causes[-1].told(1)[1] == (
        "  With the budget above, it is whole still. If nothing needs all of it at once, compute some rows at a time, "
        "as by jax.lax.map."
    )


def branching(ws, x, kind):
    assert kind == "mean"
    for w in ws:
        x = jax.checkpoint(jax.jit(lambda x, w: jnp.tanh(x @ w) @ w.T))(x, w)
    return jnp.mean(x**2), {"kept": x}


def test_barriers_on_the_operands_of_products_leave_value_and_gradient_as_they_are():
    ws, x = [jnp.linspace(-1, 1, 12 * (i + 1)).reshape(4, -1) for i in range(3)], jnp.ones((5, 4))
    (line,) = {line_of(eqn) for eqn in products(jax.make_jaxpr(branching, static_argnums=2)(ws, x, "mean").jaxpr)}
    ours = barred(branching, [line])
    told = jax.make_jaxpr(ours, static_argnums=2)(ws, x, "mean")
    assert str(told).count("optimization_barrier") == len(list(products(told.jaxpr))) == 6
    got, want = (jax.value_and_grad(f, has_aux=True)(ws, x, "mean") for f in (ours, branching))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert "optimization_barrier" not in str(
        jax.make_jaxpr(barred(branching, ["elsewhere.py:1 (f)"]), 2)(ws, x, "mean")
    )
    assert barred(aot.function(head), [line])._options == aot.function(head)._options


def products(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from products(inner)


# ------------------------------------------------------------------------------------------------------ the schedule


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, ws)[0] ** 2)


def branched(ws, x):
    return jax.lax.cond(x[0, 0] > 0, scanned, lambda ws, x: layers(list(ws), jnp.sin(x)), ws, x)


@pytest.mark.parametrize("function", [layers, scanned, branched, head, ranked])
def test_a_schedule_holds_what_xla_has_assigned(function):
    known = {head: HEAD, ranked: RANKED}
    args = known.get(function, (struct(6, 64, 64), struct(2048, 64)))
    compiled = jax.jit(jax.value_and_grad(function)).lower(*args).compile()
    known_to_xla, found = Liveness.of(compiled), scheduled(compiled)
    assert known_to_xla is not None and found is not None
    assert max(live_bytes(found)) == pytest.approx(max(live_bytes(known_to_xla)), rel=0.1)
    assert found.order == known_to_xla.order
