"""Schedule a plan, write the two jaxprs, and predict their peak memory.

A plan becomes a `Schedule`: the steps of both halves, as data, which print as text. `follow` walks these steps for two
users: `emit` writes jaxprs, and `replay` counts bytes without writing any. `verify` checks the halves against the joint
program, and a user's passes rewrite them before XLA sees them. To add a step, or a new form of a residual, begin in
`steps`. `schedule` decides where the step stands, and `follow` says what it does.

Files, in reading order:

    roots: Choose the values that recomputed ops wait by: as few as hold all of these ops back.
    order: Order the backward so that a recomputed value lives briefly.
    steps: Define the steps of a schedule: ops that run, and values that wait, move or are kept.
    listing: The schedule: the steps of both halves, in the order in which they run, and its text.
    reruns: Say which loops can run in segments, and at which cost.
    follow: Follow a schedule: say what stands for each value at each level of the program.
    among: Insert more steps into a half whose steps are in order.
    exports: List the values of loops and branches that each region hands out to readers outside it.
    schedule: Say when each op runs: the plan as steps of both halves (`steps`), for one backend.
    once_programs: Write the programs of an equation that runs each at most once, with their inputs and kept values.
    writer: Write the equations of one region while a schedule is followed.
    emit: Write a schedule out as two jaxprs.
    verify: Check that the two jaxprs fit together, and run them one after the other.
    memory: Predict the memory of a schedule: count the bytes of both halves, without writing them.
"""
