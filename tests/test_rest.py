"""`make test` has a case of every test function; what it leaves out is decided by one rule, in `rest.py`."""

from __future__ import annotations

import re

import pytest

import programs
import rest
from programs import EVERY_PROGRAM
from rest import Kind


@pytest.fixture(scope="module")
def collected(request):
    """For each function of what was collected, all of the tests where no path is given, whether it has a case."""
    return request.config.stash[rest.IN_MAKE_TEST]


def test_every_function_has_a_case_in_make_test_but_for_those_that_are_named(collected):
    without = {function for function, has_case in collected.items() if not has_case}
    named = set() if EVERY_PROGRAM else rest.NO_CASE.keys() & collected.keys()
    assert without == named


def test_every_file_has_a_test_in_make_test(collected):
    files = {function.partition("::")[0] for function in collected}
    assert {function.partition("::")[0] for function, has_case in collected.items() if has_case} == files


def test_what_is_named_is_there_and_has_a_reason(collected):
    files = {function.partition("::")[0] for function in collected}
    for name, why in (rest.EVERY_CASE | rest.NO_CASE).items():
        assert name in files | collected.keys() or name.partition("::")[0] not in files, f"{name} is no test"
        assert re.fullmatch(r"[a-z`].*[^.]", why), f"{name}: a reason is half a sentence"
    assert not rest.EVERY_CASE.keys() & rest.NO_CASE.keys()


def test_of_each_kind_of_program_the_first_is_kept():
    names = ["two_layers", "transformer_block", "scan_over_layers", "layer_norm", "cond_on_data"]
    assert kept(*([rest.kind_of("name", name, 0)] for name in names)) == [True, False, True, False, True]
    assert (
        rest.kind_of("p", programs.named("two_layers"), 0)
        == rest.kind_of("p", "two_layers", 3)
        == Kind("p", "corpus.networks", True)
    )


def test_of_other_values_the_first_is_kept_and_both_of_two():
    assert kept(*([Kind("seed", str(n))] for n in range(4))) == [True, False, False, False]
    assert kept([Kind("jit", "True")], [Kind("jit", "False")]) == [True, True]
    assert kept(*([Kind("x", x), Kind("y", y)] for x in "ab" for y in "cdef")) == [
        True,
        *[False] * 3,
        True,
        *[False] * 3,
    ]
    assert kept(*([rest.kind_of("p", p, 0), Kind("s", s)] for p in ("two_layers", "fori_loop") for s in "abc")) == [
        True,
        *[False] * 2,
        True,
        *[False] * 2,
    ]


def test_a_test_without_parameters_is_kept():
    assert kept([]) == [True]


def test_values_that_print_an_address_are_told_apart_by_their_place():
    one, other = (rest.kind_of("x", object(), place) for place in (0, 1))
    assert one != other == rest.kind_of("x", object(), 1)
    assert rest.kind_of("x", 1, 0) == rest.kind_of("x", 1, 5) != rest.kind_of("x", "1", 0)


def kept(*cases):
    return list(rest.first_of_each_kind(cases))
