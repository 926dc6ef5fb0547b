"""Say what went wrong, where, and what to do next.

The tree of everything that jointcut raises on its own account::

    JointcutError
    ├── PlanError          a plan does not close, or two rules contradict each other
    │   └── PolicyError    a policy that names nothing, or that contradicts itself or a rule
    ├── BudgetError        a budget that is not valid, or one for which no plan was found
    ├── TargetError        a device to plan for that is unknown, or that lacks what is asked for
    │   └── RoomError          a step that takes more memory than its target has
    ├── PeakError          a step takes more than its test allows, or cannot be compared (also an AssertionError)
    ├── StrategyError      an unknown strategy, or a strategy that returned no plan
    ├── GraphError         a joint program or a graph text that cannot be read
    ├── VerifyError        the two halves do not mean what the joint program meant
    ├── NonFiniteError     a half made a NaN or an infinity (also a FloatingPointError)
    ├── RecordError        a record has no JSON form, or a JSON text was not written by jointcut
    ├── CacheError         a cache folder that cannot be used or trusted
    ├── SpillError         a folder that cannot hold what is spilled (also an OSError)
    ├── ArtefactError      a function that cannot be exported, or an artefact that cannot be read or run
    ├── ProcessError       the processes of one program disagree, or one has ended (also a RuntimeError)
    ├── IdentityError      something in a cache key has no identity outside this process
    ├── CallError          a call that does not fit its program (also a TypeError and a ValueError)
    └── TraceError         the user's function could not be traced or differentiated (also a TypeError)
        └── DerivativeError    a primitive in it has no derivative (also a NotImplementedError)

There are three warnings, each about a request that is not met: `UncutWarning`, plain JAX runs instead of a cut;
`UncheckedWarning`, a call is not checked for NaN, or the error of a gradient is not measured; `UncachedWarning`, a
program is not kept for other processes.

Errors that JAX itself raises for the same mistake (an integer argument to differentiate, a loss that is not a
scalar) keep JAX's type, so that code which catches them goes on working.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from typing import Any


class JointcutError(Exception):
    """The root of all errors that jointcut raises."""


class PlanError(JointcutError, ValueError):
    """A plan does not close, or two rules forbid both saving and recomputing one value."""


class PolicyError(PlanError):
    """A key of a policy names nothing, or two demands, or a demand and a rule, contradict each other."""


class BudgetError(JointcutError, ValueError):
    """A budget is neither a number of bytes nor a fraction, or no plan was found for it.

    `least_bytes` is the smallest peak of the whole step that was found; None where none was looked for.
    """

    def __init__(self, text: str = "", least_bytes: int | None = None) -> None:
        """An error with a text; the bytes are kept when it is pickled."""
        super().__init__(text, least_bytes)
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        """The text."""
        return str(self.args[0])


class TargetError(JointcutError, ValueError):
    """A device to plan for is unknown, its compiler is missing, or the request needs the device here."""


class RoomError(TargetError):
    """A step takes more memory than its target has; `temp_bytes` are the bytes of its temporaries there, by XLA."""

    def __init__(self, text: str = "", temp_bytes: int = 0) -> None:
        """An error with a text; the bytes are kept when it is pickled."""
        super().__init__(text, temp_bytes)
        self.temp_bytes = temp_bytes

    def __str__(self) -> str:
        """The text."""
        return str(self.args[0])


class PeakError(JointcutError, AssertionError):
    """A tested step takes more than its record or its mark allows, or cannot be compared with them."""


class StrategyError(JointcutError, ValueError):
    """A strategy is unknown, or returned something that is not a plan."""


class GraphError(JointcutError, ValueError):
    """A joint program or a graph text cannot be read."""


class VerifyError(JointcutError):
    """The two halves together do not mean what the joint program meant: a fault of jointcut."""


class NonFiniteError(JointcutError, FloatingPointError):
    """A half made a NaN or an infinity; `found` is the record of it, which `aot.first_nonfinite` returns."""

    def __init__(self, text: str = "", found: Any = None) -> None:
        """An error with a text; the record is kept when it is pickled."""
        super().__init__(text, found)
        self.found = found

    def __str__(self) -> str:
        """The text."""
        return str(self.args[0])


class RecordError(JointcutError, ValueError):
    """A record holds something that JSON cannot hold, or a JSON text does not say what a record must say."""


class ArtefactError(JointcutError, ValueError):
    """A function cannot be exported, or a folder holds no artefact that this version can read and this machine run."""


class CacheError(JointcutError, ValueError):
    """A cache folder cannot be used or trusted, or was asked for something that is not a key."""


class SpillError(JointcutError, OSError):
    """A folder for values that the backward needs is full, or cannot be written or read."""


class ProcessError(JointcutError, RuntimeError):
    """The processes of one program ask for different plans, or one of them has ended."""


class IdentityError(JointcutError, ValueError):
    """Something in a cache key has no identity that another process would know."""


class CallError(JointcutError, TypeError, ValueError):
    """A call does not fit its program. JAX raises a TypeError or a ValueError for this, so CallError is both."""


class TraceError(JointcutError, TypeError):
    """The user's function could not be traced or differentiated."""


class DerivativeError(TraceError, NotImplementedError, ValueError):
    """Something in the user's function has no derivative in JAX, which raises one of the two others."""


class UncutWarning(UserWarning):
    """Plain JAX runs instead of a cut: the results are the same, but memory is not reduced."""


class UncheckedWarning(UserWarning):
    """A call is not checked for NaN and infinities, although `check="nonfinite"` asks for it.

    Or the error of a gradient is not measured, and so no smaller form is used, although `error` permits some.
    """


class UncachedWarning(UserWarning):
    """The programs of a call are not kept for other processes, although `cache` asks for it."""


def message(where: str, what: str, cure: str) -> str:
    """Join the three parts that every message has: where it happened, what is wrong, what to do.

    >>> print(message("args[0]['w']", "is a string, not an array.", "Pass an array."))
    args[0]['w'] is a string, not an array.
    Pass an array.
    """
    return f"{where} {what}\n{cure}"


def choices(given: object, known: Iterable[str]) -> str:
    """List the known names, and the name nearest to the given one if there is any.

    >>> choices("min-cut", ["min_cut", "save_all"])
    "Known names: 'min_cut', 'save_all'. Did you mean 'min_cut'?"
    """
    names = sorted(known)
    near = get_close_matches(str(given), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Known names: {', '.join(map(repr, names))}.{hint}"


def nearest(given: str, known: Iterable[str], most: int = 12) -> str:
    """List the names that are nearest to the given one, the nearest first.

    >>> nearest("atention", ["mlp", "attention", "norm"], 2)
    "'attention', 'norm' and 1 more"
    """

    def distance(name: str) -> tuple[float, str]:
        parts = (name, *name.split("/"))
        return -max(SequenceMatcher(None, given.lower(), part.lower()).ratio() for part in parts), name

    names = sorted(known, key=distance)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
