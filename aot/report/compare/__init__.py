"""Compare two steps: what one takes more than the other, by scope, source line and array.

A `Snapshot` holds what is compared, and is written to JSON. Arrays are matched by what they are, since lines move from
one commit to the next.

Files, in reading order:

    exchanges: Read from a compiled program what its devices exchange, and for which lines of the user's.
    collectives: Compare what devices exchange in a step with plain JAX, and say what is more, and why.
    snapshot: Hold the figures and arrays of a step, to be compared with those of another.
    stored: Read a snapshot back from JSON, and refuse what is damaged.
    matching: Match the arrays of two steps by scope, op and type.
    files: Write a report to a file, in the format of its ending.
    diff: Say what a step takes more and less than another.
"""
