"""Compare XLA's account of plain JAX's steps without a device with the account that a device gave.

    python -m benchmarks.account              # the suite at large sizes for an H200: half an hour
    python -m benchmarks.account vit mlp      # some programs; the figures of the others stay
    python -m benchmarks.account --libraries  # with all products by libraries, too

What the device gave is stored in `benchmarks/results/device-h200-large.json`, made there by `benchmarks.device` under
`--xla_gpu_autotune_level=0`, so that XLA timed no kernels, and for two programs in `device-h200-large-timed.json`, made
without that flag. Here each step is compiled as `aot.target("h200")` compiles it, in a process of its own, and nothing
runs. Versions of JAX differ: the device had the one that its file names.

Shares are bytes of temporaries over those without the device. Figures are added to
`benchmarks/results/account-TARGET-jaxVERSION.json` after each program.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from rich import box
from rich.table import Table
from tqdm import tqdm

from benchmarks.measure import machine, memory_of, wide_console
from benchmarks.programs import PROGRAMS, Program, load
from jointcut import aot
from jointcut.aot.run.compile import BY_LIBRARIES, compiled_unseen

RESULTS = Path(__file__).parent / "results"
SIZE = "large"
GB = 1e9


@dataclass(frozen=True)
class Compared:
    """Bytes of temporaries of plain JAX's step of one program; `failed` tells why there are none without the device.

    Attributes:
        name: of the program.
        device_bytes: on the device, which took kernels without timing them.
        timed_bytes: on the device, which timed kernels; None where that was not measured.
        here_bytes: without the device.
        libraries_bytes: without the device, where libraries make all products; None where that was not asked for.
        failed: the error.
    """

    name: str
    device_bytes: int
    timed_bytes: int | None
    here_bytes: int = 0
    libraries_bytes: int | None = None
    failed: str = ""

    @property
    def share(self) -> float:
        """What the device took, over the account without it."""
        return self.device_bytes / self.here_bytes

    @property
    def timed_share(self) -> float | None:
        """The same of a device that timed kernels."""
        return None if self.timed_bytes is None else self.timed_bytes / self.here_bytes

    @property
    def libraries_share(self) -> float | None:
        """The account with all products by libraries, over that with XLA's own kernels."""
        return None if self.libraries_bytes is None else self.libraries_bytes / self.here_bytes


def main() -> None:
    """Compare the programs asked for, print a table, and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.account", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="all that the device's file has when none")
    parser.add_argument("--target", default="h200", help="the device, of which a file is stored (%(default)s)")
    parser.add_argument("--libraries", action="store_true", help="weigh with all products by libraries, too")
    options = parser.parse_args()
    on_device, timed = (device_bytes(options.target, how) for how in ("", "-timed"))
    names = options.programs or [name for name in PROGRAMS if name in on_device]
    if unknown := sorted(set(names) - set(on_device)):
        parser.error(f"the device weighed no {', '.join(unknown)}; it weighed {', '.join(on_device)}")
    path = RESULTS / f"account-{options.target}-jax{jax.__version__}.json"
    found = read(path)
    for name in tqdm(names, unit="program", disable=None):
        sizes = alone(weigh, name, options.target, options.libraries)
        found[name] = Compared(name, on_device[name], timed.get(name), **sizes)
        write(path, options.target, [found[each] for each in PROGRAMS if each in found])
    wide_console(110).print(table_of(options.target, [found[name] for name in names]))


def device_bytes(target: str, how: str) -> dict[str, int]:
    """Temporaries of plain JAX's steps by program, as a device weighed them; none where no file is stored."""
    path = RESULTS / f"device-{target}-{SIZE}{how}.json"
    rows = json.loads(path.read_text("utf-8"))["programs"] if path.exists() else []
    return {row["name"]: row["plain_bytes"] for row in rows if not row["failed"]}


def alone(call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a call returns in a process of its own: a compiler that dies takes only that along."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        future = pool.submit(call, *arguments)
        error = future.exception()
        return future.result() if error is None else {"failed": f"{type(error).__name__}: {error}"[:300]}


def weigh(name: str, target: str, libraries: bool) -> dict[str, Any]:
    """Temporaries of plain JAX's step of a program, compiled for a device that is not here."""
    goal = aot.target(target)
    program, shapes = shaped(name)
    placed = jax.tree.map(goal.placed, shapes)
    lowered = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux)).lower(*placed)
    sizes: dict[str, Any] = {"here_bytes": memory_of(compiled_unseen(lowered)).temp}
    if libraries:
        sizes["libraries_bytes"] = memory_of(lowered.compile(compiler_options=BY_LIBRARIES)).temp
    return sizes


def shaped(name: str) -> tuple[Program, Any]:
    """A program, and the types of its arguments; these are made only where the program looks at them."""
    made: list[Program] = []

    def arguments() -> Any:
        made.append(load(name, SIZE))
        return made[-1].arguments

    try:
        types = jax.eval_shape(arguments)
    except jax.errors.TracerArrayConversionError:
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype), arguments())
    return made[-1], types


def read(path: Path) -> dict[str, Compared]:
    """What was compared before, by program."""
    rows = json.loads(path.read_text("utf-8"))["programs"] if path.exists() else []
    return {row["name"]: Compared(**row) for row in rows}


def write(path: Path, target: str, rows: Iterable[Compared]) -> None:
    """Write what was compared."""
    made = machine() | {"target": target, "size": SIZE, "jaxlib": jaxlib.__version__}
    text = json.dumps({"machine": made, "programs": [asdict(row) for row in rows]}, indent=1)
    path.write_text(text + "\n", "utf-8")


def table_of(target: str, rows: Sequence[Compared]) -> Table:
    """A line for each program, and the least and the greatest share."""
    title = (
        f"plain JAX's temporaries for {target}, JAX {jax.__version__}; shares are the device's over those without it"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for heading in ("program", "device GB", "without GB", "share", "timed", "by libraries"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for row in rows:
        if row.failed:
            table.add_row(row.name, f"{row.device_bytes / GB:.3f}", row.failed)
            continue
        shares = ("" if x is None else f"{x:.4f}" for x in (row.share, row.timed_share, row.libraries_share))
        table.add_row(row.name, f"{row.device_bytes / GB:.3f}", f"{row.here_bytes / GB:.3f}", *shares)
    if shares := [row.share for row in rows if not row.failed]:
        table.caption = f"{min(shares):.4f} to {max(shares):.4f} over {len(shares)} programs"
    return table


if __name__ == "__main__":
    main()
