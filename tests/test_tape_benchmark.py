"""`benchmarks/tape.py` counts captures and bytes, and tells which rows miss the mark."""

import itertools
import re

from benchmarks import tape
from benchmarks.measure import wide_console


def test_the_rows_of_an_update_say_what_one_jit_holds_and_what_can_be_saved():
    one, two = itertools.islice(tape.released(True), 2)
    assert (one[0], two[0]) == ("12 layers, SGD: one jit", "12 layers, SGD: two programs")
    assert re.fullmatch(r"0\.\d MiB, 0\.\d\d of the gradients in it, 0\.\d\d to save", one[1])
    assert re.fullmatch(r"\+0\.[789]\d of the gradients less", two[2])


def test_each_of_our_loops_is_captured_once():
    rows = list(tape.loops(True))
    assert [(row[0].split(",")[0], row[2].split(",")[0], row[3]) for row in rows] == [
        (f"aot.{name}", "1 captures", True) for name in ("while_loop", "fori_loop", "scan", "while_loop_stack_output")
    ]


def test_two_captures_serve_all_batch_sizes_and_ragged_sequences_few():
    rows = [*tape.sizes(True), *tape.ragged(True)]
    assert [(row[0], row[2].split(",")[0], row[3]) for row in rows] == [
        ("8 batch sizes", "2 captures", True),
        ("5 steps on sequences, a list of 4", "2 captures", True),
        ("5 steps on sequences, padded to the longest of 4", "2 captures", True),
    ]


def test_a_row_that_misses_is_red():
    console = wide_console(80)
    made = tape.table([("a", "1", "2", True), ("b", "1", "2", False)])
    with console.capture() as shown:
        console.print(made)
    assert [row.style for row in made.rows] == [None, "red"]
    assert ("reached" in shown.get(), "missed" in shown.get()) == (True, True)


def test_trees_are_told_apart_by_shape_alone():
    tree = ((1.0, 2.0), 3.0)
    assert tape.shape_of(tree) == ((0, 0), 0)
