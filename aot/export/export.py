"""Export a cut pair as programs that others can run.

Three programs are lowered for each platform, which this machine need not have: the function alone, its forward with the
residuals as results, and its backward. They are written as portable artefacts of `jax.export` and as readable
StableHLO, with a contract (`contract`) that describes each array, and a README.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.export import artefact, guide, result_tree
from jointcut.aot.export.contract import Contract
from jointcut.aot.export.exported import CONSTANTS
from jointcut.aot.export.pair import Pair
from jointcut.aot.options.target import Target
from jointcut.aot.progress.progress import Stage, tell
from jointcut.aot.run.meshed import on_devices
from jointcut.aot.trace.data import Trace
from jointcut.aot.trace.joint import constant_key
from jointcut.partition.errors import ArtefactError, choices, message
from jointcut.partition.program.jax import abstract, jaxprs, meshes, runtime, side_effects, user_source
from jointcut.wrappers.arguments.tree import struct
from jointcut.wrappers.built_in.autograd import JITTED
from jointcut.wrappers.metadata.descriptors import Size

#: The platforms by default, by `jax.export`'s names.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def platforms_for(given: str | Sequence[str] | None, goal: Target | None) -> str | Sequence[str]:
    """Return the platforms to lower for: the given platforms, else the platform of the target, else all."""
    return given if given is not None else PLATFORMS if goal is None else (goal.platform,)


def export(pair: Pair, folder: str | os.PathLike[str], platforms: tuple[str, ...], order: int, overwrite: bool) -> Path:
    """Write the artefact of a pair, and return its path.

    Raises `ArtefactError` if the function cannot be exported, or the folder cannot be written.
    """
    platforms = refuse_request(folder, platforms, order, overwrite)
    refuse_what_stays(pair.traced)
    _refuse_symbolic_halves(pair, order)
    _refuse_hooks(pair)
    _refuse_same_keys(pair)
    with Stage("export", pair.traced.name) as now:
        programs = {p.name: _lowered(p, platforms, order) for p in _programs(pair, order)}
        now.says(lambda: "writing")
        files = {name: data for program in programs.values() for name, data in program.files.items()}
        if pair.constants:
            files[CONSTANTS] = _packed(pair.constants)
        contract = pair.contract(platforms, order, {name: program.entry for name, program in programs.items()})
        files["README.md"] = guide.readme(contract).encode()
        signature = contract.to_json()
        result_tree.check(Contract.from_json(json.loads(json.dumps(signature)), pair.traced.name), pair.traced.name)
        place = artefact.write(folder, signature, files, overwrite)
        now.ends(lambda: f"exported in {now} for {', '.join(platforms)}, {len(programs)} programs in {place}")
        return place


def refuse_request(
    folder: str | os.PathLike[str], platforms: str | Sequence[str], order: int, overwrite: bool
) -> tuple[str, ...]:
    """Return the platforms; raises `ArtefactError` for bad arguments, before any tracing or lowering."""
    known = known_platforms(platforms)
    if type(order) is not int or order not in (1, 2, 3):
        raise ArtefactError(message("order", f"is {order!r}.", "Give 1, 2 or 3: how often it can be differentiated."))
    artefact.free_place(folder, overwrite)
    return known


def known_platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
    """Return the platforms, each once; raises `ArtefactError` for an unknown name."""
    cure = f"Give one or more of {', '.join(PLATFORMS)}."
    if not isinstance(platforms, str | list | tuple):
        raise ArtefactError(message("platforms", f"is {platforms!r}.", cure))
    names = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    for name in names:
        if name not in PLATFORMS:
            cure = "JAX exports for 'cuda' or for 'rocm'." if name == "gpu" else choices(name, PLATFORMS)
            raise ArtefactError(message("platforms", f"holds {name!r}.", cure))
    if not names:
        raise ArtefactError(message("platforms", "is empty.", cure))
    return tuple(dict.fromkeys(names))


# ---------------------------------------------------------------------------------------------------------- refusals


def refuse_what_stays(traced: Trace) -> None:
    """Raise `ArtefactError` for arrays and effects that belong to this process or to another trace."""
    for info in traced.inputs:
        if info.duplicate_of is not None:
            what = f"is the same array as {traced.inputs[info.duplicate_of].path}."
            cure = "Trace with a copy, or with jax.ShapeDtypeStruct, so that it has a place of its own."
            raise ArtefactError(message(info.path, what, cure))
    if traced.program.has_traced_consts:
        cure = "Export outside of jit, grad and vmap, or pass what it closes over as an argument."
        raise ArtefactError(message(traced.name, "closes over values of a trace that is under way.", cure))
    cure = "Call the function once, and export after that, if it adds them only once."
    if traced.program.results.grown is not None:
        what = "adds parts to objects or takes them away, which an exported program cannot do."
        raise ArtefactError(message(traced.name, what, cure))
    cure = "Write the function on arrays: take the state as an argument and return the new one."
    for info in traced.inputs:
        if info.is_reference:
            raise ArtefactError(message(info.path, "is a jax.Ref, which an exported program cannot write.", cure))
    if any(abstract.is_reference(jax.typeof(constant)) for constant in traced.consts):
        what = "closes over a jax.Ref, which an exported program cannot write."
        raise ArtefactError(message(traced.name, what, cure))
    for name, source in dict.fromkeys(_effects(jaxprs.opened(traced.program.closed)[0])):
        what = f"has an effect that cannot be exported: {name}, at {source}."
        cure = "Leave it out where you export: an exported program runs where this process is not."
        raise ArtefactError(message(traced.name, what, cure))


def _refuse_hooks(pair: Pair) -> None:
    """Raise `ArtefactError` if residuals are spilled, or pass through functions that are called back."""
    if pair.traced.options.spill is not None:
        what = "spills what it keeps to files of this process."
        raise ArtefactError(message(pair.traced.name, what, "Export it without spill."))
    halves = (pair.halves.forward, pair.halves.backward)
    if pair.traced.options.saved_arrays and any(any(_effects(jaxprs.opened(half)[0])) for half in halves):
        what = "has saved_arrays that are called back, in this process."
        cure = "Export without them, or give functions that JAX can trace."
        raise ArtefactError(message(pair.traced.name, what, cure))


def _effects(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and source lines of equations that call back or print.

    Writes to the function's own references do not count.
    """
    for eqn in jaxpr.eqns:
        inner = [effect for sub in jaxprs.inner_jaxprs(eqn) for effect in _effects(sub)]
        yield from inner
        if not inner and ("callback" in eqn.primitive.name or side_effects.effect_names(eqn)):
            yield eqn.primitive.name, user_source.source_of(eqn) or "an unknown line"


