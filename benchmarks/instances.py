"""Schedule the training steps of three published networks within less than their peak.

    python -m benchmarks.instances                       # VGG16, U-Net and ResNet-50, five budgets each
    python -m benchmarks.instances unet --budgets 50     # one of them, half its peak
    python -m benchmarks.instances --seconds-limit 10    # less time for each budget
    python -m benchmarks.instances graph.json            # an instance published as node-link JSON, or a graph's text
    python -m benchmarks.instances --save                # write the figures to benchmarks/results/ as well
    python -m benchmarks.instances --trace               # trace the networks anew into benchmarks/instances/

An instance is a graph in text form with an op for each layer and one for its backward. It is traced from the network
of `benchmarks/convnets.py`, where each op bears the name of its layer, and contracted by these names. A layer takes
what the slower of arithmetic and memory takes on a GPU with the figures below; parameters and images are held by the
caller, gradients until the end. TDI, the total duration increase, is what reruns add to the nominal time.
"""

import argparse
import heapq
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.convnets import NETWORKS, Network
from benchmarks.intervals import Instance, solve
from benchmarks.measure import machine, wide_console
from jointcut import aot
from jointcut.partition.program.graph import TOP, Graph, Loop, Op, Region
from jointcut.partition.program.roles import Side
from jointcut.partition.program.text import parse, show

HERE = Path(__file__).parent
TEXTS = HERE / "instances"
SHARES = (90, 80, 70, 60, 50)
FLOPS_PER_SECOND = 15e12  # float32 of a V100, on which the published instances were measured
BYTES_PER_SECOND = 0.9e12

_SCOPE = re.compile(r"(transpose\()?jvp\(([^()/]+)\)")


@dataclass(frozen=True)
class Row:
    """One instance under one budget: percent of the nominal peak, and what the solver made of it."""

    instance: str
    ops: int
    edges: int
    nominal_bytes: int
    nominal_seconds: float
    share: float
    budget_bytes: int
    status: str
    increase_percent: float | None
    bound_percent: float | None
    peak_bytes: int | None
    reruns: int | None
    solve_seconds: float


def main() -> None:
    """Trace if asked, solve, print, save if asked."""
    options = parse_options()
    if options.trace:
        for name in NETWORKS if not options.names else [n for n in options.names if n in NETWORKS]:
            write_text(name)
    names = options.names or list(NETWORKS)
    work = [(name, share) for name in names for share in options.budgets]
    rows: list[Row] = []
    with tqdm(work, unit="budget", disable=None) as bar:
        for name, share in bar:
            bar.set_description(f"{name} {share:g} %")
            rows.append(measure(name, share, options.seconds_limit, options.workers))
    wide_console(120).print(table_of(rows, options.seconds_limit))
    if options.save:
        path = HERE / "results" / "instances.json"
        limits = {"seconds_limit": options.seconds_limit, "workers": options.workers}
        record = {"machine": machine(), **limits, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"Written to {path}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instances", description=(__doc__ or "").partition("\n")[0]
    )
    known = ", ".join(NETWORKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}, or a file; these when none")
    parser.add_argument("--budgets", type=float, nargs="+", default=SHARES, help="percent of the nominal peak")
    parser.add_argument("--seconds-limit", type=float, default=60.0, help="for each budget (%(default)g)")
    parser.add_argument("--workers", type=int, default=1, help="of the solver, which take turns (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results/")
    parser.add_argument("--trace", action="store_true", help="write the networks' texts anew")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NETWORKS and not Path(name).is_file()]:
        parser.error(f"{', '.join(unknown)}: neither a file nor one of {known}")
    return options


# ---------------------------------------------------------------- from a network to an instance


def write_text(name: str) -> Path:
    """Trace a network and write its layers as a graph's text."""
    network = NETWORKS[name]
    title = f"// {network.title}, float32, one training step; by python -m benchmarks.instances --trace"
    path = TEXTS / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{title}\n{show(traced(network))}\n")
    return path


def traced(network: Network) -> Graph:
    """The layers of a network, forward and backward, by shapes alone."""
    return contract(aot.function(network.loss_of).trace(*network.arguments()).graph)


