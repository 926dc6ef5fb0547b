"""Read a scan and write one: whole, or in segments, forward and again in the backward.

If a loop runs in segments (`steps.Keep` and `steps.Segments`), programs take the place of its two scan equations. To
*sweep* is to run a forward scan segment by segment and note the carry at the start of each. To *unwind* is to run each
segment again from there, and then the backward scan's own steps, in the backward scan's order. A loop of L steps in
segments of k keeps L/k carries and k residuals. Several lengths divide each segment again, for one more run each, as in
Griewank and Walther's treeverse (TOMS 2000), though with segments of one length.

Each scan keeps its body, its direction, its name stack and its source line. A segment of a stack is sliced out of the
whole. If the segments leave a rest, it becomes one shorter segment at the end of the stacks. The last steps of the
forward may be in no segment: it stacks their residuals, and the backward reads them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jointcut.partition.program.bodies import Apart, Carry, DividingKind, Inside, Operands
from jointcut.partition.program.jax import abstract, barriers, jaxprs, runtime
from jointcut.partition.rewrite.simplify import renamed

Segment = Callable[["_Place", Any, list[Any], list[Any]], tuple[list[Any], list[Any], list[Any]]]


class Scan(DividingKind):
    """Read and write `lax.scan`."""

    def inside(self, eqn: Any) -> Inside:
        """The body of a scan."""
        layout = jaxprs.scan_layout(eqn)
        a, b = layout.num_consts, layout.num_consts + layout.num_carry
        variables, ends = layout.body.invars, layout.body.outvars
        results, n = eqn.outvars, layout.num_carry
        slices = barriers.own_slices(layout.body)
        return Inside(
            layout.length,
            layout.body,
            layout.body_consts,
            tuple(zip(variables[:a], eqn.invars[:a], strict=True)),
            tuple(map(Carry, variables[a:b], eqn.invars[a:b], ends[:n], results[:n], map(slices.get, variables[a:b]))),
            tuple(zip(variables[b:], eqn.invars[b:], strict=True)),
            tuple(zip(ends[n:], results[n:], strict=True)),
        )

    def equation(self, like: Any, program: Any, operands: Operands, results: Sequence[Any]) -> Any:
        """A scan in the direction of another, with another body."""
        return jaxprs.scan(like, program, *operands, results)

    def sweep(self, eqn: Any, kept: Sequence[int], length: int, apart: Apart | None = None) -> tuple[Any, list[Any]]:
        """The program that runs a forward scan in segments, in its place, and the atoms that it reads."""
        walk, (read, carry) = _Walk.of(eqn), operands_of(eqn)
        place, end = _places(eqn, 0 if apart is None else apart.steps)
        further = ([], []) if apart is None else operands_of(apart.eqn)[0]

        def program(read: Any, further: Any, carry: list[Any]) -> Any:
            carry, starts, rest, pieces = _sweep(walk, kept, place, length, read, carry)
            if apart is None:
                return *carry, *_joined(pieces), *starts, *rest
            carry, ys = _Walk.of(apart.eqn).run(end, further, carry)
            shared = [ys[i] for i in apart.same]
            pieces = [shared, *pieces] if eqn.params["reverse"] else [*pieces, shared]
            tails = [y for i, y in enumerate(ys) if i not in apart.same]
            return *carry, *_joined(pieces), *starts, *rest, *tails

        groups = [read, further, carry]
        return traced(program, *jax.tree.map(struct_of, groups))[0], jax.tree.leaves(groups)

    def unwind(
        self, reruns: Sequence[Any], back: Any, fed: Sequence[int | None], lengths: Sequence[int], last: int = 0
    ) -> tuple[Any, list[Any]]:
        """The program that runs a backward scan in segments, in its place, and the atoms that it reads."""
        pair = _Pair(tuple(map(_Walk.of, reruns)), _Walk.of(back, fed), tuple(i for i in fed if i is not None))
        (consts, stacks), carry = operands_of(back)
        other = [v for v, stack in zip(stacks, fed, strict=True) if stack is None]
        groups = [[operands_of(eqn)[0] for eqn in reruns], (consts, other), carry]
        place, end = _places(reruns[-1], last)
        given = _given(reruns, lengths[0], place.steps, last)

        def program(again: Any, read: Any, carry: Any, starts: Any, rest: Any, tails: Any) -> Any:
            def segments(carry: list[Any]) -> Any:
                return _unwind(pair, lengths, place, (again, read), carry, starts, rest)

            def steps(carry: list[Any]) -> Any:
                carry, ys = pair.backward.run(end, read, carry, [tails[i] for i in pair.fed])
                return carry, [ys]

            parts = [segments, steps] if last else [segments]
            carry, pieces = _in_turn(back, parts[::-1] if reruns[-1].params["reverse"] else parts, carry)
            return [*carry, *_joined(pieces)]

        return traced(program, *jax.tree.map(struct_of, groups), *given)[0], jax.tree.leaves(groups)

    def parts(
        self, forward: Any, parts: Sequence[Any], given: Sequence[Sequence[bool]], apart: Sequence[bool], last: int
    ) -> tuple[Any, list[Any]]:
        """The program that runs a scan in two parts, in its place, and the atoms that it reads."""
        places, fed = _places(forward, last), [[0 if own else None for own in row] for row in given]
        walks = [_Walk.of(eqn, row) for eqn, row in zip(parts, fed, strict=True)]
        reads, pieces = [], []
        for eqn, row, place in zip(parts, given, places, strict=True):
            (consts, stacks), _ = operands_of(eqn)
            reads.append((consts, [v for v, own in zip(stacks, row, strict=True) if not own]))
            steps = [abstract.unstacked(v.aval) for v, own in zip(stacks, row, strict=True) if own]
            pieces.append([abstract.struct(abstract.stacked(aval, [place.steps])) for aval in steps])
        groups = [reads, operands_of(parts[0])[1]]

        def program(reads: Any, carry: list[Any], pieces: Any) -> Any:
            out: dict[int, list[Any]] = {}

            def part(i: int) -> Callable[..., Any]:
                def run(carry: list[Any]) -> Any:
                    carry, out[i] = walks[i].run(places[i], reads[i], carry, pieces[i])
                    return carry, [[y for y, is_apart in zip(out[i], apart, strict=True) if not is_apart]]

                return run

            order = [part(1), part(0)] if forward.params["reverse"] else [part(0), part(1)]
            carry, joined = _in_turn(parts[0], order, carry)
            return *carry, *_joined(joined), *(y for i in (0, 1) for y, own in zip(out[i], apart, strict=True) if own)

        return traced(program, *jax.tree.map(struct_of, groups), pieces)[0], jax.tree.leaves(groups)


def operands_of(eqn: Any) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
    """The operands that a scan reads whole, and the stacks that it slices; then the carries."""
    consts, carry, xs = jaxprs.scan_layout(eqn).parts(eqn.invars)
    return (consts, xs), carry


def _places(forward: Any, last: int) -> tuple[_Place, _Place]:
    """The places of a forward scan's steps: the steps in segments, and the `last` steps, which are in none."""
    steps = forward.params["length"] - last
    if forward.params["reverse"]:
        return _Place(np.uint32(last), steps), _Place(np.uint32(0), last)
    return _Place(np.uint32(0), steps), _Place(np.uint32(steps), last)


