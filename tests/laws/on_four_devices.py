"""Run on four devices of the host: what `test_sharding` claims, one function for each claim, told as JSON.

Warnings are errors here as they are in the tests.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from jointcut.aot.report.gradient_error import relative_error
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.run.weigh import weigh
from jointcut.partition import Planner, Problem, Roofline
from jointcut.partition.errors import BudgetError, TraceError
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.program.jax.meshes import varying
from jointcut.partition.search.mincut import min_cut

ROWS = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
KEYS = jax.random.split(jax.random.key(0), 4)
W = {
    "in": jax.random.normal(KEYS[0], (8, 8)),
    "out": jax.random.normal(KEYS[1], (8, 8)),
    "blocks": 0.3 * jax.random.normal(KEYS[2], (7, 8, 8)),
}
X = jax.random.normal(KEYS[3], (16, 8))


def layers(w, x):
    return jnp.mean(jnp.sin(jnp.tanh(x @ w["in"]) @ w["out"]) ** 2)


def blocks(w, x):
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), x, w["blocks"])
    return jnp.mean(jnp.sin(h @ w["in"]) ** 2)


def branch(w, x):
    def positive(x):
        return jnp.sum(jnp.sin(jnp.sin(x @ w["in"])))

    return lax.cond(x[0, 0] > 0, positive, lambda x: jnp.sum(jnp.cos(x @ w["out"])), x)


def mean(w, x):
    return lax.pmean(layers(w, x), "d")


def normalised(w, x):
    h = jnp.tanh(x @ w["in"])
    return jnp.sum(jnp.sin(h / lax.psum(jnp.sum(h**2), "d") @ w["out"]))


def regularised(w, x):
    return blocks(w, x) + jnp.sum(jnp.sin(jnp.tanh(w["in"])))


PROGRAMS = [branch, mean, normalised, regularised]


def near(got, want):
    """Sums of products round by the largest of them, and differently on each processor."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=4e-6 * max(1.0, np.max(np.abs(b), initial=0.0)))


ALIKE, BATCH = P(), (P(), P("d"))


def mapped(function, out=ALIKE, mesh=ROWS, into=BATCH):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out))


def by_vjp(function, w, x):
    out, pullback = function(w, x)
    return out, pullback(jnp.ones_like(out))[0]


def every_program_has_jax_gradients_in_every_way_of_calling():
    """Against `jax.value_and_grad` inside the same shard_map; the parameters are on all devices."""
    for program in PROGRAMS:
        cut = aot.function(program)

        def ways(w, x, program=program, cut=cut):
            found = [jax.value_and_grad(program)(w, x), jax.value_and_grad(cut)(w, x), cut.value_and_grad(w, x)]
            return [(lax.pmean(value, "d"), slope) for value, slope in [*found, by_vjp(cut.vjp, w, x)]]

        want, *got = mapped(ways)(W, X)
        for pair in got:
            near(pair, want)


def outputs_that_vary_and_that_do_not_take_cotangents_of_their_kind():
    def several(w, x):
        h = jnp.tanh(x @ w["in"])
        return {"rows": h * h, "sum": lax.psum(jnp.sum(jnp.sin(h @ w["out"])), "d"), "norm": jnp.sum(w["out"] ** 2)}

    def pulled(vjp):
        def run(w, x):
            out, pullback = vjp(w, x)
            return pullback(jax.tree.map(jnp.cos, out))

        return mapped(run, (P(), P("d")))(W, X)

    near(pulled(aot.function(several).vjp), pulled(lambda w, x: jax.vjp(several, w, x)))

    def of_one(function):
        def run(w, x):
            return jax.grad(lambda w, x: jnp.sum(function(w, x)["rows"]), (0, 1))(w, x)

        return mapped(run, (P(), P("d")))(W, X)

    near(of_one(aot.function(several)), of_one(several))


