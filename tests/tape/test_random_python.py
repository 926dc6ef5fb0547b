"""Random functions of Python answer on a tape as in eager JAX, with any sizes, and leave their modules alike."""

from __future__ import annotations

import pytest
from flax import nnx

from jointcut import aot
from programs import EVERY_PROGRAM
from pythonic import DECIDING, NEEDING, Box, Drawn, counted, in_grad, module, params, rows
from varying import assert_close

PROGRAMS, TOGETHER = (120 if EVERY_PROGRAM else 36), 3
OPTIONS = {}, {"sizes": "dynamic"}, {"roll": True}
SIZES = (3, 5, 2, 3)


def eager(drawn, weights, norm, x):
    """The value and gradient by eager JAX, whose references are boxes."""
    return nnx.value_and_grad(lambda weights, norm: drawn(weights, norm, x, Box, in_grad))(weights, norm)


def assert_alike(told, got, want, ours, theirs):
    """Whether values, gradients and the statistics of modules are equal; else `told` says of what."""
    try:
        assert_close(got, want, rtol=2e-4)
        assert_close(nnx.state(ours), nnx.state(theirs), rtol=2e-4)
    except AssertionError as error:
        error.add_note(told)
        raise


@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER), ids="from {}".format)
def test_random_functions_of_python_answer_as_in_eager_jax(first):
    for seed in range(first, first + TOGETHER):
        drawn, weights, ours, theirs = Drawn.of(seed), params(seed), module(), module()
        options = OPTIONS[seed % len(OPTIONS)]
        taped = aot.tape(lambda weights, norm, x, drawn=drawn: drawn(weights, norm, x), **options)
        for count in SIZES:
            x = rows(count, seed)
            got, want = taped.value_and_grad(weights, ours, x), eager(drawn, weights, theirs, x)
            assert_alike(f"program {seed} with {count} rows, {options}: {drawn}", got, want, ours, theirs)
        made = taped.captures.made
        taped.value_and_grad(weights, module(), x)
        assert taped.captures.made == made, f"program {seed}, {options}: {drawn}\n{taped.captures}"
        has_note = " has a program for each size: " in str(taped.captures)
        assert has_note == (bool(options.get("sizes")) and not drawn.has_names), f"{seed}: {drawn}\n{taped.captures}"


@pytest.mark.parametrize("seed", range(0, PROGRAMS, TOGETHER))
def test_random_functions_that_can_be_traced_have_one_pair_of_halves_for_all_sizes(seed):
    drawn, weights, ours, theirs = Drawn.of(seed, DECIDING | NEEDING | {counted}), params(seed), module(), module()
    cut = aot.function(lambda weights, norm, x: drawn(weights, norm, x), sizes="dynamic")
    for count in SIZES:
        x = rows(count, seed)
        got, want = cut.value_and_grad(weights, ours, x), eager(drawn, weights, theirs, x)
        assert_alike(f"program {seed} with {count} rows: {drawn}", got, want, ours, theirs)
    assert len(cut.sizes) == 1, f"program {seed}: {drawn}\n{cut.sizes}"
