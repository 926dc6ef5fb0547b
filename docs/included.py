"""Fit what was written for a code host into the site: the README, the guides, the changelog, the notebooks.

Links between files of the repository are pointed at the pages that show them; where the site has no such page, the
words stay and the link goes.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from pathlib import Path

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
# Files of the repository, and the pages that show them.
_PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "docs/tasks.py": "api/index.rst",
    "notebooks": "notebooks/index.md",
    "notebooks/README.md": "notebooks/index.md",
}
_TOCTREE = "\n```{{toctree}}\n:hidden:\n:titlesonly:\n\n{}\n```\n"


def include(root: Path, stage: Path) -> None:
    """Write all that is written by hand to the folder `stage`, where Sphinx reads it, with the pictures in it."""
    (stage / "notebooks").mkdir()
    found, guides = sorted((root / "notebooks").glob("*.ipynb")), sorted((root / "docs").glob("*.md"))
    pages = _PAGES | {f"notebooks/{path.name}": f"notebooks/{path.name}" for path in found}
    pages |= {f"docs/{path.name}": path.name for path in guides}
    by_hand = {"README.md": "overview.md", "CHANGELOG.md": "changelog.md"}
    for name, page in (by_hand | {f"docs/{path.name}": path.name for path in guides}).items():
        text = _fitted((root / name).read_text("utf-8"), posixpath.dirname(name), root, stage, pages, "")
        (stage / page).write_text(text, "utf-8")
    for path in found:
        read = json.loads(path.read_text("utf-8"))
        for cell in read["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = _fitted("".join(cell["source"]), "notebooks", root, stage, pages)
        (stage / "notebooks" / path.name).write_text(json.dumps(read), "utf-8")
    listed = _TOCTREE.format("\n".join(path.stem for path in found)) if found else ""
    about = _fitted((root / "notebooks/README.md").read_text("utf-8"), "notebooks", root, stage, pages)
    (stage / "notebooks/index.md").write_text(about + listed, "utf-8")


def _fitted(text: str, folder: str, root: Path, stage: Path, pages: dict[str, str], shown_in: str | None = None) -> str:
    """A Markdown text that lies in `folder`, with its links pointed at pages and its pictures copied."""
    _copy_pictures(text, folder, root, stage)
    text = relinked(text, folder, pages, shown_in)
    return re.sub(r'"(?:docs/)?static/', '"_static/', text)  # in HTML, where Sphinx looks at no path


def relinked(text: str, folder: str, pages: dict[str, str], shown_in: str | None = None) -> str:
    """Point the links of a Markdown text that lies in `folder` at pages, and undo those that lead nowhere.

    `pages` maps files of the repository to pages of the site. The text's own page lies in the folder `shown_in` of the
    site, if that is another.

    >>> pages = {"CHANGELOG.md": "changelog.md", "docs/loops.md": "loops.md"}
    >>> relinked("[a](../CHANGELOG.md), [b](https://b.org), [c](../aot/planning/budgets/fit.py)", "notebooks", pages)
    '[a](../changelog.md), [b](https://b.org), c'
    >>> relinked("[a](loops.md#branches)", "docs", pages, "")
    '[a](loops.md#branches)'
    """

    def replaced(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if mark or "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        file, hash_sign, place = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, file))
        if path not in pages:
            return label
        page = posixpath.relpath(pages[path], (folder if shown_in is None else shown_in) or ".")
        return f"[{label}]({page}{hash_sign}{place})"

    return _LINK.sub(replaced, text)


def _copy_pictures(text: str, folder: str, root: Path, stage: Path) -> None:
    """Copy the pictures of the repository that a text shows to the same places of the site's sources."""
    for mark, _, target in _LINK.findall(text):
        path = posixpath.normpath(posixpath.join(folder, target))
        if mark and "://" not in target and (root / path).is_file():
            (stage / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, stage / path)
