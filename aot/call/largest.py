"""Find the largest size of an axis, such as the batch, for which a training step fits into memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from textwrap import TextWrapper
from typing import Any

import jax

from jointcut.aot.call.decorator import function
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.options.limits import Budget, free_bytes, limit
from jointcut.aot.options.options import name_of, with_budget
from jointcut.aot.options.target import Target
from jointcut.aot.options.target import target as target_named
from jointcut.aot.planning.asked import is_at
from jointcut.aot.planning.largest_size import largest_size
from jointcut.aot.planning.request import Request
from jointcut.aot.planning.size_search import FIRST, TriedSize
from jointcut.aot.stages.cut import Cut
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace.shapes import allowing, concrete, sizes_for, symbolic_arguments
from jointcut.partition.errors import BudgetError, CallError, choices, message
from jointcut.partition.figures import human_bytes, human_seconds
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program import sizes as symbolic
from jointcut.wrappers.boundary import bounded
from jointcut.wrappers.record import Record

_DEVICE = "device"
_TOLD = TextWrapper(100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)

#: At least so many sizes below a number are looked at for an allowed one, before half of the number is.
_WINDOW = 256
_MOST = 1 << 16  # the smallest allowed size is at most this


@dataclass(frozen=True)
class Largest(Record):
    """The largest size of an axis for which a step holds a budget.

    Its JSON form is without the cut.

    Attributes:
        name: of the function.
        axis: the name of the size.
        size: the largest that holds.
        budget_bytes: the budget.
        peak_bytes: the peak of the step of this size, by XLA's account of the compiled step.
        step_seconds: its time, as predicted.
        tried: the sizes that were tried, in order, and half of the largest.
        tiles: the rows that run in blocks, in words.
        cut: the step of this size, cut by the fastest plan within the budget.
    """

    name: str
    axis: str
    size: int
    budget_bytes: int
    peak_bytes: int
    step_seconds: float
    tried: tuple[TriedSize, ...]
    tiles: tuple[str, ...] = ()
    cut: Cut | None = field(default=None, repr=False, compare=False)

    @property
    def plan(self) -> Plan | None:
        """The plan of the step; None in a record that was read from JSON."""
        return None if self.cut is None else self.cut.plan

    def to_json(self, indent: int | None = None) -> str:
        """Return the record as a JSON text, without the cut."""
        return super(Largest, replace(self, cut=None)).to_json(indent)

    def __str__(self) -> str:
        """Return the result on a line, and a table of the sizes with the predicted time per example."""
        first = f"{self.name}: {self.axis}={self.size:,} is the largest size within {self.budget_bytes:,} bytes"
        rows = [(self.axis, "peak", "of budget", "step", f"step / {self.axis}", "", "", "blocks", "plan")]
        rows += [self._cells(row) for row in self.tried]
        if all(row.blocks == 1 for row in self.tried):
            rows = [(*row[:-2], row[-1]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
        lines = ("  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)
        return "\n".join([first, *lines, *(_TOLD.fill(f"in blocks: {tile}") for tile in self.tiles)])

    def _cells(self, row: TriedSize) -> tuple[str, ...]:
        peak, share = human_bytes(row.peak_bytes), f"{row.peak_bytes / self.budget_bytes:.1%}"
        times = human_seconds(row.step_seconds), human_seconds(row.seconds_per_example)
        verdict = "" if row.fits else "does not fit"
        mark = "largest" if row.size == self.size else verdict
        return (f"{row.size:,}", peak, share, *times, row.how, mark, f"{row.blocks:,}", row.strategy)


@bounded
def largest(
    fun: Callable[..., Any],
    axis: str,
    budget: Budget | None = None,
    *args: Any,
    sizes: Mapping[str, int] | None = None,
    constraints: Sequence[str] = (),
    target: str | Target | None = None,
    **options: Any,
) -> Largest:
    """Return the largest size of an axis for which a step, value and gradient, holds a budget by XLA's account.

    The peak is predicted at a few sizes, and XLA is asked near the budget, in at most four compilations. The result was
    compiled and holds. On a CPU it is at most two per cent below the largest size; for other devices each question is a
    compilation, of the plan that is predicted to be smallest. Rows run in at most 256 blocks where a
    larger size holds by that, unless `tiles` is False. If it is a dict, they run in its blocks at all sizes.

    Args:
        fun: a function, or one that `aot.function` made, with its options.
        axis: the name of the size.
        budget: peak bytes of a step on one device, `"24GiB"`. The default is the budget of `fun`, or else the memory of
            the target, or what the device has free.
        *args: the arguments, with symbolic sizes by `aot.shapes("b, 128", jnp.float32)`.
        sizes: a number for each other size that is a name.
        constraints: conditions on the sizes, as in `jax.export.symbolic_args_specs`: `("mod(b, 8) == 0",)`.
        target: the device that the step is for, which need not be here; see `aot.target`.
        **options: the options of `aot.function`. Under `error` no value waits in a smaller form.

    Returns a record; print it for a table of sizes and their predicted time per example. `cut.compile()` is the step.
    Raises `BudgetError` if the budget is a fraction, or if not even the smallest size holds it, and `CallError` if the
    axis is no size of the arguments.
    """
    is_ours = isinstance(fun, Function | Method)
    if is_ours and options:
        what = f"is an aot.function, which has its own options, and {', '.join(sorted(options))} is given."
        raise CallError(message(name_of(fun), what, "Leave it out, or give the plain function."))
    ours = fun if is_ours else function(fun, budget=_DEVICE if budget is None else budget, **options)
    with nullcontext() if target is None else target_named(target):
        return largest_of(ours, axis, budget, args, {}, sizes or {}, constraints)


def largest_of(
    fun: Function | Method,
    axis: str,
    budget: Budget | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Mapping[str, int],
    constraints: Sequence[str] = (),
) -> Largest:
    """Return the largest size as `largest` does, for a function of `aot.function` and the current target."""
    allowed = _allowed(name_of(fun), axis, symbolic_arguments(args, kwargs), sizes, constraints)
    below = _below(axis, allowed)
    leaves = symbolic_arguments((*(None,) * isinstance(fun, Method), *args), kwargs)
    named = {path: ", ".join(map(str, leaf.shape)) for path, leaf in leaves.items()}

    @cache
    def traced(size: int) -> Traced:
        numbers = {**sizes, axis: size}
        given = jax.tree.map(lambda leaf: concrete(leaf, numbers), (tuple(args), dict(kwargs)))
        return fun.trace(*given[0], **given[1])

    def request(size: int) -> Request:
        call = traced(size)
        given = dict(call.options.shapes)
        asked = {path: spec for path, spec in given.items() if symbolic.names(spec) & asking.keys()}
        options = replace(call.options, tiles=asking or False, shapes={**given, **named, **asked})
        return replace(call, options=with_budget(options, budget_bytes)).request.in_asked_blocks

    options = traced(below(FIRST) or below(_MOST)).options  # the search begins at the former
    if asking := {} if isinstance(options.tiles, bool) else dict(options.tiles):
        least = _rows_of_blocks(axis, asking, named, dict(options.shapes))
        below = _below(axis, lambda size: size >= least and allowed(size))
    budget_bytes = _bytes(options.budget if budget is None else budget, options.goal)
    found = largest_size(axis, budget_bytes, request, below, options.tiles is True)
    best = next(row for row in found.tried if row.size == found.size)
    cut = Cut(**vars(found.answer))
    known = found.answer.request.name, axis, found.size, budget_bytes, best.peak_bytes, best.step_seconds
    return Largest(*known, found.tried, tuple(map(str, cut.plan.tiles)), cut)


def _rows_of_blocks(axis: str, asking: Mapping[str, int], named: Mapping[str, str], given: Mapping[str, str]) -> int:
    """Return the fewest rows along an axis that can be parted into the blocks that a user asks for.

    `given` are the user's own names for sizes, `named` those with the axis.
    """
    alike = [path for path, shape in named.items() if _first(shape) == axis]
    also = (_first(spec) for path, spec in given.items() if any(is_at(leaf, path) for leaf in alike))
    having = {axis, *alike, *also}
    return max((max(blocks, 2) for name, blocks in asking.items() if name in having), default=1)


def _first(shape: str) -> str:
    """Return the first size of a shape."""
    return shape.split(",")[0].strip()


def _bytes(budget: Budget | None, goal: Target | None) -> int:
    """Return a budget in bytes; by default the memory of the target, or what the device has free."""
    found = limit(_DEVICE if budget is None else budget)
    if found.fraction is not None:
        what = f"of {found} grows with the size, and no size is the largest."
        raise BudgetError(message("budget", what, "Give bytes, such as '24GiB', or a target, whose memory is taken."))
    if found.peak_bytes is not None:
        return found.peak_bytes
    return free_bytes(()) if goal is None else goal.memory_bytes


# ------------------------------------------------------------------------------------------ the sizes to choose from


def _allowed(
    name: str, axis: str, leaves: Mapping[str, Any], sizes: Mapping[str, int], constraints: Sequence[str]
) -> Callable[[int], bool]:
    """Return whether the axis may have a size; raises `CallError` for an axis that the arguments do not have."""
    known = frozenset().union(*(symbolic.names(leaf.shape) for leaf in leaves.values()))
    if not known:
        cure = "Give an argument one: aot.shapes('b, 128', jnp.float32)."
        raise CallError(message(name, f"has no argument with a size that is a name, such as {axis!r}.", cure))
    if axis not in known:
        raise CallError(message("axis", f"is {axis!r}, which stands in no argument's shape.", choices(axis, known)))
    if axis in sizes:
        raise CallError(message("sizes", f"names {axis!r}, whose size is looked for.", "Leave it out."))
    numbers = sizes_for(leaves, {**sizes, axis: _MOST})
    allows = allowing(leaves, constraints)
    return lambda size: allows({**numbers, axis: size})


def _below(axis: str, allowed: Callable[[int], bool]) -> Callable[[int], int]:
    """Return a function that gives the largest allowed size up to a number, 0 where there is none.

    Allowed sizes may be as far apart as the first two, and may end somewhere. Raises `CallError` if there are none.
    """
    known = list(islice(filter(allowed, range(1, _MOST + 1)), 2))
    if not known:
        what = f"allow no size of {axis!r} from 1 to {_MOST:,}."
        raise CallError(message("constraints", what, "Give conditions that a size meets, such as 'mod(b, 8) == 0'."))
    first, window = known[0], max(_WINDOW, known[-1] - known[0])

    def near(size: int) -> int:
        return next(filter(allowed, range(size, max(size - window, first - 1), -1)), 0)

    def below(size: int) -> int:
        if size < first:
            return 0
        low, high = size, size + 1
        while low > first and not near(low):
            low, high = max(first, low // 2), low
        return near(bisect_left(range(high), True, low, key=lambda n: not near(n)) - 1)

    return below
