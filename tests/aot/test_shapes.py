"""Sizes that are names: one plan, two programs, every size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax

from jointcut.aot.call.decorator import function
from jointcut.aot.options.options import Options, validated
from jointcut.aot.stages.symbolic import symbolic_cut
from jointcut.aot.trace.shapes import checked_sizes, concrete, in_one_scope, shapes
from jointcut.partition import Plan, Problem
from jointcut.partition.errors import CallError, GraphError, JointcutError, PlanError, TraceError
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.program import sizes
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.search import mincut
from jointcut.wrappers.arguments.tree import Statics, bind

F32 = jnp.float32


of = partial(shapes, dtype=F32)


# ------------------------------------------------------------------------------------------------------- programs


def normalised(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def perceptron(weights, x):
    hidden = jax.nn.gelu(normalised(x) @ weights["in"] + weights["bias"])
    out = hidden @ weights["out"]
    return jnp.mean(out**2), out


def attention(weights, x):
    batch, time, width = x.shape
    q, k, v = jnp.split((x @ weights["qkv"]).reshape(batch, time, 2, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(batch, time, width)
    return jnp.mean((x + mixed @ weights["out"]) ** 2)


def stacked_layers(layers, x):
    def layer(x, weights):
        return x + jnp.sin(jnp.tanh(x @ weights) * 2.0), None

    return jnp.sum(lax.scan(layer, x, layers)[0] ** 2) / x.shape[0]


def recurrence(weights, x):
    def step(state, x):
        state = jnp.tanh(state @ weights + x)
        return state, jnp.sin(state)

    end, path = lax.scan(step, jnp.zeros(x.shape[1:]), x)
    return jnp.mean(path) + jnp.sum(end)


def convolution(kernel, images):
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.nn.relu(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout))
    pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(pooled**2)


def embedding(table, tokens):
    return jnp.mean(jnp.tanh(table[tokens]).sum(1) ** 2)


def merged(weights, x):
    steps = jnp.cumsum(jnp.sin(x @ weights), 1)[:, 1:]
    return jnp.mean(jax.nn.logsumexp(steps.reshape(-1, steps.shape[-1]), -1))


def average(x):
    return jnp.mean(x * 3.0)


@dataclass(frozen=True, eq=False)
class Symbolic:
    """A function, its arguments with names for sizes, the sizes to plan for, and others to run with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    planned: dict[str, int]
    others: tuple[dict[str, int], ...]
    constraints: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.function.__name__


def batches(function, *args):
    return Symbolic(function, args, {"b": 8}, ({"b": 1}, {"b": 5}))


def sequences(function, *args, constraints=()):
    return Symbolic(function, args, {"b": 4, "t": 6}, ({"b": 3, "t": 9}, {"b": 2, "t": 2}), constraints)


PROGRAMS = (
    batches(perceptron, {"in": of("3, 5"), "bias": of("5"), "out": of("5, 2")}, of("2*b, 3")),
    batches(stacked_layers, of("4, 5, 5"), of("b, 5")),
    batches(convolution, of("3, 3, 1, 2"), of("b, 6, 6, 1")),
    sequences(attention, {"qkv": of("4, 12"), "out": of("4, 4")}, of("b, t, 4")),
    sequences(recurrence, of("4, 4"), of("t, b, 4")),
    sequences(embedding, of("10, 4"), shapes("b, t", jnp.int32)),
    sequences(merged, of("4, 4"), of("b, t, 4"), constraints=("t >= 2", "b*t >= b")),
    sequences(average, of("b, t")),
)
named = {program.name: program for program in PROGRAMS}
every = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def cut_of(function, args, planned, constraints=(), **options):
    bound = bind(args, {}, Statics())
    return symbolic_cut(function, validated(function, Options(**options)), bound, planned, constraints)


@cache
def cut(program):
    return cut_of(program.function, program.args, program.planned, program.constraints)


def at(program, numbers):
    return tuple(jax.tree.map(lambda leaf: concrete(leaf, numbers), arg) for arg in program.args)


def arrays(program, numbers):
    draws = np.random.default_rng(0)

    def one(struct):
        if struct.dtype == jnp.int32:
            return draws.integers(0, 10, struct.shape).astype(np.int32)
        return (0.5 * draws.standard_normal(struct.shape)).astype(struct.dtype)

    return jax.tree.map(one, at(program, numbers))


def exported(closed):
    run = jax.jit(lambda *flat: runtime.evaluate(closed, *flat))
    return export.export(run, platforms=["cpu"])(*abstract.input_structs(closed))


