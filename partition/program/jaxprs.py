"""Borrow from JAX's internals here, and nowhere else.

No other file imports `jax._src`, `jax.extend` or `jax.interpreters`, or asks for JAX's version. The file supports
JAX 0.10.2 to 0.12: 0.11 merged `ClosedJaxpr` into `Jaxpr` and replaced scan's `num_consts`/`num_carry` by flat
trees; 0.12 keeps optimisation barriers on CPU until scheduling.
"""

from __future__ import annotations

import abc
import copy
import functools
import gc
import importlib
import io
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax._src import ad_checkpoint as _checkpoint
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import source_info_util as _source
from jax._src import util as _util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.state import discharge as _discharge
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex
from jax.extend.mlir import ir as _ir
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import SingleDeviceSharding

from jointcut.partition.program.cells import call_text

try:  # JAX 0.11 and later describe a scan's operands by flat trees
    _flattree = importlib.import_module("jax._src.flattree")
except ModuleNotFoundError:  # JAX 0.10
    _flattree = None

_JAX_FOLDER = str(Path(jax.__file__).parent)
_SAYING = ("DebugEffect", "OrderedDebugEffect", "ErrorEffect")  # of `jax.debug.print` and of `checkify.check`
_INWARD = ("NamedAxisEffect", "InternalMutableArrayEffect", "NoDCEEffect")  # effects that nobody outside can see

#: The kind of memory of the host that a device copies to and from by itself.
HOST = "pinned_host"

Jaxpr = jex.Jaxpr
ClosedJaxpr = jex.ClosedJaxpr
Equation = jex.JaxprEqn
Literal = jex.Literal
Var = jex.Var
Atom = Any  # Var | Literal


# ---------------------------------------------------------------------------------------------------- reading


def opened(closed: Any) -> tuple[Any, list[Any]]:
    """Return the open jaxpr and its constants, whichever form this version of JAX gives."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


@dataclass(frozen=True)
class ScanLayout:
    """How a scan equation's operands and results divide into constants, carry and per-step values."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    body: Jaxpr
    body_consts: tuple[Any, ...]


def scan_layout(eqn: Equation) -> ScanLayout:
    """Read a scan equation's parameters, as JAX 0.10 or as JAX 0.11 and later write them."""
    params = eqn.params
    if "ft_in" in params:
        num_consts, num_carry = (len(list(part)) for part in params["ft_in"].unpack()[:2])
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    body, body_consts = opened(params["jaxpr"])
    return ScanLayout(num_consts, num_carry, params["length"], params["reverse"], body, tuple(body_consts))


def inner_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Yield every jaxpr that an equation holds in its parameters."""
    if not any(map(may_hold_jaxpr, eqn.params.values())):
        return
    for closed in jex.jaxprs_in_params(eqn.params):
        yield opened(closed)[0]


def may_hold_jaxpr(param: Any) -> bool:
    """Whether a parameter of an equation holds a jaxpr."""
    if isinstance(param, tuple | list):
        return any(map(may_hold_jaxpr, param))
    return isinstance(param, Jaxpr | ClosedJaxpr)


def inner_primitives(eqn: Equation) -> frozenset[str]:
    """Names of all primitives inside an equation's own jaxprs, however deep."""
    names: set[str] = set()
    stack = list(inner_jaxprs(eqn))
    while stack:
        for inner in stack.pop().eqns:
            names.add(inner.primitive.name)
            stack.extend(inner_jaxprs(inner))
    return frozenset(names)


def has_effects(eqn: Equation) -> bool:
    """Whether running the equation twice, or not at all, could be seen from outside (named axes do not count)."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def touches_references(eqn: Equation) -> bool:
    """Whether the equation reads or writes a `jax.Ref` that it was given."""
    return any(hasattr(effect, "input") for effect in eqn.effects)


def effect_names(eqn: Equation, ordered: bool = False) -> list[str]:
    """Names of an equation's effects on the world outside, without references; with `ordered`, only ordered ones."""
    effects = [e for e in eqn.effects if not hasattr(e, "input") and type(e).__name__ not in _INWARD]
    return sorted(str(e) for e in effects if not ordered or _effects.ordered_effects.contains(e))


#: What stands for a gradient among those of `with_refs`: `GradRef`, `GradValue`, `DontWant`, `DidntWant`.
marks: Any = jax.ad  # pyright: ignore[reportPrivateImportUsage]


def called_back(eqn: Equation) -> Any:
    """The function that an equation of `io_callback` calls; None for any other equation."""
    if eqn.primitive.name != "io_callback":
        return None
    return getattr(eqn.params["callback"], "callback_func", None)


def is_reference(aval: Any) -> bool:
    """Whether an abstract value is a mutable array reference (`jax.Ref`)."""
    return type(aval).__name__ == "AbstractRef"


def is_plain(aval: Any) -> bool:
    """Whether an abstract value is an ordinary array: not a reference, a random key, a token or float0."""
    if not hasattr(aval, "dtype") or is_reference(aval) or aval.dtype == jax.dtypes.float0:
        return False
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def aval_bytes(aval: Any) -> int:
    """Bytes of one array of this abstract value; random keys count as their raw data, references as nothing."""
    if not hasattr(aval, "shape") or is_reference(aval):
        return 0
    return math.prod(aval.shape) * dtype_bytes(aval.dtype)


def extends_floats(dtype: Any) -> bool:
    """Whether a dtype of a library has tangents, such as Flax's numbers whose gradients are not summed up."""
    return (
        jnp.issubdtype(dtype, jax.dtypes.extended) and _core.primal_dtype_to_tangent_dtype(dtype) != jax.dtypes.float0
    )


