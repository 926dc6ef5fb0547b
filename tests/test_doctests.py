"""The examples in the docstrings run, and print what they say.

pytest's own `--doctest-modules` finds the files by path and imports each a second time, as `partition.graph`
beside `jointcut.partition.program.graph`; two classes of one name then fail `isinstance`. Here every module is
imported by the one name that users give it.
"""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from house import house_at

MODULES = list(house_at(Path(__file__).parent.parent).modules)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder().find(import_module(name)):
        runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)
