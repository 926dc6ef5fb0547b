"""The command line: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner, Result

from jointcut import aot
from jointcut.aot.cache import location
from jointcut.aot.cache.store import Store
from jointcut.aot.command import cli as command
from jointcut.aot.command import facts, main, usage
from jointcut.partition.figures import human_bytes

MODEL = """
import functools
import jax
import jax.numpy as jnp
from jointcut import aot

print("the module speaks")

def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) * params["scale"])

made = aot.function(loss, argnums=(0, 1))

def norms(x, *, power):
    return jnp.sum(x**2, axis=1) * power

def deep(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w) ** 2)

def step(w, x):
    return w - jax.grad(deep)(w, x)

def branches(x):
    return x if x > 0 else -x

@aot.function(static_argnums=1)
def spread(x, axis):
    return jnp.mean(jnp.exp(x), axis=axis).sum()

class Model:
    @aot.function
    def loss(self, x):
        return x

model = Model()
args = ({"w": jnp.ones((4, 3)), "scale": jnp.ones(3)}, jnp.ones((2, 4)))
by_name = {"x": args[1], "params": args[0]}
narrow = (args[0], jnp.ones((2, 5)))
two = (1.0, 2.0, 3.0)
wide = (jnp.ones((64, 64)), jnp.ones((64, 64)))
number = (1.0,)
axis = (jnp.ones((3, 2)), 1)
any_x = (args[0], aot.shapes("b, 4", "float32"))
matrix = {"x": jax.ShapeDtypeStruct((3, 2), jnp.float32), "power": jax.ShapeDtypeStruct((), jnp.float32)}

def made_args():
    return by_name

def needy(x):
    return x
