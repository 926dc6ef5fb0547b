"""Damage artefacts in every way, and see that each is refused or proves equal.

    python -m benchmarks.mutants                        # 10,000 mutants: a quarter of an hour
    python -m benchmarks.mutants --count 500 --seed 7

A mutant is an artefact with one wound (`wounds`): bits flipped, bytes cut off or added, files exchanged, a value of
signature.json changed. A child process loads each mutant and calls it in every way; what it then opens
outside of the folder, or starts, is noted. When a child dies or hangs, the mutant it was at is to blame, and the next
child goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.wounds import Files, mutant
from jointcut import aot
from jointcut.partition.errors import JointcutError

ROOT = Path(__file__).parent.parent
BATCH = 500
LONGEST_S = 900.0  # that a child may take for its batch
GOOD = ("equal", "refused by ")
X = np.float32([0.3, -0.2, 0.7])


class Row(NamedTuple):
    """What became of one mutant."""

    index: int
    wound: str
    outcome: str

    @property
    def is_good(self) -> bool:
        """Whether it was refused with an error of ours, or answered as the artefact that it was made from."""
        return self.outcome.startswith(GOOD)


# ------------------------------------------------------------------------------------------------- the artefacts


@jax.tree_util.register_pytree_with_keys_class
class Result:
    """A class of a user's, at hand where mutants are loaded."""

    def __init__(self, loss: Any, parts: Any) -> None:
        """The loss, and what it was made of."""
        self.loss, self.parts = loss, parts

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Both fields, by name."""
        named = (("loss", self.loss), ("parts", self.parts))
        return [(jax.tree_util.GetAttrKey(name), value) for name, value in named], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Result:
        """The object again."""
        del aux
        return cls(*children)


def trained(weights: Any, x: Any, power: int, *, shift: Any) -> Any:
    """A loss with aux, a constant, a static argument and an argument by name."""
    hidden = jnp.tanh(x * weights["w"] + shift) @ jnp.asarray(np.eye(3, dtype=np.float32) * 1.5)
    return jnp.sum(hidden**power) * weights["b"], {"hidden": [hidden, x], "none": None}


def pulled_back(layers: Any, places: Any) -> Any:
    """A tree of results of a class, a scan, and integers."""
    last, seen = jax.lax.scan(lambda h, w: (jnp.sin(h * w), h), jnp.ones(3), layers)
    return Result(jnp.sum(last), {"seen": seen[places], "count": places + 1})


ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "trained": (({"w": X, "b": 0.5}, X + 1, 3), {"shift": np.float32(0.1)}),
    "pulled_back": ((np.float32(np.outer(X, X)), np.array([2, 0], np.int32)), {}),
    "inference": ((X,), {}),
}


def write(folder: Path) -> None:
    """Export what mutants are made from."""
    made = {
        "trained": aot.function(trained, has_aux=True, static_argnums=2),
        "pulled_back": aot.function(pulled_back),
        "inference": aot.function(lambda x: {"twice": 2 * x}, argnums=()),
    }
    for name, function in made.items():
        args, kwargs = ARGUMENTS[name]
        function.export(folder / name, *args, platforms=("cpu", "tpu"), **kwargs)


def answers(loaded: Any, name: str) -> list[np.ndarray]:
    """Everything that a loaded pair answers, flat."""
    args, kwargs = ARGUMENTS[name]
    found = [loaded(*args, **kwargs)]
    if name == "trained":
        found.append(loaded.value_and_grad(*args, **kwargs))
    if name == "pulled_back":
        out, pullback = loaded.vjp(*args, **kwargs)
        found.append(pullback(jax.tree.map(jnp.ones_like, out)))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found) if leaf.dtype != jax.dtypes.float0]


# ---------------------------------------------------------------------------------------------------- the child


def judge(bases: Path, seed: int, start: int, stop: int) -> None:
    """Load and call mutants, and print a line of JSON for each."""
    jax.config.update("jax_disable_most_optimizations", True)
    originals = {name: _files(bases / name) for name in ARGUMENTS}
    wanted = {name: answers(aot.load(bases / name), name) for name in ARGUMENTS}
    seen = _watched()
    for index in range(start, stop):
        name, wound, files = mutant(originals, seed, index)
        with tempfile.TemporaryDirectory() as held:
            folder = Path(held) / "artefact"
            _put(folder, files)
            seen[:] = [held]
            outcome = _outcome(folder, name, wanted[name])
            outside = seen[1:]
        print(json.dumps([index, wound, f"touched {outside[0]}" if outside else outcome]), flush=True)


def _outcome(folder: Path, name: str, wanted: list[np.ndarray]) -> str:
    try:
        got = answers(aot.load(folder), name)
    except JointcutError as error:
        frame = [f for f in traceback.extract_tb(error.__traceback__) if "/aot/" in f.filename][-1]
        return f"refused by {Path(frame.filename).stem}.{frame.name.strip('_')}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no error of ours, and that is the finding
        return f"raised {type(error).__name__}: {error}"[:300]
    same = len(got) == len(wanted) and all(
        a.shape == b.shape and a.dtype == b.dtype and np.allclose(a, b, rtol=1e-6, atol=1e-7)
        for a, b in zip(got, wanted, strict=True)
    )
    return "equal" if same else "WRONG"


def _watched() -> list[str]:
    """Note what is started, and what is opened outside of the folder named first; Python's own files are let pass."""
    seen = ["/"]
    known = (sys.prefix, sys.base_prefix, str(ROOT), "/proc/", "/sys/", "/dev/")
    starting = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class")

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in starting:
            seen.append(f"{event} {args}")
        elif event == "open" and isinstance(args[0], str | bytes):
            path = str(Path(os.fsdecode(args[0])).absolute())
            if not path.startswith((seen[0], *known)):
                seen.append(path)

    sys.addaudithook(note)
    return seen


