"""Say a plan in JAX's own words: which names and primitives a policy of `jax.checkpoint` must save.

This is for code that cannot take a dependency. JAX asks a policy about each equation of the function, and about each
equation that its derivative computes ahead. It passes the primitive, the operands' types and the parameters. If the
policy answers yes, JAX saves the results that the backward reads. So a policy names a value by its `checkpoint_name`,
else by its primitive, else by its primitive and operand types.

To JAX a value and its name are two values. Where the derivative reads the value without a name, as the derivative of
`tanh` does, the policy names the primitive. Around a loop, JAX would run the whole loop again. So the policy belongs on
the loop's body; JAX keeps its carries as we do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.plans.problem import Problem
from jointcut.partition.prices.keys import Array, arrays_of
from jointcut.partition.prices.rules import KEPT_OUT
from jointcut.partition.program.bodies import Nested
from jointcut.partition.program.graph import LITERAL, OPEN, STEP, TOP, Graph, Op
from jointcut.partition.program.primitives import BY_RESULT, NAME, SPARSE_SCOPE
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.sides import first_met, reached

_POLICIES = "jax.checkpoint_policies"
_INDENT = "    "


def underived(problem: Problem | None, nested: Iterable[Nested]) -> str:
    """Return the op through which plain JAX has no gradient, with its line; empty where there is none."""
    ops = problem.graph.ops if problem is not None else ()
    back = (op for op in ops if op.origin is Side.BACKWARD and SPARSE_SCOPE in op.scope)
    products = (f"the product of two BCOO at {op.source}" for op in back)
    return next((loop.name for loop in nested if loop.is_of_jax), "") or next(products, "")


def residuals_of_jax(problem: Problem) -> frozenset[int]:
    """The values that JAX itself would save, whatever is demanded of them."""
    graph, verdicts = problem.graph, problem.verdicts
    read = {v for op in graph.ops if op.origin is Side.BACKWARD for v in op.inputs if op.name != STEP}
    handed = (v for v in map(graph.outermost, graph.results(Role.GRADIENT) | read) if _traced_forward(problem, v))
    return sources(graph, handed, lambda v: verdicts[v].not_saved == KEPT_OUT)


def sources(graph: Graph, wanted: Iterable[int], is_out: Callable[[int], bool]) -> frozenset[int]:
    """The wanted values; a value that is out is replaced by the nearest values from which it is computed."""
    met = reached(wanted, lambda v: map(graph.outermost, graph.made_from(v)) if is_out(v) else ())
    made = ((v, op) for v in met if (op := graph.maker_of(v)) is not None)
    return frozenset(v for v, op in made if op.name != LITERAL and not is_out(v))


def _traced_forward(problem: Problem, v: int) -> bool:
    graph, maker = problem.graph, problem.graph.values[v].maker
    if maker is None or problem.sides.is_late(v):
        return False
    return graph.ops[maker].origin is Side.FORWARD and graph.ops[maker].name not in (STEP, LITERAL)


@dataclass(frozen=True)
class Unsaid:
    """A value that plain JAX treats otherwise than the plan: its type, op and line, and the bytes of all copies."""

    what: str
    bytes: int


@dataclass(frozen=True)
class JaxPolicy:
    """A policy of `jax.checkpoint` that saves the values of a plan, as far as JAX can be told; `print` it as Python.

    It is callable as JAX's policies are: `jax.checkpoint(f, policy=plan.to_policy())`.

    Attributes:
        names: the `checkpoint_name`s of values to save.
        primitives: the primitives whose results are all saved.
        typed: the primitives whose results are saved for certain operand types, each with the types.
        loops: the lines of the loops whose bodies it is for; empty where it is for the whole function.
        missing: the values that the plan saves, and plain JAX computes again.
        extra: the values that plain JAX saves, and the plan does not.
        notes: other decisions of the plan that no policy can say.
    """

    names: tuple[str, ...]
    primitives: tuple[str, ...]
    typed: tuple[tuple[str, tuple[str, ...]], ...]
    loops: tuple[str, ...]
    missing: tuple[Unsaid, ...]
    extra: tuple[Unsaid, ...]
    notes: tuple[str, ...] = ()

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> bool:
        """Whether JAX may save the results of an equation."""
        if prim.name == NAME:
            return params["name"] in self.names
        return prim.name in self.primitives or (prim.name, tuple(map(type_of, avals))) in self.typed

    @property
    def bytes_missing(self) -> int:
        """Bytes that the plan saves and plain JAX does not."""
        return sum(row.bytes for row in self.missing)

    @property
    def bytes_extra(self) -> int:
        """Bytes that plain JAX saves and the plan does not."""
        return sum(row.bytes for row in self.extra)

    @property
    def is_exact(self) -> bool:
        """Whether plain JAX saves the values of the plan, and no others."""
        return not (self.missing or self.extra or self.notes)

    def __str__(self) -> str:
        """Python to paste: the policy, the place where it belongs, and the decisions that it cannot say."""
        return "\n".join([*self._remarks(), "import jax", "", "", *self._definition(), "", *self._use()])

    def _remarks(self) -> Iterable[str]:
        for note in self.notes:
            yield f"# The plan also {note}."
        lists = (self.missing, "Computed again, though the plan saves it"), (self.extra, "Saved beyond the plan")
        for rows, text in lists:
            if rows:
                yield f"# {text}: {human_bytes(sum(row.bytes for row in rows))}."
                largest = sorted(rows, key=lambda row: -row.bytes)[:4]
                yield from (f"#   {human_bytes(row.bytes)}  {row.what}" for row in largest)
                if len(rows) > len(largest):
                    yield f"#   and {counted(len(rows) - len(largest), 'other value')}"

    def _definition(self) -> Iterable[str]:
        if not self.primitives and not self.typed:
            yield f"policy = {_POLICIES}.save_only_these_names({', '.join(map(repr, self.names))})"
            return
        yield "def policy(prim, *avals, **params):"
        if self.names:
            yield f'{_INDENT}if prim.name == "{NAME}":'
            yield f"{_INDENT * 2}return params['name'] in {set(self.names)!r}"
        answers = [f"prim.name in {set(self.primitives)!r}"] if self.primitives else []
        if self.typed:
            yield f"{_INDENT}kind = prim.name, *(f\"{{a.dtype}}[{{','.join(map(str, a.shape))}}]\" for a in avals)"
            yield f"{_INDENT}kinds = {{"
            yield from (f"{_INDENT * 2}{(name, *types)!r}," for name, types in self.typed)
            yield f"{_INDENT}}}"
            answers.append("kind in kinds")
        yield f"{_INDENT}return {' or '.join(answers)}"

    def _use(self) -> Iterable[str]:
        for line in self.loops:
            yield f"# around the body of the loop at {line}:"
        call = "body = jax.checkpoint(body, policy=policy, prevent_cse=False)" if self.loops else ""
        yield call or "# around the function, or around each of its blocks:\nf = jax.checkpoint(f, policy=policy)"


def type_of(aval: Any) -> str:
    """An array's type as text: `float32[8,128]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]" if hasattr(aval, "dtype") else str(aval)


