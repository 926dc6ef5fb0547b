"""Plan a program wherever it is called: one request, one answer.

A `Request` has the program, the options, and the trace of the call. There is no trace for a part of a program of the
user's. The request knows the planning problem, the planner and the front of the budgets. Its answer is a cut.

Files, in reading order:

    agreed: Make a decision on one process, and give it to the others that run the same program.
    budgets: Find a plan that fits a budget, and remember it.
    offloading: Set up the planning problem of a program, and check first that offloaded values come back unchanged.
    weighing: Compile the plans of one program, or weigh them, where it is called.
    asked: Find the rows that a name stands for, and run them in blocks where a user asks for it.
    request: Answer a request for a plan, wherever the program is called.
    front: Compare a program's plans: the front of peak and time, without a budget.
    together: Answer a request once for all processes that hold the arrays of a program.
    size_search: Predict peaks at sizes of an axis, compile the step of the largest one, and list the sizes tried.
    size_blocks: Choose the rows that run in blocks so that a larger size of an axis holds a budget.
    largest_size: Find the largest size of an axis for which a step holds a budget.
"""
