"""A line of a notebook is named by the cell that the reader sees."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from jointcut.partition.program.cells import call_text

compilerop = pytest.importorskip("IPython.core.compilerop")


@pytest.fixture
def shell(monkeypatch):
    """A running IPython that compiles cells as it does, with no kernel around it."""
    running = SimpleNamespace(compile=compilerop.CachingCompiler())
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: running)
    return running


@pytest.mark.parametrize("maker", ["ipykernel.compiler.XCachingCompiler", "IPython.core.compilerop.CachingCompiler"])
def test_a_cell_is_named_by_the_number_of_its_last_run(shell, maker):
    module, _, name = maker.rpartition(".")
    shell.compile = getattr(pytest.importorskip(module), name)()
    file = shell.compile.cache("def loss(x):\n    return x\n", 3)
    assert call_text(file, 2, "loss") == "In[3]:2 (loss)"
    again = shell.compile.cache("def loss(x):\n    return x\n", 5)
    assert call_text(again, 2, "loss") == "In[5]:2 (loss)"


def test_a_cell_of_another_kernel_is_a_cell_and_a_file_stays_a_file(shell):
    assert call_text("/tmp/ipykernel_12/345.py", 7, "loss") == "cell:7 (loss)"
    assert call_text("/home/me/train.py", 7, "loss") == "/home/me/train.py:7 (loss)"


def test_without_ipython_a_cell_is_a_cell(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython")
    assert call_text("/tmp/ipykernel_12/345.py", 7, "loss") == "cell:7 (loss)"
