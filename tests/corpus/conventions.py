"""Conventions: every shape in which a caller may hand over arguments and take results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from corpus.program import integers, normal, program

NUMPY_TABLE = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)
JAX_TABLE = jnp.asarray(np.linspace(-0.5, 1.5, 6, dtype=np.float32).reshape(3, 2))


class Affine(NamedTuple):
    """A layer as a named tuple."""

    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """A layer as a dataclass with a static field."""

    weight: Any
    scale: float = field(metadata={"static": True}, default=1.0)


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A layer as a registered class, as the neural network libraries make them."""

    def __init__(self, weight, name):
        self.weight, self.name = weight, name

    def __call__(self, x):
        return jnp.tanh(x @ self.weight)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("weight"), self.weight),), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


@program(
    "Integer, Boolean and key leaves beside the weights, in one tree.",
    lambda: (
        normal(400, 3),
        {
            "ids": integers(401, 4, below=3),
            "mask": jnp.array([True, False, True, True]),
            "key": jax.random.key(0),
        },
    ),
    tags="random",
)
def integer_and_key_leaves(x, batch):
    noise = jax.random.normal(batch["key"], (4,))
    return jnp.sum(jnp.where(batch["mask"], jnp.sin(x)[batch["ids"]] * noise, 0.0))


@program(
    "None among the leaves, and an empty dictionary.",
    lambda: ({"weight": normal(402, 3), "bias": None, "more": {}}, None),
)
def none_leaves(weights, bias):
    assert weights["bias"] is None and bias is None
    return jnp.sum(jnp.exp(jnp.sin(weights["weight"])))


@program(
    "A dataclass of weights with a static field.",
    lambda: (Layer(normal(403, 3, 3), 2.0), normal(404, 3)),
    argnums=(0, 1),
)
def dataclass_weights(layer, x):
    return jnp.sum(jnp.sin(layer.weight @ x) * layer.scale)


@program(
    "Named tuples of weights in a list.",
    lambda: (
        [Affine(normal(405, 3, 3), normal(406, 3)), Affine(normal(407, 3, 3), normal(408, 3))],
        normal(409, 3),
    ),
)
def named_tuples(layers, x):
    for layer in layers:
        x = jnp.tanh(x @ layer.weight + layer.bias)
    return jnp.sum(x)


@program(
    "A module that is a pytree of its own class and is called.",
    lambda: (Module(normal(410, 3, 3), "dense"), normal(411, 2, 3)),
)
def module_as_argument(module, x):
    return jnp.sum(module(x) * jnp.cos(module(x)))


@program(
    "Keyword arguments, one an array and one a Python number.",
    lambda: (normal(412, 3), normal(413, 3)),
    kwargs={"scale": 2.0, "shift": np.float32([0.1, 0.2, 0.3])},
)
def keyword_arguments(x, y, *, scale, shift):
    return jnp.sum(jnp.sin(x * scale + shift) * y)


@program("Captured constants: a numpy array and a JAX array.", lambda: (normal(414, 2, 2),))
def captured_constants(x):
    return jnp.sum(jnp.sin(x @ NUMPY_TABLE) @ jnp.exp(JAX_TABLE))


@program(
    "Inputs of which some are never read.",
    lambda: ({"used": normal(415, 3), "unused": normal(416, 2)}, normal(417, 4)),
    argnums=(0, 1),
)
def unused_inputs(weights, never):
    return jnp.sum(jnp.sin(weights["used"]) ** 2)


@program(
    "An output that is an input as it came.",
    lambda: (normal(418, 3), normal(419, 2)),
    argnums=(0, 1),
    tags="nonscalar",
)
def output_is_input(x, y):
    return {"as it came": x, "changed": jnp.sin(x) * 2, "other": y}


@program("One value returned twice, and one input twice.", lambda: (normal(420, 3),), tags="nonscalar")
def output_twice(x):
    y = jnp.exp(jnp.sin(x))
    return (y, y), [x, x]