def both(halves, count):
    """The two halves, each lowered once for all sizes, as one function of flat arguments and cotangents."""
    forward, backward = exported(halves.forward), exported(halves.backward)

    @jax.jit
    def run(flat, cotangents):
        results = forward.call(*flat)
        places = {"input": flat, "output": results[:count], "saved": results[count:]}
        given = [places[r.kind][r.index] for r in halves.residuals]
        return results[:count], backward.call(*given, *cotangents)

    return run


def pulled(program, args):
    """What JAX answers: flat outputs, cotangents to pull back, and the flat gradient of argument 0."""

    @jax.jit
    def run(args):
        out, pullback = jax.vjp(lambda first: program.function(first, *args[1:]), args[0])
        cotangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=F32)).reshape(x.shape), out)
        return jax.tree.leaves(out), jax.tree.leaves(cotangent), jax.tree.leaves(pullback(cotangent))

    return run(args)


def assert_agree(run, program, numbers):
    args = arrays(program, numbers)
    outputs, cotangents, gradients = pulled(program, args)
    got = run(jax.tree.leaves(args), cotangents)
    for found, want in zip(jax.tree.leaves(got), [*outputs, *gradients], strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-6)


# ------------------------------------------------------------------------------------------------------- the laws


@every
def test_halves_that_are_lowered_once_agree_with_jax_at_every_size(program):
    made = cut(program)
    run = both(made.split.halves, len(made.traced.program.results.avals))
    for numbers in (program.planned, *program.others):
        assert_agree(run, program, numbers)


@every
def test_what_is_saved_is_what_the_plan_for_these_sizes_saves(program):
    """A plan without cheaper forms, such as one stack instead of two: there may be sizes for which they are larger."""
    made = cut(program)
    traced = function(program.function).trace(*at(program, program.planned))
    plain = replace(traced, program=replace(traced.program, is_as_jax=True)).partition().plan
    assert made.split.plan == made.cut.plan
    assert [(s.bytes, s.shape, s.source) for s in made.split.plan.saved] == [
        (s.bytes, s.shape, s.source) for s in plain.saved
    ]
    assert made.split.plan.bound_bytes == plain.bound_bytes
    assert sizes.number(made.split.residual_bytes, made.sizes) == plain.bytes_saved


@every
def test_a_program_with_numbers_has_the_same_equations(program):
    made = cut(program)
    symbolic, plain = (jaxprs.opened(t.joint)[0] for t in (made.traced, made.cut.traced))
    jaxprs.check(made.cut.traced.joint)
    assert sizes.names_in(made.traced.joint) == made.sizes.keys()
    assert not sizes.names_in(made.cut.traced.joint)
    for a, b in zip(symbolic.eqns, plain.eqns, strict=True):
        assert a.primitive.name in (b.primitive.name, "dim_as_value")
        assert [sizes.numbers(v.aval.shape, made.sizes) for v in a.outvars] == [v.aval.shape for v in b.outvars]


@every
def test_residuals_are_those_of_the_cut_with_numbers_and_then_arguments(program):
    made = cut(program)
    for backend in (PORTABLE, CPU):
        symbolic, plain = (split.on(backend).halves.residuals for split in (made.split, made.cut.split))
        assert symbolic[: len(plain)] == plain
        assert all(r.kind == "input" for r in symbolic[len(plain) :])


def test_halves_for_xla_cpu_have_all_sizes_too():
    def tail(weights, x):  # where the batch is 1, there is nothing behind its first row
        rows = jnp.exp(jnp.sin(x @ weights))[1:]
        return jnp.sum(jnp.exp(jnp.tanh(jnp.sin(rows)) * rows) ** 2)

    program = batches(tail, of("4, 4"), of("b, 4"))
    made = cut(program)
    assert made.split.plan.recomputed
    run = both(made.split.on(CPU).halves, 1)
    for numbers in program.others:
        assert_agree(run, program, numbers)


def test_a_backward_is_handed_an_argument_for_a_size_that_no_residual_tells():
    made = cut(named["average"])
    assert made.cut.split.halves.residuals == ()
    (residual,) = made.split.halves.residuals
    assert (residual.kind, residual.index) == ("input", 0)


def test_of_several_arguments_the_smallest_tells_the_size():
    def loss(x, y, z):
        return jnp.mean(x) + jnp.sum(y) * jnp.sum(z)

    args = of("b, 9"), of("b, 3"), of("b, 5")
    (residual,) = cut_of(loss, args, {"b": 4}).split.halves.residuals
    assert (residual.kind, residual.index) == ("input", 1)


