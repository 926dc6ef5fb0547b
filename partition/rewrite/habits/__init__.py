"""Rewrite a half for a habit of the compiler, once it is written.

Files, in reading order:

    draws: Draw random numbers where they are used, not when the program starts.
    fills: Keep the zeros that a scatter adds to apart from the zeros that loops over elements read.
"""
