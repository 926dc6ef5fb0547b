"""Read what a user may choose: a memory budget, and the options of `aot.function`.

Files, in reading order:

    limits: Read a memory budget.
    options: List every choice a user can make, with its default.
"""
