"""Compare derivatives with PyTorch's and JAX's, at random and at singular points.

Ours are those of `jointcut.aot.derivatives`.

    python -m benchmarks.derivatives            # all families: a table of NaN and infinite gradients, and of errors
    python -m benchmarks.derivatives.pytorch    # make PyTorch's figures anew, which the tests compare with
    python -m benchmarks.derivatives.finite     # what derivatives="finite" gives and costs
    python -m benchmarks.derivatives.bodies     # random guarded functions in bodies of all kinds, in both modes
    python -m benchmarks.derivatives.agreement  # JAX's functions under each set of conventions, beside PyTorch
    python -m benchmarks.derivatives.checked    # what check="nonfinite" costs
    python -m benchmarks.derivatives.forms      # what cheaper forms of values save
    python -m benchmarks.derivatives.vocabulary # linear cross entropy beside the plain loss: memory and time

Files, in reading order:

- case: Say what is compared: one function with its options, random inputs, and singular points.
- cases: The functions that are compared, by family.
- figures: Keep PyTorch's figures: values, gradients and gradients of gradients, one small file for each family.
- pytorch: Make PyTorch's figures.
- evaluate: Evaluate our functions and JAX's as PyTorch's were: value, first order, second order.
- compare: Count what is not finite, and measure how far ours is from PyTorch's.
- guards: Functions that guard a singular point with `where`, as users of JAX, Diffrax, Optax and NumPyro write them.
- bodies: Draw functions that are guarded at singular points, in bodies of all kinds, and check their slopes.
- finite: Say what `derivatives="finite"` gives and costs: `python -m benchmarks.derivatives.finite [PROGRAM ...]`.
- agreement: Compare JAX's functions under each set of conventions with PyTorch.
- checked: Say what `check="nonfinite"` costs: `python -m benchmarks.derivatives.checked [PROGRAM ...]`.
- forms: Say what cheaper forms save: `python -m benchmarks.derivatives.forms [PROGRAM ...]`.
- vocabulary: Compare linear cross entropy with the plain loss.
"""
