"""Cut one joint program into a forward and a backward.

Usable on its own, on any joint jaxpr: `from jointcut.partition import split`.

Files, in reading order:

    errors: Say what went wrong, where, and what to do next.
    figures: Write bytes, seconds and counts as people read them.
    cells: Name the place of a call as its reader does: by file and line, or by the cell of a notebook.
    jaxprs: Borrow from JAX's internals here, and nowhere else.
    page: Write a report as a page: one HTML file that needs no network.
    shown: Let a class show itself in a notebook by a file that comes after it.
    places: Say where an equation comes from, in the words of whoever wrote the model.
    sizes: Put numbers in the place of symbolic sizes.
    roles: Name what each input and output of the joint program stands for.
    graph: Hold the joint program as ops and values.
    text: Print a graph as text, and read it back.
    loops: Read a joint jaxpr into a graph, with each forward scan joined to the scans that read it.
    classify: Mark what must run forward, what must run backward, and what may choose.
    policy: Decide what may be saved and what may be recomputed, with a reason.
    counts: Count what a primitive computes on arrays of given shapes.
    flops: Count what one equation computes and moves.
    cost: Price every value in bytes and every op in seconds.
    rewrite: Open calls, and merge what is computed twice.
    views: Read a value back from an output that is a view of it.
    rows: Take a gradient that is a sum of rows apart into the rows and their places.
    zeros: Leave out of a backward what a zero cotangent would do.
    plan: Record a decision: what is saved, what is recomputed, and why.
    twins: Find the values of one program in another that has the same forward.
    instance: Hold ops in a fixed order, with what they take and make, and replay sequences of them.
    evict: Fit a schedule into a budget by dropping one value at a time.
    intervals: Choose when each value is kept and computed again, by constraint programming.
    planfile: Write a plan to JSON, and read it back for its program.
    plandiff: Say what changes from one plan to another of the same program.
    network: Turn values, prices and rules into a flow network.
    mincut: Find the cheapest set of values to save.
    peel: Peel a network: find what leaves the minimum cut as the price of a second rises.
    front: Find the cheapest cut at every price of a second.
    backend: Say what a compiler does with the two halves, so that they are written for it once.
    order: Order the backward so that a recomputed value lives briefly.
    steps: The schedule: the steps of both halves, in the order in which they run.
    schedule: Say when each op runs: the plan as steps of both halves (`steps`), for one backend.
    emit: Write a schedule out as two jaxprs.
    verify: Check that the two jaxprs together mean what the one did.
    sweeps: Write a scan in segments, forward and again in the backward.
    reruns: Say which loops can run in segments, and what that takes.
    segments: Run a long loop in segments: keep the carry between them, and run each segment again.
    memory: Replay a plan and count the bytes alive at every step.
    lifetimes: Say when each buffer of a plan lives.
    outline: Arrange the ops of a graph in the scopes that the user sees.
    picture: Give a notebook the numbers and shapes to draw.
    displays: Show graphs, plans and what changes between two plans in a notebook.
    stages: Divide the forward into stages at narrow places, and say in which stage each value is made and read.
    undo: Say what one stage takes while the backward undoes it.
    chain: Divide a chain of layers: what to keep of each, and which to run again together.
    budget: List the plans worth trying for a budget, with the peak and the time of each.
    best: Choose the default plan: the minimum cut, or a plan of the front that is smaller and no slower.
    split: Take a joint jaxpr and return two: the whole folder in one function.
"""

from jointcut.partition.displays import graph_page as graph_page
from jointcut.partition.graph import Graph as Graph
from jointcut.partition.graph import Op as Op
from jointcut.partition.graph import Value as Value
from jointcut.partition.plan import Plan as Plan
from jointcut.partition.plan import Saved as Saved
from jointcut.partition.roles import Role as Role
from jointcut.partition.roles import Roles as Roles
from jointcut.partition.split import Split as Split
from jointcut.partition.split import split as split
from jointcut.partition.text import parse as parse
from jointcut.partition.text import show as show
