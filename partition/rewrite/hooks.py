"""Call the hooks of complete gradients as soon as these are there.

JAX calls a hook of the backward where the forward set it. A hook on a parameter is mostly set at the function's start,
so it would be called when the whole backward has run. After this rewrite it is called right behind what completes
the gradient, as in PyTorch, and before hooks of what is computed later.
"""

from __future__ import annotations

from collections.abc import Sequence

from jointcut.partition.program.jaxprs import Atom, Equation, Var, called_back


class CalledBack:
    """The base of functions that are called back for a hook: a program may call them earlier than it says."""


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
