"""Find the first op of a call that makes a NaN or an infinity, and what cures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jointcut.aot.call.decorator import function
from jointcut.aot.call.function import Function
from jointcut.aot.call.method import Method
from jointcut.aot.options.conventions import Conventions
from jointcut.aot.options.options import Options
from jointcut.aot.stages.cures.found import NonFinite
from jointcut.aot.stages.debug import debug
from jointcut.partition.errors import CallError, NonFiniteError, TraceError, message
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.boundary import bounded


@bounded
def first_nonfinite(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    filter: Any = None,
    derivatives: str | Conventions = "jax",
    **kwargs: Any,
) -> NonFinite | None:
    """Run a function and its gradient, and find the first op that makes a NaN or an infinity, and what cures it.

    The call runs as in `aot.debug()`: forward and backward as two programs, then op by op if a result is not finite.
    Each cure was tried by running the call with it. A cure is `derivatives="finite"`, or a function of
    `aot.derivatives` in place of the expression at that line. It makes all values and gradients of this call finite,
    and leaves outputs that were finite unchanged. Nothing more is known of the gradient.

    Infinities that are passed in, or that are constants of the program (a mask, the start of a maximum), are no fault.

    Args:
        fun: the function, which returns a real scalar (and aux). A function made by `aot.function` runs with its own
            options.
        *args: its arguments, arrays of any shape.
        argnums: the arguments that are differentiated, as in `jax.value_and_grad`.
        has_aux: whether it returns `(output, aux)`.
        static_argnums: positions of arguments that are Python values.
        static_argnames: their names.
        filter: which arrays are differentiated; see `aot.function`.
        derivatives: the derivatives at singular points; see `aot.function`.
        **kwargs: further arguments by name.

    Returns a record, which prints as a few lines, or None if all is finite. Raises `CallError` inside a transformation
    and for arguments without numbers, and `TraceError` as `value_and_grad` does, and for options beside an
    `aot.function`.

    >>> import jax.numpy as jnp
    >>> def length(x):
    ...     return jnp.sqrt(jnp.sum(x**2))
    >>> first_nonfinite(length, jnp.ones(3)) is None
    True
    >>> print(first_nonfinite(length, jnp.zeros(3)))
    The backward of length is not finite: div made an infinity out of float32[] = 0.5 and float32[] = 0 at ...
    aot.function(derivatives="finite") makes this call finite (checked by a run).
    aot.derivatives.norm(x) in place of the root of a sum of squares at that line makes this call finite (checked ...
    """
    options = {
        "argnums": argnums,
        "has_aux": has_aux,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "filter": filter,
        "derivatives": derivatives,
    }
    ours = _own(fun, options) if isinstance(fun, Function | Method) else function(fun, **options)
    _refuse_without_numbers((args, kwargs))
    try:
        with debug():
            ours.value_and_grad(*args, **kwargs)
    except NonFiniteError as error:
        if error.found is None:  # raised by the user's code
            raise
        return error.found
    return None


def _own(fun: Any, options: dict[str, Any]) -> Any:
    """Return a function with options of its own; raises `TraceError` if it is given others."""
    given = [name for name, value in options.items() if value != getattr(Options(), name)]
    if given:
        what = "is given for an aot.function, which has options of its own."
        raise TraceError(message(f"first_nonfinite({given[0]}=...)", what, "Give it to aot.function, or leave it out."))
    return fun


def _refuse_without_numbers(args: Any) -> None:
    leaves = jax.tree.leaves(args)
    if runtime.tracing() or any(map(runtime.is_tracer, leaves)):
        what = "is called inside a transformation (jax.jit, jax.grad, jax.vmap), where arrays have no numbers."
        raise CallError(message("first_nonfinite", what, "Call it outside, with the arrays of one call."))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise CallError(
            message("first_nonfinite", "is given a jax.ShapeDtypeStruct.", "Give arrays: it runs the call.")
        )
