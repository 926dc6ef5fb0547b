"""Random programs with random signatures: whatever trees, aliases, references and static values a function takes and
returns, it means what it means under plain JAX.

A case is text: what is run is what is shown when a law fails.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from jointcut import aot
from jointcut.wrappers.metadata.schemas import OutputType, SubclassMeta, ViewAndMutationMeta, plain_metas
from jointcut.wrappers.metadata.signatures import GraphSignature
from oracle import cotangents, is_inexact, kind, numbers, weigh
from programs import EVERY_PROGRAM
from regenerate import can_be_regenerated, regenerated

MORE = 2 if EVERY_PROGRAM else 1
few = settings(deadline=None, max_examples=5 * MORE, derandomize=True, database=None, phases=[Phase.generate])
many = settings(deadline=None, max_examples=10 * MORE, derandomize=True, database=None, phases=[Phase.generate])

FLOAT0 = jax.dtypes.float0

# ---------------------------------------------------------------- what the text of a case may name


@jax.tree_util.register_dataclass
@dataclass
class Pair:
    """Stands for an array as the sum of two, which may be containers themselves."""

    first: Any
    second: Any

    @property
    def shape(self):
        return self.first.shape

    @property
    def dtype(self):
        return self.first.dtype


@jax.tree_util.register_dataclass
@dataclass
class Quantised:
    """Stands for an array: small integers, a scale, and a name that is no array."""

    codes: Any
    scale: Any
    name: str = field(metadata={"static": True})

    @property
    def shape(self):
        return self.codes.shape

    @property
    def dtype(self):
        return self.scale.dtype


@jax.tree_util.register_dataclass
@dataclass
class Box:
    """A structure, which stands for no array."""

    inside: Any
    beside: Any = None


def draws(seed):
    return np.random.default_rng(seed)


def floats(seed, *shape):
    return jnp.asarray(draws(seed).normal(size=shape), jnp.float32)


def halves(seed, *shape):
    return floats(seed, *shape).astype(jnp.bfloat16)


def complexes(seed, *shape):
    return lax.complex(floats(seed, *shape), floats(seed + 100, *shape))


def integers(seed, *shape, dtype=jnp.int32):
    return jnp.asarray(draws(seed).integers(-4, 5, shape), dtype)


def flags(seed, *shape):
    return integers(seed, *shape) > 0


def number(x):
    """A float32 made of anything but a random key."""
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if x.dtype.kind != "c" else jnp.real(x) - 0.5 * jnp.imag(x)


NAMES = {
    "jax": jax, "jnp": jnp, "np": np, "lax": lax, "Pair": Pair, "Quantised": Quantised, "Box": Box, "weigh": weigh,
    "floats": floats, "halves": halves, "complexes": complexes, "integers": integers, "flags": flags,
    "number": number,
}  # fmt: skip

# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Value:
    """An expression of a program: of which kind (`f`loat, `h`alf, `c`omplex, `i`nteger, `b`ool, `k`ey) and shape."""

    text: str
    kind: str
    shape: tuple[int, ...]
    is_reference: bool = False
    is_array: bool = True  # not so Python's numbers and numpy's arrays, which have no array of JAX's to hand back
    is_input: bool = True


@dataclass(frozen=True)
class Case:
    """A program and a call of it, as text, and how it is to be differentiated.

    `prepare` makes `args` and `kwargs` anew, so that references start anew. `written` are the paths of references that
    the body writes. `main` are the leaves of the result, `rest` those of aux.
    """

    prepare: str
    parameters: str
    body: str
    out: str
    aux: str | None
    argnums: int | tuple[int, ...]
    statics: dict[str, Any]
    main: tuple[Value, ...]
    rest: tuple[Value, ...]
    written: frozenset[str]

    def __repr__(self):
        return f"\n{self.prepare}\n\n{self.source(self.out)}\n# argnums={self.argnums}, {self.options}\n"

    def _repr_pretty_(self, printer, _):
        """Hypothesis would list the fields."""
        printer.text(repr(self))

    def source(self, out: str) -> str:
        returned = out if self.aux is None else f"{out}, {self.aux}"
        return f"def program({self.parameters}):\n{self.body}    return {returned}\n"

    @property
    def outputs(self) -> tuple[Value, ...]:
        return *self.main, *self.rest

    @property
    def has_aux(self) -> bool:
        return self.aux is not None

    @property
    def options(self) -> dict[str, Any]:
        """Those of `aot.function`, beside `argnums`."""
        return {**self.statics, "has_aux": self.has_aux}

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scope = dict(NAMES)
        exec(self.prepare, scope)
        return scope["args"], scope["kwargs"]

    @functools.cached_property
    def program(self) -> Any:
        """The function that returns every output."""
        return self._made(self.out)

    @functools.cached_property
    def loss(self) -> Any:
        """The function that returns one real number to which every inexact output contributes, and aux."""
        return self._made(f"weigh({self.out})")

    def _made(self, out: str) -> Any:
        scope = dict(NAMES)
        exec(self.source(out), scope)
        return scope["program"]

    def dynamic(self, args, kwargs) -> Any:
        """The arguments that are not static, in one tree."""
        fixed = self.statics.get("static_argnums", ())
        names = self.statics.get("static_argnames", ())
        names = (names,) if isinstance(names, str) else names
        kept = tuple(a for i, a in enumerate(args) if i not in fixed)
        return kept, {k: v for k, v in kwargs.items() if k not in names}


class Writer:
    """Writes the text of one case, by chance."""

    def __init__(self, random):
        self.random = random
        self.made: list[Value] = []  # arrays that arguments may hold, some of them twice
        self.lines: list[str] = []
        self.values: list[Value] = []
        self.body: list[str] = []
        self.written: set[str] = set()

    def one_of(self, items):
        return self.random.choice(list(items))

    def chance(self, one_in):
        return self.random.randrange(one_in) == 0

    # ------------------------------------------------------------ arguments

    def create(self, text, kind, shape, **more):
        name = f"x{len(self.made)}"
        self.lines.append(f"{name} = {text}")
        self.made.append(Value(name, kind, shape, **more))
        return self.made[-1]

    def array(self, kinds):
        """A new array, or one that is an argument already."""
        known = [v for v in self.made if v.kind in kinds and not v.is_reference]
        if known and self.chance(4):
            return self.one_of(known)
        kind, seed = self.one_of(kinds), len(self.made)
        shape = self.one_of([(), (3,), (3,), (2, 3)])
        inside = ", ".join(map(str, (seed, *shape)))
        if kind == "f" and self.chance(6):
            return self.create(f"np.asarray(floats({inside}))", "f", shape, is_array=False)
        if kind == "k":
            return self.create(f"jax.random.key({seed})", "k", ())
        maker = {"f": "floats", "h": "halves", "c": "complexes", "i": "integers", "b": "flags"}[kind]
        return self.create(f"{maker}({inside})", kind, shape)

    def leaf(self, path, kinds):
        """The text of one leaf of the arguments, which the program reaches by `path`."""
        if "r" in kinds and self.chance(4):
            shape = self.one_of([(), (3,)])
            inside = ", ".join(map(str, (len(self.made), *shape)))
            text, kind = (f"floats({inside})", "f") if self.chance(2) else ("jnp.int32(0)", "i")
            found = self.create(f"jax.new_ref({text})", kind, shape if kind == "f" else (), is_reference=True)
        elif self.chance(8):
            text, kind = ("1.5", "f") if "i" not in kinds or self.chance(2) else ("2", "i")
            found = Value(text, kind, (), is_array=False)
        else:
            found = self.array([k for k in kinds if k != "r"])
        self.values.append(Value(path, found.kind, found.shape, found.is_reference, found.is_array))
        return found.text

    def container(self, path, depth):
        """The text of a container: floats, and integers inside of `Quantised`."""
        if self.chance(2):
            codes = self.create(f"integers({len(self.made)}, 3, dtype=jnp.int8)", "i", (3,))
            self.values.append(Value(f"{path}.codes", "i", (3,)))
            scale = self.array("f")
            self.values.append(Value(f"{path}.scale", "f", scale.shape, is_array=scale.is_array))
            return f"Quantised({codes.text}, {scale.text}, 'q')"
        parts = []
        for name in ("first", "second"):
            if depth and self.chance(3):
                parts.append(self.container(f"{path}.{name}", depth - 1))
            else:
                found = self.array("ffhk")
                self.values.append(Value(f"{path}.{name}", found.kind, found.shape, is_array=found.is_array))
                parts.append(found.text)
        return f"Pair({', '.join(parts)})"

    def tree(self, path, kinds, depth=2):
        """The text of an argument's tree."""
        form = self.one_of(["leaf", "leaf", "tuple", "list", "dict", "none", "container", "box"] if depth else ["leaf"])
        if form == "leaf":
            return self.leaf(path, kinds)
        if form == "none":
            return "None"
        if form == "container":
            return self.container(path, 1)
        if form == "box":
            return f"Box({self.tree(f'{path}.inside', kinds, depth - 1)})"
        count = self.random.randint(0 if depth < 2 else 1, 3)
        if form == "dict":
            parts = [f"'{k}': {self.tree(f'{path}[{k!r}]', kinds, depth - 1)}" for k in "vuw"[:count]]
            return f"{{{', '.join(parts)}}}"
        parts = [self.tree(f"{path}[{i}]", kinds, depth - 1) for i in range(count)]
        return f"[{', '.join(parts)}]" if form == "list" else f"({''.join(f'{part}, ' for part in parts)})"

    # ------------------------------------------------------------ the body

    def pick(self, kinds, fits=lambda value: True):
        """A value of one of some kinds, the late ones sooner, or None."""
        known = [v for v in self.values if v.kind in kinds and not v.is_reference and fits(v)]
        return self.one_of([*known, *known[-2:]]) if known else None

    def name(self, text, kind, shape):
        name = f"v{len(self.body)}"
        self.body.append(f"    {name} = {text}\n")
        self.values.append(Value(name, kind, shape, is_input=False))

    def statement(self):
        """One more line, if the program has values for it to be about."""
        before = len(self.body)
        for _ in range(9):
            if len(self.body) == before:
                getattr(self, self.one_of(FORMS))()

    def elementwise(self):
        if x := self.pick("f"):
            form = self.one_of(
                ["jnp.sin({})", "jnp.tanh({})", "{0} * {0}", "jax.jit(jnp.tanh)({})", "lax.exp(-{0} * {0})"]
            )
            self.name(form.format(f"number({x.text})"), "f", x.shape)

    def binary(self):
        x = self.pick("f")
        y = x and self.pick("f", lambda y: together(x.shape, y.shape) is not None)
        if y:
            form = self.one_of(["{} * {}", "{} + {}", "jnp.sin({}) * jnp.cos({})", "{} - jnp.tanh({})"])
            self.name(form.format(f"number({x.text})", f"number({y.text})"), "f", together(x.shape, y.shape))

    def product(self):
        x = self.pick("f", lambda x: x.shape == (2, 3))
        y = self.pick("f", lambda y: y.shape in ((3,), (3, 2)))
        if x and y:
            self.name(f"{x.text} @ {y.text}", "f", (2, *y.shape[1:]))

    def conversion(self):
        if x := self.pick("hcib"):
            self.name(f"number({x.text})", "f", x.shape)

    def complexity(self):
        if z := self.pick("c"):
            form = self.one_of(["{0} * {0}", "jnp.conj({0}) * {0}", "jnp.exp(1j * {0})"])
            self.name(form.format(z.text), "c", z.shape)

    def counting(self):
        if i := self.pick("i"):
            self.name(f"jnp.asarray({i.text}) + 1", "i", i.shape)

    def comparison(self):
        if x := self.pick("f"):
            self.name(f"number({x.text}) > 0.1", "b", x.shape)

    def choice(self):
        b, x, y = self.pick("b"), self.pick("f"), self.pick("f")
        shape = together(b.shape, x.shape, y.shape) if b and x and y else None
        if shape is not None:
            self.name(f"jnp.where({b.text}, number({x.text}), number({y.text}))", "f", shape)

    def view(self):
        if x := self.pick("fhcib"):
            text, shape = self.one_of(views(x))
            self.name(text, x.kind, shape)

    def total(self):
        if x := self.pick("fc"):
            self.name(f"jnp.{self.one_of(['sum', 'mean'])}({x.text})", x.kind, ())

    def loop(self):
        if x := self.pick("f"):
            text = f"number({x.text})"
            self.name(f"lax.fori_loop(0, 2, lambda _, h: jnp.sin(h) * {text}, {text})", "f", x.shape)

    def checkpointed(self):
        if x := self.pick("f"):
            self.name(f"jax.checkpoint(lambda h: jnp.sin(jnp.tanh(h)))(number({x.text}))", "f", x.shape)

    def stopped(self):
        if x := self.pick("fhc"):
            self.name(f"lax.stop_gradient({x.text})", x.kind, x.shape)

    def drawn(self):
        if k := self.pick("k"):
            self.name(f"jax.random.normal({k.text}, (3,))", "f", (3,))

    def touch(self):
        """Read a reference, or write what carries no derivative."""
        references = [v for v in self.values if v.is_reference]
        if not references:
            return
        r = self.one_of(references)
        if self.chance(2):
            self.name(f"{r.text}[...]", r.kind, r.shape)
            return
        self.written.add(r.text)
        x = r.kind == "f" and self.pick("f", lambda x: together(x.shape, r.shape) == r.shape)
        write = f"[...] += lax.stop_gradient(number({x.text}))" if x else "[...] += 1"
        self.body.append(f"    {r.text}{write}\n")

    # ------------------------------------------------------------ the result

    def result(self, values):
        """The text of a tree of outputs."""
        texts = [v.text for v in values]
        form = self.one_of(["tuple", "list", "dict", "nested", "box"])
        if len(texts) == 1 and self.chance(2):
            return texts[0]
        if len(texts) == 2 and self.chance(2):
            return f"Pair({', '.join(texts)})"
        if form == "dict":
            return f"{{{', '.join(f'{k!r}: {t}' for k, t in zip('abcdef', texts, strict=False))}}}"
        if form == "nested":
            return f"(None, [{texts[0]}], {{'rest': ({''.join(f'{t}, ' for t in texts[1:])})}})"
        if form == "box":
            return f"Box([{', '.join(texts)}])"
        return f"[{', '.join(texts)}]" if form == "list" else f"({''.join(f'{t}, ' for t in texts)})"

    def outputs(self, least, most):
        """Some values, computed ones sooner: inputs among them, and some twice."""
        known = [v for v in self.values if not v.is_reference]
        weights = [1 if v.is_input else 3 for v in known]
        return self.random.choices(known, weights, k=self.random.randint(least, most)) if known else []


