"""Scopes: a tree of the names that the user gave, in which every op stands, the backward's beside its forward."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax import lax

from drawn import graphs
from jointcut import aot
from jointcut.partition.program.graph import TOP, Graph
from jointcut.partition.program.outline import PSEUDO, Outline, outline
from jointcut.partition.program.places import modules_of
from jointcut.partition.program.roles import Role, Side
from programs import CORPUS

NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"][1::3]  # that one cannot be traced
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def check(graph: Graph, found: Outline) -> None:
    """The laws of every outline."""
    assert {op.id for op in graph.ops if op.name not in PSEUDO} == set(found.scope_of)
    assert all(0 <= scope < len(found.scopes) for scope in found.scope_of.values())
    assert found.scopes[0].parent is None and found.scopes[0].kind == "root"
    assert all(s.parent is not None and s.parent < i for i, s in enumerate(found.scopes) if i)
    assert set(Counter((s.parent, s.name) for s in found.scopes).values()) == {1}
    assert len(found.lines) == len(graph.ops)
    paths = [found.path(i) for i in range(len(found.scopes))]
    assert len(set(paths[1:])) == len(paths) - 1


@pytest.mark.parametrize("name", NAMES)
def test_every_op_stands_in_a_tree_of_scopes_whose_siblings_have_names_of_their_own(name, traced):
    graph = traced(name).graph
    found = outline(graph, "title")
    check(graph, found)
    assert found.path(0) == found.scopes[0].name == "title"


@pytest.mark.parametrize("name", NAMES)
def test_an_op_of_a_loop_stands_below_a_scope_of_that_loop(name, traced):
    graph = traced(name).graph
    found = outline(graph)
    for op, scope in found.scope_of.items():
        loops, loop = [], graph.loop_of(graph.ops[op])
        while loop != TOP:
            loops.append(f"{graph.loops[loop].length} steps")
            loop = graph.loops[loop].parent
        assert [found.scopes[s].detail for s in above(found, scope) if found.scopes[s].kind == "loop"] == loops


def above(found: Outline, scope: int | None) -> list[int]:
    """A scope and those around it, the innermost first."""
    own = []
    while scope is not None:
        own.append(scope)
        scope = found.scopes[scope].parent
    return own


@quick
@given(graphs())
def test_a_graph_that_was_read_from_text_has_one_scope(graph):
    found = outline(graph)
    check(graph, found)
    assert len(found.scopes) == 1 and not any(found.lines)


def block(w, x):
    y = x @ w
    return jnp.tanh(y) + jnp.sin(y)


def layered(count):
    """A graph of layers in a Python loop, each of another width, so that a shape tells the layer."""

    def loss(weights, x):
        for w in weights:
            x = block(w, x)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((2 + i, 3 + i), "float32") for i in range(count)]
    return aot.function(loss).trace(weights, jax.ShapeDtypeStruct((5, 2), "float32")).graph


def leaf(found: Outline, op: int) -> str:
    return found.scopes[found.scope_of[op]].name


@pytest.mark.parametrize("count", [1, 2, 5])
def test_layers_that_a_python_loop_calls_are_told_apart(count):
    graph = layered(count)
    found = outline(graph)
    check(graph, found)
    named = [s.name for s in found.scopes if s.name.startswith("block")]
    assert named == (["block"] if count == 1 else [f"block ({i + 1})" for i in range(count)])
    forward = [op for op in graph.ops if op.name == "dot_general" and op.origin is Side.FORWARD]
    assert [leaf(found, op.id) for op in forward] == named


def test_the_gradient_of_a_weight_is_made_in_the_layer_that_has_it():
    graph = layered(4)
    found = outline(graph)
    gradients = graph.role_outputs(Role.GRADIENT)
    for i, v in enumerate(gradients):
        value = graph.values[v]
        assert value.shape == (2 + i, 3 + i)
        assert leaf(found, value.maker) == f"block ({i + 1})"


def scoped(x, w):
    with jax.named_scope("model"):
        with jax.named_scope("embed"):
            x = jnp.sin(x) * w
        with jax.named_scope("core"):
            with jax.named_scope("first"):
                x = jnp.tanh(x * w)
            with jax.named_scope("second"):
                x = jnp.exp(x) * w
        with jax.named_scope("head"):
            return jnp.sum(x**2)


def test_ops_of_both_halves_stand_where_their_named_scopes_say():
    graph = aot.function(scoped, argnums=(0, 1)).trace(*[jax.ShapeDtypeStruct((4,), "float32")] * 2).graph
    found = outline(graph)
    check(graph, found)
    sides = {Side.FORWARD: set(), Side.BACKWARD: set()}
    for op, scope in found.scope_of.items():
        own = modules_of(graph.ops[op].scope)
        if own:
            assert found.path(scope) == "/".join(own)
            sides[graph.ops[op].origin].add(own[1:])
    assert sides[Side.FORWARD] == {("embed",), ("core", "first"), ("core", "second"), ("head",)}
    assert sides[Side.BACKWARD] >= {("embed",), ("core", "first"), ("core", "second")}


def test_a_loop_stands_within_the_call_that_writes_it_and_its_layers_within_the_loop():
    def stack(weights, x):
        return lax.scan(lambda c, w: (block(w, c), None), x, weights)[0]

    def loss(weights, x):
        return jnp.sum(stack(weights, x))

    structs = jax.ShapeDtypeStruct((3, 4, 4), "float32"), jax.ShapeDtypeStruct((4, 4), "float32")
    graph = aot.function(loss).trace(*structs).graph
    found = outline(graph)
    for op, scope in found.scope_of.items():
        if graph.ops[op].name == "tanh":
            path = found.path(scope).split("/")
            assert path[-3:] == ["stack", "loop", "block"]
            break
    else:
        raise AssertionError("there is no tanh")


def test_the_modules_of_flax_are_scopes():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(4)(nn.LayerNorm()(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(Block()(Block()(x)))

    x = jnp.ones((2, 4))
    model = Model()
    params = model.init(jax.random.key(0), x)
    graph = aot.function(lambda p: jnp.sum(model.apply(p, x) ** 2)).trace(params).graph
    found = outline(graph)
    check(graph, found)
    paths = {found.path(i) for i in range(len(found.scopes))}
    blocks = {f"Model/Block_{i}/{part}" for i in range(2) for part in ("Dense_0", "LayerNorm_0")}
    assert blocks | {"Model/Dense_0"} <= paths
