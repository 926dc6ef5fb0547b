"""What is installed is what is here: the names, the files, the version, the dependencies."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from house import FOLDERS, house_at

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = house_at(ROOT).sources
PLUGIN = "aot/ratchet/plugin/__init__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel that `pip` would build from this tree, from a copy so that no build/ is left here."""
    copy = tmp_path_factory.mktemp("source")
    kept = [f"{folder}/py.typed" for folder in FOLDERS] + [source.path for source in SOURCES]
    for path in ["pyproject.toml", "README.md", "LICENSE", *kept]:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((ROOT / path).read_bytes())
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=copy, check=True, capture_output=True)
    (built,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_the_sources_under_one_name_and_nothing_else(wheel):
    expected = {f"jointcut/{source.path}" for source in SOURCES} | {f"jointcut/{f}/py.typed" for f in FOLDERS}
    expected.add("jointcut/__init__.py")  # aot/package
    expected.add("jointcut/ratchet/__init__.py")  # the plugin again, where pytest imports it without jointcut.aot
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_the_wheel_brings_its_licence_and_states_its_python(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.11" in text
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_the_sources_are_imported_by_one_name():
    ask = "import sys; from jointcut import aot; print({'aot', 'partition', 'wrappers'} & sys.modules.keys())"
    answer = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    assert answer.stdout == "set()\n"
    assert not sys.modules.keys() & {"aot", "partition", "wrappers"}


def test_pytest_finds_the_plugin_by_the_name_that_its_option_takes_and_imports_nothing_else_for_it(wheel):
    (points,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "[pytest11]\njointcut.aot.ratchet.plugin = jointcut.ratchet\n" in wheel.read(points).decode()
    plugin, package = (wheel.read(f"jointcut/{name}__init__.py") for name in ("ratchet/", ""))
    assert plugin == wheel.read("jointcut/aot/ratchet/plugin/__init__.py") and b"\nfrom jointcut" not in plugin
    assert b"\nimport jax" not in package and b"\nfrom jointcut" not in package


ASK = """
import sys, jointcut
from jointcut import ratchet
print(jointcut.__version__, dir(jointcut), 'jax' in sys.modules, hasattr(jointcut, 'other'))
print(jointcut.aot.__file__, jointcut.partition.errors.__name__, jointcut.wrappers.__name__)
"""


def test_the_name_alone_has_a_version_and_imports_its_folders_when_they_are_asked_for(wheel, tmp_path):
    wheel.extractall(tmp_path)
    for given, where in [({}, str(ROOT)), ({"PYTHONPATH": str(tmp_path)}, str(tmp_path))]:
        ran = subprocess.run(
            [sys.executable, "-c", ASK], env=os.environ | given, cwd=ROOT, check=True, capture_output=True, text=True
        )
        first, second = ran.stdout.splitlines()
        assert first == f"{PROJECT['project']['version']} ['__version__', 'aot', 'partition', 'wrappers'] False False"
        assert second.startswith(where) and second.endswith(" jointcut.partition.errors jointcut.wrappers")


def test_importing_reads_only_what_is_declared():
    declared = {re.split(r"[^\w-]", line)[0] for line in PROJECT["project"]["dependencies"]}
    for source in SOURCES:
        imported = {item.name.split(".")[0] for item in source.imports}
        if source.path == PLUGIN:
            imported -= {"pytest"}  # which is what imports it
        assert imported <= declared | sys.stdlib_module_names | {"jointcut"}, source.path


def test_the_changelog_speaks_of_this_version_or_of_the_next():
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert heads[1:2] in ([], [PROJECT["project"]["version"]])
