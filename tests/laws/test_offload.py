"""What waits in host memory comes back as it was: the halves give the same bits, on every program."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jointcut import aot
from jointcut.partition import Plan, Problem
from jointcut.partition.lower import verify
from jointcut.partition.lower.among.moves import is_read_within
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import PORTABLE, Backend
from jointcut.partition.program.jax import abstract
from jointcut.partition.search.mincut import STRATEGIES
from jointcut.partition.split import halved
from oracle import assert_same, cotangents, plain_vjp
from programs import CORPUS, EVERY_PROGRAM

SOME = CORPUS[:: 1 if EVERY_PROGRAM else 10]


def away(problem, plan):
    """The plan with all that can wait in host memory there."""
    some = [v for v in plan.values if not problem.not_offloaded(v)]
    return Plan.of(problem, plan.values, offloaded=some)


def all_away(name, made, graph):
    """A strategy that puts all into host memory; it notes its plan."""
    problem = Problem.of(graph, backend=Backend.here())
    made.append(away(problem, STRATEGIES[name](problem)))
    return made[-1]


def lies_there(x):
    return abstract.lies_on_host(getattr(x, "sharding", None))


@pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)
def test_vjp_pulls_back_as_jax_and_residuals_lie_in_host_memory(program):
    with program.precision():
        bound = partial(program.function, **program.kwargs)
        name = "save_all" if len(program.name) % 2 else "min_cut"
        made = []
        function = aot.function(bound, has_aux=program.has_aux, strategy=partial(all_away, name, made))
        out, pullback, *aux = function.vjp(*program.args)
        want_out, want_aux, want_first, want_second = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        assert_same(pullback(cotangents(out, 1)), want_first, program)
        assert_same(pullback(cotangents(out, 2)), want_second, program)
        there = sum(x.nbytes for x in pullback.residuals if lies_there(x))
        assert there == sum(plan.bytes_offloaded for plan in made)


@pytest.mark.parametrize("program", SOME[::2], ids=lambda program: program.name)
def test_halves_for_a_device_that_moves_inside_a_program_have_the_same_bits(program):
    """There fetches wait for cotangents; the file of such a plan is read back equal."""
    with program.precision():
        args = program.args
        traced = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux).trace(
            *args, **program.kwargs
        )
        problem = Problem.of(traced.graph, backend=PORTABLE)
        plain = STRATEGIES["min_cut"](problem)
        split, same = halved(problem, lambda graph: away(problem, plain)), halved(problem, lambda graph: plain)
        assert planfile.loads(planfile.dumps(split.plan, traced.graph), traced.graph) == split.plan
        leaves = {id(x): x for x in jax.tree.leaves((args, program.kwargs))}
        flat = [*traced.consts, *leaves.values()]
        rng, avals = np.random.default_rng(0), abstract.input_structs(traced.joint)[len(flat) :]
        seeds = [np.asarray(rng.standard_normal(a.shape), a.dtype) for a in avals]
        got, want = (
            jax.jit(lambda *flat, s=s: verify.run(s.halves, s.graph, flat, seeds))(*flat) for s in (split, same)
        )
        jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(_numbers, tree) for tree in (got, want)))
        local = [v for v in split.plan.offloaded if problem.graph.values[v].loop and _is_local(problem, v)]
        assert all(f"    offload %{v}\n" in str(split.schedule) for v in local)


def _is_local(problem, v):
    maker = problem.graph.maker_of(v)
    home = maker.region if maker.name != "loop" else problem.graph.bodies[maker.id].region
    return is_read_within(problem.graph, problem.sides, v, home)


def _numbers(x):
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
