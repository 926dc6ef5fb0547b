"""The corpus: every small program on which the laws are run, gathered from the files of `corpus/`.

from programs import CORPUS, named

@pytest.mark.parametrize("program", CORPUS, ids=lambda program: program.name)
def test_a_law(program): ...
"""

from __future__ import annotations

from corpus import branches, calls, checkpoints, conventions, draws, loops, networks, numerics
from corpus.program import TAGS, Program, programs_of

__all__ = ["CORPUS", "TAGS", "Program", "named", "tagged"]

FILES = (networks, loops, branches, numerics, conventions, calls, checkpoints, draws)
CORPUS: tuple[Program, ...] = tuple(program for file in FILES for program in programs_of(file))
assert len({program.name for program in CORPUS}) == len(CORPUS), "two programs have one name"


def named(name: str) -> Program:
    """The program of that name."""
    return next(program for program in CORPUS if program.name == name)


def tagged(tag: str) -> tuple[Program, ...]:
    """The programs that bear a tag of `TAGS`."""
    assert tag in TAGS, tag
    return tuple(program for program in CORPUS if tag in program.tags)
