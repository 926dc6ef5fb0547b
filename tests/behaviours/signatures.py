"""What an exported pair says of itself: names, positions, the joint program, and calling conventions driven by hand."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from behaviours.behaviour import assert_near, behaviour, counts, primitives, refusal
from corpus.program import normal
from jointcut import aot
from jointcut.partition.errors import CallError, DerivativeError, RecordError, TraceError
from jointcut.partition.program.roles import Role
from jointcut.wrappers.metadata.schemas import SubclassMeta, ViewAndMutationMeta
from jointcut.wrappers.metadata.signatures import BackwardSignature, GraphSignature

X, Y = normal(80, 3), normal(81, 3)
S = normal(82, 3, 3)
TABLE = normal(83, 3)
N = jnp.arange(3)
ONE = jnp.float32(1)


def loss(weights, batch, state):
    """Two parameters, a batch with integers, and a counter; aux beside the loss."""
    state["steps"][...] += 1
    hidden = jnp.tanh(batch["x"] * weights["w"] + weights["b"])[batch["n"]]
    return jnp.sum(hidden**2), {"hidden": hidden, "n": batch["n"]}


def arguments():
    """Arguments of the loss."""
    weights, batch = {"w": X, "b": Y}, {"x": X + Y, "n": N}
    return weights, batch, {"steps": jax.new_ref(jnp.int32(0))}


def signed(function, *args, **options):
    """The signature of a pair."""
    return aot.function(function, **options).trace(*args).partition().signature


# ------------------------------------------------------------------------------------------------ names


@behaviour(
    "export signature / parameters, buffers and user inputs", "Each input of the programs has a name and a kind."
)
def inputs_have_names_and_kinds():
    signature = signed(loss, *arguments(), has_aux=True)
    assert signature.parameters == ("args[0]['b']", "args[0]['w']")
    assert signature.inputs_to_parameters == {"primals_1": "args[0]['b']", "primals_2": "args[0]['w']"}
    assert signature.buffers == ("args[2]['steps']",)
    assert signature.inputs_to_buffers == {"primals_5": "args[2]['steps']"}
    assert signature.user_inputs == ("primals_3", "primals_4")


@behaviour("export signature / user outputs", "Outputs are numbered, aux after what is differentiated.")
def outputs_have_names():
    signature = signed(loss, *arguments(), has_aux=True)
    assert signature.user_outputs == ("output_1", "output_2", "output_3")


@behaviour(
    "export signature / buffers to mutate", "A Ref is written where it lies: there is no result with its new state."
)
def written_references_are_told():
    writes = signed(loss, *arguments(), has_aux=True)
    assert (writes.buffers_to_mutate, writes.buffers_mutated_in_place) == ({}, ("args[2]['steps']",))
    reads = signed(lambda x, ref: jnp.sum(x * ref[...]), X, jax.new_ref(Y))
    assert (reads.buffers, reads.buffers_to_mutate, reads.buffers_mutated_in_place) == (("args[1]",), {}, ())


@behaviour("export signature / gradients to parameters", "Each gradient has a name and the path of its leaf.")
def gradients_have_names():
    backward = signed(loss, *arguments(), has_aux=True).backward_signature
    assert backward.gradients_to_parameters == {"gradient_1": "args[0]['b']", "gradient_2": "args[0]['w']"}
    assert (backward.gradients_to_user_inputs, backward.loss_output) == ({}, "output_1")


@behaviour("export signature / loss_output", "The one output with a cotangent; no name where there are several.")
def the_loss_has_a_name():
    assert signed(lambda x: (N, jnp.sum(jnp.sin(x))), X).backward_signature.loss_output == "output_2"
    assert signed(lambda x: (jnp.sin(x), jnp.cos(x)), X).backward_signature.loss_output == ""


@behaviour(
    "export signature / captured constants", "They lead the inputs, so that names of arguments begin after them."
)
def constants_lead_the_inputs():
    signature = signed(lambda x: jnp.sum(jnp.sin(x) * TABLE), X)
    assert signature.inputs_to_parameters == {"primals_2": "args[0]"}
    assert signature.user_inputs == ()


@behaviour("export signature / duplicate inputs", "One array at two places has one name.")
def a_duplicate_has_one_name():
    signature = signed(lambda a, b: jnp.sum(a * jnp.sin(b)), X, X, argnums=1)
    assert signature.inputs_to_parameters == {"primals_1": "args[1]"}
    assert signature.user_inputs == ("primals_1",)


@behaviour("export signature / inference", "Without anything to differentiate there is no backward signature.")
def inference_has_no_backward_signature():
    signature = signed(lambda nothing, x: jnp.sum(x), {}, X)
    assert signature.backward_signature is None
    assert (signature.parameters, signature.user_inputs) == ((), ("primals_1",))


@behaviour("export signature / in_spec and out_spec", "The trees put flat inputs and outputs together again.")
def the_trees_are_told():
    args = arguments()
    signature = signed(loss, *args, has_aux=True)
    assert signature.in_spec == jax.tree.structure((args, {}))
    assert signature.out_spec == jax.tree.structure((0, {"hidden": 0, "n": 0}))


@behaviour(
    "export signature / gradients to user inputs",
    "Under vjp every argument is differentiated; argnums say which are parameters.",
)
def gradients_of_other_arguments():
    pullback = aot.function(lambda x, y, n: jnp.sum(jnp.sin(x * y)[n])).vjp(X, Y, N)[1]
    backward = pullback.backward.signature.backward_signature
    assert backward.gradients_to_parameters == {"gradient_1": "args[0]"}
    assert backward.gradients_to_user_inputs == {"gradient_2": "args[1]"}


@behaviour("export signature / written to disk", "A signature comes back equal from JSON, its backward signature too.")
def a_signature_in_json():
    signature = signed(loss, *arguments(), has_aux=True)
    for indent in (None, 2):
        text = signature.to_json(indent=indent)
        assert list(json.loads(text)) == ["GraphSignature"]
        assert GraphSignature.from_json(text) == signature
    backward = signature.backward_signature
    assert BackwardSignature.from_json(backward.to_json()) == backward


@behaviour("export signature / metadata written to disk", "All that one look taught comes back equal from JSON.")
def metadata_in_json():
    def several(weights, key, ref):
        ref[...] += 1
        h = jnp.sin(weights["w"]) * jax.random.normal(key, (3,)).astype(jnp.float32)
        return h, h[::-1], weights["w"], (weights["h"] * 2).T, key, 3.0

    args = {"w": X, "h": S.astype(jnp.bfloat16)}, jax.random.key(0), jax.new_ref(jnp.int32(0))
    traced = aot.function(several).trace(*args)
    for metadata in (traced.metadata, traced.partition().metadata):
        assert ViewAndMutationMeta.from_json(metadata.to_json()) == metadata
    assert SubclassMeta.from_json(traced.subclass_metadata.to_json()) == traced.subclass_metadata


@behaviour(
    "export signature / something else is read", "A text that is no record is refused, and so is another record."
)
def another_text_is_no_signature():
    cure = "Read what to_json of the same class and version wrote."
    signature = signed(lambda x: jnp.sum(x), X)
    assert refusal(RecordError, GraphSignature.from_json, "[").startswith("GraphSignature is not JSON: ")
    assert refusal(RecordError, BackwardSignature.from_json, "3") == (
        f"BackwardSignature was asked for, but the text holds 3.\n{cure}"
    )
    text = signature.to_json().replace('"parameters"', '"params"')
    assert refusal(RecordError, GraphSignature.from_json, text) == (
        f"GraphSignature is no GraphSignature: missing ['parameters'], unknown ['params'].\n{cure}"
    )


@behaviour("export signature / auxiliary data without a text", "Refused, with the path of what cannot be written.")
def auxiliary_data_without_a_text():
    @jax.tree_util.register_pytree_node_class
    @dataclass(frozen=True)
    class Model:
        """An array and a function."""

        array: Any
        function: Any = jnp.sin

        def tree_flatten(self):
            return (self.array,), self.function

        @classmethod
        def tree_unflatten(cls, function, children):
            return cls(*children, function)

    signature = signed(lambda m: jnp.sum(m.function(m.array)), Model(X, lambda x: x * 2))
    said = refusal(RecordError, signature.to_json)
    assert said.startswith("GraphSignature.in_spec") and "has no JSON form." in said
    assert said.endswith(
        "Give the class auxiliary data of numbers, strings, tuples and dicts, so that it can be written."
    )


@behaviour("export signature / metadata as text", "A line for each input and output, and never more than a screen.")
def metadata_fits_a_screen():
    few = str(aot.function(lambda x, n: (jnp.sin(x)[n], x)).trace(X, N).metadata)
    assert few.splitlines() == [
        "training: forward and backward",
        "inputs",
        "  0  float32[3]  args[0]  read, differentiated",
        "  1  int32[3]    args[1]  read",
        "outputs",
        "  0  float32[3]  result[0]  a new array, carries a gradient",
        "  1  float32[3]  result[1]  input 0 itself, carries a gradient",
    ]
    many = [np.float32(i) for i in range(200)]
    text = str(aot.function(lambda xs: [x * 2 for x in xs]).trace(many).metadata)
    assert len(text.splitlines()) <= 90 and text.count("and 160 more") == 2
    assert max(map(len, text.splitlines())) <= 120


# ------------------------------------------------------------------------------------------------ the joint program


@behaviour("export joint graph / one program", "Constants, arguments and cotangents in; outputs and gradients out.")
def the_joint_program_is_one_jaxpr():
    traced = aot.function(lambda x, y: (jnp.sin(x) * TABLE * y, jnp.argmax(x)), argnums=(0, 1)).trace(X, Y)
    assert counts(traced.joint) == (1 + 2 + 1, 2 + 2)
    outputs = jaxpr_as_fun(traced.joint)(*traced.consts, X, Y, Y)
    want, pullback = jax.vjp(lambda x, y: jnp.sin(x) * TABLE * y, X, Y)
    assert_near(tuple(outputs[:2]), (want, jnp.argmax(X)))
    assert_near(tuple(outputs[2:]), pullback(Y))


@behaviour(
    "export joint graph / inputs and outputs have roles", "The graph says of each input and output what it stands for."
)
def the_joint_program_has_roles():
    graph = aot.function(lambda x, y: jnp.sum(jnp.sin(x) * y)).trace(X, Y).graph
    assert [role for _, role in graph.inputs] == [Role.PRIMAL, Role.PRIMAL, Role.COTANGENT]
    assert [role for _, role in graph.outputs] == [Role.OUTPUT, Role.GRADIENT]
    assert [graph.values[v].label for v, _ in graph.inputs] == ["args[0]", "args[1]", "cotangent 0"]


@behaviour("export joint graph / nothing is computed", "Tracing takes shapes only, and touches no array.")
def tracing_computes_nothing():
    shape = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    traced = aot.function(lambda x: jnp.sum(jnp.sin(x @ x))).trace(shape)
    assert counts(traced.joint) == (2, 2)
    assert traced.partition().plan.bytes_saved == 4 << 40


@behaviour("export joint graph / calls are opened", "The user's jax.jit leaves no call behind, in loops neither.")
def calls_are_opened():
    def nested(x):
        step = jax.jit(lambda h, _: (jax.jit(jnp.sin)(h @ h), None))
        return jnp.sum(jax.jit(lambda x: lax.scan(step, x, None, 3)[0])(x))

    made = aot.function(nested).trace(S).partition()
    for closed in (made.traced.joint, made.forward, made.backward):
        assert not {"pjit", "jit", "closed_call"} & set(primitives(closed))


@behaviour(
    "export joint graph / a joint needs one scalar loss", "Refused otherwise, with what was returned and the way out."
)
def value_and_grad_needs_a_scalar():
    cure = "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."

    def pair(x):
        return jnp.sum(x), x

    assert refusal(TraceError, aot.function(pair).value_and_grad, X) == (
        f"pair returned float32[], float32[3]: value_and_grad needs a real scalar.\n{cure}"
    )
    compiled = aot.function(pair).trace(X).partition().compile()
    assert_near(compiled.vjp(X)[1]((ONE, X)), 1 + X)


# ------------------------------------------------------------------------------------------------ unused and None


@behaviour("export unused and None / unused inputs", "They keep their place in both programs' conventions.")
def unused_inputs_keep_their_place():
    made = aot.function(lambda a, unused, b: jnp.sum(jnp.sin(a) * b), argnums=(0, 1, 2)).trace(X, S, Y).partition()
    assert counts(made.forward)[0] == 3
    assert counts(made.backward)[1] == 3
    assert list(made.signature.inputs_to_parameters) == ["primals_1", "primals_2", "primals_3"]
    for executables in (1, 2):
        _, gradients = made.compile(executables).value_and_grad(X, S, Y)
        assert_near(gradients, (jnp.cos(X) * Y, jnp.zeros((3, 3)), jnp.sin(X)))


@behaviour(
    "export unused and None / keep_unused", "The option keeps unused arguments in the executables, as in jax.jit."
)
def unused_inputs_are_kept_by_option():
    for keep in (False, True):
        made = aot.function(lambda a, unused: jnp.sum(jnp.sin(a)), keep_unused=keep)
        compiled = made.trace(X, S).partition().compile(1)
        assert_near(compiled.value_and_grad(X, S)[1], jnp.cos(X))
        assert compiled.memory.step.argument_bytes == X.nbytes + keep * S.nbytes


@behaviour("export unused and None / None inputs", "None is no input of the program, and stays None in trees.")
def none_is_no_input():
    def partial(weights, mask, x):
        assert mask is None
        return jnp.sum(jnp.sin(weights["w"] * x)), {"bias": weights["bias"]}

    traced = aot.function(partial, has_aux=True).trace({"w": X, "bias": None}, None, Y)
    assert [info.path for info in traced.metadata.input_info] == ["args[0]['w']", "args[2]"]
    for executables in (1, 2):
        compiled = traced.partition().compile(executables)
        (_, aux), gradient = compiled.value_and_grad({"w": X, "bias": None}, None, Y)
        assert aux == {"bias": None} and gradient["bias"] is None


@behaviour("export unused and None / None where an array was", "A compiled program refuses it with its path.")
def none_where_an_array_was_traced():
    compiled = aot.function(lambda x, tree: jnp.sum(jnp.sin(x) * tree["y"])).trace(X, {"y": Y}).partition().compile()
    assert refusal(CallError, compiled.value_and_grad, X, {"y": None}).startswith(
        "The arguments lack args[1]['y'], which was there when traced.\n"
    )


@behaviour(
    "export refusals / an argument that was not traced", "A compiled program tells path, shapes and dtypes that differ."
)
def a_compiled_program_refuses_other_arguments():
    cure = "Trace and compile for this signature too, or call the function itself, which does so by need."
    compiled = aot.function(lambda x, y: jnp.sum(jnp.sin(x) * y)).trace(X, Y).partition().compile()
    for way in (compiled.value_and_grad, compiled.vjp, compiled.forward):
        assert refusal(CallError, way, X, N) == f"args[1] is int32[3], but float32[3] was traced.\n{cure}"


@behaviour("export refusals / another static value", "A compiled program is made for its static values.")
def a_compiled_program_refuses_another_static_value():
    compiled = aot.function(lambda x, n: jnp.sum(jnp.sin(x)) * n, static_argnums=1).trace(X, 2.0).partition().compile()
    said = refusal(CallError, compiled.value_and_grad, X, 3.0)
    assert said.startswith("args[1] is static and 3.0, but 2.0 was traced.\n")


@behaviour("export refusals / no derivative", "An op without a derivative is named when the joint program is traced.")
def an_op_without_derivative():
    made = aot.function(lambda x: jnp.sum(jax.pure_callback(np.sin, x, jnp.exp(x))))
    said = refusal(DerivativeError, made.trace, X)
    assert re.match(r"<lambda> cannot be differentiated at .*\(<lambda>\): Pure callbacks do not support JVP\.", said)
    assert made(X).shape == ()


# ------------------------------------------------------------------------------------------------ conventions


def several(x, y, n):
    """Outputs with and without derivative, one of them an input, and a constant."""
    h = jnp.exp(x @ S)
    return {"h": h, "n": n + 1, "x": x, "out": jnp.sin(h) * y * TABLE}


@behaviour(
    "calling convention / forward", "From constants and arguments to outputs and saved values, flat and in order."
)
def the_forward_by_hand():
    made = aot.function(several, argnums=(0, 1)).trace(X, Y, N).partition()
    flat = [*made.traced.consts, X, Y, N]
    results = jaxpr_as_fun(made.forward)(*flat)
    outputs = jax.tree.leaves(several(X, Y, N))
    assert_near(results[: len(outputs)], outputs)
    assert len(results) == len(outputs) + sum(r.kind == "saved" for r in made.residuals)


@behaviour(
    "calling convention / backward", "From residuals and cotangents to gradients; residuals say where they come from."
)
def the_backward_by_hand():
    made = aot.function(several, argnums=(0, 1)).trace(X, Y, N).partition()
    flat = [*made.traced.consts, X, Y, N]
    results = jaxpr_as_fun(made.forward)(*flat)
    places = {"input": flat, "output": results, "saved": results[made.traced.metadata.num_outputs :]}
    residuals = [places[r.kind][r.index] for r in made.residuals]
    seeds = [Y, X, X + Y]  # h, out and x, in the order of the tree; n has none
    gradients = jaxpr_as_fun(made.backward)(*residuals, *seeds)
    _, pullback = jax.vjp(lambda x, y: {k: v for k, v in several(x, y, N).items() if k != "n"}, X, Y)
    assert_near(tuple(gradients), pullback({"h": Y, "out": X, "x": X + Y}))


@behaviour("calling convention / compiled halves", "Compiled.forward and Compiled.backward speak the same convention.")
def compiled_halves_by_hand():
    made = aot.function(several, argnums=(0, 1)).trace(X, Y, N).partition()
    compiled = made.compile(2)
    out, residuals = compiled.forward(X, Y, N)
    assert_near(out, several(X, Y, N))
    assert len(residuals) == len(made.residuals)
    _, pullback = jax.vjp(lambda x, y: {k: v for k, v in several(x, y, N).items() if k != "n"}, X, Y)
    assert_near(tuple(compiled.backward(residuals, Y, X, X + Y)), pullback({"h": Y, "out": X, "x": X + Y}))


@behaviour(
    "calling convention / order of gradients",
    "Trees come in the order of argnums, flat gradients in that of arguments.",
)
def gradients_come_in_the_order_of_argnums():
    def weighed(a, b, c):
        return jnp.sum(jnp.sin(a) * 2 + jnp.sin(b) * 3 + jnp.sin(c) * 5)

    made = aot.function(weighed, argnums=(2, 0))
    assert_near(made.grad(X, Y, X + Y), (5 * jnp.cos(X + Y), 2 * jnp.cos(X)))
    run = made.trace(X, Y, X + Y).partition().compile(2)
    _, residuals = run.forward(X, Y, X + Y)
    assert_near(tuple(run.backward(residuals, ONE)), (2 * jnp.cos(X), 5 * jnp.cos(X + Y)))


@behaviour("calling convention / static arguments", "They are no inputs, wherever they stand.")
def static_arguments_are_no_inputs():
    def powered(mode, x, n, y):
        return jnp.sum(getattr(jnp, mode)(x) ** n * y)

    made = aot.function(powered, argnums=(1, 3), static_argnums=(0, 2))
    traced = made.trace("sin", X, 2, Y)
    assert counts(traced.partition().forward)[0] == 2
    assert [info.path for info in traced.metadata.input_info] == ["args[1]", "args[3]"]
    want = jax.grad(lambda x, y: powered("sin", x, 2, y), (0, 1))(X, Y)
    for executables in (1, 2):
        assert_near(traced.partition().compile(executables).value_and_grad("sin", X, 2, Y)[1], want)


@behaviour("calling convention / keyword arguments", "They follow the positional ones, by name.")
def keyword_arguments_follow():
    traced = aot.function(lambda x, **more: jnp.sum(jnp.sin(x) * more["b"] + more["a"])).trace(X, b=Y, a=TABLE)
    assert [info.path for info in traced.metadata.input_info] == ["args[0]", "kwargs['a']", "kwargs['b']"]
    assert_near(traced.partition().compile().value_and_grad(X, a=TABLE, b=Y)[1], jnp.cos(X) * Y)


@behaviour("calling convention / one executable or two", "value_and_grad gives the same from either.")
def one_executable_or_two():
    made = aot.function(loss, has_aux=True)
    weights, batch, state = arguments()
    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights, batch, state)
    cut = made.trace(*arguments()).partition()
    for executables in (1, 2):
        compiled = cut.compile(executables)
        assert len(compiled.programs) == executables
        assert_near(compiled.value_and_grad(*arguments()), want)


# ------------------------------------------------------------------------------------------------ Gradient


def drive(function, args, argnums, seeds):
    """Outputs and gradients of a pair that is driven by hand, by the lists of its `Gradient`."""
    g = aot.function(function, argnums=argnums).trace(*args).partition().gradient
    inputs = list({id(leaf): leaf for leaf in jax.tree.leaves(args)}.values())
    outputs = jaxpr_as_fun(g.f)(*inputs)
    taken = [*(seeds[i] for i in g.df_input_vjps), *(inputs[i] for i in g.df_input_captured_inputs)]
    gradients = jaxpr_as_fun(g.df)(*taken, *(outputs[i] for i in g.df_input_captured_outputs))
    assert len(gradients) == len(g.df_output_vjps)
    return g, outputs[: g.f_real_outputs], gradients


@behaviour("Gradient contract / f and df are driven by hand", "Outputs and gradients are those of jax.vjp.")
def a_gradient_is_driven_by_hand():
    for function, args in (
        (lambda x: jnp.cos(jnp.cos(jnp.cos(x))), (X,)),
        (lambda x, y: (jnp.sin(x @ S) * y, jnp.exp(y) * TABLE), (X, Y)),
        (lambda x, y: jnp.sum(lax.scan(lambda h, r: (jnp.sin(h * r), None), x, y)[0]), (X, S)),
    ):
        want, pullback = jax.vjp(function, *args)
        seeds = [jnp.cos(out + 1) for out in jax.tree.leaves(want)]
        _, outputs, gradients = drive(function, args, tuple(range(len(args))), seeds)
        assert_near(outputs, jax.tree.leaves(want))
        tree = jax.tree.unflatten(jax.tree.structure(want), seeds)
        assert_near(gradients, list(pullback(tree)))


@behaviour(
    "Gradient contract / isDifferentiable", "JAX's own rules answer, and the op that stops the gradient is named."
)
def the_query_is_answered():
    assert aot.is_differentiable(lambda x: jnp.sum(jnp.sin(x)), X)
    found = aot.is_differentiable(lambda x: jnp.sum(jnp.round(x)), X)
    assert not found and [stop.op for stop in found.stops] == ["round"]


@behaviour(
    "Gradient contract / real outputs come first", "f returns the function's outputs, then captured temporaries."
)
def real_outputs_come_first():
    g = aot.function(lambda x: (jnp.cos(jnp.cos(jnp.cos(x))), jnp.argmax(x))).trace(X).partition("save_all").gradient
    assert g.f_real_outputs == 2
    assert counts(g.f) == (1, 5)
    assert (g.df_input_captured_inputs, g.df_input_captured_outputs) == ((), (2, 3, 4))


@behaviour("Gradient contract / captures that are inputs", "They are taken from the inputs and not returned again.")
def a_captured_input_is_not_returned():
    g = aot.function(lambda x: jnp.sum(jnp.sin(x))).trace(X).partition().gradient
    assert (g.df_input_captured_inputs, g.df_input_captured_outputs) == ((0,), ())
    assert counts(g.f) == (1, 1)


@behaviour("Gradient contract / captures that are outputs", "They are taken from the outputs and returned once.")
def a_captured_output_is_returned_once():
    g = aot.function(lambda x: jnp.exp(x @ S)).trace(X).partition().gradient
    assert g.df_input_captured_outputs == (0,)
    assert counts(g.f) == (1, 1)


@behaviour("Gradient contract / constants", "What the function closes over is lifted into df and is no capture.")
def constants_are_not_captured():
    g = aot.function(lambda x: jnp.sum(jnp.sin(x) * TABLE)).trace(X).partition().gradient
    assert counts(g.f)[0] == 1
    assert (g.df_input_captured_inputs, g.df_input_captured_outputs) == ((0,), ())
    assert_near(jaxpr_as_fun(g.df)(ONE, X)[0], jnp.cos(X) * TABLE)


@behaviour("Gradient contract / inputs without gradient", "An input whose gradient is zero by structure is left out.")
def inputs_without_gradient_are_left_out():
    g = (
        aot.function(lambda a, unused, b: jnp.sum(jnp.sin(a) * b), argnums=(0, 1, 2))
        .trace(X, S, Y)
        .partition()
        .gradient
    )
    assert g.df_output_vjps == (0, 2)
    assert counts(g.df)[1] == 2


@behaviour(
    "Gradient contract / outputs without gradient", "An output that no gradient depends on has no place in df's inputs."
)
def outputs_without_gradient_are_left_out():
    g = aot.function(lambda x, y: (jnp.argmax(x), jnp.cos(y), jnp.sin(x))).trace(X, Y).partition().gradient
    assert g.df_input_vjps == (2,)
    assert g.f_real_outputs == 3
    assert_near(jaxpr_as_fun(g.df)(Y, X)[0], jnp.cos(X) * Y)


@behaviour("Gradient contract / an array at two places", "Its input occurs twice among those that gradients belong to.")
def a_duplicate_occurs_twice():
    g, outputs, gradients = drive(lambda a, b: jnp.sum(a * jnp.sin(b)), (X, X), (0, 1), [ONE])
    assert g.df_output_vjps == (0, 0)
    assert counts(g.f)[0] == 1
    assert_near(outputs[0], jnp.sum(X * jnp.sin(X)))
    assert_near(gradients, [jnp.sin(X), X * jnp.cos(X)])


@behaviour("Gradient contract / the order of df's inputs", "Cotangents, then captured inputs, then captured outputs.")
def the_order_of_inputs_of_df():
    g = aot.function(lambda x, y: (jnp.exp(x @ S) * y, jnp.exp(x @ S)), argnums=(0, 1)).trace(X, Y).partition().gradient
    lists = (g.df_input_vjps, g.df_input_captured_inputs, g.df_input_captured_outputs)
    assert counts(g.df)[0] == sum(map(len, lists))
    assert g.df_input_vjps == (0, 1)


@behaviour("Gradient contract / nothing to differentiate", "df has neither inputs nor outputs.")
def inference_has_an_empty_df():
    g = aot.function(lambda nothing, x: jnp.sum(jnp.sin(x))).trace({}, X).partition().gradient
    assert counts(g.df) == (0, 0)
    assert (g.df_input_vjps, g.df_output_vjps, g.f_real_outputs) == ((), (), 1)
    assert_near(jaxpr_as_fun(g.f)(X)[0], jnp.sum(jnp.sin(X)))
