"""Run on eight devices of the host: in a `jax.jit` of the user's, plans and budgets know how its arguments lie.

Warnings are errors here as they are in the tests.
"""

from __future__ import annotations

import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from claims import tell
from jointcut import aot
from jointcut.aot.call import under_transform
from jointcut.aot.report.gradient_error import relative_error

LINE = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
DRAWS = np.random.default_rng(0)
W = [DRAWS.normal(size=(32, 32)).astype("f") / 6 for _ in range(4)]
X = DRAWS.normal(size=(2048, 32)).astype("f")
HALF = 440_000  # bytes of one device: half of what plain JAX takes there, and less than a tenth of all together


def on(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def deep(ws, x):
    for w in 2 * ws:
        x = jnp.sin(jnp.tanh(x @ w) + x)
    return jnp.mean(x**2)


LAID = {
    "data": ([on(LINE, P(), w) for w in W], on(LINE, P("d"), X)),
    "FSDP": ([on(LINE, P(None, "d"), w) for w in W], on(LINE, P("d"), X)),
    "tensor": ([on(GRID, P(*(None, "m")[:: 1 - 2 * (n % 2)]), w) for n, w in enumerate(W)], on(GRID, P("d"), X)),
}
TYPES = {name: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), args)
         for name, args in LAID.items()}  # fmt: skip


def grad_of(function):
    return jax.jit(lambda ws, x: jax.value_and_grad(function)(ws, x))


def own_grad_of(function):
    return jax.jit(lambda ws, x: function.value_and_grad(ws, x))


def nested(function):
    return jax.jit(lambda batch: jax.jit(lambda ws, x: jax.value_and_grad(function)(ws, x))(batch["w"], batch["x"]))


def temp_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


def inside(step, *args):
    """The plans that were made while a step was traced, each with its graph."""
    made, answered = [], under_transform.answered

    def kept(request, *rest):
        made.append(answered(request, *rest))
        return made[-1]

    with mock.patch.object(under_transform, "answered", kept):
        program = step.lower(*args).compile()
    return [(each.plan, each.split.graph) for each in made], program


def a_budget_is_for_each_device_at_the_first_plan():
    for name, share, step_of in (("data", 0.6, grad_of), ("FSDP", 0.6, own_grad_of)):
        args = LAID[name]
        plain = jax.jit(jax.value_and_grad(deep)).lower(*args).compile()
        step = step_of(aot.function(deep, budget=share, tiles=False)).lower(*args).compile()
        assert temp_bytes(step) <= share * temp_bytes(plain), (name, temp_bytes(step), temp_bytes(plain))
        assert relative_error(step(*args), plain(*args)) < 1e-5, name


def bytes_of_a_budget_are_those_of_a_device():
    args = LAID["data"]
    for step_of, given in ((grad_of, TYPES["data"]), (nested, ({"w": args[0], "x": args[1]},))):
        step = step_of(aot.function(deep, budget=HALF, tiles=False)).lower(*given).compile()
        memory = step.memory_analysis()
        taken = temp_bytes(step) + memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert taken <= HALF, (step_of.__name__, taken)


def a_plan_knows_the_arguments_and_what_is_cast_from_them():
    casting = jax.jit(lambda ws, x: jax.grad(aot.function(deep))([w.astype("float16") * 0.5 for w in ws], x))
    for step in (grad_of(aot.function(deep)), casting):
        ((plan, graph),), _ = inside(step, *TYPES["FSDP"])
        assert plan.remarks[-1] == "all bytes are those of one of 8 devices", plan.remarks
        assert graph.devices == 8
        assert plan.bytes_saved == graph_bytes(plan, graph), plan


def graph_bytes(plan, graph):
    assert {graph.values[v].parts for v in plan.values} <= {2, 8}, "rows of the batch are divided"
    return sum(graph.values[v].saved_bytes for v in plan.values)


def what_a_plan_exchanges_again_is_named_there_too():
    ((_, graph),), _ = inside(grad_of(aot.function(deep)), *TYPES["tensor"])
    assert any(move.kind == "all-reduce" for move in graph.moves), graph.moves
    everything = aot.function(deep, policy={"*": aot.MUST_RECOMPUTE})
    ((plan, _),), _ = inside(grad_of(everything), *TYPES["tensor"])
    assert any("devices exchange" in line and "in_jit.py:" in line for line in plan.remarks), plan.remarks


def computed(ws, x):
    """Rows that the step shifts: it is not known how they lie."""
    return jnp.roll(x, 1, axis=0)


UNKNOWN = {
    "computed": lambda f: lambda ws, x: jax.grad(f)(ws, computed(ws, x)),
    "in a loop": lambda f: lambda ws, x: lax.scan(lambda c, _: (c, jax.grad(f)(ws, c)), x, None, length=2)[1],
}


def where_it_is_not_known_a_budget_warns_once_and_devices_say_it():
    for name, around in UNKNOWN.items():
        function = aot.function(deep, budget="100MB")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                jax.jit(around(function)).lower(*LAID["data"])
        (warning,) = caught
        assert warning.category is aot.UncheckedWarning, name
        assert str(warning.message) == (
            "deep has a budget, and is given what your jax.jit computes on automatic axes: it is not known how that "
            "lies, so the budget is for the bytes of all devices together.\n"
            "Give the arguments of the jax.jit themselves, or say how many devices share the batch: "
            "aot.function(..., devices=8)."
        ), warning.message
        for options in ({"budget": 1.0}, {"budget": "100MB", "devices": 8}):
            jax.jit(around(aot.function(deep, **options))).lower(*LAID["data"])


