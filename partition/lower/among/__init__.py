"""Put more steps among those of a half, once these are in order.

Files, in reading order:

    moves: Say where values are copied to host memory or brought to other forms, and back: steps among the others.
    settle: Let gradients be complete before a layer is computed again, where a compiler would put them off.
"""