FORMS = (
    "elementwise", "elementwise", "binary", "binary", "binary", "product", "conversion", "conversion", "complexity",
    "counting", "comparison", "choice", "view", "view", "total", "loop", "checkpointed", "stopped", "drawn",
    "touch", "touch",
)  # fmt: skip


def together(*shapes):
    """The shape to which some broadcast, or None."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def views(x):
    """The texts and shapes of views of a value."""
    text, shape = f"jnp.asarray({x.text})", x.shape
    found = [
        (f"jnp.reshape({text}, -1)", (int(np.prod(shape)),)),
        (f"{text}.T", shape[::-1]),
        (f"{text}[None]", (1, *shape)),
        (f"jnp.broadcast_to({text}, {(2, *shape)})", (2, *shape)),
    ]
    if shape:
        found += [(f"jnp.flip({text}, 0)", shape), (f"{text}[:1]", (1, *shape[1:]))]
    return found


def written(random):
    """A program of some lines, its arguments, and how they are passed."""
    w = Writer(random)
    kinds = [TRAINED, *(w.one_of([TRAINED, "fhcibkr", "fibkrr"]) for _ in range(random.randint(0, 2)))]
    texts = [w.tree(name, each) for name, each in zip("abc", kinds, strict=False)]
    positional, by_name, statics = list("abc"[: len(kinds)]), {}, {}
    if w.chance(3):
        by_name["k"] = w.tree("k", "fhcibkr", 1)
    if w.chance(3):
        power(w, positional, texts, kinds, by_name, statics)
    for _ in range(random.randint(3, 8)):
        w.statement()
    main, aux = w.outputs(1, 4), w.outputs(0, 3) if w.chance(3) else None
    bar = ["*"] if by_name and w.chance(2) else []
    w.lines += [f"args = ({', '.join(texts)},)"]
    w.lines += [f"kwargs = {{{', '.join(f'{name!r}: {text}' for name, text in by_name.items())}}}"]
    return Case(
        prepare="\n".join(w.lines),
        parameters=", ".join([*positional, *bar, *by_name]),
        body="".join(w.body),
        out=w.result(main) if main else "()",
        aux=None if aux is None else (w.result(aux) if aux else "{}"),
        argnums=argnums(w, [i for i, each in enumerate(kinds) if each == TRAINED], len(kinds), bar or not by_name),
        statics=statics,
        main=tuple(main),
        rest=tuple(aux or ()),
        written=frozenset(w.written),
    )


TRAINED = "fffhc"  # the kinds of leaves of an argument that is differentiated


def power(w, positional, texts, kinds, by_name, statics):
    """A static argument, which one line of the body depends on."""
    if w.chance(2):
        place = w.random.randint(0, len(positional))
        for known, new in ((positional, "n"), (texts, "3"), (kinds, "")):
            known.insert(place, new)
        statics |= {"static_argnums": (place,)}
    else:
        by_name["n"] = "3"
        statics |= {"static_argnames": "n"}
    if x := w.pick("f"):
        w.name(f"number({x.text}) * n if n > 2 else None", "f", x.shape)


def argnums(w, eligible, count, is_all):
    """One position or several, sometimes counted from the end of what is passed by position."""
    chosen = w.random.sample(eligible, w.random.randint(1, len(eligible)))
    back = count if w.chance(4) and is_all else 0
    chosen = [i - back for i in chosen]
    return chosen[0] if len(chosen) == 1 and w.chance(2) else tuple(chosen)


def cases():
    """Random cases. They are as small as they are: to make one smaller when a law fails would compile for minutes."""
    return st.randoms(use_true_random=True).map(written)


# ---------------------------------------------------------------- what plain JAX answers


def jitted(case, function):
    return jax.jit(function, **case.statics)


def run(case, function, change=lambda arguments: arguments):
    """What a function answers for fresh arguments, and what their references hold then."""
    args, kwargs = change(case.arguments())
    answer = function(*args, **kwargs)
    return answer, state(args, kwargs)


def apart(arguments):
    """The same arguments, no array twice among them."""

    def other(leaf):
        return leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.Ref) else leaf

    return jax.tree.map(other, arguments)


def state(*trees):
    return [leaf[...] for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Ref)]


def plain_value_and_grad(case):
    """Compiled by plain JAX; integers can only stand inside of containers, where they have a float0 gradient."""
    differentiated = jax.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux, allow_int=True)
    return run(case, jitted(case, differentiated))


def plain_vjp(case, seeds):
    """Output, aux, and for each of some seeds the gradients of all positional arguments, by `jax.vjp`.

    It takes no references among what it differentiates: they are closed over, and have a float0 for a gradient.
    """

    def vjp(*args, **kwargs):
        fixed = case.statics.get("static_argnums", ())
        leaves, tree = jax.tree.flatten(tuple(None if i in fixed else a for i, a in enumerate(args)))
        free = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, jax.Ref)]

        def flat(chosen):
            given = dict(zip(free, chosen, strict=True))
            trees = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            called = (a if i in fixed else t for i, (a, t) in enumerate(zip(args, trees, strict=True)))
            return case.program(*called, **kwargs)

        def in_trees(gradients):
            found = dict(zip(free, gradients, strict=True))
            full = [found[i] if i in found else np.zeros(leaf.shape, FLOAT0) for i, leaf in enumerate(leaves)]
            return jax.tree.unflatten(tree, full)

        out, pullback, *aux = jax.vjp(flat, [leaves[i] for i in free], has_aux=case.has_aux)
        out, aux = jax.tree.map(jnp.asarray, (out, aux))
        return out, aux, [in_trees(*pullback(plain_cotangents(out, seed))) for seed in seeds]

    return run(case, jitted(case, vjp))


def plain_cotangents(out, seed):
    """Random cotangents, float0 for what has none; by an odd seed the first inexact one is zero."""
    leaves, tree = jax.tree.flatten(cotangents(out, seed))
    if (i := first_inexact(out)) is not None and seed % 2:
        leaves[i] = jnp.zeros_like(leaves[i])
    return jax.tree.unflatten(tree, leaves)


def other_cotangents(out, seed):
    """The same in the other words that a pullback of ours takes: a float0 for what is zero, zeros for a float0."""
    leaves, tree = jax.tree.flatten(plain_cotangents(out, seed))
    for i, leaf in enumerate(jax.tree.leaves(out)):
        if not is_inexact(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[i] = jnp.zeros_like(leaf)
    if (i := first_inexact(out)) is not None and seed % 2:
        leaves[i] = np.zeros(leaves[i].shape, FLOAT0)
    return jax.tree.unflatten(tree, leaves)


def first_inexact(out):
    return next((i for i, leaf in enumerate(jax.tree.leaves(out)) if is_inexact(leaf)), None)


def assert_same(got, want, parts=4):
    """Equal trees, and leaf by leaf equal types and, but for rounding, equal numbers.

    Without the last of the four parts of `oracle.kind` weak types may differ: those of a gradient depend under plain
    JAX on that of the cotangent, and on whether it is compiled.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, have), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert kind(have)[:parts] == kind(expected)[:parts], where
        coarse = 4e-2 if expected.dtype == jnp.bfloat16 else 2e-4
        right = numbers(expected)
        scale = max(1.0, float(np.max(np.abs(right), initial=0.0)))
        np.testing.assert_allclose(numbers(have), right, coarse, coarse * scale / 4, err_msg=where)


