"""Write the scan over blocks of rows that takes the place of some equations.

Rows along the first axis are views of the whole array; along another axis each block is sliced out, and its results are
written in place. Sums over rows are added up, in float32 where the parts are narrower. If the number of blocks does not
divide the rows, the last block begins earlier, so that it is full: the rows that it shares with the one before are
computed twice, and added once.

On a mesh each device runs such a scan over rows of its own (`devices`), and what it adds up is added over the devices
behind the scan, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jointcut.partition.program.axes import Joined, Rows
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.jax.devices import Devices
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Var
from jointcut.partition.program.jax.meshes import varying
from jointcut.partition.rewrite.simplify import equations_of
from jointcut.partition.tiles.blocks import Block, asks_for_numbers, for_rows
from jointcut.partition.tiles.inside import SAME


@dataclass(frozen=True)
class Blocks:
    """The blocks of `count` rows: `number` blocks of `size` rows, of which the last may overlap another."""

    count: int
    number: int
    size: int

    @classmethod
    def of(cls, count: int, number: int, needs_even: bool) -> Blocks:
        """Part rows into at most so many blocks of equal size; into fewer, where these must not overlap."""
        if needs_even:
            number = next(n for n in range(min(number, count), 0, -1) if count % n == 0)
        size = -(-count // number)
        return cls(count, -(-count // size), size)

    @property
    def is_even(self) -> bool:
        """Whether no two blocks overlap."""
        return self.number * self.size == self.count

    def start(self, i: Any) -> Any:
        """The first row of block `i`."""
        return i * self.size if self.is_even else jnp.minimum(i * self.size, self.count - self.size)

    def is_new(self, i: Any) -> Any:
        """For each row of block `i`, whether it is in no block before."""
        return self.start(i) + jnp.arange(self.size, dtype=jnp.int32) >= i * self.size


@dataclass
class BlockScan:
    """A scan over blocks, while it is written.

    Attributes:
        eqns: the equations that it runs.
        rows: the places of the rows in their values.
        blocks: the blocks of rows; on a mesh of the rows of one device.
        devices: the devices that have rows of their own; None if the rows are those of all.
        consts, carry, xs: the operands, each with its variable in the body.
        ends, ys: the results, as variables of the body, each with the result.
        front, back: the equations around the scan, which bring arrays to blocks, and back.
        body: the equations of one block.
        totals: the sums of one device, each with the sum over all.
        number, start: the number of the block, and of its first row, in the body.
        first: the number of this row among the rows of all devices.
    """

    eqns: Sequence[Equation]
    rows: Rows
    blocks: Blocks
    devices: Devices | None = None
    consts: list[tuple[Atom, Var]] = field(default_factory=list)
    carry: list[tuple[Atom, Var]] = field(default_factory=list)
    xs: list[tuple[Atom, Var]] = field(default_factory=list)
    ends: list[tuple[Atom, Var]] = field(default_factory=list)
    ys: list[tuple[Atom, Var]] = field(default_factory=list)
    front: list[Equation] = field(default_factory=list)
    back: list[Equation] = field(default_factory=list)
    body: list[Equation] = field(default_factory=list)
    totals: list[tuple[Var, Var]] = field(default_factory=list)
    number: Any = None
    start: Any = None
    first: Any = None

    def written(self, stacks: dict[Var, Var], wanted: Iterable[Var], handed: Iterable[Var]) -> list[Equation]:
        """The equations that take the place of the given ones.

        `stacks` has the values that another scan leaves block by block, and gets the `handed` ones, which this scan
        leaves so. The `wanted` values are left whole.
        """
        known, wanted = self.begun(stacks), dict.fromkeys(wanted)
        for eqn in self.eqns:
            self.write(eqn, known)
            for v in eqn.outvars:
                if v in wanted and isinstance(self.rows.place(v), Joined):  # the part of one sum at a time
                    self.leave(v, known[v], None)
                    del wanted[v]
        for v in handed:
            stacks[v] = self.stacked(known[v])
        for v in wanted:
            self.leave(v, known[v], stacks.get(v))
        return self.scanned()

    def adding(self, total: Var, part: Var, axis: int, result: Var) -> list[Equation]:
        """The equations that take the place of the given ones, and add the rows of a part to a total, in place."""
        known = self.begun({})
        for eqn in self.eqns:
            self.write(eqn, known)
        before = self.carried(total, result)

        def add(total: Any, part: Any, start: Any) -> Any:
            rows = lax.dynamic_slice_in_dim(total, start, self.blocks.size, axis)
            return lax.dynamic_update_slice_in_dim(total, rows + part, start, axis)

        (after,) = self.traced(self.body, add, before, known[part], self.start)
        self.ends[-1] = (after, result)
        return self.scanned()

    def begun(self, stacks: dict[Var, Var]) -> dict[Var, Atom]:
        """Number the blocks, and name the values that the equations read as one block sees them."""
        self.number = self.counted()
        (self.start,) = self.traced(self.body, self.blocks.start, self.number)
        self.first = self.start if self.devices is None else self.counted_on(self.devices)
        return self.read(stacks)

    def counted_on(self, devices: Devices) -> Any:
        """The number of a block's first row among the rows of all devices."""
        if not asks_for_numbers(self.eqns, self.rows):
            return self.start
        with devices.inside():
            eqns, (before,) = equations_of(lambda: lax.axis_index(devices.axes) * self.blocks.count, [])
        self.front += eqns
        (first,) = self.traced(self.body, lambda before, start: before + start, self.constant(before), self.start)
        return first

    def scanned(self) -> list[Equation]:
        """The scan, with the equations around it."""
        variables = [v for part in (self.consts, self.carry, self.xs) for _, v in part]
        program = jaxprs.build(variables, [v for v, _ in (*self.ends, *self.ys)], self.body)
        like = _like(self.blocks.number).replace(source_info=self.eqns[0].source_info, ctx=self.eqns[0].ctx)
        consts, carry, xs = ([v for v, _ in part] for part in (self.consts, self.carry, self.xs))
        scan = jaxprs.scan(like, program, consts, carry, xs, [v for _, v in (*self.ends, *self.ys)])
        return [*self.front, scan, *self.added(), *self.back]

    def added(self) -> list[Equation]:
        """The equations that add up the sums of all devices, all at once, and bring them to their types."""
        if self.devices is None or not self.totals:
            return []
        axes, narrow, names = self.devices.axes, list[Equation](), dict[Any, Var]()
        with self.devices.inside():
            eqns, sums = equations_of(lambda *xs: lax.psum(xs, axes), [end for end, _ in self.totals])
        for total, (_, v) in zip(sums, self.totals, strict=True):
            wanted: Any = v.aval
            ends = [total]
            if total.aval.dtype != wanted.dtype:
                ends = self.traced(narrow, lambda x, dtype=wanted.dtype: x.astype(dtype), total)
            names[ends[0]] = v
        return [jaxprs.rebound(e, e.invars, [names.get(v, v) for v in e.outvars]) for e in (*eqns, *narrow)]

    # ---------------------------------------------------------------------------------------------- what a block reads

    def counted(self) -> Var:
        """Number the blocks."""
        (numbers,) = self.traced(self.front, lambda: jnp.arange(self.blocks.number, dtype=jnp.int32))
        return self.stepped(numbers)

    def read(self, stacks: dict[Var, Var]) -> dict[Var, Atom]:
        """Name the values that the equations read as one block sees them."""
        made = {v for eqn in self.eqns for v in eqn.outvars}
        read = dict.fromkeys(jaxprs.variables(v for eqn in self.eqns for v in eqn.invars))
        return {v: self.taken(v, stacks) for v in read if v not in made}

    def taken(self, v: Var, stacks: dict[Var, Var]) -> Var:
        """Take the block of a value, or the whole value if it has no rows."""
        axis, size = self.axis(v), self.blocks.size
        if axis is None:
            return self.constant(v)
        if v in stacks:
            return self.stepped(stacks[v])
        if axis == 0 and self.blocks.is_even:
            (stack,) = self.traced(self.front, lambda x: x.reshape(-1, size, *x.shape[1:]), v)
            return self.stepped(stack)
        (block,) = self.traced(
            self.body,
            lambda x, start: lax.dynamic_slice_in_dim(x, start, size, axis),
            self.constant(v),
            self.start,
        )
        return block

    def axis(self, v: Var) -> int | None:
        """The axis of a value's rows; None if it has none."""
        place = self.rows.place(v)
        return place if isinstance(place, int) else None

    def constant(self, v: Atom) -> Var:
        """Hand an array to all blocks."""
        self.consts.append((v, jaxprs.fresh(v.aval)))
        return self.consts[-1][1]

    def stepped(self, stack: Atom) -> Var:
        """Hand each block its part of a stack."""
        self.xs.append((stack, jaxprs.fresh(abstract.unstacked(stack.aval))))
        return self.xs[-1][1]

    # ---------------------------------------------------------------------------------------------- what a block does

    def write(self, eqn: Equation, known: dict[Var, Atom]) -> None:
        """Write an equation for one block, and name its results."""
        place = self.rows.place(eqn.outvars[0])
        names: dict[Any, Atom] = {**known}
        is_scattered = isinstance(place, Joined) and place.starts
        if isinstance(place, Joined) and not self.blocks.is_even and id(eqn) not in self.rows.inside:
            names = names | {v: self.masked(v, known[v]) for v in self.with_rows(eqn)}
        if is_scattered:  # each block adds to the result of the blocks before
            names = names | {eqn.invars[0]: self.carried(self.begins(eqn.invars[0]), eqn.outvars[0])}
        eqns, after = for_rows([eqn], self.rows, Block(self.blocks.size, self.first), names)
        self.body += eqns
        known.update((v, after[v]) for v in eqn.outvars)
        if is_scattered:
            self.ends[-1] = (known[eqn.outvars[0]], self.total(eqn.outvars[0]))

    def begins(self, start: Atom) -> Atom:
        """The value that a sum begins with: on one device of several, and zeros on the others."""
        if self.devices is None:
            return start
        axes = self.devices.axes
        with self.devices.inside():
            eqns, (own,) = equations_of(lambda x: jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)), [start])
        self.front += eqns
        return own

    def total(self, v: Var) -> Var:
        """The variable of a sum of one device, where it is to be added up over several."""
        if self.devices is None:
            return v
        self.totals.append((jaxprs.fresh(v.aval), v))
        return self.totals[-1][0]

    def with_rows(self, eqn: Equation) -> list[Var]:
        """The operands that are read by rows."""
        return [v for v in dict.fromkeys(jaxprs.variables(eqn.invars)) if self.axis(v) is not None]

    def masked(self, v: Var, block: Atom) -> Atom:
        """A block with zeros in the rows of an earlier block."""
        axis = self.axis(v)
        assert axis is not None, "it has rows"

        def zeroed(x: Any, i: Any) -> Any:
            shape = [1] * x.ndim
            shape[axis] = self.blocks.size
            return jnp.where(self.blocks.is_new(i).reshape(shape), x, jnp.zeros_like(x))

        return self.traced(self.body, zeroed, block, self.number)[0] if _adds(v.aval) else block

    # --------------------------------------------------------------------------------------------- what a block leaves

    def leave(self, v: Any, inner: Atom, stack: Var | None) -> None:
        """Leave a value whole: a sum is added up, and the blocks of other values are put together."""
        place, blocks = self.rows.place(v), self.blocks
        if place == SAME:
            self.carried(self.zeros(v.aval), v)
            self.ends[-1] = (inner, v)
        elif isinstance(place, Joined):
            self.add(v, inner)
        elif place == 0 and blocks.is_even:
            (whole,) = self.traced(self.back, lambda x: x.reshape(v.aval.shape), stack or self.stacked(inner))
            self.back = _ending(self.back, whole, v)
        else:
            assert isinstance(place, int), "a value has rows, or is a sum over rows"
            before = self.carried(self.zeros(v.aval), v)
            (after,) = self.traced(
                self.body,
                lambda x, part, start: lax.dynamic_update_slice_in_dim(x, part, start, place),
                before,
                inner,
                self.start,
            )
            self.ends[-1] = (after, v)

    def add(self, v: Any, part: Atom) -> None:
        """Add up the parts of a sum."""
        if any(end is v for _, end in (*self.ends, *self.totals)):
            return
        wide = jnp.dtype(jnp.float32) if v.aval.dtype in (jnp.bfloat16, jnp.float16) else v.aval.dtype
        before = self.carried(self.zeros(v.aval.update(dtype=wide)), v)
        (after,) = self.traced(self.body, lambda total, x: total + x.astype(wide), before, part)
        self.ends[-1] = (after, v)
        if self.devices is not None:
            self.totals.append((jaxprs.fresh(after.aval), v))
            self.ends[-1] = (after, self.totals[-1][0])
        elif wide != v.aval.dtype:
            end = jaxprs.fresh(after.aval)
            self.ends[-1] = (after, end)
            (narrow,) = self.traced(self.back, lambda x: x.astype(v.aval.dtype), end)
            self.back = _ending(self.back, narrow, v)

    def zeros(self, aval: Any) -> Atom:
        """Zeros of a type, made before the scan."""
        return self.traced(self.front, lambda: abstract.full(aval.update(weak_type=False), 0))[0]

    def carried(self, start: Any, end: Var) -> Var:
        """Carry a value from block to block. The value after a block is set later."""
        if varying(end.aval) - varying(start.aval):
            (start,) = self.traced(self.front, lambda x: abstract.typed(x, end.aval), start)
        before = jaxprs.fresh(start.aval.update(weak_type=False))
        self.carry.append((start, before))
        self.ends.append((before, end))
        return before

    def stacked(self, inner: Atom) -> Var:
        """Stack the values of all blocks."""
        self.ys.append((inner, jaxprs.fresh(abstract.stacked(inner.aval, [self.blocks.number]))))
        return self.ys[-1][1]

    def traced(self, into: list[Equation], function: Callable[..., Any], *atoms: Atom) -> list[Any]:
        """Write a function's equations; returns its results."""
        eqns, results = equations_of(function, atoms)
        into += eqns
        return results


def _adds(aval: Any) -> bool:
    """Whether numbers of a type are added up."""
    return jnp.issubdtype(aval.dtype, jnp.number)


def _ending(eqns: list[Equation], result: Var, v: Var) -> list[Equation]:
    """Equations with another name for their last result."""
    *before, last = eqns
    return [*before, jaxprs.rebound(last, last.invars, [v if end is result else end for end in last.outvars])]


def _like(length: int) -> Equation:
    """A scan of so many steps."""
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c, None), x, None, length=length)[0])(0.0)
    return jaxprs.opened(closed)[0].eqns[0]
