"""Take a function through its stages: `Traced`, `Cut`, `Compiled`.

They follow the stages of `jax.jit`: traced, lowered, compiled. `tracing` traces; `Traced.partition` asks for a plan,
and gets a `Cut`; `Cut.compile` calls XLA. `symbolic` cuts a program with symbolic sizes. `debug` runs and checks a
call half by half, `watched` looks at the results of every call.

Files, in reading order:

    cures: Find a change that makes a call finite, and try it by running the call.
    gradient: Convert the pair of halves to the form of TorchScript's `Gradient`.
    debug: Run a call half by half, and check types and numbers.
    watched: Look at the results of every call, and find the op that made one of them NaN.
    gather: Gather a report from a plan, its planner and its front.
    axes: Say what stays independent along an axis of the arguments, and which ops mix its rows.
    measured: Run a compiled step, and put what it took beside what was predicted.
    cut: Hold one cut, and compile it: the plan and the two jaxprs, the executables and calls on the caller's trees.
    traced: Hold one traced call, for all later stages.
    tracing: Trace a function for one signature.
    symbolic: Cut a function whose arguments have symbolic sizes.
    padding: Run programs of symbolic sizes on padded arrays.
    exportable: Trace and cut a function for export, for fixed or symbolic sizes.
"""
