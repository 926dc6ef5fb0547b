"""Say the figures of README and docs, and lay out their tables: each follows from what is stored in `results/`.

The pages call these functions in comments, and `written` puts there what they say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks import mesh_figures
from benchmarks.methods import PLAIN
from benchmarks.report import Result, geometric_mean, result_of
from benchmarks.target_figures import DEFAULT, Outcome, Row, read_outcomes, time_ratio

RESULTS = Path(__file__).parent / "results"
BUDGETS, BENCH = "budgets-cpu-py3.11.7-jax0.10.2", "bench-cpu-py3.11.7-jax0.10.2"
H100, V5E = "targets-h100-jax0.10.2", "targets-v5e-4-jax0.10.2"
MIN_CUT, INSIDE = "jointcut min_cut", "jointcut min_cut in jax.jit"
#: The programs of the README's table: one of each kind.
FIRST = ("mlp", "gpt-scan", "vit", "resnet", "moe", "lstm", "ode", "flax-linen")
Rows = Sequence[Mapping[str, Any]]

#: The ways to take a step for a target beside plain JAX.
WAYS: dict[str, Callable[[Outcome], Row | None]] = {
    "default": lambda outcome: outcome.row(DEFAULT),
    "least": lambda outcome: outcome.least,
    "checkpoint": lambda outcome: outcome.best_placement,
}


@cache
def stored(name: str) -> Any:
    """What the file of a name in `results/` holds."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


# ---------------------------------------------------------------------------------------------------------- wording


def mb(size: float) -> str:
    """Bytes in megabytes, with two digits at least."""
    value = size / 1e6
    return f"{value:,.0f} MB" if value >= 20 else f"{value:.1f} MB"


def share(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}"


def span(values: Iterable[float]) -> str:
    """The least and the greatest of some ratios."""
    ordered = sorted(values)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are set to the right."""
    rules = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rules, *rows])


def bold(texts: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """The texts, bold where they say the same as that of the least value."""
    least = texts[min((v, i) for i, v in enumerate(values) if v is not None)[1]]
    return [f"**{text}**" if text == least else text for text in texts]


# ------------------------------------------------------------------------------------ the suite, under budgets and not


def programs() -> Rows:
    """The programs of the suite, as `benchmarks.budgets` stored them."""
    return stored(BUDGETS)["programs"]


def ways(program: Mapping[str, Any]) -> dict[str, tuple[float, float, str]]:
    """Peak and time over plain's, and the name: the default, `budget=0.0`, and the `jax.checkpoint` of least memory."""
    points = program["points"]
    best = min(program["rivals"], key=lambda rival: rival["peak_bytes"])
    of = {"default": points[0], "least": points[-1], "checkpoint": best}
    plain = program["plain_peak_bytes"]
    return {way: (found["peak_bytes"] / plain, found["time"], found.get("name", "")) for way, found in of.items()}


def mean(way: str, which: int) -> float:
    """The geometric mean over the suite of a way's peak (0) or time (1) over plain's."""
    return geometric_mean(ways(program)[way][which] for program in programs())


def compared(names: Sequence[str] | None) -> str:
    """Peak and time over plain's for each program: the default, the least memory, the best `jax.checkpoint`."""
    headings = ("program", "plain JAX's peak", "default", "`budget=0.0`", "best `jax.checkpoint`")
    rows = []
    for program in programs():
        if names is None or program["name"] in names:
            found = list(ways(program).values())
            peaks = bold([share(peak) for peak, _, _ in found], [peak for peak, _, _ in found])
            times = bold([share(time) for _, time, _ in found], [time for _, time, _ in found])
            cells = [f"{peak}, {time}" for peak, time in zip(peaks, times, strict=True)]
            where = f" ({found[-1][2].removeprefix('checkpoint ')})" if names is None else ""
            rows.append([program["name"], mb(program["plain_peak_bytes"]), *cells[:-1], cells[-1] + where])
    means = [[mean(way, which) for way in ("default", "least", "checkpoint")] for which in (0, 1)]
    peaks, times = (bold(list(map(share, values)), values) for values in means)
    rows.append(["*mean of all 21*", "", *(f"{peak}, {time}" for peak, time in zip(peaks, times, strict=True))])
    return table(headings, rows)


def wins(way: str, which: int) -> int:
    """For how many programs a way is the best of the three in memory (0) or time (1), as the table prints them."""
    found = [{name: share(figures[which]) for name, figures in ways(program).items()} for program in programs()]
    return sum(texts[way] == min(texts.values(), key=float) for texts in found)


def points() -> Rows:
    """The budgets that were put on the suite."""
    return [point for program in programs() for point in program["points"]]


