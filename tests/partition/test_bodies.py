"""Reading a program and writing its halves know of a loop only what its kind says."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from jointcut.partition.bodies import kinds
from jointcut.partition.bodies import read as reading
from jointcut.partition.bodies.read import read
from jointcut.partition.lower import emit
from jointcut.partition.lower.memory import levels
from jointcut.partition.lower.reruns import segmentable
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.lower.verify import run
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program import bodies
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.roles import Role
from jointcut.partition.program.text import parse, show
from jointcut.partition.search.mincut import STRATEGIES

#: A loop that has all in another order than a scan: it reads slices, starts, then what is whole, and returns stacks
#: first.
STEPS = Primitive("steps")
STEPS.multiple_results = True


@STEPS.def_impl
def run_steps(*operands, program, counts, trips, reverse):
    s, c = counts
    sliced, carry, whole = operands[:s], list(operands[s : s + c]), operands[s + c :]
    rows = [None] * trips
    for i in reversed(range(trips)) if reverse else range(trips):
        results = runtime.evaluate(program, *whole, *carry, *(x[i] for x in sliced))
        carry, rows[i] = results[:c], results[c:]
    return [*map(jnp.stack, zip(*rows, strict=True)), *carry]


class Steps(bodies.Kind):
    """How `steps` is read and written."""

    def inside(self, eqn):
        (s, c), program = eqn.params["counts"], jaxprs.opened(eqn.params["program"])[0]
        sliced, starts, whole = eqn.invars[:s], eqn.invars[s : s + c], eqn.invars[s + c :]
        n, w = len(eqn.outvars) - c, len(whole)
        carries = zip(program.invars[w : w + c], starts, program.outvars[:c], eqn.outvars[n:], strict=True)
        return bodies.Inside(
            trips=eqn.params["trips"],
            program=program,
            whole=tuple(zip(program.invars[:w], whole, strict=True)),
            carries=tuple(bodies.Carry(*carry) for carry in carries),
            sliced=tuple(zip(program.invars[w + c :], sliced, strict=True)),
            stacks=tuple(zip(program.outvars[c:], eqn.outvars[:n], strict=True)),
        )

    def equation(self, like, program, operands, results):
        whole, starts, sliced = operands
        params = dict(like.params, program=program, counts=(len(sliced), len(starts)))
        outvars = [*results[len(starts) :], *results[: len(starts)]]
        return like.replace(invars=[*sliced, *starts, *whole], outvars=outvars, params=params)


def in_steps(jaxpr):
    """The same program with `steps` in the place of each scan."""
    eqns = [as_steps(eqn) if eqn.primitive.name == "scan" else eqn for eqn in jaxpr.eqns]
    return jaxprs.build(jaxpr.invars, jaxpr.outvars, eqns)


def as_steps(eqn):
    layout = jaxprs.scan_layout(eqn)
    a, c = layout.num_consts, layout.num_carry
    counts = (len(eqn.invars) - a - c, c)
    params = {"program": in_steps(layout.body), "counts": counts, "trips": layout.length, "reverse": layout.reverse}
    invars = [*eqn.invars[a + c :], *eqn.invars[a : a + c], *eqn.invars[:a]]
    return eqn.replace(primitive=STEPS, invars=invars, outvars=[*eqn.outvars[c:], *eqn.outvars[:c]], params=params)


def primitives_of(closed):
    return {eqn.primitive.name for eqn in jaxprs.opened(closed)[0].eqns}


@pytest.mark.parametrize("strategy", ["min_cut", "save_all"])
@pytest.mark.parametrize("name", ["scan_with_several_carries", "reverse_scan", "nested_scans", "scan_feeding_scan"])
def test_a_second_kind_of_loop_is_a_class_and_a_line_in_the_table(name, strategy, traced, monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "steps", Steps())
    given = traced(name)
    joint, roles = given.program.closed, given.program.roles
    graph = read(in_steps(jaxprs.opened(joint)[0]), roles)
    assert {body.kind for body in graph.bodies.values()} == {"steps"}
    assert [(op.name, op.region) for op in graph.ops] == [(op.name, op.region) for op in given.graph.ops]
    assert parse(show(graph)) == graph
    problem = Problem.of(graph)
    plan = STRATEGIES[strategy](problem)
    assert not segmentable(problem, plan)  # it does not divide
    halves = emit.emit(graph, schedule(problem, plan))
    assert "scan" not in primitives_of(halves.forward) | primitives_of(halves.backward)
    assert "steps" in primitives_of(halves.forward) & primitives_of(halves.backward)
    draws = np.random.default_rng(7)
    inputs = [draws.uniform(0.5, 1.5, v.aval.shape).astype(v.aval.dtype) for v in jaxprs.opened(joint)[0].invars]
    count = len(graph.role_inputs(Role.PRIMAL))
    outputs, gradients = run(halves, graph, inputs[:count], inputs[count:])
    for got, wanted in zip([*outputs, *gradients], runtime.evaluate(joint, *inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_loop_that_stays_closed_is_counted_as_its_kind_says(traced, monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "steps", Steps())
    eqn = next(op.payload for op in traced("scan_with_several_carries").graph.ops if op.name == "loop")
    scan, steps = levels.body_of(eqn), levels.body_of(as_steps(eqn))
    assert scan is not None and steps is not None
    assert (steps.sizes, steps.carried, steps.stacks) == (scan.sizes, scan.carried, scan.stacks)
    assert steps.carried and steps.peak == scan.peak


@pytest.mark.parametrize("module", [reading, emit], ids=["read", "emit"])
def test_reading_and_writing_name_no_kind(module):
    assert "scan" not in Path(module.__file__).read_text().lower()


def test_a_body_says_what_each_operand_and_result_of_its_op_means():
    graph = parse("""
        loop 1 x6
        primal %0:float32[3] "x"
        %1:float32[3] %2:6xfloat32[3]@1 %3:float32[6,3] = loop %0 %4 body 1 of loop 1 {
            #1 %4:6xfloat32[3] = sin %2
            next %4
            stacks %4
            repeats %3
        }
        output %1""")
    body = bodies.Body(
        op=0, kind="scan", regions=(1,), loop=1, trips=6,
        starts=(0,), carried_in=(2,), carried=(4,), carried_out=(1,), stacks=(4,), own=(3,),
    )  # fmt: skip
    assert graph.bodies == {0: body}
    assert body.region == 1


def test_a_graph_says_which_region_no_op_holds(traced):
    graph = traced("reverse_scan").graph
    assert graph.holder_of(1).id in graph.bodies
    with pytest.raises(ValueError, match=r"^region 0 is no body of an op$"):
        graph.holder_of(0)