def made(case, function, **more):
    return aot.function(function, argnums=case.argnums, **case.options, **more)


def its_vjp(function, seeds, cotangents_of=plain_cotangents):
    """As `plain_vjp` of a function of ours."""

    def vjp(*args, **kwargs):
        out, pullback, *aux = function.vjp(*args, **kwargs)
        return out, aux, [pullback(cotangents_of(out, seed)) for seed in seeds]

    return vjp


def chosen_of(case, trees):
    """Those of all positional arguments' trees that `argnums` names, in its form."""
    return trees[case.argnums] if isinstance(case.argnums, int) else tuple(trees[n] for n in case.argnums)


# ---------------------------------------------------------------- what once was wrong

X = jnp.arange(3.0)


def test_a_reference_that_nothing_touches_goes_through_the_users_jit():
    jax.jit(aot.function(lambda x, r: jnp.sum(jnp.sin(x))))(X, jax.new_ref(X))


def test_argnums_from_the_end_with_a_static_argument():
    def loss(a, b, n):
        return jnp.sum(a["w"] * b) * n

    got = aot.function(loss, argnums=-2, static_argnums=2).grad({"w": X}, X, 3)
    assert isinstance(got, jax.Array)


def test_a_zero_gradient_of_a_python_number_is_weakly_typed():
    _, pullback = aot.function(lambda a, s: (a * s, a)).vjp(X, 1.5)
    want = jax.vjp(lambda a, s: (a * s, a), X, 1.5)[1]((0 * X, X))[1]
    assert kind(pullback((np.zeros(3, FLOAT0), X))[1]) == kind(want)


