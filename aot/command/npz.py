"""Read the arrays of a call from an .npz file, by their paths, and write results to one."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.npyio import NpzFile

from jointcut.aot.export.descriptors import Described, fits, same_sizes
from jointcut.partition.errors import CallError, choices, message
from jointcut.wrappers.record import key_implementation, read_dtype

_SAVED = "Write it with numpy.savez(file, **arrays), where arrays holds each array under its path."


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file by name; raises `CallError` for any other file, and never unpickles."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, NpzFile):
            with archive:
                return {name: np.asarray(archive[name]) for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CallError(message(str(path), f"is no .npz file that can be read: {error}.", _SAVED)) from error
    raise CallError(message(str(path), "holds one array and no names.", _SAVED))


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays under their names; raises `CallError` where the file cannot be written."""
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **arrays)
    try:
        path.write_bytes(archive.getvalue())
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}."
        raise CallError(message(str(path), what, "Give a file in a folder that you may write to.")) from error


def taken(arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Described], where: str) -> list[Any]:
    """The wanted arrays in order, each with its shape and dtype; `where` is the file.

    Raises `CallError` with the name of an array that is missing, unknown or of another type.
    """
    for name, described in wanted.items():
        if name not in arrays:
            cure = _SAVED if not arrays else f"It holds {', '.join(arrays)}. {_SAVED}"
            raise CallError(message(where, f"lacks {name}, a {described.type}.", cure))
    for name in arrays:
        if name not in wanted:
            raise CallError(message(where, f"holds {name!r}, which is no input.", choices(name, wanted)))
    typed = [_typed(arrays[name], name, described, where) for name, described in wanted.items()]
    pairs = zip(wanted.items(), typed, strict=True)
    same_sizes([(f"{name} in {where}", described, array.shape) for (name, described), array in pairs])
    return typed


def _typed(array: np.ndarray, name: str, described: Described, where: str) -> Any:
    dtype = read_dtype(described.dtype, name)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        typed: Any = _key(array, name, described, where)
    elif array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:  # numpy does not save foreign dtypes
        typed = array.view(dtype)
    else:
        typed = array
    if typed.dtype != dtype or not fits(typed.shape, described.shape):
        what = f"is {typed.dtype}[{','.join(map(str, typed.shape))}], and must be {described.type}."
        raise CallError(message(f"{name} in {where}", what, "Convert it before you save it, or export for it."))
    return typed


def _key(array: np.ndarray, name: str, described: Described, where: str) -> Any:
    if array.dtype != np.uint32 or array.ndim != len(described.shape) + 1:
        what = f"is {array.dtype}[{','.join(map(str, array.shape))}], and must be the data of {described.type}."
        raise CallError(message(f"{name} in {where}", what, "Save jax.random.key_data(key)."))
    return jax.random.wrap_key_data(jnp.asarray(array), impl=key_implementation(described.dtype))


def as_numpy(x: Any) -> np.ndarray:
    """A JAX array as a numpy array; a random key as its data."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
