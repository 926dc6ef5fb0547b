"""Hold the plan, and the problem that it solves.

A `Problem` is a graph with sides, prices, rules and the `Backend` that the halves are written for. It is made once for
a program, and every search takes it. A `Plan` says what is saved and what is computed again, and why. It is written to
a file, and read back for its program or for one with the same forward. The search for plans is in `search`, what they
come to in `lower`.

Files, in reading order:

    backend: Describe the habits of a compiler, so that the two halves are written for it once.
    problem: Hold a program with all that is known before a plan is searched for.
    demands: Compare a plan with what was demanded of single values.
    asjax: Say a plan in JAX's own words: which names and primitives a policy of `jax.checkpoint` must save.
    saved: The saved values of a plan as rows, and how those that read the same are grouped.
    runs: Say which ops each half runs, for the values that it must have.
    plan: Record a decision: what is saved, what is recomputed, and why.
    twins: Find the values of one program in another that has the same forward.
    planfile: Write a plan to JSON, and read it back for its program.
    plandiff: Say what changes from one plan to another of the same program.
"""