@functools.cache
def dtype_bytes(dtype: Any) -> int:
    """Bytes of one element of a dtype; one that stands for arrays of another, as random keys do, counts as these."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = _core.physical_aval(_core.ShapedArray((), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return 0 if dtype == jax.dtypes.float0 else dtype.itemsize


def rule_of_jax(eqn: Equation) -> str:
    """The name of JAX's own function with a derivative rule that an equation calls, `xlogy`; empty for a user's."""
    return _name_if_of_jax(eqn.params["call_jaxpr"]) if eqn.primitive.name == "custom_jvp_call" else ""


def call_of_jax(eqn: Equation) -> str:
    """The name of JAX's own jitted function that an equation calls, `clip`; empty for a user's and for what is none."""
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
    """What a policy of `jax.checkpoint_policies` says of an equation: saveable, or not, or in which memory."""
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


# -------------------------------------------------------------------------------------------------- rewriting


def fresh(aval: Any) -> Var:
    """A new variable of the given abstract value."""
    return Var(aval)


def is_dropped(var: Any) -> bool:
    """Whether an equation's result is thrown away."""
    return isinstance(var, jex.DropVar)


def rebound(eqn: Equation, invars: Sequence[Atom], outvars: Sequence[Var]) -> Equation:
    """The same equation with other operands and results; effects on references are moved to the new operands."""
    effects = eqn.effects
    if touches_references(eqn):
        renamed = {old: new for old, new in zip(eqn.invars, invars, strict=True) if isinstance(old, Var)}
        effects = {_moved(e, renamed) for e in effects}
    return eqn.replace(invars=list(invars), outvars=list(outvars), effects=effects)


def _moved(effect: Any, renamed: dict[Var, Atom]) -> Any:
    return effect.replace(renamed[effect.input]) if hasattr(effect, "input") else effect


def build(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Equation]) -> ClosedJaxpr:
    """A closed jaxpr without constants from its parts; its effects are those of its equations."""
    inputs = set(invars)
    effects = {e for eqn in eqns for e in eqn.effects if getattr(e, "input", None) in (None, *inputs)}
    jaxpr = Jaxpr([], list(invars), list(outvars), list(eqns), frozenset(effects), _no_debug_info(invars, outvars))
    return ClosedJaxpr(jaxpr, [])


def _no_debug_info(invars: Sequence[Var], outvars: Sequence[Atom]) -> jex.DebugInfo:
    names = tuple(f"in{i}" for i in range(len(invars)))
    return jex.DebugInfo("jointcut", "jointcut", names, tuple(f"out{i}" for i in range(len(outvars))))


def check(closed: ClosedJaxpr) -> None:
    """Run JAX's own type checker over a jaxpr where `jax_enable_checks` asks for it; raises where it is malformed."""
    if _config.enable_checks.value:
        jex.check_jaxpr(opened(closed)[0])


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The pure form of a jaxpr: references become arrays, and their last states become trailing results.

    The jaxpr has no constants. Raises `NotImplementedError` where JAX has no rule for a primitive that touches a
    reference.
    """
    jaxpr, consts = opened(_discharge.discharge_state(closed, lower=False))
    assert not consts, "JAX's rules for references make no constants"
    return build(jaxpr.invars, jaxpr.outvars, jaxpr.eqns)


def pure(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr with values in the place of the references that it makes."""
    jaxpr, consts = opened(closed)
    if not any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in jaxpr.effects):
        return closed
    inner, _ = opened(discharged(build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)))
    front, rest = inner.invars[: len(consts)], inner.invars[len(consts) :]
    info = _no_debug_info(rest, inner.outvars)
    return ClosedJaxpr(Jaxpr(front, rest, inner.outvars, inner.eqns, inner.effects, info), consts)


