"""Kill the writers of a store again and again, and see that nothing it reported as written is lost or wrong.

    python -m benchmarks.storm                 # 200 rounds of 8 processes: a minute
    python -m benchmarks.storm --rounds 20

In a round, workers (`benchmarks/storm_worker.py`) open one folder and put and get entries, under keys that they share
and keys of their own; each is sent SIGKILL at a random moment. Five rounds make a siege, with a folder of its own, so
that the first steps in a folder are taken in a crowd as well. After each siege a new `Store` looks at what is left. In
every second siege the bound is so tight that all processes evict all the time; then entries may be missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import storm_worker
from benchmarks.storm_worker import author, is_payload, key_of
from jointcut.aot.cache.store import Store

PROCESSES = 8
ROUNDS_OF_A_SIEGE = 5
WIDE_BYTES, TIGHT_BYTES = 10 * 2**30, 1_500_000
EARLY = 3  # of the workers of a round, which are killed while they open the store, or soon after
EARLY_S, LATE_S = 0.012, 0.15  # the longest to a kill: from the start, and from when the late ones are open
OPENING_S = 30.0  # the longest that a worker may take to open the store
UNSEEN = "no folder is left to look at"


@dataclass
class Tally:
    """What was counted, and what should never be.

    Attributes:
        counts: rounds, killed workers, killed before the store was open, killed in a put, puts reported as written,
            hits, misses, keys reported (where the bound is wide), drafts that the killed left behind.
        faults: a line for each thing that should not be.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass
class Siege:
    """One folder, and what its workers wrote down, by worker."""

    folder: Path
    max_bytes: int
    notes: dict[str, list[list[str]]] = field(default_factory=dict)

    @property
    def is_tight(self) -> bool:
        """Whether entries may be evicted."""
        return self.max_bytes == TIGHT_BYTES


def main() -> None:
    """Storm, print, and fail if there is a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="of 8 workers each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of what is put (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = storm(Path(folder), options.rounds, options.seed)
    print(json.dumps(tally.counts, indent=1))
    print("\n".join(tally.faults) or "No faults.")
    sys.exit(bool(tally.faults))


def storm(folder: Path, rounds: int, seed: int = 0) -> Tally:
    """Run rounds below a folder, and judge after each siege, until there is a fault."""
    draw, tally = random.Random(seed), Tally()
    for siege_number, first in enumerate(range(0, rounds, ROUNDS_OF_A_SIEGE)):
        max_bytes = TIGHT_BYTES if siege_number % 2 else WIDE_BYTES
        siege = Siege(folder / f"siege-{siege_number}", max_bytes)
        for number in range(first, min(first + ROUNDS_OF_A_SIEGE, rounds)):
            if not tally.faults:
                run_round(siege, number, seed, draw, tally)
        judge(siege, tally)
        if tally.faults:
            break
    return tally


def run_round(siege: Siege, number: int, seed: int, draw: random.Random, tally: Tally) -> None:
    """Start the workers, kill each in its moment, and read what they wrote down."""
    names = [f"{seed}-{number}-{k}" for k in range(PROCESSES)]
    notes = siege.folder.with_name("notes")
    notes.mkdir(exist_ok=True)
    command = [sys.executable, "-I", "-S", storm_worker.__file__, siege.folder, str(siege.max_bytes), notes, *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None and starter.stdout is not None
        workers = [int(word) for word in starter.stdout.readline().split()]
        kill(workers[:EARLY], EARLY_S, draw)
        wait_until_open([notes / f"{name}.out" for name in names[EARLY:]], tally)
        kill(workers[EARLY:], LATE_S, draw)
        starter.stdin.close()
        codes = [int(word) for word in starter.stdout.readline().split()]
    for name, code in zip(names, codes, strict=True):
        if code != -signal.SIGKILL:
            tally.faults.append(f"worker {name} ended by itself")
        read_notes(siege, notes, name, tally)
    tally.counts["rounds"] += 1


def read_notes(siege: Siege, notes: Path, name: str, tally: Tally) -> None:
    """Read what a worker wrote down, if it lived to begin, and remove it."""
    out, err = notes / f"{name}.out", notes / f"{name}.err"
    if err.exists() and (complaint := err.read_text()):
        tally.faults.append(f"worker {name} complained: {complaint}")
    siege.notes[name] = [line.split() for line in out.read_text().splitlines()] if out.exists() else []
    count(siege.notes[name], tally)
    out.unlink(missing_ok=True)
    err.unlink(missing_ok=True)


def kill(workers: list[int], longest_s: float, draw: random.Random) -> None:
    """Kill each worker at a moment of its own. Its number is not another's yet: nobody has waited for it."""
    begin = time.monotonic()
    for moment, worker in sorted((draw.uniform(0, longest_s), worker) for worker in workers):
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        os.kill(worker, signal.SIGKILL)


