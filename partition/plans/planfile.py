"""Write a plan to JSON, and read it back for its program.

The text has one line for each saved value and for each line of the program that the plan was made for. Reading takes
the saved values and the figures from the text, works out the rest from the program at hand, and refuses a text that
contradicts it. A loop in segments is `{"loop": 1, "steps": 8}`, with `"kept": 12` if its last 12 steps are in no
segment. `on_device` is there if loops offload in part: `{"loop": 1, "kept": 4}` if the last 4 steps do not. `dropped`
is there if there are such values, `"memory": "pinned_host"` with each saved value that is offloaded, and `"form":
"bfloat16"` with one that waits in that form. Nothing in the text is ever run. `scope` and `source` are for people: they
differ between machines, so they are neither compared nor taken over. A plan also serves a program with the same forward
and another backward (`twins`).

>>> from jointcut.partition import Plan, parse
>>> from jointcut.partition.plans.planfile import dumps, loads
>>> graph = parse('''
...     primal %0:float32[8]
...     cotangent %1:float32[8]
...     %2:float32[8] = sin %0
...     %3:float32[8] = sin %2
...     backward:
...     %4:float32[8] = mul %1 %3
...     gradient %4''')
>>> plan = Plan.of(graph, [3], reasons={3: "so told"})
>>> loads(dumps(plan, graph), graph) == plan
True
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from jointcut.partition.errors import GraphError, PlanError
from jointcut.partition.plans.document import FIGURES, PARTS, has_types, refuse, shown
from jointcut.partition.plans.matching import in_order, moved
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.saved import DEVICE, Saved
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.roles import Tile
from jointcut.partition.program.text import parse, show

#: The values of `format` and `version` that are written, and the only ones that are read.
FORMAT, VERSION = "jointcut plan", 1


# ---------------------------------------------------------------------------------------------------- writing


def dumps(plan: Plan, graph: Graph) -> str:
    """Return the plan as a JSON text, the same for the same plan: `loads(dumps(plan, graph), graph) == plan`.

    Raises `PlanError` where the plan does not fit this graph.
    """
    document = _document(plan, graph)
    has_types(document, "plan")
    if _completed(document, graph) != plan:
        cure = "Write a plan with the graph that it was made for, as Plan.of returned it."
        raise refuse("plan", "is not what Plan.of makes of its values in this graph.", cure)
    document["checksum"] = checksum(document)
    entries = (f"  {json.dumps(key)}: {_lines(document[key])}" for key in sorted(document))
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _document(plan: Plan, graph: Graph) -> dict[str, Any]:
    in_part = [{"loop": loop, "kept": kept} for loop, kept in plan.partly_offloaded.items()]
    fewer = [{"op": op, "number": number} for op, number in plan.checkpoints]
    return {
        "format": FORMAT,
        "version": VERSION,
        "checksum": "",
        "strategy": plan.strategy,
        "saved": [_entry(s) for s in plan.saved],
        "recomputed": list(plan.recomputed),
        "deferred": list(plan.deferred),
        "segments": [
            {"loop": loop, "steps": steps, **({"kept": kept} if kept else {})}
            for loop, steps, kept in plan.loops_in_segments
        ],
        **({"on_device": in_part} if in_part else {}),
        **({"tiles": [_of_tile(tile) for tile in graph.tiles]} if graph.tiles else {}),
        **({"dropped": list(plan.dropped)} if plan.dropped else {}),
        **({"checkpoints": fewer} if fewer else {}),
        "bytes_saved": plan.bytes_saved,
        "figures": {name: getattr(plan, name) for name in FIGURES},
        "written_for": program_lines(graph),
    }


def _of_tile(tile: Tile) -> dict[str, Any]:
    usual = asdict(tile)
    over = usual.pop("over")
    return usual | ({"over": list(over)} if over else {})


def _entry(saved: Saved) -> dict[str, Any]:
    usual = {"memory": DEVICE, "form": "", "host_steps": 0, "loop_steps": 0}
    entry = asdict(saved) | {"shape": list(saved.shape)}
    return {key: value for key, value in entry.items() if key not in usual or value != usual[key]}


def program_lines(graph: Graph) -> list[str]:
    """The lines of the graph's text, without labels and prices: a program is the same with them and without."""
    values = tuple(replace(v, label="") if v.label else v for v in graph.values)
    ops = tuple(op if op.seconds is None else replace(op, seconds=None) for op in graph.ops)
    return show(replace(graph, values=values, ops=ops)).splitlines()


