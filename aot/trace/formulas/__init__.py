"""Give a traced function the derivatives that conventions choose, without a change of its values.

Functions are recognised in the jaxpr, however deep, by their primitive, by what is known of their operands, or by the
name of JAX's own function. Each is replaced by a call of the same function with another derivative rule.

Files, in reading order:

    slopes: Functions of JAX's whose slopes at singular points are chosen.
    spectra: Eigenvalues and singular values that may be equal, with JAX's derivatives elsewhere.
    known: Find sums of squares, sums of exponentials, masks and numbers in a jaxpr.
    changes: List the rules that changed derivatives, with their source lines.
    rewrite: Put formulas into a traced function, by the conventions.
"""
