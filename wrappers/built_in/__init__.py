"""The wrappers that every function gets.

Each file handles one thing that a compiled program of flat arrays cannot: trees, one array passed twice, references,
zero cotangents, derivatives. `wrapped_for` of `aot/stages/tracing` applies `TreeWrapper`, `GuardsWrapper` and
`AliasWrapper`, in this order; the last two read the records of the arguments. The others are used by stages and calls
of `aot`. A user's own wrappers, `aot.function(wrappers=...)`, wrap the function directly, inside all of these.

Files, in reading order:

    flatten: Turn a function of trees into a function of flat arrays.
    guards: Refuse a call that does not fit the compiled program.
    culprit: Describe the op that made a NaN or an infinity, and its operands.
    checks: Name the first op that made a NaN or an infinity.
    alias: Let an array that is passed twice enter once, and return inputs without a copy.
    refs: Turn writes to references into extra results, then write them back.
    zeros: Run a smaller backward if some cotangents are zero.
    programs: Let a flat program be one call to JAX's transformations, with rules of its own.
    autograd: Let JAX's transformations use the forward and backward programs.
"""
