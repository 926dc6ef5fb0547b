"""Keep the compiled backwards of a function, and say in words why each was needed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.cache.fingerprint import foreign_rules
from jointcut.aot.hooks.closures import constants_read
from jointcut.aot.hooks.hook import ISLAND, Place
from jointcut.aot.progress.progress import Stage
from jointcut.aot.tape.nodes import Node
from jointcut.aot.tape.program import Backward
from jointcut.aot.tape.records import Record
from jointcut.aot.tape.roll import RolledSweep, structure_of
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.walk import Structure
from jointcut.aot.trace.differences import first_difference, short_line
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, runtime
from jointcut.partition.program.places import line_at
from jointcut.partition.program.text import show
from jointcut.wrappers.table import Table

KEPT_CAPTURES = 256

#: The reason for the capture of the first structure.
FIRST = "the first call"


@dataclass(frozen=True)
class Sketch:
    """The parts of a structure that `why` compares.

    Attributes:
        arrays: the type of each array among the arguments, by path.
        ops: the user's line and the name of each op, in running order.
        hooks: the hooks, in words.
        records: the kind of each op.
        reads: where the gradients of each op go, in words.
        seeds: the values that have a cotangent, in words.
        hook_keys: for each hook, its key among hooks of programs, and the constants that it reads, by name.
        called: the hooks and islands that are called back, in words.
        fate: the use of the gradients, in words, such as "returned".
        loop: the number of ops in a block of its loop; 0 without a loop.
    """

    arrays: dict[str, str]
    ops: tuple[tuple[str, str], ...]
    hooks: tuple[str, ...]
    fate: str
    loop: int = 0
    records: tuple[Record, ...] = ()
    reads: tuple[tuple[str, ...], ...] = ()
    seeds: tuple[str, ...] = ()
    hook_keys: tuple[tuple[Any, dict[str, str]], ...] = ()
    called: tuple[str, ...] = ()

    @classmethod
    def of(cls, sweep: Sweep, arrays: dict[str, str], fate: str) -> Sketch:
        """Return the sketch of a sweep, and of the arguments of its call."""
        block = sweep.block if isinstance(sweep, RolledSweep) else ()
        nodes = [*sweep.nodes, *block]
        ran = [(node, node.record) for node in reversed(nodes) if node.record is not None]
        called = [*sweep.called, *(sweep.inner if isinstance(sweep, RolledSweep) else ())]
        places = [hook for hook in called if isinstance(hook, Place)]
        return cls(
            arrays,
            tuple((_line(node.source), record.name) for node, record in ran),
            tuple(map(_named, places)),
            fate,
            len(block),
            tuple(record for _, record in ran),
            tuple(tuple(_value(parent) for parent, _ in node.edges) for node, _ in ran),
            tuple(_value(node) for node, _ in sweep.seeds),
            tuple((place.key, constants_read(place.hook.function)) for place in places),
            tuple(f"{_named(place)}, of {place.where}" for place in places if not place.is_traced),
        )


@dataclass(eq=False)
class Capture:
    """One structure of a backward, traced and compiled.

    Attributes:
        why: the reason why it was needed, in words.
        ops: the number of forward ops that it differentiates.
        residual_bytes: the bytes that the forward kept for it, when it was captured.
        backward: the program: a `Backward`, or a `Straight` step.
        sketch: the sketch with which later captures are compared, to tell why they were needed.
        hits: the number of later calls that used it.
        holds: the update inside it, or None.
    """

    why: str
    ops: int
    residual_bytes: int
    backward: Any = field(repr=False)
    sketch: Sketch = field(repr=False)
    hits: int = 0
    holds: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        """`120 ops, 3 hits, 1.2 MB kept: 24 steps instead of 23 in train.py:41`."""
        islands = sum(1 for words in self.sketch.called if words.startswith(ISLAND))
        inside = f", {counted(islands, 'island')}" * bool(islands)
        kept = human_bytes(self.residual_bytes)
        return f"{counted(self.ops, 'op')}{inside}, {counted(self.hits, 'hit')}, {kept} kept: {self.why}"

    @property
    def jaxpr(self) -> Any:
        """The whole backward as a closed jaxpr `(constants, references, residuals, cotangents) -> gradients`.

        With a budget or a policy it is the joint program `(constants, arguments, cotangents) -> (outputs, gradients)`.
        """
        return self.backward.closed

    @property
    def graph(self) -> Graph:
        """The backward as ops and values, which can be printed, drawn and planned."""
        return self.backward.graph

    @property
    def text(self) -> str:
        """The backward as graph text, after a line for each hook and island that is called back."""
        called = [f"// called back: the {words}" for words in self.sketch.called]
        return "\n".join([*called, show(self.graph)])


class Captures(Sequence[Capture]):
    """The captures of a function, the oldest first; print them to see why each was needed.

    At most 256 are kept; beyond that, the oldest is dropped.
    """

    def __init__(self, name: str) -> None:
        """Start with none."""
        self._name = name
        self._table: Table[Capture] = Table(KEPT_CAPTURES)
        self.made = 0
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Add a line about all captures, which is printed before them."""
        self._notes.append(text)

    def __len__(self) -> int:
        """Return the number of captures."""
        return len(self._table)

    def __getitem__(self, i: Any) -> Any:
        """Return capture `i`, counted from the oldest."""
        return list(self)[i]

    def __iter__(self) -> Iterator[Capture]:
        """Iterate over the captures, oldest first."""
        found = (self._table.get(key) for key in self._table)
        return (capture for capture in found if capture is not None)

    def clear(self) -> None:
        """Drop all captures, with their programs; the next call of each structure captures it anew."""
        self._table = Table(KEPT_CAPTURES)

    def __repr__(self) -> str:
        """Return a line for each capture."""
        lines = [f"{self._name}: {counted(len(self), 'capture')}", *(f"  {note}" for note in self._notes)]
        return "\n".join([*lines, *(f"  {i}: {capture}" for i, capture in enumerate(self))])

    def of(
        self,
        sweep: Sweep,
        cotangents: Sequence[Any],
        refs: Sequence[Any],
        arrays: Callable[[], dict[str, str]],
        more: Any = None,
        program: Callable[[Structure], Any] | None = None,
        fate: str = "",
    ) -> Capture:
        """Return the capture of a sweep; make it if there is none.

        `refs` are the references that gradients are added to, None for a leaf without one. `arrays` returns the types
        of the arguments. `program` makes the program, which depends on `more`; the default program returns the
        gradients. `fate` names the use of the gradients.
        """
        made: list[Capture] = []
        types = tuple(map(jax.typeof, cotangents)), tuple(None if ref is None else jax.typeof(ref) for ref in refs)

        def make() -> Capture:
            of_gradients = functools.partial(Backward.of, flat=sweep.flat, cotangents=cotangents, refs=refs)
            end = fate or ("added to references" if any(ref is not None for ref in refs) else "returned")
            made.append(self._made(sweep, program or of_gradients, end, arrays()))
            return made[0]

        capture = self._table.of((sweep.key, types, more, runtime.trace_context()), make)
        capture.hits += not made
        return capture

    def _made(self, sweep: Sweep, program: Callable[[Structure], Any], fate: str, arrays: dict[str, str]) -> Capture:
        with Stage("capture", self._name) as now:
            sketch = Sketch.of(sweep, arrays, fate)
            reason = why(sketch, [capture.sketch for capture in self])
            backward = program(structure_of(sweep))
            bytes_kept = sum(abstract.aval_bytes(jax.typeof(x)) for x in sweep.kept)
            self.made += 1
            now.ends(lambda: f"captured the backward of {counted(sweep.count, 'op')} in {now}: {reason}")
        return Capture(reason, sweep.count, bytes_kept, backward, sketch)


