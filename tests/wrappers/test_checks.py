"""Of a program that makes a NaN or an infinity the first op to blame is named, and no op that only hands it on."""

from __future__ import annotations

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jointcut.partition import Roles, split
from jointcut.partition.lower.verify import run_forward
from jointcut.partition.program.jax import runtime
from jointcut.wrappers.built_in.checks import first_nonfinite, is_finite
from jointcut.wrappers.built_in.culprit import Culprit

INF, NAN = jnp.inf, jnp.nan


def searched(function, *args):
    """The culprit of one call, and whether the call's results are finite."""
    program = jax.make_jaxpr(function)(*args)
    flat = jax.tree.leaves(args)
    results = runtime.evaluate(program, *flat)
    found = first_nonfinite(program, flat)
    assert found is None or not is_finite(results)
    return found


def line(marker):
    """The place of this file where a comment stands."""
    lines, _ = inspect.getsourcelines(inspect.getmodule(line))
    (number,) = [i for i, text in enumerate(lines, 1) if text.rstrip().endswith(f"  # {marker}")]
    return f"{__file__}:{number} "


def assert_blamed(culprit, primitive, kind, marker, steps=()):
    assert culprit is not None
    assert (culprit.primitive, culprit.kind, culprit.steps) == (primitive, kind, steps)
    assert culprit.source.startswith(line(marker)), culprit.source


def test_a_logarithm_of_a_negative_number():
    def loss(x):
        y = jnp.log(x)  # log
        return jnp.sum(y * 2)

    found = searched(loss, jnp.array([-1.0, 2.0, 3.0, 1.0]))
    assert found == Culprit("log", f"{line('log')}({loss.__qualname__})", "", "NaN", (), ("float32[4] in [-1, 3]",))
    assert str(found) == f"log made a NaN out of float32[4] in [-1, 3] at {line('log')}({loss.__qualname__})."


def test_zero_by_zero():
    def loss(x, y):
        with jax.named_scope("ratio"):
            return x / y  # zero by zero

    found = searched(loss, 0.0, jnp.zeros(()))
    assert_blamed(found, "div", "NaN", "zero by zero")
    assert str(found) == (f"div made a NaN out of float32[] = 0 and float32[] = 0 at {found.source}, scope ratio.")


def joint(function, x, seed):
    out, pullback = jax.vjp(function, x)
    return out, *pullback(seed)


def test_the_derivative_of_a_root_at_zero():
    def loss(x):
        return jnp.sum(jnp.sqrt(x))  # root

    found = searched(partial(joint, loss), jnp.arange(3.0), 1.0)
    assert_blamed(found, "div", "Inf", "root")
    assert found.scope == "jvp()"


def test_a_half_that_was_cut():
    def loss(x):
        return jnp.sum(jnp.sqrt(x) * jnp.sin(x))  # cut root

    x, seed = jnp.arange(3.0), jnp.float32(1)
    program = jax.make_jaxpr(partial(joint, loss))(x, seed)
    cut = split(program, Roles.simple(1, 1, 1, 1))
    assert first_nonfinite(cut.forward, [x]) is None
    _, residuals = run_forward(cut.halves, cut.graph, [x])
    assert is_finite(residuals)
    assert_blamed(first_nonfinite(cut.backward, [*residuals, seed]), "div", "Inf", "cut root")


def test_an_overflow_is_to_blame_for_the_nan_that_comes_of_it():
    def loss(x):
        y = jnp.exp(x)  # overflow
        return y - 2 * y

    assert_blamed(searched(loss, jnp.array([1.0, 100.0])), "exp", "Inf", "overflow")


def test_a_nan_comes_before_an_infinity_that_has_nothing_to_do_with_it():
    def loss(x):
        y = 1 / x
        return jnp.sqrt(y - 5)  # of a negative

    assert_blamed(searched(loss, jnp.array([0.0, 1.0])), "sqrt", "NaN", "of a negative")
    assert searched(loss, jnp.array([0.0, 0.1])).primitive == "div"


def test_a_result_with_a_nan_comes_first():
    def loss(x):
        return 1 / x, jnp.log(x - 1)  # both

    found = searched(loss, jnp.float32(0))
    assert (found.primitive, found.kind) == ("log", "NaN")


def softmax(x, mask):
    x = jnp.where(mask, x, -jnp.inf)
    return jax.nn.softmax(x)  # softmax


