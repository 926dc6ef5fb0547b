"""Lead a call through its stages: `Traced`, `Cut`, `Compiled`.

They follow `jax.jit`, whose stages are traced, lowered and compiled, and each can be asked what it decided. `pipeline`
traces; `Traced.partition` plans and splits; `Cut.compile` asks XLA. Inside a transformation of the user's a program is
cut by `under_transform`. `debug` runs a call half by half and checks all that can be checked. `symbolic` does the same
for sizes that are known later.

Files, in reading order:

    under_transform: Cut a program that runs inside somebody's transformation, within the budget of its options.
    gradient: Give the pair of halves in the form of TorchScript's `Gradient`, for whoever drives them by hand.
    debug: Run a call half by half, and check everything that can be checked.
    compiled: Run a compiled cut in the caller's own trees, and tell what XLA says of it.
    gather: Gather a report from a cut, its planner and its front.
    cut: Hold one cut: the plan, the two jaxprs, and what their inputs and outputs mean to the caller.
    traced: Hold one traced call: what every later stage needs to know of it.
    pipeline: Lead a function through every stage, in order, on one screen.
    symbolic: Cut a function whose arguments have symbolic sizes.
    exportable: Trace and cut a function for export, at the sizes of its arguments or for any.
"""
