"""A cut says what stays independent along an axis of the arguments, and which ops mix its rows."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.partition.drawing.picture import graph_view
from jointcut.partition.errors import TraceError
from jointcut.partition.program.graph import TOP
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.text import parse, show
from jointcut.partition.tiles.apart import labelled
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND

WIDTH, ROWS = 8, 12
PROGRAMS = [p for p in CORPUS if (EVERY_PROGRAM or p.name in OF_EACH_KIND) and "grad" not in p.lacks]
W, X = jnp.eye(WIDTH) / 2, jnp.ones((ROWS, WIDTH))


def mean_loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def weighted_mean(w, x):
    h = jnp.tanh(x @ w)[:, 0]
    return jnp.sum(h * x[:, 1]) / jnp.sum(x[:, 1])


def batch_norm(w, x):
    h = x @ w
    h = (h - jnp.mean(h, axis=0)) / jnp.sqrt(jnp.mean(h**2, axis=0))
    return jnp.mean(jnp.tanh(h))


def shares_of_the_batch(w, x):
    return jnp.sum(jax.nn.softmax(x @ w, axis=0) ** 2)


def sums_so_far(w, x):
    h = jnp.cumsum(jnp.tanh(x @ w), axis=0)
    return jnp.mean(jnp.sort(h, axis=0))


def layers(w, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.sum(h)), x, jnp.stack([w, w, w]))[0])


def with_logits(w, batch):
    logits = batch["x"] @ w
    return jnp.mean(jnp.tanh(logits) ** 2 * batch["mask"].T), {"logits": logits}


def line(function, offset):
    return f"test_axes_of_cut.py:{function.__code__.co_firstlineno + offset}"


def cut(function, *args, **options):
    return aot.function(function, **options).trace(*args or (W, X)).partition()


SYMBOLIC = {"x": aot.shapes("b, 8", jnp.float32), "mask": aot.shapes("8, b", jnp.float32)}


# ---------------------------------------------------------------------------------------------- what it says


HALVES = (
    "values of the forward: N with rows (N% of the bytes), N from sums over rows, N mixed",
    "values of the backward: N with rows (N% of the bytes), N from sums over rows, N mixed",
)


def without_counts(axes):
    """The text of the rows; JAX's versions differ in how many values they make."""
    first, *rest = str(axes).splitlines()
    return [first, *(re.sub(r"\d+(?=% of| with rows| from sums| mixed$)", "N", text).strip() for text in rest)]


@pytest.mark.parametrize(
    ("function", "mixed", "results"),
    [
        (mean_loss, "no op", ["sum over rows: result, gradient of args[0]"]),
        (weighted_mean, "no op", ["computed from sums over rows: result", "sum over rows: gradient of args[0]"]),
        (batch_norm, f"sub at {line(batch_norm, 2)} (reads a total)", ["rows meet: result, gradient of args[0]"]),
        (layers, "no op", ["sum over rows: result, gradient of args[0]"]),
    ],
)
def test_it_says_which_op_mixes_rows_and_what_stays_apart(function, mixed, results):
    first = f"{function.__name__} along args[1], 12 rows: mixed by {mixed}"
    assert without_counts(cut(function).axes("args[1]")) == [first, *HALVES, *results]


@pytest.mark.parametrize("function", [mean_loss, weighted_mean, batch_norm, layers])
def test_it_counts_the_values_of_each_half_and_their_bytes(function):
    axes = cut(function).axes("args[1]")
    late = {v for op in axes.graph.ops if op.origin is Side.BACKWARD for v in op.outputs}
    counted = [text for text in str(axes).splitlines() if "values of the" in text]
    for side, text in zip((False, True), counted, strict=True):
        own = [v for v in axes.graph.values if (v.id in late) == side and "rows" in v.label]
        apart, met = ([v for v in own if words in v.label] for words in ("rows along axis 0", "rows meet"))
        share = sum(v.saved_bytes for v in apart) / sum(v.saved_bytes for v in own)
        sums = len(own) - len(apart) - len(met)
        figures = f"{len(apart)} with rows ({share:.0%} of the bytes), {sums} from sums over rows, {len(met)} mixed"
        assert text.endswith(f": {figures}")
        assert {v.id for v in apart} == {v.id for v in own} & axes.values.keys()


def test_the_first_op_that_mixes_comes_first_and_a_few_others_follow():
    total = " (reads a total)"
    first, second, *_ = str(cut(shares_of_the_batch).axes("args[1]")).splitlines()
    where = line(shares_of_the_batch, 1)
    assert first == f"shares_of_the_batch along args[1], 12 rows: mixed first by reduce_max at {where}"
    assert second.startswith(f"  then by eq at {where}{total}")
    ops = [(op.op, op.side.value, op.reads_total) for op in cut(sums_so_far).axes("args[1]").mixing]
    assert ops == [("cumsum", "forward", False)]


