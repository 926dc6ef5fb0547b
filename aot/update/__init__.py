"""Update parameters inside the backward.

An update is traced, and divided into a part for each parameter, which runs as soon as its gradient is complete. An
update that joins all gradients in a few numbers goes back twice: the first sweep makes these numbers.

If a scan takes slices of a parameter, it is updated in the steps of that scan in the backward, slice by slice.

Files, in reading order:

    joins: Find the gradients that each value of an update needs.
    updates: Divide an update of all parameters into one for each parameter.
    slices: Compute results for one slice of their arrays, along the first axis.
    leaves: Find the parameters that a scan can update slice by slice.
    scans: Run a scan that updates parameters in its steps.
    step: Run a backward that updates, equation by equation.
    released: Make an update a part of a joint program.
"""
