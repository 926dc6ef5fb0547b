"""Execute the notebooks and write their outputs, or check that what is written is what a fresh run gives.

    python notebooks/make.py                  execute all, write each .ipynb anew
    python notebooks/make.py 00_from_scratch  only this one
    python notebooks/make.py --check          write nothing; end with 1 where a fresh run differs

The extras `notebooks` and `demo` bring what this needs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import notebooks

AS_WRITTEN = argparse.RawDescriptionHelpFormatter


def main() -> int:
    """Serve the command line, and return its exit status: 1 where a notebook is not as committed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AS_WRITTEN)
    parser.add_argument("names", nargs="*", metavar="NAME", help="without ending; all if none is named")
    parser.add_argument("--check", action="store_true", help="compare with a fresh run, write nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(notebooks.names())):
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(notebooks.names())}")
    results = [made(name, options.check) for name in options.names or notebooks.names()]
    return int(not all(results))


def made(name: str, check: bool) -> bool:
    """Execute one notebook, and write it or compare it; say whether it is as it should be."""
    start = time.perf_counter()
    fresh = notebooks.committed(notebooks.run(notebooks.FOLDER / f"{name}.py"))
    seconds = time.perf_counter() - start
    path = notebooks.FOLDER / f"{name}.ipynb"
    if not check:
        notebooks.write(fresh, path)
        print(f"{name}: written in {seconds:.1f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)
        return True
    there = path.exists()
    complaints = notebooks.differences(notebooks.read(path), fresh) if there else ["there is no .ipynb"]
    print(f"{name}: {'as committed' if not complaints else 'differs'}, {seconds:.1f} s", flush=True)
    for complaint in complaints:
        print(f"  {complaint}", flush=True)
    return not complaints


if __name__ == "__main__":
    sys.exit(main())
