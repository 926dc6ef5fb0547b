"""Every figure of README and docs is what the stored results say."""

import doctest

import pytest

from benchmarks import written


@pytest.mark.parametrize("path", written.written(), ids=lambda path: path.name)
def test_a_page_is_what_the_stored_results_say(path):
    assert path.read_text("utf-8") == written.written()[path], "run python -m benchmarks.written"


@pytest.mark.parametrize("path", written.PAGES, ids=lambda path: path.name)
def test_no_figure_stands_in_a_page_that_no_stored_result_gives(path):
    assert list(written.strays(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    ["takes 5 MB.", "in 3.2 s", "1,283 MB", "half at 40 %", "7 times as long", "0.51 of plain", "| a | 0.5 |", "12 ms"],
)
def test_a_figure_by_hand_is_found(text):
    assert len(list(written.strays(f"It {text} more"))) == 1


@pytest.mark.parametrize(
    "text",
    ["JAX 0.10.2 to 0.12", "Python 3.11 or later", "`5 MB`", "```python\nx = 0.5  # 3 MB\n```", "8 layers", "v2"],
)
def test_versions_code_and_counts_are_no_figures(text):
    assert list(written.strays(f"It has\n{text}\nmore")) == []


def test_a_line_must_not_start_with_a_figure():
    with pytest.raises(ValueError, match="a line starts with a figure, put a word in front of it: <!--=share"):
        written.filled("It takes\n<!--=share(0.5)-->0.5<!--/--> of it.")


def test_the_examples_of_the_command_run():
    assert doctest.testmod(written).failed == 0
