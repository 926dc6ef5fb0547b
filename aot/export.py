"""Export a cut pair as programs that others can run.

Three programs are lowered for every platform that is asked for, which need not be here: the function alone, its forward
with the residuals as results, and its backward. They are written as portable artefacts of `jax.export` and as readable
StableHLO, with a contract (`contract`) that says what each array is, and a README for whoever finds the folder.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jointcut.aot import artefact, guide
from jointcut.aot.pair import Pair
from jointcut.aot.traced import TracedCall
from jointcut.partition import jaxprs
from jointcut.partition.errors import ArtefactError, choices, message
from jointcut.wrappers.tree import struct

#: What programs are lowered for unless somebody says otherwise: the names are those of `jax.export`.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
CONSTANTS = "constants.npz"


def export(
    pair: Pair, folder: str | os.PathLike[str], platforms: str | Sequence[str], order: int, overwrite: bool
) -> Path:
    """Write the artefact of a pair, and return where it is.

    Raises `ArtefactError` where the function cannot be exported or the folder not written.
    """
    platforms = _platforms(platforms)
    if isinstance(order, bool) or order not in (1, 2, 3):
        raise ArtefactError(message("order", f"is {order!r}.", "Give 1, 2 or 3: how often it can be differentiated."))
    refuse_what_stays(pair.traced)
    programs = {p.name: _lowered(p, platforms, order) for p in _programs(pair, platforms)}
    files = {name: data for made in programs.values() for name, data in made.files.items()}
    if pair.constants:
        files[CONSTANTS] = _packed(pair.constants)
    contract = pair.contract(platforms, order, {name: made.entry for name, made in programs.items()})
    files["README.md"] = guide.readme(contract).encode()
    return artefact.write(folder, contract.to_json(), files, overwrite)


def _platforms(given: str | Sequence[str]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given)
    for name in found:
        if name not in PLATFORMS:
            raise ArtefactError(message("platforms", f"holds {name!r}.", choices(name, PLATFORMS)))
    if not found:
        raise ArtefactError(message("platforms", "is empty.", f"Give one or more of {', '.join(PLATFORMS)}."))
    return tuple(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------- what cannot be exported


def refuse_what_stays(traced: TracedCall) -> None:
    """Raise `ArtefactError` for what belongs to this process or to another trace."""
    paths, bound = traced.bound.paths(), traced.bound
    for i, j in bound.duplicates.items():
        cure = "Trace with a copy, or with jax.ShapeDtypeStruct, so that it has a place of its own."
        raise ArtefactError(message(paths[i], f"is the same array as {paths[j]}.", cure))
    if traced.program.has_traced_consts:
        cure = "Export outside of jit, grad and vmap, or pass what it closes over as an argument."
        raise ArtefactError(message(traced.name, "closes over values of a trace that is under way.", cure))
    for i, leaf in enumerate(bound.leaves):
        if jaxprs.is_reference(jax.typeof(leaf)):
            cure = "Write the function on arrays: take the state as an argument and return the new one."
            raise ArtefactError(message(paths[i], "is a jax.Ref, which an exported program cannot write.", cure))
    for name, source in dict.fromkeys(_effects(jaxprs.opened(traced.program.closed)[0])):
        what = f"has an effect that cannot be exported: {name}, at {source}."
        cure = "Leave it out where you export: an exported program runs where this process is not."
        raise ArtefactError(message(traced.name, what, cure))


def _effects(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Names and source lines of the equations that call back, write or print."""
    for eqn in jaxpr.eqns:
        if "callback" in eqn.primitive.name or jaxprs.has_effects(eqn):
            inner = [found for sub in jaxprs.inner_jaxprs(eqn) for found in _effects(sub)]
            yield from inner or [(eqn.primitive.name, jaxprs.source_of(eqn) or "an unknown line")]
        else:
            for sub in jaxprs.inner_jaxprs(eqn):
                yield from _effects(sub)


