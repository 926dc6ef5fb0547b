"""Remember on disk which plans held a budget, and what plain JAX takes.

The result of a search is noted in the cache under everything that it depends on, so that the next process compiles that
plan alone. Its compiled step is measured all the same, and a plan that does not hold the budget is not used. A budget
that is a fraction needs the bytes of plain JAX's step: these are noted too, for every fraction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.aot.cache.location import store_for
from jointcut.aot.cache.store import Store
from jointcut.aot.choices.options import Options
from jointcut.partition.errors import IdentityError


@dataclass(frozen=True)
class Held:
    """A plan that held a budget, with the figures of its compiled step.

    Attributes:
        program: the name (`sketch`) of the joint program that was planned.
        way: how it was compiled (`searches.way`).
        plan: its text.
        peak_bytes, activation_bytes: of the step and of its temporaries, as XLA reports them.
        compile_ms: milliseconds of compilation.
    """

    program: str
    way: str
    plan: str
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
        """The place named by the parts that a search depends on; None without a cache, or where one has no identity."""
        store = store_for(options.cache)
        if store is None:
            return None
        try:
            return cls(store, fingerprint(**parts), label)
        except IdentityError:
            return None

    def read(self) -> tuple[Held, ...]:
        """Plans that other processes noted."""
        data = self.store.get(self.key)
        return () if data is None else tuple(Held(**fields) for fields in json.loads(data))

    def add(self, held: Held) -> None:
        """Note a plan, in place of another of the same program that was compiled in the same way."""
        others = (plan for plan in self.read() if (plan.program, plan.way) != (held.program, held.way))
        self.store.put(self.key, json.dumps([asdict(plan) for plan in (*others, held)]).encode(), self.label)


@dataclass(frozen=True)
class PlainNote(Note):
    """The place on disk for the bytes of plain JAX's temporaries."""

    def known(self) -> int | None:
        """The bytes that another process noted."""
        data = self.store.get(self.key)
        return None if data is None else int(json.loads(data))

    def keep(self, plain_bytes: int) -> None:
        """Note the bytes."""
        self.store.put(self.key, json.dumps(plain_bytes).encode(), self.label)
