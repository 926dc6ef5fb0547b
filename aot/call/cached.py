"""Look up programs that another process compiled, and compile missing ones.

The first call of a signature traces the user's function, without its derivative. The key in the store is the
`fingerprint` of that program, the options and the environment. If the store has an entry, nothing is differentiated,
cut or compiled. Otherwise the program is made and stored for the next process.

The function's own trace is not always enough. If there is a derivative rule of the user's, or the derivative closes
over arrays of its own, the key is the differentiated program. A program that holds an object without identity, has an
effect, or runs on several devices is not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import WithoutRules, fingerprint, foreign_rules
from jointcut.aot.cache.store import Store
from jointcut.aot.call.entry import Entry, running
from jointcut.aot.options.limits import limit
from jointcut.aot.options.options import Options
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.bound import KEPT_SIGNATURES
from jointcut.aot.run.flat import handed_back, of_function
from jointcut.aot.run.runner import Runner
from jointcut.aot.stages import tracing
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace.blame import explained
from jointcut.aot.trace.differentiated import differentiated
from jointcut.aot.trace.joint import constant_key
from jointcut.aot.trace.primal import Primal, primal
from jointcut.aot.trace.trees import Call
from jointcut.partition.errors import IdentityError
from jointcut.partition.program.jax import jaxprs, runtime, side_effects
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.arguments.tree import struct as type_of
from jointcut.wrappers.metadata.schemas import TensorAlias
from jointcut.wrappers.table import Table

_LOG = logging.getLogger("jointcut")
_UNABLE = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)  # JAX's errors if it cannot (de)serialise


@dataclass(frozen=True)
class _Request:
    """A call: its `kind`, which is `call`, `step` or `pair`, and the `positions` of its differentiated arguments."""

    kind: str
    bound: Bound
    positions: tuple[int, ...] | None


@dataclass(frozen=True)
class CachedCalls:
    """Answers the calls of one function with programs from a store."""

    function: Callable[..., Any]
    options: Options
    store: Store
    name: str
    known: Table[Runner | None] = field(default_factory=lambda: Table(KEPT_SIGNATURES), repr=False)

    def find(self, kind: str, positions: tuple[int, ...] | None, bound: Bound) -> Runner | None:
        """Return the runner of a call; None if its programs cannot be stored."""
        key = (kind, positions, bound.signature(), tuple(map(_sharding, bound.leaves)), runtime.trace_context())
        return self.known.of(key, lambda: self._runner(_Request(kind, bound, positions)))

    def _runner(self, request: _Request) -> Runner | None:
        """Load the programs of one signature from the store, or compile and store them."""
        with explained(self.name, self.function), runtime.paused_collection():
            source = self._source(request.bound)
        reason = _refusal(source, request.bound, self.options)
        if reason is None:
            try:
                return self._by_source(request, source)
            except IdentityError as error:
                reason = str(error)
        _LOG.warning("%s (%s) is not kept in the cache: %s", self.name, request.kind, reason)
        return None

    def _source(self, bound: Bound) -> Primal:
        """Return the function's own trace; an array passed twice is one input."""
        with Stage("trace", self.name) as now:
            shapes = bound.abstract()
            target = tracing.wrapped_for(self.function, shapes, shapes.input_info(), self.options).target
            source = primal(target.entered, bound.unique, self.options.has_aux)
            count = len(jaxprs.opened(source.closed)[0].eqns)
            now.ends(lambda: f"traced without its derivative in {now}, {count} equations")
        return source

    # ------------------------------------------------------------------------------------------------- the key

    def _by_source(self, request: _Request, source: Primal) -> Runner:
        """Return the runner whose key is the function's own trace, or the differentiated one."""
        if request.kind == "call":
            key = self._key(request, WithoutRules(source.closed))
            return self._stored(key, request, source) or self._compiled_call(key, request, source)
        key = None
        if not foreign_rules(source.closed) and not self.options.rewrites:
            with suppress(IdentityError):  # such as the policy of a jax.checkpoint, which differentiation resolves
                key = self._key(request, source.closed)
        if key is not None and (runner := self._stored(key, request, source)):
            return runner
        traced = tracing.trace(self.function, self.options, request.bound, request.positions)
        if key is None or _places(traced, source) is None:
            key = self._key(request, WithoutRules(traced.program.closed))
            if runner := self._stored(key, request, source, traced.consts):
                return runner
        return self._compiled(key, request, source, traced)

    def _chosen(self, request: _Request) -> tuple[int, ...]:
        """Return the flat positions of the leaves that are differentiated."""
        return () if request.kind == "call" else differentiated(request.bound, request.positions, self.options)

    def _key(self, request: _Request, program: Any) -> str:
        options, bound = self.options, request.bound
        how = options.strategy, options.budget, options.cost, options.plan, options.policy, options.offload
        return fingerprint(
            kind=request.kind,
            program=program,
            environment=environment(),
            places=bound.places,
            shardings=tuple(map(_sharding, bound.leaves)),
            differentiated=self._chosen(request),
            donated=() if request.kind == "pair" else tuple(sorted(bound.leaves_of(*options.donated))),
            has_aux=options.has_aux,
            keep_unused=options.keep_unused,
            compiler_options=options.compiler_options,
            sparse=options.sparse_gradients if request.kind == "step" else (),
            derivatives=None if request.kind == "call" else options.conventions,
            how=None if request.kind == "call" else (*how, options.error, options.tiles, options.shapes),
        )

    # --------------------------------------------------------------------------------------------- the programs

    def _stored(
        self, key: str, request: _Request, source: Primal, consts: Sequence[Any] | None = None
    ) -> Runner | None:
        """Return a runner of the store's entry; `consts` are the differentiated program's if that is the key."""
        data = self.store.get(key)
        if data is None:
            return None
        entry = Entry.from_bytes(data)
        try:
            with Stage("load", self.name) as now:
                programs = entry.loaded(_device((*request.bound.leaves, *source.consts)))
                now.ends(lambda: f"loaded from the cache in {now}, {request.kind}")
        except _UNABLE as error:
            _LOG.warning("%s (%s) in the cache cannot be loaded, and is made again: %s", self.name, request.kind, error)
            return None
        if entry.consts is not None:
            consts = [source.consts[i] for i in entry.consts]
        assert consts is not None, "an entry under the differentiated program"
        return running(self._call(request, source, frozenset(entry.sparse), entry.is_train), consts, entry, programs)

    def _call(self, request: _Request, source: Primal, sparse: frozenset[int], is_train: bool) -> Call:
        bound, options = request.bound.abstract(), self.options
        return Call(self.name, options, bound, source.results, self._chosen(request), sparse, is_train, bound.entering)

    def _compiled_call(self, key: str, request: _Request, source: Primal) -> Runner:
        """Compile and store the function alone."""
        call = self._call(request, source, frozenset(), False)
        aliases = handed_back(call, source)
        with Stage("compile", self.name):
            program = of_function(call, source, aliases).compiled("alone")
        entry = Entry(tuple(range(len(source.consts))), _flat(aliases), (), False, ())
        return self._put(key, request, call, source.consts, entry, (program,))

    def _compiled(self, key: str, request: _Request, source: Primal, traced: Traced) -> Runner:
        """Cut, compile and store the function and its derivative."""
        cut, sparse = traced.partition(), traced.program.sparse
        is_one = request.kind == "step" and not cut.made.is_apart
        names = ("step",) if is_one else ("forward", "keeping backward")
        with Stage("compile", self.name):
            programs = tuple(map(cut.jits.compiled, names))
        residuals = tuple((r.kind, r.index) for r in cut.residuals)
        handed, is_train = _flat(traced.handed_back), traced.program.is_train
        entry = Entry(_places(traced, source), handed, residuals, is_train, tuple(sorted(sparse)))
        call = self._call(request, source, sparse, is_train)
        return self._put(key, request, call, traced.consts, entry, programs)

    def _put(
        self,
        key: str,
        request: _Request,
        call: Call,
        consts: Sequence[Any],
        entry: Entry,
        programs: tuple[Any, ...],
    ) -> Runner:
        """Store the programs, if JAX can serialise them, and return their runner."""
        try:
            full = entry.holding(programs)
        except _UNABLE as error:
            _LOG.warning("%s (%s) is not kept in the cache: %s", self.name, request.kind, error)
        else:
            self.store.put(key, full.to_bytes(), f"{self.name} {request.kind}")
        return running(call, consts, entry, programs)


