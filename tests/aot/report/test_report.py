"""A report tells of one cut what its plan, XLA and jax.vjp say of it, in a table, a page, pictures and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.run.weigh import weigh
from jointcut.partition.errors import JointcutError, TraceError
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.roles import Side
from programs import CORPUS, named

RATES = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)
MATRIX = jax.ShapeDtypeStruct((64, 64), "float32")


def loss(w, x):
    for _ in range(3):
        y = x @ w
        x = jnp.tanh(y) * jnp.sin(y)
    return jnp.sum(x)


def cut_of(strategy="min_cut"):
    return aot.function(loss, cost=RATES).trace(MATRIX, MATRIX).partition(strategy)


@pytest.fixture(scope="module")
def cut():
    return cut_of()


@pytest.fixture(scope="module")
def measured(cut):
    return cut.explain()


@pytest.fixture(scope="module")
def predicted(cut):
    return cut.explain(measure=False)


# ------------------------------------------------------------------------------------ what is explained


def test_a_function_explains_the_cut_that_it_would_run(measured):
    ours = aot.function(loss, cost=RATES)
    assert ours.explain(MATRIX, MATRIX).to_dict() == measured.to_dict()
    assert aot.explain(ours, MATRIX, MATRIX).to_dict() == measured.to_dict()
    assert not measured.is_plain


@jax.tree_util.register_dataclass
@dataclass
class Model:
    w: jax.Array

    @aot.function(cost=RATES)
    def loss(self, x):
        return loss(self.w, x)


def test_a_method_explains_itself_with_its_instance_as_argument_0(measured):
    model = Model(jnp.zeros((64, 64)))
    for report in (model.loss.explain(MATRIX), aot.explain(model.loss, MATRIX)):
        assert report.totals.saved_bytes == measured.totals.saved_bytes
        assert [row.type for row in report.saved] == [row.type for row in measured.saved]


def test_a_function_that_is_not_ours_is_told_what_plain_jax_keeps():
    report = aot.explain(loss, MATRIX, MATRIX)
    assert report.is_plain and report.plan.strategy == "save_all"
    assert asdict(report.totals) == asdict(report.plain)
    assert not report.again and report.totals.again_ops == 0
    assert report.default_saved_bytes == cut_of().plan.bytes_saved < report.totals.saved_bytes
    assert report.subtitle.startswith("what jax.vjp keeps; on cpu, JAX ")


def test_a_report_of_plain_jax_says_that_it_is_the_default_where_it_is():
    few = aot.function(lambda x: jnp.sum(jnp.tanh(x)), target="h100").trace(jnp.ones(8))
    report = few.partition().explain(measure=False)
    assert report.is_plain
    assert "The default of aot.function is this plan, too: none that is clearly better is found." in report.table()


def test_the_options_of_explain_are_those_of_jax():
    def told(x, w, times):
        y = x
        for _ in range(times):
            y = jnp.tanh(y @ w)
        return jnp.sum(y), y

    report = aot.explain(told, MATRIX, MATRIX, 2, argnums=(0, 1), has_aux=True, static_argnums=2)
    assert sum(row.op == "tanh" for row in report.saved) >= 1
    with pytest.raises(TraceError):
        aot.explain(loss, jax.ShapeDtypeStruct((64, 64), "int32"), MATRIX)


PROGRAMS = [p for p in CORPUS if p.name != "integers_to_differentiate" and "x64" not in p.tags][::7]


def kept_by_vjp(program) -> tuple[int, int]:
    """Bytes that jax.vjp keeps for the backward, and the largest array of them.

    Arguments and outputs are left out, since the caller holds them, and each array counts once.
    """
    args, kwargs = program.args, program.kwargs
    places = program.argnums if isinstance(program.argnums, tuple) else (program.argnums,)

    def of_differentiated(*given):
        own = list(args)
        for place, value in zip(places, given, strict=True):
            own[place] = value
        return program.function(*own, **kwargs)

    made = jax.vjp(of_differentiated, *(args[i] for i in places), has_aux=program.has_aux)
    held = {id(x) for x in jax.tree.leaves((args, kwargs, made[0], made[2:]))}
    leaves = {id(x): x.nbytes for x in jax.tree.leaves(made[1]) if id(x) not in held}
    return sum(leaves.values()), max(leaves.values(), default=0)


def saved_by_plan(program) -> int:
    function = aot.function(program.function, argnums=program.argnums, has_aux=program.has_aux, cost=RATES)
    return (
        function.trace(*program.args, **program.kwargs).partition("save_all").explain(measure=False).totals.saved_bytes
    )


def test_what_plain_jax_is_said_to_keep_is_what_vjp_keeps():
    """Exactly for most programs.

    Elsewhere it is less: what is computed twice is kept once, scalars and captured constants are the program's own. Or
    it is more by one array at most, where a cotangent's zeros or a cast are written down in the joint program.
    """
    exact = 0
    for program in PROGRAMS:
        (kept, largest), saved = kept_by_vjp(program), saved_by_plan(program)
        assert 0.6 * (kept - 4) <= saved <= kept + largest, program.name
        exact += saved == kept
    assert exact >= 0.55 * len(PROGRAMS)


@pytest.mark.parametrize("name", ["two_layers", "convolutions", "elman", "scan_with_constants", "nested_scans"])
def test_of_networks_and_scans_it_is_the_same_to_the_byte(name):
    assert saved_by_plan(named(name)) == kept_by_vjp(named(name))[0]


# ------------------------------------------------------------------------------------ figures


def test_the_totals_are_those_of_the_plan_and_the_rows(measured, predicted, cut):
    totals, plan = measured.totals, cut.plan
    assert (totals.saved_bytes, totals.num_saved) == (plan.bytes_saved, len(plan.saved))
    assert totals.saved_bytes == sum(row.bytes for row in measured.saved)
    assert totals.again_ops == sum(row.count for row in measured.again)
    assert totals.again_flops == sum(row.flops for row in measured.again)
    assert totals.fixed_bytes == 3 * 64 * 64 * 4 + 2 * 4  # two arguments, one gradient, the loss and its cotangent
    assert totals.peak_bytes == predicted.front.chosen.peak_bytes == predicted.peak_bytes
    assert measured.account.peak_bytes == measured.front.chosen.peak_bytes == measured.peak_bytes
    assert measured.account.plain_peak_bytes == measured.front.plain.peak_bytes
    assert totals.forward_bytes == measured.life.peak_bytes(Side.FORWARD)
    assert totals.backward_bytes == measured.life.peak_bytes(Side.BACKWARD)
    assert measured.plain.saved_bytes == cut_of("save_all").plan.bytes_saved > totals.saved_bytes


def test_the_account_is_that_of_the_compiled_step_and_of_plain_jax(measured, cut):
    memory = cut.compile().memory
    plain = weigh(jax.jit(jax.value_and_grad(loss)).lower(MATRIX, MATRIX))
    assert asdict(measured.account) == {
        "temp_bytes": memory.activation_bytes,
        "peak_bytes": memory.peak_bytes,
        "plain_temp_bytes": plain.temp_bytes,
        "plain_peak_bytes": plain.peak_bytes,
    }
    assert 0.97 * memory.activation_bytes - 64 * 60 <= max(measured.life.totals) <= memory.activation_bytes


def test_the_report_of_a_step_of_two_programs_holds_the_residuals_throughout():
    def three(w, x):
        return jnp.tanh(x @ w) * jnp.sin(x)

    report = aot.function(three, cost=RATES).trace(MATRIX, MATRIX).partition("min_cut").explain()
    assert min(report.life.totals) >= report.totals.saved_bytes > 0
    assert report.account.temp_bytes >= max(report.life.totals)


def test_without_measuring_nothing_is_compiled(cut):
    with Counted() as compilations:
        report = cut_of().explain(measure=False)
    assert not compilations and report.account is None
    with Counted() as compilations:
        report = cut_of().explain()
    assert len(compilations) >= 2 and report.account is not None


class Counted:
    """How often XLA compiles meanwhile."""

    def __enter__(self):
        self.events = []
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self.events

    def listen(self, event, *_, **__):
        if event.endswith("backend_compile_duration"):
            self.events.append(event)

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self.listen)


# ------------------------------------------------------------------------------------ what it is shown as


def test_equal_cuts_have_equal_pages(measured, predicted):
    assert cut_of().explain(measure=False).html == predicted.html
    assert cut_of().explain().html == measured.html
    assert predicted.html != measured.html


def test_a_report_is_plain_json_with_the_keys_that_are_documented(measured, predicted):
    for report in (measured, predicted):
        told = report.to_dict()
        assert json.loads(json.dumps(told)) == json.loads(json.dumps(told, sort_keys=True))
        assert list(told) == [
            "function", "strategy", "backend", "device_bytes", "totals", "plain", "saved", "recomputed", "less",
            "segments", "loops", "forms", "overruled", "packed", "gradient_error", "bound_bytes", "derivatives",
            "account", "collectives", "snapshot",
        ]  # fmt: skip
        assert told["function"] == "loss" and told["strategy"] == "min_cut" and told["backend"] == "cpu"
        assert told["totals"] == asdict(report.totals) and len(told["saved"]) == report.totals.num_saved
        assert json.loads(json.dumps(report.data)) == report.data
    assert predicted.to_dict()["account"] is None


def test_the_sections_of_the_page_agree_with_the_report(measured):
    sections = {section["id"]: section for section in measured.data["sections"]}
    less = ["less"] * bool(measured.less)
    assert list(sections) == ["memory", "graph", "saved", "again", *less, "pareto", "words"]
    assert sections["memory"]["peak"]["bytes"] == max(measured.life.totals)
    assert sections["memory"]["ghost"]["peak"]["bytes"] == max(measured.plain_life.totals)
    values = sections["graph"]["values"]
    shown = [at for own in sections["saved"]["values"] for at in own]
    assert [values["id"][at] for at in shown] == [row.value for row in measured.saved]
    assert all(values["saved"][at] for at in shown)
    assert len(sections["pareto"]["points"]) >= len(measured.front)


def test_it_says_what_it_is_in_a_line(measured):
    assert repr(measured) == "<Report of loss: 3 arrays, 49.2 kB saved>"
    assert str(measured) == measured.table()


def test_a_notebook_gets_the_page_and_the_text(measured):
    bundle = measured._repr_mimebundle_(include=None, exclude=None)
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == measured.table(in_colour=False)
    assert "<iframe" in bundle["text/html"]


FORMATS = (".html", ".json", ".txt")
BEGINNINGS = {".html": b"<!doctype html", ".json": b"{"}


@pytest.mark.parametrize("ending", FORMATS)
def test_a_report_is_saved_in_the_format_of_its_ending(ending, measured, tmp_path):
    path = measured.save(str(tmp_path / f"report{ending}"))
    assert path == tmp_path / f"report{ending}"
    assert path.read_bytes().lower().startswith(BEGINNINGS.get(ending, b"loss, cut by").lower())
    if ending == ".html":
        assert path.read_text(encoding="utf-8") == measured.html
    if ending == ".json":
        assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(measured.to_dict()))
    if ending == ".txt":
        assert path.read_text(encoding="utf-8") == measured.table(everything=True, in_colour=False) + "\n"


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(ending, measured, tmp_path):
    path = tmp_path / "nowhere" / f"report{ending}"
    with pytest.raises(JointcutError) as refusal:
        measured.save(path)
    assert str(refusal.value) == (
        f"{path} cannot be written: No such file or directory.\nGive a file in a folder that takes it."
    )
    (tmp_path / f"report{ending}").mkdir()
    with pytest.raises(JointcutError, match="cannot be written: Is a directory"):
        measured.save(tmp_path / f"report{ending}")
    assert [p.name for p in tmp_path.iterdir()] == [f"report{ending}"]


def test_another_ending_is_refused_before_anything_is_written(measured, tmp_path):
    path = tmp_path / "report.htm"
    with pytest.raises(JointcutError) as refused:
        measured.save(path)
    assert str(refused.value) == (
        f"{path} has no known ending.\nKnown names: '.html', '.json', '.txt'. Did you mean '.html'?"
    )
    assert not list(tmp_path.iterdir())


def test_a_function_that_keeps_nothing_has_a_report_as_well(tmp_path):
    for measure in (False, True):
        report = aot.function(lambda x: x, cost=RATES).trace(np.float32(2)).partition().explain(measure=measure)
        assert report.totals.saved_bytes == 0 and not report.saved
        assert report.save(tmp_path / "report.html").exists()
        assert "0 B" in report.table()
