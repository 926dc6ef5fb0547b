"""A plan is searched for once, whichever way the function is called next, and another program never gets it."""

from __future__ import annotations

import functools
import gc
import logging
import re
import threading
import weakref
from dataclasses import replace
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.options.limits import limit
from jointcut.aot.planning.budgets import rates as measuring
from jointcut.aot.planning.budgets import searches
from jointcut.aot.planning.budgets.attempts import Ways
from jointcut.aot.planning.request import Request
from jointcut.partition.bodies.read import read
from jointcut.partition.errors import BudgetError
from jointcut.partition.plans.planfile import dumps, loads
from jointcut.partition.prices.cost import Roofline
from programs import CORPUS

W = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32) / 4)
X = jnp.asarray(np.random.default_rng(1).normal(size=(256, 16)).astype(np.float32))
ROOFLINE = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)


def deep(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def cut(function=deep, budget=0.9, **options):
    """A fresh function, of which nothing is traced yet."""
    return aot.function(functools.partial(function), **{"budget": budget, "cost": ROOFLINE, "tiles": False} | options)


WAYS = {
    "value_and_grad": lambda f, w, x, folder: f.value_and_grad(w, x)[1],
    "partition": lambda f, w, x, folder: f.trace(w, x).partition(),
    "compile": lambda f, w, x, folder: f.trace(w, x).partition().compile().value_and_grad(w, x)[1],
    "explain": lambda f, w, x, folder: f.explain(w, x),
    "export": lambda f, w, x, folder: f.export(folder / "artefact", w, x),
    "grad in jit": lambda f, w, x, folder: jax.jit(jax.grad(f))(w, x),
    "grad": lambda f, w, x, folder: jax.grad(f)(w, x),
    "method in jit": lambda f, w, x, folder: jax.jit(f.grad)(w, x),
    "grad in scan": lambda f, w, x, folder: lax.scan(lambda w, _: (w - jax.grad(f)(w, x), None), w, None, length=1),
}


@pytest.fixture
def told(caplog):
    """How each search of the last call ended: how, and how many plans were compiled for it."""
    caplog.set_level(logging.INFO, logger="jointcut")

    def endings():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        found = [re.search(r": (searched|took|checked) .* and compiled (\d+|none),", text) for text in texts]
        return [(m[1], 0 if m[2] == "none" else int(m[2])) for m in found if m]

    return endings


def assert_found(endings):
    """What was found before was taken, or compiled once as it runs here."""
    assert endings in ([("took", 0)], [("checked", 1)])


@pytest.mark.parametrize(("first", "later"), [("partition", WAYS), ("grad in jit", ["value_and_grad", "grad"])])
def test_the_second_way_of_calling_searches_no_more(first, later, told, tmp_path):
    WAYS[first](cut(), W, X, tmp_path)
    assert [how for how, _ in told()] == ["searched"]
    want = jax.grad(deep)(W, X)
    for name in later:
        found = WAYS[name](cut(), W, X, tmp_path)
        assert_found(told())
        if isinstance(found, jax.Array):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_runs_in_the_same_way_is_not_compiled_to_be_weighed(told):
    first = cut().trace(W, X).partition()
    told()
    second = cut().trace(W, X).partition()
    assert told() == [("took", 0)]
    assert second.plan == first.plan
    assert second.fitted.trail == first.fitted.trail
    assert not second.jits.has_compiled("step")
    made = second.compile()
    assert made.peak_bytes == second.fitted.measured.peak_bytes == first.compile().peak_bytes
    assert made.activation_bytes == second.fitted.measured.activation_bytes
    assert second.compile().programs[0] is made.programs[0]


def test_aux_makes_another_program_of_the_same_function(told):
    def with_aux(w, x):
        return deep(w, x), jnp.sum(w)

    cut(with_aux, has_aux=True).value_and_grad(W, X)
    assert [how for how, _ in told()] == ["searched"]
    got = jax.grad(cut(with_aux), has_aux=True)(W, X)[0]
    assert told() == [("checked", 1)]
    np.testing.assert_allclose(got, jax.grad(deep)(W, X), rtol=1e-4, atol=1e-5)


def test_what_no_disk_could_name_is_known_in_the_process(told):
    def printing(w, x):
        jax.debug.callback(lambda: None)
        return deep(w, x)

    for _ in range(2):
        cut(printing).trace(W, X).partition()
    assert [how for how, _ in told()] == ["searched", "took"]


def precisely(w, x):
    with jax.default_matmul_precision("float32"):
        return deep(w, x)


OTHERS = {
    "fraction": lambda: cut(budget=0.95),
    "bytes": lambda: cut(budget="1 MB"),
    "argument": lambda: cut(argnums=1),
    "prices": lambda: cut(cost=Roofline(1e11, 1e10, 1e10)),
    "precision": lambda: cut(precisely),
}


def test_another_search_is_not_spared(told):
    cut().trace(W, X).partition()
    assert [how for how, _ in told()] == ["searched"]
    for name, other in OTHERS.items():
        other().trace(W, X).partition()
        assert [how for how, _ in told()] == ["searched"], name


def test_a_cost_model_is_known_by_what_it_is_and_rates_by_what_they_say(told, monkeypatch):
    class Model:
        def seconds(self, graph, op):
            return ROOFLINE.seconds(graph, op)

        def saving_seconds(self, num_bytes):
            return ROOFLINE.saving_seconds(num_bytes)

    model = Model()
    for cost, how in ((model, "searched"), (model, "took"), (Model(), "searched"), (None, "searched"), (None, "took")):
        cut(cost=cost).trace(W, X).partition()
        assert [ending for ending, _ in told()] == [how]
    monkeypatch.setattr(measuring, "_KNOWN", dict.fromkeys(measuring._KNOWN, Roofline(1e10, 1e10, 1e10)))
    cut(cost=None).trace(W, X).partition()
    assert [how for how, _ in told()] == ["searched"]


def test_a_plan_that_does_not_hold_in_another_way_is_searched_for(told):
    traced = cut(budget=1.0).trace(W, X)
    first = traced.partition()
    told()
    wanted = traced.request.wanted(limit(1.0))
    measured = []

    def measure(plan):
        weighed = wanted.ways.measure(plan)
        measured.append(plan.values)
        return replace(weighed, activation_bytes=10**9) if plan.values == first.plan.values else weighed

    found = searches.settled(replace(wanted, way="another", ways=Ways(measure)))
    assert [how for how, _ in told()] == ["searched"]
    assert measured[0] == first.plan.values != found.plan.values
    assert searches.settled(wanted).plan == first.plan


def least_peak(**options):
    """The smallest peak that a refusal names, in bytes."""
    with pytest.raises(BudgetError) as refusal:
        cut(budget=18_000, **options).trace(W, X).partition()
    return int(re.search(r"smallest peak found is ([\d,]+) bytes", str(refusal.value))[1].replace(",", ""))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another process"])
def test_the_budget_that_a_refusal_names_takes_one_compilation(elsewhere, told, tmp_path):
    cache = str(tmp_path) if elsewhere else None
    least = least_peak(cache=cache)
    if elsewhere:
        searches.forget()
    told()
    for budget in (least, least + least // 50):
        found = cut(budget=budget, cache=cache).trace(W, X).partition()
        assert told() == [("checked", 1)]
        assert found.fitted.measured.peak_bytes == least
    cut(budget=least + least // 8, cache=cache).trace(W, X).partition()
    assert [how for how, _ in told()] == ["searched"]
    with pytest.raises(BudgetError):
        cut(budget=least - 1, cache=cache).trace(W, X).partition()


def test_threads_that_ask_for_the_same_wait_for_one_search(told):
    traces = [cut().trace(W, X) for _ in range(3)]
    cuts = []
    threads = [threading.Thread(target=lambda t=t: cuts.append(t.partition()), daemon=True) for t in traces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(how for how, _ in told()) == ["searched", "took", "took"]
    assert len({made.plan.values for made in cuts}) == 1


def test_what_was_asked_for_longest_ago_is_forgotten(told, monkeypatch):
    monkeypatch.setattr(searches, "MOST_KEPT", 2)  # that of the budget, and that of the smallest plan
    for budget in (0.9, 0.9, "1 MB", 0.9):
        cut(budget=budget).trace(W, X).partition()
    assert [how for how, _ in told()] == ["searched", "took", "searched", "searched"]


def test_nothing_of_the_users_is_kept_alive():
    def made():
        captured = jnp.ones((256, 16))

        def loss(w, x):
            return deep(w, x + captured)

        function = cut(loss)
        function.trace(W, X).partition()
        return [weakref.ref(captured), weakref.ref(loss), weakref.ref(function)]

    held = made()
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    assert searches._PLACES


# ------------------------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize(("first", "second"), [("partition", "grad in jit"), ("grad in jit", "partition")])
def test_another_process_compiles_one_plan_whichever_way_it_calls(first, second, told, tmp_path):
    """Another process is one that has forgotten."""
    WAYS[first](cut(cache=tmp_path), W, X, tmp_path)
    assert [how for how, _ in told()] == ["searched"]
    searches.forget()
    WAYS[second](cut(cache=tmp_path), W, X, tmp_path)
    assert told() == [("checked", 1)]
    WAYS[second](cut(cache=tmp_path), W, X, tmp_path)
    assert told() == [("took", 0)]


def test_a_note_that_does_not_hold_is_not_followed(told, tmp_path, monkeypatch):
    cut(cache=tmp_path).trace(W, X).partition()
    searches.forget()
    told()
    read = searches.Note.read
    monkeypatch.setattr(
        searches.Note, "read", lambda note: tuple(replace(held, activation_bytes=1) for held in read(note))
    )
    for cache in (tmp_path, False):
        searches.forget()
        cut(cache=cache).trace(W, X).partition()
        assert [how for how, _ in told()] == ["searched"]


def test_plain_jax_is_compiled_once_for_all_fractions_and_processes(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(searches, "room_within", spied(searches.room_within, begun))
    for fraction, cache in ((0.9, tmp_path), (0.95, tmp_path), (0.95, False)):
        searches.forget()
        cut(budget=fraction, cache=cache).trace(W, X).partition()
    jax.jit(jax.grad(cut(budget=0.85, cache=tmp_path)))(W, X)  # another way of calling
    assert begun == [True, False, True, False]


def spied(room, begun):
    """`_room` that notes whether plain JAX's step was compiled for it."""

    def noting(wanted, lookup):
        started = []
        made = room(replace(wanted, plain=lambda: started.append(wanted.plain()) or started[0]), lookup)
        begun.append(bool(started))
        return made

    return noting


# --------------------------------------------------------------------------------------------------- the corpus


# What is another program inside: arrays are no longer the same one, a Python bool stays one, a reference is taken out.
CHANGED_INSIDE = frozenset(["same_array_twice", "cond_with_idle_branch", "internal_reference"])
SCALARS = [p for p in CORPUS if p.scalar and not p.has_aux and "grad" not in p.lacks and p.name not in CHANGED_INSIDE]


@pytest.mark.parametrize("program", SCALARS[::9], ids=lambda program: program.name)
def test_inside_a_transformation_a_program_is_known_as_the_same(program, monkeypatch):
    cuts = []

    def spy(name, joint, options):
        cuts.append(joint)
        return Request(name, joint, options)

    monkeypatch.setattr(import_module("jointcut.aot.call.under_transform"), "Request", spy)
    function = aot.function(program.function, argnums=program.argnums, cost=ROOFLINE)
    with program.precision():
        traced = function.trace(*program.args, **program.kwargs)
        gradient = jax.grad(lambda *args: function(*args, **program.kwargs), argnums=program.argnums)
        jax.eval_shape(gradient, *program.args)
        here = traced.request.wanted(limit(0.5))
        inside = replace(here, program=cuts[0], graph=read(cuts[0].closed, cuts[0].roles), leaves=())
        known, asked = searches.Lookup.of(here), searches.Lookup.of(inside)
    assert asked.place is known.place and asked.types == known.types
    text = dumps(traced.partition().plan, here.graph)
    assert len(loads(text, inside.graph).values) == len(loads(text, here.graph).values)
