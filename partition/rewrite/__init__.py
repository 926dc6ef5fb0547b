"""Rewrite a jaxpr so that less of it must be saved or computed.

The joint program is simplified before it is read: calls are opened, and equal equations merged. An output that is a
view of a residual stands for it, and a sum of scattered rows stays in rows. A backward is written again for zero
cotangents, without the equations that make zeros. Nothing here knows of plans or prices. Each rewrite keeps the
numbers, bit for bit, except `guard`, which changes NaN to zero where it is asked to.

Files, in reading order:

    simplify: Open calls, and merge equations that compute the same.
    regions: Open the regions under `jax.checkpoint`, so that a plan runs them again op by op.
    names: Let all readers of a named array read it by its name.
    views: Read a value back from an output that is a view of it.
    sparse: Split a gradient that is a sum of scattered rows into the rows and their places.
    product: Write an elementwise product in which zero times infinity is zero, with such products as its derivative.
    matrices: Write a matrix product, and the solution of a triangular system, in which a line of zeros gives zeros.
    slopes: Give guarded products and solutions in a program derivatives that are guarded, too.
    numbers: Follow numbers that a program computes from literals, such as the number of elements of a mean.
    guard: Let a product with a cotangent of zero be zero in a backward, whatever the other factor is.
    hooks: Call the hooks of complete gradients as soon as these are there.
    repeats: Repeat an array inside the loops that read it, not before them.
    fills: Keep the zeros that a scatter adds to apart from the zeros that loops over elements read.
    specialise: Leave out of a backward the equations that zero cotangents make needless.
"""