def test_the_cut_with_numbers_compiles_and_is_right():
    program = named["recurrence"]
    args = arrays(program, program.planned)
    value, gradient = cut(program).cut.compile().value_and_grad(*args)
    want, want_gradient = jax.jit(jax.value_and_grad(program.function))(*args)
    np.testing.assert_allclose(value, want, rtol=2e-5)
    np.testing.assert_allclose(gradient, want_gradient, rtol=2e-5, atol=2e-6)


def test_a_loop_of_known_length_runs_in_segments_at_every_size():
    program = named["stacked_layers"]

    def in_segments(graph):
        return replace(mincut.STRATEGIES["min_cut"](graph), segments=((1, 2),))

    made = cut_of(program.function, program.args, program.planned, strategy=in_segments)
    assert made.split.plan.segments == ((1, 2),)
    assert sizes.number(made.split.residual_bytes, made.sizes) == made.split.plan.bytes_saved
    assert made.split.plan.bytes_saved < cut(program).split.plan.bytes_saved
    assert_agree(both(made.split.halves, 1), program, program.others[1])


def test_a_constraint_settles_a_comparison():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w)) if x.shape[0] >= 2 else jnp.sum(x)

    args = of("3, 3"), of("b, 3")
    program = Symbolic(loss, args, {"b": 4}, (), ("b >= 2",))
    made = cut_of(loss, args, {"b": 4}, ("b >= 2",))
    assert_agree(both(made.split.halves, 1), program, {"b": 7})


# --------------------------------------------------------------------------------------------- sizes, text, number


EXPRESSIONS = st.recursive(
    st.sampled_from(["b", "t", "1", "3"]),
    lambda inner: st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from("+-"), inner),
        st.builds("{0}^2 - 3*{0}".format, st.sampled_from("bt")),
        st.builds("{} * mod({}, {})^2".format, st.sampled_from("bt"), inner, st.sampled_from("2357")),
        st.builds("{}({}, {})".format, st.sampled_from(["max", "min"]), inner, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["floordiv", "mod"]), inner, st.sampled_from("2357")),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=150)
@given(EXPRESSIONS, st.integers(1, 40), st.integers(1, 40))
def test_the_number_of_a_size_is_that_of_its_text(text, b, t):
    known = {"floordiv": operator.floordiv, "mod": operator.mod, "max": max, "min": min, "b": b, "t": t}
    (size,) = export.symbolic_shape(text)
    want = eval(text.replace("^", "**"), {}, known)
    assert sizes.number(size, {"b": b, "t": t, "unused": 1}) == want
    assert sizes.number(text, {"b": b, "t": t}) == want
    assert sizes.names(size) <= sizes.names(text) <= {"b", "t"}


def test_a_number_may_be_larger_than_any_machine_integer():
    (size,) = export.symbolic_shape("4*b*t")
    assert sizes.number(size, {"b": 2**40, "t": 2**41}) == 2**83


def test_one_name_is_one_size_wherever_it_stands():
    x, y = of("b, t"), of("t, b")
    assert x.shape == y.shape[::-1]
    assert export.is_symbolic_dim(x.shape[0] + y.shape[0])
    assert jax.eval_shape(jnp.matmul, x, y).shape == (x.shape[0], x.shape[0])


def test_sizes_may_be_taken_from_arrays():
    batch = {"x": np.zeros((3, 4), np.float32), "y": np.zeros(3, np.int32)}
    made = shapes("b, ...", like=batch)
    assert {k: (str(v.shape), v.dtype) for k, v in made.items()} == {
        "x": ("(b, 4)", np.float32),
        "y": ("(b,)", np.int32),
    }
    made = shapes({"x": "b, _", "y": None}, like=batch)
    assert [str(made[k].shape) for k in "xy"] == ["(b, 4)", "(3,)"]


def test_numbers_take_the_place_of_names():
    assert concrete(of("2*b, 128"), {"b": 8}) == jax.ShapeDtypeStruct((16, 128), F32)
    array = np.zeros(3)
    assert concrete(array, {"b": 8}) is array


def test_each_export_has_a_scope_of_its_own():
    bound = bind((of("b, 3"), np.zeros(3), of("b, t")), {}, Statics())
    one, other = (in_one_scope(bound, constraints) for constraints in ((), ("b >= 4",)))
    first, same, again = one.leaves[0].shape[0], one.leaves[2].shape[0], other.leaves[0].shape[0]
    assert first == same and str(first) == str(again) and first.scope is not again.scope
    assert again >= 4
    assert one.leaves[1] is bound.leaves[1]


