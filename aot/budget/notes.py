"""Remember on disk which plans held a budget.

What a search found is noted in the cache under everything that it depends on, so that the next process compiles that
plan alone. Its compiled step is weighed as ever, and a note that does not hold is not followed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.aot.cache.location import store_for
from jointcut.aot.cache.store import Store
from jointcut.aot.options import Options
from jointcut.partition.errors import IdentityError


@dataclass(frozen=True)
class Held:
    """A plan that held a budget, and what its compiled step took.

    Attributes:
        program: the name of the joint program that it was found for (`sketch`).
        way: how it was compiled; what decides the figures beside the program.
        plan: its text.
        peak_bytes, activation_bytes: of the step and of its temporaries, by XLA's account.
        compile_ms: what compiling took.
    """

    program: str
    way: str
    plan: str
    peak_bytes: int
    activation_bytes: int
    compile_ms: float


@dataclass(frozen=True)
class Note:
    """The place on disk for what is known of one program under one budget."""

    store: Store
    key: str
    label: str

    @classmethod
    def of(cls, options: Options, label: str, parts: dict[str, Any]) -> Note | None:
        """The place under the parts that a search depends on; None without a cache, or where one has no identity."""
        store = store_for(options.cache)
        if store is None:
            return None
        try:
            return cls(store, fingerprint(**parts), label)
        except IdentityError:
            return None

    def read(self) -> tuple[Held, ...]:
        """What other processes noted."""
        data = self.store.get(self.key)
        return () if data is None else tuple(Held(**found) for found in json.loads(data))

    def write(self, found: Sequence[Held]) -> None:
        """Note what is known, in place of what was."""
        self.store.put(self.key, json.dumps([asdict(held) for held in found]).encode(), self.label)