def pruned(closed: ClosedJaxpr, wanted: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """A jaxpr that computes only the wanted outputs from only the inputs that they need, and which inputs these are."""
    jaxpr, consts = opened(closed)
    whole = build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    less, used = pe.dce_jaxpr(opened(whole)[0], list(wanted))
    count = len(consts)
    front = less.invars[: sum(used[:count])]
    values = [c for c, on in zip(consts, used[:count], strict=True) if on]
    rest = less.invars[len(front) :]
    open_ = Jaxpr(list(front), list(rest), less.outvars, less.eqns, less.effects, _no_debug_info(rest, less.outvars))
    return ClosedJaxpr(open_, values), list(used[count:])


def silenced(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same jaxpr without `jax.debug.print`, `jax.debug.callback` and `checkify.check`, however deep."""
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_silenced(jaxpr), consts) if _says(jaxpr.effects) else closed


def _says(effects: Any) -> bool:
    return any(type(effect).__name__ in _SAYING for effect in effects)


def _silenced(jaxpr: Jaxpr) -> Jaxpr:
    def quiet(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(quiet, value))
        if isinstance(value, Jaxpr):  # where JAX merged the two classes, a closed one too
            return _silenced(value)
        return ClosedJaxpr(_silenced(value.jaxpr), value.consts) if isinstance(value, ClosedJaxpr) else value

    eqns = []
    for eqn in jaxpr.eqns:
        if not _says(eqn.effects):
            eqns.append(eqn)
        elif any(map(may_hold_jaxpr, eqn.params.values())):
            effects = frozenset(e for e in eqn.effects if type(e).__name__ not in _SAYING)
            eqns.append(eqn.replace(params={k: quiet(v) for k, v in eqn.params.items()}, effects=effects))
    effects = frozenset(e for e in jaxpr.effects if type(e).__name__ not in _SAYING)
    return jaxpr.replace(eqns=eqns, effects=effects)


def barrier(atoms: Sequence[Var]) -> tuple[Equation, list[Var]]:
    """A barrier equation over the given variables (see `held`), and the variables that it returns."""
    outs = [fresh(v.aval) for v in atoms]
    eqn = jex.new_jaxpr_eqn(list(atoms), outs, _barrier_p(), {}, frozenset())
    return eqn, outs


def as_before(eqn: Equation) -> Equation:
    """A region of `jax.checkpoint`, or a name, as JAX wrote it before `jax_remat3`; any other equation as it is."""
    inner: Any = eqn.params.get("_prim")
    match type(inner).__name__:
        case "RematTraced":
            primitive: Any = _checkpoint.remat_p
            params = {**inner.params, "differentiated": False}
        case "CheckpointName" | "CheckpointNameFwd":
            primitive, params = _checkpoint.name_p, dict(inner.params)
        case _:
            return eqn
    return eqn.replace(primitive=primitive, params=params)


def called(eqn: Equation) -> Equation:
    """The equation as a call that XLA does not inline, so that whatever the compiler adds to it stays in the call."""

    def apart(*values: Any) -> Any:
        out = eqn.primitive.bind(*values, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    closed = jax.make_jaxpr(_not_inlined(apart))(*(struct(v.aval) for v in eqn.invars))
    call = opened(closed)[0].eqns[0]
    return rebound(call, eqn.invars, eqn.outvars).replace(source_info=eqn.source_info)


def _not_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a call that XLA never inlines."""

    def call(*operands: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(function)(*operands)

    return call


def held(values: Sequence[Any]) -> list[Any]:
    """Return the values behind a barrier, as `lax.optimization_barrier`: a reader of one waits for all of them."""
    return list(_barrier_p().bind(*values)) if values else []


def reduce_precision(var: Atom) -> tuple[Equation, Var]:
    """Round a half-precision value to its own format, so that XLA may not keep it wider on one side only."""
    info = jax.numpy.finfo(var.aval.dtype)
    trace = jax.make_jaxpr(lambda x: lax.reduce_precision(x, info.nexp, info.nmant))
    eqn = opened(trace(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)))[0].eqns[0]
    out = fresh(var.aval)
    return eqn.replace(invars=[var], outvars=[out]), out


def moved(var: Var, to_host: bool) -> tuple[Equation, Var]:
    """An equation that copies an array to host memory or back to the device's, and the copy."""
    out = fresh(var.aval.update(memory_space=jax.memory.Space.Host if to_host else jax.memory.Space.Device))
    return _move(to_host).replace(invars=[var], outvars=[out]), out


@functools.cache
def _move(to_host: bool) -> Equation:
    """The equation of JAX's own offload policies, over a number.

    It also names the memory that it copies from: its transpose copies a cotangent back there, and else would not.
    """
    here, there = jax.memory.Space.Device, jax.memory.Space.Host
    source, target = (here, there) if to_host else (there, here)
    trace = jax.make_jaxpr(lambda x: jax.device_put(x, target, src=source))
    return opened(trace(jax.ShapeDtypeStruct((), jnp.float32)))[0].eqns[0]


def is_on_host(aval: Any) -> bool:
    """Whether an abstract value is of an array in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def on_host(aval: Any) -> Any:
    """The abstract value of the same array in host memory."""
    return aval.update(memory_space=jax.memory.Space.Host)


class HostStruct(jax.ShapeDtypeStruct):
    """The type of an array in host memory; lowered for JAX's own struct, an argument looks as if on the device."""


_core.pytype_aval_mappings[HostStruct] = lambda x: on_host(jax.core.ShapedArray(x.shape, x.dtype, x.weak_type))


def lies_on_host(placed: Any) -> bool:
    """Whether a sharding, or None, puts an array into host memory."""
    return getattr(placed, "memory_kind", None) == HOST


def unplaced(struct: Any) -> Any:
    """A type without its sharding, unless that says that it is in host memory; references stay as they are."""
    return struct if is_reference(struct) or lies_on_host(struct.sharding) else struct.update(sharding=None)


def host_bytes(variables: Sequence[Any]) -> int:
    """Bytes of those of some variables that are in host memory."""
    return sum(aval_bytes(v.aval) for v in variables if is_on_host(v.aval))


def scan(
    like: Equation,
    body: ClosedJaxpr,
    consts: Sequence[Atom],
    carry: Sequence[Atom],
    xs: Sequence[Atom],
    outvars: Sequence[Var],
) -> Equation:
    """A scan equation over a new body, with the length, direction, name stack and source of an old one."""
    params = dict(like.params, jaxpr=body)
    num_ys = len(outvars) - len(carry)
    if "ft_in" in params:
        assert _flattree is not None
        pack, nones = _flattree.pack, _flattree.nones
        params["ft_in"] = pack((nones(len(consts)), nones(len(carry)), nones(len(xs))))
        params["ft_out"] = pack((nones(len(carry)), nones(num_ys)))
    else:
        params.update(num_consts=len(consts), num_carry=len(carry))
    effects = frozenset(opened(body)[0].effects)
    return like.replace(invars=[*consts, *carry, *xs], outvars=list(outvars), params=params, effects=effects)


def stacked(aval: Any, lengths: Sequence[int]) -> Any:
    """The abstract value of a per-step value once the loops around it have stacked it."""
    if not lengths:
        return aval
    return _reshaped(aval, (*lengths, *aval.shape), lambda spec: (*(None for _ in lengths), *spec))


def unstacked(aval: Any) -> Any:
    """The abstract value of one step of a stack."""
    return _reshaped(aval, aval.shape[1:], lambda spec: spec[1:])


def _reshaped(aval: Any, shape: tuple[int, ...], spec: Callable[[Any], Any]) -> Any:
    """The abstract value with another shape, and with other parts of its axes on an explicit mesh."""
    if not is_explicit(aval.sharding):
        return aval.update(shape=shape)
    old = aval.sharding.spec
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=old.update(partitions=spec(old.partitions))))


# --------------------------------------------------------------------------------------------------- runtime


