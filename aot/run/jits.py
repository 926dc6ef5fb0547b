"""Jit the flat programs of one signature, and compile each once.

`run` calls the jitted function: JAX chooses its executable by the arrays of the call, and compiles another one for
other shardings. `compiled` returns the executable for the types of the signature. JAX compiles once for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.options.target import Target
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.compile import compiled
from jointcut.aot.trace.blame import note
from jointcut.wrappers.table import Table


@dataclass(frozen=True)
class Jits:
    """The flat programs of one signature by name.

    `jitted` are the functions. `takes` returns the types that each is compiled for. `goal` is the target on whose
    devices these lie. `compile_ms` has the wall time of each compilation.
    """

    name: str
    jitted: Mapping[str, Any]
    takes: Mapping[str, Callable[[], Sequence[Any]]]
    goal: Target | None = None
    compile_ms: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: Table[Any] = field(default_factory=Table, repr=False, compare=False)
    _compiled: Table[Any] = field(default_factory=Table, repr=False, compare=False)
    _lowered: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def run(self, which: str, arrays: Sequence[Any]) -> list[Any]:
        """Run a jitted function; the first time, it is compiled for these arrays within a `Stage`."""
        program = self._known.get(which) or self._known.of(which, lambda: self._first(which, arrays))
        return program(*arrays)

    def known(self, which: str) -> Callable[..., list[Any]] | None:
        """Return a jitted function that has run before; None for any other."""
        return self._known.get(which)

    def compiled(self, which: str) -> Any:
        """Return the executable for the types of the signature."""
        return self._compiled.get(which) or self._compiled.of(which, lambda: self._compile(which))

    def has_compiled(self, *names: str) -> bool:
        """Whether all of these are compiled for the types of the signature."""
        return all(self._compiled.get(name) is not None for name in names)

    def lowered(self, which: str) -> jax.stages.Lowered:
        """Return a program for the types of the signature, lowered and not compiled; keep it until it is compiled."""
        if which not in self._lowered:
            self._lowered[which] = self.jitted[which].lower(*self.takes[which]())
        return self._lowered[which]

    def _compile(self, which: str) -> Any:
        takes = self.takes[which]()
        start = time.perf_counter()
        lowered = self._lowered.pop(which, None) or self.jitted[which].lower(*takes)
        executable = compiled(lowered, self.goal)
        self.compile_ms[which] = 1e3 * (time.perf_counter() - start)
        return executable

    def _first(self, which: str, arrays: Sequence[Any]) -> Any:
        program = self.jitted[which]
        is_eager = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        if not is_eager and not self.has_compiled(which):
            try:
                with Stage("compile", self.name):
                    program.lower(*arrays).compile()
            except jax.errors.JAXTypeError as error:
                note(error, self.name)
                raise
        return program
