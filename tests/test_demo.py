"""What the demo says of its table names the winners, whoever they are."""

from benchmarks.demo import best_checkpoint, verdict
from benchmarks.methods import Figures

SECONDS = {"trace_s": 0.0, "cut_s": 0.0, "lower_s": 0.0, "compile_s": 0.0}
CHECKPOINT = "checkpoint block: nothing"


def figures(**peaks):
    """A step for each way: its peak in MB, and its matrix products."""
    return {
        name: Figures(activation_bytes=0, peak_bytes=int(peak * 1e6), saved_bytes=0, dots=dots, **SECONDS)
        for name, (peak, dots) in peaks.items()
    }


def ways(ours, least):
    made = figures(plain=(160, 21), ours=ours, least=least, dots=(75, 21), nothing=(39, 26))
    names = ("plain", "jointcut", "jointcut, budget=0.0", "checkpoint block: dots", CHECKPOINT)
    return dict(zip(names, made.values(), strict=True))


def times(ours):
    return {
        "plain": 1.0,
        "jointcut": ours,
        "jointcut, budget=0.0": 0.86,
        "checkpoint block: dots": 0.9,
        CHECKPOINT: 0.75,
    }


def test_who_wins_is_told_with_the_reason():
    assert verdict(ways((70, 21), (32, 31)), times(0.72)) == [
        "Least memory: jointcut, budget=0.0 (32.0 MB, 0.86 of plain's time). "
        "Least time: jointcut (70.0 MB, 0.72 of plain's time). "
        "Beside them: checkpoint block: nothing (39.0 MB, 0.75 of plain's time).",
        "Why: what is computed again need not be kept. Of 21 matrix products are computed again: "
        "5 by checkpoint block: nothing; 0 by jointcut; 10 by jointcut, budget=0.0.",
    ]


def test_where_a_checkpoint_wins_it_is_told_as_well():
    told = verdict(ways((70, 21), (42, 31)), times(0.8))[0]
    assert told.startswith("Least memory: checkpoint block: nothing (39.0 MB, 0.75 of plain's time). Least time: chec")


def test_the_best_checkpoint_is_the_one_of_least_memory():
    assert best_checkpoint({"plain": 1, "checkpoint a": 3, "checkpoint b": 2}) == "checkpoint b"
