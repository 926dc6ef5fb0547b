"""Make PyTorch's figures: `python -m benchmarks.derivatives.pytorch [FAMILY ...]`, with the extra `pytorch`.

All is in float64 and complex128, and in JAX's convention for complex numbers: JAX's gradient is the conjugate of
PyTorch's, for a cotangent conjugated likewise. Second order is the gradient of the first-order gradients, each paired
with a fixed direction.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.derivatives.case import Case, Inputs, direction
from benchmarks.derivatives.cases import cases, families
from benchmarks.derivatives.figures import FOLDER, RANDOM, Figures, write


def evaluate(torch: Any, case: Case, inputs: Inputs) -> tuple[list[np.ndarray], ...]:
    """PyTorch's values, gradients, and gradients of gradients of one case at one input."""
    assert case.torch is not None
    tensors = [torch.from_numpy(np.array(x)) for x in inputs]
    varied = [tensors[n].requires_grad_() for n in case.places(inputs)]
    results = case.torch(torch, *tensors)
    results = list(results) if isinstance(results, tuple | list) else [results]
    values = [result.detach().resolve_conj().resolve_neg().numpy(force=True) for result in results]
    smooth = [result for result in results if result.is_floating_point() or result.is_complex()]
    paired = [direction(_array(result), "cotangent", n) for n, result in enumerate(smooth)]
    first = _pulled(torch, smooth, varied, paired)
    if first is None:
        return values, [], []
    aside = [direction(_array(grad), "second", n) for n, grad in enumerate(first)]
    second = _pulled(torch, first, varied, aside)
    return values, [_array(grad) for grad in first], [_array(grad) for grad in second or []]


def _pulled(
    torch: Any, results: Sequence[Any], varied: Sequence[Any], cotangents: list[np.ndarray]
) -> list[Any] | None:
    """Pull cotangents back, in JAX's convention; None where PyTorch has no derivative. Zeros where nothing depends."""
    pairs = [(r, torch.from_numpy(c).conj()) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in varied]
    outs, weights = zip(*pairs, strict=True)
    try:
        grads = torch.autograd.grad(outs, varied, weights, create_graph=True, allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        if any(word in str(error) for word in ("not implemented", "not differentiable", "unsupported")):
            return None
        if "singular" in str(error) or "ill-defined" in str(error):
            return [torch.full_like(x, torch.nan) for x in varied]  # PyTorch raises where it would divide by zero
        raise
    return [torch.zeros_like(x) if grad is None else grad.conj() for x, grad in zip(varied, grads, strict=True)]


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().resolve_conj().resolve_neg().numpy(force=True)


def figures_of(torch: Any, family: str, count: int = RANDOM) -> Figures:
    """All figures of a family, with so many random inputs for each case."""
    return {
        (case.name, name): evaluate(torch, case, inputs)
        for case in cases(family)
        if case.torch is not None
        for name, inputs in case.inputs(family, count)
    }


def main() -> None:
    """Write the figures of the chosen families, or of all."""
    import torch  # an extra, that nothing else here needs

    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives.pytorch", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all when none")
    parser.add_argument("--random", type=int, default=RANDOM, help="random inputs of each case (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the figures go")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    for family in chosen.families or families():
        path = write(family, figures_of(torch, family, chosen.random), chosen.folder)
        print(f"{path.name}: {len(cases(family))} cases, {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
