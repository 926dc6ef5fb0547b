"""Take a function through its stages: `Traced`, `Cut`, `Compiled`.

They follow the stages of `jax.jit`: traced, lowered, compiled. `tracing` traces; `Traced.partition` plans and splits;
`Cut.compile` calls XLA. `under_transform` cuts a program inside a transformation of the user's, `symbolic` one with
symbolic sizes. `debug` runs and checks a call half by half, `watched` looks at the results of
every call.

Files, in reading order:

    offloading: Set up the planning problem of a program, and check first that what is offloaded comes back as it was.
    under_transform: Cut a program inside an outer transformation, within the budget of its options.
    again: Differentiate the halves once more, under the conventions of the function.
    gradient: Convert the pair of halves to the form of TorchScript's `Gradient`.
    debug: Run a call half by half, and check types and numbers.
    watched: Look at the results of every call, and find the op that made one of them NaN.
    compiled: Run a compiled cut on the caller's trees, and report XLA's figures.
    gather: Gather a report from a cut, its planner and its front.
    weighing: Compile the plans of one trace, or weigh them.
    cut: Hold one cut: the plan and the two jaxprs.
    traced: Hold one traced call, for all later stages.
    tracing: Trace a function for one signature.
    symbolic: Cut a function whose arguments have symbolic sizes.
    exportable: Trace and cut a function for export, for fixed or symbolic sizes.
"""
