"""Time export, load and the first step of a process, with the compiled cache and without.

    python -m benchmarks.artefacts                # gpt-scan, and an artefact of 10^4 equations
    python -m benchmarks.artefacts --rounds 3

Export is compared with one `jax.export` of plain JAX's step, for the same platforms. The first step is that of a fresh
process, from the call until its result is there: imports and data are ready before. Each way gets a process of its own
in every round, and the ways take turns: plain JAX, with JAX's persistent cache and without; jointcut, with its cache
and without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.measure import machine, wide_console
from benchmarks.methods import count_equations, forget
from benchmarks.programs import gpt, load
from benchmarks.scaling import DEPTHS
from jointcut import aot
from jointcut.aot.export.export import PLATFORMS

RESULTS = Path(__file__).parent / "results" / "artefacts.json"
WAYS = ("plain", "plain, JAX's cache", "jointcut", "jointcut, its cache")


def export_seconds(name: str, rounds: int) -> tuple[float, float]:
    """Medians: one `jax.export` of plain JAX's step, and our three programs with their contract."""
    plain, ours = [], []
    for _ in range(rounds):
        program = load(name)
        forget()
        start = time.perf_counter()
        step = jax.jit(jax.value_and_grad(program.loss))
        jax.export.export(step, platforms=PLATFORMS)(*program.arguments).serialize()
        plain.append(time.perf_counter() - start)
        forget()
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            aot.function(program.loss).export(f"{folder}/artefact", *program.arguments)
            ours.append(time.perf_counter() - start)
    return statistics.median(plain), statistics.median(ours)


def load_seconds(layers: int) -> dict[str, float]:
    """Load an artefact with many equations, and run it once."""
    program = gpt.of("large", gpt.Config(layers=layers, width=8, heads=2, context=8, scan=False), rows=1)
    function = aot.function(program.loss)
    with tempfile.TemporaryDirectory() as folder:
        path = function.export(f"{folder}/artefact", *program.arguments, platforms="cpu")
        size = sum(file.stat().st_size for file in path.iterdir())
        start = time.perf_counter()
        loaded = aot.load(path)
        middle = time.perf_counter()
        jax.block_until_ready(loaded.value_and_grad(*program.arguments))
        end = time.perf_counter()
    equations = count_equations(function.trace(*program.arguments).joint)
    return {"equations": equations, "bytes": size, "load_s": middle - start, "first_step_s": end - middle}


def first_step(way: str, name: str, folder: str) -> float:
    """Seconds of the first step in a process of its own."""
    environment = dict(os.environ)
    if way == "plain, JAX's cache":
        environment["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/jax"
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if way == "jointcut, its cache":
        environment["JOINTCUT_CACHE_DIR"] = f"{folder}/jointcut"
    command = [sys.executable, "-m", "benchmarks.artefacts", "--first-step", way.split(",")[0], name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def time_first_step(way: str, name: str) -> float:
    """As `first_step`, in this process."""
    program = load(name)
    jax.block_until_ready(jax.tree.map(jax.numpy.asarray, program.arguments))
    start = time.perf_counter()
    step = jax.jit(jax.value_and_grad(program.loss)) if way == "plain" else aot.function(program.loss).value_and_grad
    jax.block_until_ready(step(*program.arguments))
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each way (5)")
    parser.add_argument("--program", default="gpt-scan", help="of the suite (gpt-scan)")
    parser.add_argument("--first-step", nargs=2, metavar=("WAY", "PROGRAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_step:
        print(time_first_step(*options.first_step))
        return
    console, name = wide_console(120), options.program
    plain, ours = export_seconds(name, options.rounds)
    console.print(
        f"Export of {name} for {', '.join(PLATFORMS)}: {ours:.2f} s; "
        f"one jax.export of plain JAX's step: {plain:.2f} s; {ours / plain:.2f} of it (at most 3)"
    )
    large = load_seconds(DEPTHS[1])
    console.print(
        f"Artefact of {large['equations']:,} equations, {large['bytes'] / 1e6:.1f} MB: "
        f"loaded in {large['load_s']:.2f} s (at most 2); its first step, compiling, {large['first_step_s']:.1f} s"
    )
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            first_step(way, name, folder)  # fill the caches, and the file system's
        times = [{way: first_step(way, name, folder) for way in WAYS} for _ in range(options.rounds)]
    medians = {way: statistics.median(t[way] for t in times) for way in WAYS}
    console.print(f"First step of a process, {name}, median of {options.rounds}:")
    for way, seconds in medians.items():
        console.print(f"    {way:22} {seconds:6.2f} s")
    warm, cold = medians[WAYS[3]], medians[WAYS[2]]
    console.print(
        f"Warm over cold: {cold / warm:.1f} times faster (at least 5); over plain JAX with its own cache: "
        f"{medians[WAYS[1]] / warm:.2f} times (at least 1.5)"
    )
    record = {"machine": machine(), "program": name, "plain_export_s": plain, "export_s": ours, "first_step_s": medians}
    RESULTS.write_text(json.dumps(record | {"large": large}, indent=1) + "\n")


if __name__ == "__main__":
    main()