def a_refusal_names_devices():
    for step_of in (grad_of, own_grad_of):
        try:
            step_of(aot.function(deep, budget="10kB", tiles=False)).lower(*LAID["data"])
        except aot.BudgetError as error:
            notes = error.__notes__
        assert notes[0] == "All of these are bytes of one of 8 devices.", notes
    try:
        jax.jit(UNKNOWN["computed"](aot.function(deep, budget="10kB", devices=8, tiles=False))).lower(*LAID["data"])
    except aot.BudgetError as error:
        notes = error.__notes__
    assert "for 10,000 bytes on each of 8 devices" in notes[0], notes


def shardings_of_the_jit_itself_are_not_taken_for_those_of_the_arguments():
    rows = NamedSharding(LINE, P("d"))
    step = jax.jit(
        lambda ws, x: jax.grad(aot.function(deep))(ws, x), in_shardings=([NamedSharding(LINE, P())] * 4, rows)
    )
    ((plan, _),), _ = inside(step, W, X)
    assert plan.remarks[-1:] != ["all bytes are those of one of 8 devices"], plan.remarks


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(each.category, str(each.message)) for each in caught]


def a_plan_for_other_shardings_is_told_once():
    told = (
        "deep runs by a plan for other shardings: args[0][0] lay as P() where the plan was made, and lies as "
        "P(None, 'd') now. On automatic axes JAX traces a function once for all shardings.\n"
        "Lay the arguments alike in all calls, or jit a function of its own for each layout, such as "
        "jax.jit(lambda *args: step(*args)) with a step that is not jitted itself."
    )
    for step_of in (grad_of, own_grad_of, lambda f: jax.grad(jax.jit(lambda ws, x: f(ws, x)))):
        step = step_of(aot.function(deep))
        found = [warnings_of(lambda args=LAID[name], step=step: step(*args)) for name in ("data", "FSDP", "data")]
        assert found == [[], [(aot.UncheckedWarning, told)], []], found
    around, (ws, x) = nested(aot.function(deep)), LAID["FSDP"]
    around({"w": LAID["data"][0], "x": LAID["data"][1]})
    lowered = warnings_of(lambda: around.lower({"w": ws, "x": x}))
    assert [text.split(" lay ")[0] for _, text in lowered] == [told.split(" lay ")[0]], lowered


def nothing_is_told_of_what_lies_alike_or_is_not_differentiated():
    function, (ws, x) = aot.function(deep), LAID["data"]
    step, alone = grad_of(aot.function(deep)), jax.jit(lambda ws, x: function(ws, x))
    step(ws, x)
    alone(ws, x)
    longer = [on(LINE, P(None, None), w) for w in W], on(LINE, P("d", None), X)
    assert warnings_of(lambda: step(*longer)) == []
    assert warnings_of(lambda: alone(*LAID["FSDP"])) == []


def where_jax_traces_anew_the_plan_is_for_the_shardings_at_hand():
    function = aot.function(deep)

    def step(ws, x):
        return jax.grad(function)(ws, x)

    first = jax.jit(step)
    for made, name in ((first, "data"), (first, "tensor"), (jax.jit(lambda *args: step(*args)), "FSDP")):
        ((plan, graph),), _ = inside(made, *LAID[name])
        expected, _ = inside(grad_of(aot.function(deep)), *LAID[name])
        assert plan.bytes_saved == expected[0][0].bytes_saved == graph_bytes(plan, graph), name


def devices_that_the_mesh_does_not_have_are_refused():
    for mesh, around in ((GRID, grad_of), (LINE, UNKNOWN["computed"])):
        args = [on(mesh, P(), w) for w in W], on(mesh, P("d"), X)
        try:
            jax.jit(around(aot.function(deep, budget="100MB", devices=16))).lower(*args)
        except aot.BudgetError as error:
            axes = ", ".join(f"{axis!r}: {size}" for axis, size in mesh.shape.items())
            assert str(error) == (
                f"budget is for each of 16 devices that share the batch, and the arguments lie on a mesh of {axes}.\n"
                "Give a number of devices= that divides 8, or a target of as many devices as the mesh has."
            ), error
        else:
            raise AssertionError(mesh)


CLAIMS = [
    devices_that_the_mesh_does_not_have_are_refused,
    a_plan_for_other_shardings_is_told_once,
    nothing_is_told_of_what_lies_alike_or_is_not_differentiated,
    where_jax_traces_anew_the_plan_is_for_the_shardings_at_hand,
    a_budget_is_for_each_device_at_the_first_plan,
    bytes_of_a_budget_are_those_of_a_device,
    a_plan_knows_the_arguments_and_what_is_cast_from_them,
    what_a_plan_exchanges_again_is_named_there_too,
    where_it_is_not_known_a_budget_warns_once_and_devices_say_it,
    a_refusal_names_devices,
    shardings_of_the_jit_itself_are_not_taken_for_those_of_the_arguments,
]


if __name__ == "__main__":
    tell(CLAIMS)
