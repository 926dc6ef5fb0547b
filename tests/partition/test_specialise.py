"""A backward without what zero cotangents feed: the same gradients from fewer equations, wherever the zeros meet."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut.partition import Roles, split
from jointcut.partition.lower import verify
from jointcut.partition.program.jax import jaxprs, own_primitives, runtime, user_source
from jointcut.partition.rewrite import simplify, specialise
from oracle import cotangents, is_inexact
from programs import CORPUS, EVERY_PROGRAM, named

# Where a zero meets what no rule knows: a clip that a derivative by hand applies to a cotangent, and a reference.
OPAQUE = frozenset({"custom_vjp_clip", "custom_vjp_in_scan", "internal_reference"})
X = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """So that XLA fuses the same equations in the same way on both sides, and results agree bit for bit."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def doubled(program):
    """The program as a function of its arguments that returns its output twice: as it is, and at half its arguments."""

    def both(*args):
        halved = jax.tree.map(lambda x: x * np.asarray(0.5, x.dtype) if is_number(x) else x, args)
        outs = [program.function(*xs, **program.kwargs) for xs in (args, halved)]
        return [out[0] for out in outs] if program.has_aux else outs

    return both


def is_number(leaf):
    return hasattr(leaf, "dtype") and is_inexact(leaf)


def pulled_back(function, *args):
    """JAX's own pullback as a jaxpr without constants, values for all its inputs, and how many are cotangents."""
    out, pullback = jax.vjp(function, *args)
    leaves, tree = jax.tree.flatten(cotangents(out, 1))
    flat = jax.make_jaxpr(lambda *cts: jax.tree.leaves(pullback(jax.tree.unflatten(tree, cts))))(*leaves)
    return without_constants(flat), [*jaxprs.opened(flat)[1], *leaves], len(leaves)


