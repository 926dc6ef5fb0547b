"""Run an exported pair without the source of its model.

>>> import jax.numpy as jnp, tempfile
>>> from jointcut import aot
>>> loss = aot.function(lambda w, x: jnp.sum(jnp.tanh(x * w)))
>>> with tempfile.TemporaryDirectory() as folder:
...     path = loss.export(f"{folder}/loss", 2.0, jnp.ones(3), platforms="cpu")
...     loaded = aot.load(path)
>>> value, grad = loaded.value_and_grad(2.0, jnp.ones(3))
>>> round(float(grad), 4)
0.212
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jointcut.aot.export import artefact
from jointcut.aot.export.contract import Contract, StaticArgument
from jointcut.aot.export.exported import CONSTANTS, constants, program
from jointcut.aot.export.new_states import GivenCall
from jointcut.aot.export.result_tree import check
from jointcut.aot.options.options import Options
from jointcut.aot.progress.progress import Stage
from jointcut.aot.run import compile as compiling
from jointcut.aot.run.bound import KEPT_SIGNATURES
from jointcut.aot.run.runner import Programs, Runner
from jointcut.aot.trace.primal import Results
from jointcut.aot.trace.signature import argument_keys
from jointcut.aot.trace.trees import Call, dense
from jointcut.partition.errors import CallError, message
from jointcut.partition.figures import counted
from jointcut.partition.lower.emit import Residual
from jointcut.partition.lower.verify import routed, waited
from jointcut.partition.program.jax import meshes, runtime
from jointcut.wrappers.arguments.tree import Bound, Statics, bind
from jointcut.wrappers.boundary import bounded, bounded_class
from jointcut.wrappers.built_in.zeros import filled
from jointcut.wrappers.metadata.convention import is_inexact, slot
from jointcut.wrappers.metadata.descriptors import BOXED, Described, Input, fits, same_sizes
from jointcut.wrappers.record import read_dtype
from jointcut.wrappers.table import Table

_WIDE = ("float64", "int64", "uint64", "complex128")
_JAX_ON_JVP = "forward-mode autodiff (jvp)"  # in JAX's error
_MOST_WANTED = 4  # the most missing arguments that an error lists
_CURE = "Export for these arguments too, or pass what it was exported for."
_CURE_SHAPE = "Export for this shape too, or for any: aot.shapes makes sizes that are known later."


@bounded_class()
class Loaded:
    """An exported pair, ready to be called.

    A call runs the function alone. `value_and_grad`, `grad` and `vjp` run the two halves. Inside `jax.grad` the pair is
    a `jax.custom_vjp` of the halves; inside `jax.jit` it is part of the program. It can be differentiated `order` times
    in reverse mode, in the `argnums` of the export; `jax.vmap` and forward mode need the source. Arguments are found by
    their paths: a dict can replace a module, and gradients have the trees of the caller's arguments.
    """

    def __init__(self, read: artefact.Artefact) -> None:
        """Use `aot.load`."""
        where = str(read.folder / artefact.SIGNATURE)
        self.contract = Contract.from_json(read.signature, where)
        check(self.contract, where)
        self._programs = {name: program(name, self.contract, read) for name in self.contract.programs}
        self._artefact = replace(read, files={name: read.files[name] for name in read.files if name == CONSTANTS})
        self._jitted: Table[Any] = Table()
        self._runners: Table[Runner] = Table(KEPT_SIGNATURES)
        self._differentiable = jax.custom_vjp(self._alone)
        self._differentiable.defvjp(self._forward_rule, self._backward_rule, symbolic_zeros=True)
        self.__name__ = self.contract.name

    def __repr__(self) -> str:
        """`<Loaded loss: 7 inputs, 1 output, 3 saved arrays, for cpu, tpu>`."""
        c = self.contract
        saved = [r for r in c.residuals if r.kind == "saved"]
        kinds = {"input": c.inputs, "output": c.outputs, "saved array": saved}
        counts = ", ".join(counted(len(arrays), noun) for noun, arrays in kinds.items())
        return f"<Loaded {c.name}: {counts}, for {', '.join(c.platforms)}>"

    # --------------------------------------------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result; raises `CallError` if the arguments do not fit."""
        runner, bound = self._bound(args, kwargs)
        return runner.result(bound)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Return value and gradient like `jax.value_and_grad` of the function, in the `argnums` of the export.

        Raises `CallError` if the arguments do not fit, and `TraceError` if the output is not a real number.
        """
        runner, bound = self._bound(args, kwargs)
        return runner.value_and_grad(bound)

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient like `jax.grad` of the function, or `(gradient, aux)` with `has_aux`."""
        value, gradient = self.value_and_grad(*args, **kwargs)
        return (gradient, value[1]) if self.contract.has_aux else gradient

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's output and a pullback to the arguments in `argnums` (and aux with `has_aux`).

        The pullback returns one gradient, or a tuple if `argnums` is a tuple, like `jax.grad`. The pullback of
        `aot.function` differs: it returns one cotangent tree per positional argument, like `jax.vjp`.
        """
        runner, bound = self._bound(args, kwargs)
        main, aux, pullback = runner.vjp(bound)
        return (main, pullback, aux) if self.contract.has_aux else (main, pullback)

    # ------------------------------------------------------------------------------------------- flat programs

    def _differentiated(self, flat: Sequence[Any]) -> list[Any]:
        """Return the flat outputs of the function inside a trace that may differentiate them."""
        with self._explained():
            return self._differentiable(*flat)

    def running(self, name: str) -> Callable[..., Any]:
        """Return a flat program, which is jitted except inside a trace."""
        self._refuse_platform()
        flat = {"alone": self._alone, "forward": self._forward, "backward": self._backward, "step": self._step}
        if runtime.tracing():
            return flat[name]
        waits = any(p.waits_in_loops for p in self._programs.values())
        options = None if waits else compiling.compiler_options()
        return self._jitted.of(name, lambda: jax.jit(flat[name], compiler_options=options))

    def _alone(self, *flat: Any) -> list[Any]:
        return self._programs["inference"](*flat)

    def _forward(self, *flat: Any) -> list[Any]:
        """Return the outputs and the saved residuals."""
        return self._programs["forward" if self.contract.is_train else "inference"](*flat)

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        if not self.contract.is_train:
            return list(map(jnp.zeros_like, residuals))
        return self._programs["backward"](*residuals, *cotangents)

    def _step(self, flat: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Run both halves in one program; a barrier between them keeps recomputation in the backward."""
        outputs, residuals = self.routed(flat)
        flat, count = [*residuals, *cotangents], len(residuals)
        waiting = waited(self._residuals, range(len(flat)), flat)
        return [*outputs, *self._backward(waiting[:count], waiting[count:])]

    def routed(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the outputs of the forward, and the residuals in the backward's order."""
        results, count = self.running("forward")(*flat), len(self.contract.outputs)
        return results[:count], routed(self._residuals, flat, results, count)

    @cached_property
    def _residuals(self) -> tuple[Residual, ...]:
        """The sources of the residuals; the parameters, if no output can carry a cotangent."""
        c = self.contract
        if not c.is_train:
            return tuple(Residual("input", i, -1) for i, info in enumerate(c.inputs) if info.kind == "parameter")
        return tuple(Residual(r.kind, r.index, -1) for r in c.residuals)

    def _forward_rule(self, *primals: Any) -> tuple[list[Any], Any]:
        parts = {g.of: g.part for g in self.contract.gradients}
        pairs = list(zip(self.contract.inputs, primals, strict=True))
        for info, x in pairs:
            if x.perturbed and is_inexact(slot("", x.value).dtype) and info.name not in parts:
                what = f"is differentiated, but {self.contract.name} was exported for argnums={self.contract.argnums}."
                raise CallError(message(info.path, what, "Export with argnums that hold it, or use stop_gradient."))
        tables = {info.name: x.value for info, x in pairs if parts.get(info.name) == "places"}
        outputs, residuals = self.routed([x.value for x in primals])
        return outputs, (residuals, tables)

    def _backward_rule(self, saved: tuple[list[Any], dict[str, Any]], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        if not self.contract.is_train:
            return (None,) * len(self.contract.inputs)
        places = {o.name: i for i, o in enumerate(self.contract.outputs)}
        tangents = [cotangents[places[t.of]] for t in self.contract.tangents]
        full = filled([None if isinstance(ct, SymbolicZero) else ct for ct in tangents], tangents)
        residuals, tables = saved
        parts: dict[str, Any] = {}
        for gradient, value in zip(self.contract.gradients, self._backward(residuals, full), strict=True):
            parts[gradient.of] = (*parts.get(gradient.of, ()), value)
        return tuple(_whole(parts.get(i.name), tables.get(i.name)) for i in self.contract.inputs)

    # ------------------------------------------------------------------------------------------------- insides

    @cached_property
    def _leaves(self) -> tuple[Input, ...]:
        return self.contract.inputs[self.contract.num_constants :]

    @cached_property
    def _constants(self) -> list[Any]:
        """The arrays that the function closes over, read once and outside of any trace."""
        return constants(self.contract, self._artefact)

    def _statics(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Statics:
        """Return the static arguments of a call, found by their paths."""
        paths = {s.path for s in self.contract.statics}
        positions = frozenset(i for i in range(len(args)) if f"args[{i}]" in paths)
        return Statics(positions, frozenset(name for name in kwargs if f"kwargs[{name!r}]" in paths))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn JAX's error about forward mode into a `CallError`."""
        try:
            yield
        except TypeError as error:
            if _JAX_ON_JVP not in str(error):
                raise
            what = "was exported for reverse mode, and is differentiated in forward mode (jvp, jacfwd, hessian)."
            cure = "Use jax.grad or jax.vjp, or the function that it was exported from."
            raise CallError(message(self.contract.name, what, cure)) from error

    def _refuse_width(self) -> None:
        """Raise `CallError` if an array has 64 bits, and 64-bit types are switched off."""
        wide = next(iter(self._wide), None)
        if wide is not None and jnp.result_type(float) != jnp.float64:
            what = f"was exported with 64-bit types ({wide}), and this process has them switched off."
            cure = 'Switch them on: jax.config.update("jax_enable_x64", True), or JAX_ENABLE_X64=1 in the environment.'
            raise CallError(message(self.contract.name, what, cure))

    @cached_property
    def _wide(self) -> list[Described]:
        c = self.contract
        return [d for d in (*c.inputs, *c.outputs, *c.residuals, *c.gradients) if d.dtype in _WIDE]

    def _refuse_platform(self) -> None:
        here = jax.default_backend()
        names = ("cuda", "rocm") if here == "gpu" else (here,)
        if not set(names) & set(self.contract.platforms):
            what = f"was exported for {', '.join(self.contract.platforms)}, and this process runs on {here}."
            cure = f"Export it with platforms that hold {names[0]!r}."
            raise CallError(message(self.contract.name, what, cure))

    def _refuse_devices(self, flat: Sequence[Any]) -> None:
        """Raise `CallError` if arrays lie on another number of devices; a program for one runs on several, too.

        In a program of the user's this is not known of values that it computes, or of `in_shardings`.
        """
        number = max(p.devices for p in self._programs.values())
        if number == 1 or meshes.manual_mesh() is not None:
            return
        known = [*map(meshes.number_of_devices, flat)]
        given = max((n for n in known if n is not None), default=1)
        if given != number and (None not in known or given > 1):
            what = f"was exported for {number} devices, and its arguments lie on {given}."
            cure = "Lay them over a mesh of as many devices, in any order, or export it for these."
            raise CallError(message(self.contract.name, what, cure))

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Runner, Bound]:
        """Return the runner of a call, and the flattened call."""
        self._refuse_width()
        bound = bind(args, kwargs, self._statics(args, kwargs))
        key = (bound.tree, len(bound.spans))
        runner = self._runners.of(key, lambda: self._runner(self._call(bound, kwargs)))
        if self.contract.states:
            bound = GivenCall.of(bound, args, kwargs, argument_keys(bound.rebuild_places(), bound.dynamic))
        self._same_statics(bound)
        flat = [bound.leaves[i] for i in runner.call.entering]
        for info, want, leaf in zip(self._leaves, self._dtypes, flat, strict=True):
            got = slot(info.path, leaf)
            if got.dtype != want or not fits(got.shape, info.shape):
                what = f"is {got.dtype}[{','.join(map(str, got.shape))}], but it was exported for {info.type}."
                raise CallError(message(info.path, what, _CURE_SHAPE if got.dtype == want else _CURE))
        self._refuse_devices(flat)
        if self.contract.sizes:
            shapes = (slot("", leaf).shape for leaf in flat)
            same_sizes([(info.path, info, shape) for info, shape in zip(self._leaves, shapes, strict=True)])
        return runner, bound

    def _runner(self, call: Call) -> Runner:
        """Return the runner of all calls with one structure."""

        def run(which: str, flat: Sequence[Any]) -> list[Any]:
            if which == "step":
                return self.running("step")(flat, call.ones())
            return self._differentiated(flat) if which == "alone" and runtime.tracing() else self.running(which)(*flat)

        def backward(residuals: Sequence[Any], cotangents: Sequence[Any | None], keep: bool) -> list[Any]:
            del keep
            return self.running("backward")(residuals, cotangents)

        return Runner(call, Programs(run, backward), tuple(self._constants), {}, self._residuals)

    @cached_property
    def _dtypes(self) -> list[Any]:
        return [read_dtype(info.dtype, info.path) for info in self._leaves]

    def _same_statics(self, bound: Bound) -> None:
        statics = {path: StaticArgument.of(path, kind, value) for path, kind, value in bound.statics}
        for s in self.contract.statics:
            if s.path not in statics:
                raise CallError(message(s.path, "is static and was not given.", f"Give {s.value}, as at export."))
            if statics[s.path] != s:
                what = f"is static and {statics[s.path].value}, but it was {s.value} at export."
                raise CallError(message(s.path, what, _CURE))

    def _call(self, bound: Bound, kwargs: Mapping[str, Any]) -> Call:
        """Return the places of the inputs in calls of one structure; raises `CallError` if some are missing."""
        c, paths = self.contract, bound.paths()
        if len(bound.spans) != c.positional:
            raise CallError(message(c.name, *self._wrong_number(len(bound.spans), tuple(kwargs))))
        places = {keys: i for i, keys in enumerate(argument_keys(bound.rebuild_places(), bound.dynamic))}
        order = []
        for info in self._leaves:
            keys = next((keys for keys in _forms(info.keys) if keys in places), None)
            if keys is None:
                raise CallError(message(info.path, *self._not_there(info, bound, places)))
            order.append(places.pop(keys))
        for i in places.values():
            what = f"is no argument that {c.name} was exported with."
            raise CallError(message(paths[i], what, "Leave it out, or export with it."))
        place = dict(zip((info.name for info in self._leaves), order, strict=True))
        parameters = (i.name for i in c.inputs if i.kind == "parameter")
        owners = dict.fromkeys((g.of for g in c.gradients) if c.is_train else parameters)
        rows = {g.of for g in c.gradients if g.part == "rows"}
        sparse = frozenset(k for k, name in enumerate(owners) if name in rows)
        written = {i.keys: place[i.name] for i in self._leaves}
        results = replace(self._results, states=tuple((written[o.keys], o.path) for o in c.states))
        left_out = (lambda array: False) if c.is_train and c.is_filtered else None  # they have the gradient None
        wanted, options = tuple(place[n] for n in owners), Options(c.argnums, c.has_aux, filter=left_out)
        fields = c.name, options, bound.abstract(), results, wanted, sparse, c.is_train
        return Call(*fields, entering=tuple(order), order=c.result_order, is_sized=True)

    def _wrong_number(self, given: int, named: tuple[str, ...]) -> tuple[str, str]:
        """Return the error and the cure for a call with `given` positional arguments and the keywords `named`."""
        c = self.contract
        were = "was" if given == 1 else "were"
        what = f"takes {counted(c.positional, 'positional argument')}, and {given} {were} given."
        if given > c.positional:
            more = ", ".join(f"args[{i}]" for i in range(c.positional, given))
            return what, f"Leave out {more}, or export for more arguments."
        missing = range(given, c.positional)
        wanted = [f"{i.path}, {i.type}" for i in self._leaves if i.keys[0] == "args" and i.keys[1] in missing]
        places = ((s, s.path.removeprefix("args[").removesuffix("]")) for s in c.statics)
        wanted += [f"{s.path}, {s.value}" for s, place in places if place.isdecimal() and int(place) in missing]
        more = f"; and {len(wanted) - _MOST_WANTED} more" if len(wanted) > _MOST_WANTED else ""
        known = {i.keys[1] for i in self._leaves if i.keys[0] == "kwargs"} | {s.path for s in c.statics}
        by_name = [name for name in named if not known & {name, f"kwargs[{name!r}]"}]
        front = f"What was exported by position is given by position, and not by name ({', '.join(by_name)}). "
        return what, f"{front if by_name else ''}Give too: {'; '.join(wanted[:_MOST_WANTED])}{more}."

    def _not_there(self, info: Input, bound: Bound, places: Mapping[Any, int]) -> tuple[str, str]:
        """Return the error and the cure for an input that is not among the leaves of a call."""
        fixed = {path: leaf.value for path, leaf in bound.fixed_leaves}
        if info.path in fixed:
            return f"is a {type(fixed[info.path]).__name__}, not an array.", f"Give {info.type}."
        known = {form for each in self._leaves for form in _forms(each.keys)}
        paths = bound.paths()
        unknown = [paths[i] for keys, i in places.items() if keys not in known]
        instead = f" In its place stands {unknown[0]}." if unknown else ""
        return "is missing.", f"Give it too: {info.type}.{instead}"

    @cached_property
    def _results(self) -> Results:
        c = self.contract
        num_aux = sum(o.kind == "aux" for o in c.outputs)
        spec = c.result_spec
        main, aux = spec.children() if c.has_aux else (spec, None)
        return Results(tuple(c.outputs[i].aval for i in c.result_order), main, aux, num_aux)


def _forms(keys: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the keys at which a call may give an input: its own keys, or these with a box added or left out."""
    return [keys, (*keys, BOXED), *([keys[:-1]] if keys[-1] == BOXED else [])]


def _whole(gradient: tuple[Any, ...] | None, table: Any) -> Any:
    """Return the gradient as one array; None if there is none."""
    if gradient is None or len(gradient) == 1:
        return None if gradient is None else gradient[0]
    rows, places = gradient
    return dense(rows, places, table.shape)


@bounded
def load(path: str | os.PathLike[str]) -> Loaded:
    """Return the pair that `Function.export` wrote to a folder.

    Every file is compared with its SHA-256 before it is used. The files are JSON, numpy arrays without objects, and
    StableHLO read by `jax.export`: nothing is unpickled, and no Python code is run. Raises `ArtefactError` with the
    file and its fault.
    """
    with Stage("load", str(path)) as now:
        loaded = Loaded(artefact.read(path))
        now.ends(lambda: f"loaded {loaded.contract.name} in {now}, for {', '.join(loaded.contract.platforms)}")
        return loaded
