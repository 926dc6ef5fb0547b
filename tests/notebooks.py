"""Run the notebooks, and say how what they show differs from what is committed.

A notebook is a pair: NAME.py, the source in jupytext's percent format, and NAME.ipynb, the same cells with the outputs
of one run, so that it reads on a code host. `run` executes the source in a fresh kernel, `committed` takes away what
belongs to that one run or machine, and `differences` compares two notebooks so treated.

The figures of a cell with the tag "varies" (in the source: `# %% tags=["varies"]`) change from run to run. Of such a
cell only the shape is compared: how many outputs it has, of which kinds, and their text with `#` for every number.
Another JAX writes other jaxprs: a notebook made with one is compared with a run under another by kinds alone.
"""

from __future__ import annotations

import base64
import difflib
import io
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import numpy as np
from matplotlib.image import imread
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
VARIES = "varies"
MOST_SECONDS = 600  # for one cell

#: A cell of the kernel is a file to Python, named by the kernel's process and by the text of the cell.
_CELL_FILE = re.compile(r"[^\s'\"<>()]*ipykernel_\d+/\d+\.py")
_NUMBER = re.compile(r"[-+]?\d[\d_,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
_REPEATED = re.compile(r"([^\w#])\1+")  # the padding and the rules of a table are as wide as its numbers
_WIDGET = "application/vnd.jupyter.widget"


def names() -> list[str]:
    """The notebooks in reading order, without endings."""
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))


def source(path: Path) -> NotebookNode:
    """Read the cells of a notebook in the percent format."""
    return jupytext.read(path)


def run(path: Path, xla_flags: str = "") -> NotebookNode:
    """Execute the source in a fresh kernel, with the folder of notebooks as working directory.

    Flags that let XLA make slower code in less time change no text but that of cells that vary. They may change
    pictures, and so these are not compared then.

    Raises `nbclient.exceptions.CellExecutionError` where a cell without the tag "raises-exception" raises.
    """
    notebook = source(path)
    with tempfile.TemporaryDirectory() as profile:
        settings = {
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "JAX_PLATFORMS": "cpu",
            "COLUMNS": "100",
            "JOINTCUT_PROGRESS": "0",  # how long a stage took decides whether it shows
            "IPYTHONDIR": profile,  # nobody's own start-up files
        }
        ours = ("JOINTCUT_CACHE_DIR", "XLA_FLAGS")
        env = {key: value for key, value in os.environ.items() if key not in ours} | settings
        env |= {"XLA_FLAGS": xla_flags} if xla_flags else {}
        client = NotebookClient(
            notebook,
            timeout=MOST_SECONDS,
            kernel_name=KERNEL["name"],
            resources={"metadata": {"path": str(FOLDER)}},
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],  # or the kernel warns of its own local sockets
        )
        client.execute(env=env)
    if xla_flags:
        notebook.metadata["made_with"] = made_with() | {"xla_flags": xla_flags}
    return notebook


