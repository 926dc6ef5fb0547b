"""Callbacks and rules of the user's are refused and named, unless they have a key; those of JAX are known."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.cache.fingerprint import WithoutRules, fingerprint, foreign_rules
from jointcut.partition.errors import IdentityError

CURE = (
    "Give it an attribute `cache_key`, a string that changes whenever its behaviour does, or switch the cache off for "
    "this function."
)
NAMELESS = "which has no name that another process would know it by."
X = np.arange(4, dtype=np.float32)


def key_of_program(function):
    return fingerprint(program=jax.make_jaxpr(function)(X))


def refusal(**parts):
    with pytest.raises(IdentityError) as caught:
        fingerprint(**parts)
    return str(caught.value)


def at(function, text):
    """Where JAX says that the line of a function stands in which a text is found."""
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{line} ({function.__qualname__})"


def with_key(function, key):
    function.cache_key = key
    return function


def doubled(x):
    return np.asarray(x) * 2


def calling_back(function):
    def program(x):
        return jax.pure_callback(function, x, x)

    return program


def sine_with(forward, backward):
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(forward, backward)
    return sine


def forward_rule(x):
    return jnp.sin(x), x


def backward_rule(kept, ct):
    return (ct * jnp.cos(kept),)


def slope_rule(primals, tangents):
    return jnp.sin(primals[0]), tangents[0]


def ruled(x):
    return sine_with(forward_rule, backward_rule)(x)


def sloped(x):
    sine = jax.custom_jvp(jnp.sin)
    sine.defjvp(slope_rule)
    return lax.scan(lambda c, _: (sine(c), None), x, None, length=2)[0]


def test_a_callback_is_refused_and_the_place_named():
    closed = jax.make_jaxpr(calling_back(doubled))(X)
    where = f"program: pure_callback at {__file__}:{calling_back.__code__.co_firstlineno + 2}"
    assert refusal(program=closed) == (
        f"{where} (calling_back.<locals>.program): callback.callback_func is the function {__name__}.doubled, "
        f"{NAMELESS}\n{CURE}"
    )


def test_a_callback_inside_a_loop_is_refused_and_both_places_named():
    program = calling_back(doubled)

    def looped(x):
        return lax.fori_loop(0, 3, lambda i, c: program(c), x)

    text = refusal(program=jax.make_jaxpr(looped)(X))
    assert text.startswith(f"program: scan at {at(looped, 'fori_loop')}: jaxpr: pure_callback at {__file__}:")


def test_a_rule_of_the_users_is_refused_and_listed():
    closed = jax.make_jaxpr(ruled)(X)
    where = f"program: custom_vjp_call at {at(ruled, 'return')}: bwd"
    assert refusal(program=closed) == f"{where} is the function {__name__}.backward_rule, {NAMELESS}\n{CURE}"
    lines = {f: f"{f.__name__} at {__file__}:{f.__code__.co_firstlineno}" for f in (forward_rule, backward_rule)}
    assert foreign_rules(closed) == (lines[backward_rule], lines[forward_rule])


def test_rules_are_listed_however_deep_they_stand():
    closed = jax.make_jaxpr(lambda x: jax.jit(sloped)(x))(X)
    assert foreign_rules(closed) == (f"slope_rule at {__file__}:{slope_rule.__code__.co_firstlineno}",)


def test_policies_and_reducers_of_the_users_are_rules_too():
    def program(x):
        x = jax.checkpoint(jnp.sin, policy=lambda *_, **__: True)(x)
        return lax.reduce(x, np.float32(0), lambda a, b: a + 2 * b, (0,))

    closed = jax.make_jaxpr(program)(X)
    assert foreign_rules(closed) == (f"reduce at {at(program, 'reduce')}", f"remat2 at {at(program, 'checkpoint')}")
    assert fingerprint(program=WithoutRules(closed))


def test_without_rules_a_program_counts_by_what_it_computes():
    keys = [fingerprint(program=WithoutRules(jax.make_jaxpr(f)(X))) for f in (ruled, sloped, jnp.sin)]
    assert len(set(keys)) == len(keys)
    other = sine_with(lambda x: (jnp.sin(x), None), lambda kept, ct: (ct,))
    assert fingerprint(program=WithoutRules(jax.make_jaxpr(lambda x: other(x))(X))) == keys[0]


def test_the_derivative_tells_rules_apart_that_the_program_does_not():
    def key(slope):
        sine = sine_with(forward_rule, lambda kept, ct: (slope * ct,))
        function = aot.function(lambda x: jnp.sum(sine(x)))
        return fingerprint(program=WithoutRules(function.trace(jnp.asarray(X)).joint))

    assert key(2.0) == key(2.0) != key(3.0)


OWN = (
    *(jax.nn.relu, jax.nn.relu6, jax.nn.gelu, jax.nn.silu, jax.nn.selu, jax.nn.softplus, jax.nn.softmax),
    *(jax.nn.log_softmax, jax.nn.logsumexp, jnp.sinc, jax.scipy.special.i0e, jax.scipy.special.logsumexp),
)


def test_rules_of_jax_are_known_by_name():
    closed = [jax.make_jaxpr(function)(X) for function in OWN]
    assert [foreign_rules(c) for c in closed] == [()] * len(OWN)
    keys = [fingerprint(program=c) for c in closed]
    assert keys == [key_of_program(lambda x, f=f: f(x)) for f in OWN]


def test_a_rule_counts_unless_it_is_left_out():
    def softened(tangent):
        rule = with_key(lambda primals, tangents: (primals[0], tangent(tangents[0])), tangent.__name__)
        same = jax.custom_jvp(lambda x: x)
        same.defjvp(rule)
        return jax.make_jaxpr(lambda x: same(x))(X)

    one, other = softened(jnp.sin), softened(jnp.cos)
    assert fingerprint(program=one) != fingerprint(program=other)
    assert fingerprint(program=WithoutRules(one)) == fingerprint(program=WithoutRules(other))


def test_a_cache_key_is_accepted_and_counts():
    def callback(key):
        return key_of_program(calling_back(with_key(lambda x: x, key)))

    def rules(first, second):
        forward = with_key(lambda x: forward_rule(x), first)
        backward = with_key(lambda kept, ct: backward_rule(kept, ct), second)
        return key_of_program(lambda x: sine_with(forward, backward)(x))

    def slope(key):
        rule = with_key(lambda primals, tangents: slope_rule(primals, tangents), key)

        def program(x):
            sine = jax.custom_jvp(jnp.sin)
            sine.defjvp(rule)
            return sine(x)

        return key_of_program(program)

    assert callback("1") == callback("1") != callback("2")
    assert rules("1", "1") == rules("1", "1")
    assert len({rules("1", "1"), rules("2", "1"), rules("1", "2")}) == 3
    assert slope("1") == slope("1") != slope("2")