def tangent_aval(aval: Any) -> Any:
    """The abstract value of a tangent or cotangent of an array."""
    return aval.to_tangent_aval()


def cotangent_aval(aval: Any) -> Any:
    """The abstract value of a cotangent of an array: that of a tangent, unless it is summed over a mesh's axis."""
    return aval.to_ct_aval()


def struct(aval: Any) -> Any:
    """The abstract value as `jax.ShapeDtypeStruct`, with its sharding where that is part of its type, with the axes
    of a mesh that it varies over, and in host memory if it is there.
    """
    if is_reference(aval):
        return aval
    weak, axes = bool(getattr(aval, "weak_type", False)), getattr(aval, "manual_axis_type", None)
    sharding = _sharding_in_type(aval)
    if sharding is None and is_on_host(aval):
        sharding = SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST)
    make = HostStruct if is_on_host(aval) else jax.ShapeDtypeStruct
    return make(aval.shape, aval.dtype, weak_type=weak, sharding=sharding, manual_axis_type=axes)


def input_structs(closed: ClosedJaxpr) -> list[Any]:
    """The inputs of a jaxpr as `jax.ShapeDtypeStruct`."""
    return [struct(v.aval) for v in opened(closed)[0].invars]


def is_explicit(sharding: Any) -> bool:
    """Whether a sharding is part of an array's type: it lays it over a mesh with an explicit axis."""
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types


def _sharding_in_type(aval: Any) -> Any:
    """The sharding of an abstract value where it is part of its type: inside `shard_map`, or on an explicit axis."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or set(mesh.axis_types) == {jax.sharding.AxisType.Auto}:
        return None
    return sharding


def varying(aval: Any) -> frozenset[Any]:
    """The axes of a mesh over which a value varies from device to device inside `jax.shard_map`."""
    return getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())


def manual_mesh() -> Any | None:
    """The mesh of the `jax.shard_map` that we are traced in, None outside of any."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.manual_axes else None


def checks_varying() -> bool:
    """Whether the `jax.shard_map` that we are traced in knows over which axes its values vary."""
    return bool(_config._check_vma.value)


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


@contextmanager
def inside(eqn: Equation) -> Iterator[None]:
    """Be where the body of an equation is traced: on the mesh of a `jax.shard_map`, and elsewhere where we are."""
    if eqn.primitive.name != "shard_map":
        yield
        return
    mesh, manual = eqn.params["mesh"].abstract_mesh, eqn.params["newly_manual_axes"]
    inner = mesh.update_axis_types(dict.fromkeys(manual, jax.sharding.AxisType.Manual))
    axes = [(name, size) for name, size in mesh.shape.items() if name in inner.manual_axes]
    checks = _config._check_vma(eqn.params["check_vma"])
    with _core.extend_axis_env_nd(axes), jax.sharding.use_abstract_mesh(inner), checks:
        yield


def on_all_devices(aval: Any) -> Any:
    """The same abstract value, for an array that is equal on all devices of a mesh."""
    return aval.update(manual_axis_type=type(aval.manual_axis_type)()) if varying(aval) else aval


def varied(var: Var, aval: Any) -> Equation:
    """An equation that casts an array which is equal on all devices to one that varies over the axes of `aval`."""
    axes = tuple(axis for axis in aval.sharding.mesh.axis_names if axis in varying(aval))
    return jex.new_jaxpr_eqn([var], [fresh(aval)], _core.pvary_p, {"axes": axes}, frozenset())


def trace_context() -> Any:
    """Everything in JAX's configuration that could change what a function traces to, as one hashable value."""
    return _config.trace_context()


def evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Run a jaxpr on values or tracers, keeping each equation's name stack, source line and context."""
    jaxpr, consts = opened(closed)
    results = jax.core.eval_jaxpr(jaxpr, consts, *args)
    ends = zip(results, jaxpr.outvars, strict=True)
    return [typed(x, v.aval) if isinstance(v, Literal) else x for x, v in ends]


def typed(x: Any, aval: Any) -> Any:
    """The array `x` with the dtype and weak type of an abstract value, varying over the axes that it varies over."""
    x = _lax._convert_element_type(x, aval.dtype, weak_type=aval.weak_type)
    axes = varying(aval) - varying(jax.typeof(x))
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def as_varying(x: Any, *others: Any) -> Any:
    """The array `x`, varying over the axes that it or one of some other arrays varies over."""
    axes = frozenset[Any]().union(*(varying(jax.typeof(y)) for y in others)) - varying(jax.typeof(x))
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def full(aval: Any, number: Any) -> Any:
    """An array that holds one number, of an abstract value's type."""
    return typed(lax.full(aval.shape, number, aval.dtype, sharding=_sharding_in_type(aval)), aval)


def tracing() -> bool:
    """Whether the caller is inside a JAX transformation (jit, grad, vmap, scan and the like)."""
    return not _core.trace_state_clean()


def is_tracer(x: Any) -> bool:
    """Whether a value is one of JAX's tracers."""
    return isinstance(x, jax.core.Tracer)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's garbage collector: tracing makes 10^5 small objects, all kept, and each sweep visits them all."""
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
    """Log nothing of plugins that find no device, where only their compilers are wanted."""
    logger = logging.getLogger("jax._src.xla_bridge")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def version() -> tuple[int, ...]:
    """The version of JAX as numbers."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def barriers_expand(platform: str) -> bool:
    """Whether XLA expands optimisation barriers before scheduling unless a compiler option forbids it: XLA:CPU
    up to JAX 0.11.
    """
    return platform == "cpu" and version() < (0, 12)


def calling(lowered: jax.stages.Lowered, target: str, shape: tuple[int, ...]) -> jax.stages.Lowered | None:
    """A copy of a lowered program that begins with a call of a foreign function of this name, without operands.

    Nobody reads its result, bytes of this shape. None for a program in parts of several devices: XLA refuses to divide
    such a call.
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


