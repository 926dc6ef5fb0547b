"""Run a function on a tape, eagerly, and take its result apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.run.references import MARKS, fitting, spread
from jointcut.aot.stages.padding.named import NamedSizes
from jointcut.aot.tape.nodes import Edge, Recording, value_of
from jointcut.aot.tape.records import Records
from jointcut.aot.trace.blame import explained
from jointcut.partition.errors import CallError, TraceError, message
from jointcut.partition.program.jax import eager, runtime
from jointcut.partition.program.sizes import is_symbolic, numbers
from jointcut.wrappers.arguments import containers, fixed
from jointcut.wrappers.arguments.objects import is_owned
from jointcut.wrappers.arguments.originals import Originals
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.arguments.tree import is_array_like
from jointcut.wrappers.metadata.convention import is_inexact


@dataclass(frozen=True)
class Ran:
    """One run of a function.

    Attributes:
        tape: the recording.
        value: the output, in its tree.
        aux: the second result of a function with `has_aux`.
        tree: the tree of the output.
        avals: the types of the flat output.
        seeds: the node that made each flat output; None if no gradient flows from it.
        arguments: the differentiated arguments, flattened.
        originals: the writable objects of the call; the function's writes to their copies are written to them.
        shapes: the shape of each flat output with the names of its sizes, None without names.
    """

    tape: Recording
    value: Any
    aux: Any
    tree: Any
    avals: tuple[Any, ...]
    seeds: tuple[Edge | None, ...]
    arguments: Sequence[Flattened]
    originals: Originals
    shapes: tuple[Any, ...] = ()

    def padded(self, cotangents: Sequence[Any]) -> Sequence[Any]:
        """Return cotangents of the flat output, padded where the output is."""
        sizes = self.tape.sizes
        if sizes is None or not any(self.shapes):
            return cotangents
        pairs = zip(cotangents, self.shapes, strict=True)
        return [ct if shape is None or ct is None else sizes.padded(ct, shape) for ct, shape in pairs]

    def cut(self, gradients: list[Any]) -> list[Any]:
        """Return gradients of the leaves without what is behind their true sizes."""
        sizes = self.tape.sizes
        if sizes is None:
            return gradients
        pairs = zip(gradients, self.tape.tracers, strict=True)
        return [x if x is None or leaf.cut is None else sizes.cut(x, leaf.shape) for x, leaf in pairs]


@dataclass(frozen=True)
class Flattened:
    """One differentiated argument: its tree, its leaves, and the place of each among the leaves of the tape.

    A leaf that is not floating point has the place None, and is passed to the function unchanged. The gradient of such
    a leaf is None `in_modules` of Equinox, the leaf itself where it is `kept`, as the indices of a sparse array are
    with `jax.experimental.sparse.grad`, and a zero of `float0` elsewhere.
    """

    tree: Any
    leaves: tuple[Any, ...]
    places: tuple[int | None, ...]
    in_modules: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()

    def named(self, root: str) -> list[tuple[str, Any, int | None]]:
        """Return path, leaf and place of each leaf, if the argument is called `root`."""
        return list(zip(tree_paths(root, self.tree), self.leaves, self.places, strict=True))

    def positions(self, root: str) -> str:
        """Return the path of the first leaf in an array-like object that has no place, such as indices, or nothing."""
        inside = containers.placed(self.tree).inside
        return next((path for i, (path, _, place) in enumerate(self.named(root)) if place is None and i in inside), "")

    def gradients(self, flat: Sequence[Any]) -> Any:
        """Return the gradients in the tree of the argument: zeros where none flows, `float0` for non-floats."""
        triples = enumerate(zip(self.leaves, self.places, strict=True))
        gradients = (
            x if i in self.kept
            else None if p is None and i in self.in_modules
            else _gradient(x, None if p is None else flat[p], p)
            for i, (x, p) in triples
        )  # fmt: skip
        return jax.tree.unflatten(self.tree, list(gradients))

    def holding(self, flat: Sequence[Any]) -> Any:
        """Return the argument with `flat` in place of the leaves of the tape."""
        pairs = zip(self.leaves, self.places, strict=True)
        return jax.tree.unflatten(self.tree, [x if p is None else flat[p] for x, p in pairs])


def ran(
    name: str,
    function: Callable[..., Any],
    records: Records,
    positions: Sequence[int] | None,
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    check: bool = False,
    keeps_residuals: bool = True,
    sizes: NamedSizes | None = None,
) -> Ran:
    """Run a function on a tape.

    `positions` are the arguments whose leaves must be floating point and are differentiated; None means every
    floating-point leaf of all positional arguments. Raises `TraceError` for other leaves, and for a result that is not
    made of arrays. With `check`, it raises `NonFiniteError` for the first op that makes a NaN or an infinity. Unless
    the tape `keeps_residuals`, the gradient comes from a second run of the ops. With `sizes`, arrays are padded, and
    the function sees the names of their sizes.
    """
    refuse_eager(name)
    tape = Recording(name, records, runtime.trace_context(), check, keeps_residuals, sizes)
    with eager.eager(tape) as trace, explained(name, function):
        tape.trace = trace
        given, named, arguments = [*map(_copied, args)], {k: _copied(x) for k, x in kwargs.items()}, []
        for place in range(len(args)) if positions is None else positions:
            argument = _flattened(tape, place, args[place], positions is not None)
            arguments.append(argument)
            leaves = enumerate(zip(argument.leaves, argument.places, strict=True))
            tracers = [_sized(tape, place, i, x) if at is None else tape.tracers[at] for i, (x, at) in leaves]
            given[place] = jax.tree.unflatten(argument.tree, tracers)
        _name_others(tape, given, named, range(len(args)) if positions is None else positions)
        originals = Originals.of((tuple(args), kwargs), (tuple(given), named))
        out = function(*given, **named)
        tape.references.held.clear()
        if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
            cure = "Return (output, aux), or leave has_aux out."
            raise TraceError(message("has_aux=True", f"needs a pair, but the function returned {_shown(out)}.", cure))
        main, aux = out if has_aux else (out, None)
        leaves, tree = jax.tree.flatten(main)
        refuse_others(name, leaves, tree)
        seeds = tuple(map(tape.edge, leaves))
    values = [value_of(x) if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    avals: tuple[Any, ...] = tuple(map(jax.typeof, values))
    value = jax.tree.unflatten(tree, values)
    aux = jax.tree.map(functools.partial(_number, tape), aux)
    return Ran(tape, value, aux, tree, avals, seeds, arguments, originals, tuple(map(_named_shape, leaves)))


def _named_shape(x: Any) -> Any:
    return x.shape if type(x) is eager.EagerTracer and x.cut is not None else None


def _number(tape: Recording, x: Any) -> Any:
    """Return the array of a value of the tape, and the number of a size that has a name."""
    if tape.sizes is not None and is_symbolic([x]):
        return numbers([x], tape.sizes.true)[0]
    return value_of(x)


def _copied(argument: Any) -> Any:
    """Return an argument with copies of its writable objects; an argument without such objects is returned itself."""
    if not any(map(is_owned, jax.tree.leaves(argument, is_leaf=is_owned))):
        return argument
    return jax.tree.map(lambda x: x, argument)


def refuse_eager(name: str) -> None:
    """Raise `CallError` under `jax.disable_jit`, where nothing is compiled."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        what = "is called under jax.disable_jit, and a tape compiles its backward."
        raise CallError(message(name, what, "Leave it out: a taped function runs op by op already, on numbers."))


