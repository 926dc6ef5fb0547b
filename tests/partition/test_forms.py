"""Cheaper forms of values: masks as bits, masks from results, carried values from the step before.

Over the corpus they are forced on wherever they can stand, and the halves return the bits that they return without.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.nesting.read import read
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Form, in_forms
from jointcut.partition.search.forms import before, bits, results
from jointcut.partition.search.forms.choose import formed
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.split import halved
from programs import CORPUS

# ------------------------------------------------------------------------------------------- over the corpus


def forced(graph):
    """The graph with every form that can stand in it, whether it pays or not."""

    def written(graph, write):
        problem, new = Problem.of(graph), Rewriting(graph)
        write(new, problem, save_all(problem))
        return new.finished()

    graph = written(graph, lambda new, problem, plan: results.write(new, problem, plan, list(results.candidates(problem))))
    graph = written(graph, bits.write)
    return written(graph, lambda new, problem, plan: before.write(new, problem, plan, list(before.candidates(problem))))


def plain_graph(function, *args, **options):
    traced = aot.function(function, **options).trace(*args)
    return traced, read(traced.program.to_cut, traced.program.roles)


def run(graph, traced, primals):
    halves = halved(Problem.of(graph), "min_cut")
    closed = traced.program.closed.jaxpr
    draws = np.random.default_rng(0)
    cotangents = [
        jnp.asarray(draws.standard_normal(v.aval.shape), v.aval.dtype) for v in closed.invars[len(primals) :]
    ]
    return halves(primals, cotangents)


FOUND = {}


@pytest.mark.parametrize("program", CORPUS, ids=lambda program: program.name)
def test_forms_forced_on_everywhere_give_the_same_bits(program, monkeypatch):
    monkeypatch.setattr(bits, "LEAST_BYTES", 1)
    with program.precision():
        function = partial(program.function, **program.kwargs)
        traced, graph = plain_graph(function, *program.args, argnums=program.argnums, has_aux=program.has_aux)
        with_forms = forced(graph)
        FOUND[program.name] = [form.kind for form in with_forms.forms]
        if not with_forms.forms:
            return
        primals = [*traced.consts, *jax.tree.leaves(program.args)]
        for got, want in zip(jax.tree.leaves(run(with_forms, traced, primals)), jax.tree.leaves(run(graph, traced, primals)), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_the_corpus_has_forms_of_each_kind():
    kinds = [kind for own in FOUND.values() for kind in own]
    assert {bits.KIND, results.KIND, before.KIND} <= set(kinds)
