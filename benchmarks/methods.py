"""Build one training step in each of the ways that we compare.

A method takes a program to a `Step`: something to call for the loss and its gradient, with what it cost to build and
what XLA says of its memory. Plain JAX; `jax.checkpoint` under each policy that needs no names, around the whole loss
and wherever else the program has a place for it, compiled as it comes and with the barriers kept; and jointcut.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
from jax.stages import Compiled

from benchmarks.measure import Call, compile_program, memory_of, xla_clock
from benchmarks.programs import Program
from benchmarks.programs.program import Wrap
from jointcut import aot
from jointcut.partition.program.jax.jaxprs import barriers_expand

# Drop what earlier builds left in JAX's caches, so that each method pays for its own tracing.
forget = jax.clear_caches

POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots, no batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

PLAIN, SAVE_ALL, MIN_CUT = "plain", "jointcut save_all", "jointcut min_cut"
AGAIN = "plain again"  # the same program, timed as if it were another: what the noise alone does
INSIDE, TWO = "jointcut min_cut in jax.jit", "jointcut min_cut, 2 programs"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a training step costs before it runs.

    `saved_bytes` and `dots` are counted in the jaxprs, the other bytes are XLA's. `compile_s` is XLA's own time,
    `lower_s` what it takes JAX to bring the program there.
    """

    activation_bytes: int
    peak_bytes: int
    saved_bytes: int
    trace_s: float
    cut_s: float
    lower_s: float
    compile_s: float
    dots: int
    residual_bytes: int = 0  # alive beside each program, when there are two

    @property
    def ready_s(self) -> float:
        """Seconds until the step can run, a search for a budget among them."""
        return self.trace_s + self.cut_s + self.lower_s + self.compile_s

    @property
    def share_of_compile(self) -> float:
        """Seconds to trace and to cut, for each second that XLA compiles."""
        return (self.trace_s + self.cut_s) / self.compile_s


@dataclass(frozen=True, kw_only=True)
class Step(Figures):
    """One training step, built: what to call, and the compiled programs behind it."""

    call: Call
    programs: tuple[Compiled, ...]

    @property
    def figures(self) -> Figures:
        """The figures alone, without the programs that they belong to."""
        return Figures(**{field.name: getattr(self, field.name) for field in fields(Figures)})


Method = Callable[[Program], Step]


def methods_for(program: Program) -> dict[str, Method]:
    """Every method that a program has a place for, by name, plain first."""
    methods: dict[str, Method] = {PLAIN: build_plain}
    for name, (place, wrap) in placements(program).items():
        for form, keep_barriers in forms():
            methods[f"{name}{form}"] = partial(build_jax, place=place, wrap=wrap, keep_barriers=keep_barriers)
    return methods | OURS


def placements(program: Program) -> dict[str, tuple[str, Wrap]]:
    """Every placement of `jax.checkpoint` that a program has a place for, by name: the place, and the wrapper there."""
    return {
        f"checkpoint {place}: {name}": (place, partial(jax.checkpoint, policy=policy))
        for place in ("loss", *program.places)
        for name, policy in POLICIES.items()
    }


def forms() -> list[tuple[str, bool]]:
    """How a step with `jax.checkpoint` is compiled: a suffix of the method's name, and whether barriers are kept."""
    return [("", False), (" + barriers", True)] if barriers_expand(jax.default_backend()) else [("", False)]


def build_plain(program: Program) -> Step:
    """`jax.jit(jax.value_and_grad(loss))`."""
    return step_of(program, program.loss, False)


def build_jax(program: Program, place: str, wrap: Callable[..., Any], keep_barriers: bool) -> Step:
    """`jax.jit(jax.value_and_grad(loss))` with `jax.checkpoint` somewhere in the loss."""
    return step_of(program, program.wrapped(place, wrap), keep_barriers)


def step_of(program: Program, loss: Callable[..., Any], keep_barriers: bool) -> Step:
    """`jax.jit(jax.value_and_grad(loss))` of a loss that takes the program's arguments."""
    forget()
    start = time.perf_counter()
    traced = jax.jit(jax.value_and_grad(loss, has_aux=program.has_aux)).trace(*program.arguments)
    trace_s = time.perf_counter() - start
    start, xla_start = time.perf_counter(), xla_clock.seconds
    compiled = compile_program(traced.lower(), keep_barriers)
    compile_s = xla_clock.seconds - xla_start
    lower_s = time.perf_counter() - start - compile_s
    memory = memory_of(compiled)
    return Step(
        call=partial(compiled, *program.arguments),
        programs=(compiled,),
        activation_bytes=memory.temp,
        peak_bytes=memory.peak,
        saved_bytes=residual_bytes(loss, program.arguments, program.has_aux),
        trace_s=trace_s,
        cut_s=0.0,
        lower_s=lower_s,
        compile_s=compile_s,
        dots=count_dots(traced.jaxpr),
    )


