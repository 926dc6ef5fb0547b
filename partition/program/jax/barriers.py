"""Write barriers, copies between memories, and calls that stay apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax._src import ad_checkpoint as _checkpoint
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jointcut.partition.program.jax.abstract import struct, tangent_aval
from jointcut.partition.program.jax.jaxprs import Atom, Equation, Jaxpr, Var, barriers_expand, fresh, opened, rebound
from jointcut.partition.program.jax.meshes import where_they_vary


def barrier(atoms: Sequence[Var]) -> tuple[Equation, list[Var]]:
    """A barrier equation over the given variables (see `held`), and the variables that it returns."""
    outs = [fresh(v.aval) for v in atoms]
    eqn = jex.new_jaxpr_eqn(list(atoms), outs, _barrier_p(), {}, frozenset())
    return eqn, outs


def barriers(atoms: Sequence[Any]) -> tuple[list[Equation], list[Var]]:
    """The equations of a barrier, and the variables after it; a random key passes as the numbers in it."""
    into, out, numbers, held = list[Equation](), list[Equation](), list[Var](), list[Var]()
    keys = [_key_opened(v.aval) if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) else None for v in atoms]
    for v, key in zip(atoms, keys, strict=True):
        numbers.append(v if key is None else fresh(key[0].outvars[0].aval))
        into += [] if key is None else [rebound(key[0], [v], [numbers[-1]])]
    waiting, behind = barrier(numbers)
    for atom, v, key in zip(atoms, behind, keys, strict=True):
        held.append(v if key is None else fresh(atom.aval))
        out += [] if key is None else [rebound(key[1], [v], [held[-1]])]
    return [*into, waiting, *out], held


@functools.lru_cache(maxsize=64)
def _key_opened(aval: Any) -> tuple[Equation, Equation]:
    """An equation that reads the numbers in a key, and an equation that makes a key from them."""

    def same(key: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(key))

    with where_they_vary(aval):
        unwrap, wrap = opened(jax.make_jaxpr(same)(struct(aval)))[0].eqns
    return unwrap, wrap


def as_before(eqn: Equation) -> Equation:
    """A region of `jax.checkpoint`, or a name, as JAX wrote it before `jax_remat3`; any other equation unchanged."""
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

    avals = [v.aval for v in eqn.invars]
    with where_they_vary(*avals):
        closed = jax.make_jaxpr(_not_inlined(apart))(*map(struct, avals))
    call = opened(closed)[0].eqns[0]
    return rebound(call, eqn.invars, eqn.outvars).replace(source_info=eqn.source_info)


def _not_inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(function)(*operands)

    return call


def held(values: Sequence[Any], are_slices: bool = False) -> list[Any]:
    """Return the values after a barrier, as `lax.optimization_barrier`: a reader of one waits for all of them.

    With `are_slices` the values are a loop step's slices of stacks that it carries, and the step changes nothing of
    each stack but this slice. Readers of the program can see this; see `own_slices`.
    """
    marks = {"are_slices": True} if are_slices else {}
    return list(_barrier_p().bind(*values, **marks)) if values else []


def own_slices(body: Jaxpr) -> dict[Var, Var]:
    """The slices that are `held` in this way, by the variables that a loop's body begins with."""
    barriers = [eqn for eqn in body.eqns if eqn.params.get("are_slices")]
    makers = {v: eqn for eqn in body.eqns for v in eqn.outvars} if barriers else {}
    found: dict[Any, Var] = {}
    for v, behind in ((v, behind) for eqn in barriers for v, behind in zip(eqn.invars, eqn.outvars, strict=True)):
        while v in makers:
            v = makers[v].invars[0]
        found[v] = behind
    return found


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

    It also names the memory that it copies from. Its transpose copies a cotangent back there, which it otherwise would
    not.
    """
    here, there = jax.memory.Space.Device, jax.memory.Space.Host
    source, target = (here, there) if to_host else (there, here)
    trace = jax.make_jaxpr(lambda x: jax.device_put(x, target, src=source))
    return opened(trace(jax.ShapeDtypeStruct((), jnp.float32)))[0].eqns[0]


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

    def jvp(primals: Any, tangents: Any, **_: Any) -> Any:
        moves = [type(t) is not ad.Zero and t.dtype != jax.dtypes.float0 for t in tangents]
        moved = iter(held([t for t, does in zip(tangents, moves, strict=True) if does]) if any(moves) else ())
        pairs = zip(primals, moves, strict=True)  # a `lax.cond` refuses an index whose tangent is an array
        return held(primals), [next(moved) if does else ad.Zero(tangent_aval(jax.typeof(x))) for x, does in pairs]

    def optimization_barrier(*values: Any) -> Any:
        return lax.optimization_barrier(values)

    def lowering(ctx: Any, *operands: Any, **_: Any) -> Any:
        module = ctx.module_context
        is_for_one = len(module.platforms) == 1 and not module.shape_poly_state.dim_vars
        if not (is_for_one and barriers_expand(module.platforms[0])):
            return _hlo.OptimizationBarrierOp(operands).results
        # The types name no axes of a mesh: a call inside `shard_map` could not find them.
        plain = [jax.core.ShapedArray(v.shape, v.dtype) for v in ctx.avals_in]
        call = mlir.lower_fun(_not_inlined(optimization_barrier), multiple_results=True)
        return call(ctx.replace(avals_in=plain), *operands)

    def parted(trace: Any, *tracers: Any, **params: Any) -> list[Any]:
        # A known value waits for no unknown value: JAX would take a residual for linear in the cotangent it waits for.
        is_known = [t.pval.is_known() for t in tracers]
        groups = {side: [t for t, on in zip(tracers, is_known, strict=True) if on == side] for side in {*is_known}}
        waited = {side: iter(trace.default_process_primitive(prim, group, params)) for side, group in groups.items()}
        return [next(waited[side]) for side in is_known]

    prim.def_impl(lambda *xs, **_: list(xs))
    prim.def_abstract_eval(lambda *avals, **_: list(avals))
    ad.primitive_jvps[prim] = jvp
    pe.custom_partial_eval_rules[prim] = parted
    ad.primitive_transposes[prim] = lambda cts, *_, **__: held([ad.instantiate_zeros(ct) for ct in cts])
    batching.primitive_batchers[prim] = lambda xs, dims, **_: (held(xs), dims)
    mlir.register_lowering(prim, lowering)
    return prim