@pytest.mark.parametrize("given", [1.5, np.ones(3, np.float32)], ids=["Python's", "numpy's"])
def test_compiled_halves_hand_back_a_number_as_an_array(given):
    compiled = aot.function(lambda a: (a, a * 2)).trace(given).partition().compile()
    assert isinstance(compiled.vjp(given)[0][0], jax.Array)


# ---------------------------------------------------------------- laws of calls


@few
@given(cases())
def test_a_call_answers_as_the_function(case):
    want = run(case, jitted(case, case.program))
    function = made(case, case.program)
    for _ in range(2):
        assert_same(run(case, function), want)
    assert_same(run(case, jitted(case, function)), want)


@few
@given(cases(), st.booleans())
def test_value_and_grad_answers_as_that_of_jax(case, apart_first):
    want = plain_value_and_grad(case)
    function = made(case, case.loss)
    if apart_first:
        assert_same(run(case, function.value_and_grad, apart), want)
    for _ in range(2):
        assert_same(run(case, function.value_and_grad), want)
    assert_same(run(case, function.value_and_grad, apart), want)
    assert_same(run(case, jitted(case, function.value_and_grad)), want)


@few
@given(cases())
def test_vjp_answers_as_that_of_jax(case):
    seeds = (1, 2)
    want = plain_vjp(case, seeds)
    function = made(case, case.program)
    assert_same(run(case, its_vjp(function, seeds)), want, parts=3)
    assert_same(run(case, its_vjp(function, seeds, other_cotangents)), want, parts=3)
    assert_same(run(case, jitted(case, its_vjp(function, seeds))), want, parts=3)


