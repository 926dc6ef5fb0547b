"""Choose which values to save, for a price or a budget; a file for each method.

The minimum cut is the cheapest set of values to save. A front is the cheapest set at every price of a second, found by
peeling one network. Long chains are divided into stretches, as if each were checkpointed. A `Planner` lists all these
plans for a budget, by the peak that a replay predicts. `best` picks the default from them.

Files, in reading order:

    network: Turn values, prices and rules into a flow network.
    mincut: Find the cheapest set of values to save.
    peel: Peel a network: find the nodes that leave the minimum cut as the price of a second rises.
    front: Find the cheapest cut at every price of a second.
    stretches: Divide the forward into stretches at narrow places, and say in which stretch each value is made and read.
    recompute: Count the bytes and seconds that one stretch takes while the backward undoes it.
    alike: Find stretches that are alike, so that figures are counted once for all of them.
    chain: Divide a chain of layers: choose the values to save in each, and the layers to run again together.
    copies: Choose values that wait in host memory: the time of their copies, and the share that hides behind computing.
    mixtures: Make plans from others: mixtures of two, loops in segments, for all steps or a part, or other checkpoints.
    candidates: Hold a plan with the figures of the model, rank such plans, and replay those that a budget needs.
    budget: List the plans worth trying for a budget, with the peak and the time of each.
    best: Choose the default plan: the minimum cut, or a plan of the front that is smaller and no slower, or JAX's own.
    forms: Let the backward read a cheaper form of a value: its bits, another value's, or the stack of one step before.
"""
