"""What steps that we cut take, held by our own plugin.

`.ci/run` compares them with `peaks.json` beside this file; elsewhere they are weighed alone. What is meant to grow is
recorded by

    pytest --peak-record -o peak_file=tests/ratchet/peaks.json tests/ratchet/test_own.py

or, for several versions of JAX, with `--peak-versions=".venv/bin/python .venv-3.13/bin/python"` in its place.
"""

from __future__ import annotations

import jax
import pytest

from benchmarks.ratcheted import convnet, perceptron, transformer
from jointcut import aot


@pytest.mark.peak("10 MB")
@pytest.mark.parametrize("strategy", ["best", "min_cut"])
def test_a_transformer_without_checkpoints(peak, strategy):
    params, _, batch, key = transformer.arguments()
    found = peak(aot.function(transformer.loss, strategy=strategy), params, batch, key)
    assert 0 < found.figures["residual_bytes"] < found.figures["temp_bytes"]


@pytest.mark.peak("10 MB")
def test_a_network_of_convolutions(peak):
    with jax.numpy_dtype_promotion("standard"):
        peak(aot.function(convnet.loss), *convnet.arguments())


@pytest.mark.peak("10 MB")
def test_a_perceptron_with_dropout(peak):
    peak(perceptron.step, *perceptron.arguments())
