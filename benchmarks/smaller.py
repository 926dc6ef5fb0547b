"""What smaller forms of residuals do: to bytes, to gradients, and to the losses of a training.

A part of `benchmarks.policies`, or alone:

    python -m benchmarks.smaller [--steps 100] [--tiny]

gpt-scan and the ResNet are cut at their small size with every float that is saved in one form, `policy={"*":
aot.SAVE_AS(form)}`, and with the same values as they are. The error of the gradient at the first step is the norm of
the difference over the norm (`Cut.check_forms`). Then both are trained at their tiny size: the greatest difference of
two losses is relative to the loss.

The ResNet pools maxima. Of rounded numbers that are equal another one would get the cotangent, and the gradient in
bfloat16 would be off by three hundredths. So its backward reads which element was chosen, one byte for a window.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.offloads import TRAINED, losses
from benchmarks.programs import Program, Size, load
from jointcut import aot

#: The forms, each with the most of the bytes that it may keep.
FORMS = {"bfloat16": 0.54, "int8": 0.29, "float8_e4m3fn": 0.29}

#: The greatest errors of gradients, and of losses over a hundred steps, by program and form.
STATED = {
    ("gpt-scan", "bfloat16"): (1e-2, 1e-3),
    ("gpt-scan", "int8"): (5e-2, 1e-2),
    ("gpt-scan", "float8_e4m3fn"): (0.1, 1e-2),
    ("resnet", "bfloat16"): (1e-2, 5e-2),
    ("resnet", "int8"): (0.2, 5e-2),
    ("resnet", "float8_e4m3fn"): (0.2, 5e-2),
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
        """Whether it keeps as few bytes, and is as exact, as is stated."""
        gradients, of_losses = STATED[self.name, self.form]
        return self.share <= FORMS[self.form] and self.error <= gradients and self.loss_error <= of_losses


def smaller(name: str, size: Size, steps: int) -> Iterator[Smaller]:
    """Measure a program in each form, and train it at its tiny size."""
    measured, trained = load(name, size), load(name, "tiny")
    want = list(losses(_cut(trained, None).compile(2), trained, steps))
    for form in FORMS:
        found = losses(_cut(trained, form).compile(2), trained, steps)
        apart = max((abs(a - b) / abs(b) for a, b in zip(found, want, strict=True)), default=0.0)
        yield Smaller(name, form, *weighed(measured, form), steps, apart)


def weighed(program: Program, form: str) -> tuple[int, int, float]:
    """The bytes that a program keeps without a form and in it, and the error of its gradient."""
    checked = _cut(program, form).check_forms(*program.arguments)
    return checked.plain_bytes_saved, checked.bytes_saved, checked.error


def _cut(program: Program, form: str | None) -> aot.Cut:
    policy = None if form is None else {"*": aot.SAVE_AS(form)}
    function = aot.function(program.loss, has_aux=program.has_aux, strategy="min_cut", policy=policy)
    return function.trace(*program.arguments).partition()


def lines(rows: list[Smaller]) -> Iterator[str]:
    """The table."""
    yield f"{'residuals as':<24}{'MB':>9}{'of exact':>10}{'gradient error':>16}{'steps':>7}{'losses differ':>15}"
    for r in rows:
        figures = f"{r.bytes / 1e6:>9.3f}{r.share:>10.2f}{r.error:>16.1e}{r.steps:>7}{r.loss_error:>15.1e}"
        yield f"{r.name + ' ' + r.form:<24}{figures}{'' if r.is_held else '  not as stated'}"


def main() -> int:
    """Print the table; 1 if a form keeps more, or is less exact, than is stated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tiny", action="store_true", help="the tiny size for bytes and gradients, too")
    options = parser.parse_args()
    size: Size = "tiny" if options.tiny else "small"
    rows = [row for name in TRAINED for row in smaller(name, size, options.steps)]
    print("\n".join(lines(rows)), flush=True)
    return int(not all(row.is_held for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