def rivals() -> Rows:
    """The placements of `jax.checkpoint` that were tried on the suite."""
    return [rival for program in programs() for rival in program["rivals"]]


@cache
def benched(name: str) -> dict[str, Result]:
    """The programs of a run of `benchmarks.bench`."""
    return {program: result_of(program, record) for program, record in stored(name)["programs"].items()}


def bench(name: str) -> str:
    """The suite with the plain minimum cut, as `benchmarks.bench` stored it."""
    headings = (
        *("program", "plain peak MB", "ms", "again", "activations ÷", "peak ÷", "time ÷"),
        *("in jit: peak ÷", "time ÷", "`jax.checkpoint`, as fast: peak ÷, time ÷"),
    )
    whole, columns = benched(BENCH), _columns()
    rows = []
    for result in benched(name).values():
        plain, full = result.rows["plain"], whole[result.name]
        best = full.best_checkpoint()
        rival = "none" if best is None else f"{share(full.peak(best))}, {share(full.time(best))} ({best[11:]})"
        sizes = f"{plain.step.peak_bytes / 1e6:.0f}", f"{plain.timing.seconds.median * 1e3:.0f}"
        rows.append([result.name, *sizes, *(share(column(result)) for column in columns), rival])
    means = (share(geometric_mean(map(column, benched(name).values()))) for column in columns)
    return table(headings, [*rows, ["*geometric mean*", "", "", *means, ""]])


def _columns() -> list[Callable[[Result], float]]:
    return [
        lambda result: result.time("plain again"),
        *(partial(_of, what=what, way=MIN_CUT) for what in ("activations", "peak", "time")),
        *(partial(_of, what=what, way=INSIDE) for what in ("peak", "time")),
    ]


def _of(result: Result, what: str, way: str) -> float:
    return getattr(result, what)(way)


def bench_mean(name: str, what: str) -> str:
    """A geometric mean of a run of `benchmarks.bench`."""
    return share(geometric_mean(getattr(result, what)(MIN_CUT) for result in benched(name).values()))


def slowest() -> str:
    """The longest time over plain's of a run of `benchmarks.bench`, called and in the user's own jit."""
    return share(max(result.time(way) for result in benched(f"{BENCH}-jointcut").values() for way in (MIN_CUT, INSIDE)))


# -------------------------------------------------------------------------------------------------- single programs


def step(way: str) -> Mapping[str, Any]:
    """One way to take the demo's step; `checkpoint` is the one of least memory."""
    rows = stored("weighed")["step"]["rows"]
    found = [row for row in rows if row["way"] == way or (way == "checkpoint" and row["way"].startswith(way))]
    return min(found, key=lambda row: row["peak_bytes"])


def steps() -> str:
    """All ways to take the demo's step."""
    rows = stored("weighed")["step"]["rows"]
    peaks = bold([mb(row["peak_bytes"]) for row in rows], [row["peak_bytes"] for row in rows])
    lines = [[row["way"], mb(row["activation_bytes"]), peak, str(row["dots"])]
             for row, peak in zip(rows, peaks, strict=True)]  # fmt: skip
    return table(["", "activations", "peak", "matrix products"], lines)


