"""Find the names and lines of the user's code under which equations were traced."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _partial_eval

from jointcut.partition.program.cells import call_text
from jointcut.partition.program.jax.jaxprs import ClosedJaxpr, Equation, opened

_JAX_FOLDER = str(Path(jax.__file__).parent)


def rule_of_jax(eqn: Equation) -> str:
    """The name of JAX's own function with a derivative rule that an equation calls, `xlogy`, else an empty text."""
    return _name_if_of_jax(eqn.params["call_jaxpr"]) if eqn.primitive.name == "custom_jvp_call" else ""


def call_of_jax(eqn: Equation) -> str:
    """The name of JAX's own jitted function that an equation calls, `clip`, else an empty text."""
    return _name_if_of_jax(eqn.params["jaxpr"]) if eqn.primitive.name in ("jit", "pjit") else ""


def _name_if_of_jax(body: Any) -> str:
    """The name of the function that was traced to a jaxpr, if it is one of JAX's own."""
    info = opened(body)[0].debug_info
    is_jax = str(info.func_filename or "").startswith(_JAX_FOLDER)
    return info.func_name if is_jax else ""


def scope_here() -> str:
    """The name stack under which the caller traces."""
    return str(_source.current_name_stack())


def asked(policy: Callable[..., Any], eqn: Equation) -> bool | str:
    """The answer of a policy of `jax.checkpoint_policies` for an equation: saveable or not, or the memory to use."""
    answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if isinstance(answer, _partial_eval.Offloadable):
        return answer.dst
    return isinstance(answer, _partial_eval.SaveableType) or answer is True


def scope_of(eqn: Equation) -> str:
    """The name stack of an equation, such as `jvp(block)/attention`."""
    return str(eqn.source_info.name_stack)


def calls_of(eqn: Equation) -> Iterator[str]:
    """`file:line (function)` of the user's calls that led to the equation, the innermost first."""
    frames = _source.user_frames(eqn.source_info.traceback)
    return (call_text(frame.file_name, frame.start_line, frame.function_name) for frame in frames)


def source_of(eqn: Equation) -> str:
    """`file:line (function)` of the user's code that made the equation, or an empty text."""
    return next(calls_of(eqn), "")


def expression_of(eqn: Equation) -> str:
    """The user's expression that made the equation, on one line, such as `jnp.sin(x)`; an empty text if it is unknown.

    Python keeps the columns of each call. A gradient's equations have those of the function's.
    """
    frame = next(iter(_source.user_frames(eqn.source_info.traceback)), None)
    if frame is None or not frame.end_column:
        return ""
    lines = [linecache.getline(frame.file_name, n).encode() for n in range(frame.start_line, frame.end_line + 1)]
    lines[-1] = lines[-1][: frame.end_column]  # columns count bytes
    lines[0] = lines[0][frame.start_column :]
    return " ".join(b" ".join(lines).decode().split())


def under(eqn: Equation) -> AbstractContextManager[None]:
    """A context in which new equations get the line and the scope of an equation."""
    info = eqn.source_info
    return _source.user_context(info.traceback, name_stack=_source.current_name_stack() + info.name_stack)


def without_scope(eqn: Equation) -> Equation:
    """The equation with an empty name stack, to be run in its own scope."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=_source.NameStack()))


def source_here() -> Any:
    """The current place in the user's program: a record that `calls_at` reads."""
    return _source.current()


def written_at(closed: ClosedJaxpr, source: Any) -> ClosedJaxpr:
    """A jaxpr whose equations lie in the scope of a `source_here`; a single equation also gets its line."""
    jaxpr, consts = opened(closed)

    def at(eqn: Equation) -> Equation:
        own = eqn.source_info
        line = source.traceback if len(jaxpr.eqns) == 1 else own.traceback
        return eqn.replace(source_info=own.replace(traceback=line, name_stack=source.name_stack + own.name_stack))

    return ClosedJaxpr(jaxpr.replace(eqns=[*map(at, jaxpr.eqns)]), consts)


def calls_at(source: Any) -> Iterator[str]:
    """`file:line (function)` of the calls that led to a `source_here`, the innermost first."""
    frames = _source.user_frames(source.traceback)
    return (call_text(f.file_name, f.start_line, f.function_name) for f in frames)
