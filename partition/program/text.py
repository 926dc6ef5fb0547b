"""Print a graph as text, and read it back.

`parse(show(graph)) == graph`, payloads aside. A line makes an op, and a value is typed where it is made::

    loop 1 x6                                       a loop of six steps; `loop 2 x3 in 1` runs inside it
    primal %0:float32[8] "args[0]"                  an input and its label; or `cotangent`
    %3:float32[8] = mul %0 _                        an op; `_` stands for a literal
    backward:                                       the next ops were traced in the backward, until `forward:`
    #9 %4:6xfloat32[8]@1 = step %2                  op 9 makes six copies, one in each step of loop 1
    %5:float32[] = cond %3 %4 effects holds exp     it is seen from outside; it hides an `exp`
    %9:float32[8] = dot %3 %4 takes 0.0125s         the seconds of one run; `takes` precedes `holds`
    %6:float32[8] = loop %3 %7 body 1 of loop 1 {   a scan: its body is region 1, which ends with `}`; before the `{`
                                                    another kind of op than a scan says its name: `as steps`
    %6:float32[8] = branches %3 %7 %9 {             a conditional; a branch is a `branch 3 of loop 2 {` of its
                                                    own, with `returns %7`; `loop 2 of 2` says: one of two
    %8:float32[4] = back %5 steps x? {              a loop whose steps are cut on their own: up to `}` stands the
                                                    program of one step; `x?` are its trips, where nobody knows them;
                                                    `keeps 8 at 4 5`: the operands that have a row for each checkpoint
    next %7                                         in a body: the value for its next step; also `stacks` (its
                                                    results step by step) and `repeats` (results that do not change)
    spare %8:float32[8]                             a value that nothing makes
    gradient %5                                     a result of the program; or `output`

Facts that follow from the rest are not written: an op's number if it is the next one, the bytes if they follow from
dtype and shape (else `%4:key<fry>[]/8B`), the loop in which an op runs. `step` and `literal` are always forward. A line
that begins with `//` is a comment.

>>> graph = parse('''
...     primal %0:float32[8] "x"
...     cotangent %1:float32[8]
...     %2:float32[8] = sin %0
...     backward:
...     %3:float32[8] = cos %0
...     %4:float32[8] = mul %1 %3
...     output %2
...     gradient %4''')
>>> print(show(graph).splitlines()[4])
%3:float32[8] = cos %0
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest
from typing import Any, NoReturn

import numpy as np

from jointcut.partition.errors import GraphError, choices, message
from jointcut.partition.program.bodies import SCAN, Body, Nested
from jointcut.partition.program.graph import LITERAL, ONCE, OPEN_LOOP, STEP, TOP, Graph, Loop, Op, Region, Value
from jointcut.partition.program.roles import Role, Side

_QUOTED = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_NAME = r"[A-Za-z?][^\s\"\[\]{}]*"
_VALUE = re.compile(rf"%(\d+):(?:(\d+)x)?({_NAME}|{_QUOTED})\[((?:\d+(?:,\d+)*)?)\](?:/(\d+)B)?(?:@(\d+))?")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)s")
_LOOP = re.compile(r"loop (\d+) (?:x|of )(\d+)(?: in (\d+))?")
_BRANCH = re.compile(r"branch (\d+) of loop (\d+) \{")
_NOTES = re.compile(
    r"(?P<effects>effects)? ?(?:takes (?P<seconds>\S+))? ?(?:holds(?P<inner>(?: (?!body |steps x)\S+)+))? ?"
    r"(?:body (?P<region>\d+) of loop (?P<loop>\d+)(?: as (?P<kind>\S+))? \{)?(?:as (?P<once>\S+) \{)?"
    r"(?:steps x(?P<trips>\d+|\?)(?: keeps (?P<kept>\d+)(?: up to (?P<most>\d+))? at (?P<rows>\d+(?: \d+)*))? \{)?"
)
_TOKEN = re.compile(rf'(?:{_QUOTED}|[^\s"])+|"')
_SIZED = re.compile(r"(bool|u?int\d|b?float\d|complex\d)\w*")
_ROLES = {role.value: role for role in Role}
_ENDS = {"next": "carried", "stacks": "stacks", "repeats": "own"}
_RETURNS = "returns"
_PSEUDO = (STEP, LITERAL)


def show(graph: Graph) -> str:
    """The text of a graph, one line for each loop, input, op and output."""
    lines = [_loop(x) for x in graph.loops if x.id != TOP]
    lines += [f"{role.value} {_typed(graph, v, TOP)}" for v, role in graph.inputs]
    given = {v for v, _ in graph.inputs}
    lines += [f"spare {_typed(graph, v.id, TOP)}" for v in graph.values if v.maker is None and v.id not in given]
    by_region: dict[int, list[Op]] = {region.id: [] for region in graph.regions}
    for op in graph.ops:
        by_region[op.region].append(op)
    lines += _block(graph, graph.regions[TOP], by_region, "")
    return "\n".join([*lines, *(f"{role.value} {_used([v])}" for v, role in graph.outputs)])


def _loop(loop: Loop) -> str:
    size = f"of {loop.rivals}" if loop.rivals else f"x{loop.length}"
    return f"loop {loop.id} {size}" + (f" in {loop.parent}" if loop.parent else "")


def _block(graph: Graph, region: Region, by_region: dict[int, list[Op]], pad: str) -> Iterator[str]:
    """The lines of one region; the lines of loop bodies in it are indented further."""
    side, expected = region.origin, 0 if region.id == TOP else None
    for op in by_region[region.id]:
        if op.origin is not side and op.name not in _PSEUDO:
            side = op.origin
            yield f"{pad}{side.value}:"
        number = "" if op.id == expected else f"#{op.id} "
        expected = op.id + 1
        yield pad + number + _line(graph, op, region.loop)
        if op.name == OPEN_LOOP:
            body = graph.bodies[op.id]
            yield from _block(graph, graph.regions[body.region], by_region, pad + "    ")
            ends = (body.carried, body.stacks, body.own)
            yield from (f"{pad}    {word} {_used(vs)}" for word, vs in zip(_ENDS, ends, strict=True) if vs)
            yield pad + "}"
        elif op.name in ONCE:
            body = graph.bodies[op.id]
            for inner, ends in zip(body.regions, body.ends, strict=True):
                yield f"{pad}    branch {inner} of loop {graph.regions[inner].loop} {{"
                yield from _block(graph, graph.regions[inner], by_region, pad + "        ")
                yield from [f"{pad}        returns {_used(ends)}"] if ends else []
                yield f"{pad}    }}"
            yield pad + "}"
        elif op.id in graph.nested:
            yield from (f"{pad}    {line}" for line in show(graph.nested[op.id].graph).splitlines())
            yield pad + "}"


def _line(graph: Graph, op: Op, loop: int) -> str:
    words = [*(_typed(graph, v, loop) for v in op.outputs), "=", _quoted(op.name)]
    words += [_used(op.operands)] if op.operands else []
    words += ["effects"] if op.effects else []
    words += [] if op.seconds is None else ["takes", f"{float(op.seconds)!r}s"]
    words += ["holds", *map(_quoted, sorted(op.inner))] if op.inner else []
    body = graph.bodies.get(op.id)
    if body is not None and op.name in ONCE:
        words.append(f"as {body.kind} {{")
    elif body is not None:
        kind = "" if body.kind == SCAN else f" as {body.kind}"
        words.append(f"body {body.region} of loop {body.loop}{kind} {{")
    if (step := graph.nested.get(op.id)) is not None:
        most = f" up to {step.most}" if step.most > step.checkpoints else ""
        kept = f" keeps {step.checkpoints}{most} at {' '.join(map(str, step.rows))}" if step.rows else ""
        words.append(f"steps x{'?' if step.trips is None else step.trips}{kept} {{")
    return " ".join(words)


def _typed(graph: Graph, v: int, home: int) -> str:
    """The text of a value at its maker: `str(value)`, and all facts that do not follow from it."""
    value = graph.values[v]
    trips = f"{value.copies}x" if value.copies != 1 or _trips(graph.loops, value.loop) != 1 else ""
    size = "" if value.bytes == _bytes(value.dtype, value.shape) else f"/{value.bytes}B"
    loop = "" if value.loop == home else f"@{value.loop}"
    label = f" {json.dumps(value.label)}" if value.label else ""
    return f"{value.name}:{trips}{_quoted(value.dtype)}[{','.join(map(str, value.shape))}]{size}{loop}{label}"


def _used(values: Iterable[Any]) -> str:
    return " ".join(f"%{v}" if isinstance(v, int) else "_" for v in values)


def _quoted(name: str) -> str:
    return name if re.fullmatch(_NAME, name) else json.dumps(name).replace(" ", r"\u0020")


def _unquoted(name: str) -> str:
    return json.loads(name) if re.fullmatch(_QUOTED, name) else name


def _bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of an array, None where numpy does not know the dtype."""
    try:
        return math.prod(shape) * np.dtype(dtype).itemsize if _SIZED.fullmatch(dtype) else None
    except TypeError:
        return None


