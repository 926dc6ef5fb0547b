"""Show what a partition keeps, what it computes again, and what less memory would cost.

Files, in reading order:

    wire: Read protocol buffers without their schema.
    frames: Read from a compiled program the Python calls that its instructions were traced in.
    instructions: Hold the instructions of a compiled program, and say which op of the user's each stands for.
    schedule: Read from a compiled program which values it holds at each instruction.
    held: Say what a compiled program holds at each step, in the words of whoever wrote the model.
    tried: Try smaller budgets, so that a report tells only those that hold.
    rows: List what is saved, what runs again, and what other budgets would cost.
    rivals: Say what a policy of `jax.checkpoint` would save of a program.
    sections: Put the rows of a report into the sections of a page.
    table: Write a report as a table of at most 100 columns.
    drawing: Draw the memory over a step with matplotlib.
    report: Tell the user what was saved, what is recomputed, and what it costs.
"""
