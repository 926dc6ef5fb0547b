"""Every recipe of the page "Use it with" runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from jointcut import aot

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "use-it-with.md"
RECIPES = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE.read_text("utf-8"), re.S | re.M))
FIRST = (ROOT / "README.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]
NEEDS = {"Keras": "keras", "HuggingFace Flax": "transformers"}
ON_SEVERAL_DEVICES = [title for title, code in RECIPES.items() if "device_count" in code]


def test_every_recipe_has_a_title_of_its_own():
    assert len(RECIPES) == PAGE.read_text("utf-8").count("```python") == 10
    assert len(ON_SEVERAL_DEVICES) == 1


def test_the_first_program_of_the_readme_trains(capsys):
    assert "optax" in FIRST
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(FIRST, "README.md", "exec"), {"__name__": "readme"})
    assert float(capsys.readouterr().out) < 0.5  # of 1.0


@pytest.mark.parametrize("title", [title for title in RECIPES if title not in ON_SEVERAL_DEVICES])
def test_the_recipe_runs(title, monkeypatch):
    if title in NEEDS and find_spec(NEEDS[title]) is None:
        pytest.skip("pip install 'jointcut[recipes]'")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' own
        warnings.simplefilter("error", aot.UncutWarning)
        exec(compile(RECIPES[title], title, "exec"), {"__name__": "recipe"})


@pytest.mark.parametrize("title", ON_SEVERAL_DEVICES)
def test_the_recipe_runs_on_several_devices(title):
    code = "import warnings; warnings.simplefilter('error')\n" + RECIPES[title]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)
