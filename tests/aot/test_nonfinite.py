"""Who made the NaN: the op, its line, its operands, the step of its loop, and a cure that was tried."""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.errors import CallError, TraceError

OPTION = 'aot.function(derivatives="finite") makes this call finite (checked by a run).'
NO_CURE = "No option and no function of aot.derivatives is known to make this call finite."
LOOK = (
    "Look at that line with these numbers; jax.numpy.where on an operand, not on the result, keeps a gradient finite."
)


def cured(name, instead):
    return f"aot.derivatives.{name} in place of {instead} at that line makes this call finite (checked by a run)."


def told(function, half, made, marker, *cures, scope="jvp()", more=""):
    """The whole text about a function whose line ends with a comment."""
    lines, start = inspect.getsourcelines(inspect.unwrap(getattr(function, "_function", function)))
    (place,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith(f"  # {marker}")]
    name = function.__qualname__
    source = f"{Path(__file__)}:{place} ({name})"
    text = f"The {half} of {function.__name__} is not finite: {made} at {source}, scope {scope}{more}."
    return "\n".join([text, *cures])


def length(x):
    return jnp.sqrt(jnp.sum(x**2))  # root


def deviation(x):
    return jnp.std(x) + jnp.sum(x)  # std


def guarded(x):
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))  # guard


def entropy(p):
    return -jnp.sum(p * jnp.log(p))  # entropy


def steep(x):
    return jnp.sum(jnp.sqrt(x))  # steep


def likelihood(x):
    y = jnp.log(x)  # log
    return jnp.sum(y)


def surprise(x):
    return -jnp.log(jax.nn.softmax(x))[0]  # softmax


def spectrum(a):
    return jnp.sum(jnp.linalg.eigh(a)[1] ** 3)  # eigh


