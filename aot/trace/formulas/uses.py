"""Find the uses of eigenvalues and vectors, and whether they are functions of the matrix.

A function of one number may work on the values, and its results may scale the vectors. A product of scaled vectors with
others of the same matrix, summed over all values, is a function of the matrix. If vectors take part in such products
alone, everything that is computed from them has a derivative, also where values are equal.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jointcut.aot.derivatives.linalg.solves import adjoint
from jointcut.aot.trace.formulas import spectra
from jointcut.aot.trace.formulas.changes import is_ruled, ruled
from jointcut.aot.trace.formulas.spread import function_of_symmetric
from jointcut.aot.trace.formulas.turns import SingularPair, function_of
from jointcut.partition.program.jax import jaxprs, runtime, user_source
from jointcut.partition.program.primitives import DECOMPOSING, ELEMENTWISE
from jointcut.partition.rewrite import simplify


@dataclass(frozen=True)
class _Scale:
    """Numbers along an axis of a matrix of this shape, which scale vectors: a value, or one number for all."""

    value: Any
    axis: int
    shape: tuple[int, ...]

    def row(self, x: Any) -> Any:
        """Return the numbers, given the value `x`; a value with one axis is returned unchanged."""
        if x.ndim == 1:
            return x
        last = len(self.shape) - 1
        other = last if self.axis == last - 1 else last - 1
        return lax.index_in_dim(jnp.broadcast_to(x, self.shape), 0, other, keepdims=False)


@dataclass(frozen=True)
class _Vectors:
    """Vectors of a decomposition, numbered along an axis, left ones "u" or right ones "v", each scaled by numbers."""

    source: Any
    side: str
    is_conjugate: bool
    axis: int
    scales: tuple[_Scale, ...] = ()

    def scaled(self, value: Any, aval: Any) -> _Vectors:
        """Return the same vectors, scaled once more."""
        return replace(self, scales=(*self.scales, _Scale(value, self.axis, aval.shape)))


@dataclass(frozen=True)
class _Values:
    """A function of one number at the values of a decomposition, along an axis."""

    source: Any
    axis: int


@dataclass(frozen=True)
class _Diagonal:
    """A matrix with such values on its diagonal, and zeros elsewhere."""

    source: Any
    values: Any


def with_turns(jaxpr: Any, chosen: Mapping[str, str], stays: Callable[[Any], bool]) -> tuple[Any, dict[int, Any]]:
    """Return the jaxpr with calls around decompositions opened, and new equations by the `id` of the replaced ones.

    Calls of functions of JAX's are not opened if `stays` is true of them.
    """
    if not {"equal_eigenvalues", "no_derivative"} & set(chosen):
        return jaxpr, {}

    def inside(eqn: Any) -> Any:
        """Return the jaxpr of a call that is opened, or None."""
        return None if stays(eqn) or is_ruled(eqn) or _is_diagonal(eqn) else simplify.callee(eqn)

    if any(inside(eqn) and DECOMPOSING & jaxprs.inner_primitives(eqn) for eqn in jaxpr.eqns):
        jaxpr = _opened(jaxpr, inside)
    elif not any(eqn.primitive.name in DECOMPOSING for eqn in jaxpr.eqns):
        return jaxpr, {}
    return jaxpr, _FactSearch(jaxpr).replaced(chosen)


def _opened(jaxpr: Any, inside: Callable[[Any], Any]) -> Any:
    """Return the jaxpr with calls opened for which `inside` has a jaxpr; its equations have the line of the call."""
    eqns: list[Any] = []

    def visit(body: Any, names: dict[Any, Any], caller: Any) -> list[Any]:
        def read(v: Any) -> Any:
            return v if isinstance(v, jaxprs.Literal) else names.get(v, v)

        for eqn in body.eqns:
            invars, around, inner = [read(v) for v in eqn.invars], caller or eqn.source_info, inside(eqn)
            if inner is not None:
                results = visit(inner, dict(zip(inner.invars, invars, strict=True)), around)
                names.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [v if caller is None or jaxprs.is_dropped(v) else jaxprs.fresh(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            info = eqn.source_info.replace(traceback=around.traceback)
            eqns.append(jaxprs.rebound(eqn, invars, outvars).replace(source_info=info))
        return [read(v) for v in body.outvars]

    return jaxpr.replace(outvars=visit(jaxpr, {}, None), eqns=eqns)


class _FactSearch:
    """The search of a jaxpr: the facts of its values, and the decompositions that are used in other ways."""

    def __init__(self, jaxpr: Any) -> None:
        self._known: dict[Any, _Vectors | _Values | _Diagonal] = {}
        self._makers: dict[Any, Any] = {}
        self._pairs: list[tuple[Any, _Vectors, _Vectors]] = []
        self._used: set[int] = set()
        self._open: set[int] = set()
        self._sources: list[Any] = []
        live = simplify.live(jaxpr.eqns, jaxpr.outvars).places
        for eqn in (eqn for i, eqn in enumerate(jaxpr.eqns) if i in live):
            self._read(eqn)
        for v in jaxpr.outvars:
            self._opens(self._of(v))

    def _of(self, v: Any) -> _Vectors | _Values | _Diagonal | None:
        return None if isinstance(v, jaxprs.Literal) else self._known.get(v)

    def _opens(self, known: Any) -> None:
        """Note that vectors are used in an unknown way."""
        if isinstance(known, _Vectors):
            self._used.add(id(known.source))
            self._open.add(id(known.source))

    def _read(self, eqn: Any) -> None:
        self._makers.update(dict.fromkeys(eqn.outvars, eqn))
        if eqn.primitive.name in DECOMPOSING and eqn.params.get("subset_by_index") is None:
            self._known.update(_results(eqn))
            self._sources.append(eqn)
            return
        now = [self._of(v) for v in eqn.invars]
        pair = self._pair(eqn, now)
        result = None if pair else self._moved(eqn, now)
        if pair:
            self._pairs.append((eqn, *pair))
            self._used.add(id(pair[0].source))
        elif result is not None:
            self._known[eqn.outvars[0]] = result
        elif eqn.primitive.name != "stop_gradient":
            for known in now:
                self._opens(known)

    # ------------------------------------------------------------------------------------------------ one equation

    def _moved(self, eqn: Any, now: Sequence[Any]) -> _Vectors | _Values | _Diagonal | None:
        """Return the facts of an equation's result."""
        name, one = eqn.primitive.name, next((known for known in now if known is not None), None)
        if name == "dot_general":
            return self._multiplied(eqn, now)
        if isinstance(one, _Values) and _is_diagonal(eqn):
            return _Diagonal(one.source, eqn.invars[0])
        if one is None or isinstance(one, _Diagonal):
            return None
        if name == "transpose":
            return replace(one, axis=eqn.params["permutation"].index(one.axis))
        if name in ("copy", "convert_element_type"):
            return one
        if name in ("broadcast_in_dim", "reshape"):
            return self._spread(eqn, one) if isinstance(one, _Values) else None
        if isinstance(one, _Vectors) and name == "conj":
            return replace(one, is_conjugate=not one.is_conjugate)
        vectors = [known for known in now if isinstance(known, _Vectors)]
        if vectors:
            return self._scaled(eqn, now, vectors[0]) if name == "mul" and len(vectors) == 1 else None
        pairs = zip(now, eqn.invars, strict=True)
        is_same = all(known == one if known else self._is_uniform(v, one.axis) for known, v in pairs)
        return one if is_same and _is_elementwise(eqn) else None

    def _scaled(self, eqn: Any, now: Sequence[Any], vectors: _Vectors) -> _Vectors | None:
        place = next(i for i, known in enumerate(now) if known is vectors)
        scale, known = eqn.invars[1 - place], now[1 - place]
        if eqn.outvars[0].aval.shape != eqn.invars[place].aval.shape:
            return None
        if isinstance(known, _Values):
            fits = known.source is vectors.source and known.axis == vectors.axis
        else:
            fits = scale.aval.ndim == 0
        return vectors.scaled(scale, eqn.outvars[0].aval) if fits else None

    def _multiplied(self, eqn: Any, now: Sequence[Any]) -> _Vectors | None:
        """Return vectors scaled by a diagonal matrix, or by a row of values in a product that sums over nothing."""
        place = next((i for i, known in enumerate(now) if isinstance(known, _Vectors)), None)
        if place is None or eqn.outvars[0].aval.ndim != 2:
            return None
        vectors, other = now[place], now[1 - place]
        dims = [
            (tuple(summed[i]), tuple(batch[i])) for summed, batch in [eqn.params["dimension_numbers"]] for i in (0, 1)
        ]
        mine, its = dims[place], dims[1 - place]
        if other is None or isinstance(other, _Vectors) or other.source is not vectors.source:
            return None
        if isinstance(other, _Diagonal):
            fits, axis, scale = mine == ((vectors.axis,), ()), 1 - place, other.values
        else:
            fits, axis, scale = (mine, its) == (((), (vectors.axis,)), ((), (0,))), 0, eqn.invars[1 - place]
        return replace(vectors, axis=axis).scaled(scale, eqn.outvars[0].aval) if fits else None

    def _spread(self, eqn: Any, values: _Values) -> _Values | None:
        """Return values along an axis of a result with more axes."""
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if eqn.primitive.name == "broadcast_in_dim":
            axis = eqn.params["broadcast_dimensions"][values.axis]
        else:
            longer = [[i for i, size in enumerate(shape) if size != 1] for shape in (before, after)]
            if [before[i] for i in longer[0]] != [after[i] for i in longer[1]] or values.axis not in longer[0]:
                return None
            axis = longer[1][longer[0].index(values.axis)]
        return _Values(values.source, axis) if before[values.axis] == after[axis] else None

    def _is_uniform(self, v: Any, axis: int) -> bool:
        """Whether a value is the same along an axis."""
        if v.aval.ndim == 0 or v.aval.shape[axis] == 1:
            return True
        eqn = None if isinstance(v, jaxprs.Literal) else self._makers.get(v)
        if eqn is None:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            dims = eqn.params["broadcast_dimensions"]
            return axis not in dims or self._is_uniform(eqn.invars[0], dims.index(axis))
        return eqn.primitive.name in ELEMENTWISE and all(self._is_uniform(u, axis) for u in eqn.invars)

    def _pair(self, eqn: Any, now: Sequence[Any]) -> tuple[_Vectors, _Vectors] | None:
        """Return the two matrices of vectors whose product an equation is, if it sums over all values."""
        if eqn.primitive.name != "dot_general" or not all(isinstance(known, _Vectors) for known in now):
            return None
        (first, second), ((one, other), batch) = now, eqn.params["dimension_numbers"]
        is_complex = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)
        leading = tuple(range(eqn.invars[0].aval.ndim - 2))
        same = first.source is second.source and not (is_complex and first.is_conjugate == second.is_conjugate)
        summed = (tuple(one), tuple(other)) == ((first.axis,), (second.axis,))
        return (first, second) if same and summed and tuple(map(tuple, batch)) == (leading, leading) else None

    # ------------------------------------------------------------------------------------------------ new equations

    def replaced(self, chosen: Mapping[str, str]) -> dict[int, Any]:
        """Return new equations by the `id` of the equations that they replace."""
        found: dict[int, Any] = {}
        for source in self._sources:
            if source.primitive.name == "svd" and source.params["full_matrices"] and not _is_square(source):
                if "no_derivative" in chosen and source.params["compute_uv"] and id(source) not in self._used:
                    formula = ruled(spectra.values_alone(source), "no_derivative")
                    found[id(source)] = simplify.instead(source, formula)
                continue
            pairs = [(eqn, a, b) for eqn, a, b in self._pairs if a.source is source]
            if pairs and id(source) not in self._open and "equal_eigenvalues" in chosen:
                formula = ruled(spectra.with_equal_values(source, turns=False), "equal_eigenvalues")
                found[id(source)] = simplify.instead(source, formula)
                found.update((id(eqn), self._turned(eqn, first, second)) for eqn, first, second in pairs)
        return found

    def _turned(self, eqn: Any, first: _Vectors, second: _Vectors) -> Any:
        """Return the product of two matrices of vectors, as a function of the matrix."""
        source, is_symmetric = first.source, first.source.primitive.name == "eigh"
        is_transposed = first.is_conjugate if first.side == second.side else first.is_conjugate and second.side != "v"
        left, right = (second, first) if is_transposed else (first, second)
        if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating):
            left, right, is_transposed = first, second, False
        pair = SingularPair(left.side, right.side, is_transposed)
        values = source.outvars[1 if is_symmetric else 0]
        scales = (*first.scales, *second.scales)
        closed, more = self._chain(values, [scale.value for scale in scales])
        product = functools.partial(eqn.primitive.bind, **eqn.params)

        def formula(a: Any, b: Any, matrix: Any, *rest: Any) -> Any:
            results, given = rest[: len(source.outvars)], rest[len(source.outvars) :]
            s, u, v = (
                (results[1], results[0], results[0]) if is_symmetric else (results[0], results[1], adjoint(results[2]))
            )

            def f(s: Any) -> Any:
                pairs = zip(scales, runtime.evaluate(closed, s, *given), strict=True)
                return functools.reduce(operator.mul, (scale.row(x) for scale, x in pairs), jnp.ones_like(s))

            def slope(s: Any) -> Any:
                return jax.jvp(f, (s,), (jnp.ones_like(s),))[1]

            at = lax.stop_gradient(s)
            numbers = f(at), slope(at)
            if is_symmetric:
                return function_of_symmetric(is_transposed, product)(a, b, matrix, s, u, *numbers)
            return function_of(pair, product)(a, b, matrix, s, u, v, *numbers)

        operands = [*eqn.invars, source.invars[0], *source.outvars, *more]
        return simplify.instead(eqn, ruled(formula, "equal_eigenvalues"), operands)

    def _chain(self, values: Any, ends: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the equations from `values` to `ends` as a closed jaxpr, and its other inputs."""
        needed: dict[int, Any] = {}
        others: dict[Any, None] = {}
        stack = [*jaxprs.variables(ends)]
        while stack:
            v = stack.pop()
            if v is values:
                continue
            if not isinstance(self._of(v), _Values):
                others[v] = None
                continue
            needed[id(self._makers[v])] = self._makers[v]
            stack += jaxprs.variables(self._makers[v].invars)
        order = {id(eqn): i for i, eqn in enumerate(self._makers.values())}
        eqns = sorted(needed.values(), key=lambda eqn: order[id(eqn)])
        return jaxprs.build([values, *others], list(ends), eqns), list(others)


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation works on each element alone, such as a call of `clip` or of `relu`."""
    if eqn.primitive.name in ELEMENTWISE:
        return eqn.primitive.name != "stop_gradient"
    body = jaxprs.opened(eqn.params["call_jaxpr"])[0] if eqn.primitive.name == "custom_jvp_call" else None
    body = body or simplify.callee(eqn)
    return body is not None and all(map(_is_elementwise, body.eqns))


def _is_diagonal(eqn: Any) -> bool:
    """Whether a call of JAX's puts numbers on the diagonal of a matrix of zeros: `jnp.diag` of some numbers does."""
    if not user_source.call_of_jax(eqn) or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    (given,), made = (v.aval for v in eqn.invars), eqn.outvars[0].aval
    if given.ndim != 1 or made.shape != 2 * given.shape:
        return False
    numbers = np.linspace(-7.0, 9.0, given.size).astype(given.dtype)
    with jax.ensure_compile_time_eval():
        return np.array_equal(runtime.evaluate(eqn.params["jaxpr"], numbers)[0], np.diag(numbers))


def _results(eqn: Any) -> dict[Any, _Vectors | _Values]:
    """Return the facts of a decomposition's results."""
    last = eqn.outvars[0].aval.ndim - 1
    if eqn.primitive.name == "eigh":
        vectors, values = eqn.outvars
        return {vectors: _Vectors(eqn, "u", False, last), values: _Values(eqn, last - 1)}
    values, *both = eqn.outvars
    known: dict[Any, _Vectors | _Values] = {values: _Values(eqn, last)}
    if both:
        known |= {both[0]: _Vectors(eqn, "u", False, last + 1), both[1]: _Vectors(eqn, "v", True, last)}
    return known


def _is_square(eqn: Any) -> bool:
    rows, columns = eqn.invars[0].aval.shape[-2:]
    return rows == columns
