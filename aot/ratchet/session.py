"""Hold the steps that the tests of one run weigh.

A step has the name of its test, or one that the test gives it. Under `--peak-check` it is compared with its record when
it is weighed; under `--peak-record` it is kept when its test has passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from jointcut.aot.options.limits import Limit, limit
from jointcut.aot.options.target import Target, target
from jointcut.aot.ratchet import records, verdict
from jointcut.aot.ratchet.verdict import Compared, command
from jointcut.aot.ratchet.weigh import weighed
from jointcut.aot.report.compare.diff import Diff
from jointcut.aot.report.compare.snapshot import Snapshot
from jointcut.aot.report.compare.stored import from_dict
from jointcut.partition.errors import (
    BudgetError,
    CallError,
    JointcutError,
    PeakError,
    TargetError,
    TraceError,
    choices,
    message,
)
from jointcut.wrappers.boundary import bounded

Named = dict[str, tuple[str, Snapshot]]  # the test and the step of each name

#: The errors that fail a test with their text alone.
REFUSED = PeakError, CallError, TraceError, TargetError, BudgetError

_CURE = "Give bytes, as in @pytest.mark.peak('66 MB')."


@dataclass(frozen=True)
class Settings:
    """What a run of tests asks for.

    Attributes:
        file: where the records are.
        root: the project's folder.
        mode: "record", "check", or "" where steps are only weighed.
        target: the device to compile for; empty for the devices that are here.
        against: the version and target to compare with; empty for the same.
        bound: the most bytes of steps whose test has no mark; empty for none.
        tolerance: the share by which a figure may grow, as `1%`.
    """

    file: Path
    root: Path
    mode: str = ""
    target: str = ""
    against: str = ""
    bound: str = ""
    tolerance: str = "0%"


@dataclass
class Session:
    """The steps of one run of tests."""

    settings: Settings
    goal: Target | None
    bound: Limit | None
    tolerance: Fraction
    known: records.Records
    against: str
    weighed: Named = field(default_factory=dict)
    passed: Named = field(default_factory=dict)
    smaller: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, settings: Settings) -> Session:
        """Begin a run; raises `JointcutError` for settings that cannot be read, and for damaged or missing records."""
        bound = bound_of(settings.bound, "peak_budget in [tool.pytest.ini_options]") if settings.bound else None
        goal = target(settings.target) if settings.target else None
        tolerance = _tolerance(settings.tolerance)
        known = records.read(settings.file, settings.mode != "check") if settings.mode else {}
        return cls(settings, goal, bound, tolerance, known, _chosen(settings, known))

    # --------------------------------------------------------------------------------------------------- one test

    def begin(self, test: str) -> None:
        """Forget what a test weighed: it runs, perhaps again."""
        for named in (self.weighed, self.passed):
            for name in [name for name, (by, _) in named.items() if by == test]:
                del named[name]

    @bounded
    def weigh(
        self, test: str, mark: Limit | None, name: str | None, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Snapshot:
        """Weigh a step of a test, hold it to its bound and, under `--peak-check`, to its record.

        Raises `PeakError` for a step that takes more, has no record, or has the name of another.
        """
        self._refuse_name(test, name)
        found = weighed(function, args, kwargs, self.goal)
        self.weighed[name or test] = test, found
        where = "@pytest.mark.peak" if mark is not None else "peak_budget in [tool.pytest.ini_options]"
        bound = self.bound if mark is None else mark
        if bound is not None and (text := verdict.above(found, bound, name or test, where)) is not None:
            raise PeakError(text)
        if self.settings.mode == "check":
            self._check(test, name or test, records.kept(found, self.settings.root))
        return found

    def _refuse_name(self, test: str, name: str | None) -> None:
        """Refuse the name of another step."""
        if (name or test) not in self.weighed:
            return
        other, _ = self.weighed[name or test]
        cure = "Give each a name of its own: peak.named('a name')(step, params, batch)."
        if name is None:
            raise PeakError(message(test, "weighs two functions without a name.", cure))
        places = f"in {test}" if other == test else f"in {other} and in {test}"
        raise PeakError(message(repr(name), f"is the name of two steps, {places}.", cure))

    def _check(self, test: str, name: str, found: Snapshot) -> None:
        """Compare a step with its record."""
        against, file = self.against or found.made_by, self.settings.file.name
        before = self.known.get(against, {}).get(name)
        if before is None:
            raise PeakError(self._unrecorded(test, name, against))
        compared = Compared(Diff(before, found), self.tolerance)
        if compared.grown:
            raise PeakError(verdict.grew(compared, name, file, self._accept(test)))
        if compared.shrunk:
            self.smaller.append(name)

    def _unrecorded(self, test: str, name: str, against: str) -> str:
        """Return the text for a step without a record of this version and target."""
        file, others = self.settings.file.name, records.others(self.known, name, against)
        if not others:
            return message(name, f"has no record in {file}.", f"Record it: {self._accept(test)}")
        what = f"has a record in {file} with {' and '.join(others)}, and none with {against}."
        target_option = [f"--peak-target={self.settings.target}"] if self.settings.target else []
        backend = against.partition(", ")[2]
        nearest = max(reversed(others), key=lambda other: other.partition(", ")[2] == backend)
        see = command(test, "--peak-check", *target_option, f"--peak-against={nearest}")
        return message(name, what, f"Record it: {self._accept(test)}\nSee first what changed from there: {see}")

    def _accept(self, test: str) -> str:
        """Return the command that records a test."""
        target_option = [f"--peak-target={self.settings.target}"] if self.settings.target else []
        return command(test, "--peak-record", *target_option)

    def end(self, test: str, has_mark: bool) -> None:
        """Keep what a test weighed that has passed; raises `PeakError` if it has a mark and weighed nothing."""
        mine = {name: pair for name, pair in self.weighed.items() if pair[0] == test}
        if has_mark and not mine:
            cure = "Weigh a step in it, as in: def test_step(peak): peak(step, params, batch). Or take the mark away."
            raise PeakError(message(test, "has @pytest.mark.peak and weighs no function.", cure))
        self.passed |= mine

    # ---------------------------------------------------------------------------------------------------- the run

    def taken(self) -> list[Any]:
        """Return what this process weighed, as plain JSON for the process that writes the records."""
        return [
            [[(n, t, s.to_dict()) for n, (t, s) in named.items()] for named in (self.weighed, self.passed)],
            self.smaller,
        ]

    def join(self, taken: Sequence[Any]) -> None:
        """Add what another process weighed; raises `PeakError` if it gave a step the name of another."""
        (weighed_there, passed_there), smaller = taken
        theirs, passed = (
            {name: (test, from_dict(entry, name, records.ANEW)) for name, test, entry in named}
            for named in (weighed_there, passed_there)
        )
        for name, (test, _) in theirs.items():
            if name in self.weighed and self.weighed[name][0] != test:
                self._refuse_name(test, name)
        self.weighed |= theirs
        self.passed |= passed
        self.smaller += smaller

    def write(self) -> list[str]:
        """Write the records of the tests that passed, and return the lines that tell of it."""
        if not self.passed:
            return ["no step was weighed, and nothing is recorded"]
        for name, (_, found) in self.passed.items():
            self.known.setdefault(found.made_by, {})[name] = records.kept(found, self.settings.root)
        records.write(self.settings.file, self.known)
        count, made = len(self.passed), sorted({found.made_by for _, found in self.passed.values()})
        steps = f"{count} step{'s' * (count != 1)}"
        return [f"{steps} recorded in {self.settings.file.name} for {' and '.join(made)}: commit it"]

    def told(self) -> list[str]:
        """Return the lines that tell of steps that take less than their records."""
        return [
            f"{name} takes less than its record; keep that: {self._accept(self.weighed[name][0])}"
            for name in self.smaller
        ]


def bound_of(given: Any, where: str) -> Limit:
    """Return the bound that a mark or an option gives; raises `JointcutError` for anything but bytes."""
    try:
        bound = limit(given)
    except JointcutError as error:
        what = str(error).partition("\n")[0].removeprefix("budget ")
        raise PeakError(message(where, what, _CURE)) from error
    if bound.peak_bytes is None:
        raise PeakError(message(where, f"is {given!r}, which is no number of bytes.", _CURE))
    return bound


def bound_in(args: Sequence[Any], kwargs: Mapping[str, Any], test: str) -> Limit:
    """Return the bound of a mark with these arguments, on a test."""
    where = f"@pytest.mark.peak of {test}"
    if len(args) != 1 or kwargs:
        raise PeakError(message(where, "does not have one argument.", _CURE))
    return bound_of(args[0], where)


def _tolerance(text: str) -> Fraction:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        where = "peak_tolerance in [tool.pytest.ini_options]"
        raise PeakError(message(where, f"is {text!r}, which is no share.", "Give per cent, such as '1%'."))
    return Fraction(match[1]) / 100


def _chosen(settings: Settings, known: records.Records) -> str:
    """Return the version and target to compare with, in full; `--peak-against` may give a part of it."""
    given = settings.against
    found = [name for name in known if given == name] or [name for name in known if given in name]
    if not given:
        return ""
    if settings.mode != "check":
        raise PeakError(message("--peak-against", "compares nothing by itself.", "Give --peak-check with it."))
    if len(found) != 1:
        what = f"is {given!r}, and {settings.file.name} has {'no such record' if not found else 'several of these'}."
        raise PeakError(message("--peak-against", what, choices(given, known)))
    return found[0]
