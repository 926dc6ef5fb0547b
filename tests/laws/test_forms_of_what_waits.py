"""What is saved in a smaller form gives gradients within an error; what passes through hooks, the same bits."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition import Plan, Problem
from jointcut.partition.errors import PolicyError
from jointcut.partition.lower import verify
from jointcut.partition.packing.packing import Hooks
from jointcut.partition.plans import planfile
from jointcut.partition.program.jax import abstract
from jointcut.partition.search.mincut import STRATEGIES
from jointcut.partition.split import halved
from laws.test_composition import batched, differentiated_twice
from oracle import assert_same, plain
from programs import CORPUS, EVERY_PROGRAM, named

SOME = [p for p in CORPUS if "integers" not in p.name][:: 1 if EVERY_PROGRAM else 12]

#: The most that gradients may be apart, relative to the exact ones.
LARGEST = {"bfloat16": 2e-2, "int8": 0.1}

#: Two arrays for one, in a tree; the second is of another shape.
TWO_ARRAYS = aot.saved_arrays(lambda x: {"x": x, "more": jnp.zeros(3)}, lambda packed: packed["x"])
TWO = TWO_ARRAYS.packing


#: What is asked of a few programs under a transformation, with the form of what waits.
TRANSFORMED = {
    "scan_with_ys_used_outside": (differentiated_twice, {"policy": {"*": aot.PREFER_OFFLOAD}}),
    "energy_and_forces": (differentiated_twice, {"policy": {"*": aot.SAVE_AS("float16")}}),
    "scan_that_selects": (differentiated_twice, {"policy": {"*": aot.SAVE_AS("float16")}}),
    "gaussian_by_cholesky": (differentiated_twice, {"strategy": "min_cut"}),  # an index of a `cond` among what waits
    "switch_over_three": (differentiated_twice, {"saved_arrays": TWO_ARRAYS}),
    "nested_scans": (batched, {"policy": {"*": (aot.PREFER_OFFLOAD, aot.SAVE_AS("bfloat16"))}}),
    "dropout_in_scan": (batched, {"saved_arrays": TWO_ARRAYS}),
}


def strategy_of(program):
    return STRATEGIES["save_all" if len(program.name) % 2 else "min_cut"]


def traced(program, **options):
    """The trace of a program, its flat inputs, and ones for its cotangents."""
    args = program.args
    function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, **options)
    trace = function.trace(*args, **program.kwargs)
    leaves = enumerate(x for x in jax.tree.leaves((args, program.kwargs)) if not isinstance(x, bool))
    unique = {id(x) if hasattr(x, "dtype") else i: x for i, x in leaves}
    flat = [*trace.consts, *unique.values()]
    return trace, flat, [np.ones(a.shape, a.dtype) for a in abstract.input_structs(trace.joint)[len(flat) :]]


def numbers(x):
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)
def test_smaller_forms_change_gradients_a_little_and_outputs_not_at_all(program):
    with program.precision():
        form = aot.SAVE_AS("int8" if len(program.name) % 3 == 0 else "bfloat16")
        trace, flat, seeds = traced(program, policy={"*": form})
        try:
            problem = trace.problem
        except PolicyError as error:
            assert "names no value" in str(error) or "fewer bytes" in str(error)
            return
        graph = trace.graph
        split = halved(problem, lambda graph: strategy_of(program)(problem))
        exact = halved(problem.without_forms, lambda graph: Plan.of(problem.without_forms, split.plan.values))
        assert planfile.loads(planfile.dumps(split.plan, graph), graph) == split.plan
        (out, found), (want_out, want) = (jax.jit(lambda *flat, s=s: s(flat, seeds))(*flat) for s in (split, exact))
        for a, b in zip(map(numbers, out), map(numbers, want_out), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # XLA fuses otherwise; nothing is rounded
        assert [(g.shape, g.dtype) for g in found] == [(g.shape, g.dtype) for g in want]
        assert split.residual_bytes == split.plan.bytes_saved or not split.plan.stored
        assert relative_error(found, want) <= LARGEST[form.dtype]


@pytest.mark.parametrize("program", SOME[::2], ids=lambda program: program.name)
def test_what_passes_through_hooks_comes_back_with_the_same_bits(program):
    """Run op by op: compiled, XLA may fuse other ops together."""
    with program.precision():
        trace, flat, seeds = traced(program)
        plain = Problem.of(trace.graph)
        plan = strategy_of(program)(plain)
        for which in ("intermediates", "all"):
            problem = replace(plain, hooks=Hooks(TWO, which, frozenset()))
            split, same = (halved(each, lambda graph: plan) for each in (problem, plain))
            got, want = (verify.run(s.halves, s.graph, flat, seeds) for s in (split, same))
            jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(numbers, tree) for tree in (got, want)))
            kept = [v for v in plan.values if v in trace.graph.arrays]
            assert set(split.schedule.stored) >= set(kept).intersection(split.schedule.handed)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_gradients_are_differentiated_again_and_mapped_whatever_form_waits(name):
    program, (transform, options) = named(name), TRANSFORMED[name]
    with program.precision():
        function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, **options)
        found, want = jax.jit(transform(program, function))(*program.args), plain(program, transform)
        if "SAVE_AS" in str(options):
            assert relative_error(jax.tree.leaves(found), jax.tree.leaves(want)) <= LARGEST["bfloat16"]
        else:
            assert_same(found, want, program, slack=10)