def refuse_others(name: str, leaves: Sequence[Any], tree: Any) -> None:
    """Raise `TraceError` for a result that is not an array."""
    for path, leaf in zip(tree_paths("result", tree), leaves, strict=True):
        if not is_array_like(leaf):
            what = f"returned a {type(leaf).__name__} ({path}), not an array."
            raise TraceError(message(name, what, "Return arrays, or other things as aux with has_aux=True."))


def _sized(tape: Recording, argument: int | str, place: int, leaf: Any) -> Any:
    """Return a leaf that is not differentiated, as a tracer if its sizes have names."""
    shape = tape.sizes.shapes.get((argument, place)) if tape.sizes is not None else None
    return leaf if shape is None else tape.named(leaf, shape)


def _name_others(tape: Recording, args: list[Any], kwargs: dict[str, Any], differentiated: Sequence[int]) -> None:
    """Give names to the sizes of the arguments that are not differentiated."""
    for argument in {at for at, _ in tape.sizes.shapes} if tape.sizes is not None else ():
        if argument not in differentiated:
            held: Any = args if isinstance(argument, int) else kwargs
            leaves, tree = jax.tree.flatten(held[argument])
            held[argument] = jax.tree.unflatten(tree, [_sized(tape, argument, i, x) for i, x in enumerate(leaves)])


