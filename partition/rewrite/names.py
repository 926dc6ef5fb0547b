"""Let all readers of a named array read it by its name.

`h = checkpoint_name(tanh(x), "h")` makes two variables of one array, and the derivative of `tanh` reads the variable
without a name. A plan that has to save `h` would save the array twice. A plan that must not save `h` would save it
nevertheless. After this rewrite only the name itself reads the variable without a name, also in the bodies of loops,
branches and `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jointcut.partition.program.jax.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var, opened
from jointcut.partition.program.primitives import ENCLOSING, NAME, WITH_BODIES
from jointcut.partition.rewrite.simplify import holds, renamed, with_bodies


def by_name(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program in which named arrays are read by their names; its inputs are read as before."""
    if not holds(closed, NAME):
        return closed
    jaxpr, consts = opened(closed)
    return ClosedJaxpr(_by_name(jaxpr, ()), consts)


def _by_name(jaxpr: Jaxpr, given: Sequence[Var]) -> Jaxpr:
    """The same equations read by name; of the inputs only those in `given` are."""
    eqns = [_opened(eqn) for eqn in jaxpr.eqns]
    makers = {v for eqn in eqns for v in eqn.outvars}.union(given)
    following: dict[Var, list[Equation]] = {}  # for each variable without a name, the equations that name it
    first: dict[Var, Var] = {}  # for each named variable, the variable without a name
    for eqn in eqns:
        (named,) = eqn.invars if eqn.primitive.name == NAME else (None,)
        if isinstance(named, Var) and (made := first.get(named, named)) in makers:
            following.setdefault(made, []).append(eqn)
            first[eqn.outvars[0]] = made
    if not following:
        return jaxpr.replace(eqns=eqns)
    return _reordered(jaxpr, eqns, following)


def _opened(eqn: Equation) -> Equation:
    if eqn.primitive.name not in WITH_BODIES | ENCLOSING:
        return eqn
    return with_bodies(eqn, lambda body: _by_name(body, body.invars))


def _reordered(jaxpr: Jaxpr, eqns: list[Equation], following: dict[Var, list[Equation]]) -> Jaxpr:
    """Put each name right after the variable that it names, in a row; all other readers read the last name."""
    names = {id(eqn) for row in following.values() for eqn in row}
    reads: dict[Var, Atom] = {}
    for v, row in following.items():
        reads.update(dict.fromkeys([v, *(eqn.outvars[0] for eqn in row)], row[-1].outvars[0]))
    others, ends = renamed(jaxpr.replace(eqns=[eqn for eqn in eqns if id(eqn) not in names]), reads)
    out: list[Equation] = []

    def name(variables: Iterable[Var]) -> None:
        for v in variables:
            operand: Atom = v
            for eqn in following.get(v, ()):
                out.append(eqn.replace(invars=[operand]))
                operand = eqn.outvars[0]

    name(jaxpr.invars)
    for eqn in others:
        out.append(eqn)
        name(eqn.outvars)
    return jaxpr.replace(eqns=out, outvars=ends)
