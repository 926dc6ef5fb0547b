"""Pull cotangents back through the recorded ops of a tape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.call.function import Function
from jointcut.aot.hooks.closures import values_now
from jointcut.aot.hooks.hook import Place
from jointcut.aot.options.options import Options
from jointcut.aot.run import references
from jointcut.aot.run.pullback import Adding
from jointcut.aot.tape.captures import Captures
from jointcut.aot.tape.forward import Ran
from jointcut.aot.tape.nodes import refuse_nonfinite
from jointcut.aot.tape.program import Backward
from jointcut.aot.tape.release import Release
from jointcut.aot.tape.roll import RolledSweep, rolled, structure_of
from jointcut.aot.tape.straight import Line, Straight
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.walk import Structure, Walk
from jointcut.aot.update.updates import Updates
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.built_in.guards import fitting, tangent_metas
from jointcut.wrappers.metadata.convention import is_inexact


class Way(threading.local):
    """How backwards run on this thread: captured, or node by node."""

    captured = True


WAY = Way()


@dataclass
class Tape:
    """The recording of one run, for one or more backwards.

    Attributes:
        ran: the run.
        captures: the captures of its function.
        name: the name of the function.
        arrays: returns the types of the arrays among the arguments.
        check: whether each op of a backward is looked at for NaN.
        roll: whether equal blocks of a backward are one loop.
        options: the options of the step, if the tape keeps no residuals.
    """

    ran: Ran | None
    captures: Captures
    name: str
    arrays: Callable[[], dict[str, str]]
    check: bool = False
    roll: bool = False
    options: Options | None = None
    _pullback: Any = None

    def running(self) -> Ran:
        """Return the run; raises `CallError` if it was released."""
        if self.ran is None:
            what = "was released, and its residuals are gone."
            raise CallError(message(f"The pullback of {self.name}", what, "Call release() after the last backward."))
        return self.ran

    def release(self) -> None:
        """Free the residuals."""
        self.ran = self._pullback = None

    def gradients(self, cotangents: Sequence[Any], refs: Sequence[Any] = (), is_step: bool = False) -> list[Any]:
        """Return the gradients of the leaves for the flat cotangents of the output; None where no gradient flows.

        In a step (`is_step`), there is one output, and its cotangent is 1.
        """
        ran = self.running()
        cotangents = ran.padded(cotangents)
        pairs = [(seed, ct) for seed, ct in zip(ran.seeds, cotangents, strict=True) if seed is not None]
        sweep, given = Sweep.of([seed for seed, _ in pairs], ran.tape.leaves), [ct for _, ct in pairs]
        if not ran.tape.keeps_residuals:
            return self._again(sweep, given, refs, is_step)
        if self.check or not WAY.captured:
            return ran.cut(self._by_node(sweep, given, refs))
        sweep = rolled(sweep, not any(ref is not None for ref in refs)) if self.roll else sweep
        backward = self.captures.of(sweep, given, refs, self.arrays).backward
        hooks = sweep.running(backward.structure) if isinstance(sweep, RolledSweep) else sweep.called
        results = backward([*(ref for ref in refs if ref is not None), *sweep.flat, *given], hooks)
        flat: list[Any] = [None] * len(sweep.leaves)
        for place, gradient in zip(backward.reached, results, strict=True):
            flat[place] = gradient
        for place, gradient in (sweep.own if isinstance(sweep, RolledSweep) else {}).items():
            flat[place] = gradient
        return ran.cut(flat)

    def updated(
        self, cotangent: Any, params: Sequence[Any], state: Sequence[Any], update: Any, trees: Any, sweeps: int
    ) -> list[Any]:
        """Return parameters and state after an update in the backward, flat; their old arrays must not be used again.

        `trees` are parameters and state, in the trees that the update takes.
        """
        ran = self.running()
        pairs = [(seed, cotangent) for seed in ran.seeds if seed is not None]
        sweep = Sweep.of([seed for seed, _ in pairs], ran.tape.leaves)
        if not ran.tape.keeps_residuals:
            step, arrays = self._straight(sweep, [ct for _, ct in pairs], trees[0], "used for an update")
            _, *made = step.value_and_update(*trees, update=update, sweeps=sweeps, arrays=arrays)
            return jax.tree.leaves(made)
        release = Release.of(sweep, params, state)

        def program(structure: Structure) -> Backward:
            updates = Updates.of(update, trees[0], trees[1], ran.tape.paths, sweeps)
            return release.backward(structure, [ct for _, ct in pairs], updates)

        given, more = [ct for _, ct in pairs], (values_now(update), sweeps, jax.tree.structure(trees), release.key)
        capture = self.captures.of(sweep, given, (), self.arrays, more, program, "used for an update")
        capture.holds = update  # so that its id is not given to another
        return capture.backward([*release.arrays, *given], sweep.called)

    def _again(self, sweep: Sweep, cotangents: Sequence[Any], refs: Sequence[Any], is_step: bool) -> list[Any]:
        """Return the gradients from a second run of the recorded ops; a pullback keeps its residuals."""
        if not sweep.seeds:
            return [None] * len(sweep.leaves)
        leaves = [leaf.value for leaf in self.running().tape.tracers]
        fate = "added to references" if any(ref is not None for ref in refs) else "returned"
        step, arrays = self._straight(sweep, cotangents, leaves, fate)
        if is_step:
            flat = step.grad(leaves, arrays=arrays)
        else:
            is_alone = len(cotangents) == 1 and cotangents[0].shape == ()
            if self._pullback is None:
                self._pullback = step.vjp(leaves, arrays=arrays)[1]
            (flat,) = self._pullback(cotangents[0] if is_alone else list(cotangents))
        for i, ref in enumerate(refs):
            if ref is not None:
                ref[...] += flat[i]
        return flat

    def _straight(self, sweep: Sweep, cotangents: Sequence[Any], leaves: Any, fate: str) -> tuple[Function, list[Any]]:
        """Return the step of the recorded ops, and the arrays that it reads besides the leaves."""
        line, options = Line.of(sweep.seeds), self.options
        assert options is not None, "a tape that keeps no residuals has options for its step"

        def program(structure: Structure) -> Straight:
            del structure
            types = jax.tree.map(lambda x: abstract.struct(jax.typeof(x)), (leaves, line.arrays))
            return Straight(line.function(self.name, options), types)

        more = line.key, jax.tree.structure(leaves)
        capture = self.captures.of(sweep, cotangents, (), self.arrays, more, program, fate)
        return capture.backward.function, line.arrays

    def _by_node(self, sweep: Sweep, cotangents: Sequence[Any], refs: Sequence[Any]) -> list[Any]:
        hooks, structure = sweep.called, structure_of(sweep)

        def look(number: int, place: Place | None, values: Sequence[Any]) -> None:
            source = None if number < 0 else structure.steps[number].source
            maker = structure.steps[number].record.name if place is None else place.words
            refuse_nonfinite(values, f"The backward of {self.name}", maker, source)

        def call(number: int, arrays: Sequence[Any], returns: Sequence[Any]) -> list[Any]:
            del returns
            return hooks[number](arrays)

        return Walk(structure, sweep.flat, call, look if self.check else None, refs)(cotangents)


class Pullback(Adding):
    """The backward of one call: a function from a cotangent of the output to the gradients.

    It may be called more than once, until `release` is called. The logs of `custom_vjp.defvjp_with_logs` (from JAX 0.12
    on) are dropped, as by a plain call of JAX's pullback; there is no `with_logs`. A hook of `aot.on_cotangent` can
    return the same values.
    """

    def __init__(self, tape: Tape) -> None:
        """Take the recording of one run."""
        self._tape = tape

    def __repr__(self) -> str:
        """`<pullback of loss: 12 ops on the tape>`."""
        ran = self._tape.ran
        what = "released" if ran is None else f"{counted(ran.tape.count, 'node')} on the tape"
        return f"<pullback of {self._tape.name}: {what}>"

    def __call__(self, cotangent: Any) -> Any:
        """Return one tree of gradients for each positional argument, as `jax.vjp` does.

        Raises `CallError` if the cotangent does not fit the output, or after `release`.
        """
        ran = self._tape.running()
        flat = self._tape.gradients(cotangents_of(ran, cotangent))
        return tuple(argument.gradients(flat) for argument in ran.arguments)

    def _adding(self, caller: str, refs: Any, flat_of: Callable[[str, Any, Any], list[Any]]) -> Callable[..., Any]:
        ran = self._tape.running()
        tree = jax.tree_util.treedef_tuple(tuple(argument.tree for argument in ran.arguments))
        entries = flat_of(caller, refs, tree)
        flat_refs: list[Any] = [None] * len(ran.tape.leaves)
        named = [pair for i, argument in enumerate(ran.arguments) for pair in argument.named(f"args[{i}]")]
        for (path, leaf, place), entry in zip(named, entries, strict=True):
            if isinstance(entry, references.MARKS):
                continue
            if place is None:
                references.refuse_without(caller, path, leaf)
            flat_refs[place] = references.fitting(caller, path, jax.typeof(ran.tape.tracers[place]), entry)

        def pull(cotangent: Any) -> Any:
            ran = self._tape.running()
            flat = self._tape.gradients(cotangents_of(ran, cotangent), flat_refs)
            gradients = tree.flatten_up_to(tuple(argument.gradients(flat) for argument in ran.arguments))
            made = jax.tree.unflatten(tree, list(map(references.result, entries, gradients)))
            return None if flat_of is references.spread else made

        return pull

    def release(self) -> None:
        """Free the residuals."""
        self._tape.release()


def cotangents_of(ran: Ran, cotangent: Any) -> list[Any]:
    """Return a cotangent of the output, flat: an array for each output."""
    metas = tangent_metas(ran.avals, [is_inexact(aval.dtype) for aval in ran.avals])
    given, flat = fitting(ran.tree, metas, cotangent), list[Any]()
    for meta, aval in zip(metas, ran.avals, strict=True):
        ct = None if meta.unwrapped_idx is None else given[meta.unwrapped_idx]
        zero = meta.unwrapped_idx is not None and ct is None
        flat.append(abstract.full(abstract.cotangent_aval(aval), 0) if zero else ct)
    return [ct if ct is None or isinstance(ct, jax.Array) else jax.numpy.asarray(ct) for ct in flat]
