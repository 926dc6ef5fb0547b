"""Arrange the rows of a level as XLA:CPU runs them, to count what is alive.

XLA decides three things that a list of ops does not tell: what is written to memory, when, and into which buffer. The
rows are read into `instructions`: calls are opened, numbers and rows that an op repeats become arrays of their own,
equal instructions are one, and products get copies of operands in the order that they want. Reductions take what a
library of kernels can compute with them (`library`), loops over elements what is cheap to compute again (`fusion`).
What is left runs breadth first, and a buffer lies where XLA's assignment puts it (`sequence`). `arranged` puts these
together. All of it was read off compiled programs, with XLA's sources beside them (JAX 0.10).

Files, in reading order:

    late: Say what waits, and for what: stacks as `nesting.stacks` writes them, random numbers as `habits.draws` does.
    instructions: Hold what a level computes as XLA's instructions, one result each.
    layouts: Say which operands and results of products and convolutions are copied into another order.
    reading: Read the rows of a level as instructions.
    copies: Say where an op that overwrites its operand gets a copy of it.
    users: Hold who reads each instruction, in the order in which XLA lists them.
    library: Let reductions take what a library of kernels computes with them.
    fusion: Let loops over elements take what is cheap to compute again.
    sequence: Say in which order instructions run, and from when to when each buffer lives.
    arranged: Arrange a level: its rows as XLA:CPU runs them, with the buffers that it keeps.
"""