def _flat(twins: Mapping[int, TensorAlias]) -> tuple[tuple[int, str, int], ...]:
    return tuple((i, twin.source, twin.alias) for i, twin in sorted(twins.items()))


def _sharding(leaf: Any) -> Any:
    return getattr(type_of(leaf), "sharding", None)


def _device(leaves: Sequence[Any]) -> Any:
    """Return the device of placed arrays, none of which lies on several, or else JAX's default."""
    placed = (sharding.device_set for sharding in map(_sharding, leaves) if sharding is not None)
    return next(iter(next(placed, None) or jnp.zeros(()).devices()))


def _places(traced: Traced, source: Primal) -> tuple[int, ...] | None:
    """Return positions of the differentiated program's constants among the function's own; None if one is missing."""
    known = {constant_key(c): i for i, c in enumerate(source.consts)}
    keys = [constant_key(c) for c in traced.consts]
    return tuple(known[key] for key in keys) if known.keys() >= set(keys) else None


def _refusal(source: Primal, bound: Bound, options: Options) -> str | None:
    """Return the reason why a program cannot be stored, or None."""
    if source.has_references:
        return "it is given a jax.Ref."
    jaxpr, _ = jaxprs.opened(source.closed)
    if named := [name for eqn in jaxpr.eqns for name in side_effects.effect_names(eqn)]:
        return f"it has the effect {named[0]}."
    if any(map(runtime.is_tracer, source.consts)):
        return "it closes over values of a trace that is under way."
    placed = map(_sharding, (*bound.leaves, *source.consts))
    if any(sharding is not None and len(sharding.device_set) > 1 for sharding in placed):
        return "it runs on several devices."
    if options.saved_arrays is not None:
        return "what it saves passes through functions of yours."
    if options.spill is not None:
        return "what it saves waits in files of this process."
    if options.passes:
        return f"{type(options.passes[0]).__name__} rewrites its halves."
    if options.budget is not None and limit(options.budget).of_device:
        return "its budget is what the device has free at the moment."
    return None
