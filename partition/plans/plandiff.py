"""Say what changes from one plan to another of the same program.

>>> from jointcut.partition import Plan, parse
>>> from jointcut.partition.plans.plandiff import diff
>>> graph = parse('''
...     primal %0:float32[8]
...     cotangent %1:float32[8]
...     %2:float32[8] = sin %0
...     %3:float32[8] = sin %2
...     backward:
...     %4:float32[8] = mul %1 %3
...     gradient %4''')
>>> print(diff(Plan.of(graph, [3], reasons={3: "so told"}), Plan.of(graph, [])))
by hand -> by hand: -32 bytes saved, +0 -0 ops recomputed
-            32  float32[8] sin : so told
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jointcut.partition.bodies.checkpoints import Numbers
from jointcut.partition.plans.loops_told import in_checkpoints, in_segments
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.saved import Saved, listed
from jointcut.partition.program.notebook import Shown


@dataclass(frozen=True)
class PlanDiff(Shown):
    """The differences from one plan to another of the same program.

    Attributes:
        saved_only_before, saved_only_after: values that the other plan does not save, or saves at another size.
        recomputed_only_...: ids of ops.
        dropped_only_...: ids of values.
        checkpoints_only_...: loops with other numbers of checkpoints, as in `Plan.checkpoints`.
        segments_only_...: loops, as in `Plan.loops_in_segments`.

    A delta is after minus before, None where either is not known.
    """

    strategies: tuple[str, str]
    saved_only_before: tuple[Saved, ...]
    saved_only_after: tuple[Saved, ...]
    recomputed_only_before: tuple[int, ...]
    recomputed_only_after: tuple[int, ...]
    segments_only_before: tuple[tuple[int, int, int], ...]
    segments_only_after: tuple[tuple[int, int, int], ...]
    dropped_only_before: tuple[int, ...]
    dropped_only_after: tuple[int, ...]
    checkpoints_only_before: Numbers
    checkpoints_only_after: Numbers
    delta_bytes: int
    delta_seconds: float | None
    delta_peak_bytes: int | None

    @property
    def is_empty(self) -> bool:
        """Whether both plans save and recompute the same, at the same cost as far as both costs are known."""
        return not any(value for name, value in vars(self).items() if name != "strategies")

    def __str__(self) -> str:
        """A line of totals, then one for each loop in segments and for each group of values that read the same.

        `-` marks rows of the first plan only, `+` rows of the second only. Values of most bytes come first.
        """
        come, gone = len(self.recomputed_only_after), len(self.recomputed_only_before)
        totals = [f"{self.delta_bytes:+,} bytes saved", f"+{come} -{gone} ops recomputed"]
        if self.dropped_only_after or self.dropped_only_before:
            totals.append(f"+{len(self.dropped_only_after)} -{len(self.dropped_only_before)} values dropped")
        totals += [] if self.delta_seconds is None else [f"{1e3 * self.delta_seconds:+,.3f} ms"]
        totals += [] if self.delta_peak_bytes is None else [f"{self.delta_peak_bytes:+,} bytes of peak"]
        lines = [f"- {told}" for told in in_segments(self.segments_only_before)]
        lines += [f"+ {told}" for told in in_segments(self.segments_only_after)]
        lines += [f"- {told}" for told in in_checkpoints(self.checkpoints_only_before)]
        lines += [f"+ {told}" for told in in_checkpoints(self.checkpoints_only_after)]
        signed = [("-", *row) for row in listed(self.saved_only_before)]
        signed += [("+", *row) for row in listed(self.saved_only_after)]
        lines += [f"{sign} {size:>13,}  {text}" for sign, size, text in sorted(signed, key=lambda row: -row[1])]
        return "\n".join([f"{' -> '.join(self.strategies)}: {', '.join(totals)}", *lines])


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Return the differences between two plans of one program; reasons do not count."""
    return PlanDiff(
        (before.strategy, after.strategy),
        _only(before.saved, after.saved),
        _only(after.saved, before.saved),
        _only(before.recomputed, after.recomputed),
        _only(after.recomputed, before.recomputed),
        _only(before.loops_in_segments, after.loops_in_segments),
        _only(after.loops_in_segments, before.loops_in_segments),
        _only(before.dropped, after.dropped),
        _only(after.dropped, before.dropped),
        _only(before.checkpoints, after.checkpoints),
        _only(after.checkpoints, before.checkpoints),
        after.bytes_saved - before.bytes_saved,
        _delta(before.seconds, after.seconds),
        _delta(before.peak_bytes, after.peak_bytes),
    )


def _only(these: Iterable[Any], others: Iterable[Any]) -> tuple[Any, ...]:
    known = set(map(_identity, others))
    return tuple(item for item in these if _identity(item) not in known)


def _identity(item: Any) -> Any:
    if not isinstance(item, Saved):
        return item
    return item.value, item.shape, item.dtype, item.copies, item.bytes, item.op, item.memory, item.form, item.host_steps


def _delta(before: Any, after: Any) -> Any:
    return None if before is None or after is None else after - before
