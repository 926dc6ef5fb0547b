"""Build the documentation site: `python docs/build.py site`.

The sources of the pages are laid out in a folder that is gone afterwards: what `included` takes from the repository,
which is all that is written by hand, and what `pages` makes of the code. Sphinx's warnings are errors.
"""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from included import include
from pages import pages
from sphinx.cmd.build import main as sphinx_build

HERE = Path(__file__).resolve().parent
gc.set_threshold(1_000_000, 50, 50)  # Sphinx makes millions of nodes and keeps most; searches take a quarter of a build


def build(out: Path) -> int:
    """Write the site to the folder `out`, in place of what is there; returns Sphinx's exit code, 0 for success."""
    with TemporaryDirectory() as made:
        stage = Path(made, "pages")
        stage.mkdir()
        include(HERE.parent, stage)
        for name, text in pages().items():
            path = stage / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        site = Path(made, "site")  # myst-nb leaves a folder of its own beside it
        options = ["--quiet", "--fail-on-warning", "--keep-going", f"--conf-dir={HERE}", f"--doctree-dir={made}/trees"]
        code = sphinx_build(["--builder=html", *options, str(stage), str(site)])
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(site, out)
        return code


def is_free(out: Path) -> bool:
    """Whether a folder can be replaced: it is not there or empty, or Sphinx has written it."""
    return not out.exists() or (out / ".buildinfo").is_file() or (out.is_dir() and not any(out.iterdir()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python docs/build.py FOLDER")
    if not is_free(Path(sys.argv[1])):
        sys.exit(f"{sys.argv[1]} is no folder that this wrote. Give another, or remove it.")
    sys.exit(build(Path(sys.argv[1]).resolve()))
