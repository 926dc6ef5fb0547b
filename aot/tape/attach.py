"""Set hooks on values, on calls, on parameters and on residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.aot.hooks.closures import described, values_read
from jointcut.aot.hooks.hook import Hook, Place, hook_of
from jointcut.aot.hooks.in_programs import hooked_call, hooked_value
from jointcut.aot.hooks.saved_arrays import SavedArrays
from jointcut.aot.tape.nodes import Edge, Node, Recording, recording_here, refuse_padded
from jointcut.aot.tape.records import identity
from jointcut.aot.tape.sweep import Packed
from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax import abstract, eager, runtime, user_source
from jointcut.partition.program.places import line_at

_LEAF = jax.tree.structure(0)


def on_cotangent(x: Any, hook: Callable[[Any], Any] | Hook, *, traced: bool = False) -> Any:
    """Set a hook on the cotangent of a value, and return the value; use the returned value from there on.

    `hook(cotangent)` is called once in a backward, with the whole cotangent of `x`, an array of the shape and dtype of
    `x`. It returns an array to use instead, or None. It corresponds to PyTorch's `Tensor.register_hook`.

    A hook is called back, in order and exactly once, with real arrays: it may print, store and decide. With
    `traced=True`, or if it is a function of `jax.jit`, the hook is part of the compiled backward, which is faster. It
    then runs once, while JAX traces it, so only its result may matter.

    On a tape the hook belongs to the op that made `x`, so it also sees the gradients of uses of `x` before this line.
    Elsewhere (in `aot.function`, `jax.grad`) it sees only later uses. Hooks are called from the last line to the first;
    hooks of one value are called in the order of setting. In `aot.function` the hooks of an argument are called as soon
    as its gradient is complete. Outside of a tape, XLA wraps the error of a hook in a `jax.errors.JaxRuntimeError` that
    contains its text.

    Raises `CallError` on a tape if no gradient flows to `x`, and in a backward if the hook returns another shape or
    dtype. Where no gradient is asked for, it does nothing.

    >>> import jax.numpy as jnp
    >>> from jointcut import aot
    >>> @aot.tape
    ... def loss(w):
    ...     h = aot.on_cotangent(jnp.sin(w), lambda g: 10 * g, traced=True)
    ...     return jnp.sum(h)
    >>> loss.grad(jnp.zeros(2)).tolist()
    [10.0, 10.0]
    """
    made, tape = _set(hook, "on_cotangent", traced), recording_here("on_cotangent")
    if made.removed:
        return x
    if tape is not None:
        edge = _edge(tape, x, "on_cotangent")
        edge[0].hooks.append(_value_place("on_cotangent", made, x, edge[1]))
        return x
    if runtime.tracing():
        return hooked_value(x, _value_place("on_cotangent", made, x, 0))
    _refuse_ended(x, "on_cotangent")
    return x


def post_accumulate(x: Any, hook: Callable[[Any], Any] | Hook, *, traced: bool = False) -> Any:
    """Set a hook on the complete gradient of a parameter, and return the parameter.

    `x` is a differentiated array, the same object that was passed to the function. `hook(gradient)` is called as soon
    as the gradient is complete, after the hooks of `on_cotangent`, and after the gradient was added to its reference
    (see `accumulate_into`). It returns an array to use instead, or None; for `traced` see `on_cotangent`. It
    corresponds to PyTorch's `Tensor.register_post_accumulate_grad_hook`. Raises `CallError` for a value that was
    computed.
    """
    made, tape = _set(hook, "post_accumulate", traced), recording_here("post_accumulate")
    if made.removed:
        return x
    if tape is not None:
        node, i = _edge(tape, x, "post_accumulate")
        if node.record is not None:
            what = f"is set on {_described(x)}, which was computed by {node.record.name}."
            raise CallError(message("post_accumulate", what, "Set it on a parameter, or use aot.on_cotangent."))
        node.hooks.append(_value_place("post_accumulate", made, x, i))
        return x
    if runtime.tracing():
        return hooked_value(x, _value_place("post_accumulate", made, x, 0))
    _refuse_ended(x, "post_accumulate")
    return x


def hooked(
    function: Callable[..., Any],
    *,
    pre_hook: Callable[[Any], Any] | Hook | None = None,
    post_hook: Callable[[Any, Any], Any] | Hook | None = None,
    traced: bool = False,
) -> Callable[..., Any]:
    """Return a function whose calls have hooks before and after their backward.

    `pre_hook(cotangents)` is called before the backward of a call. It takes the cotangents of the output in the
    output's tree, zeros included, and returns such a tree to use instead, or None. `post_hook(gradients, cotangents)`
    is called after the backward. It takes a tuple of the gradients of the positional arguments, with None for leaves
    that are not differentiated, and the cotangents that the backward started from. It returns such a tuple to use
    instead, or None. The hooks correspond to PyTorch's `Module.register_full_backward_pre_hook` and
    `register_full_backward_hook`.

    Args:
        function: any function of arrays. On a tape it runs eagerly like the rest.
        pre_hook: the hook that is called before the backward.
        post_hook: the hook that is called after the backward.
        traced: whether both are part of the compiled backward, as in `on_cotangent`.

    Raises `CallError` at a call on a tape if no gradient flows to an argument.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(function, **kwargs)
        tape = recording_here("hooked")
        before = None if pre_hook is None else _set(pre_hook, "pre_hook", traced)
        after = None if post_hook is None else _set(post_hook, "post_hook", traced)
        if tape is not None:
            return _called(tape, bound, args, before, after)
        if runtime.tracing():
            return hooked_call(bound, args, before, after)
        return bound(*args)

    return call


