"""Hold what is exported: a traced call, its halves, and what each of their arrays is."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from jointcut.aot.export.contract import Contract, StaticArgument, Tree
from jointcut.aot.export.descriptors import (
    BOXED,
    Gradient,
    Input,
    Output,
    ResidualInput,
    Size,
    Tangent,
    plain_keys,
    plain_tree,
)
from jointcut.aot.trace.joint import Joint, constant_key, joint
from jointcut.aot.trace.signature import graph_signature, input_kinds
from jointcut.partition.errors import RecordError
from jointcut.partition.lower.emit import Halves, Residual
from jointcut.partition.plans import planfile
from jointcut.partition.plans.backend import Backend
from jointcut.partition.plans.plan import Saved
from jointcut.partition.program import jaxprs
from jointcut.wrappers.arguments.tree import struct
from jointcut.wrappers.metadata.signatures import GraphSignature

if TYPE_CHECKING:
    import jointcut.aot.stages.cut
    from jointcut.aot.stages.traced import Traced

_HELD = {"input": "an input, which the caller holds", "output": "an output, which the caller holds"}


@dataclass(frozen=True)
class Pair:
    """A traced call and its halves.

    `cut` is the cut whose plan they follow; where `traced` and `halves` have symbolic sizes, it was made with those of
    `sizes` in their place.
    """

    cut: jointcut.aot.stages.cut.Cut
    traced: Traced
    halves: Halves
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, cut: jointcut.aot.stages.cut.Cut, platforms: Sequence[str]) -> Pair:
        """A cut at the sizes that it was traced for."""
        return cls(cut, cut.traced, cut.split.on(Backend.of(platforms)).halves, {})

    @cached_property
    def alone(self) -> Joint:
        """The function without its derivative."""
        target, leaves = self.traced.wrapped.target, self.traced.bound.unique
        paths = [slot.path for slot in target.convention.inputs]
        has_aux = self.traced.options.has_aux
        return joint(target.function, leaves, has_aux, [False] * len(leaves), paths, target.places)

    @cached_property
    def constants(self) -> list[Any]:
        """The arrays that function and derivative close over, each once."""
        return list({constant_key(c): c for c in (*self.traced.consts, *self.alone.consts)}.values())

    def contract(self, platforms: tuple[str, ...], order: int, programs: Mapping[str, dict[str, Any]]) -> Contract:
        """What `signature.json` says; `programs` are its entries for each program."""
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
            plan=json.loads(planfile.dumps(self.cut.plan, self.cut.split.graph)),
            programs=dict(programs),
            versions=versions(),
        )

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """Constants, then the leaves of the arguments."""
        bound, made = self.traced.bound, []
        for i, constant in enumerate(self.constants):
            rest = {"kind": "constant", "path": f"constant {i}", "keys": (), "sharding": None}
            made.append(Input.like(struct(constant), name=f"primals_{i + 1}", **rest))
        given = zip(self._places(), bound.leaves, input_kinds(self.traced), strict=True)
        for i, ((path, keys), leaf, kind) in enumerate(given):
            where = getattr(leaf, "sharding", None)
            rest = {"kind": kind, "path": path, "keys": keys, "sharding": None if where is None else str(where)}
            made.append(Input.like(leaf, name=f"primals_{len(self.constants) + i + 1}", **rest))
        return tuple(made)

    def _places(self) -> list[tuple[str, tuple[Size, ...]]]:
        """The path of each leaf as text and taken apart: `("args", 0, "w")`, `("kwargs", "mask")`.

        A box that holds one array as its `value`, as Flax's variables do, stands for that array.
        """
        bound = self.traced.bound
        places = bound.rebuild_places()
        found, _ = tree_flatten_with_path(places)
        given = zip(
            bound.paths(), argument_keys(places, bound.dynamic), boxed([keys for keys, _ in found]), strict=True
        )
        return [
            (path.removesuffix(f".{BOXED}"), keys[:-1]) if is_boxed else (path, keys) for path, keys, is_boxed in given
        ]

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """The results of the function."""
        results = self.traced.program.results
        found, _ = tree_flatten_with_path(jax.tree.unflatten(results.tree, range(results.num_returned)))
        arguments = self._places()
        states = [arguments[place] for place, _ in results.states]
        keys = [*(plain_keys(path) for path, _ in found), *(keys for _, keys in states)]
        paths = [*results.paths[: results.num_returned], *(path for path, _ in states)]
        kinds = ["output"] * len(results.main) + ["aux"] * results.num_aux + ["state"] * len(results.states)
        described = zip(results.avals, paths, keys, kinds, strict=True)
        return tuple(
            Output.like(aval, name=f"output_{i + 1}", kind=kind, path=path, keys=names)
            for i, (aval, path, names, kind) in enumerate(described)
        )

    @property
    def residuals(self) -> tuple[ResidualInput, ...]:
        """What the backward takes of the forward."""
        saved = {s.value: s for s in self.cut.plan.saved}
        avals = jaxprs.input_structs(self.halves.backward)
        made = zip(self.halves.residuals, avals, strict=False)
        return tuple(self._residual(r, aval, saved.get(r.value)) for r, aval in made)

    def _residual(self, residual: Residual, aval: Any, known: Saved | None) -> ResidualInput:
        """`known` is what the plan says of the residual."""
        index, consts = residual.index, self.traced.consts
        if residual.kind == "input" and index < len(consts):
            index = next(i for i, c in enumerate(self.constants) if constant_key(c) == constant_key(consts[index]))
        elif residual.kind == "input":
            index += len(self.constants) - len(consts)
        prefix = "primals" if residual.kind == "input" else residual.kind
        return ResidualInput.like(
            aval,
            name=f"{prefix}_{index + 1}",
            kind=residual.kind,
            index=index,
            bytes=self.cut.split.graph.values[residual.value].saved_bytes,
            op="" if known is None else known.op,
            scope="" if known is None else known.scope,
            source="" if known is None else known.source,
            reason=_HELD[residual.kind] if known is None else known.reason,
        )

    @property
    def tangents(self) -> tuple[Tangent, ...]:
        """The cotangents that the backward takes, one for each output that can carry one."""
        carrying = [o for o, on in zip(self.outputs, self.traced.program.carries, strict=True) if on]
        avals = jaxprs.input_structs(self.halves.backward)[len(self.halves.residuals) :]
        pairs = zip(carrying, avals, strict=True)
        return tuple(Tangent.like(a, name=f"tangents_{i + 1}", of=o.name) for i, (o, a) in enumerate(pairs))

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """The results of the backward."""
        traced = self.traced
        parts = [p for k in range(len(traced.wanted)) for p in _parts(k in traced.program.sparse)]
        ends = jaxprs.opened(self.halves.backward)[0].outvars
        made = []
        for n, (owner, part, end) in enumerate(zip(traced.owners, parts, ends, strict=True)):
            of = self.inputs[len(self.constants) + owner]
            made.append(Gradient.like(end.aval, name=f"gradient_{n + 1}", of=of.name, path=of.path, part=part))
        return tuple(made)

    @property
    def graph_signature(self) -> GraphSignature:
        """PyTorch's record, its trees of dicts and tuples only, so that it can be read anywhere."""
        made = graph_signature(self.traced, len(self.constants))
        paths = dict(zip(self.traced.bound.paths(), (path for path, _ in self._places()), strict=True))

        def renamed(names: Mapping[str, str]) -> dict[str, str]:
            return {name: paths[path] for name, path in names.items()}

        back = made.backward_signature
        if back is not None:
            chosen, others = renamed(back.gradients_to_parameters), renamed(back.gradients_to_user_inputs)
            back = replace(back, gradients_to_parameters=chosen, gradients_to_user_inputs=others)
        return replace(
            made,
            parameters=tuple(paths[path] for path in made.parameters),
            buffers=tuple(paths[path] for path in made.buffers),
            inputs_to_parameters=renamed(made.inputs_to_parameters),
            inputs_to_buffers=renamed(made.inputs_to_buffers),
            buffers_to_mutate=renamed(made.buffers_to_mutate),
            in_spec=_plain_spec([i.keys for i in self.inputs if i.keys]),
            out_spec=_plain_spec([o.keys for o in self.outputs if o.kind != "state"]),
            backward_signature=back,
        )


