"""Hold the joint program: what there is before anything is decided.

A joint program comes in as a jaxpr. Here it becomes a `Graph` of ops and values, each with its place in the user's
source, and each op belongs to a side: forward, backward, or either. An op that holds a program has a `Body`, whatever
its kind. What is known of a primitive stands in one table (`primitives`). Only `jaxprs` knows JAX's insides; all other
files, in all folders, ask it.

Files, in reading order:

    cells: Name the place of a call as its reader does: by file and line, or by the cell of a notebook.
    notebook: Let a class show itself in a notebook, drawn by a file that comes after it.
    jaxprs: Borrow from JAX's internals here, and nowhere else.
    places: Say where an equation comes from, in the names that the user gave.
    sizes: Put numbers in the place of symbolic sizes.
    roles: Name what each input and output of the joint program stands for.
    primitives: Describe every primitive in one table.
    bodies: Describe an op that holds a program: its kind, and what its operands and results mean.
    graph: Hold the joint program as ops and values.
    sides: Mark the ops that must run forward, those that must run backward, and those that may do either.
    text: Print a graph as text, and read it back.
    outline: Arrange the ops of a graph in the scopes that the user sees.
"""