def test_sizes_of_a_scope_of_the_users_stay_in_it():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 3"), F32)
    bound = bind((x,), {}, Statics())
    assert in_one_scope(bound) is bound
    assert cut_of(average, (x,), {"b": 2}).traced.bound.leaves[0].shape[0].scope is x.shape[0].scope


# ------------------------------------------------------------------------------------------------------- refusals


def raised(kind, run, *args, **kwargs):
    with pytest.raises(JointcutError) as caught:
        run(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


W, X = of("3, 3"), of("b, 3")


@pytest.mark.parametrize(
    ("known", "constraints", "text"),
    [
        (
            {"b": 4},
            (),
            "sizes lacks 't', which args[1]: float32[2*b,t - 1] has.\n"
            "Give a number for each name: the plan is made for these, the programs run with any.",
        ),
        (
            {"b": 4, "t": 2, "tt": 2},
            (),
            "sizes names 'tt', which stands in no argument's shape.\nKnown names: 'b', 't'. Did you mean 't'?",
        ),
        (
            {"b": 0, "t": 2},
            (),
            "sizes['b'] is 0, not a whole number from 1 up.\nJAX takes a symbolic size to be at least 1.",
        ),
        (
            {"b": 4, "t": 2.0},
            (),
            "sizes['t'] is 2.0, not a whole number from 1 up.\nJAX takes a symbolic size to be at least 1.",
        ),
        (
            {"b": True, "t": 2},
            (),
            "sizes['b'] is True, not a whole number from 1 up.\nJAX takes a symbolic size to be at least 1.",
        ),
        (
            {"b": 4, "t": 9},
            ("b >= 2", "mod(t, 8) == 0"),
            "sizes b=4, t=9 break the constraint 'mod(t, 8) == 0'.\nGive others, or leave the constraint out.",
        ),
        (
            {"b": 4, "t": 8},
            ("t <= c",),
            "constraints hold 't <= c', but 'c' stands in no argument's shape.\nKnown names: 'b', 't'.",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(known, constraints, text):
    bound = bind((W, of("2*b, t - 1"), X), {}, Statics())
    assert raised(CallError, checked_sizes, bound, known, constraints) == text
    assert raised(CallError, cut_of, average, (W, of("2*b, t - 1"), X), known, constraints) == text


def test_sizes_that_leave_an_argument_less_than_nothing_are_refused():
    text = "args[0]: float32[b - 3,2] has a size below zero where b=2.\nGive larger sizes."
    assert raised(CallError, cut_of, average, (of("b - 3, 2"),), {"b": 2}) == text


def test_sizes_without_a_name_among_the_arguments_are_refused():
    text = (
        "sizes names 'b', which stands in no argument's shape.\n"
        "Give arguments sizes that are names: aot.shapes('b, 128', dtype)."
    )
    assert raised(CallError, cut_of, average, (W,), {"b": 2}) == text


def test_sizes_of_several_scopes_are_refused():
    theirs = jax.ShapeDtypeStruct(export.symbolic_shape("b, 3"), F32)
    text = (
        "args[1]: float32[b,3] and args[2]: float32[b,3] have sizes of different scopes, in which one name may be two "
        "sizes.\nMake all with aot.shapes, or all in one jax.export.SymbolicScope."
    )
    assert raised(CallError, cut_of, average, (W, X, theirs), {"b": 2}) == text
    text = (
        "constraints are given for sizes of a scope of your own.\n"
        "Give them to that scope: jax.export.SymbolicScope(constraints)."
    )
    assert raised(CallError, cut_of, average, (theirs,), {"b": 2}, ("b >= 2",)) == text


def test_a_constraint_that_jax_does_not_take_is_refused():
    text = (
        "constraints cannot be taken: Constraint parsing error: must contain one of '==' or '>=' or '<='\n"
        "Write them as jax.export does: 'b >= 2', 't <= 4*b', 'mod(t, 8) == 0'."
    )
    assert raised(CallError, cut_of, average, (X,), {"b": 2}, ("b > 2",)) == text


@pytest.mark.parametrize("spec", ["b,,", "b, (3", "b, ...", 3, "b / 2"])
def test_a_text_of_no_shape_is_refused(spec):
    with pytest.raises(CallError) as caught:
        shapes(spec, F32)
    line = str(caught.value.__cause__).strip().splitlines()[0].strip()
    cure = "Write sizes as jax.export.symbolic_shape reads them: 'b, 128', '2*b, ...', 'floordiv(t, 8), _'."
    assert str(caught.value) == f"shapes({spec!r}) cannot be read: {line}\n{cure}"


def test_shapes_without_a_dtype_or_with_two_are_refused():
    cure = "\nGive the dtype of one array, or the arrays that it is like."
    assert raised(CallError, shapes, "b") == "shapes('b') is given neither dtype nor like." + cure
    text = raised(CallError, shapes, "b", F32, like=np.zeros(3))
    assert text == "shapes('b') is given both dtype and like." + cure


def line_of(function, offset):
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset} ({function.__name__})"


def by_size(w, x):
    return jnp.sum(x @ w) if x.shape[0] > 3 else jnp.sum(x)


def by_shape(w, x):
    return jnp.sum((x @ w).reshape(7, -1))


def by_count(w, x):
    return sum(jnp.sum(x[i] @ w) for i in range(x.shape[0]))


def by_root(w, x):
    return jnp.sum(x @ w) / x.shape[0] ** 0.5


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (
            by_shape,
            "Cannot divide evenly the sizes of shapes (b, 3) and (7, -1). The remainder mod(3*b, - 7) should be 0.",
        ),
        (by_size, "Symbolic dimension comparison 'b' > '3' is inconclusive."),
        (by_count, "'_DimExpr' object cannot be interpreted as an integer"),
        (by_root, "Symbolic dimension cannot be raised to non-integer powers: 'b' ** '0.5'"),
    ],
)
def test_a_function_that_asks_for_the_number_is_refused_by_its_line(loss, why):
    text = (
        f"{loss.__name__} asks of a symbolic size what only a number can answer at {line_of(loss, 1)}: {why}\n"
        "A function that branches on a size, or counts with it in Python, is exported with that size as a number; a "
        "comparison may be settled by a constraint, such as constraints=('b >= 2',)."
    )
    assert raised(TraceError, cut_of, loss, (W, X), {"b": 4}) == text


def test_a_symbolic_size_equals_no_number_as_in_jax():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w)) if x.shape[0] == 4 else jnp.sum(jnp.cos(x @ w))

    joint = cut_of(loss, (W, X), {"b": 4}).cut.traced.joint
    assert [eqn.primitive.name for eqn in jaxprs.opened(joint)[0].eqns][:2] == ["dot_general", "cos"]


