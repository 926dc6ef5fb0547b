"""Equal computations have one fingerprint in every process; any other computation has another, or none."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jointcut import aot
from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import WithoutRules, fingerprint, foreign_rules
from jointcut.partition.program.jax import jaxprs
from programs import CORPUS, named

X = np.arange(4, dtype=np.float32)
ELSEWHERE = (
    *("two_layers", "convolutions", "scan_over_layers", "nested_scans", "dropout_in_scan", "scan_in_cond"),
    *("custom_vjp_clip", "checkpoint_by_name", "sharded_map", "named_tuples", "tied_embedding"),
)


def traced(program):
    with program.precision():
        return jax.make_jaxpr(lambda *args: program.function(*args, **program.kwargs))(*program.args)


def key_of(program):
    closed = traced(program)
    return fingerprint(program=WithoutRules(closed) if foreign_rules(closed) else closed)


def keys_elsewhere():
    """The keys of some programs, of their joint programs and of the surroundings, as another process has them too."""
    programs = [named(name) for name in ELSEWHERE]
    found = {p.name: key_of(p) for p in programs}
    for p in programs:
        cut = aot.function(p.function, argnums=p.argnums).trace(*p.args, **p.kwargs)
        found[f"joint {p.name}"] = fingerprint(program=WithoutRules(cut.joint))
    found["rules"] = key_of_program(lambda x: jax.nn.gelu(jax.nn.relu(x)))
    while_importing = ("sources", "context")  # of a file that is edited at the moment, of modules imported so far
    around = {k: v for k, v in environment().items() if k not in while_importing}
    settings = {name: str(value) for name, value in around.pop("config").items()}
    return found | settings | {k: fingerprint(it=v) for k, v in around.items()}


def key_of_program(function, *args):
    return fingerprint(program=jax.make_jaxpr(function)(*(args or (X,))))


# ---------------------------------------------------------------- the corpus


@functools.cache
def corpus_keys():
    return {program.name: key_of(program) for program in CORPUS}


def test_different_programs_have_different_fingerprints():
    assert len(set(corpus_keys().values())) == len(CORPUS)


def test_a_program_that_is_traced_twice_has_one_fingerprint():
    again = {program.name: key_of(program) for program in CORPUS[::3]}
    assert again.items() <= corpus_keys().items()


def test_another_process_with_other_hashes_finds_the_same_fingerprints():
    tests = Path(__file__).parents[1]
    script = (
        f"import sys; sys.path[:0] = {[str(tests), str(tests / 'aot'), str(tests.parent)]!r}\n"
        "import conftest, json, test_fingerprint as t\n"
        "print(json.dumps([hash('a'), t.keys_elsewhere()]))"
    )
    own = os.environ.get("PYTHONHASHSEED")
    seeded = {**os.environ, "PYTHONHASHSEED": "12" if own == "11" else "11"}
    ran = subprocess.run([sys.executable, "-c", script], env=seeded, capture_output=True, text=True, check=True)
    salt, found = json.loads(ran.stdout)
    assert salt != hash("a")
    assert found == keys_elsewhere()


# ---------------------------------------------------------------- one change


def body(x, *, factor=2.0, axes=(0,), dtype=jnp.float32, swap=False, length=3, extra=False, turns=1):
    """A program with something of everything to change."""
    y = lax.convert_element_type(x, dtype) * jnp.asarray(factor, dtype)
    y = lax.sub(jnp.ones_like(y), y) if swap else lax.sub(y, jnp.ones_like(y))

    def inner(c):
        return lax.scan(lambda c, _: (c + turns, None), c, None, length=length)[0]

    y, _ = lax.scan(lambda c, _: (inner(c), None), y, None, length=2)
    y = jnp.tanh(y) if extra else y
    return lax.reduce_sum(y, axes=axes)


@functools.cache
def mesh(names="ab"):
    return jax.make_mesh((1, 1), tuple(names), axis_types=(AxisType.Auto,) * 2)


def closing_over(const):
    return lambda x: x + const


def scoped(name):
    def function(x):
        with jax.named_scope(name):
            return body(x)

    return function


def marked(**metadata):
    def function(x):
        with set_xla_metadata(**metadata):
            return body(x)

    return function


def saving(*names):
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*names))


SQUARE = np.ones((3, 3), np.float32)
CHANGES: dict[str, tuple[Any, ...]] = {
    "nothing": (body, SQUARE),
    "dtype": (body, SQUARE.astype(np.float16)),
    "shape": (body, np.ones((3, 4), np.float32)),
    "weak type": (body, jax.ShapeDtypeStruct((3, 3), np.float32, weak_type=True)),
    "literal": (functools.partial(body, factor=3.0), SQUARE),
    "positive zero": (functools.partial(body, factor=0.0), SQUARE),
    "negative zero": (functools.partial(body, factor=-0.0), SQUARE),
    "not a number": (functools.partial(body, factor=float("nan")), SQUARE),
    "parameter": (functools.partial(body, axes=(1,)), SQUARE),
    "parameter dtype": (functools.partial(body, dtype=jnp.float16), SQUARE),
    "order of operands": (functools.partial(body, swap=True), SQUARE),
    "length of an inner scan": (functools.partial(body, length=4), SQUARE),
    "literal of an inner scan": (functools.partial(body, turns=2), SQUARE),
    "one more equation": (functools.partial(body, extra=True), SQUARE),
    "one more input": (lambda x, y: body(x), SQUARE, SQUARE),
    "one more output": (lambda x: (body(x), x), SQUARE),
    "order of outputs": (lambda x: (x, body(x)), SQUARE),
    "scope": (scoped("one"), SQUARE),
    "another scope": (scoped("two"), SQUARE),
    "metadata": (marked(a="1"), SQUARE),
    "another metadata": (marked(a="2"), SQUARE),
    "jit": (lambda x: jax.jit(body)(x), SQUARE),
    "donation": (lambda x: jax.jit(body, donate_argnums=0)(x), SQUARE),
    "sharding": (lambda x: jax.jit(body, in_shardings=NamedSharding(mesh(), P("a")))(x), SQUARE),
    "axis of a sharding": (lambda x: jax.jit(body, in_shardings=NamedSharding(mesh(), P("b")))(x), SQUARE),
    "name of an axis": (lambda x: jax.jit(body, in_shardings=NamedSharding(mesh("ac"), P("a")))(x), SQUARE),
    "device": (lambda x: jax.jit(body, in_shardings=SingleDeviceSharding(jax.devices()[0]))(x), SQUARE),
    "constraint": (lambda x: lax.with_sharding_constraint(body(x), NamedSharding(mesh(), P("a"))), SQUARE),
    "another constraint": (lambda x: lax.with_sharding_constraint(body(x), NamedSharding(mesh(), P(None))), SQUARE),
    "checkpoint": (saving("a"), SQUARE),
    "names that a checkpoint saves": (saving("a", "b"), SQUARE),
    "const": (closing_over(SQUARE * 2), SQUARE),
    "bit of a const": (closing_over(np.nextafter(SQUARE * 2, np.float32(9))), SQUARE),
    "dtype of a const": (closing_over(SQUARE.astype(np.int32) * 2), SQUARE.astype(np.int32)),
    "const of JAX": (closing_over(jnp.asarray(SQUARE) * 3), SQUARE),
    "key": (lambda x: x + jax.random.normal(jax.random.key(0), (3, 3)), SQUARE),
    "another key": (lambda x: x + jax.random.normal(jax.random.key(1), (3, 3)), SQUARE),
    "generator": (lambda x: x + jax.random.normal(jax.random.key(0, impl="rbg"), (3, 3)), SQUARE),
    "branch": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), SQUARE),
    "order of branches": (lambda x: lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x), SQUARE),
    "precision": (lambda x: lax.dot(x, x, precision="highest"), SQUARE),
    "default precision": (lambda x: lax.dot(x, x), SQUARE),
}


@functools.cache
def changed(name):
    function, *args = CHANGES[name]
    return fingerprint(program=jax.make_jaxpr(function)(*args))


def test_any_one_change_of_a_program_changes_its_fingerprint():
    names: dict[str, list[str]] = {}
    for name in CHANGES:
        names.setdefault(changed(name), []).append(name)
    assert [same for same in names.values() if len(same) > 1] == []


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_program_that_is_traced_again_has_its_fingerprint_again(name):
    function, *args = CHANGES[name]
    jax.clear_caches()
    assert fingerprint(program=jax.make_jaxpr(lambda *xs: function(*xs))(*args)) == changed(name)


def test_lines_of_source_and_names_of_variables_change_nothing():
    def one(x):
        return jnp.sin(x)

    def two(other):
        y = other
        return jnp.sin(y)

    assert key_of_program(one) == key_of_program(two)


def test_what_the_users_functions_become_inside_those_of_jax_counts():
    def solved(matvec):
        return key_of_program(lambda b: jax.scipy.sparse.linalg.cg(matvec, b)[0])

    def root(scale, slope):
        def f(x):
            def solve(g, y):
                return y / g(slope * jnp.ones(4))

            return lax.custom_root(lambda y: y * y - scale * x, x, lambda f, y: f(y), solve)

        return key_of_program(f)

    keys = [solved(lambda v: 2.0 * v), solved(lambda v: 3.0 * v), root(1.0, 1.0), root(2.0, 1.0), root(1.0, 2.0)]
    assert len(set(keys)) == len(keys)
    assert solved(lambda v: 2.0 * v) == keys[0] and root(2.0, 1.0) == keys[3]


def test_an_effect_counts_by_the_variable_that_its_own_program_numbers():
    def read_one(swap):
        closed = jax.make_jaxpr(lambda one, other: one[...])(jax.new_ref(jnp.ones(3)), jax.new_ref(jnp.ones(3)))
        jaxpr, _ = jaxprs.opened(closed)
        return closed, jaxprs.build(jaxpr.invars[::-1] if swap else jaxpr.invars, jaxpr.outvars, jaxpr.eqns)

    (one, swapped), (_, swapped_too) = read_one(True), read_one(True)
    assert fingerprint(it=(one, swapped)) == fingerprint(it=(one, swapped_too)) != fingerprint(it=(one, one))
    assert fingerprint(it=(one, one)) == fingerprint(it=read_one(False))


def test_the_constraints_of_symbolic_sizes_count():
    def key(spec, *constraints):
        scope = export.SymbolicScope(constraints)
        (size,) = export.symbolic_shape(spec, scope=scope)
        return key_of_program(jnp.sin, jax.ShapeDtypeStruct((size,), np.float32))

    keys = [key("n"), key("m"), key("2*n"), key("n", "n >= 4"), key("n", "n >= 5")]
    assert len(set(keys)) == len(keys)
    assert key("n", "n >= 5") == keys[-1]
