"""Which tests `make test` leaves out: the rest, which `make test-all` runs.

Of each test function `make test` runs the first cases that together have a program of each file of `corpus/`, a
behaviour of each group, and the first value of each other parameter, or both where there are two. What stands in
`EVERY_CASE` is run with all its cases, what stands in `NO_CASE` with none. With JOINTCUT_EVERY_PROGRAM nothing is left
out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest

from behaviours.behaviour import Behaviour
from corpus.program import Program, programs_of
from programs import EVERY_PROGRAM, FILES

#: Files, or functions as `file::function`, of which each case is a claim of its own, and why.
EVERY_CASE: dict[str, str] = {
    "tests/laws/test_equal_to_vjp.py::test_vjp_pulls_back_as_jax_and_more_than_once": "what all else rests on",
    "tests/laws/test_sharding.py::test_on_four_devices": "one process asks all of its claims",
    "tests/mesh/test_mesh.py::test_on_eight_devices": "one process asks all claims of a script",
    "tests/tiles/test_on_devices.py": "one process asks all of its claims",
    "tests/processes/test_processes.py": "two processes ask all of its cases",
    "tests/test_doctests.py": "each case is the examples of one file",
    "tests/test_story.py": "each case is a rule of layout, or a fault that it finds",
    "tests/test_written.py": "each case is a page",
}

RANDOM = "programs are random: the same law is asked of written ones in"

#: Functions of which no case is in `make test`: why that is enough, their file, their names without `test_`.
NO_CASE_FOR: list[tuple[str, str, str]] = [
    (
        "the site takes half a minute to build; the figures, links and examples of its pages are asked beside it",
        "test_docs.py",
        """
        a_keyboard_and_a_screen_reader_reach_all_of_a_page
        a_name_in_a_docstring_is_a_link_to_what_it_names
        a_public_name_stands_on_one_page_of_the_reference_with_all_that_belongs_to_it
        each_answer_opens_with_what_to_do
        every_error_stands_on_the_page_of_errors
        every_file_stands_in_the_order_of_reading_with_its_sentence
        every_link_within_the_site_leads_somewhere
        no_page_tells_of_the_machine_that_built_it
        the_first_page_of_the_reference_names_each_in_a_line
        the_help_of_every_command_stands_in_the_site_as_it_is_printed
        the_site_asks_nothing_of_a_network
        the_site_has_a_page_for_each_task_and_none_for_each_file
        the_start_page_has_a_door_for_each_question_with_a_sentence
        """,
    ),
    (
        "each notebook takes a kernel: `make notebooks` runs them, and `test_examples.py` the examples of pages",
        "test_notebooks.py",
        "a_fresh_run_gives_what_is_committed",
    ),
    (
        "wounds are many and random: `test_artefact.py` and `partition/test_planfile.py` deal one of each kind",
        "aot/test_mutants.py",
        """
        every_mutant_is_refused_with_an_error_of_ours_or_proves_equal
        every_wound_was_dealt_and_what_changes_a_file_is_refused
        """,
    ),
    (f"{RANDOM} `test_equal_to_vjp.py`", "laws/test_fuzz.py", "random_programs_answer_as_plain_jax"),
    (f"{RANDOM} `loops/test_loops.py`", "laws/test_fuzz.py", "random_loops_answer_as_python"),
    (f"{RANDOM} `test_objects.py`", "laws/test_fuzz.py", "random_modules_change_as_under_nnx"),
    (
        f"{RANDOM} `test_zero_cotangents.py`",
        "laws/test_guarded_bodies.py",
        "random_programs_have_the_right_slopes_at_singular_points",
    ),
    (
        f"{RANDOM} `test_derivatives.py`",
        "loops/test_random_bodies.py",
        "tangents_and_second_derivatives_are_those_of_pythons_loop",
    ),
    (f"{RANDOM} `test_lanes.py`", "loops/test_random_bodies.py", "mapped_each_lane_makes_its_own_trips"),
    (
        "compiling for eight GPUs takes long: `partition/test_settle.py` asks it of what is written",
        "targets/test_compiled.py",
        "products_for_weights_are_not_put_off_where_devices_share_a_batch",
    ),
    (
        "compiling for a TPU takes half a minute: beside it a step is refused for one, and others weighed for a GPU",
        "targets/test_compiled.py",
        "a_step_is_weighed_by_the_compiler_of_its_target",
    ),
    (
        "two processes: `partition/test_mincut.py` asks it of a plan for the CPU",
        "targets/test_plans.py",
        "a_plan_is_the_same_in_every_process",
    ),
    (
        "a hundred steps on four processes take a minute; those of `make test` ask the same of two, for one step",
        "processes/test_processes.py",
        """
        four_processes_train_as_one_does
        the_death_of_the_first_ends_all
        the_program_of_the_page_runs_on_two_processes_as_it_stands
        """,
    ),
    (
        "two processes: `test_keeper.py` has a second one find what the first compiled, by its fingerprint",
        "aot/test_fingerprint.py",
        "another_process_with_other_hashes_finds_the_same_fingerprints",
    ),
    (
        "models are large: `aot/test_training.py` and `aot/test_models.py` train smaller ones of these libraries",
        "test_firststep_benchmark.py",
        "a_model_outside_of_the_suite_has_the_gradient_of_plain_jax",
    ),
    *(
        ("a benchmark is run: what is made of its figures is asked beside it", f"test_{file}_benchmark.py", name)
        for file, name in (
            ("device", "a_program_is_weighed_and_its_gradients_are_those_of_plain_jax"),
            ("firststep", "a_first_step_at_what_a_refusal_named_compiles_one_plan"),
            ("firststep", "a_first_step_is_weighed_and_compiles_what_the_users_own_call_compiles"),
            ("house", "plans_are_weighed_at_the_budgets_given_or_at_eight_from_plain_down_to_the_least"),
            ("latency", "the_model_is_one_function_in_both_forms"),
            ("targets", "one_program_is_weighed_plain_with_a_checkpoint_and_by_default"),
        )
    ),
]
NO_CASE = {f"tests/{file}::test_{name}": why for why, file, names in NO_CASE_FOR for name in names.split()}

#: What was collected in this session, before anything was chosen: `in_make_test` of it.
IN_MAKE_TEST = pytest.StashKey[dict[str, bool]]()

KINDS = {program.name: file.__name__ for file in FILES for program in programs_of(file)}


class Kind(NamedTuple):
    """What a parameter of a case adds: a program or a behaviour of a group, or a value."""

    parameter: str
    value: str
    is_grouped: bool = False


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark those that are the rest."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[function_of(item)].append(item)
    for function, of_function in () if EVERY_PROGRAM else cases.items():
        for item, kept in zip(of_function, kept_of(function, of_function), strict=True):
            if not kept:
                item.add_marker("rest")


def in_make_test(items: Iterable[pytest.Item]) -> dict[str, bool]:
    """For each function whether a case of it is in `make test`, by the marks alone."""
    functions: dict[str, bool] = {}
    for item in items:
        function = function_of(item)
        functions[function] = functions.get(function, False) or item.get_closest_marker("rest") is None
    return functions


def function_of(item: pytest.Item) -> str:
    """`file::function`, of all cases the same."""
    return item.nodeid.partition("[")[0]


def kept_of(function: str, items: list[pytest.Item]) -> list[bool]:
    """For each case of a function, whether `make test` runs it."""
    if function in NO_CASE:
        return [False] * len(items)
    if {function, function.partition("::")[0]} & EVERY_CASE.keys():
        return [True] * len(items)
    return list(first_of_each_kind([kinds_of(item) for item in items]))


def kinds_of(item: pytest.Item) -> list[Kind]:
    """What each parameter of a case adds; values that are no words or numbers are told apart by their place."""
    called = getattr(item, "callspec", None)
    return [kind_of(name, value, called.indices[name]) for name, value in called.params.items()] if called else []


def kind_of(parameter: str, value: object, place: int) -> Kind:
    """The kind of one value, which stands at a place in the list of its parameter."""
    name = value.name if isinstance(value, Program) else value
    if isinstance(name, str) and name in KINDS:
        return Kind(parameter, KINDS[name], is_grouped=True)
    if isinstance(value, Behaviour):
        return Kind(parameter, value.group, is_grouped=True)
    simple = isinstance(name, str | int | float | type(None))
    return Kind(parameter, repr(name) if simple else f"number {place}")


def first_of_each_kind(cases: Sequence[Sequence[Kind]]) -> Iterator[bool]:
    """For each case whether it adds a kind to those before it; of three or more values the first one alone counts."""
    every = {kind for kinds in cases for kind in kinds}
    counts = Counter(kind.parameter for kind in every if not kind.is_grouped)
    seen: set[Kind] = set()
    for number, kinds in enumerate(cases):
        parameters = {kind.parameter for kind in seen if not kind.is_grouped}
        new = {k for k in kinds if k.is_grouped or counts[k.parameter] <= 2 or k.parameter not in parameters} - seen
        seen |= new
        yield bool(new) or number == 0