def the_gradient_of_a_shard_map_and_second_derivatives_are_jax_s():
    def outer(function):
        whole = jax.shard_map(
            lambda w, x: lax.pmean(function(w, x), "d"), mesh=ROWS, in_specs=(P(), P("d")), out_specs=P()
        )
        return jax.jit(jax.value_and_grad(whole))(W, X)

    near(outer(aot.function(blocks)), outer(blocks))

    def curved(function):
        return mapped(lambda w, x: jax.jvp(jax.grad(lambda w: function(w, x)), (w,), (w,))[1])(W, X)

    near(curved(aot.function(layers)), curved(layers))


def weights_in_parts_and_meshes_that_are_manual_in_part():
    def parallel(w, x):
        h = lax.psum(jnp.sin(jnp.tanh(x @ w["in"])) @ w["out"], "m")
        return lax.pmean(jnp.mean(jnp.sin(jnp.tanh(h) * h) ** 2), "d")

    parts = {"in": P(None, "m"), "out": P("m", None)}
    weights = {name: W[name] for name in parts}

    def run(step):
        return mapped(step, (P(), parts), GRID, (parts, P("d")))(weights, X)

    near(run(aot.function(parallel).value_and_grad), run(jax.value_and_grad(parallel)))

    def partly(function):
        def step(w, x):
            return lax.pmean(jax.grad(function)(w, x)["in"], "d")

        into = (P(), P("d"))
        step = jax.shard_map(step, mesh=GRID, in_specs=into, out_specs=P(), axis_names={"d"})
        return jax.jit(step)(W, X)

    near(partly(aot.function(blocks)), partly(blocks))


def calls_that_differ_in_what_varies_have_cuts_of_their_own():
    def summed(w, x):
        return jnp.sum(jnp.sin(x @ w["in"]))

    cut = aot.function(summed)

    def both(w, x):
        alike = lax.psum(x, "d")
        return cut.grad(w, x)["in"], cut.grad(w, alike)["in"], jax.grad(cut)(w, x)["in"], jax.grad(cut)(w, alike)["in"]

    apart, alike = jax.grad(summed)(W, X)["in"], jax.grad(summed)(W, jnp.sum(X.reshape(4, 4, 8), 0))["in"]
    near(mapped(both)(W, X), (apart, alike, apart, alike))


