"""Give a traced function the derivatives that conventions choose, without a change of its values.

Functions are recognised in the jaxpr, however deep, by their primitive, by the facts of their operands, or by the name
of JAX's own function. Each is replaced by a call of the same function with another derivative rule.

Files, in reading order:

    chosen_slopes: Functions of JAX's whose slopes at singular points are chosen.
    spectra: Decompositions of matrices that may be singular, with JAX's derivatives elsewhere.
    spread: Differentiate a function of a symmetric matrix where eigenvalues are equal, by divided differences.
    turns: Differentiate a function of a matrix that is made of its singular values and vectors, where values are equal.
    squares: Find products of a value with itself, and sums of products that are sums of squares.
    touches: Follow bounds that a value touches only where its slope is zero, and sums of exponentials.
    changes: List the rules that changed derivatives, with their source lines.
    uses: Find the uses of eigenvalues and vectors, and whether they are functions of the matrix.
    rewrite: Put formulas into a traced function, by the conventions.
"""
