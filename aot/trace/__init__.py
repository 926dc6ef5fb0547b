"""Trace a function and its gradient, and describe their inputs and outputs.

`primal` traces the function alone, and `joint` the function with its gradient, each as one jaxpr, on shapes alone.
`analyse` finds the inputs that the function reads, writes and returns unchanged. `blame` puts the user's names, line
and argument into JAX's errors. Sizes may be symbols (`shapes`). Nothing is cut or compiled here.

Files, in reading order:

    shapes: Make arguments with symbolic sizes.
    formulas: Give a traced function the derivatives that conventions choose, without a change of its values.
    residuals: Take the pullback of `jax.vjp` apart, and put it together again.
    primal: Trace a flat function alone, and describe its results.
    joint: Trace the function and its gradient as one jaxpr.
    sparse_gradients: Split gradients of tables into the rows that were read, and their places.
    trees: Put flat results back into the caller's trees.
    analyse: Find the inputs that a traced function reads, writes and aliases.
    blame: Add the user's function, its arguments and a cure to JAX's errors.
    data: Hold the data of one traced call: its joint program, and the meaning of each flat position.
    differences: Say in words where one program first differs from another.
    escapes: Find traced values that a function stored outside itself.
    differentiated: Choose the leaves of a call that are differentiated.
    signature: Describe a pair by names and positions.
"""
