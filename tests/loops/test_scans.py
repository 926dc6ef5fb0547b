"""`aot.scan` means what `lax.scan` means, in the memory of a loop."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import BudgetError, TraceError
from looped import near

HERE = re.escape(__file__)
W = 0.5 * jnp.eye(3) + 0.1
H = jnp.array([0.3, -0.2, 0.9])
XS = {"a": jnp.sin(jnp.arange(21.0)).reshape(7, 3), "b": jnp.arange(1.0, 8.0), "n": jnp.arange(7)}


def step(carry, x):
    h = jnp.tanh(W @ carry["h"] + x["a"])
    return {"h": h, "n": carry["n"] + x["n"]}, (h * x["b"], carry["n"], jax.random.key(3))


def loss(scan, h, xs, **options):
    carry, (ys, numbers, keys) = scan(step, {"h": h, "n": 0}, xs, **options)
    return (carry["h"] ** 2).sum() + jnp.cos(ys).sum(), (carry["n"], ys, numbers, jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("memory", "reverse"),
    [(1, False), (3, True), (None, False), ("stack", False), ("stack", True), ("sqrt", True), ("1KiB", False)],
)
def test_values_and_gradients_are_those_of_lax_scan(memory, reverse):
    xs = {**XS, "n": None} if memory is None else XS
    body = step if memory is not None else (lambda c, x: step(c, {**x, "n": 1}))

    def of(scan, **options):
        def run(h, a):
            return loss(lambda f, *args, **kw: scan(body, *args, **kw), h, {**xs, "a": a}, reverse=reverse, **options)

        return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(H, XS["a"])

    near(of(aot.scan, memory=memory), of(lax.scan), rtol=2e-5)


ORDERS = {
    "forward": lambda f: jax.jacfwd(f),
    "second": lambda f: jax.hessian(f),
    "map": lambda f: lambda h: jax.vmap(jax.grad(f))(jnp.stack([h, -h])),
    "cut": lambda f: aot.function(f).grad,
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_transformation_gives_what_it_gives_of_lax_scan(order):
    def of(scan):
        return lambda h: loss(scan, h, XS)[0]

    near(*(jax.jit(ORDERS[order](of(scan)))(H) for scan in (aot.scan, lax.scan)), rtol=2e-4)


def test_no_rows_and_no_arrays():
    for xs, length in (({"a": jnp.ones((0, 3))}, None), (None, 0), (None, 4)):
        got, want = (scan(lambda c, x: (c * 2.0, c), H, xs, length=length) for scan in (aot.scan, lax.scan))
        near(got, want)


def test_python_numbers_take_the_dtype_that_the_function_makes_of_them():
    got, want = (scan(lambda c, x: (c + x, c), 0, jnp.arange(3.0)) for scan in (aot.scan, lax.scan))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    near(got, want)


def test_memory_does_not_grow_with_what_a_step_computes_and_time_not_with_the_square():
    def programs(scan, length, **options):
        def run(h, xs):
            c, ys = scan(lambda c, x: (jnp.sin(jnp.cos(jnp.tanh(c * x)) * c), c), h, xs, **options)
            return c.sum() + (ys**2).sum()

        return jax.jit(jax.grad(run)).lower(jnp.ones(64), jnp.ones((length, 64))).compile()

    ours, plain = (programs(s, 4096, **o) for s, o in ((aot.scan, {"memory": 64}), (lax.scan, {})))
    stack = 4096 * 64 * 4
    assert ours.memory_analysis().temp_size_in_bytes < 2.2 * stack  # the `y`, and their cotangents
    assert plain.memory_analysis().temp_size_in_bytes > 4 * stack
    copies = re.findall(r"= f32\[4096,64\]\S* copy\(", ours.as_text().partition("ENTRY")[0])
    assert not copies, "a step copies no stack"


AT = f"f at {HERE}:\\d+ \\(<lambda>\\)"
REFUSED = {
    "rows": (
        lambda: aot.scan(step, 1.0, {"a": jnp.ones(3), "b": jnp.ones(4)}), TraceError,
        "xs\\['b'\\] has 4 rows, and xs\\['a'\\] has 3.\nGive arrays of equally many rows.",
    ),
    "length": (
        lambda: aot.scan(step, 1.0, jnp.ones(3), length=4), TraceError,
        "xs has 3 rows, and length is 4.\nGive arrays of equally many rows.",
    ),
    "no length": (
        lambda: aot.scan(step, 1.0), TraceError, "xs has no arrays, and length is not given.\nGive one of them.",
    ),
    "a length that is none": (
        lambda: aot.scan(step, 1.0, length=-1), TraceError,
        "length is -1.\nGive the number of rows, or leave it out.",
    ),
    "a number": (
        lambda: aot.scan(step, 1.0, 3.0), TraceError,
        "xs has no rows: its shape is \\(\\).\nGive arrays of equally many rows.",
    ),
    "no function": (
        lambda: aot.scan(3, 1.0, jnp.ones(3)), TraceError,
        "f is 3, which cannot be called.\nPass a function of the carry and a row.",
    ),
    "no pair": (
        lambda: aot.scan(lambda c, x: (c, x, x), 1.0, jnp.ones(3)), TraceError,
        f"{AT} returns a tuple of 3, not a pair.\nReturn the next carry, and what is to be stacked.",
    ),
    "another carry": (
        lambda: aot.scan(lambda c, x: ({"h": c["h"][None]}, x), {"h": 1.0}, jnp.ones(3)), TraceError,
        f"{AT} takes carry\\['h'\\] as float32\\[\\] and returns it as float32\\[1\\].\n"
        "Return it as float32\\[\\], or start with init\\['h'\\] as float32\\[1\\].",
    ),
    "memory": (
        lambda: aot.scan(lambda c, x: (c, x), 1.0, jnp.ones(3), memory="7B"), BudgetError,
        "memory is '7B', and one carry takes 4 bytes.\n"
        "Give at least '8B', for one checkpoint and the carry that the reverse sweep works on.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_place_and_cure(case):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=f"^{text}$"):
        call()


def test_a_stack_of_numpy_arrays():
    got, want = (
        scan(lambda c, x: (c + x, np.ones(2, np.float32)), 0.0, np.arange(3.0)) for scan in (aot.scan, lax.scan)
    )
    near(got, want)


def test_rows_of_any_number_are_exported_and_have_a_program_each_on_a_tape(tmp_path):
    def loss(w, x):
        return jnp.sum(aot.scan(lambda c, row: (jnp.tanh(c + row * w), c), jnp.zeros(3), x)[0])

    w = jnp.array([0.5, -0.2, 0.9])
    shapes = jax.ShapeDtypeStruct((3,), "float32"), aot.shapes("b, 3", "float32")
    aot.function(loss).export(tmp_path / "artefact", *shapes, sizes={"b": 8}, platforms="cpu")
    loaded, taped = aot.load(tmp_path / "artefact"), aot.tape(loss, sizes="dynamic")
    for rows in (2, 5, 40):
        x = jax.random.normal(jax.random.key(rows), (rows, 3))
        want = jax.grad(lambda w, x=x: jnp.sum(lax.scan(lambda c, r: (jnp.tanh(c + r * w), c), jnp.zeros(3), x)[0]))(w)
        for got in (loaded.grad(w, x), taped.grad(w, x)):
            np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(taped.captures) == 3
