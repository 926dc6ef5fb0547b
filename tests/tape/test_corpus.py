"""Every program of the corpus, run on a tape, answers as plain JAX does."""

from __future__ import annotations

from functools import partial

import pytest

from jointcut import aot
from oracle import assert_same, cotangents, plain, plain_vjp, value_and_grad
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND, named

REFUSED = ("internal_reference",)  # with its cure, see `test_refusals.py`
RUN = [program for program in CORPUS if program.name not in REFUSED]
KINDS = RUN if EVERY_PROGRAM else [program for program in RUN if program.name in OF_EACH_KIND][::4]
LOSSES = [named(name) for name in ("two_layers", "auxiliary_output", "keyword_arguments", "none_leaves")]


@pytest.mark.parametrize("program", LOSSES, ids=lambda program: program.name)
def test_value_and_grad_answers_as_jax(program):
    with program.precision():
        taped = aot.tape(program.function, argnums=program.argnums, has_aux=program.has_aux)
        assert_same(taped.value_and_grad(*program.args, **program.kwargs), plain(program, value_and_grad), program)


@pytest.mark.parametrize("program", KINDS, ids=lambda program: program.name)
def test_vjp_pulls_back_as_jax_and_more_than_once(program):
    with program.precision():
        bound = partial(program.function, **program.kwargs)
        out, pullback, *aux = aot.tape(bound, has_aux=program.has_aux).vjp(*program.args)
        want_out, want_aux, want_first, want_second = plain_vjp(program)
        assert_same((out, aux), (want_out, want_aux), program)
        assert_same(pullback(cotangents(out, 1)), want_first, program)
        assert_same(pullback(cotangents(out, 2)), want_second, program)
