"""A level as XLA:CPU runs it: small programs, one for each rule, take what XLA says that they take."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.lower.memory import Names
from jointcut.partition.lower.replay import Replayer
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.xla.arranged import Arranged, Arranger
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.program import jaxprs
from larger import larger

SIDE = 128
N = 4 * SIDE * SIDE  # bytes of one matrix
X = jax.ShapeDtypeStruct((SIDE, SIDE), "float32")
BATCH = jax.ShapeDtypeStruct((4, 32, 8, 16), "float32")
IMAGE = jax.ShapeDtypeStruct((8, 16, 16, 32), "float32")
SMALL = 2_000  # bytes of pointers, tuples and single numbers, which are not counted

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:CPU alone is followed")


def arranged(function, *types):
    """A function's level as XLA runs it."""
    jaxpr = jaxprs.opened(jax.make_jaxpr(function)(*types))[0]
    names = Names()
    names.give([*jaxpr.constvars, *jaxpr.invars])
    names.run(jaxpr.eqns)
    names.level.ends.update(b for v in jaxpr.outvars if (b := names.read(v)) is not None)
    return Arranger(()).arranged(names.level)


def bytes_of(function, *types):
    """The bytes of temporaries by the model, and by XLA."""
    made = jax.jit(function).lower(*types).compile().memory_analysis()
    return arranged(function, *types).peak[0], made.temp_size_in_bytes


def normalized(x):
    """A layer norm without scale."""
    centred = x - jnp.mean(x, 1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, 1, keepdims=True) + 1e-5)