# --------------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class _Program:
    """A flat function on its way to StableHLO; `inputs` and `outputs` say which descriptors it takes and gives."""

    name: str
    run: Callable[..., list[Any]]
    structs: Sequence[Any]


@dataclass(frozen=True)
class _Lowered:
    """The files of a program, and what the contract says of it."""

    files: dict[str, bytes]
    entry: dict[str, Any]


def _programs(pair: Pair, platforms: tuple[str, ...]) -> Iterator[_Program]:
    traced, name = pair.traced, _identifier(pair.traced.name)
    structs = [*map(struct, pair.constants), *traced.bound.unique]
    yield _picking("inference", name, pair.alone.closed, pair.alone.consts, pair, structs)
    if not traced.program.is_train:
        return
    halves = pair.split.halves
    if platforms == ("cpu",):
        halves = pair.split.held if jaxprs.barriers_expand("cpu") else pair.split.on_cpu
    yield _picking("forward", name, halves.forward, traced.consts, pair, structs)
    backward = [s.update(sharding=None) for s in jaxprs.input_structs(halves.backward)]
    yield _named("backward", name, lambda *flat: jaxprs.evaluate(halves.backward, *flat), backward)


def _picking(
    program: str, name: str, closed: Any, consts: Sequence[Any], pair: Pair, structs: Sequence[Any]
) -> _Program:
    """A program that takes all constants of the pair and reads its own."""
    places = {id(c): i for i, c in enumerate(pair.constants)}
    read = [*(places[id(c)] for c in consts), *range(len(pair.constants), len(structs))]
    return _named(program, name, lambda *flat: jaxprs.evaluate(closed, *(flat[i] for i in read)), structs)


def _identifier(name: str) -> str:
    """The name of a function as StableHLO takes it: `<lambda>` becomes `lambda`."""
    return re.sub(r"\W+", "_", name).strip("_") or "function"


def _named(program: str, name: str, run: Callable[..., list[Any]], structs: Sequence[Any]) -> _Program:
    run.__name__ = f"{name}_{program}"
    return _Program(program, run, structs)


def _lowered(program: _Program, platforms: tuple[str, ...], order: int) -> _Lowered:
    jitted = jax.jit(program.run, keep_unused=True)
    try:
        made = jax.export.export(jitted, platforms=platforms)(*program.structs)
        data = bytes(made.serialize(vjp_order=order - 1))
    except ImportError as error:
        cure = "Install it: pip install flatbuffers."
        raise ArtefactError(message("Exporting", "needs the package flatbuffers.", cure)) from error
    except (ValueError, NotImplementedError) as error:
        what = f"cannot be lowered for {', '.join(platforms)}: {error}"
        cure = "Export for fewer platforms, or without what has no portable form."
        raise ArtefactError(message(program.run.__name__, what, cure)) from error
    file, readable = f"{program.name}.stablehlo", f"{program.name}.mlir"
    entry = {"file": file, "mlir": readable, "calling_convention_version": made.calling_convention_version}
    return _Lowered({file: data, readable: _readable(program, jitted, made, platforms[0]).encode()}, entry)


def _readable(program: _Program, jitted: Any, made: Any, platform: str) -> str:
    """The program for one platform as text, without source locations; with symbolic sizes as it was exported."""
    if any(type(d) is not int for s in program.structs for d in s.shape):
        return made.mlir_module()
    return jitted.trace(*program.structs).lower(lowering_platforms=(platform,)).as_text()


def _packed(constants: Sequence[Any]) -> bytes:
    """The constants as bytes in an archive of numpy's, in their order; the contract has their types."""
    held = io.BytesIO()
    np.savez(held, allow_pickle=False, **{f"constant_{i}": _raw(c) for i, c in enumerate(constants)})
    return held.getvalue()


def _raw(constant: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(jax.typeof(constant).dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.frombuffer(np.asarray(constant).tobytes(), np.uint8)
