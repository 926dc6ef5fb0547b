"""Hold a plan with the figures of the model, rank such plans, and replay those that a budget needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.plan import Plan

#: A plan whose replay takes at most this factor of the least one's may take less memory than that one, once compiled.
WIDE = 1.35

#: The strategy of plans that are cuts of the front, and no more.
FRONT = "front"

#: So many guesses by the peak are made; then halves of what is left are looked at.
_MOST_GUESSES = 4

_PEAK = attrgetter("peak_bytes")


@dataclass(frozen=True)
class Candidate:
    """A plan with the figures of the model.

    `peak_bytes` are those of temporaries. `step_seconds` is the time to recompute, and to write and read the saved
    values; the time that every plan takes is not in it, but `preferred_seconds` are: what preferences weigh in the
    comparison with other plans. `follow` replays the plan's schedule as the compiler runs it. `calibration` is the
    compiler's bytes for each byte of a replay that does not follow it.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float
    follow: Callable[[], float] | None = field(default=None, compare=False, repr=False)
    preferred_seconds: float = 0.0
    calibration: float = PORTABLE.calibration

    @property
    def predicted_bytes(self) -> float:
        """The compiler's bytes of temporaries, as well as they are known before it has compiled the plan.

        Where the backend is followed, this takes several times as long as the replay that gives `peak_bytes`, which is
        enough to compare plans.
        """
        return self.calibration * self.peak_bytes if self.follow is None else self.follow()


def is_between(large: Candidate, c: Candidate, small: Candidate) -> bool:
    """Whether a candidate lies strictly between two others in peak and in time."""
    shrinks = small.peak_bytes < c.peak_bytes < large.peak_bytes
    return shrinks and large.step_seconds < c.step_seconds < small.step_seconds


def ranked(menu: Iterable[Candidate], peak: Callable[[Candidate], float] = _PEAK) -> list[Candidate]:
    """The candidates that no other betters in both time and `peak`, the fastest (and largest) first."""
    best: list[Candidate] = []
    for c in sorted(menu, key=lambda c: (c.step_seconds, peak(c))):
        if not best or peak(c) < peak(best[-1]):
            best.append(c)
    return best


def first_within(row: Sequence[Candidate], most_bytes: float, expected: Callable[[Candidate], float]) -> int:
    """The place of the first of some ranked candidates that is `expected` to take at most so many bytes; else the end.

    To expect something may take long. So the next one asked is where the bytes would be reached if they were the same
    share of the peak as they were last. If two neighbours are asked, that is the answer.
    """
    first, end, guesses, share = 0, len(row), 0, 1.0
    while first < end:
        guess = (i for i in range(first, end - 1) if share * row[i].peak_bytes <= most_bytes)
        at = next(guess, end - 1) if guesses < _MOST_GUESSES else (first + end) // 2
        bytes_expected, guesses = expected(row[at]), guesses + 1
        share = bytes_expected / max(row[at].peak_bytes, 1)
        first, end = (first, at) if bytes_expected <= most_bytes else (at + 1, end)
    return end