def _flattened(tape: Recording, position: int, argument: Any, must_differ: bool) -> Flattened:
    path = f"args[{position}]"
    leaves, tree = jax.tree.flatten(argument)
    whole = jax.tree.unflatten(tree, range(len(leaves)))
    in_modules = frozenset(fixed.inside_modules(whole))
    owned = map(jax.tree.leaves, filter(is_owned, jax.tree.leaves(whole, is_leaf=is_owned)))
    described = containers.placed(tree)
    held = in_modules.union(described.inside, *owned)
    places: list[int | None] = []
    for i, (at, leaf) in enumerate(zip(tree_paths(path, tree), leaves, strict=True)):
        if is_array_like(leaf) and is_inexact(jax.typeof(leaf).dtype):
            places.append(len(tape.leaves))
            tape.leaf(as_array(leaf), at, tape.sizes.shapes.get((position, i)) if tape.sizes is not None else None)
        elif must_differ and i not in held:
            kind = jax.typeof(leaf).str_short() if is_array_like(leaf) else f"a {type(leaf).__name__}"
            what = f"is {kind}: value_and_grad differentiates floating-point arguments."
            raise TraceError(message(at, what, "Leave its argument out of argnums, convert it, or use vjp."))
        else:
            places.append(None)
    kept = described.kept if must_differ else frozenset[int]()
    return Flattened(tree, tuple(leaves), tuple(places), in_modules, kept)


def as_array(leaf: Any) -> Any:
    """Return the leaf as a JAX array, which nobody writes to; a leaf that is one already is returned itself."""
    return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)


def _gradient(leaf: Any, gradient: Any, place: int | None) -> Any:
    if gradient is not None:
        return gradient
    if place is not None:
        return jnp.zeros_like(leaf)
    return np.zeros(np.shape(leaf), jax.dtypes.float0) if is_array_like(leaf) else None


def _shown(out: Any) -> str:
    if isinstance(out, jax.Array):
        return f"one array, {jax.typeof(out).str_short()}"
    return f"{len(out)} values" if isinstance(out, tuple | list) else f"a {type(out).__name__}"


def fitting_refs(made: Ran, places: Any, refs: Any) -> list[Any]:
    """Return the reference of each leaf of a tape, or None.

    `places` is the tree of gradients, with the place of each leaf.

    Raises `CallError` if trees or types differ, or if a reference is given twice, since the backward takes each once.
    """
    caller, (numbers, tree) = "accumulate_into", jax.tree.flatten(places)
    flat: list[Any] = [None] * len(made.tape.leaves)
    held = dict[int, str]()
    for place, ref in zip(numbers, spread(caller, refs, tree), strict=True):
        if isinstance(ref, MARKS):
            continue
        path = made.tape.paths[place]
        if (before := held.setdefault(id(ref), path)) != path:
            what = f"was given one jax.Ref for {before} and for {path}."
            raise CallError(message(caller, what, "Make one for each, with jax.new_ref(jnp.zeros_like(array))."))
        flat[place] = fitting(caller, path, jax.typeof(made.tape.tracers[place]), ref)
    return flat