INF = "made an infinity out of"
FOUND = {
    "a norm at zero": (
        *(length, jnp.zeros(3), "backward", f"div {INF} float32[] = 0.5 and float32[] = 0", "root", "jvp()"),
        (OPTION, cured("norm(x)", "the root of a sum of squares")),
    ),
    "the deviation of equal values": (
        *(deviation, jnp.ones(3), "backward", f"div {INF} float32[] = 0.5 and float32[] = 0", "std", "jvp(_std)"),
        (OPTION, cured("std(x)", "the root of a variance")),
    ),
    "a guard by where": (
        *(guarded, jnp.array([0.0, 1.0]), "backward"),
        *(f"div {INF} float32[] = 0.5 and float32[2] in [0, 1]", "guard", "jvp()"),
        (OPTION, cured("sqrt(x)", "jnp.sqrt(x)")),
    ),
    "an entropy": (
        *(entropy, jnp.array([0.0, 0.5, 0.5]), "forward", f"log {INF} float32[3] in [0, 0.5]", "entropy", "jvp()"),
        (cured("xlogy(x, y)", "x * log(y)"),),
    ),
    "an underflow of softmax": (
        *(surprise, jnp.array([0.0, 200.0]), "forward", f"log {INF} float32[2] in [0, 1]", "softmax", "jvp()"),
        (cured("log_softmax(x)", "log(softmax(x))"),),
    ),
    "equal eigenvalues": (
        *(spectrum, jnp.eye(2), "backward", f"integer_pow {INF} float32[2,2] in [0, 1]", "eigh", "jvp(eigh)"),
        (cured("linalg.eigh(x)", "jnp.linalg.eigh(x)"),),
    ),
    "a slope that is infinite by nature": (
        *(steep, jnp.array([0.0, 1.0]), "backward"),
        *(f"div {INF} float32[] = 0.5 and float32[2] in [0, 1]", "steep", "jvp()"),
        (NO_CURE, LOOK),
    ),
    "the logarithm of a negative number": (
        *(likelihood, jnp.array([-1.0, 2.0]), "forward"),
        *("log made a NaN out of float32[2] in [-1, 2]", "log", "jvp()"),
        (NO_CURE, LOOK),
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_the_op_is_named_with_a_cure_that_was_tried(case):
    function, x, half, made, marker, scope, cures = case
    found = aot.first_nonfinite(function, x)
    assert str(found) == told(function, half, made, marker, *cures, scope=scope)
    for cure in found.cures:
        assert not cure.then


def test_the_cures_of_the_texts_do_cure():
    x, p = jnp.zeros(3), jnp.array([0.0, 0.5, 0.5])
    assert aot.first_nonfinite(length, x, derivatives="finite") is None
    assert aot.first_nonfinite(aot.derivatives.norm, x) is None
    assert aot.first_nonfinite(lambda p: -jnp.sum(aot.derivatives.xlogy(p, p)), p) is None
    assert aot.first_nonfinite(lambda a: jnp.sum(aot.derivatives.linalg.eigh(a)[1] ** 3), jnp.eye(2)) is None


def test_what_is_finite_is_none_and_options_are_taken():
    def pair(scale, x):
        return jnp.sum(x * scale), {"mean": jnp.mean(x)}

    assert aot.first_nonfinite(pair, 2.0, jnp.ones(3), argnums=(0, 1), has_aux=True) is None
    assert aot.first_nonfinite(lambda n, x: jnp.sum(x**n), 2, jnp.ones(3), static_argnums=0, argnums=1) is None
    assert aot.first_nonfinite(aot.function(length, argnums=(0,)), jnp.ones(3)) is None


def test_the_record_has_the_parts():
    found = aot.first_nonfinite(aot.function(deviation), jnp.ones(3))
    assert (found.name, found.half, found.came_in, found.untried) == ("deviation", "backward", "", "")
    culprit = found.culprit
    assert (culprit.primitive, culprit.kind, culprit.scope, culprit.steps) == ("div", "Inf", "jvp(_std)", ())
    assert culprit.operands == ("float32[] = 0.5", "float32[] = 0")
    assert [cure.what for cure in found.cures] == [
        'aot.function(derivatives="finite")',
        "aot.derivatives.std(x) in place of the root of a variance at that line",
    ]


def test_the_step_of_a_scan_is_told_and_its_line_cured():
    def stepped(x):
        def step(total, row):
            return total + jnp.sqrt(jnp.sum(row * row)), None

        return lax.scan(step, 0.0, x)[0]

    rows = jnp.ones((4, 2)).at[2].set(0)
    found = aot.first_nonfinite(stepped, rows)
    assert found.culprit.steps == (2,)
    assert "in step 2 of the loop around it (counted from 0)." in str(found)
    assert str(found).splitlines()[1:] == [OPTION, cured("norm(x)", "the root of a sum of squares")]


def test_the_step_of_a_while_loop_is_told():
    def halved(x):
        def body(state):
            i, y = state
            return i + 1, jnp.log(y)

        return aot.while_loop(lambda state: state[0] < 4, body, (0, x))[1]

    found = aot.first_nonfinite(halved, jnp.float32(1.5))
    assert (found.half, found.culprit.primitive, found.culprit.steps) == ("forward", "log", (2,))
    assert found.culprit.source.endswith("halved.<locals>.body)")
    assert re.fullmatch(r"float32\[\] = -0\.90\d+", *found.culprit.operands)
    assert str(found).splitlines()[1:] == [NO_CURE, LOOK]


LOOPS = {
    "aot.fori_loop": (lambda body, x: aot.fori_loop(0, 20, body, x, memory=3), 19),
    "lax.scan": (lambda body, x: lax.scan(lambda y, i: (body(i, y), None), x, jnp.arange(20))[0], 0),
}


@pytest.mark.parametrize("case", LOOPS.values(), ids=LOOPS)
def test_the_step_of_a_backward_is_the_users(case):
    loop, step = case

    def turned(x):
        def body(i, y):
            return jnp.where(i == 7, jnp.sum(y) + jnp.sqrt(jnp.sum((y - y) ** 2)), y * 1.01)

        return jnp.sum(loop(body, x))

    found = aot.first_nonfinite(turned, jnp.ones(2))
    assert (found.half, found.culprit.primitive, found.culprit.steps) == ("backward", "div", (step,))
    assert "body)" in found.culprit.source
    assert str(found).splitlines()[1:] == [OPTION, cured("norm(x)", "the root of a sum of squares")]


def test_two_lines_are_cured_together():
    def two(p):
        first = jnp.sum(p * jnp.log(p))  # first
        second = jnp.sum(jnp.exp(p * 200) / jnp.sum(jnp.exp(p * 200)))  # second
        return first + second

    found = aot.first_nonfinite(two, jnp.array([0.0, 1.0]))
    assert found.culprit.primitive == "log"
    (cure,) = found.cures
    place = told(two, "", "", "second").partition(" at ")[2].partition(", scope")[0]
    assert cure.what == (
        "aot.derivatives.xlogy(x, y) in place of x * log(y) at that line, together with "
        f"aot.derivatives.softmax(x) in place of exp(x) / sum(exp(x)) at {place},"
    )
    assert cure.then == ""


def test_a_cure_that_only_moves_the_fault_says_what_comes_then():
    def two(p):
        first = jnp.sum(p * jnp.log(p))  # first
        return first + jnp.sum(jnp.exp(p * 1000))  # second

    text = str(aot.first_nonfinite(two, jnp.array([0.0, 0.5])))
    assert text == told(
        two,
        *("forward", f"log {INF} float32[2] in [0, 0.5]", "first", NO_CURE),
        "aot.derivatives.xlogy(x, y) in place of x * log(y) at that line cures that line, but not this call: with it, "
        + told(two, "", f"exp {INF} float32[2] in [0, 500]", "second").partition("finite: ")[2],
        LOOK,
    )


def test_a_formula_with_the_option_together():
    def both(p):
        return jnp.sum(p * jnp.log(p)) + jnp.sqrt(jnp.sum(p**2))

    found = aot.first_nonfinite(both, jnp.zeros(2))
    assert [cure.then for cure in found.cures] == [""]
    assert found.cures[0].what.startswith("aot.derivatives.xlogy(x, y) in place of x * log(y) at that line")


def test_a_nan_that_came_in_is_told_by_its_path():
    found = aot.first_nonfinite(lambda params: jnp.sum(params["w"]), {"w": jnp.array([1.0, jnp.nan])})
    assert found.culprit is None
    assert str(found) == (
        "The forward of <lambda> returns a NaN that came in with args[0]['w'].\nLook at what made that one."
    )


def test_infinities_that_are_meant_are_no_fault():
    def masked(scores, mask):
        return jnp.sum(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))[0])

    assert aot.first_nonfinite(masked, jnp.ones(3), jnp.array([True, True, False])) is None


