"""The decorator and its calls: find or compile the programs of a call, and run them.

`decorator` is the decorator, `function` the object that it returns. `alone` runs a function without its gradient.
`cached` looks up programs that another process compiled, as an `Entry`, and compiles missing ones through the stages.
`under_transform` is the call within a transformation of JAX. `updating` runs a step with its update.

Files, in reading order:

    adding: Run a step, and add its gradients to references.
    alone: Run a function forward only, without derivative or cut.
    entry: Run programs that another process compiled.
    cached: Look up programs that another process compiled, and compile missing ones.
    under_transform: Run a function inside a transformation, which may differentiate it.
    flow: Find out whether a gradient can flow through a function, and where it stops.
    updating: Run a function with an update of its parameters as one step.
    method: Bind a function or tape to an instance.
    function: The object that the decorator returns: calls, gradients and stages of one function.
    decorator: The decorator.
    doctor: Tell why a jitted function does not fit into memory, and try cures by compiling.
    explain: Report what any function keeps for its backward, what its devices exchange, and whether it has a gradient.
    largest: Find the largest size of an axis, such as the batch, for which a training step fits into memory.
    nonfinite: Find the first op of a call that makes a NaN or an infinity, and what cures it.
"""
