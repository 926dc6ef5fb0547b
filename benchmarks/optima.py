"""Compare the cuts of small graphs with the optimum of an integer program that knows nothing of the front.

The graphs are the suite's at its tiny size, and random ones. The program has a variable for each node of the network,
1 on the sink's side, and one for each arc that may be cut, 1 if it is severed; HiGHS solves it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

from benchmarks.polish import polished
from benchmarks.programs import PROGRAMS, load
from jointcut import aot
from jointcut.partition.search.front import front
from jointcut.partition.search.network import INFINITE, SINK, SOURCE, Network

#: Random networks, budgets for each graph, and seconds for each integer program.
RANDOM, BUDGETS, MOST_SECONDS = 24, 5, 30.0


@dataclass(frozen=True)
class Exact:
    """One small graph: the network's nodes, and at how many budgets the choice was the optimum.

    `proven` counts the budgets whose optimum the integer program has proven.
    """

    name: str
    nodes: int
    budgets: int
    proven: int
    equal: int
    equal_unpolished: int


def small_networks() -> Iterator[tuple[str, Network]]:
    """The networks of the suite at its tiny size, and random ones."""
    for name in PROGRAMS:
        program = load(name, "tiny")
        yield name, aot.function(program.loss, has_aux=program.has_aux).trace(*program.arguments).planner.network
    for seed in range(RANDOM):
        yield f"random {seed}", random_network(np.random.default_rng(seed))


def random_network(rng: np.random.Generator) -> Network:
    """A network as that of a program: each op reads up to three of the six values before it, some are wanted."""
    count = int(rng.integers(60, 151))
    ins = [2 + 2 * k for k in range(count)]
    arcs = [(v, v + 1, int(rng.integers(1, 1000)) if k else 0, 0.0) for k, v in enumerate(ins)]
    for k, v in enumerate(ins[1:], start=1):
        reads = {int(r) for r in rng.integers(max(0, k - 6), k, rng.integers(1, 4))}
        arcs += [(ins[r] + 1, v, INFINITE, 0.0) for r in sorted(reads)]
        arcs.append((SOURCE, v, 0, float(rng.integers(1, 50))))
        arcs += [(v + 1, SINK, INFINITE, 0.0)] * int(rng.random() < 0.35 or k == count - 1)
    tails, heads, capacities, seconds = (np.array(column) for column in zip(*arcs, strict=True))
    places = np.concatenate([[-1, 2 * count], np.repeat(2 * np.arange(count) + 1, 2)])
    return Network(
        2 + 2 * count, tails, heads, capacities.astype(np.int64), np.array(ins), seconds.astype(float), places
    )


def exact_of(name: str, net: Network) -> Exact:
    """The choices for some budgets beside the optima; at any price of a second."""
    found = front(net)
    first, last = found.choices[0].bytes, found.choices[-1].bytes
    proven = equal = unpolished = 0
    for budget in np.linspace(first, last, BUDGETS + 2)[1:-1].astype(int).tolist():
        optimum = optimal_seconds(net, budget)
        if optimum is None:
            continue
        quick, slow = found.best(budget), polished(found, budget, MOST_SECONDS)
        assert quick is not None and slow is not None
        proven += 1
        equal += math.isclose(slow.seconds, optimum, rel_tol=1e-9, abs_tol=1e-15)
        unpolished += math.isclose(quick.seconds, optimum, rel_tol=1e-9, abs_tol=1e-15)
    return Exact(name, net.num_nodes, BUDGETS, proven, equal, unpolished)


def optimal_seconds(net: Network, budget_bytes: int) -> float | None:
    """Fewest seconds of any cut within a budget; None if that is not proven in time."""
    (finite,) = np.nonzero(net.capacities < INFINITE)
    count, width = len(net.tails), net.num_nodes + len(finite)
    rows = np.concatenate([np.arange(count), np.arange(count), finite])
    columns = np.concatenate([net.heads, net.tails, net.num_nodes + np.arange(len(finite))])
    signs = np.concatenate([np.ones(count), -np.ones(count + len(finite))])
    severs = csr_array((signs, (rows, columns)), shape=(count, width))
    weights, costs = np.zeros((2, width))
    weights[net.num_nodes :], costs[net.num_nodes :] = net.capacities[finite], net.seconds[finite]
    low, high = np.zeros(width), np.ones(width)
    high[SOURCE], low[SINK] = 0, 1
    unit = math.gcd(*net.capacities[finite].tolist()) or 1
    limits = np.append(np.zeros(count), budget_bytes // unit)
    rules = LinearConstraint(csr_array(vstack([severs, csr_array(weights[None] / unit)])), ub=limits)
    options = {"time_limit": MOST_SECONDS, "mip_rel_gap": 0.0}
    scaled = costs * (1000 / costs.max())
    result = milp(scaled, integrality=np.ones(width), bounds=Bounds(low, high), constraints=rules, options=options)
    if result.status != 0:
        return None
    side = result.x[: net.num_nodes] > 0.5
    severed = ~side[net.tails] & side[net.heads]
    return math.fsum(net.seconds[severed]) if net.capacities[severed].sum() <= budget_bytes else None