def build_inside(program: Program, strategy: str = "min_cut") -> Step:
    """The user's own `jax.jit(loss.value_and_grad)`: jointcut inlined in a program whose options are not its own."""
    forget()
    start = time.perf_counter()
    loss = aot.function(program.loss, has_aux=program.has_aux, strategy=strategy)
    traced = jax.jit(loss.value_and_grad).trace(*program.arguments)
    trace_s = time.perf_counter() - start
    start, xla_start = time.perf_counter(), xla_clock.seconds
    compiled = compile_program(traced.lower(), False)
    compile_s = xla_clock.seconds - xla_start
    lower_s = time.perf_counter() - start - compile_s
    memory = memory_of(compiled)
    cut = loss.trace(*program.arguments).partition()
    return Step(
        call=partial(compiled, *program.arguments),
        programs=(compiled,),
        activation_bytes=memory.temp,
        peak_bytes=memory.peak,
        saved_bytes=cut.plan.bytes_saved,
        trace_s=trace_s,
        cut_s=0.0,
        lower_s=lower_s,
        compile_s=compile_s,
        dots=count_dots(traced.jaxpr),
    )


def build_jointcut(
    program: Program, strategy: str | None = None, executables: int | None = None, budget: float | None = None
) -> Step:
    """`aot.function(loss)`, traced, cut and compiled stage by stage; by its default where nothing else is said."""
    forget()
    start = time.perf_counter()
    traced = aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments)
    trace_s = time.perf_counter() - start
    start = time.perf_counter()
    cut = traced.partition(strategy=strategy, budget=budget)
    cut_s = time.perf_counter() - start
    start, xla_start = time.perf_counter(), xla_clock.seconds
    compiled = cut.compile(executables)
    compile_s = xla_clock.seconds - xla_start
    lower_s = time.perf_counter() - start - compile_s
    memory = memory_of(compiled.programs[0]) if compiled.executables == 1 else None
    return Step(
        call=partial(compiled.value_and_grad, *program.arguments),
        programs=tuple(compiled.programs),
        activation_bytes=memory.temp if memory else compiled.memory.activation_bytes,
        peak_bytes=memory.peak if memory else compiled.memory.peak_bytes,
        saved_bytes=cut.plan.bytes_saved,
        trace_s=trace_s,
        cut_s=cut_s,
        lower_s=lower_s,
        compile_s=compile_s,
        dots=count_dots(cut.forward) + count_dots(cut.backward),
        residual_bytes=0 if memory else compiled.memory.residual_bytes,
    )


#: jointcut's methods: each is timed in close pairs with plain.
OURS: dict[str, Method] = {
    SAVE_ALL: partial(build_jointcut, strategy="save_all"),
    MIN_CUT: partial(build_jointcut, strategy="min_cut"),
    INSIDE: build_inside,
    TWO: partial(build_jointcut, strategy="min_cut", executables=2),
}


def residual_bytes(loss: Callable[..., Any], arguments: tuple[Any, ...], has_aux: bool) -> int:
    """The bytes that `jax.vjp` keeps for the backward pass, without the arguments themselves."""
    parameters, *rest = arguments

    def residuals(parameters: Any, *rest: Any) -> list[Any]:
        _, pullback, *_ = jax.vjp(lambda p: loss(p, *rest), parameters, has_aux=has_aux)
        return jax.tree.leaves(pullback)

    jaxpr = inner_jaxpr(jax.make_jaxpr(residuals)(parameters, *rest))
    kept = {v for v in jaxpr.outvars if not hasattr(v, "val")} - {*jaxpr.invars, *jaxpr.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def count_dots(jaxpr: Any) -> int:
    """How many matrix products stand in a jaxpr and in those inside it; one in a loop's body counts once."""
    return sum(
        (equation.primitive.name == "dot_general") + sum(map(count_dots, inner_jaxprs(equation.params)))
        for equation in inner_jaxpr(jaxpr).eqns
    )


def count_equations(jaxpr: Any) -> int:
    """How many equations stand in a jaxpr and in those inside it."""
    return sum(1 + sum(map(count_equations, inner_jaxprs(equation.params))) for equation in inner_jaxpr(jaxpr).eqns)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if hasattr(inner_jaxpr(item), "eqns"):
                yield item


def inner_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr in a closed one; from JAX 0.11 on they are the same."""
    return getattr(jaxpr, "jaxpr", jaxpr)