def test_many_ops_that_mix_are_a_count_and_all_lines_are_at_most_100_columns():
    def mixes(w, x):
        h = x @ w
        ends = jnp.max(h, axis=0), jnp.min(h, axis=0), jnp.prod(h, axis=0), h @ h.T, jnp.sort(h, axis=0)
        return sum(map(jnp.mean, (*ends, jnp.cumsum(h, axis=0), h[::-1], h[1:])))

    lines = str(cut(mixes).axes("args[1]")).splitlines()
    assert max(map(len, lines)) <= 100
    others = "".join(lines[1 : lines.index(next(text for text in lines if "values of the forward" in text))])
    assert others.count(" at ") == 6
    assert others.endswith(" and 2 more")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_rows_of_all_arguments_of_a_program_are_as_long_and_their_graph_is_read_back(program):
    with program.precision():
        made = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux)
        traced = made.trace(*program.args, **program.kwargs)
        inputs = zip(traced.program.roles.input_paths, traced.graph.inputs, strict=True)
        shapes = {path: traced.graph.values[v].shape for path, (v, role) in inputs if role is Role.PRIMAL}
        for path in (path for path, shape in shapes.items() if shape and shape[0] > 1):
            axes = traced.axes(path)
            assert axes.count == shapes[path][0]
            assert {axes.graph.values[v].shape[axis] for v, axis in axes.values.items()} == {axes.count}
            assert all(len(text) <= 100 for text in str(axes).splitlines())
            assert parse(axes.text) == axes.graph


# ---------------------------------------------------------------------------------------------- values


def test_values_in_the_steps_of_a_loop_have_their_rows_along_an_axis_of_one_step():
    axes = cut(layers).axes("args[1]")
    inside = [v for v in axes.graph.values if v.loop != TOP and v.id in axes.values]
    assert inside and not axes.mixing
    assert {(v.shape, axes.values[v.id]) for v in inside} == {((ROWS, WIDTH), 0)}
    assert dict(axes.results) == {"result": "sum over rows", "gradient of args[0]": "sum over rows"}


def test_a_loop_whose_steps_are_the_rows_is_followed_from_outside():
    axes = cut(lambda w, x: jnp.sum(jax.lax.map(lambda row: jnp.tanh(row @ w), x))).axes("args[1]")
    assert axes.results[0] == ("result", "sum over rows")
    assert [(op.op, op.side.value) for op in axes.mixing] == [("scan", "backward")]
    assert all(axes.graph.values[v].loop == TOP for v in axes.values)


def test_outputs_and_gradients_with_rows_are_named_by_their_paths():
    batch = {"x": X, "mask": X.T}
    traced = aot.function(with_logits, argnums=(0, 1), has_aux=True).trace(W, batch)
    assert dict(traced.axes("args[1]['x']").results) == {
        "result[0]": "sum over rows",
        "result[1]['logits']": "rows along axis 0",
        "gradient of args[0]": "sum over rows",
        "gradient of args[1]['mask']": "rows along axis 1",
        "gradient of args[1]['x']": "rows along axis 0",
    }


def test_the_cotangent_of_an_output_has_rows_where_the_output_has_some():
    traced = aot.function(lambda w, x: (x @ w).T, argnums=(0, 1)).trace(W, X)
    axes = traced.axes("args[1]")
    cotangent = traced.graph.role_inputs(Role.COTANGENT)[0]
    assert axes.values[cotangent] == 1
    assert [place for _, place in axes.results] == ["rows along axis 1", "sum over rows", "rows along axis 0"]


def test_a_gradient_that_reads_mixed_rows_is_mixed_and_one_that_reads_no_rows_is_without():
    traced = aot.function(lambda v, x: (jnp.cumsum(x, axis=0), 3 * v), argnums=(0, 1)).trace(X, X + 1)
    assert [place for _, place in traced.axes("args[1]").results] == ["rows meet", "no rows", "no rows", "rows meet"]


def test_parameters_that_an_update_replaces_are_sums_over_rows_too():
    def descend(gradient, state, w):
        return w - 0.1 * gradient, state

    traced = aot.function(mean_loss).trace_update(W, (), X, update=descend)
    assert dict(traced.axes("args[2]").results) == {"result": "sum over rows", "new args[0]": "sum over rows"}


def test_a_cut_with_rows_in_blocks_says_the_same_as_the_cut_without():
    for function in (mean_loss, weighted_mean):
        whole = aot.function(function).trace(W, X).partition().axes("args[1]")
        assert cut(function, tiles={"args[1]": 4}).axes("args[1]") == whole


