"""Call the hooks of complete gradients as soon as these are there.

JAX calls a hook of the backward where the forward set it. A hook on a parameter is mostly set at the function's start,
so it would be called at the end of the whole backward. In a schedule it is called right after the step that completes
the gradient, as in PyTorch, and before hooks on values computed later.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from jointcut.partition.errors import CallError, message
from jointcut.partition.program.jax.jaxprs import Equation, variables
from jointcut.partition.program.jax.side_effects import called_back

T = TypeVar("T")

#: The message of JAX if `jax.vmap` meets a function that is called back in order.
_JAX_ON_VMAP = "Cannot `vmap` ordered IO callback."


class CalledBack(abc.ABC):
    """The base of functions that are called back for a hook: a program may call them earlier than it says."""

    @property
    @abc.abstractmethod
    def named(self) -> str:
        """The name of the hook in messages."""


@contextmanager
def refused_in_vmap(hooks: Iterable[CalledBack | None]) -> Iterator[None]:
    """Raise `CallError` where JAX cannot call a hook back inside `jax.vmap`; `hooks` are the possible ones."""
    try:
        yield
    except ValueError as error:
        hook = next((hook for hook in hooks if hook is not None), None)
        if _JAX_ON_VMAP not in str(error) or hook is None:
            raise
        what = "is called back, once for each cotangent, which jax.vmap cannot do for a batch of them."
        cure = "Set it outside of jax.vmap, on the batch; or let JAX trace it: aot.on_cotangent(..., traced=True)."
        raise CallError(message(f"The hook {hook.named}", what, cure)) from None


def hooks_in(eqns: Iterable[Equation]) -> Iterator[CalledBack]:
    """The hooks that equations call back."""
    return (hook for eqn in eqns if isinstance(hook := called_back(eqn), CalledBack))


class Stage(NamedTuple, Generic[T]):
    """One stage of a backward, an equation or a step: its reads and results, and whether it calls a hook back."""

    stage: T
    reads: Collection[Any]
    makes: Collection[Any]
    calls_back: bool


def stages_of(eqns: Iterable[Equation]) -> list[Stage[Equation]]:
    """Equations as stages."""
    return [Stage(eqn, [*variables(eqn.invars)], eqn.outvars, isinstance(called_back(eqn), CalledBack)) for eqn in eqns]


def called_early(stages: Sequence[Stage[T]], ends: Collection[Any]) -> list[T]:
    """The stages of a backward, with hooks on its results `ends` moved forward; other hooks keep their order."""
    hooks = _on_results(stages, ends)
    out: list[T] = []
    made = {v for stage in stages for v in stage.makes}
    waiting = [stages[n] for n in hooks]
    for n in range(-1, len(stages)):
        if n in hooks:
            continue
        if n >= 0:
            out.append(stages[n].stage)
            made.difference_update(stages[n].makes)
        for hook in list(waiting):
            if made.isdisjoint(hook.reads):
                out.append(hook.stage)
                made.difference_update(hook.makes)
                waiting.remove(hook)
    return out


def _on_results(stages: Sequence[Stage[Any]], ends: Collection[Any]) -> list[int]:
    """The places of the hooks that only results and other such hooks read."""
    others, ends, found = set[Any](), set(ends), list[int]()
    for n in reversed(range(len(stages))):
        stage = stages[n]
        if stage.calls_back and all(v in ends and v not in others for v in stage.makes):
            found.append(n)
            ends.update(stage.reads)
        else:
            others.update(stage.reads)
    return found[::-1]