def _refuse_symbolic_halves(pair: Pair, order: int) -> None:
    """Raise `ArtefactError` if halves with symbolic sizes need derivatives that are not JAX's."""
    is_symbolic = any(type(d) is not int for s in pair.traced.bound.unique for d in jax.typeof(s).shape)
    if order > 1 and is_symbolic and pair.again is not JITTED:
        what = f"is {order}, for symbolic sizes and derivatives that are not JAX's: halves are cut again for that."
        cure = "Export with numbers for all sizes, with order=1, or with derivatives='jax'."
        raise ArtefactError(message("order", what, cure))


def _refuse_same_keys(pair: Pair) -> None:
    """Raise `ArtefactError` if a class gives two of its parts the same keys, since the contract finds parts by keys."""
    returned = [output for output in pair.outputs if output.kind != "state"]
    for arrays in (pair.inputs[len(pair.constants) :], returned):
        for n, array in enumerate(arrays):
            if not _disjoint([each.keys for each in arrays[: n + 1]]):
                cure = "Give each part a key of its own, with jax.tree_util.register_pytree_with_keys_class."
                raise ArtefactError(message(array.path, "is told by the same keys as another part.", cure))


def _disjoint(paths: Sequence[tuple[Size, ...]]) -> bool:
    """Whether all paths differ, and none is the beginning of another."""
    known = {tuple(map(str, path)) for path in paths}
    return len(known) == len(paths) and not any(path[:n] in known for path in known for n in range(len(path)))


# --------------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class _ToLower:
    """A flat function to be lowered, and the types of its inputs."""

    name: str
    run: Callable[..., list[Any]]
    structs: Sequence[Any]


