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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jointcut.aot.call.function import Function
from jointcut.aot.call.method import bound_to, refusing_unbound, unwrapped
from jointcut.aot.options.limits import Budget
from jointcut.aot.options.options import NONFINITE, Options, name_of
from jointcut.aot.options.policies import GivenPolicy
from jointcut.aot.options.sizes import read_sizes, refuse_beside
from jointcut.aot.options.target import GivenTarget, refuse_to_run
from jointcut.aot.stages.padding.named import NamedSizes, SizeNames
from jointcut.aot.tape.captures import Captures
from jointcut.aot.tape.forward import Ran, as_array, fitting_refs, ran
from jointcut.aot.tape.nodes import value_of
from jointcut.aot.tape.pullback import WAY, Pullback, Tape
from jointcut.aot.tape.records import Records
from jointcut.aot.update.step import refuse_sweeps
from jointcut.partition.errors import CallError, TraceError, choices, message
from jointcut.partition.program.jax import abstract, eager
from jointcut.partition.program.sizes import names
from jointcut.partition.split import Strategy
from jointcut.wrappers.arguments.paths import tree_paths
from jointcut.wrappers.boundary import bounded_class
from jointcut.wrappers.metadata.convention import is_real

_RECORDS = Records()


@bounded_class()
class Taped:
    """A function that runs eagerly, and whose whole backward is captured and compiled once for each structure.

    A call runs the function without recording. Inside `jax.jit`, `jax.vmap` and other transformations it is traced like
    any function.

    Attributes:
        captures: the captured backwards, each with the reason why it was needed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        check: str | None,
        roll: bool = False,
        planned: Mapping[str, Any] = MappingProxyType({}),
        sizes: str | None = None,
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
        self._whole = None
        dynamic = read_sizes(sizes, ["check"] * self._check + list(planned))
        self._names = None if dynamic is None else SizeNames()
        if planned:
            refuse_beside(
                next(iter(planned)), "the tape runs as one program", ["check"] * self._check + ["roll"] * roll
            )
            self._whole = Function(function, Options(argnums, has_aux, **planned))
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
        function = self._function if self._whole is None or eager.runs_eagerly() else self._whole
        return function(*args, **kwargs)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Return value and gradient, like `jax.value_and_grad(function, argnums, has_aux)`.

        Raises `TraceError` (a `TypeError`) for an argument or result that cannot be differentiated.
        """
        if not eager.runs_eagerly():
            if self._whole is not None:
                return self._whole.value_and_grad(*args, **kwargs)
            return jax.value_and_grad(self._function, self._argnums, self._has_aux)(*args, **kwargs)
        made = self._ran(self._positions(len(args)), args, kwargs)
        flat = self._tape(made, args, kwargs).gradients([self._one(made)], is_step=True)
        return self._value(made), self._in_argnums(made, flat)

    def accumulate_into(self, refs: Any) -> Callable[..., Any]:
        """Return a function of the same arguments that adds the gradients to references, and returns the value.

        `refs` is a tree like the result of `grad`, of `jax.Ref`s with the shapes and dtypes of the gradients, or None.
        The backward adds each gradient to its reference as soon as it is complete; a hook of `post_accumulate` sees the
        sum. Raises `CallError` if the trees differ, or if a reference has another type than its argument.
        """

        def accumulate(*args: Any, **kwargs: Any) -> Any:
            if not eager.runs_eagerly():
                what = "is called inside a transformation (jax.jit, jax.grad, jax.vmap)."
                cure = "Call it outside, or take the gradients and add them."
                raise CallError(message(f"{self._name}.accumulate_into", what, cure))
            made = self._ran(self._positions(len(args)), args, kwargs, is_adding=True)
            flat = fitting_refs(made, self._in_argnums(made, range(len(made.tape.leaves))), refs)
            self._tape(made, args, kwargs).gradients([self._one(made)], flat, is_step=True)
            return self._value(made)

        return accumulate

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient, or `(gradient, aux)` with `has_aux`, like `jax.grad(function, argnums, has_aux)`."""
        value, gradient = self.value_and_grad(*args, **kwargs)
        return (gradient, value[1]) if self._has_aux else gradient

    def value_and_update(self, params: Any, state: Any, *args: Any, update: Any, sweeps: int = 1, **kwargs: Any) -> Any:
        """Return the value, and the parameters and state after one optimiser step that runs inside the backward.

        A parameter is updated as soon as its gradient is complete, so that all gradients are never in memory together.
        The method takes the same arguments as `value_and_update` of an `aot.function`. The arrays of `params` and
        `state` must not be used after the call.

        Returns `value, params, state`, or `(value, aux), params, state` with `has_aux`. In `jax.jit` the whole step is
        one program. Raises `TraceError`, with the equation, if the update joins gradients in an unsupported way.
        """
        if self._whole is not None and not eager.runs_eagerly():
            return self._whole.value_and_update(params, state, *args, update=update, sweeps=sweeps, **kwargs)
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
        """Return the output and a pullback (and aux with `has_aux`), like `jax.vjp`.

        The pullback returns one tree per positional argument, and may be called more than once. Keyword arguments are
        not differentiated.
        """
        if not eager.runs_eagerly():
            if self._whole is not None:
                return self._whole.vjp(*args, **kwargs)
            return jax.vjp(functools.partial(self._function, **kwargs), *args, has_aux=self._has_aux)
        made = self._ran(None, args, kwargs)
        pullback = Pullback(self._tape(made, args, kwargs))
        return (made.value, pullback, made.aux) if self._has_aux else (made.value, pullback)

    # ------------------------------------------------------------------------------------------- helpers

    def _ran(
        self,
        positions: Sequence[int] | None,
        args: Any,
        kwargs: dict[str, Any],
        is_update: bool = False,
        is_adding: bool = False,
    ) -> Ran:
        """Run the function on a tape, and write its changes of objects back to the caller's objects."""
        if self._refuse is not None:
            self._refuse(args)
        keeps = self._whole is None or not WAY.captured
        if self._whole is not None and not keeps:
            cure = "Leave the target out, or call aot.function(...).trace: a tape plans what it ran."
            refuse_to_run(self._name, self._whole._options.goal, cure)
        run = functools.partial(ran, self._name, self._function, _RECORDS, positions, self._has_aux, args, kwargs)
        without = positions if positions and (is_update or is_adding) else []
        made = self._with_sizes(run, args, kwargs, without) or run(self._check, keeps)
        if is_update and (written := [path for path in made.originals.written if path.startswith("args[0]")]):
            what = f"is an object that is updated, and {self._name} writes to it."
            raise TraceError(message(written[0], what, "Take value_and_grad, and update after it."))
        if is_update and (path := made.arguments[0].positions("args[0]")):
            what = "is a part of an array-like object that has no gradient, and value_and_update updates all parts."
            raise TraceError(message(path, what, "Take value_and_grad, and update after it."))
        made.originals.write(value_of)
        return made

    def _with_sizes(
        self, run: Callable[..., Ran], args: Any, kwargs: dict[str, Any], without: Sequence[int]
    ) -> Ran | None:
        """Run the function with names for sizes that vary; None if it has none, or needs one as a number."""
        sizes = None if self._names is None else self._names.of(args, kwargs, without)
        if self._names is None or sizes is None:
            return None
        return self._names.tried(sizes, functools.partial(run, sizes=sizes), self.captures.note)

    def _value(self, made: Ran) -> Any:
        return (made.value, made.aux) if self._has_aux else made.value

    def _in_argnums(self, made: Ran, flat: Sequence[Any]) -> Any:
        trees = tuple(argument.gradients(flat) for argument in made.arguments)
        return trees[0] if isinstance(self._argnums, int) else trees

    def _tape(self, made: Ran, args: Sequence[Any], kwargs: dict[str, Any]) -> Tape:
        arrays = functools.partial(_arrays, args, kwargs, made.tape.sizes)
        options = None if self._whole is None else replace(self._whole._options, argnums=0, has_aux=False)
        return Tape(made, self.captures, self._name, arrays, self._check, self._roll, options)

    def _positions(self, count: int) -> list[int]:
        """Return the positions of the differentiated arguments; raises `TraceError` if one is missing."""
        chosen = (self._argnums,) if isinstance(self._argnums, int) else self._argnums
        for place in chosen:
            if not -count <= place < count:
                what = f"names an argument that is missing: the call has {count} by position."
                cure = "Pass it by position, or change argnums."
                raise TraceError(message(f"argnums={self._argnums}", what, cure))
        return [place % count for place in chosen]

    def _one(self, made: Ran) -> Any:
        """Return the cotangent 1 of the output; raises `TraceError` if the output is not a real scalar."""
        is_bare = made.tree == jax.tree.structure(0)
        if not (is_bare and made.avals[0].shape == () and is_real(made.avals[0].dtype)):
            shown = ", ".join(aval.str_short() for aval in made.avals) or "nothing"
            cure = (
                "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
            )
            raise TraceError(message(self._name, f"returned {shown}: value_and_grad needs a real scalar.", cure))
        return abstract.full(abstract.cotangent_aval(made.avals[0]), 1)


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
        budget: Budget | None = None,
        policy: GivenPolicy | None = None,
        strategy: Strategy | None = None,
        target: GivenTarget | None = None,
        offload: bool = False,
        sizes: str | None = None,
        **others: Any,
    ) -> Any:
        """Let a function run eagerly, and capture its whole backward; it can be a decorator with or without options.

        The function runs on numbers: Python's `if` and `for`, `print`, numpy and `float(x)` work on its values. Its
        writes to Flax's NNX objects reach the caller's objects once the function has returned. Each op is recorded with
        the residuals that its backward reads. The backward of the whole call is then one program, with the backward
        halves of the `jax.jit` and `aot.function` calls in it. It is compiled once for each structure: the ops, which
        values they read, shapes and dtypes. Values are not part of the structure, nor are Python numbers that the
        function computes with: they are inputs of the program.

        Args:
            fun: the function. Differentiated arguments and results are pytrees of arrays; other arguments and aux may
                be any Python objects.
            argnums: the positional arguments that `value_and_grad` and `grad` differentiate.
            has_aux: whether the function returns `(output, aux)`.
            check: `"nonfinite"` checks each op of the forward, each op of the backward and each hook as it runs. The
                first that makes a NaN or an infinity raises `NonFiniteError`, with the user's line. This is for
                debugging: nothing is captured, and each op is waited for, as with PyTorch's `detect_anomaly`.
            roll: whether loops that run another number of times share one program. The tape finds the largest part of
                the backward that repeats, such as the steps of a recurrent network. It consists of blocks of the same
                ops. A block reads its own values, passes cotangents to the next block and adds to gradients outside.
                The blocks run in one compiled loop, 16 at a time, or block by block if hooks are called back. Blocks
                may have parameters of their own, and results that are stacked. Updates and blocks inside `saved_arrays`
                are not rolled.
            budget: the memory that a step may take, as in `aot.function`. The function runs eagerly, but keeps no
                residuals. Its recorded ops become one program, forward and backward. This program is cut within the
                budget, by XLA's account, and compiled once for each structure. So the budget holds from the first call
                on. The forward is computed twice: op by op, for Python, and in the program. Inside `jax.jit` the
                function is an `aot.function` with this budget.
            policy: rules for saving or recomputing single values, as in `aot.function`; with it, too, the ops become
                one program, as with the three options that follow.
            strategy: how the program is cut, as in `aot.function`.
            target: the device that the program is planned for; on another device a call raises `TargetError`.
            offload: whether residuals may wait in the host's memory, as in `aot.function`.
            sizes: `"dynamic"` lets one program serve all sizes of an axis of an argument, from its second size on. The
                arrays are padded to a bucket, and the function sees a name for the size, as in `jax.export`. If it
                needs the number, it runs once more with numbers, and these sizes have a program each. `captures` says
                so, with the op and its line.
            **others: no option. An option of `aot.function` that a tape does not have is refused by name.

        Raises `TraceError` if `fun` is not callable, the check, the sizes or an option is unknown, check or roll is
        given beside one of budget, policy, strategy, target and offload, or one of these or check beside sizes. Raises
        `BudgetError`, `PolicyError`, `StrategyError` and `TargetError` as `aot.function` does. With one of these five a
        call raises `CallError` for a hook, an op with an effect or a derivative rule that needs numbers.
        """
        refuse_unknown(others)
        given = {"budget": budget, "policy": policy, "strategy": strategy, "target": target, "offload": offload or None}
        planned = {name: x for name, x in given.items() if x is not None}
        options = argnums, has_aux, check, roll, planned, sizes
        return (lambda fun: Taped(fun, *options)) if fun is None else Taped(fun, *options)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run backwards on this thread op by op, without captures: for a debugger, or if no structure comes twice."""
        before, WAY.captured = WAY.captured, False
        try:
            yield
        finally:
            WAY.captured = before


tape = Decorator()


def refuse_unknown(others: Mapping[str, Any]) -> None:
    """Raise `TraceError` for an option that a tape does not have."""
    for name in others:
        if name in {field.name for field in fields(Options)}:
            what = "is an option of aot.function, and a tape does not have it."
            inner = "" if name == "compiler_options" else ", or give it to an aot.function that the function calls"
            raise TraceError(message(name, what, f"Leave it out{inner}."))
        known = sorted(name for name in Decorator.__call__.__annotations__ if name not in ("fun", "others", "return"))
        raise TraceError(message("aot.tape", f"has no option {name!r}.", choices(name, known)))


def _arrays(args: Sequence[Any], kwargs: dict[str, Any], sizes: NamedSizes | None) -> dict[str, str]:
    """Return the types of the arrays among the arguments, by path."""
    named = [(i, f"args[{i}]", x) for i, x in enumerate(args)] + [(k, f"kwargs[{k!r}]", x) for k, x in kwargs.items()]
    types: dict[str, str] = {}
    for key, name, argument in named:
        leaves, tree = jax.tree.flatten(argument)
        for i, (path, x) in enumerate(zip(tree_paths(name, tree), leaves, strict=True)):
            if isinstance(x, jax.Array | np.ndarray):
                types[path] = _type(x, sizes, (key, i))
    return types


def _type(x: Any, sizes: NamedSizes | None, place: tuple[int | str, int]) -> str:
    """`float32[s0,3] (s0 up to 64)`."""
    aval: Any = jax.typeof(x)
    if sizes is None or place not in sizes.shapes:
        return aval.str_short()
    shape = sizes.shapes[place]
    most = ", ".join(f"{name} up to {sizes.bucket[name]}" for name in sorted(names(shape)))
    return f"{aval.update(shape=shape).str_short()} ({most})"
