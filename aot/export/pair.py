"""Hold a traced call and its halves for export, and describe their arrays."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from jointcut.aot.export.contract import Contract, StaticArgument, Tree
from jointcut.aot.export.descriptors import (
    BOXED,
    GradientOutput,
    Input,
    Output,
    ResidualInput,
    Size,
    Tangent,
    plain_keys,
    plain_tree,
)
from jointcut.aot.run.runnable import Runnable
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import Joint, constant_key, joint
from jointcut.aot.trace.signature import graph_signature, input_kinds
from jointcut.partition.errors import RecordError
from jointcut.partition.lower.emit import Halves, Residual
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.saved import Saved
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.sizes import numbers
from jointcut.wrappers.arguments.tree import struct
from jointcut.wrappers.built_in.autograd import Wrap
from jointcut.wrappers.metadata.signatures import GraphSignature

_REASONS = {
    "input": "an input, which the caller holds",
    "output": "an output, which the caller holds",
    "saved": "a loop that runs in segments starts from it, or reads it when it runs again",
}


@dataclass(frozen=True)
class Pair:
    """A traced call and its halves, which follow the plan of `made`.

    If `traced` and `halves` have symbolic sizes, `made` is a cut with the numbers in `sizes`.
    """

    made: Runnable
    traced: Trace
    halves: Halves
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, made: Runnable, platforms: Sequence[str]) -> Pair:
        """Return the pair of a cut, with the sizes that it was traced for."""
        return cls(made, made.trace, made.split.on(Backend.of(platforms)).halves, {})

    @cached_property
    def alone(self) -> Joint:
        """The function without its derivative."""
        target, leaves = self.traced.wrapped.target, self.traced.bound.unique
        paths = [slot.path for slot in target.convention.inputs]
        has_aux = self.traced.options.has_aux
        return joint(target.function, leaves, has_aux, [False] * len(leaves), paths, target.places)

    @property
    def again(self) -> Wrap:
        """The wrapper with which the halves are differentiated once more."""
        return self.made.again

    @cached_property
    def constants(self) -> list[Any]:
        """The arrays that the function and its derivative close over, each once."""
        return list({constant_key(c): c for c in (*self.traced.consts, *self.alone.consts)}.values())

    def contract(self, platforms: tuple[str, ...], order: int, programs: Mapping[str, dict[str, Any]]) -> Contract:
        """Return the contract of the pair; `programs` are its entries for each program."""
        traced, options = self.traced, self.traced.options
        train = traced.program.is_train
        return Contract(
            name=traced.name,
            inputs=self.inputs,
            outputs=self.outputs,
            residuals=self.residuals if train else (),
            tangents=self.tangents if train else (),
            gradients=self.gradients if train else (),
            platforms=platforms,
            mlir_platform=platforms[0],
            argnums=options.argnums if isinstance(options.argnums, int) else tuple(options.argnums),
            has_aux=options.has_aux,
            positional=len(traced.bound.spans),
            statics=tuple(StaticArgument.of(*static) for static in traced.bound.statics),
            order=order,
            sizes=dict(self.sizes),
            graph_signature=self.graph_signature,
            result_tree=_json_of(traced.program.results.tree),
            plan=json.loads(planfile.dumps(self.made.split.plan, self.made.split.graph)),
            programs=dict(programs),
            versions=versions(),
        )

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """Constants, then the leaves of the arguments."""
        bound, inputs = self.traced.bound, []
        for i, constant in enumerate(self.constants):
            rest = {"kind": "constant", "path": f"constant {i}", "keys": (), "sharding": None}
            inputs.append(Input.like(struct(constant), name=f"primals_{i + 1}", **rest))
        arguments = zip(self._places(), bound.leaves, input_kinds(self.traced), strict=True)
        for i, ((path, keys), leaf, kind) in enumerate(arguments, len(self.constants)):
            sharding = getattr(leaf, "sharding", None)
            rest = {"kind": kind, "path": path, "keys": keys, "sharding": None if sharding is None else str(sharding)}
            inputs.append(Input.like(leaf, name=f"primals_{i + 1}", **rest))
        return tuple(inputs)

    def _places(self) -> list[tuple[str, tuple[Size, ...]]]:
        """Return the path of each leaf as text and as keys: `("args", 0, "w")`, `("kwargs", "mask")`.

        An array that a box holds as its only `value`, as in Flax's variables, has the path of the box.
        """
        bound = self.traced.bound
        tree = bound.rebuild_places()
        leaves, _ = tree_flatten_with_path(tree)
        are_boxed = boxed([keys for keys, _ in leaves])
        return [
            (path.removesuffix(f".{BOXED}"), keys[:-1]) if is_boxed else (path, keys)
            for path, keys, is_boxed in zip(bound.paths(), argument_keys(tree, bound.dynamic), are_boxed, strict=True)
        ]

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """The results of the function."""
        results = self.traced.program.results
        returned, _ = tree_flatten_with_path(jax.tree.unflatten(results.tree, range(results.num_returned)))
        arguments = self._places()
        states = [arguments[place] for place, _ in results.states]
        keys = [*(plain_keys(path) for path, _ in returned), *(keys for _, keys in states)]
        paths = [*results.paths[: results.num_returned], *(path for path, _ in states)]
        kinds = ["output"] * len(results.main) + ["aux"] * results.num_aux + ["state"] * len(results.states)
        outputs = zip(results.avals, paths, keys, kinds, strict=True)
        return tuple(
            Output.like(aval, name=f"output_{i + 1}", kind=kind, path=path, keys=output_keys)
            for i, (aval, path, output_keys, kind) in enumerate(outputs)
        )

    @property
    def residuals(self) -> tuple[ResidualInput, ...]:
        """The inputs of the backward that come from the forward."""
        saved = {s.value: s for s in self.made.split.plan.saved}
        avals = abstract.input_structs(self.halves.backward)
        pairs = zip(self.halves.residuals, avals, strict=False)  # cotangents follow in `avals`
        return tuple(self._residual(r, aval, saved.get(r.value)) for r, aval in pairs)

    def _residual(self, residual: Residual, aval: Any, saved: Saved | None) -> ResidualInput:
        """Return the description of a residual; `saved` is the plan's entry for it."""
        index, consts = residual.index, self.traced.consts
        if residual.kind == "input" and index < len(consts):
            index = next(i for i, c in enumerate(self.constants) if constant_key(c) == constant_key(consts[index]))
        elif residual.kind == "input":
            index += len(self.constants) - len(consts)
        prefix = "primals" if residual.kind == "input" else residual.kind
        value = self.made.split.schedule.graph.values[residual.value]
        stacked = numbers(aval.shape[: len(aval.shape) - len(value.shape)], self.sizes)  # in segments, only some steps
        return ResidualInput.like(
            aval,
            name=f"{prefix}_{index + 1}",
            kind=residual.kind,
            index=index,
            bytes=math.prod(stacked) * value.bytes,
            op="" if saved is None else saved.op,
            scope="" if saved is None else saved.scope,
            source="" if saved is None else saved.source,
            reason=_REASONS[residual.kind] if saved is None else saved.reason,
        )

    @property
    def tangents(self) -> tuple[Tangent, ...]:
        """The cotangents that the backward takes, one for each output that can carry one."""
        carrying = [o for o, carries in zip(self.outputs, self.traced.program.carries, strict=True) if carries]
        avals = abstract.input_structs(self.halves.backward)[len(self.halves.residuals) :]
        pairs = zip(carrying, avals, strict=True)
        return tuple(Tangent.like(a, name=f"tangents_{i + 1}", of=o.name) for i, (o, a) in enumerate(pairs))

    @property
    def gradients(self) -> tuple[GradientOutput, ...]:
        """The results of the backward."""
        traced = self.traced
        parts = [p for k in range(len(traced.wanted)) for p in _parts(k in traced.program.sparse)]
        results = jaxprs.opened(self.halves.backward)[0].outvars
        gradients = []
        for n, (owner, part, v) in enumerate(zip(traced.owners, parts, results, strict=True)):
            of = self.inputs[len(self.constants) + owner]
            rest = {"name": f"gradient_{n + 1}", "of": of.name, "path": of.path, "part": part}
            gradients.append(GradientOutput.like(v.aval, **rest))
        return tuple(gradients)

    @property
    def graph_signature(self) -> GraphSignature:
        """PyTorch's record; its trees are dicts and tuples, so that it can be read anywhere."""
        signature = graph_signature(self.traced, len(self.constants))
        paths = dict(zip(self.traced.bound.paths(), (path for path, _ in self._places()), strict=True))

        def renamed(names: Mapping[str, str]) -> dict[str, str]:
            return {name: paths[path] for name, path in names.items()}

        backward = signature.backward_signature
        if backward is not None:
            parameters, others = renamed(backward.gradients_to_parameters), renamed(backward.gradients_to_user_inputs)
            backward = replace(backward, gradients_to_parameters=parameters, gradients_to_user_inputs=others)
        return replace(
            signature,
            parameters=tuple(paths[path] for path in signature.parameters),
            buffers=tuple(paths[path] for path in signature.buffers),
            inputs_to_parameters=renamed(signature.inputs_to_parameters),
            inputs_to_buffers=renamed(signature.inputs_to_buffers),
            buffers_to_mutate=renamed(signature.buffers_to_mutate),
            in_spec=_plain_spec([i.keys for i in self.inputs if i.keys]),
            out_spec=_plain_spec([o.keys for o in self.outputs if o.kind != "state"]),
            backward_signature=backward,
        )


