"""Call back derivative rules that JAX cannot trace, such as a rule that computes with numpy.

An island is a call of a `jax.custom_vjp` or `jax.custom_jvp` function whose rule needs numbers. Its forward runs as
under eager `jax.grad`, with real arrays. Its backward is called back like a hook, with real cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.hooks.closures import described
from jointcut.aot.hooks.hook import ISLAND, Hook, Place
from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax import abstract, eager
from jointcut.wrappers.metadata.convention import is_inexact

#: The errors of a rule that needs numbers where it is traced.
NEEDS_NUMBERS = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)

#: The words with which JAX begins its errors about the result of a rule.
_MISFIT = ("Custom VJP bwd rule", "Custom JVP rule")


@dataclass(eq=False)
class Island:
    """The backward of a call that ran eagerly: a function from cotangents to gradients.

    Attributes:
        rule: the user's rule.
        where: the call, with the user's line.
        types: the types of the gradients.
        kept: the residuals, as arrays or packed.
        tree: the tree of JAX's backward around them.
    """

    rule: Any
    where: str
    types: tuple[Any, ...]
    kept: Sequence[Any] = field(repr=False)
    tree: Any = field(repr=False)

    @classmethod
    def of(
        cls, op: eager.Operation, values: Sequence[Any], wanted: Sequence[int], where: str
    ) -> tuple[Island, list[Any], tuple[int, ...]]:
        """Run an op as eager `jax.vjp` does; `wanted` are the inputs that get a gradient.

        Return its backward, its outputs, and the places of the outputs that have a cotangent.
        """
        op.forget()
        places: list[int] = []

        def run(*given: Any) -> Any:
            flat = dict(enumerate(values)) | dict(zip(wanted, given, strict=True))
            out = op.bind(*flat.values())
            out = dict(enumerate(map(jnp.asarray, out if op.multiple else [out])))
            places[:] = [i for i, x in out.items() if is_inexact(x.dtype)]
            return [out.pop(i) for i in places], out

        moving, pull, out = jax.vjp(run, *(values[i] for i in wanted), has_aux=True)
        kept, tree = jax.tree.flatten(pull)
        types = tuple(abstract.cotangent_aval(jax.typeof(values[i])) for i in wanted)
        outputs = out | dict(zip(places, moving, strict=True))
        island = cls(op.functions[-1].f, where, types, kept, tree)
        return island, [outputs[i] for i in range(len(outputs))], tuple(places)

    def emptied(self) -> Island:
        """Return the island without residuals, which cannot be called: structures hold it."""
        return replace(self, kept=(), tree=None)

    def place(self, cotangents: Sequence[Any]) -> Place:
        """Return the place at which the backward calls it, with cotangents of these types."""
        trees = tuple(jax.tree.structure(tuple(range(len(avals)))) for avals in (self.types, cotangents))
        types, outputs = (*self.types, *cotangents), tuple(range(len(self.types)))
        return Place(ISLAND, Hook(self), types, trees, self.types, trees[0], self.where, outputs)

    @property
    def __wrapped__(self) -> Any:
        """The user's rule, by whose name and line messages name the island."""
        return self.rule

    def __call__(self, gradients: Any, cotangents: Any) -> Any:
        """Return the gradients of the inputs; `gradients` are zeros, which are not used."""
        del gradients
        leaves = [x if isinstance(x, jax.Array | np.ndarray) else x(())[0] for x in self.kept]
        pull = jax.tree.unflatten(self.tree, leaves)
        try:
            results = tuple(map(jnp.asarray, pull(list(cotangents))))
        except (TypeError, ValueError) as error:
            if not str(error).startswith(_MISFIT):
                raise
            self._refuse(f"does not fit the function: {error}", "Return a gradient of its type for each argument.")
        for i, (x, aval) in enumerate(zip(results, self.types, strict=True)):
            if x.shape != aval.shape or x.dtype != aval.dtype:
                returned = f"returned {jax.typeof(x).str_short()} for differentiated operand {i}."
                self._refuse(returned, f"Return {aval.str_short()}.")
        return results

    def _refuse(self, what: str, cure: str) -> NoReturn:
        raise CallError(message(f"The rule {described(self.rule)}, of {self.where},", what, cure))
