"""Warn, once per function, that plain JAX runs instead of a cut.

>>> import warnings
>>> from jointcut.aot.run.uncut import Uncut
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     uncut = Uncut("loss")
...     uncut("has sizes that are names.", "Give numbers.")
...     uncut("has sizes that are names.", "Give numbers.")
>>> print(*(warning.message for warning in caught))
loss is not cut here, and plain JAX runs: it has sizes that are names.
Give numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.partition.errors import UncutWarning, message
from jointcut.partition.plans.plan import Plan
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.places import user_line
from jointcut.partition.program.primitives import JITS
from jointcut.partition.program.roles import Side
from jointcut.partition.program.sizes import is_symbolic
from jointcut.wrappers.boundary import users_frame

#: Whether a function around the calls is traced for symbolic sizes, and cut with them.
_CUT_AROUND: ContextVar[bool] = ContextVar("_CUT_AROUND", default=False)

#: Calls that are not inlined, in the user's words.
_CLOSED = {
    "shard_map": "jax.shard_map",
    **dict.fromkeys(JITS, "a jax.jit with shardings or options of its own"),
}


#: Whether functions are traced as plain JAX. JAX's own caches keep the programs of both apart.
_PLAIN: Any = jax.make_user_context(False)


def plainly() -> AbstractContextManager[Any]:
    """Let functions that are traced here be plain JAX, without a cut, to compare with."""
    return _PLAIN(True)


def is_plain() -> bool:
    """Whether functions that are traced here are plain JAX."""
    return _PLAIN.value


@dataclass
class Uncut:
    """The warning of one function, issued once; `told` says whether it was."""

    name: str
    told: bool = False

    def __call__(self, why: str, cure: str) -> None:
        """Warn at the user's line; `why` continues a sentence that begins with "it"."""
        if self.told:
            return
        self.told = True
        what = f"is not cut here, and plain JAX runs: it {why}"
        warn(UncutWarning(message(self.name, what, cure)))

    def references(self) -> None:
        """Warn of a program that has no pure form."""
        self(
            "hands a jax.Ref to a function with a derivative of its own, and JAX has no rule that takes it out.",
            "Call its own value_and_grad, grad or vjp outside of jax.grad and jax.jit, or hand over what the reference "
            "holds, ref[...].",
        )

    def twice(self) -> None:
        """Warn of a forward-mode derivative that is differentiated again."""
        self(
            "is differentiated in forward mode, by jax.jvp, and the result is differentiated once more.",
            "Take the gradient first, jax.jvp of jax.grad, or cut the function that holds both derivatives.",
        )

    def symbolic(self) -> None:
        """Warn of arguments with symbolic sizes, for which no plan can be made."""
        if _CUT_AROUND.get():
            return
        self(
            "has sizes that are names, and a plan needs numbers.",
            "Export it with aot.function(...).export(path, ..., sizes={...}), which plans for the sizes that you give.",
        )

    def closed(self, graph: Graph, plan: Plan) -> None:
        """Warn if a call that is not inlined keeps residuals for its own backward, unless all is to be saved."""
        for name, place in _kept_inside(graph, plan) if plan.strategy != "save_all" else ():
            self(
                f"keeps for the backward what {_CLOSED[name]} at {place} keeps inside.",
                f"Put aot.function inside: around the function that {_CLOSED[name]} is given.",
            )


@contextmanager
def cut_around() -> Iterator[None]:
    """Warn of no symbolic sizes: the function around the calls is cut with them."""
    token = _CUT_AROUND.set(True)
    try:
        yield
    finally:
        _CUT_AROUND.reset(token)


def warn(warning: UserWarning) -> None:
    """Issue a warning at the user's line."""
    frame = users_frame()
    where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(warning, type(warning), *where, registry)


def has_symbolic_sizes(leaves: Any) -> bool:
    """Whether an array has a symbolic size."""
    return any(is_symbolic(getattr(jax.typeof(leaf), "shape", ())) for leaf in leaves)


def _kept_inside(graph: Graph, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the calls that save values for their own backward only: name, and place in the source."""
    ours = {v for v, _ in graph.outputs} | {form.source for form in graph.forms}
    for v in plan.values:
        maker = graph.values[v].maker
        if maker is None or v in ours or graph.ops[maker].name not in _CLOSED:
            continue
        op = graph.ops[maker]
        readers = [graph.ops[i] for i in graph.consumers[v]]
        if all(r.name == op.name and r.origin is Side.BACKWARD for r in readers):
            yield op.name, user_line(op.payload) or "an unknown place"
