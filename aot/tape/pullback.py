"""Pull cotangents back through what a tape recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.hooks.hook import Place
from jointcut.aot.run import references
from jointcut.aot.tape.captures import Captures
from jointcut.aot.tape.forward import Ran
from jointcut.aot.tape.nodes import refuse_nonfinite
from jointcut.aot.tape.program import Backward
from jointcut.aot.tape.release import Release
from jointcut.aot.tape.roll import RolledSweep, rolled, structure_of
from jointcut.aot.tape.sweep import Sweep
from jointcut.aot.tape.walk import Structure, Walk
from jointcut.aot.update.updates import Updates
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.program import jaxprs
from jointcut.wrappers.built_in.guards import fitting
from jointcut.wrappers.metadata.convention import is_inexact


class Way(threading.local):
    """How backwards run on this thread: captured, or node by node."""

    captured = True


WAY = Way()


@dataclass
class Tape:
    """What one run recorded, for one or more backwards.

    Attributes:
        ran: the run.
        captures: the captures of its function.
        name: its name.
        arrays: returns the types of the arrays among the arguments.
        check: whether each op of a backward is looked at for NaN.
        roll: whether equal blocks of a backward are one loop.
    """

    ran: Ran | None
    captures: Captures
    name: str
    arrays: Callable[[], dict[str, str]]
    check: bool = False
    roll: bool = False

    def running(self) -> Ran:
        """The run; raises `CallError` if it was released."""
        if self.ran is None:
            what = "was released, and its residuals are gone."
            raise CallError(message(f"The pullback of {self.name}", what, "Call release() after the last backward."))
        return self.ran

    def gradients(self, cotangents: Sequence[Any], refs: Sequence[Any] = ()) -> list[Any]:
        """The gradients of the leaves, for the flat cotangents of the output; None where none flows."""
        ran = self.running()
        pairs = [(seed, ct) for seed, ct in zip(ran.seeds, cotangents, strict=True) if seed is not None]
        sweep, given = Sweep.of([seed for seed, _ in pairs], ran.tape.leaves), [ct for _, ct in pairs]
        if self.check or not WAY.captured:
            return self._by_node(sweep, given, refs)
        sweep = rolled(sweep, not any(ref is not None for ref in refs)) if self.roll else sweep
        backward = self.captures.of(sweep, given, refs, self.arrays).backward
        hooks = sweep.running(backward.structure) if isinstance(sweep, RolledSweep) else sweep.called
        results = backward([*(ref for ref in refs if ref is not None), *sweep.flat, *given], hooks)
        flat: list[Any] = [None] * len(sweep.leaves)
        for place, gradient in zip(backward.reached, results, strict=True):
            flat[place] = gradient
        for place, gradient in (sweep.own if isinstance(sweep, RolledSweep) else {}).items():
            flat[place] = gradient
        return flat

    def updated(
        self, cotangent: Any, params: Sequence[Any], state: Sequence[Any], update: Any, trees: Any, sweeps: int
    ) -> list[Any]:
        """The parameters and state after an update in the backward, flat; their old arrays are given up.

        `trees` are parameters and state as the update takes them.
        """
        ran = self.running()
        pairs = [(seed, cotangent) for seed in ran.seeds if seed is not None]
        sweep = Sweep.of([seed for seed, _ in pairs], ran.tape.leaves)
        release = Release.of(sweep, params, state)

        def program(structure: Structure) -> Backward:
            updates = Updates.of(update, trees[0], trees[1], ran.tape.paths, sweeps)
            return release.backward(structure, [ct for _, ct in pairs], updates)

        given, more = [ct for _, ct in pairs], (id(update), sweeps, jax.tree.structure(trees), release.key)
        capture = self.captures.of(sweep, given, (), self.arrays, more, program)
        capture.holds = update  # so that its id is not given to another
        return capture.backward([*release.arrays, *given], sweep.called)

    def _by_node(self, sweep: Sweep, cotangents: Sequence[Any], refs: Sequence[Any]) -> list[Any]:
        hooks, structure = sweep.called, structure_of(sweep)

        def look(number: int, place: Place | None, values: Sequence[Any]) -> None:
            source = None if number < 0 else structure.steps[number].source
            maker = structure.steps[number].record.name if place is None else f"the hook {place.named}"
            refuse_nonfinite(values, f"The backward of {self.name}", maker, source)

        def call(number: int, arrays: Sequence[Any], returns: Sequence[Any]) -> list[Any]:
            del returns
            return hooks[number](arrays)

        return Walk(structure, sweep.flat, call, look if self.check else None, refs)(cotangents)


class Pullback:
    """The backward of one call: a function from a cotangent of the output to the gradients.

    It may be called more than once, until `release` is called. What rules of `custom_vjp.defvjp_with_logs` log (from
    JAX 0.12 on) is dropped, as by a plain call of JAX's pullback; there is no `with_logs`. A hook of `aot.on_cotangent`
    hands out the same.
    """

    def __init__(self, tape: Tape) -> None:
        """Take what one run recorded."""
        self._tape = tape

    def __repr__(self) -> str:
        """`<pullback of loss: 12 ops on the tape>`."""
        ran = self._tape.ran
        what = "released" if ran is None else f"{counted(ran.tape.count, 'node')} on the tape"
        return f"<pullback of {self._tape.name}: {what}>"

    def __call__(self, cotangent: Any) -> Any:
        """One tree of gradients for each positional argument, as in `jax.vjp`.

        Raises `CallError` if the cotangent does not fit the output, or after `release`.
        """
        ran = self._tape.running()
        flat = self._tape.gradients(cotangents_of(ran, cotangent))
        return tuple(argument.gradients(flat) for argument in ran.arguments)

    def accumulate_into(self, refs: Any) -> Callable[[Any], None]:
        """A function of the cotangent that adds the gradients to references, and returns nothing.

        `refs` are `jax.Ref`s in the tree of what the pullback returns, with the shapes and dtypes of the gradients;
        None stands for an argument, or a part of one, whose gradient is not wanted. Each is added to as soon as its
        gradient is complete. Raises `CallError` if the trees differ, if a reference has another type than its argument,
        or after `release`.
        """
        adding = self._adding("accumulate_into", refs, references.spread)

        def accumulate(cotangent: Any) -> None:
            adding(cotangent)

        return accumulate

    def with_refs(self, *refs: Any) -> Callable[[Any], Any]:
        """A function of the cotangent that adds gradients to references, as `with_refs` of what `jax.vjp` returns.

        There is one entry for each array of the arguments, in their trees: a `jax.Ref` of its type, whose result is
        `jax.ad.GradRef()`; `jax.ad.GradValue()`, whose result is the gradient; or `jax.ad.DontWant()`, whose result is
        `jax.ad.DidntWant()`. Raises `CallError` if trees or types differ, or after `release`.
        """
        return self._adding("with_refs", refs, references.exact)

    def _adding(self, caller: str, refs: Any, flat_of: Callable[[str, Any, Any], list[Any]]) -> Callable[[Any], Any]:
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
            return jax.tree.unflatten(tree, list(map(references.result, entries, gradients)))

        return pull

    def release(self) -> None:
        """Free the residuals."""
        self._tape.ran = None


def cotangents_of(ran: Ran, cotangent: Any) -> list[Any]:
    """A cotangent of the output, flat: an array for each output."""
    given = iter(fitting(ran.tree, ran.avals, cotangent))
    flat: list[Any] = []
    for aval in ran.avals:
        ct = next(given) if is_inexact(aval.dtype) else None
        zero = is_inexact(aval.dtype) and ct is None
        flat.append(jaxprs.full(jaxprs.cotangent_aval(aval), 0) if zero else ct)
    return [ct if ct is None or isinstance(ct, jax.Array) else jax.numpy.asarray(ct) for ct in flat]
