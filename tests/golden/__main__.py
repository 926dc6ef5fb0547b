"""Make the digests anew, and print what changed: `make golden`, `make golden PROGRAMS="gpt lstm"`."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

os.environ["JOINTCUT_RATES"] = str(Path(__file__).parents[1] / "rates.json")
os.environ["JOINTCUT_PROGRESS"] = "0"

import jax

import golden


def main(words: list[str]) -> int:
    """Print each digest that changed; without words write all of them."""
    if jax.__version__ != golden.JAX_VERSION:
        print(f"Digests are of JAX {golden.JAX_VERSION}, and this is {jax.__version__}.")
        return 2
    names = golden.names(words)
    found: dict[str, golden.Text] = {}
    changed: list[str] = []
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, own in zip(names, pool.imap(golden.digests, names), strict=True):
            found |= own
            changed += (lines := golden.changes(name, own))
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
    gone = [] if words else [key for key in golden.kept() if key not in found]
    print(f"{len(found)} texts of {len(names)} programs: {len(changed) + len(gone)} changed")
    if not words:
        golden.keep(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
