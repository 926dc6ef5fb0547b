"""Compare random programs with plain JAX: under many plans, and inside JAX's own transformations.

    python -m benchmarks.fuzz                          # 2,000 programs: half an hour
    python -m benchmarks.fuzz --count 20 --seed 7      # programs 7 to 26
    python -m benchmarks.fuzz --count 1 --seed 1234    # one that failed, alone

Each program (`random_programs`) is cut by the default, by what JAX keeps, by plans from the menu of budgets, by random
plans that break no rule, and with loops in random segments; the halves are run op by op (`eagerly`) as written for
each backend. Then the function is called inside one of JAX's transformations, and some programs are compiled as
well, then with a budget, each next to a twin that differs in one line of a body. One seed in ten also runs a loop whose
trips are not known (`random_loops`), lane by lane against Python, and one in twenty a module that changes while it is
called (`random_objects`). What plain JAX refuses is not asked. A failing seed is printed with its program.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks.eagerly import evaluate, traced
from benchmarks.random_loops import Looped, looped, written_out
from benchmarks.random_objects import Grown, grown
from benchmarks.random_objects import loss as loss_of_object
from benchmarks.random_programs import Program, program, twin
from jointcut import aot
from jointcut.aot.stages.traced import Traced
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.plans.backend import CPU, GPU, PORTABLE, Backend
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.runs import needed
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.graph import OPEN_LOOP, Graph
from jointcut.partition.search.candidates import Candidate
from jointcut.partition.split import Strategy

STEADY = Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)  # so that a seed gives the same plans everywhere
ARGNUMS = (0, 1)
RTOL, ATOL = 2e-3, 2e-4  # one op by another, in 32 bits
HALF_TOL = 0.05  # where a program computes in 16 bits too
MENU, DRAWN = 2, 3  # plans of the menu, and random ones
FEW = 2  # checks of each program where time is short
KEPT = 100  # programs after which JAX forgets what it has traced and compiled
COMPILED = 40  # one program in so many is compiled
LOOPED, GROWN = 10, 20  # one seed in so many runs a loop, or a module that changes


@dataclass(frozen=True)
class Check:
    """What became of one check of one program: no `fault`, or what was wrong."""

    seed: int
    name: str
    text: str
    fault: str = ""


# ------------------------------------------------------------------------------------------------------- the plans


def plans(made: Traced, name: str, draws: random.Random) -> Iterator[tuple[str, Strategy]]:
    """Plans of a program, as strategies, each with where it comes from."""
    if name == "menu":
        place = draws.random()  # the menu itself is made within the check
        yield "menu", lambda graph: followed(made.planner.menu[int(place * len(made.planner.menu))])
    elif name != "random plan":
        yield name, "min_cut" if name == "default" else name
    elif (plan := random_plan(made.graph, draws)) is not None:
        yield "random plan", lambda graph: with_dropped(graph, plan, random.Random(len(plan.values)))
        in_segments = with_segments(made.graph, plan, draws)
        if in_segments.segments:
            yield "random segments", lambda graph: in_segments


def followed(candidate: Candidate) -> Plan:
    """The plan of a candidate, whose peak can be predicted."""
    if not candidate.predicted_bytes >= 0:
        raise AssertionError(f"{candidate.predicted_bytes} bytes are predicted")
    return candidate.plan


def random_plan(graph: Graph, draws: random.Random) -> Plan | None:
    """A plan that saves a random part of what may be saved; None where that breaks a rule."""
    share = draws.choice((0.0, 0.1, 0.3, 0.6))
    return closed(graph, {v for v in savable(graph) if draws.random() < share})


def savable(graph: Graph) -> list[int]:
    """The values that a plan may save."""
    problem = Problem.of(graph)
    sides, pairs = problem.sides, zip(graph.values, problem.verdicts, strict=True)
    return [v.id for v, verdict in pairs if v.maker is not None and not verdict.not_saved and not sides.is_late(v.id)]


def closed(graph: Graph, saved: set[int]) -> Plan | None:
    """The plan that saves some values, and of what must not run again no more than it needs; None where none may."""
    problem = Problem.of(graph)
    verdicts = problem.verdicts
    while True:
        again = needed(problem, frozenset(saved))
        made = (v for i in again.ops for v in graph.ops[i].outputs if v in again.values or graph.ops[i].effects)
        must = {v for v in made if verdicts[v].not_recomputed and not verdicts[v].is_costly} - saved
        if not must:
            break
        saved = saved | must
    try:
        return Plan.of(problem, saved)
    except PlanError:
        return None


def with_segments(graph: Graph, plan: Plan, draws: random.Random) -> Plan:
    """The plan with random loops in segments of random lengths, of those that can; some keep their last steps."""
    loops = [loop for loop in segmentable(Problem.of(graph), plan) if draws.random() < 0.8]
    lengths = {loop: graph.loops[loop].length for loop in loops}
    segments = tuple((loop, draws.randint(1, length)) for loop, length in lengths.items())
    longer = [(loop, length) for loop, length in lengths.items() if length > 1 and draws.random() < 0.5]
    return replace(plan, segments=segments, kept_steps=tuple((i, draws.randint(1, n - 1)) for i, n in longer))


def with_dropped(graph: Graph, plan: Plan, draws: random.Random) -> Plan:
    """The plan with a random part of its recomputed values dropped."""
    again = (graph.ops[i] for i in (*plan.recomputed, *plan.deferred))
    values = [v for op in again if op.name != OPEN_LOOP for v in op.outputs]
    share = draws.choice((0.0, 0.5, 1.0))
    return Plan.of(graph, plan.values, dropped=[v for v in values if draws.random() < share])


def run_halves(made: Traced, strategy: Strategy, backend: Backend, arguments: Any) -> Any:
    """Value and gradients by the halves of a plan written for a backend, op by op."""
    halves = made.partition(strategy).split.on(backend).halves
    flat = [*made.consts, *jax.tree.leaves(arguments)]
    results = evaluate(halves.forward, flat)
    count = len(made.program.results.avals)
    places = {"input": flat, "output": results[:count], "saved": results[count:]}
    residuals = [places[r.kind][r.index] for r in halves.residuals]
    gradients = evaluate(halves.backward, [*residuals, *made.call.ones()])
    return results[0], made.call.gradients(gradients, ARGNUMS, made.bound)


# -------------------------------------------------------------------------------------------------- transformations


def in_vmap(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of each example."""
    gradient = jax.vmap(jax.value_and_grad(loss, ARGNUMS), (None, 0, None, None))
    return lambda w, x, n, key: gradient(w, jnp.stack([x, x + 0.5]), n, key)


