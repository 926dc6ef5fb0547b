"""Hooks on random graphs are called in the order of PyTorch's engine.

`python -m benchmarks.tape_hooks` compares both with PyTorch itself.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from benchmarks.tape_hooks import DrawnGraph, by_rule, ours_of
from jointcut import aot


@pytest.mark.parametrize("seed", range(100, 120))
def test_hooks_of_a_random_graph_are_called_in_the_order_of_pytorch(seed):
    graph = DrawnGraph.of(seed)
    expected = by_rule(graph)
    assert ours_of(graph) == expected
    with aot.tape.disabled():
        assert ours_of(graph) == expected


def noting(log, name):
    return lambda g: log.append(name)


def test_an_op_that_hands_its_input_on_is_no_node_so_that_leaves_complete_in_order():
    log = []

    def loss(a, b):
        a, b = (aot.post_accumulate(x, noting(log, name)) for x, name in ((a, "a"), (b, "b")))
        return jnp.sum(jnp.concatenate([a.astype(jnp.float32), b.astype(jnp.float32)]))

    taped = aot.tape(loss, argnums=(0, 1))
    taped.grad(jnp.ones(2), jnp.ones(2))
    assert log == ["a", "b"]
    assert taped.captures[0].ops == 2, "concatenate and sum"


def test_a_python_number_is_not_packed():
    packed = []

    @aot.tape
    def loss(w):
        with aot.saved_arrays(lambda x: packed.append(x.shape) or x, lambda x: x):
            return jnp.sum(2.5 * w * w)

    assert loss.grad(jnp.ones(3)).tolist() == [5.0, 5.0, 5.0]
    assert () not in packed and packed
