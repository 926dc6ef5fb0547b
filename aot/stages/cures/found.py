"""Record the op that made a NaN or an infinity, and its cures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from jointcut.partition.errors import NonFiniteError, message
from jointcut.wrappers.built_in.culprit import Culprit

_WHERE = (
    "Look at that line with these numbers; jax.numpy.where on an operand, not on the result, keeps a gradient finite."
)
_OWN = (
    "If it is of a derivative that the function takes itself, differentiate "
    'aot.function(..., derivatives="finite") there, or a function of aot.derivatives.'
)
_NONE = "No option and no function of aot.derivatives is known to make this call finite."


@dataclass(frozen=True)
class Cure:
    """A change that makes a call finite; the call ran with it.

    Attributes:
        what: the change, such as `aot.derivatives.xlogy(x, y) in place of x * log(y) at that line`. Two changes that
            only help together are one cure.
        then: empty if all values and gradients of the call are finite. Otherwise the first op to blame after the
            change, at another line.
    """

    what: str
    then: str = ""

    def __str__(self) -> str:
        """Return one sentence."""
        if not self.then:
            return f"{self.what} makes this call finite (checked by a run)."
        return f"{self.what} cures that line, but not this call: with it, {self.then}"


@dataclass(frozen=True)
class NonFinite:
    """The first op to blame for a NaN or an infinity in a call, and its cures.

    `print` it to read it. A cure is known to make values and gradients of this call finite. Whether the gradient is
    also the one that you want, you judge by the docstring of the named function.

    Attributes:
        name: the function's name.
        half: "forward" or "backward".
        culprit: the op: its `primitive`, the user's `source` line and `scope`, the `kind` ("NaN" or "Inf"), the `steps`
            of the loops around it, and its `operands` with their ranges. None if no op made the NaN.
        came_in: the path of the input that contained the NaN, if there is no culprit.
        cures: the changes that make the call finite.
        untried: the reason why no cure was tried, or empty.
        note: a further remark.
    """

    name: str
    half: str
    culprit: Culprit | None = None
    came_in: str = ""
    cures: tuple[Cure, ...] = ()
    untried: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return the op with its place, and then a line for each cure."""
        where = f"The {self.half} of {self.name}"
        if self.culprit is not None:
            return message(where, f"is not finite: {self.culprit}", "\n".join(self._cures()))
        if self.came_in:
            return message(where, f"returns a NaN that came in with {self.came_in}.", "Look at what made that one.")
        what = "returns a NaN, but no op makes one when they run one by one."
        cure = "Look at what its callbacks and references bring in, or report it: XLA's fused program makes the NaN."
        return message(where, self.note or what, cure)

    def _cures(self) -> list[str]:
        if any(not cure.then for cure in self.cures):
            return [str(cure) for cure in self.cures if not cure.then]
        why = f"No cure was tried: {self.untried}" if self.untried else _NONE
        return [why, *map(str, self.cures), *([_OWN] if self._may_be_of_own_derivative() else []), _WHERE]

    def _may_be_of_own_derivative(self) -> bool:
        """Whether the op may come from a `jax.grad` or `jax.jvp` inside the function, besides our own derivative."""
        scope = self.culprit.scope if self.culprit is not None else ""
        return self.half == "forward" and ("transpose(" in scope or scope.count("jvp(") > 1)

    def refuse(self) -> NoReturn:
        """Raise `NonFiniteError` with this record."""
        raise NonFiniteError(str(self), self)