def _trips(loops: Sequence[Loop], loop: int) -> int:
    return 1 if loop == TOP else loops[loop].length * _trips(loops, loops[loop].parent)


def parse(text: str) -> Graph:
    """The graph that a text describes; its ops have no payload.

    Raises `GraphError`, with the number of the line, where the text is malformed.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.strip().startswith("//"):
            reader.number = number
            reader.read(_TOKEN.findall(line))
    return reader.finish()


@dataclass
class _Block:
    """A region while its lines are read, with the kind of its body and the values that a step ends with."""

    region: dict[str, Any]
    side: Side
    expected: int | None = None
    kind: str = SCAN
    once: int | None = None  # the op whose branches stand in this block
    ends: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass
class _Step:
    """A step that is cut on its own while its lines are read."""

    op: int
    loop: Nested
    reader: _Reader


@dataclass
class _Reader:
    """Read line by line; anything that may stand further down, such as the maker of a value, is checked at the end."""

    number: int = 0
    loops: list[Loop] = field(default_factory=lambda: [Loop(TOP, TOP, 1)])
    values: dict[int, Value] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    ops: dict[int, Op] = field(default_factory=dict)
    regions: dict[int, _Block] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    inputs: list[tuple[int, Role]] = field(default_factory=list)
    outputs: list[tuple[int | None, Role]] = field(default_factory=list)
    nested: dict[int, Nested] = field(default_factory=dict)
    step: _Step | None = None

    def __post_init__(self) -> None:
        self.open(_Block({"id": TOP, "loop": TOP, "ops": ()}, Side.FORWARD, 0))

    def open(self, block: _Block) -> None:
        self.blocks.append(block)
        self.regions[block.region["id"]] = block

    def fail(self, what: str, cure: str, number: int = 0) -> NoReturn:
        raise GraphError(message(f"line {number or self.number}", what, cure))

    @property
    def is_open(self) -> bool:
        """Whether a body has not ended."""
        return len(self.blocks) > 1 or self.step is not None

    def read(self, tokens: list[str]) -> None:
        if self.step is not None:
            self.read_step(self.step, tokens)
            return
        block = self.blocks[-1]
        match tokens:
            case [*_] if "=" in tokens:
                self.op(tokens[: tokens.index("=")], tokens[tokens.index("=") + 1 :], block)
            case ["forward:" | "backward:" as side]:
                block.side = Side(side[:-1])
            case ["}"] if len(self.blocks) > 1:
                self.blocks.pop()
            case ["primal" | "cotangent" | "spare" as role, *made]:
                new = self.make(made, None)
                self.inputs += [(v, _ROLES[role]) for v in new if role in _ROLES]
            case ["output" | "gradient" as role, value]:
                self.outputs.append((self.use(value), _ROLES[role]))
            case ["next" | "stacks" | "repeats" | "returns" as end, *values]:
                ids = [self.use(token) for token in values]
                block.ends[_ENDS.get(end, end)] = tuple(ids)
            case ["branch", *_]:
                self.branch(" ".join(tokens), block)
            case _:
                self.loop(" ".join(tokens))

    def read_step(self, step: _Step, tokens: list[str]) -> None:
        """Read a line of a step that is cut on its own, or its end."""
        step.reader.number = self.number
        if tokens != ["}"] or step.reader.is_open:
            step.reader.read(tokens)
            return
        self.nested[step.op] = replace(step.loop, graph=step.reader.finish())
        self.step = None

    def loop(self, line: str) -> None:
        found = _LOOP.fullmatch(line)
        if found is None:
            known = choices(line.split()[0], [*_ROLES, *_ENDS, "spare", "loop"])
            self.fail(f"reads {line!r}: neither an op nor a line of a known name.", f"An op has a `=`. {known}")
        loop, length, parent = (int(x or TOP) for x in found.groups())
        if loop != len(self.loops) or parent >= loop:
            self.fail(f"names loop {loop}, but loop {len(self.loops)} is next.", "Number outer loops first.")
        is_branch = " of " in line
        self.loops.append(Loop(loop, parent, 1 if is_branch else length, length if is_branch else 0))

    def branch(self, line: str, block: _Block) -> None:
        found = _BRANCH.fullmatch(line)
        if found is None or block.once is None:
            self.fail(f"reads {line!r}, which opens no branch.", "Write `branch 3 of loop 2 {` in a block of branches.")
        self.body(int(found[1]), int(found[2]), block.kind, self.ops[block.once])

    def use(self, token: str) -> int | None:
        """The value that a token names, None for a literal."""
        if token == "_":
            return None
        if not re.fullmatch(r"%\d+", token):
            self.fail(f"has {token!r} where a value is read.", "Write a value as %4, a literal as _.")
        self.used.setdefault(int(token[1:]), self.number)
        return int(token[1:])

    def make(self, tokens: Sequence[str], maker: int | None) -> tuple[int, ...]:
        """The values that a line makes, each with the label after it."""
        out: list[int] = []
        for token, label in zip_longest(tokens, tokens[1:], fillvalue=""):
            if out and re.fullmatch(_QUOTED, token):
                continue
            found = _VALUE.fullmatch(token)
            if found is None:
                self.fail(f"has {token!r} where a value is made.", "Write its type: %4:float32[8].")
            value = self.value(found, maker, _unquoted(label) if re.fullmatch(_QUOTED, label) else "")
            self.values[value.id], self.made[value.id] = value, self.number
            out.append(value.id)
        return tuple(out)

    def value(self, found: re.Match[str], maker: int | None, label: str) -> Value:
        v, copies, dtype, dims, size, at = found.groups()
        if int(v) in self.values:
            self.fail(f"makes %{v}, which line {self.made[int(v)]} makes.", "Give each value a number of its own.")
        dtype, shape = _unquoted(dtype), tuple(int(n) for n in dims.split(",") if n)
        size = _bytes(dtype, shape) if size is None else int(size)
        loop = self.blocks[-1].region["loop"] if at is None else int(at)
        if size is None:
            self.fail(f"has the dtype {dtype!r}, whose size is not known.", "Write the bytes: %4:thing[8]/64B.")
        if loop >= len(self.loops):
            self.fail(f"puts %{v} into loop {loop}.", f"Write `loop {loop} x6` further up.")
        copies = _trips(self.loops, loop) if copies is None else int(copies)
        return Value(int(v), shape, dtype, size, copies, loop, maker, label)

    def op(self, made: list[str], call: list[str], block: _Block) -> None:
        number = int(made.pop(0)[1:]) if made and re.fullmatch(r"#\d+", made[0]) else block.expected
        if number is None or number in self.ops or not call:
            self.fail("is no op with a number of its own.", f"Write, say, `#{len(self.ops)} %4:float32[8] = sin %3`.")
        block.expected = number + 1
        name, operands = _unquoted(call[0]), list(takewhile(lambda token: token[0] in "%_", call[1:]))
        notes = _NOTES.fullmatch(" ".join(call[1 + len(operands) :]))
        if notes is None or (notes["region"] is None) == (name == OPEN_LOOP) or (not notes["once"]) == (name in ONCE):
            words = "`effects`, `takes 0.0125s`, `holds sin cos`, `steps x6 {`"
            cure = f"Write nothing, {words}, or, of a loop and only of one, `body 1 of loop 1 {{`."
            self.fail(f"ends with {' '.join(call[1 + len(operands) :])!r}.", cure)
        region, side = block.region["id"], Side.FORWARD if name in _PSEUDO else block.side
        block.region["ops"] += () if name in _PSEUDO else (number,)
        inner = frozenset(map(_unquoted, (notes["inner"] or "").split()))
        reads, outputs = tuple(map(self.use, operands)), self.make(made, number)
        seconds = None if notes["seconds"] is None else self.seconds(notes["seconds"])
        self.ops[number] = Op(number, name, reads, outputs, region, side, bool(notes["effects"]), inner, seconds)
        if name == OPEN_LOOP:
            self.body(int(notes["region"]), int(notes["loop"]), notes["kind"] or SCAN, self.ops[number])
        if name in ONCE:
            self.blocks.append(_Block(dict(block.region, ops=()), side, kind=notes["once"], once=number))
        if notes["trips"]:
            trips, rows = None if notes["trips"] == "?" else int(notes["trips"]), (notes["rows"] or "").split()
            kept, most = int(notes["kept"] or 0), int(notes["most"] or 0)
            loop = Nested(trips, None, checkpoints=kept, rows=tuple(map(int, rows)), most=most)
            self.step = _Step(number, loop, _Reader())

    def seconds(self, figure: str) -> float:
        found = _SECONDS.fullmatch(figure)
        if found is None or math.isinf(float(found[1])):
            self.fail(f"takes {figure!r}.", "Write what one run takes, finite and not negative: takes 0.0125s.")
        return float(found[1])

    def body(self, region: int, loop: int, kind: str, op: Op) -> None:
        if region in self.regions or loop >= len(self.loops):
            self.fail(f"opens body {region} of loop {loop}.", "Give it a new number, and write the loop further up.")
        fields = {"id": region, "loop": loop, "ops": (), "parent": op.region, "holder": op.id, "origin": op.origin}
        self.open(_Block(fields, op.origin, kind=kind))

    def held(self, region: Region, op: Op) -> Body:
        """The body of a region; its op reads the starts first, and makes the ends, then the carried values."""
        block, trips = self.regions[region.id], self.loops[region.loop].length
        carried, stacks, own = (block.ends.get(name, ()) for name in _ENDS.values())
        n = len(carried)
        at_op = op.operands[:n], op.outputs[n : 2 * n], carried, op.outputs[:n]
        return Body(op.id, block.kind, (region.id,), region.loop, trips, *at_op, stacks, own)

    def finish(self) -> Graph:
        if self.is_open:
            self.fail("ends the text inside a body.", "Close it by a line `}`.")
        for v, number in self.used.items():
            if v not in self.values:
                self.fail(f"reads %{v}, which no line makes.", f"Add the op or the input that makes %{v}.", number)
        regions = {i: Region(**block.region) for i, block in self.regions.items()}
        parts = (self.in_order("value", self.values), self.in_order("op", self.ops), self.in_order("body", regions))
        bodies = {r.holder: self.held(r, self.ops[r.holder]) for r in parts[2] if r.holder is not None}
        for op in (op for op in parts[1] if op.name in ONCE):
            own = [r for r in parts[2] if r.holder == op.id]
            ends = tuple(self.regions[r.id].ends.get(_RETURNS, ()) for r in own)
            kind, first = self.regions[own[0].id].kind, own[0].loop
            bodies[op.id] = Body(op.id, kind, tuple(r.id for r in own), first, 1, ends=ends)
        ends = tuple(self.inputs), tuple(self.outputs)
        return Graph(*parts, tuple(self.loops), *ends, bodies=bodies, nested=self.nested)

    def in_order(self, kind: str, items: dict[int, Any]) -> tuple[Any, ...]:
        """The items by number, which must have no gap."""
        for i in range(len(items)):
            if i not in items:
                self.fail(f"ends the text, and {kind} {i} is missing.", f"Number each {kind} without a gap, from 0.")
        return tuple(items[i] for i in range(len(items)))