def test_other_errors_of_the_function_stay_what_they_are():
    with pytest.raises(TypeError, match="contracting dimensions"):
        cut_of(lambda w, x: jnp.sum(w @ x), (W, X), {"b": 4})


def holds_a_reference(w, x):
    ref = jax.new_ref(jnp.zeros(x.shape))
    ref[...] = jnp.sin(x @ w)
    return jnp.sum(ref[...])


def test_a_reference_of_symbolic_size_is_refused():
    text = (
        f"{line_of(holds_a_reference, 1)} uses a jax.Ref of symbolic size, for which no plan is made.\n"
        "Give its sizes as numbers, or return what it holds instead."
    )
    assert raised(GraphError, cut_of, holds_a_reference, (W, X), {"b": 4}) == text


def test_a_loop_of_symbolic_length_is_not_divided():
    def in_segments(graph):
        return replace(mincut.STRATEGIES["min_cut"](graph), segments=((1, 2),))

    program = named["recurrence"]
    text = (
        "loop 1 has a symbolic length, t, and the plan divides it into segments of 2 steps.\n"
        "Give that size as a number, or plan without a budget: strategy='min_cut'."
    )
    given = program.function, program.args, program.planned
    assert raised(PlanError, cut_of, *given, strategy=in_segments) == text

    def in_two_parts(graph):
        plan = mincut.STRATEGIES["min_cut"](graph)
        (loop,) = segmentable(Problem.of(graph), plan).values()
        return Plan.of(graph, plan.values, offloaded=loop.values, kept_steps=((1, 2),))

    text = text.replace("divides it into segments of 2 steps", "treats its last 2 steps apart")
    assert raised(PlanError, cut_of, *given, strategy=in_two_parts) == text


def test_a_trace_with_symbolic_sizes_is_not_partitioned():
    traced = function(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)).trace(jnp.eye(3), shapes("b, 3", jnp.float32))
    with pytest.raises(TraceError) as caught:
        traced.partition()
    assert str(caught.value) == (
        "args[1] has sizes that are names, and a plan needs numbers.\n"
        "Trace with numbers, or export for all sizes: aot.function(...).export(path, ..., sizes={...})."
    )
