"""Find a plan that fits a budget, and remember it.

The planner predicts the peak of each plan, XLA's account decides. `fit` takes the default plan if it holds the budget.
Otherwise it weighs plans until the fastest plan that holds the budget is known, and compiles that one. The speed of the
device is measured once. Plans that held a budget are noted on disk, and within one process all ways of calling share a
search. Where no plan holds a budget, rows run block by block. `Pareto` shows the cost of each budget.

Files, in reading order:

    pareto: Show the cost of each budget.
    rates_file: Keep what was measured of devices in a small file, which processes may share.
    rates: Measure how much a device computes and moves in a second.
    link: Measure how fast a device copies to its host's memory.
    attempts: Record the plans that a search for a budget tried, their memory by XLA's account, and the chosen one.
    refusals: Say why no plan holds a budget: the smallest peak found, the arrays alive there, and what would help.
    fit: Find the fastest plan that fits a budget.
    notes: Remember on disk which plans held a budget, and the memory of plain JAX.
    scoped: Let no plan keep more of a part of a program than its `aot.budget`.
    shares: Take the bytes of a budget for each of several devices, where a step is part of a program of the user's.
    searches: Search for a plan once for all ways of calling.
    tiling: Run rows block by block where no plan of a program holds a budget.
    unasked: Run rows block by block where the model of a GPU or TPU finds that smaller and no slower, without a budget.
    inexact: Let values wait in a smaller form under a budget, as far as a bound on the error of the gradient permits.
"""
