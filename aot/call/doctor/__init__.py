"""Tell why a jitted function does not fit into memory, and try cures by compiling.

`aot.doctor` watches a block. A `Subject` is a call of a jitted function, by the types of its arguments. `causes` says
why it takes its memory. A cure is told with the bytes that the function takes with it, by XLA's account.

Files, in reading order:

    scheduled: Find the arrays that a compiled program holds by the order of its instructions.
    within: Find the jitted program that a function hands all its arrays to, as `eqx.filter_jit` and `nnx.jit` do.
    subject: Hold a call of a jitted function by the types of its arguments, and weigh it.
    gradients: Find the gradients that a step takes, and compile the step with these cut.
    equal_rows: Find loops that stack a value which is the same at each step, and compute it before the loop.
    late: Find the weight gradients that XLA computes late, and let each layer wait for its own.
    causes: Find why a step needs its memory, and try a cure of each cause by compiling.
    doctor: Watch the functions that are compiled in a block, and tell why one does not fit into memory.
"""