@few
@given(cases())
def test_jax_differentiates_it_as_the_function(case):
    want = plain_value_and_grad(case)
    function = made(case, case.loss)
    differentiated = jax.value_and_grad(function, case.argnums, has_aux=case.has_aux, allow_int=True)
    assert_same(run(case, jitted(case, differentiated)), want)
    assert_same(jax.tree.map(as_array, run(case, differentiated)), want)


def as_array(leaf):
    """JAX hands back a number of Python's or numpy's as it is where nothing is compiled, and so do we there."""
    return leaf if getattr(leaf, "dtype", None) == FLOAT0 else jnp.asarray(leaf)


@few
@given(cases(), st.sampled_from([None, 1, 2]))
def test_the_compiled_step_answers_as_value_and_grad_of_jax(case, executables):
    want = plain_value_and_grad(case)
    args, kwargs = case.arguments()
    before = state(args, kwargs)
    compiled = made(case, case.loss).trace(*args, **kwargs).partition().compile(executables)
    assert_same(state(args, kwargs), before)
    for _ in range(2):
        assert_same(run(case, compiled.value_and_grad), want)


@few
@given(cases())
def test_the_compiled_halves_answer_as_vjp_of_jax(case):
    (out, aux, (gradients,)), after = plain_vjp(case, (2,))
    args, kwargs = case.arguments()
    compiled = made(case, case.program).trace(*args, **kwargs).partition().compile()

    def vjp(*args, **kwargs):
        result, pullback = compiled.vjp(*args, **kwargs)
        main = result[0] if case.has_aux else result
        kept = pullback(plain_cotangents(main, 2), keep_residuals=True)
        return result, kept, pullback(other_cotangents(main, 2))

    wanted = chosen_of(case, gradients)
    assert_same(run(case, vjp), (((out, *aux) if case.has_aux else out, wanted, wanted), after), parts=3)