def _files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _put(folder: Path, files: Files) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


# --------------------------------------------------------------------------------------------------- the parent


def run(count: int, seed: int = 0, batch: int = BATCH) -> Iterator[Row]:
    """What became of each mutant; a child that died or hung is told as the outcome of the mutant it was at."""
    with tempfile.TemporaryDirectory() as held:
        _child("write", held).check_returncode()
        start = 0
        while start < count:
            stop = min(start + batch, count)
            done = _child("judge", held, seed, start, stop)
            rows = [Row(*json.loads(line)) for line in done.stdout.splitlines()]
            yield from rows
            start += len(rows)
            if start < stop:
                told = done.stderr.strip().splitlines()[-1:] or [""]
                yield Row(start, "?", f"CRASHED the interpreter ({done.returncode}): {told[0]}"[:300])
                start += 1


def _child(what: str, folder: str, *rest: int) -> subprocess.CompletedProcess[str]:
    numbers = ", ".join(map(str, rest))
    code = f"from pathlib import Path; from benchmarks import mutants; mutants.{what}(Path({folder!r}), {numbers})"
    try:
        ours = os.environ | {"JOINTCUT_TRACEBACK": "full"}  # an outcome tells our frame
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=ours,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        text = out.decode() if isinstance(out, bytes) else out
        whole = text[: text.rfind("\n") + 1]
        return subprocess.CompletedProcess(error.cmd, -1, whole, "it hung")


def table(rows: list[Row]) -> str:
    """What was done, and what happened: one line for each pair, the most frequent first."""
    counts = Counter((row.wound, row.outcome) for row in rows)
    width = max(len(wound) for wound, _ in counts)
    lines = [f"{wound:<{width}}  {n:>6,}  {outcome}" for (wound, outcome), n in sorted(counts.items())]
    good = Counter(row.outcome.split(" ")[0] for row in rows)
    return "\n".join([*lines, "", ", ".join(f"{n:,} {what}" for what, n in good.most_common())])


def main() -> None:
    """Print the table; the exit status is 1 where a mutant was neither refused nor equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for row in run(options.count, options.seed):
        rows.append(row)
        if not row.is_good:
            print(f"mutant {row.index} ({row.wound}): {row.outcome}", flush=True)
    print(table(rows))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
