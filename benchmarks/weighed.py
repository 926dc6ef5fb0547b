"""Weigh what the pages tell of memory: steps are compiled, nothing is timed, and the figures are stored.

    python -m benchmarks.weighed          # all parts: a few minutes on two cores
    python -m benchmarks.weighed step     # the demo's step, and how many bytes are alive at each moment of it
    python -m benchmarks.weighed sums     # gradients that are sums over layers
    python -m benchmarks.weighed waits    # what XLA on a CPU would run too early
    python -m benchmarks.weighed smaller  # residuals in smaller forms, and the error of the gradient
    python -m benchmarks.weighed spilled  # residuals in files

The figures go to `benchmarks/results/weighed.json`; `python -m benchmarks.written` puts them into the pages. A part
that is not named keeps the figures that it had.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import smaller, spilled, sums, waits
from benchmarks.alive import live_bytes
from benchmarks.demo import DEFAULT, LEAST, best_checkpoint, methods_shown
from benchmarks.measure import machine
from benchmarks.methods import PLAIN, Step
from benchmarks.programs import load
from jointcut.aot.report.liveness import Liveness

PATH = Path(__file__).parent / "results" / "weighed.json"
MOMENTS = 200  # of a step, in the picture


def main() -> None:
    """Weigh the parts asked for, and write them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weighed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all when none")
    named = parser.parse_args().parts
    if unknown := sorted(set(named) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in tqdm(named or list(PARTS), unit="part", disable=None):
        found = json.loads(PATH.read_text()) if PATH.exists() else {}
        found[name] = {"machine": machine(), "rows": list(PARTS[name]())}
        PATH.write_text(json.dumps(found, indent=1) + "\n")
    print(f"Written to {PATH}")


def _step() -> Iterator[dict[str, Any]]:
    """The demo's step in each way that the demo shows; the bytes alive over it, of those that are drawn."""
    program = load("gpt-scan")
    steps = {name: build(program) for name, build in methods_shown(program).items()}
    drawn = PLAIN, best_checkpoint({name: step.peak_bytes for name, step in steps.items()}), DEFAULT, LEAST
    for name, step in steps.items():
        sizes = {"activation_bytes": step.activation_bytes, "peak_bytes": step.peak_bytes, "dots": step.dots}
        yield {"way": name} | sizes | ({"alive": alive_in(step)} if name in drawn else {})


def alive_in(step: Step) -> list[int]:
    """The bytes of temporaries alive over a step: the most in each of so many stretches of equal length."""
    held = [found for program in step.programs if (found := Liveness.of(program)) is not None]
    live = np.asarray([step.residual_bytes + alive for found in held for alive in live_bytes(found)])
    edges = np.linspace(0, len(live), min(MOMENTS, len(live)) + 1).astype(int)
    return [int(live[start:end].max()) for start, end in pairwise(edges)]


def _rows(sizes: Mapping[str, Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    for program, ways in sizes.items():
        yield from ({"program": program, "way": way, "temp_bytes": size} for way, size in ways.items())


def _sums() -> Iterator[dict[str, Any]]:
    return _rows({name: sums.weighed(*build())[0] for name, build in sums.PROGRAMS.items()})


def _waits() -> Iterator[dict[str, Any]]:
    return _rows({name: waits.weighed(*build())[0] for name, build in waits.PROGRAMS.items()})


def _smaller() -> Iterator[dict[str, Any]]:
    for name in smaller.TRAINED:
        program = load(name)
        for form in smaller.FORMS:
            plain_bytes, kept_bytes, error = smaller.weighed(program, form)
            yield {"program": name, "form": form, "plain_bytes": plain_bytes, "bytes": kept_bytes, "error": error}


def _spilled() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for way, figures in spilled.both(spilled.SIZES, folder).items():
            yield {"way": way} | {name: figures[name] for name in ("peak_resident_bytes", "bytes_on_disk")}


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "step": _step,
    "sums": _sums,
    "waits": _waits,
    "smaller": _smaller,
    "spilled": _spilled,
}


if __name__ == "__main__":
    main()