def argument_keys(tree: Any, dynamic: Sequence[int]) -> list[tuple[Size, ...]]:
    """Return the keys of each leaf of `(args, kwargs)`; `dynamic` are the positions of the dynamic arguments."""
    leaves, _ = tree_flatten_with_path(tree)
    paths = []
    for (half, first, *rest), _ in leaves:
        if half.idx == 0:
            paths.append(("args", dynamic[first.idx], *plain_keys(rest)))
        else:
            paths.append(("kwargs", *plain_keys([first, *rest])))
    return paths


def boxed(paths: Sequence[Any]) -> list[bool]:
    """Return, for each JAX path, whether it ends with the attribute `value` of an object that holds nothing else."""
    leaves_below = Counter(keys[:n] for keys in paths for n in range(len(keys)))
    return [bool(keys) and keys[-1] == GetAttrKey(BOXED) and leaves_below[keys[:-1]] == 1 for keys in paths]


def _parts(is_sparse: bool) -> tuple[str, ...]:
    return ("rows", "places") if is_sparse else ("whole",)


def _plain_spec(keys: Sequence[tuple[Size, ...]]) -> Any:
    return jax.tree.structure(plain_tree([(k, 0) for k in keys]))


def _json_of(tree: Any) -> str | None:
    """Return the JSON form of a tree; None if its classes have none."""
    try:
        return Tree(tree).to_json()
    except RecordError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of jointcut, jax, jaxlib and Python; `unknown` for a package that is not installed."""
    numbers = {"python": platform.python_version()}
    for name in ("jointcut", "jax", "jaxlib"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = "unknown"
    return numbers
