"""Read a user's choices: a memory budget, and the options of `aot.function`.

Files, in reading order:

    limits: Read a memory budget.
    conventions: Choose the derivative at points where a function has none, or several.
    scopes: Bound the bytes that a part of a program keeps for its backward.
    policies: Read a policy: a user's demands on single values, by names, scopes and primitives.
    compilers: Load XLA's compiler for a device that is not here, from the plugin by which JAX would run it.
    target: Name the device that a program is planned for, which need not be here.
    tiles: Read a user's wish for rows in blocks, and names for the sizes of arguments.
    xla: Read the options that XLA compiles with, and say where they cannot be had.
    sizes: Read a user's wish for one program that serves all sizes, and refuse what cannot go with it.
    options: List every choice a user can make, with its default.
"""
