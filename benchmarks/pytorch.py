"""Compare with PyTorch's memory budget: bytes saved for equal recomputed products.

    python -m benchmarks.pytorch                 # a transformer and a ResNet: two minutes on two cores
    python -m benchmarks.pytorch transformer     # one of them

It needs PyTorch 2.13 on a CPU: `pip install torch==2.13.0`. The same network is written in both (`pytorch_models`) and
given the same parameters; in float64 loss and gradients agree before anything is compared.

PyTorch: `torch.compile` traces, with Inductor's decompositions, and `min_cut_rematerialization_partition` cuts at each
`torch._functorch.config.activation_memory_budget`; all else is as it comes. The halves run, and each storage that the
forward hands to the backward counts once, with all its bytes; inputs (parameters, batch), views of them and the user's
outputs do not count. *Products* are what `torch.utils.flop_counter` knows, matrix products and convolutions, with its
flops. Computed again are those of both halves less those of the joint graph, once PyTorch has merged what is equal.

jointcut: of all plans whose products computed again have at most the flops of PyTorch's, the one of fewest bytes that
the planner finds when nothing but products takes time. Bytes and products are counted in the emitted halves by the same
rules, and the halves give the joint program's results bit for bit. A row holds if neither bytes nor flops nor the
number of products are more than PyTorch's. Two more plans are shown beside it: fewest bytes for the same number of
products, whatever their flops, and fewest flops for the same bytes. On neither side does it count what else is computed
again: elementwise ops, copies, reductions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.meaning import verify_meaning
from benchmarks.measure import machine, wide_console
from benchmarks.polish import polished
from jointcut import aot
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.graph import Graph, Op
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.search.budget import Planner

if TYPE_CHECKING:
    from benchmarks.pytorch_models import Batch, Capture, Model, Product

RESULTS = Path(__file__).parent / "results" / "pytorch.json"
MISSING = "benchmarks.pytorch compares with PyTorch, which is not installed. pip install torch==2.13.0"
NETWORKS = ("transformer", "resnet")
BUDGETS = (1.0, 0.9, 0.5, 0.25, 0.1)
PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
PER_FLOP, PER_PRODUCT = 1e-12, 1e-3  # seconds, where nothing else takes any
POLISH_SECONDS = 20.0  # of an integer program that looks for one cut; it ends by itself in a fraction
RTOL = 1e-4
MB, GFLOP = 1e6, 1e9


@dataclass(frozen=True)
class Taken:
    """What one cut saves (bytes), and the products that it computes again: how many, and their flops."""

    bytes_saved: int
    products: int
    flops: int

    @classmethod
    def of(cls, bytes_saved: int, halves: Counter[Product], joint: Counter[Product]) -> Taken:
        """Count what two halves compute beyond their joint program; raises `RuntimeError` where they compute less."""
        if lost := joint - halves:
            raise RuntimeError(f"the halves lack products of the joint program: {lost}")
        again = halves - joint
        return cls(bytes_saved, again.total(), flops_of(again))


@dataclass(frozen=True)
class Row:
    """One budget of PyTorch's, what it takes there, and three plans of ours.

    `jointcut` saves fewest bytes for at most its flops, `same_number` for at most its number of products, and
    `same_bytes` takes fewest flops for at most its bytes.
    """

    budget: float
    torch: Taken
    jointcut: Taken
    same_number: Taken
    same_bytes: Taken

    @property
    def holds(self) -> bool:
        """Whether we save no more bytes for no more products and no more of their flops."""
        ours, theirs = self.jointcut, self.torch
        is_equal_work = ours.products <= theirs.products and ours.flops <= theirs.flops
        return is_equal_work and ours.bytes_saved <= theirs.bytes_saved


@dataclass(frozen=True)
class Outcome:
    """One network: its products in the forward, what our default plan takes, and the rows."""

    name: str
    title: str
    forward_products: int
    forward_flops: int
    default: Taken
    rows: tuple[Row, ...]


def main() -> None:
    """Compare, print, write."""
    options = parse_options()
    if importlib.util.find_spec("torch") is None:
        sys.exit(MISSING)
    import torch

    from benchmarks.pytorch_models import MODELS

    console = wide_console(130)
    outcomes = []
    with tqdm(options.networks, unit="network", disable=None) as bar:
        for name in bar:
            bar.set_description(name)
            outcomes.append(compare(name, MODELS["small"][name]))
            with bar.external_write_mode():
                console.print(table_of(outcomes[-1]))
    console.print(summary(outcomes))
    if not options.named:
        where = machine() | {"torch": torch.__version__}
        RESULTS.write_text(json.dumps({"machine": where, "networks": list(map(asdict, outcomes))}, indent=1) + "\n")
        console.print(f"Written to {RESULTS}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch", description=__doc__.partition("\n")[0])
    parser.add_argument("named", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}; both when none")
    options = parser.parse_args()
    if unknown := sorted(set(options.named) - set(NETWORKS)):
        parser.error(f"unknown network {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    options.networks = options.named or list(NETWORKS)
    return options


def compare(name: str, model: Model, budgets: Sequence[float] = BUDGETS) -> Outcome:
    """One network at some of PyTorch's budgets.

    Raises `RuntimeError` where the two frameworks do not compute the same.
    """
    from benchmarks.pytorch_models import capture, parameters

    draw = np.random.default_rng(0)
    drawn, batch = parameters(model, draw), model.batch(draw)
    check_agreement(model, drawn, batch)
    ours = Ours(model, drawn, batch)
    captures = [capture(model, drawn, batch, budget) for budget in budgets]
    check_captures(captures, ours)
    rows = []
    for budget, made in zip(budgets, captures, strict=True):
        theirs = Taken.of(made.bytes_saved, made.forward + made.backward, made.joint)
        found = ours.for_flops(theirs.flops), ours.for_number(theirs.products), ours.for_bytes(theirs.bytes_saved)
        rows.append(Row(budget, theirs, *found))
    forward = ours.forward_products
    return Outcome(name, model.title, forward.total(), flops_of(forward), ours.default, tuple(rows))


# ------------------------------------------------------------------------------------------------------------ jointcut


@dataclass(frozen=True)
class ProductsOnly:
    """A cost model by which only products take time: so many seconds for each flop, and for each of them."""

    per_flop: float = 0.0
    per_product: float = 0.0

    def seconds(self, graph: Graph, op: Op) -> float:
        """What one run of an op takes."""
        if op.name not in PRODUCTS:
            return 0.0
        return self.per_flop * product_of(op.payload)[-1] + self.per_product

    def saving_seconds(self, num_bytes: int) -> float:
        """Next to nothing, so that the front goes on to where no product is computed again."""
        return 1e-30 * num_bytes


class Ours:
    """One network in jointcut: its plans, priced by products alone."""

    def __init__(self, model: Model, drawn: dict[str, np.ndarray], batch: Batch) -> None:
        self.arguments: Any = jax.tree.map(jnp.asarray, (drawn, *batch))  # JAX makes int64 to int32
        self.traced = aot.function(model.jax_loss).trace(*self.arguments)
        ops = [op for op in self.traced.graph.ops if op.name in PRODUCTS]
        forward = self.traced.problem.sides.forward
        self.joint = Counter(product_of(op.payload) for op in ops)
        self.forward_products = Counter(product_of(op.payload) for op in ops if op.id in forward)
        self.loss = float(jax.jit(model.jax_loss)(*self.arguments))
        self.taken: dict[tuple[int, ...], Taken] = {}
        self.by_flops = Planner(Problem.of(self.traced.graph, ProductsOnly(per_flop=PER_FLOP)))
        self.by_number = Planner(Problem.of(self.traced.graph, ProductsOnly(per_product=PER_PRODUCT)))

    @property
    def default(self) -> Taken:
        """What the default plan takes, which computes nothing heavy again."""
        return self.take(self.traced.partition("min_cut").plan)

    def for_flops(self, flops: int) -> Taken:
        """The plan of fewest bytes whose recomputed products have at most so many flops."""
        return self.take(fewest_bytes(self.by_flops, PER_FLOP * flops))

    def for_number(self, products: int) -> Taken:
        """The plan of fewest bytes that computes at most so many products again."""
        return self.take(fewest_bytes(self.by_number, PER_PRODUCT * products))

    def for_bytes(self, bytes_saved: int) -> Taken:
        """The plan of fewest flops of recomputed products that saves at most so many bytes."""
        choice = polished(self.by_flops.front, bytes_saved, POLISH_SECONDS)
        assert choice is not None, "saving nothing at all is within every budget"
        return self.take(self.by_flops.plan(choice, "fewest flops"))

    def take(self, plan: Plan) -> Taken:
        """Emit a plan, make sure that it computes what the joint program does, and count."""
        if plan.values not in self.taken:
            cut = self.traced.partition(plan=plan)
            values = [*self.traced.consts, *jax.tree.leaves(self.arguments), *self.traced.call.ones()]
            verify_meaning(self.traced.joint, self.traced.graph, cut.split.halves, *values)
            halves = products_of(cut.forward) + products_of(cut.backward)
            self.taken[plan.values] = Taken.of(cut.split.residual_bytes, halves, self.joint)
        return self.taken[plan.values]


def fewest_bytes(planner: Planner, most_seconds: float) -> Plan:
    """The plan of fewest bytes among those of at most so many seconds; the fewest seconds fall as bytes rise."""
    front = planner.front
    limit = most_seconds * (1 + 1e-12)
    best = front.choices[-1]
    low, high = -1, best.bytes
    while high - low > 1:
        middle = (low + high) // 2
        found = None
        if front.bound_seconds(middle) <= limit:
            found = polished(front, middle, POLISH_SECONDS)
        if found is None or found.seconds > limit:
            low = middle
        else:
            best, high = found, found.bytes
    return planner.plan(best, "fewest bytes")


def products_of(closed: Any) -> Counter[Product]:
    """The products of a jaxpr, those inside its calls too."""
    found: Counter[Product] = Counter()
    levels = [jaxprs.opened(closed)[0]]
    while levels:
        for eqn in levels.pop().eqns:
            if eqn.primitive.name in PRODUCTS:
                found[product_of(eqn)] += 1
            levels.extend(jaxprs.inner_jaxprs(eqn))
    return found


def flops_of(products: Counter[Product]) -> int:
    """The flops of some products together."""
    return sum(flops * count for (_, _, flops), count in products.items())


def product_of(eqn: Any) -> Product:
    """One product, with its flops as PyTorch counts them: what a convolution does to its padding counts too."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval.shape
    lhs, rhs = (v.aval.shape for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    if name == "dot_general":
        met = math.prod(lhs[i] for i in numbers[0][0])
    else:
        met = math.prod(rhs) // rhs[numbers.rhs_spec[0]]
    return name, (lhs, rhs, out), 2 * math.prod(out) * met


# ------------------------------------------------------------------------------------------------------------- checks


def check_agreement(model: Model, drawn: dict[str, np.ndarray], batch: Batch) -> None:
    """Compare loss and gradients of the two frameworks, uncut and in float64.

    In float32 a ReLU's input that is zero but for its rounding sends a gradient on or not, as the framework rounds.
    """
    from benchmarks.pytorch_models import Module

    wide = {name: a.astype(np.float64) for name, a in drawn.items()}
    given, labels = (a.astype(np.float64) if a.dtype.kind == "f" else a for a in batch)
    with jax.enable_x64(True):
        ours, gradients = jax.device_get(jax.jit(jax.value_and_grad(model.jax_loss))(wide, given, labels))
    theirs, their_gradients = Module(model, wide).step((given, labels))
    compare_values("the loss", theirs, ours)
    for name, gradient in gradients.items():
        compare_values(f"the gradient of {name}", their_gradients[name], gradient)


def check_captures(captures: Sequence[Capture], ours: Ours) -> None:
    """Make sure that what was captured of PyTorch is the same program at every budget, and that of jointcut."""
    first = captures[0]
    ahead = sorted(flops for _, _, flops in ours.forward_products.elements())
    for made in captures:
        compare_values("the loss", made.loss, ours.loss)
        for name, gradient in made.gradients.items():
            compare_values(f"the gradient of {name} at another budget", gradient, first.gradients[name])
        if sorted(flops for _, _, flops in made.forward.elements()) != ahead:
            raise RuntimeError(f"PyTorch's forward has other products: {made.forward}; jointcut's: {ahead}")


def compare_values(what: str, theirs: Any, ours: Any) -> None:
    """Raise `RuntimeError` where two arrays differ by more than `RTOL` of their norm."""
    off = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
    if not off <= RTOL:
        raise RuntimeError(f"PyTorch and JAX differ in {what}: by {off:.2g} of its norm")


# -------------------------------------------------------------------------------------------------------------- tables


def table_of(outcome: Outcome) -> Table:
    """The rows of one network."""
    default = outcome.default
    caption = (
        f"forward: {outcome.forward_products} products, {outcome.forward_flops / GFLOP:.3f} GFLOP; "
        f"jointcut's default plan saves {default.bytes_saved / MB:.3f} MB and runs {default.products} products again"
    )
    table = Table(title=outcome.title, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left")
    for heading in ("torch's\nbudget", "torch\nsaved MB", "torch\nagain", "torch\nGFLOP", "jointcut\nsaved MB",
                    "jointcut\nagain", "jointcut\nGFLOP", "saved\n÷ torch", "no\nmore",
                    "same number\nsaved MB", "same bytes\nGFLOP"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in outcome.rows:
        theirs, ours = row.torch, row.jointcut
        ratio = f"{ours.bytes_saved / theirs.bytes_saved:.3f}" if theirs.bytes_saved else "-"
        table.add_row(
            f"{row.budget}", f"{theirs.bytes_saved / MB:.3f}", str(theirs.products), f"{theirs.flops / GFLOP:.4f}",
            f"{ours.bytes_saved / MB:.3f}", str(ours.products), f"{ours.flops / GFLOP:.4f}", ratio,
            "yes" if row.holds else "NO", f"{row.same_number.bytes_saved / MB:.3f}",
            f"{row.same_bytes.flops / GFLOP:.4f}",
        )  # fmt: skip
    return table


def summary(outcomes: Sequence[Outcome]) -> str:
    """In how many rows we save no more."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    hold = sum(row.holds for row in rows)
    return f"in {hold} of {len(rows)} rows jointcut saves no more bytes for no more recomputed products"


if __name__ == "__main__":
    main()