def _given(reruns: Sequence[Any], length: int, steps: int, last: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The types that a forward of `steps` steps in segments hands over: the starts, a rest's start, the tails."""
    count, rest = divmod(steps, length)
    carries = [v.aval for v in operands_of(reruns[0])[1]]
    stacks = [v.aval for v in reruns[-1].outvars[len(operands_of(reruns[-1])[1]) :]] if last else []
    starts = [abstract.struct(abstract.stacked(aval, [count])) for aval in carries]
    tails = [abstract.struct(abstract.stacked(abstract.unstacked(aval), [last])) for aval in stacks]
    return starts, [abstract.struct(aval) for aval in carries] if rest else [], tails


# --------------------------------------------------------------------------------------------- how they are traced


@dataclass(frozen=True)
class _Place:
    """A segment's place in the whole loop: its first step, which may be a tracer, and its number of steps."""

    first: Any
    steps: int


@dataclass(frozen=True)
class Steps:
    """A scan of any number of steps, in the direction and under the name of an equation."""

    like: Any
    body: Any

    def run(self, length: int, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Any:
        """Run it on values or tracers; return the lists of final carries and of stacks."""
        params = self.like.params
        like = self.like.replace(params=dict(params, length=length, unroll=min(params["unroll"], length)))
        a, b, c = ([jaxprs.fresh(jax.typeof(x)) for x in group] for group in (consts, carry, xs))
        avals = [v.aval for v in jaxprs.opened(self.body)[0].outvars]
        count = len(carry)
        outvars = [jaxprs.fresh(aval) for aval in avals[:count]]
        outvars += [jaxprs.fresh(abstract.stacked(aval, [length])) for aval in avals[count:]]
        eqn = jaxprs.scan(like, self.body, a, b, c, outvars)
        results = runtime.evaluate(jaxprs.build([*a, *b, *c], outvars, [eqn]), *consts, *carry, *xs)
        return results[:count], results[count:]


@dataclass(frozen=True)
class _Walk:
    """A scan over some steps of a loop. It picks the steps out of whole stacks, because a slice would be a copy."""

    scan: Steps

    @classmethod
    def of(cls, like: Any, fed: Sequence[int | None] = ()) -> _Walk:
        """Walk as a scan equation does.

        `fed` is None for each scanned operand that is a whole stack; by default all are. Other operands are given for
        the steps of the walk only.
        """
        layout = jaxprs.scan_layout(like)
        inner, consts = layout.body, layout.num_consts
        last = consts + layout.num_carry
        xs = inner.invars[last:]
        picked = [v for v, given in zip(xs, fed or [None] * len(xs), strict=True) if given is None]
        wholes = [jaxprs.fresh(abstract.stacked(v.aval, [like.params["length"]])) for v in picked]
        number = jaxprs.fresh(jax.typeof(np.uint32(0)))
        closed, _ = traced(lambda i, *stacks: [abstract.row(x, i) for x in stacks], *map(struct_of, [number, *wholes]))
        pick, _ = jaxprs.opened(closed)
        first, slices = renamed(pick, dict(zip(pick.invars, [number, *wholes], strict=True)))
        eqns, ends = renamed(inner, dict(zip(picked, slices, strict=True)))
        given = [v for v in xs if v not in picked]
        invars = [*inner.invars[:consts], *wholes, *inner.invars[consts:last], number, *given]
        return cls(Steps(like, jaxprs.build(invars, ends, [*first, *eqns])))

    def run(self, place: _Place, read: Any, carry: list[Any], given: Sequence[Any] = ()) -> Any:
        """Run it; `read` is a pair: the operands that the scan reads whole, and the whole stacks."""
        numbers = place.first + lax.iota(np.uint32, place.steps)
        return self.scan.run(place.steps, [*read[0], *read[1]], carry, [numbers, *given])


@dataclass(frozen=True)
class _Pair:
    """The loops that run in a segment of the backward.

    The `reruns`, one for each level of segments, come first. The `backward` scan reads the stacks of the last rerun, in
    the order `fed`.
    """

    reruns: tuple[_Walk, ...]
    backward: _Walk
    fed: tuple[int, ...]


def _sweep(scan: _Walk, kept: Sequence[int], place: _Place, length: int, read: Any, carry: list[Any]) -> Any:
    """Run a forward scan in segments: final carries, starts of the segments, starts of the tail, stacks in pieces."""

    def segment(place: _Place, read: Any, carry: list[Any], row: list[Any]) -> Any:
        del row
        end, ys = scan.run(place, read, carry)
        return end, [carry[j] for j in kept], ys

    return _in_segments(scan.scan.like, place, length, segment, read, carry, [], [])


def _unwind(
    pair: _Pair, lengths: Sequence[int], place: _Place, read: Any, carry: list[Any], starts: Any, last: Any
) -> tuple[list[Any], list[list[Any]]]:
    """Run a backward scan in segments, each after its rerun: final carries and stacks in pieces.

    `lengths` are the lengths of this level and the levels below. `read` has one pair for each rerun and one for the
    backward scan, each a pair as `_Walk.run` takes it.
    """

    def segment(place: _Place, read: Any, carry: list[Any], start: list[Any]) -> Any:
        carry, ys = _run_again(pair, lengths, place, read, carry, start)
        return carry, [], ys

    like = pair.backward.scan.like
    carry, _, _, pieces = _in_segments(like, place, lengths[0], segment, read, carry, starts, last)
    return carry, pieces


def _run_again(
    pair: _Pair, lengths: Sequence[int], place: _Place, read: Any, carry: list[Any], start: list[Any]
) -> tuple[list[Any], list[Any]]:
    """One segment of the backward: the rerun from its start, whole or in segments of its own, then the steps back."""
    start = _tied(start, carry)
    for below in range(1, len(lengths)):
        if lengths[below] < place.steps:
            level = len(pair.reruns) - len(lengths) + below - 1
            kept = range(len(start))
            _, starts, last, _ = _sweep(pair.reruns[level], kept, place, lengths[below], read[0][level], start)
            carry, pieces = _unwind(pair, lengths[below:], place, read, carry, starts, last)
            return carry, _joined(pieces)
    _, stacks = pair.reruns[-1].run(place, read[0][-1], start)
    return pair.backward.run(place, read[1], carry, [stacks[i] for i in pair.fed])


def _tied(start: list[Any], carry: list[Any]) -> list[Any]:
    """Let a rerun's start wait for the cotangent: the rerun then neither starts early nor merges with the forward."""
    witnesses = [x for x in carry if abstract.is_plain(jax.typeof(x))]  # all of them, since some may begin as constants
    held = [i for i, x in enumerate(start) if abstract.is_plain(jax.typeof(x))]
    if not witnesses or not held:
        return start
    waited = barriers.held([*(start[i] for i in held), *witnesses])
    after = dict(zip(held, waited, strict=False))
    return [after.get(i, x) for i, x in enumerate(start)]


def _in_segments(
    like: Any, place: _Place, length: int, segment: Segment, read: Any, carry: Any, rows: list[Any], last: list[Any]
) -> tuple[list[Any], list[Any], list[Any], list[list[Any]]]:
    """A scan over segments of `length` steps each, and the tail before or after it, in the direction of an equation.

    `segment(place, read, carry, row)` runs one segment, with its own of the `rows` (the tail gets `last`), and returns
    carry, notes and stacks. The whole returns the final carry, the notes of all segments, each stacked, the notes of
    the tail, and the stacks in pieces (see `_joined`).
    """
    count, rest = divmod(place.steps, length)
    notes, late = [], []

    def body(fixed: Any, carry: list[Any], row: list[Any]) -> Any:
        first, read = fixed
        carry, notes, ys = segment(_Place(first + row[0] * np.uint32(length), length), read, carry, row[1:])
        return carry, (notes, ys)

    def main(carry: list[Any]) -> Any:
        numbers = lax.iota(np.uint32, count)
        carry, (notes[:], ys) = _scan_over(like, count, body, (place.first, read), carry, [numbers, *rows])
        return carry, [[lax.collapse(y, 0, 2) for y in ys]]

    def tail(carry: list[Any]) -> Any:
        carry, late[:], ys = segment(_Place(place.first + np.uint32(count * length), rest), read, carry, last)
        return carry, [ys]

    carry, pieces = _in_turn(like, [main, tail] if rest else [main], carry)
    return carry, notes, late, pieces


def _in_turn(like: Any, parts: Sequence[Callable[..., Any]], carry: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Run parts of a loop in the direction of an equation: the final carry, and the stacks in pieces.

    The parts are in the order of the stacks; each takes a carry and returns it with its own pieces.
    """
    reverse, pieces = like.params["reverse"], []
    for part in reversed(parts) if reverse else parts:
        carry, more = part(carry)
        pieces = [*more, *pieces] if reverse else [*pieces, *more]
    return carry, pieces


def _joined(pieces: Sequence[Sequence[Any]]) -> list[Any]:
    """Stacks joined from pieces of some steps each, the first steps first."""
    return [parts[0] if len(parts) == 1 else lax.concatenate(parts, 0) for parts in zip(*pieces, strict=True)]


def _scan_over(like: Any, count: int, body: Callable[..., Any], fixed: Any, carry: list[Any], rows: list[Any]) -> Any:
    """`lax.scan` of `body(fixed, carry, row)` in the direction and under the name of an equation."""
    given = jax.tree.map(lambda x: abstract.struct(jax.typeof(x)), (fixed, carry))
    avals = [jax.typeof(x) for x in rows]
    inner, shape = traced(body, *given, [abstract.struct(abstract.unstacked(a)) for a in avals])
    like = like.replace(params=dict(like.params, unroll=1))
    carry, stacks = Steps(like, inner).run(count, jax.tree.leaves(fixed), carry, rows)
    return carry, jax.tree.unflatten(jax.tree.structure(shape[1]), stacks)


def traced(function: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """The program of a function, and the tree of its results; doubles stay doubles, even if disabled by now."""
    with_doubles = any(x.dtype in ("float64", "int64", "uint64", "complex128") for x in jax.tree.leaves(given))
    with jax.enable_x64(with_doubles or jax.config.jax_enable_x64):  # pyright: ignore[reportAttributeAccessIssue]
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*given)
    jaxpr, consts = jaxprs.opened(closed)
    assert not consts, "a program in segments reads its operands alone"
    return jaxprs.build(jaxpr.invars, jaxpr.outvars, jaxpr.eqns), shape


def struct_of(atom: Any) -> Any:
    """The shape and the dtype of an atom, as JAX traces functions with them."""
    return abstract.struct(atom.aval)
