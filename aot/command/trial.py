"""Run an exported pair on given arrays, and check the results.

Arrays go in and out in the order of the contract, named by their paths, so that the user's trees are not needed. The
checks work without the source of the model: all numbers are finite, the forward gives the outputs of the function
alone, the function changes as its gradient says, and the results equal those of another run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jointcut.aot.command import npz
from jointcut.aot.command.differences import ALLOWED, missed, wide
from jointcut.aot.export.descriptors import GradientOutput, Input
from jointcut.aot.export.loaded import Loaded
from jointcut.aot.trace.trees import dense
from jointcut.partition.errors import CallError, JointcutError, message
from jointcut.wrappers.metadata.convention import is_inexact, is_real

_NO_GRADIENT = "; if it has a stop_gradient or a derivative of your own, give --no-differences"


class FlatPair(Loaded):
    """An exported pair that takes and gives arrays in the order of its contract."""

    @property
    def inputs(self) -> dict[str, Input]:
        """The inputs by path, without the constants of the artefact."""
        return {info.path: info for info in self._leaves}

    @property
    def has_scalar(self) -> bool:
        """Whether the only differentiable output is a real number, so that its cotangent can be 1."""
        tangents = self.contract.tangents
        return len(tangents) == 1 and tangents[0].shape == () and is_real(tangents[0].aval.dtype)

    def alone(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """The outputs of the function alone; raises `CallError` where this machine cannot run it."""
        with self._here():
            return list(map(npz.as_numpy, self.running("alone")(*self._constants, *inputs)))

    def halves(self, inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The outputs of the forward, and the gradients of the backward; raises `CallError` as `alone` does."""
        with self._here():
            outputs, residuals = self.routed([*self._constants, *inputs])
            gradients = self.running("backward")(residuals, tangents)
            return list(map(npz.as_numpy, outputs)), list(map(npz.as_numpy, gradients))

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Turn JAX's errors into `CallError`: a missing platform, sizes that the export excluded, lack of memory."""
        try:
            yield
        except JointcutError:
            raise
        except (RuntimeError, ValueError) as error:
            cure = "Give arrays that it was exported for, on a machine that has what they take."
            raise CallError(message(self.contract.name, f"cannot run here: {error}", cure)) from error


@dataclass(frozen=True)
class Check:
    """The result of one check; `passed` is None where it is undecided, `detail` says why."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Trial:
    """An exported pair and arrays for it; `tangents` is None where the backward is not run."""

    pair: FlatPair
    inputs: list[Any]
    tangents: list[Any] | None

    @classmethod
    def of(cls, pair: FlatPair, arrays: Mapping[str, np.ndarray], where: str) -> Trial:
        """Take arrays by the paths of inputs and the names of tangents; raises `CallError` where they do not fit.

        Without tangents the cotangent of a real number is 1; for other outputs the backward is not run.
        """
        pair.refuse_width()
        tangents = {t.name: t for t in pair.contract.tangents}
        has_tangents = bool(tangents.keys() & arrays.keys())
        values = npz.taken(arrays, {**pair.inputs, **(tangents if has_tangents else {})}, where)
        inputs, cotangents = values[: len(pair.inputs)], values[len(pair.inputs) :]
        if not has_tangents and pair.has_scalar:
            cotangents = [np.ones((), t.aval.dtype) for t in tangents.values()]
        return cls(pair, inputs, cotangents if pair.contract.is_train and cotangents else None)

    @cached_property
    def outputs(self) -> list[np.ndarray]:
        """The outputs of the function alone."""
        return self.pair.alone(self.inputs)

    @cached_property
    def halves(self) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """The outputs of the forward and the gradients of the backward, None where it is not run."""
        return None if self.tangents is None else self.pair.halves(self.inputs, self.tangents)

    @property
    def gradients(self) -> list[np.ndarray]:
        """The gradients of the backward, none where it is not run."""
        return [] if self.halves is None else self.halves[1]

    @property
    def results(self) -> dict[str, np.ndarray]:
        """Outputs by their paths, and gradients by those of their inputs: `gradient of args[0]['w']`."""
        contract = self.pair.contract
        outputs = {o.path: value for o, value in zip(contract.outputs, self.outputs, strict=True)}
        pairs = zip(contract.gradients, self.gradients, strict=False)  # no gradients where the backward is not run
        return outputs | {gradient_name(gradient): value for gradient, value in pairs}

    def checks(self, differences: bool) -> Iterator[Check]:
        """The checks that need only this machine, as `jointcut run --help` lists them."""
        yield _finite(self.results)
        if self.halves is not None:
            contract = self.pair.contract
            outputs = dict(zip((o.path for o in contract.outputs), self.halves[0], strict=True))
            yield _same("forward", outputs, {o.path: self.results[o.path] for o in contract.outputs})
            if differences and self.tangents:
                yield _differences(self, self.tangents)

    def compared(self, reference: Mapping[str, np.ndarray]) -> Check:
        """Whether the results equal those of another run, which `npz.write` wrote."""
        return _same("reference", self.results, reference)


def gradient_name(gradient: GradientOutput) -> str:
    """The name of a gradient in files: `gradient of args[0]['w']`, for the rows of a table `..., rows`."""
    return f"gradient of {gradient.path}" + ("" if gradient.part == "whole" else f", {gradient.part}")


# ------------------------------------------------------------------------------------------------ equal, and finite


def _finite(results: Mapping[str, np.ndarray]) -> Check:
    bad = {
        name: f"{count:,} of {a.size:,}"
        for name, a in results.items()
        if is_inexact(a.dtype) and (count := int(np.sum(~np.isfinite(wide(a)))))
    }
    detail = "; ".join(f"{name} is not finite in {count} numbers" for name, count in bad.items())
    return Check("finite", not bad, detail or "every number is finite")


def _same(name: str, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> Check:
    """Whether arrays are equal, floating-point ones to half of their dtype's digits."""
    wrong, largest = [], 0.0
    for path, wanted in want.items():
        if path not in got:
            wrong.append(f"{path} is not among the results")
            continue
        array = got[path]
        wanted = wanted.view(array.dtype) if _is_nameless(wanted, array) else wanted
        if (array.dtype, array.shape) != (wanted.dtype, wanted.shape):
            wrong.append(f"{path} is {_type(array)}, and was {_type(wanted)}")
            continue
        distance, allowed = _apart(array, wanted), _allowed(array.dtype)
        largest = max(largest, distance)
        if not distance <= allowed:
            wrong.append(f"{path} differs by {distance:.1e} of its size, more than {allowed:.1e}")
    detail = f"{len(want)} compared: they differ by at most {largest:.1e} of their size" if largest else "no difference"
    return Check(name, not wrong, "; ".join(wrong) or detail)