# ---------------------------------------------------------------------------------------------- text and page


def test_the_text_of_the_graph_tells_the_rows_of_each_value_where_it_is_asked_for():
    made = cut(mean_loss)
    axes = made.axes("args[1]")
    assert 'primal %1:float32[12,8] "args[1], rows along axis 0"' in axes.text.splitlines()
    assert '%3:float32[12,8] "rows along axis 0" = dot_general %1 %0' in axes.text.splitlines()
    assert "rows" not in show(made.split.graph)


def test_the_page_of_the_graph_tells_the_rows_of_each_value_where_it_is_asked_for():
    made = cut(mean_loss)
    axes = made.axes("args[1]")
    plain, told = (graph_view(graph, made.plan)["values"] for graph in (made.split.graph, axes.graph))
    own = [axes.graph.values[v].label for v in plain["id"]]
    assert "float32[12,8], rows along axis 0" in told["type"]
    assert told["type"] == [", ".join(filter(None, pair)) for pair in zip(plain["type"], own, strict=True)]
    assert {**told, "type": plain["type"]} == plain
    bundle = axes._repr_mimebundle_()
    assert bundle["text/plain"] == str(axes)
    assert "float32[12,8], rows along axis 0" in bundle["text/html"]


def test_nothing_is_added_to_a_graph_without_rows():
    graph = cut(mean_loss).split.graph
    assert labelled(graph, {}) == graph


# ---------------------------------------------------------------------------------------------- names of sizes


def test_the_name_of_a_size_means_all_arguments_that_have_it_wherever():
    traced = aot.function(with_logits, argnums=(0, 1), has_aux=True).trace(W, SYMBOLIC)
    assert without_counts(traced.axes("b")) == [
        "with_logits along b: mixed by no op",
        "values of the forward: N with rows, N from sums over rows, N mixed",
        "values of the backward: N with rows, N from sums over rows, N mixed",
        "sum over rows: result[0], gradient of args[0]",
        "rows along axis 0: result[1]['logits'], gradient of args[1]['x']",
        "rows along axis 1: gradient of args[1]['mask']",
    ]


def test_the_cut_of_a_largest_size_knows_the_name():
    found = aot.largest(with_logits, "b", "1MB", W, SYMBOLIC, argnums=(0, 1), has_aux=True)
    axes = found.cut.axes("b")
    first, *_ = str(axes).splitlines()
    assert first == f"with_logits along b, {found.size} rows: mixed by no op"
    symbolic = aot.function(with_logits, argnums=(0, 1), has_aux=True).trace(W, SYMBOLIC).axes("b")
    assert axes.results == symbolic.results
    assert found.cut.storing({}).axes("b") == axes


def test_the_cut_of_a_largest_size_of_a_method_knows_the_name():
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        @aot.function
        def loss(self, x):
            return mean_loss(self.w, x)

    cut = aot.largest(Model(W).loss, "b", "1MB", aot.shapes("b, 8", jnp.float32)).cut
    assert replace(cut.axes("args[1]"), axis="b") == cut.axes("b")


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (
            "c",
            "axes('c') names no argument with rows.\n"
            "Known names: 'args[0]', \"args[1]['mask']\", \"args[1]['x']\", 'b'.",
        ),
        (
            "args[2]",
            "axes('args[2]') names no argument with rows.\n"
            "Known names: 'args[0]', \"args[1]['mask']\", \"args[1]['x']\", 'b'. Did you mean 'args[0]'?",
        ),
        (
            "args[1]",
            "axes('args[1]') names arrays of 8 rows (args[1]['mask']) and of b rows (args[1]['x']).\n"
            "Give the path of arrays whose first axes are equally long.",
        ),
    ],
)
def test_an_axis_that_the_arguments_do_not_have_is_refused(axis, text):
    with pytest.raises(TraceError) as error:
        aot.function(with_logits, has_aux=True).trace(W, SYMBOLIC).axes(axis)
    assert str(error.value) == text


def test_an_axis_of_one_is_refused():
    with pytest.raises(TraceError) as error:
        cut(mean_loss, W, X[:1]).axes("args[1]")
    assert str(error.value) == "axes('args[1]') names arrays of 1 row.\nGive more rows."


def test_a_size_that_is_computed_from_the_name_is_refused():
    pairs = aot.shapes("2*b, 8", jnp.float32)
    traced = aot.function(lambda w, x, y: mean_loss(w, x) + mean_loss(w, y)).trace(W, SYMBOLIC["x"], pairs)
    with pytest.raises(TraceError) as error:
        traced.axes("b")
    assert str(error.value) == (
        "axes('b') names rows, of which args[2] has 2*b: nobody knows which belong together.\n"
        "Give the path of an argument."
    )
