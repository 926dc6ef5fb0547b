"""Trace a function and its gradient, and learn what goes in and out.

The function runs on shapes alone. `analyse` learns what it reads, writes and returns unchanged; `joint` traces it with
its gradient as one jaxpr. Errors of JAX are told in the user's names, with line and argument. Sizes may be symbols,
known later. Nothing is cut or compiled here.

Files, in reading order:

    shapes: Give arguments sizes that are known later.
    joint: Trace the function and its gradient as one jaxpr.
    trees: Put flat results back into the caller's trees.
    analyse: Run the function on shapes to learn what it reads, writes and aliases.
    blame: Say of JAX's errors whose function and argument they are about, and what helps.
    escapes: Find traced values that a function kept outside of itself.
    wanted: Say which leaves of a call are differentiated.
    signature: Describe a pair by names and positions.
"""