def a_budget_inside_a_jit_is_for_each_of_the_devices_that_it_names_where_values_are_computed():
    w, x = (
        jax.device_put(W["in"], NamedSharding(ROWS, P())),
        jax.device_put(np.ones((4096, 8)), NamedSharding(ROWS, P("d"))),
    )

    def deep(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    def step(**options):
        function = aot.function(deep, budget="250kB", **options)
        return jax.jit(jax.grad(lambda w, x: function(w, jnp.abs(x))))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", aot.UncheckedWarning)
            step()(w, x)
        raise AssertionError("one device would hold it all")
    except BudgetError as error:
        assert error.__notes__[0].endswith("say how many they are: aot.function(..., devices=4).")
    made = step(devices=4).lower(w, x).compile()
    assert ProgramMemory.of(made).peak_bytes <= 250_000 + x.nbytes // 4  # which the step computes
    near(made(w, x), jax.jit(jax.grad(deep))(w, x))
    try:
        step(devices=2)(w, x)
        raise AssertionError("each of two would hold too much")
    except BudgetError as error:
        assert "for 250,000 bytes on each of 2 devices" in error.__notes__[0]


def a_budget_is_measured_on_the_mesh():
    near(mapped(aot.function(layers, budget=1.0).grad)(W, X), mapped(jax.grad(layers))(W, X))


def a_program_takes_what_it_was_weighed_at():
    on_mesh = {"d": NamedSharding(EXPLICIT, P("d")), "parts": NamedSharding(GRID, P("d", "m"))}
    steps = {name: jax.jit(jax.value_and_grad(layers), in_shardings=(None, at)) for name, at in on_mesh.items()}
    steps["shard_map"] = jax.jit(jax.grad(mapped(lambda w, x: lax.pmean(layers(w, x), "d"), P())))
    for name, step in steps.items():
        lowered = step.lower(W, X)
        assert weigh(lowered) == ProgramMemory.of(lowered.compile()), name


def pmap_is_as_ever():
    rows, cut = X.reshape(4, 4, 8), aot.function(mean)
    want = jax.pmap(jax.value_and_grad(mean), axis_name="d", in_axes=(None, 0))(W, rows)
    near(jax.pmap(jax.value_and_grad(cut), axis_name="d", in_axes=(None, 0))(W, rows), want)
    near(jax.pmap(cut.value_and_grad, axis_name="d", in_axes=(None, 0))(W, rows), want)


def tower(w, x):
    def block(h, w):
        a = 0.1 * (h @ w)
        b = a * (1 + a * (0.5 + a)) * (2 - a)
        return h + b * (1 - b) * (1 + b * a), None

    return jnp.mean(lax.scan(block, x, w["blocks"])[0] ** 2)


def temporaries(step, mesh):
    """Bytes that XLA takes on each device beside arguments and results, and the results."""
    with jax.set_mesh(mesh):
        rows = jnp.concatenate([X] * 64)
        args = jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(rows, NamedSharding(mesh, P("d")))
        compiled = jax.jit(step).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled(*args)


def a_device_saves_as_much_on_explicit_meshes_and_in_shard_map_as_elsewhere():
    whole = temporaries(jax.value_and_grad(tower), EXPLICIT)
    steps = {
        "auto": (aot.function(tower).value_and_grad, ROWS),
        "explicit": (jax.value_and_grad(aot.function(tower)), EXPLICIT),
        "shard_map": (in_parts(aot.function(tower).value_and_grad), ROWS),
    }
    for name, (step, mesh) in steps.items():
        taken = temporaries(step, mesh)
        near(taken[1], whole[1])
        assert taken[0] <= 0.55 * whole[0], f"{name}: {taken[0]} of {whole[0]} bytes"


def in_parts(step):
    def mean_of_all(w, x):
        value, slope = step(w, x)
        return lax.pmean(value, "d"), jax.tree.map(lambda s: s / 4, slope)

    return jax.shard_map(mean_of_all, mesh=ROWS, in_specs=(P(), P("d")), out_specs=P())


def a_loop_over_sharded_rows_runs_in_segments_on_an_explicit_mesh():
    with jax.set_mesh(EXPLICIT):
        args = jax.device_put(W, NamedSharding(EXPLICIT, P())), jax.device_put(X, NamedSharding(EXPLICIT, P("d")))
        want = jax.jit(jax.value_and_grad(blocks))(*args)
        near(jax.jit(aot.function(blocks, budget=0.0).value_and_grad)(*args), want)


def what_waits_in_another_form_is_near_on_a_mesh_and_in_shard_map():
    half = aot.saved_arrays(lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.float32))
    want = jax.grad(layers)(W, X)
    plain, divided = mapped(jax.grad(layers))(W, X), jax.device_put(X, NamedSharding(ROWS, P("d")))
    for options in ({"policy": {"*": aot.SAVE_AS("int8")}}, {"saved_arrays": half}):
        function = aot.function(layers, **options)
        assert function.trace(W, X).partition().schedule.stored
        assert 0 < relative_error(function.grad(W, divided), want) < 5e-2
        assert 0 < relative_error(mapped(jax.grad(function))(W, X), plain) < 5e-2


def branches_with_values_that_vary_and_that_do_not_are_differentiated():
    def unequal(w, x):
        def with_both(x):
            return jnp.sum(jnp.exp(jnp.sin(jnp.tanh(x @ w["in"]))) @ jnp.sin(w["out"] @ w["out"]))

        def with_more(x):
            return jnp.sum(jnp.sin(jnp.exp(jnp.sin(jnp.concatenate([x, x]) @ jnp.tanh(w["in"])))))

        return lax.switch(
            jnp.int32(x[0, 0] > 0), [with_both, with_more, lambda x: jnp.sum(jnp.cos(w["in"])) * x[0, 0]], x
        )

    def run(gradient):
        def apart(w, x):
            w = jax.tree.map(lambda leaf: lax.pcast(leaf, "d", to="varying"), w)
            return lax.psum(gradient(w, x), "d")

        return mapped(apart)(W, X)

    near(run(jax.grad(aot.function(unequal))), run(jax.grad(unequal)))