def committed(notebook: NotebookNode) -> NotebookNode:
    """What of an executed notebook is kept; the notebook given is left as it is.

    Away go the times of execution, the state of widgets, progress displays (a widget, an empty display, a line that
    was written over), absolute paths of this machine, tracebacks but for their last line, and the page (`text/html`)
    of an output that also has a picture or a text: a code host cannot show it.
    """
    cells = [_kept_cell(place, cell) for place, cell in enumerate(notebook.cells)]
    metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": KERNEL,
        "language_info": {"name": "python"},
        "made_with": notebook.metadata.get("made_with", made_with()),
    }
    return nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def made_with() -> dict[str, str]:
    """What decides over the text and the pixels of an output: the versions of JAX and matplotlib, the machine."""
    return {"jax": version("jax"), "machine": platform.machine(), "matplotlib": version("matplotlib")}


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook as its .ipynb."""
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", "utf-8")


def read(path: Path) -> NotebookNode:
    """Read an .ipynb."""
    return nbformat.reads(path.read_text("utf-8"), as_version=4)


def cells(notebook: NotebookNode) -> list[tuple[str, str, list[str]]]:
    """What a reader writes of each cell: its kind, its text, its tags."""
    return [(cell.cell_type, cell.source, list(cell.metadata.get("tags", []))) for cell in notebook.cells]


def differences(kept: NotebookNode, fresh: NotebookNode) -> list[str]:
    """How the outputs of two committed notebooks with the same cells differ, a paragraph for each cell that does."""
    if cells(kept) != cells(fresh):
        return ["the cells are not the same; run `python notebooks/make.py`"]
    ours, theirs = kept.metadata.made_with, fresh.metadata.made_with
    found = []
    for place, (old, new) in enumerate(zip(kept.cells, fresh.cells, strict=True)):
        before, after = old.get("outputs", []), new.get("outputs", [])
        if _kinds(before) != _kinds(after):
            found.append(f"cell {place}: gave {_kinds(before)}, now {_kinds(after)}")
        elif ours["jax"] == theirs["jax"]:
            varies = VARIES in old.metadata.get("tags", [])
            found.extend(f"cell {place}: {text}" for text in _text_changes(before, after, varies))
            if ours == theirs and not varies and _pictures_differ(before, after):
                found.append(f"cell {place}: the picture is another")
    return found


def shape(text: str) -> str:
    """A text with `#` for every number, and one of each run of the same sign.

    >>> shape("loss  0.125 after 1,000 steps -----")
    'loss # after # steps -'
    """
    return _REPEATED.sub(r"\1", _NUMBER.sub("#", text))


# ---------------------------------------------------------------- what is kept


def _kept_cell(place: int, cell: NotebookNode) -> dict[str, Any]:
    tags = list(cell.metadata.get("tags", []))
    kept: dict[str, Any] = {
        "cell_type": cell.cell_type,
        "id": f"cell-{place}",  # jupytext draws them anew at each reading
        "metadata": {"tags": tags} if tags else {},
        "source": cell.source,
    }
    if cell.cell_type == "code":
        count = cell.get("execution_count")
        kept |= {"execution_count": count, "outputs": list(_kept_outputs(cell.get("outputs", []), count))}
    return kept


def _kept_outputs(outputs: list[NotebookNode], count: int | None) -> Iterator[dict[str, Any]]:
    """The outputs that stay, the streams of one name as one: how often they were flushed is an accident."""
    streams: dict[str, str] = {}
    for output in outputs:
        if output.output_type == "stream":
            streams[output.name] = streams.get(output.name, "") + output.text
    for output in outputs:
        kept: dict[str, Any] = {"output_type": output.output_type}
        if output.output_type == "stream":
            lines = streams.pop(output.name, "").split("\n")
            text = "\n".join(line for line in lines if "\r" not in line)
            if text:
                yield kept | {"name": output.name, "text": _without_paths(text)}
        elif output.output_type == "error":
            last = _without_paths(f"{output.ename}: {output.evalue}")
            yield kept | {"ename": output.ename, "evalue": _without_paths(output.evalue), "traceback": [last]}
        elif data := _kept_data(output.data):
            metadata = {kind: value for kind, value in output.get("metadata", {}).items() if kind in data}
            counted = {"execution_count": count} if output.output_type == "execute_result" else {}
            yield kept | counted | {"data": data, "metadata": metadata}


def _kept_data(data: NotebookNode) -> dict[str, Any]:
    """The kinds of one display that stay; none of a widget's or of a display that was cleared."""
    if any(kind.startswith(_WIDGET) for kind in data) or not any(data.values()):
        return {}
    page = {"text/html"} if len(data) > 1 else set()
    return {
        kind: value if kind.startswith("image/png") or not isinstance(value, str) else _without_paths(value)
        for kind, value in data.items()
        if kind not in page
    }


def _without_paths(text: str) -> str:
    text = _CELL_FILE.sub("cell", text)
    for path in (Path(sysconfig.get_path("purelib")), FOLDER, FOLDER.parent):  # the first may lie in the last
        text = text.replace(f"{path}/", "")
    temporary = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+")
    return temporary.sub("temporary", text).replace(str(Path.home()) + "/", "~/")


# ---------------------------------------------------------------- what is compared


def _kinds(outputs: list[NotebookNode]) -> list[str]:
    """The kind of each output: a stream by its name, an error by its class, a display by its media types."""
    return [
        output.get("name") or output.get("ename") or " ".join([output.output_type, *sorted(output.data)])
        for output in outputs
    ]


def _text_changes(before: list[NotebookNode], after: list[NotebookNode], varies: bool) -> Iterator[str]:
    for old, new in zip(map(_texts, before), map(_texts, after), strict=True):
        for kind, text in old.items():
            pair = (shape(text), shape(new[kind])) if varies else (text, new[kind])
            if pair[0] != pair[1]:
                was, now = (part.splitlines() for part in pair)
                lines = difflib.unified_diff(was, now, "committed", "fresh", n=1, lineterm="")
                yield f"{kind} differs\n" + "\n".join(list(lines)[:20])


def _texts(output: NotebookNode) -> dict[str, str]:
    """The text of one output by kind; pictures are left out."""
    if output.output_type == "stream":
        return {output.name: output.text}
    if output.output_type == "error":
        return {output.ename: output.evalue}
    return {kind: str(value) for kind, value in output.data.items() if not kind.startswith("image/")}


def _pictures_differ(before: list[NotebookNode], after: list[NotebookNode]) -> bool:
    pairs = zip(map(_pixels, before), map(_pixels, after), strict=True)
    return any(not np.array_equal(old, new) for old, new in pairs)


def _pixels(output: NotebookNode) -> np.ndarray:
    """The picture of an output; an empty array where there is none."""
    data = output.get("data", {}).get("image/png")
    return np.zeros(0) if data is None else imread(io.BytesIO(base64.b64decode(data)))
