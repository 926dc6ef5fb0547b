"""Read exported programs, and refuse one that is not what the contract says."""

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

from jointcut.aot.export.agreement import CONSTANTS
from jointcut.aot.export.artefact import Artefact
from jointcut.aot.export.contract import Contract
from jointcut.aot.export.descriptors import CURE, Described, Input, size_of
from jointcut.aot.export.pair import versions
from jointcut.partition.errors import ArtefactError, CallError, message
from jointcut.partition.program import jaxprs
from jointcut.wrappers.record import key_implementation

Arrays = Sequence[Described | None]

#: What `jax.export.deserialize` and the reader of its format raise for bytes that are none of theirs.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, struct.error)


@dataclass(frozen=True)
class Program:
    """A program of an artefact as a function of arrays, differentiable as often as the contract says.

    `waits_in_loops` says whether a loop in it holds an optimisation barrier: XLA:CPU up to JAX 0.11, told to keep
    barriers, aborts the process over such.
    """

    run: Callable[..., list[Any]]
    waits_in_loops: bool

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results, in order."""
        return self.run(*arrays)


def program(name: str, contract: Contract, found: Artefact) -> Program:
    """Read a program of an artefact.

    Raises `ArtefactError` where this JAX cannot read it, or where it is not the program that the contract describes.
    """
    entry = contract.programs[name]
    file = found.folder / entry["file"]
    _refuse_convention(entry["calling_convention_version"], file)
    made = _deserialized(found.files[entry["file"]], file)
    text = _text(made, contract, file)
    _refuse_another(made, name, contract, file)
    takes, gives = _arrays(name, contract, len(made.out_avals))
    _refuse_types(made.in_avals, takes, "takes", file)
    _refuse_types(made.out_avals, gives, "gives", file)
    call = _batched_never(made.call, contract) if contract.order == 1 else made.call

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

    return Program(run, _waits_in_loops(text))


def _is_as_weak(x: Any, described: Described | None) -> bool:
    """Whether an argument has the weak type that it had at export, if any."""
    return described is None or not described.weak_type or bool(jax.typeof(x).weak_type)


def _weak(x: Any, described: Described | None) -> Any:
    """A result with its weak type, which `jax.export` does not keep."""
    return x if described is None or not described.weak_type else jaxprs.typed(x, described.aval)


def _arrays(name: str, contract: Contract, count: int) -> tuple[Arrays, Arrays]:
    """What a program takes and gives; None for what the forward gives, of `count` results, and nobody reads."""
    if name == "backward":
        return [*contract.residuals, *contract.tangents], contract.gradients
    if name == "inference":
        return contract.inputs, contract.outputs
    saved = {r.index: r for r in contract.residuals if r.kind == "saved"}
    held = [saved.pop(i, None) for i in range(count - len(contract.outputs))]
    return contract.inputs, [*contract.outputs, *held, *saved.values()]


# ------------------------------------------------------------------------------------------------------- constants


def constants(contract: Contract, found: Artefact) -> list[Any]:
    """The arrays that the function closes over; raises `ArtefactError` where the file does not hold them."""
    infos = contract.inputs[: contract.num_constants]
    if not infos:
        return []
    try:
        with np.load(io.BytesIO(found.files[CONSTANTS]), allow_pickle=False) as held:
            names = {f"constant_{i}": info for i, info in enumerate(infos)}
            if set(held.files) != set(names):
                raise ValueError(f"it holds {', '.join(held.files)}")
            with jax.ensure_compile_time_eval():
                return [_array(held[name], info) for name, info in names.items()]
    except (*_UNREADABLE, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        what = f"does not hold the constants that signature.json describes: {error}."
        raise ArtefactError(message(str(found.folder / CONSTANTS), what, CURE)) from error


def _array(data: np.ndarray, info: Input) -> Any:
    """A constant made of its bytes."""
    aval = info.aval
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.asarray(data.view(aval.dtype).reshape(aval.shape))
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    made = jnp.asarray(data.view(words.dtype).reshape(words.shape))
    return jax.random.wrap_key_data(made, impl=key_implementation(info.dtype))


# -------------------------------------------------------------------------------------------------------- refusals


def _refuse_convention(spoken: int, file: Path) -> None:
    newest = jax.export.maximum_supported_calling_convention_version
    oldest = jax.export.minimum_supported_calling_convention_version
    if not oldest <= spoken <= newest:
        here = f"JAX {versions()['jax']} speaks {oldest} to {newest}"
        what = f"speaks version {spoken} of JAX's calling convention, and {here}."
        cure = "Use a newer JAX, or export again." if spoken > newest else "Export again with this JAX."
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


def _text(made: Any, contract: Contract, file: Path) -> str:
    """The program as MLIR; raises `ArtefactError` for StableHLO that only a newer JAX reads."""
    try:
        return made.mlir_module()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        what = f"holds StableHLO that JAX {versions()['jax']} does not read."
        cure = f"Use JAX {contract.versions.get('jax', 'of its time')} or newer, or export with this one."
        raise ArtefactError(message(str(file), what, cure)) from error


def _refuse_another(made: Any, name: str, contract: Contract, file: Path) -> None:
    """Raise `ArtefactError` for a program that says of itself what the contract does not."""
    told = {
        "platforms": (set(made.platforms), set(contract.platforms)),
        "calling_convention_version": (
            made.calling_convention_version,
            contract.programs[name]["calling_convention_version"],
        ),
        "effects": ((*made.ordered_effects, *made.unordered_effects), ()),
        "safety checks that are off": (tuple(made.disabled_safety_checks), ()),
    }
    for what, (is_so, said) in told.items():
        if is_so != said:
            raise ArtefactError(message(str(file), f"has the {what} {is_so}, and signature.json says {said}.", CURE))
    if not made.fun_name.endswith(f"_{name}"):
        raise ArtefactError(message(str(file), f"holds {made.fun_name}, which is no program called {name}.", CURE))
    for _ in range(contract.order - 1 if name != "inference" else 0):
        if not made.has_vjp():
            what = f"cannot be differentiated as often as the order {contract.order} says."
            raise ArtefactError(message(str(file), what, CURE))
        made = made.vjp()


def _refuse_types(avals: Sequence[Any], said: Arrays, does: str, file: Path) -> None:
    if len(avals) != len(said):
        what = f"{does} {len(avals)} arrays, and signature.json says {len(said)}."
        raise ArtefactError(message(str(file), what, CURE))
    for aval, described in zip(avals, said, strict=True):
        if described is not None and not _is_of(aval, described):
            what = f"{does} {aval.str_short()}, and signature.json says {described}."
            raise ArtefactError(message(str(file), what, CURE))


def _is_of(aval: Any, described: Described) -> bool:
    dtype = "float0" if aval.dtype == jax.dtypes.float0 else str(aval.dtype)
    return dtype == described.dtype and tuple(map(size_of, aval.shape)) == described.shape


# ------------------------------------------------------------------------------------------------ transformations


def _waits_in_loops(text: str) -> bool:
    """Whether a barrier may stand in a loop: anywhere but in the outermost lines of `main`, where there are loops."""
    if "stablehlo.while" not in text:
        return False
    function = ""
    for line in text.splitlines():
        function = line if line.startswith("  func.func ") else function
        if "stablehlo.optimization_barrier" in line and ("@main(" not in function or line.startswith(" " * 5)):
            return True
    return False


def _batched_never(call: Callable[..., Any], contract: Contract) -> Callable[..., Any]:
    """A program whose own derivative was not exported, and that runs on one example."""
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
    """The error for `jax.vmap` of a loaded function."""
    cure = "Export jax.vmap of the function, or go through the examples with jax.lax.map."
    what = "was exported for one example, and jax.vmap gives it a batch, as jax.jacrev and jax.hessian do."
    return CallError(message(name, what, cure))
