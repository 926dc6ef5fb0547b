"""Lead a function through every stage, in order, on one screen.

    user function ─ bind ─▶ flat leaves ─ wrappers ─▶ flat function ─ joint ─▶ joint jaxpr
      ─ Traced.partition ─▶ Cut ─ Cut.compile ─▶ Compiled

A feature is a wrapper, a rule of the policy, or a strategy; there is no flag in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jointcut.aot import escapes
from jointcut.aot.joint import joint, with_rows
from jointcut.aot.options import Options, name_of
from jointcut.aot.progress import Stage
from jointcut.aot.stages import Traced
from jointcut.aot.wanted import differentiated
from jointcut.partition import jaxprs
from jointcut.partition.errors import DerivativeError, JointcutError, TraceError, choices, message
from jointcut.wrappers import stack
from jointcut.wrappers.alias import AliasWrapper
from jointcut.wrappers.convention import Convention
from jointcut.wrappers.guards import GuardsWrapper
from jointcut.wrappers.tree import Bound, TreeWrapper
from jointcut.wrappers.wrapper import Target

_JAX_ON_WRITES = "differentiated value on a non-differentiated array reference"


def trace(function: Callable[..., Any], options: Options, bound: Bound, positions: Sequence[int] | None) -> Traced:
    """Trace forward and backward for one signature.

    `positions` are the arguments that are differentiated and must be floating point throughout; None differentiates
    whatever can be among all positional arguments, as `jax.vjp` does.
    """
    name = name_of(function)
    with Stage("trace", name) as now:
        wanted = differentiated(bound, positions, options)
        shapes = bound.abstract()
        wrapped = wrapped_for(function, shapes)
        target = wrapped.target
        paths = [slot.path for slot in target.convention.inputs]
        with explained(name, paths, bound), escapes.refused(function, name, bound), jaxprs.paused_collection():
            mask = [i in wanted for i in range(len(bound.leaves))]
            program = joint(target.function, bound.unique, options.has_aux, mask, paths, target.places)
            if positions is not None and options.sparse_gradients:
                program = with_rows(program, tables(bound, wanted, options))
        now.ends(lambda: f"traced in {now}, {len(jaxprs.opened(program.closed)[0].eqns)} equations")
    return Traced(name, options, shapes, wrapped, program, wanted, 1e3 * now.seconds)


def wrapped_for(function: Callable[..., Any], shapes: Bound) -> stack.Wrapped:
    """What the wrappers make of a function for calls of one signature."""
    wrappers = (TreeWrapper(shapes), GuardsWrapper(shapes), AliasWrapper(shapes))
    return stack.pre_compile(wrappers, Target(function, Convention((), ())))


def tables(bound: Bound, wanted: Sequence[int], options: Options) -> dict[int, str]:
    """Places among the gradients, with their paths, of those that are wanted as rows.

    Raises `TraceError` for a path that is none of a differentiated leaf.
    """
    paths = bound.paths()
    known = {paths[i]: k for k, i in enumerate(wanted)}
    for path in options.sparse_gradients:
        if path not in known:
            raise TraceError(message("sparse_gradients", f"names {path}.", choices(path, known)))
    return {known[path]: path for path in options.sparse_gradients}


@contextmanager
def explained(name: str, paths: Sequence[str] = (), bound: Bound | None = None) -> Iterator[None]:
    """Say of an error that JAX raises while tracing which function of ours it was, and what helps.

    `paths` are the user's names of the arrays that it is traced with, which JAX counts: `args[3]`. `bound` is the call.
    """
    try:
        yield
    except jax.errors.JAXTypeError as error:
        _name_argument(error, paths)
        note(error, name)
        raise
    except (TypeError, AttributeError) as error:
        if bound is not None and bound.has_fixed:
            _tell_fixed(error, name, bound)
        raise
    except NotImplementedError as error:
        if not re.match(r"(Differentiation|Transpose|Linearization|JVP|Partial eval).* not implemented", str(error)):
            raise
        what = f"cannot be differentiated: {error}"
        cure = "Give it a derivative with jax.custom_vjp, or keep it out of the path by lax.stop_gradient."
        raise DerivativeError(message(name, what, cure)) from error
    except Exception as error:
        if type(error) is not Exception or _JAX_ON_WRITES not in str(error):  # JAX has no class of its own for it
            raise
        what = "writes a value that is differentiated into a jax.Ref that is not."
        cure = "Write jax.lax.stop_gradient(value): statistics and counters need no derivative."
        raise TraceError(message(name, what, cure)) from error


def _name_argument(error: BaseException, paths: Sequence[str]) -> None:
    """Put the user's path of an argument into JAX's message."""
    counted = re.search(r"the argument args\[(\d+)\]", str(error))
    if counted and int(counted[1]) < len(paths) and not _is_noted(error):
        error.args = (str(error).replace(counted[0], f"the argument {paths[int(counted[1])]}"), *error.args[1:])


def _tell_fixed(error: BaseException, name: str, bound: Bound) -> None:
    """Say which leaves are no arrays, where that may be the mistake: a function or a number seldom is."""
    strange = [(path, leaf.value) for path, leaf in bound.fixed_leaves]
    strange = [(path, x) for path, x in strange if not callable(x) and not isinstance(x, int | float | complex)]
    if strange and not isinstance(error, JointcutError) and not _is_noted(error):
        shown = ", ".join(f"{path} is a {type(x).__name__}" for path, x in strange[:3])
        error.add_note(f"This happened while jointcut traced {name}. It passes on what is no array as it is: {shown}.")


def note(error: BaseException, name: str) -> None:
    """Add to an error of JAX's which function was traced and what helps, once."""
    if _is_noted(error):
        return
    error.add_note(
        f"This happened while jointcut traced {name}. A traced value has a shape and a dtype but no number yet: "
        "do not branch on it, convert it or keep it outside the function. Pass Python values as static_argnums."
    )


def _is_noted(error: BaseException) -> bool:
    return any("jointcut traced" in text for text in getattr(error, "__notes__", ()))
