"""Leave checkpoints behind while a loop runs, and run it back from them.

The forward does not know how long the loop will run, so it moves checkpoints as it goes. The sweep knows, and runs the
steps between checkpoints again, each as seldom as possible. Each step is pulled back on its own. A large one is cut as
a joint program: what it keeps for its own backward is a temporary of the sweep. The first carry of a `lax.while_loop`
that runs the user's steps is the number of the next step; `checks` reads it there to name the step that made a NaN.

Files, in reading order:

    placing: Run a loop forward and leave checkpoints behind, without knowing how long it will run.
    sweeping: Run a loop backward from checkpoints.
    cutting: Cut one step of a reverse sweep: what its forward part keeps for its backward part.
    steps: Pull cotangents back through one step of a loop.
    reverse: Take a loop apart into what its reverse sweep needs, and run the sweep on flat arrays.
    saving: Let a loop with checkpoints beside its results be one call to JAX's transformations.
"""
