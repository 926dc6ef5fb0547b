"""Rows are followed through a program: each rule is held against what JAX computes of other rows, and of fewer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.programs import load
from jointcut import aot
from jointcut.partition.program import axes
from jointcut.partition.program.axes import MET, TOTAL, Joined
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.roles import Role
from jointcut.partition.program.ties import ADD, RULES, ties


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape)


def whole(*shape, below=3):
    return jax.random.randint(jax.random.key(sum(shape)), shape, 0, below)


def definite(*shape):
    x = normal(*shape)
    return x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(shape[-1])


def gathered(x, i, offset, collapsed, sizes, batch=()):
    numbers = lax.GatherDimensionNumbers(offset, collapsed, collapsed, batch, batch)
    return lax.gather(x, i, numbers, tuple(n or x.shape[a] for a, n in enumerate(sizes)))


def scattered(add, x, i, u, window, inserted, batch=()):
    return add(x, i, u, lax.ScatterDimensionNumbers(window, inserted, inserted, batch, batch))


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def laid_anew(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.P()))


CONV = ("NHC", "HIO", "NHC")
X = normal(4, 5, 3)


def by_groups(x, w):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=CONV, feature_group_count=3)


#: Functions of one equation that is tied along some axes, whatever the length of these.
CASES = {
    "elementwise": (lambda x, y: lax.atan2_p.bind(x, y), X, X + 1),
    "elementwise with a number": (lambda x: lax.clamp_p.bind(0.0, x, 1.0), X),
    "laid anew over a mesh": (laid_anew, X),
    "elementwise with axes of length 1": (lambda x, y: lax.mul_p.bind(x, y), X, X[:, :1]),
    "a choice": (lambda x, y: lax.select_n_p.bind(x > 0, x, y), X, X + 1),
    "a series": (lambda x: lax.lgamma_p.bind(x), X + 9),
    "sum": (lambda x: lax.reduce_sum(x, (0, 2)), X),
    "largest": (lambda x: lax.reduce_max(x, (1,)), X),
    "smallest": (lambda x: lax.reduce_min(x, (1,)), X),
    "product": (lambda x: lax.reduce_prod(x, (1,)), X),
    "all": (lambda x: lax.reduce_and(x, (1,)), whole(4, 5, below=2) > 0),
    "any": (lambda x: lax.reduce_or(x, (0,)), whole(4, 5, below=2) > 0),
    "parity": (lambda x: lax.reduce_xor(x, (0,)), whole(4, 5)),
    "the place of the largest": (lambda x: lax.argmax(x, 1, jnp.int32), X),
    "sums so far": (lambda x: lax.cumsum(x, 1), X),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (x.shape[0], 2, x.shape[1], 7), (0, 2, 3)), normal(4, 3, 1)),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), X),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), normal(4, 1, 3)),
    "reshape": (lambda x: lax.reshape(x, (x.shape[0], 15, x.shape[3])), normal(4, 5, 3, 2)),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (x.shape[0], 3, x.shape[2])), X),
    "slice from a place": (
        lambda x, i: lax.dynamic_slice_p.bind(x, 0, i, 0, slice_sizes=(len(x), 2, x.shape[2])),
        X,
        1,
    ),
    "update": (lambda x, u: lax.dynamic_update_slice_p.bind(x, u, 0, 1, 0), X, normal(4, 2, 3)),
    "pad": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 1), (0, 0, 0))), X),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), X, normal(4, 2, 3)),
    "split": (lambda x: lax.split(x, (2, 3), 1), X),
    "reverse": (lambda x: lax.rev(x, (1,)), X),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1), X, X + 1),
    "top": (lambda x: lax.top_k(x, 2), X),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (4, 3), 1),),
    "gather of rows": (lambda x, i: gathered(x, i, (2,), (0,), (1, 0)), normal(5, 3), whole(4, 2, 1)),
    "gather in batches": (lambda x, i: gathered(x, i, (2,), (1,), (1, 1, 0), (0,)), X, whole(4, 2, 1)),
    "scatter": (
        lambda x, i, u: scattered(lax.scatter, x, i, u, (1, 2), (1,), ()),
        X,
        jnp.array([[1]]),
        normal(1, 4, 3),
    ),
    "scatter in batches": (
        lambda x, i, u: scattered(lax.scatter_add, x, i, u, (2,), (1,), (0,)),
        X,
        whole(4, 2, 1),
        normal(4, 2, 3),
    ),
    "product of matrices": (lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), X, normal(4, 3, 2)),
    "product of transposes": (lambda x, y: lax.dot_general(x, y, (((0, 2), (2, 0)), ((), ()))), X, normal(3, 2, 4)),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=CONV),
        normal(4, 6, 3),
        normal(3, 3, 2),
    ),
    "convolution of groups": (
        lambda x, w: by_groups(x, w),
        normal(4, 6, 3),
        normal(3, 1, 6),
    ),
    "convolution back": (
        lambda g, x, w: jax.vjp(lambda w: by_groups(x, w), w)[1](g)[0],
        normal(4, 6, 6),
        normal(4, 6, 3),
        normal(3, 1, 6),
    ),
    "pooling": (pooled, normal(4, 6, 3)),
    "pooling back": (lambda g, x: jax.vjp(pooled, x)[1](g)[0], normal(4, 3, 3), normal(4, 6, 3)),
    "fourier": (lambda x: lax.fft_p.bind(x, fft_type=lax.FftType.RFFT, fft_lengths=(6,)), normal(4, 2, 6)),
    "triangular": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), definite(4, 3, 3), normal(4, 3, 2)),
    "triangular on the right": (lambda a, b: lax.linalg.triangular_solve(a, b), definite(4, 3, 3), normal(4, 2, 3)),
    "cholesky": (lambda a: lax.linalg.cholesky_p.bind(a), definite(4, 3, 3)),
}
JOINS = {"add": jnp.add, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}
JOINS |= {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.bitwise_xor}


def is_literal(v):
    return isinstance(v, jaxprs.Literal)


def tied(name):
    """Each tie of a case, with its function, the arguments, and the axis of each argument."""
    function, *arguments = CASES[name]
    arguments = [jnp.asarray(x) for x in arguments]
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    eqn, makers = jaxpr.eqns[-1], {v: e for e in jaxpr.eqns for v in e.outvars}

    def roots(v):
        return {v} if v in jaxpr.invars else {r for u in makers[v].invars if not is_literal(u) for r in roots(u)}

    for tie in ties(eqn):
        pairs = [(v, axis) for v, axis in zip(eqn.invars, tie.operands, strict=True) if not is_literal(v)]
        of = {root: axis for v, axis in pairs if axis is not None for root in roots(v)}
        yield eqn, tie, function, arguments, [of.get(v) for v in jaxpr.invars]


def part(x, axis, rows):
    return x if axis is None else jnp.take(x, np.array(rows), axis)


def near(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_tie_means_that_a_row_needs_that_row_alone(name):
    found = list(tied(name))
    assert found, "no axis is tied"
    for _, tie, function, arguments, where in found:
        results = results_of(function, arguments)
        lengths = {x.shape[axis] for x, axis in zip(arguments, where, strict=True) if axis is not None}
        if not lengths:
            alike = zip(results, tie.results, strict=True)
            assert all(jnp.all(y == jnp.take(y, jnp.array([0]), axis)) for y, axis in alike)
            continue
        (n,) = lengths
        parts = [rows for rows in ([*range(n // 2)], [*range(n // 2, n)][::-1]) if rows]
        made = [results_of(function, map(part, arguments, where, [rows] * len(where))) for rows in parts]
        if tie.starts:
            empty = [jnp.zeros_like(arguments[0]), *arguments[1:]]
            made[1:] = [results_of(function, map(part, empty, where, [rows] * len(where))) for rows in parts[1:]]
        for k, (y, axis) in enumerate(zip(results, tie.results, strict=True)):
            if axis is None:
                near(functools.reduce(JOINS[tie.joins], [m[k] for m in made]), y)
            else:
                near(
                    jnp.concatenate([m[k] for m in made], axis), part(y, axis, [row for rows in parts for row in rows])
                )


def results_of(function, arguments):
    results = function(*arguments)
    return list(results) if isinstance(results, tuple | list) else [results]


def test_every_rule_has_a_case():
    used = {RULES[eqn.primitive.name] for name in CASES for eqn, *_ in tied(name)}
    assert used == set(RULES.values())


# ------------------------------------------------------------------------------------------------- whole programs


def layers(x, w):
    y = jnp.tanh(x @ w)
    return y / jnp.sum(y, axis=1, keepdims=True)


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -1, 1),))

ROWS, W = normal(6, 4), normal(4, 4)
SEQUENCE = normal(3, 6, 4)
APART = {
    "layers": lambda x: layers(x, W),
    "a call": lambda x: jax.jit(layers)(x, W),
    "a rule of the user's": lambda x: clipped(x) + jax.nn.relu(x),
    "a checkpoint": lambda x: jax.checkpoint(layers)(x, W),
    "a loop over steps": lambda x: lax.scan(lambda c, s: (jnp.sin(c + x), c * s), jnp.zeros((6, 4)), jnp.ones(3))[0],
    "its stacks": lambda x: lax.scan(lambda c, s: (jnp.sin(c + x), c * s), x, jnp.ones(3))[1].transpose(1, 0, 2),
    "a loop over the rows": lambda x: lax.map(lambda row: jnp.sort(row @ W), x),
    "a branch": lambda x: lax.cond(W[0, 0] > 0, lambda x: layers(x, W), lambda x: jnp.zeros((6, 4)), x),
    "a loop of known trips": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, layers(c[1], W)), (0, x)
    )[1],
    "a barrier": lambda x: lax.optimization_barrier((x, W))[0] + 1.0,
    "rows of a table": lambda x: W[jnp.argmax(x, axis=1)],
    "a batch of derivatives": lambda x: jax.vmap(jax.grad(lambda r: jnp.sum(layers(r[None], W)[0] ** 3)))(x),
}
MEETING = {
    "the largest of a column": (lambda x: x - jnp.max(x, axis=0), "reduce_max"),
    "the next row": (lambda x: x + jnp.roll(x, 1, 0), "slice"),
    "in other order": (lambda x: x[::-1], "rev"),
    "rows in order": (lambda x: jnp.sort(x, axis=0), "sort"),
    "a matrix of the rows": (lambda x: x @ x.T, "dot_general"),
    "a branch on a row": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "slice"),
    "two rows in one": (lambda x: x.reshape(3, 8), "reshape"),
    "what nobody knows": (lambda x: jax.pure_callback(lambda x: x, x, x), "pure_callback"),
    "rows carried on": (lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), x)[1], "scan"),
    "in a loop": (lambda x: lax.scan(lambda c, _: (jnp.cumsum(c, 0), None), x, None, 2)[0], "cumsum"),
}
JOINED = {
    "a sum": (lambda x: jnp.sum(x, axis=0), ADD),
    "a mean of losses": (lambda x: jnp.mean(layers(x, W) ** 2), ADD),
    "the gradient of a matrix": (lambda x: jax.grad(lambda w: jnp.mean(layers(x, w) ** 2))(W), ADD),
    "the largest": (lambda x: jnp.max(x, axis=0), "max"),
}
STARTED = {
    "the gradient of a table": lambda x: jax.grad(lambda w: jnp.sum(w[jnp.argmax(x, axis=1)] ** 2))(W),
    "a sum and more": lambda x: jnp.sum(x, axis=0) / 3 + W[0],
    "a sum of steps": lambda x: lax.scan(lambda c, w: (c + jnp.sum(x @ w, axis=0), w), W[0], jnp.stack([W, W]))[0],
    "a sum on one branch": lambda x: lax.cond(W[0, 0] > 0, lambda x: jnp.sum(x, axis=0), lambda x: W[0], x),
}


def places(function, x=ROWS, place=0):
    closed = jax.make_jaxpr(function)(x)
    rows = axes.followed(closed, [place])
    return rows, [rows.place(v) for v in closed.jaxpr.outvars]


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart(name):
    function = APART[name]
    rows, (place,) = places(function)
    assert rows.is_apart and place == 0
    want = function(ROWS)
    for i in (0, 5):
        others = ROWS.at[jnp.array([j for j in range(6) if j != i])].add(1.0)
        near(function(others)[i], want[i])


@pytest.mark.parametrize("name", MEETING)
def test_rows_that_meet_and_where(name):
    function, end = MEETING[name]
    rows, (place,) = places(function)
    assert place == MET and not rows.is_apart
    assert end in [eqn.primitive.name for eqn, _ in rows.ends]


@pytest.mark.parametrize("name", JOINED)
def test_results_that_are_joined_of_those_of_parts(name):
    function, by = JOINED[name]
    rows, (place,) = places(function)
    assert place == Joined(by) and not rows.is_apart


@pytest.mark.parametrize("name", STARTED)
def test_sums_to_which_something_is_added_once(name):
    assert places(STARTED[name])[1] == [Joined(ADD, starts=True)]


def test_a_sum_is_lost_in_what_is_not_linear_and_rows_meet_where_they_read_it():
    rows, (place,) = places(lambda x: jnp.tanh(jnp.sum(x, axis=0)))
    assert place == TOTAL and not rows.ends and not rows.is_apart
    assert places(lambda x: jnp.sum(x, axis=0) * jnp.sum(x, axis=0))[1] == [TOTAL]
    assert places(lambda x: lax.scan(lambda c, w: (jnp.tanh(c + w), c), jnp.sum(x, axis=0), W))[1] == [TOTAL, TOTAL]
    rows, (place,) = places(lambda x: x / jnp.sqrt(jnp.sum(x**2, axis=0)))
    assert place == MET and [eqn.primitive.name for eqn, _ in rows.ends] == ["div"]


def test_branches_that_disagree_about_the_axis_of_the_rows_mix_them():
    rows, (place,) = places(lambda x: lax.cond(W[0, 0] > 0, lambda x: x[:4], lambda x: x[:4].T, x), jnp.ones((4, 4)))
    assert place == MET and [eqn.primitive.name for eqn, _ in rows.ends] == ["cond"]


def test_the_largest_row_mixes_rows_even_where_no_row_reads_it():
    rows, (place,) = places(lambda x: jnp.max(x, axis=0))
    assert place == Joined("max") and [eqn.primitive.name for eqn, _ in rows.ends] == ["reduce_max"]
    assert [eqn.primitive.name for eqn, _ in places(lambda x: jnp.sin(jnp.max(x, axis=0)))[0].ends] == ["reduce_max"]


def test_a_value_is_followed_along_another_axis():
    assert places(lambda x: jnp.sum(x @ W, axis=2), SEQUENCE, 1)[1] == [1]
    assert places(lambda x: jnp.swapaxes(x, 0, 1), SEQUENCE, 1)[1] == [0]
    assert places(lambda x: lax.scan(lambda c, x: (c + x, c), jnp.zeros((6, 4)), x), SEQUENCE, 1)[1] == [0, 1]


def test_what_reads_no_rows_has_no_place():
    assert places(lambda x: (W @ W, x))[1] == [None, 0]


def of_joint(traced, is_row):
    """The rows in a joint program, given which of its inputs have them, and the places of its gradients."""
    jaxpr, _ = jaxprs.opened(traced.joint)
    rows = axes.followed(traced.joint, [0 if is_row(v) else None for v, _ in traced.graph.inputs])
    ends = zip(jaxpr.outvars, traced.graph.outputs, strict=True)
    return rows, [rows.place(v) for v, (_, role) in ends if role is Role.GRADIENT]


def test_rows_are_followed_through_a_joint_program_and_into_its_loops():
    def loss(w, x):
        y, stack = lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sin(c)), x, w)
        return jnp.sum(y**2) + jnp.sum(stack)

    traced = aot.function(loss).trace(jnp.stack([W, W]), ROWS)
    rows, gradients = of_joint(traced, lambda v: traced.graph.values[v].shape == ROWS.shape)
    in_loops = {place for several in rows.inside.values() for loop in several for place in loop.places.values()}
    assert 0 in in_loops and MET not in in_loops
    assert gradients and set(gradients) == {Joined(ADD)}
    assert of_joint(traced, lambda _: False)[1] == [None] * len(gradients)


@pytest.mark.parametrize("name", ["mlp", "gpt-scan", "unet", "lstm", "mamba"])
def test_all_gradients_of_a_program_are_sums_over_its_batch(name):
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        program = load(name, "tiny")
        traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    values = traced.graph.values
    _, gradients = of_joint(traced, lambda v: values[v].shape and not values[v].label.startswith("args[0]"))
    assert gradients and {place.by for place in gradients if isinstance(place, Joined)} == {ADD}
