"""Run on eight devices of the host: what `test_mesh` claims, one function for each claim, told as JSON.

Warnings are errors here as they are in the tests.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from jointcut.aot.planning.request import Request
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition import Problem, Roofline
from jointcut.partition.errors import BudgetError, TargetError
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.cost import LINK_S

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
TYPED = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
DRAWS = np.random.default_rng(0)
W = [DRAWS.normal(size=(64, 64)).astype("f") / 8 for _ in range(4)]
X = DRAWS.normal(size=(256, 64)).astype("f")


def laid(mesh, weights, rows):
    return [jax.device_put(w, NamedSharding(mesh, weights)) for w in W], jax.device_put(X, NamedSharding(mesh, rows))


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w) + x)


def loss(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def gathering(ws, x):
    """The loss, where each device gathers the weights of a layer."""

    def on_each(ws, x):
        for w in ws:
            x = layer(x, lax.all_gather(w, "d", axis=1, tiled=True))
        return lax.pmean(jnp.mean(x**2), "d")

    return jax.shard_map(on_each, mesh=LINE, in_specs=([P(None, "d")] * 4, P("d")), out_specs=P())(ws, x)


PLACED = {
    "data": (loss, laid(LINE, P(), P("d"))),
    "FSDP": (loss, laid(LINE, P(None, "d"), P("d"))),
    "explicit": (loss, laid(TYPED, P(), P("d"))),
    "manual": (gathering, laid(LINE, P(None, "d"), P("d"))),
    "manual, arrays of one device": (gathering, (W, X)),
}


def bytes_are_those_of_one_device():
    for name, (function, args) in PLACED.items():
        traced = aot.function(function).trace(*args)
        cut, kept = traced.partition(), traced.partition("save_all")
        (step,) = cut.compile() and cut.made.programs(1)
        memory = step.memory_analysis()
        ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert abs(traced.program.fixed_bytes - ends) < 256, (name, traced.program.fixed_bytes, ends)
        for each in (cut, kept):
            assert each.plan.bytes_saved == each.split.residual_bytes, (name, each.plan.bytes_saved)
            assert each.plan.bytes_saved <= 16 * X.nbytes // 8 + 4 * W[0].nbytes, (name, each.plan.bytes_saved)
        assert cut.plan.remarks[-1:] == ["all bytes are those of one of 8 devices"], cut.plan.remarks
        peak_bytes = cut.made.peak_bytes(1)
        assert 0.8 < traced.pareto().points[0].peak_bytes / peak_bytes < 1.6, (name, traced.pareto(), peak_bytes)
        assert max(buffer.bytes for buffer in cut.explain(measure=False).life.buffers) <= W[0].nbytes, name


def halves_that_run_apart_keep_as_many_bytes_as_the_plan_says():
    for function, args in PLACED.values():
        traced = aot.function(function).trace(*args)
        made = traced.partition("save_all").compile()
        memory = made.memory
        kept = memory.forward.output_bytes - 4
        assert abs(kept - memory.residual_bytes) < 256, (function, kept, memory.residual_bytes)


def a_plan_is_read_back_on_the_mesh_and_followed_elsewhere():
    _, args = PLACED["FSDP"]
    cut = aot.function(loss).trace(*args).partition()
    text = planfile.dumps(cut.plan, cut.split.graph)
    again = aot.function(loss, plan=text)
    assert again.trace(*args).partition().plan.bytes_saved == cut.plan.bytes_saved
    assert again.trace(W, X).partition().plan.bytes_saved == 8 * cut.plan.bytes_saved
    want = jax.grad(loss)(W, X)
    assert relative_error(jax.jit(jax.grad(lambda ws, x: again(ws, x)))(*args), want) < 1e-5


def attending(ws, x):
    """A layer whose queries are rows of a device and whose keys are those of all."""
    for w in ws:
        q, k = x @ w, jnp.tanh(x @ (w + w.T))
        x = x + jax.nn.softmax(jnp.einsum("btf,bsf->bts", q, k)) @ k
    return jnp.mean(x**2)


def two_layers(ws, x):
    """Layers of two matrices, the first divided by columns and the second by rows."""
    for up, down in zip(ws[::2], ws[1::2], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, ws)[0] ** 2)


GRID = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)


def on_grid(specs, rows, x=X, ws=W):
    put = [jax.device_put(w, NamedSharding(GRID, spec)) for w, spec in zip(ws, specs, strict=True)]
    return put, jax.device_put(x, NamedSharding(GRID, rows))


TENSOR = (P(None, "m"), P("m"), P(None, "m"), P("m"))
STACKS = [np.stack([w, w]) for w in W[:2]]
EXCHANGING = {
    "tensor": (two_layers, on_grid(TENSOR, P("d")), "all-reduce", 2),
    "tensor in a scan": (scanned, on_grid((P(None, None, "m"), P(None, "m")), P("d"), ws=STACKS), "all-reduce", 2),
    "sequence": (attending, on_grid((P(),) * 4, P("d", "m"), x=X.reshape(8, 32, 64)), "all-gather", 4),
}


def what_devices_exchange_is_foreseen_and_a_plan_tells_what_it_exchanges_again():
    for name, (function, args, kind, number) in EXCHANGING.items():
        traced = aot.function(function).trace(*args)
        cut = traced.partition()
        graph = cut.split.graph
        found = [m for m in graph.moves if m.kind == kind and m.bytes > 8]
        assert sum(graph.trips[graph.loop_of(graph.ops[m.op])] for m in found) == number, (name, graph.moves)
        assert not [line for line in traced.partition("save_all").plan.remarks if "once more" in line], name
        if function is scanned:
            continue
        everything = Plan.of(cut.split.problem, [])
        (line,) = [line for line in everything.remarks if "once more" in line]
        assert f"in {number} {kind}s: " in line and "on_eight_devices.py:" in line, line


def collectives_cost_their_time_on_the_links():
    for function, args, _, number in EXCHANGING.values():
        graph = aot.function(function).trace(*args).partition().split.graph
        fast = Roofline(1e12, 1e12, 1e11)
        priced, free = Problem.of(graph, fast), Problem.of(replace(graph, moves=()), fast)
        more = sum(priced.seconds) - sum(free.seconds)
        assert more > 0.9 * number * LINK_S, (function.__name__, more)


def a_report_says_which_part_of_an_array_each_device_has():
    function, args, *_ = EXCHANGING["tensor"]
    text = aot.function(function).trace(*args).partition("save_all").explain(measure=False).table(in_colour=False)
    assert "each has" in text and " 1/2 " in text and " 1/8 " in text, text
    assert "All bytes are those of one of 8 devices." in text, text
    assert "each has" not in aot.function(loss).trace(W, X).partition("save_all").explain(measure=False).table()


def refused(call, kind):
    try:
        call()
    except kind as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError("nothing was refused")


def a_refused_budget_names_the_devices_and_an_array_that_is_whole_on_each():
    _, (ws, x) = PLACED["data"]
    text = refused(lambda: aot.function(loss, budget="10kB").value_and_grad(ws, x), BudgetError)
    assert text.startswith("budget of 10,000 bytes cannot be met.\nThe smallest peak found is "), text
    assert text.endswith(
        "or budget=0.0 for the least that is found.\nAll of these are bytes of one of 8 devices.\n"
        "args[0][0] alone takes 16,384 bytes, whole on each device. Lay it in parts over the mesh."
    ), text
    _, in_parts = PLACED["FSDP"]
    text = refused(lambda: aot.function(loss, budget="10kB").value_and_grad(*in_parts), BudgetError)
    assert text.endswith("All of these are bytes of one of 8 devices."), text


def a_budget_in_a_shard_map_is_refused_for_each_device():
    _, (ws, x) = PLACED["data"]
    inside = aot.function(loss, budget="10kB")
    step = jax.shard_map(
        lambda ws, x: lax.pmean(inside(ws, x), "d"), mesh=LINE, in_specs=([P()] * 4, P("d")), out_specs=P()
    )
    text = refused(lambda: jax.jit(jax.grad(step))(ws, x), BudgetError)
    assert (
        "All of these are bytes of one of 8 devices.\n"
        "args[0][0] alone takes 16,384 bytes on each device. Lay it in parts over the mesh."
    ) in text, text


def calls_whose_arrays_lie_otherwise_are_each_as_plain_jax():
    step, want = aot.function(loss), jax.value_and_grad(loss)(W, X)
    placed = (PLACED["data"][1], (W, X), PLACED["FSDP"][1], laid(LINE, P("d"), P()), PLACED["data"][1])
    for args in placed:
        assert relative_error(step.value_and_grad(*args), want) < 1e-5


def a_call_whose_arrays_lie_otherwise_has_a_plan_of_its_own():
    args, types = [PLACED[name][1] for name in ("data", "FSDP")], []
    for placed in args:
        types.append(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), placed))
    for given, call in (
        (args, lambda step, each: step.value_and_grad(*each)),
        (args, lambda step, each: step.vjp(*each)),
        (types, lambda step, each: step.lower(*each)),
    ):
        step, layouts, found = aot.function(loss), [], Request._answer

        def kept(request, split, found=found, layouts=layouts):
            layouts.append(request.program.layout.specs[0])
            return found(request, split)

        with mock.patch.object(Request, "_answer", kept):
            for each in (*given, *given):
                call(step, each)
        assert layouts == [((), ()), ((), ("d",))], layouts


def a_mesh_of_one_device_is_no_mesh():
    one = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    cut = aot.function(loss).trace(*laid(one, P("d"), P("d"))).partition()
    assert cut.plan.remarks == [], cut.plan.remarks
    assert cut.plan.bytes_saved == aot.function(loss).trace(W, X).partition().plan.bytes_saved


def an_axis_that_is_not_on_the_mesh_is_refused_as_by_jax():
    def mean(ws, x):
        return jax.shard_map(
            lambda ws, x: lax.pmean(loss(ws, x), "q"), mesh=LINE, in_specs=([P()] * 4, P("d")), out_specs=P()
        )(ws, x)

    errors = []
    ours = aot.function(mean)
    for step in (jax.value_and_grad(mean), ours.value_and_grad, jax.jit(jax.grad(lambda ws, x: ours(ws, x)))):
        try:
            step(W, X)
        except (NameError, AssertionError) as error:
            errors.append(error)
    assert len(errors) == 3 and len({type(error) for error in errors}) == 1, errors
    line = mean.__code__.co_firstlineno + 2
    for error in errors[1:] if isinstance(errors[0], AssertionError) else ():
        (note,) = [text for text in error.__notes__ if "jointcut traced" in text]
        assert note == (
            f"This happened while jointcut traced mean at {__file__}:{line} (<lambda>). JAX stopped at an assertion of "
            "its own, as it does for a collective over an axis that is not on the mesh. Look at the axis names there."
        ), note


def budgets_hold_on_explicit_axes_where_no_mesh_is_set():
    _, (ws, x) = PLACED["explicit"]
    want = jax.jit(jax.value_and_grad(loss))(ws, x)
    step = aot.function(loss, budget="250kB")
    for got in (step.value_and_grad(ws, x), jax.jit(jax.value_and_grad(lambda ws, x: step(ws, x)))(ws, x)):
        assert relative_error(got, want) < 1e-5
    peak_bytes = step.trace(ws, x).partition().made.peak_bytes(1)
    with jax.set_mesh(TYPED):
        assert step.trace(ws, x).partition().made.peak_bytes(1) == peak_bytes


def a_target_of_another_number_of_devices_is_refused():
    four = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    text = refused(lambda: aot.function(loss, target="h100x8").trace(*laid(four, P(), P("d"))), TargetError)
    assert text == (
        "The arguments lie on 4 devices, and the target h100x8 has 8 devices.\n"
        "Lay them on as many, such as with the mesh of the target, or name a target of as many."
    ), text


def types_on_a_mesh_that_names_no_devices_lie_on_those_that_are_here():
    for kind in (AxisType.Auto, AxisType.Explicit):
        rows = {"explicit" if kind is AxisType.Explicit else "data": P("d")}
        for name, spec in rows.items():
            mesh = jax.sharding.AbstractMesh((8,), ("d",), axis_types=(kind,))
            types = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, P())) for w in W]
            x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))
            got = aot.function(loss).trace(types, x).partition()
            assert got.plan.bytes_saved == aot.function(loss).trace(*PLACED[name][1]).partition().plan.bytes_saved
            step = got.compile()
            assert relative_error(step.value_and_grad(*PLACED[name][1]), jax.value_and_grad(loss)(W, X)) < 1e-5
            assert aot.collectives(aot.function(loss), types, x).ours.totals
    many = jax.sharding.AbstractMesh((16,), ("d",))
    types = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(many, P())) for w in W]
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(many, P("d")))
    asks = lambda: aot.function(loss).trace(types, x), lambda: aot.collectives(jax.grad(loss), types, x)
    for path, ask in zip(("args[0][0]", "An argument"), asks, strict=True):
        assert refused(ask, TargetError) == (
            f"{path} lies on a jax.sharding.AbstractMesh of 16 devices, which names none, and there are 8 devices "
            "here.\nName a target of 16, as in aot.function(..., target='h100x8'), or lay it on a mesh of devices, "
            "such as aot.target('h100x8').mesh(...)."
        )
    assert refused(lambda: aot.function(loss, target="h100x8").trace(types, x), TargetError) == (
        "args[0][0] lies on a jax.sharding.AbstractMesh of 16 devices, which names none, and h100x8 has 8 devices.\n"
        "Name a target of 16, as in aot.function(..., target='h100x8'), or lay it on a mesh of devices, such as "
        "aot.target('h100x8').mesh(...)."
    )


def a_budget_in_jit_needs_devices_on_explicit_axes():
    mesh = jax.sharding.AbstractMesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    types = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, P())) for w in W]
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))
    step = jax.jit(jax.grad(lambda ws, x: aot.function(loss, budget=0.9)(ws, x)))
    assert refused(lambda: step.trace(types, x), BudgetError).startswith(
        "budget is to be measured, and the arguments lie on a jax.sharding.AbstractMesh, which names no devices.\n"
        "Trace for a mesh of devices, such as aot.target('h100x8').mesh(...), or give a strategy or a plan."
    )


def sizes_of_arrays_on_a_mesh_are_numbers():
    cut, wanted = aot.function(loss, sizes="dynamic"), jax.grad(loss)
    for rows in (256, 128, 64):
        ws, x = laid(LINE, P(), P("d"))
        for leaves in ((ws, x[:rows]), (ws, X[:rows])):
            for a, b in zip(cut.grad(*leaves), wanted(*leaves), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert not len(cut.sizes), cut.sizes


def sums_over_devices_run_again_if_a_policy_says_so_and_the_plan_tells_it():
    def on_each(ws, x):
        for up, down in zip(ws[::2], ws[1::2], strict=True):
            x = x + jnp.sin(lax.psum(jnp.tanh(x @ up) @ down, "m"))
        return lax.pmean(jnp.mean(x**2), "d")

    summed = jax.shard_map(on_each, mesh=GRID, in_specs=(list(TENSOR), P("d")), out_specs=P())
    args = on_grid(TENSOR, P("d"))
    plain = jax.jit(jax.value_and_grad(summed)).lower(*args).compile()
    cut = aot.function(summed, policy={"psum_invariant": aot.MUST_RECOMPUTE}).trace(*args).partition()
    run = cut.compile()
    assert relative_error(run.value_and_grad(*args)[1], plain(*args)[1]) < 1e-5
    lines = [step.as_text().splitlines() for step in (plain, run.cut.jits.compiled("step"))]
    found = [[line.partition(" all-reduce(") for line in each] for each in lines]
    sums = [sum(made.count("f32[128,64]") for made, is_sum, _ in each if is_sum) for each in found]
    assert sums == [3, 5], sums
    assert "in 2 psum_invariants" in cut.plan.remarks[0], cut.plan.remarks


CLAIMS = [
    a_budget_in_a_shard_map_is_refused_for_each_device,
    types_on_a_mesh_that_names_no_devices_lie_on_those_that_are_here,
    a_budget_in_jit_needs_devices_on_explicit_axes,
    sums_over_devices_run_again_if_a_policy_says_so_and_the_plan_tells_it,
    sizes_of_arrays_on_a_mesh_are_numbers,
    a_refused_budget_names_the_devices_and_an_array_that_is_whole_on_each,
    calls_whose_arrays_lie_otherwise_are_each_as_plain_jax,
    a_call_whose_arrays_lie_otherwise_has_a_plan_of_its_own,
    a_mesh_of_one_device_is_no_mesh,
    an_axis_that_is_not_on_the_mesh_is_refused_as_by_jax,
    a_target_of_another_number_of_devices_is_refused,
    budgets_hold_on_explicit_axes_where_no_mesh_is_set,
    what_devices_exchange_is_foreseen_and_a_plan_tells_what_it_exchanges_again,
    collectives_cost_their_time_on_the_links,
    a_report_says_which_part_of_an_array_each_device_has,
    bytes_are_those_of_one_device,
    halves_that_run_apart_keep_as_many_bytes_as_the_plan_says,
    a_plan_is_read_back_on_the_mesh_and_followed_elsewhere,
]


if __name__ == "__main__":
    tell(CLAIMS)
