"""Random things to draw pictures of: rows of memory, and graphs with a plan that closes.

@given(rows())
def test_a_law(row): ...
"""

from __future__ import annotations

from hypothesis import strategies as st

from jointcut.partition import Plan, parse
from jointcut.partition.errors import PlanError
from jointcut.partition.lower.memory.lifetimes import Lifetime, Lifetimes, Moment
from jointcut.partition.program.places import NOWHERE, Name, Place
from jointcut.partition.program.roles import Side

_CALLS = (Name("call", "apply", "model.py:3"), Name("call", "norm", "model.py:7"), Name("call", "dense", "model.py:9"))

places = st.one_of(
    st.just(NOWHERE),
    st.builds(
        Place,
        st.lists(st.sampled_from(["encoder", "head", "block_0", "block_1"]), max_size=3).map(tuple),
        st.lists(st.sampled_from(_CALLS), max_size=2).map(tuple),
        st.integers(1, 14).map(lambda n: f"/home/me/train/model.py:{n} (apply)"),
    ),
)


@st.composite
def rows(draw, least=1, most=40):
    """A row of steps, some of them the backward's, and buffers that live somewhere in it."""
    count = draw(st.integers(least, most))
    boundary = draw(st.integers(0, count))
    known = draw(st.lists(places, min_size=1, max_size=12))
    sides = [Side.FORWARD if i < boundary else Side.BACKWARD for i in range(count)]
    moments = tuple(Moment("sin", side, known[i % len(known)], 1 + i % 3) for i, side in enumerate(sides))
    spans = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).map(sorted)
    lives = draw(st.lists(st.tuples(spans, st.integers(0, 10**9), st.sampled_from(known)), max_size=30))
    buffers = (Lifetime(size, "float32[4]", "sin", place, *span) for span, size, place in lives)
    return Lifetimes(moments, tuple(buffers))


@st.composite
def graphs(draw):
    """A joint program of at most 12 forward values: ops of one result or two, some read by the backward."""
    lines, count, ops = ["primal %0:int8[4]", "cotangent %1:int8[]"], 1, draw(st.integers(1, 9))
    values = [0]
    for _ in range(ops):
        made = [count + 1 + i for i in range(draw(st.integers(1, 2)))]
        types = " ".join(f"%{v}:int8[{draw(st.integers(0, 9))}]" for v in made)
        read = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
        lines.append(f"{types} = {draw(st.sampled_from(['sin', 'exp', 'dot_general']))} {named(read)}")
        values, count = values + made, count + len(made)
    wanted = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
    lines += ["backward:", f"%{count + 1}:int8[4] = mul %1 {named(wanted)}"]
    return parse("\n".join([*lines, *(f"output %{v}" for v in outputs), f"gradient %{count + 1}"]))


@st.composite
def planned(draw):
    """A random graph, and a plan of it that some of its values give, where they give one."""
    graph = draw(graphs())
    early = [v.id for v in graph.values if v.maker is not None and v.id + 1 < len(graph.values)]
    try:
        return graph, Plan.of(graph, draw(st.lists(st.sampled_from(early), unique=True)))
    except PlanError:
        return graph, Plan.of(graph, early)


def named(values):
    return " ".join(f"%{v}" for v in values)