class saved_arrays(SavedArrays):
    """Save residuals in another form: the forward keeps `pack(array)`, and the backward reads `unpack` of it.

    It corresponds to PyTorch's `torch.autograd.graph.saved_tensors_hooks`. `unpack` returns an array of the same shape
    and dtype as `pack` was given.

    As an option, `aot.function(saved_arrays=aot.saved_arrays(pack, unpack))`, it packs all arrays that the plan saves:
    `which="intermediates"`. With `"no_params"`, it also packs the arguments that the backward reads and that are not
    differentiated; without packing, the backward reads them from the caller. With `"all"`, it packs every argument that
    the backward reads. `pack` takes the array in its saved form, such as bits or bfloat16 (see `aot.SAVE_AS`); in a
    loop, it takes the array of one step.

    Functions that JAX can trace are part of the two halves. They run once, while JAX traces them, and `unpack` runs
    just before the op that reads its array. Functions that convert their argument to numpy, or decide by its numbers,
    are called back with numpy arrays. The shapes and dtypes of their results may depend only on the shape and dtype of
    their argument, and they are called with zeros first. The compiler chooses how often they are called. Three kinds of
    residuals are not packed: the carries that a loop in segments keeps, and the residuals inside a conditional or
    inside a step of `aot.while_loop`.

    On a tape it is a context: `with aot.saved_arrays(pack, unpack):` packs the residuals of the ops inside it. `pack`
    is called with each array when it is saved, and may return anything, such as the name of a file. `unpack` is called
    when the backward of the op runs. A traced `unpack`, such as `aot.Hook(unpack, traced=True)`, is part of the
    program. Where no gradient is recorded, the context does nothing. Raises `CallError` inside a transformation, where
    nothing is saved yet.

    Raises `CallError` if a function cannot be called, or `which` is unknown. In `aot.function`, a call also raises it
    if `unpack` returns another shape or dtype.

    >>> import jax.numpy as jnp
    >>> from jointcut import aot
    >>> half = aot.saved_arrays(lambda x: x.astype("float16"), lambda x: x.astype("float32"))
    >>> loss = aot.function(lambda w: jnp.sum(jnp.tanh(w @ w) ** 2), saved_arrays=half)
    >>> loss.trace(jnp.ones((8, 8))).partition().split.residual_bytes, 8 * 8 * 2
    (128, 128)
    """

    def __enter__(self) -> None:
        tape = recording_here("saved_arrays")
        if tape is not None:
            refuse_padded(tape, "saved_arrays")
            if self.which not in (None, "all"):
                what = f"has which={self.which!r} on a tape, where all that is saved is packed."
                raise CallError(message("saved_arrays", what, "Leave which out, or give it to aot.function."))
            tape.packing.append(_Packing(self.pack, hook_of(self.unpack)))
        elif runtime.tracing():
            what = "is used inside a transformation (jax.jit, jax.grad, aot.function), where nothing is saved yet."
            cure = "Use it in a function of aot.tape, around such calls, or give it to aot.function(saved_arrays=...)."
            raise CallError(message("saved_arrays", what, cure))

    def __exit__(self, *_: object) -> None:
        if (tape := recording_here()) is not None:
            tape.packing.pop()


@dataclass(frozen=True)
class _Packing:
    """The two functions of `saved_arrays`."""

    pack: Callable[[Any], Any]
    unpack: Hook

    def packed(self, x: Any) -> Packed:
        """Return the packed form of an array."""
        leaves, tree = jax.tree.flatten(self.pack(x))
        are_arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
        types = tuple(map(jax.typeof, leaves)) if are_arrays else ()
        aval: Any = jax.typeof(x)
        place = Place("unpack", self.unpack, types, (tree,), (aval,), _LEAF, f"{aval.str_short()} that was saved")
        return Packed(tuple(leaves), place)


