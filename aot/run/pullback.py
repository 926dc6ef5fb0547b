"""Hold a forward's residuals until the cotangent is given.

Every `vjp` returns a `Pullback`: a function from a cotangent of the output to the gradients. It is a pytree, so it can
leave a `jax.jit` or be part of a training state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.run.references import MARKS, added, exact, fitting, refuse_without, spread
from jointcut.aot.trace.trees import Call
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.program.jax import abstract
from jointcut.wrappers.arguments.given_up import is_given_up
from jointcut.wrappers.metadata.convention import slot
from jointcut.wrappers.metadata.signatures import GraphSignature

#: A backward: residuals, cotangents (None for zero), and whether to keep the residuals for another call, to gradients.
Run = Callable[[Sequence[Any], Sequence[Any | None], bool], Sequence[Any]]


@dataclass(frozen=True)
class StaticPart:
    """The static part of a pullback: the backward, and the trees of the call.

    It is part of the result's tree, which JAX keeps as long as the program. So it holds neither the user's function nor
    its constants, which can be freed.

    Attributes:
        call: the arguments and results of the signature.
        run: the backward.
        kinds: the origin of each residual, "input", "output" or "saved".
        takes_zeros: whether a zero cotangent is passed as None, and not as an array of zeros.
        positions: the arguments that get one tree of gradients each; None means those in `argnums`, as in `jax.grad`.
        overwrites: whether a call overwrites the residuals by default.
        key: equal for all calls of one program.
        signature: the names of the programs' inputs and outputs; None if there is no trace.
    """

    call: Call = field(compare=False)
    run: Run = field(compare=False, repr=False)
    kinds: tuple[str, ...]
    takes_zeros: bool
    positions: tuple[int, ...] | None
    overwrites: bool
    key: int
    signature: GraphSignature | None = field(default=None, compare=False, repr=False)

    @property
    def places(self) -> Any:
        """The trees of the gradients, with the flat position of each argument."""
        bound, chosen = self.call.bound, self.call.options.argnums
        trees = bound.gradients(range(len(bound.leaves)))
        if self.positions is None and isinstance(chosen, int):
            return trees[chosen % len(trees)]
        return tuple(trees[i] for i in (self.call.options.chosen if self.positions is None else self.positions))


class Adding:
    """A pullback that adds gradients to references; the pullback of a tape adds each as soon as it is complete."""

    _is_tuple = True

    def _adding(self, caller: str, refs: Any, flat_of: Callable[[str, Any, Any], list[Any]]) -> Callable[..., Any]:
        """Return a function of the cotangent that adds gradients to references, and returns their trees with marks."""
        raise NotImplementedError

    def accumulate_into(self, refs: Any) -> Callable[..., None]:
        """Return a function of the cotangent that adds the gradients to references, and returns nothing.

        `refs` are `jax.Ref`s in the tree of the pullback's result, with the shapes and dtypes of the gradients.
        None stands for an argument, or a part of one, whose gradient is not wanted. The sums are there after the
        backward. The function takes the keyword arguments of the pullback. Raises `CallError` if the trees differ, if a
        reference has another type than its argument, or after the residuals were released.
        """
        return self._adding("accumulate_into", refs, spread)

    def with_refs(self, *refs: Any) -> Callable[..., Any]:
        """Return a function of the cotangent that adds gradients to references, as `with_refs` in `jax.vjp`.

        There is one entry for each array of the arguments, in their trees: a `jax.Ref` of its type, whose result is
        `jax.ad.GradRef()`; `jax.ad.GradValue()`, whose result is the gradient; or `jax.ad.DontWant()`, whose result is
        `jax.ad.DidntWant()`. Raises as `accumulate_into`.
        """
        return self._adding("with_refs", refs if self._is_tuple else refs[0] if len(refs) == 1 else refs, exact)


@jax.tree_util.register_dataclass
@dataclass
class Pullback(Adding):
    """The backward of one call: `saved` results of the forward, and `inputs` that are read again.

    Logs of rules of `custom_vjp.defvjp_with_logs` (from JAX 0.12 on) are dropped, as by a plain call of JAX's pullback.
    There is no `with_logs`, since a cut returns nothing but gradients. A hook of `aot.on_cotangent` hands out the same.
    """

    saved: list[Any] | None
    inputs: list[Any]
    backward: StaticPart = field(metadata={"static": True})

    def __repr__(self) -> str:
        """`<pullback of loss: 3 residuals>`."""
        return f"<pullback of {self.backward.call.name}: {counted(len(self.backward.kinds), 'residual')}>"

    @property
    def residuals(self) -> list[Any]:
        """The arrays kept for the backward, in its order.

        Raises `CallError` if a call has overwritten them.
        """
        if self.saved is None:
            what = "was called before, and its residuals' memory has become the gradients."
            cure = "Say pullback(cotangent, keep_residuals=True) at every call but the last."
            raise CallError(message(f"The pullback of {self.backward.call.name}", what, cure))
        saved, inputs = iter(self.saved), iter(self.inputs)
        return [next(inputs if kind == "input" else saved) for kind in self.backward.kinds]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays kept for the backward, including inputs of the function."""
        return sum(abstract.aval_bytes(jax.typeof(r)) for r in self.residuals)

    def __call__(self, cotangent: Any, *, keep_residuals: bool = False) -> Any:
        """Return the gradients of a cotangent of the output.

        The pullback of a `Compiled` overwrites the residuals unless `keep_residuals` is true. Raises `CallError` if the
        cotangent does not fit the output, or if the residuals have been overwritten or given up.
        """
        backward, residuals = self.backward, self.residuals
        if any(map(is_given_up, residuals)):
            what = "reads an argument or a result of its call whose memory was given up to another call since."
            cure = "Call the pullback first, or give the other call a copy: jax.tree.map(jnp.copy, ...)."
            raise CallError(message(repr(self), what, cure))
        call, keep = backward.call, keep_residuals or not backward.overwrites
        cotangents = call.cotangents(cotangent)
        flat = backward.run(residuals, cotangents if backward.takes_zeros else call.filled(cotangents), keep)
        if not keep:
            self.saved = None
        if backward.positions is None:
            return call.in_argnums(flat, call.bound)
        return call.gradients(flat, backward.positions, call.bound)

    @property
    def _is_tuple(self) -> bool:
        """Whether a call returns a tuple of trees, and not one tree."""
        backward = self.backward
        return backward.positions is not None or not isinstance(backward.call.options.argnums, int)

    def _adding(self, caller: str, refs: Any, flat_of: Callable[[str, Any, Any], list[Any]]) -> Callable[..., Any]:
        """Return a function of the cotangent that adds gradients to references, and returns their trees with marks."""
        leaves = self.backward.places
        numbers, tree = jax.tree.flatten(leaves)
        entries, bound = flat_of(caller, refs, tree), self.backward.call.bound
        paths, wanted = bound.paths(), self.backward.call.wanted
        for i, entry in zip(numbers, entries, strict=True):
            if isinstance(entry, MARKS):
                continue
            if i not in wanted:
                refuse_without(caller, paths[i], bound.leaves[i])
            fitting(caller, paths[i], slot(paths[i], bound.leaves[i]), entry)

        def pull(cotangent: Any, *, keep_residuals: bool = False) -> Any:
            gradients = tree.flatten_up_to(self(cotangent, keep_residuals=keep_residuals))
            made = jax.tree.unflatten(tree, added(entries, gradients))
            return None if flat_of is spread else made

        return pull
