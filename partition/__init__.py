"""Cut one joint program into a forward and a backward.

This folder is usable on its own, on any joint jaxpr: `from jointcut.partition import split`. A joint jaxpr is a forward
and its backward traced as one program. It is read into a `Graph`. A search makes a `Plan`: the values to save and the
ops to run again. A `Schedule` lists the steps of both halves, and two jaxprs are written from it. Graph, plan and
schedule are records; print one to read it.

Where to add what:

- a new op with a program inside, such as `while`: a file in `bodies`, and a line in `bodies/kinds`;
- a rule against saving or recomputing a value: `prices/rules`;
- facts of a primitive, such as heavy or random: words in its line of `program/primitives`;
- the memory and rates of an accelerator: a line in `prices/targets`; the price of an op: `prices/counts`;
- the axes along which a primitive treats rows alone: a rule in `program/ties`; rows by their number: `tiles/blocks`;
- a new step of the schedule: a class in `lower/steps`; a new form of a residual: a line in `packing/forms`;
- an ability of a target, such as host memory: a field of `plans/backend`;
- a new search: a file in `search`, with a function from a `Problem` to a `Plan`, and a name in `search/best`;
- a change in JAX: a file of `program/jax`, and nowhere else.

Files, in reading order:

    errors: Say what went wrong, where, and what to do next.
    figures: Write bytes, seconds and counts as people read them.
    program: Hold the joint program, before anything is decided.
    rewrite: Rewrite a jaxpr so that less of it must be saved or computed.
    tiles: Run equations of a program block by block, so that their arrays are never whole.
    bodies: Open ops with a program inside, such as `scan`, and write them again.
    packing: Bring values to the forms in which they wait for the backward, and back.
    prices: Give each value and op a price, and say which values may be saved or computed again.
    plans: Hold the plan, and the problem that it solves.
    lower: Schedule a plan, write the two jaxprs, and predict their peak memory.
    passes: Let a user's pass rewrite each half before XLA compiles it.
    search: Choose which values to save, for a price or a budget; a file for each method.
    drawing: Draw graphs and plans as pages and pictures.
    split: The entry point: a joint jaxpr goes in, forward and backward come out.
"""

from jointcut.partition.drawing.displays import graph_page as graph_page
from jointcut.partition.passes import HalfPass as HalfPass
from jointcut.partition.plans.plan import Plan as Plan
from jointcut.partition.plans.plandiff import diff as diff
from jointcut.partition.plans.problem import Problem as Problem
from jointcut.partition.plans.saved import Saved as Saved
from jointcut.partition.prices.cost import CostModel as CostModel
from jointcut.partition.prices.cost import Roofline as Roofline
from jointcut.partition.prices.rules import CheckpointPolicy as CheckpointPolicy
from jointcut.partition.prices.rules import Constraint as Constraint
from jointcut.partition.program.graph import Graph as Graph
from jointcut.partition.program.graph import Op as Op
from jointcut.partition.program.graph import Value as Value
from jointcut.partition.program.roles import Role as Role
from jointcut.partition.program.roles import Roles as Roles
from jointcut.partition.program.roles import Side as Side
from jointcut.partition.program.text import parse as parse
from jointcut.partition.program.text import show as show
from jointcut.partition.search.budget import Planner as Planner
from jointcut.partition.search.mincut import min_cut as min_cut
from jointcut.partition.search.mincut import save_all as save_all
from jointcut.partition.split import Split as Split
from jointcut.partition.split import split as split
