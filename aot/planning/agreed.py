"""Make a plan on one process, and give it to the others that run the same program.

The first process says what is asked for. Each other process compares, and answers. If all agree, the first one plans and
sends the plan as a text. Each says the hash of the plan that it took, and hears the others'. Whoever waits learns if
another process ends.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

import jax

from jointcut.partition import errors
from jointcut.partition.errors import JointcutError, ProcessError, message
from jointcut.partition.program.jax import processes

_T = TypeVar("_T")
_COUNTS: Counter[tuple[int, ...]] = Counter()
_KNOWN: dict[tuple[tuple[int, ...], str], str] = {}
_LOCK = threading.RLock()
_CURE = "Run the same program on all processes: the same source, versions, shapes and options."


@dataclass(frozen=True)
class Asked:
    """What is asked for: the function's `name`, named `facts`, and the `lines` of its program."""

    name: str
    facts: Mapping[str, str]
    lines: Sequence[str] = field(repr=False)

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps([self.name, dict(self.facts), list(self.lines)])

    def difference(self, there: str, leader: int) -> str:
        """The first difference from what the leader asks for; empty where there is none."""
        name, facts, lines = json.loads(there)
        mine = {"the function": self.name, **self.facts, **_numbered(self.lines)}
        theirs = {"the function": name, **facts, **_numbered(lines)}
        for key, _ in zip_longest([*mine, *(k for k in theirs if k not in mine)], ()):
            if (here := mine.get(key, "missing")) != (other := theirs.get(key, "missing")):
                return f"{key} is `{here}` on process {jax.process_index()}, and `{other}` on process {leader}."
        return ""


def _numbered(lines: Sequence[str]) -> dict[str, str]:
    return {f"line {n} of the program": line.strip() for n, line in enumerate(lines, 1)}


def agreed(
    group: tuple[int, ...], asked: Asked, made: Callable[[], tuple[_T, str]], taken: Callable[[str], tuple[_T, str]]
) -> _T:
    """Return the answer that the first process of a group makes, taken from its text on the others.

    `made` and `taken` return an answer and its text. Raises `ProcessError`, on all processes, if one asks for something
    else, takes another plan or ends, and the first one's error if it finds no plan.
    """
    with _LOCK:
        if (known := _KNOWN.get((group, asked.text()))) is not None:
            return taken(known)[0]
        room = f"jointcut/plans/{'-'.join(map(str, group))}/{_COUNTS[group]}"
        _COUNTS[group] += 1
        with processes.living(f"{room}/beat/{jax.process_index()}"):
            answer, text = _Meeting(room, group, asked.name).held(asked, made, taken)
        _KNOWN[group, asked.text()] = text
        return answer


@dataclass(frozen=True)
class _Meeting:
    room: str
    group: tuple[int, ...]
    name: str

    def held(
        self, asked: Asked, made: Callable[[], tuple[_T, str]], taken: Callable[[str], tuple[_T, str]]
    ) -> tuple[_T, str]:
        leader, here = self.group[0], jax.process_index()
        if here == leader:
            processes.send(f"{self.room}/asked/{here}", asked.text())
            verdict = ""
        else:
            verdict = asked.difference(self._heard("asked", leader), leader)
        processes.send(f"{self.room}/verdict/{here}", verdict)
        if differing := next(filter(None, [self._heard("verdict", p) for p in self.group]), None):
            raise ProcessError(message(f"The plan of {self.name}", f"is not agreed on: {differing}", _CURE))
        answer, text = self._planned(made) if here == leader else self._took(taken, leader)
        processes.send(f"{self.room}/took/{here}", text)
        for p in self.group:
            if self._heard("took", p) != text:
                what = f"is another one on process {p} than on process {here}."
                raise ProcessError(message(f"The plan of {self.name}", what, _CURE))
        return answer, text

    def _planned(self, made: Callable[[], tuple[_T, str]]) -> tuple[_T, str]:
        try:
            answer, text = made()
        except JointcutError as error:
            processes.send(f"{self.room}/plan/{self.group[0]}", json.dumps([type(error).__name__, str(error)]))
            raise
        processes.send(f"{self.room}/plan/{self.group[0]}", json.dumps(["", text]))
        return answer, text

    def _took(self, taken: Callable[[str], tuple[_T, str]], leader: int) -> tuple[_T, str]:
        kind, text = json.loads(self._heard("plan", leader))
        if kind:
            raise getattr(errors, kind)(text)
        return taken(text)

    def _heard(self, what: str, p: int) -> str:
        """Return what a process says; raises `ProcessError` if it ends, or does not come."""
        text = processes.receive(f"{self.room}/{what}/{p}", f"{self.room}/beat/{p}")
        if text is None:
            told = f"is not made: process {p} has ended, or does not ask for it."
            cure = "Look at what that process printed, and start all processes again."
            raise ProcessError(message(f"The plan of {self.name}", told, cure))
        return text
