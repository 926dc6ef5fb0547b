"""Arrange the ops of a graph in the scopes that the user sees.

The scopes form a tree: loops, and within and around them the names of `places`. Layers may share a name, if a function
or a module is called again. A name that is left and entered again is a new scope if the new op depends on an op in
between. A call that begins again at its first line is a new scope, too. An op that was moved out of a loop stands
beside the loop. An op of the backward goes beside the forward ops that make or read its operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jointcut.partition.program.graph import LITERAL, STEP, TOP, Graph, Op
from jointcut.partition.program.places import NOWHERE, Name, names, place_of
from jointcut.partition.program.roles import Side

#: Pseudo-ops, which run nothing.
PSEUDO = frozenset({STEP, LITERAL})

_MOST_READERS = 16  # the most readers of a value whose scopes are looked at


@dataclass(frozen=True)
class Scope:
    """One scope: the scope around it (None for the root), its name, its kind, and a detail such as a loop's length."""

    parent: int | None
    name: str
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Outline:
    """The scopes, parents before children, the scope of each op that runs, and the user's line of every op."""

    scopes: tuple[Scope, ...]
    scope_of: Mapping[int, int]
    lines: Sequence[str]

    def path(self, scope: int) -> str:
        """The names from below the root down to a scope, joined by slashes; for the root its own name."""
        upwards: list[str] = []
        at: int | None = scope
        while at is not None:
            upwards.append(self.scopes[at].name)
            at = self.scopes[at].parent
        return "/".join(reversed(upwards[:-1])) or upwards[-1]


def outline(graph: Graph, title: str = "program") -> Outline:
    """Find the scope of every op except pseudo-ops; `title` names the root, and a call of that name is the root."""
    tree = _Tree(graph, [_Entered(Scope(None, title, "root"))])
    real = [op for op in graph.ops if op.name not in PSEUDO]
    for op in real:
        if op.origin is Side.FORWARD:
            tree.place_forward(op)
    for op in real:
        if op.origin is not Side.FORWARD:
            tree.place_backward(op)
    return Outline(tuple(tree.numbered()), tree.scope_of, tree.lines)


@dataclass
class _Entered:
    """A scope, the line at which its call began, and whether another line of the call has been met since."""

    scope: Scope
    begun: str = ""
    is_under_way: bool = False


