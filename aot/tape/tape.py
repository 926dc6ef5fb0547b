"""The decorator for functions of Python control flow, and the object it returns.

>>> import jax.numpy as jnp
>>> from jointcut import aot
>>> @aot.tape
... def loss(w, words):
...     h = jnp.zeros(2)
...     for word in words:
...         h = jnp.tanh(h + w * word)
...         if float(h[0]) > 0.9:
...             break
...     return jnp.sum(h)
>>> for words in ([0.1, 0.2], [0.3, 0.4], [0.5]):
...     value, grad = loss.value_and_grad(jnp.ones(2), words)
>>> len(loss.captures)
2
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jointcut.aot.calls.method import bound_to, refusing_unbound, unwrapped
from jointcut.aot.choices.options import NONFINITE, name_of
from jointcut.aot.tape.captures import Captures
from jointcut.aot.tape.forward import Ran, as_array, fitting_refs, ran
from jointcut.aot.tape.nodes import value_of
from jointcut.aot.tape.pullback import WAY, Pullback, Tape
from jointcut.aot.tape.records import Records
from jointcut.aot.update.step import refuse_sweeps
from jointcut.partition.errors import CallError, TraceError, choices, message
from jointcut.partition.program import jaxprs
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.metadata.convention import is_real

_RECORDS = Records()


class Taped:
    """A function that runs eagerly, and whose whole backward is captured and compiled once for each structure.

    A call runs the function as it is. Inside `jax.jit`, `jax.vmap` and other transformations it is traced like any
    function.

    Attributes:
        captures: the structures of backwards that were needed, and why each was.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        check: str | None,
        roll: bool = False,
    ) -> None:
        """Call `aot.tape` instead."""
        function, self._kind = unwrapped(function)
        if not callable(function):
            cure = "Pass a function: aot.tape(f), or @aot.tape above its definition."
            raise TraceError(message("aot.tape", f"was given a {type(function).__name__}, not a function.", cure))
        self._function, self._has_aux = function, has_aux
        self._refuse = refusing_unbound(self, function)
        self._argnums = argnums if isinstance(argnums, int) else tuple(argnums)
        if check not in (None, NONFINITE):
            raise TraceError(message("check", f"{check!r} is unknown.", choices(check, [NONFINITE])))
        self._check, self._roll = check is not None, roll
        self._name = name_of(function)
        self.captures = Captures(self._name)
        functools.update_wrapper(self, function, updated=())

    def __repr__(self) -> str:
        """`<aot.tape loss: 2 captures>`."""
        return f"<aot.tape {repr(self.captures).splitlines()[0]}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method: the instance (a pytree) or class becomes the first argument."""
        return bound_to(self, self._kind, instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; nothing is recorded."""
        return self._function(*args, **kwargs)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.value_and_grad(function, argnums, has_aux)`.

        Raises `TraceError` (a `TypeError`) for an argument or result that cannot be differentiated.
        """
        if not jaxprs.runs_eagerly():
            return jax.value_and_grad(self._function, self._argnums, self._has_aux)(*args, **kwargs)
        made = self._ran(self._positions(len(args)), args, kwargs)
        flat = self._tape(made, args, kwargs).gradients([self._one(made)])
        return self._value(made), self._in_argnums(made, flat)

    def accumulate_into(self, refs: Any) -> Callable[..., Any]:
        """A function of the same arguments that adds the gradients to references, and returns the value.

        `refs` are `jax.Ref`s in the tree of what `grad` returns, with the shapes and dtypes of the gradients, or None.
        Each is added to in the backward, as soon as its gradient is complete; a hook of `post_accumulate` sees the sum.
        Raises `CallError` if the trees differ, and if a reference has another type than its argument.
        """

        def accumulate(*args: Any, **kwargs: Any) -> Any:
            if not jaxprs.runs_eagerly():
                what = "is called inside a transformation (jax.jit, jax.grad, jax.vmap)."
                cure = "Call it outside, or take the gradients and add them."
                raise CallError(message(f"{self._name}.accumulate_into", what, cure))
            made = self._ran(self._positions(len(args)), args, kwargs)
            flat = fitting_refs(made, self._in_argnums(made, range(len(made.tape.leaves))), refs)
            self._tape(made, args, kwargs).gradients([self._one(made)], flat)
            return self._value(made)

        return accumulate

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.grad(function, argnums, has_aux)`: the gradient, or `(gradient, aux)` with `has_aux`."""
        value, gradient = self.value_and_grad(*args, **kwargs)
        return (gradient, value[1]) if self._has_aux else gradient

    def value_and_update(self, params: Any, state: Any, *args: Any, update: Any, sweeps: int = 1, **kwargs: Any) -> Any:
        """The value, and parameters and state after one step of an optimiser, each updated inside the backward.

        A parameter is updated as soon as its gradient is complete, so that all gradients are never in memory together.
        If a `lax.scan` takes slices of it, and the update treats each slice alone, it is updated slice by slice, inside
        the scan of the backward. `params` and `state` are given up: their arrays must not be used after the call.

        Args:
            params: the first argument of the function, a pytree of floating-point arrays.
            state: the state of the optimiser, a pytree of arrays.
            *args: the other arguments of the function.
            update: an Optax transformation, or a function `(gradients, state, params) -> (params, state)`. The new
                value of a parameter, and its part of the state, may depend on its own gradient alone, and on what
                `sweeps` allows. Pass the same object at each step.
            sweeps: with 2, the update may also join a few numbers of each gradient, as a clip by the global norm does.
                The backward then runs twice: first for these numbers, then for the updates.
            **kwargs: further arguments of the function, by name.

        Returns `value, params, state`, or `(value, aux), params, state` with `has_aux`. In `jax.jit` the whole step is
        one program. Raises `TraceError` if the update joins gradients otherwise, with the equation.
        """
        made = self._ran([0], (params, *args), kwargs, is_update=True)
        leaves, states = [leaf.value for leaf in made.tape.tracers], [as_array(x) for x in jax.tree.leaves(state)]
        tape = self._tape(made, (params, *args), kwargs)
        trees = made.arguments[0].gradients(leaves), state
        flat = tape.updated(self._one(made), leaves, states, update, trees, refuse_sweeps(sweeps))
        after, rest = flat[: len(leaves)], flat[len(leaves) :]
        return (
            self._value(made),
            made.arguments[0].holding(after),
            jax.tree.unflatten(jax.tree.structure(state), rest),
        )

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """Like `jax.vjp`: the output and a pullback (and aux with `has_aux`).

        The pullback returns one tree per positional argument, and may be called more than once. Keyword arguments are
        not differentiated.
        """
        if not jaxprs.runs_eagerly():
            return jax.vjp(functools.partial(self._function, **kwargs), *args, has_aux=self._has_aux)
        made = self._ran(None, args, kwargs)
        pullback = Pullback(self._tape(made, args, kwargs))
        return (made.value, pullback, made.aux) if self._has_aux else (made.value, pullback)

    # ------------------------------------------------------------------------------------------- helpers

    def _ran(self, positions: Sequence[int] | None, args: Any, kwargs: dict[str, Any], is_update: bool = False) -> Ran:
        """Run the function on a tape, and write back what it wrote to objects."""
        if self._refuse is not None:
            self._refuse(args)
        made = ran(self._name, self._function, _RECORDS, positions, self._has_aux, args, kwargs, self._check)
        if is_update and (written := [path for path in made.originals.written if path.startswith("args[0]")]):
            what = f"is an object that is updated, and {self._name} writes to it."
            raise TraceError(message(written[0], what, "Take value_and_grad, and update after it."))
        made.originals.write(value_of)
        return made

    def _value(self, made: Ran) -> Any:
        return (made.value, made.aux) if self._has_aux else made.value

    def _in_argnums(self, made: Ran, flat: Sequence[Any]) -> Any:
        trees = tuple(argument.gradients(flat) for argument in made.arguments)
        return trees[0] if isinstance(self._argnums, int) else trees

    def _tape(self, made: Ran, args: Sequence[Any], kwargs: dict[str, Any]) -> Tape:
        return Tape(made, self.captures, self._name, functools.partial(_arrays, args, kwargs), self._check, self._roll)

    def _positions(self, count: int) -> list[int]:
        """The differentiated arguments; raises `TraceError` if one is missing."""
        chosen = (self._argnums,) if isinstance(self._argnums, int) else self._argnums
        for place in chosen:
            if not -count <= place < count:
                what = f"names an argument that is missing: the call has {count} by position."
                cure = "Pass it by position, or change argnums."
                raise TraceError(message(f"argnums={self._argnums}", what, cure))
        return [place % count for place in chosen]

    def _one(self, made: Ran) -> Any:
        """The cotangent 1 of a scalar output; raises `TraceError` if it is not a real scalar."""
        is_bare = made.tree == jax.tree.structure(0)
        if not (is_bare and made.avals[0].shape == () and is_real(made.avals[0].dtype)):
            shown = ", ".join(aval.str_short() for aval in made.avals) or "nothing"
            cure = (
                "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
            )
            raise TraceError(message(self._name, f"returned {shown}: value_and_grad needs a real scalar.", cure))
        return jaxprs.full(jaxprs.cotangent_aval(made.avals[0]), 1)


class Decorator:
    """The decorator `aot.tape`."""

    def __call__(
        self,
        fun: Callable[..., Any] | None = None,
        *,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        check: str | None = None,
        roll: bool = False,
    ) -> Any:
        """Let a function run eagerly, and capture its whole backward: a bare decorator, or one with options.

        The function runs on numbers: Python's `if` and `for`, `print`, numpy and `float(x)` work on its values. What it
        writes to Flax's NNX objects is written to the caller's, once the function has returned. Each op
        is recorded with the residuals that its backward reads. The backward of the whole call is then one program, with
        the backward halves of the `jax.jit` and `aot.function` calls in it. It is compiled once for each structure: the
        ops, which values they read, shapes and dtypes. Values are not part of the structure, nor are Python numbers
        that the function computes with: they are inputs of the program.

        Args:
            fun: the function. Differentiated arguments and results are pytrees of arrays; other arguments and aux may
                be any Python objects.
            argnums: the positional arguments that `value_and_grad` and `grad` differentiate.
            has_aux: whether the function returns `(output, aux)`.
            check: `"nonfinite"`: each op of the forward, each op of the backward and each hook is looked at as it runs.
                The first that makes a NaN or an infinity is raised as `NonFiniteError`, with the user's line. This is
                for debugging: nothing is captured, and each op is waited for, as with PyTorch's `detect_anomaly`.
            roll: whether loops that ran another number of times share one program. The largest part of the backward
                that repeats is found: blocks of the same ops, which read their own values, hand cotangents to the next
                block and add to gradients outside, as the steps of a recurrent network do. They run in one compiled
                loop, 16 at a time, or block by block where hooks are called back. Blocks may have parameters of their
                own, and results that are stacked. Updates are not rolled, nor blocks inside `saved_arrays`.

        Raises `TraceError` if `fun` is not callable, or the check is unknown.
        """
        if fun is None:
            return lambda fun: Taped(fun, argnums, has_aux, check, roll)
        return Taped(fun, argnums, has_aux, check, roll)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run backwards on this thread op by op, without captures: for a debugger, or if no structure comes twice."""
        before, WAY.captured = WAY.captured, False
        try:
            yield
        finally:
            WAY.captured = before


tape = Decorator()


def _arrays(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, str]:
    """The types of the arrays among the arguments, by path."""
    named = [(f"args[{i}]", x) for i, x in enumerate(args)] + [(f"kwargs[{k!r}]", x) for k, x in kwargs.items()]
    types: dict[str, str] = {}
    for name, argument in named:
        leaves, tree = jax.tree.flatten(argument)
        pairs = zip(tree_paths(name, tree), leaves, strict=True)
        types.update((path, jax.typeof(x).str_short()) for path, x in pairs if isinstance(x, jax.Array))
    return types
