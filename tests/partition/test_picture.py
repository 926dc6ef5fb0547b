"""What a page draws: a graph whose edges are the plan's, a timeline that adds up, and figures that people read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import planned, rows
from jointcut.partition.drawing.picture import graph_view, shared, short, timeline
from jointcut.partition.figures import human_bytes, human_seconds
from jointcut.partition.lower.memory.lifetimes import lifetimes
from jointcut.partition.lower.memory.replay import Replayer
from jointcut.partition.program.outline import PSEUDO, outline
from programs import CORPUS, named

NAMES = [p.name for p in CORPUS if p.name != "integers_to_differentiate"][2::4]  # that one cannot be traced
MOST_STEPS, MOST_GROUPS = 1_200, 8
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)
few = settings(quick, max_examples=12)


# ------------------------------------------------------------------------------------ the graph


def check(view, graph, plan) -> None:
    """The laws of every graph view."""
    assert json.loads(json.dumps(view)) == view
    nodes, values, edges = view["nodes"], view["values"], view["edges"]
    count, roles = len(nodes["name"]), nodes["role"]
    assert {len(column) for column in nodes.values()} == {count}
    assert len({len(column) for column in values.values()}) == len({len(column) for column in edges.values()}) == 1
    assert all(0 <= at < len(view["scopes"]) for at in nodes["scope"])
    assert all(0 <= at < len(view["sources"]) for at in (*nodes["source"], *values["source"]))
    assert all(0 <= at < count for at in (*edges["from"], *edges["to"], *map(int, view["arguments"])))
    assert all(-1 <= at < count for at in values["node"])
    assert set(edges["value"]) <= set(range(len(values["id"])))
    assert values["saved"] == [reason >= 0 for reason in values["reason"]]
    assert all(at < len(view["texts"]) for at in values["reason"])
    assert_edges_are_as_the_plan_says(view, graph, plan)
    saved = {v for v, is_saved in zip(values["id"], values["saved"], strict=True) if is_saved}
    assert saved == set(plan.values if plan else ())
    if plan:
        sizes = dict(zip(values["id"], values["bytes"], strict=True))
        assert sum(sizes[v] for v in saved) == plan.bytes_saved + plan.bytes_spared
        assert sum(role == "recomputed" for role in roles) == sum(
            graph.ops[i].name not in PSEUDO for i in plan.recomputed
        )


def assert_edges_are_as_the_plan_says(view, graph, plan) -> None:
    values, roles = view["values"], view["nodes"]["role"]
    outputs = {v for v, _ in graph.outputs}
    for source, target, at in zip(*(view["edges"][name] for name in ("from", "to", "value")), strict=True):
        value = values["id"][at]
        assert view["nodes"]["name"][source] == graph.ops[graph.values[value].maker].name
        if roles[target] == "forward":
            assert roles[source] == "forward"
        elif roles[source] == "forward" and plan is not None:
            assert values["saved"][at] or value in outputs


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("name", NAMES)
def test_the_view_of_a_program_shows_its_plan(name, strategy, traced):
    with named(name).precision():
        made = traced(name).partition(strategy).split
    view = graph_view(made.graph, made.plan, root=name, id="graph", title=name)
    assert (view["kind"], view["id"], view["title"], view["scopes"][0]["name"]) == ("graph", "graph", name, name)
    check(view, made.graph, made.plan)
    assert [s["name"] for s in view["scopes"]] == [s.name for s in outline(made.graph, name).scopes]


@pytest.mark.parametrize("name", NAMES[::3])
def test_without_a_plan_nothing_is_saved_or_run_twice(name, traced):
    graph = traced(name).graph
    view = graph_view(graph, None)
    check(view, graph, None)
    assert "recomputed" not in view["nodes"]["role"]
    assert len(view["nodes"]["name"]) == sum(op.name not in PSEUDO for op in graph.ops)


@quick
@given(planned())
def test_the_view_of_a_random_plan_shows_it(found):
    graph, plan = found
    check(graph_view(graph, plan), graph, plan)


def test_the_prices_of_ops_are_those_that_were_given(traced):
    made = traced("two_layers").partition("save_all").split
    view = graph_view(made.graph, made.plan, [float(op.id) for op in made.graph.ops])
    assert view["nodes"]["seconds"] != graph_view(made.graph, made.plan)["nodes"]["seconds"]
    assert sum(view["nodes"]["seconds"]) == sum(op.id for op in made.graph.ops if op.name not in PSEUDO)


# ------------------------------------------------------------------------------------ the timeline


def adds_up(section, row) -> None:
    """The laws of every timeline."""
    total = section["total"]
    assert json.loads(json.dumps(section)) == section
    assert len(section["steps"]) == len(total) <= MOST_STEPS
    for grouping in section["groupings"]:
        columns = [group["bytes"] for group in grouping["groups"]]
        assert [sum(own) for own in zip(*columns, strict=True)] == total or (not columns and not any(total))
        assert len(columns) <= MOST_GROUPS + 1
        assert len({group["name"] for group in grouping["groups"]}) == len(columns)
    if not total:
        assert section["peak"] is None
        return
    assert section["peak"]["bytes"] == total[section["peak"]["step"]] == max(total) == max(row.totals)
    arrays = [array["bytes"] for array in section["peak"]["arrays"]]
    assert arrays == sorted(arrays, reverse=True) and sum(arrays) <= max(total)
    assert len(arrays) == 12 or sum(arrays) == max(total)
    sides = [step["side"] for step in section["steps"]]
    assert sides == ["forward"] * section["boundary"] + ["backward"] * (len(total) - section["boundary"])


@quick
@given(rows())
def test_the_groups_of_a_timeline_add_up_at_every_step(row):
    section = timeline(row, id="memory")
    adds_up(section, row)
    assert section["total"] == list(row.totals) and section["ghost"] is None and section["id"] == "memory"


@few
@given(rows(least=MOST_STEPS + 1, most=5 * MOST_STEPS), st.integers(0, 1))
def test_a_long_row_is_drawn_no_finer_and_keeps_its_peak(row, count):
    section = timeline(row, ("plain", row) if count else None)
    adds_up(section, row)
    if count:
        ghost = section["ghost"]
        assert (ghost["total"], ghost["boundary"]) == (section["total"], section["boundary"])
        assert ghost["peak"] == {key: section["peak"][key] for key in ("step", "bytes")}


@pytest.mark.parametrize("name", NAMES[::4])
def test_the_timeline_of_a_program_adds_up_by_line_and_by_module(name, traced):
    with named(name).precision():
        made = traced(name).partition("save_all").split
    row = lifetimes(Replayer(made.graph).rows(made.schedule), made.graph)
    section = timeline(row)
    adds_up(section, row)
    assert [grouping["name"] for grouping in section["groupings"]] == ["source line", "module"]


# ------------------------------------------------------------------------------------ texts


UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TIMES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def parsed(text, units):
    """The number that a text says, and half of the last digit that it shows."""
    number, unit = text.replace(",", "").split(" ")
    decimals = len(number.partition(".")[2])
    return float(number) * units[unit], 0.5 * 10**-decimals * units[unit]


@given(st.integers(0, 10**15))
@settings(quick, max_examples=300)
def test_a_number_of_bytes_reads_back_within_its_last_digit(count):
    value, half = parsed(human_bytes(count), UNITS)
    assert abs(value - count) <= half * (1 + 1e-9)
    assert half <= max(0.5, 0.006 * count)
    assert human_bytes(-count).removeprefix("-") == human_bytes(count)


@given(st.floats(0, 1e4))
@settings(quick, max_examples=300)
def test_a_duration_reads_back_within_its_last_digit(seconds):
    value, half = parsed(human_seconds(seconds), TIMES)
    assert abs(value - seconds) <= half * (1 + 1e-9)
    assert half <= max(0.5e-8, 0.006 * seconds) or human_seconds(seconds) == "0 s"


@given(st.lists(st.integers(0, 10**13), min_size=2, max_size=2).map(sorted))
@quick
def test_more_bytes_never_read_as_fewer(counts):
    fewer, more = (parsed(human_bytes(count), UNITS)[0] for count in counts)
    assert fewer <= more


names = st.lists(st.lists(st.sampled_from("ab"), max_size=4).map(tuple), max_size=4)


@given(names)
@quick
def test_what_paths_share_leaves_each_its_last_name(paths):
    known, count = [path for path in paths if path], shared(paths)
    assert all(len(path) > count for path in known)
    assert len({path[:count] for path in known}) <= 1
    if known and all(len(path) > count + 1 for path in known):
        assert len({path[: count + 1] for path in known}) > 1


@given(st.lists(st.sampled_from(["home", "me", "train"]), min_size=1, max_size=4), st.integers(1, 999))
@quick
def test_a_line_keeps_its_file_and_the_folder_of_it(folders, number):
    line = f"/{'/'.join([*folders, 'model.py'])}:{number} (loss)"
    told = short(line)
    assert line.endswith(told) and told.endswith(f"model.py:{number} (loss)")
    assert told.count("/") <= 2