def _lines(value: Any) -> str:
    """One line, or one for each record or text of a list."""
    if isinstance(value, list) and value and isinstance(value[0], dict | str):
        return "[\n    " + ",\n    ".join(json.dumps(item, sort_keys=True) for item in value) + "\n  ]"
    return json.dumps(value, sort_keys=True)


def checksum(document: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of a plan's text, without the checksum itself.

    It detects a changed figure that nothing else in the text contradicts. It is no protection against an attacker.
    """
    content = {key: value for key, value in document.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------- reading


def loads(text: str, graph: Graph) -> Plan:
    """Return the plan that `dumps` wrote for this program, or for one with the same forward.

    Of the figures of a plan for another program only `seconds` is kept. Raises `PlanError` where the text is not a
    plan, where it was made for a program with another forward (the error names the first difference), or where the text
    contradicts itself or the program.
    """
    try:
        document = _parsed(text)
        has_types(document, "plan")
    except RecursionError as error:
        raise refuse("plan", "nests too deep.") from error
    plan = _here(document, graph)
    if document["checksum"] != (actual := checksum(document)):
        what = f"is {shown(document['checksum'])}, but what the text says gives {shown(actual)}: it was changed."
        raise refuse("plan.checksum", what)
    return plan


def tiles_of(text: str) -> tuple[Tile, ...]:
    """Return the tiles of the program that a plan was made for; none for a text that is no plan."""
    if '"tiles": ' not in text:
        return ()
    document = _parsed(text)
    has_types(document, "plan")
    return tuple(Tile(**{**tile, "over": tuple(tile.get("over", ()))}) for tile in document.get("tiles", ()))


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object in a text, which must say that it is a plan of a known version."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (TypeError, ValueError) as error:
        raise refuse("plan", f"is not JSON: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise refuse("plan", f"is no plan of jointcut: it does not say `format` {shown(FORMAT)}.")
    if (version := document.get("version")) != VERSION:
        cure = "Read it with the jointcut that wrote it, or make the plan anew."
        raise refuse("plan.version", f"is {shown(version)}, and this jointcut reads version {VERSION}.", cure)
    return document


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {shown(twice[0])} stands twice in one object")
    return dict(pairs)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _here(document: Mapping[str, Any], graph: Graph) -> Plan:
    """The plan of a document for this program; the document's program is this one, or has the same forward."""
    if (other := _difference(document["written_for"], graph)) is None:
        return _completed(document, graph)
    try:
        there = parse("\n".join(document["written_for"]))
    except GraphError:
        raise other from None
    if _difference(document["written_for"], there) is not None:
        raise other
    found = moved(_completed(document, there), there, graph)
    if found is None:
        raise other
    return found


def _completed(document: Mapping[str, Any], graph: Graph) -> Plan:
    """Complete the saved values and the figures of a document to a plan, which the rest of the document must equal."""
    problem, loops, in_part = Problem.of(graph), document["segments"], document.get("on_device", [])
    _can_be_saved(document["saved"], problem)
    plan = Plan.of(
        problem,
        [entry["value"] for entry in document["saved"]],
        strategy=document["strategy"],
        reasons={entry["value"]: entry["reason"] for entry in document["saved"]},
        segments=((entry["loop"], entry["steps"]) for entry in loops),
        kept_steps=((entry["loop"], entry["kept"]) for entry in [*loops, *in_part] if "kept" in entry),
        dropped=document.get("dropped", ()),
        checkpoints=[(entry["op"], entry["number"]) for entry in document.get("checkpoints", [])],
        offloaded=[entry["value"] for entry in document["saved"] if "memory" in entry],
        stored={entry["value"]: entry["form"] for entry in document["saved"] if "form" in entry},
        **document["figures"],
    )
    _same_saved(document["saved"], plan, graph)
    _same_ops("plan.recomputed", document["recomputed"], plan.recomputed, graph)
    _same_ops("plan.deferred", document["deferred"], plan.deferred, graph)
    if (size := document["bytes_saved"]) != plan.bytes_saved:
        raise refuse("plan.bytes_saved", f"is {shown(size)}, but the values take {plan.bytes_saved}.")
    return plan


def _difference(lines: Sequence[str], graph: Graph) -> PlanError | None:
    """The first difference between the lines of a program and this one; None where there is none."""
    if (found := difference(lines, graph)) is None:
        return None
    cure = "Read the plan for the program that it was made for, or make a plan for this one."
    return refuse(found.name, f"is {found.was} in the plan's program, but {found.now} here.", cure)


class Difference(NamedTuple):
    """An op or input of a program that differs from another program's: its `name`, what it `was` there and is `now`."""

    name: str
    was: str
    now: str


def difference(lines: Sequence[str], graph: Graph) -> Difference | None:
    """The first difference between the `program_lines` of a program and this one; None where there is none."""
    here = program_lines(graph)
    for n, (was, now) in enumerate(zip_longest(lines, here)):
        if was != now:
            name, place = _place(graph, here, n)
            had, has = ("nothing" if line is None else f"`{line.strip()}`" for line in (was, now))
            return Difference(name, had, f"{has}{place}")
    return None


def _place(graph: Graph, lines: Sequence[str], n: int) -> tuple[str, str]:
    """The op or input on line n of a graph's text, and its place in the user's program."""
    words = lines[n].split() if n < len(lines) else []
    count, is_apart = _ops_until(lines[: n + 1])
    if "=" in words or is_apart:
        op = graph.ops[in_order(graph)[count - 1]]
        return f"op {op.id}", f" at {op.source}" if op.source else ""
    if words and words[0] in {role.value for _, role in graph.inputs}:
        index = n - (len(graph.loops) - 1)
        label = graph.values[graph.inputs[index][0]].label
        return f"input {index}", f" ({label})" if label else ""
    return f"line {n + 1} of the program", ""


def _ops_until(lines: Sequence[str]) -> tuple[int, bool]:
    """The number of a program's ops on these lines, and whether the last is of a step that is cut on its own."""
    count, depth, is_apart = 0, 0, False
    for line in lines:
        is_apart = bool(depth)
        count += not is_apart and "=" in line.split()
        if line.endswith("{") and (is_apart or " steps x" in line):
            depth += 1
        elif is_apart and line.strip() == "}":
            depth -= 1
    return count, is_apart


def _can_be_saved(entries: Sequence[Mapping[str, Any]], problem: Problem) -> None:
    graph = problem.graph
    seen: set[int] = set()
    for n, entry in enumerate(entries):
        v, where = entry["value"], f"plan.saved[{n}]:"
        if v >= len(graph.values):
            raise refuse(where, f"%{v} does not exist in the forward: the program has {len(graph.values)} values.")
        if problem.sides.is_late(v):
            raise refuse(where, f"{graph.where(v)} does not exist in the forward: it needs a cotangent.")
        if graph.values[v].maker is None:
            raise refuse(where, f"{graph.where(v)} is an input, which the caller holds.")
        if v in seen:
            raise refuse(where, f"{graph.where(v)} is saved twice.")
        seen.add(v)


def _same_saved(entries: Sequence[Mapping[str, Any]], plan: Plan, graph: Graph) -> None:
    saved = {s.value: s for s in plan.saved}
    for n, entry in enumerate(entries):
        want = _entry(saved[entry["value"]])
        for name in ("shape", "dtype", "copies", "bytes", "op", *PARTS):
            if (told := entry.get(name, 0)) != (due := want.get(name, 0)):
                what = f"is {shown(told)}, but {shown(due)} in {graph.where(entry['value'])}."
                raise refuse(f"plan.saved[{n}].{name}", what)


def _same_ops(where: str, given: Sequence[int], want: Sequence[int], graph: Graph) -> None:
    """Refuse a list of ops that does not follow from the saved values, and name one op too few or too many."""
    few, many = set(want) - set(given), set(given) - set(want)
    if few:
        raise refuse(where, f"lacks {_op(graph, min(few))}, which must run if no more than that is saved.")
    if many:
        raise refuse(where, f"holds {_op(graph, min(many))}, which need not run if all that is saved.")
    if list(given) != list(want):
        raise refuse(where, "names an op twice, or not in program order.")


def _op(graph: Graph, i: int) -> str:
    if i >= len(graph.ops):
        return f"op {i}, of {len(graph.ops)} in all"
    op = graph.ops[i]
    return f"op {i} ({op.name}{' at ' + op.source if op.source else ''})"