def repeated(w, x):
    _, h = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w["in"])), (0, x))
    return jnp.mean(h**2)


def repeated_by_scan(w, x):
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w["in"]), None), x, length=3)
    return jnp.mean(h**2)


def while_loops_are_differentiated_to_any_order():
    def curved(function):
        return mapped(lambda w, x: jax.jvp(jax.grad(lambda w: function(w, x)), (w,), (w,))[1])(W, X)

    cut = aot.function(repeated)
    near(mapped(cut.grad)(W, X), mapped(jax.grad(repeated_by_scan))(W, X))
    near(curved(cut), curved(repeated_by_scan))


def settled(w, x):
    h = lax.while_loop(lambda h: jnp.mean(h**2) > 0.01, lambda h: 0.8 * jnp.tanh(h @ w["in"] / 4), x)
    return jnp.mean(h**2)


def settled_by_scan(w, x):
    def step(h, _):
        return jnp.where(jnp.mean(h**2) > 0.01, 0.8 * jnp.tanh(h @ w["in"] / 4), h), None

    return jnp.mean(lax.scan(step, x, length=60)[0] ** 2)


def devices_may_leave_a_while_loop_one_by_one():
    def run(gradient):
        def apart(w, x):
            w = jax.tree.map(lambda leaf: lax.pcast(leaf, "d", to="varying"), w)
            return lax.psum(gradient(w, x * (1 + 9 * lax.axis_index("d"))), "d")

        return mapped(apart)(W, X)

    near(run(aot.function(settled).grad), run(jax.grad(settled_by_scan)))


def a_sum_over_devices_within_a_loop_that_some_have_left_is_refused():
    try:
        mapped(aot.function(settled).grad)(W, X)
    except TraceError as error:
        told = str(error).splitlines()
    line = settled.__code__.co_firstlineno + 1
    assert told[:2] == [
        f"the lax.while_loop at {__file__}:{line} (settled) is repeated as often as each device of axis 'd' wants, and "
        "reads a float32[8,8] that is equal on all of them, whose gradient is a sum over them.",
        "Pass that value through jax.lax.pcast(…, 'd', to='varying') before the loop.",
    ], told


def while_loops_run_backwards_on_an_explicit_mesh():
    with jax.set_mesh(EXPLICIT):
        args = jax.device_put(W, NamedSharding(EXPLICIT, P())), jax.device_put(X, NamedSharding(EXPLICIT, P("d")))
        near(jax.jit(jax.grad(aot.function(repeated)))(*args), jax.jit(jax.grad(repeated_by_scan))(*args))


def shard_map_inside_is_cut_and_runs_no_more_collectives():
    def whole(w, x):
        return jax.shard_map(mean, mesh=ROWS, in_specs=(P(), P("d")), out_specs=P())(w, x) + jnp.sum(w["in"] ** 2)

    cut = aot.function(whole)
    plain = jax.jit(jax.value_and_grad(whole))
    want = plain(W, X)
    near(cut.value_and_grad(W, X), want)
    near(jax.jit(jax.value_and_grad(cut))(W, X), want)
    made = cut.trace(W, X).partition()
    assert "shards" in names_of(made)
    assert made.plan.recomputed, "something inside is computed again"
    assert moves(made) == moves(whole, W, X)


def nothing_kept(graph):
    """The plan that saves what it must alone."""
    problem = Problem.of(graph)
    return Planner(problem.timed(Roofline(1e11, 1e10, 1e10))).menu[-1].plan if problem else None


def laid(program, **how):
    """The program as a loss of which the body is one shard_map."""

    def whole(w, x):
        body = lambda w, x: lax.pmean(jnp.sum(jnp.atleast_1d(program(w, x))), how.get("names", "d"))  # noqa: E731
        mesh, into = how.get("mesh", ROWS), how.get("into", BATCH)
        options = {key: how[key] for key in ("check_vma", "axis_names") if key in how}
        mean = jax.shard_map(body, mesh=mesh, in_specs=into, out_specs=P(), **options)
        return mean(w, jnp.sin(x)) + jnp.sum(jnp.cos(w["in"]))

    return whole


