"""Show what a partition keeps and computes again, by XLA's own account, and what less memory would cost.

Files, in reading order:

    wire: Read protocol buffers without their schema.
    frames: Read the Python calls in which the instructions of a compiled program were traced.
    instructions: Hold the instructions of a compiled program, and find the user's op for each.
    liveness: Read from a compiled program which values are alive at each instruction.
    held: List the arrays that a compiled program holds at each step, by the user's modules and source lines.
    tried: Try smaller budgets, so that a report lists only those that hold.
    lists: List what is saved, what runs again, and what other budgets would cost.
    rivals: Turn the policies of `jax.checkpoint` into plans, to compare with.
    sections: Put the rows of a report into the sections of a page.
    derived: Say where a derivative may differ from JAX's, and by which rule.
    inexact: Tell what the smaller forms of saved values do to gradients: bytes, and the error that was measured.
    table: Write a report as a table of at most 100 columns.
    drawing: Draw the memory over a step with matplotlib.
    report: Report what is saved, what is recomputed, and what it costs.
"""
