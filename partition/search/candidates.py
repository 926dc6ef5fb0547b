"""Hold a plan with the figures of the model, rank such plans, and replay those that a budget needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from jointcut.partition.plans.backend import PORTABLE
from jointcut.partition.plans.plan import Plan

#: A plan whose replayed peak is at most this factor of the least may take less memory than that plan, once compiled.
WIDE = 1.35

#: The strategy of plans that are just cuts of the front.
FRONT = "front"

#: How many guesses are made by the peak. After them the remaining range is halved.
_MOST_GUESSES = 4

_PEAK = attrgetter("peak_bytes")


@dataclass(frozen=True)
class Candidate:
    """A plan with the figures of the model.

    `peak_bytes` counts temporaries. `step_seconds` is the time to recompute, and to write and read the saved values. It
    leaves out the time that every plan takes, and includes `preferred_seconds`, the weight of preferences in the
    comparison with other plans. `calibration` is the compiler's bytes for each byte of a replay.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float
    preferred_seconds: float = 0.0
    calibration: float = PORTABLE.calibration

    @property
    def predicted_bytes(self) -> float:
        """The compiler's bytes of temporaries, as far as they are known before it has compiled the plan."""
        return self.calibration * self.peak_bytes


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
    """The place of the first ranked candidate that is `expected` to take at most `most_bytes`; the end if none is.

    Each call of `expected` may take long. So the next candidate to ask is guessed: the bytes are assumed to be the same
    share of the peak as in the last answer. The search ends when two neighbours were asked that lie around
    `most_bytes`.
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
    budget three kinds of plans need no replay: plans that hand over more than the budget, plans slower than one that
    fits, and cuts of the front that must take more than a faster plan (see `least_peak`).

    Attributes:
        plans: the plans, by the time that each takes.
        known: gives the candidate of a plan.
        partly: gives more plans for the fastest undominated plan in segments: with some steps kept whole.
    """

    plans: Sequence[Plan]
    known: Callable[[Plan], Candidate]
    partly: Callable[[Plan], Iterable[Plan]]
    _beside: dict[int, int] = field(default_factory=dict, init=False)  # by the bytes that a cut of the front saves

    def replayed(self, plan: Plan) -> Candidate:
        """The candidate of a plan; for a cut of the front, note the bytes that it takes beside the saved values."""
        candidate = self.known(plan)
        if _is_cut(plan):
            self._beside[plan.bytes_saved] = candidate.peak_bytes - plan.bytes_saved
        return candidate

    def least_peak(self, plan: Plan) -> int:
        """The least bytes that the replay of a plan can give, as far as this is known before the replay.

        A cut of the front that saves less runs more again. So its whole peak is no less than the bytes that a cut which
        saves more takes beside its saved values. This held for all cuts but one, by 1.5%, of 27 programs (the suite and
        models of libraries). It is no law, since the forward may write more for the cut that saves more.
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
        """The `ranked` candidates down to one that is `expected` to take at most `most_bytes`, if there is one.

        Some candidates that take more may be missing, but not the smallest of these.
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
        """A ranked row, with the partly segmented variants of the next plan that are faster than the last candidate."""
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

    def smallest(self, is_allowed: Callable[[Plan], bool]) -> Candidate | None:
        """The smallest candidate of the allowed plans, the fastest of equal ones; None where no plan is allowed."""
        if any(plan.segments for plan in self.plans):
            return next((c for c in reversed(ranked(self.all())) if is_allowed(c.plan)), None)
        found: Candidate | None = None
        for plan in sorted(filter(is_allowed, self.plans), key=least_bytes):
            if found is not None and least_bytes(plan) > found.peak_bytes:
                break
            rows = [self.replayed(plan), *([] if found is None else [found])]
            found = min(rows, key=lambda c: (c.peak_bytes, c.step_seconds))
        return found

    def small(self, most_bytes: float, spread: float) -> list[Candidate]:
        """The candidates that may take at most `most_bytes`, or the least times `spread`; by peak.

        Candidates that take more than `WIDE` times the least may be missing.
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
    """The least bytes that a plan takes: the bytes that it hands to the backward.

    If nothing runs again, there is no barrier between the halves, and the compiler may save less.
    """
    return plan.bytes_saved if plan.runs_again else 0


def _is_cut(plan: Plan) -> bool:
    """Whether a plan is a cut of the front that keeps all its saved values on the device."""
    return plan.strategy == FRONT and not plan.offloaded


def _in_segments(row: Iterable[Candidate]) -> Candidate | None:
    """The fastest candidate of a ranked row that runs loops in segments."""
    return next((c for c in row if c.plan.segments), None)
