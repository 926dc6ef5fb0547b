"""Predict the memory of a schedule: count the bytes of both halves, without writing them.

Files, in reading order:

    levels: Count the bytes alive at every step of a program.
    regions: Count the rows of one region while a schedule is followed: rows of ops, whole loops and branches.
    counter: Count the rows of loops that run in segments or in parts, beside the rows of other steps.
    replay: Replay a schedule: count the bytes of both halves as one program, without writing them.
    lifetimes: Say when each buffer of a plan lives.
"""