def temporaries(part: str) -> str:
    """What `benchmarks.weighed` stored of a part: temporaries of each program, each way a column."""
    rows = stored("weighed")[part]["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    found = {(row["program"], row["way"]): row["temp_bytes"] for row in rows}
    out = []
    for program in dict.fromkeys(row["program"] for row in rows):
        sizes = [found.get((program, way)) for way in ways]
        out.append([program, *bold(["" if size is None else mb(size) for size in sizes], sizes)])
    return table(["", *ways], out)


def below_floor(*parts: str) -> str:
    """Steps whose rows run in blocks, with marks in brackets; of a budget that is refused the least that was found."""
    lines = []
    for row in stored("below-floor")["rows"]:
        if row["part"] in parts and not row["way"].endswith(" blocks"):
            marks = [f" ({limit:.3g})" if limit else "" for limit in (row["most"], row["most_time"])]
            time = "" if row["time"] is None else share(row["time"])
            least = "" if row["is_held"] else "refused, "
            cells = mb(row["temp_bytes"]), f"{least}{row['share']:.3f}{marks[0]}", time + marks[1] * bool(time)
            lines.append([row["case"], row["way"], *cells])
    return table(["", "step", "temporaries", "÷ plain's", "time ÷"], lines)


def blocks(what: str) -> str:
    """Sixty-four blocks over eight: the "equations" of a step, or the seconds of XLA, "compile_s"."""
    found = {(row["case"], row["way"]): row[what] for row in stored("below-floor")["rows"] if row["equations"]}
    return span(found[case, "64 blocks"] / found[case, "8 blocks"] for case, way in found if way == "8 blocks")


def forms() -> str:
    """Bytes kept and the error of the gradient, for each form of the residuals."""
    rows = stored("weighed")["smaller"]["rows"]
    cells = ((row["bytes"] / row["plain_bytes"], row["error"]) for row in rows)
    lines = [[f"{row['program']}, {row['form']}", share(part), f"{error:.1e}"]
             for row, (part, error) in zip(rows, cells, strict=True)]  # fmt: skip
    return table(["", "bytes kept ÷", "error of the gradient"], lines)


def spilled(way: str, what: str) -> str:
    """A figure of the step whose residuals wait in files, or of the one that keeps them in memory."""
    (row,) = (row for row in stored("weighed")["spilled"]["rows"] if row["way"] == way)
    return mb(row[what])


def loops(what: str) -> int:
    """In how many rows our loop takes more than Equinox's: `s`, `bytes` or `again`."""
    rows = stored("loops")["equinox"]["rows"]
    return sum((row[f"ours_{what}"] or 0) > (row[f"theirs_{what}"] or 0) for row in rows)


def meshes(program: str) -> str:
    """The peaks of a GPT's blocks on eight devices, over plain's."""
    return span(row["peak ÷"] for row in stored("home")["mesh"]["rows"] if row["program"] == program)


def laid_over(file: str) -> str:
    """Models laid over eight devices, as `benchmarks.mesh` stored them."""
    ways = ("in jit ÷", "called ÷", "collectives of plain JAX", "in jit", "called", "more is named")
    return table(("program, layers", "plain JAX", *ways), mesh_figures.cells(file))


def budgets_over_devices() -> str:
    """Budgets per device, as `benchmarks.mesh_budgets` stored them."""
    return table(("", "rows", "hold", "at the first plan", "÷ plain JAX"), mesh_figures.budgets())


def libraries(what: str, way: str = "") -> str:
    """Peaks or times over plain's of models in the idiom of their libraries, in the ways that hold a word."""
    return span(row[what] for row in stored("home")["libraries"]["rows"] if way in row["way"])


def examples() -> str:
    """Gradients of single examples, and of their mean, by plain JAX and cut."""
    rows = stored("home")["examples"]["rows"]
    lines = [[f"`{row['gradient']}`, {row['of']}", share(row["activations ÷"]), share(row["time ÷"])] for row in rows]
    return table(["", "activations ÷", "time ÷"], lines)


def outcomes(file: str, size: str) -> list[Outcome]:
    """What was measured for a target at one size of the programs."""
    found = read_outcomes(RESULTS / f"{file}.json").values()
    return [outcome for outcome in found if outcome.size == size and outcome.row(DEFAULT) is not None]


def on_target(file: str, size: str, names: Sequence[str] = ()) -> str:
    """The table of a target: temporaries and time of each way over plain JAX's, for the programs named, or all.

    The last line is of all programs. Times are XLA's cycles where it tells any, else those by the rates.
    """
    found = outcomes(file, size)
    counts = {way: sum(pick(outcome) is not None for outcome in found) for way, pick in WAYS.items()}
    ways, lines = [way for way in WAYS if counts[way]], []
    for outcome in [outcome for outcome in found if not names or outcome.name in names]:
        plain, rows = outcome.row(PLAIN), [WAYS[way](outcome) for way in ways]
        assert plain is not None, "a program with a default has a plain step"
        pairs = [row and (row.taken_bytes / plain.taken_bytes, time_of(row, plain)) for row in rows]
        lines.append((outcome.name, mb(plain.temp_bytes or 0), *paired(pairs)))
    whole = [way if counts[way] == len(found) else None for way in ways]
    means = [way and (target_mean(file, size, "memory", way), target_mean(file, size, "time", way)) for way in whole]
    lines.append((f"*mean of all {len(found)}*", "", *paired(means)))
    names_of = {"default": "default", "least": "`budget=0.0`", "checkpoint": "best `jax.checkpoint`"}
    return table(("program", "plain JAX", *(names_of[way] for way in ways)), lines)


def paired(pairs: Sequence[tuple[float, float] | None]) -> list[str]:
    """Cells of memory and time, empty where a way was not measured; the least of each is bold, if there are several."""
    memory, time = (["" if pair is None else share(pair[which]) for pair in pairs] for which in (0, 1))
    if sum(pair is not None for pair in pairs) > 1:
        memory, time = (
            bold(memory, [pair and pair[0] for pair in pairs]),
            bold(time, [pair and pair[1] for pair in pairs]),
        )
    return [f"{bytes_}, {seconds}" if bytes_ else "" for bytes_, seconds in zip(memory, time, strict=True)]


def leads(file: str, size: str, way: str) -> str:
    """For how many programs of a target a way takes the least memory of all, as the table prints it."""
    found = outcomes(file, size)
    sizes = [{name: row.taken_bytes for name in WAYS if (row := WAYS[name](outcome))} for outcome in found]
    plain = [row.taken_bytes for outcome in found if (row := outcome.row(PLAIN))]
    shares = [{name: share(size / of) for name, size in row.items()} for row, of in zip(sizes, plain, strict=True)]
    return f"{sum(row.get(way) == min(row.values(), key=float) for row in shares)} of {len(found)}"


def target_mean(file: str, size: str, what: str, way: str = "default") -> float:
    """The geometric mean of a way's "memory" or "time" over plain JAX's, over all programs of a target."""
    ratios = []
    for outcome in outcomes(file, size):
        row, plain = WAYS[way](outcome), outcome.row(PLAIN)
        if row is not None and plain is not None:
            ratios.append(row.taken_bytes / plain.taken_bytes if what == "memory" else time_of(row, plain))
    return geometric_mean(ratios)


def time_of(row: Row, plain: Row) -> float:
    """A step's time over plain's: XLA's cycles where it tells any, else by the rates."""
    return row.cycles / plain.cycles if row.cycles and plain.cycles else time_ratio(row, plain)


def matched(file: str, size: str) -> str:
    """How many placements of `jax.checkpoint` a plan matches in memory and time."""
    found = outcomes(file, size)
    count = sum(len(outcome.placements) for outcome in found)
    return f"{count - sum(len(outcome.unmatched) for outcome in found)} of {count}"


def on_gpu(what: str) -> list[float]:
    """Ratios of the suite on a GPU, by program."""
    rows = stored("device-h200-large")["programs"]
    over = {"default": "plain_bytes", "half": "plain_bytes", "predicted": "default_bytes"}[what]
    return [row[f"{what}_bytes"] / row[over] for row in rows if row[f"{what}_bytes"] is not None]


def timed_on_gpu(name: str) -> str:
    """Memory and time of a program on a GPU."""
    (row,) = (row for row in stored("device-h200-large-timed")["programs"] if row["name"] == name)
    plain, default = row["plain_bytes"], row["default_bytes"] / row["plain_bytes"]
    ratio = row["times"]["default"] / row["times"]["plain"]
    return f"{plain / 1e9:.0f} GB in plain JAX and {share(default)} of that by default, at {share(ratio)} of the time"


def without_device(which: str, version: str = "0.11.2") -> list[float]:
    """Temporaries over those by XLA's account without an H200, as a version of JAX makes it, by program.

    Those of a "device" that timed no kernels, of one that "timed" them, or without one but with all products by
    "libraries".
    """
    rows = [row for row in stored(f"account-h200-jax{version}")["programs"] if not row["failed"]]
    return [row[f"{which}_bytes"] / row["here_bytes"] for row in rows if row[f"{which}_bytes"] is not None]


def to_the_byte() -> int:
    """For how many programs an H200 took what the account without it says, to the byte."""
    return without_device("device").count(1.0)


def middle(name: str) -> str:
    """Between what shares of XLA's four of five predicted peaks lie."""
    rows = [row for rows in stored(name)["programs"].values() for row in rows]
    least, *_, most = quantiles([row["predicted"] / max(row["actual"], 1) for row in rows], n=10)
    return f"{least:.2f} to {most:.2f}"


def scaling(what: str) -> str:
    """Seconds for the largest of the graphs that `benchmarks.scaling` makes."""
    largest = stored(f"{BENCH}-jointcut")["scaling"][-1]
    return f"{largest[f'{what}_s']:.0f} s"


def calls(leaves: int) -> str:
    """Time of a call over that of `jax.jit`, decorated and compiled, for so many leaves."""
    (row,) = (row for row in stored(f"{BENCH}-jointcut")["calls"] if row["leaves"] == leaves)
    return span(row[f"{way}_us"] / row["jax_us"] for way in ("function", "compiled"))


def first_step(way: str) -> str:
    """Seconds of the first step of a process."""
    return f"{stored('artefacts')['first_step_s'][way]:.1f} s"


def ratchet(is_regression: bool, is_found: bool | None = None) -> int:
    """The number of changes that take more memory or none; with `is_found`, of those that the ratchet flags or not."""
    rows = [row for row in stored("ratchet")["changes"] if row["is_regression"] == is_regression]
    return sum(is_found is None or row["is_found"] == is_found for row in rows)
