"""A plan survives the way through JSON, whatever else the text says is refused by name, and differences add up."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jointcut.partition import Plan, Roles, parse, show, split
from jointcut.partition.errors import PlanError
from jointcut.partition.plans.plandiff import diff
from jointcut.partition.plans.planfile import checksum, dumps, loads
from jointcut.partition.search.mincut import STRATEGIES
from programs import CORPUS

PROGRAM = """
    loop 1 x5
    primal %0:float32[3] "args[0]"
    cotangent %1:float32[3]
    %2:float32[3] = dot_general %0
    %3:float32[3] = sin %2
    %4:float32[3] %5:float32[3]@1 = loop %3 %6 body 1 of loop 1 {
        #3 %6:float32[3] = tanh %5
        next %6
    }
    backward:
    #4 %7:float32[3] %8:float32[3]@1 = loop %1 %10 body 2 of loop 1 {
        #5 %9:float32[3] = cos %5
        %10:float32[3] = mul %8 %9
        next %10
    }
    #7 %11:float32[3] = cos %2
    %12:float32[3] = mul %11 %3
    %13:float32[3] = mul %7 %12
    output %4
    gradient %13
"""
GRAPH = parse(PROGRAM)
FIGURES = {"seconds": 1.5e-3, "bound_seconds": 1.25e-3, "bound_bytes": 60, "peak_bytes": 4096, "segments": ((1, 2),)}
PLAN = Plan.of(GRAPH, [2, 5], strategy="told", reasons={2: "it is heavy", 5: "it is carried"}, **FIGURES)
WRITTEN = dumps(PLAN, GRAPH)
CURE = "\nRead what dumps wrote, unchanged; to plan otherwise, use Plan.of(graph, saved=[...])."
NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"][::2]  # that one cannot be traced
quick = settings(deadline=None, max_examples=150, derandomize=True, database=None)


def refusal(function, *args):
    with pytest.raises(PlanError) as refused:
        function(*args)
    return str(refused.value)


def whole(expected):
    """The whole message: one that gives no cure of its own gives the usual one."""
    return expected if "\n" in expected else expected + CURE


def sealed(document):
    """The text of a document that was edited by somebody who knows about the checksum."""
    return json.dumps(document | {"checksum": checksum(document)})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_every_program_is_read_back_equal(name, strategy, traced):
    graph = traced(name).graph
    plan = STRATEGIES[strategy](graph)
    text = dumps(plan, graph)
    assert loads(text, graph) == plan
    assert dumps(loads(text, graph), graph) == text


SECONDS = st.floats(0, allow_infinity=False).map(np.float64) | st.none()
BYTES = st.integers(0, 2**70) | st.none()
FIELDS = {"seconds": SECONDS, "bound_seconds": SECONDS, "bound_bytes": BYTES, "peak_bytes": BYTES}
FIELDS |= {"segments": st.sampled_from([(), ((1, 1),), ((1, 5),)]), "strategy": st.text(max_size=5)}
KEPT_STEPS = st.sampled_from([(), ((1, 1),), ((1, 4),)])


@quick
@given(st.sets(st.sampled_from([2, 3, 6])), st.fixed_dictionaries(FIELDS), KEPT_STEPS, st.text(max_size=5))
def test_figures_and_words_are_read_back_to_the_last_digit(saved, fields, kept_steps, reason):
    kept_steps = kept_steps if fields["segments"] else ()
    plan = Plan.of(GRAPH, saved | {5}, reasons={5: reason}, kept_steps=kept_steps, **fields)
    assert loads(dumps(plan, GRAPH), GRAPH) == plan


def test_kept_steps_stand_with_the_segments_of_their_loop_and_only_where_there_are_some():
    kept = replace(PLAN, kept_steps=((1, 3),))
    assert json.loads(WRITTEN)["segments"] == [{"loop": 1, "steps": 2}]
    assert json.loads(dumps(kept, GRAPH))["segments"] == [{"loop": 1, "steps": 2, "kept": 3}]


def test_the_text_is_sorted_with_a_line_for_each_value_and_each_line_of_the_program():
    lines, document = WRITTEN.splitlines(), json.loads(WRITTEN)
    assert (document["format"], document["version"], list(document)) == ("jointcut plan", 1, sorted(document))
    assert [line.strip(" ,") for line in lines if '"reason"' in line] == [
        '{"bytes": 12, "copies": 1, "dtype": "float32", "op": "dot_general", "reason": "it is heavy", "scope": "", '
        '"shape": [3], "source": "", "value": 2}',
        '{"bytes": 60, "copies": 5, "dtype": "float32", "op": "loop", "reason": "it is carried", "scope": "", '
        '"shape": [3], "source": "", "value": 5}',
    ]
    assert document["written_for"] == show(GRAPH).replace(' "args[0]"', "").splitlines()
    assert len(lines) == 2 + len(document) + sum(1 + len(document[x]) for x in ("saved", "segments", "written_for"))


def cut(loss):
    def joint(x, ct):
        y, pullback = jax.vjp(loss, x)
        return y, *pullback(ct)

    return split(jax.make_jaxpr(joint)(jnp.ones((3, 3)), 1.0), Roles.simple(1, 1, 1, 1))


HERE = cut(lambda x: jnp.sum(jnp.tanh(x @ x)))
THERE = cut(lambda x: jnp.sum(jnp.tanh(x @ x)))


def test_a_plan_fits_the_same_program_at_another_line_and_speaks_of_that_line():
    plan = loads(dumps(HERE.plan, HERE.graph), THERE.graph)
    assert plan == THERE.plan
    assert [s.source for s in plan.saved] != [s.source for s in HERE.plan.saved]


def test_labels_and_prices_do_not_make_another_program():
    assert loads(WRITTEN, parse(PROGRAM.replace("args[0]", "w").replace("= sin %2", "= sin %2 takes 0.5s"))) == PLAN


OTHER = " here.\nRead the plan for the program that it was made for, or make a plan for this one."


@pytest.mark.parametrize("first, second", list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))[::4])
def test_a_plan_of_another_program_is_refused(first, second, traced):
    ours, theirs = traced(first).graph, traced(second).graph
    assert refusal(loads, dumps(STRATEGIES["min_cut"](ours), ours), theirs).endswith(OTHER)


# An edit of the program, what stands at the first difference, and how that reads there and here.
OTHERS = [
    ("= sin %2", "= cos %2", "op 1", "`%3:float32[3] = sin %2`", "`%3:float32[3] = cos %2`"),
    ("= sin %2", "= sin %2 effects", "op 1", "`%3:float32[3] = sin %2`", "`%3:float32[3] = sin %2 effects`"),
    ("%0:float32[3]", "%0:float32[4]", "input 0", "`primal %0:float32[3]`", "`primal %0:float32[4]` (args[0])"),
    ("cotangent %1", "primal %1", "input 1", "`cotangent %1:float32[3]`", "`primal %1:float32[3]`"),
    ("loop 1 x5", "loop 1 x6", "line 1 of the program", "`loop 1 x5`", "`loop 1 x6`"),
    ("next %6", "next %5", "line 8 of the program", "`next %6`", "`next %5`"),
    ("output %4", "//", "line 19 of the program", "`output %4`", "`gradient %13`"),
    ("output %4", "output %4\noutput %3", "line 20 of the program", "`gradient %13`", "`output %3`"),
]


@pytest.mark.parametrize("old, new, where, was, now", OTHERS)
def test_the_first_difference_to_the_plans_program_is_named(old, new, where, was, now):
    assert PROGRAM.count(old) == 1
    graph = parse(PROGRAM.replace(old, new))
    assert refusal(loads, WRITTEN, graph) == f"{where} is {was} in the plan's program, but {now}{OTHER}"


@pytest.mark.parametrize(
    "old, new",
    [
        ("= mul %11", "= div %11"),
        ("= cos %5", "= sin %5"),
        ("gradient %13", ""),
        ("gradient %13", "gradient %13\ngradient %7"),
    ],
)
def test_a_plan_serves_a_program_with_the_same_forward_without_its_bounds(old, new):
    graph = parse(PROGRAM.replace(old, new))
    here = loads(WRITTEN, graph)
    assert (here.saved, here.segments, here.strategy, here.seconds) == (
        PLAN.saved, PLAN.segments, PLAN.strategy, PLAN.seconds)  # fmt: skip
    assert (here.bound_bytes, here.bound_seconds, here.peak_bytes) == (None, None, None)
    assert here == Plan.of(
        graph, PLAN.values, strategy=PLAN.strategy, reasons={s.value: s.reason for s in PLAN.saved},
        seconds=PLAN.seconds, segments=PLAN.segments,
    )  # fmt: skip


def test_an_edited_plan_is_refused_for_a_program_with_the_same_forward_too():
    graph = parse(PROGRAM.replace("= mul %11", "= div %11"))
    document = json.loads(WRITTEN)
    document["saved"][0]["bytes"] += 4
    assert refusal(loads, json.dumps(document), graph).startswith("plan.saved[0].bytes is 16, but 12 in %2:float32[3]")
    document = json.loads(WRITTEN)
    document["strategy"] = "mine"
    assert refusal(loads, json.dumps(document), graph).startswith("plan.checksum is ")


def test_a_difference_to_the_plans_program_is_told_with_the_users_line():
    other = cut(lambda x: jnp.sum(jnp.tanh(jnp.sin(x) @ x)))
    assert __file__ in (source := other.graph.ops[0].source)
    assert refusal(loads, dumps(HERE.plan, HERE.graph), other.graph) == (
        "op 0 is `%2:float32[3,3] = dot_general %0 %0` in the plan's program, "
        f"but `%2:float32[3,3] = sin %0` at {source}{OTHER}"
    )


STEPS = """primal %0:float32[8]
cotangent %1:float32[8]
%2:float32[8] = sin %0
%3:float32[8] = cos %2
backward:
%4:float32[8] = back %1 %3 steps x? {
    primal %0:float32[8]
    cotangent %1:float32[8]
    %2:float32[8] = sin %0
    backward:
    %3:float32[8] = mul %1 %2
    output %2
    gradient %3
}
%5:float32[8] = mul %4 %2
output %3
gradient %5"""


def test_a_difference_in_steps_that_are_cut_on_their_own_is_one_of_the_op_that_runs_them():
    graph, inner = parse(STEPS), "    %3:float32[8] = "
    text = dumps(Plan.of(graph, [2]), graph)
    other = STEPS.replace(f"{inner}mul", f"{inner}div")
    assert loads(text, parse(other)).values == (2,)
    assert refusal(loads, text, parse(other.replace("output %3\n", "output %2\n"))) == (
        "op 2 is `%3:float32[8] = mul %1 %2` in the plan's program, but `%3:float32[8] = div %1 %2` here.\n"
        "Read the plan for the program that it was made for, or make a plan for this one."
    )
    assert refusal(loads, text, parse(other.replace("= cos", "= exp"))).startswith("op 1 is `%3:float32[8] = cos %2`")


NO_PLAN = 'plan is no plan of jointcut: it does not say `format` "jointcut plan".'
VERSION = ", and this jointcut reads version 1.\nRead it with the jointcut that wrote it, or make the plan anew."
COUNT, AMOUNT = "not a whole number from 0 up.", "not a finite number from 0 up."
NOT_ALL = "Loop 1 takes 5 steps in all: keep at least one, and not all of them."
NO_LOOP = "which does not exist.\nName a loop of the program: see Graph.loops."
DROPPED = object()


def put(document, path, value):
    """Put a value where a path leads, or drop what is there."""
    *front, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in front:
        document = document[key]
    if value is DROPPED:
        del document[last]
    else:
        document[last] = value


NONSENSE = [
    ("format", "a poem", NO_PLAN),
    ("format", DROPPED, NO_PLAN),
    ("version", 2, "plan.version is 2" + VERSION),
    ("version", True, "plan.version is true, " + COUNT),
    ("saved", DROPPED, "plan lacks 'saved'."),
    ("saved.1.bytes", DROPPED, "plan.saved[1] lacks 'bytes'."),
    ("more", 1, 'plan holds "more", which this version does not know.'),
    ("saved", {"value": 2}, 'plan.saved is {"value": 2}, not a list.'),
    ("saved.0", [2], "plan.saved[0] is [2], not an object."),
    ("strategy", 3, "plan.strategy is 3, not a text."),
    ("written_for.2", 7, "plan.written_for[2] is 7, not a text."),
    ("deferred", 100 * "x", f'plan.deferred is "{56 * "x"}..., not a list.'),
    ("saved.0.value", "2", 'plan.saved[0].value is "2", ' + COUNT),
    ("recomputed.0", -1, "plan.recomputed[0] is -1, " + COUNT),
    ("figures.peak_bytes", 0.5, "plan.figures.peak_bytes is 0.5, " + COUNT),
    ("figures.seconds", -1.0, "plan.figures.seconds is -1.0, " + AMOUNT),
    ("figures.seconds", 10**400, f"plan.figures.seconds is 1{56 * '0'}..., " + AMOUNT),
    ("figures.bound_seconds", True, "plan.figures.bound_seconds is true, " + AMOUNT),
    ("saved.1.value", 99, "plan.saved[1]: %99 does not exist in the forward: the program has 14 values."),
    ("saved.1.value", 13, "plan.saved[1]: %13:float32[3] (mul) does not exist in the forward: it needs a cotangent."),
    ("saved.0.value", 0, "plan.saved[0]: %0:float32[3] (args[0]) is an input, which the caller holds."),
    ("saved.1.value", 2, "plan.saved[1]: %2:float32[3] (dot_general) is saved twice."),
    ("saved.0.shape", [4], "plan.saved[0].shape is [4], but [3] in %2:float32[3] (dot_general)."),
    ("saved.0.dtype", "int8", 'plan.saved[0].dtype is "int8", but "float32" in %2:float32[3] (dot_general).'),
    ("saved.0.op", "sin", 'plan.saved[0].op is "sin", but "dot_general" in %2:float32[3] (dot_general).'),
    ("saved.1.bytes", 61, "plan.saved[1].bytes is 61, but 60 in %5:5xfloat32[3] (loop)."),
    ("saved.1.copies", 4, "plan.saved[1].copies is 4, but 5 in %5:5xfloat32[3] (loop)."),
    ("bytes_saved", 71, "plan.bytes_saved is 71, but the values take 72."),
    ("bytes_saved", 10**90, f"plan.bytes_saved is 1{56 * '0'}..., but the values take 72."),
    ("recomputed", [], "plan.recomputed lacks op 1 (sin), which must run if no more than that is saved."),
    ("recomputed", [0, 1], "plan.recomputed holds op 0 (dot_general), which need not run if all that is saved."),
    ("deferred", [7, 99, 8], "plan.deferred holds op 99, of 10 in all, which need not run if all that is saved."),
    ("deferred", [7, 8, 8], "plan.deferred names an op twice, or not in program order."),
    (
        "saved.1",
        DROPPED,
        "%5:5xfloat32[3] (loop) is neither saved nor can it be recomputed.\n"
        "Save it, or save what the backward computes from it. It is not recomputed because a loop is not run twice.",
    ),
    ("segments.0.loop", 2, "plan.segments[0] names loop 2, " + NO_LOOP),
    ("segments.0.loop", 0, "plan.segments[0] names loop 0, " + NO_LOOP),
    ("segments", 2 * [{"loop": 1, "steps": 2}], "plan.segments[1] names loop 1 a second time.\nName each loop once."),
    ("segments.0.kept", 5, "plan.kept_steps[0] keeps 5 steps.\n" + NOT_ALL),
    ("segments.0.kept", 0, "plan.kept_steps[0] keeps 0 steps.\n" + NOT_ALL),
    ("segments.0.kept", -1, "plan.segments[0].kept is -1, not a whole number from 0 up."),
    ("segments.0.steps", 6, "plan.segments[0] has segments of 6 steps.\nLoop 1 takes 5 steps in all."),
    ("segments.0.steps", 0, "plan.segments[0] has segments of 0 steps.\nLoop 1 takes 5 steps in all."),
]


@pytest.mark.parametrize("path, value, expected", NONSENSE)
def test_edited_nonsense_is_refused_by_name(path, value, expected):
    document = json.loads(WRITTEN)
    put(document, path, value)
    assert refusal(loads, sealed(document), GRAPH) == whole(expected)


CHANGED = WRITTEN.replace("0.0015", "0.0014")
SUMS = [json.dumps(checksum(json.loads(text))) for text in (WRITTEN, CHANGED)]
TEXTS = [
    (7, "plan is not JSON: the JSON object must be str, bytes or bytearray, not int."),
    (b"\xff{}", "plan is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte."),
    ("a poem", "plan is not JSON: Expecting value: line 1 column 1 (char 0)."),
    ("[1]", NO_PLAN),
    (WRITTEN.replace("5,", '5, "copies": 5,'), 'plan is not JSON: the key "copies" stands twice in one object.'),
    (WRITTEN.replace("0.0015", "NaN"), "plan is not JSON: NaN is no number."),
    (WRITTEN.replace("0.0015", "1e999"), "plan.figures.seconds is Infinity, " + AMOUNT),
    (WRITTEN.replace("0.0015", 500 * "[" + 500 * "]"), f"plan.figures.seconds is {57 * '['}..., " + AMOUNT),
    (CHANGED, f"plan.checksum is {SUMS[0]}, but what the text says gives {SUMS[1]}: it was changed."),
]


@pytest.mark.parametrize("text, expected", TEXTS, ids=range(len(TEXTS)))
def test_a_text_that_is_no_plan_is_refused(text, expected):
    assert refusal(loads, text, GRAPH) == whole(expected)


def test_a_text_that_nests_too_deep_is_refused():
    assert refusal(loads, 10**5 * "[", GRAPH) == whole("plan nests too deep.")
    assert {plan_in(WRITTEN.replace("0.0015", n * "[" + n * "]")) for n in range(800, 1000)} == {None}


NOT_WRITTEN = [
    (
        replace(PLAN, saved=PLAN.saved[::-1]),
        "plan is not what Plan.of makes of its values in this graph.\n"
        "Write a plan with the graph that it was made for, as Plan.of returned it.",
    ),
    (replace(PLAN, seconds=math.nan), "plan.figures.seconds is NaN, " + AMOUNT),
    (replace(PLAN, seconds=math.inf), "plan.figures.seconds is Infinity, " + AMOUNT),
    (replace(PLAN, peak_bytes=np.int64(5)), 'plan.figures.peak_bytes is "np.int64(5)", ' + COUNT),
]


@pytest.mark.parametrize("plan, expected", NOT_WRITTEN, ids=range(len(NOT_WRITTEN)))
def test_what_could_not_be_read_back_is_not_written(plan, expected):
    assert refusal(dumps, plan, GRAPH) == whole(expected)


def places(found, path=""):
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, inner in items:
        yield f"{path}{key}"
        yield from places(inner, f"{path}{key}.")


PLACES = list(places(json.loads(WRITTEN)))
NUMBERS = st.integers(-2, 14) | st.just(10**30) | st.floats()
ANYTHING = st.sampled_from([None, True, "", "sin", DROPPED, [], {}, [0], [7, 8]])


@st.composite
def edited(draw):
    """The document after one edit; half of them outside the program's lines, which are many."""
    document = json.loads(WRITTEN)
    path = st.sampled_from(PLACES) | st.sampled_from([path for path in PLACES if "written_for" not in path])
    put(document, draw(path), draw(st.one_of(NUMBERS, ANYTHING)))
    return document