def attended(q, k, v):
    """Attention of many heads, as one writes it with axes of batch, place, head and feature."""
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def convolved(kernel, x, groups=1):
    """A convolution of images whose features come last."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def looped(x):
    """A scan that stacks two arrays in each step."""

    def step(h, _):
        h = jnp.tanh(h @ x)
        return h, (h, h * 2)

    last, (first, second) = lax.scan(step, x, None, length=8)
    return last + first[3] @ x + second[3] @ x


def interleaved(x):
    """An array whose rows are those of two others in turns, as an associative scan puts them together."""
    even, odd = jnp.sin(x @ x), jnp.cos(x @ x + 1)
    both = lax.pad(even, 0.0, ((0, 1, 1), (0, 0, 0))) + lax.pad(odd, 0.0, ((1, 0, 1), (0, 0, 0)))
    return jnp.sum(jnp.sort(both[:-1] * both[1:]))


def padded(x):
    """Two loops that compute one op each of a padding."""
    longer = lax.pad(jnp.sin(x @ x), 0.0, ((0, SIDE, 0), (0, 0, 0)))
    return jnp.sum(jnp.tan(longer) @ x[:, :8]) + jnp.sum(jnp.tanh(longer) @ x[:, 8:16])


def next_token(w, x, tokens):
    """The loss of a language model, whose gradient is padded, and read by two products that flatten it."""
    picked = jnp.take_along_axis(jax.nn.log_softmax((x @ w)[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def flattened(w, x):
    """A sum of two arrays that two products read, as in the backward of a last layer; one wants it transposed."""
    both = jnp.sort(x @ w) + jnp.sort(x @ (2 * w), 1)
    return both @ w.mT, jnp.einsum("bts,btd->sd", both, x)


RULES = {
    "a product reads an array": (lambda x: (jnp.sin(x) + 1) @ x, X),
    "an elementwise chain is one loop": (lambda x: jnp.sum((jnp.exp(x @ x) * 2 + 1).T @ x), X),
    "a reduction takes a product and what comes before it": (lambda x: jnp.sum((x @ x) * x, 1), X),
    "a reduction's operand with another reader is written": (lambda x: normalized(x @ x) @ x, X),
    "a number that another op spreads too": (lambda x: jnp.mean(jax.nn.gelu(x @ x), 1) + (x @ x * 0.5)[0], X),
    "heads are brought in front": (attended, BATCH, BATCH, BATCH),
    "the gradient of a product over two axes": (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))),
        jax.ShapeDtypeStruct((16, 64), "float32"),
        BATCH,
    ),
    "the gradient of a convolution's kernel": (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(convolved(w, x)))),
        jax.ShapeDtypeStruct((3, 3, 32, 32), "float32"),
        IMAGE,
    ),
    "the gradient of a grouped convolution's kernel": (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(convolved(w, x, 32)))),
        jax.ShapeDtypeStruct((3, 3, 1, 32), "float32"),
        IMAGE,
    ),
    "a loop's stacks are there from the start": (looped, X),
    "arrays are put together along the last axis": (
        lambda x: jnp.concatenate([x + 1, x * 2], 1) @ jnp.ones((256, 8)),
        X,
    ),
    "a scatter writes over its operand": (lambda x: jnp.sin((x @ x).at[jnp.arange(4)].add(1.0)) @ x, X),
    "a result's buffer holds others before": (lambda x: (jnp.tanh(jnp.tanh(x @ x) @ x) @ x).T @ x, X),
    "a padding with two readers is written": (interleaved, X),
    "a padding is computed again for each op that comes first in its loop": (padded, X),
    "a padding that a product flattens is computed again for a transposition": (
        jax.grad(next_token, (0, 1)),
        jax.ShapeDtypeStruct((64, 512), "float32"),
        jax.ShapeDtypeStruct((4, 32, 64), "float32"),
        jax.ShapeDtypeStruct((4, 32), "int32"),
    ),
    "a padding that only cuts off is a slice": (
        lambda x: (lambda y: (y * y[::-1]) @ x)(lax.pad(x @ x, 0.0, ((-1, -1, 0), (0, 0, 0)))),
        X,
    ),
    "a product that sums nothing up is a multiplication": (
        lambda x: (lambda y: (y * y[..., ::-1]) @ x)(jnp.einsum("ab,ac->abc", x @ x, jnp.sort(x))),
        X,
    ),
    "a sum that a product flattens is computed again for a transposition": (
        flattened,
        jax.ShapeDtypeStruct((64, 512), "float32"),
        jax.ShapeDtypeStruct((4, 64, 64), "float32"),
    ),
    "the bits of a key": (lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0) @ x, X),
}


#: Rules after which a carried value is copied once too often.
ABOUT = {"a loop's stacks are there from the start": 1.06}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds_to_the_byte_but_for_pointers_and_numbers(rule):
    predicted, actual = bytes_of(*RULES[rule])
    assert actual - SMALL <= predicted <= ABOUT.get(rule, 1.0) * actual + SMALL, predicted / max(actual, 1)


OUTER, I32 = (((), ()), ((), ())), np.ones(1, np.int32)
WITH_NUMBERS = {
    "product, left": lambda n, x: lax.dot_general(n, x, OUTER),
    "product, right": lambda n, x: lax.dot_general(x, n, OUTER),
    "product, both": lambda n, x: x * lax.dot_general(n, n, OUTER),
    "padding": lambda n, x: lax.pad(x, n, ((1, 1, 0), (0, 0, 0))),
    "sum": lambda n, x: n + x,
    "choice": lambda n, x: lax.select_n(x > n, x, x * n),
    "choice of numbers": lambda n, x: x * lax.select_n(x[0, 0] > 0, n, n),
    "clip": lambda n, x: lax.clamp(n, x, n),
    "spread": lambda n, x: lax.broadcast_in_dim(n, x.shape, ()) @ x,
    "places of a slice": lambda n, x: lax.dynamic_slice(x, (n.astype(int), 0), (1, SIDE)),
    "places of an update": lambda n, x: lax.dynamic_update_slice(x, x[:4], (n.astype(int), 0)),
    "update of a number": lambda n, x: x * lax.dynamic_update_slice(n, x[0, 0], ()),
    "update by a number": lambda n, x: x * lax.dynamic_update_slice(x[0, 0], n, ()),
    "scatter into a number": lambda n, x: (
        x * lax.scatter_add(n, I32[:0], x[0, 0], lax.ScatterDimensionNumbers((), (), ()))
    ),
    "scatter of a number": lambda n, x: lax.scatter_add(x[0], I32, n, lax.ScatterDimensionNumbers((), (0,), (0,))),
    "reduction": lambda n, x: lax.reduce(x, n, lambda a, b: a + b * 2, (0,)),
    "loop": lambda n, x: lax.scan(lambda h, row: (h * jnp.dot(n, row[0]), h), n, x),
    "branch": lambda n, x: lax.cond(x[0, 0] > n, jnp.dot, lambda n, x: n - x, n, x),
    "call": lambda n, x: jax.jit(jnp.dot)(n, x),
    "call that runs again": lambda n, x: jax.checkpoint(jnp.dot)(n, x),
    "barrier": lambda n, x: lax.optimization_barrier((n, x)),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_an_op_that_reads_a_number_takes_what_it_does_where_an_argument_gives_the_number(name):
    op = WITH_NUMBERS[name]
    given = arranged(op, jax.ShapeDtypeStruct((), "float32"), X).peak[0]
    assert arranged(lambda x: op(np.float32(2), x), X).peak[0] == pytest.approx(given, abs=SMALL)


def test_each_instruction_runs_once_and_after_what_it_reads():
    made = arranged(looped, X)
    assert all(first <= last for first, last in made.spans)
    assert len(made.rows) == len(made.over) == len(made.origins)


def test_a_loop_is_written_over_a_product_but_not_over_one_that_is_made_in_another_shape():
    """XLA makes a product with one axis for several of an operand."""

    def step(x, w):
        y = jnp.arctan2(x @ w, 2.0)
        return jnp.sum(jnp.sort(y @ w)) + jnp.sum(jnp.sort(y))

    assert any(arranged(lambda x: step(x, x), X).over)
    assert not any(arranged(step, BATCH, jax.ShapeDtypeStruct((16, 16), "float32")).over)


def test_only_a_followed_backend_has_its_rows_in_the_compiler_s_order():
    traced = aot.function(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ x) @ x))).trace(jnp.ones((SIDE, SIDE)))
    plan = traced.planner.default()
    assert plan is not None
    steps = schedule(traced.problem, plan)
    assert isinstance(Replayer(traced.graph, CPU).rows(steps).level, Arranged)
    assert not isinstance(Replayer(traced.graph, PORTABLE).rows(steps).level, Arranged)


def test_steps_of_the_corpus_are_predicted_within_a_twentieth():
    """Programs that no rule was made for; loops in segments and branches are known to be further off."""
    names = ["two_layers", "transformer_block", "convolutions", "unrolled_layers"]
    if "fusion_emitters=false" not in os.environ["XLA_FLAGS"]:  # the older way needs twice as much for experts
        names.append("mixture_of_experts")
    for name in names:
        program = larger(name)
        function = aot.function(program.function, argnums=program.argnums)
        made = function.trace(*program.args, **program.kwargs).partition("save_all").compile()
        predicted = made.cut.traced.planner.replay(made.cut.plan).peak_bytes
        assert 0.95 <= predicted / made.activation_bytes <= 1.05, name
