"""Small things that people meet daily: what a print shows, and functions whose call runs nothing."""

from __future__ import annotations

import re
from functools import partial

import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.partition.errors import TraceError

W, X = jnp.ones((3, 3)), jnp.ones((2, 3))


def test_the_memory_of_a_step_is_a_table():
    run = aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)).trace(W, X).partition().compile()
    head, names, step, *halves, last = str(run.memory).splitlines()
    assert (head, names.split()) == ("Memory", ["arguments", "results", "in", "both", "temporaries", "peak"])
    assert step.startswith("  step      60 B       56 B     0 B")
    assert [line.split()[0] for line in halves] == ["forward", "backward"]
    assert re.fullmatch(r"  saved between forward and backward: \d+ B", last)


async def awaited(w):
    return jnp.sum(w)


def parts(w):
    yield jnp.sum(w)


async def stream(w):
    yield jnp.sum(w)


IS_ASYNC = "is async, so that its call runs nothing.\nTake `async` away, and await around the call."
IS_GENERATOR = "is a generator, whose call runs nothing.\nReturn the values: in a list, or by jax.lax.scan."


@pytest.mark.parametrize(("function", "text"), [(awaited, IS_ASYNC), (parts, IS_GENERATOR), (stream, IS_ASYNC)])
@pytest.mark.parametrize(
    "decorator", [aot.function, aot.tape, lambda f: aot.explain(f, W)], ids=["f", "tape", "explain"]
)
def test_a_function_whose_call_runs_nothing_is_refused_by_name(decorator, function, text):
    for given in (function, partial(function)):
        with pytest.raises(TraceError) as caught:
            decorator(given)
        line = function.__code__.co_firstlineno
        assert str(caught.value) == f"{function.__name__} at {__file__}:{line} {text}"