# ------------------------------------------------------------------------------------------------ why, in words


def why(new: Sketch, known: Sequence[Sketch]) -> str:
    """Say why a new structure is needed: how it differs from the nearest known structure."""
    if not known:
        return FIRST
    nearest = min(known, key=lambda old: _distance(new, old))
    if new.loop and new.loop not in [sketch.loop for sketch in known]:
        return f"equal blocks of {counted(new.loop, 'op')} are a loop"
    differences = [*_arrays(new, nearest), *_lines(new, nearest), *_hooks(new, nearest)]
    if not differences:
        differences = list(_order(new, nearest) if new.ops != nearest.ops else _within(new, nearest))
    if new.fate != nearest.fate:
        differences.append(f"gradients are {new.fate}, not {nearest.fate}")
    return "; ".join(differences[:2]) or "JAX's configuration, or the update's function, is another"


def _distance(new: Sketch, old: Sketch) -> int:
    other = sum(1 for path in {*new.arrays, *old.arrays} if new.arrays.get(path) != old.arrays.get(path))
    counts, before = Counter(new.ops), Counter(old.ops)
    counts.subtract(before)
    others = sum(1 for pair in zip(new.records, old.records, strict=False) if pair[0] is not pair[1])
    return 1000 * other + 10 * sum(map(abs, counts.values())) + others + len(set(new.hooks) ^ set(old.hooks))


