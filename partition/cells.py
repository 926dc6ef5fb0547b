"""Name the place of a call as its reader does: by file and line, or by the cell of a notebook.

A cell is a file to Python, whose name is made of the kernel's process and a hash; to the reader it is `In[3]`.
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
    """`In[3]` for the file of a cell that the running IPython knows, `cell` for another one's, empty for no cell's."""
    if "ipykernel_" not in file and not file.startswith("<ipython-input"):
        return ""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find else None
    found = shell.compile.format_code_name(file) if shell is not None else None
    return found[1] if found else "cell"
