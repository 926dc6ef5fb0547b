"""Run a function eagerly, and capture its whole backward as one compiled program.

The function runs on tracers that hold numbers. Each op that a gradient flows through is recorded with the residuals of
its backward. A sweep orders the recorded ops and their hooks, and separates structure from values. For each structure
the backward is traced and compiled once. A tape corresponds to PyTorch's compiled autograd. With a budget, a policy, a
strategy, a target or `offload` no residuals are kept: the recorded ops run again as one step of `aot.function`.

Files, in reading order:

    records: Cut each kind of op that runs on a tape into a forward, its residuals and a backward.
    nodes: Record the ops that run on a tape, as PyTorch's graph of backward nodes.
    sweep: Order the nodes of a tape for the backward, and tell its structure from its values.
    straight: Run the recorded ops of a tape again, as one step of `aot.function`.
    walk: Run the backward of a structure, step by step, on arrays or on tracers.
    program: Write a backward as one jaxpr, and compile the parts between its hooks.
    loop: Run equal blocks of a backward as one compiled loop, some at a time.
    roll: Find the part of a backward that repeats, so that loops of all lengths share one program.
    attach: Set hooks on values, on calls, on parameters and on residuals.
    release: Update each parameter as soon as its gradient is complete, inside the backward.
    captures: Keep the compiled backwards of a function, and say in words why each was needed.
    forward: Run a function on a tape, eagerly, and take its result apart.
    pullback: Pull cotangents back through the recorded ops of a tape.
    tape: The decorator for functions of Python control flow, and the object it returns.
"""
