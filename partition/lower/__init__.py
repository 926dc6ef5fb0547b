"""Schedule a plan, write the two jaxprs, and predict their peak memory.

A plan becomes a `Schedule`: the steps of both halves, as data, which print as text. `follow` walks them, once for all
who need to: `emit` writes jaxprs and `replay` counts bytes without writing any. `verify` checks the halves against the
joint program, and a user's passes rewrite them before XLA sees them. For a new kind of step, or another form of a
residual, begin in `steps`; `schedule` decides where it stands, and `follow` says what it does.

Files, in reading order:

    order: Order the backward so that a recomputed value lives briefly.
    steps: The schedule: the steps of both halves, in the order in which they run.
    written: Read a schedule back from the text that it prints (see `steps`).
    reruns: Say which loops can run in segments, and what that takes.
    among: Put more steps among those of a half, once these are in order.
    follow: Follow a schedule: say what stands for each value at each level of the program.
    schedule: Say when each op runs: the plan as steps of both halves (`steps`), for one backend.
    emit: Write a schedule out as two jaxprs.
    verify: Check that the two jaxprs fit together, and run them one after the other.
    memory: Count the bytes alive at every step of a program.
    xla: Arrange the rows of a level as XLA:CPU runs them, to count what is alive.
    counter: Count the rows of one region while a schedule is followed: the buffers that each step makes and reads.
    replay: Replay a schedule: count the bytes of both halves as one program, without writing them.
    lifetimes: Say when each buffer of a plan lives.
"""