def contract(graph: Graph) -> Graph:
    """One op for all that a layer's forward does, and one for its backward.

    What is computed from constants alone, such as an array of zeros, each reader makes for itself.
    """
    constant = _constants(graph)
    members: dict[str, list[Op]] = {}
    for op in graph.ops:
        if not set(op.outputs) <= constant:
            members.setdefault(_layer(op), []).append(op)
    home = {v: name for name, ops in members.items() for op in ops for v in op.outputs}
    results = {v for v, _ in graph.outputs if v is not None}
    reads = {
        name: dict.fromkeys(v for op in ops for v in op.inputs if home.get(v) != name and v not in constant)
        for name, ops in members.items()
    }
    shared = results.union(*reads.values())
    number = {v: i for i, (v, _) in enumerate(graph.inputs)}
    values = [replace(graph.values[v], id=i, payload=None) for v, i in number.items()]
    ops: list[Op] = []
    for name in _sorted(members, {name: {home[v] for v in vs if v in home} for name, vs in reads.items()}):
        made = [v for op in members[name] for v in op.outputs if v in shared]
        for v in made:
            number[v] = len(values)
            values.append(replace(graph.values[v], id=number[v], maker=len(ops), payload=None))
        operands, outputs = tuple(number[v] for v in reads[name]), tuple(number[v] for v in made)
        moved = sum(values[v].bytes for v in (*operands, *outputs))
        seconds = max(sum(flops(graph, op) for op in members[name]) / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)
        side = Side.BACKWARD if name.endswith("-back") else Side.FORWARD
        ops.append(Op(len(ops), name, operands, outputs, origin=side, seconds=float(f"{seconds:.4g}")))
    return Graph(
        values=tuple(values),
        ops=tuple(ops),
        regions=(Region(TOP, TOP, ops=tuple(range(len(ops)))),),
        loops=(Loop(TOP, TOP, 1),),
        inputs=tuple((number[v], role) for v, role in graph.inputs),
        outputs=tuple((number[v] if v is not None else None, role) for v, role in graph.outputs),
    )


def _constants(graph: Graph) -> set[int]:
    """Values that no input of the program goes into."""
    out: set[int] = set()
    for op in graph.ops:
        if out.issuperset(op.inputs) and not op.effects:
            out.update(op.outputs)
    return out


def _layer(op: Op) -> str:
    """The name of the layer under which an op was traced, with `-back` for its backward."""
    found = _SCOPE.match(op.scope)
    if found is None:
        raise ValueError(f"op {op.id} ({op.name}) was traced outside the layers, under {op.scope!r}")
    return found[2] + ("-back" if found[1] else "")


def _sorted(names: Iterable[str], needs: dict[str, set[str]]) -> list[str]:
    """The names with each behind those that it needs, else in the order given."""
    place = {name: i for i, name in enumerate(names)}
    waiting = {name: len(needs[name]) for name in place}
    ready = [(i, name) for name, i in place.items() if not waiting[name]]
    out: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        out.append(name)
        for other in place:
            if name in needs[other]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, (place[other], other))
    if len(out) < len(place):
        raise ValueError(f"layers wait for each other: {', '.join(sorted(place.keys() - set(out)))}")
    return out


def flops(graph: Graph, op: Op) -> float:
    """Two for each product that a convolution or a matrix product adds up, else one for each number touched."""
    sizes = [math.prod(graph.values[v].shape) for v in (*op.inputs, *op.outputs)]
    if op.name == "conv_general_dilated":
        parameters = op.payload.params
        kernel = op.payload.invars[1].aval.shape
        window = math.prod(kernel) / kernel[parameters["dimension_numbers"].rhs_spec[0]]
        return 2.0 * sizes[-1] * window / math.prod(parameters["lhs_dilation"])
    if op.name == "dot_general":
        (contracted, _), _ = op.payload.params["dimension_numbers"]
        return 2.0 * sizes[-1] * math.prod(op.payload.invars[0].aval.shape[axis] for axis in contracted)
    return float(max(sizes))


# ---------------------------------------------------------------- from an instance to a row


