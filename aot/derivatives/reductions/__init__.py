"""Functions over axes: norms, sums and products, ranks, cumulative functions, distances.

Files, in reading order:

    norms: Norms of vectors, for every order, with a choice where they have a corner.
    moments: Sums, products, means, variances and log-sum-exp over axes.
    ranks: The largest, the smallest and the middle element over axes, where equal elements share evenly.
    cumulative: Sums, products, extremes and log-sum-exp of all elements so far along an axis.
    distances: Distances and angles between vectors, with a choice where two vectors meet or one is zero.
"""
