"""A behaviour is a small named function that asserts what one of PyTorch's tests claims, as it is meant in JAX.

A file of this folder reads:

    @behaviour(
        "output aliasing / an output that is an input is that input",
        "The very same array is handed back; none is copied.",
    )
    def an_input_comes_back_as_itself():
        x = normal(0, 3)
        assert aot.function(lambda x: x)(x) is x

after which `an_input_comes_back_as_itself` is a `Behaviour`. The words before the slash name a group of `GROUPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from jointcut import aot

#: The groups of PyTorch's `test_aotdispatch` and `test_compiled_autograd`, with what each is about.
GROUPS: Mapping[str, str] = {
    # TestAOTAutograd
    "plain I/O": "what may go in and come out",
    "input mutation": "inputs that the function writes",
    "output aliasing": "outputs that share memory with inputs or with each other",
    "aliased inputs": "one array, or one storage, at two places of the arguments",
    "backward mutation": "what the backward writes",
    "requires_grad mixtures": "inputs and outputs of which some carry no derivative",
    "subclasses": "objects that stand for an array and hold several",
    "autocast": "mixed precision",
    "dynamic shapes": "shapes that change from call to call",
    "memory": "what stays alive, and how long",
    "misc": "names, modules, custom derivatives, randomness",
    # TestPartitioning
    "recompute correctness": "forward and gradients equal eager",
    "exact I/O counts": "how many inputs and outputs the halves have",
    "saved sizes": "sizes are saved instead of the arrays that have them",
    "default vs min-cut": "two partitioners on one graph",
    "split backward": "the backward in two programs, one for inputs and one for weights",
    "getitem and golden text": "several results of one op, and the text of graphs",
    "custom partitioner": "a function of the user's chooses what is saved",
    "preserved randomness": "random ops are not drawn anew",
    "unbounded error finder": "a cut that does not exist is explained",
    "effectful ops": "effects happen once",
    "quantised activations": "saved values in fewer bits",
    "metadata of subclass outputs": "which flat outputs belong together",
    # TestAOTExport and its neighbours
    "export signature": "names and positions of an exported pair",
    "export joint graph": "the joint program as a value",
    "export unused and None": "unused and missing inputs of an exported program",
    "export refusals": "what cannot be exported",
    # conventions
    "calling convention": "the order of inputs and outputs of joint, forward and backward",
    "tangents": "which outputs have a cotangent, and of which type",
    "double backward": "derivatives of derivatives",
    "Gradient contract": "TorchScript's record of a differentiated graph",
    # TestCompiledAutograd, and what it runs again of TestAutograd
    "captures": "which backward graphs are captured, and when again",
    "accumulation": "gradients that are added up",
    "hooks": "functions that are called with cotangents",
    "saved values": "what a forward keeps for a captured backward",
    "custom functions": "backwards that the user wrote, inside of a captured one",
    "around the tape": "second derivatives, anomalies, errors and reentrance",
}


@dataclass(frozen=True, eq=False)
class Behaviour:
    """One behaviour: PyTorch's claim, what it means in JAX, and a function that asserts it."""

    name: str
    group: str
    claim: str
    meaning: str
    check: Callable[[], None]


def behaviour(torch: str, meaning: str) -> Callable[[Callable[[], None]], Behaviour]:
    """Turn the decorated function into a `Behaviour`; `torch` is "group / what PyTorch's test claims"."""
    group, _, claim = torch.partition(" / ")
    assert group in GROUPS and claim and meaning, torch

    def decorate(check: Callable[[], None]) -> Behaviour:
        return Behaviour(check.__name__, group, claim, meaning, check)

    return decorate


def behaviours_of(module: ModuleType) -> tuple[Behaviour, ...]:
    """The behaviours that a module defines, in its order."""
    return tuple(value for value in vars(module).values() if isinstance(value, Behaviour))


# ------------------------------------------------------------------------------------------------ asserting


def assert_near(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal trees, and leaf by leaf equal shapes and types and near numbers."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        where = f"result{jax.tree_util.keystr(path)}"
        assert (np.shape(a), _dtype(a)) == (np.shape(b), _dtype(b)), where
        if _dtype(a) != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol, atol, err_msg=where)


def _dtype(leaf: Any) -> Any:
    return jax.dtypes.result_type(leaf) if getattr(leaf, "dtype", None) != jax.dtypes.float0 else leaf.dtype


def assert_as_jax(function: Callable[..., Any], *args: Any, argnums: Any = 0, has_aux: bool = False) -> None:
    """A loss has JAX's value and gradient, whether it is asked for them or differentiated by JAX."""
    made = aot.function(function, argnums=argnums, has_aux=has_aux)
    ways = [jax.value_and_grad(way, argnums, has_aux=has_aux) for way in (function, made)]
    want, inside = jax.jit(lambda *args: [way(*args) for way in ways])(*args)  # one program is compiled sooner than two
    assert_near(made.value_and_grad(*args), want)
    assert_near(inside, want)


def assert_pulls_back_as_jax(function: Callable[..., Any], *args: Any) -> None:
    """The output and the cotangents of all arguments are those of `jax.vjp`, for a cotangent of ones."""

    def plain(*args: Any) -> tuple[Any, Any]:
        out, pull = jax.vjp(function, *args)
        return out, pull(jax.tree.map(_one, out))

    want, cotangents = jax.jit(plain)(*args)
    got, pull = aot.function(function).vjp(*args)
    assert_near(got, want)
    assert_near(pull(jax.tree.map(_one, want)), cotangents)


def _one(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, np.inexact):
        return jax.numpy.ones_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def refusal(kind: type[Exception], run: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The whole text of the error, of exactly this type, that a call raises."""
    with pytest.raises(kind) as caught:
        run(*args, **kwargs)
    assert caught.type is kind
    return str(caught.value)


def equations(closed: Any) -> list[Any]:
    """All equations of a jaxpr, those of the jaxprs inside it included."""
    found = []
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        found.append(eqn)
        for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found.extend(equations(inner))
    return found


def primitives(closed: Any) -> list[str]:
    """The names of the equations' primitives, in order."""
    return [eqn.primitive.name for eqn in equations(closed)]


def counts(closed: Any) -> tuple[int, int]:
    """How many inputs and outputs a jaxpr has."""
    jaxpr = getattr(closed, "jaxpr", closed)
    return len(jaxpr.invars), len(jaxpr.outvars)
