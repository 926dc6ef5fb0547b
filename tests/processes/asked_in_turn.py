"""Ask for plans on two processes, in turn, and print what each case tells on this one, as JSON.

python tests/processes/asked_in_turn.py NUMBER PLACE PORT
"""

from __future__ import annotations

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.processes import Plans, join
from jointcut import aot
from jointcut.aot.cache import environment
from jointcut.aot.cache.store import Store
from jointcut.aot.planning import agreed
from jointcut.aot.planning.request import Request
from jointcut.partition.program.jax import processes

NUMBER, PLACE, PORT = map(int, sys.argv[1:])
join(NUMBER, PLACE, PORT)
IS_OTHER = PLACE == 1
MESH = jax.make_mesh((NUMBER,), ("data",), axis_types=(AxisType.Auto,))
WIDTH, ROWS = 32, 64
ROWS_APART = P("data")


class Floating:
    """A filter without a text of its own."""

    def __call__(self, x):
        return jnp.issubdtype(x.dtype, jnp.floating)


def laid(shape, spec=ROWS_APART):
    whole = np.random.default_rng(0).standard_normal(shape, np.float32) / 6
    return jax.make_array_from_callback(shape, NamedSharding(MESH, spec), whole.__getitem__)


W, X = [laid((WIDTH, WIDTH)) for _ in range(4)], laid((ROWS, WIDTH))


def loss_of(scale=2.0, **options):
    def loss(w, x):
        for v in w:
            x = jnp.sin(jnp.tanh(x @ v) * scale)
        return jnp.mean(x**2)

    return aot.function(loss, **options)


def in_jit(loss, x=X):
    return float(jax.jit(lambda w, x: jax.value_and_grad(loss)(w, x))(W, x)[0])


def plans_of_a_jit_a_call_and_a_gradient():
    values = [in_jit(loss_of()), float(loss_of().value_and_grad(W, X)[0])]
    return [*values, float(jax.value_and_grad(loss_of())(W, X)[0])]


def a_plan_that_is_known():
    before = sum(agreed._COUNTS.values())
    in_jit(loss_of())
    return sum(agreed._COUNTS.values()) - before


def a_plan_for_fewer_bytes():
    steps = [loss_of(budget=0.8).trace(W, X).partition().compile() for _ in range(2)]
    plain = loss_of(strategy="save_all").trace(W, X).partition().compile()
    assert steps[0].activation_bytes == steps[1].activation_bytes <= 0.8 * plain.activation_bytes
    return in_jit(loss_of(budget=0.8))


def notes_in_a_shared_folder():
    put, keys = Store.put, []
    Store.put = lambda self, key, *rest: keys.append(key) or put(self, key, *rest)
    in_jit(loss_of(2.2, budget=0.8, cache=os.environ["NOTES"]))
    Store.put = put
    return keys


def a_bound_on_the_error():
    return str(loss_of(budget=0.9, error=1e-2).trace(W, X).partition().plan.gradient_error)


def options_that_are_objects():
    return in_jit(loss_of(filter=Floating(), policy={"tanh": aot.MUST_SAVE}))


def another_source():
    return in_jit(loss_of(3.0 if IS_OTHER else 2.5))


def another_shape():
    return in_jit(loss_of(2.6), laid((2 * ROWS, WIDTH)) if IS_OTHER else X)


def another_sharding():
    return in_jit(loss_of(2.7), laid((ROWS, WIDTH), P(None, "data")) if IS_OTHER else X)


def another_option():
    return in_jit(loss_of(2.8, budget=1.0 if IS_OTHER else None))


def another_policy():
    return in_jit(loss_of(2.8, policy={"tanh": aot.MUST_SAVE if IS_OTHER else aot.MUST_RECOMPUTE}))


def another_version():
    versions = environment.versions
    try:
        if IS_OTHER:
            environment.versions = lambda: tuple((name, "0.1" if name == "jaxlib" else v) for name, v in versions())
        else:
            environment.versions = lambda: tuple((name, "0.2" if name == "jaxlib" else v) for name, v in versions())
        return in_jit(loss_of(2.9))
    finally:
        environment.versions = versions


def a_budget_that_is_refused():
    try:
        in_jit(loss_of(2.9, budget="1 kB"))
    except aot.BudgetError as error:
        return [str(error), error.least_bytes, error.__notes__]


def a_failure(place):
    answered = Request.answered
    try:
        if place == PLACE:
            Request.answered = lambda *_, **__: {}["nothing"]
        return in_jit(loss_of(3.1 + place))
    except KeyError:
        return "KeyError"
    finally:
        Request.answered = answered


def a_failure_of_the_first():
    return a_failure(0)


def a_failure_of_the_second():
    return a_failure(1)


def texts_that_are_left():
    left = processes._client().key_value_dir_get_bytes("jointcut/plans/0-1")
    return len({key.split("/")[3] for key, _ in left})


def one_that_does_not_ask():
    processes.PATIENCE_S = 1.5
    return None if IS_OTHER else in_jit(loss_of(4.0))


CASES = [
    plans_of_a_jit_a_call_and_a_gradient,
    a_plan_that_is_known,
    a_plan_for_fewer_bytes,
    notes_in_a_shared_folder,
    a_bound_on_the_error,
    options_that_are_objects,
    another_source,
    another_shape,
    another_sharding,
    another_option,
    another_policy,
    another_version,
    a_budget_that_is_refused,
    a_failure_of_the_first,
    a_failure_of_the_second,
    texts_that_are_left,
    one_that_does_not_ask,  # the last one: it parts the counts of the two
]


def told_of(case):
    try:
        return case()
    except aot.ProcessError as error:
        return str(error)


if __name__ == "__main__":
    plans = Plans()
    told = {}
    for case in CASES:
        plans.found.clear()
        told[case.__name__] = [told_of(case), [*plans.found]]
    sys.stdout.write(json.dumps(told))
