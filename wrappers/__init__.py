"""Bend the caller's convention into plain arrays, and back.

Files, in reading order:

    convention: Say what each flat input and output means to the caller.
    wrapper: Define a wrapper: one half before compiling, one half after.
    tree: Flatten nested arguments and results, and build them again.
    guards: Refuse a call that the compiled program was not made for.
    autograd: Tie the forward and backward programs into jax.grad.
    stack: Apply every wrapper in order before, and in reverse after.
"""
