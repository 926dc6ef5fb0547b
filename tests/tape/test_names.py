"""The inputs and ops of a captured backward say where they come from."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from jointcut import aot

W = jnp.ones(3)


def labels(capture):
    return re.findall(r'"(residual .*?)"', capture.text)


def test_a_residual_is_named_by_the_first_op_that_keeps_it_and_its_line():
    def loss(w):
        h = jnp.tanh(w)
        return jnp.sum(h * jnp.sin(h))

    taped = aot.tape(loss)
    taped.grad(W)
    line = loss.__code__.co_firstlineno
    told = {re.sub(r"^residual \d+ of ", "", label).replace(__file__, "FILE") for label in labels(taped.captures[0])}
    where = f"({loss.__qualname__})"
    assert told == {f"tanh at FILE:{line + 1} {where}", f"multiply at FILE:{line + 2} {where}"}


def test_a_packed_residual_and_what_a_traced_hook_reads_are_named():
    limit = jnp.full(3, 0.5)

    def clip(g):
        return jnp.minimum(g, limit)

    @aot.tape
    def loss(w):
        with aot.saved_arrays(lambda x: x, aot.Hook(lambda x: x, traced=True)):
            h = aot.on_cotangent(jnp.sin(w), clip, traced=True)
        return jnp.sum(h)

    loss.grad(W)
    told = [label.replace(__file__, "FILE") for label in labels(loss.captures[0])]
    where = loss.__wrapped__.__code__
    assert told == [
        f"residual 0 of sin at FILE:{where.co_firstlineno + 3} ({where.co_qualname}), packed",
        f"residual 1 of the hook {clip.__qualname__} at FILE:{clip.__code__.co_firstlineno}",
    ]


def test_inlined_ops_carry_the_function_that_they_come_from():
    first, second = aot.function(lambda w: jnp.sin(w) * 2), aot.function(lambda w: jnp.cos(w))

    taped = aot.tape(lambda w: jnp.sum(first(w) + second(jnp.exp(w))))
    taped.grad(W)
    scopes = {op.name: op.scope.split("/")[0] for op in taped.captures[0].graph.ops if op.scope}
    numbered = re.compile(r"<lambda>#\d+")
    assert numbered.fullmatch(scopes["cos"]) and numbered.fullmatch(scopes["sin"])
    assert scopes["cos"] != scopes["sin"], "each is inlined from its own aot.function"


def test_the_reason_of_a_capture_names_the_function_that_is_called():
    function = aot.function(lambda w: jnp.sin(w))

    @aot.tape
    def loss(w, called):
        return jnp.sum(function(w) if called else jax.lax.sin(w))

    loss.grad(W, False)
    loss.grad(W, True)
    assert re.match(r"<lambda>#\d+ instead of sin in test_names.py:\d+$", loss.captures[1].why)