def without_constants(closed):
    jaxpr, _ = jaxprs.opened(closed)
    return jaxprs.build([*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns)


def backward_of(function, *args):
    """Our own backward half, values for all its inputs, and how many are cotangents."""
    primals, tree = jax.tree.flatten(args)
    cts, cts_tree = jax.tree.flatten(cotangents(function(*args), 1))

    def joint(*xs):
        out, pullback = jax.vjp(function, *tree.unflatten(xs[: len(primals)]))
        return *jax.tree.leaves(out), *jax.tree.leaves(pullback(cts_tree.unflatten(xs[len(primals) :])))

    flat = simplify.inlined(jax.make_jaxpr(joint)(*primals, *cts))
    inputs = [*jaxprs.opened(flat)[1], *primals]
    halves = split(without_constants(flat), Roles.simple(len(inputs), len(cts), len(cts), len(primals)))
    _, residuals = verify.run_forward(halves.halves, halves.graph, inputs)
    return halves.backward, [*residuals, *cts], len(cts)


def filled(values, places):
    return [np.zeros(v.shape, v.dtype) if i in places else v for i, v in enumerate(values)]


def answers(closed, special, values):
    """What a program and its specialisation answer on the same values, as two lists of equal length."""
    want = runtime.evaluate(closed, *values)
    got = iter(runtime.evaluate(special.closed, *(values[i] for i in special.used)))
    pairs = zip(want, special.zero_outputs, strict=True)
    got = [np.zeros(x.shape, x.dtype) if zero else next(got) for x, zero in pairs]
    return want, got


def hold_law(closed, values, patterns):
    """The law: for each pattern the same gradients, with no more equations and without the inputs left out."""
    specials = [specialise.without(closed, places) for places in patterns]
    for special, places in zip(specials, patterns, strict=True):
        jaxpr, _ = jaxprs.opened(special.closed)
        assert not set(special.used) & set(places)
        assert len(special.used) == len(jaxpr.invars)
        assert size(special.closed) <= size(closed)
    pairs = list(zip(specials, patterns, strict=True))
    for want, got in jax.jit(lambda xs: [answers(closed, s, filled(xs, p)) for s, p in pairs])(values):
        for a, b in zip(want, got, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return specials


def deep(closed):
    """All equations of a jaxpr, those inside others too."""
    for eqn in jaxprs.opened(closed)[0].eqns:
        yield eqn
        for body in jaxprs.inner_jaxprs(eqn):
            yield from deep(body)


def names(closed):
    return Counter(eqn.primitive.name for eqn in deep(closed))


def size(closed):
    """How many equations there are, without those that only make a constant."""
    return sum(1 for eqn in deep(closed) if any(not isinstance(v, jaxprs.Literal) for v in eqn.invars))


@pytest.mark.parametrize("program", CORPUS[:: 4 if EVERY_PROGRAM else 8], ids=lambda program: program.name)
def test_every_pattern_of_zeros_gives_the_same_gradients_for_less(program):
    """The two outputs share nothing but the arguments, so that what is left for each adds up to the whole at most."""
    with program.precision():
        closed, values, count = pulled_back(doubled(program), *program.args)
        places = range(len(values) - count, len(values))
        patterns = [places[: count // 2], places[count // 2 :], places]
        second, first, neither = hold_law(closed, values, patterns)
    if program.name not in OPAQUE:
        assert size(first.closed) + size(second.closed) <= size(specialise.without(closed, ()).closed)
        assert not jaxprs.opened(neither.closed)[0].eqns
        assert all(neither.zero_outputs)


@pytest.mark.parametrize("name", ["transformer_block", "scan_over_layers", "nested_scans", "bfloat16_weights"])
def test_our_own_backward_keeps_the_law(name):
    program = named(name)
    closed, values, count = backward_of(doubled(program), *program.args)
    places = range(len(values) - count, len(values))
    second, first, neither = hold_law(closed, values, [places[:1], places[1:], places])
    assert names(first.closed)["dot_general"] < names(closed)["dot_general"] or name == "nested_scans"
    assert size(first.closed) < size(closed) and size(second.closed) < size(closed)
    assert all(neither.zero_outputs) and not neither.used


def test_what_only_the_cotangent_of_logits_feeds_is_dropped():
    def loss_and_logits(head, x):
        logits = jnp.tanh(x @ head)
        return jnp.sum(x**2), logits

    closed, values, _ = backward_of(loss_and_logits, X, X)
    last = len(values) - 1
    (special,) = hold_law(closed, values, [[last]])
    assert names(closed)["dot_general"] == 2
    assert names(special.closed)["dot_general"] == 0
    assert special.zero_outputs == (True, False)
    assert last not in special.used


def test_a_loss_made_of_logits_needs_all_products_without_their_own_cotangent():
    def loss_and_logits(head, x):
        logits = x @ head
        return jnp.sum(logits**2), logits

    closed, values, _ = backward_of(loss_and_logits, X, X)
    (special,) = hold_law(closed, values, [[len(values) - 1]])
    assert names(special.closed)["dot_general"] == names(closed)["dot_general"] == 2
    assert names(special.closed)["add_any"] == names(closed)["add_any"] - 1


def test_without_zeros_only_dead_code_goes():
    def program(x):
        dead = jnp.exp(x)
        dead_too, alive = lax.scan(lambda h, _: (h * 2, (h + 1, jnp.sin(h))), x, None, length=3)[1]
        return jnp.cos(x), alive, x, 0.0, jax.jit(jnp.sinh)(x), dead * 0 if False else dead_too.shape[0]

    closed = jax.make_jaxpr(program)(X)
    special = specialise.without(closed, ())
    assert special.used == (0,) and not any(special.zero_outputs)
    assert names(closed) - names(special.closed) == Counter({"exp": 1, "add": 1})
    old, new = ({e.primitive.name: e for e in jaxprs.opened(c)[0].eqns} for c in (closed, special.closed))
    assert new["cos"] is old["cos"] and new["jit"] is old["jit"]
    want, got = answers(closed, special, [X])
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


def specialised(function, places, *args):
    """A function as if it were a backward, with some arguments zero; the law holds for it."""
    closed = jax.make_jaxpr(function)(*args)
    (special,) = hold_law(closed, list(args), [places])
    return special


def tops(special):
    return [eqn.primitive.name for eqn in jaxprs.opened(special.closed)[0].eqns]


def test_sums_lose_their_zero_terms():
    special = specialised(lambda x, z: (x + z, z + x, x - z, z - x, x * z, z / x, z, x), [1], X + 2, X)
    assert tops(special) == ["neg"]
    assert special.zero_outputs == (False, False, False, False, True, True, True, False)
    assert special.used == (0,)


def test_a_zero_is_zero_times_infinity_too_and_nothing_by_itself_below_a_line():
    closed = jax.make_jaxpr(lambda x, z: (x * z, x / (z + 1), x / z))(X, X)
    special = specialise.without(closed, [1])
    assert special.zero_outputs == (True, False, False)
    got = runtime.evaluate(special.closed, jnp.full((3, 3), 2.0))
    assert [float(x[0, 0]) for x in got] == [2, np.inf]


def test_a_system_is_solved_by_zero_for_zeros_alone():
    def solve(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    closed = jax.make_jaxpr(lambda x, z: (solve(x, z), solve(z, x)))(X, X)
    assert specialise.without(closed, [1]).zero_outputs == (True, False)


def test_a_term_of_another_type_keeps_its_sum():
    weak = jax.make_jaxpr(lambda x: x * 2)(1.0).out_avals[0]
    assert weak.weak_type
    closed = jax.make_jaxpr(lambda x, z: x + z)(1.0, np.float32(1))
    special = specialise.without(closed, [1])
    (out,) = jaxprs.opened(special.closed)[0].outvars
    assert not out.aval.weak_type
    assert answers(closed, special, [jnp.asarray(1.0), np.float32(0)])[1] == [1]
    assert tops(specialised(lambda z: z + 2.0, [0], X)) == ["broadcast_in_dim", "add"]


def test_data_are_zero_together_and_joined_with_zeros_otherwise():
    def moved(mask, index, x, z):
        blank = jnp.zeros_like(z)
        zero = (
            jnp.where(mask, z, blank),
            jnp.concatenate([z, blank]),
            jnp.pad(z, 1),
            blank.at[index].add(z[0]),
            lax.dynamic_update_slice(blank, z, (0, 0)),
            lax.dynamic_slice(z, (index, 0), (1, 3)),
            jnp.cumsum(z[index]),
        )
        joined = (
            jnp.where(mask, x, z),
            jnp.where(mask, z, x),
            jnp.concatenate([z, x]),
            x.at[index].add(z[0]),
            z.at[index].set(x[0]),
            lax.dynamic_update_slice(z, x[:1], (index, 0)),
        )
        return zero, joined

    special = specialised(moved, [3], X > 0, np.int32(1), X, X)
    assert special.zero_outputs == (True,) * 7 + (False,) * 6


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.complex64, np.int32, np.bool_])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_where_there_is_no_rule_zeros_are_made(dtype, shape):
    z = np.ones(shape, dtype)
    special = specialised(lambda z: jnp.stack([z == jnp.zeros_like(z), z != jnp.ones_like(z)]), [0], z)
    assert special.used == ()
    assert special.zero_outputs == (False,)
    (both,) = runtime.evaluate(special.closed)
    assert both.shape == (2, *shape) and both.all()


def test_zeros_of_64_bits_are_made_where_64_bits_are_off():
    with jax.enable_x64(True):
        z = jnp.ones(3, np.float64)
        closed = jax.make_jaxpr(lambda z: (jnp.cos(z), jnp.exp(z) + z))(z)
    with jax.enable_checks(False):  # the checker knows no 64 bits then
        special = specialise.without(closed, [0])
    with jax.enable_x64(True):
        ones = [np.asarray(x) for x in runtime.evaluate(special.closed)]
    assert [x.dtype for x in ones] == [np.float64] * 2
    assert all(np.all(x == 1) for x in ones)


def test_zeros_of_an_explicit_sharding_are_made():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        z = jax.device_put(jnp.ones((2, 3)), jax.sharding.NamedSharding(mesh, jax.P("i")))
        special = specialise.without(jax.make_jaxpr(jnp.cos)(z), [0])
        (out,) = jaxprs.opened(special.closed)[0].outvars
        assert out.aval.sharding.spec == jax.P("i", None)
        assert np.all(np.asarray(jax.jit(partial(runtime.evaluate, special.closed))()[0]) == 1)


def test_zeros_are_made_once_and_where_they_are_read():
    def function(z):
        with jax.named_scope("here"):
            return jnp.cos(z) + jnp.exp(z)

    special = specialised(function, [0], X)
    assert tops(special) == ["broadcast_in_dim", "cos", "exp", "add"]
    eqns = jaxprs.opened(special.closed)[0].eqns
    assert [user_source.scope_of(eqn) for eqn in eqns] == ["here"] * 4
    assert all("test_specialise.py" in user_source.source_of(eqn) for eqn in eqns)


def test_a_result_of_cond_is_zero_if_it_is_in_every_branch():
    def branches(index, x, z):
        return lax.switch(index, [lambda x, z: (z * x, z, x), lambda x, z: (jnp.zeros_like(z), x, x + z)], x, z)

    special = specialised(branches, [2], np.int32(0), X, X)
    (cond,) = (e for e in deep(special.closed) if e.primitive.name == "cond")
    assert special.zero_outputs == (True, False, False)
    assert (len(cond.invars), len(cond.outvars)) == (2, 2)


def test_a_carry_is_zero_if_it_starts_and_stays_so():
    def loop(x, z):
        def step(carry, xs):
            sum_of_zeros, moved, alive, late = carry
            x, z = xs
            return (sum_of_zeros + z * x, sum_of_zeros * 2 + z, alive + moved, late + alive), (z, x * alive, moved)

        return lax.scan(step, (jnp.zeros_like(z[0]), z[0], x[0], z[0]), (x, z))

    special = specialised(loop, [1], X, X)
    (scan,) = (e for e in deep(special.closed) if e.primitive.name == "scan")
    layout = jaxprs.scan_layout(scan)
    assert special.zero_outputs == (True, True, False, False, True, False, True)
    assert (layout.num_carry, len(scan.invars), len(scan.outvars)) == (2, 3, 3)


def test_a_loop_of_which_nothing_is_left_is_gone_with_what_fed_it():
    def loop(x, z):
        stack = lax.scan(lambda h, y: (jnp.sin(h * y), h), x[0], x)[1]
        return lax.scan(lambda s, xs: (s + xs[0] * xs[1], s), jnp.zeros_like(z[0]), (stack, z))[0], jnp.cos(x)

    assert tops(specialised(loop, [1], X, X)) == ["cos"]


def test_barriers_lose_the_zeros_alone():
    special = specialised(lambda x, z: lax.optimization_barrier((x, z, x * 2)), [1], X, X)
    (barrier,) = (e for e in deep(special.closed) if e.primitive.name == "optimization_barrier")
    assert (len(barrier.invars), len(barrier.outvars)) == (2, 2)
    assert special.zero_outputs == (False, True, False)


def test_calls_are_made_smaller_and_keep_their_options():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.jit(lambda x, z: (z * 2, jnp.sin(x) + z, x), in_shardings=device, out_shardings=device)
    special = specialised(lambda x, z: placed(x, z), [1], X, X)
    (call,) = jaxprs.opened(special.closed)[0].eqns
    assert special.zero_outputs == (True, False, False)
    assert call.params["in_shardings"] == (device,)
    assert call.params["out_shardings"] == (device, device)
    assert tops(specialised(lambda x, z: jax.checkpoint(lambda x, z: jnp.sin(x) * z)(x, z), [1], X, X)) == []


def test_custom_rules_are_looked_into_and_kept():
    assert tops(specialised(lambda x, z: (jax.nn.relu(z * x), x), [1], X, X)) == []
    steep = jax.custom_jvp(lambda x, z: (jnp.cos(z) * x, z))
    steep.defjvp(lambda primals, tangents: (steep(*primals), steep(*tangents)))
    special = specialised(lambda x, z: steep(x, z), [1], X, X)
    assert tops(special) == ["broadcast_in_dim", "custom_jvp_call"]
    assert special.zero_outputs == (False, True)


def test_a_linear_map_of_zeros_is_zero():
    rules = own_primitives.LinearRules(
        lambda residuals, linear: linear, lambda rs, xs: [rs[0] * xs[0]], lambda rs, cts: cts, lambda: None
    )
    linear = own_primitives.linear_primitive("scaled")
    closed = jax.make_jaxpr(lambda x, z: linear.bind(x, z, rules=rules, num_residuals=1))(X, X)
    assert specialise.without(closed, [1]).zero_outputs == (True,)
    assert specialise.without(closed, [0]).zero_outputs == (False,)


@pytest.mark.parametrize("where", ["alone", "in a loop", "in a branch", "in a call"])
def test_effects_stay(where, capfd):
    def told(z):
        jax.debug.print("saw {}", jnp.sum(z), ordered=True)
        return z * 2

    around = {
        "alone": told,
        "in a loop": lambda z: lax.scan(lambda s, x: (s + told(x), None), jnp.zeros_like(z[0]), z)[0],
        "in a branch": lambda z: lax.cond(z[0, 0] > 2, lambda z: z, told, z),
        "in a call": jax.jit(told),
    }
    special = specialise.without(jax.make_jaxpr(around[where])(X), [0])
    assert special.zero_outputs == (True,)
    assert special.used == ()
    jax.jit(partial(runtime.evaluate, special.closed))()
    jax.effects_barrier()
    assert capfd.readouterr().out == "saw 0.0\n" * (3 if where == "in a loop" else 1)


def test_references_and_keys_are_never_left_out():
    def function(ref, key, z):
        ref[...] += z
        return jax.random.uniform(key) * z, jax.random.bits(key)

    jaxpr, _ = jaxprs.opened(jax.make_jaxpr(function)(jax.new_ref(X), jax.random.key(0), X))
    special = specialise.without(jaxprs.build(jaxpr.invars, jaxpr.outvars, jaxpr.eqns), [0, 1, 2])
    assert special.used == (0, 1)
    assert special.zero_outputs == (True, False)
    ref = jax.new_ref(jnp.asarray(X))
    runtime.evaluate(special.closed, ref, jax.random.key(0))
    np.testing.assert_array_equal(ref[...], X)


def test_a_loop_on_a_reference_stays_whole():
    def function(ref, x, z):
        def step(s, xs):
            ref[...] += xs[0] + xs[1]
            return s + xs[1], None

        return lax.scan(step, jnp.zeros_like(z[0]), (x, z))[0]

    jaxpr, _ = jaxprs.opened(jax.make_jaxpr(function)(jax.new_ref(X[0]), X, X))
    special = specialise.without(jaxprs.build(jaxpr.invars, jaxpr.outvars, jaxpr.eqns), [2])
    ref = jax.new_ref(jnp.zeros(3))
    assert special.used == (0, 1)
    runtime.evaluate(special.closed, ref, X)
    np.testing.assert_allclose(ref[...], X.sum(0), atol=1e-6)


def test_cotangents_of_integers_are_handed_on_without_numbers():
    first = jax.custom_jvp(lambda x, z: x * 2)
    first.defjvp(lambda primals, tangents: (first(*primals), tangents[0] * 2))
    nothing = np.zeros(3, jax.dtypes.float0)
    closed = jax.make_jaxpr(lambda x, z: (first(x, z), z))(X, nothing)
    special = specialise.without(closed, [1])
    assert (special.used, special.zero_outputs) == ((0,), (False, True))
    np.testing.assert_array_equal(jax.jit(partial(runtime.evaluate, special.closed))(X)[0], X * 2)


def test_a_call_with_constants_of_its_own_stays_whole():
    const = jnp.arange(3.0)
    call = jax.jit(lambda x, z: (x * const + z, z * const))
    special = specialised(lambda x, z: call(x, z), [1], X, X)
    assert tops(special) == ["broadcast_in_dim", "jit"]
    assert special.zero_outputs == (False, True)


def test_a_place_that_does_not_exist_is_refused():
    with pytest.raises(AssertionError, match=r"\[2\] of 1 inputs"):
        specialise.without(jax.make_jaxpr(jnp.sin)(X), [2])