# ---------------------------------------------------------------------------------------- primitives of our own


def mapped(closed: ClosedJaxpr, axis: Any, dims: Sequence[int | None]) -> tuple[ClosedJaxpr, list[Any], list[Any]]:
    """A jaxpr over one more axis, given its position in each input (None where an input does not have the axis).

    Returns a jaxpr without constants, the values of its new leading inputs, and the axis's position in each output.
    """
    made, out_dims = _batching.batch_jaxpr2(closed, axis, tuple(dims))
    jaxpr, consts = opened(made)
    if consts:
        made = build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)
    return made, consts, list(out_dims)


def with_axis(axis: Any, dim: int | None, aval: Any) -> Any:
    """The abstract value with the axis that is mapped over at a position; unchanged if that is None."""
    return aval if dim is None else _core.unmapped_aval(axis.size, dim, aval, axis.explicit_mesh_axis)


class CallRules(abc.ABC):
    """How a call of ours is run, differentiated and mapped. The jaxpr in its parameters says what it computes."""

    @abc.abstractmethod
    def run(self, *flat: Any) -> list[Any]:
        """The outputs, computed outside of all transformations."""

    @abc.abstractmethod
    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[list[Any], list[Any | None]]:
        """The outputs and their tangents; None stands for a tangent that is zero."""

    @abc.abstractmethod
    def mapped(self, axis: Any, dims: tuple[int | None, ...]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """The same function over one more axis, as in `mapped`, and the axis's position in each output."""

    @property
    @abc.abstractmethod
    def forward(self) -> CallRules:
        """The rules for `jax.linearize`, which asks for no backward."""

    #: How many leading inputs the call is not linear in; None where it is not known to be linear in the others.
    constants: int | None = None

    def halves(self, mask: tuple[bool, ...]) -> tuple[Any, Sequence[Any]] | None:
        """The forward and backward for some differentiated inputs, and the constants that they take first.

        Returns None, as it does by default, where the call is differentiated by its `jvp`.
        """
        del mask

    def nested(self) -> Any:
        """The step of a loop that is cut on its own (`bodies.Nested`), None in other calls."""
        return None

    def runs(self) -> Sequence[tuple[ClosedJaxpr, int]] | None:
        """The programs that a call runs, and how often it is expected to; None where that is its jaxpr, once."""
        return None

    def parted(self, known: Sequence[Any | None]) -> tuple[list[Any], Callable[..., list[Any]]] | None:
        """The leading outputs, computed from the known inputs, and a function of the other inputs for the rest.

        An input that is not known is None in `known`. Returns None, as it does by default, where every output needs
        every input.
        """
        del known

    def __init_subclass__(cls) -> None:
        """Make JAX's caches hold objects of this class weakly, although they are parameters of a primitive."""
        _util.weakref_cache_key_types.add(cls)


def nested_in(eqn: Equation) -> Any:
    """As `CallRules.nested`, None for an equation that is no such call."""
    rules = eqn.params.get("rules")
    return rules.nested() if isinstance(rules, CallRules) else None


def runs_of(eqn: Equation) -> Sequence[tuple[ClosedJaxpr, int]] | None:
    """As `CallRules.runs`, None for an equation that is no such call."""
    rules = eqn.params.get("rules")
    return rules.runs() if isinstance(rules, CallRules) else None


@dataclass(frozen=True)
class Early:
    """The part of a call that can run before all inputs are known: it takes `inputs` and gives the first outputs."""

    prim: Any
    jaxpr: ClosedJaxpr
    rules: CallRules
    inputs: slice


def call_primitive(name: str, early: Callable[[Any], Early] | None = None) -> Any:
    """A primitive `p(*flat, jaxpr=ClosedJaxpr, rules=CallRules)`: a jaxpr with rules of its own.

    `early` returns, for the rules of a call, the part of the call that `jax.checkpoint` can run at once.
    """
    prim = jex.Primitive(name)
    prim.multiple_results = True
    prim.def_impl(lambda *flat, rules, **params: rules.run(*flat))
    prim.def_effectful_abstract_eval(_call_abstract)
    ad.primitive_jvps[prim] = _call_jvp
    ad.primitive_transposes[prim] = _call_transpose
    _ad.primitive_linearizations[prim] = functools.partial(_call_linearized, prim)
    pe.custom_partial_eval_rules[prim] = functools.partial(_call_parted, prim)
    if early is not None:
        pe.partial_eval_jaxpr_custom_rules[prim] = functools.partial(_call_under_checkpoint, early)
    batching.fancy_primitive_batchers[prim] = functools.partial(_call_mapped, prim)
    _checkify.error_checks[prim] = _call_checked
    mlir.register_lowering(prim, mlir.lower_fun(_call_evaluated, multiple_results=True))
    return prim


def _call_evaluated(*flat: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> list[Any]:
    del rules
    return evaluate(jaxpr, *flat)


def _call_abstract(*avals: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> tuple[list[Any], Any]:
    del avals, rules
    inner, _ = opened(jaxpr)
    return [v.aval for v in inner.outvars], inner.effects


def _call_jvp(primals: Any, tangents: Any, *, jaxpr: ClosedJaxpr, rules: CallRules) -> Any:
    del jaxpr
    outs, moved = rules.jvp(primals, [None if type(t) is ad.Zero else t for t in tangents])
    zeros = (ad.Zero(tangent_aval(jax.typeof(out))) for out in outs)
    return outs, [zero if t is None else t for zero, t in zip(zeros, moved, strict=True)]


def _call_linearized(prim: Any, is_vjp: bool, nonzeros: Any, *primals: Any, rules: CallRules, **params: Any) -> Any:
    chosen = rules if is_vjp else rules.forward
    return _ad.fallback_linearize_rule(prim, is_vjp, nonzeros, *primals, rules=chosen, **params)


def _call_parted(prim: Any, trace: Any, *tracers: Any, rules: CallRules, **params: Any) -> Any:
    known = [t.pval.get_known() for t in tracers]
    parted = None if all(x is not None for x in known) else rules.parted(known)
    if parted is None:
        return trace.default_process_primitive(prim, tracers, {**params, "rules": rules})
    values, rest = parted
    with _core.set_current_trace(trace):
        return [*values, *rest(*(t for t, x in zip(tracers, known, strict=True) if x is None))]


def _call_under_checkpoint(
    early: Callable[[Any], Early], saveable: Any, unknown: Any, at_hand: Any, eqn: Equation
) -> Any:
    """Run the early call at once where its inputs are known. The whole call, with that part, is left for later."""
    del saveable
    first = early(eqn.params["rules"])
    outputs = eqn.outvars[: len(opened(first.jaxpr)[0].outvars)]
    waits = any(unknown[first.inputs])
    params = {"jaxpr": first.jaxpr, "rules": first.rules}
    now = eqn.replace(primitive=first.prim, invars=eqn.invars[first.inputs], outvars=outputs, params=params)
    late = [waits or i >= len(outputs) for i in range(len(eqn.outvars))]
    needed = [v for v, here in zip(eqn.invars, at_hand, strict=True) if isinstance(v, Var) and not here]
    return None if waits else now, eqn, late, [True] * len(late), needed


def _call_mapped(prim: Any, axis: Any, operands: Any, dims: Any, *, rules: CallRules, **params: Any) -> Any:
    if all(d is None for d in dims):
        outs = prim.bind(*operands, rules=rules, **params)
        return outs, [None] * len(outs)
    call, out_dims = rules.mapped(axis, tuple(dims))
    return call(*operands), out_dims


def _call_transpose(cts: Any, *operands: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> list[Any]:
    asked = [ad.is_undefined_primal(x) for x in operands]

    def linear(*xs: Any) -> list[Any]:
        given = iter(xs)
        return evaluate(jaxpr, *(next(given) if wanted else x for wanted, x in zip(asked, operands, strict=True)))

    avals = [x.aval for x, wanted in zip(operands, asked, strict=True) if wanted]
    if rules.constants is None or any(asked[: rules.constants]):
        transposed = jax.linear_transpose(linear, *map(struct, avals))
    else:  # it may test its inputs for zero: JAX transposes the derivative of that, but not the test
        transposed = jax.vjp(linear, *(full(aval, 0) for aval in avals))[1]
    back = iter(transposed([ad.instantiate_zeros(ct) for ct in cts]))
    return [next(back) if wanted else None for wanted in asked]


def _call_checked(*given: Any, jaxpr: ClosedJaxpr, rules: CallRules) -> Any:
    del rules
    front = len(given) - len(opened(jaxpr)[0].invars)
    *context, error, enabled = given[:front]  # JAX 0.12 puts a context in front
    return _checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *given[front:])


@dataclass(frozen=True, eq=False)
class LinearRules:
    """The functions that define a linear map: the avals of its results, its value and its transpose.

    All take `(residuals, linear)` as flat lists, except `transpose`, which takes `(residuals, cotangents)`. There None
    stands for a zero, both among the cotangents and among the results. `twice` is called when the map itself is
    differentiated, which is then done through `apply`.
    """

    avals: Callable[..., list[Any]]
    apply: Callable[..., list[Any]]
    transpose: Callable[..., list[Any | None]]
    twice: Callable[[], None] = lambda: None

    def mapped(self, axis: Any, residuals: Sequence[int | None], linear: Sequence[int | None]) -> LinearRules:
        """The same map over one more axis, given its position in each operand (None: absent); it leads each result."""
        over = functools.partial(
            jax.vmap, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name or None
        )

        def inner(avals: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
            pairs = zip(avals, dims, strict=True)
            return [a if d is None else _core.mapped_aval(axis.size, d, a) for a, d in pairs]

        def avals(given: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
            outs = self.avals(inner(given, residuals), inner(moved, linear))
            return [_core.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in outs]

        def apply(given: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
            return over(self.apply, in_axes=(list(residuals), list(linear)))(list(given), list(moved))

        def transpose(given: Sequence[Any], cotangents: Sequence[Any | None]) -> list[Any | None]:
            back = over(self.transpose, in_axes=(list(residuals), 0))(list(given), list(cotangents))
            pairs = zip(back, linear, strict=True)
            return [ct if ct is None else ct.sum(0) if d is None else jnp.moveaxis(ct, 0, d) for ct, d in pairs]

        return LinearRules(avals, apply, transpose, self.twice)


def leaving_primitive(name: str) -> Any:
    """A primitive `p(*values, number=int, returns=avals)` at which a program is left for something that it is not."""
    prim = jex.Primitive(name)
    prim.multiple_results = True
    prim.def_abstract_eval(lambda *avals, number, returns: list(returns))
    return prim


def elementwise_primitive(name: str, function: Callable[..., Any]) -> Any:
    """A primitive `p(x, dtype=dtype)` that computes `function(x, dtype)`, and whose derivative is a conversion alone.

    A `jax.custom_jvp` will not do: in the steps of a loop JAX 0.10 forgets it for second derivatives.
    """
    prim = jex.Primitive(name)
    prim.def_impl(jax.jit(function, static_argnums=1, static_argnames="dtype"))
    prim.def_abstract_eval(lambda x, *, dtype: x.update(dtype=jnp.dtype(dtype), weak_type=False))
    ad.primitive_jvps[prim] = lambda xs, ts, *, dtype: (prim.bind(*xs, dtype=dtype), _converted(ts[0], dtype))
    batching.defvectorized(prim)
    mlir.register_lowering(prim, mlir.lower_fun(function, multiple_results=False))
    return prim


def _converted(tangent: Any, dtype: Any) -> Any:
    return ad.Zero(tangent.aval.update(dtype=jnp.dtype(dtype))) if type(tangent) is ad.Zero else tangent.astype(dtype)


def linear_primitive(name: str) -> Any:
    """A primitive `p(*residuals, *linear, rules=LinearRules, num_residuals=n)` that is linear in its last operands.

    Reverse mode calls `rules.transpose`; forward mode and lowering follow `rules.apply`.
    """
    prim = jex.Primitive(name)
    prim.multiple_results = True

    def apply(*operands: Any, rules: LinearRules, num_residuals: int) -> list[Any]:
        return rules.apply(operands[:num_residuals], operands[num_residuals:])

    def abstract(*avals: Any, rules: LinearRules, num_residuals: int) -> list[Any]:
        return rules.avals(avals[:num_residuals], avals[num_residuals:])

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        params["rules"].twice()
        filled = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(lambda *xs: apply(*xs, **params), tuple(primals), tuple(filled))

    def transpose(cts: Any, *operands: Any, rules: LinearRules, num_residuals: int) -> list[Any]:
        linear = operands[num_residuals:]
        known = [None if type(ct) is ad.Zero else ct for ct in cts]
        back = rules.transpose(operands[:num_residuals], known)
        return [None] * num_residuals + [
            (ad.Zero(x.aval) if b is None else b) if ad.is_undefined_primal(x) else None
            for b, x in zip(back, linear, strict=True)
        ]

    def batch(axis: Any, operands: Any, dims: Any, *, rules: LinearRules, num_residuals: int) -> Any:
        if all(d is None for d in dims):
            outs = prim.bind(*operands, rules=rules, num_residuals=num_residuals)
            return outs, [None] * len(outs)
        over = rules.mapped(axis, dims[:num_residuals], dims[num_residuals:])
        outs = prim.bind(*operands, rules=over, num_residuals=num_residuals)
        return outs, [0] * len(outs)

    prim.def_impl(lambda *operands, **params: jax.jit(lambda *xs: apply(*xs, **params))(*operands))
    prim.def_abstract_eval(abstract)
    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose
    batching.fancy_primitive_batchers[prim] = batch
    mlir.register_lowering(prim, mlir.lower_fun(apply, multiple_results=True))
    return prim


_util.weakref_cache_key_types.add(LinearRules)


@functools.lru_cache(maxsize=1)
def _barrier_p() -> Any:
    """An optimisation barrier, with the name of JAX's own, that also holds on XLA:CPU up to JAX 0.11.

    There XLA expands barriers before it schedules, but never inlines a call marked `inlineable="false"`: it fuses,
    merges and moves nothing across such a call, and copies nothing for it. So a barrier is lowered to such a call. It
    is not in a program for several platforms or for symbolic sizes, where all calls are inlined before XLA sees them.
    Operands may vary over different axes of a mesh, which JAX 0.10 does not allow for its own barrier.
    """
    prim: Any = jex.Primitive("optimization_barrier")
    prim.multiple_results, prim.cache_key = True, "jointcut: a barrier"

    def jvp(primals: Any, tangents: Any) -> Any:
        moves = [type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents]
        moved = iter(held([t for t, does in zip(tangents, moves, strict=True) if does]) if any(moves) else ())
        pairs = zip(primals, moves, strict=True)  # a `lax.cond` refuses an index whose tangent is an array
        return held(primals), [next(moved) if does else ad.Zero(tangent_aval(jax.typeof(x))) for x, does in pairs]

    def optimization_barrier(*values: Any) -> Any:
        return lax.optimization_barrier(values)

    def lowering(ctx: Any, *operands: Any) -> Any:
        module = ctx.module_context
        is_for_one = len(module.platforms) == 1 and not module.shape_poly_state.dim_vars
        if not (is_for_one and barriers_expand(module.platforms[0])):
            return _hlo.OptimizationBarrierOp(operands).results
        # The types name no axes of a mesh: a call inside `shard_map` could not find them.
        plain = [jax.core.ShapedArray(v.shape, v.dtype) for v in ctx.avals_in]
        call = mlir.lower_fun(_not_inlined(optimization_barrier), multiple_results=True)
        return call(ctx.replace(avals_in=plain), *operands)

    def parted(trace: Any, *tracers: Any) -> list[Any]:
        # A known value waits for no unknown one: JAX would take a residual for linear in the cotangent it waits for.
        is_known = [t.pval.is_known() for t in tracers]
        groups = {side: [t for t, on in zip(tracers, is_known, strict=True) if on == side] for side in {*is_known}}
        waited = {side: iter(trace.default_process_primitive(prim, group, {})) for side, group in groups.items()}
        return [next(waited[side]) for side in is_known]

    prim.def_impl(lambda *xs: list(xs))
    prim.def_abstract_eval(lambda *avals: list(avals))
    ad.primitive_jvps[prim] = jvp
    pe.custom_partial_eval_rules[prim] = parted
    ad.primitive_transposes[prim] = lambda cts, *_: held([ad.instantiate_zeros(ct) for ct in cts])
    batching.primitive_batchers[prim] = lambda xs, dims: (held(xs), dims)
    mlir.register_lowering(prim, lowering)
    return prim


# --------------------------------------------------------------------------------------- ops that run one at a time


@dataclass(frozen=True)
class Operation:
    """One op of a function that runs eagerly: its `name`, and `bind`, which runs it on values or tracers.

    `key` is equal for equal ops, None where an op has no identity. An op with a derivative of the user's has a function
    among its `functions`, before the rules. The caller reads what the function left behind when it ran, the trees of
    its results.
    """

    name: str
    key: Any
    bind: Callable[..., Any]
    params: dict[str, Any]
    multiple: bool
    functions: tuple[Any, ...] = ()

    def left_behind(self) -> list[Any]:
        """What the function left behind; what its rules left is removed, since the caller reads only one of them."""
        for rule in self.functions[1:]:
            for store in rule.stores:
                if store is not None:
                    store.reset()
        return [store for f in self.functions[:1] for store in f.stores]

    def leave_behind(self, stores: Sequence[Any]) -> None:
        """Leave the same for another caller, whose function does not run."""
        for mine, known in zip(self.functions[0].stores, stores, strict=True):
            if mine is not None:
                mine.store(known.val)


class EagerTracer(_core.Tracer[Any]):
    """A value that ops are recorded of, and that has numbers: `value` is the array, `edge` a note of the recorder."""

    __slots__ = ("edge", "value")

    def __init__(self, trace: EagerTrace, value: Any, edge: Any) -> None:
        """Wrap an array, which may be a tracer of a trace around this one."""
        self._trace = trace
        self.aval = _core.typeof(value)
        self.value, self.edge = value, edge

    def to_concrete_value(self) -> Any:
        """The array."""
        return _core.to_concrete_value(self.value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value.__array__(*args, **kwargs)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __reduce__(self) -> Any:
        return self.value.__reduce__()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value.__dlpack__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name) if name in _OF_ARRAYS else super().__getattr__(name)


#: What only arrays with numbers have; the same of the array inside.
_OF_ARRAYS = (
    *("item", "tolist", "tobytes", "block_until_ready", "copy_to_host_async", "devices", "sharding", "committed"),
    *("device", "addressable_shards", "addressable_data", "global_shards", "is_deleted", "is_fully_addressable"),
    *("is_fully_replicated", "unsafe_buffer_pointer", "on_device_size_in_bytes"),
)


def _of_array(name: str) -> property:
    return property(lambda self: getattr(self.value, name), doc=f"As `jax.Array.{name}`.")


for _name in _OF_ARRAYS:
    setattr(EagerTracer, _name, _of_array(_name))


class EagerTrace(_core.Trace):
    """Hands each op of a running function to `recorder`, with the values and tracers that it is given."""

    __slots__ = ("parent", "recorder")

    def __init__(self) -> None:
        """Start without a recorder; `eager` sets it."""
        super().__init__()
        self.parent: Any = None
        self.recorder: Any = None

    def stage_value(self, val: Any) -> Any:
        """Leave a value as it is."""
        return val

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Record and run an op."""
        return self._record(primitive, params, (), tracers)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        """Record and run a function with a forward derivative of its own."""
        return self._record(primitive, {"subfuns": (fun, jvp), **params}, (fun, jvp), tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """Record and run a function with a backward of its own."""
        return self._record(primitive, {"subfuns": (fun, fwd, bwd), **params}, (fun, fwd, bwd), tracers)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        """Record and run a `jax.shard_map` as a jitted call."""
        made: list[Any] = []

        def call(*values: Any) -> list[Any]:
            made[:] = [primitive.bind(*values, subfuns=(fun,), **params)]
            return list(made[0])

        with _core.set_current_trace(self):
            flat = jax.jit(call)(*tracers)
        return made[0].update(flat)

    def _record(self, primitive: Any, params: Any, functions: tuple[Any, ...], tracers: Any) -> Any:
        if not any(type(x) is EagerTracer and x._trace is self for x in tracers):
            with _core.set_current_trace(self.parent):
                return primitive.bind(*tracers, **params)
        rest = ((k, v) for k, v in params.items() if k not in ("out_trees", "subfuns"))
        key = (primitive, *functions[:1], *(rule.f for rule in functions[1:]), *rest)
        try:
            hash(key)
        except TypeError:
            key = None
        bind = functools.partial(primitive.bind, **params)
        operation = Operation(primitive.name, key, bind, params, primitive.multiple_results, functions)
        with _core.set_current_trace(self.parent):
            return self.recorder(operation, tracers)


class _EagerTraces(threading.local):
    """The eager traces of a thread, by depth. They are used again, since JAX's caches hold them as part of a key."""

    def __init__(self) -> None:
        self.made: list[EagerTrace] = []
        self.depth = 0


_eager_traces = _EagerTraces()


@contextmanager
def eager(recorder: Callable[[Operation, Sequence[Any]], Any]) -> Iterator[EagerTrace]:
    """Hand every op that is run in the `with` to a recorder, if it reads an `EagerTracer` of the trace given."""
    mine = _eager_traces
    if mine.depth == len(mine.made):
        mine.made.append(EagerTrace())
    trace, parent = mine.made[mine.depth], _core.trace_ctx.trace
    trace.parent, trace.recorder = parent, recorder
    mine.depth += 1
    try:
        with _core.set_current_trace(trace):
            yield trace
    finally:
        mine.depth -= 1
        trace.parent = trace.recorder = None


def eager_trace() -> EagerTrace | None:
    """The innermost trace that runs its ops eagerly, if no other transformation is inside it."""
    current = _core.trace_ctx.trace
    return current if isinstance(current, EagerTrace) else None


def runs_eagerly() -> bool:
    """Whether ops run on numbers where the caller is: outside all transformations, or in eager traces alone."""
    return not tracing() or eager_trace() is not None


def source_here() -> Any:
    """Where the user's program is: a record that `calls_at` reads."""
    return _source.current()


def calls_at(source: Any) -> Iterator[str]:
    """`file:line (function)` of the calls that led to a `source_here`, the innermost first."""
    frames = _source.user_frames(source.traceback)
    return (call_text(f.file_name, f.start_line, f.function_name) for f in frames)
