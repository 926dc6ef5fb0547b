"""Compare JAX's functions under each set of conventions with PyTorch: `python -m benchmarks.derivatives.agreement`.

The functions are those of `cases` that JAX has, at all their probes; PyTorch's gradients are the committed figures. The
first table has a row for each family: at how many probes the gradient is PyTorch's with JAX's derivatives, with
`"finite"`, and with `"pytorch"`. The second has a row for each choice: at how many of all probes it is, if that one is
taken and all others are those of `"pytorch"`. Then come the probes at which `"pytorch"` is not PyTorch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.derivatives.case import Case, Inputs, direction
from benchmarks.derivatives.cases import cases, families
from benchmarks.derivatives.compare import TOLERANCES, distance, finite
from benchmarks.derivatives.evaluate import smooth, theirs
from benchmarks.derivatives.figures import read
from benchmarks.measure import wide_console
from jointcut import aot
from jointcut.aot.options.conventions import CHOICES, NAMED
from jointcut.partition.program.jax import runtime

PYTORCH = NAMED["pytorch"]

_ENDS = "JAX takes the slope inside, 1, and PyTorch that outside, 0"

#: Why JAX's own functions differ from PyTorch's with all choices, where `Case.differs` says nothing of ours.
REASONS = {
    ("hard_tanh", "x=-1"): _ENDS,
    ("hard_tanh", "x=1"): _ENDS,
    ("leaky_relu", "x=0"): "JAX takes the slope of the positive side, and PyTorch that of the negative one",
    ("sign complex", "x=0+1j"): "JAX takes every sign as flat, and PyTorch turns that of a complex number",
    ("sinc", "x=1e-160"): "JAX divides by the square of x, which is 0; aot.derivatives.sinc has the limit",
}


@dataclass(frozen=True)
class Group:
    """A function of JAX's at points of equal shapes: the names and inputs of probes, and PyTorch's gradients there."""

    family: str
    case: Case
    names: tuple[str, ...]
    inputs: tuple[Inputs, ...]
    gradients: tuple[list[np.ndarray], ...]

    @property
    def function(self) -> Callable[..., Any]:
        """JAX's function."""
        function = theirs(self.case)
        assert function is not None
        return function

    def traced(self, conventions: aot.Conventions) -> aot.Traced:
        """The gradient of the results, each paired with the cotangent that PyTorch's had."""
        places = self.case.places(self.inputs[0])

        def loss(*inputs: Any) -> jax.Array:
            results = smooth(self.function, inputs, places)(*(inputs[n] for n in places))
            pairs = ((r, direction(np.zeros(r.shape, r.dtype), "cotangent", n)) for n, r in enumerate(results))
            return sum((jnp.sum((r * c).real) for r, c in pairs), jnp.zeros(()))

        return aot.function(loss, argnums=places, derivatives=conventions).trace(*self.inputs[0])

    def agreeing(self, conventions: aot.Conventions) -> list[bool]:
        """At which probes the gradient under these conventions is PyTorch's."""
        traced = self.traced(conventions)

        def gradient(*inputs: Any) -> list[Any]:
            return runtime.evaluate(traced.joint, *traced.consts, *inputs, *traced.call.ones())[1:]

        stacked = [np.stack(same) for same in zip(*self.inputs, strict=True)]
        found = [np.asarray(grad) for grad in jax.jit(jax.vmap(gradient))(*stacked)]
        tolerance = max(TOLERANCES[1], self.case.loose)
        rows = ([grad[row] for grad in found] for row in range(len(self.names)))
        return [distance(mine, given) <= tolerance for mine, given in zip(rows, self.gradients, strict=True)]

    @property
    def rules(self) -> frozenset[str]:
        """The choices that there are in the function."""
        every = aot.conventions(**{name: values[-1] for name, values in CHOICES.items()})
        return frozenset(change.rule for change in self.traced(every).program.changes)


