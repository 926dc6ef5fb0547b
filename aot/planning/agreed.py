"""Make a decision on one process, and give it to the others that run the same program.

The first process says what is asked for. Each other process compares, and answers. If all agree, the first one decides
and sends a text. Each says the hash of what it took, and hears whether all took the same. Whoever waits learns if
another process fails or ends.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import jax

from jointcut.partition import errors
from jointcut.partition.errors import JointcutError, ProcessError, message
from jointcut.partition.plans.planfile import difference, program_lines
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import processes

MOST_KEPT = 256  # decisions; the oldest is forgotten first

_T = TypeVar("_T")
_COUNTS: Counter[tuple[int, ...]] = Counter()
_KNOWN: dict[tuple[tuple[int, ...], str], str] = {}
_LOCK = threading.RLock()
_DECIDING = ContextVar("deciding", default=False)
_CURE = "Run the same program on all processes: the same source, versions, shapes, shardings and options."
_WIDEST, _BEFORE = 100, 20  # characters that are shown of a long text, and how many of them before the difference


@dataclass(frozen=True)
class Asked:
    """What is asked for: the function's `name`, named `facts`, its joint `graph`, and its `equations`.

    An equation is a pair of its place in the user's program and its key.
    """

    name: str
    facts: Mapping[str, str]
    graph: Graph
    equations: Sequence[tuple[str, str]]

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps([self.name, dict(self.facts), program_lines(self.graph), [key for _, key in self.equations]])

    def difference(self, told: str, leader: int) -> str:
        """The first difference from what the leader asks for, in words; empty where there is none."""
        here, (name, facts, lines, keys) = jax.process_index(), json.loads(told)
        mine, theirs = ({"the function": f, **known} for f, known in ((self.name, self.facts), (name, facts)))
        for what in {**theirs, **mine}:
            if mine.get(what) != theirs.get(what):
                now, was = _apart(mine.get(what), theirs.get(what))
                return f"{what} is {now} on process {here}, but {was} on process {leader}."
        if (found := difference(lines, self.graph)) is not None:
            return f"{found.name} is {found.now} on process {here}, but {found.was} on process {leader}."
        for (place, key), other in zip(self.equations, keys, strict=True):
            if key != other:
                return f"{place} is not the same on process {here} as on process {leader}."
        return ""


def _apart(*texts: str | None) -> Iterator[str]:
    """Yield two texts as they are shown, from about the place on where they differ if one is long."""
    start = 0
    if any(text is not None and len(text) > _WIDEST for text in texts):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*(text or "" for text in texts), strict=False))
        start = max(0, len([*same]) - _BEFORE)
    for text in texts:
        ends = ("..." * (start > 0), "..." * (len(text or "") > start + _WIDEST))
        yield "missing" if text is None else f"`{ends[0]}{text[start : start + _WIDEST]}{ends[1]}`"


def hash_of(text: str) -> str:
    """16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_deciding() -> bool:
    """Whether a decision for several processes is being made, so that others cannot answer another request."""
    return _DECIDING.get()


def agreed(
    group: tuple[int, ...], asked: Asked, made: Callable[[], tuple[_T, str]], taken: Callable[[str], tuple[_T, str]]
) -> tuple[_T, str]:
    """Return the answer that the first process of a group makes, taken from its text on the others, and the text.

    `made` and `taken` return an answer and its text; while they run, the process `is_deciding`. Raises
    `ProcessError`, on all processes, if one asks for something else, takes another answer, fails or ends, and the
    first one's error if that is of jointcut.
    """
    told = asked.text()
    token = _DECIDING.set(True)
    try:
        with _LOCK:
            if (known := _KNOWN.get((group, hash_of(told)))) is not None:
                return taken(known)
            room = f"jointcut/plans/{'-'.join(map(str, group))}"
            _COUNTS[group] += 1
            with processes.living(f"{room}/{_COUNTS[group]}/beat/{jax.process_index()}"):
                answer, text = _Meeting(room, _COUNTS[group], group, asked.name).held(asked, made, taken)
            _KNOWN[group, hash_of(told)] = text
            if len(_KNOWN) > MOST_KEPT:
                del _KNOWN[next(iter(_KNOWN))]
            return answer, text
    finally:
        _DECIDING.reset(token)


@dataclass(frozen=True)
class _Meeting:
    """The messages of one decision, the `count`th of a group of processes; texts of its last one are removed."""

    room: str
    count: int
    group: tuple[int, ...]
    name: str

    def held(
        self, asked: Asked, made: Callable[[], tuple[_T, str]], taken: Callable[[str], tuple[_T, str]]
    ) -> tuple[_T, str]:
        leader, *others = self.group
        if jax.process_index() == leader:
            return self._led(others, asked, made)
        self._say("verdict", asked.difference(self._heard("asked", leader), leader))
        text = self._heard("decision", leader)
        with self._failures_told("took"):
            answer, mine = taken(text)
        self._say("took", hash_of(mine))
        self._heard("end", leader)
        return answer, mine

    def _led(self, others: Sequence[int], asked: Asked, made: Callable[[], tuple[_T, str]]) -> tuple[_T, str]:
        self._say("asked", asked.text())
        with self._failures_told("decision"):
            verdicts = [self._heard("verdict", p) for p in others]
            processes.forget(f"{self.room}/{self.count - 1}")  # all have left the last meeting
            for differing in filter(None, verdicts):
                raise ProcessError(message(f"The plan of {self.name}", f"is not agreed on: {differing}", _CURE))
            answer, text = made()
        self._say("decision", text)
        with self._failures_told("end"):
            for p in others:
                if (theirs := self._heard("took", p)) != hash_of(text):
                    what = f"has the hash {theirs} on process {p}, but {hash_of(text)} on process {self.group[0]}."
                    raise ProcessError(message(f"The plan of {self.name}", what, _CURE))
        self._say("end")
        return answer, text

    # ------------------------------------------------------------------------------------------------ messages

    def _key(self, what: str, p: int) -> str:
        return f"{self.room}/{self.count}/{what}/{p}"

    def _say(self, what: str, text: str = "", **failure: Any) -> None:
        told = json.dumps({"text": text, **failure}, default=str)
        processes.send(self._key(what, jax.process_index()), told)

    @contextmanager
    def _failures_told(self, what: str) -> Iterator[None]:
        """Tell the others of an error, in place of what they wait for."""
        try:
            yield
        except BaseException as error:
            self._say(what, kind=type(error).__name__, args=error.args, notes=getattr(error, "__notes__", []))
            raise

    def _heard(self, what: str, p: int) -> str:
        """Return what a process says; raise its error, or `ProcessError` if it ends or does not come."""
        told = processes.receive(self._key(what, p), self._key("beat", p))
        if told is None:
            ended = f"is not made: process {p} has ended, or does not ask for it."
            cure = "Look at what that process printed, and start all processes again."
            raise ProcessError(message(f"The plan of {self.name}", ended, cure))
        said = json.loads(told)
        if "kind" not in said:
            return said["text"]
        raise self._failure(p, said)

    def _failure(self, p: int, said: Mapping[str, Any]) -> JointcutError:
        kind, args = getattr(errors, said["kind"], None), said["args"]
        if isinstance(kind, type) and issubclass(kind, JointcutError):
            error = kind(*args)
        else:
            failed = f"is not made: process {p} failed with {said['kind']}: {', '.join(map(str, args))}"
            cure = "Look at what that process printed, and start all processes again."
            error = ProcessError(message(f"The plan of {self.name}", failed, cure))
        for note in said["notes"]:
            error.add_note(note)
        return error
