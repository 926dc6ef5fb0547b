"""Price the step of any method for a target: by the target's rates, and by the cycles that XLA expects.

The rates price a jaxpr that has no dead code. Each equation takes what the planner says of such an op
(`prices.cost.op_seconds`). Equations with a program inside are opened: a scan counts its body once per trip, a
conditional counts the branch that takes longest, a `while` counts one trip. What the forward keeps for the backward is
written once and read once.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jointcut.partition.bodies.read import read
from jointcut.partition.prices.cost import Roofline, op_seconds
from jointcut.partition.prices.counts import PER_ELEMENT
from jointcut.partition.program.graph import Graph, Op
from jointcut.partition.program.jax import jaxprs, own_primitives
from jointcut.partition.program.primitives import BY_BODY, OPAQUE
from jointcut.partition.program.roles import Roles

# --------------------------------------------------------------------------------------------------- by the rates


def step_seconds(programs: Iterable[Any], kept_bytes: int, rates: Roofline) -> float:
    """The seconds of a step: of each jaxpr, and of the bytes that are kept between forward and backward."""
    return sum(jaxpr_seconds(closed, rates) for closed in programs) + rates.saving_seconds(kept_bytes)


def jaxpr_seconds(closed: Any, rates: Roofline) -> float:
    """The seconds of one run of a closed jaxpr, without what nobody reads."""
    less, _ = jaxprs.pruned(closed, [True] * len(jaxprs.opened(closed)[0].outvars))
    return _seconds(jaxprs.opened(less)[0], rates)


def _seconds(jaxpr: jaxprs.Jaxpr, rates: Roofline) -> float:
    """The seconds of one run of the equations at one level and of all below."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    graph = read(jaxprs.build(inputs, jaxpr.outvars, jaxpr.eqns), Roles.simple(len(inputs), 0, len(jaxpr.outvars), 0))
    return sum(_op_seconds(graph, op, rates) for op in graph.ops)


def _op_seconds(graph: Graph, op: Op, rates: Roofline) -> float:
    eqn = op.payload
    if eqn is None or op.name in PER_ELEMENT or op.name in OPAQUE or op.name in BY_BODY:
        return op_seconds(graph, op, rates)
    if op.name == "scan":
        layout = jaxprs.scan_layout(eqn)
        return layout.length * _seconds(layout.body, rates)
    if (runs := own_primitives.runs_of(eqn)) is not None:
        return sum(count * jaxpr_seconds(closed, rates) for closed, count in runs)
    inner = [_seconds(jaxpr, rates) for jaxpr in jaxprs.inner_jaxprs(eqn)]
    if not inner:
        return op_seconds(graph, op, rates)
    return sum(inner) if op.name == "while" else max(inner)


# --------------------------------------------------------------------------------------------------- by XLA's cycles

#: XLA writes a number near 2**63 where it has no estimate.
_NO_ESTIMATE = 2**62
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CALL = re.compile(r" call\(.*to_apply=%?([\w.\-]+)")
_CONFIG = re.compile(r'"known_trip_count":(\{[^}]*\})')
_LIMIT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"^\s*ROOT .*compare\(.*direction=LT")


@dataclass(frozen=True)
class _Text:
    """A compiled program's computations: the lines of each by name, and the name of the one that is run."""

    lines: Mapping[str, list[str]]
    entry: str


def estimated_cycles(text: str) -> int | None:
    """The cycles that XLA expects of a compiled program; None where its text has no estimate, as on GPUs.

    A loop counts its body once per trip, and once where XLA does not know how often it runs. A conditional counts the
    branch that takes longest.
    """
    if not _CYCLES.search(text):
        return None
    program = _computations(text)
    return _cycles(program, program.entry)


def _computations(text: str) -> _Text:
    lines: dict[str, list[str]] = {}
    entry, current = "", list[str]()
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = lines.setdefault(match[1], [])
            entry = match[1] if line.startswith("ENTRY") else entry
        else:
            current.append(line)
    return _Text(lines, entry)


def _cycles(program: _Text, name: str) -> int:
    total = 0
    for line in program.lines.get(name, ()):
        total += sum(n for found in _CYCLES.findall(line) if (n := int(found)) < _NO_ESTIMATE)
        if loop := _WHILE.search(line):
            total += _trips(program, line, loop[1]) * _cycles(program, loop[2])
        elif branches := _BRANCHES.search(line):
            names = branches[1].split(",") if branches[1] else [branches[2], branches[3]]
            total += max(_cycles(program, branch.strip().lstrip("%")) for branch in names)
        elif call := _CALL.search(line):
            total += _cycles(program, call[1])
    return total


def _trips(program: _Text, line: str, condition: str) -> int:
    """How often a loop runs: as its configuration says, or the limit that its condition compares the counter with."""
    if told := _CONFIG.search(line):
        return int(json.loads(told[1])["n"])
    body = program.lines.get(condition, [])
    limits = [int(n) for each in body for n in _LIMIT.findall(each)]
    return limits[0] if len(limits) == 1 and any(map(_COMPARED.match, body)) else 1