def groups(family: str) -> list[Group]:
    """The probes of a family at which the values and gradients of PyTorch are finite."""
    figures = read(family)
    found: dict[Any, list[Any]] = {}
    for case in cases(family):
        for name, inputs in case.inputs(family, 0):
            figure = figures.get((case.name, name))
            if theirs(case) and figure and figure[1] and finite((*figure[0], *figure[1])):
                shapes = tuple((x.shape, x.dtype.str) for x in inputs)
                found.setdefault((case.name, shapes), []).append((case, name, inputs, figure[1]))
    made = []
    for rows in found.values():
        many, names, inputs, gradients = zip(*rows, strict=True)
        made.append(Group(family, many[0], names, inputs, gradients))
    return made


def main() -> None:
    """Print both tables and the probes that do not agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.derivatives.agreement", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of the cases; all when none")
    options = parser.parse_args()
    console = wide_console(120)
    with jax.enable_x64(True):
        chosen = [group for family in options.families or families() for group in groups(family)]
        by_set = {name: agreements(chosen, conventions, name) for name, conventions in NAMED.items()}
        console.print(by_family(chosen, by_set))
        console.print(by_choice(chosen, by_set["pytorch"]))
    for group, agrees in zip(chosen, by_set["pytorch"], strict=True):
        for name, is_equal in zip(group.names, agrees, strict=True):
            if not is_equal:
                reason = reason_of(group.case, name)
                console.print(f"{group.family}: {group.case.name} at {name} {reason}", markup=False, highlight=False)


def reason_of(case: Case, name: str) -> str:
    """Why the gradient at a probe is not PyTorch's; empty where nobody knows."""
    return case.differs.get(name) or REASONS.get((case.name, name), "")


def agreements(chosen: list[Group], conventions: aot.Conventions, name: str) -> list[list[bool]]:
    """For each function, at which probes the gradient is PyTorch's."""
    return [group.agreeing(conventions) for group in tqdm(chosen, desc=name, unit="function", disable=None)]


def by_family(chosen: list[Group], by_set: dict[str, list[list[bool]]]) -> Table:
    """A row for each family: probes, and at how many each set agrees."""
    table = Table(title="gradients of JAX's functions that are PyTorch's", box=box.SIMPLE_HEAD)
    for heading in ("family", "probes", *by_set):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    families_ = list(dict.fromkeys(group.family for group in chosen))
    for family in (*families_, "all"):
        places = [i for i, group in enumerate(chosen) if family in (group.family, "all")]
        counts = [sum(sum(agrees[i]) for i in places) for agrees in by_set.values()]
        table.add_row(family, str(sum(len(chosen[i].names) for i in places)), *map(str, counts))
    return table


def by_choice(chosen: list[Group], best: list[list[bool]]) -> Table:
    """A row for each choice: at how many probes it agrees, and at how many less or more than that of PyTorch."""
    table = Table(title='with one choice other than in "pytorch"', box=box.SIMPLE_HEAD)
    for heading in ("choice", "value", "functions", "agreeing", "lost", "gained"):
        table.add_column(heading, justify="left" if heading in ("choice", "value") else "right")
    rules = [group.rules for group in tqdm(chosen, desc="rules", unit="function", disable=None)]
    for name, values in CHOICES.items():
        places = [i for i, found in enumerate(rules) if name in found]
        for value in values:
            conventions = replace(PYTORCH, **{name: value})
            is_best = conventions == PYTORCH
            agrees = [best[i] if is_best else chosen[i].agreeing(conventions) for i in places]
            pairs = [pair for i, row in zip(places, agrees, strict=True) for pair in zip(best[i], row, strict=True)]
            lost, gained = (sum(pair == kind for pair in pairs) for kind in ((True, False), (False, True)))
            label = f"{value} (pytorch)" if is_best else value
            table.add_row(name, label, str(len(places)), str(sum(now for _, now in pairs)), str(lost), str(gained))
    return table


if __name__ == "__main__":
    main()
