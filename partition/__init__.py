"""Cut one joint program into a forward and a backward.

Usable on its own, on any joint jaxpr: `from jointcut.partition import split`. A joint jaxpr is read into a graph; a
search makes a plan of what is saved; a schedule says in which order both halves run; two jaxprs are written from it.
Each of these is a record that prints as text.

Where to add what: a kind of op that holds a program is a file in `nesting`, listed in `nesting/kinds`. A rule against
saving or recomputing is a line in `prices/rules`. A kind of step, or another form in which a residual is kept, is a
class in `lower/steps`. What is known of a primitive is a line in `program/primitives`. A way to search is a function
from a `Problem` to a `Plan`, as in `search/mincut`.

Files, in reading order:

    errors: Say what went wrong, where, and what to do next.
    figures: Write bytes, seconds and counts as people read them.
    program: Hold the joint program: what there is before anything is decided.
    rewrite: Rewrite a jaxpr into one that means the same and keeps less.
    nesting: Open ops that hold a program, and write them again.
    prices: Say what each value and op costs, and what may be done with it.
    plans: Hold the decision as a record, and what it was taken from.
    lower: Say in which order a plan runs, write the two halves, and count what they hold.
    search: Search for what to keep.
    drawing: Draw graphs and plans for notebooks and reports.
    split: Take a joint jaxpr and return two: the whole folder in one function.
"""

from jointcut.partition.drawing.displays import graph_page as graph_page
from jointcut.partition.plans.plan import Plan as Plan
from jointcut.partition.plans.plan import Saved as Saved
from jointcut.partition.plans.plandiff import diff as diff
from jointcut.partition.plans.problem import Problem as Problem
from jointcut.partition.prices.cost import CostModel as CostModel
from jointcut.partition.prices.cost import Roofline as Roofline
from jointcut.partition.prices.rules import Constraint as Constraint
from jointcut.partition.prices.rules import Demand as Demand
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
