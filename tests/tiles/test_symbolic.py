"""Where sizes are symbolic no rows run in blocks: who asks for blocks is told so, who does not gets a plan without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition.errors import BudgetError, PlanError, TraceError
from jointcut.partition.plans import planfile
from jointcut.partition.prices.cost import Roofline

TOKENS, WIDTH, WORDS = 512, 16, 2048
STEADY = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)


def loss(w, x):
    return jnp.mean(jax.nn.logsumexp(x @ w, axis=1))


def arguments(tokens):
    return jnp.full((WIDTH, WORDS), 0.1), jax.random.normal(jax.random.key(0), (tokens, WIDTH))


def exported(folder, **options):
    step = aot.function(loss, **options)
    return step.export(folder, arguments(1)[0], aot.shapes(f"b, {WIDTH}", jnp.float32), sizes={"b": TOKENS})


def test_blocks_that_are_asked_for_are_refused(tmp_path):
    with pytest.raises(TraceError) as error:
        exported(tmp_path / "out", tiles={"args[1]": 4})
    assert str(error.value) == (
        "tiles['args[1]'] asks for rows in blocks, which are parted for one number of rows, and sizes are symbolic.\n"
        "Export with numbers for all sizes, or leave it out."
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_a_plan_with_blocks_is_refused(tmp_path, as_text):
    cut = aot.function(loss, tiles={"args[1]": 4}).trace(*arguments(TOKENS)).partition()
    with pytest.raises(PlanError) as error:
        exported(tmp_path / "out", plan=planfile.dumps(cut.plan, cut.split.graph) if as_text else cut.plan)
    assert str(error.value) == (
        "plan.tiles name rows in blocks, which are parted for one number of rows, and sizes are symbolic.\n"
        "Export with numbers for all sizes, or make a plan under tiles=False."
    )


def test_a_budget_that_only_blocks_hold_is_refused_and_says_so(tmp_path):
    assert aot.function(loss, budget=0.25, cost=STEADY).trace(*arguments(TOKENS)).partition().plan.tiles
    with pytest.raises(BudgetError) as error:
        exported(tmp_path / "out", budget=0.25, cost=STEADY)
    assert error.value.least_bytes is not None
    assert error.value.__notes__ == [
        "No rows run in blocks where sizes are symbolic. With numbers for all sizes this budget may hold."
    ]


def test_where_a_target_gains_by_blocks_symbolic_sizes_have_a_plan_without(tmp_path, monkeypatch):
    """On a GPU a large array runs in blocks unasked: not so for all sizes."""
    monkeypatch.setattr("jointcut.aot.planning.request.unasked", lambda *given: pytest.fail("blocks were looked for"))
    loaded = aot.load(exported(tmp_path / "out"))
    for tokens in (TOKENS, 13, 1):
        value, gradient = loaded.value_and_grad(*arguments(tokens))
        want, want_gradient = jax.value_and_grad(loss)(*arguments(tokens))
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-7)


def test_blocks_of_a_symbolic_number_of_rows_are_refused_without_an_export():
    traced = aot.function(loss, tiles={"args[1]": 4}).trace(arguments(1)[0], aot.shapes(f"b, {WIDTH}", jnp.float32))
    with pytest.raises(TraceError) as error:
        traced.partition()
    assert str(error.value) == (
        "args[1] has sizes that are names, and a plan needs numbers.\n"
        "Trace with numbers, or export for all sizes: aot.function(...).export(path, ..., sizes={...})."
    )