# ---------------------------------------------------------------- laws of aliases


@many
@given(cases())
def test_outputs_that_are_inputs_are_the_very_same_arrays(case):
    args, kwargs = case.arguments()
    scope = by_name(case, args, kwargs)
    inputs = {i: value.text for i, value in enumerate(case.outputs) if value.is_input and value.is_array}
    for way in (call, vjp_of_it):
        outputs = jax.tree.leaves(way(made(case, case.program), args, kwargs))
        for i, text in inputs.items():
            assert outputs[i] is eval(text, dict(scope)), text
        first = {}
        for value, leaf in zip(case.outputs, outputs, strict=True):
            assert leaf is first.setdefault(value.text, leaf) or value.is_input, value.text


def call(function, args, kwargs):
    return function(*args, **kwargs)


def vjp_of_it(function, args, kwargs):
    out, _, *aux = function.vjp(*args, **kwargs)
    return out, aux


def by_name(case, args, kwargs):
    """The arguments under the names that the program gives them."""
    names = [name for name in case.parameters.split(", ") if name != "*"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# ---------------------------------------------------------------- laws of what is known without running


@many
@given(cases())
def test_metadata_tell_what_the_program_does(case):
    args, kwargs = case.arguments()
    scope = {"args": args, "kwargs": kwargs, **by_name(case, args, kwargs)}
    leaves = jax.tree.leaves(case.dynamic(args, kwargs))
    traced = made(case, case.program).trace(*args, **kwargs)
    inputs, outputs = traced.metadata.input_info, traced.metadata.output_info
    assert traced.metadata.num_constants == 0
    assert len(inputs) == len(leaves)
    assert len(outputs) == traced.metadata.num_outputs == len(case.outputs)

    arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray) else object() for leaf in leaves]
    firsts = [next(j for j, other in enumerate(arrays) if other is array) for array in arrays]
    assert [info.duplicate_of for info in inputs] == [j if j != i else None for i, j in enumerate(firsts)]
    for info, leaf in zip(inputs, leaves, strict=True):
        assert eval(info.path, dict(scope)) is leaf
        assert info.is_reference == isinstance(leaf, jax.Ref)
    written = {id(eval(path, dict(scope))) for path in case.written}
    assert [info.mutates_data for info in inputs] == [id(leaf) in written for leaf in leaves]
    assert [info.requires_grad for info in inputs] == requested(case, args, kwargs)
    assert traced.metadata.is_train == (any(requested(case, args, kwargs)) and any(map(carries, case.main)))

    shapes = jitted(case, case.program).eval_shape(*args, **kwargs)
    result = jax.tree.unflatten(jax.tree.structure(shapes), case.outputs)
    for info, value in zip(outputs, case.outputs, strict=True):
        assert eval(info.path, {"result": result}) is value
        if value.is_input:
            assert info.output_type is OutputType.is_input
            assert arrays[info.base_idx] is eval(value.text, dict(scope)) or not value.is_array


