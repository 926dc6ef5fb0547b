"""The code of README and docs runs as it stands there, and what it prints is what the page says."""

import importlib.metadata
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from fences import PAGES, ROOT, examples, run

README = ROOT / "README.md"
EXAMPLES = [example for page in PAGES for example in examples(page)]
ON_SEVERAL_DEVICES = [example for example in EXAMPLES if "device_count" in example.code]
HERE = [example for example in EXAMPLES if example not in ON_SEVERAL_DEVICES and example.page != README]
FIRST = [example for example in EXAMPLES if example.page == README]
ONLY = """
import sys
sys.path.insert(0, {tests!r})
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from pathlib import Path
from fences import examples, run
complaints = [text for example in examples(Path({page!r})) for text in run(example)]
sys.exit("\\n".join(complaints) or 0)
"""


#: Pages without code of Python, each with the reason.
READ = {
    "figures": "the commands that measure are its code, and its figures come from what they stored",
    "index": "its doors are links, which `test_docs.py` follows",
    "layout": "it lists folders",
}


def test_every_page_has_code_but_those_that_are_read():
    assert {page.stem for page in PAGES} - {example.page.stem for example in EXAMPLES} == set(READ)
    assert len({example.name for example in EXAMPLES}) == len(EXAMPLES)
    assert len(ON_SEVERAL_DEVICES) == 2


@pytest.mark.parametrize("example", HERE, ids=lambda example: example.name)
def test_the_example_runs(example, monkeypatch):
    if absent := [name for name in sorted(example.imports) if find_spec(name) is None]:
        pytest.skip(f"there is no {', '.join(absent)}: pip install 'jointcut[recipes]'")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert run(example) == []


@pytest.mark.parametrize("example", ON_SEVERAL_DEVICES, ids=lambda example: example.name)
def test_the_example_runs_on_several_devices(example):
    code = "import warnings; warnings.simplefilter('error')\n" + example.code
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


# ---------------------------------------------------------------------------------------------------- the first page


def test_the_first_page_runs_with_what_pip_install_brings():
    code = ONLY.format(tests=str(ROOT / "tests"), absent=not_installed_by_pip(), page=str(README))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def not_installed_by_pip():
    """The modules of this environment that `pip install jointcut`, without extras, does not bring."""
    brought, todo = set(), ["jointcut"]
    while todo:
        name = todo.pop()
        brought.add(name)
        needs = [need for need in importlib.metadata.requires(name) or () if "extra ==" not in need]
        names = {normal(re.split(r"[^\w.-]", need, maxsplit=1)[0]) for need in needs}
        todo += [need for need in names - brought if installed(need)]
    owners = importlib.metadata.packages_distributions()
    return sorted(module for module, names in owners.items() if not brought & set(map(normal, names)))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name):
    """Whether a distribution is there; of what only other systems need, it is not."""
    return any(normal(found.name) == name for found in importlib.metadata.distributions(name=name))


def test_what_pip_install_does_not_bring_is_known():
    absent = not_installed_by_pip()
    assert {"flax", "optax", "matplotlib", "tqdm", "pytest"} <= set(absent)
    assert not {"jax", "jaxlib", "numpy", "scipy", "rich", "click", "flatbuffers", "jointcut"} & set(absent)


def test_the_first_page_is_short():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1800


def test_every_command_of_the_pages_is_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= targets
        modules = re.findall(r"python -m (benchmarks[\w.]*)", text)
        modules += [f"benchmarks.{suite}" for suite in re.findall(r"SUITE=(\w+)", text)]
        assert [name for name in modules if find_spec(name) is None] == []


def test_every_file_that_a_page_names_is_there():
    for page in PAGES:
        text = page.read_text("utf-8")
        named = re.findall(r"`((?:tests|benchmarks|partition|aot|wrappers|docs|notebooks)/[\w/.]+)`", text)
        lost = [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]
        assert lost == [], page.name
