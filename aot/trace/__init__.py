"""Trace a function and its gradient, and describe their inputs and outputs.

`joint` traces the function with its gradient as one jaxpr, on shapes alone. `analyse` finds what it reads, writes and
returns unchanged. `blame` puts the user's names, line and argument into JAX's errors. Sizes may be symbols (`shapes`).
Nothing is cut or compiled here.

Files, in reading order:

    shapes: Make arguments with symbolic sizes.
    formulas: Give a traced function the derivatives that conventions choose, without a change of its values.
    residuals: Take the pullback of `jax.vjp` apart, and put it together again.
    joint: Trace the function and its gradient as one jaxpr.
    rows: Split gradients of tables into the rows that were read, and their places.
    trees: Put flat results back into the caller's trees.
    analyse: Find what a traced function reads, writes and aliases.
    blame: Add the user's function, its arguments and a cure to JAX's errors.
    escapes: Find traced values that a function stored outside itself.
    wanted: Choose the leaves of a call that are differentiated.
    signature: Describe a pair by names and positions.
"""
