"""Hold the plan, and the problem that it solves.

A `Problem` is a graph with sides, prices, rules and the `Backend` that the halves are written for. It is made once for
a program, and every search takes it. A `Plan` says which values are saved and which are computed again, and why. It is
written to a file, and read back for its program or for one with the same forward. The search for plans is in `search`,
the programs made from them are in `lower`.

Files, in reading order:

    backend: Describe the habits of a compiler, so that the two halves are written for it once.
    problem: Hold a program with all that is known before a plan is searched for.
    demands: Compare a plan with the demands on single values.
    asjax: Say a plan in JAX's own words: which names and primitives a policy of `jax.checkpoint` must save.
    saved: List the saved values of a plan as rows, and group rows that read the same.
    sharing: Count the values of branches once: only one branch runs, so their values lie in a space that they share.
    runs: Say which ops each half runs, for the values that it must have.
    loops_told: Say in a line how a plan runs a loop.
    plan: Record a decision: what is saved, what is recomputed, and why.
    matching: Find the values of one program in another that has the same forward.
    document: Check the types of everything in a plan's text, before any of it is used.
    planfile: Write a plan to JSON, and read it back for its program.
    plandiff: Say what changes from one plan to another of the same program.
"""
