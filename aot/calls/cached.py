"""Look up what another process compiled, and compile what none did.

The first call of a signature traces the user's function, without its derivative, and asks the store for what was
compiled for that program under these options in this environment (`fingerprint`). Where it is found nothing is
differentiated, cut or compiled; otherwise all that is done, and kept for the next process.

What decides a program but does not show in the function's own trace is never guessed: where there is a derivative rule
of the user's, or the derivative closes over arrays of its own, the differentiated program is the key, and a program
that holds something without an identity, an effect, or more than one device is not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import WithoutRules, fingerprint, foreign_rules
from jointcut.aot.cache.store import Store
from jointcut.aot.calls.entry import Entry, running
from jointcut.aot.limits import limit
from jointcut.aot.options import Options
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run.bound import KEPT_SIGNATURES
from jointcut.aot.run.flat import handed_back, of_function
from jointcut.aot.run.runner import Runner
from jointcut.aot.stages import pipeline
from jointcut.aot.stages.traced import Traced
from jointcut.aot.trace.blame import explained
from jointcut.aot.trace.joint import Primal, constant_key, primal
from jointcut.aot.trace.trees import Call
from jointcut.aot.trace.wanted import differentiated
from jointcut.partition.errors import IdentityError
from jointcut.partition.program import jaxprs
from jointcut.wrappers.arguments.tree import Bound
from jointcut.wrappers.arguments.tree import struct as type_of
from jointcut.wrappers.metadata.schemas import TensorAlias
from jointcut.wrappers.table import Table

_LOG = logging.getLogger("jointcut")
_UNABLE = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)  # what JAX raises where it cannot (de)serialise


@dataclass(frozen=True)
class _Wanted:
    """What a call asks for: `kind` is `call`, `step` or `pair`; `positions` the arguments that are differentiated."""

    kind: str
    bound: Bound
    positions: tuple[int, ...] | None


@dataclass(frozen=True)
class Keeper:
    """The calls of one function, by programs that are kept in a store."""

    function: Callable[..., Any]
    options: Options
    store: Store
    name: str
    known: Table[Runner | None] = field(default_factory=lambda: Table(KEPT_SIGNATURES), repr=False)

    def find(self, kind: str, positions: tuple[int, ...] | None, bound: Bound) -> Runner | None:
        """What runs a call; None where its programs are not kept."""
        key = (kind, positions, bound.signature(), tuple(map(_sharding, bound.leaves)), jaxprs.trace_context())
        return self.known.of(key, lambda: self._made(_Wanted(kind, bound, positions)))

    def _made(self, wanted: _Wanted) -> Runner | None:
        """The programs of one signature: from the store, or compiled and kept there."""
        with explained(self.name, self.function), jaxprs.paused_collection():
            source = self._source(wanted.bound)
        reason = _not_kept(source, wanted.bound, self.options)
        if reason is None:
            try:
                return self._by_source(wanted, source)
            except IdentityError as error:
                reason = str(error)
        _LOG.warning("%s (%s) is not kept in the cache: %s", self.name, wanted.kind, reason)
        return None

    def _source(self, bound: Bound) -> Primal:
        """The function's own trace, of each array once."""
        with Stage("trace", self.name) as now:
            shapes = bound.abstract()
            target = pipeline.wrapped_for(self.function, shapes, shapes.input_info(), self.options.around).target
            source = primal(target.entered, bound.unique, self.options.has_aux)
            count = len(jaxprs.opened(source.closed)[0].eqns)
            now.ends(lambda: f"traced without its derivative in {now}, {count} equations")
        return source

    # ------------------------------------------------------------------------------------------------- the key

    def _by_source(self, wanted: _Wanted, source: Primal) -> Runner:
        """The programs under the function's own trace as the key, or under the differentiated one."""
        if wanted.kind == "call":
            key = self._key(wanted, WithoutRules(source.closed))
            return self._kept(key, wanted, source) or self._compiled_call(key, wanted, source)
        key = None
        if not foreign_rules(source.closed):
            try:
                key = self._key(wanted, source.closed)
            except IdentityError:  # the policy of a jax.checkpoint, say, which differentiation resolves
                key = None
        if key is not None and (found := self._kept(key, wanted, source)):
            return found
        traced = pipeline.trace(self.function, self.options, wanted.bound, wanted.positions)
        if key is None or _places(traced, source) is None:
            key = self._key(wanted, WithoutRules(traced.program.closed))
            if found := self._kept(key, wanted, source, traced.consts):
                return found
        return self._compiled(key, wanted, source, traced)

    def _chosen(self, wanted: _Wanted) -> tuple[int, ...]:
        """Flat positions of the leaves that are differentiated."""
        if wanted.kind == "call":
            return ()
        return differentiated(wanted.bound, wanted.positions, self.options)

    def _key(self, wanted: _Wanted, program: Any) -> str:
        options, bound = self.options, wanted.bound
        return fingerprint(
            kind=wanted.kind,
            program=program,
            environment=environment(),
            places=bound.places,
            shardings=tuple(map(_sharding, bound.leaves)),
            differentiated=self._chosen(wanted),
            donated=() if wanted.kind == "pair" else tuple(sorted(bound.leaves_of(*options.donated))),
            has_aux=options.has_aux,
            keep_unused=options.keep_unused,
            sparse=options.sparse_gradients if wanted.kind == "step" else (),
            how=None if wanted.kind == "call" else (options.strategy, options.budget, options.cost, options.plan),
        )

    # --------------------------------------------------------------------------------------------- the programs

    def _kept(self, key: str, wanted: _Wanted, source: Primal, consts: Sequence[Any] | None = None) -> Runner | None:
        """What the store has under a key; `consts` are those of the differentiated program, where that is the key."""
        data = self.store.get(key)
        if data is None:
            return None
        entry = Entry.from_bytes(data)
        try:
            with Stage("load", self.name) as now:
                programs = entry.loaded()
                now.ends(lambda: f"loaded from the cache in {now}, {wanted.kind}")
        except _UNABLE as error:
            _LOG.warning("%s (%s) in the cache cannot be loaded, and is made again: %s", self.name, wanted.kind, error)
            return None
        if entry.consts is not None:
            consts = [source.consts[i] for i in entry.consts]
        assert consts is not None, "an entry under the differentiated program"
        return running(self._call(wanted, source, frozenset(entry.sparse), entry.is_train), consts, entry, programs)

    def _call(self, wanted: _Wanted, source: Primal, sparse: frozenset[int], is_train: bool) -> Call:
        bound, options = wanted.bound.abstract(), self.options
        return Call(self.name, options, bound, source.results, self._chosen(wanted), sparse, is_train, bound.entering)

    def _compiled_call(self, key: str, wanted: _Wanted, source: Primal) -> Runner:
        """The function alone."""
        call = self._call(wanted, source, frozenset(), False)
        aliases = handed_back(call, source)
        with Stage("compile", self.name):
            program = of_function(call, source, aliases).compiled("alone")
        entry = Entry(tuple(range(len(source.consts))), _told(aliases), (), False, ())
        return self._put(key, wanted, call, source.consts, entry, (program,))

    def _compiled(self, key: str, wanted: _Wanted, source: Primal, traced: Traced) -> Runner:
        """The function and its derivative, cut and compiled."""
        cut, sparse = traced.partition(), traced.program.sparse
        names = ("step",) if wanted.kind == "step" else ("forward", "keeping backward")
        with Stage("compile", self.name):
            programs = tuple(map(cut.jits.compiled, names))
        residuals = tuple((r.kind, r.index) for r in cut.residuals)
        handed, is_train = _told(traced.handed_back), traced.program.is_train
        entry = Entry(_places(traced, source), handed, residuals, is_train, tuple(sorted(sparse)))
        call = self._call(wanted, source, sparse, is_train)
        return self._put(key, wanted, call, traced.consts, entry, programs)

    def _put(
        self,
        key: str,
        wanted: _Wanted,
        call: Call,
        consts: Sequence[Any],
        entry: Entry,
        programs: tuple[Any, ...],
    ) -> Runner:
        """The programs, kept in the store where they can be."""
        try:
            kept = entry.holding(programs)
        except _UNABLE as error:
            _LOG.warning("%s (%s) is not kept in the cache: %s", self.name, wanted.kind, error)
        else:
            self.store.put(key, kept.to_bytes(), f"{self.name} {wanted.kind}")
        return running(call, consts, entry, programs)


