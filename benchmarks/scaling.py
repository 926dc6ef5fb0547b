"""Time what jointcut itself costs: tracing, cutting and planning large graphs, and the call of a compiled step.

    python -m benchmarks.scaling        # graphs of about 10**3, 10**4 and 10**5 equations: three minutes
    python -m benchmarks.scaling 42     # an unrolled GPT of 42 layers

Nothing is compiled but what is called.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.methods import count_equations, forget
from benchmarks.programs import gpt
from jointcut import aot
from jointcut.aot.planning.budgets.rates import rates
from jointcut.partition.search.budget import Planner

#: Layers of an unrolled GPT whose joint graphs have about 10**3, 10**4 and 10**5 equations.
DEPTHS = (4, 42, 420)


@dataclass(frozen=True)
class Scaling:
    """How long a joint graph takes from function to two jaxprs, beside what JAX alone takes to trace the gradient.

    `cut_s` counts both emissions on CPU: the one that the user sees, and the one for XLA:CPU that is compiled. `plan_s`
    is what a budget takes before the first plan is weighed: to list the plans worth trying, and to choose among them.
    The budget lies in the middle between the least and the largest peak among them.
    """

    equations: int
    jax_trace_s: float
    trace_s: float
    cut_s: float
    plan_s: float

    @property
    def seconds(self) -> float:
        """Tracing, cutting and emitting together."""
        return self.trace_s + self.cut_s

    def __str__(self) -> str:
        """All of them in words."""
        return (
            f"{self.equations} equations: traced in {self.trace_s:.2f} s (jax.value_and_grad alone "
            f"{self.jax_trace_s:.2f} s), cut and emitted in {self.cut_s:.2f} s, planned in {self.plan_s:.2f} s"
        )


def main() -> None:
    """Print what graphs and calls take."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("layers", nargs="*", type=int, default=DEPTHS, help="how deep the unrolled GPTs are")
    for layers in parser.parse_args().layers:
        print(measure_scaling(layers), flush=True)
    for leaves in (2, 50):
        print(measure_call(leaves), flush=True)


def measure_scaling(layers: int) -> Scaling:
    """Trace, cut and plan a deep unrolled GPT of width 8, without compiling it."""
    program = gpt.of("scaling", gpt.Config(layers=layers, width=8, heads=2, context=8, scan=False), rows=1)
    rates()  # they are measured once for a device
    forget()
    start = time.perf_counter()
    jax.jit(jax.value_and_grad(program.loss)).trace(*program.arguments)
    jax_trace_s = time.perf_counter() - start
    forget()
    start = time.perf_counter()
    traced = aot.function(program.loss).trace(*program.arguments)
    middle = time.perf_counter()
    traced.partition()
    cut = time.perf_counter()
    sizes = [candidate.peak_bytes for candidate in traced.planner.menu]
    known = time.perf_counter()
    planner = Planner(traced.planner.problem)
    planner.fastest((min(sizes) + max(sizes)) / 2, lambda candidate: candidate.predicted_bytes)
    end = time.perf_counter()
    return Scaling(count_equations(traced.joint), jax_trace_s, middle - start, cut - middle, end - known)


@dataclass(frozen=True)
class CallCost:
    """Microseconds from a call to its return, before the result is there, for a tree of so many leaves.

    `jax_us` is `jax.jit(jax.value_and_grad(f))`, `function_us` a function of ours, `compiled_us` its compiled stage.
    """

    leaves: int
    jax_us: float
    function_us: float
    compiled_us: float

    @property
    def ratio(self) -> float:
        """The dearer of our two calls over JAX's."""
        return max(self.function_us, self.compiled_us) / self.jax_us

    def __str__(self) -> str:
        """The three in words."""
        return (
            f"{self.leaves} leaves: jax.jit {self.jax_us:.1f} us, value_and_grad {self.function_us:.1f} us, "
            f"compiled {self.compiled_us:.1f} us"
        )


def measure_call(leaves: int, rounds: int = 300, repeats: int = 5) -> CallCost:
    """Call a step that does next to nothing, all ways in turn; medians over the rounds."""
    parameters = {f"w{i:02d}": jnp.ones(4) for i in range(leaves - 1)}
    x = jnp.ones(4)

    def loss(parameters: dict[str, Array], x: Array) -> Array:
        return sum((jnp.sum(w * x) for w in parameters.values()), jnp.zeros(()))

    ours = aot.function(loss)
    calls = (
        jax.jit(jax.value_and_grad(loss)),
        ours.value_and_grad,
        ours.trace(parameters, x).partition().compile().value_and_grad,
    )
    return CallCost(leaves, *(1e6 * s for s in _medians(calls, (parameters, x), rounds, repeats)))


def _medians(calls: Sequence[Callable[..., Any]], arguments: Any, rounds: int, repeats: int) -> list[float]:
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call(*arguments))
    for _ in range(rounds):
        for call, own in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(repeats):
                result = call(*arguments)
            own.append((time.perf_counter() - start) / repeats)
            jax.block_until_ready(result)
    return [statistics.median(own) for own in seconds]


if __name__ == "__main__":
    main()
