"""What smaller forms of residuals do: to the bytes between the halves, to gradients, and to losses over a hundred steps.

A part of `benchmarks.policies`, or alone:

    python -m benchmarks.smaller [--steps 100] [--small]

gpt-scan and the ResNet are cut with every float that is saved in one form, `policy={"*": aot.SAVE_AS(form)}`, and with
the same values as they are. The error of the gradient at the first step is the norm of the difference over the norm
(`Cut.check_forms`). Then both are trained: the greatest difference of two losses is relative to the loss.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.offloads import TRAINED, losses
from benchmarks.programs import Program, load
from jointcut import aot

#: The forms, each with the most of the bytes that it may keep and the greatest error that is asked of it; None: told.
FORMS: dict[str, tuple[float, float | None]] = {
    "bfloat16": (0.52, 1e-2),
    "int8": (0.28, None),
    "float8_e4m3fn": (0.28, None),
    "float8_e5m2": (0.28, None),
}


@dataclass(frozen=True)
class Smaller:
    """One program with its residuals in one form: bytes, and what is inexact."""

    name: str
    form: str
    plain_bytes: int
    bytes: int
    error: float
    steps: int
    loss_error: float

    @property
    def share(self) -> float:
        """The bytes as a share of those without the form."""
        return self.bytes / self.plain_bytes

    @property
    def is_held(self) -> bool:
        """Whether it keeps as few bytes, and is as exact, as is asked of its form."""
        share, error = FORMS[self.form]
        return self.share <= share and (error is None or max(self.error, self.loss_error) <= error)


def smaller(program: Program, steps: int) -> Iterator[Smaller]:
    """Train a program with its residuals as they are, then in each form."""
    options = {"has_aux": program.has_aux, "strategy": "min_cut"}
    want = list(losses(_cut(program, options).compile(2), program, steps))
    for form in FORMS:
        cut = _cut(program, {**options, "policy": {"*": aot.SAVE_AS(form)}})
        checked = cut.check_forms(*program.arguments)
        found = losses(cut.compile(2), program, steps)
        apart = max((abs(a - b) / abs(b) for a, b in zip(found, want, strict=True)), default=0.0)
        yield Smaller(program.name, form, checked.plain_bytes_saved, checked.bytes_saved, checked.error, steps, apart)


def _cut(program: Program, options: dict[str, object]) -> aot.Cut:
    return aot.function(program.loss, **options).trace(*program.arguments).partition()


def lines(rows: list[Smaller]) -> Iterator[str]:
    """The table."""
    yield f"{'residuals as':<24}{'MB':>9}{'of exact':>10}{'gradient error':>16}{'steps':>7}{'loss differs':>14}"
    for r in rows:
        figures = f"{r.bytes / 1e6:>9.3f}{r.share:>10.2f}{r.error:>16.1e}{r.steps:>7}{r.loss_error:>14.1e}"
        yield f"{r.name + ' ' + r.form:<24}{figures}{'' if r.is_held else '  missed'}"


def main() -> int:
    """Print the table; 1 if a form keeps more, or is less exact, than is asked of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--small", action="store_true", help="the small size instead of the tiny one")
    options = parser.parse_args()
    size = "small" if options.small else "tiny"
    rows = [row for name in TRAINED for row in smaller(load(name, size), options.steps)]
    print("\n".join(lines(rows)), flush=True)
    return int(not all(row.is_held for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
