"""Where a compiler puts gradients off, what is computed again waits for those that are complete."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.lower import verify
from jointcut.partition.lower.among import settle
from jointcut.partition.lower.steps import Enter, Run, Settle, runs
from jointcut.partition.plans.backend import CPU, GPU
from jointcut.partition.program.roles import Role
from programs import EVERY_PROGRAM, OF_EACH_KIND, named

#: The same habits, but that it puts nothing off.
PROMPT = replace(GPU, puts_off=False)
#: The same, for values that may lie on several devices.
SEVERAL = replace(GPU, several=True)


def written_out(layers, x):
    for up, down in layers:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.sum(x**2)


def scanned(layers, x):
    def step(x, layer):
        up, down = layer
        x = x + jnp.tanh(x @ up) @ down
        return x + jnp.tanh(x @ up) @ down, None

    return jnp.sum(lax.scan(step, x, layers)[0] ** 2)


def tied(layers, x):
    return written_out([layers[0]] * len(layers), x)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32) / 8


LAYERS = [(normal(i, 32, 64), normal(i + 9, 64, 32)) for i in range(6)]
X = normal(20, 16, 32)
STACKED = jax.tree.map(lambda *rows: jnp.stack(rows), *LAYERS)
CASES = [(written_out, LAYERS), (scanned, STACKED), (tied, LAYERS)]
#: Waits of one device, then of several with 16, 3 and 1 buckets, and with one of a byte.
COUNTS = {written_out: [6, 6, 2, 0, 6], scanned: [2, 1, 1, 1, 2], tied: [6, 6, 5, 0, 6]}


def cut(function, layers, backend):
    traced = aot.function(function).trace(layers, X)
    return traced, traced.partition("min_cut").split.on(backend)


def settles(split):
    return [step for step in all_steps(split.schedule.backward) if isinstance(step, Settle)]


def all_steps(steps):
    for step in steps:
        yield step
        yield from all_steps(step.steps) if isinstance(step, Enter) else ()


@pytest.mark.parametrize(("function", "layers"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_settled_has_been_made_and_the_numbers_are_the_same(function, layers):
    traced, split = cut(function, layers, GPU)
    found, made = [s for s in all_steps(split.schedule.backward) if isinstance(s, Settle)], set()
    assert found
    for step in all_steps(split.schedule.backward):
        if isinstance(step, Run):
            made.update(split.graph.ops[step.op].outputs)
        elif isinstance(step, Settle):
            assert made.issuperset(step.values)
    before = split.on(PROMPT)
    flat = [*traced.consts, *jax.tree.leaves((layers, X))]
    got, want = (verify.run(half.halves, split.graph, flat, [jnp.float32(1)]) for half in (split, before))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_each_gradient_is_settled_within_two_layers():
    _, split = cut(written_out, LAYERS, GPU)
    graph, steps = split.graph, split.schedule.backward
    gradients = {v for v in graph.role_outputs(Role.GRADIENT) if v is not None}
    settled = [v for step in steps if isinstance(step, Settle) for v in step.values]
    assert len(settled) == len(set(settled))
    terms = {*gradients, *(v for g in gradients for v in graph.maker_of(g).inputs)}  # a transposed product
    assert terms.issuperset(settled) and len(settled) >= len(gradients) - 4
    for place, step in enumerate(steps):
        if isinstance(step, Settle):
            made = [
                i for i, s in enumerate(steps) if isinstance(s, Run) and {*graph.ops[s.op].outputs} & {*step.values}
            ]
            again = [s for s in steps[min(made) : place] if isinstance(s, Run) and s.again]
            assert sum(graph.ops[s.op].name == "dot_general" for s in again) <= 2


def test_the_terms_of_a_sum_are_settled():
    _, split = cut(tied, LAYERS, GPU)
    graph = split.graph
    settled = {v for step in split.schedule.backward if isinstance(step, Settle) for v in step.values}
    assert any(graph.ops[i].name == "add_any" for v in settled for i in graph.consumers[v])


def test_nothing_is_settled_on_a_cpu_or_where_nothing_is_computed_again():
    traced, split = cut(written_out, LAYERS, CPU)
    kept = traced.partition("save_all").split.on(GPU)
    assert not any(isinstance(s, Settle) for each in (split, kept) for s in all_steps(each.schedule.backward))


@pytest.mark.parametrize(("function", "layers"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_over_several_devices_cotangents_wait_for_many_gradients_at_once(function, layers, monkeypatch):
    traced, split = cut(function, layers, GPU)
    flat = [*traced.consts, *jax.tree.leaves((layers, X))]
    _, want = verify.run(split.halves, split.graph, flat, [jnp.float32(1)])
    counts = [len(settles(split))]
    for buckets, least in ((16, 25 * 2**20), (3, 25 * 2**20), (1, 25 * 2**20), (1, 1)):
        monkeypatch.setattr(settle, "BUCKETS", buckets)
        monkeypatch.setattr(settle, "BUCKET_BYTES", least)
        over = split.on(SEVERAL)
        counts.append(len(settles(over)))
        _, got = verify.run(over.halves, over.graph, flat, [jnp.float32(1)])
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert counts == COUNTS[function]


def test_what_a_loop_pulls_back_is_no_gradient():
    _, split = cut(scanned, STACKED, SEVERAL)
    (loop,) = (step for step in split.schedule.backward if isinstance(step, Enter))
    ends = {*loop.stacks, *(v for v in split.graph.bodies[loop.op].carried if v is not None)}
    shapes = {split.graph.values[v].shape for v in settle._gradients(split.graph, loop.steps, ends)}
    assert shapes == {(32, 64), (64, 32)}


@pytest.mark.parametrize("name", sorted(OF_EACH_KIND)[:: 1 if EVERY_PROGRAM else 3])
def test_the_schedule_of_every_program_runs_the_same_ops(name):
    program = named(name)
    with program.precision():
        traced = aot.function(program.function, has_aux=program.has_aux, argnums=program.argnums).trace(
            *program.args, **program.kwargs
        )
        split = traced.partition("min_cut").split.on(GPU)
        assert [*runs_of(split)] == [*runs_of(split.on(PROMPT))]


def runs_of(split):
    return ((step.op, step.again) for step in runs(split.schedule.backward))
