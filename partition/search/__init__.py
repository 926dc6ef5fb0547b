"""Choose what is saved, for a price or a budget; a file for each method.

The minimum cut is the cheapest set of values to save. A front is the cheapest set at every price of a second, found by
peeling one network. Long chains are divided into stretches, as if each were checkpointed. A `Planner` lists all of
these for a budget, by the peak that a replay predicts. `best` picks the default from them.

Files, in reading order:

    network: Turn values, prices and rules into a flow network.
    mincut: Find the cheapest set of values to save.
    peel: Peel a network: find the nodes that leave the minimum cut as the price of a second rises.
    front: Find the cheapest cut at every price of a second.
    stretches: Divide the forward into stretches at narrow places, and say in which stretch each value is made and read.
    undo: Count the bytes and seconds that one stretch takes while the backward undoes it.
    alike: Find stretches that are alike, so that figures are counted once for all of them.
    chain: Divide a chain of layers: what to save of each, and which to run again together.
    copies: Choose what waits in host memory: how long the copies take, and how much of that hides behind computing.
    between: Make plans from others: mixtures of two, and loops that run in segments, for all of their steps or a part.
    candidates: Hold a plan with the figures of the model, rank such plans, and replay those that a budget needs.
    budget: List the plans worth trying for a budget, with the peak and the time of each.
    best: Choose the default plan: the minimum cut, or a plan of the front that is smaller and no slower, or JAX's own.
    forms: Let the backward read a cheaper form of a value: its bits, another value's, or those of one step before.
"""
