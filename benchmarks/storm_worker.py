"""Put and get entries of a store until killed, and write down what the store said.

    python -I -S benchmarks/storm_worker.py FOLDER MAX_BYTES NOTES NAME...

The workers of one round of `benchmarks/storm.py`: one for each name, forked from a process that has loaded the store
alone, without JAX, whose import would take longer than the round. It prints their process numbers, and when its
standard input ends, their exit codes. A worker writes to NOTES/NAME.out, each line whole before the next step:

    open                 the store is open
    begin KEY NUMBER     now puts its payload NUMBER
    done KEY NUMBER      ... which the store reported as written
    no KEY NUMBER        ... which the store declined
    hit KEY, miss KEY    what a get returned
    wrong KEY            a get returned what nobody put there
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
SHARED_KEYS, OWN_KEYS = 6, 3
PIECE_BYTES = 997
COPIES = (1, 2, 16, 64, 1024)  # of a piece, in a payload: the largest takes long enough to be killed in the middle


def main() -> None:
    """Start the workers, wait for the end of standard input, and say how they ended."""
    folder, max_bytes, notes, *names = sys.argv[1:]
    store, starter, workers = load_store(), os.getpid(), []
    for name in names:
        worker = os.fork()
        if worker == 0:
            redirect(Path(notes) / f"{name}.out", 1)
            redirect(Path(notes) / f"{name}.err", 2)
            work(store.Store.at(folder, int(max_bytes)), name, starter)
            return
        workers.append(worker)
    print(*workers, flush=True)
    sys.stdin.read()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)  # nothing happens to those that were killed before: they are waited for
    print(*(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers))


def redirect(path: Path, descriptor: int) -> None:
    """Let what is written to a descriptor go into a new file."""
    with path.open("wb") as file:
        os.dup2(file.fileno(), descriptor)


def work(store: Any, name: str, starter: int) -> None:
    """Put and get until killed, or until the process that started this one is gone."""
    say("open")
    draw, number = random.Random(name), 0
    keys = [key_of(f"shared {k}") for k in range(SHARED_KEYS)] + [key_of(f"{name} {k}") for k in range(OWN_KEYS)]
    while os.getppid() == starter:
        key = draw.choice(keys)
        if draw.random() < 0.5:
            found = store.get(key)
            say(f"{'miss' if found is None else 'hit' if is_payload(key, found) else 'wrong'} {key}")
        else:
            number += 1
            payload = payload_of(key, name, number, draw.choice(COPIES))
            say(f"begin {key} {number}")
            said = store.put(key, payload, label=f"payload {number} of worker {name}")
            say(f"{'done' if said else 'no'} {key} {number}")


def load_store() -> ModuleType:
    """`jointcut.aot.cache.store`, and what it imports of jointcut, without the folders they lie in."""
    for name in ("partition.errors", "wrappers.mark", "aot.cache.folder", "aot.cache.store"):
        spec = importlib.util.spec_from_file_location(f"jointcut.{name}", ROOT / (name.replace(".", "/") + ".py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["jointcut.aot.cache.store"]


def say(line: str) -> None:
    """Write a line in one stroke, which a kill cannot take back."""
    os.write(1, f"{line}\n".encode())


def key_of(text: str) -> str:
    """A key."""
    return hashlib.sha256(text.encode()).hexdigest()


def payload_of(key: str, name: str, number: int, copies: int) -> bytes:
    """What a worker puts: a line that says all of it, and bytes that follow from the line and the key."""
    line = f"{name} {number} {copies}\n".encode()
    return line + hashlib.shake_256(key.encode() + line).digest(PIECE_BYTES) * copies


def author(payload: bytes) -> tuple[str, int]:
    """The worker that put a payload, and which of its payloads it was."""
    name, number, _ = payload.partition(b"\n")[0].decode().split()
    return name, int(number)


def is_payload(key: str, payload: bytes) -> bool:
    """Whether some worker puts this under this key."""
    words = payload.partition(b"\n")[0].split()
    if len(words) != 3 or not (words[1] + words[2]).isdigit():
        return False
    name, number, copies = words[0].decode(errors="replace"), int(words[1]), int(words[2])
    return copies in COPIES and payload == payload_of(key, name, number, copies)


if __name__ == "__main__":
    main()