def plan_in(text):
    """The plan in a text, None where it is refused; no other error passes."""
    try:
        return loads(text, GRAPH)
    except PlanError as refused:
        assert "\n" in str(refused)
        return None


@settings(quick, max_examples=500)
@given(edited())
def test_an_edited_text_is_refused_or_holds_the_same_plan_or_with_a_new_checksum_what_it_says(document):
    assert plan_in(json.dumps(document)) in (None, PLAN)
    if plan := plan_in(sealed(document)):
        again = json.loads(dumps(plan, GRAPH))
        for entry in [*document["saved"], *again["saved"]]:
            del entry["scope"], entry["source"]  # for people only
        assert again | {"checksum": ""} == document | {"checksum": ""}


@settings(quick, max_examples=300)
@given(st.integers(0, len(WRITTEN)), st.integers(0, 2), st.text('{}[]",:0159.-eE \\x\x00', max_size=2))
def test_a_text_with_other_letters_is_refused_or_holds_the_same_plan(start, length, new):
    text = WRITTEN[:start] + new + WRITTEN[start + length :]
    assume(text != WRITTEN)
    assert plan_in(text) in (None, PLAN)


CHAIN = parse(
    "primal %0:float32[8]\ncotangent %1:float32[8]\n%2:float32[2] = exp %0\n"
    + "".join(f"%{v}:float32[{v}] = {'sin' if v % 2 else 'exp'} %{v - 1}\n" for v in range(3, 9))
    + "output %8\nbackward:\n%9:float32[8] = mul %1 %2 %3 %4 %5 %6 %7\ngradient %9"
)