def what_lies_in_a_shard_map_is_cut_in_every_way_of_calling():
    """The gradients of plain JAX's; with nothing heavy run twice, with all that may be, within a budget, in a scan."""
    for program in PROGRAMS:
        whole = laid(program)
        want = jax.jit(jax.value_and_grad(whole, (0, 1)))(W, X)
        for options in (
            {},
            {"strategy": "min_cut"},
            {"strategy": "save_all"},
            {"strategy": nothing_kept},
            {"budget": 0.0},
        ):
            cut = aot.function(whole, argnums=(0, 1), **options)
            near(cut.value_and_grad(W, X), want)
        near(jax.jit(jax.value_and_grad(cut, (0, 1)))(W, X), want)
        near(by_vjp(aot.function(whole).vjp, W, X), (want[0], want[1][0]))


def a_shard_map_without_checks_or_manual_in_part_is_cut_too():
    unchecked, partly = laid(blocks, check_vma=False), laid(blocks, mesh=GRID, axis_names={"d"})
    parts = {"in": P(None, "m"), "out": P("m", None), "blocks": P()}

    def parallel(w, x):
        return lax.psum(jnp.sin(jnp.tanh(x @ w["in"])) @ w["out"], "m") + jnp.sum(jnp.sin(w["blocks"]))

    for whole in (unchecked, partly, laid(parallel, mesh=GRID, into=(parts, P("d")))):
        want = jax.jit(jax.value_and_grad(whole))(W, X)
        for options in ({}, {"strategy": nothing_kept}):
            cut = aot.function(whole, **options)
            assert "shards" in {op.name for op in cut.trace(W, X).graph.ops}
            near(cut.value_and_grad(W, X), want)


def a_policy_reaches_into_a_shard_map():
    def named(w, x):
        h = checkpoint_name(jnp.tanh(x @ w["in"]), "hidden")
        return jnp.mean(jnp.sin(h @ w["out"]) ** 2)

    def kept(demand):
        cut = aot.function(laid(named), policy={"hidden": demand}).trace(W, X).partition("min_cut")
        near(cut.compile().value_and_grad(W, X), jax.value_and_grad(laid(named))(W, X))
        return [(s.shape, s.op) for s in cut.plan.saved if s.op in ("name", "tanh")]

    assert kept(aot.MUST_SAVE) == [((4, 8), "name")], kept(aot.MUST_SAVE)  # the part of one device
    assert not kept(aot.MUST_RECOMPUTE)
    try:
        kept(aot.MUST_OFFLOAD)
    except aot.PolicyError as error:
        assert "it is made in a jax.shard_map, which hands over all that it keeps in the device's memory" in str(error)
    else:
        raise AssertionError("was not refused")


def names_of(cut):
    return {op.name for op in cut.split.graph.ops}


def moves(function, *args):
    """How often the compiled step of a function, or of a cut, runs each kind of collective."""
    step = jax.jit(jax.value_and_grad(function)).lower(*args).compile() if not hasattr(function, "jits") else None
    text = (step or function.jits.compiled("step")).as_text()
    return [text.count(f" {name}(") for name in COLLECTIVES]


def in_segments(length, kept=0):
    """The strategy of the minimum cut whose one loop runs in segments, without its `kept` last steps."""

    def strategy(graph):
        problem = Problem.of(graph)
        plan = min_cut(problem)
        ((loop, _),) = segmentable(problem, plan).items()
        return replace(plan, segments=((loop, length),), kept_steps=((loop, kept),) if kept else ())

    return strategy


def a_loop_in_a_shard_map_runs_in_segments():
    """With equal segments, with a rest, and with last steps kept whole; each device keeps the starts of its own."""
    for lengths, how in (((2,), {}), ((2, 3), {}), ((3,), {"check_vma": False})):
        whole = laid(blocks, **how)
        want = jax.jit(jax.value_and_grad(whole))(W, X)
        cut = aot.function(whole, strategy=in_segments(*lengths))
        near(cut.value_and_grad(W, X), want)
        near(by_vjp(cut.vjp, W, X), want)
        assert "segments of" in str(cut.trace(W, X).partition().split.schedule)


