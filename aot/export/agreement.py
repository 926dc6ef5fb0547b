"""Check that the statements of a contract agree.

A contract states most things more than once: the name of an array holds its position, a gradient names its input and
the input's path, the tree of the result holds the paths of the outputs. So an edit or damage is found when the artefact
is read, before anything runs, even where the checksum was written anew.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from jointcut.aot.export.contract import Contract
from jointcut.aot.export.descriptors import CURE, Described, Size, plain_keys, plain_tree
from jointcut.partition.errors import ArtefactError, RecordError, message
from jointcut.wrappers.metadata.convention import is_inexact
from jointcut.wrappers.metadata.signatures import BackwardSignature
from jointcut.wrappers.record import read_dtype

CONSTANTS = "constants.npz"
_PROGRAMS = ("inference", "forward", "backward")
_DTYPE = re.compile(r"\w+|key<\w+>")

Claims = Iterator[tuple[bool, str]]  # whether a statement holds, and the error text where it does not


def check(contract: Contract, files: Collection[str], where: str) -> None:
    """Raise `ArtefactError` for the first statement that contradicts another; `files` are the files of the artefact."""
    about: tuple[Callable[[Contract], Claims], ...] = (
        _about_types,
        _about_calls,
        _about_inputs,
        _about_outputs,
        _about_residuals,
        _about_gradients,
        _about_results,
        _about_signature,
        lambda c: _about_files(c, files),
    )
    for claims in about:
        for holds, what in claims(contract):
            if not holds:
                raise ArtefactError(message(where, what, CURE))


def disjoint(paths: Sequence[tuple[Size, ...]]) -> bool:
    """Whether all paths differ, and none is the beginning of another."""
    known = {tuple(map(str, path)) for path in paths}
    return len(known) == len(paths) and not any(path[:n] in known for path in known for n in range(len(path)))


def _numbered(prefix: str, arrays: Sequence[Described]) -> tuple[bool, str]:
    names = [f"{prefix}_{i + 1}" for i in range(len(arrays))]
    return [a.name for a in arrays] == names, f"does not count its arrays {prefix}_1, {prefix}_2 and so on."


# ------------------------------------------------------------------------------------------------------- the call


def _about_types(c: Contract) -> Claims:
    for d in (*c.inputs, *c.outputs, *c.residuals, *c.tangents, *c.gradients):
        yield _is_dtype(d.dtype), f"gives {d.name} the dtype {d.dtype!r}, which JAX does not have."


def _is_dtype(name: str) -> bool:
    if not _DTYPE.fullmatch(name):
        return False
    try:
        dtype = read_dtype(name, name)
    except RecordError:
        return False
    return name == "float0" or (str(dtype) == name and getattr(dtype, "kind", "") not in tuple("OSUMm"))


def _about_calls(c: Contract) -> Claims:
    known = isinstance(c.mlir_platform, str) and c.mlir_platform in c.platforms
    yield known and len(set(c.platforms)) == len(c.platforms), "does not tell its platforms."
    yield c.order in (1, 2, 3), f"has the order {c.order}."
    chosen = _chosen(c)
    yield all(type(n) is int and -c.positional <= n < c.positional for n in chosen), f"has the argnums {c.argnums}."
    yield len({n % c.positional for n in chosen}) == len(chosen), "names one of its argnums twice."
    yield len({s.path for s in c.statics}) == len(c.statics), "has two static arguments in one place."
    yield all(type(n) is int and n > 0 for n in c.sizes.values()), "has sizes that are none."
    yield all(isinstance(v, str) for v in c.versions.values()), "has versions that are no texts."


def _chosen(c: Contract) -> tuple[int, ...]:
    return c.argnums if isinstance(c.argnums, tuple) else (c.argnums,)


def _about_inputs(c: Contract) -> Claims:
    yield _numbered("primals", c.inputs)
    n = c.num_constants
    expected = [("constant", f"constant {i}", ()) for i in range(n)]
    yield [(i.kind, i.path, i.keys) for i in c.inputs[:n]] == expected, "does not have its constants first."
    chosen = {p % c.positional for p in _chosen(c)}
    written = {o.keys for o in c.states}
    for i in c.inputs[n:]:
        half, *rest = i.keys or ("",)
        by_position = half == "args" and bool(rest) and type(rest[0]) is int and rest[0] < c.positional
        by_name = half == "kwargs" and bool(rest) and isinstance(rest[0], str)
        yield by_position or by_name, f"does not tell where {i.name} stands among the arguments."
        parameter = by_position and rest[0] in chosen and is_inexact(read_dtype(i.dtype, i.path))
        kind = "buffer" if i.keys in written else "parameter" if parameter else "user_input"
        filtered = kind == "parameter" and i.kind == "user_input"
        yield i.kind == kind or filtered, f"calls {i.name} a {i.kind}, which it is not."
    yield disjoint([i.keys for i in c.inputs[n:]]), "has two inputs in one place."


# ---------------------------------------------------------------------------------------------------- the programs


def _about_outputs(c: Contract) -> Claims:
    yield _numbered("output", c.outputs)
    kinds = [o.kind for o in c.outputs]
    counts = {kind: kinds.count(kind) for kind in ("output", "aux", "state")}
    ordered = [kind for kind, count in counts.items() for _ in range(count)]
    yield kinds == ordered, "does not have its outputs before its aux, and its states last."
    yield c.has_aux or not counts["aux"], "has aux without has_aux."
    yield disjoint([o.keys for o in c.returned]), "has two outputs in one place."
    inputs = {i.keys: (i.path, i.dtype, i.shape) for i in c.inputs[c.num_constants :]}
    for o in c.states:
        yield (
            inputs.get(o.keys) == (o.path, o.dtype, o.shape),
            f"has the state {o.name} of {o.path}, and no such input.",
        )
    yield len({o.keys for o in c.states}) == counts["state"], "has two states of one input."


def _about_residuals(c: Contract) -> Claims:
    sources: dict[str, Sequence[Described]] = {"input": c.inputs, "output": c.outputs}
    prefixes = {"input": "primals", "output": "output", "saved": "saved"}
    for r in c.residuals:
        known = r.kind in prefixes and r.name == f"{prefixes[r.kind]}_{r.index + 1}"
        yield known, f"has a residual {r.name} of the kind {r.kind!r} at {r.index}, which do not go together."
        if r.kind in sources:
            source = sources[r.kind][r.index : r.index + 1]
            same = bool(source) and source[0].dtype == r.dtype and source[0].shape == r.shape
            yield same, f"has the residual {r}, and no such {r.kind}."
    yield len({r.name for r in c.residuals}) == len(c.residuals), "names a residual twice."


def _about_gradients(c: Contract) -> Claims:
    carrying = [o for o in c.outputs if o.kind == "output" and is_inexact(read_dtype(o.dtype, o.path))]
    if not c.is_train:
        yield not (c.residuals or c.tangents or c.gradients), "has gradients and no backward."
        return
    yield _numbered("tangents", c.tangents)
    yield [t.of for t in c.tangents] == [o.name for o in carrying], "does not have a tangent for each output."
    yield _numbered("gradient", c.gradients)
    places = {i.name: place for place, i in enumerate(c.inputs) if i.kind != "constant"}
    for g in c.gradients:
        known = g.of in places and c.inputs[places[g.of]].path == g.path
        yield known, f"has {g.name} of {g.of}, {g.path}, which is no argument."
    owners = list(dict.fromkeys(g.of for g in c.gradients))
    yield [places[of] for of in owners] == sorted(places[of] for of in owners), "does not have its gradients in order."
    yield {i.name for i in c.inputs if i.kind == "parameter"} <= set(owners), "lacks the gradient of a parameter."
    for of in owners:
        parts = [g.part for g in c.gradients if g.of == of]
        yield parts in (["whole"], ["rows", "places"]), f"has of {of} the parts {', '.join(parts)}."


def _about_files(c: Contract, files: Collection[str]) -> Claims:
    names = _PROGRAMS if c.is_train else _PROGRAMS[:1]
    yield set(c.programs) == set(names), f"has the programs {', '.join(c.programs)}."
    for name in names:
        entry = c.programs[name]
        version = entry.get("calling_convention_version") if isinstance(entry, dict) else None
        expected = {"file": f"{name}.stablehlo", "mlir": f"{name}.mlir", "calling_convention_version": version}
        yield type(version) is int and entry == expected, f"says of the program {name} what export does not say."
        yield {entry["file"], entry["mlir"]} <= set(files), f"does not list the files of the program {name}."
    yield (CONSTANTS in files) == bool(c.num_constants), f"does not say the same of {CONSTANTS} and of the inputs."


# ------------------------------------------------------------------------------------------------------- the trees


def _about_results(c: Contract) -> Claims:
    spec = c.own_result_spec
    if spec is None:
        return
    is_tree = isinstance(spec, jax.tree_util.PyTreeDef) and is_sound(spec)
    yield is_tree and spec.num_leaves == len(c.returned), _CHANGED
    try:
        leaves, tree = tree_flatten_with_path(jax.tree.unflatten(spec, range(len(c.returned))))
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        yield False, f"{_CHANGED[:-1]} ({error})."
        return
    yield [plain_keys(keys) for keys, _ in leaves] == [o.keys for o in c.returned], _CHANGED
    main = sum(o.kind == "output" for o in c.outputs)
    counts = [child.num_leaves for child in tree.children()]
    yield not c.has_aux or counts == [main, len(c.returned) - main], "has aux, and a result that is no pair."


_CHANGED = "has a result_tree that is not the tree of its outputs, or its classes have changed since."


def is_sound(tree: Any) -> bool:
    """Whether JAX can build a tree that was read; JAX does not check that a dataclass gets all of its fields."""
    data, children = tree.node_data(), tree.children()
    if data is None:
        return True
    kind, aux = data
    if kind is type(None) and children:
        return False
    if dataclasses.is_dataclass(kind) and isinstance(aux, tuple):
        fields = sum(field.init for field in dataclasses.fields(kind))
        if len(children) + len(aux) < fields:
            return False
    return all(map(is_sound, children))


def _about_signature(c: Contract) -> Claims:
    s, parameters = c.graph_signature, {i.name: i.path for i in c.inputs if i.kind == "parameter"}
    others = (i.name for i in c.inputs if i.kind == "user_input")
    same = (
        s.inputs_to_parameters == parameters
        and s.parameters == tuple(parameters.values())
        and s.user_inputs == tuple(others)
        and s.user_outputs == tuple(o.name for o in c.returned)
        and s.buffers_to_mutate == {o.name: o.path for o in c.states}
        and (s.buffers_mutated_in_place, s.same_arrays) == ((), {})
        and _is_plain(s.in_spec, (i.keys for i in c.inputs[c.num_constants :]))
        and _is_plain(s.out_spec, (o.keys for o in c.returned))
        and (s.backward_signature is not None) == c.is_train
    )
    yield same, "has a graph_signature that is not that of its inputs and outputs."
    if c.is_train:
        b, paths = s.backward_signature, {g.name: g.path for g in c.gradients}
        main = {name: path for name, path in paths.items() if path in s.parameters}
        rest = {name: path for name, path in paths.items() if name not in main}
        parts = {g.name: g.part for g in c.gradients if g.part != "whole"}
        same = (
            isinstance(b, BackwardSignature)
            and (b.gradients_to_parameters, b.gradients_to_user_inputs) == (main, rest)
            and b.parts in (parts, {})  # older versions wrote none
        )
        yield same, "has a backward_signature that is not that of its gradients."


def _is_plain(spec: Any, keys: Iterable[tuple[Size, ...]]) -> bool:
    """Whether a tree consists of dicts and tuples, with leaves at these keys."""
    return isinstance(spec, jax.tree_util.PyTreeDef) and spec == jax.tree.structure(plain_tree([(k, 0) for k in keys]))