def requested(case, args, kwargs):
    """For each leaf whether `argnums` asks for its gradient."""
    leaves, tree = jax.tree.flatten(case.dynamic(args, kwargs))
    places = list(jax.tree.unflatten(tree, range(len(leaves)))[0])
    for i in case.statics.get("static_argnums", ()):
        places.insert(i, None)
    asked = jax.tree.leaves(chosen_of(case, places))
    return [i in asked and is_inexact(leaf) for i, leaf in enumerate(leaves)]


def carries(value):
    return value.kind in "fhc"


@many
@given(cases())
def test_outputs_that_are_views_can_be_made_again_from_their_inputs(case):
    args, kwargs = case.arguments()
    leaves = jax.tree.leaves(case.dynamic(args, kwargs))
    infos = made(case, case.program).trace(*args, **kwargs).metadata.output_info
    outputs = jax.tree.leaves(run(case, jitted(case, case.program))[0])
    for info, out in zip(infos, outputs, strict=True):
        if not can_be_regenerated(info):
            continue
        if info.output_type is OutputType.alias_of_input:
            np.testing.assert_array_equal(regenerated(info, leaves[info.base_idx]), out)
        if info.output_type is OutputType.alias_of_intermediate_base_is_user_output:
            np.testing.assert_array_equal(regenerated(info, outputs[info.base_idx]), out)