def argument_keys(places: Any, dynamic: Sequence[int]) -> list[tuple[Size, ...]]:
    """The path of each leaf of `(args, kwargs)`; `dynamic` are the positions of the arguments that are not static."""
    found, _ = tree_flatten_with_path(places)
    made = []
    for keys, _ in found:
        half, first, *rest = keys
        if half.idx == 0:
            made.append(("args", dynamic[first.idx], *plain_keys(rest)))
        else:
            made.append(("kwargs", *plain_keys([first, *rest])))
    return made


def boxed(paths: Sequence[Any]) -> list[bool]:
    """For each path of JAX's whether its last step is the attribute `value` of an object that holds nothing else."""
    around = Counter(keys[:n] for keys in paths for n in range(len(keys)))
    return [bool(keys) and keys[-1] == GetAttrKey(BOXED) and around[keys[:-1]] == 1 for keys in paths]


def _parts(is_sparse: bool) -> tuple[str, ...]:
    return ("rows", "places") if is_sparse else ("whole",)


def _plain_spec(keys: Sequence[tuple[Size, ...]]) -> Any:
    return jax.tree.structure(plain_tree([(k, 0) for k in keys]))


def _json_of(tree: Any) -> str | None:
    """The JSON form of a tree, None where its classes have none."""
    try:
        return Tree(tree).to_json()
    except RecordError:
        return None


def versions() -> dict[str, str]:
    """Of jointcut, jax, jaxlib and Python; jointcut's is `unknown` where it was not installed."""
    found = {"python": platform.python_version()}
    for name in ("jointcut", "jax", "jaxlib"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