def _called(
    tape: Recording, function: Callable[..., Any], args: Sequence[Any], pre_hook: Hook | None, post_hook: Hook | None
) -> Any:
    """Call a function on a tape, between two nodes that pass its cotangents on."""
    entered, arguments, tree = _passed(tape, args)
    if entered is None:
        what = "is called with arguments to which no gradient flows, so its backward never runs."
        name = getattr(function.func, "__name__", "a call")  # pyright: ignore[reportFunctionMemberAccess]
        raise CallError(message(f"hooked {name}", what, "Pass it something that is computed from a parameter."))
    left, result, out_tree = _passed(tape, function(*arguments))
    types = tuple(abstract.cotangent_aval(aval) for aval in _types(entered))
    where = f"a call at {line_at(entered.source)}"
    cotangents = () if left is None else tuple(abstract.cotangent_aval(aval) for aval in _types(left))
    if pre_hook is not None and left is not None and not pre_hook.removed:
        outputs = tuple(range(len(cotangents)))
        made = Place("pre_hook", pre_hook, cotangents, (out_tree,), cotangents, out_tree, where, outputs)
        left.hooks.append(made)
    if post_hook is not None and not post_hook.removed:
        both, trees, outputs = (*types, *cotangents), (tree, out_tree), tuple(range(len(types)))
        made = Place("post_hook", post_hook, both, trees, types, tree, where, outputs, left)
        entered.hooks.append(made)
    return result


def _passed(tape: Recording, values: Any) -> tuple[Node | None, Any, Any]:
    """Add a node that passes on the differentiated values of a tree.

    Return the node, the tree of values behind it, and the tree of their cotangents. The node is None if no value is
    differentiated.
    """
    leaves, tree = jax.tree.flatten(values)
    refuse_padded(tape, "hooked", leaves)
    edges = [tape.edge(x) for x in leaves]
    moving: list[Edge] = [edge for edge in edges if edge is not None]
    cotangents = jax.tree.structure(jax.tree.unflatten(tree, [None if edge is None else 0 for edge in edges]))
    if not moving:
        return None, values, cotangents
    node = Node(tape, identity(len(moving)), moving, ())
    node.source = user_source.source_here()
    node.types = tuple(jax.typeof(x) for x, edge in zip(leaves, edges, strict=True) if edge is not None)
    numbers = iter(range(len(moving)))
    behind = [
        x if edge is None else eager.EagerTracer(tape.trace, x.value, (node, next(numbers)))
        for x, edge in zip(leaves, edges, strict=True)
    ]
    return node, jax.tree.unflatten(tree, behind), cotangents


def _types(node: Node) -> tuple[Any, ...]:
    return node.types


def _edge(tape: Recording, x: Any, kind: str) -> Edge:
    refuse_padded(tape, kind, [x])
    edge = tape.edge(x)
    if edge is None:
        what = f"is set on {_described(x)}, to which no gradient flows: it is not computed from a parameter."
        raise CallError(message(kind, what, "Set it on a value that depends on a differentiated argument."))
    return edge


def _set(hook: Any, kind: str, traced: bool) -> Hook:
    """Return the hook of a function; raises `CallError` if it reads a tracer, which is gone in the backward."""
    made = hook_of(hook, traced=traced)
    for name, x in values_read(made.function):
        if runtime.is_tracer(x):
            what = f"is set ({kind}) and reads {name}, {_described(x)}, whose time is over when the hook is called."
            cure = "Read jax.lax.stop_gradient of it on a tape. Elsewhere write a jax.custom_vjp that saves it."
            cure += " A hook may write to an object that is no argument." * any(sign in name for sign in ".[")
            where = f"The hook {described(made.function)}"
            raise CallError(message(where, what, cure))
    return made


def _refuse_ended(x: Any, kind: str) -> None:
    """Raise `CallError` for a value of a tape that has ended."""
    if type(x) is eager.EagerTracer:
        what = f"is set on {_described(x)} of a tape that has ended."
        raise CallError(message(kind, what, "Set it in the function of the tape."))


def _value_place(kind: str, hook: Hook, x: Any, output: int) -> Place:
    types = (abstract.cotangent_aval(jax.typeof(x)),)
    where = f"{_described(x)} at {line_at(user_source.source_here())}"
    return Place(kind, hook, types, (_LEAF,), types, _LEAF, where, (output,))


def _described(x: Any) -> str:
    return jax.typeof(x).str_short() if hasattr(x, "dtype") else f"a {type(x).__name__}"
