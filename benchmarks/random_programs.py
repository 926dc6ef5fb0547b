"""Write random programs as Python text: losses of a few small arrays, with loops, branches, rules and draws.

    print(program(7).text)

A program takes weights (a vector, a matrix and a number), an input, a whole number and a random key, and returns a real
number. What it computes stays small, so that plain JAX's answer can be compared with any other. The same seed gives the
same text. A `twin` is the same program but for one line of a body.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops
from jax import lax

SIDE = 3
#: The types of variables, by name: what a line of a program can read.
NUMBER, VECTOR, MATRIX, HALF, WHOLE, WHOLES, KEY = "number", "vector", "matrix", "half", "whole", "wholes", "key"
LARGEST = "largest"  # a number of Flax's type whose gradient is the largest of its parts, not their sum
FLOATS = (NUMBER, VECTOR, MATRIX)

_PRELUDE = "def loss(weights, x, n, key):\n    v0, v1, v2 = weights['v'], weights['m'], weights['s']\n"
_INITIAL = {VECTOR: ["v0", "x"], MATRIX: ["v1"], NUMBER: ["v2"], WHOLE: ["n"], KEY: ["key"]}


@dataclass(frozen=True)
class Program:
    """One random program: its seed, its text, and the function that the text defines."""

    seed: int
    text: str
    loss: Callable[..., Any] = field(repr=False)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Weights, an input, a whole number and a key."""
        draws = np.random.default_rng(self.seed)
        weights = {
            "v": draws.uniform(-1, 1, SIDE).astype(np.float32),
            "m": draws.uniform(-1, 1, (SIDE, SIDE)).astype(np.float32),
            "s": np.float32(draws.uniform(-1, 1)),
        }
        x = draws.uniform(-1, 1, SIDE).astype(np.float32)
        return *jax.tree.map(jnp.asarray, (weights, x, np.int32(draws.integers(0, 3)))), jax.random.key(self.seed)


def program(seed: int) -> Program:
    """The program of a seed."""
    writer = _Writer(random.Random(seed))
    writer.block({HALF: [], WHOLES: [], LARGEST: []} | _INITIAL, writer.draws.randint(2, 6), 0)
    return _made(
        seed, _PRELUDE + "\n".join(f"    {line}" for line in writer.lines) + f"\n    return {writer.total()}\n"
    )


def twin(of: Program) -> Program | None:
    """The program with a cosine for the first sine in a body, None where no body has one."""
    lines = of.text.splitlines(keepends=True)
    inner = (i for i, line in enumerate(lines) if line.startswith(" " * 8) and "jnp.sin(" in line)
    place = next(inner, None)
    if place is None:
        return None
    lines[place] = lines[place].replace("jnp.sin(", "jnp.cos(", 1)
    return _made(of.seed, "".join(lines))


def _made(seed: int, text: str) -> Program:
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "ruled": ruled, "pulled": pulled}
    names |= {"masked": masked, "force": force, "scaled": scaled, "largest": largest}
    exec(compile(text, f"<random program {seed}>", "exec"), names)
    return Program(seed, text, names["loss"])


@jax.custom_jvp
def ruled(x: Any) -> Any:
    """A sine with a derivative of its own, which is not the cosine."""
    return jnp.sin(x)


ruled.defjvp(lambda primals, tangents: (ruled(*primals), 0.5 * tangents[0] * jnp.cos(primals[0] * 2)))


@jax.custom_vjp
def pulled(x: Any, y: Any) -> Any:
    """A product with a derivative of its own."""
    return jnp.tanh(x) * y


pulled.defvjp(
    lambda x, y: (pulled(x, y), (x, jnp.sin(y))),
    lambda kept, ct: (ct * kept[1], 2 * ct * jnp.tanh(kept[0])),
)


@jax.custom_vjp
def masked(x: Any, y: Any) -> Any:
    """A leaky relu and a product, with a rule that keeps a mask."""
    return jnp.where(x > 0, x, 0.1 * x) * y


masked.defvjp(
    lambda x, y: (masked(x, y), (x > 0, x, y)),
    lambda kept, ct: (jnp.where(kept[0], ct, 0.1 * ct) * kept[2], jnp.where(kept[0], kept[1], 0.1 * kept[1]) * ct),
)