"""
SEE = "See to it there; jointcut --traceback COMMAND shows the way to it."
EXAMPLES = "Give a tuple of arguments, a dict of arguments by name, or a function without parameters that returns one."


def call(*arguments: object, **options) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), **options)


def told(*arguments: object) -> str:
    """What a command prints that goes well."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """What a command says that cannot be done, on standard error alone."""
    result = call(*arguments)
    assert result.exit_code == command.REFUSED, result.output
    assert result.stdout == ""
    return result.stderr.removeprefix("the module speaks\n").removeprefix("Error: ").rstrip("\n")


@dataclass(frozen=True)
class Place:
    """A folder with the module `spoken`, and an artefact of its function."""

    folder: Path

    @property
    def artefact(self) -> Path:
        return self.folder / "artefact"


@pytest.fixture(scope="module")
def made_place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    (folder / "spoken.py").write_text(MODEL)
    return Place(folder)


@pytest.fixture(autouse=True)
def place(made_place, monkeypatch) -> Place:
    """Stand in the folder, and leave neither path nor modules behind."""
    monkeypatch.chdir(made_place.folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(location.FOLDER, raising=False)
    known = set(sys.modules)
    yield made_place
    for name in {"spoken", *sys.modules.keys() - known} & {path.stem for path in made_place.folder.glob("*.py")}:
        sys.modules.pop(name, None)


@pytest.fixture
def artefact(place) -> Path:
    if not place.artefact.exists():
        told("export", "spoken:loss", place.artefact, "--example", "args", "--platforms", "cpu,tpu")
    return place.artefact


# ------------------------------------------------------------------------------------------------------------ help


def commands(group: click.Group = main, path: tuple[str, ...] = ()):
    yield path, group
    for name, inner in group.commands.items():
        if isinstance(inner, click.Group):
            yield from commands(inner, (*path, name))
        else:
            yield (*path, name), inner


def test_every_help_fits_a_terminal_and_explains_every_option():
    for path, found in commands():
        lines = told(*path, "--help").splitlines()
        assert max(map(len, lines)) <= 80, path
        for parameter in found.params:
            assert isinstance(parameter, click.Argument) or parameter.help, (path, parameter.name)
        if isinstance(found, click.Group):
            listed = lines[lines.index("Commands:") + 1 :]
            assert {line.split()[0] for line in listed} == set(found.commands)
            assert all(line.endswith(".") and not line.endswith("...") for line in listed), path


def test_every_example_of_a_help_is_a_command_that_is_there():
    texts = [text for name, text in vars(usage).items() if name.isupper()]
    known = {path for path, _ in commands()}
    shown = [line.split() for text in texts for line in text.splitlines() if line.startswith("  jointcut ")]
    assert len(shown) > 15
    for _, *words in shown:
        path = tuple(words[:2] if words[0] == "cache" else words[:1])
        options = {option for parameter in dict(commands())[path].params for option in parameter.opts}
        assert path in known
        assert {word for word in words if word.startswith("--")} <= options, words


def test_explain_answers_by_the_model_before_xla_does(place):
    arguments = ["explain", "spoken:loss", "--example", "args"]
    result = call(*arguments)
    first = result.stderr.removeprefix("the module speaks\n").splitlines()
    assert first[0].startswith("spoken:loss: ")
    words = (
        r"spoken:loss: \d+ B are kept for the backward, in plain JAX \d+ B; temporaries of about \d+ B by the model, "
    )
    assert re.fullmatch(words + "XLA's follow", " ".join(map(str.strip, first)))
    assert "by the model" not in call(*arguments, "--json").stderr
    assert "by the model" not in call(*arguments, "--no-compile").stderr


def test_explain_of_a_step_says_to_name_its_loss(place):
    told = call("explain", "spoken:step", "--example", "wide", "--no-compile")
    assert told.stderr.removeprefix("the module speaks\n") == (
        "spoken:step takes the gradient of deep itself, and what follows is about a gradient of that.\n"
        "Name the loss to see what its backward keeps. Of the step as it is tells: jointcut doctor spoken:step\n"
    )
    assert "takes the gradient" not in call("explain", "spoken:deep", "--example", "wide", "--no-compile").stderr
    assert (
        "takes the gradient" not in call("explain", "spoken:step", "--example", "wide", "--no-compile", "--json").stderr
    )


def test_the_script_and_the_module_are_one_command(place):
    script = Path(sys.executable).with_name("jointcut")
    for start in ([script], [sys.executable, "-c", "from jointcut.aot.command import main; main()"]):
        run = subprocess.run([*start, "--version"], capture_output=True, text=True, check=True)
        assert (run.stdout, run.stderr) == (told("--version"), "")


# --------------------------------------------------------------------------------------------------------- explain


def explained(*options: str) -> tuple[str, dict[str, Any]]:
    """What `explain` prints of the loss, and its JSON."""
    words = ("explain", "spoken:loss", "--example", "spoken:args", *options)
    return told(*words), json.loads(told(*words, "--json"))


def test_explain_prints_what_is_saved_and_why():
    text, found = explained("--no-compile")
    head, columns, *rest = text.splitlines()
    saved = next(line for line in rest if line.startswith("  saved for the backward"))
    assert head == f"spoken:loss, cut by min_cut; on cpu, JAX {jax.__version__}"
    assert columns.split() == ["jointcut", "plain", "JAX", "ratio"]
    ours, plain = (found[name]["saved_bytes"] for name in ("totals", "plain"))
    assert saved.split() == f"saved for the backward {ours} B {plain} B {ours / plain:.2f}".split()
    assert "24 B  float32[2,3]  tanh" in text and found["saved"][0]["reason"] in " ".join(text.split())
    assert found["account"] is None


def test_explain_puts_plain_jax_beside_what_it_compiled():
    text, found = explained()
    account = found["account"]
    peaks = [human_bytes(account[name]) for name in ("peak_bytes", "plain_peak_bytes")]
    line = next(line for line in text.splitlines() if line.startswith("peak of a step"))
    assert line.split()[4:8] == " ".join(peaks).split()


@pytest.mark.parametrize("ending", [".html", ".json", ".txt"])
def test_explain_keeps_its_report_in_a_file(place, tmp_path, ending):
    kept = tmp_path / f"report{ending}"
    text = told("explain", "spoken:loss", "--example", "args", "--no-compile", "--save", kept)
    assert text.endswith(f"\n\nwritten to {kept}\n") and kept.stat().st_size > 100


def test_explain_writes_a_trace_and_a_profile(place, tmp_path):
    files = tmp_path / "step.json", tmp_path / "step.pb.gz"
    asked = "explain", "spoken:loss", "--example", "args", "--no-compile", "--perfetto", files[0], "--pprof", files[1]
    assert told(*asked).endswith(f"\n\nwritten to {files[0]}\nwritten to {files[1]}\n")
    assert json.loads(files[0].read_text())["traceEvents"] and gzip.decompress(files[1].read_bytes())
    found = json.loads(told(*asked, "--json"))
    assert (found["file"], found["perfetto"], found["pprof"]) == (None, *map(str, files))


def test_a_report_in_no_known_format_is_refused(place, tmp_path):
    said = refused("explain", "spoken:loss", "--example", "args", "--no-compile", "--save", tmp_path / "report.doc")
    assert said == (f"{tmp_path / 'report.doc'} has no known ending.\nKnown names: '.html', '.json', '.txt'.")


@pytest.mark.parametrize("example", ["spoken:args", "by_name", "made_args"])
def test_arguments_come_as_a_tuple_by_name_or_from_a_function(example):
    found = json.loads(told("explain", "spoken:loss", "--example", example, "--no-compile", "--json"))
    assert found == json.loads(told("explain", "spoken:loss", "--example", "args", "--no-compile", "--json"))


def test_a_parameter_that_has_no_position_is_given_by_name():
    found = json.loads(told("explain", "spoken:norms", "--example", "matrix", "--json"))
    assert found["account"]["peak_bytes"] > 0  # two programs, since it returns no number


@pytest.mark.parametrize(
    ("options", "budget", "strategy"),
    [([], None, None), (["--budget", "0.0"], 0.0, None), (["--strategy", "save_all"], None, "save_all")],
)
def test_what_explain_tells_is_what_the_records_say(place, options, budget, strategy):
    found = json.loads(told("explain", "spoken:made", "--example", "args", "--json", *options))
    spoken = sys.modules["spoken"]
    cut = spoken.made.trace(*spoken.args).partition(strategy, budget=budget)
    run = cut.compile()
    assert found["strategy"] == cut.plan.strategy
    assert found["totals"]["saved_bytes"] == cut.plan.bytes_saved
    assert [row["bytes"] for row in found["saved"]] == sorted((s.bytes for s in cut.plan.saved), reverse=True)
    assert sum(row["count"] for row in found["recomputed"]) == found["totals"]["again_ops"]
    plain = cut.traced.plain_memory
    assert (found["account"]["plain_peak_bytes"], found["account"]["plain_temp_bytes"]) == (
        plain.peak_bytes,
        plain.temp_bytes,
    )
    if strategy is None:
        assert (found["account"]["peak_bytes"], found["account"]["temp_bytes"]) == (
            run.peak_bytes,
            run.activation_bytes,
        )
    assert found["plans_compiled"] == (len(run.trail) or None)


def test_argnums_choose_what_is_differentiated():
    both = json.loads(
        told("explain", "spoken:loss", "--example", "args", "--argnums", "0, 1", "--no-compile", "--json")
    )
    made = json.loads(told("explain", "spoken:made", "--example", "args", "--no-compile", "--json"))
    for report in (both, made):
        assert report.pop("function") == report["snapshot"].pop("function")
    assert both == made


def test_a_budget_of_a_part_bounds_what_it_keeps():
    arguments = ["explain", "spoken:deep", "--example", "wide", "--no-compile", "--json", "--policy"]
    kept = [json.loads(told(*arguments, f"tanh={demand}"))["saved"] for demand in ("MUST_SAVE", "BUDGET:20kB")]
    sizes = [sum(row["bytes"] for row in rows if row["op"] == "tanh") for rows in kept]
    assert sizes[0] > 20_000 >= sizes[1] > 0
    assert refused(*arguments, "tanh=BUDGET:50%") == (
        "aot.budget is 50% of plain JAX's activations, and a part of a program needs a number.\n"
        "Give bytes: an int, or a text such as '300MiB'."
    )


def test_spilling_tells_what_would_wait_in_files(tmp_path):
    arguments = ["explain", "spoken:deep", "--example", "wide", "--no-compile", "--spill", tmp_path]
    found = json.loads(told(*arguments, "--json"))
    assert found["spilled_bytes"] == sum(row["bytes"] for row in found["saved"] if row["op"] != "input") > 0
    assert told(*arguments).endswith(
        f"between forward and backward {human_bytes(found['spilled_bytes'])} of it wait in files\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert json.loads(told(*arguments[:-2], "--json"))["spilled_bytes"] == 0
    assert refused("explain", "spoken:made", "--example", "args", "--spill", tmp_path) == (
        "spoken:made is an aot.function, which has its own spill.\nLeave --spill out, or name the plain function."
    )


def test_what_a_module_prints_does_not_mix_with_the_answer():
    result = call("explain", "spoken:loss", "--example", "args", "--no-compile", "--json")
    assert result.stderr == "the module speaks\n"
    json.loads(result.stdout)


def test_the_largest_size_is_what_aot_largest_finds(place):
    arguments = ["largest", "spoken:loss", "--example", "any_x", "--axis", "b", "--budget", "20kB"]
    data, text = json.loads(told(*arguments, "--json")), told(*arguments)
    spoken = sys.modules["spoken"]
    found = aot.largest(spoken.loss, "b", "20kB", *spoken.any_x)
    assert data == json.loads(json.dumps(facts.of_largest(replace(found, name="spoken:loss"), found.cut)))
    assert text.startswith(str(replace(found, name="spoken:loss")))
    assert data["in_blocks"] == [*found.tiles] != []
    assert f"{found.plan.tiles[0].blocks} blocks along axis 0" in " ".join(map(str.strip, text.splitlines()))
    assert f"the step of b={found.size:,} is cut by {found.plan.strategy}: " in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 100
    eights = told(*arguments, "--constraint", "mod(b, 8) == 0", "--json")
    eight = json.loads(eights)["size"]
    assert eight % 8 == 0 and 0.9 * found.size <= eight <= found.size + 16, "few of these sizes make equal blocks"
    assert refused(*arguments, "--size", "b=2") == "sizes names 'b', whose size is looked for.\nLeave it out."


@pytest.mark.parametrize(("memory", "code"), [("1MB", 0), ("100B", 1)])
def test_doctor_says_whether_a_function_fits(place, memory, code):
    words = ["doctor", "spoken:loss", "--example", "spoken:args", "--memory", memory]
    result, data = call(*words), json.loads(call(*words, "--json").stdout)
    assert (result.exit_code, data["fits"]) == (code, code == 0)
    first = "spoken:loss fits: " if code == 0 else "spoken:loss does not fit: "
    assert result.stdout.startswith(f"{first}it takes {human_bytes(data['account']['peak_bytes'])} of ")
    assert [cause["evidence"] in result.stdout for cause in data["causes"]] == [True] * len(data["causes"])


# ------------------------------------------------------------------------------------------- what cannot be explained


@pytest.mark.parametrize(
    ("function", "example", "text"),
    [
        ("spoken:los", "args", "module spoken has no 'los'.\nKnown names: {functions}. Did you mean 'loss'?"),
        ("spoken:loss.x", "args", "spoken.loss has no 'x'.\nIt has none that would serve."),
        ("spoken:loss", "arg", "module spoken has no 'arg'.\nKnown names: {names}. Did you mean 'args'?"),
        ("spoken", "args", "'spoken' names no object of a module.\nWrite module:name, as in train:loss."),
        ("spoken:", "args", "'spoken:' names no object of a module.\nWrite module:name, as in train:loss."),
        ("spoken.py:loss", "args", "spoken.py:loss names a file.\nName the module as an import does: spoken:loss, in "
         "the folder of the file."),
        ("spokn:loss", "args", "module spokn is neither in {here} nor installed.\nRun jointcut in the folder from "
         "which you would import it. Did you mean 'spoken'?"),
        ("spoken:args", "args", "spoken:args is of type tuple, not a function.\nWrite module:name, as in train:loss."),
        ("spoken:model.loss", "args", "spoken:model.loss is bound to an object.\nName it by its class, "
         "module:Class.method, and give the object as the first argument."),
        ("spoken:loss", "jnp", f"spoken:jnp is of type module.\n{EXAMPLES}"),
        ("spoken:loss", "needy", "spoken:needy cannot be called without arguments: TypeError: needy() missing 1 "
         f"required positional argument: 'x'\n{SEE}"),
        ("spoken:loss", "two", "spoken:two does not fit the parameters of spoken:loss, (params, x): too many "
         f"positional arguments.\n{EXAMPLES}"),
        ("spoken:loss", "matrix", "spoken:matrix does not fit the parameters of spoken:loss, (params, x): missing a "
         f"required argument: 'params'.\n{EXAMPLES}"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(place, function, example, text):
    functions = "'Model', 'branches', 'deep', 'loss', 'made', 'made_args', 'needy', 'norms', 'spread', 'step'"
    names = (
        "'Model', 'any_x', 'args', 'axis', 'branches', 'by_name', 'deep', 'loss', 'made', 'made_args', 'matrix', "
        "'model', 'narrow', 'needy', 'norms', 'number', 'spread', 'step', 'two', 'wide'"
    )
    expected = text.format(functions=functions, names=names, here=place.folder) if "{" in text else text
    assert refused("explain", function, "--example", example) == expected


@pytest.mark.parametrize(
    ("source", "raised"),
    [
        ("x = 1\n1 / 0\n", "ZeroDivisionError at {file}:2: division by zero"),
        ("import sys\nsys.exit(0)\n", "SystemExit at {file}:2: 0"),
        ("import nowhere_to_be_found\n", "ModuleNotFoundError at {file}:1: No module named 'nowhere_to_be_found'"),
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
    ],
)
def test_a_module_that_raises_on_import_is_told_by_its_line(tmp_path, monkeypatch, source, raised):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(source)
    sys.modules.pop("broken", None)
    said = refused("explain", "broken:loss", "--example", "args")
    assert said == f"module broken cannot be imported: {raised.format(file=tmp_path / 'broken.py')}\n{SEE}"


def test_an_example_of_the_wrong_shape_is_told_by_the_line_that_met_it(place):
    said = refused("explain", "spoken:loss", "--example", "narrow").splitlines()
    line = next(n for n, text in enumerate(MODEL.splitlines(), 1) if "tanh" in text)
    head = f"spoken:loss cannot be traced for these arguments: TypeError at {place.folder / 'spoken.py'}:{line}: "
    assert said[0].startswith(head + "dot_general requires contracting dimensions to have the same shape")
    assert said[-1] == SEE


def test_what_jax_says_of_a_branch_keeps_what_jointcut_adds(place):
    said = refused("explain", "spoken:branches", "--example", "number")
    line = next(n for n, text in enumerate(MODEL.splitlines(), 1) if "if x > 0" in text)
    head = f"TracerBoolConversionError at {place.folder / 'spoken.py'}:{line}: Attempted boolean conversion"
    assert said.startswith(f"spoken:branches cannot be traced for these arguments: {head}")
    assert "\nThis happened while jointcut traced branches. " in said


def test_what_jointcut_refuses_is_said_as_it_says_it():
    said = refused("explain", "spoken:norms", "--example", "two")
    assert said.startswith("spoken:two does not fit the parameters of spoken:norms, (x, *, power): ")
    assert refused("explain", "spoken:loss", "--example", "args", "--budget", "12") == (
        "budget is '12', a number without a unit.\n"
        "Give a fraction of plain JAX's activation memory (a float from 0.0 to 1.0, or a text such as '60%'), peak "
        "bytes of the whole step (an int, or a text such as '1.5GiB' or '800 MB'), or 'device'."
    )
    assert refused("explain", "spoken:made", "--example", "args", "--argnums", "0") == (
        "spoken:made is an aot.function, which has its own argnums.\nLeave --argnums out, or name the plain function."
    )
    both = refused("explain", "spoken:loss", "--example", "args", "--budget", "0.5", "--strategy", "save_all")
    assert both == "strategy and budget are given together.\nGive one: each of them decides the plan."


def test_a_budget_is_refused_before_anything_is_imported():
    result = call("explain", "spoken:loss", "--example", "args", "--budget", "0.5 apples")
    assert (result.exit_code, "the module speaks" in result.stderr) == (command.REFUSED, False)


def test_a_reader_that_goes_away_is_no_fault(monkeypatch, artefact):
    def closed(text: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(click, "echo", closed)
    result = call("show", artefact)
    assert (result.exit_code, result.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["explain", "spoken:loss"], "Missing option '--example'. Name the arguments, or a function that returns them: "
         "--example train:batch"),
        (["explain", "spoken:loss", "--example", "args", "--argnums", "first"], "Invalid value for '--argnums': "
         "'first' is no position, nor several joined by commas."),
        (["explain", "spoken:loss", "--example", "args", "--size", "b"], "Invalid value for '--size': 'b' is no "
         "name=number, such as b=8."),
    ],
)  # fmt: skip
def test_wrong_usage_is_refused_before_anything_is_imported(arguments, text):
    result = call(*arguments)
    assert result.exit_code == command.REFUSED
    assert result.stderr.split("\n\n")[-1] == f"Error: {text}\n"
    assert "the module speaks" not in result.stderr


def test_a_traceback_is_shown_on_request():
    result = call("--traceback", "explain", "spoken:loss", "--example", "narrow")
    assert result.exit_code == command.REFUSED
    assert "Traceback (most recent call last):" in result.stderr
    assert 'spoken.py", line' in result.stderr


def test_a_fault_of_ours_shows_its_traceback_and_has_an_exit_code_of_its_own(monkeypatch):
    def fails(*arguments: object) -> None:
        raise KeyError("a slip")

    monkeypatch.setattr(facts, "of_report", fails)
    result = call("explain", "spoken:loss", "--example", "args", "--no-compile")
    assert result.exit_code == command.FAULT
    assert result.stderr.endswith("KeyError: 'a slip'\n") and "in fails" in result.stderr


# ---------------------------------------------------------------------------------------------------- export and show


def test_export_tells_where_the_artefact_is(place):
    there = place.folder / "told"
    first = told("export", "spoken:loss", "told", "--example", "args", "--platforms", "cpu")
    size = sum(path.stat().st_size for path in there.iterdir())
    assert first == (
        f"loss is in {there}, for cpu: {size:,} bytes in 8 files\njointcut show {there} tells what it takes and gives\n"
    )
    again = ["export", "spoken:loss", "told", "--example", "args", "--platforms", "cpu"]
    assert refused(*again) == f"{there} holds an artefact already.\nGive another name, or say --overwrite."
    assert json.loads(told(*again, "--overwrite", "--order", 2, "--json")) == json.loads(told("show", "told", "--json"))
    assert aot.load(there).contract.order == 2


def test_show_tells_the_signature_by_paths(artefact):
    versions = json.loads((artefact / "signature.json").read_text())["versions"]
    head, *lists = told("show", artefact).rstrip("\n").split("\n\n")
    assert head.splitlines() == [
        "loss, for cpu, tpu",
        f"made with {', '.join(f'{name} {number}' for name, number in sorted(versions.items()))}",
        "can be differentiated once, in argnums 0",
        "cut by min_cut: 24 bytes in 1 array saved for the backward, 1 operation computed again",
    ]
    assert lists[:4] == SHOWN.rstrip("\n").split("\n\n")


SHOWN = """\
inputs
  primals_1       float32[3]                args[0]['scale']  (parameter)
  primals_2       float32[4,3]              args[0]['w']  (parameter)
  primals_3       float32[2,4]              args[1]  (user input)

