"""Hold hooks, and tell which of them can be traced.

Files, in reading order:

    looks: Tell whether a hook can be traced into a program, or must be called back.
    hook: Hold the functions that are called with cotangents, and check what they return.
    saving: Hold two functions that what is saved passes through: one where it is kept, one where it is read.
    spilling: Keep what the backward needs in files: written as soon as it is made, memory-mapped where it is read.
    traced: Call hooks in programs that JAX traces: in `aot.function`, `jax.grad` and `jax.jit`.
"""
