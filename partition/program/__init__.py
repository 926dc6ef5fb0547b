"""Hold the joint program, before anything is decided.

A joint program comes in as a jaxpr. Here it becomes a `Graph` of ops and values. Each op has a place in the user's
source, and belongs to a side: forward, backward, or either. An op that holds a program has a `Body`, whatever its kind.
Facts of primitives stand in one table (`primitives`), rules for their axes in another (`ties`). Only `jax` knows JAX's
insides; all other files, in all folders, ask it.

Files, in reading order:

    cells: Name the place of a call as its reader does: by file and line, or by the cell of a notebook.
    notebook: Let a class show itself in a notebook, drawn by a file that comes after it.
    jax: Borrow from JAX's internals here, and nowhere else.
    places: Say where an equation comes from, in the names that the user gave.
    sizes: Put numbers in the place of symbolic sizes.
    roles: Name what each input and output of the joint program stands for.
    primitives: Describe every primitive in one table.
    bodies: Describe an op that holds a program: its kind, and what its operands and results mean.
    graph: Hold the joint program as ops and values.
    sides: Mark the ops that must run forward, the ops that must run backward, and the ops that may do either.
    ties: Say along which axes an equation treats each row alone.
    axes: Follow rows through a program: find the axis along which each value keeps the rows of the inputs apart.
    text: Print a graph as text, and read it back.
    outline: Arrange the ops of a graph in the scopes that the user sees.
"""
