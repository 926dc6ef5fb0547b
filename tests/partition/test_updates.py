"""Updates of parameters are steps of the schedule: the rest of the backward waits for each of them."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.release import layers as mlp_layers
from benchmarks.release import mlp, scanned, shared, stacked
from jointcut import aot
from jointcut.partition.lower import verify
from jointcut.partition.lower.emit import emit
from jointcut.partition.lower.memory.replay import Replayer
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.steps import Enter, Fork, Run, Settle, Update
from jointcut.partition.plans.backend import CPU, GPU
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.primitives import BARRIER
from jointcut.partition.program.roles import Role
from jointcut.partition.search.forms import bits
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import save_all

WIDTH = 32  # so that two sweeps keep no whole gradient of the first
X = jnp.linspace(0.1, 1.0, 6 * WIDTH).reshape(6, WIDTH)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1))
WAYS = [(mlp, optax.adam(1e-3), 1), (mlp, CLIPPED, 2), (shared, optax.sgd(0.1), 1), (shared, CLIPPED, 2)]


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def cut(which):
    function, update, sweeps = WAYS[which]
    params = mlp_layers(3, WIDTH)
    traced = aot.function(function).trace_update(params, update.init(params), X, update=update, sweeps=sweeps)
    return traced, traced.partition().split


def made_by(split, step):
    return split.graph.ops[step.op].outputs if isinstance(step, Run | Enter | Fork) else ()


every_way = pytest.mark.parametrize("which", range(len(WAYS)))


@every_way
def test_the_joint_program_has_no_barrier_and_a_backward_those_of_its_schedule(which):
    traced, split = cut(which)
    assert BARRIER not in {eqn.primitive.name for eqn in traced.joint.jaxpr.eqns}
    steps = [s for s in split.schedule.backward if isinstance(s, Settle) or (isinstance(s, Update) and s.waiting)]
    written = [eqn for eqn in split.backward.jaxpr.eqns if eqn.primitive.name == BARRIER]
    held = [len((s.cotangent, *s.values)) if isinstance(s, Settle) else len((*s.waiting, *s.made)) for s in steps]
    assert steps
    assert [len(eqn.invars) for eqn in written if len(eqn.invars) > 1] == held


@every_way
def test_each_parameter_is_updated_as_soon_as_its_new_value_is_there(which):
    _, split = cut(which)
    graph, steps = split.graph, split.schedule.backward
    new = dict(zip(graph.role_inputs(Role.PRIMAL), graph.role_outputs(Role.GRADIENT)[:6], strict=False))
    updates = [i for i, s in enumerate(steps) if isinstance(s, Update) and new[s.parameter] in s.made]
    assert sorted(steps[i].parameter for i in updates) == sorted(new)
    assert all({*made_by(split, steps[i - 1])} & {*steps[i].made} for i in updates)


@every_way
def test_values_that_wait_are_there_and_are_read_later(which):
    _, split = cut(which)
    steps, there = split.schedule.backward, {*split.graph.role_inputs(Role.COTANGENT)}
    for i, step in enumerate(steps):
        if isinstance(step, Update):
            later = {v for s in steps[i:] if isinstance(s, Run) for v in split.graph.ops[s.op].inputs}
            assert there.issuperset((*step.made, *step.waiting))
            assert later.issuperset(step.waiting)
        there.update(made_by(split, step))


def test_the_second_sweep_begins_once_the_numbers_of_the_first_are_joined():
    _, split = cut(1)
    steps = split.schedule.backward
    (settle,) = (i for i, s in enumerate(steps) if isinstance(s, Settle))
    cotangent = split.graph.role_inputs(Role.COTANGENT)[0]
    assert steps[settle].cotangent == cotangent
    assert all(split.graph.values[v].shape == () for v in steps[settle].values)
    readers = [i for i, s in enumerate(steps) if isinstance(s, Run) and cotangent in split.graph.ops[s.op].inputs]
    assert min(readers) < settle < max(readers)


@every_way
@pytest.mark.parametrize("backend", [CPU, GPU], ids=["cpu", "gpu"])
def test_steps_of_updates_change_no_number(which, backend):
    traced, split = cut(which)
    with_steps = split.on(backend)
    bare = replace(with_steps.problem, graph=replace(split.graph, updates=()))
    without = emit(split.graph, schedule(bare, split.plan))
    params = mlp_layers(3, WIDTH)
    flat = [*traced.consts, *jax.tree.leaves((params, WAYS[which][1].init(params), X))]
    got, want = (verify.run(half, split.graph, flat, [jnp.float32(1)]) for half in (with_steps.halves, without))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_replay_counts_what_waits_as_written():
    _, split = cut(0)
    rows = Replayer(split.graph, split.problem.backend).rows(split.schedule)
    without = replace(split.schedule, backward=tuple(s for s in split.schedule.backward if not isinstance(s, Update)))
    bare = Replayer(split.graph, split.problem.backend).rows(without)
    assert len(rows.level.rows) == len(bare.level.rows)
    assert rows.level.written > bare.level.written


def test_the_schedule_shows_updates_with_lines_and_shapes():
    def step(gradients, state, params):
        return jax.tree.map(lambda p, g: p - g, params, gradients), state

    made = aot.function(lambda p, x: jnp.sum((x @ p["w"]) @ p["v"]))
    params = {"v": jnp.ones((3, 2)), "w": jnp.ones((WIDTH, 3))}
    split = made.trace_update(params, (), X, update=step).partition().split
    shown = [line.strip() for line in str(split.schedule).splitlines() if "update " in line]
    v, w = split.graph.role_outputs(Role.GRADIENT)
    (waiting,) = (s.waiting for s in split.schedule.backward if isinstance(s, Update) and s.waiting)
    place = f"sub at {split.graph.where(v).split(' at ')[1]}"
    assert f"{__file__}:{step.__code__.co_firstlineno + 1} " in place
    assert shown == [
        f"update args[0]['v'] by %{v}:float32[3,2] ({place}, before %{waiting[0]}",
        f"update args[0]['w'] by %{w}:float32[{WIDTH},3] ({place}",
    ]


def test_updates_keep_their_ops_where_cheaper_forms_are_written():
    def loss(w, x):
        kept = jax.random.bernoulli(jax.random.key(0), 0.8, x.shape)
        return jnp.sum((jnp.where(kept, jnp.sin(x @ w), 0.0) @ w) ** 2)

    update, w = optax.sgd(0.1), jnp.eye(WIDTH)
    graph = aot.function(loss).trace_update(w, update.init(w), jnp.tile(X, (9, 1)), update=update).program.graph
    problem, new = Problem.of(graph), Rewriting(graph)
    bits.write(new, problem, save_all(problem), list(bits.candidates(problem)))
    other = new.finished()
    before, after = (g.ops[g.updates[0].ops[-1]].outputs for g in (graph, other))
    assert graph.updates != other.updates
    assert before == after == graph.role_outputs(Role.GRADIENT)


def test_a_scan_that_updates_in_its_steps_has_no_step_of_its_own():
    params = stacked(3, WIDTH)
    update = optax.sgd(0.1)
    made = aot.function(scanned).trace_update(params, update.init(params), X, update=update)
    split = made.partition().split
    assert not any(isinstance(step, Update) for step in split.schedule.backward)
    assert not split.graph.updates
