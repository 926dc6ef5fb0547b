"""Hold the joint program as ops and values.

A `Graph` is flat: the bodies of paired loops lie in the same list of ops as the rest, each in its own *region*. A value
that one loop hands to another step by step is one value, whether it is stacked in between or not. So a cut through the
graph is a cut through all loops at once. Ids are dense and follow program order; an op's equation is an opaque payload
that only `loops` and `emit` open. An op whose program lies in regions has a `Body`.

Three lines of graph text (see `text`) for `loss = sum(sin(x * w))`::

    %2:f32[8] = mul %0 %1
    %3:f32[8] = sin %2
    %4:f32[] = reduce_sum %3
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jointcut.partition.program.bodies import Body, Nested
from jointcut.partition.program.jax.abstract import is_plain
from jointcut.partition.program.jax.user_source import scope_of
from jointcut.partition.program.notebook import Shown
from jointcut.partition.program.places import line_of
from jointcut.partition.program.roles import Move, Role, Side, Tile, UpdateOps

TOP = 0

STEP = "step"  # one step's slice of a stacked value
LITERAL = "literal"  # a constant written in the program
OPEN_LOOP = "loop"  # an op whose body is a region of this graph; a scan that stays closed is called "scan"
BRANCHES = "branches"  # a conditional whose branches are regions of this graph; a closed one is called "cond"
SHARDS = "shards"  # a `jax.shard_map` whose program is a region of this graph; values in it are values of one device

#: Ops whose regions run at most once, and all ops whose bodies are regions of the graph.
ONCE = frozenset({BRANCHES, SHARDS})
OPEN = ONCE | {OPEN_LOOP}


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the joint program.

    Attributes:
        id: its place among the values of the graph.
        shape, dtype: the type of one copy.
        bytes: the size of one copy; of a value in parts on several devices, the size of one part.
        copies: the trips of the loops around it: saving it for the backward keeps `saved_bytes`.
        loop: id of the loop in whose steps it lives, `TOP` outside all.
        maker: id of the op that computes it, None for an input of the program.
        label: the user's name for it, if it is an input; or a text, such as where its rows are (`tiles/apart`).
        payload: its type in JAX; None where the graph was read from text.
        parts: how many parts the value has on the devices of a mesh.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    copies: int = 1
    loop: int = TOP
    maker: int | None = None
    label: str = ""
    payload: Any = field(default=None, compare=False, repr=False)
    parts: int = field(default=1, compare=False)

    @property
    def name(self) -> str:
        """The value's name in graph text."""
        return f"%{self.id}"

    @property
    def saved_bytes(self) -> int:
        """Bytes that stay alive between the halves if this value is saved: one copy per trip."""
        return self.bytes * self.copies

    def __str__(self) -> str:
        """Name, dtype and shape, with the trips of its loops in front."""
        trips = f"{self.copies}x" if self.copies != 1 else ""
        return f"{self.name}:{trips}{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One equation of the joint program, or a pseudo-op (`step`, `literal`) that costs nothing.

    Attributes:
        id: its place among the ops of the graph.
        name: the name of its primitive, or `step` or `literal`.
        operands: ids of the values it reads, in the equation's own order, with None for a literal.
        outputs: ids of the values it makes.
        region: id of the region in which it runs.
        origin: the phase in which it was traced.
        effects: whether running it is seen from outside, so that it must happen once.
        inner: the primitives inside it, where the cut does not look.
        seconds: the time of one run, if the text gives it; else the cost model prices it.
        payload: its equation; None where the graph was read from text.
        inputs: ids of the values it reads, each once.
    """

    id: int
    name: str
    operands: tuple[int | None, ...]
    outputs: tuple[int, ...]
    region: int = TOP
    origin: Side = Side.FORWARD
    effects: bool = False
    inner: frozenset[str] = frozenset()
    seconds: float | None = None
    payload: Any = field(default=None, compare=False, repr=False)
    inputs: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(dict.fromkeys(v for v in self.operands if v is not None)))

    @property
    def primitive(self) -> str:
        """The name of its primitive, also for an op whose programs are in regions."""
        return self.payload.primitive.name if self.name in ONCE and self.payload is not None else self.name

    @property
    def scope(self) -> str:
        """The name stack under which it was traced."""
        return "" if self.payload is None or self.name == LITERAL else scope_of(self.payload)

    @property
    def source(self) -> str:
        """The line of the user's code that made it."""
        return "" if self.payload is None or self.name == LITERAL else line_of(self.payload)