@dataclass
class Menu:
    """Plans worth trying, the fastest first by the model, which are replayed where their peaks may matter.

    A plan takes at least the bytes that it hands to the backward, and its time is known without a replay. So for a
    budget no plan is replayed that hands over more than it allows, and none that is slower than one that fits. Nor is a
    cut of the front that must take more than a faster plan: see `least_peak`.

    Attributes:
        plans: the plans, by the time that each takes.
        known: gives the candidate of a plan.
        partly: gives more plans for the fastest one in segments that no other betters: with some steps kept whole.
    """

    plans: Sequence[Plan]
    known: Callable[[Plan], Candidate]
    partly: Callable[[Plan], Iterable[Plan]]
    _beside: dict[int, int] = field(default_factory=dict, init=False)  # by the bytes that a cut of the front saves

    def replayed(self, plan: Plan) -> Candidate:
        """The candidate of a plan; of a cut of the front note how much it takes beside the saved values."""
        candidate = self.known(plan)
        if _is_cut(plan):
            self._beside[plan.bytes_saved] = candidate.peak_bytes - plan.bytes_saved
        return candidate

    def least_peak(self, plan: Plan) -> int:
        """The bytes that the replay of a plan gives at least, as far as this is known before.

        A cut of the front that saves less runs all the more again. So all that it takes is no less than what one that
        saves more takes beside its saved values: that is so for all cuts but one, by 1.5%, of 27 programs (the suite
        and models of libraries). It is no law, since the forward may write more for the cut that saves more.
        """
        if not _is_cut(plan):
            return least_bytes(plan)
        larger = [beside for saved, beside in self._beside.items() if saved >= plan.bytes_saved]
        return max([least_bytes(plan), *larger])

    def all(self) -> list[Candidate]:
        """All candidates, by the time that each takes."""
        found = [self.replayed(plan) for plan in self.plans]
        if (divided := _in_segments(ranked(found))) is not None:
            found += map(self.replayed, self.partly(divided.plan))
        return sorted(found, key=lambda c: (c.step_seconds, c.peak_bytes))

    def row(self, most_bytes: float, expected: Callable[[Candidate], float]) -> list[Candidate]:
        """The `ranked` candidates down to one that is `expected` to take at most so many bytes, if there is one.

        Of those that take more some may be missing, but not the smallest.
        """
        found: list[Candidate] = []
        row: list[Candidate] = []
        share, divided = 1.0, None
        for place, plan in enumerate(self.plans):
            if least_bytes(plan) > most_bytes or (row and self.least_peak(plan) >= row[-1].peak_bytes):
                continue
            found.append(self.replayed(plan))
            least, row = row[-1:], ranked(found)
            if divided is None and (divided := _in_segments(row)) is not None:
                found += map(self.replayed, self.partly(divided.plan))
                row = ranked(found)
            if (not least or row[-1] is not least[0]) and share * row[-1].peak_bytes <= most_bytes:
                bytes_expected = expected(row[-1])
                share = bytes_expected / max(row[-1].peak_bytes, 1)
                if bytes_expected <= most_bytes:
                    faster, slower = self.plans[:place], self.plans[place + 1 :]
                    row = row if divided is not None else self._with_parts(row, slower)
                    return self._with_larger(row, faster, most_bytes)
        return row

    def _with_parts(self, row: list[Candidate], slower: Iterable[Plan]) -> list[Candidate]:
        """A ranked row, with what is made of the next plan in segments and is faster than the last candidate."""
        segmented = (self.replayed(plan) for plan in slower if plan.segments)
        divided = next((c for c in segmented if c.peak_bytes < row[-1].peak_bytes), None)
        parts = [] if divided is None else map(self.replayed, self.partly(divided.plan))
        return ranked([*row, *(c for c in parts if c.step_seconds < row[-1].step_seconds)])

    def _with_larger(self, row: list[Candidate], faster: Iterable[Plan], most_bytes: float) -> list[Candidate]:
        """A ranked row, with the smallest of the faster plans that take more bytes, though it was skipped."""
        smallest = min((c.peak_bytes for c in row if c.peak_bytes > most_bytes), default=math.inf)
        for plan in sorted((plan for plan in faster if least_bytes(plan) > most_bytes), key=least_bytes):
            if least_bytes(plan) >= smallest:
                break
            larger = self.replayed(plan)
            row, smallest = ranked([*row, larger]), min(smallest, larger.peak_bytes)
        return row

    def small(self, most_bytes: float, spread: float) -> list[Candidate]:
        """The candidates that may take at most so many bytes, or the least times `spread`; by peak.

        Those may be missing that take more than `WIDE` times the least.
        """
        found: list[Candidate] = []
        least = math.inf
        for plan in sorted(self.plans, key=least_bytes):
            if least_bytes(plan) > max(most_bytes, spread * least):
                break
            if self.least_peak(plan) > WIDE * least:
                continue
            found.append(self.replayed(plan))
            least = min(least, found[-1].peak_bytes)
        return sorted(found, key=lambda c: (c.peak_bytes, c.step_seconds))


def least_bytes(plan: Plan) -> int:
    """The bytes that a plan takes at least: those that it hands to the backward.

    Where nothing runs again, no barrier is between the halves, and the compiler may save less.
    """
    return plan.bytes_saved if plan.runs_again else 0


def _is_cut(plan: Plan) -> bool:
    """Whether a plan is a cut of the front that keeps all it saves on the device."""
    return plan.strategy == FRONT and not plan.offloaded


def _in_segments(row: Iterable[Candidate]) -> Candidate | None:
    """The fastest candidate of a ranked row that runs loops in segments."""
    return next((c for c in row if c.plan.segments), None)
