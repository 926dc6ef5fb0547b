"""Hold hooks, traced into programs or called back.

Files, in reading order:

    closures: Read the variables that a hook's function reads, so that equal hooks share a program.
    hook: Hold the functions that are called with cotangents, and check their results.
    islands: Call back derivative rules that JAX cannot trace, such as a rule that computes with numpy.
    saved_arrays: Hold two functions that saved arrays pass through: one where they are kept, one where they are read.
    spilling: Keep residuals in files: written as soon as they are made, memory-mapped where they are read.
    in_programs: Call hooks in programs that JAX traces: in `aot.function`, `jax.grad` and `jax.jit`.
"""
