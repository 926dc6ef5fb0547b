"""Open ops with a program inside, such as `scan`, and write them again.

`read` makes the graph of a joint program. An op that holds a program is opened if its kind is in `kinds`: its ops then
lie in regions of the graph, and forward loops are joined with the backward loops that read their stacks. A kind is one
file: `scans` reads an equation as an `Inside`, `branches` and `shards` read one as a `Once`, and each writes equations
like it. A program of no kind stays closed, as one op. For a new kind write a file, and a line in `kinds`.

Files, in reading order:

    scans: Read a scan and write one: whole, or in segments, forward and again in the backward.
    slots: Lay the values of a conditional's branches in slots that they share, since only one branch runs.
    branches: Read a conditional and write one; the values that its branches keep lie in slots that they share.
    shards: Read a `jax.shard_map` and write one: its program runs once on each device of a mesh.
    kinds: List the kinds of ops whose program can be opened, by the names of their primitives.
    collect: Collect the ops, values, regions and loops of a graph while a program is read.
    once: Open ops whose programs run at most once: a conditional or a `jax.shard_map`, and ops that undo it.
    read: Read a joint jaxpr into a graph, with each forward loop joined to the loops that read it.
    stacks: Make the stacks of a backward's loops when the loop runs, not when the program starts.
    checkpoints: Give the loops of a graph other numbers of checkpoints.
"""
