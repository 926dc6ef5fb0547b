"""The wrappers that every function gets.

Each handles one thing that a compiled program of flat arrays cannot: trees, the same array twice, references, zero
cotangents, derivatives. It reads the metadata, and changes arguments before and results after. The stack applies them
in the order in which they stand here. A user's own wrapper, `aot.function(wrappers=...)`, comes around all of them.

Files, in reading order:

    flatten: Speak in flat arrays to the compiler, in trees to the caller.
    guards: Refuse a call that the compiled program was not made for.
    checks: Name the first op that made a NaN or an infinity.
    alias: Pass an array once when the caller passed it twice; return inputs as themselves.
    refs: Turn writes to references into extra results, then write them back.
    zeros: Run the backward that a pattern of zero cotangents asks for.
    autograd: Tie the forward and backward programs into jax.grad.
"""
