"""Run loops backwards in memory that does not depend on how long they run.

A loop is two jaxprs, `Parts`. The forward leaves checkpoints behind, and the reverse sweep runs again the steps between
them. `Loop`, `Saving` and `Pull` tell JAX's transformations so, and are differentiable themselves.

Files, in reading order:

    memory: Read how much memory the derivative of a loop may have, and count its checkpoints.
    parts: Hold a loop as two jaxprs, and derive other loops from it: its tangent, its form under `jax.vmap`.
    buffers: Prove that a loop writes an array row by row, so that its earlier states follow from the last one.
    placing: Run a loop forward and leave checkpoints behind, without knowing how long it will run.
    sweeping: Run a loop backward from checkpoints.
    steps: Pull cotangents back through one step of a loop.
    rules: Differentiate a loop, to any order and in both modes.
    lanes: Say whether a program keeps the lanes of a mapped axis apart.
    plain: Let every `lax.while_loop` of a program run backwards, and so every `fori_loop` with dynamic bounds.
    functions: Trace the predicate and the body of a loop, and say where they do not fit each other.
    loops: Make loops like those of `jax.lax` that run backwards too.
"""