@dataclass(frozen=True)
class _Lowered:
    """The files of a program, and its entry in the contract."""

    files: dict[str, bytes]
    entry: dict[str, Any]


def _programs(pair: Pair, order: int) -> Iterator[_ToLower]:
    """Yield the programs; further derivatives of the halves (`order` > 1) follow the function's conventions."""
    traced, name = pair.traced, _identifier(pair.traced.name)
    again = pair.again if order > 1 else JITTED
    structs = [*map(struct, pair.constants), *traced.bound.unique]
    alone, halves = pair.alone, pair.halves
    yield _named("inference", name, _picking(alone.closed, alone.consts, pair), structs)
    if not traced.program.is_train:
        return
    yield _named("forward", name, again(_picking(halves.forward, traced.consts, pair)), structs)
    structs = abstract.input_structs(halves.backward)
    backward = [on_devices(s) if meshes.is_explicit(s.sharding) else s.update(sharding=None) for s in structs]
    yield _named("backward", name, again(lambda *flat: runtime.evaluate(halves.backward, *flat)), backward)


def _picking(closed: Any, consts: Sequence[Any], pair: Pair) -> Callable[..., list[Any]]:
    """Return a function that takes all constants and arguments of the pair, and uses its own constants."""
    places = {constant_key(c): i for i, c in enumerate(pair.constants)}
    count = len(pair.constants)
    read = [places[constant_key(c)] for c in consts]
    return lambda *flat: runtime.evaluate(closed, *(flat[i] for i in read), *flat[count:])


def _identifier(name: str) -> str:
    """Return the name of a function as a StableHLO identifier: `<lambda>` becomes `lambda`."""
    return re.sub(r"\W+", "_", name).strip("_") or "function"


def _named(program: str, name: str, function: Callable[..., list[Any]], structs: Sequence[Any]) -> _ToLower:
    def run(*flat: Any) -> list[Any]:
        return function(*flat)

    run.__name__ = f"{name}_{program}"
    return _ToLower(program, run, structs)


def _lowered(program: _ToLower, platforms: tuple[str, ...], order: int) -> _Lowered:
    jitted = jax.jit(program.run, keep_unused=True)
    tell(lambda: f"{program.name} for {', '.join(platforms)}")
    try:
        exported = jax.export.export(jitted, platforms=platforms)(*program.structs)
        data = bytes(exported.serialize(vjp_order=0 if program.name == "inference" else order - 1))
    except ImportError as error:
        cure = "Install it: pip install flatbuffers."
        raise ArtefactError(message("Exporting", "needs the package flatbuffers.", cure)) from error
    except KeyError as error:  # a type that the format lacks, such as int2
        what = f"has arrays of {error.args[0]}, for which jax.export has no form."
        cure = "Convert them to a wider type where they enter and leave the function."
        raise ArtefactError(message(program.run.__name__, what, cure)) from error
    except (ValueError, NotImplementedError) as error:
        what = f"cannot be lowered for {', '.join(platforms)}: {error}"
        cure = "Export for fewer platforms, or without what has no portable form."
        raise ArtefactError(message(program.run.__name__, what, cure)) from error
    file, readable = f"{program.name}.stablehlo", f"{program.name}.mlir"
    entry = {"file": file, "mlir": readable, "calling_convention_version": exported.calling_convention_version}
    return _Lowered({file: data, readable: _readable(program, jitted, exported, platforms[0]).encode()}, entry)


def _readable(program: _ToLower, jitted: Any, exported: Any, platform: str) -> str:
    """Return the program for one platform as text without source locations; for symbolic sizes, the exported text."""
    if any(type(d) is not int for s in program.structs for d in s.shape):
        return exported.mlir_module()
    return jitted.trace(*program.structs).lower(lowering_platforms=(platform,)).as_text()


def _packed(constants: Sequence[Any]) -> bytes:
    """Return the constants as raw bytes of an .npz file, in order; the contract holds their types."""
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **{f"constant_{i}": _raw(c) for i, c in enumerate(constants)})
    return archive.getvalue()


def _raw(constant: Any) -> np.ndarray:
    if jnp.issubdtype(jax.typeof(constant).dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.frombuffer(np.asarray(constant).tobytes(), np.uint8)
