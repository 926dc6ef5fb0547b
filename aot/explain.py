"""Tell what any function keeps for its backward, whether it is one of ours or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jointcut.aot.function import Function, function
from jointcut.aot.method import Method
from jointcut.aot.report.report import Report
from jointcut.partition.cost import CostModel


def explain(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    cost: CostModel | None = None,
    **kwargs: Any,
) -> Report:
    """What `jax.vjp` of a function keeps of its forward, and what jointcut would keep; nothing is run.

    Args:
        fun: the function. One that `aot.function` made explains itself, with its own options.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`.
        argnums: which of them are differentiated, as `jax.grad` has it.
        has_aux: whether it returns `(output, aux)`.
        static_argnums: positions of arguments that are Python values.
        cost: what ops take in seconds; by default a roofline of what the device was measured to do.
        **kwargs: further arguments by name.

    Returns a report of plain JAX's plan, with XLA's own account of `jax.jit(jax.value_and_grad(fun))`. Raises
    `TraceError` for an argument that cannot be differentiated.
    """
    if isinstance(fun, Function | Method):
        return fun.explain(*args, **kwargs)
    chosen = {"argnums": argnums, "has_aux": has_aux, "static_argnums": static_argnums, "cost": cost}
    ours = function(fun, strategy="save_all", **chosen)
    return ours.explain(*args, **kwargs)