def long(w, x):
    """Sixty steps, or layers written one after the other."""

    def layer(h):
        for _ in range(4):
            h = h + jnp.sin(jnp.tanh(h @ w["in"]) @ w["out"])
        return h

    return jnp.mean(lax.scan(lambda h, _: (layer(h), None), x, length=48)[0] ** 2)


def tall(w, x):
    for _ in range(24):
        x = x + jnp.sin(jnp.tanh(x @ w["in"]) @ w["out"])
    return jnp.mean(x**2)


def a_budget_reaches_as_low_in_a_shard_map_as_on_one_device():
    """Each device has as many rows as the one device; the least peak of the model is a tenth higher at most."""
    rows = jnp.concatenate([X] * 32)
    for program in (long, tall):
        plain = mapped(lambda w, x, f=program: lax.pmean(f(w, x), "d"))
        want = jax.jit(jax.value_and_grad(plain))(W, rows)
        pairs = (plain, rows), (program, rows[: len(rows) // 4])
        graphs = [aot.function(f).trace(W, x).graph for f, x in pairs]
        planners = [Planner(Problem.of(graph).timed(Roofline(1e11, 1e10, 1e10))) for graph in graphs]
        inside, outside = (planner.ranked[-1].peak_bytes for planner in planners)
        assert inside <= 1.1 * outside, (program.__name__, inside, outside)
        smallest = planners[0].ranked[-1].plan
        assert "segments" in smallest.strategy or "division" in smallest.strategy, smallest.strategy
        made = aot.function(plain, strategy=lambda graph, plan=smallest: plan).trace(W, rows).partition()
        near(made.compile().value_and_grad(W, rows), want)
        assert moves(made) == moves(plain, W, rows)


def apart(w):
    """The weights as values that vary, so that branches which devices choose for themselves hold no sums over them."""
    return jax.tree.map(lambda leaf: leaf if varying(jax.typeof(leaf)) else lax.pcast(leaf, "d", to="varying"), w)


def chosen_apart(w, x):
    """Every device chooses for itself among branches that keep arrays of different sizes."""
    w = apart(w)

    def one(x):
        return jnp.sum(jnp.exp(jnp.sin(jnp.tanh(x @ w["in"]))) @ jnp.sin(jnp.tanh(w["out"] @ w["out"])))

    def two(x):
        return jnp.sum(jnp.sin(jnp.exp(jnp.sin(jnp.concatenate([x, x]) @ jnp.tanh(w["in"])))))

    return lax.switch(jnp.int32(3 * jnp.abs(jnp.sin(5 * x[0, 0]))), [one, two, lambda x: jnp.sum(jnp.cos(x))], x)


def chosen_together(w, x):
    """All devices choose one branch; it keeps values that vary and values that do not, and sums its gradients."""

    def one(x):
        return jnp.sum(jnp.exp(jnp.sin(jnp.tanh(x @ w["in"]))) @ jnp.sin(jnp.tanh(w["out"] @ w["out"])))

    def two(x):
        return jnp.sum(jnp.sin(jnp.exp(jnp.sin(jnp.concatenate([x, x]) @ jnp.tanh(w["in"])))))

    return lax.cond(lax.psum(x[0, 0], "d") > 0, one, two, x)


def chosen_in_a_loop(w, x):
    def step(h, w):
        is_positive = lax.psum(jnp.sum(h[0]), "d") > 0
        return lax.cond(is_positive, lambda h: jnp.tanh(jnp.sin(h @ w)), lambda h: jnp.cos(jnp.sin(h)) @ w, h), None

    return jnp.mean(lax.scan(step, x, w["blocks"])[0] ** 2)


def a_conditional_in_a_shard_map_is_opened():
    for program in (chosen_apart, chosen_together, chosen_in_a_loop):
        whole = laid(program)
        want = jax.jit(jax.value_and_grad(whole, (0, 1)))(W, X)
        for options in ({}, {"strategy": nothing_kept}):
            cut = aot.function(whole, argnums=(0, 1), **options)
            made = cut.trace(W, X).partition()
            assert "branches" in names_of(made) and "cond" not in names_of(made), program.__name__
            near(cut.value_and_grad(W, X), want)
            is_default = not options  # a plan that keeps nothing adds up again what the branches were chosen by
            assert not is_default or moves(made) == moves(whole, W, X)
        by_jax = mapped(lambda w, x, f=program: jax.grad(f)(apart(w), x), P("d"))
        near(mapped(lambda w, x, f=program: aot.function(f).grad(apart(w), x), P("d"))(W, X), by_jax(W, X))


def dropped(w, x):
    key = jax.random.fold_in(jax.random.key(1), lax.axis_index("d"))
    h = jnp.tile(jnp.tanh(x @ w["in"]), (64, 8))
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), jnp.sin(h), 0)
    return jnp.sum((h[:, :8] @ w["out"]) ** 2)


