"""Functions of each element.

Files, in reading order:

    powers: Powers and roots, with finite slopes where a power is smooth.
    logarithms: Logarithms, and products and sums of logarithms, which may have a limit where a logarithm has none.
    angles: Lengths and angles in the plane, of complex numbers too, and inverse functions of angles.
    bounds: Bounds, choices between two values, quotients and remainders.
    activations: Smooth activations, also at the largest numbers, and activations over an axis.
    corners: Activations with corners, where each follows PyTorch's choice of a subgradient.
"""
