"""Cut one joint program into a forward and a backward.

Usable on its own, on any joint jaxpr: `from jointcut.partition import split`.

Files, in reading order:

    errors: Say what went wrong, where, and what to do next.
    figures: Write bytes, seconds and counts as people read them.
    cells: Name the place of a call as its reader does: by file and line, or by the cell of a notebook.
    jaxprs: Borrow from JAX's internals here, and nowhere else.
    page: Write a report as a page: one HTML file that needs no network.
    notebook: Let a class show itself in a notebook, drawn by a file that comes after it.
    places: Say where an equation comes from, in the names that the user gave.
    sizes: Put numbers in the place of symbolic sizes.
    roles: Name what each input and output of the joint program stands for.
    bodies: Describe an op that holds a program: its kind, and what its operands and results mean.
    graph: Hold the joint program as ops and values.
    text: Print a graph as text, and read it back.
    sides: Mark the ops that must run forward, those that must run backward, and those that may do either.
    primitives: Describe every primitive in one table.
    rules: Decide what may be saved and what may be recomputed, with a reason.
    counts: Count what a primitive computes on arrays of given shapes.
    flops: Count what one equation computes and moves.
    cost: Price every value in bytes and every op in seconds.
    backend: Describe the habits of a compiler, so that the two halves are written for it once.
    problem: Hold a program with all that is known before a plan is searched for.
    rewrite: Open calls, and merge equations that compute the same.
    scans: Read a scan and write one: whole, or in segments, forward and again in the backward.
    kinds: List the kinds of ops whose program can be opened, by the names of their primitives.
    loops: Read a joint jaxpr into a graph, with each forward loop joined to the loops that read it.
    views: Read a value back from an output that is a view of it.
    sparse: Split a gradient that is a sum of scattered rows into the rows and their places.
    specialise: Leave out of a backward the equations that zero cotangents make needless.
    plan: Record a decision: what is saved, what is recomputed, and why.
    twins: Find the values of one program in another that has the same forward.
    planfile: Write a plan to JSON, and read it back for its program.
    plandiff: Say what changes from one plan to another of the same program.
    network: Turn values, prices and rules into a flow network.
    mincut: Find the cheapest set of values to save.
    peel: Peel a network: find the nodes that leave the minimum cut as the price of a second rises.
    front: Find the cheapest cut at every price of a second.
    order: Order the backward so that a recomputed value lives briefly.
    steps: The schedule: the steps of both halves, in the order in which they run.
    reruns: Say which loops can run in segments, and what that takes.
    follow: Follow a schedule: say what stands for each value at each level of the program.
    schedule: Say when each op runs: the plan as steps of both halves (`steps`), for one backend.
    emit: Write a schedule out as two jaxprs.
    verify: Check that the two jaxprs together mean the same as the joint one.
    memory: Count the bytes alive at every step of a program.
    replay: Replay a schedule: count the bytes of both halves as one program, without writing them.
    lifetimes: Say when each buffer of a plan lives.
    outline: Arrange the ops of a graph in the scopes that the user sees.
    picture: Give a notebook the numbers and shapes to draw.
    displays: Show graphs, plans and what changes between two plans in a notebook.
    stretches: Divide the forward into stretches at narrow places, and say in which stretch each value is made and read.
    undo: Count the bytes and seconds that one stretch takes while the backward undoes it.
    chain: Divide a chain of layers: what to save of each, and which to run again together.
    budget: List the plans worth trying for a budget, with the peak and the time of each.
    best: Choose the default plan: the minimum cut, or a plan of the front that is smaller and no slower.
    passes: Let a user's pass rewrite each half before XLA compiles it.
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
