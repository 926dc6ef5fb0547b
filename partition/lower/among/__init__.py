"""Insert more steps into a half whose steps are in order.

Files, in reading order:

    hooks: Call the hooks of complete gradients as soon as these are there: move their steps forward in the backward.
    early_updates: Update each parameter as soon as its gradient is complete, before the backward goes on.
    moves: Say where values are copied to host memory or brought to other forms, and back: steps among the others.
    settle: Let gradients be complete before a layer is computed again, where a compiler would put them off.
    waits: Let stacks and random numbers wait, and zeros lie apart, for compilers that hold them too long.
"""
