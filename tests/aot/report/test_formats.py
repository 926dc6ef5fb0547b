"""Files of a report for other tools: traces that Perfetto shows, profiles that pprof reads."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.aot.report.wire import decode, packed
from jointcut.partition.errors import JointcutError


def block(x, w):
    return jnp.tanh(x @ w)


def loss(ws, x):
    for w in ws:
        x = block(x, w)
    return jnp.sum(x**2)


def looped(ws, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, jnp.stack(ws))[0] ** 2)


ARGS = [jnp.eye(32)] * 3, jnp.ones((64, 32))
LINE = f"{__file__}:{block.__code__.co_firstlineno + 1} (block)"


@pytest.fixture(scope="module", params=[loss, looped], ids=["unrolled", "scan"])
def report(request):
    return aot.function(request.param, strategy="min_cut").explain(*ARGS)


# ---------------------------------------------------------------------------------------------- Perfetto


def events(path):
    """The events of a trace by their letter, and by process."""
    data = json.loads(path.read_text("utf-8"))
    assert data.keys() == {"displayTimeUnit", "traceEvents"} and data["displayTimeUnit"] in ("ms", "ns")
    found = {}
    for event in data["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and event["ph"] in "MCXbe"
        assert event["ph"] == "M" or isinstance(event["ts"], int)
        found.setdefault((event["pid"], event["ph"]), []).append(event)
    return found


def test_a_trace_has_the_bytes_of_each_step_and_each_array_from_first_to_last(report, tmp_path):
    found = events(report.perfetto(tmp_path / "step.json"))
    names = {e["pid"]: e["args"]["name"] for (_, ph), es in found.items() for e in es if e["name"] == "process_name"}
    assert names == {1: report.name, 2: "plain JAX"}
    for pid, life in ((1, report.life), (2, report.plain_life)):
        counted = [event["args"]["bytes"] for event in found[pid, "C"]]
        assert counted == [*life.totals, 0] and max(counted) == life.totals[life.peak]
        assert [(e["name"], e["cat"], e["dur"]) for e in found[pid, "X"]] == [
            (m.op, m.side.value, 1) for m in life.moments
        ]
        begin, end = ({e["id"]: e for e in found[pid, ph]} for ph in "be")
        assert len(begin) == len(end) == len(life.buffers)
        alive = Counter()
        for key, event in begin.items():
            assert (event["cat"], event["name"]) == (end[key]["cat"], end[key]["name"]) and event["ts"] < end[key]["ts"]
            alive.update(dict.fromkeys(range(event["ts"], end[key]["ts"]), event["args"]["bytes"]))
        assert [alive[step] for step in range(len(life.moments))] == list(life.totals)
    assert any(event["args"]["at"] == LINE for event in found[1, "b"])


# ---------------------------------------------------------------------------------------------- pprof


def profile(path):
    """A profile by the numbers of its fields: its kinds, and for each sample its values, stack and labels."""
    data = decode(gzip.decompress(path.read_bytes()))
    texts = [text.decode() for text in data[6]]
    assert texts[0] == "" and len({*texts}) == len(texts)
    functions = {f[1][0]: (texts[f[2][0]], texts[f[4][0]] if 4 in f else "") for f in map(decode, data[5])}
    lines = {}
    for location in map(decode, data[4]):
        (line,) = map(decode, location[4])
        lines[location[1][0]] = *functions[line[1][0]], line[2][0] if 2 in line else 0
    kinds = [tuple(texts[kind[n][0]] for n in (1, 2)) for kind in map(decode, data[1])]
    samples = []
    for sample in map(decode, data[2]):
        labels = {texts[label[1][0]]: texts[label[2][0]] for label in map(decode, sample[3])}
        samples.append((tuple(packed(sample, 2)), [lines[n] for n in packed(sample, 1)], labels))
    return kinds, samples, texts[data[13][0]], texts[data[14][0]]


def test_a_profile_has_the_bytes_at_the_peak_and_the_saved_ones_by_function_and_line(report, tmp_path):
    kinds, samples, comment, default = profile(report.pprof(tmp_path / "step.pb.gz"))
    assert kinds == [("at_peak", "bytes"), ("saved", "bytes")] and default == "at_peak"
    assert comment == f"{report.name}: {report.subtitle}"
    totals = [sum(values[n] for values, _, _ in samples) for n in (0, 1)]
    assert totals == [report.life.totals[report.life.peak], report.totals.saved_bytes]
    line = block.__code__.co_firstlineno + 1
    stacks = [stack for values, stack, labels in samples if labels["op"] not in ("loop", "integer_pow") and values[1]]
    assert stacks and all(stack[0] == ("block", __file__, line) for stack in stacks)
    assert all(stack[-1][:2] == (report.name, __file__) for stack in stacks)
    assert len({(*stack, *sorted(labels.items())) for _, stack, labels in samples}) == len(samples)


def test_two_profiles_of_one_step_are_the_same_bytes_and_one_more_layer_is_all_that_differs(tmp_path):
    first, again = (aot.function(loss).explain(*ARGS) for _ in range(2))
    paths = [r.pprof(tmp_path / f"{i}.pb.gz") for i, r in enumerate((first, again))]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    more = aot.function(loss).explain([jnp.eye(32)] * 4, ARGS[1]).pprof(tmp_path / "more.pb.gz")
    before, after = (
        {(*stack, *labels.items()): values[1] for values, stack, labels in profile(p)[1]} for p in (paths[0], more)
    )
    assert sum(after.values()) - sum(before.values()) == 64 * 32 * 4
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= after.keys()


def test_a_profile_is_of_the_form_of_those_of_jax(report, tmp_path):
    ours = decode(gzip.decompress(report.pprof(tmp_path / "step.pb.gz").read_bytes()))
    theirs = decode(gzip.decompress(jax.profiler.device_memory_profile()))
    assert theirs.keys() <= ours.keys()
    for field in (1, 2, 4, 5):
        assert {type(part) for part in ours[field]} == {type(part) for part in theirs[field]} == {bytes}
        assert {*decode(ours[field][0])} <= {*decode(theirs[field][0])}


def read_by_pprof(*options):
    """What pprof says of a profile: by its name on the PATH, or as `go tool pprof`, of Debian's golang-go."""
    found, go = shutil.which("pprof"), shutil.which("go")
    if not found and not go:
        pytest.skip("no pprof on the PATH: install Debian's golang-go")
    command = [found] if found else [go, "tool", "pprof"]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pprof_reads_a_profile_and_says_what_one_more_layer_saves(tmp_path):
    paths = []
    for count in (3, 4):
        more = aot.function(loss, strategy="min_cut").explain([jnp.eye(32)] * count, ARGS[1])
        paths.append(more.pprof(tmp_path / f"{count}.pb.gz"))
    first = read_by_pprof("-top", "-lines", "-unit=B", "-sample_index=saved", paths[0])
    assert re.search(
        rf"^ *24576B +100% .* block {re.escape(__file__)}:{LINE.rpartition(':')[2].split()[0]}$", first, re.M
    )
    assert re.search(r"^Type: at_peak$", read_by_pprof("-top", paths[0]), re.M)
    change = read_by_pprof("-top", "-unit=B", "-sample_index=saved", "-diff_base", paths[0], paths[1])
    assert re.search(r"^ *8192B .* block$", change, re.M)


# ---------------------------------------------------------------------------------------------- bad input


def test_a_file_with_another_ending_or_in_no_folder_is_refused(report, tmp_path):
    for write, name, ending in ((report.perfetto, "step.html", ".json"), (report.pprof, "step.pb", ".gz")):
        with pytest.raises(JointcutError) as refused:
            write(tmp_path / name)
        assert str(refused.value).startswith(f"{tmp_path / name} has no known ending.\nKnown names: '{ending}'.")
        with pytest.raises(JointcutError) as refused:
            write(tmp_path / f"none/step{ending}")
        assert "cannot be written: No such file or directory." in str(refused.value)
    assert not list(tmp_path.iterdir())