@jax.custom_vjp
def largest(x: Any) -> Any:
    """A number of Flax's type; JAX itself has no transpose of the conversion."""
    return lax.convert_element_type(x, fp8_ops.fp32_max_grad)


largest.defvjp(lambda x: (largest(x), None), lambda _, ct: (lax.convert_element_type(ct, "float32"),))


@jax.custom_vjp
def scaled(x: Any, scale: Any) -> Any:
    """A product with a number of Flax's type, whose gradient is the largest of those from all its readers."""
    return x * lax.convert_element_type(scale, "float32")


def _scaled_back(kept: Any, ct: Any) -> Any:
    x, scale = kept
    largest = jnp.max(jnp.abs(ct * x))
    return ct * lax.convert_element_type(scale, "float32"), lax.convert_element_type(largest, scale.dtype)


scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), _scaled_back)


def force(matrix: Any, x: Any) -> Any:
    """The gradient of a quadratic energy and a well, as models of physics have it inside."""
    return jnp.tanh(jax.grad(lambda z: 0.5 * z @ matrix @ z + jnp.sum(jnp.cos(z)))(x))


class _Writer:
    """Lines of one program, and the variables that the next line can read, by type."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.lines: list[str] = []
        self.scope: dict[str, list[str]] = {}
        self.depth, self.count = 0, 2

    def block(self, given: dict[str, list[str]], count: int, depth: int) -> None:
        """Write some lines that read what is given and each other."""
        self.scope, self.depth = {kind: list(names) for kind, names in given.items()}, depth
        for _ in range(count):
            self.line()

    def line(self) -> None:
        """Write one line, or one with a body."""
        deep = (self.scan, self.scan, self.scan, self.cond, self.repeat, self.each_row, self.again)
        flat = (self.unary, self.binary, self.product, self.reduced, self.moved, self.whole, self.drawn, self.cast,
                self.rule, self.row, self.barrier, self.literal, self.largest)  # fmt: skip
        nests = self.depth < 3 and self.draws.random() < (0.4, 0.35, 0.2)[self.depth]
        self.draws.choice(deep if nests else flat)()

    def total(self) -> str:
        """A number that depends on the last of each kind, and on some others."""
        ends = [names[-1] for kind in (VECTOR, MATRIX, NUMBER, HALF) if (names := self.scope[kind])]
        ends += self.draws.sample(self.scope[VECTOR], 1)
        return " + ".join(f"jnp.sum(jnp.sin({name}.astype('float32')))" for name in dict.fromkeys(ends))

    # -------------------------------------------------------------------------------------------------- helpers

    def new(self, kind: str, text: str) -> str:
        """Write a line that makes a variable."""
        name = self.name()
        self.lines.append(f"{name} = {text}")
        self.scope[kind].append(name)
        return name

    def name(self) -> str:
        """A name that is not taken."""
        self.count += 1
        return f"v{self.count}"

    def any(self, kind: str) -> str:
        """A variable of a type, late ones rather than early ones."""
        names = self.scope[kind]
        return self.draws.choice(names[-3:] if self.draws.random() < 0.7 else names)

    def float(self) -> str:
        """A type of floating-point numbers."""
        return self.draws.choice((NUMBER, VECTOR, VECTOR, MATRIX))

    # ------------------------------------------------------------------------------------------------- one line

    def unary(self) -> None:
        kind = self.float()
        text = self.draws.choice((
            "jnp.sin({})", "jnp.cos({})", "jnp.tanh({})", "jax.nn.sigmoid({})", "jnp.exp(-{0} * {0})", "0.5 * {}",
            "jnp.sqrt(1 + {0} * {0})", "jnp.arctan({})", "jnp.maximum({}, 0.1)", "-{}", "lax.stop_gradient({})",
            "jax.jit(jnp.sin)({})", "jnp.log1p({0} * {0})", "jnp.where({0} > 0, {0}, jnp.sin({0}))",
        ))  # fmt: skip
        self.new(kind, text.format(self.any(kind)))

    def binary(self) -> None:
        kind = self.float()
        a, b = self.any(kind), self.any(self.draws.choice((kind, kind, NUMBER)))
        self.new(kind, self.draws.choice((f"{a} + {b}", f"{a} - {b}", f"jnp.sin({a} * {b})", f"jnp.tanh({a}) * {b}",
                                          f"jnp.maximum({a}, {b})", f"{a} / (2 + {b} * {b})",
                                          f"jnp.where({a} > {b}, {a}, 0.5)")))  # fmt: skip

    def product(self) -> None:
        m, v = self.any(MATRIX), self.any(VECTOR)
        kind, text = self.draws.choice((
            (VECTOR, f"jnp.tanh({m} @ {v})"), (MATRIX, f"jnp.tanh({m} @ {self.any(MATRIX)})"),
            (MATRIX, f"jnp.outer({v}, {self.any(VECTOR)})"), (NUMBER, f"jnp.tanh({v} @ {self.any(VECTOR)})"),
            (VECTOR, f"jnp.einsum('ij,i->j', {m}, {v}) / 3"), (VECTOR, f"force({m}, {v})"),
        ))  # fmt: skip
        self.new(kind, text)

    def reduced(self) -> None:
        kind, text = self.draws.choice((
            (NUMBER, f"jnp.mean({self.any(MATRIX)})"), (NUMBER, f"jnp.max({self.any(VECTOR)})"),
            (VECTOR, f"jnp.mean({self.any(MATRIX)}, axis={self.draws.randint(0, 1)})"),
            (VECTOR, f"jnp.cumsum({self.any(VECTOR)}) / 3"), (VECTOR, f"jax.nn.softmax({self.any(VECTOR)})"),
            (VECTOR, f"jnp.sort({self.any(VECTOR)})"), (NUMBER, f"jax.nn.logsumexp({self.any(VECTOR)})"),
        ))  # fmt: skip
        self.new(kind, text)

    def moved(self) -> None:
        kind, text = self.draws.choice((
            (VECTOR, f"{self.any(VECTOR)}[::-1]"), (MATRIX, f"{self.any(MATRIX)}.T"),
            (VECTOR, f"{self.any(MATRIX)}.reshape(-1)[2:{2 + SIDE}]"),
            (MATRIX, f"jnp.stack([{self.any(VECTOR)}] * {SIDE})"),
            (VECTOR, f"jnp.concatenate([{self.any(VECTOR)}[1:], {self.any(VECTOR)}[:1]])"),
            (MATRIX, f"{self.any(MATRIX)} + {self.any(VECTOR)}"), (VECTOR, f"jnp.full({SIDE}, {self.any(NUMBER)})"),
        ))  # fmt: skip
        self.new(kind, text)

    def whole(self) -> None:
        self.new(WHOLE, self.draws.choice((
            f"{self.any(WHOLE)} + 1", f"{self.any(WHOLE)} * 2 % 5", f"jnp.int32(3 * {self.any(NUMBER)})",
            f"jnp.argmax({self.any(VECTOR)}).astype('int32')", f"jnp.sum({self.any(VECTOR)} > 0, dtype='int32')",
        )))  # fmt: skip

    def row(self) -> None:
        n, v, m = self.any(WHOLE), self.any(VECTOR), self.any(MATRIX)
        kind, text = self.draws.choice((
            (NUMBER, f"{v}[{n} % {SIDE}]"), (VECTOR, f"{m}[{n} % {SIDE}]"), (NUMBER, f"jnp.float32({n} % 4)"),
            (VECTOR, f"{v}.at[{n} % {SIDE}].add({self.any(NUMBER)})"),
            (MATRIX, f"lax.dynamic_update_slice({m}, {v}[None], ({n} % {SIDE}, 0))"),
            (MATRIX, f"{m}.at[{n} % {SIDE}].set({v})"),
            (VECTOR, f"jnp.take({v}, jnp.array([0, 2, 0]) + 0 * {n})"),
        ))  # fmt: skip
        self.new(kind, text)

    def drawn(self) -> None:
        key, kind = self.any(KEY), self.float()
        if self.draws.random() < 0.4:
            self.new(KEY, self.draws.choice((f"jax.random.split({key})[0]", f"jax.random.fold_in({key}, 7)",
                                             f"jax.random.fold_in({key}, {self.any(WHOLE)})")))  # fmt: skip
        a = self.any(kind)
        self.new(kind, self.draws.choice((f"jnp.where(jax.random.bernoulli({key}, 0.7, {a}.shape), {a}, 0.0)",
                                          f"{a} + 0.1 * jax.random.normal({key}, {a}.shape)",
                                          f"jnp.sin({a} * jax.random.uniform({key}, {a}.shape))")))  # fmt: skip

    def cast(self) -> None:
        if self.scope[HALF] and self.draws.random() < 0.6:
            h = self.any(HALF)
            kind, text = self.draws.choice(((VECTOR, f"{h}.astype('float32')"), (HALF, f"jnp.sin({h})"),
                                            (HALF, f"{h} * {self.any(HALF)}")))  # fmt: skip
            self.new(kind, text)
        else:
            self.new(HALF, f"{self.any(VECTOR)}.astype('bfloat16')")

    def rule(self) -> None:
        kind = self.float()
        a, b = self.any(kind), self.any(kind)
        self.new(kind, self.draws.choice((f"ruled({a})", f"pulled({a}, {b})", f"jnp.tanh(masked({a}, {b}))")))

    def literal(self) -> None:
        v, m, n = self.any(VECTOR), self.any(MATRIX), self.any(NUMBER)
        kind, text = self.draws.choice((
            (VECTOR, f"jnp.dot(0.7, {v})"), (NUMBER, f"jnp.tanh(jnp.dot({n}, 2.0))"),
            (VECTOR, f"jnp.clip({v}, -0.5, 0.4)"), (VECTOR, f"lax.pad({v}, 0.5, ((1, -1, 0),))"),
            (VECTOR, f"{v}.at[1].set(0.3)"), (VECTOR, f"lax.select_n(True, {v}, 2 * {v})"),
            (MATRIX, f"lax.dynamic_update_slice({m}, jnp.full((1, 2), 0.5), (0, 1))"),
            (MATRIX, f"lax.reduce_window({m}, 0.0, lax.add, (2, 2), (1, 1), 'SAME') / 4"),
            (VECTOR, f"jnp.power(1.5, {v})"), (VECTOR, f"lax.scan(lambda c, x: (c, c * x), 0.5, {v})[1]"),
            (NUMBER, f"jax.grad(lambda z: jnp.dot(2.0, jnp.sin(z)))({n})"),
            (VECTOR, f"lax.dynamic_slice({m}, (1, 0), (1, {SIDE}))[0]"),
        ))  # fmt: skip
        self.new(kind, text)

    def largest(self) -> None:
        if self.scope[LARGEST] and self.draws.random() < 0.7:
            self.new(VECTOR, f"jnp.tanh(scaled({self.any(VECTOR)}, {self.any(LARGEST)}))")
        else:
            self.new(LARGEST, f"largest(jnp.float32({self.any(NUMBER)}))")

    def barrier(self) -> None:
        a, b = self.name(), self.name()
        other = self.draws.choice((self.any(NUMBER), "1.0", "0"))
        self.lines.append(f"{a}, {b} = lax.optimization_barrier((jnp.cos({self.any(VECTOR)}), {other}))")
        self.scope[VECTOR].append(a)
        self.new(NUMBER, f"0.5 * {b}")

    # ----------------------------------------------------------------------------------------- lines with a body

    def inner(self, head: str, more: dict[str, list[str]], ends: Callable[[], str]) -> None:
        """Write a function whose body reads what is around it and `more`; `ends` says what it returns."""
        outer, depth, lines = self.scope, self.depth, self.lines
        closed = {kind: names[-2:] for kind, names in outer.items()}
        self.lines = []
        self.block({kind: [*closed[kind], *more.get(kind, [])] for kind in outer}, self.draws.randint(1, 3), depth + 1)
        body = [*self.lines, f"return {ends()}"]
        self.scope, self.depth, self.lines = outer, depth, [*lines, head, *(f"    {line}" for line in body)]

    def carried(self) -> list[tuple[str, str]]:
        """What a loop carries, with what it starts with: variables, and numbers."""
        kinds = self.draws.sample((VECTOR, MATRIX, NUMBER, NUMBER, WHOLE, KEY), self.draws.randint(1, 3))
        literal = {NUMBER: "0.5", WHOLE: "0"}
        return [(k, literal[k] if k in literal and self.draws.random() < 0.5 else self.any(k)) for k in kinds]

    def scan(self) -> None:
        carried, f = self.carried(), self.name()
        names = [self.name() for _ in carried]
        over = self.draws.choice((None, MATRIX, MATRIX, VECTOR, *[WHOLES] * bool(self.scope[WHOLES])))
        row = self.name()
        more: dict[str, list[str]] = {}
        for (kind, _), name in zip(carried, names, strict=True):
            more.setdefault(kind, []).append(name)
        if over:
            more.setdefault({MATRIX: VECTOR, VECTOR: NUMBER, WHOLES: WHOLE}[over], []).append(row)
        stacks = self.draws.choice((None, VECTOR, WHOLE))

        def ends() -> str:
            out = [self.scope[kind][-1] for kind, _ in carried]
            out = [f"jnp.tanh({o})" if k in FLOATS else o for o, (k, _) in zip(out, carried, strict=True)]
            if over == MATRIX and self.draws.random() < 0.5:  # a number is multiplied by what each step reduces
                factor = f"jnp.{self.draws.choice(('mean', 'max', 'sum'))}({row})"
                names_and_ends = zip(names, out, carried, strict=True)
                out = [f"{name} * {factor}" if k == NUMBER else o for name, o, (k, _) in names_and_ends]
            out = [f"jnp.float32({o})" if k == NUMBER else o for o, (k, _) in zip(out, carried, strict=True)]
            return f"({', '.join(out)},), {self.scope[stacks][-1] if stacks else None}"

        self.inner(f"def {f}(carry, {row}):", more, lambda: ends())
        place = max(i for i, line in enumerate(self.lines) if line == f"def {f}(carry, {row}):")
        self.lines.insert(place + 1, f"    {', '.join(names)}, = carry")
        length = SIDE if over else self.draws.choice((1, 2, 5, 7))
        xs = self.any(over) if over else "None"
        starts = ", ".join(f"jnp.float32({s})" if k == NUMBER else f"jnp.int32({s})" if k == WHOLE else s
                           for k, s in carried)  # fmt: skip
        how = self.draws.choice(("", "", ", reverse=True", ", unroll=2"))
        made, ys = [self.name() for _ in carried], self.name()
        self.lines.append(f"({', '.join(made)},), {ys} = lax.scan({f}, ({starts},), {xs}, length={length}{how})")
        for (kind, _), name in zip(carried, made, strict=True):
            self.scope[kind].append(name)
        if stacks and length == SIDE:
            self.scope[MATRIX if stacks == VECTOR else WHOLES].append(ys)
        elif stacks == VECTOR:
            self.new(VECTOR, f"jnp.mean({ys}, 0)")

    def repeat(self) -> None:
        f, h, i = self.name(), self.name(), self.name()
        self.inner(f"def {f}({i}, {h}):", {VECTOR: [h], WHOLE: [i]}, lambda: f"jnp.tanh({self.scope[VECTOR][-1]})")
        self.new(VECTOR, f"lax.fori_loop(0, {self.draws.choice((2, 3, 5))}, {f}, {self.any(VECTOR)})")

    def cond(self) -> None:
        count = self.draws.choice((2, 2, 3))
        fs = [self.name() for _ in range(count)]
        h = self.name()
        for f in fs:
            self.inner(f"def {f}({h}):", {VECTOR: [h]}, lambda: self.scope[VECTOR][-1])
        chosen = f"lax.cond({self.any(NUMBER)} > 0.1, {fs[0]}, {fs[1]}," if count == 2 else None
        which = f"lax.switch({self.any(WHOLE)} % 3, [{', '.join(fs)}],"
        self.new(VECTOR, f"{chosen or which} {self.any(VECTOR)})")

    def each_row(self) -> None:
        f, h = self.name(), self.name()
        self.inner(f"def {f}({h}):", {VECTOR: [h]}, lambda: self.scope[VECTOR][-1])
        how = self.draws.choice((f"jax.vmap({f})(", f"lax.map({f}, "))
        self.new(MATRIX, f"{how}{self.any(MATRIX)})")

    def again(self) -> None:
        f, h = self.name(), self.name()
        self.inner(f"def {f}({h}):", {VECTOR: [h]}, lambda: self.scope[VECTOR][-1])
        self.new(VECTOR, f"{self.draws.choice(('jax.checkpoint', 'jax.jit'))}({f})({self.any(VECTOR)})")