def a_mask_in_a_shard_map_is_kept_as_bits():
    for how in ({}, {"check_vma": False}):
        whole = laid(dropped, **how)
        made = aot.function(whole).trace(W, X).partition("min_cut")
        assert [s.shape for s in made.plan.saved if s.dtype == "uint8"] == [(256, 8)], made.plan
        assert not [s for s in made.plan.saved if s.dtype == "bool"]
        near(made.compile().value_and_grad(W, X), jax.jit(jax.value_and_grad(whole))(W, X))
    near(mapped(aot.function(dropped).grad)(W, X), mapped(jax.grad(dropped))(W, X))


def sharded_weights_are_gathered_no_more_often_than_by_plain_jax():
    """On axes that XLA lays out, with weights that each layer takes a part of."""

    def layer(x, w):
        for i in range(3):
            x = x + jnp.sin(jnp.tanh(x @ w[i]))
        return x

    def unrolled(ws, x):
        return jnp.mean(layer(layer(x, ws[0]), ws[1]) ** 2)

    def scanned(ws, x):
        return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)

    ws, rows = 0.1 * jax.random.normal(KEYS[0], (2, 3, 8, 8)), jnp.concatenate([X] * 16)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    args = jax.device_put((ws, rows), (NamedSharding(mesh, P(None, None, None, "d")), NamedSharding(mesh, P("d"))))
    for whole in (unrolled, scanned):
        cut = aot.function(whole)
        near(cut.value_and_grad(*args), jax.jit(jax.value_and_grad(whole))(*args))
        plain, ours = moves(whole, *args), moves(cut.trace(*args).partition())
        inside = jax.jit(lambda *args, cut=cut: cut.value_and_grad(*args)).lower(*args).compile().as_text()
        assert ours == plain, (whole.__name__, ours, plain)
        assert [inside.count(f" {name}(") for name in COLLECTIVES] == plain, whole.__name__
        assert plain[1] > 0, "plain JAX gathers"


def gathered_weights_are_kept_or_gathered_again():
    """As a policy says, by parameter; a budget takes no more memory. Nothing else that talks to devices runs again."""

    def layer(x, w):
        up, down = (lax.all_gather(part, "d", axis=1, tiled=True) for part in w)
        return x + jnp.tanh(jnp.sin(x @ up)) @ down

    def unrolled(ws, x):
        for i in range(3):
            x = layer(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return lax.pmean(jnp.mean(x**2), "d")

    def scanned(ws, x):
        return lax.pmean(jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2), "d")

    ws, part = tuple(0.1 * jax.random.normal(KEYS[i], (3, 64, 64)) for i in range(2)), P(None, None, "d")
    for whole in (unrolled, scanned):
        laid = jax.shard_map(whole, mesh=ROWS, in_specs=((part, part), P("d")), out_specs=P())
        args = ws, jax.random.normal(KEYS[3], (16, 64))
        plain = moves(laid, *args)
        taken, kept, temps = [], [], []
        for options in ({}, {"policy": {"all_gather": aot.MUST_RECOMPUTE}}, {"budget": 0.0}):
            cut = aot.function(laid, **options).trace(*args).partition()
            run = cut.compile()
            near(run.value_and_grad(*args), jax.jit(jax.value_and_grad(laid))(*args))
            taken.append(moves(cut))
            temps.append(run.memory.step.temp_bytes)
            kept.append(len([s for s in cut.plan.saved if s.op == "all_gather"]))
        gathers = [row.pop(1) for row in (plain, *taken)]
        assert all(row == plain for row in taken), (whole.__name__, plain, taken)
        assert gathers[0] == gathers[1] < gathers[2] and max(gathers) <= 2 * gathers[0], gathers
        assert max(temps[1:]) <= temps[0], temps
        assert kept[0] > 0 == kept[1], kept


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def head(w, x, y):
    logits = x @ w
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])


