"""Update parameters inside the backward.

Files, in reading order:

    updates: Divide an update of all parameters into one for each parameter.
    release: Update each parameter as soon as its gradient is complete, inside the backward.
"""
