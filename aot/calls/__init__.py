"""Find or compile the programs of a call, and run them.

`alone` runs a function without its gradient. `cached` looks up programs that another process compiled, as an `Entry`,
and compiles missing ones through the stages. `inside` is the call within a transformation of JAX. `flow` answers
whether a gradient can flow at all. `updating` runs a step with its update. `method` binds a function to an instance.

Files, in reading order:

    adding: Run a step, and add its gradients to references.
    alone: Run a function forward only, without derivative or cut.
    entry: Run programs that another process compiled.
    cached: Look up programs that another process compiled, and compile missing ones.
    inside: Run a function inside a transformation, which may differentiate it.
    flow: Find out whether a gradient can flow through a function, and where it stops.
    updating: Run a function with an update of its parameters as one step.
    method: Bind a function or tape to an instance.
"""