# --------------------------------------------------------------------------------------------- how it is found

_Key = tuple[str, Any]  # a kind of key, "name", "primitive" or "typed", and its text


def to_policy(problem: Problem, saved: Iterable[int], notes: Iterable[str] = ()) -> JaxPolicy:
    """Return the smallest policy found that saves these values; `notes` are other decisions of the plan.

    For each value it tries the coarsest key that saves no more than the plan does. A value is left out if its finest
    key would save more than the value's own bytes beyond the plan.
    """
    said = _Said(problem, frozenset(saved))
    keys = said.chosen()
    kept = said.kept(keys)
    missing, extra = said.target - kept, kept - said.target
    names, primitives, typed = (tuple(sorted(what for k, what in keys if k == kind)) for kind in _KINDS)
    return JaxPolicy(
        cast("tuple[str, ...]", names),
        cast("tuple[str, ...]", primitives),
        cast("tuple[tuple[str, tuple[str, ...]], ...]", typed),
        tuple(dict.fromkeys(problem.graph.origin_of(op)[1] for op in said.loops)),
        said.rows(missing),
        said.rows(extra),
        tuple(notes),
    )


_KINDS = ("name", "primitive", "typed")


def _is_asked(op: Op) -> bool:
    """Whether JAX asks a policy about the results of an op."""
    return op.payload is not None and op.name not in OPEN