@dataclass
class _Tree:
    """The scopes so far.

    `alike` lists the scopes of one name within one parent, the newest last. `touched` holds for each value the scopes
    that the value depends on through an op outside of them, as bits of a number.
    """

    graph: Graph
    scopes: list[_Entered]
    scope_of: dict[int, int] = field(default_factory=dict)
    alike: dict[tuple[int, str, str], list[int]] = field(default_factory=dict)
    touched: dict[int, int] = field(default_factory=dict)
    names: list[tuple[Name, ...]] = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph
        places = [NOWHERE if op.payload is None or op.name in PSEUDO else place_of(op.payload) for op in graph.ops]
        self.lines = [p.line for p in places]
        own = [_within(self.scopes[0].scope.name, path) for path in names(places)]
        loops: dict[int, tuple[Name, ...]] = {TOP: ()}
        for region in graph.regions:
            if region.holder is not None and region.loop not in loops:
                around = _below(loops[graph.loops[region.loop].parent], own[region.holder])
                loops[region.loop] = (*around, Name("loop", str(region.loop)))
        homes = self._homes(own, loops)
        self.names = [
            _below(homes.get(own[op.id][:1], ()) if graph.loop_of(op) == TOP else loops[graph.loop_of(op)], own[op.id])
            for op in graph.ops
        ]

    def _homes(
        self, own: Sequence[tuple[Name, ...]], loops: Mapping[int, tuple[Name, ...]]
    ) -> dict[tuple[Name, ...], tuple[Name, ...]]:
        """The names around the loop, for each name that comes first in a loop's body.

        An op outside loops with such a name was moved out of the loop.
        """
        homes: dict[tuple[Name, ...], tuple[Name, ...]] = {}
        for op in self.graph.ops:
            around = loops[self.graph.loop_of(op)]
            first = own[op.id][:1]
            if around and first and first[0].text not in [name.text for name in around]:
                homes.setdefault(first, tuple(name for name in around if name.kind != "loop"))
        return homes

    def place_forward(self, op: Op) -> None:
        """Find or make the scope of an op: a new one if the old scope would run both before and after another."""
        reads = 0
        for v in op.inputs:
            reads |= self.touched.get(v, 0)
        at, inside = 0, 0
        for name in self.names[op.id]:
            at = self._entered(at, name, reads)
            inside |= 1 << at
        self.scope_of[op.id] = at
        for v in op.inputs:
            maker = self.graph.values[v].maker
            if maker in self.scope_of:
                reads |= sum(1 << at for at in self._up(self.scope_of[maker])) & ~inside
        for v in op.outputs:
            self.touched[v] = reads

    def _entered(self, parent: int, name: Name, reads: int) -> int:
        """The scope of a name: a new one if this is another call, or if the scopes in `reads` contain the old one."""
        alike = self.alike.get((parent, name.kind, name.text))
        if alike is None or reads >> alike[-1] & 1:
            return self._new(parent, name)
        newest = alike[-1]
        known = self.scopes[newest]
        if name.at and name.at == known.begun and known.is_under_way:
            return self._new(parent, name)
        known.is_under_way |= name.at != known.begun
        return newest

    def _new(self, parent: int, name: Name) -> int:
        detail = f"{self.graph.loops[int(name.text)].length} steps" if name.kind == "loop" else ""
        text = "loop" if name.kind == "loop" else name.text
        self.scopes.append(_Entered(Scope(parent, text, name.kind, detail), name.at))
        self.alike.setdefault((parent, name.kind, name.text), []).append(len(self.scopes) - 1)
        return len(self.scopes) - 1

    def place_backward(self, op: Op) -> None:
        """Place an op of the backward beside an op of the same names that makes or reads one of its operands.

        Forward ops of the same line decide first, then other forward ops, then ops of the backward, which may belong to
        another layer. If there is no such op, each name goes into the scope that holds most makers and readers of the
        operands.
        """
        votes: dict[int, list[int]] = {}
        for other in self._kin(op):
            if self._are_called_alike(op.id, other.id):
                own = votes.setdefault(self.scope_of[other.id], [0, 0, 0])
                own[self._distance(op, other)] += 1
        if votes:
            self.scope_of[op.id] = max(votes, key=votes.__getitem__)
            return
        near = Counter(scope for other in self._kin(op) for scope in self._up(self.scope_of[other.id]))
        at = 0
        for name in self.names[op.id]:
            alike = self.alike.get((at, name.kind, name.text))
            at = max(alike, key=lambda scope: (near[scope], scope)) if alike else self._new(at, name)
        self.scope_of[op.id] = at

    def _kin(self, op: Op) -> Iterator[Op]:
        """The ops with a scope that make or read an operand of an op."""
        for v in op.inputs:
            maker = self.graph.values[v].maker
            for other in (*([] if maker is None else [maker]), *self.graph.consumers[v][:_MOST_READERS]):
                if other != op.id and other in self.scope_of:
                    yield self.graph.ops[other]

    def _distance(self, op: Op, other: Op) -> int:
        if other.origin is not Side.FORWARD:
            return 2
        return 0 if self.lines[op.id] == self.lines[other.id] else 1

    def _up(self, scope: int) -> Iterator[int]:
        """A scope and the scopes around it, without the root."""
        while scope:
            yield scope
            scope = self.scopes[scope].scope.parent or 0

    def _are_called_alike(self, op: int, other: int) -> bool:
        mine, others = self.names[op], self.names[other]
        return len(mine) == len(others) and all(a.text == b.text for a, b in zip(mine, others, strict=True))

    def numbered(self) -> Iterator[Scope]:
        """Yield the scopes; scopes of one name within one parent get numbers."""
        scopes = [entered.scope for entered in self.scopes]
        total = Counter((s.parent, s.name) for s in scopes)
        seen: Counter[tuple[int | None, str]] = Counter()
        for s in scopes:
            seen[s.parent, s.name] += 1
            same = total[s.parent, s.name] > 1
            yield Scope(s.parent, f"{s.name} ({seen[s.parent, s.name]})" if same else s.name, s.kind, s.detail)


def _within(title: str, path: tuple[Name, ...]) -> tuple[Name, ...]:
    """A path without a call that the root already names."""
    return path[1:] if path and (path[0].kind, path[0].text) == ("call", title) else path


def _below(around: tuple[Name, ...], own: tuple[Name, ...]) -> tuple[Name, ...]:
    """A path within another; names that both begin with appear once, except loops."""
    outer = [name for name in around if name.kind != "loop"]
    same = 0
    while same < min(len(outer), len(own)) and outer[same].text == own[same].text:
        same += 1
    return (*around, *own[same:])
