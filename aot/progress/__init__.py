"""Show the user which stage runs, and for how long.

Work that takes seconds shows its stage on one line of a terminal or notebook, and removes the line at the end. If the
output is a file, a line is written every ten seconds. `aot.progress(False)` turns the display off. Other modules only
write `with Stage(...)`.

Files, in reading order:

    screens: Draw and remove one line of a terminal or notebook, or write lines to a file now and then.
    progress: Show the user which stage runs and how long it has run.
"""
