"""Find what makes a call finite that was not, and try it by running the call.

A NaN has an op that made it, which `wrappers/built_in/checks` names. Here it gets a cure: `derivatives="finite"`, or a
function of `aot.derivatives` in place of what the user wrote at that line. A cure is named only after the call ran with
it.

Files, in reading order:

    found: Say which op made a NaN or an infinity, and what cures it.
    formula: Put a function of `aot.derivatives` in place of the equations that it stands for.
    patterns: List the functions of `aot.derivatives` that cure a line, and what each stands for.
    trials: Run a call that was not finite once more with each cure.
"""