@many
@given(cases())
def test_records_are_read_back_equal_from_their_json(case):
    args, kwargs = case.arguments()
    traced = made(case, case.program).trace(*args, **kwargs)
    cut = traced.partition()
    for kind_of, record in (
        (ViewAndMutationMeta, traced.metadata),
        (ViewAndMutationMeta, cut.metadata),
        (SubclassMeta, traced.subclass_metadata),
        (GraphSignature, cut.signature),
    ):
        assert kind_of.from_json(record.to_json()) == record
        assert str(record)


@many
@given(cases())
def test_containers_are_made_again_from_their_arrays(case):
    args, kwargs = case.arguments()
    dynamic = case.dynamic(args, kwargs)
    leaves = jax.tree.leaves(dynamic)
    metadata = made(case, case.program).trace(*args, **kwargs).metadata
    outer = [*outermost(dynamic)]
    assert len(metadata.subclass_inp_meta) == len(outer)
    for meta, want in zip(metadata.subclass_inp_meta, outer, strict=True):
        got = meta.creation_fn(leaves) if isinstance(want, Pair | Quantised) else leaves[meta.unwrapped_idx]
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert all(a is b for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    plain = [plain.unwrapped_idx for meta in metadata.subclass_inp_meta for plain in plain_metas(meta)]
    assert plain == list(range(len(leaves)))


def outermost(tree):
    """The containers of a tree that are in no other, and the arrays that are in none."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Pair | Quantised))
