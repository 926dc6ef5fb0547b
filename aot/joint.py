"""Trace the function and its gradient as one jaxpr.

The forward is traced first, with everything that `jax.vjp` needs for the backward as extra results; then the backward
is traced on those. Laid end to end they are the joint program, and it is known which equation came from which phase.
Calls are opened, constants become inputs, and what both phases compute is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jointcut.partition import jaxprs, rewrite
from jointcut.partition.roles import Role, Roles
from jointcut.wrappers.convention import is_inexact


@dataclass(frozen=True)
class Primal:
    """The user's function as a flat jaxpr `(constants, leaves) -> outputs`, calls opened, with its result trees.

    `out_tree` is the tree of what is differentiated, `aux_tree` that of `aux` (None without `has_aux`); `num_aux`
    counts the trailing flat outputs that belong to `aux`.
    """

    closed: Any
    consts: tuple[Any, ...]
    out_tree: Any
    aux_tree: Any
    num_aux: int

    @property
    def out_avals(self) -> list[Any]:
        """Abstract values of all flat outputs, those of `aux` last."""
        return [v.aval for v in jaxprs.opened(self.closed)[0].outvars]

    @property
    def uses_references(self) -> bool:
        """Whether the function reads or writes a `jax.Ref`, its own or the caller's."""
        return any(map(jaxprs.touches_references, jaxprs.opened(self.closed)[0].eqns))

    @property
    def has_traced_consts(self) -> bool:
        """Whether the function closes over values of an outer trace, so that its jaxpr must not be kept."""
        return any(map(jaxprs.is_tracer, self.consts))


def primal(function: Callable[..., Any], leaves: Sequence[Any], has_aux: bool) -> Primal:
    """Trace a flat function to a jaxpr without constants."""
    trees: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        out = function(*xs)
        main, aux = out if has_aux else (out, None)
        main_leaves, main_tree = jax.tree.flatten(main)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        trees[:] = [main_tree, aux_tree if has_aux else None, len(aux_leaves)]
        return [*main_leaves, *aux_leaves]

    opened = rewrite.inlined(jax.make_jaxpr(flat)(*leaves))
    jaxpr, consts = jaxprs.opened(opened)
    closed = jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return Primal(closed, tuple(consts), *trees)


@dataclass(frozen=True)
class Joint:
    """The joint program `(constants, primals, cotangents) -> (outputs, gradients)` of one function.

    `closed` has no constants; `extra` are constants that only the derivative needs, as leading inputs after those of
    the primal. `mask` tells which primal inputs are differentiated, `with_cotangent` which outputs carry one.
    """

    closed: Any
    roles: Roles
    extra: tuple[Any, ...]
    mask: tuple[bool, ...]
    with_cotangent: tuple[bool, ...]


def joint(source: Primal, mask: Sequence[bool], paths: Sequence[str]) -> Joint:
    """Trace forward and backward for the primal inputs chosen by `mask` (constants included, in order)."""
    avals = [v.aval for v in jaxprs.opened(source.closed)[0].invars]
    outs = source.out_avals
    carrying = [is_inexact(a.dtype) and i < len(outs) - source.num_aux for i, a in enumerate(outs)]
    kept = _Residuals()

    def forward(*xs: Any) -> tuple[list[Any], list[Any]]:
        def chosen(*picked: Any) -> tuple[list[Any], list[Any]]:
            given = iter(picked)
            full = [next(given) if on else x for x, on in zip(xs, mask, strict=True)]
            results = jaxprs.evaluate(source.closed, *full)
            main = [r for r, on in zip(results, carrying, strict=True) if on]
            return main, [r for r, on in zip(results, carrying, strict=True) if not on]

        main, pull, rest = jax.vjp(chosen, *(x for x, on in zip(xs, mask, strict=True) if on), has_aux=True)
        main, rest = iter(main), iter(rest)
        return [next(main) if on else next(rest) for on in carrying], kept.take(pull, xs)

    structs = list(map(_struct, avals))
    front, shapes = jax.make_jaxpr(forward, return_shape=True)(*structs)
    back = jax.make_jaxpr(lambda residuals, refs, cts: kept.pull(residuals, refs)(cts))(
        shapes[1],
        [structs[i] for i in kept.references],
        [_struct(jaxprs.tangent_aval(a)) for a, on in zip(outs, carrying, strict=True) if on],
    )
    return _joined(front, back, kept.references, mask, carrying, paths)


@dataclass
class _Residuals:
    """What the pullback of `jax.vjp` holds, taken apart into arrays and into references among the inputs."""

    tree: Any = None
    is_reference: tuple[bool, ...] = ()
    references: tuple[int, ...] = ()

    def take(self, pull: Any, inputs: Sequence[Any]) -> list[Any]:
        """The arrays; a reference cannot be a result, so its place among the inputs is kept instead."""
        leaves, self.tree = jax.tree.flatten(pull)
        self.is_reference = tuple(jaxprs.is_reference(jax.typeof(leaf)) for leaf in leaves)
        refs = [leaf for leaf, is_ref in zip(leaves, self.is_reference, strict=True) if is_ref]
        self.references = tuple(next(i for i, x in enumerate(inputs) if x is ref) for ref in refs)
        return [leaf for leaf, is_ref in zip(leaves, self.is_reference, strict=True) if not is_ref]

    def pull(self, arrays: Sequence[Any], references: Sequence[Any]) -> Any:
        """The pullback on other arrays and references."""
        a, r = iter(arrays), iter(references)
        return self.tree.unflatten(next(r) if is_ref else next(a) for is_ref in self.is_reference)


def _struct(aval: Any) -> Any:
    if jaxprs.is_reference(aval):
        return aval
    sharding = getattr(aval, "sharding", None)
    explicit = sharding if jaxprs.is_explicit(sharding) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=explicit)


def _joined(
    front: Any,
    back: Any,
    references: Sequence[int],
    mask: Sequence[bool],
    carrying: Sequence[bool],
    paths: Sequence[str],
) -> Joint:
    """Lay the backward's equations behind the forward's; constants of either become inputs."""
    num_outputs = len(carrying)
    first, first_consts = jaxprs.opened(rewrite.inlined(front))
    second, second_consts = jaxprs.opened(rewrite.inlined(back))
    handed = [*first.outvars[num_outputs:], *(first.invars[i] for i in references)]
    rename = dict(zip(second.invars[: len(handed)], handed, strict=True))
    late, gradients = rewrite.renamed(second, rename)
    cotangents = second.invars[len(handed) :]
    ends = [*first.outvars[:num_outputs], *gradients]
    eqns, ends, boundary = rewrite.merged([*first.eqns, *late], ends, len(first.eqns))
    consts = [*first.constvars, *second.constvars]
    invars = [*consts, *first.invars, *cotangents]
    roles = Roles(
        (Role.PRIMAL,) * (len(consts) + len(first.invars)) + (Role.COTANGENT,) * len(cotangents),
        (Role.OUTPUT,) * num_outputs + (Role.GRADIENT,) * len(gradients),
        boundary,
        (
            *(f"constant {i} of the derivative" for i in range(len(consts))),
            *paths,
            *_cotangent_paths(cotangents),
        ),
    )
    extra = tuple(np.asarray(c) if isinstance(c, np.generic) else c for c in (*first_consts, *second_consts))
    return Joint(jaxprs.build(invars, ends, eqns), roles, extra, tuple(mask), tuple(carrying))


def _cotangent_paths(cotangents: Sequence[Any]) -> list[str]:
    return [f"cotangent {i}" for i in range(len(cotangents))]
