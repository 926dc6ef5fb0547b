"""Bend the caller's convention into plain arrays, and back.

Files, in reading order:

    table: Keep what was made for a key, made once whichever thread asks for it.
    record: Write a record as JSON, and read it back equal.
    views: Name the operations that only move elements, and do them again on another array.
    metadata: Say what one look at the function taught us of its inputs and outputs.
    signatures: Say by names and positions which input and output of a program is which.
    convention: Say what each flat input and output means to the caller.
    paths: Say how the user reaches each part of a call.
    fixed: Keep leaves that are no arrays out of programs: functions, strings, flags, the numbers of an Equinox module.
    objects: Take objects that can be written apart into their arrays, and write back what became of them.
    copies: Refuse a function that writes to an object of which it got a copy.
    containers: Open array-like objects into arrays, and close them again.
    wrapper: Define a wrapper: one half before compiling, one half after.
    tree: Flatten nested arguments and results, and build them again.
    stack: Apply every wrapper in order before, and in reverse after.
    flatten: Speak in flat arrays to the compiler, in trees to the caller.
    guards: Refuse a call that the compiled program was not made for.
    checks: Name the first op that made a NaN or an infinity.
    alias: Pass an array once when the caller passed it twice; return inputs as themselves.
    refs: Turn writes to references into extra results, then write them back.
    zeros: Run the backward that a pattern of zero cotangents asks for.
    autograd: Tie the forward and backward programs into jax.grad.
"""