def rows_of_a_device_run_in_blocks_and_devices_add_up_once():
    w, x = 0.1 * jax.random.normal(KEYS[0], (8, 1024)), jnp.concatenate([X] * 16)
    y = jnp.arange(len(x))
    want = jax.grad(head)(w, x, y)
    for checks in (True, False):

        def step(checks=checks, **options):
            def own(w, x, y):
                slope = jax.grad(lambda w: lax.pmean(aot.function(head, **options)(w, x, y), "d"))(w)
                return slope if checks else lax.pmean(slope, "d")

            into = P(), P("d"), P("d")
            sharded = jax.shard_map(own, mesh=ROWS, in_specs=into, out_specs=P(), check_vma=checks)
            return jax.jit(sharded).lower(w, x, y).compile()

        whole = step()
        for options in ({"tiles": {"args[1]": 8}}, {"budget": 0.4}):
            tiled = step(**options)
            near(tiled(w, x, y), want)
            sums = [made.as_text().count(" all-reduce(") for made in (whole, tiled)]
            assert sums[0] == sums[1] > 0, f"{options}: {sums} sums over devices"
            taken = [made.memory_analysis().temp_size_in_bytes for made in (whole, tiled)]
            assert taken[1] <= 0.5 * taken[0], f"{options}, {checks}: {taken} bytes"


CLAIMS = [
    gathered_weights_are_kept_or_gathered_again,
    sharded_weights_are_gathered_no_more_often_than_by_plain_jax,
    rows_of_a_device_run_in_blocks_and_devices_add_up_once,
    every_program_has_jax_gradients_in_every_way_of_calling,
    outputs_that_vary_and_that_do_not_take_cotangents_of_their_kind,
    the_gradient_of_a_shard_map_and_second_derivatives_are_jax_s,
    weights_in_parts_and_meshes_that_are_manual_in_part,
    calls_that_differ_in_what_varies_have_cuts_of_their_own,
    a_budget_inside_a_jit_is_for_each_of_the_devices_that_it_names_where_values_are_computed,
    a_budget_is_measured_on_the_mesh,
    a_program_takes_what_it_was_weighed_at,
    pmap_is_as_ever,
    a_device_saves_as_much_on_explicit_meshes_and_in_shard_map_as_elsewhere,
    what_waits_in_another_form_is_near_on_a_mesh_and_in_shard_map,
    a_loop_over_sharded_rows_runs_in_segments_on_an_explicit_mesh,
    branches_with_values_that_vary_and_that_do_not_are_differentiated,
    while_loops_are_differentiated_to_any_order,
    devices_may_leave_a_while_loop_one_by_one,
    a_sum_over_devices_within_a_loop_that_some_have_left_is_refused,
    while_loops_run_backwards_on_an_explicit_mesh,
    shard_map_inside_is_cut_and_runs_no_more_collectives,
    what_lies_in_a_shard_map_is_cut_in_every_way_of_calling,
    a_shard_map_without_checks_or_manual_in_part_is_cut_too,
    a_policy_reaches_into_a_shard_map,
    a_loop_in_a_shard_map_runs_in_segments,
    a_budget_reaches_as_low_in_a_shard_map_as_on_one_device,
    a_conditional_in_a_shard_map_is_opened,
    a_mask_in_a_shard_map_is_kept_as_bits,
]


if __name__ == "__main__":
    tell(CLAIMS)