@dataclass(frozen=True, slots=True)
class Loop:
    """Scans that run step by step together: one or more forward scans, and the backward scans that read them.

    A loop may also be a body of the forward that runs at most once, such as a branch, with the bodies of the backward
    that run where it ran. Such a loop has one step, and its values have no axis for it. `rivals` is then the number of
    bodies of which one runs, itself included; it is 0 for a real loop.
    """

    id: int
    parent: int
    length: int
    rivals: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A list of ops that run in order: the whole program, or one that an op holds, its `holder`.

    `names` maps the variables of its jaxpr to value ids (or to literals).
    """

    id: int
    loop: int
    parent: int | None = None
    holder: int | None = None
    origin: Side = Side.FORWARD
    ops: tuple[int, ...] = ()
    names: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Form:
    """A cheaper form of a value: the backward makes the value again from another one, with the same bits.

    Attributes:
        kind: the way, in words, such as "a mask as bits".
        value: id of the value that the backward would read otherwise.
        source: id of the value that is kept for it, or kept anyway.
        bytes_less: how many fewer bytes are kept; if forms only pay together, the first has the whole saving.
    """

    kind: str
    value: int
    source: int
    bytes_less: int


def lengths_between(loops: Sequence[Loop], home: int, loop: int) -> list[int]:
    """The lengths of a loop and of the loops around it, up to another loop, which is left out."""
    lengths: list[int] = []
    while home not in (loop, TOP):
        lengths[:0] = [] if loops[home].rivals else [loops[home].length]
        home = loops[home].parent
    return lengths


@dataclass(frozen=True)
class Graph(Shown):
    """A joint program: values, ops, regions and loops, with the roles of its inputs and outputs.

    Attributes:
        values, ops, regions, loops: each at the place that is its id.
        inputs: ids of the values that enter, with their roles.
        outputs: ids of the values that leave, with their roles; None where an output is a literal of the program.
        literals: the outputs that are literals.
        bodies: the programs that ops hold, by op id, in the order of their regions.
        nested: the steps that are cut on their own, by the id of the op that runs them.
        forms: the cheaper forms of values that the backward reads.
        updates: the ops with which parameters are updated.
        tiles: the rows that run block by block; see `Roles`.
        devices: how many devices run it together; bytes and seconds are those of one.
        moves: what they exchange on automatic axes where ops of the forward run again, as far as it is foreseen.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...]
    loops: tuple[Loop, ...]
    inputs: tuple[tuple[int, Role], ...]
    outputs: tuple[tuple[int | None, Role], ...]
    literals: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    bodies: Mapping[int, Body] = field(default_factory=dict, hash=False)
    nested: Mapping[int, Nested] = field(default_factory=dict, hash=False)
    forms: tuple[Form, ...] = field(default=(), compare=False)
    updates: tuple[UpdateOps, ...] = field(default=(), compare=False)
    tiles: tuple[Tile, ...] = field(default=(), compare=False)
    devices: int = field(default=1, compare=False)
    moves: tuple[Move, ...] = field(default=(), compare=False)

    @property
    def bare(self) -> Graph:
        """The same program without JAX's objects, labels and prices: it identifies the program and holds no array."""
        return replace(
            self,
            values=tuple(replace(v, label="", payload=None) for v in self.values),
            ops=tuple(replace(op, seconds=None, payload=None) for op in self.ops),
            regions=tuple(replace(region, names={}) for region in self.regions),
            literals=(),
            bodies={i: replace(body, repeated=(), inside=None) for i, body in self.bodies.items()},
            nested={i: replace(step, graph=step.graph.bare, plan=None) for i, step in self.nested.items()},
        )

    def role_inputs(self, role: Role) -> tuple[int, ...]:
        """Ids of the inputs that play a role, in order."""
        return tuple(v for v, r in self.inputs if r is role)

    def role_outputs(self, role: Role) -> tuple[int | None, ...]:
        """Ids of the outputs that play a role, in order."""
        return tuple(v for v, r in self.outputs if r is role)

    def results(self, role: Role) -> frozenset[int]:
        """Ids of the values that leave in a role, without literals."""
        return frozenset(v for v, r in self.outputs if r is role and v is not None)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The ops that read each value, in order; by value."""
        out: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for v in op.inputs:
                out[v].append(op.id)
        return tuple(map(tuple, out))

    @cached_property
    def arrays(self) -> frozenset[int]:
        """The values that are arrays in memory: no literals, references or random keys."""
        literals = {v for op in self.ops if op.name == LITERAL for v in op.outputs}
        plain = (v.id for v in self.values if v.payload is None or is_plain(v.payload))
        return frozenset(plain) - literals

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """Each loop with the loops around it, by loop."""
        out: list[frozenset[int]] = []
        for loop in self.loops:
            out.append(frozenset({loop.id}) | (out[loop.parent] if loop.id != TOP else frozenset()))
        return tuple(out)

    @cached_property
    def trips(self) -> tuple[int, ...]:
        """How often the body of each loop runs in all, with the loops around it; by loop."""
        out: list[int] = []
        for loop in self.loops:
            out.append(1 if loop.id == TOP else out[loop.parent] * loop.length)
        return tuple(out)

    @cached_property
    def once(self) -> frozenset[int]:
        """The loops whose one body runs exactly once: the top of the program, and programs of `jax.shard_map` in it."""
        found = {TOP}
        for loop in self.loops:
            found |= {loop.id} if loop.rivals == 1 and loop.parent in found else set()
        return frozenset(found)

    @cached_property
    def rivals(self) -> tuple[int, ...]:
        """Of how many values one waits, by their loop: its rivals, times those of the loops around it."""
        out: list[int] = []
        for loop in self.loops:
            out.append(1 if loop.id == TOP else out[loop.parent] * max(loop.rivals, 1))
        return tuple(out)

    def lengths(self, v: int, loop: int) -> list[int]:
        """The lengths of the loops between a value and a loop around its own: the axes of its stack as seen there."""
        return lengths_between(self.loops, self.values[v].loop, loop)

    def branch_of(self, v: int, loop: int) -> int | None:
        """The outermost branch between a value and a loop around its own, as the loop that stands for it."""
        home, found = self.values[v].loop, None
        while home not in (loop, TOP):
            found = home if self.loops[home].rivals else found
            home = self.loops[home].parent
        return found

    @cached_property
    def around(self) -> tuple[frozenset[int], ...]:
        """Each region with the regions around it, by region."""
        out: list[frozenset[int]] = []
        for region in self.regions:
            out.append(frozenset({region.id}) | (frozenset() if region.parent is None else out[region.parent]))
        return tuple(out)

    @cached_property
    def moves_of(self) -> dict[int, list[Move]]:
        """The moves of each op that has some; by op."""
        out: dict[int, list[Move]] = {}
        for move in self.moves:
            out.setdefault(move.op, []).append(move)
        return out

    def parts_of(self, op: Op) -> int:
        """Among how many devices the work of an op is divided."""
        return max((self.values[v].parts for v in (*op.inputs, *op.outputs)), default=1)

    def maker_of(self, value_id: int) -> Op | None:
        """The op that computes a value, None for an input."""
        maker = self.values[value_id].maker
        return None if maker is None else self.ops[maker]

    def made_from(self, value_id: int) -> tuple[int, ...]:
        """The values that the op which computes a value reads; none for an input."""
        maker = self.values[value_id].maker
        return () if maker is None else self.ops[maker].inputs

    def behind(self, op_id: int) -> list[int]:
        """The ops that an op needs: those that compute its operands, and the one that holds its region."""
        op = self.ops[op_id]
        found = (*(self.values[v].maker for v in op.inputs), self.regions[op.region].holder)
        return [i for i in found if i is not None]

    @cached_property
    def _origins(self) -> dict[int, tuple[str, str]]:
        return {}

    def origin_of(self, op: Op) -> tuple[str, str]:
        """The scope and the source line of an op, looked up once."""
        if op.id not in self._origins:
            self._origins[op.id] = op.scope, op.source
        return self._origins[op.id]

    def holder_of(self, region_id: int) -> Op:
        """The op that holds a region. Raises `ValueError` for the top of the program, which no op holds."""
        holder = self.regions[region_id].holder
        if holder is None:
            raise ValueError(f"region {region_id} is no body of an op")
        return self.ops[holder]

    def whole(self, value_id: int) -> int:
        """The stack that a step was taken from; for any other value, the value itself."""
        maker = self.values[value_id].maker
        return value_id if maker is None or self.ops[maker].name != STEP else self.ops[maker].inputs[0]

    def is_packed(self, form: Form, values: Container[int]) -> bool:
        """Whether a form keeps one of these values itself, in another dtype."""
        maker = self.maker_of(form.source)
        return form.value in values and maker is not None and form.value in maker.inputs

    def outermost(self, value_id: int) -> int:
        """The outermost stack of a step of a stack; for any other value, the value itself."""
        while (stack := self.whole(value_id)) != value_id:
            value_id = stack
        return value_id

    def is_in_steps(self, op: Op) -> bool:
        """Whether an op runs in the steps of a loop."""
        return any(not self.loops[i].rivals for i in self.ancestors[self.loop_of(op)] - {TOP})

    def loops_in(self, op_id: int) -> frozenset[int]:
        """The loops in whose steps the regions of an op run."""
        return frozenset(self.regions[r].loop for r in self.bodies[op_id].regions)

    def loop_of(self, op: Op) -> int:
        """The loop in whose steps an op runs."""
        return self.regions[op.region].loop

    def within(self, *regions: int) -> frozenset[int]:
        """Some regions and the regions inside them."""
        return frozenset(r.id for r in self.regions if not self.around[r.id].isdisjoint(regions))

    def where(self, value_id: int) -> str:
        """A text that tells the user which value is meant: its name, type, op and source line, or its argument path."""
        value = self.values[value_id]
        if value.maker is None:
            return f"{value} ({value.label or 'an input'})"
        op = self.ops[value.maker]
        return f"{value} ({op.name}{' at ' + op.source if op.source else ''})"
