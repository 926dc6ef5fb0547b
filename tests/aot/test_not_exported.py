"""What cannot be exported is refused by name, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jointcut import aot
from jointcut.partition.errors import ArtefactError

X = np.float32([0.1, -0.4, 0.9])
HERE = Path(__file__)
WITHOUT = "Leave it out where you export: an exported program runs where this process is not."
ON_ARRAYS = "Write the function on arrays: take the state as an argument and return the new one."


def printing(x):
    jax.debug.print("{}", x[0])
    return jnp.sum(x**2)


def calling_back(x):
    return jnp.sum(jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), np.float32), lax.stop_gradient(x)) * x)


def calling_back_in_a_loop(x):
    def step(total, row):
        return total + jnp.sum(io_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), lax.stop_gradient(row))), None

    return lax.scan(step, jnp.sum(x), x)[0]


@pytest.mark.parametrize(
    ("function", "effect", "scope", "line"),
    [
        (printing, "debug_print", "printing", 'jax.debug.print("{}", x[0])'),
        (calling_back, "pure_callback", "calling_back", "jax.pure_callback(np.sin"),
        (calling_back_in_a_loop, "io_callback", "calling_back_in_a_loop.<locals>.step", "io_callback(np.sin, jax"),
    ],
    ids=["print", "callback", "callback in a loop"],
)
def test_an_effect_is_named_with_the_line_that_has_it(function, effect, scope, line, tmp_path):
    number = next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if line in text)
    with pytest.raises(ArtefactError) as caught:
        aot.function(function).export(tmp_path / "model", X)
    first, cure = str(caught.value).split("\n")
    where = f"{HERE}:{number} ({scope})"
    assert first == f"{function.__name__} has an effect that cannot be exported: {effect}, at {where}."
    assert cure == WITHOUT and not list(tmp_path.iterdir())


def refusal(run):
    with pytest.raises(ArtefactError) as caught:
        run()
    return str(caught.value)


def test_references_are_refused_as_arguments_and_where_they_are_closed_over(tmp_path):
    counter = jax.new_ref(jnp.zeros(3))
    given = aot.function(lambda x, state: jnp.sum(x * state[...]))
    told = refusal(lambda: given.export(tmp_path / "model", X, counter))
    assert told == f"args[1] is a jax.Ref, which an exported program cannot write.\n{ON_ARRAYS}"

    def closing(x):
        return jnp.sum(x * counter[...])

    told = refusal(lambda: aot.function(closing).export(tmp_path / "model", X))
    assert told == f"closing closes over a jax.Ref, which an exported program cannot write.\n{ON_ARRAYS}"


def test_values_of_an_outer_trace_are_refused(tmp_path):
    def outer(y):
        def inner(x):
            return jnp.sum(x * y)

        return str(aot.function(inner).export(tmp_path / "model", X)) and y

    told = refusal(lambda: jax.jit(outer)(X))
    cure = "Export outside of jit, grad and vmap, or pass what it closes over as an argument."
    assert told == f"inner closes over values of a trace that is under way.\n{cure}"


def test_what_has_no_portable_form_is_refused_by_platform(tmp_path):
    def eigen(x):
        return jnp.sum(jnp.abs(jnp.linalg.eigvals(x)))

    told = refusal(lambda: aot.function(eigen).export(tmp_path / "model", jnp.eye(3), platforms="tpu"))
    assert told == (
        "eigen_inference cannot be lowered for tpu: MLIR translation rule for primitive 'eig' not found for platform "
        "tpu\nExport for fewer platforms, or without what has no portable form."
    )
    narrow = aot.function(lambda x, few: jnp.sum(x * few.astype(jnp.float32)))
    told = refusal(lambda: narrow.export(tmp_path / "model", X, jnp.zeros(3, "int2")))
    cure = "Convert them to a wider type where they enter and leave the function."
    assert told == f"lambda_inference has arrays of int2, for which jax.export has no form.\n{cure}"
    assert not list(tmp_path.iterdir())


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """Two parts of one name."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("part"), part) for part in self.parts], None

    @classmethod
    def tree_unflatten(cls, aux, parts):
        return cls(*parts)


def test_parts_that_nobody_could_tell_apart_are_refused(tmp_path):
    cure = "Give each part a key of its own, with jax.tree_util.register_pytree_with_keys_class."
    given = aot.function(lambda twins: jnp.sum(twins.parts[0] - twins.parts[1]))
    told = refusal(lambda: given.export(tmp_path / "model", Twins(X, X + 1)))
    assert told == f"args[0].part is told by the same keys as another part.\n{cure}"
    made = aot.function(lambda x: Twins(x, 2 * x))
    told = refusal(lambda: made.export(tmp_path / "model", X))
    assert told == f"result.part is told by the same keys as another part.\n{cure}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"platforms": "gpu"}, "platforms holds 'gpu'.\nJAX exports for 'cuda' or for 'rocm'."),
        (
            {"platforms": ("cpu", "tpus")},
            "platforms holds 'tpus'.\nKnown names: 'cpu', 'cuda', 'rocm', 'tpu'. Did you mean 'tpu'?",
        ),
        ({"platforms": ()}, "platforms is empty.\nGive one or more of cpu, cuda, rocm, tpu."),
        ({"order": 0}, "order is 0.\nGive 1, 2 or 3: how often it can be differentiated."),
        ({"order": 2.0}, "order is 2.0.\nGive 1, 2 or 3: how often it can be differentiated."),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_traced(options, told, tmp_path):
    def never(x):
        raise AssertionError("traced")

    assert refusal(lambda: aot.function(never).export(tmp_path / "model", X, **options)) == told


def test_orders_of_symbolic_sizes_are_refused_where_derivatives_are_not_those_of_jax(tmp_path):
    function = aot.function(lambda x: jnp.sum(jnp.sqrt(x)), derivatives="finite")
    given = {"sizes": {"n": 3}, "platforms": "cpu"}
    told = refusal(lambda: function.export(tmp_path / "model", aot.shapes("n", "float32"), order=2, **given))
    assert told == (
        "order is 2, for symbolic sizes and derivatives that are not JAX's: halves are cut again for that.\n"
        "Export with numbers for all sizes, with order=1, or with derivatives='jax'."
    )
    assert not list(tmp_path.iterdir())
    assert function.export(tmp_path / "model", aot.shapes("n", "float32"), **given).exists()
