"""Run a function over the rows of arrays, as `lax.scan`, in the memory of a loop."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from jointcut.aot.loops.functions import place_of, promoted, traced_loop
from jointcut.aot.loops.interned import same
from jointcut.aot.loops.memory import Memory
from jointcut.aot.loops.rules import Loop
from jointcut.partition.errors import TraceError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.boundary import bounded


@bounded
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None,
    reverse: bool = False, *, memory: int | str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Run `carry, y = f(carry, x)` over the rows of `xs`, as `lax.scan`; return the last carry, and the `y`, stacked.

    Reverse mode keeps some of the carries, not the values that each step computes, and runs the steps between them
    again: see `while_loop`. Rows of `xs` and results `y` are in no checkpoint.

    Args:
        f: a function of a carry and a row, or None without `xs`; it returns the next carry, of the same structure,
            shapes and dtypes, and a tree of arrays.
        init: the first carry, any tree of arrays.
        xs: a tree of arrays of equally many rows; `f` gets a reference to each row of a `jax.Ref`, as in `lax.scan`.
        length: the number of rows; needed without `xs`.
        reverse: whether to begin with the last row.
        memory: the memory of reverse mode, as in `while_loop`. `"sqrt"` keeps about as many carries as the square root
            of the length, and runs each step once more; `"stack"` keeps all.

    Raises `TraceError` where rows or the carry do not fit, and `BudgetError` for an invalid `memory`.

    >>> total, sums = scan(lambda c, x: (c + x, c + x), 0.0, jnp.arange(4.0), memory=2)
    >>> print(total, sums)
    6.0 [0. 1. 3. 6.]
    """
    if not callable(f):
        raise TraceError(message("f", f"is {f!r}, which cannot be called.", "Pass a function of the carry and a row."))
    if any(abstract.is_reference(jax.typeof(x)) for x in jax.tree.leaves(xs)):
        return _scanned(f, init, xs, length, reverse=reverse, memory=memory)
    count, init = _length(xs, length), jax.tree.map(jnp.asarray, init)
    carry_bytes = sum(abstract.aval_bytes(jax.typeof(x)) for x in jax.tree.leaves(init))
    kept = Memory.read(memory, count, carry_bytes)
    if count == 0:
        return lax.scan(f, init, xs, length=0)
    init, stacked = _forms(f, init, xs)
    first, change = (count - 1, -1) if reverse else (0, 1)

    def body(state: Any) -> Any:
        i, carry, stacks = state
        carry, y = f(carry, _row(xs, i))
        return i + change, carry, jax.tree.map(lambda form, x, stack: form.write(stack, x, i), stacked, y, stacks)

    stacks = jax.tree.map(lambda form: form.empty(count), stacked)
    test = (lambda s: s[0] >= 0) if reverse else (lambda s: s[0] < count)
    loop = traced_loop(test, body, (jnp.int32(first), init, stacks), f, 1, "f")
    program = same(Loop(loop.parts, kept, loop.name, {**loop.known, len(loop.consts): first}, count))
    _, carry, stacks = loop.finished(program(*loop.consts, *loop.init))
    return carry, jax.tree.map(lambda form, stack: form.opened(stack), stacked, stacks)


@dataclass(frozen=True)
class _Form:
    """How the rows of one result are stacked; random keys are stacked as their data."""

    shape: tuple[int, ...]
    dtype: Any
    key: Any = None  # the kind of random keys

    @classmethod
    def of(cls, x: Any) -> _Form:
        """Return the form for rows like `x`."""
        if not jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
            return cls(jnp.shape(x), jnp.asarray(x).dtype)
        data = jax.random.key_data(x)
        return cls(data.shape, data.dtype, jax.random.key_impl(x))

    def empty(self, count: int) -> Any:
        """Return the stack before the first row is written."""
        return jnp.zeros((count, *self.shape), self.dtype)

    def write(self, stack: Any, x: Any, i: Any) -> Any:
        """Return the stack with one more row."""
        row = jnp.asarray(x) if self.key is None else jax.random.key_data(x)
        return lax.dynamic_update_index_in_dim(stack, row, i, 0)

    def opened(self, stack: Any) -> Any:
        """Return the rows, once all are written."""
        return stack if self.key is None else jax.random.wrap_key_data(stack, impl=self.key)


def _forms(f: Callable[[Any, Any], Any], init: Any, xs: Any) -> tuple[Any, Any]:
    """Return the first carry, in the dtypes that `f` gives Python numbers, and the form of each stacked result."""
    where = place_of("f", f)

    def first(carry: Any) -> Any:
        out = f(carry, _row(xs, jnp.int32(0)))
        found[:] = [jax.tree.map(_Form.of, out[1])] if isinstance(out, tuple) and len(out) == 2 else []
        returned[:] = [f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"]
        return out[0] if found else None

    found: list[Any] = []
    returned: list[str] = []
    after = jax.eval_shape(first, init)
    if not found:
        cure = "Return the next carry, and what is to be stacked."
        raise TraceError(message(where, f"returns {returned[0]}, not a pair.", cure))
    if jax.tree.structure(after) == jax.tree.structure(init):
        init = jax.tree.map(promoted, init, after)
        jax.eval_shape(first, init)
    return init, found[0]


def _row(xs: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), xs)


def _scanned(f: Callable[[Any, Any], Any], init: Any, xs: Any, length: int | None, **options: Any) -> tuple[Any, Any]:
    """Run `scan` where some of `xs` are references: `f` gets a reference to each row, which is written back."""
    leaves, tree = jax.tree.flatten(xs)
    at = [i for i, x in enumerate(leaves) if abstract.is_reference(jax.typeof(x))]

    @functools.wraps(f)
    def step(carry: Any, rows: Any) -> Any:
        rows = [jax.new_ref(x) if i in at else x for i, x in enumerate(rows)]
        out = f(carry, jax.tree.unflatten(tree, rows))
        return (out[0], (out[1], [rows[i][...] for i in at])) if isinstance(out, tuple) and len(out) == 2 else out

    carry, (ys, ends) = scan(step, init, [x[...] if i in at else x for i, x in enumerate(leaves)], length, **options)
    for i, end in zip(at, ends, strict=True):
        leaves[i][...] = end
    return carry, ys


def _length(xs: Any, length: int | None) -> int:
    """Return the number of rows. Raises `TraceError` where arrays do not agree on it."""
    if length is not None and (isinstance(length, bool) or not isinstance(length, numbers.Integral) or length < 0):
        raise TraceError(message("length", f"is {length!r}.", "Give the number of rows, or leave it out."))
    known = None if length is None else ("length", int(length))
    for keys, x in tree_flatten_with_path(xs)[0]:
        path, shape = f"xs{keystr(keys)}", jnp.shape(x)
        if not shape:
            raise TraceError(message(path, "has no rows: its shape is ().", "Give arrays of equally many rows."))
        if known is not None and known[1] != shape[0]:
            what = (
                f"has {counted(shape[0], 'row')}, and {known[0]} {'is' if known[0] == 'length' else 'has'} {known[1]}."
            )
            raise TraceError(message(path, what, "Give arrays of equally many rows."))
        known = known or (path, shape[0])
    if known is None:
        raise TraceError(message("xs", "has no arrays, and length is not given.", "Give one of them."))
    return known[1]