outputs
  output_1        float32[]                 result

tangents
  tangents_1      float32[]                 the cotangent of output_1

gradients
  gradient_1      float32[3]                args[0]['scale']
  gradient_2      float32[4,3]              args[0]['w']
"""


def test_show_tells_all_that_the_signature_says_and_the_sizes(artefact):
    found = json.loads(told("show", artefact, "--json"))
    signature = json.loads((artefact / "signature.json").read_text())
    sizes = {path.name: path.stat().st_size for path in artefact.iterdir()}
    assert found == {
        "folder": str(artefact),
        "total_bytes": sum(sizes.values()),
        "saved_bytes": 24,
        **signature,
    }
    listed = told("show", artefact).split(f"files in {artefact}, {sum(sizes.values()):,} bytes\n")[1]
    last = "signature.json"
    names = [*sorted(sizes.keys() - {last}), last]
    assert listed == "".join(f"{sizes[name]:>14,}  {name}\n" for name in names)


def test_show_works_where_nothing_can_run(artefact):
    script = Path(sys.executable).with_name("jointcut")
    environment = {**os.environ, "JAX_PLATFORMS": "tpu"}
    run = subprocess.run([script, "show", artefact], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, told("show", artefact), "")


def test_a_damaged_artefact_is_not_shown(artefact, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(artefact, damaged)
    (damaged / "forward.mlir").write_text("")
    size = (artefact / "forward.mlir").stat().st_size
    text = (
        f"{damaged / 'forward.mlir'} has 0 bytes, and {size:,} were written.\n"
        "Export again, or copy the whole folder again."
    )
    assert refused("show", damaged) == text


def exported(tmp_path: Path, function: str, example: str, *options: str) -> Path:
    told("export", f"spoken:{function}", tmp_path / function, "--example", example, "--platforms", "cpu", *options)
    return tmp_path / function


def test_a_static_argument_needs_no_array(tmp_path):
    folder = exported(tmp_path, "spread", "axis")
    assert "args[1] is always 1\n" in told("show", folder)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("cpu,gpu", "platforms holds 'gpu'.\nJAX exports for 'cuda' or for 'rocm'."),
        (",", "platforms is empty.\nGive one or more of cpu, cuda, rocm, tpu."),
    ],
)
def test_a_platform_that_is_none_is_refused_before_anything_is_imported(given, text):
    assert refused("export", "nowhere:loss", "there", "--example", "args", "--platforms", given) == text


def test_sizes_that_are_names_are_free(tmp_path):
    explained = json.loads(
        told("explain", "spoken:loss", "--example", "any_x", "--size", "b=2", "--no-compile", "--json")
    )
    assert explained == json.loads(told("explain", "spoken:loss", "--example", "args", "--no-compile", "--json"))
    folder = exported(tmp_path, "loss", "any_x", "--size", "b=2", "--constraint", "b <= 8")
    shown = told("show", folder)
    assert "  primals_3       float32[b,4]              args[1]  (user input)\n" in shown
    assert "\ncut for the sizes b = 2\n" in shown
    params = {"w": jnp.ones((4, 3)), "scale": jnp.ones(3)}
    for batch in (1, 5):
        aot.load(folder).value_and_grad(params, jnp.ones((batch, 4)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "spoken:loss is to be cut, but the size 'b' of its example is open.\nGive a number for each size that "
         "is a name: --size b=8."),
        (["--size", "b=2", "--size", "c=3"], "--size names 'c', which the example does not have.\nKnown names: 'b'."),
    ],
)  # fmt: skip
def test_sizes_that_explain_lacks_or_does_not_know_are_named(options, text):
    assert refused("explain", "spoken:loss", "--example", "any_x", *options) == text


# ------------------------------------------------------------------------------------------------------------- cache


def test_a_cache_that_is_not_there_is_empty_and_stays_so(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        assert told("cache", "ls", "--dir", folder) == f"{folder}: 0 entries, 0 bytes\n"
        assert told("cache", "clear", "--dir", folder) == f"{folder}: removed 0 entries, 0 bytes\n"
        assert json.loads(told("cache", "ls", "--dir", folder, "--json")) == {
            "folder": str(folder),
            "total_bytes": 0,
            "entries": [],
        }
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cache(tmp_path) -> Path:
    store = Store.at(tmp_path / "cache")
    store.put("ab" * 32, b"x" * 1000, "loss")
    store.put("cd" * 32, b"x" * 10, "step")
    for days, entry in enumerate(sorted(store.folder.glob("*.entry"))):
        os.utime(entry, (86400 * days, 86400 * days))
    return store.folder


def test_a_cache_is_listed_the_last_used_first(cache, monkeypatch):
    found = json.loads(told("cache", "ls", "--dir", cache, "--json"))
    sizes = [path.stat().st_size for path in sorted(cache.glob("*.entry"), reverse=True)]
    assert found == {
        "folder": str(cache),
        "total_bytes": sum(sizes),
        "entries": [
            {"key": "cd" * 32, "label": "step", "bytes": sizes[0], "last_used": 86400.0},
            {"key": "ab" * 32, "label": "loss", "bytes": sizes[1], "last_used": 0.0},
        ],
    }
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) for seconds in (86400, 0)]
    assert told("cache", "ls", "--dir", cache).splitlines() == [
        f"{cache}: 2 entries, {sum(sizes):,} bytes",
        f"{sizes[0]:>14,}  {days[0]}  cdcdcdcdcdcd  step",
        f"{sizes[1]:>14,}  {days[1]}  abababababab  loss",
    ]
    monkeypatch.setenv(location.FOLDER, str(cache))
    assert json.loads(told("cache", "ls", "--json")) == found


def test_a_cache_is_cleared_when_the_answer_is_yes(cache):
    size = sum(path.stat().st_size for path in cache.glob("*.entry"))
    question = f"Remove {size:,} bytes from {cache}? [y/N]: "
    no = call("cache", "clear", "--dir", cache, input="n\n")
    assert (no.exit_code, no.stdout) == (command.NO, "")
    assert no.stderr.startswith(question) and no.stderr.endswith("Nothing was removed.\n")
    assert call("cache", "clear", "--dir", cache, input="").exit_code == command.NO
    assert len(list(cache.glob("*.entry"))) == 2
    yes = call("cache", "clear", "--dir", cache, "--json", input="y\n")
    assert json.loads(yes.stdout) == {"folder": str(cache), "removed": 2, "removed_bytes": size}
    assert told("cache", "clear", "--dir", cache, "--yes") == f"{cache}: removed 0 entries, 0 bytes\n"


def test_the_usual_folder_is_that_of_the_library():
    folder = next(p for p in main.commands["cache"].commands["ls"].params if p.name == "folder")
    assert folder.default == location.DEFAULT_FOLDER and folder.envvar == location.FOLDER


def test_a_cache_that_others_may_write_is_refused(cache):
    cache.chmod(0o777)
    assert refused("cache", "ls", "--dir", cache) == (
        f"cache folder {cache} has mode 0777, so that others may write to it.\n"
        f"If nobody has done so: chmod go-w {cache}"
    )


# -------------------------------------------------------------------------------------------------------------- JSON


def test_every_key_of_an_answer_is_in_the_help(cache):
    answers = {
        usage.EXPLAIN: ["explain", "spoken:loss", "--example", "args", "--budget", "0.0", "--json"],
        usage.DOCTOR: ["doctor", "spoken:loss", "--example", "args", "--memory", "1MB", "--json"],
        usage.LARGEST: ["largest", "spoken:loss", "--example", "any_x", "--axis", "b", "--budget", "9kB", "--json"],
        usage.CACHE_LS: ["cache", "ls", "--dir", cache, "--json"],
        usage.CACHE_CLEAR: ["cache", "clear", "--dir", cache, "--yes", "--json"],
    }
    for text, arguments in answers.items():
        words = set(re.findall(r"\w+", text.partition("--json prints")[2]))
        assert set(keys(json.loads(told(*arguments)))) <= words, arguments[0]


def keys(found: object):
    """The keys of an answer."""
    for item in found if isinstance(found, list) else ():
        yield from keys(item)
    for key, value in found.items() if isinstance(found, dict) else ():
        yield key
        yield from keys(value)