def of_vmap(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the mean over examples."""

    def mean(w: Any, xs: Any, n: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0, None, None))(w, xs, n, key))

    gradient = jax.value_and_grad(mean, ARGNUMS)
    return lambda w, x, n, key: gradient(w, jnp.stack([x, x + 0.5]), n, key)


def in_hvp(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The Hessian times the input itself."""
    return lambda w, x, n, key: jax.jvp(lambda x: jax.grad(loss, 1)(w, x, n, key), (x,), (x,))


def in_scan(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Two steps of training in a loop."""

    def train(w: Any, x: Any, n: Any, key: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(w, x, n, key)
            return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

        return lax.scan(step, w, jnp.stack([x, x + 0.5]))

    return train


def of_transpose(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The transpose of the pullback, which is the derivative along a tangent."""

    def along(w: Any, x: Any, n: Any, key: Any) -> Any:
        value, pullback = jax.vjp(lambda w, x: loss(w, x, n, key), w, x)
        return jax.linear_transpose(pullback, value)((jax.tree.map(jnp.cos, w), x))

    return along


TRANSFORMATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda loss: jax.value_and_grad(loss, ARGNUMS),
    "jit": lambda loss: jax.jit(jax.value_and_grad(loss, ARGNUMS)),
    "vmap of grad": in_vmap,
    "grad of vmap": of_vmap,
    "hvp": in_hvp,
    "scan": in_scan,
    "jvp": lambda loss: lambda w, x, n, key: jax.jvp(lambda x: loss(w, x, n, key), (x,), (x,)),
    "transpose": of_transpose,
}


# --------------------------------------------------------------------------------------------------------- checking


def checks(seed: int, most: int | None = None) -> Iterator[Check]:
    """The checks of one program, or at `most` so many of them."""
    made = program(seed)
    draws, arguments = random.Random(seed), made.arguments
    function = aot.function(made.loss, argnums=ARGNUMS, cost=STEADY)
    joint = function.trace(*arguments)
    names = ["default", "save_all", *["menu"] * MENU, *["random plan"] * DRAWN, "transformation", "transformation"]
    if draws.randrange(COMPILED) == 0:
        names += ["compiled", "method", "budget"]
    draws.shuffle(names)
    plain = Plain(made, {})
    for name in names[:most] if plain.of("grad") is not None else ():
        if name == "transformation":
            yield from transformed(made, function, draws.choice(list(TRANSFORMATIONS)), plain)
        elif name == "compiled":
            yield check(made, name, plain.of("grad"), lambda: joint.partition().compile().value_and_grad(*arguments))
        elif name == "method":
            yield check(made, name, plain.of("grad"), lambda: function.value_and_grad(*arguments))
        elif name == "budget":
            yield from budgeted(made)
        else:
            for what, plan in plans(joint, name, draws):
                form = draws.choice((PORTABLE, CPU, GPU))
                run = functools.partial(run_halves, joint, plan, form, arguments)
                yield check(made, f"{what}, {form.name}", plain.of("grad"), run)


def budgeted(made: Program) -> Iterator[Check]:
    """The checks of a program under a budget, and of its twin right after it, which must not get its plan."""
    for each in filter(None, (made, twin(made))):
        function = aot.function(each.loss, argnums=ARGNUMS, cost=STEADY, budget="1MB")
        run = functools.partial(function.value_and_grad, *each.arguments)
        yield check(each, "budget", Plain(each, {}).of("grad"), run)


def checks_of_loop(seed: int) -> Iterator[Check]:
    """The checks of one loop: its first lane alone, and all lanes in one of JAX's ways."""
    made = looped(seed)
    w, rows, trips = made.arguments
    plain, function = written_out(made), aot.function(made.loss, argnums=ARGNUMS, cost=STEADY)
    each = [jax.value_and_grad(plain, ARGNUMS)(w, row, n) for row, n in zip(rows, trips, strict=True)]
    lanes = jax.tree.map(lambda *values: jnp.stack(values), *each)
    value, (for_w, for_rows) = lanes
    together = jnp.sum(value), (jnp.sum(for_w), for_rows)
    yield check(made, "loop", each[0], lambda: function.value_and_grad(w, rows[0], trips[0]))
    yield check(made, "lanes of loops", *random.Random(seed).choice((
        (lanes, lambda: jax.vmap(jax.value_and_grad(function, ARGNUMS), (None, 0, 0))(w, rows, trips)),
        (together, lambda: jax.value_and_grad(sum_of_lanes(function), ARGNUMS)(w, rows, trips)),
        (together, lambda: aot.function(sum_of_lanes(made.loss), argnums=ARGNUMS).value_and_grad(w, rows, trips)),
    )))  # fmt: skip


def sum_of_lanes(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of a loss over lanes."""
    return lambda w, rows, trips: jnp.sum(jax.vmap(loss, (None, 0, 0))(w, rows, trips))


def checks_of_object(seed: int) -> Iterator[Check]:
    """The check of one module: value, gradients and all that the object holds after two calls."""
    made, x = grown(seed), jnp.array([0.3, -0.2, 0.9])

    def after_two(gradient: Callable[..., Any]) -> Any:
        module = made.new()
        values, gradients = zip(*(gradient(module, x) for _ in range(2)), strict=True)
        held = nnx.state(module, nnx.Not(nnx.RngKey))
        return values, [nnx.to_pure_dict(nnx.state(g, nnx.Param)) for g in gradients], nnx.to_pure_dict(held)

    want = after_two(nnx.value_and_grad(loss_of_object))
    yield check(made, "object", want, lambda: after_two(aot.function(loss_of_object).value_and_grad))


@dataclass(frozen=True)
class Plain:
    """What plain JAX answers for a program, in the transformations that were asked for."""

    made: Program
    known: dict[str, Any]

    def of(self, name: str) -> Any:
        """The answer in one transformation, None where JAX refuses: forward mode of a `custom_vjp`, say."""
        if name not in self.known:
            try:
                function = TRANSFORMATIONS[name](self.made.loss)
                if name == "jvp":  # refused where a branch that is not run holds a `custom_vjp`
                    jax.jit(function).lower(*self.made.arguments)
                self.known[name] = traced(function, self.made.arguments)
            except (TypeError, NotImplementedError, ValueError, AttributeError):  # the last for numbers of Flax's type
                self.known[name] = None
        return self.known[name]


def transformed(made: Program, function: Any, name: str, plain: Plain) -> Iterator[Check]:
    """The check of one transformation, none where JAX refuses it."""
    want = plain.of(name)
    if want is not None:
        yield check(made, name, want, lambda: traced(TRANSFORMATIONS[name](function), made.arguments))


def check(made: Program | Looped | Grown, name: str, want: Any, run: Callable[[], Any]) -> Check:
    """One answer compared with plain JAX's."""
    try:
        got = run()
    except Exception as error:  # noqa: BLE001 - whatever it is, plain JAX ran, and that is the finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Check(made.seed, name, made.text, f"{type(error).__name__} in {where.name}: {error}"[:300])
    return Check(made.seed, name, made.text, difference(got, want, HALF_TOL if "bfloat16" in made.text else RTOL))


def difference(got: Any, want: Any, rtol: float) -> str:
    """Where two answers differ, an empty text where they are near enough."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"another tree: {jax.tree.structure(got)}"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{jax.tree_util.keystr(path)} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if not np.allclose(a, b, rtol, max(ATOL, rtol / 10) * scale, equal_nan=True):
            return f"{jax.tree_util.keystr(path)} is {a.ravel()[:4]}, not {b.ravel()[:4]}"
    return ""


# -------------------------------------------------------------------------------------------------------- the table


def table(found: list[Check]) -> str:
    """How often each kind of check was made, and how often it failed."""
    made, failed = Counter(c.name for c in found), Counter(c.name for c in found if c.fault)
    width = max(map(len, made))
    return "\n".join(f"{name:<{width}} {made[name]:>7,} checks {failed[name]:>5,} faults" for name in sorted(made))


def main() -> None:
    """Print the table; the exit status is 1 where something differed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2_000, help="programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (%(default)s)")
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    found, start = [], time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        new = [*checks(seed), *(checks_of_loop(seed) if seed % LOOPED == 0 else ())]
        new += checks_of_object(seed) if seed % GROWN == 0 else ()
        found += new
        for bad in (c for c in new if c.fault):
            print(f"program {bad.seed}, {bad.name}: {bad.fault}\n{bad.text}", flush=True)
        if len(range(options.seed, seed)) % KEPT == KEPT - 1:
            print(f"{seed + 1 - options.seed:,} programs, {len(found):,} checks", flush=True)
            jax.clear_caches()
    print(table(found))
    faults = sum(bool(c.fault) for c in found)
    print(f"{options.count:,} programs, {len(found):,} checks, {faults} faults, {time.perf_counter() - start:.0f} s")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
