"""The oracle of the house: digests of what the partitioner makes of every program of the corpus and the suite.

    make golden                    # make the digests anew, and print what changed
    make golden PROGRAMS="gpt"     # of the programs whose names contain a word, and print alone

A change that only moves code keeps every digest. One that changes programs says which, and why. For each program and
strategy there are texts: graph, plan, schedule and both halves of a called function, and the joint jaxpr of the
function's gradient inside a `jit`. Budgets are met by the planner's own figures, at the rates of `tests/rates.json`, so
that nothing is compiled. A text is kept as a digest of the whole and one character for each line, by which the first
line that differs is found.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

import oracle
from benchmarks.programs import PROGRAMS, load
from jointcut import aot
from jointcut.aot.planning.budgets.rates import rates
from jointcut.partition.errors import PlanError, TraceError
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.text import show
from jointcut.partition.search.budget import Planner
from jointcut.partition.split import Split
from programs import CORPUS, named

HERE = Path(__file__).parent
STRATEGIES: tuple[str | float, ...] = ("min_cut", "best", 0.3, 0.0)
#: Digests are of what this version of JAX traces.
JAX_VERSION = "0.10.2"

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_CHECKSUM = re.compile(r'"checksum": "\w*",')


@dataclass(frozen=True)
class Text:
    """A text as it is kept: a digest of all of it, and a character for each line."""

    digest: str
    lines: str

    @classmethod
    def of(cls, text: str) -> Text:
        """The digest of a text, without addresses of Python objects and the place of this checkout.

        A plan's checksum is left out: it is of the lines below it, paths included.
        """
        text = _CHECKSUM.sub("", _ADDRESS.sub("0x", text).replace(str(HERE.parents[1]), "."))
        lines = "".join(_hashed(line)[0] for line in text.splitlines())
        return cls(_hashed(text)[:12], lines)


def _hashed(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass(frozen=True)
class Subject:
    """A program of the corpus or the suite, and how it is traced and differentiated."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    has_aux: bool = False
    argnums: int | tuple[int, ...] = 0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    with_doubles: bool = False

    def decorated(self, **options: Any) -> Any:
        """The function under `aot.function`."""
        return aot.function(self.function, argnums=self.argnums, has_aux=self.has_aux, **options)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Each text with its key: the name of the program, the strategy and the kind of text."""
        try:
            traced = self.decorated().trace(*self.arguments, **self.kwargs)
            yield f"{self.name}/graph", show(traced.graph)
        except TraceError:  # arguments that `value_and_grad` refuses, and `vjp` does not
            traced = None
        for strategy in STRATEGIES:
            key = f"{self.name}/{strategy}"
            how = functools.partial(within, share=strategy) if isinstance(strategy, float) else strategy
            try:
                if traced is not None:
                    yield from ((f"{key}/{kind}", text) for kind, text in _texts(traced.partition(how).split))
                yield f"{key}/in jit", str(jax.make_jaxpr(self.pulled_back(how))(*self.arguments))
            except PlanError as error:
                yield f"{key}/refused", str(error)

    def pulled_back(self, strategy: Any) -> Callable[..., Any]:
        """The function with its pullback, as `jax.vjp` gives them, in one program."""

        def run(*args: Any) -> Any:
            function = functools.partial(self.decorated(strategy=strategy), **self.kwargs)
            out, pullback, *aux = jax.vjp(function, *args, has_aux=self.has_aux)
            return out, aux, pullback(oracle.cotangents(out, 1))

        return run


def _texts(split: Split) -> Iterator[tuple[str, str]]:
    yield "plan", planfile.dumps(split.plan, split.graph)
    yield "schedule", str(split.schedule)
    yield "forward", str(split.forward)
    yield "backward", str(split.backward)


def within(graph: Graph, share: float) -> Plan:
    """The fastest plan that takes a share of the peak of saving everything, by the planner's own figures."""
    planner = Planner(Problem.of(graph, rates(), backend=Backend.here()))
    everything = planner.everything()
    most = planner.known(everything).peak_bytes if everything is not None else 0
    chosen = planner.fastest(share * most, lambda candidate: candidate.peak_bytes)
    return (chosen or min(planner.menu, key=lambda candidate: candidate.peak_bytes)).plan


def names(words: Iterable[str] = ()) -> list[str]:
    """The names of the programs that contain one of some words; all of them without words."""
    every = [*(program.name for program in CORPUS), *(f"suite/{name}" for name in PROGRAMS)]
    words = tuple(words) or ("",)
    return [name for name in every if any(word in name for word in words)]


def subject(name: str) -> Subject:
    """The program of a name; those of the suite at their smallest size."""
    if name.startswith("suite/"):
        program = load(name.removeprefix("suite/"), "tiny")
        return Subject(name, program.loss, program.arguments, program.has_aux)
    small = named(name)
    with small.precision():
        made = Subject(name, small.function, small.args, small.has_aux, small.argnums, small.kwargs)
    return replace(made, with_doubles="x64" in small.tags)


def digests(name: str) -> dict[str, Text]:
    """The digests of one program, by key."""
    with jax.numpy_dtype_promotion("standard" if name.startswith("suite/") else "strict"):
        program = subject(name)
        with jax.enable_x64(program.with_doubles):
            return {key: Text.of(text) for key, text in program.texts()}


@functools.cache
def kept() -> dict[str, Text]:
    """The digests that are committed."""
    found: dict[str, Text] = {}
    for path in sorted(HERE.glob("*.json")):
        found |= {key: Text(*text) for key, text in json.loads(path.read_text()).items()}
    return found


def keep(found: dict[str, Text]) -> None:
    """Write the digests of all programs: those of the suite in one file, those of the corpus in another."""
    for name, of_suite in (("suite", True), ("corpus", False)):
        own = {key: [text.digest, text.lines] for key, text in found.items() if key.startswith("suite/") is of_suite}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(text)}" for key, text in sorted(own.items()))
        (HERE / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")


def changes(name: str, found: dict[str, Text]) -> list[str]:
    """What differs from the digests that are committed, a line each: program, strategy, text, and the first line."""
    before = {key: text for key, text in kept().items() if key.startswith(f"{name}/")}
    gone = [f"{key}: is gone" for key in before if key not in found]
    new = [f"{key}: is new" for key in found if key not in before]
    other = [
        f"{key}: {_first(before[key], found[key])}" for key in before if before[key] != found.get(key, before[key])
    ]
    return [*gone, *new, *other]


def _first(before: Text, after: Text) -> str:
    pairs = zip(before.lines, after.lines, strict=False)
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before.lines), len(after.lines)))
    return f"differs from line {number + 1} on; it had {len(before.lines)} lines, and has {len(after.lines)}"
