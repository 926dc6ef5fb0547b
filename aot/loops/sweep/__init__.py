"""Leave checkpoints behind while a loop runs, and run it back from them.

The forward does not know how long the loop will run, so it moves checkpoints as it goes. The sweep knows, and runs the
steps between checkpoints again, each as seldom as possible. Each step is pulled back on its own. A large step is cut as
a joint program; its residuals are temporaries of the sweep. The first carry of a `lax.while_loop` that runs the user's
steps is the number of the next step; `checks` reads it there to name the step that made a NaN.

Files, in reading order:

    placing: Run a loop forward and leave checkpoints behind, without knowing how long it will run.
    sweeping: Run a loop backward from checkpoints.
    cutting: Cut one step of a reverse sweep: choose the values that its forward keeps for its backward.
    steps: Pull cotangents back through one step of a loop.
    reverse: Take a loop apart for its reverse sweep, and run the sweep on flat arrays.
    saving: Let a loop with checkpoints beside its results be one call to JAX's transformations.
"""