@dataclass(frozen=True)
class _Said:
    """The keys that can name the values of a program, and the values that JAX keeps for them."""

    problem: Problem
    saved: frozenset[int]

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @cached_property
    def loops(self) -> list[Op]:
        """The loops of the forward that are in no other loop."""
        ops = (self.graph.ops[i] for i in self.graph.bodies)
        return [op for op in ops if op.origin is Side.FORWARD and op.region == TOP]

    @cached_property
    def arrays(self) -> dict[int, Array]:
        """The arrays made by equations that JAX asks a policy about, by value."""
        known = arrays_of(self.graph, self.problem.sides)
        own = (array for array in known if array.is_forward and not array.op.inner and _is_asked(array.op))
        return {v: array for array in own for v in array.values}

    @cached_property
    def target(self) -> frozenset[int]:
        """The values that the plan saves; an array under all its names counts as one."""
        return frozenset(map(self.first, self.saved))

    def first(self, v: int) -> int:
        """The value that stands for an array under all its names."""
        return self.arrays[v].values[0] if v in self.arrays else v

    def keys_of(self, v: int) -> list[_Key]:
        """The keys that name a value, the coarsest first; none where JAX is not asked."""
        array = self.arrays.get(v)
        if array is None:
            return []
        if array.names and array.op.name not in BY_RESULT:
            return [("name", name) for name in array.names[-1:]]
        types = tuple(type_of(atom.aval) for atom in array.op.payload.invars)
        return [("primitive", array.op.name), ("typed", (array.op.name, types))]

    def is_given(self, v: int, op: Op) -> bool:
        """Whether JAX keeps a value without being asked."""
        if op.name in OPEN:
            return True
        return bool(self.loops) and self.graph.values[v].loop == TOP and v in self.outside

    @cached_property
    def outside(self) -> frozenset[int]:
        """The values that plain JAX keeps outside the loops whose bodies are checkpointed."""
        return frozenset(v for v in residuals_of_jax(self.problem) if self.graph.values[v].loop == TOP)

    def kept(self, keys: Iterable[_Key]) -> frozenset[int]:
        """The values that plain JAX keeps if it saves the values of these keys."""
        chosen = set(keys)

        def stops(v: int, op: Op) -> bool:
            return op.name not in (STEP, LITERAL) and (self.is_given(v, op) or not chosen.isdisjoint(self.keys_of(v)))

        return frozenset(map(self.first, first_met(self.graph, self.problem.sides.wanted, stops)))

    def chosen(self) -> list[_Key]:
        """The keys: fine ones first, made coarser and fewer as long as JAX keeps the same."""
        governed = (v for v in sorted(self.target) if not self.loops or self.graph.values[v].loop != TOP)
        keys = list(dict.fromkeys(own[-1] for v in governed if (own := self.keys_of(v))))
        for key in list(keys):
            without = [other for other in keys if other != key]
            if self.cost(self.kept(without)) < self.cost(self.kept(keys)):
                keys = without
        kept = self.kept(keys)
        for name in dict.fromkeys(what[0] for kind, what in keys if kind == "typed"):
            coarser = [*(key for key in keys if key[0] != "typed" or key[1][0] != name), ("primitive", name)]
            keys = coarser if self.kept(coarser) == kept else keys
        for key in list(keys):
            without = [other for other in keys if other != key]
            keys = without if self.kept(without) == kept else keys
        return keys

    def cost(self, kept: frozenset[int]) -> int:
        """The bytes by which the values that JAX keeps differ from the plan."""
        return sum(self.problem.prices[v] for v in kept ^ self.target)

    def rows(self, values: Iterable[int]) -> tuple[Unsaid, ...]:
        """The values in words; values that take no bytes of their own are left out."""
        prices, graph = self.problem.prices, self.graph
        rows: list[Unsaid] = []
        for v in sorted(values):
            if prices[v]:
                op = graph.maker_of(v)
                made = f" {op.name} {graph.origin_of(op)[1]}" if op else ""
                trips = f"{graph.values[v].copies} x " if graph.values[v].copies > 1 else ""
                rows.append(Unsaid(f"{trips}{graph.values[v].dtype}{list(graph.values[v].shape)}{made}", prices[v]))
        return tuple(rows)
