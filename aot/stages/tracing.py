"""Trace a function for one signature.

    user function ─ bind ─▶ flat leaves ─ wrappers ─▶ flat function ─ joint ─▶ joint jaxpr
      ─ Traced.partition ─▶ Cut ─ Cut.compile ─▶ Compiled

A feature is a wrapper, a rule, or a strategy; there are no flags in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jointcut.aot.options.options import Options, name_of
from jointcut.aot.options.target import target_of
from jointcut.aot.planning.budgets.inexact import is_at_hand
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.meshed import given_devices
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace import escapes
from jointcut.aot.trace.blame import explained, unique_paths
from jointcut.aot.trace.differentiated import differentiated
from jointcut.aot.trace.joint import joint, rewritten
from jointcut.aot.trace.signature import described
from jointcut.aot.trace.sparse_gradients import with_rows
from jointcut.partition.errors import TargetError, TraceError, choices, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.wrappers import stack
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.built_in.alias import AliasWrapper
from jointcut.wrappers.built_in.flatten import TreeWrapper
from jointcut.wrappers.built_in.guards import GuardsWrapper
from jointcut.wrappers.metadata.convention import Convention
from jointcut.wrappers.metadata.descriptors import Descriptors
from jointcut.wrappers.metadata.schemas import InputAliasInfo
from jointcut.wrappers.wrapper import Target


def trace(function: Callable[..., Any], options: Options, bound: Bound, positions: Sequence[int] | None) -> Traced:
    """Trace forward and backward for one signature.

    `positions` are the differentiated arguments, whose leaves must all be floating point. None means all floating-point
    leaves of the positional arguments, as in `jax.vjp`.
    """
    name = name_of(function)
    with Stage("trace", name) as now:
        bound = with_devices(bound, options)
        wanted, shapes = differentiated(bound, positions, options), bound.abstract()
        options = with_target(options, shapes)
        inputs = shapes.input_info(wanted, shapes.leaves_of(*options.donated))
        wrapped = wrapped_for(function, shapes, inputs, options)
        target = wrapped.target
        paths = [slot.path for slot in target.convention.inputs]
        with (
            explained(name, function, unique_paths(bound), bound),
            escapes.refused(function, name, bound),
            runtime.paused_collection(),
        ):
            mask = [i in wanted for i in range(len(bound.leaves))]
            places, chosen = target.places, options.conventions
            program = joint(target.function, bound.unique, options.has_aux, mask, paths, places, chosen)
            if positions is not None and options.sparse_gradients:
                program = with_rows(program, tables(bound, wanted, options))
        now.ends(lambda: f"traced in {now}, {len(jaxprs.opened(program.closed)[0].eqns)} equations")
    examples = bound if options.error is not None and is_at_hand(bound) else None
    traced = Traced(name, options, shapes, inputs, wrapped, program, wanted, 1e3 * now.seconds, examples)
    if not options.rewrites:
        return traced
    with runtime.paused_collection():
        program = rewritten(program, options.rewrites, lambda joint: described(replace(traced, program=joint)))
    return replace(traced, program=program)


def with_devices(bound: Bound, options: Options) -> Bound:
    """Return a call whose arguments lie on devices where they are laid on a mesh without, `jax.sharding.AbstractMesh`.

    These are those of the target, or else those that are here. Raises `TargetError` if they are too few.
    """
    paired = zip(bound.paths(), bound.leaves, strict=True)
    leaves = tuple(given_devices(path, leaf, options.goal) for path, leaf in paired)
    same = all(new is old for new, old in zip(leaves, bound.leaves, strict=True))
    return bound if same else replace(bound, leaves=leaves)


def with_target(options: Options, bound: Bound) -> Options:
    """Return the options with their target, which may follow from the arguments of a call, given as types.

    Raises `TargetError` for arguments on the devices of another target, or on another number of devices.
    """
    found, goal = target_of(bound.leaves), options.goal
    if found is not None and goal is not None and found.device_kind != goal.device_kind:
        what = f"lie on {found.device_kind}, and the target is {goal.name}, {goal.device_kind}."
        raise TargetError(message("The arguments", what, "Lay them on the target's devices, or leave the target out."))
    placed = (getattr(leaf, "sharding", None) for leaf in bound.leaves)
    count = max((sharding.num_devices for sharding in placed if sharding is not None), default=1)
    if goal is not None and count not in (1, goal.count):
        what = f"lie on {count} devices, and the target {goal.name} has {counted(goal.count, 'device')}."
        cure = "Lay them on as many, such as with the mesh of the target, or name a target of as many."
        raise TargetError(message("The arguments", what, cure))
    return replace(options, target=goal or found)


def wrapped_for(
    function: Callable[..., Any], shapes: Bound, inputs: Sequence[InputAliasInfo], options: Options
) -> stack.Wrapped:
    """Return the function within its wrappers, for calls of one signature.

    `inputs` are the records of the arguments. The user's own wrappers of the `options` see flat arrays.
    """
    tree = tree_wrapper(function, shapes, inputs, options)
    wrappers = tree, GuardsWrapper(shapes, inputs), AliasWrapper(inputs)
    return stack.pre_compile(wrappers, Target(function, Convention((), ())))


def tree_wrapper(
    function: Callable[..., Any], shapes: Bound, inputs: Sequence[InputAliasInfo], options: Options
) -> TreeWrapper:
    """Return the wrapper that flattens calls, around the user's own wrappers."""
    if not options.around:
        return TreeWrapper(shapes)

    @functools.cache
    def describe() -> Descriptors:
        plain, mask = replace(options, wrappers=()), [info.requires_grad for info in inputs]
        wanted, wrapped = tuple(i for i, on in enumerate(mask) if on), wrapped_for(function, shapes, inputs, plain)
        target, paths = wrapped.target, [slot.path for slot in wrapped.target.convention.inputs]
        known = options.has_aux, mask, paths, target.places, options.conventions
        program = joint(target.function, shapes.unique, *known)
        return described(Traced(name_of(function), plain, shapes, tuple(inputs), wrapped, program, wanted, 0.0))

    return TreeWrapper(shapes, tuple(options.around), describe)


def tables(bound: Bound, wanted: Sequence[int], options: Options) -> dict[int, str]:
    """Return the positions of the `sparse_gradients` among the gradients, with their paths.

    Raises `TraceError` for a path that is no differentiated leaf.
    """
    paths = bound.paths()
    known = {paths[i]: k for k, i in enumerate(wanted)}
    for path in options.sparse_gradients:
        if path not in known:
            raise TraceError(message("sparse_gradients", f"names {path}.", choices(path, known)))
    return {known[path]: path for path in options.sparse_gradients}
