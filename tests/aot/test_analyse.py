"""One look at the function tells what every input and output is."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

from jointcut import aot
from jointcut.wrappers.metadata.schemas import MutationType, OutputType, ViewAndMutationMeta
from regenerate import can_be_regenerated, regenerated

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


def test_what_the_call_alone_says_is_known_before_the_trace():
    ref = jax.new_ref(jnp.float32(0))
    function = aot.function(lambda a, b, r, c: jnp.sum(a * b) + r[...], donate_argnums=3)
    traced = function.trace(X, X, ref, X + 1)
    assert [
        (i.path, i.requires_grad, i.is_reference, i.is_donated, i.duplicate_of, i.is_read) for i in traced.inputs
    ] == [
        ("args[0]", True, False, False, None, False),
        ("args[1]", False, False, False, 0, False),
        ("args[2]", False, True, False, None, False),
        ("args[3]", False, False, True, None, False),
    ]
    read = [True, True, True, False]
    with_uses = [replace(info, is_read=on) for info, on in zip(traced.inputs, read, strict=True)]
    assert list(traced.metadata.input_info) == with_uses


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
        "a primitive of its own": lambda x, key: jnp.sum(x * jax.random.gamma(key, 2.0, x.shape)),
        "in a loop": in_loop,
        "in a branch": in_branch,
    }
    for name, function in drawn.items():
        assert [i.consumes_key for i in metadata(function, X, key).input_info] == [False, True], name
    kept = metadata(lambda x, key: (jnp.sum(x), key), X, key, has_aux=True)
    assert [i.consumes_key for i in kept.input_info] == [False, False]
    assert kept.output_info[1].output_type is OutputType.is_input


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
        (True, False, True, False),
        (True, True, False, True),
    ]
    assert [i.mutation_type for i in found.input_info] == [
        MutationType.NOT_MUTATED,
        MutationType.NOT_MUTATED,
        MutationType.MUTATED_IN_GRAPH,
        MutationType.NOT_MUTATED,
    ]


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
        np.testing.assert_array_equal(regenerated(found, X), function(X))


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
    np.testing.assert_array_equal(regenerated(infos[1], values[0]), values[1])
    np.testing.assert_array_equal(regenerated(infos[2], values[0]), values[2])


def test_which_outputs_can_carry_a_cotangent():
    def function(x, y):
        return jnp.sum(x), jnp.argmax(x), jnp.sum(y), lax.stop_gradient(x), x.astype(jnp.complex64)

    infos = aot.function(function).trace(X, X + 1).metadata.output_info
    assert [i.requires_grad for i in infos] == [True, False, False, False, True]


def test_tangents_and_their_types():
    found = aot.function(lambda x, n: {"a": x.astype(jnp.bfloat16), "n": n, "b": jnp.sum(x)}).trace(X, 3).metadata
    assert [str(t) for t in found.traced_tangents] == ["bfloat16[2,3]", "float32[]"]
    assert [str(t) for t in found.subclass_tangent_meta] == ["bfloat16[2,3]", "float32[]"]
    assert [t.weak_type for t in found.subclass_inp_meta] == [False, True]


def shares(function, *args, **options):
    """Type, base and steps of each output behind the first one."""
    infos = metadata(lambda *xs: (jnp.sum(xs[0] ** 2), function(*xs)), *args, has_aux=True, **options).output_info[1:]
    return [(i.output_type, i.base_idx, [str(view) for view in i.view_meta_sequence]) for i in infos]


NEW = (OutputType.non_alias, None, [])
OF_OUTPUT = OutputType.alias_of_intermediate_base_is_user_output


def test_what_shares_with_a_donated_input_is_a_new_array():
    assert shares(lambda x, y: (x, x.T, y), X, X + 1, donate_argnums=0) == [
        NEW,
        (OF_OUTPUT, 1, ["transpose"]),
        (OutputType.is_input, 1, []),
    ]
    function = aot.function(lambda x: (jnp.sum(x**2), (x, x)), has_aux=True, donate_argnums=0)
    assert shares(lambda x: (x, x), X, donate_argnums=0) == [NEW, (OF_OUTPUT, 1, [])]
    compiled = function.trace(X).partition().compile()
    for run in (function, lambda x: function.value_and_grad(x)[0], lambda x: compiled.value_and_grad(x)[0]):
        given = X + 0
        _, (first, second) = run(given)
        assert first is second is not given
        assert given.is_deleted()
        np.testing.assert_array_equal(first, X)


def test_an_array_that_stands_twice_is_not_handed_back_where_one_place_is_donated():
    function = aot.function(lambda a, b: (jnp.sum(a * b), b), has_aux=True, donate_argnums=0)
    given = X + 0
    (_, kept), _ = function.value_and_grad(given, given)
    np.testing.assert_array_equal(kept, X)
    assert function.trace(given, given).metadata.output_info[1].output_type is OutputType.non_alias


def test_outputs_that_are_computed_twice_are_two_arrays():
    assert shares(lambda x: (jnp.sin(x), jnp.sin(x)), X) == [NEW, NEW]

    def same(x):
        h = jnp.sin(x)
        return h, h

    assert shares(same, X) == [NEW, (OF_OUTPUT, 1, [])]


def test_a_view_of_an_input_that_is_returned_twice_is_one_array():
    def same(x):
        view = x.T
        return view, view

    assert shares(same, X) == [(OutputType.alias_of_input, 0, ["transpose"]), (OF_OUTPUT, 1, [])]
    (_, (first, second)), _ = aot.function(lambda x: (jnp.sum(x**2), same(x)), has_aux=True).value_and_grad(X)
    assert first is second


def test_a_view_and_its_base_are_told_in_either_order():
    def outputs(*order):
        h = jnp.sin(order[0])
        return [h.T, h]

    assert shares(outputs, X) == [(OF_OUTPUT, 2, ["transpose"]), NEW]
    assert shares(lambda x: outputs(x)[::-1], X) == [NEW, (OF_OUTPUT, 1, ["transpose"])]


def test_pieces_and_dynamic_slices_are_views():
    pieces = shares(lambda x: jnp.split(x, [1], axis=1), X)
    assert pieces == [(OutputType.alias_of_input, 0, [f"split[{i}]"]) for i in range(2)]
    both = shares(lambda x, i: (lax.dynamic_slice(x, (0, 1), (2, 1)), lax.dynamic_slice(x, (0, i), (2, 1))), X, 1)
    assert both == [(OutputType.alias_of_input, 0, ["dynamic_slice"])] * 2


def test_a_view_is_made_again_unless_the_program_says_where_it_starts():
    def function(x, i):
        return jnp.split(x, 3, axis=1), lax.dynamic_slice(x, (0, 1), (2, 1)), lax.dynamic_slice(x, (0, i), (2, 1))

    *known, unknown = metadata(function, X, 1, argnums=()).output_info
    for info, out in zip(known, jax.tree.leaves(function(X, 1))[:-1], strict=True):
        assert can_be_regenerated(info)
        np.testing.assert_array_equal(regenerated(info, X), out)
    assert not can_be_regenerated(unknown)
    assert dict(unknown.view_meta_sequence[0].arguments)["start_indices"] == (0, None)


def test_outputs_that_no_gradient_flows_back_from():
    def function(x):
        stopped = lax.stop_gradient(x), jnp.round(x), jnp.sign(x), jnp.floor(x), (x > 0).astype(x.dtype)
        return *stopped, lax.stop_gradient(jnp.sin(x)), x * 2, x

    infos = aot.function(function).trace(X).metadata.output_info
    assert [i.requires_grad for i in infos] == [False] * 6 + [True, True]


def test_references_that_are_closed_over():
    read, written = jax.new_ref(jnp.float32(1)), jax.new_ref(jnp.float32(0))

    def function(x):
        written[...] = jnp.float32(1)
        return jnp.sum(x) * read[...]

    cut = aot.function(function).trace(X).partition()
    infos = cut.metadata.constant_info
    assert [(i.path, i.is_reference, i.is_read, i.mutates_data) for i in infos] == [
        ("constant 0", True, False, True),
        ("constant 1", True, True, False),
    ]
    assert cut.metadata.num_constants == 2
    assert cut.signature.inputs_to_buffers == {"primals_1": "constant 0", "primals_2": "constant 1"}
    assert cut.signature.buffers_mutated_in_place == ("constant 0",)
    assert cut.signature.inputs_to_parameters == {"primals_3": "args[0]"}


def test_a_reference_that_is_only_written_is_not_read():
    def swapped(ref, x):
        return jax.ref.swap(ref, ..., x)

    def looped(ref, x):
        def step(c, _):
            return c + jax.ref.swap(ref, ..., c), None

        return lax.scan(step, x, None, 3)[0]

    def written_in_loop(ref, x):
        def step(c, _):
            ref[...] = lax.stop_gradient(c)
            return c * 2, None

        return lax.scan(step, x, None, 3)[0]

    def written(ref, x):
        ref[...] = jnp.float32(2)
        return x

    def added(ref, x):
        ref[...] += 1
        return x

    reads = {swapped: True, looped: True, written_in_loop: False, written: False, added: True}
    for function, is_read in reads.items():
        found = aot.function(function, argnums=()).trace(jax.new_ref(jnp.float32(0)), jnp.float32(1)).metadata
        assert (found.input_info[0].is_read, found.input_info[0].mutates_data) == (is_read, True), function.__name__


def test_the_parts_of_a_sparse_matrix_are_named():
    matrix = sparse.BCOO.fromdense(jnp.eye(3))
    found = metadata(lambda m, x: (jnp.sum(m["m"] @ x), m), {"m": matrix}, jnp.ones(3), has_aux=True)
    assert [i.path for i in found.input_info] == ["args[0]['m'].data", "args[0]['m'].indices", "args[1]"]
    assert [o.path for o in found.output_info[1:]] == ["result[1]['m'].data", "result[1]['m'].indices"]


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
    assert shown[:3] == [
        "training: forward and backward",
        "inputs",
        "  0   float32[2]  args[0]['w000']  read, differentiated",
    ]
    assert "  and 161 more" in shown
    assert ViewAndMutationMeta.from_json(found.to_json()) == found


def test_what_is_printed_can_be_read_by_a_newcomer():
    count = jax.new_ref(jnp.float32(0))

    def loss(params, x, same):
        count[...] = jnp.float32(1)
        h = jnp.tanh(x @ params["w"])
        return jnp.sum(h + same.T @ same), (h, h.T, same, same.T, h)

    params = {"w": jnp.ones((3, 3)), "idle": jnp.ones(2)}
    square = jnp.ones((3, 3))
    assert (
        str(metadata(loss, params, square, square, has_aux=True))
        == """\
training: forward and backward
constants
  0  float32[]  constant 0  a reference, written
inputs
  0  float32[2]    args[0]['idle']  unused, differentiated
  1  float32[3,3]  args[0]['w']     read, differentiated
  2  float32[3,3]  args[1]          read
  3  float32[3,3]  args[2]          read, the same array as input 2
outputs
  0  float32[]     result[0]     a new array, carries a gradient
  1  float32[3,3]  result[1][0]  a new array
  2  float32[3,3]  result[1][1]  a view of output 1 (transpose)
  3  float32[3,3]  result[1][2]  input 2 itself
  4  float32[3,3]  result[1][3]  a view of input 2 (transpose)
  5  float32[3,3]  result[1][4]  the same array as output 1"""
    )
