"""Small programs by subject: networks, loops, branches, numerics, conventions, calls, checkpoints, draws."""