def test_a_mask_of_infinities_is_legitimate():
    assert searched(softmax, jnp.ones((2, 3)), jnp.array([True, False, True])) is None
    assert searched(lambda x: jnp.max(x, initial=-INF), jnp.ones(3)) is None
    constant = np.array([1, -np.inf, 1], np.float32)
    assert searched(lambda x: x + constant, jnp.ones(3)) is None


def test_a_row_that_is_masked_in_full():
    found = searched(softmax, jnp.ones((2, 3)), jnp.array([[True, False, True], [False, False, False]]))
    assert_blamed(found, "sub", "NaN", "softmax")
    assert found.operands == ("float32[2,3] in [-inf, 1]", "float32[2,1] in [-inf, 1]")


def test_an_overflow_beside_a_legitimate_infinity():
    def loss(x):
        y = jnp.where(x > 0, x, -INF)
        return jnp.sum(jnp.exp(y))  # beside

    assert_blamed(searched(loss, jnp.array([-1.0, 100.0])), "exp", "Inf", "beside")


def test_what_a_where_takes_out_is_not_to_blame():
    def loss(x, y):
        safe = jnp.where(x > 0, jnp.log(x), 0.0)
        other = jnp.where(x > 0, y, -INF)
        return jnp.sum(safe), jnp.where(x > 0, jnp.log(x), other), jnp.arcsin(y)  # arcsine

    found = searched(loss, jnp.array([0.0, 1.0]), jnp.array([3.0, 1.0]))
    assert (found.primitive, found.kind) == ("asin", "NaN")
    assert_blamed(found, "asin", "NaN", "arcsine")
    assert searched(lambda x: jnp.where(x > 0, jnp.log(x), -INF), jnp.float32(-1)) is None


def test_only_what_was_chosen_of_several_bad_operands():
    def loss(x):
        a, b = jnp.log(x), jnp.sqrt(x)  # chosen
        c, d = lax.optimization_barrier((a, b))
        return d, c[1:]

    found = searched(loss, jnp.array([-1.0, 1.0]))
    assert_blamed(found, "sqrt", "NaN", "chosen")


def test_the_smaller_of_two_infinities_blames_the_first():
    assert searched(lambda x: jnp.minimum(1 / x, 2 / x**2), jnp.float32(0)).primitive == "div"


def test_what_a_matrix_with_bad_numbers_spoils():
    def loss(x):
        y = x @ x.T  # product
        return jnp.linalg.cholesky(y), jnp.linalg.solve(y, x)

    for x in (jnp.full((3, 3), 1e30), jnp.eye(3).at[0].set(1e30)):
        assert_blamed(searched(loss, x), "dot_general", "Inf", "product")
    assert searched(jnp.linalg.cholesky, -jnp.eye(3)).primitive == "cholesky"


