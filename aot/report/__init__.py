"""Show the values that a partition saves and recomputes, by XLA's own account, and the cost of less memory.

Files, in reading order:

    wire: Read protocol buffers without their schema.
    frames: Read the Python calls that traced the instructions of a compiled program.
    instructions: Hold the instructions of a compiled program, and find the user's op for each.
    liveness: Read from a compiled program the values that are alive at each instruction.
    held: List the arrays that a compiled program holds at each step, by the user's modules and source lines.
    tried: Try smaller budgets, so that a report lists only budgets that hold.
    lists: List the saved arrays, the ops that run again, and the cost of other budgets.
    rivals: Turn the policies of `jax.checkpoint` into plans, to compare with.
    sections: Put the rows of a report into the sections of a page.
    derived: Say where a derivative may differ from JAX's, and by which rule.
    gradient_error: Measure the bytes that smaller forms of saved values save, and the error of the gradients.
    tabular: Write a report as a table of at most 100 columns.
    compare: Compare two steps: what one takes more than the other, by scope, source line and array.
    report: Report the saved arrays, the recomputed ops, and the costs.
"""
