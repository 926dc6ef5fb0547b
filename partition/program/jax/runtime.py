"""Ask JAX what it is doing, and run jaxprs."""

from __future__ import annotations

import copy
import gc
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.core
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax.extend.mlir import ir as _ir

from jointcut.partition.program.jax.abstract import typed
from jointcut.partition.program.jax.jaxprs import ClosedJaxpr, Literal, opened


@contextmanager
def outside() -> Iterator[None]:
    """Leave all transformations and meshes for a while, to compile a program of our own."""
    axes = _core.get_axis_env()
    _core.trace_ctx.set_axis_env(_core.top_axis_env)
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), _core.eval_context():
            yield
    finally:
        _core.trace_ctx.set_axis_env(axes)


def trace_context() -> Any:
    """Everything in JAX's configuration that could change the trace of a function, as one hashable value."""
    return _config.trace_context()


def evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Run a jaxpr on values or tracers, keeping each equation's name stack, source line and context."""
    jaxpr, consts = opened(closed)
    results = jax.core.eval_jaxpr(jaxpr, consts, *args)
    ends = zip(results, jaxpr.outvars, strict=True)
    return [typed(x, v.aval) if isinstance(v, Literal) else x for x, v in ends]


def inlined(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a flat function that is jitted, and becomes a part of the program of a `jax.jit` around it.

    There its equations keep their source lines. With JAX's `inline=True` alone they would all have that of the call.
    """
    jitted = jax.jit(function, inline=True)

    def run(*flat: Any) -> list[Any]:
        kinds = {type(x) for x in flat if is_tracer(x)}
        if kinds != {_pe.DynamicJaxprTracer}:
            return jitted(*flat)
        return evaluate(jitted.trace(*flat).jaxpr, *flat)

    return run


def tracing() -> bool:
    """Whether the caller is inside a JAX transformation (jit, grad, vmap, scan and the like)."""
    return not _core.trace_state_clean()


def only_pulls_back() -> bool:
    """Whether the caller is inside a single `jax.grad` or `jax.vjp` that runs op by op, and in nothing else."""
    trace = _core.trace_ctx.trace
    is_vjp = isinstance(trace, _ad.LinearizeTrace) and trace.is_vjp
    return is_vjp and isinstance(trace.parent_trace, _core.EvalTrace)


def number_of(x: Any) -> Any:
    """The array in a tracer of such a `jax.grad`; any other value unchanged."""
    return x.primal if isinstance(x, _ad.LinearizeTracer) else x


def runs_at_once(values: Iterable[Any]) -> bool:
    """Whether an op on these values may run now: eagerly, also under `jax.grad` and on a tape; then it makes arrays."""
    is_staged = type(_core.trace_ctx.trace).__name__ == "DynamicJaxprTrace"
    return not is_staged and all(map(_core.is_concrete, values))


def is_tracer(x: Any) -> bool:
    """Whether a value is one of JAX's tracers."""
    return isinstance(x, jax.core.Tracer)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's garbage collector: tracing makes 10^5 objects, all kept, and each collection visits them all."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def memory_kinds() -> tuple[str, ...]:
    """The kinds of memory that the default device can address, the default one first."""
    device = jax.local_devices()[0]
    default = device.default_memory().kind
    return default, *(m.kind for m in device.addressable_memories() if m.kind != default)


@contextmanager
def quiet_plugins() -> Iterator[None]:
    """Silence plugins that find no device, where only their compilers are wanted."""
    logger = logging.getLogger("jax._src.xla_bridge")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def calling(lowered: jax.stages.Lowered, target: str, shape: tuple[int, ...]) -> jax.stages.Lowered | None:
    """A copy of a lowered program that begins with a call of a foreign function of this name, without operands.

    Nobody reads its result, which is bytes of this shape. Returns None for a program in parts of several devices, since
    XLA refuses to divide such a call.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    partitions: Any = module.operation.attributes["mhlo.num_partitions"]
    if partitions.value > 1:
        return None
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    with module.context, _ir.Location.unknown(module.context):
        copied = _ir.Module.parse(bytecode.getvalue())
        functions: Any = copied.body.operations
        (main,) = (function for function in functions if function.attributes["sym_name"].value == "main")
        named = {"call_target_name": _ir.StringAttr.get(target), "has_side_effect": _ir.BoolAttr.get(True)}
        named["api_version"] = _ir.IntegerAttr.get(_ir.IntegerType.get_signless(32), 4)
        with _ir.InsertionPoint.at_block_begin(main.regions[0].blocks[0]):
            result = _ir.RankedTensorType.get(shape, _ir.IntegerType.get_unsigned(8))
            _ir.Operation.create("stablehlo.custom_call", results=[result], attributes=named)
    changed: Any = copy.copy(lowered)
    changed._lowering = copy.copy(changed._lowering)
    changed._lowering._hlo = copied
    return changed
