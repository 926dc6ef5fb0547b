"""Write the figures of README and docs, and the README's picture, from what is stored in `results/`.

    python -m benchmarks.written          # write them anew
    python -m benchmarks.written --check  # write nothing; end with 1 where a page is not as it should be

A page says where a figure stands and which one, in comments that no reader sees. What stands between them is written
here. The words of a comment are an expression of Python over the functions of `figures`:

    A step takes <!--=mb(step("plain")["peak_bytes"])-->160 MB<!--/--> of memory.

    <!--table compared(FIRST)-->

    | ... |

    <!--/table-->

No other figure may stand in a page: `strays` finds numbers with units, and decimals, outside of code and comments.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import figures
from benchmarks.curves import svg

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PICTURE = ROOT / "docs" / "static" / "memory.svg"

_FIGURE = re.compile(r"(<!--=(.+?)-->)(.*?)(<!--/-->)", re.DOTALL)
_TABLE = re.compile(r"(<!--table (.+?)-->\n\n)(.*?)(\n\n<!--/table-->)", re.DOTALL)
# At the start of a line a comment would end the paragraph that it stands in.
_AT_THE_START = re.compile(r"^<!--=.*", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`|^    .*?$|<!--.*?-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
_VERSION = re.compile(r"(?:JAX|jaxlib|Python|PyTorch|version)(?: up to)? \d[\d.]*(?: (?:to|or|and) \d[\d.]*)?")
_UNIT = r"(?:[kMGT]i?B|bytes|[mµn]?s|%|times|per cent|seconds?|minutes?|hours?)"
_MEASURED = re.compile(rf"(?<![\w.-])\d[\d,]*(?:\.\d+|(?:\.\d+)?\s?{_UNIT}(?!\w)).*")


def main() -> int:
    """Write the pages, or compare them; return the exit status."""
    opening = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.written", description=opening)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    is_right = True
    for path, text in written().items():
        complaints = list(strays(text)) if path.suffix == ".md" else []
        is_old = not path.exists() or path.read_text("utf-8") != text
        if is_old and not check:
            path.write_text(text, "utf-8")
        elif is_old:
            complaints.append("is not what the stored results say: run python -m benchmarks.written")
        for complaint in complaints:
            print(f"{path.relative_to(ROOT)}: {complaint}")
        is_right = is_right and not complaints
    return int(not is_right)


def written() -> dict[Path, str]:
    """The text of each page, and of the picture, as it should be."""
    alive = {row["way"]: row["alive"] for row in figures.stored("weighed")["step"]["rows"] if "alive" in row}
    return {path: filled(path.read_text("utf-8")) for path in PAGES} | {PICTURE: svg(alive)}


def filled(text: str) -> str:
    """A page with all its figures and tables written anew.

    >>> filled("It takes <!--=share(0.5)-->0.7<!--/--> of it.")
    'It takes <!--=share(0.5)-->0.50<!--/--> of it.'

    Raises `ValueError` where a line starts with a figure: in Markdown the paragraph would end there.
    """
    if found := _AT_THE_START.search(text):
        raise ValueError(f"a line starts with a figure, put a word in front of it: {found[0]}")
    for pattern in (_FIGURE, _TABLE):
        text = pattern.sub(lambda match: f"{match[1]}{eval(match[2], vars(figures))}{match[4]}", text)
    return text


def strays(text: str) -> Iterator[str]:
    """Each figure of a page that follows from nothing that is stored.

    >>> list(strays("On JAX 0.12 it takes `5 MB`, <!--=mb(1)-->1 MB<!--/-->, or 12 % more."))
    ['a figure that no stored result gives: 12 % more.']
    """
    for pattern in (_TABLE, _FIGURE, _CODE, _VERSION):
        text = pattern.sub("", text)
    yield from (f"a figure that no stored result gives: {found[0]}" for found in _MEASURED.finditer(text))


if __name__ == "__main__":
    sys.exit(main())
