"""Run loops backwards in memory that does not depend on how long they run.

A loop is two jaxprs, `Parts`. The forward leaves checkpoints behind, and the reverse sweep runs the steps between them
again. `Loop`, `Saving` and `Pull` are the calls that JAX's transformations see, and are differentiable themselves.

Files, in reading order:

    memory: Read how much memory the derivative of a loop may have, and count its checkpoints.
    parts: Hold a loop as two jaxprs, and derive other loops from it: its tangent, its form under `jax.vmap`.
    expected: Tell how often a loop is expected to run.
    counters: Prove where the counters of a loop begin, how they change, and how many trips they allow.
    buffers: Prove that a loop writes an array row by row, so that its earlier states follow from the last one.
    sweep: Leave checkpoints behind while a loop runs, and run it back from them.
    rules: Differentiate a loop, to any order and in both modes.
    lanes: Say whether a program keeps the lanes of a mapped axis apart.
    interned: Give loops that are the same program one object, so that what was made for one serves all.
    plain: Let ops run backwards that do not in JAX: each `lax.while_loop`, and products of sparse matrices.
    functions: Trace the predicate and the body of a loop, and say where they do not fit each other.
    loops: Make loops like those of `jax.lax` that run backwards too.
    scans: Run a function over the rows of arrays, as `lax.scan`, in the memory of a loop.
"""
