"""Let the backward read a cheaper form of a value: its bits, another value's, or the stack of one step before.

A backward asks for a value, and the cut finds the cheapest way to have it: kept, or computed again as the forward
computed it. Some values can be had in another way, from another value. Each way is a file here. It finds its places in
a graph and writes the graph again, so that the backward reads the value made in that way. `choose` cuts the program
without and with these forms. The halves return the same bits.

Files, in reading order:

    readers: Say who reads a value in the backward, and whether something else may be read there in its place.
    written: Write a graph again in which the backward reads other values than before.
    bits: Keep a mask as bits: one bit for an element, where an array of booleans has a byte.
    indices: Keep an index in the smallest integer that holds it, where the program says how large it may be.
    results: Compute the mask of a derivative from the function's result in place of its input.
    before: Read the carried values of a step from the stack of the step before, where both stacks are kept anyway.
    chosen: Keep the place of the element that a pooling has chosen, where the pooled array is not exact later.
    exact: Say what stays exact where other values wait in smaller forms: masks, indices, and choices of poolings.
    choose: Choose the forms that pay, for the minimum cut of a program.
"""
