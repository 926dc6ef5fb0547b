"""Find a change that makes a call finite, and try it by running the call.

`wrappers/built_in/checks` names the op that made a NaN. Here the op gets a cure: `derivatives="finite"`, or a function
of `aot.derivatives` in place of the user's formula at that line. A cure is named only after the call ran with it.

Files, in reading order:

    found: Record the op that made a NaN or an infinity, and its cures.
    formula: Put a function of `aot.derivatives` in place of the equations that compute it.
    patterns: List the functions of `aot.derivatives` that cure a line, and the formulas that each replaces.
    trials: Run a call that was not finite again with each cure.
"""