@st.composite
def plans(draw):
    """A plan of the chain: any of its values, figures that are known or not, in fractions that add exactly."""
    saved, amounts = draw(st.sets(st.integers(2, 8))), st.none() | st.integers(0, 1000)
    seconds, reasons = draw(amounts.map(lambda n: n and n / 1024)), dict.fromkeys(saved, draw(st.sampled_from("xy")))
    return Plan.of(CHAIN, saved, seconds=seconds, peak_bytes=draw(amounts), reasons=reasons)


@quick
@given(plans(), plans())
def test_what_is_added_and_taken_away_leads_from_one_plan_to_the_other(before, after):
    found, same = diff(before, after), before.values == after.values
    gone, come = found.saved_only_before, found.saved_only_after
    assert {s.value for s in gone} == set(before.values) - set(after.values)
    assert {s.value for s in come} == set(after.values) - set(before.values)
    assert sum(s.bytes for s in come) - sum(s.bytes for s in gone) == found.delta_bytes
    stay = set(before.recomputed) - set(found.recomputed_only_before)
    assert stay | set(found.recomputed_only_after) == set(after.recomputed)
    assert found.is_empty == (same and not found.delta_seconds and not found.delta_peak_bytes)
    assert diff(before, before).is_empty
    lines = [line.split()[:2] for line in str(found).splitlines()[1:]]
    assert sorted(lines) == sorted([*(["-", str(s.bytes)] for s in gone), *(["+", str(s.bytes)] for s in come)])
    assert [int(size) for _, size in lines] == sorted((s.bytes for s in (*gone, *come)), reverse=True)


