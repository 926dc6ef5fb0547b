"""The front of a program tells what each peak costs: as points, as a table, and as a page."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.aot.planning.budgets.pareto import Pareto, ParetoPoint
from jointcut.partition import Plan, parse
from jointcut.partition.prices.cost import Roofline

GRAPH = parse("""
    loop 1 x4
    primal %0:float32[250000]
    cotangent %1:float32[]
    %2:float32[250000] = sin %0
    %3:float32[250000] = exp %2
    backward:
    %4:float32[250000] = mul %1 %2 %3
    gradient %4
""")
ALL, SOME, NONE = (Plan.of(GRAPH, saved, strategy=name) for saved, name in [((2, 3), "all"), ((2,), "some"), ((), "-")])
POINTS = ParetoPoint(90_000_000, 1e-3, ALL), ParetoPoint(50_000_000, 2e-3, SOME), ParetoPoint(20_000_000, 8e-3, NONE)
FRONT = Pareto("loss", POINTS)


def test_a_front_is_the_sequence_of_its_points():
    assert (len(FRONT), [(peak, seconds, plan) for peak, seconds, plan in FRONT][1]) == (3, (50_000_000, 2e-3, SOME))


def test_a_front_is_printed_with_a_star_at_the_plan_that_was_chosen():
    assert str(FRONT) == (
        "loss: 3 plans\n"
        "   peak MB   extra ms   saved MB  plan\n"
        "      90.0       1.00        2.0  all\n"
        "      50.0       2.00        1.0  some\n"
        "      20.0       8.00        0.0  -"
    )
    assert stars(replace(FRONT, chosen=POINTS[1])) == ["*     50.0       2.00        1.0  some"]


def stars(front: Pareto) -> list[str]:
    return [line for line in str(front).splitlines()[2:] if line.startswith("*")]


def test_a_plan_that_is_not_on_the_front_comes_last_also_where_it_saves_the_same():
    """The same values with a loop in segments are another plan."""
    other = ParetoPoint(95_000_000, 3e-3, replace(SOME, segments=((1, 2),), strategy="by hand"))
    shown = replace(FRONT, chosen=other)
    assert stars(shown) == [str(shown).splitlines()[-1]] == ["*     95.0       3.00        1.0  by hand"]


@pytest.mark.parametrize(("factor", "unit"), [(1e-3, "kB"), (1e-5, "kB"), (1, "MB"), (100, "MB"), (1000, "GB")])
def test_peaks_are_shown_in_a_unit_that_suits_them(factor, unit):
    front = Pareto("loss", tuple(replace(p, peak_bytes=int(factor * p.peak_bytes)) for p in POINTS))
    assert str(front).splitlines()[1] == f"   peak {unit}   extra ms   saved {unit}  plan"


def test_with_plain_jax_beside_it_a_front_tells_the_time_of_a_step_over_plains():
    """4 ms that every plan computes: plain's step takes 5 ms, the others 6 and 12."""
    front = replace(FRONT, plain=POINTS[0], common_seconds=4e-3, chosen=POINTS[1])
    assert [front.time_share(point) for point in front] == pytest.approx([1.0, 1.2, 2.4])
    assert str(front) == (
        "loss: 3 plans\n"
        "   peak MB   extra ms   ÷ plain   saved MB  plan\n"
        "      90.0       1.00      1.00        2.0  all\n"
        "*     50.0       2.00      1.20        1.0  some\n"
        "      20.0       8.00      2.40        0.0  -"
    )
    section = front.section()
    assert [(p["seconds"], p["share"]) for p in section["points"]] == [(5e-3, 1.0), (6e-3, 1.2), (12e-3, 2.4)]
    assert section["time"] == "time of a step" and FRONT.section()["time"] == "extra time"
    assert FRONT.time_share(POINTS[0]) is None


def test_a_notebook_gets_a_page_and_the_text():
    shown = FRONT._repr_mimebundle_(include=None, exclude=None)
    assert set(shown) == {"text/plain", "text/html"}
    assert shown["text/plain"] == str(FRONT)


def test_the_front_of_a_program_falls_and_a_cut_marks_its_own_plan():
    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(jnp.exp(jnp.sin(x @ w)) @ w)
        return jnp.sum(x**2)

    shapes = jax.ShapeDtypeStruct((6, 64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    traced = aot.function(loss, cost=Roofline(1.5e11, 1.5e10, 3.7e10, 4.4e9)).trace(*shapes)
    front = traced.pareto()
    peaks, times = [p.peak_bytes for p in front], [p.seconds for p in front]
    assert len(front) > 2 and front.chosen is None
    assert peaks == sorted(set(peaks), reverse=True) and times == sorted(set(times))
    for strategy in ("min_cut", "save_all"):
        cut = traced.partition(strategy)
        (line,) = stars(cut.pareto())
        assert line.endswith(f"  {cut.plan.strategy}")
