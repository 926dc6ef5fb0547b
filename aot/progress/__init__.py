"""Tell the user what runs, and for how long.

Work that takes seconds shows a line with its stage, in a terminal or a notebook, and takes it away at the end. Where
output goes to a file, a line is written now and then. `aot.progress(False)` turns it off. Other files write
`with Stage(...)`, and know nothing of screens.

Files, in reading order:

    screens: Draw one line in a terminal or in a notebook and take it away, or write it now and then elsewhere.
    progress: Tell the user which stage runs and how long it has run.
"""
