"""Random programs answer as in plain JAX, under random plans and inside JAX's transformations.

`python -m benchmarks.fuzz --count 1 --seed N` runs one that failed alone, with all of its checks, and
`make bench SUITE=fuzz` runs thousands.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import fuzz
from benchmarks.eagerly import traced
from benchmarks.random_loops import looped
from benchmarks.random_objects import grown
from benchmarks.random_programs import program, twin
from jointcut import aot
from jointcut.partition.plans.backend import PORTABLE
from programs import EVERY_PROGRAM

PROGRAMS, TOGETHER = (200 if EVERY_PROGRAM else 30), 10
LOOPS = range(100) if EVERY_PROGRAM else (19, 27, 35)  # an index that wraps around, slopes that are infinite at the end
OBJECTS = range(50) if EVERY_PROGRAM else (4, 9, 11)  # random streams, an array sown twice, a new attribute


@pytest.fixture(scope="module", autouse=True)
def unchecked() -> Iterator[None]:
    """JAX's own checks of each jaxpr take as long as all else here; the other laws run with them."""
    with jax.enable_checks(False):
        yield


def faults(checks):
    """What was wrong, with the seed and the program."""
    return [f"program {c.seed}, {c.name}: {c.fault}\n{c.text}" for c in checks if c.fault]


@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER), ids="from {}".format)
def test_random_programs_answer_as_plain_jax(first):
    found = faults(check for seed in range(first, first + TOGETHER) for check in fuzz.checks(seed, fuzz.FEW))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", LOOPS)
def test_random_loops_answer_as_python(seed):
    found = faults(fuzz.checks_of_loop(seed))
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("seed", OBJECTS)
def test_random_modules_change_as_under_nnx(seed):
    found = faults(fuzz.checks_of_object(seed))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", [4, 8] if EVERY_PROGRAM else [4])
def test_a_budget_gives_no_program_the_plan_of_its_twin(seed):
    assert twin(program(seed)) is not None
    found = faults(fuzz.budgeted(program(seed)))
    assert not found, "\n".join(found)


def two_loops_over_one_stack(weights, x):
    """In each step of a loop one loop stacks its counter, and another scans over that."""

    def step(carry, row):
        h, k = carry

        def count(carry, _):
            h, k = carry
            return (jnp.sin(h) * row[k[0] % 3], k + 1), k

        def read(h, k):
            return jnp.sin(h) * row[k[0] % 3], None

        (h, k), counts = lax.scan(count, (h, k), None, length=2)
        return (jnp.sin(lax.scan(read, h, counts)[0]), k), None

    (h, _), _ = lax.scan(step, (x, jnp.zeros(1, jnp.int32)), weights)
    return jnp.sum(h)


def test_a_loop_that_runs_again_reads_the_stack_of_another_that_does():
    """Whichever one value is saved: so the second runs again before the first, or after it, or alone."""
    arguments = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.full(3, 0.5)
    want = traced(jax.value_and_grad(two_loops_over_one_stack, (0, 1)), arguments)
    joint = aot.function(two_loops_over_one_stack, argnums=(0, 1), cost=fuzz.STEADY).trace(*arguments)
    plans = {plan.values: plan for v in fuzz.savable(joint.graph) if (plan := fuzz.closed(joint.graph, {v}))}
    assert len(plans) > 10
    for n, plan in enumerate(plans.values()):
        cut = joint.partition(plan=plan)
        if n % 4 == 0:
            got = fuzz.run_halves(joint, lambda graph, plan=plan: plan, PORTABLE, arguments)
            assert fuzz.difference(got, want, fuzz.RTOL) == "", cut.plan


def test_a_seed_always_writes_the_same_program_of_every_kind_of_line():
    texts = [program(seed).text for seed in range(300)]
    assert texts[:3] == [program(seed).text for seed in range(3)]
    words = "lax.scan fori_loop lax.cond lax.switch jax.vmap lax.map jax.checkpoint bfloat16 ruled( pulled( jax.random"
    words += " masked( force( largest( jnp.dot(0.7, select_n(True"
    for word in [*words.split(" "), "optimization_barrier", "stop_gradient", "reverse=True", "int32"]:
        assert sum(word in text for text in texts) >= 10, word
    assert sum("        def " in text for text in texts) >= 30  # one body within another


def test_so_do_loops_and_modules():
    loops, modules = [looped(seed).text for seed in range(200)], [grown(seed).text for seed in range(100)]
    assert (loops[:3], modules[:3]) == ([looped(n).text for n in range(3)], [grown(n).text for n in range(3)])
    for word in ("int8", "uint8", "int16", "mode='drop'", "memory=", "max_trips=", "fori_loop", "jnp.log", "float32"):
        assert sum(word in text for text in loops) >= 10, word
    for word in ("sow", "dropout(h)", "self.last =", "self.count[...] =", "noise()"):
        assert sum(word in text for text in modules) >= 10, word


def test_a_twin_differs_in_one_line_of_a_body():
    one, other = program(4), twin(program(4))
    changed = [pair for pair in zip(one.text.splitlines(), other.text.splitlines(), strict=True) if len(set(pair)) > 1]
    assert len(changed) == 1 and changed[0][0].startswith(" " * 8)


@pytest.mark.parametrize(
    "wrong", [lambda x: x + 1, lambda x: x[:1], lambda x: x * float("nan"), lambda x: x.astype("int32")]
)
def test_a_wrong_answer_is_told(wrong):
    made = program(0)
    right = fuzz.Plain(made, {}).of("grad")
    value, (weights, x) = right
    assert fuzz.check(made, "grad", right, lambda: right).fault == ""
    assert "[1][1] is " in fuzz.check(made, "grad", right, lambda: (value, (weights, wrong(x)))).fault
    assert "another tree" in fuzz.check(made, "grad", right, lambda: value).fault
    assert fuzz.check(made, "grad", right, lambda: 1 // 0).fault.startswith("ZeroDivisionError in <lambda>: ")