def wait_until_open(outs: list[Path], tally: Tally) -> None:
    """Wait until all these workers have written something down."""
    end = time.monotonic() + OPENING_S
    while not all(out.exists() and out.stat().st_size for out in outs):
        if time.monotonic() > end:
            tally.faults.append("a worker has not opened the store")
            return
        time.sleep(0.005)


def count(notes: list[list[str]], tally: Tally) -> None:
    """Add up what one killed worker wrote down."""
    words = Counter(note[0] for note in notes)
    tally.counts["killed"] += 1
    tally.counts["killed before the store was open"] += not words["open"]
    tally.counts["killed in a put"] += words["begin"] - words["done"] - words["no"]
    tally.counts["puts reported as written"] += words["done"]
    tally.counts["hits"] += words["hit"]
    tally.counts["misses"] += words["miss"]
    for word in ("no", "wrong"):
        tally.faults += [" ".join(note) for note in notes if note[0] == word]


def judge(siege: Siege, tally: Tally) -> None:
    """Look at what a siege left, with a new store."""
    if not siege.folder.exists():
        tally.faults.append(UNSEEN)
        return
    tally.counts["drafts left by the killed"] += drafts(siege.folder)
    store = Store.at(siege.folder, siege.max_bytes)
    if left := drafts(siege.folder):
        tally.faults.append(f"{left} drafts are left after a sweep")
    begun = {(name, int(note[2]), note[1]) for name, note in noted(siege, "begin")}
    reported = {note[1] for _, note in noted(siege, "done")}
    tally.counts["keys reported"] += len(reported)
    for key in reported | {note[1] for _, note in noted(siege, "begin")}:
        found = store.get(key)
        if found is None and key in reported and not siege.is_tight:
            tally.faults.append(f"{key} was reported as written, and is lost")
        if found is not None and not (is_payload(key, found) and (*author(found), key) in begun):
            tally.faults.append(f"{key} holds what nobody put there")
    if not siege.is_tight:
        check_order(siege, store, tally)
    if not store.put(key_of("last"), b"last") or store.total_bytes > siege.max_bytes:
        tally.faults.append(f"{store.total_bytes} bytes after a last put")


def check_order(siege: Siege, store: Store, tally: Tally) -> None:
    """Where one worker alone puts, what is found is what it reported last, or what it was killed in after that."""
    for name, notes in siege.notes.items():
        for key in {key_of(f"{name} {k}") for k in range(storm_worker.OWN_KEYS)}:
            numbers = [int(note[2]) for note in notes if note[0] == "done" and note[1] == key]
            found = store.get(key)
            if numbers and found is not None and author(found)[1] < max(numbers):
                tally.faults.append(f"{key} was reported as written, and holds what was there before")


def noted(siege: Siege, word: str) -> Iterable[tuple[str, list[str]]]:
    """Worker and note, for each note that begins so."""
    return ((name, note) for name, notes in siege.notes.items() for note in notes if note[0] == word)


def drafts(folder: Path) -> int:
    """How many files are neither an entry nor the key nor the lock."""
    return sum(path.suffix != ".entry" and path.name not in ("key", "lock") for path in folder.iterdir())


if __name__ == "__main__":
    main()
