"""Hold a plan with the figures of the model, and rank such plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from jointcut.partition.plans.plan import Plan

#: The compiler's bytes for each byte of a replay: about the median on CPU.
CALIBRATION = 1.25

#: So many guesses by the peak are made; then halves of what is left are looked at.
_MOST_GUESSES = 4

_PEAK = attrgetter("peak_bytes")


@dataclass(frozen=True)
class Candidate:
    """A plan with the figures of the model.

    `peak_bytes` are those of temporaries. `step_seconds` is the time to recompute, and to write and read the saved
    values; the time that every plan takes is not in it, but `preferred_seconds` are: what preferences weigh in the
    comparison with other plans. `follow` replays the plan's schedule as the compiler runs it.
    """

    plan: Plan
    peak_bytes: int
    step_seconds: float
    follow: Callable[[], float] | None = field(default=None, compare=False, repr=False)
    preferred_seconds: float = 0.0

    @property
    def predicted_bytes(self) -> float:
        """The compiler's bytes of temporaries, as well as they are known before it has compiled the plan.

        Where the backend is followed, this takes several times as long as the replay that gives `peak_bytes`, which is
        enough to compare plans.
        """
        return CALIBRATION * self.peak_bytes if self.follow is None else self.follow()


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
