"""Open ops with a program inside, such as `scan`, and write them again.

`read` makes the graph of a joint program. Where an op holds a program whose kind stands in `kinds`, it is opened: its
ops lie in regions of the graph, and forward loops are joined with the backward loops that read their stacks. A kind is
one file, today `scans`, which reads an equation as an `Inside` and writes one like it. A program of no kind stays
closed, as one op. For a new kind write a file, and a line in `kinds`.

Files, in reading order:

    scans: Read a scan and write one: whole, or in segments, forward and again in the backward.
    kinds: List the kinds of ops whose program can be opened, by the names of their primitives.
    taken: Find the slices that a loop takes of a stack which it carries, and writes slice by slice.
    read: Read a joint jaxpr into a graph, with each forward loop joined to the loops that read it.
    stacks: Make the stacks of a backward's loops when the loop runs, not when the program starts.
    slots: Lay what the branches of a conditional keep in slots that they share, since only one branch runs.
"""
