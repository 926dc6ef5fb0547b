"""Two reports side by side, opened in a real browser: both mountains, and what is new, gone or larger."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.partition.prices.cost import Roofline
from page.browser import axe_findings
from page.graph_tab import STILL

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)


@pytest.fixture(scope="module")
def found():
    def loss(ws, x, more):
        for w in ws:
            with jax.named_scope("layer"):
                x = jnp.tanh(x @ w)
                x = jnp.where(jnp.sin(x) > 0.1, x, jnp.cos(x) * 2) if more else x
        return jnp.sum(x**2)

    function = aot.function(loss, static_argnums=2, cost=RATES)
    before, after = (function.explain([jnp.ones((32, 32))] * 3, jnp.ones((256, 32)), more) for more in (False, True))
    return after.diff(before)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_draws_both_steps_and_complains_of_nothing(found, theme, opened):
    tab = opened(found.html, theme=theme, **STILL)
    assert tab.locator("#memory path.ghost").count() == 1
    assert tab.get_by_label("with the step before").is_checked()
    assert tab.locator("#saved tbody tr").count() == sum(row.how != "same" for row in found.saved)
    assert "new" in tab.locator("#saved tbody").text_content()
    assert axe_findings(tab) == []
