"""Compile the halves, run them, and pass residuals from forward to backward.

A `Runner` calls the programs of one signature on flat arrays. The programs may be just compiled, from the cache, or
from an exported pair. A `Binder` finds the signature of a call. A `Pullback` holds the residuals until the cotangent is
given. Inside a transformation of the user's, the same programs run as part of its trace.

Files, in reading order:

    compile: Lower and compile the two jaxprs for a device.
    weigh: Weigh a program: learn its memory from XLA, before XLA makes code for it.
    again: Differentiate the halves once more, under the conventions of the function.
    jits: Jit the flat programs of one signature, and compile each once.
    bound: Bind calls to signatures, and find the program of an earlier call of the same signature.
    references: Add gradients to references.
    pullback: Hold a forward's residuals until the cotangent is given.
    runner: Run the programs of one signature on the caller's trees.
    flat: Make the flat programs of a function: inside a trace, jitted, or compiled ahead of time.
    spilled: Run programs that keep residuals in files.
    runnable: Run a traced call that was cut, in every way: inside a trace, jitted, or compiled ahead of time.
    meshed: Measure a part of a program of the user's, compiled for all devices of its mesh.
    uncut: Warn, once per function, that plain JAX runs instead of a cut.
    unchecked: Warn, once per function, that an option has no effect on a call: it is not checked, measured or kept.
"""