def _told(out: Mapping[int, TensorAlias]) -> tuple[tuple[int, str, int], ...]:
    return tuple((i, twin.source, twin.alias) for i, twin in sorted(out.items()))


def _sharding(leaf: Any) -> Any:
    return getattr(type_of(leaf), "sharding", None)


def _places(traced: Traced, source: Primal) -> tuple[int, ...] | None:
    """Where the constants of the differentiated program stand among the function's own; None where one does not."""
    known = {constant_key(c): i for i, c in enumerate(source.consts)}
    found = [known.get(constant_key(c)) for c in traced.consts]
    return None if None in found else tuple(i for i in found if i is not None)


def _not_kept(source: Primal, bound: Bound, options: Options) -> str | None:
    """Why a program cannot be kept; None where it can."""
    if source.has_references:
        return "it is given a jax.Ref."
    jaxpr, _ = jaxprs.opened(source.closed)
    if named := [name for eqn in jaxpr.eqns for name in jaxprs.effect_names(eqn)]:
        return f"it has the effect {named[0]}."
    if any(map(jaxprs.is_tracer, source.consts)):
        return "it closes over values of a trace that is under way."
    placed = (_sharding(leaf) for leaf in (*bound.leaves, *source.consts))
    if any(where is not None and len(where.device_set) > 1 for where in placed):
        return "it runs on several devices."
    if options.passes:
        return f"{type(options.passes[0]).__name__} rewrites its halves."
    if options.budget is not None and limit(options.budget).of_device:
        return "its budget is what the device has free at the moment."
    return None
