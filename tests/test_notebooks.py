"""The notebooks are what a fresh run gives, small, and free of what belongs to one machine.

All are executed here, with code of XLA's that takes less time to make.
"""

import os
import re
import sysconfig
import tempfile
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import pytest

for package in ("jupytext", "nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(package, reason=f"the notebooks need {package}: pip install '.[notebooks,demo]'")

nbformat, notebooks = import_module("nbformat"), import_module("notebooks")
v4 = nbformat.v4

NAMES = notebooks.names()
MOST_BYTES = 500_000
MOST_COLUMNS = 110
ROOT = Path(__file__).parent.parent
OF_A_MACHINE = re.compile(r"(?<![\w.~-])/(?:home|Users|root|tmp|work|var|usr|opt|private|mnt)/\w+")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
OTHER_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="


def kept(name):
    return notebooks.read(notebooks.FOLDER / f"{name}.ipynb")


def text_of(output):
    """All that one output says, but for its pictures."""
    data = output.get("data", {})
    return repr({**output, "data": {kind: value for kind, value in data.items() if not kind.startswith("image/")}})


def executed(*outputs, source="f()", tags=()):
    """A notebook of one cell with these outputs, as a kernel might give it."""
    cell = v4.new_code_cell(source, outputs=list(outputs), execution_count=1, metadata={"tags": list(tags)})
    return v4.new_notebook(cells=[cell])


def display(**data):
    """A display; `text_html` stands for text/html."""
    return v4.new_output("display_data", {kind.replace("_", "/"): value for kind, value in data.items()})


def stream(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


def outputs_of(notebook):
    return notebooks.committed(notebook).cells[0].outputs


def changes(before, after):
    return notebooks.differences(notebooks.committed(before), notebooks.committed(after))


SHOWN = display(text_plain="x", image_png=PNG)
PLAIN = executed(stream("loss 1.5\n"), SHOWN)


# ---------------------------------------------------------------- what stands in the folder


def test_every_notebook_is_a_pair():
    assert NAMES, "no notebook was found"
    assert sorted(path.stem for path in notebooks.FOLDER.glob("*.ipynb")) == NAMES


def test_the_readme_lists_the_notebooks_in_order_with_a_sentence_each():
    text = (notebooks.FOLDER / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.ipynb\) \| [A-Z].*\. \|$", text, re.MULTILINE)
    assert rows == [(name, name) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_both_of_a_pair_have_the_same_cells(name):
    assert notebooks.cells(kept(name)) == notebooks.cells(notebooks.source(notebooks.FOLDER / f"{name}.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_small_valid_and_as_committed_leaves_it(name):
    notebook = kept(name)
    nbformat.validate(notebook)
    assert (notebooks.FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES
    assert notebooks.committed(notebook) == notebook


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_holds_no_path_of_a_machine(name):
    outputs = [output for cell in kept(name).cells for output in cell.get("outputs", [])]
    assert not [OF_A_MACHINE.findall(text) for text in map(text_of, outputs) if OF_A_MACHINE.search(text)]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_that_runs_has_run_once_in_order(name):
    counts = [cell.execution_count for cell in kept(name).cells if cell.cell_type == "code" and cell.source]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_source_opens_with_a_title_and_keeps_to_its_columns(name):
    path = notebooks.FOLDER / f"{name}.py"
    kind, text, _ = notebooks.cells(notebooks.source(path))[0]
    assert kind == "markdown" and text.startswith("# ")
    assert not [line for line in path.read_text("utf-8").splitlines() if len(line) > MOST_COLUMNS]


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_run_gives_what_is_committed(name):
    fresh = notebooks.committed(notebooks.run(notebooks.FOLDER / f"{name}.py", os.environ["XLA_FLAGS"]))
    complaints = notebooks.differences(kept(name), fresh)
    assert not complaints, "\n".join([f"{name}: run `python notebooks/make.py {name}` if this is meant", *complaints])


# ---------------------------------------------------------------- what is kept of a run


@pytest.mark.parametrize(
    "output",
    [
        stream("\r 10%\r100%\n", "stderr"),
        display(text_plain="", text_html=""),
        v4.new_output(
            "display_data", {"text/plain": "0%", "application/vnd.jupyter.widget-view+json": {"model_id": "a"}}
        ),
    ],
    ids=["a line written over", "a display that was cleared", "a widget"],
)
def test_a_progress_display_is_not_kept(output):
    assert outputs_of(executed(stream("a\n"), output)) == outputs_of(executed(stream("a\n")))


def test_a_page_is_kept_only_where_there_is_no_picture():
    both, page = outputs_of(executed(display(text_html="<p>", image_png=PNG), display(text_html="<p>")))
    assert set(both.data) == {"image/png"} and set(page.data) == {"text/html"}


def test_times_widgets_and_the_names_of_cells_are_not_kept():
    notebook = executed(stream("a\n"), tags=["varies"])
    notebook.cells[0].metadata.update(execution={"iopub.execute_input": "2024-01-01"}, collapsed=True)
    notebook.metadata.update(widgets={"state": {}}, language_info={"name": "python", "version": "3.11.7"})
    clean = notebooks.committed(executed(stream("a\n"), tags=["varies"]))
    assert notebooks.committed(notebook) == clean
    assert clean.cells[0].metadata == {"tags": ["varies"]} and clean.metadata.language_info == {"name": "python"}


@pytest.mark.parametrize(
    ("path", "left"),
    [
        (f"{notebooks.FOLDER}/report.html", "report.html"),
        (f"{ROOT}/aot/call/function.py", "aot/call/function.py"),
        (f"{sysconfig.get_path('purelib')}/jax/core.py", "jax/core.py"),
        (f"{tempfile.gettempdir()}/tmpa1b2_c3/plan.json", "temporary/plan.json"),
        (f"{Path.home()}/x.npz", "~/x.npz"),
        (f"{tempfile.gettempdir()}/ipykernel_123/4567.py:3", "cell:3"),
    ],
    ids=["beside the notebooks", "sources", "a library", "temporary", "home", "a cell"],
)
def test_a_path_of_this_machine_is_shortened_wherever_it_stands(path, left):
    error = v4.new_output("error", ename="ValueError", evalue=f"in '{path}'", traceback=["many", "lines"])
    said, shown, raised = outputs_of(executed(stream(f"in '{path}'\n"), display(text_plain=f"in '{path}'"), error))
    assert (said.text, shown.data["text/plain"]) == (f"in '{left}'\n", f"in '{left}'")
    assert raised.traceback == [f"ValueError: in '{left}'"]


def test_how_often_a_stream_was_flushed_makes_no_difference():
    parts = executed(stream("a"), stream("w\n", "stderr"), stream("b\n"))
    assert outputs_of(parts) == outputs_of(executed(stream("ab\n"), stream("w\n", "stderr")))


def test_what_is_kept_can_be_kept_again_and_the_notebook_given_is_not_changed():
    given = executed(stream(f"{ROOT}/a\n"), display(text_html="<p>", image_png=PNG), stream("\r1\n", "stderr"))
    copy = deepcopy(given)
    once = notebooks.committed(given)
    assert notebooks.committed(once) == once and given == copy


# ---------------------------------------------------------------- what is compared


def test_a_notebook_does_not_differ_from_itself():
    assert changes(PLAIN, PLAIN) == []


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (executed(stream("loss 2.5\n"), SHOWN), "stdout differs"),
        (executed(stream("loss 1.5\n"), display(text_plain="y", image_png=PNG)), "text/plain differs"),
        (executed(stream("loss 1.5\n"), display(text_plain="x", image_png=OTHER_PNG)), "the picture is another"),
        (executed(stream("loss 1.5\n")), "gave ['stdout', 'display_data image/png text/plain'], now ['stdout']"),
        (executed(stream("loss 1.5\n", "stderr"), SHOWN), "now ['stderr', "),
        (executed(stream("loss 1.5\n"), SHOWN, source="g()"), "the cells are not the same"),
        (executed(stream("loss 1.5\n"), SHOWN, tags=["varies"]), "the cells are not the same"),
    ],
)
def test_another_output_is_found(other, complaint):
    (found,) = changes(PLAIN, other)
    assert complaint in found


def test_of_a_cell_that_varies_only_the_shape_counts():
    before = executed(stream("loss  1.5 in 10 ms\n"), SHOWN, tags=["varies"])
    after = executed(stream("loss 12.25 in 9 ms\n"), display(text_plain="x", image_png=OTHER_PNG), tags=["varies"])
    words = executed(stream("cost 12.25 in 9 ms\n"), SHOWN, tags=["varies"])
    fewer = executed(stream("loss 12.25 in 9 ms\n"), tags=["varies"])
    assert changes(before, after) == []
    assert len(changes(before, words)) == len(changes(before, fewer)) == 1


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1,024 bytes in -2.5e-3 s", "# bytes in # s"),
        ("| a   | 12.5 |\n|-----|------|", "| a | # |\n|-|-|"),
        ("no numbers", "no numbers"),
    ],
)
def test_the_shape_of_a_text_is_the_text_without_its_numbers_and_widths(text, shape):
    assert notebooks.shape(text) == shape


@pytest.mark.parametrize(
    ("field", "other", "found"),
    [
        ("jax", executed(stream("loss 9\n"), display(text_plain="y", image_png=OTHER_PNG)), 0),
        ("matplotlib", executed(stream("loss 1.5\n"), display(text_plain="x", image_png=OTHER_PNG)), 0),
        ("matplotlib", executed(stream("loss 9\n"), SHOWN), 1),
        ("jax", executed(stream("loss 1.5\n")), 1),
    ],
)
def test_what_another_library_may_change_is_compared_by_kinds(field, other, found):
    fresh = notebooks.committed(other)
    fresh.metadata.made_with[field] = "another version"
    assert len(notebooks.differences(notebooks.committed(PLAIN), fresh)) == found


def test_a_notebook_that_is_written_is_read_back_equal(tmp_path):
    notebook = notebooks.committed(PLAIN)
    notebooks.write(notebook, tmp_path / "a.ipynb")
    assert notebooks.read(tmp_path / "a.ipynb") == notebook