@quick
@given(plans(), plans(), plans())
def test_differences_add_up_and_turn_round(first, second, third):
    steps = diff(first, second), diff(second, third), diff(first, third)
    for name in ("delta_bytes", "delta_seconds", "delta_peak_bytes"):
        one, two, both = (getattr(step, name) for step in steps)
        assert None in (one, two, both) or one + two == both
    one, back = steps[0], diff(second, first)
    assert (back.saved_only_before, back.saved_only_after) == (one.saved_only_after, one.saved_only_before)
    assert (one.delta_seconds is None) == (None in (first.seconds, second.seconds))


def test_plans_that_run_a_loop_otherwise_differ():
    plain = replace(PLAN, segments=())
    found = diff(PLAN, plain)
    assert not found.is_empty
    assert (found.segments_only_before, found.segments_only_after) == (((1, 2, 0),), ())
    assert str(found).splitlines()[1:] == ["- loop 1 in segments of 2 steps"]
    assert diff(plain, PLAN).segments_only_after == ((1, 2, 0),)


def test_plans_that_keep_other_steps_of_a_loop_differ_and_say_so():
    kept = replace(PLAN, kept_steps=((1, 3),))
    assert kept.key != PLAN.key and kept.loops_in_segments == ((1, 2, 3),)
    assert str(diff(PLAN, kept)).splitlines()[1:] == [
        "- loop 1 in segments of 2 steps",
        "+ loop 1 in segments of 2 steps, its last 3 kept",
    ]
    assert "; loop 1 in segments of 2 steps, its last 3 kept\n" in str(kept)


