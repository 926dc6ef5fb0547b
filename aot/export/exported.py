"""Read exported programs, and refuse a program that does not match the contract."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.export.artefact import Artefact
from jointcut.aot.export.contract import Contract
from jointcut.aot.export.pair import versions
from jointcut.partition.errors import ArtefactError, CallError, message
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.metadata.descriptors import CURE, Described, Input, size_of
from jointcut.wrappers.record import key_implementation

Arrays = Sequence[Described | None]

CONSTANTS = "constants.npz"

#: The errors of `jax.export.deserialize` and of its format's reader for foreign bytes.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, struct.error)


@dataclass(frozen=True)
class LoadedProgram:
    """A program of an artefact as a function of arrays; the contract says how often it can be differentiated.

    `waits_in_loops` says whether a loop in it may hold an optimisation barrier. Up to JAX 0.11, XLA:CPU aborts the
    process on such a loop if it is told to keep barriers. `devices` is the number of devices that it was exported for.
    """

    run: Callable[..., list[Any]]
    waits_in_loops: bool
    devices: int

    def __call__(self, *arrays: Any) -> list[Any]:
        """Return the results, in order."""
        return self.run(*arrays)


def program(name: str, contract: Contract, artefact: Artefact) -> LoadedProgram:
    """Read a program of an artefact.

    Raises `ArtefactError` if this JAX cannot read it, or if it does not match the contract.
    """
    entry = contract.programs[name]
    file = artefact.folder / entry["file"]
    _refuse_convention(entry["calling_convention_version"], file)
    exported = _deserialized(artefact.files[entry["file"]], file)
    text = _text(exported, contract, file)
    takes, gives = _arrays(name, contract, len(exported.out_avals))
    _refuse_types(exported.in_avals, takes, "takes", file)
    _refuse_types(exported.out_avals, gives, "gives", file)
    call = _never_batched(exported.call, contract) if contract.order == 1 else exported.call

    def run(*arrays: Any) -> list[Any]:
        try:
            results = call(*arrays)
        except NotImplementedError as error:
            if "Batching rule" in str(error):
                raise _no_batch(contract.name) from error
            raise
        if not all(map(_is_as_weak, arrays, takes)):
            return list(results)
        return [_weak(x, d) for x, d in zip(results, gives, strict=True)]

    return LoadedProgram(run, _waits_in_loops(text), exported.nr_devices)


def _is_as_weak(x: Any, described: Described | None) -> bool:
    """Whether an argument is weakly typed, if it was so at export."""
    return described is None or not described.weak_type or bool(jax.typeof(x).weak_type)


def _weak(x: Any, described: Described | None) -> Any:
    """Return a result with its weak type, which `jax.export` does not keep."""
    return x if described is None or not described.weak_type else abstract.typed(x, described.aval)


def _arrays(name: str, contract: Contract, count: int) -> tuple[Arrays, Arrays]:
    """Return the arrays that a program takes and returns.

    The forward has `count` results; for its unused results, the description is None.
    """
    if name == "backward":
        return [*contract.residuals, *contract.tangents], contract.gradients
    if name == "inference":
        return contract.inputs, contract.outputs
    saved = {r.index: r for r in contract.residuals if r.kind == "saved"}
    handed = [saved.pop(i, None) for i in range(count - len(contract.outputs))]
    return contract.inputs, [*contract.outputs, *handed, *saved.values()]


# ------------------------------------------------------------------------------------------------------- constants


def constants(contract: Contract, artefact: Artefact) -> list[Any]:
    """Return the arrays that the function closes over; raises `ArtefactError` if the file does not hold them."""
    inputs = contract.inputs[: contract.num_constants]
    if not inputs:
        return []
    try:
        with np.load(io.BytesIO(artefact.files[CONSTANTS]), allow_pickle=False) as archive:
            names = {f"constant_{i}": info for i, info in enumerate(inputs)}
            if set(archive.files) != set(names):
                raise ValueError(f"it holds {', '.join(archive.files)}")
            with jax.ensure_compile_time_eval():
                return [_array(archive[name], info) for name, info in names.items()]
    except (*_UNREADABLE, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        what = f"does not hold the constants that signature.json describes: {error}."
        raise ArtefactError(message(str(artefact.folder / CONSTANTS), what, CURE)) from error


def _array(data: np.ndarray, info: Input) -> Any:
    """Return the constant with these bytes."""
    aval = info.aval
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.asarray(data.view(aval.dtype).reshape(aval.shape))
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    key_data = jnp.asarray(data.view(words.dtype).reshape(words.shape))
    return jax.random.wrap_key_data(key_data, impl=key_implementation(info.dtype))


# -------------------------------------------------------------------------------------------------------- refusals


def _refuse_convention(number: int, file: Path) -> None:
    newest = jax.export.maximum_supported_calling_convention_version
    oldest = jax.export.minimum_supported_calling_convention_version
    if not oldest <= number <= newest:
        here = f"JAX {versions()['jax']} speaks {oldest} to {newest}"
        what = f"speaks version {number} of JAX's calling convention, and {here}."
        cure = "Use a newer JAX, or export again." if number > newest else "Export again with this JAX."
        raise ArtefactError(message(str(file), what, cure))


def _deserialized(data: bytes, file: Path) -> Any:
    try:
        return jax.export.deserialize(bytearray(data))
    except ImportError as error:
        cure = "Install it: pip install flatbuffers."
        raise ArtefactError(message("Loading", "needs the package flatbuffers.", cure)) from error
    except _UNREADABLE as error:
        what = f"is no program that JAX {versions()['jax']} can read: {error!r}."
        raise ArtefactError(
            message(str(file), what, "Use the JAX that signature.json names, or a newer one.")
        ) from error


def _text(exported: Any, contract: Contract, file: Path) -> str:
    """Return the program as MLIR; raises `ArtefactError` for StableHLO that only a newer JAX reads."""
    try:
        return exported.mlir_module()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        what = f"holds StableHLO that JAX {versions()['jax']} does not read."
        cure = f"Use JAX {contract.versions.get('jax', 'of its time')} or newer, or export with this one."
        raise ArtefactError(message(str(file), what, cure)) from error


def _refuse_types(avals: Sequence[Any], expected: Arrays, does: str, file: Path) -> None:
    if len(avals) != len(expected):
        what = f"{does} {len(avals)} arrays, and signature.json says {len(expected)}."
        raise ArtefactError(message(str(file), what, CURE))
    for aval, described in zip(avals, expected, strict=True):
        if described is not None and not _is_of(aval, described):
            what = f"{does} {aval.str_short()}, and signature.json says {described}."
            raise ArtefactError(message(str(file), what, CURE))


def _is_of(aval: Any, described: Described) -> bool:
    dtype = "float0" if aval.dtype == jax.dtypes.float0 else str(aval.dtype)
    return dtype == described.dtype and tuple(map(size_of, aval.shape)) == described.shape


# ------------------------------------------------------------------------------------------------ transformations


def _waits_in_loops(text: str) -> bool:
    """Whether a loop may hold a barrier: there are loops, and a barrier that is not on an outermost line of `main`."""
    if "stablehlo.while" not in text:
        return False
    function = ""
    for line in text.splitlines():
        function = line if line.startswith("  func.func ") else function
        if "stablehlo.optimization_barrier" in line and ("@main(" not in function or line.startswith(" " * 5)):
            return True
    return False


def _never_batched(call: Callable[..., Any], contract: Contract) -> Callable[..., Any]:
    """Return a program that refuses `jax.vmap` and a second derivative."""
    alone = jax.custom_batching.custom_vmap(call)

    @alone.def_vmap
    def refuse_batch(size: int, batched: Sequence[Any], *arrays: Any) -> Any:
        del size, batched, arrays
        raise _no_batch(contract.name)

    once = jax.custom_vjp(alone)

    def refuse_twice(*arrays: Any) -> Any:
        del arrays
        what = "was exported to be differentiated once, and is differentiated twice."
        raise CallError(message(contract.name, what, "Export it with order=2."))

    once.defvjp(refuse_twice, refuse_twice)
    return once


def _no_batch(name: str) -> CallError:
    """Return the error for `jax.vmap` of a loaded function."""
    cure = "Export jax.vmap of the function, or go through the examples with jax.lax.map."
    what = "was exported for one example, and jax.vmap gives it a batch, as jax.jacrev and jax.hessian do."
    return CallError(message(name, what, cure))
