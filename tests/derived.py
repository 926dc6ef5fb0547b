"""Laws that every derivative of `jointcut.aot.derivatives` keeps, for one case of `benchmarks/derivatives`."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.derivatives.case import Case, direction
from benchmarks.derivatives.cases import cases
from benchmarks.derivatives.compare import TOLERANCES, distance, finite, is_natural
from benchmarks.derivatives.evaluate import Batch, batches, evaluate_all, ours, pulled, smooth, theirs
from benchmarks.derivatives.figures import RANDOM, Figures, read

STEP = 1e-5  # of finite differences
figures_of = cache(read)


@cache
def batches_of(family: str, name: str) -> list[Batch]:
    """Ours at every input of the figures."""
    case = case_of(family, name)
    return batches(case, ours(case), list(case.inputs(family, RANDOM)))


@cache
def evaluated(family: str, name: str):
    """Ours at every input of the figures: name of input -> values, first order, second order."""
    return {name: found for batch in batches_of(family, name) for name, found in batch.evaluated().items()}


def case_of(family: str, name: str) -> Case:
    """The case with this name."""
    return next(case for case in cases(family) if case.name == name)


def figure(family: str, case: Case, name: str, order: int):
    """PyTorch's arrays at one input; None if PyTorch has none."""
    figures: Figures = figures_of(family)
    kinds = figures.get((case.name, name))
    return kinds[order] if kinds and (kinds[order] or not order) else None


def equals_pytorch(family: str, case: Case) -> None:
    """Values, first and second order are PyTorch's, wherever its are finite."""
    mine = evaluated(family, case.name)
    for name in mine:
        for order in (0, 1, 2):
            figures = figure(family, case, name, order)
            if figures is None or name in case.differs or not (order == 0 or finite(mine[name][0])):
                continue
            if order == 0 or finite(figures):
                error = distance(mine[name][order], figures)
                assert error <= max(TOLERANCES[order], case.loose), (name, order, mine[name][order], figures)


def is_finite_at_probes(family: str, case: Case) -> None:
    """Where the function is finite so are both orders, but where none of PyTorch's and no limit is."""
    mine = evaluated(family, case.name)
    for name in case.probes:
        if finite(mine[name][0]):
            for order in (1, 2):
                natural = is_natural(case, name, order, mine[name][order], figure(family, case, name, order))
                assert finite(mine[name][order]) or natural, (name, order, mine[name][order])


def equals_jax(family: str, case: Case) -> None:
    """Values are JAX's bit for bit; first order is JAX's where that is finite and conventions agree."""
    function = theirs(case)
    if function is None:
        return
    named = list(case.inputs(family, RANDOM))
    mine, others = evaluated(family, case.name), evaluate_all(case, function, named)
    for name, inputs in named:
        agrees = case.agrees if name in case.probes else case.agrees is not None
        if agrees and finite((*others[name][0], *others[name][1])) and name not in case.differs:
            assert distance(mine[name][1], others[name][1]) <= TOLERANCES[1], (name, mine[name][1], others[name][1])
        if not name.startswith("random") or name == "random 0":
            if isinstance(case.jax, str):
                _same_bits(ours(case)(*inputs), function(*inputs))
            else:
                assert distance(mine[name][0], others[name][0]) <= TOLERANCES[0]


def _same_bits(mine, other) -> None:
    """Equal values of equal types, weak or not."""
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
        assert jnp.asarray(a).weak_type == jnp.asarray(b).weak_type


def is_linear_in_the_cotangent(family: str, case: Case) -> None:
    """A sum is pulled back to the sum, and zero to zero at every input."""
    for batch in batches_of(family, case.name):
        once = batch.cotangents
        for name, zero in batch.evaluated([0 * c for c in once]).items():
            both_orders = finite(zero[0])
            assert all((grad == 0).all() for grad in (*zero[1], *zero[2] * both_orders)), (name, zero)
        if "random 0" in batch.names:
            ways = once, [c**2 for c in once], [2 * c - c**2 for c in once]
            for a, b, c in zip(*(batch.evaluated(way)["random 0"][1] for way in ways), strict=True):
                np.testing.assert_allclose(c, 2 * a - b, rtol=1e-9, atol=1e-12)


def keeps_its_type(family: str, case: Case) -> None:
    """Single precision in, single precision out, for values, gradients and tangents."""
    single = {np.dtype("float64"): np.dtype("float32"), np.dtype("complex128"): np.dtype("complex64")}
    inputs = [x.astype(single.get(x.dtype, x.dtype)) for x in case.random(family, 0)]
    places = case.places(tuple(inputs))
    function = smooth(ours(case), tuple(inputs), places)
    varied = [inputs[n] for n in places]
    results = jax.eval_shape(function, *varied)
    assert {r.dtype for r in results} <= set(single.values())
    grads = jax.eval_shape(lambda *xs: pulled(function, [jnp.ones_like(r) for r in function(*xs)], xs), *varied)
    assert [g.dtype for g in grads] == [x.dtype for x in varied]
    tangents = jax.eval_shape(lambda *xs: jax.jvp(function, xs, xs)[1], *varied)
    assert [t.dtype for t in tangents] == [r.dtype for r in results]


def equals_finite_differences(family: str, case: Case) -> None:
    """Both modes, and each mode of each, are finite differences at a random input; and a batch is its rows.

    One case of each function is enough, since the others have PyTorch's figures.
    """
    if case is not next(other for other in cases(family) if other.ours == case.ours):
        return
    inputs = case.random(family, 0)
    places = case.places(inputs)
    gradient = equals_differences(smooth(ours(case), inputs, places), *(inputs[n] for n in places))
    assert distance(evaluated(family, case.name)["random 0"][1], [np.asarray(grad) for grad in gradient]) < 1e-13


def equals_differences(function, *inputs, tolerance: float = 1e-5):
    """What both modes give, and each mode of each, are finite differences.

    The function returns a list. Answers the cotangents of the inputs for fixed ones of the results.
    """

    def both_modes(xs, ways, cotangents):
        values, push = jax.linearize(function, *xs)
        return values, push(*ways), jax.linear_transpose(push, *xs)(cotangents)

    @jax.jit
    def compared(xs):
        results = jax.eval_shape(function, *xs)
        at = (xs, _directions(xs, "along"), _directions(results, "cotangent"))
        moves = tuple(_directions(arrays, f"move {n}") for n, arrays in enumerate(at))
        steps = jax.tree.map(lambda x, move: jnp.stack([x + STEP * move, x - STEP * move]), at, moves)
        differences = jax.tree.map(lambda y: (y[0] - y[1]) / (2 * STEP), jax.vmap(both_modes)(*steps))
        found, push = jax.linearize(both_modes, *at)
        across = tuple(_directions(arrays, f"across {n}") for n, arrays in enumerate(found))
        pair = _paired(jax.linear_transpose(push, *at)(across), moves), _paired(across, differences)
        return found[2], [(push(*moves), differences), pair]

    gradient, pairs = compared(inputs)
    for got, want in pairs:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, want)
    return gradient


def _directions(arrays, word: str):
    return type(arrays)(direction(np.zeros(x.shape, x.dtype), word, n) for n, x in enumerate(arrays))


def _paired(a, b):
    return sum(jnp.sum((x * y).real) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