@pytest.mark.parametrize(
    "kept_steps, told",
    [
        ([(1, 0)], "plan.kept_steps[0] keeps 0 steps.\n{NOT_ALL}"),
        ([(1, 5)], "plan.kept_steps[0] keeps 5 steps.\n{NOT_ALL}"),
        ([(1, 1), (1, 1)], "plan.kept_steps[1] names loop 1 a second time.\nName each loop once."),
        (
            [(2, 1)],
            "plan.kept_steps[0] names loop 2, which neither runs in segments nor offloads anything.\n"
            "Name one of plan.segments, or a loop that offloads; any other keeps what all its steps hand over.",
        ),
    ],
)
def test_kept_steps_that_do_not_fit_are_refused(kept_steps, told):
    told = told.replace("{NOT_ALL}", NOT_ALL)
    assert refusal(lambda: Plan.of(GRAPH, [2, 5], segments=[(1, 2)], kept_steps=kept_steps)) == told


def test_a_difference_is_printed_whole_and_a_value_of_another_size_is_another():
    found = diff(PLAN, Plan.of(parse(PROGRAM.replace("output %4", "output %2\noutput %4")), [2, 5]))
    assert ([s.bytes for s in found.saved_only_before], [s.bytes for s in found.saved_only_after]) == ([12], [0])
    segments = [(1, 5)]
    after = Plan.of(GRAPH, [3, 5], reasons={3: "so I say"}, seconds=1e-3, peak_bytes=5000, segments=segments)
    assert str(diff(PLAN, after)) == (
        "told -> by hand: +0 bytes saved, +1 -1 ops recomputed, -0.500 ms, +904 bytes of peak\n"
        "- loop 1 in segments of 2 steps\n"
        "+ loop 1 in segments of 5 steps\n"
        "-            12  float32[3] dot_general : it is heavy\n"
        "+            12  float32[3] sin : so I say"
    )


def test_a_plan_prints_what_is_known_of_it():
    assert str(PLAN) == (
        "told: 2 values, 72 bytes saved; 1 op recomputed; no plan under the same rules saves less than 60 bytes\n"
        "recomputing takes 1.500 ms; no plan of as few bytes takes less than 1.250 ms (gap 20.0%); peak 4,096 bytes; "
        "loop 1 in segments of 2 steps\n"
        "            60  5 x float32[3] loop : it is carried\n"
        "            12  float32[3] dot_general : it is heavy"
    )


GAPS = [(3.0, 2.0, 0.5), (0.0, 0.0, 0.0), (2.0, 2.0, 0.0), (1.0, 0.0, math.inf), (None, 1.0, None), (1.0, None, None)]


@pytest.mark.parametrize("seconds, bound, gap", GAPS)
def test_the_gap_is_the_part_of_the_bound_that_lies_above_it(seconds, bound, gap):
    assert Plan.of(GRAPH, [2, 5], seconds=seconds, bound_seconds=bound).gap == gap