def _arrays(new: Sketch, old: Sketch) -> Iterator[str]:
    """`x: float32[8, 7] instead of [8, 6]`."""
    for path, now in new.arrays.items():
        before = old.arrays.get(path)
        if before is None:
            yield f"{path} is new: {now}"
        elif before != now:
            same = now.partition("[")[0] == before.partition("[")[0]
            yield f"{path}: {now} instead of {before.partition('[')[1] + before.partition('[')[2] if same else before}"
    yield from (f"{path} is gone" for path in old.arrays if path not in new.arrays)


def _lines(new: Sketch, old: Sketch) -> Iterator[str]:
    """`24 steps instead of 23 in train.py:41`: yield the first line that ran another number of times."""
    now, before = _runs(new), _runs(old)
    for line in dict.fromkeys((*now, *before)):
        if line and now.get(line, 0) != before.get(line, 0):
            yield f"{counted(now.get(line, 0), 'step')} instead of {before.get(line, 0)} in {line}"
            return


def _runs(sketch: Sketch) -> dict[str, int]:
    """Count how often each line ran, by its rarest op."""
    names: dict[str, Counter[str]] = {}
    for line, name in sketch.ops:
        names.setdefault(line, Counter())[name] += 1
    return {line: min(counts.values()) for line, counts in names.items()}


def _hooks(new: Sketch, old: Sketch) -> Iterator[str]:
    yield from (f"the {name} is new" for name in new.hooks if name not in old.hooks)
    yield from (f"the {name} is gone" for name in old.hooks if name not in new.hooks)


def _order(new: Sketch, old: Sketch) -> Iterator[str]:
    for (line, name), (_, before) in zip(new.ops, old.ops, strict=False):
        if name != before:
            yield f"{name} instead of {before} in {line}"
            return
    yield "the same ops in another order"


def _within(new: Sketch, old: Sketch) -> Iterator[str]:
    """Yield how the same ops in the same order differ: in what they compute, in what they read, or in their hooks."""
    for (line, name), record, before in zip(new.ops, new.records, old.records, strict=True):
        if record is not before:
            yield from _kinds(f"{name} in {line}", record, before, line)
            return
    for (line, name), now, then in zip(new.ops, new.reads, old.reads, strict=True):
        if now != then:
            yield f"the gradient of {name} in {line} goes to {_listed(now)} instead of {_listed(then)}"
            return
    if new.seeds != old.seeds:
        yield f"{_listed(new.seeds)} has a cotangent instead of {_listed(old.seeds)}"
    for hook, (key, now), (old_key, then) in zip(new.hooks, new.hook_keys, old.hook_keys, strict=True):
        read = (f"{name} is {x} instead of {then.get(name)}" for name, x in now.items() if x != then.get(name))
        if key != old_key:
            yield f"in the {hook} {next(read, 'an object or an array is another')}"


def _kinds(op: str, new: Record, old: Record, line: str) -> Iterator[str]:
    """Yield how two kinds of op differ, which only JAX's configuration tells apart if nothing is yielded."""
    if new.closed is None or old.closed is None:  # islands, and the ends of calls with hooks
        yield f"{op} passes other types on"
        return
    differs = first_difference(new.closed, old.closed, line)
    now, then = (_listed([f"operand {i}" for i in record.wanted]) for record in (new, old))
    if differs:
        yield differs
    elif now != then:
        yield f"{op} has a gradient for {now} instead of {then}"
    elif foreign_rules(new.closed):
        yield f"{op} has a derivative rule that was made anew, or that reads other values"


def _named(place: Place) -> str:
    """Return a hook in words: `hook on_cotangent clip at train.py:12`; an island has no `hook` before it."""
    return f"{'' if place.kind == ISLAND else 'hook '}{place.kind} {place.named}"


def _value(node: Node) -> str:
    """Return a value in words: an argument by its path, or an op with its line."""
    return node.tape.paths[node.place] if node.record is None else f"{node.record.name} in {_line(node.source)}"


def _listed(values: Sequence[str]) -> str:
    return " and ".join(values) or "nothing"


def _line(source: Any) -> str:
    return short_line(line_at(source) if source is not None else "")
