"""Find a plan that fits a budget, and remember it.

The planner predicts the peak of each plan, XLA's account decides. `fit` takes the default plan if it holds the budget,
and else weighs plans until the fastest that holds it is known, and compiles that one. The speed of the device is
measured once. Plans that held a budget are noted on disk, and within one process all ways of calling share a search.
`Pareto` shows what each budget would cost.

Files, in reading order:

    axes: Open matplotlib axes where it is installed, and save figures.
    pareto: Show what each budget would cost.
    rates: Measure how much a device computes and moves in a second.
    link: Measure how fast a device copies to its host's memory.
    attempts: Record the plans that a search for a budget tried, what XLA says of them, and the one that it chose.
    refusals: Say why no plan holds a budget: the smallest peak found, what is alive there, and what would help.
    fit: Find the fastest plan that fits a budget.
    scales: Weigh plans: learn side by side what memory they take, each once.
    notes: Remember on disk which plans held a budget, and what plain JAX takes.
    scopes: Let no plan keep more of a part of a program than its `aot.budget`.
    shares: Take the bytes of a budget for each of several devices, where a step is part of a program of the user's.
    searches: Search for a plan once for all ways of calling.
    checkpoints: Let the number of checkpoints of a loop follow from a budget, where nobody said how many there are.
    inexact: Let values wait in a smaller form under a budget, as far as a bound on the error of the gradient permits.
"""
