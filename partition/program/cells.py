"""Name the place of a call as its reader does: by file and line, or by the cell of a notebook.

To Python, a cell is a file named after the kernel's process and a hash. To the reader it is `In[3]`.
"""

from __future__ import annotations

import sys


def call_text(file: str, line: int, function: str) -> str:
    """A call as `file:line (function)`.

    >>> call_text("/home/me/train/model.py", 40, "loss")
    '/home/me/train/model.py:40 (loss)'
    """
    return f"{_cell(file) or file}:{line} ({function})"


def _cell(file: str) -> str:
    """Return `In[3]` for a cell that the running IPython knows, `cell` for any other cell, else an empty text."""
    if "ipykernel_" not in file and not file.startswith("<ipython-input"):
        return ""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find else None
    kind_and_name = shell.compile.format_code_name(file) if shell is not None else None
    return kind_and_name[1] if kind_and_name else "cell"
