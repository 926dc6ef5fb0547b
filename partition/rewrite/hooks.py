"""Call the hooks of complete gradients as soon as these are there.

JAX calls a hook of the backward where the forward set it. A hook on a parameter is mostly set at the function's start,
so it would be called when the whole backward has run. After this rewrite it is called right behind what completes
the gradient, as in PyTorch, and before hooks of what is computed later.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jaxprs import Atom, Equation, Var, called_back

#: What JAX says where `jax.vmap` meets a function that is called back in order.
_JAX_ON_VMAP = "Cannot `vmap` ordered IO callback."


class CalledBack(abc.ABC):
    """The base of functions that are called back for a hook: a program may call them earlier than it says."""

    @property
    @abc.abstractmethod
    def named(self) -> str:
        """The hook as messages name it."""


@contextmanager
def refused_in_vmap(hooks: Iterable[CalledBack | None]) -> Iterator[None]:
    """Raise `CallError` where JAX cannot call a hook back inside `jax.vmap`; `hooks` are those that may be called."""
    try:
        yield
    except ValueError as error:
        hook = next((hook for hook in hooks if hook is not None), None)
        if _JAX_ON_VMAP not in str(error) or hook is None:
            raise
        what = "is called back, once for each cotangent, which jax.vmap cannot do for a batch of them."
        cure = "Set it outside of jax.vmap, on the batch; or let JAX trace it: see aot.on_cotangent."
        raise CallError(message(f"The hook {hook.named}", what, cure)) from None


def hooks_in(eqns: Iterable[Equation]) -> Iterator[CalledBack]:
    """The hooks that equations call back."""
    return (hook for eqn in eqns if isinstance(hook := called_back(eqn), CalledBack))


def called_early(eqns: Sequence[Equation], outvars: Sequence[Atom]) -> list[Equation]:
    """The equations of a backward, those of hooks on its results moved forward; other hooks keep their order."""
    moved = _on_results(eqns, outvars)
    if not moved:
        return list(eqns)
    out: list[Equation] = []
    made: set[Var] = {v for eqn in eqns for v in eqn.outvars}
    waiting = [eqn for eqn in eqns if id(eqn) in moved]
    for eqn in (None, *eqns):
        if eqn is not None:
            if id(eqn) in moved:
                continue
            out.append(eqn)
            made.difference_update(eqn.outvars)
        for hook in list(waiting):
            if made.isdisjoint(v for v in hook.invars if isinstance(v, Var)):
                out.append(hook)
                made.difference_update(hook.outvars)
                waiting.remove(hook)
    return out


def _on_results(eqns: Sequence[Equation], outvars: Sequence[Atom]) -> set[int]:
    """The ids of the hooks that nothing but results and other such hooks read."""
    others: set[Var] = set()
    found: set[int] = set()
    ends = {v for v in outvars if isinstance(v, Var)}
    for eqn in reversed(eqns):
        is_last = all(v in ends and v not in others for v in eqn.outvars)
        if is_last and isinstance(called_back(eqn), CalledBack):
            found.add(id(eqn))
            ends.update(v for v in eqn.invars if isinstance(v, Var))
        else:
            others.update(v for v in eqn.invars if isinstance(v, Var))
    return found
