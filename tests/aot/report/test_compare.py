"""Two steps side by side: arrays are known by what they are, and damaged reports are refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from jointcut import aot
from jointcut.aot.command import main
from jointcut.aot.report.compare.diff import diff
from jointcut.aot.report.compare.matching import changes
from jointcut.aot.report.compare.snapshot import Array, Snapshot, together
from jointcut.aot.report.compare.stored import from_dict, read
from jointcut.partition.errors import CallError, RecordError
from jointcut.partition.prices.cost import Roofline

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
WIDE = jnp.ones((256, 32))
WEIGHTS = [jnp.ones((32, 32))] * 3
ANEW = "Write it anew: jointcut explain --save report.json, or report.save('report.json')."
GIVE = "Give a file that report.save('report.json') or jointcut explain --save report.json wrote."


def loss(ws, x):
    for w in ws:
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def with_a_sine(ws, x):
    for w in ws:
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ w)
            x = jnp.where(jnp.sin(x) > 0.1, x, jnp.cos(x) * 2)
    return jnp.sum(x**2)


def reported(function, weights=WEIGHTS, name="loss", measure=True):
    cut = aot.function(function, cost=RATES).trace(weights, WIDE).partition()
    return replace(cut.explain(measure=measure), name=name)


@pytest.fixture(scope="module")
def before():
    return reported(loss)


@pytest.fixture(scope="module")
def after():
    return reported(with_a_sine)


@pytest.fixture
def files(before, after, tmp_path):
    return before.save(tmp_path / "before.json"), after.save(tmp_path / "after.json")


# ------------------------------------------------------------------------------------------------- what is compared


def test_the_figures_are_those_of_both_reports_and_the_arrays_add_up_to_them(before, after):
    found = after.diff(before)
    assert found.figures["peak_bytes"] == (before.peak_bytes, after.peak_bytes)
    assert found.figures["temp_bytes"] == (before.account.temp_bytes, after.account.temp_bytes)
    assert found.figures["residual_bytes"] == (before.totals.saved_bytes, after.totals.saved_bytes)
    for rows, pair in ((found.at_peak, (before.life, after.life)),):
        assert sum(row.bytes_more for row in rows) == max(pair[1].totals) - max(pair[0].totals)
    assert sum(row.bytes_more for row in found.saved) == after.totals.saved_bytes - before.totals.saved_bytes


def test_what_is_new_is_told_with_its_bytes_its_scope_and_its_line(before, after):
    found = after.diff(before)
    sines = [row for row in found.saved if row.array.op == "sin"]
    assert [(row.how, row.array.type) for row in sines] == [("new", "float32[256,32]")]
    assert sines[0].array.scope.endswith("layer") and sines[0].array.line.startswith(f"{__file__}:")
    back = before.diff(after)
    assert [(row.how, row.bytes_more) for row in back.saved if row.array.op == "sin"] == [
        ("gone", -sines[0].bytes_more)
    ]
    text = str(found)
    assert re.search(r"^new +\+\d+\.\d kB  float32\[256,32\]  sin +report/test_compare.py:\d+ ", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 100


def test_a_report_is_the_same_as_itself_and_as_what_was_saved_of_it(before, files):
    assert before.diff(before).is_empty and before.diff(files[0]).is_empty
    assert read(files[0]) == from_dict(json.loads(json.dumps(before.snapshot().to_dict())), "", "")
    assert str(before.diff(before)).startswith("loss, nothing changes; JAX ")


def test_one_layer_more_makes_its_arrays_larger(before):
    found = reported(loss, [*WEIGHTS, jnp.ones((32, 32))]).diff(before)
    assert {row.how for row in found.saved} <= {"larger", "same"}
    assert sum(row.bytes_more for row in found.saved) == WIDE.nbytes


def test_a_prediction_is_not_passed_off_as_xlas_account(before):
    found = reported(loss, measure=False).diff(before)
    assert found.remarks == ("the first is by XLA, the second by the model: they differ by that, too",)


# --------------------------------------------------------------------------------------------------------- matching

HERE = Array(100, "float32[8,8]", "tanh", "block/mlp", "/a/model.py:10 (mlp)")


@pytest.mark.parametrize(
    "other",
    [
        replace(HERE, line="/a/model.py:99 (mlp)"),
        replace(HERE, line="/a/other.py:1 (feed)", scope="block/feed"),
        replace(HERE, scope="loss/block/mlp"),
        replace(HERE, op="fusion"),
    ],
    ids=["moved", "in another function", "in a scope more", "by another op"],
)
def test_an_array_that_moved_is_the_same(other):
    assert [change.how for change in changes([HERE], [other])] == ["same"]
    (larger,) = changes([HERE], [replace(other, bytes=150)])
    assert (larger.how, larger.bytes_more, larger.before, larger.after.bytes) == ("larger", 50, HERE, 150)


def test_an_array_of_another_dtype_or_shape_is_one_that_grew():
    for type_ in ("float64[8,8]", "float32[16,8]"):
        (found,) = changes([HERE], [replace(HERE, type=type_, bytes=200)])
        assert (found.how, found.bytes_more, found.array.type) == ("larger", 100, type_)


def test_no_byte_is_lost_or_counted_twice():
    old = [replace(HERE, bytes=n, op=op, type=t) for n, op in enumerate(("sin", "cos", "exp"), 1) for t in ("a", "b")]
    new = [replace(row, bytes=7 * row.bytes, scope="x") for row in old[1:]] + [replace(HERE, type="c", op="log")]
    found = changes(old, new)
    assert sum(row.bytes_before for row in found) == sum(row.bytes for row in old)
    assert sum(row.bytes_after for row in found) == sum(row.bytes for row in new)
    assert [row.bytes_more for row in found] == sorted((row.bytes_more for row in found), reverse=True)


def test_arrays_that_differ_in_bytes_alone_are_one_row():
    assert together([HERE, replace(HERE, bytes=5), replace(HERE, op="sin")]) == (
        replace(HERE, bytes=105), replace(HERE, op="sin"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ files


def test_the_page_has_both_mountains_over_one_axis(before, after, tmp_path):
    found = after.diff(before)
    memory, at_peak, saved = found.data["sections"]
    assert memory["total"] == after.snapshot().memory["total"]
    assert memory["ghost"]["total"] == before.snapshot().memory["total"]
    assert memory["ghost"]["peak"]["bytes"] == max(before.life.totals)
    assert [cells[0] for cells in saved["rows"]].count("new") >= 1 and at_peak["id"] == "at_peak"
    assert found.save(tmp_path / "diff.html").read_text("utf-8") == found.html
    assert found.save(tmp_path / "diff.txt").read_text("utf-8") == found.table(True, in_colour=False) + "\n"
    assert json.loads(found.save(tmp_path / "diff.json").read_text("utf-8")) == found.to_dict()
    assert found._repr_mimebundle_()["text/plain"] == found.table(in_colour=False)


def test_the_command_tells_the_same(before, after, files, tmp_path):
    def call(*arguments):
        return CliRunner().invoke(main, ["diff", *map(str, arguments)])

    found = after.diff(before)
    assert call(*files).stdout == f"{found.table(in_colour=False)}\n"
    saved = tmp_path / "diff.html"
    told = call(*files, "--save", saved, "--json")
    assert json.loads(told.stdout) == {**found.to_dict(), "file": str(saved)} and saved.exists()
    refused = call(files[0], tmp_path / "none.json")
    assert refused.exit_code == 2
    assert refused.stderr == f"Error: {tmp_path}/none.json cannot be read: No such file or directory.\n{GIVE}\n"


# ---------------------------------------------------------------------------------------------------- what is refused


def test_reports_of_two_functions_are_refused_unless_one_was_renamed(before, after, files, tmp_path):
    other = replace(after, name="step")
    with pytest.raises(RecordError) as refused:
        other.diff(before)
    cure = "Compare two reports of one function; if it has another name now, give renamed=True (--renamed)."
    assert str(refused.value) == f"the other is a report of loss, and this of step.\n{cure}"
    with pytest.raises(RecordError) as refused:
        other.diff(files[0])
    assert str(refused.value) == f"{files[0]} is a report of loss, and this of step.\n{cure}"
    path = other.save(tmp_path / "step.json")
    refused = CliRunner().invoke(main, ["diff", str(files[0]), str(path)])
    assert refused.stderr == f"Error: {files[0]} is a report of loss, and {path} of step.\n{cure}\n"
    assert CliRunner().invoke(main, ["diff", str(files[0]), str(path), "--renamed"]).exit_code == 0
    assert other.diff(before, renamed=True).remarks == ("the function was loss, and is step now",)


def test_other_versions_and_targets_are_told(before):
    found = diff(replace(before.snapshot(), jax="0.9", backend="h100"), before.snapshot(), False, ("a", "b"))
    version = before.snapshot().jax
    assert found.remarks == (
        f"JAX 0.9 compiled the first, JAX {version} the second",
        "the first is for h100, the second for cpu",
    )
    assert found.headline == f"the peak is the same; JAX 0.9, h100 -> JAX {version}, cpu" or found.is_empty


DAMAGED = {
    "half": (lambda text: text[: len(text) // 2], r"is damaged: it is no JSON from line \d+, column \d+ on."),
    "bytes": (lambda text: b"\xff" + text.encode(), "is damaged: byte 0 is no text."),
    "list": (lambda text: "[]", None),
    "old": (lambda text: json.dumps({"function": "loss"}), None),
    "newer": (lambda text: changed(text, format=2), "has format 2, and this jointcut reads 1."),
    "no backend": (lambda text: changed(text, backend=None), "is damaged: None is no text."),
    "no list": (lambda text: changed(text, at_peak=7), "is damaged: 'int' object is not iterable."),
    "array": (lambda text: changed(text, at_peak=[{"bytes": 1}]), "is damaged: no 'type' is there."),
    "bytes as text": (lambda text: changed(text, saved=[{"bytes": "1"}]), "is damaged: '1' is no number from 0 on."),
    "share": (lambda text: changed(text, saved=[{"bytes": 1.5}]), "is damaged: 1.5 is no number of bytes."),
    "figure": (lambda text: changed(text, figures={"flops": -1}), "is damaged: -1 is no number from 0 on."),
    "memory": (lambda text: changed(text, memory={"total": []}), "is damaged: no 'kind' is there."),
}


def changed(text, **fields):
    data = json.loads(text)
    data["snapshot"].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_report_is_refused_with_what_is_wrong(name, files):
    damage, what = DAMAGED[name]
    wound = damage(files[0].read_text("utf-8"))
    files[0].write_bytes(wound if isinstance(wound, bytes) else wound.encode())
    with pytest.raises(RecordError) as refused:
        read(files[0])
    if what is None:
        assert str(refused.value) == f"{files[0]} holds no report that can be compared.\n{GIVE}"
    else:
        assert re.fullmatch(f"{re.escape(str(files[0]))} {what}\n{re.escape(ANEW)}", str(refused.value))


def test_a_snapshot_without_a_picture_is_compared_without_one(before):
    bare = replace(before.snapshot(), memory=None)
    assert isinstance(bare, Snapshot)
    assert [section["id"] for section in before.diff(bare).data["sections"]] == ["at_peak", "saved"]


@pytest.mark.parametrize("given", [None, 3, {"snapshot": 1}], ids=["None", "3", "dict"])
def test_what_is_no_step_is_refused_by_its_type(before, given):
    with pytest.raises(CallError) as refused:
        before.diff(given)
    kind = type(given).__name__
    assert str(refused.value) == (
        f"diff is given a {kind}, which is no step to compare with.\n"
        "Give the report of the step before, or its JSON file."
    )
