"""Every program, called, differentiated and pulled back, answers as plain JAX does.

`vjp` runs both halves of every program on two cotangents, and there JAX checks each jaxpr. A call and `value_and_grad`
run the same halves in other ways: they are asked of one program of each kind and of each second kind, and of all with
JOINTCUT_EVERY_PROGRAM. (That `value_and_grad` answers under jit is a law of `test_composition.py`.)
"""

from __future__ import annotations

from functools import partial

import jax
import pytest

from jointcut import aot
from oracle import STRATEGIES, assert_same, called, cotangents, plain, plain_vjp, value_and_grad
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND, named

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
KINDS = [program for program in CORPUS if EVERY_PROGRAM or program.name in OF_EACH_KIND]
every_kind = pytest.mark.parametrize("program", KINDS, ids=lambda program: program.name)
LOSSES = [program for program in KINDS if program.scalar and "grad" not in program.lacks]


def cut_and_some_uncut(programs, start):
    """Every program cut, and every eighth from `start` on with what JAX keeps: the two laws have different ones."""
    first, second = STRATEGIES
    cases = [*((program, first) for program in programs), *((program, second) for program in programs[start::8])]
    return pytest.mark.parametrize(
        ("program", "strategy"), cases, ids=[f"{program.name}-{strategy}" for program, strategy in cases]
    )


def compiled(program, strategy):
    return aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, strategy=strategy)


@every_kind
def test_a_call_answers_as_the_function(program):
    """A call cuts nothing, so that one strategy speaks for all."""
    with program.precision(), jax.enable_checks(EVERY_PROGRAM):
        got = compiled(program, "min_cut")(*program.args, **program.kwargs)
        assert_same(got, plain(program, called), program)


@cut_and_some_uncut(LOSSES[:: 1 if EVERY_PROGRAM else 2], 0)
def test_value_and_grad_answers_as_jax(program, strategy):
    with program.precision(), jax.enable_checks(EVERY_PROGRAM):
        got = compiled(program, strategy).value_and_grad(*program.args, **program.kwargs)
        assert_same(got, plain(program, value_and_grad), program)


@cut_and_some_uncut(CORPUS, 2)
def test_vjp_pulls_back_as_jax_and_more_than_once(program, strategy):
    """The second seed catches residuals that the first pullback used up, the third those it changed."""
    with program.precision():
        bound = partial(program.function, **program.kwargs)
        function = aot.function(bound, has_aux=program.has_aux, strategy=strategy)
        out, pullback, *aux = function.vjp(*program.args)
        want_out, want_aux, want_first, want_second = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        assert_same(pullback(cotangents(out, 1)), want_first, program)
        assert_same(pullback(cotangents(out, 2)), want_second, program)
        assert_same(pullback(cotangents(out, 1)), want_first, program)


@every_strategy
@pytest.mark.parametrize(
    "name",
    [
        "two_layers",
        "auxiliary_output",
        "two_argnums",
        "last_argument",
        "keyword_arguments",
        "scan_over_layers",
    ],
)
def test_grad_is_the_gradient_of_value_and_grad(name, strategy):
    """One program of each convention is enough."""
    program = named(name)
    value, gradients = plain(program, value_and_grad)
    got = compiled(program, strategy).grad(*program.args, **program.kwargs)
    assert_same(got, (gradients, value[1]) if program.has_aux else gradients, program)