def test_effects_are_not_repeated_to_try_a_cure():
    count = jax.new_ref(jnp.int32(0))

    def counted(x):
        count[...] += 1
        return jnp.sum(x * jnp.log(x))  # counted

    found = aot.first_nonfinite(counted, jnp.zeros(2))
    assert count[...] == 1
    assert str(found).splitlines()[1:] == ["No cure was tried: another run would write its references again.", LOOK]


def test_debug_tells_the_same():
    with aot.debug(), pytest.raises(aot.NonFiniteError) as caught:
        aot.function(length).value_and_grad(jnp.zeros(3))
    found = aot.first_nonfinite(length, jnp.zeros(3))
    assert str(caught.value) == str(found)
    assert caught.value.found == found


def test_an_error_can_be_pickled_with_its_record():
    with pytest.raises(aot.NonFiniteError) as caught:
        aot.function(length, check="nonfinite").value_and_grad(jnp.zeros(3))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.found) == (str(caught.value), caught.value.found)


# ------------------------------------------------------------------------------------------------------- bad input


def test_options_beside_a_function_with_options_are_refused():
    with pytest.raises(TraceError) as caught:
        aot.first_nonfinite(aot.function(length), jnp.ones(3), derivatives="finite")
    assert str(caught.value) == (
        "first_nonfinite(derivatives=...) is given for an aot.function, which has options of its own.\n"
        "Give it to aot.function, or leave it out."
    )


