"""A user's pass rewrites the joint program before it is cut, in every way of calling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from jointcut import aot
from jointcut.partition.errors import TraceError
from jointcut.wrappers import Descriptors, rerun

X, W = jnp.linspace(0.1, 1.0, 32).reshape(4, 8), jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)


def loss(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


class Pass:
    """A pass that computes some equations otherwise, and remembers what it was given."""

    def __init__(self, change):
        self.change, self.given = change, []

    def before_cut(self, joint, descriptors):
        self.given.append((joint, descriptors))
        return rerun(joint, self.change)


def by_exponentials(place, eqn, operands, run):
    """Write tanh by the exponential function: a decomposition."""
    if eqn.primitive.name != "tanh":
        return run(*operands)
    e = jnp.exp(2 * operands[0])
    return [(e - 1) / (e + 1)]


def sines(place, eqn, operands, run):
    """Put the sine in the place of tanh: no honest pass, so that one sees where it runs."""
    return [jnp.sin(operands[0])] if eqn.primitive.name == "tanh" else run(*operands)


def unchanged(place, eqn, operands, run):
    """Compute each equation as it is."""
    return run(*operands)


class EightBits:
    """Let what no output needs read large values in eight bits, so that the backward finds these."""

    def before_cut(self, joint, descriptors):
        needed, late, small = {*joint.jaxpr.outvars[: len(descriptors.outputs)]}, set(), {}
        for place, eqn in reversed(list(enumerate(joint.jaxpr.eqns))):
            if needed.isdisjoint(eqn.outvars):
                late.add(place)
            else:
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        made = {v for eqn in joint.jaxpr.eqns for v in eqn.outvars} & needed

        def change(place, eqn, operands, run):
            for i, v in enumerate(eqn.invars):
                if place in late and not isinstance(v, Literal) and v in made and v.aval.size >= 32:
                    if v not in small:
                        small[v] = jnp.round(operands[i] * 127).astype(jnp.int8)
                    operands[i] = small[v].astype(v.aval.dtype) / 127
            return run(*operands)

        return rerun(joint, change)


def near(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def in_debug_mode(function):
    with aot.debug():
        return function.value_and_grad(W, X)


def through_vjp(function):
    value, pullback = function.vjp(W, X)
    return value, pullback(jnp.float32(1))[0]


WAYS = {
    "value_and_grad": lambda f: f.value_and_grad(W, X),
    "vjp": through_vjp,
    "jax.value_and_grad around": lambda f: jax.value_and_grad(f)(W, X),
    "jax.jit around": lambda f: jax.jit(f.value_and_grad)(W, X),
    "jax.vmap around": lambda f: jax.tree.map(
        lambda x: x[0], jax.vmap(jax.value_and_grad(f), (None, 0))(W, jnp.stack([X, X + 1]))
    ),
    "debug mode": in_debug_mode,
    "stages": lambda f: f.trace(W, X).partition().compile().value_and_grad(W, X),
    "two programs": lambda f: f.trace(W, X).partition().compile(executables=2).value_and_grad(W, X),
    "a strategy": lambda f: f.trace(W, X).partition("save_all").compile().value_and_grad(W, X),
    "a budget": lambda f: f.trace(W, X).partition(budget=1.0).compile().value_and_grad(W, X),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_decomposition_holds_in_every_way_of_calling(way):
    decomposed = Pass(by_exponentials)
    near(way(aot.function(loss, wrappers=[decomposed])), jax.value_and_grad(loss)(W, X))
    assert decomposed.given


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_runs_is_the_rewritten_program(way):
    def swapped(w, x):
        for _ in range(3):
            x = jnp.sin(x @ w)
        return jnp.mean(x**2)

    value, _ = way(aot.function(loss, wrappers=[Pass(sines)]))
    np.testing.assert_allclose(value, swapped(W, X), rtol=1e-5)


def test_a_call_without_a_gradient_is_not_cut_and_not_rewritten():
    ours = aot.function(loss, wrappers=[Pass(sines)])
    np.testing.assert_allclose(ours(W, X), loss(W, X), rtol=1e-6)
    assert ours.trace(W, X).partition is not None


def test_residuals_are_kept_in_eight_bits():
    plain = aot.function(loss, strategy="min_cut").trace(W, X).partition()
    cut = aot.function(loss, strategy="min_cut", wrappers=[EightBits()]).trace(W, X).partition()
    kept = [r for r in cut.descriptors.residuals if r.kind == "saved"]
    assert kept
    assert {r.dtype for r in kept} == {"int8"}
    assert (cut.plan.bytes_saved, plain.plan.bytes_saved) == (96, 384)
    got, want = cut.compile().value_and_grad(W, X), jax.value_and_grad(loss)(W, X)
    assert got[0] == plain.compile().value_and_grad(W, X)[0]
    error = jnp.linalg.norm(got[1] - want[1]) / jnp.linalg.norm(want[1])
    assert 0 < error < 0.02


def test_an_update_a_tape_and_an_accumulation_run_the_rewritten_program():
    ours, want = aot.function(loss, wrappers=[Pass(by_exponentials)]), jax.grad(loss)(W, X)
    _, params, _ = ours.value_and_update(W + 0.0, (), X, update=lambda g, state, p: (p - g, state))
    near(params, W - want)
    near(aot.tape(lambda w, x: ours(w, x) * 2).grad(W, X), 2 * want)
    sums = jax.new_ref(jnp.ones_like(W))
    ours.accumulate_into(sums)(W, X)
    near(sums[...], 1 + want)


def test_two_passes_run_in_order_and_one_may_be_a_wrapper_too():
    first, second = Pass(by_exponentials), Pass(unchanged)
    cut = aot.function(loss, wrappers=[first, second]).trace(W, X).partition()
    names = [eqn.primitive.name for eqn in second.given[0][0].jaxpr.eqns]
    assert "exp" in names
    assert "tanh" not in names
    near(cut.compile().value_and_grad(W, X), jax.value_and_grad(loss)(W, X))


def test_arrays_that_a_pass_closes_over_become_inputs():
    table = jnp.linspace(0.5, 1.5, 8)

    def scaled(place, eqn, operands, run):
        return [x * table / table for x in run(*operands)] if eqn.primitive.name == "tanh" else run(*operands)

    seen = Pass(scaled), Pass(unchanged)
    offset = jnp.linspace(0.0, 0.1, 8)
    ours = aot.function(lambda w, x: loss(w, x + offset), wrappers=seen)
    near(ours.value_and_grad(W, X), jax.value_and_grad(lambda w, x: loss(w, x + offset))(W, X))
    near(jax.grad(ours)(W, X), jax.grad(lambda w: loss(w, X + offset))(W))
    counts = [[i.kind for i in each.given[0][1].inputs].count("constant") for each in seen]
    assert counts == [1, 2]


def test_effects_stay_where_they_were(capfd):
    def noisy(w, x):
        jax.debug.print("forward", ordered=True)
        return loss(w, x)

    ours = aot.function(noisy, wrappers=[Pass(by_exponentials)])
    near(ours.value_and_grad(W, X), jax.value_and_grad(loss)(W, X))
    jax.effects_barrier()
    assert capfd.readouterr().out == "forward\n"


def test_an_array_that_is_passed_twice_and_rows_of_a_table_are_described():
    seen = Pass(by_exponentials)

    def function(table, same, x):
        return jnp.sum(jnp.tanh(table[:2] * x)) + jnp.sum(same)

    made = aot.function(function, argnums=(1, 2), wrappers=[seen])
    near(made.value_and_grad(W, W, X[:2]), jax.value_and_grad(function, (1, 2))(W, W, X[:2]))
    (joint, descriptors), *_ = seen.given
    assert [d.path for d in descriptors.inputs] == ["args[0]", "args[2]"]
    assert [(g.of, g.path) for g in descriptors.gradients] == [("primals_1", "args[1]"), ("primals_2", "args[2]")]
    assert len(joint.jaxpr.invars) == len(descriptors.inputs) + len(descriptors.tangents)


def test_descriptors_name_every_array_of_the_joint_program():
    seen = Pass(by_exponentials)
    aot.function(lambda p, x: (loss(p["w"], x), x), has_aux=True, wrappers=[seen]).trace({"w": W}, X)
    joint, descriptors = seen.given[0]
    ends = (*descriptors.inputs, *descriptors.tangents), (*descriptors.outputs, *descriptors.gradients)
    for described, variables in zip(ends, (joint.jaxpr.invars, joint.jaxpr.outvars), strict=True):
        assert [(d.shape, d.dtype) for d in described] == [(v.aval.shape, str(v.aval.dtype)) for v in variables]
    assert str(descriptors) == (
        "inputs\n"
        "  primals_1  float32[8,8]  parameter args[0]['w']\n"
        "  primals_2  float32[4,8]  user_input args[1]\n"
        "outputs\n"
        "  output_1  float32[]     output result[0]\n"
        "  output_2  float32[4,8]  aux result[1]\n"
        "tangents\n"
        "  tangents_1  float32[]  of output_1\n"
        "gradients\n"
        "  gradient_1  float32[8,8]  of args[0]['w']"
    )
    metadata = descriptors.metadata.fw_metadata
    assert [info.path for info in metadata.input_info] == ["args[0]['w']", "args[1]"]
    assert joint.jaxpr.eqns[descriptors.forward_ops - 1].primitive.name != "transpose"
    late = [eqn for eqn in joint.jaxpr.eqns[: descriptors.forward_ops] if joint.jaxpr.invars[-1] in eqn.invars]
    assert late == []


def test_a_cut_describes_its_residuals_and_cotangents():
    cut = aot.function(loss, strategy="min_cut").trace(W, X).partition()
    descriptors = cut.descriptors
    forward, backward = cut.forward.jaxpr, cut.backward.jaxpr
    taken = [*descriptors.residuals, *descriptors.tangents]
    assert [(d.shape, d.dtype) for d in taken] == [(v.aval.shape, str(v.aval.dtype)) for v in backward.invars]
    assert [d.shape for d in descriptors.gradients] == [v.aval.shape for v in backward.outvars]
    assert [d.shape for d in descriptors.inputs] == [v.aval.shape for v in forward.invars]
    saved = [d for d in descriptors.residuals if d.kind == "saved"]
    assert len(saved) == len(forward.outvars) - len(descriptors.outputs)
    assert {d.op for d in saved} == {"tanh"}
    assert all("test_before_cut.py" in d.source for d in saved)
    inference = aot.function(lambda n: n + 1, argnums=()).trace(3).partition().descriptors
    assert (inference.residuals, inference.tangents, inference.gradients) == ((), (), ())


def test_programs_in_the_cache_know_the_rewritten_program(tmp_path):
    for _ in range(2):
        honest = aot.function(loss, cache=tmp_path)
        other = aot.function(loss, cache=tmp_path, wrappers=[Pass(sines)])
        near(honest.value_and_grad(W, X), jax.value_and_grad(loss)(W, X))
        assert abs(float(other.value_and_grad(W, X)[0]) - float(loss(W, X))) > 1e-3
    assert len(list(tmp_path.rglob("*"))) > 0


def test_a_rewritten_program_is_exported_for_fixed_and_symbolic_sizes(tmp_path):
    ours = aot.function(loss, wrappers=[Pass(sines)])
    want = ours.value_and_grad(W, X)
    ours.export(tmp_path / "fixed", W, X, platforms="cpu")
    near(aot.load(tmp_path / "fixed").value_and_grad(W, X), want)
    sized = aot.shapes("b, 8", "float32")
    ours.export(tmp_path / "sized", W, sized, sizes={"b": 4}, platforms="cpu")
    near(aot.load(tmp_path / "sized").value_and_grad(W, X), want)


def test_loops_and_checkpoints_are_rewritten_around_and_kept():
    def function(w, x):
        x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        x = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]
        x = aot.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]
        return jnp.sum(jnp.tanh(x))

    for derivatives in ("jax", "finite"):
        ours = aot.function(function, derivatives=derivatives, wrappers=[Pass(by_exponentials)])
        near(ours.value_and_grad(W, X), jax.value_and_grad(function)(W, X), rtol=1e-4)


# ---------------------------------------------------------------------------------------------- bad passes

CURE = "Return a closed jaxpr with the inputs and outputs of the joint program that it is given, in their order."


def jaxpr_of(change):
    """Return a pass that changes the flat results of the joint program."""

    def before_cut(joint, descriptors):
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in joint.jaxpr.invars]
        return jax.make_jaxpr(lambda *arrays: change(arrays, jax.core.eval_jaxpr(joint.jaxpr, (), *arrays)))(*structs)

    return before_cut


BAD = {
    "no jaxpr": (lambda joint, descriptors: None, f"returned a NoneType, not a jaxpr.\n{CURE}"),
    "fewer outputs": (
        jaxpr_of(lambda arrays, results: results[:1]),
        f"returned a program of 3 inputs and 1 outputs, and was given one of 3 and 2.\n{CURE}",
    ),
    "another shape": (
        jaxpr_of(lambda arrays, results: [results[0], results[1].reshape(64)]),
        f"returned a program whose gradient_1 is float32[64], not float32[8,8].\n{CURE}",
    ),
    "another dtype": (
        jaxpr_of(lambda arrays, results: [results[0].astype(jnp.bfloat16), results[1]]),
        f"returned a program whose output_1 is bfloat16[], not float32[].\n{CURE}",
    ),
    "an output of the cotangent": (
        jaxpr_of(lambda arrays, results: [results[0] * arrays[2], results[1]]),
        "returned a program whose output_1 reads a cotangent.\n"
        "Compute the outputs from the inputs alone: the forward runs before there are cotangents.",
    ),
    "a new effect": (
        jaxpr_of(lambda arrays, results: (jax.debug.print("{}", results[0], ordered=True), results)[1]),
        "returned a program with the effects debug_print, and was given one with none.\n"
        "Keep the equations that have effects, in their order.",
    ),
}


@pytest.mark.parametrize(("before_cut", "what"), BAD.values(), ids=BAD)
def test_a_pass_that_returns_another_program_is_named(before_cut, what):
    class Wild:
        def before_cut(self, joint, descriptors):
            return before_cut(joint, descriptors)

    ours = aot.function(loss, wrappers=[Wild()])
    for way in (ours.value_and_grad, ours.trace, jax.grad(ours)):
        with pytest.raises(TraceError) as caught:
            way(W, X)
        assert str(caught.value) == f"before_cut of Wild {what}"


def test_an_effect_that_would_read_a_cotangent_is_refused():
    class Wild:
        def before_cut(self, joint, descriptors):
            def program(*arrays):
                def change(place, eqn, operands, run):
                    return run(arrays[-1]) if eqn.effects else run(*operands)

                made = rerun(joint, change)
                return jax.core.eval_jaxpr(made.jaxpr, made.consts, *arrays)

            structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in joint.jaxpr.invars]
            return jax.make_jaxpr(program)(*structs)

    def noisy(w, x):
        jax.debug.print("{}", x[0, 0], ordered=True)
        return loss(w, x)

    with pytest.raises(TraceError) as caught:
        aot.function(noisy, wrappers=[Wild()]).trace(W, X)
    assert str(caught.value) == (
        "before_cut of Wild returned a program in which debug_print, an effect of the forward, reads a cotangent.\n"
        "Keep the equations that have effects, with their operands."
    )


def test_a_change_that_gives_other_results_is_named():
    def wrong(place, eqn, operands, run):
        return [jnp.sum(operands[0])] if eqn.primitive.name == "tanh" else run(*operands)

    with pytest.raises(
        TraceError, match=r"The change of tanh at .*test_before_cut.py:\d+ \(loss\) gives float32\[\]"
    ) as caught:
        aot.function(loss, wrappers=[Pass(wrong)]).trace(W, X)
    assert str(caught.value).endswith(
        ", where the equation gives float32[4,8].\n"
        "Return a list of its results; run(*operands) computes the equation itself."
    )


def test_what_a_pass_writes_has_the_line_and_scope_of_what_it_replaces():
    cut = aot.function(loss, strategy="min_cut", wrappers=[EightBits()]).trace(W, X).partition()
    kept = [r for r in cut.descriptors.residuals if r.kind == "saved"]
    assert all("test_before_cut.py" in r.source and "(loss)" in r.source for r in kept)
    same = aot.function(loss, wrappers=[Pass(unchanged)]).trace(W, X)
    plain = aot.function(loss).trace(W, X)
    assert [str(e.source_info.name_stack) for e in same.joint.jaxpr.eqns] == [
        str(e.source_info.name_stack) for e in plain.joint.jaxpr.eqns
    ]
    assert str(same.joint) == str(plain.joint)


def test_descriptors_are_part_of_the_public_names():
    assert Descriptors.__module__ == "jointcut.wrappers.metadata.descriptors"
