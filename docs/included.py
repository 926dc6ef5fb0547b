"""Fit what was written for a code host into the site: the README, the changelog, the notebooks.

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
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "notebooks": "notebooks/index.md",
    "notebooks/README.md": "notebooks/index.md",
}
_TOCTREE = "\n```{{toctree}}\n:hidden:\n:titlesonly:\n\n{}\n```\n"


def include(root: Path, stage: Path) -> None:
    """Write README, changelog and notebooks to the folder `stage`, where Sphinx reads them, with pictures they show."""
    (stage / "notebooks").mkdir()
    found = sorted((root / "notebooks").glob("*.ipynb"))
    pages = _PAGES | {f"notebooks/{path.name}": f"notebooks/{path.name}" for path in found}
    for name, page in (("README.md", "README.md"), ("CHANGELOG.md", "changelog.md")):
        (stage / page).write_text(_fitted((root / name).read_text("utf-8"), "", root, stage, pages), "utf-8")
    for path in found:
        read = json.loads(path.read_text("utf-8"))
        for cell in read["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = _fitted("".join(cell["source"]), "notebooks", root, stage, pages)
        (stage / "notebooks" / path.name).write_text(json.dumps(read), "utf-8")
    listed = _TOCTREE.format("\n".join(path.stem for path in found)) if found else ""
    about = _fitted((root / "notebooks/README.md").read_text("utf-8"), "notebooks", root, stage, pages)
    (stage / "notebooks/index.md").write_text(about + listed, "utf-8")


def _fitted(text: str, folder: str, root: Path, stage: Path, pages: dict[str, str]) -> str:
    """A Markdown text that lies in `folder`, with its links pointed at pages and its pictures copied."""
    _copy_pictures(text, folder, root, stage)
    return relinked(text, folder, pages).replace('"docs/static/', '"_static/')  # in HTML, where Sphinx looks at no path


def relinked(text: str, folder: str, pages: dict[str, str]) -> str:
    """Point the links of a Markdown text that lies in `folder` at pages, and undo those that lead nowhere.

    `pages` maps files of the repository to pages of the site.

    >>> pages = {"CHANGELOG.md": "changelog.md"}
    >>> relinked("[a](../CHANGELOG.md), [b](https://b.org), [c](../aot/fitting/fit.py)", "notebooks", pages)
    '[a](../changelog.md), [b](https://b.org), c'
    """

    def replaced(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if mark or "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
        return f"[{label}]({posixpath.relpath(pages[path], folder or '.')})" if path in pages else label

    return _LINK.sub(replaced, text)


def _copy_pictures(text: str, folder: str, root: Path, stage: Path) -> None:
    """Copy the pictures of the repository that a text shows to the same places of the site's sources."""
    for mark, _, target in _LINK.findall(text):
        path = posixpath.normpath(posixpath.join(folder, target))
        if mark and "://" not in target and (root / path).is_file():
            (stage / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, stage / path)