def test_arguments_without_numbers_are_refused():
    with pytest.raises(CallError) as caught:
        aot.first_nonfinite(length, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert str(caught.value) == "first_nonfinite is given a jax.ShapeDtypeStruct.\nGive arrays: it runs the call."
    with pytest.raises(CallError) as caught:
        jax.jit(lambda x: aot.first_nonfinite(length, x))(jnp.ones(3))
    assert str(caught.value) == (
        "first_nonfinite is called inside a transformation (jax.jit, jax.grad, jax.vmap), where arrays have no numbers."
        "\nCall it outside, with the arrays of one call."
    )


def test_an_unknown_check_proposes_the_nearest():
    with pytest.raises(TraceError) as caught:
        aot.function(length, check="nonfinit")
    assert str(caught.value) == ("check 'nonfinit' is unknown.\nKnown names: 'nonfinite'. Did you mean 'nonfinite'?")


def test_donated_arguments_are_refused_early():
    for donated in ({"donate_argnums": 0}, {"donate_argnames": "x"}):
        with pytest.raises(TraceError) as caught:
            aot.function(length, check="nonfinite", **donated)
        assert str(caught.value) == (
            "check and donate_argnums are given together, and a donated argument is gone when a failed call is "
            "replayed.\nDonate in the function that updates, or leave check out and look at one call with "
            "aot.first_nonfinite."
        )


# --------------------------------------------------------------------------------------- check="nonfinite", every call

STORY = told(length, "backward", f"div {INF} float32[] = 0.5 and float32[] = 0", "root", *FOUND["a norm at zero"][-1])
WAYS = {
    "value_and_grad": lambda f: f.value_and_grad,
    "grad": lambda f: f.grad,
    "compiled": lambda f: f.trace(jnp.ones(3)).partition().compile().value_and_grad,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_failed_step_tells_the_whole_story_and_the_next_call_works(way):
    call = way(aot.function(length, check="nonfinite"))
    want = way(aot.function(length))(jnp.ones(3))
    for _ in range(3):  # the first compiles, the next are bound, then the program is called directly
        for a, b in zip(jax.tree.leaves(call(jnp.ones(3))), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
        with pytest.raises(aot.NonFiniteError) as caught:
            call(jnp.zeros(3))
        assert str(caught.value) == STORY


def test_a_call_alone_is_checked():
    checked = aot.function(likelihood, check="nonfinite")
    assert checked(jnp.ones(2)) == 0
    made = "log made a NaN out of float32[2] in [-1, 2]"
    for _ in range(2):
        with pytest.raises(aot.NonFiniteError) as caught:
            checked(jnp.array([-1.0, 2.0]))
        want = told(likelihood, "forward", made, "log", NO_CURE, LOOK).replace(", scope jvp()", "")
        assert str(caught.value) == want


def test_a_cache_of_programs_is_checked(tmp_path):
    for _ in range(2):  # the second function loads what the first stored
        checked = aot.function(length, check="nonfinite", cache=tmp_path)
        checked.value_and_grad(jnp.ones(3))
        with pytest.raises(aot.NonFiniteError) as caught:
            checked.value_and_grad(jnp.zeros(3))
        assert str(caught.value) == STORY


@pytest.mark.parametrize("executables", [None, 2])
def test_a_pullback_replays_its_backward_alone(executables):
    checked = aot.function(length, check="nonfinite")
    run = checked if executables is None else checked.trace(jnp.ones(3)).partition().compile(executables)
    _, pullback = run.vjp(jnp.ones(3))
    assert np.isfinite(np.asarray(jax.tree.leaves(pullback(jnp.float32(1))))).all()
    _, pullback = run.vjp(jnp.zeros(3))
    with pytest.raises(aot.NonFiniteError) as caught:
        pullback(jnp.float32(1))
    made = f"div {INF} float32[] = 0.5 and float32[] = 0"
    why = "the backward does not have the arguments of its call. aot.first_nonfinite takes them, and tries."
    assert str(caught.value) == told(length, "backward", made, "root", f"No cure was tried: {why}", LOOK)


def test_a_step_of_two_programs_is_checked():
    run = aot.function(length, check="nonfinite").trace(jnp.ones(3)).partition().compile(executables=2)
    run.value_and_grad(jnp.ones(3))
    with pytest.raises(aot.NonFiniteError, match="backward of length is not finite: div made an inf"):
        run.value_and_grad(jnp.zeros(3))


def test_infinities_of_the_users_own_pass_and_are_replayed_once(monkeypatch):
    replays = []
    monkeypatch.setattr("jointcut.aot.stages.watched.Checked.run", _counted(replays))

    @aot.function(check="nonfinite", has_aux=True)
    def masked(x, mask):
        scores = jnp.where(mask, x, -jnp.inf)
        return jnp.sum(jax.nn.softmax(scores) * x), scores

    for _ in range(3):
        (_, scores), _ = masked.value_and_grad(jnp.ones(3), jnp.array([True, True, False]))
        assert scores[2] == -jnp.inf
    assert len(replays) == 1
    with pytest.raises(aot.NonFiniteError, match="came in with args"):
        masked.value_and_grad(jnp.array([1.0, jnp.nan, 1.0]), jnp.array([True, True, False]))


def _counted(calls):
    from jointcut.aot.stages.debug import Checked

    run = Checked.run
    return lambda self, which, flat: (calls.append(which), run(self, which, flat))[1]


def test_a_step_with_effects_is_not_replayed():
    count = jax.new_ref(jnp.int32(0))

    @aot.function(check="nonfinite")
    def counted(x):
        count[...] += 1
        return jnp.sum(x * jnp.log(x))

    counted.value_and_grad(jnp.ones(2))
    with pytest.raises(aot.NonFiniteError) as caught:
        counted.value_and_grad(jnp.zeros(2))
    assert count[...] == 2
    assert str(caught.value) == (
        "The forward of counted returns a NaN, and the call is not replayed to find the op: another run would write "
        "its references again.\n"
        "Look at what its callbacks and references bring in, or report it: XLA's fused program makes the NaN."
    )


def test_calls_inside_a_transformation_are_not_checked_and_one_warning_says_so():
    checked = aot.function(length, check="nonfinite")
    with pytest.warns(aot.UncheckedWarning) as caught:
        assert np.isnan(jax.jit(checked.value_and_grad)(jnp.zeros(3))[1]).all()
        assert np.isnan(jax.grad(checked)(jnp.zeros(3))).all()
    assert [str(warning.message) for warning in caught] == [
        "length is called inside a transformation (jax.jit, jax.grad, jax.vmap): its results are not checked there.\n"
        "Call its own value_and_grad, grad or vjp outside of it, or look at one call with aot.first_nonfinite."
    ]
    assert caught[0].filename == __file__


def test_a_pullback_inside_a_jit_is_not_checked():
    checked = aot.function(length, check="nonfinite")
    _, pullback = checked.vjp(jnp.zeros(3))
    with pytest.warns(aot.UncheckedWarning):
        assert np.isnan(jax.jit(lambda ct: pullback(ct)[0])(jnp.float32(1))).all()


def test_a_function_without_the_check_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(jax.jit(aot.function(length).grad)(jnp.zeros(3))).all()