def test_a_nan_written_in_the_program():
    def loss(x):
        return jnp.where(x > 0, x, NAN)  # written

    found = searched(jax.jit(loss), jnp.array([0.0, 1.0]))
    assert found.kind == "NaN"
    assert found.operands == ("float32[] = nan",)
    assert found.source.startswith(line("written"))
    assert searched(loss, jnp.float32(1)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_was_bad_already_when_it_came_in(bad):
    x = jnp.array([1.0, bad])
    assert searched(lambda x: jnp.sum(jnp.sin(x) * 2 if np.isnan(bad) else x * 2), x) is None
    assert searched(lambda x: (x, jnp.log(x[0] - 2)), x).primitive == "log"


def test_a_nan_of_infinities_that_came_in():
    assert searched(lambda x: jnp.sin(x), jnp.float32(np.inf)).primitive == "sin"
    assert searched(lambda x: x - x, jnp.float32(np.inf)).primitive == "sub"


def test_a_finite_program_has_no_culprit():
    assert searched(lambda x: (jnp.sin(x), jnp.argmax(x), jax.random.key(0)), jnp.ones(3)) is None


def test_a_step_of_a_scan():
    def body(carry, x):
        return carry + x, jnp.log(x)  # step

    def loss(xs):
        total, ys = lax.scan(body, 0.0, xs)
        return total * jnp.sum(ys)

    found = searched(loss, jnp.array([2.0, 1.0, -1.0, -2.0]))
    assert_blamed(found, "log", "NaN", "step", (2,))
    assert str(found) == (
        f"log made a NaN out of float32[] = -1 at {found.source}, in step 2 of the loop around it (counted from 0)."
    )
    backwards = searched(partial(lax.scan, body, 0.0, reverse=True), jnp.array([2.0, -1.0, -1.0, 2.0]))
    assert backwards.steps == (2,)


def test_a_step_of_a_scan_in_a_scan():
    def inner(carry, x):
        return carry / x, None  # inner

    def outer(carry, row):
        return lax.scan(inner, carry, row)[0], jax.random.key(1)

    table = jnp.ones((3, 4)).at[1, 2].set(0)
    found = searched(lambda xs: lax.scan(outer, 1.0, xs), table)
    assert_blamed(found, "div", "Inf", "inner", (1, 2))
    assert str(found).endswith(", in steps 1 and 2 of the loops around it (outermost first, counted from 0).")


def test_a_scan_without_steps_hands_on():
    def loss(x):
        return lax.scan(lambda c, x: (c + x, c), jnp.log(x), jnp.zeros(0))  # no step

    assert_blamed(searched(loss, -1.0), "log", "NaN", "no step")


def test_the_branch_that_was_taken():
    def loss(x):
        return lax.cond(x > 0, lambda x: jnp.log(x), lambda x: jnp.sqrt(x), x)  # branch

    assert_blamed(searched(loss, -1.0), "sqrt", "NaN", "branch")
    assert searched(loss, 1.0) is None
    by_platform = partial(lax.platform_dependent, cpu=jnp.log, default=jnp.log)
    assert searched(by_platform, jnp.float32(-1)).primitive == "log"


def test_a_step_of_a_while_loop():
    def loss(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1e20), (0, x))  # while

    assert_blamed(searched(loss, jnp.float32(1)), "mul", "Inf", "while", (1,))
    assert searched(loss, jnp.float32(0)) is None


def test_calls_are_gone_into():
    @jax.jit
    def called(x):
        return jnp.log(x)  # called

    def loss(x):
        with jax.named_scope("outer"):
            return jax.checkpoint(lambda x: called(x) + 1)(x)

    found = searched(loss, -1.0)
    assert_blamed(found, "log", "NaN", "called")
    assert found.scope.startswith("outer")


def test_functions_of_a_library_are_told_by_the_line_that_calls_them():
    def loss(x):
        ok = jnp.var(x)
        return ok + jnp.var(x[:0])  # empty

    found = searched(loss, jnp.ones(2))
    assert found.source.startswith(line("empty"))


def test_rules_of_the_users_own():
    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)  # forward rule

    root.defvjp(lambda x: (root(x), root(x)), lambda y, ct: (ct / y,))

    def loss(x):
        return root(x)  # JAX gives the ops of a backward rule the line that calls the function

    assert_blamed(searched(loss, -1.0), "sqrt", "NaN", "forward rule")
    found = searched(jax.grad(loss), 0.0)
    assert_blamed(found, "div", "Inf", "JAX gives the ops of a backward rule the line that calls the function")
    assert found.scope == "transpose(jvp())"
    assert searched(jax.nn.relu, 1.0) is None
    assert searched(lambda x: jnp.log(jax.nn.relu(x)), -1.0).primitive == "log"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
def test_an_overflow_of_narrow_numbers(dtype):
    def loss(x):
        return (x * x * x * x).astype(jnp.float32)  # narrow

    found = searched(loss, jnp.array([1, 3e4 if dtype != "bfloat16" else 1e20], dtype))
    assert_blamed(found, "mul", "Inf", "narrow")


def test_complex_numbers():
    def loss(z):
        return jnp.abs(1 / z)  # complex

    found = searched(loss, jnp.array([3 + 4j, 0]))
    assert_blamed(found, "div", found.kind, "complex")
    assert found.operands[-1] == "complex64[2] of magnitude in [0, 5]"
    assert searched(loss, jnp.array([1j])) is None


def test_an_index_out_of_bounds():
    def loss(x, i):
        return x.at[i].get(mode="fill")  # bounds

    found = searched(loss, jnp.ones(3), jnp.int32(7))
    assert found.source.startswith(line("bounds"))


def test_settings_of_the_user_do_not_stop_the_search():
    def loss(x):
        return jnp.log(x)

    program = jax.make_jaxpr(loss)(1.0)
    with jax.debug_nans(True), jax.debug_infs(True):
        assert first_nonfinite(program, [jnp.float32(-1)]).primitive == "log"


