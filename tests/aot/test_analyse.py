"""One look at the function tells what every input and output is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.wrappers.metadata import MutationType, OutputType, ViewAndMutationMeta

X = jnp.arange(6.0).reshape(2, 3)


def metadata(function, *args, **options):
    return aot.function(function, **options).trace(*args).metadata


# ------------------------------------------------------------------------------------------------------ inputs


def test_inputs_that_are_read_unused_and_differentiated():
    found = metadata(lambda a, b, c: jnp.sum(a["w"] * c), {"w": X, "idle": X + 1}, X + 2, 2.0)
    assert [(i.path, i.is_read, i.requires_grad) for i in found.input_info] == [
        ("args[0]['idle']", False, True),
        ("args[0]['w']", True, True),
        ("args[1]", False, False),
        ("args[2]", True, False),
    ]


def test_an_input_that_only_dead_code_reads_is_unused():
    def function(a, b):
        _ = jnp.exp(b)
        return jnp.sum(a)

    assert [i.is_read for i in metadata(function, X, X + 1).input_info] == [True, False]


def test_the_same_array_at_two_places():
    found = metadata(lambda a, b, c: jnp.sum(a * b["x"] + c), X, {"x": X}, X + 1)
    assert [i.duplicate_of for i in found.input_info] == [None, 0, None]


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_keys_that_are_drawn_from(key):
    def in_loop(x, key):
        def step(c, i):
            return c + jax.random.uniform(jax.random.fold_in(key, i)), None

        return jnp.sum(x**2) * lax.scan(step, jnp.float32(0), jnp.arange(3))[0]

    def in_branch(x, key):
        return lax.cond(x[0, 0] > 1, lambda: jnp.sum(jax.random.normal(key, x.shape) * x), lambda: jnp.sum(x))

    drawn = {
        "drawn": lambda x, key: jnp.sum(x * jax.random.normal(key, x.shape)),
        "split": lambda x, key: jnp.sum(x * jax.random.normal(jax.random.split(key)[0], x.shape)),
        "in a loop": in_loop,
        "in a branch": in_branch,
    }
    for name, function in drawn.items():
        assert [i.consumes_key for i in metadata(function, X, key).input_info] == [False, True], name
    kept = metadata(lambda x, key: (jnp.sum(x), key), X, key, has_aux=True)
    assert [i.consumes_key for i in kept.input_info] == [False, False]
    assert kept.output_info[1].output_type is OutputType.is_input
    assert kept.output_info[1].raw_type == ("key" if key.dtype != jnp.uint32 else "array")


def test_a_reference_is_told_by_what_happens_to_it():
    seen = jax.new_ref(jnp.float32(0))

    @jax.custom_vjp
    def tap(ref, x):
        return x

    def backward(ref, g):
        ref[...] += jnp.sum(g)
        return None, g

    tap.defvjp(lambda ref, x: (x, ref), backward)

    def function(x, read, written, tapped):
        written[...] = lax.stop_gradient(jnp.sum(x))
        return jnp.sum(tap(tapped, x) ** 2) * read[...]

    found = metadata(function, X, jax.new_ref(jnp.float32(1)), jax.new_ref(jnp.float32(0)), seen)
    assert [(i.is_reference, i.is_read, i.mutates_data, i.mutates_in_backward) for i in found.input_info] == [
        (False, True, False, False),
        (True, True, False, False),
        (True, True, True, False),
        (True, True, False, True),
    ]
    assert [i.mutation_type for i in found.input_info] == [
        MutationType.NOT_MUTATED,
        MutationType.NOT_MUTATED,
        MutationType.MUTATED_IN_GRAPH,
        MutationType.NOT_MUTATED,
    ]
    assert (found.mutated_graph_handled_indices, found.mutated_inp_runtime_indices) == ((2,), ())


# ----------------------------------------------------------------------------------------------------- outputs

OUTPUTS = {
    "new": (lambda x: x * 2, OutputType.non_alias, None, ()),
    "the input": (lambda x: x, OutputType.is_input, 0, ()),
    "reshaped": (lambda x: x.reshape(3, 2), OutputType.alias_of_input, 0, ("reshape",)),
    "transposed": (lambda x: x.T, OutputType.alias_of_input, 0, ("transpose",)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 2, 3)), OutputType.alias_of_input, 0, ("broadcast_in_dim",)),
    "sliced": (lambda x: lax.slice(x, (0, 1), (2, 3)), OutputType.alias_of_input, 0, ("slice",)),
    "squeezed": (lambda x: lax.squeeze(x[None], (0,)), OutputType.alias_of_input, 0, ("broadcast_in_dim", "squeeze")),
    "reversed": (lambda x: lax.rev(x, (1,)), OutputType.alias_of_input, 0, ("rev",)),
    "turned twice": (lambda x: x.T.reshape(-1), OutputType.alias_of_input, 0, ("transpose", "reshape")),
    "in Fortran's order": (lambda x: jnp.ravel(x, order="F"), OutputType.alias_of_input, 0, ("reshape",)),
    "a constant": (lambda x: jnp.float32(3), OutputType.non_alias, None, ()),
}


@pytest.mark.parametrize(("function", "kind", "base", "ops"), OUTPUTS.values(), ids=OUTPUTS)
def test_what_an_output_shares_with_the_input(function, kind, base, ops):
    found = metadata(lambda x: (jnp.sum(x**2), function(x)), X, has_aux=True).output_info[1]
    assert (found.path, found.output_type, found.base_idx) == ("result[1]", kind, base)
    assert tuple(view.op for view in found.view_meta_sequence) == ops
    if base is not None:
        np.testing.assert_array_equal(found.regenerated(X), function(X))


def test_what_outputs_share_with_each_other():
    def function(x):
        h, g = jnp.sin(x), jnp.cos(x)
        return h, h.T, h.T.reshape(-1), g.T, g[None], h

    infos = metadata(lambda x: (jnp.sum(x**2), function(x)), X, has_aux=True).output_info[1:]
    base_is_output = OutputType.alias_of_intermediate_base_is_user_output
    assert [(i.output_type, i.base_idx) for i in infos] == [
        (OutputType.non_alias, None),
        (base_is_output, 1),
        (base_is_output, 1),
        (OutputType.alias_of_intermediate, 1),
        (OutputType.alias_of_intermediate, 1),
        (base_is_output, 1),
    ]
    values = function(X)
    np.testing.assert_array_equal(infos[1].regenerated(values[0]), values[1])
    np.testing.assert_array_equal(infos[2].regenerated(values[0]), values[2])


def test_which_outputs_can_carry_a_cotangent():
    def function(x, y):
        return jnp.sum(x), jnp.argmax(x), jnp.sum(y), lax.stop_gradient(x), x.astype(jnp.complex64)

    infos = aot.function(function).trace(X, X + 1).metadata.output_info
    assert [i.requires_grad for i in infos] == [True, False, False, True, True]  # JAX gives a stopped value a zero one


def test_tangents_and_their_types():
    found = aot.function(lambda x, n: {"a": x.astype(jnp.bfloat16), "n": n, "b": jnp.sum(x)}).trace(X, 3).metadata
    assert [str(t) for t in found.traced_tangents] == ["bfloat16[2,3]", "float32[]"]
    assert [str(t) for t in found.subclass_tangent_meta] == ["bfloat16[2,3]", "float32[]"]
    assert [t.weak_type for t in found.subclass_inp_meta] == [False, True]


# ------------------------------------------------------------------------------------------- effects, inference


def test_effects_and_tokens():
    @jax.custom_vjp
    def noted(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda: None, ordered=True)
        return (g,)

    noted.defvjp(lambda x: (x, None), backward)

    def function(x):
        jax.debug.callback(lambda: None, ordered=True)
        jax.debug.print("x")
        return jnp.sum(noted(x) ** 2)

    found = metadata(function, X)
    assert (len(found.tokens), found.num_backward_tokens) == (1, 1)
    assert set(found.tokens) <= set(found.effects)
    assert metadata(lambda x: jnp.sum(x), X).effects == ()


def test_without_anything_to_differentiate_there_is_no_joint_program(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a derivative was traced")

    monkeypatch.setattr(jax, "vjp", refused)
    function = aot.function(lambda n, m: (n + m, n.T), argnums=())
    traced = function.trace(jnp.arange(6).reshape(2, 3), 1)
    assert not traced.metadata.is_train
    assert traced.metadata.traced_tangents == ()
    assert len(traced.joint.jaxpr.outvars if hasattr(traced.joint, "jaxpr") else traced.joint.outvars) == 2
    out, pullback = function.vjp(jnp.arange(6).reshape(2, 3), 1)
    assert [g.dtype for g in pullback((out[0], out[1]))] == [jax.dtypes.float0] * 2


def test_records_print_on_one_screen_and_come_back_from_json():
    many = {f"w{i:03}": jnp.ones(2) for i in range(200)}
    found = metadata(lambda p, x: (sum(jnp.sum(w * w) for w in p.values()), x.T), many, X, has_aux=True)
    shown = str(found).splitlines()
    assert len(shown) < 60
    assert max(map(len, shown)) <= 120
    assert shown[:3] == ["training, 0 constants", "inputs:", "  float32[2] args[0]['w000']: read, differentiated"]
    assert "  and 161 more" in shown
    assert ViewAndMutationMeta.from_json(found.to_json()) == found
