"""Find a plan that fits a budget, and remember it.

The planner predicts what each plan takes, XLA tells the truth, and `fit` compiles until one holds. The program that was
weighed is the one that runs. How fast the device is is measured once. Plans that held are noted on disk, and within one
process all ways of calling share a search. `Pareto` shows what each budget would cost.

Files, in reading order:

    axes: Open axes of matplotlib where it is installed, and keep what was drawn.
    pareto: Show what each budget would cost.
    rates: Measure what a device computes and moves in a second.
    fit: Compile plans until one fits the budget.
    notes: Remember on disk which plans held a budget.
    searches: Search for a plan once for all ways of calling.
"""
