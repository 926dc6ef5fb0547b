"""Keep PyTorch's figures: values, gradients and gradients of gradients, one small file for each family."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "tests" / "derivatives" / "figures"
RANDOM = 3  # random inputs of each case whose figures are kept

# (case, input) -> value, first order and second order, each a list of arrays; a missing second order is an empty list
Figures = dict[tuple[str, str], tuple[list[np.ndarray], ...]]


def write(family: str, figures: Figures, folder: Path = FOLDER) -> Path:
    """Write the figures of a family into a folder as one flat array and an index."""
    index, parts = [], [np.zeros(0)]
    for (case, name), kinds in figures.items():
        index.append([case, name, [[[array.dtype.kind, list(array.shape)] for array in arrays] for arrays in kinds]])
        for array in (array for arrays in kinds for array in arrays):
            flat = np.ravel(array)
            parts.append(
                np.stack([flat.real, flat.imag], -1).ravel() if array.dtype.kind == "c" else flat.astype(float)
            )
    path = folder / f"{family}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez_compressed(path, flat=np.concatenate(parts), index=text)
    return path


def read(family: str, folder: Path = FOLDER) -> Figures:
    """Read the figures of a family from a folder."""
    with np.load(folder / f"{family}.npz") as stored:
        flat, index = stored["flat"], json.loads(stored["index"].tobytes())
    figures: Figures = {}
    start = 0
    for case, name, kinds in index:
        read_kinds = []
        for arrays in kinds:
            read_arrays = []
            for kind, shape in arrays:
                size = int(np.prod(shape)) * (2 if kind == "c" else 1)
                part = flat[start : start + size]
                start += size
                part = part[0::2] + 1j * part[1::2] if kind == "c" else part
                read_arrays.append(part.astype({"c": complex, "f": float}.get(kind, np.int64)).reshape(shape))
            read_kinds.append(read_arrays)
        figures[case, name] = tuple(read_kinds)
    return figures
