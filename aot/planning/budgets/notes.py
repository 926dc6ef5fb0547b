"""Remember on disk which plans held a budget, and the memory of plain JAX.

The result of a search is noted in the cache under everything that it depends on, so that the next process compiles that
plan alone. Its compiled step is measured all the same, and a plan that does not hold the budget is not used. A budget
that is a fraction needs the bytes of plain JAX's step: these are noted too, for every fraction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.aot.cache.location import store_for
from jointcut.aot.cache.store import Store
from jointcut.aot.options.options import Options
from jointcut.partition.errors import IdentityError, PlanError
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.graph import Graph

_NOTED = ("program", "way", "peak_bytes", "activation_bytes", "compile_ms")


@dataclass(frozen=True)
class Held:
    """A plan that held a budget, with the figures of its compiled step.

    Attributes:
        program: the name (`sketch`) of the joint program that was planned.
        way: how it was compiled (`searches.way`).
        within: gives the plan in the graph of a newly traced program; None if the plan does not fit that.
        peak_bytes, activation_bytes: peaks of the step and of its temporaries, as XLA reports them.
        compile_ms: milliseconds of compilation.
    """

    program: str
    way: str
    within: Callable[[Graph], Plan | None]
    peak_bytes: int
    activation_bytes: int
    compile_ms: float


@dataclass(frozen=True)
class Note:
    """The place on disk for the plans of one program under one budget."""

    store: Store
    key: str
    label: str

    @classmethod
    def of(cls, options: Options, label: str, parts: Mapping[str, Any]) -> Self | None:
        """Return the place named by the parts of a search; None without a cache, or where a part has no identity."""
        store = store_for(options.cache)
        if store is None:
            return None
        try:
            return cls(store, fingerprint(**parts), label)
        except IdentityError:
            return None

    def read(self) -> tuple[Held, ...]:
        """Return plans that other processes noted."""
        return tuple(Held(within=partial(_read, fields.pop("plan")), **fields) for fields in self._entries())

    def add(self, held: Held, text: str) -> None:
        """Note a plan by its text; it replaces a plan of the same program that was compiled in the same way."""
        fields = {name: getattr(held, name) for name in _NOTED}
        others = (e for e in self._entries() if (e["program"], e["way"]) != (held.program, held.way))
        self.store.put(self.key, json.dumps([*others, {**fields, "plan": text}]).encode(), self.label)

    def _entries(self) -> list[dict[str, Any]]:
        data = self.store.get(self.key)
        return [] if data is None else json.loads(data)


def _read(text: str, graph: Graph) -> Plan | None:
    try:
        return planfile.loads(text, graph)
    except PlanError:
        return None


@dataclass(frozen=True)
class PlainNote(Note):
    """The place on disk for the bytes of plain JAX's temporaries."""

    def known(self) -> int | None:
        """Return the bytes that another process noted."""
        data = self.store.get(self.key)
        return None if data is None else int(json.loads(data))

    def keep(self, plain_bytes: int) -> None:
        """Note the bytes."""
        self.store.put(self.key, json.dumps(plain_bytes).encode(), self.label)
