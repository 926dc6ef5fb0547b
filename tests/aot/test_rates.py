"""Rates are measured once, kept, and found again; nothing that befalls the file stops a call."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jointcut import aot
from jointcut.aot.planning.budgets import link, rates_file
from jointcut.aot.planning.budgets import rates as measuring
from jointcut.aot.planning.budgets.rates import Measured, rates
from jointcut.aot.stages import cut as cut_module
from jointcut.partition.bodies.read import read
from jointcut.partition.errors import CallError, JointcutError
from jointcut.partition.prices.cost import Roofline, recompute_seconds
from jointcut.partition.program.jax import runtime
from jointcut.partition.program.roles import Roles
from jointcut.partition.program.sides import classify
from jointcut.partition.program.text import parse

FIGURES = Roofline(1e12, 2e10, 3e9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, in a process that knows no rates yet."""
    monkeypatch.delenv("JOINTCUT_RATES")
    monkeypatch.setenv("JOINTCUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measuring, "_KNOWN", {})
    return tmp_path


@pytest.fixture
def count(monkeypatch):
    """Instead of measuring, count how often it is done and on which threads."""
    calls = []

    def measure(device):
        calls.append(threading.current_thread())
        assert not runtime.tracing()
        return FIGURES

    monkeypatch.setattr(measuring, "_measure", measure)
    return calls


def forget():
    measuring._KNOWN.clear()


# ---------------------------------------------------------------- of a device


def test_rates_are_positive_decibels(folder, monkeypatch):
    monkeypatch.setattr(measuring, "_STEADY", 1)
    found = rates()
    for rate in _told(found).values():
        assert math.isfinite(rate) and rate > 0
        assert float(f"{rate:.1e}") == rate == measuring.rounded(rate)


def test_rates_are_rounded_to_ten_steps_for_each_power_of_ten():
    given = [10 ** (k / 400) for k in range(4000)]
    rounded = [measuring.rounded(rate) for rate in given]
    assert all(0.85 < r / g < 1.17 for r, g in zip(rounded, given, strict=True))
    assert len(set(rounded)) == 101  # ten in each of ten powers of ten, and the end
    assert {float(f"{r:.1e}"[:3]) for r in rounded} == {1.0, 1.3, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 7.9}


def test_the_least_time_counts_and_what_comes_late_is_waited_for(monkeypatch):
    """A machine that is busy for the first bursts: pauses let the other work end."""
    monkeypatch.setattr(measuring, "_BURST_S", 0.0)
    monkeypatch.setattr(measuring, "_PAUSE_S", 0.0)
    quick, slow = iter([9.0, 5.0, 7.0, 7.0, 3.0]), iter([4.0, 4.0, 4.0, 4.0, 4.0])
    least = measuring._least([lambda: next(quick, 3.1), lambda: next(slow, 4.2)])
    assert least == [3.0, 4.0]
    assert next(quick, "all were run") == "all were run"


def test_measuring_ends_where_times_fall_for_ever(monkeypatch):
    monkeypatch.setattr(measuring, "_BURST_S", 0.0)
    monkeypatch.setattr(measuring, "_PAUSE_S", 0.001)
    monkeypatch.setattr(measuring, "_MOST_S", 0.05)
    times = (0.5**n for n in range(10**6))
    assert 0 < measuring._least([lambda: next(times)])[0] < 1


def test_rates_are_measured_once_per_process_and_once_per_file(folder, count):
    assert rates() == rates() == FIGURES
    assert len(count) == 1
    forget()
    assert rates() == FIGURES
    assert len(count) == 1
    (folder / "rates.json").unlink()
    forget()
    assert rates() == FIGURES
    assert len(count) == 2


def test_the_default_device_is_the_one_that_jax_would_use(folder, count):
    device = jax.devices()[0]
    assert rates() == rates(device)
    with jax.default_device(device):
        rates()
    assert len(count) == 1


def test_the_key_names_the_kind_of_device_the_cores_and_the_version(folder, count):
    rates()
    (key,) = json.loads((folder / "rates.json").read_text())
    assert key.startswith(f"{jax.devices()[0].device_kind} ")
    assert " cores, jaxlib 0." in key


def test_hosts_that_share_a_folder_do_not_share_rates(folder, count, monkeypatch):
    rates()
    monkeypatch.setattr(measuring, "_processor", lambda: "a slow one")
    rates()
    monkeypatch.setattr(measuring.os, "sched_getaffinity", lambda pid: range(200), raising=False)
    rates()
    assert len(count) == len(json.loads((folder / "rates.json").read_text())) == 3


def test_rates_are_measured_anew_where_that_is_asked_for_or_a_month_is_over(folder, count, monkeypatch):
    rates()
    assert rates(anew=True) == rates() == FIGURES
    assert len(count) == 2
    now = time.time()
    for days, times in [(29, 2), (31, 3), (-1, 4)]:  # none of a clock that was put back
        monkeypatch.setattr(measuring.time, "time", lambda days=days: now + 86_400 * days)
        forget()
        rates()
        forget()
        rates()
        assert len(count) == times


def test_after_a_month_rates_stay_but_for_those_that_are_much_higher(folder, monkeypatch):
    measured = iter([Roofline(4e10, 5e9, 3e9), Roofline(1e11, 6.3e9, 1e9, 5e8), Roofline(1e9, 1e9, 1e9)])
    monkeypatch.setattr(measuring, "_measure", lambda device: next(measured))
    rates()
    forget()
    now = time.time()
    monkeypatch.setattr(measuring.time, "time", lambda: now + 86_400 * 31)
    assert rates() == Roofline(1e11, 5e9, 3e9, 5e8)
    forget()
    assert rates() == Roofline(1e11, 5e9, 3e9, 5e8)
    assert rates(anew=True) == Roofline(1e9, 1e9, 1e9)


def test_a_device_that_cannot_be_measured_is_named_with_a_cure(folder, monkeypatch):
    def measure(device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(measuring, "_measure", measure)
    with pytest.raises(JointcutError) as refused:
        rates()
    assert str(refused.value) == (
        f"{jax.devices()[0]} cannot be measured: RESOURCE_EXHAUSTED: Out of memory\n"
        "Free memory on it, or say what it does in a second: cost=Roofline(...)."
    )


TRANSFORMED = {
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(x[None]),
    "scan": lambda f, x: lax.scan(lambda c, y: (c, f(y)), 0.0, x[None]),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "eval_shape": jax.eval_shape,
    "no jit": lambda f, x: f(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_rates_are_measured_for_real_inside_any_trace(name, folder, monkeypatch):
    monkeypatch.setattr(measuring, "_BURST_S", 0.0)
    monkeypatch.setattr(measuring, "_STEADY", 0)
    found = []

    def function(x):
        found.append(rates())
        return jnp.sum(x * x)

    TRANSFORMED[name](function, np.ones(3, np.float32))
    assert isinstance(found[0], Roofline) and len(measuring._KNOWN) == 1


def test_settings_of_the_caller_do_not_reach_the_measurement(folder, monkeypatch):
    seen = []

    def measure(device):
        seen.append((jax.config.jax_enable_x64, jax.config.jax_disable_jit, jax.config.jax_debug_nans))
        return FIGURES

    monkeypatch.setattr(measuring, "_measure", measure)
    with jax.enable_x64(True), jax.disable_jit(), jax.debug_nans(True):
        rates()
    assert seen == [(False, False, False)]


# ---------------------------------------------------------------- by a step that ran


def measured_step(monkeypatch, seconds):
    """A compiled step whose runs take a second of these times, as if the device did."""
    monkeypatch.setattr(cut_module, "timed", lambda *_: seconds)
    return aot.function(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)).trace(W, X).partition().compile()


W, X = jnp.ones((32, 32)), jnp.ones((64, 32))


def test_a_measured_step_corrects_the_seconds_of_later_plans(folder, count, monkeypatch, caplog):
    run = measured_step(monkeypatch, (0.02, 0.015))
    plain = run.measure(W, X)
    assert plain.fed == "" and rates() == FIGURES
    with caplog.at_level(logging.INFO, "jointcut"):
        found = run.measure(W, X, feed=True)
    later = measured_step(monkeypatch, (0.015,)).measure(W, X)
    assert abs(math.log(0.015 / later.predicted_seconds)) < abs(math.log(0.015 / plain.predicted_seconds))
    assert 0.8 < 0.015 / later.predicted_seconds < 1.25
    slower = FIGURES.flops_per_s / rates().flops_per_s
    kind = jax.local_devices()[0].device_kind
    assert found.fed == (
        f"the rates of {kind} are {slower:.1f} times lower, in {folder}/rates.json; "
        "remove the entry there to have them measured again"
    )
    assert str(found).splitlines()[-1] == f"  {found.fed}"
    assert f"By the time of <lambda> {found.fed}." in caplog.messages
    for name, rate in asdict(FIGURES).items():  # all by one factor: prices keep their proportions
        assert rate is None or 0.85 < rate / slower / getattr(rates(), name) < 1.17
    assert run.measure(W, X, feed=True).fed.startswith(f"the rates of {kind} are what they were, in ")  # once is enough


def test_rates_that_were_fed_are_kept_until_the_entry_is_removed(folder, count, monkeypatch):
    measured_step(monkeypatch, (0.015,)).measure(W, X, feed=True)
    fed, path = rates(), folder / "rates.json"
    entries = json.loads(path.read_text())
    (entry,) = entries.values()
    assert entry["fed_by"] == "<lambda>"
    entry["measured_unix_s"] -= 90 * 86_400
    path.write_text(json.dumps(entries))
    forget()
    assert rates() == fed != FIGURES and len(count) == 1
    path.unlink()
    forget()
    assert rates() == FIGURES and len(count) == 2


def test_what_a_step_cannot_correct_is_refused_and_stays(folder, count, monkeypatch):
    with pytest.raises(CallError) as caught:
        measured_step(monkeypatch, (0.0003,)).measure(W, X, feed=True)
    assert str(caught.value) == (
        "feed cannot tell rates by a step of 300 µs: much of that is the call itself.\n"
        "Measure one that takes a millisecond or more."
    )
    priced = aot.function(lambda w: jnp.sum(w**2), cost=FIGURES).trace(W).partition().compile()
    with pytest.raises(CallError) as caught:
        priced.measure(W, feed=True)
    assert str(caught.value) == (
        "feed has no rates to correct: the step was planned for a target, or by a cost of yours.\n"
        "Correct these yourself, or leave `target` and `cost` away."
    )
    (folder / "rates.json").write_text(json.dumps({"*": _told(FIGURES)}))
    forget()
    with pytest.raises(CallError) as caught:
        measured_step(monkeypatch, (0.015,)).measure(W, X, feed=True)
    assert str(caught.value) == (
        f"feed has no rates to correct: {folder}/rates.json fixes those of any device.\nRemove its entry '*'."
    )
    assert rates() == FIGURES


def test_rates_that_cannot_be_kept_are_fed_for_this_process_and_that_is_said(folder, count, monkeypatch):
    run = measured_step(monkeypatch, (0.015,))
    rates()
    monkeypatch.setenv("JOINTCUT_RATES", str(folder / "rates.json" / "below a file"))
    assert run.measure(W, X, feed=True).fed.endswith(" times lower, not kept")
    assert rates() != FIGURES


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("text", ["{", "[1]", "7", "\x00", "null", 10**5 * "["])
def test_a_file_that_is_not_ours_is_told_of_and_left_as_it_is(text, folder, count, caplog):
    path = folder / "rates.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="jointcut"):
        assert rates() == rates() == FIGURES
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "Rates are measured anew, since the file that should hold them cannot be read: "
    )
    assert record.getMessage().endswith(". It is left as it is: remove it, or name another file by JOINTCUT_RATES.")
    assert path.read_text() == text
    path.write_text("")  # which holds nothing
    forget()
    rates()
    assert len(count) == 2 and json.loads(path.read_text())


@pytest.mark.parametrize("figure", ["0", "-1.0", "NaN", "Infinity", '"fast"', "null", "true", 400 * "9", "[]"])
def test_figures_that_are_no_rates_are_not_believed(figure, folder, count, caplog):
    rates()
    path = folder / "rates.json"
    path.write_text(path.read_text().replace(str(FIGURES.bytes_per_s), figure))
    forget()
    assert rates() == FIGURES
    assert len(count) == 2
    (record,) = caplog.records
    (name,) = json.loads(path.read_text())
    assert record.getMessage() == f"Rates are measured anew, since the entry {name!r} of {path} holds none."


@pytest.mark.parametrize("other", [{"flops_per_s": 1.0, "of_tomorrow": 2}, None, 7, []])
def test_what_the_file_says_of_other_devices_stays_there_and_does_no_harm(other, folder, count, caplog):
    (folder / "rates.json").write_text(json.dumps({"another machine": other}))
    rates()
    kept = json.loads((folder / "rates.json").read_text())
    assert len(kept) == 2 and kept["another machine"] == other
    forget()
    rates()
    assert len(count) == 1 and not caplog.records


@pytest.mark.parametrize("entry", ["null", "7", "[]", "{}", '{"flops_per_s": 1e9}', '{"measured_unix_s": "today"}'])
def test_an_entry_that_is_none_is_replaced_alone(entry, folder, count):
    rates()
    path = folder / "rates.json"
    ((name, mine),) = json.loads(path.read_text()).items()
    path.write_text(json.dumps({name: json.loads(entry), "another machine": mine}))
    forget()
    assert rates() == FIGURES
    assert len(count) == 2
    assert set(json.loads(path.read_text())) == {name, "another machine"}


def test_nothing_but_the_file_is_left_in_the_folder(folder, count, monkeypatch):
    rates()
    assert [path.name for path in folder.iterdir()] == ["rates.json"]

    def refuse(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    rates(anew=True)
    assert [path.name for path in folder.iterdir()] == ["rates.json"]


def test_whoever_may_read_the_folder_may_read_the_file(folder, count):
    rates()
    ours, usual = folder / "rates.json", folder / "usual"
    usual.touch()
    assert ours.stat().st_mode == usual.stat().st_mode


def test_processes_that_write_at_once_leave_one_whole_file(folder, count):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: rates_file.write(str(n), n * "x"), range(200)))
    assert json.loads((folder / "rates.json").read_text()).items() <= {str(n): n * "x" for n in range(200)}.items()
    assert len(list(folder.iterdir())) == 1


def test_processes_that_start_at_once_measure_once_and_lose_no_entry(folder, count, monkeypatch):
    """Each thread stands for a process: they lock the folder against each other, too."""
    measure = measuring._measure
    monkeypatch.setattr(measuring, "_measure", lambda device: time.sleep(0.2) or measure(device))
    device = jax.devices()[0]
    names = ["one", "one", "other", "one", "other"]
    with ThreadPoolExecutor(5) as pool:
        found = pool.map(lambda name: measuring._noted_or_measured(device, name, False), names)
        assert [*found] == [FIGURES] * 5
    assert len(count) == 2
    assert json.loads((folder / "rates.json").read_text()).keys() == {"one", "other"}


def test_a_folder_that_cannot_be_written_does_not_matter(folder, count, monkeypatch):
    blocked = folder / "a file"
    blocked.write_text("")
    monkeypatch.setenv("JOINTCUT_CACHE_DIR", str(blocked / "below"))
    assert rates() == rates() == FIGURES
    assert len(count) == 1


def test_the_users_cache_folder_is_the_default(folder, count, monkeypatch):
    monkeypatch.delenv("JOINTCUT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    rates()
    assert (folder / "cache" / "jointcut" / "rates.json").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(folder / "home"))
    forget()
    rates()
    assert (folder / "home" / ".cache" / "jointcut" / "rates.json").exists()


def test_a_variable_names_the_file(folder, count, monkeypatch):
    monkeypatch.setenv("JOINTCUT_RATES", str(folder / "mine.json"))
    rates()
    assert [path.name for path in folder.iterdir()] == ["mine.json"]
    forget()
    assert rates() == FIGURES
    assert len(count) == 1


def test_an_entry_for_any_device_is_never_measured_again(folder, count, monkeypatch):
    fixed = Roofline(1e10, 1e9, 1e9, 1e8)
    (folder / "rates.json").write_text(json.dumps({"*": asdict(fixed)}))
    monkeypatch.setattr(measuring.time, "time", lambda: 10.0**12)
    assert rates() == fixed
    assert not count
    assert rates(anew=True) == FIGURES
    assert set(json.loads((folder / "rates.json").read_text())) > {"*"}


def _told(known):
    """The rates that are measured with the others; that of the link to the host is not."""
    return {name: rate for name, rate in asdict(known).items() if name != "host_bytes_per_s"}


def test_the_link_to_the_host_is_measured_once_and_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("JOINTCUT_RATES", str(tmp_path / "rates.json"))
    monkeypatch.setattr(link, "_KNOWN", {})
    measured = link.host_rate()
    assert measured == measuring.rounded(measured) > 0
    (entry,) = json.loads((tmp_path / "rates.json").read_text()).items()
    assert entry[0].startswith("host, ") and entry[1] == {"host_bytes_per_s": measured}
    monkeypatch.setattr(link, "_KNOWN", {})
    monkeypatch.setattr(link, "_measured_host", lambda device: 1.0)
    assert link.host_rate() == measured


def test_tests_run_with_rates_that_nobody_measured(count):
    assert json.loads(Path(os.environ["JOINTCUT_RATES"]).read_text()) == {"*": _told(rates())}
    assert not count


# ---------------------------------------------------------------- op by op


def graph_of(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    return read(closed, Roles.simple(len(args), 0, len(closed.out_avals), 0))


@pytest.fixture
def timed(monkeypatch):
    """Run each op once, and say that it took a second for each operand."""
    calls = []

    def median(function, *operands):
        if operands:
            calls.append(jax.block_until_ready(jax.jit(function)(*operands)))
        return float(len(operands))

    monkeypatch.setattr(measuring, "_median", median)
    return calls


SQUARE = np.eye(6, dtype=np.float32)
WORDS = np.array([4, 1, 0])

ALONE = {
    "dot_general": (jnp.dot, SQUARE, SQUARE),
    "sort": (lambda x: lax.sort(x), SQUARE),
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), SQUARE),
    "lu": (lambda x: lax.linalg.lu(x), SQUARE),
    "cumsum": (lambda x: lax.cumsum(x), np.ones(5, np.int32)),
    "reduce_sum": (lambda x: jnp.sum(x), SQUARE),
    "scatter-add": (lambda x, i, y: x.at[i].add(y), SQUARE, WORDS.astype(np.int32), np.ones((3, 6), np.float32)),
    "scan": (lambda x: lax.scan(lambda c, y: (c @ y, None), x, jnp.zeros((2, 6, 6)))[0], SQUARE),
    "dot_general in half": (jnp.dot, SQUARE.astype(jnp.bfloat16), SQUARE.astype(jnp.bfloat16)),
    "dot_general of complex numbers": (jnp.dot, SQUARE.astype(np.complex64), SQUARE.astype(np.complex64)),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_heavy_op_runs_alone_and_is_timed(name, timed):
    function, *args = ALONE[name]
    graph = graph_of(function, *args)
    (op,) = [op for op in graph.ops if op.name == name.split()[0]]
    model = Measured(FIGURES)
    assert model.seconds(graph, op) == len(op.inputs)
    (outs,) = timed
    assert [(x.shape, x.dtype) for x in outs] == [(v.aval.shape, v.aval.dtype) for v in op.payload.outvars]
    assert all(np.isfinite(np.asarray(x, np.complex64)).all() for x in outs)


def test_equal_ops_are_timed_once_and_different_ones_apart(timed):
    graph = graph_of(lambda x: (x @ x) @ x + lax.dot(x, x, precision="highest") + lax.sort(x), SQUARE)
    model = Measured(FIGURES)
    for _ in range(2):
        for op in graph.ops:
            model.seconds(graph, op)
    assert len(timed) == len(model.taken) == 3


def test_doubles_are_timed_as_doubles(timed):
    with jax.enable_x64(True):
        graph = graph_of(lambda x: lax.sort(x), SQUARE.astype(np.float64))
        Measured(FIGURES).seconds(graph, graph.ops[0])
    assert [x.dtype for x in timed[0]] == [np.float64]


def test_an_op_is_timed_on_the_users_default_device(monkeypatch):
    graph, device, seen = graph_of(lambda x: lax.sort(x), SQUARE), jax.local_devices()[0], []
    monkeypatch.setattr(measuring, "_median", lambda *_: float(seen.append(jax.config.jax_default_device) or 0))
    with jax.default_device(device):
        Measured(FIGURES).seconds(graph, graph.ops[0])
    assert seen == [device, device]


def waiting(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c @ c, x)


def kernel(x, out):
    out[...] = x[...]


def silent(x):
    return jax.pure_callback(lambda y: pytest.fail("it was called"), x, x)


NOT_ALONE = {
    "sin": (lambda x: jnp.sin(x), SQUARE),  # cheap
    "reshape": (lambda x: x.reshape(-1), SQUARE),
    "while": (waiting, SQUARE),
    "jit": (jax.jit(waiting), SQUARE),
    "cond": (lambda i, x: lax.switch(i, [jnp.tanh, lambda y: y @ y], x), np.int32(0), SQUARE),
    "random_bits": (lambda key: jax.random.bits(key, (3,)), jax.random.key(0)),
    "pure_callback": (silent, SQUARE),
    "ffi_call": (jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((6, 6), np.float32)), SQUARE),
}


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_is_cheap_or_cannot_run_alone_costs_what_the_roofline_says(name, timed):
    function, *args = NOT_ALONE[name]
    graph = graph_of(function, *args)
    (op,) = [op for op in graph.ops if op.name == name]
    assert Measured(FIGURES).seconds(graph, op) == FIGURES.seconds(graph, op)
    assert not timed


