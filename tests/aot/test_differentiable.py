"""Whether a gradient can flow, and the op and line that stop it."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

from jointcut import aot
from jointcut.aot.call.flow import Stop
from jointcut.partition.errors import TraceError

X = jnp.arange(1.0, 4.0)


def in_a_while(x):
    return jnp.sum(lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c * 2, x))


def called_back_in_a_while(x):
    def body(c):
        io_callback(lambda: None, None, ordered=True)
        return c * 2

    return jnp.sum(lax.while_loop(lambda c: jnp.sum(c) < 10, body, x))


def in_a_while_in_a_scan(x):
    def step(c, _):
        return lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c * 2, c), None

    return jnp.sum(lax.scan(step, x, None, 2)[0])


def stopped(x):
    return jnp.sum(lax.stop_gradient(x) * 2)


def rounded_in_a_scan(x):
    return jnp.sum(lax.scan(lambda c, _: (jnp.round(c) * 2, None), x, None, 3)[0])


def in_a_branch(x):
    return lax.cond(jnp.sum(x) > 0, lambda x: jnp.sum(jnp.sign(x)), lambda x: jnp.sum(jnp.floor(x)), x)


def called_back(x):
    return jnp.sum(jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((3,), jnp.float32), x))


def largest(x):
    return jnp.argmax(x)


def counted(x):
    return jnp.sum(x.astype(jnp.int32)).astype(jnp.float32)


@jax.custom_vjp
def no_gradient(x):
    return x * 2


no_gradient.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.zeros_like(g),))


def ruled(x):
    return jnp.sum(no_gradient(x))


ZERO = "its derivative is zero."


def integer(shown):
    return f"it returns {shown}, and only floating-point arrays carry a derivative."


STOPS = {
    stopped: [("stop_gradient", "stopped", 1, ZERO)],
    rounded_in_a_scan: [("round", "rounded_in_a_scan.<locals>.<lambda>", 1, ZERO)],
    in_a_branch: [
        ("floor", "in_a_branch.<locals>.<lambda>", 1, ZERO),
        ("sign", "in_a_branch.<locals>.<lambda>", 1, ZERO),
    ],
    called_back: [
        ("pure_callback", "called_back", 1, "It cannot be differentiated: Pure callbacks do not support JVP.")
    ],
    largest: [("argmax", "largest", 1, integer("int32[]"))],
    counted: [("convert_element_type", "counted", 1, integer("int32[3]"))],
    ruled: [("custom_vjp_call", "ruled", 1, ZERO)],
}


def test_a_while_loop_with_an_effect_stops_it():
    (stop,) = aot.is_differentiable(called_back_in_a_while, X).stops
    assert stop.op == "while_loop" and "(called_back_in_a_while)" in stop.source
    place = r"\S*test_differentiable\.py:\d+"
    assert re.fullmatch(
        rf"the lax\.while_loop at {place} \(called_back_in_a_while\) has the effect OrderedIO, "
        rf"in {place} \(\S*body\); so the loop has no derivative\.",
        stop.why,
    )


@pytest.mark.parametrize("function", [in_a_while, in_a_while_in_a_scan])
def test_a_while_loop_does_not_stop_it(function):
    found = aot.is_differentiable(function, X)
    assert found and str(found) == f"{function.__name__} is differentiable."


@pytest.mark.parametrize(("function", "stops"), STOPS.items(), ids=[f.__name__ for f in STOPS])
def test_the_op_and_the_line_that_stop_the_gradient_are_named(function, stops):
    found = aot.is_differentiable(function, X)
    assert not found
    assert (found.reached, found.unreached) == ((), ("args[0]",))
    assert [(s.op, s.why) for s in found.stops] == [(op, why) for op, _, _, why in stops]
    first = inspect.getsourcelines(function)[1]
    for stop, (_, name, line, _) in zip(found.stops, stops, strict=True):
        assert f"test_differentiable.py:{first + line} ({name})" in stop.source


FLOWS = {
    "a square": lambda x: jnp.sum(x**2),
    "a scan": lambda x: jnp.sum(lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 3)[0]),
    "a branch": lambda x: lax.cond(x[0] > 0, lambda x: jnp.sum(x), lambda x: 0.0, x),
    "an index that is computed": lambda x: x[jnp.argmax(x)],
    "beside what is stopped": lambda x: jnp.sum(x) + jnp.sum(jnp.round(x)),
    "a checkpoint": lambda x: jnp.sum(jax.checkpoint(jnp.sin)(x)),
    "several outputs": lambda x: (jnp.sign(x), jnp.argmax(x), x),
    "complex numbers": lambda x: jnp.sum(jnp.abs(lax.complex(x, x))),
}


@pytest.mark.parametrize("function", FLOWS.values(), ids=FLOWS)
def test_a_gradient_that_flows_is_told(function):
    found = aot.is_differentiable(function, X)
    assert found
    assert (found.reached, found.unreached, found.stops) == (("args[0]",), (), ())
    assert str(found) == "<lambda> is differentiable."


def test_what_no_gradient_reaches_is_named_beside_what_it_reaches():
    def loss(params):
        return jnp.sum(lax.stop_gradient(params["frozen"]) * params["w"])

    found = aot.is_differentiable(loss, {"frozen": X, "idle": X, "w": X})
    assert found.reached == ("args[0]['w']",)
    assert found.unreached == ("args[0]['frozen']", "args[0]['idle']")
    (stop,) = found.stops
    assert str(found) == (
        "loss is differentiable.\n"
        "No gradient reaches args[0]['frozen'], args[0]['idle'].\n"
        f"  stop_gradient at {stop.source}: its derivative is zero."
    )


def test_an_output_that_reads_nothing_that_is_differentiated():
    assert str(aot.is_differentiable(lambda x: jnp.ones(2), X)) == (
        "<lambda> is not differentiable.\nNo gradient reaches args[0]: no output reads it."
    )


def test_an_integer_argument_is_the_reason():
    found = aot.is_differentiable(lambda n: n * 2.0, jnp.arange(3))
    assert found.stops == (Stop("", "", "args[0] is int32: value_and_grad differentiates floating-point arguments."),)
    assert str(found) == f"<lambda> is not differentiable.\n  {found.stops[0].why}"


def test_a_write_to_a_reference_stops_the_gradient():
    ref = jax.new_ref(jnp.zeros(3))

    def through(x):
        ref[...] = x
        return jnp.sum(ref[...])

    (stop,) = aot.is_differentiable(through, X).stops
    assert (stop.op, stop.why) == ("swap", "it touches a reference, through which no gradient flows.")


def test_functions_of_ours_are_asked_with_their_own_options():
    @aot.function(argnums=1, static_argnums=2, has_aux=True)
    def loss(n, x, power):
        return jnp.sum(x**power), n

    assert aot.is_differentiable(loss, jnp.arange(3), X, 2).reached == ("args[1]",)
    assert loss.is_differentiable(jnp.arange(3), jax.ShapeDtypeStruct((3,), jnp.float32), 2)
    assert not aot.is_differentiable(loss, jnp.arange(3), jnp.arange(3), 2)
    assert aot.is_differentiable(lambda n, x, p: x**p, jnp.arange(3), X, 2, argnums=1, static_argnums=2)


def test_a_position_that_is_none_is_refused():
    with pytest.raises(TraceError) as caught:
        aot.is_differentiable(lambda x: x, X, argnums=1)
    assert str(caught.value) == (
        "argnums=1 needs at least 2 positional arguments, but got 1.\nPass it by position, or change argnums."
    )


def test_nothing_is_run(capsys):
    def printing(x):
        jax.debug.print("ran")
        return jnp.sum(x)

    assert aot.is_differentiable(printing, X)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


def test_metadata_looks_into_loops_too():
    def outputs(x):
        def step(c, _):
            return (jnp.round(c[0]) * 2, jnp.sin(c[1])), None

        return lax.scan(step, (x, x), None, 3)[0]

    infos = aot.function(outputs).trace(X).metadata.output_info
    assert [info.requires_grad for info in infos] == [False, True]
