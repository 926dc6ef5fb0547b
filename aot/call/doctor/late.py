"""Find the weight gradients that XLA computes late, and let each layer wait for its own.

The backward of a layer has two products: one for the layer below, and one for the weights, which nothing waits for. XLA
may put off the latter, as something to do while devices talk to each other. Then what it reads waits with it: an
activation and a cotangent of every layer. A barrier on the operands of a product in the forward is one on their
cotangents in the backward, so that the layer below waits for the gradient of the weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.aot.call.function import Function
from jointcut.aot.report.instructions import Index, Instruction
from jointcut.aot.report.liveness import Liveness
from jointcut.partition.program.jax import abstract, jaxprs, runtime
from jointcut.partition.program.jax.jaxprs import Equation, Jaxpr
from jointcut.partition.program.places import line_of, place
from jointcut.partition.program.primitives import ENCLOSING, OPENED, PRODUCTS

_BACKWARD = "transpose("  # in the names of instructions that carry a cotangent
_PASSING = {"get-tuple-element", "tuple", "bitcast", "opt-barrier", "add-dependency"}
_WITH_PRODUCTS = OPENED | (ENCLOSING - {"shard_map"})  # calls whose products get barriers, too


@dataclass(frozen=True)
class Late:
    """The weight gradients of a line that could have been computed before a time, and the bytes that wait for them."""

    line: str
    count: int
    bytes: int


def late_gradients(liveness: Liveness, time: int) -> list[Late]:
    """Return the weight gradients that a program computes after a time although what they read is there, by line."""
    return _Waiting(liveness, time).by_line()


@dataclass
class _Waiting:
    liveness: Liveness
    time: int

    def by_line(self) -> list[Late]:
        """Return what waits for late products alone."""
        late = self.late
        counts = Counter(late.values())
        sizes: Counter[str] = Counter()
        for value in self.liveness.values:
            if value.start <= self.time < value.end:
                readers = [r for r in self.readers_of(value.maker, value.index) if self.times[r] > self.time]
                if readers and late.keys() >= set(readers):
                    sizes[late[readers[0]]] += value.size
        return [Late(line, counts[line], size) for line, size in sizes.most_common()]

    @property
    def times(self) -> dict[int, int]:
        return self.liveness.order.times

    @cached_property
    def late(self) -> dict[int, str]:
        """The late products, with the line of each."""
        found, known = self.liveness.instructions, dict[int, bool]()
        late = dict[int, str]()
        for identity in self.liveness.order.instructions[self.time + 1 :]:
            product = found.by_id[identity]
            is_gradient = self.is_product(product) and _BACKWARD in product.name and identity not in self.needed
            if is_gradient and all(self.is_there(operand, known) for operand in product.operands):
                named = found.named(product)
                late[identity] = place("", found.frames.of(named.frame)).line
        return late

    def is_product(self, instruction: Instruction) -> bool:
        """Whether an instruction multiplies matrices or convolves."""
        if instruction.opcode == "fusion":
            return instruction.called[0] in self.multiplying
        by_library = instruction.opcode == "custom-call" and instruction.name.rpartition("/")[2] in PRODUCTS
        return by_library or instruction.opcode in ("dot", "convolution")

    @cached_property
    def multiplying(self) -> set[int]:
        """The computations that hold a product."""
        every = self.liveness.instructions.by_id.values()
        return {i.computation for i in every if i.opcode in ("dot", "convolution")}

    @cached_property
    def needed(self) -> set[int]:
        """The instructions from which a product of the program is computed."""
        found, needed = self.liveness.instructions, set[int]()
        products = [i for i in self.liveness.order.instructions if self.is_product(found.by_id[i])]
        stack = [operand for i in products for operand in found.by_id[i].operands]
        while stack:
            if (identity := stack.pop()) not in needed:
                needed.add(identity)
                stack += found.by_id[identity].operands
        return needed

    def is_there(self, identity: int, known: dict[int, bool]) -> bool:
        """Whether a value is computed by the time."""
        if identity not in known:
            instruction = self.liveness.instructions.by_id[identity]
            known[identity] = self.times[identity] <= self.time or (
                instruction.opcode in _PASSING and all(self.is_there(o, known) for o in instruction.operands)
            )
        return known[identity]

    def readers_of(self, maker: int, index: Index) -> Iterator[int]:
        """Yield the instructions that read a value, also behind barriers and out of tuples."""
        found, stack = self.liveness.instructions.by_id, [(maker, index)]
        while stack:
            identity, at = stack.pop()
            for reader, position in self.users[identity]:
                instruction = found[reader]
                if instruction.opcode == "tuple":
                    stack.append((reader, (position, *at)))
                elif instruction.opcode == "get-tuple-element":
                    stack += [(reader, at[1:])] if at[:1] == (instruction.element,) else []
                elif instruction.opcode in _PASSING:
                    stack.append((reader, at))
                else:
                    yield reader

    @cached_property
    def users(self) -> dict[int, list[tuple[int, int]]]:
        """The instructions that have each as an operand, with its position."""
        users: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for identity in self.liveness.order.instructions:
            for position, operand in enumerate(self.liveness.instructions.by_id[identity].operands):
                users[operand].append((identity, position))
        return users


# ---------------------------------------------------------------------------------------------------------- the cure


def barred(loss: Callable[..., Any], lines: Collection[str]) -> Callable[..., Any]:
    """Return a loss, or an `aot.function`, with a barrier on the operands of each product of some lines."""
    if isinstance(loss, Function):
        return Function(barred(loss._function, lines), loss._options)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

        def flat(*arrays: Any) -> Any:
            given = dict(zip(places, arrays, strict=True))
            again = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            inner_args, inner_kwargs = jax.tree.unflatten(tree, again)
            return loss(*inner_args, **inner_kwargs)

        arrays = [leaves[i] for i in places]
        closed, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        jaxpr, consts = jaxprs.opened(closed)
        made = jaxprs.constants_first(_with_barriers(jaxpr, lines))
        return jax.tree.unflatten(jax.tree.structure(out), runtime.evaluate(made, *consts, *arrays))

    return run


def _with_barriers(jaxpr: Jaxpr, lines: Collection[str]) -> Jaxpr:
    eqns = list[Equation]()
    for eqn in jaxpr.eqns:
        operands = list(jaxprs.variables(eqn.invars))
        if eqn.primitive.name in PRODUCTS and len(operands) == len(eqn.invars) and line_of(eqn) in lines:
            structs = [abstract.struct(v.aval) for v in operands]
            (barrier,) = jaxprs.opened(jax.make_jaxpr(jax.lax.optimization_barrier)(structs))[0].eqns
            behind = [jaxprs.fresh(v.aval) for v in operands]
            eqns += [jaxprs.rebound(barrier, operands, behind), jaxprs.rebound(eqn, behind, eqn.outvars)]
        elif eqn.primitive.name in _WITH_PRODUCTS:
            eqns.append(eqn.replace(params={name: _inside(each, lines) for name, each in eqn.params.items()}))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _inside(param: Any, lines: Collection[str]) -> Any:
    if isinstance(param, jaxprs.Jaxpr):  # also a closed jaxpr, where JAX merged the two classes
        return _with_barriers(param, lines)
    is_closed = isinstance(param, jaxprs.ClosedJaxpr)
    return jaxprs.ClosedJaxpr(_with_barriers(param.jaxpr, lines), param.consts) if is_closed else param