def _is_nameless(wanted: np.ndarray, array: np.ndarray) -> bool:
    """Whether numpy lost the dtype of an array when it was written."""
    return wanted.dtype.kind == "V" and wanted.dtype.itemsize == array.dtype.itemsize


def _type(a: np.ndarray) -> str:
    return f"{a.dtype}[{','.join(map(str, a.shape))}]"


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference over the norm of `b`; of integers, the share that differ."""
    if not is_inexact(a.dtype):
        return float(np.mean(a != b)) if a.size else 0.0
    x, y = wide(a), wide(b)
    if np.array_equal(x, y, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.divide(np.linalg.norm(x - y), np.linalg.norm(y)))


def _allowed(dtype: Any) -> float:
    return math.sqrt(_eps(dtype)) if is_inexact(dtype) else 0.0


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


# ----------------------------------------------------------------------------------------------------- differences


def _differences(trial: Trial, tangents: Sequence[Any]) -> Check:
    """Whether the function changes along random directions as its gradient says."""
    gradients = _by_input(trial)
    places = [i for i, info in enumerate(trial.pair.inputs.values()) if info.name in gradients]
    names = [info.name for info in trial.pair.inputs.values()]
    weights = [wide(np.asarray(t)) for t in tangents]
    outputs = [o.name for o in trial.pair.contract.outputs]
    read = [outputs.index(t.of) for t in trial.pair.contract.tangents]

    def weighted(moved: Sequence[np.ndarray]) -> tuple[float, float]:
        inputs = list(trial.inputs)
        for i, x in zip(places, moved, strict=True):
            inputs[i] = x
        values = trial.pair.alone(inputs)
        terms = [np.real(w * wide(values[i])) for w, i in zip(weights, read, strict=True)]
        return sum(float(np.sum(x)) for x in terms), sum(float(np.sum(np.abs(x))) for x in terms)

    points = [np.asarray(trial.inputs[i]) for i in places]
    eps = max(_eps(x.dtype) for x in (*points, *tangents))
    share = missed(weighted, points, [gradients[names[i]] for i in places], eps)
    if share is None:
        return Check("differences", None, "undecided: rounding may hide the function's change")
    detail = f"the gradient misses {share:.1e} of the change along a direction, and may miss {ALLOWED}"
    return Check("differences", share <= ALLOWED, detail if share <= ALLOWED else detail + _NO_GRADIENT)


def _by_input(trial: Trial) -> dict[str, np.ndarray]:
    """The gradient of each input that has one, as one array; the rows of a table are put in their places."""
    shapes = {info.name: x.shape for info, x in zip(trial.pair.inputs.values(), trial.inputs, strict=True)}
    parts_of: dict[str, list[np.ndarray]] = {}
    for gradient, value in zip(trial.pair.contract.gradients, trial.gradients, strict=True):
        parts_of.setdefault(gradient.of, []).append(value)
    return {name: _whole(parts, shapes[name]) for name, parts in parts_of.items()}


def _whole(parts: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    rows, places = parts
    return np.asarray(dense(rows, places, shape))
