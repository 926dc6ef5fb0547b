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

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jointcut.aot import artefact
from jointcut.aot import compile as compiling
from jointcut.aot.calls import keep
from jointcut.aot.contract import Contract
from jointcut.aot.descriptors import Input
from jointcut.aot.joint import Results
from jointcut.aot.options import Options
from jointcut.aot.pair import argument_keys
from jointcut.aot.trees import Trees
from jointcut.partition import jaxprs
from jointcut.partition.errors import ArtefactError, CallError, message
from jointcut.wrappers.convention import is_inexact, slot
from jointcut.wrappers.record import key_implementation, read_dtype
from jointcut.wrappers.tree import Bound, Statics, bind

CONSTANTS = "constants.npz"
_CURE = "Export for these arguments too, or pass what it was exported for."


@dataclass(frozen=True)
class Exported:
    """What trees need to know of an exported function."""

    results: Results
    sparse: frozenset[int]
    is_train: bool


@dataclass(frozen=True)
class Call(Trees):
    """The calls of one structure: `order` gives for each input its place among the leaves of the call."""

    name: str
    options: Options
    bound: Bound
    wanted: tuple[int, ...]
    exported: Exported
    order: tuple[int, ...]

    @property
    def differentiated(self) -> Exported:
        """What was differentiated when it was exported."""
        return self.exported


@dataclass(frozen=True)
class LoadedPullback:
    """The backward of one call: residuals wait for a cotangent, as often as one is given."""

    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]] = field(repr=False)
    residuals: list[Any] = field(repr=False)
    call: Call = field(repr=False)
    bound: Bound = field(repr=False)

    def __call__(self, cotangent: Any) -> Any:
        """The gradients of the arguments in `argnums`; raises `CallError` where the cotangent does not fit."""
        outputs = self.call.exported.results.main
        leaves = iter(self.call.cotangents(cotangent))
        full = [_or_zeros(next(leaves), a) for a in outputs if is_inexact(a.dtype)]
        return self.call.in_argnums(self.run(self.residuals, full), self.bound)