def test_effects_do_not_happen_again():
    seen = []

    def loss(x):
        def body(c, x):
            jax.debug.callback(lambda _: seen.append("body"), x)
            return c + jnp.log(x), None

        jax.debug.callback(lambda _: seen.append("loss"), x)
        return lax.scan(body, 0.0, x)[0]

    program = jax.make_jaxpr(loss)(jnp.ones(2))
    assert first_nonfinite(program, [-jnp.ones(2)]).steps == (0,)
    assert first_nonfinite(program, [jnp.ones(2)]) is None
    jax.effects_barrier()
    assert seen == []


def test_what_depends_on_a_callback_is_not_known():
    seen = []

    def double(x):
        seen.append(x)
        return np.float32(2) * x

    def loss(x):
        y = io_callback(double, x, x)
        z = lax.while_loop(lambda c: c < y, lambda c: c + 1, x)
        w, ws = lax.scan(lambda c, x: (c + y, (jnp.log(x), x * y)), x, -jnp.ones(2))
        v = lax.cond(y > 0, jnp.sin, jnp.log, x)
        return jnp.log(y), z, w, ws[1], v, ws[0]

    program = jax.make_jaxpr(loss)(1.0)
    assert first_nonfinite(program, [jnp.float32(-1)]).steps == (0,)
    program = jax.make_jaxpr(lambda x: loss(x)[:-1])(1.0)
    assert first_nonfinite(program, [jnp.float32(-1)]) is None
    assert seen == []


def test_a_pure_callback_is_an_op_like_any():
    def loss(x):
        y = jax.pure_callback(lambda x: np.log(np.abs(x)), x, x)  # callback
        return y + 1

    with np.errstate(divide="ignore"):
        found = searched(loss, jnp.float32(0))
    assert_blamed(found, "pure_callback", "Inf", "callback")


def test_references_are_left_alone():
    ref = jax.new_ref(jnp.zeros(2))

    def loss(ref, x):
        ref[...] = x
        return jnp.log(ref[...] * x), jnp.sqrt(x)

    program = jax.make_jaxpr(loss)(ref, -jnp.ones(2))
    found = first_nonfinite(program, [ref, -jnp.ones(2)])
    assert found is not None
    assert found.primitive == "sqrt"
    np.testing.assert_array_equal(ref[...], np.zeros(2))


def nothing(x):
    """A callback that answers NaN, whatever it is given."""
    return jax.pure_callback(lambda x: np.float32(np.nan), jax.ShapeDtypeStruct((), jnp.float32), x)


@pytest.mark.parametrize(
    ("function", "x", "told"),
    [
        (nothing, jnp.array([1, -3, 2]), "int32[3] in [-3, 2]"),
        (nothing, jnp.array([True, False]), "bool[2] in [0, 1]"),
        (nothing, jnp.array(200, jnp.uint8), "uint8[] = 200"),
        (nothing, jnp.ones((2, 0)), "float32[2,0]"),
        (jnp.log, jnp.array([NAN, -1.5, INF], jnp.bfloat16), "bfloat16[3] in [-1.5, inf] or NaN"),
        (jnp.log, jnp.full(2, -1.23456e20), "float32[2] in [-1.235e+20, -1.235e+20]"),
        (lambda x: x.at[jnp.array([7])].get(mode="fill"), jnp.full(2, NAN), "float32[2] NaN"),
        (jnp.log, jnp.array(0j), "complex64[] of magnitude = 0"),
    ],
)
def test_how_an_operand_is_told(function, x, told):
    assert told in searched(function, x).operands


def test_no_more_than_a_few_operands_are_told():
    found = Culprit("concatenate", "", "a/b", "Inf", (), tuple("abcdef"))
    assert str(found) == "concatenate made an infinity out of a, b, c, d and 2 more, scope a/b."
    assert str(Culprit("rng", "", "", "NaN", (), ())) == "rng made a NaN."


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float8_e4m3fn"])
def test_finite_or_not(dtype):
    good = [jnp.ones(3, dtype), jnp.arange(3), jax.random.key(0), np.zeros(2, jax.dtypes.float0), 1.0, True]
    assert is_finite(good)
    assert is_finite([])
    assert is_finite([jax.new_ref(jnp.array(NAN)), jnp.ones((0, 2))])
    assert not is_finite([*good, jnp.array([1, NAN]).astype(dtype)])
    assert not is_finite([np.float32(np.inf)])
