"""Compile the halves, and run them.

A `Runner` calls the programs of one signature on flat arrays, and routes residuals from forward to backward. Where its
programs come from is not its business: just compiled, from the cache, or from an exported pair. A call is bound to its
signature once. A `Pullback` holds the residuals until the cotangent comes. In a transformation of the user's the same
programs run as part of his trace.

Files, in reading order:

    compile: Lower and compile the two jaxprs for a device.
    jits: Jit the flat programs of one signature, and compile each once.
    bound: Bind the calls of one function, each once, and find what was made for calls like it.
    pullback: Hold a forward's residuals until the cotangent comes.
    runner: Run the programs of one signature in the caller's own trees.
    flat: Run flat programs: as part of the trace around us, jitted, or compiled ahead of time.
    meshed: Compile for all devices of a mesh what was traced for one of them, inside `jax.shard_map`.
    uncut: Say, once for each function, where plain JAX runs in the place of a cut, and why.
"""