def _or_zeros(cotangent: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if cotangent is None else cotangent


class Loaded:
    """An exported pair, ready to be called.

    Called, it runs the function alone. `value_and_grad`, `grad` and `vjp` run the two halves; inside `jax.grad` it is a
    `jax.custom_vjp` call of them, inside `jax.jit` part of the program. It can be differentiated as often as `order`
    says, in the arguments that it was exported for, in reverse mode; `jax.vmap` and forward mode need the source.
    Arguments are told by their paths: a dict can stand where a module stood, and gradients come in the caller's trees.
    """

    def __init__(self, found: artefact.Artefact) -> None:
        """Use `aot.load`."""
        where = str(found.folder / artefact.SIGNATURE)
        self.contract = Contract.from_json(found.signature, where)
        self._found = found
        self._programs: dict[str, Any] = {}
        self._jitted: dict[str, Any] = {}
        self._calls: dict[Any, Call] = {}
        self._differentiable = jax.custom_vjp(self._alone)
        self._differentiable.defvjp(self._forward_rule, self._backward_rule, symbolic_zeros=True)
        self.__name__ = self.contract.name

    def __repr__(self) -> str:
        """`<Loaded loss: 7 inputs, 1 outputs, 3 residuals, for cpu, tpu>`."""
        c = self.contract
        sizes = f"{len(c.inputs)} inputs, {len(c.outputs)} outputs, {len(c.residuals)} residuals"
        return f"<Loaded {c.name}: {sizes}, for {', '.join(c.platforms)}>"

    # --------------------------------------------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result; raises `CallError` where the arguments do not fit."""
        call, _, flat = self._bound(args, kwargs)
        outputs = self._differentiable(*flat) if jaxprs.tracing() else self._run("inference", self._alone)(*flat)
        main, aux = call.results(outputs)
        return (main, aux) if self.contract.has_aux else main

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.value_and_grad` of the function, in the `argnums` that it was exported with.

        Raises `CallError` where the arguments do not fit, `TraceError` where the output is no real number.
        """
        call, bound, flat = self._bound(args, kwargs)
        ones = call.ones()
        outputs, gradients = self._run("step", self._step)(flat, ones)
        return call.value_and_gradients(outputs, gradients, bound)

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.grad` of the function: the gradient, or `(gradient, aux)` with `has_aux`."""
        value, gradient = self.value_and_grad(*args, **kwargs)
        return (gradient, value[1]) if self.contract.has_aux else gradient

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """The function's output and a pullback to the arguments in `argnums` (and aux with `has_aux`)."""
        call, bound, flat = self._bound(args, kwargs)
        outputs, residuals = self._run("forward", self._forward)(*flat)
        results = replace(call.exported.results, avals=tuple(map(jax.typeof, outputs)))
        call = replace(call, exported=replace(call.exported, results=results))
        pullback = LoadedPullback(self._run("backward", self._backward), residuals, call, bound)
        main, aux = call.results(outputs)
        return (main, pullback, aux) if self.contract.has_aux else (main, pullback)

    # ------------------------------------------------------------------------------------------- flat programs

    def _run(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A flat function as part of the program around it, or compiled."""
        self._refuse_platform()
        if jaxprs.tracing():
            return function
        if name not in self._jitted:
            self._jitted[name] = jax.jit(function, compiler_options=compiling.compiler_options())
        return self._jitted[name]

    def _alone(self, *flat: Any) -> list[Any]:
        return self._program("inference")(*self._constants, *flat)

    def _forward(self, *flat: Any) -> tuple[list[Any], list[Any]]:
        """Outputs, and all residuals."""
        if not self.contract.is_train:
            return self._alone(*flat), []
        inputs = [*self._constants, *flat]
        results = list(self._program("forward")(*inputs))
        count = len(self.contract.outputs)
        where = {"input": inputs, "output": results[:count], "saved": results[count:]}
        return results[:count], [where[r.kind][r.index] for r in self.contract.residuals]

    def _backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        return list(self._program("backward")(*residuals, *cotangents)) if self.contract.is_train else []

    def _step(self, flat: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Both halves in one program, with a barrier between them so that recomputation stays in the backward."""
        outputs, residuals = self._forward(*flat)
        kinds = [r.kind for r in self.contract.residuals]
        held = [i for i, x in enumerate(residuals) if kinds[i] != "input" and jaxprs.is_plain(jax.typeof(x))]
        if held:
            passed = lax.optimization_barrier([*(residuals[i] for i in held), *cotangents])
            for i, value in zip(held, passed, strict=False):
                residuals[i] = value
            cotangents = passed[len(held) :]
        return outputs, self._backward(residuals, cotangents)

    def _forward_rule(self, *given: Any) -> tuple[list[Any], list[Any]]:
        known = {g.of for g in self.contract.gradients}
        for info, x in zip(self._leaves, given, strict=True):
            if x.perturbed and is_inexact(slot("", x.value).dtype) and info.name not in known:
                what = f"is differentiated, but {self.contract.name} was exported for argnums={self.contract.argnums}."
                raise CallError(message(info.path, what, "Export with argnums that hold it, or use stop_gradient."))
        return self._forward(*(x.value for x in given))

    def _backward_rule(self, residuals: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        places = {o.name: i for i, o in enumerate(self.contract.outputs)}
        given = (cotangents[places[t.of]] for t in self.contract.tangents)
        full = [jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct for ct in given]
        found: dict[str, Any] = {}
        for gradient, value in zip(self.contract.gradients, self._backward(residuals, full), strict=True):
            found[gradient.of] = (*found.get(gradient.of, ()), value)
        return tuple(_dense(found.get(info.name), info) for info in self._leaves)

    # ------------------------------------------------------------------------------------------------- insides

    @cached_property
    def _leaves(self) -> tuple[Input, ...]:
        return self.contract.inputs[self.contract.num_constants :]

    @cached_property
    def _statics(self) -> Statics:
        paths = [s.path for s in self.contract.statics]
        positions = frozenset(int(p[len("args[") : -1]) for p in paths if p.startswith("args["))
        names = frozenset(p[len("kwargs['") : -2] for p in paths if p.startswith("kwargs["))
        return Statics(positions, names)

    @cached_property
    def _constants(self) -> list[Any]:
        """The arrays that the function closes over."""
        infos = self.contract.inputs[: self.contract.num_constants]
        if not infos:
            return []
        with np.load(io.BytesIO(self._found.files[CONSTANTS]), allow_pickle=False) as held:
            with jax.ensure_compile_time_eval():
                return [_array(held[f"constant_{i}"], info) for i, info in enumerate(infos)]

    def _program(self, name: str) -> Callable[..., Any]:
        """An exported program, read when it is first run."""
        if name not in self._programs:
            self._programs[name] = self._read(name)
        return self._programs[name]

    def _read(self, name: str) -> Callable[..., Any]:
        entry, jax_version = self.contract.programs[name], jax.__version__
        newest = jax.export.maximum_supported_calling_convention_version
        oldest = jax.export.minimum_supported_calling_convention_version
        spoken, file = entry["calling_convention_version"], self._found.folder / entry["file"]
        if not oldest <= spoken <= newest:
            what = f"speaks version {spoken} of JAX's calling convention, and JAX {jax_version} {oldest} to {newest}."
            cure = "Use a newer JAX, or export again." if spoken > newest else "Export again with this JAX."
            raise ArtefactError(message(str(file), what, cure))
        try:
            made = jax.export.deserialize(bytearray(self._found.files[entry["file"]]))
        except ImportError as error:
            raise ArtefactError(
                message("Loading", "needs the package flatbuffers.", "Install it: pip install flatbuffers.")
            ) from error
        return made.call if self.contract.order > 1 else self._differentiated_once(made.call)

    def _differentiated_once(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A program whose own derivative was not exported."""
        once = jax.custom_vjp(run)

        def refuse(*args: Any) -> Any:
            del args
            what = "was exported to be differentiated once, and is differentiated twice."
            raise CallError(message(self.contract.name, what, "Export it with order=2."))

        once.defvjp(refuse, refuse)
        return once

    def _refuse_platform(self) -> None:
        here = jax.default_backend()
        names = ("cuda", "rocm") if here == "gpu" else (here,)
        if not set(names) & set(self.contract.platforms):
            what = f"was exported for {', '.join(self.contract.platforms)}, and this process runs on {here}."
            cure = f"Export it with platforms that hold {names[0]!r}."
            raise CallError(message(self.contract.name, what, cure))

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, Bound, list[Any]]:
        """The call's trees, the call flattened, and the arrays in the order of the inputs."""
        bound = bind(args, kwargs, self._statics)
        key = (bound.tree, len(bound.spans))
        if key not in self._calls:
            keep(self._calls, key, self._call(bound))
        call = self._calls[key]
        self._same_statics(bound)
        flat = [bound.leaves[i] for i in call.order]
        for info, want, leaf in zip(self._leaves, self._dtypes, flat, strict=True):
            got = slot(info.path, leaf)
            if got.dtype != want or not _fits(got.shape, info.shape):
                what = f"is {got.dtype}[{','.join(map(str, got.shape))}], but it was exported for {info.type}."
                raise CallError(message(info.path, what, _CURE))
        return call, bound, flat

    @cached_property
    def _dtypes(self) -> list[Any]:
        return [read_dtype(info.dtype, info.path) for info in self._leaves]

    def _same_statics(self, bound: Bound) -> None:
        given = {path: (kind.__name__, repr(value)) for path, kind, value in bound.statics}
        for s in self.contract.statics:
            if s.path not in given:
                raise CallError(message(s.path, f"is static and was not given: it was {s.value} at export.", _CURE))
            if given[s.path] != (s.type, s.value):
                what = f"is static and {given[s.path][1]}, but it was {s.value} at export."
                raise CallError(message(s.path, what, _CURE))

    def _call(self, bound: Bound) -> Call:
        """Where each input stands in calls of one structure."""
        c, paths = self.contract, bound.paths()
        if len(bound.spans) != c.positional:
            what = f"takes {c.positional} positional arguments, but {len(bound.spans)} were given."
            raise CallError(message(c.name, what, _CURE))
        places = {keys: i for i, keys in enumerate(argument_keys(bound.rebuild_places(), bound.dynamic))}
        order = []
        for info in self._leaves:
            if info.keys not in places:
                raise CallError(message(info.path, "is missing.", _CURE))
            order.append(places.pop(info.keys))
        for i in places.values():
            raise CallError(message(paths[i], f"is no argument that {c.name} was exported with.", _CURE))
        place = dict(zip((info.name for info in self._leaves), order, strict=True))
        owners = dict.fromkeys(g.of for g in c.gradients)
        rows = {g.of for g in c.gradients if g.part == "rows"}
        sparse = frozenset(k for k, name in enumerate(owners) if name in rows)
        exported = Exported(self._results, sparse, c.is_train)
        options = Options(c.argnums, c.has_aux)
        return Call(c.name, options, bound.abstract(), tuple(place[n] for n in owners), exported, tuple(order))

    @cached_property
    def _results(self) -> Results:
        c = self.contract
        num_aux = sum(o.kind == "aux" for o in c.outputs)
        whole = c.result_spec
        trees = whole.children() if c.has_aux else [whole, None]
        return Results(tuple(o.aval for o in c.outputs), trees[0], trees[1], num_aux)


def _fits(got: Sequence[int], want: Sequence[Any]) -> bool:
    return len(got) == len(want) and all(isinstance(w, str) or g == w for g, w in zip(got, want, strict=True))


def _array(data: np.ndarray, info: Input) -> Any:
    """A constant made of its bytes."""
    dtype = read_dtype(info.dtype, info.path)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        words = data.view(np.uint32).reshape(*info.shape, -1)
        return jax.random.wrap_key_data(jnp.asarray(words), impl=key_implementation(info.dtype))
    return jnp.asarray(data.view(dtype).reshape(info.shape))


def _dense(gradient: tuple[Any, ...] | None, info: Input) -> Any:
    """The gradient as an array: rows are added where they belong."""
    if gradient is None or len(gradient) == 1:
        return None if gradient is None else gradient[0]
    rows, places = gradient
    return jnp.zeros(info.shape, rows.dtype).at[tuple(places.T)].add(rows)


def load(path: str | os.PathLike[str]) -> Loaded:
    """The pair that `Function.export` wrote to a folder.

    Every file is compared with its SHA-256 before anything is made of it. What is read is JSON, numpy arrays without
    objects, and StableHLO through `jax.export`: nothing in it is pickled, and no Python in it is run. Raises
    `ArtefactError` that names the file and what is wrong with it.
    """
    return Loaded(artefact.read(path))