def test_an_op_of_a_text_costs_what_the_roofline_says(timed):
    graph = parse("primal %0:float32[8]\n%1:float32[8] = sort %0\noutput %1")
    assert recompute_seconds(graph, classify(graph), Measured(FIGURES)) == [FIGURES.seconds(graph, graph.ops[0])]
    assert not timed


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices run Pallas kernels")
def test_an_op_that_the_device_cannot_run_costs_what_the_roofline_says(timed):
    kind = jax.ShapeDtypeStruct((6, 6), np.float32)
    graph = graph_of(pl.pallas_call(kernel, out_shape=kind), SQUARE)
    (op,) = [op for op in graph.ops if op.name == "pallas_call"]
    model = Measured(FIGURES)
    assert model.seconds(graph, op) == FIGURES.seconds(graph, op)
    assert list(model.taken.values()) == [None] and not timed


def test_an_op_is_timed_for_real_inside_a_trace():
    taken = []

    def function(x):
        graph = graph_of(lambda y: lax.sort(y), np.ones(100, np.float32))
        taken.append(Measured(FIGURES).seconds(graph, graph.ops[0]))
        return x + 1

    jax.jit(function)(np.float32(0))
    assert math.isfinite(taken[0]) and taken[0] >= 0


def test_a_measured_model_moves_bytes_as_its_roofline_does():
    assert Measured(FIGURES).saving_seconds(1) == FIGURES.saving_seconds(1)