SHARED = np.float32([0.3, -0.2, 0.7])


def same_array_twice_arguments() -> tuple[Any, ...]:
    shared = jnp.asarray(SHARED)
    return shared, {"again": shared, "and again": shared}


@program("The same array passed three times, in two arguments.", same_array_twice_arguments, argnums=(0, 1))
def same_array_twice(x, others):
    return jnp.sum(x * jnp.sin(others["again"]) * jnp.exp(others["and again"]))


@program(
    "Several outputs in a tree, one of them an integer and one a constant.",
    lambda: (normal(421, 3), normal(422, 3)),
    argnums=(0, 1),
    tags="nonscalar",
)
def several_outputs(x, y):
    h = jnp.sin(x) * y
    return {"vector": jnp.exp(h), "count": jnp.sum(h > 0), "constant": jnp.ones(2), "none": None}, jnp.sum(h**2)


@program(
    "A matrix as its output.",
    lambda: (normal(423, 3, 2), normal(424, 2, 3)),
    argnums=(0, 1),
    tags="nonscalar",
)
def matrix_output(a, b):
    return jnp.tanh(a @ b) @ a


@program(
    "A loss with auxiliary output: a tree with an integer, an input and a hidden value.",
    lambda: (normal(425, 3, 3), normal(426, 3)),
    has_aux=True,
)
def auxiliary_output(weight, x):
    h = jnp.tanh(weight @ x)
    return jnp.sum(h**2), {"hidden": h, "input": x, "sign": jnp.sum(h > 0), "none": None, "weight": weight}


@program("A function that does not depend on its argument.", lambda: (normal(427, 3),))
def constant_function(x):
    return jnp.float32(3.0)


@program("A function whose gradient is zero by stop_gradient.", lambda: (normal(428, 3),))
def stopped_entirely(x):
    return jnp.sum(jnp.sin(jax.lax.stop_gradient(x)))


@program(
    "Gradients with respect to the second and the first argument, in that order.",
    lambda: (normal(429, 3), normal(430, 3), normal(431, 3)),
    argnums=(1, 0),
)
def two_argnums(x, y, z):
    return jnp.sum(jnp.sin(x * z) * jnp.exp(y))


@program("A negative argnums.", lambda: (normal(432, 3), normal(433, 3)), argnums=-1)
def last_argument(x, y):
    return jnp.sum(jnp.sin(x) * jnp.exp(jnp.cos(y)))


@program("Python numbers as arguments.", lambda: (0.5, 2, normal(434, 3)), argnums=(0, 2))
def python_numbers(x, power, y):
    return jnp.sum(jnp.sin(x * y)) ** power + x**2


@program("One Python number in and one out: the weak type must survive.", lambda: (0.7,))
def weak_types(x):
    return jnp.sin(x) * 2.0 + x**3


@program(
    "Numpy arrays and numpy scalars as arguments.",
    lambda: (np.float32([0.1, -0.4, 0.9]), np.float32(1.5)),
    argnums=(0, 1),
)
def numpy_arguments(x, scale):
    return jnp.sum(jnp.exp(jnp.sin(x * scale)))


@program(
    "A linear function: nothing but the inputs is needed by the backward.",
    lambda: (normal(435, 3), normal(436, 3)),
    argnums=(0, 1),
)
def linear_function(x, y):
    return jnp.sum(3 * x - y[::-1])


@program("The identity on a scalar.", lambda: (jnp.float32(0.4),))
def identity(x):
    return x


@program(
    "A tree of weights with integers inside, of which only vjp takes derivatives.",
    lambda: ({"table": normal(437, 3), "steps": jnp.int32(3)}, integers(438, 2, below=3)),
    tags="nonscalar",
    lacks={"grad": "int32"},
)
def integers_to_differentiate(state, places):
    return jnp.sin(state["table"])[places] * state["steps"].astype(jnp.float32), state["steps"] + 1
