"""Several processes take one plan, or all end with a text that says which of them differs, fails or is gone."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.processes import NUMBER, differences, measured, together
from fences import ROOT, examples
from jointcut.aot.planning import agreed
from jointcut.aot.run import compile
from jointcut.partition.program.jax import processes

HERE = Path(__file__).parent
IN_TURN, KILLED = HERE / "asked_in_turn.py", HERE / "one_killed.py"
ENVIRONMENT = {"PYTHONPATH": ":".join(filter(None, sys.path))}
NOT_AGREED = "The plan of loss is not agreed on: "
SAME = "\nRun the same program on all processes: the same source, versions, shapes, shardings and options."
LOOK = "\nLook at what that process printed, and start all processes again."


def run(script, number, limit_s, *given, **more):
    command = [sys.executable, "-W", "error", str(script), *map(str, given)]
    return together(number, command, limit_s, {**ENVIRONMENT, "XLA_FLAGS": os.environ["XLA_FLAGS"], **more})


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each case of the script tells on both processes, and the hashes of the plans that they take."""
    done = run(IN_TURN, 2, 120, NOTES=str(tmp_path_factory.mktemp("notes") / "shared"))
    assert [process.code for process in done] == [0, 0], "".join(process.err[-2000:] for process in done)
    first, second = (json.loads(process.out.splitlines()[-1]) for process in done)
    return {case: (first[case], second[case]) for case in first}


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        ("plans_of_a_jit_a_call_and_a_gradient", 3),
        ("a_plan_that_is_known", 1),
        ("a_plan_for_fewer_bytes", 4),
        ("a_bound_on_the_error", 1),
        ("options_that_are_objects", 1),
    ],
)
def test_both_take_one_plan(case, plans, told):
    (answer, hashes), other = told[case]
    assert [answer, hashes] == other
    assert len(hashes) == plans
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in hashes)


def test_a_plan_that_is_known_takes_no_message(told):
    assert told["a_plan_that_is_known"][0][0] == 0


def test_the_first_process_alone_writes_notes_each_once(told):
    (first, _), (second, _) = told["notes_in_a_shared_folder"]
    assert len(first) == len(set(first)) > 0
    assert second == []


def test_an_error_is_not_measured_and_the_plan_says_so(told):
    assert told["a_bound_on_the_error"][0][0] == "no smaller form is used: several processes run the step"


def line_of(text):
    return 1 + next(n for n, line in enumerate(IN_TURN.read_text().splitlines()) if text in line)


ON_BOTH = "on the mesh {'data': 2} of devices [...], device"
POLICY = "(('tanh', <CheckpointPolicy.MUST_{}: 'must {}'>),)"
DIFFERENCES = {
    "another_source": (
        f"mul at {IN_TURN}:{line_of('* scale')} (loss_of.<locals>.loss) is not the same on process 1 as on process 0."
    ),
    "another_shape": (
        "input 4 is `primal %4:float32[128,32]/8192B` (args[1]) on process 1, "
        "but `primal %4:float32[64,32]/4096B` on process 0."
    ),
    "another_sharding": (
        f"the sharding of args[1] of <lambda> is `(None, 'data') {ON_BOTH}` on process 1, "
        f"but `('data',) {ON_BOTH}` on process 0."
    ),
    "another_option": "the option budget is `1.0` on process 1, but `None` on process 0.",
    "another_policy": (
        f"the option policy is `{POLICY.format('SAVE', 'save')}` on process 1, "
        f"but `{POLICY.format('RECOMPUTE', 'recompute')}` on process 0."
    ),
    "another_version": "the version of jaxlib is `0.1` on process 1, but `0.2` on process 0.",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_what_differs_is_told_on_both(case, told):
    (first, _), (second, _) = told[case]
    assert first == second
    assert re.sub(r"devices \[[\d, ]+]", "devices [...]", first) == f"{NOT_AGREED}{DIFFERENCES[case]}{SAME}"


def test_a_budget_is_refused_on_both_in_the_same_words(told):
    (first, _), (second, _) = told["a_budget_that_is_refused"]
    assert first == second
    text, least_bytes, notes = first
    assert (
        text.startswith("budget of 1,000 bytes cannot be met.\nThe smallest peak found is ")
        and least_bytes > 1000
        and notes
    )


def test_a_failure_of_one_ends_both(told):
    text = "The plan of loss is not made: process {} failed with KeyError: nothing" + LOOK
    assert [answer for answer, _ in told["a_failure_of_the_first"]] == ["KeyError", text.format(0)]
    assert [answer for answer, _ in told["a_failure_of_the_second"]] == [text.format(1), "KeyError"]


def test_the_texts_of_one_decision_at_most_are_left(told):
    assert all(answer <= 1 for answer, _ in told["texts_that_are_left"])


GONE = "The plan of loss is not made: process 1 has ended, or does not ask for it." + LOOK


def test_a_process_that_does_not_ask_is_named(told):
    assert told["one_that_does_not_ask"][0][0] == GONE


def test_a_process_killed_while_the_first_one_plans_ends_all():
    first, victim, third = run(KILLED, 3, 60, 1)
    assert victim.code == -9
    for process in (first, third):
        assert process.code != 0
        assert f"jointcut.partition.errors.ProcessError: {GONE}\n" in process.err


def test_the_death_of_the_first_ends_all():
    first, second = run(KILLED, 2, 60, 0)
    assert first.code == -9
    assert second.code != 0
    assert GONE.replace("1", "0") in second.err or "JAX distributed service detected fatal errors" in second.err


def test_the_program_of_the_page_runs_on_two_processes_as_it_stands(tmp_path):
    (example,) = examples(ROOT / "docs" / "many-devices.md")
    begins = "import sys\nfrom benchmarks.processes import join\njoin(*map(int, sys.argv[1:]))\n"
    script = tmp_path / "train.py"
    script.write_text(f"{begins}{example.code}\nassert jax.process_count() == 2\nprint(losses)\n")
    first, second = run(script, 2, 60)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out.splitlines()[-1] == second.out.splitlines()[-1]


def test_four_processes_train_as_one_does():
    (alone,), runs = measured(1), measured(NUMBER)
    assert len({tuple(process["plans"]) for process in runs}) == 1
    assert len(runs[0]["plans"]) == 1
    assert max(differences(alone["losses"], [process["losses"] for process in runs])) <= 1e-6


def test_on_gpus_a_process_compiles_without_waiting_for_the_kernels_that_others_time(monkeypatch):
    lowered = jax.jit(jnp.sin).lower(1.0)
    assert compile.by_itself() is None
    monkeypatch.setattr(processes, "are_many", lambda: True)
    assert compile.by_itself() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compile.by_itself() == {"xla_gpu_shard_autotuning": False}
    assert compile.compiled(lowered, None)(0.0) == 0.0


def test_a_long_text_is_shown_from_shortly_before_the_place_where_it_differs():
    long = 300 * "x"
    shown = [*agreed._apart(f"{long}a{long}", f"{long}b")]
    assert shown == [f"`...{20 * 'x'}a{79 * 'x'}...`", f"`...{20 * 'x'}b`"]
    assert [*agreed._apart(None, "some")] == ["missing", "`some`"]