def load(name: str) -> Instance:
    """An instance by the name of its network, or by the path of a graph's text or a node-link JSON."""
    path = TEXTS / f"{name}.txt" if name in NETWORKS else Path(name)
    return read_node_link(path) if path.suffix == ".json" else Instance.of(parse(path.read_text()))


def read_node_link(path: Path) -> Instance:
    """An instance as Checkmate's and Moccasin's are published: one value for each node, links from maker to reader.

    A node has `cost_cpu` and `cost_ram`, or `duration` and `out_cost`. Nodes run in the `order` of the graph, else by
    their ids. Nothing is kept until the end.
    """
    record = json.loads(path.read_text())
    nodes = {node.get("id", node.get("name")): node for node in record["nodes"]}
    order = record.get("graph", {}).get("order", sorted(nodes))
    order = json.loads(order) if isinstance(order, str) else order
    place = {node: i for i, node in enumerate(order)}
    reads: list[list[int]] = [[] for _ in order]
    for link in record["links"]:
        source, target = (link[k] for k in (("source", "target") if "source" in link else ("0", "1")))
        reads[place[target]].append(place[source])
    return Instance(
        names=tuple(str(nodes[node].get("name", node)) for node in order),
        seconds=tuple(float(_either(nodes[node], "cost_cpu", "duration")) for node in order),
        reads=tuple(tuple(sorted(values)) for values in reads),
        makes=tuple((i,) for i in range(len(order))),
        value_bytes=tuple(int(_either(nodes[node], "cost_ram", "out_cost")) for node in order),
    )


def _either(node: dict[str, float], first: str, second: str) -> float:
    if not {first, second} & node.keys():
        raise ValueError(f"a node has neither {first} nor {second}: {node}")
    return node[first] if first in node else node[second]


def measure(name: str, share: float, seconds_limit: float, workers: int) -> Row:
    """Solve one instance within a share of its nominal peak, in percent."""
    instance = load(name)
    budget = math.ceil(instance.nominal_bytes * share / 100)
    start = time.perf_counter()
    outcome = solve(instance, budget, seconds_limit=seconds_limit, num_workers=workers)
    end = time.perf_counter()
    schedule, nominal = outcome.schedule, instance.nominal_seconds
    return Row(
        instance=name if name in NETWORKS else Path(name).stem,
        ops=len(instance.names),
        edges=sum(map(len, instance.reads)),
        nominal_bytes=instance.nominal_bytes,
        nominal_seconds=nominal,
        share=share,
        budget_bytes=budget,
        status=outcome.status,
        increase_percent=100 * (schedule.seconds / nominal - 1) if schedule else None,
        bound_percent=100 * (outcome.bound_seconds / nominal - 1) if math.isfinite(outcome.bound_seconds) else None,
        peak_bytes=schedule.peak_bytes if schedule else None,
        reruns=len(schedule.runs) - len(instance.names) if schedule else None,
        solve_seconds=end - start,
    )


def table_of(rows: Sequence[Row], seconds_limit: float) -> Table:
    """One line for each instance and budget."""
    caption = (
        "TDI: what reruns add to the nominal time. bound: what any schedule of the model adds at\n"
        "least (ops in this order, each run at most twice). optimal: proved. feasible: the best\n"
        f"that {seconds_limit:g} s found. infeasible: proved."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("instance (ops, reads)", no_wrap=True)
    for heading in ("budget\n%", "budget\nGB", "status", "TDI\n%", "bound\n%", "peak\nGB", "reruns", "solved in\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = ""
    for row in rows:
        if last not in ("", row.instance):
            table.add_section()
        table.add_row(
            f"{row.instance} ({row.ops}, {row.edges})" if row.instance != last else "",
            f"{row.share:g}",
            f"{row.budget_bytes / 1e9:.4g}",
            row.status,
            "" if row.increase_percent is None else f"{row.increase_percent:.3f}",
            "" if row.bound_percent is None else f"{row.bound_percent:.3f}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.4g}",
            "" if row.reruns is None else f"{row.reruns}",
            f"{row.solve_seconds:.1f}",
        )
        last = row.instance
    return table


if __name__ == "__main__":
    main()
