"""Run a function eagerly, and capture its whole backward as one compiled program.

The function runs on tracers that hold numbers, and each op that a gradient flows through is recorded with what its
backward reads. A sweep orders what was recorded, hooks included, and tells its structure from its values. For each
structure the backward is traced and compiled once. It corresponds to PyTorch's compiled autograd.

Files, in reading order:

    records: Cut each kind of op that runs on a tape: its forward, what it keeps, and its backward.
    nodes: Record the ops that run on a tape, as PyTorch's graph of backward nodes.
    sweep: Order the nodes of a tape for the backward, and tell its structure from its values.
    walk: Run the backward of a structure, step by step, on arrays or on tracers.
    program: Write a backward as one jaxpr, and compile it in as many parts as its hooks divide it into.
    loop: Run equal blocks of a backward as one compiled loop, some at a time.
    roll: Find the part of a backward that repeats, so that loops of all lengths share one program.
    attach: Set hooks on values, on calls, on parameters and on what is saved.
    release: Update each parameter as soon as its gradient is complete, inside the backward.
    words: Say in words why a backward had to be captured anew.
    captures: Keep the backwards that a function needed: each structure is traced and compiled once.
    forward: Run a function on a tape, eagerly, and take its result apart.
    pullback: Pull cotangents back through what a tape recorded.
    tape: The decorator for functions of Python control flow, and the object it returns.
"""
