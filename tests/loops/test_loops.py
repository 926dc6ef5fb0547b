"""What loops cost, what they carry, and what they say."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jointcut import aot
from jointcut.aot.loops.sweep.placing import placed
from jointcut.aot.loops.sweep.sweeping import swept
from jointcut.partition.errors import BudgetError, CallError, DerivativeError, TraceError
from looped import masked, near

HERE = re.escape(__file__)


def again(steps: int, slots: int) -> int:
    """The least steps that run again where `steps` are run back from a checkpoint with `slots` in all (revolve)."""
    if steps <= 1:
        return 0
    most = next(r for r in range(steps) if math.comb(slots + r, slots) >= steps)
    return most * steps - math.comb(slots + most, slots + 1)


def counted(slots: int, is_enough: bool = False):
    """A program of the number of trips: steps that ran again, steps pulled back, and where the checkpoints stood."""
    ran = [0, 0]

    def step(i, kept):
        jax.debug.callback(lambda: ran.__setitem__(0, ran[0] + 1))
        return [kept[0] + 1]

    def back(i, kept, right):
        jax.debug.callback(lambda: ran.__setitem__(1, ran[1] + 1))
        return right & (kept[0] == i)

    @jax.jit
    def program(trips):
        carry, points = placed(lambda c: c[0] < trips, lambda c: [c[0] + 1], [jnp.int32(0)], [0], slots, is_enough)
        return swept(step, back, points, carry[0] == trips), points.places

    def run(trips):
        ran[:] = [0, 0]
        right, places = jax.block_until_ready(program(trips))
        jax.effects_barrier()
        return list(ran), bool(right), [int(p) for p in places if p >= 0]

    return run


@pytest.mark.parametrize(("slots", "most"), [(1, 3), (2, 6), (3, 10), (4, 15), (6, 28)])
def test_up_to_one_repetition_all_steps_but_one_for_each_checkpoint_run_again(slots, most):
    run = counted(slots)
    for trips in range(most):
        ran, right, places = run(trips)
        assert right and ran == [max(trips - slots, 0), trips]
        assert len(set(places)) == min(trips, slots)


@pytest.mark.parametrize(("slots", "trips"), [(2, 40), (3, 30), (3, 90), (4, 60), (5, 100), (5, 300), (8, 200)])
def test_with_more_trips_the_steps_that_run_again_are_near_those_of_revolve(slots, trips):
    ran, right, _ = counted(slots)(trips)
    best = again(trips, slots) - trips  # revolve knows the trips, so the forward is its first sweep
    assert right and ran[1] == trips and best <= ran[0] <= 1.25 * best + slots


def test_a_stack_runs_no_step_again_and_a_loop_that_exceeds_it_starts_from_the_first():
    run = counted(5, is_enough=True)
    for trips in range(6):
        assert run(trips) == ([0, trips], True, list(range(trips)))
    for trips in (6, 30, 200):
        ran, right, places = run(trips)
        assert right and places == [0] and ran == [again(trips, 5), trips]


def test_between_two_checkpoints_the_sweep_runs_again_what_revolve_would():
    for slots, trips in ((1, 7), (2, 6), (3, 20), (4, 15)):
        ran, _, places = counted(slots)(trips)
        ends = [*sorted(places)[1:], trips]
        gaps = [b - a for a, b in zip(sorted(places), ends, strict=True)]
        assert ran[0] == sum(again(gap, slots - i) for i, gap in enumerate(gaps))


def temporaries(memory, trips, loop=None):
    """Bytes of temporaries of a gradient."""

    def total(x, n):
        def body(c):
            return (c[0] + 1, jnp.sin(c[1]) * 1.1)

        return aot.while_loop(lambda c: c[0] < n, body, (0, x), memory=memory, max_trips=trips)[1].sum()

    program = jax.jit(jax.grad(total)).lower(jnp.ones(1000), 5).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_memory_follows_the_checkpoints_and_not_the_trips():
    carry = 4000
    sizes = {k: temporaries(k, None) for k in (4, 20)}
    assert sizes[20] - sizes[4] == pytest.approx(16 * carry, rel=0.05)
    assert sizes[4] < 10 * carry
    assert temporaries("100kB", None) < 100_000 + 5 * carry
    assert temporaries("sqrt", 100) - temporaries("sqrt", 9) == pytest.approx(7 * carry, rel=0.05)
    assert temporaries("stack", 10) - temporaries("stack", 3) == pytest.approx(7 * carry, rel=0.05)


def test_a_loop_that_is_not_differentiated_is_a_while_loop():
    def one(loop):
        return lambda x, n: loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (jnp.int32(0), x))

    texts = [
        jax.jit(one(loop)).lower(jnp.ones(3), 4).compile().as_text() for loop in (aot.while_loop, jax.lax.while_loop)
    ]
    names = re.compile(r"metadata=\{.*?\}|, stack_frame_id=\d+|\.\d+|HloModule.*|FileNames.*|FunctionNames.*", re.S)
    plain = [sorted(re.findall(r" = \S+ (\w[\w-]*)\(", names.sub("", text))) for text in texts]
    assert plain[0] == plain[1]


def test_what_no_derivative_reads_is_not_kept():
    def loss(x, extra):
        def body(c):
            return (c[0] + 1, c[1] * jnp.float32(0.5), c[2] + 1.0)

        _, y, side = aot.while_loop(lambda c: c[0] < 9, body, (0, x, extra), memory=8)
        return y.sum() + jax.lax.stop_gradient(side).sum()

    program = jax.jit(jax.grad(loss)).lower(jnp.ones(1000), jnp.ones(1000)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 4000  # a step is linear: nothing is kept
    near(jax.grad(loss)(jnp.ones(3), jnp.ones(3)), np.full(3, 0.5**9))


def test_random_keys_and_integers_are_carried_along():
    def body(c):
        key, y, n = c
        key, mine = jax.random.split(key)
        return key, y * jax.random.uniform(mine), n + 1

    def product(y, n):
        return aot.while_loop(lambda c: c[2] < n, body, (jax.random.key(0), y, 0), memory=2)[1]

    near(jax.jit(jax.grad(product))(2.0, 6), product(1.0, 6), rtol=1e-6)
    lanes = jax.jit(jax.vmap(jax.grad(product)))(jnp.ones(3), jnp.array([0, 2, 6]))
    near(lanes, np.array([product(1.0, n) for n in (0, 2, 6)]), rtol=1e-6)


def test_a_python_number_takes_the_type_that_the_body_gives_it():
    count, y = aot.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, 1))
    assert (int(count), float(y), y.dtype) == (3, 1.5**3, jnp.float32)


def power_of(n, memory):
    """`x ** (n + 1)` by a loop."""
    return lambda x: aot.fori_loop(0, jnp.int32(n), lambda i, y: y * x, x, memory=memory)


def test_strict_promotion_of_number_types():
    with jax.numpy_dtype_promotion("strict"):
        grown = [jax.jit(jax.grad(power_of(n, memory)))(jnp.float32(1.01)) for memory, n in ((2, 30), (3, 7))]
    near(grown, [(n + 1) * 1.01**n for n in (30, 7)], rtol=1e-5)


def test_a_body_prints_as_often_as_the_forward_runs(capfd):
    def body(y):
        jax.debug.print("at {}", y)
        return jax.lax.cond(y > 5, lambda y: (jax.debug.print("late"), y * 2)[1], lambda y: y * 2, y)

    jax.jit(jax.grad(lambda x: aot.while_loop(lambda y: y < 20, body, x, memory=1)))(3.0)
    jax.effects_barrier()
    assert capfd.readouterr().out == "at 3.0\nat 6.0\nlate\nat 12.0\nlate\n"


def test_the_stack_of_carries():
    def stacked(x):
        return aot.while_loop_stack_output(lambda y: y < 20.0, lambda y: y * x, x, max_trips=6)

    stack = stacked(2.0)
    assert stack.carries.tolist() == [4.0, 8.0, 16.0, 32.0, 0.0, 0.0]
    assert (int(stack.trips), bool(stack.exceeded)) == (4, False)

    def total(x):
        return (stacked(x).carries ** 2).sum()

    def by_hand(x):
        return sum(x ** (2 * i) for i in range(2, 6))

    for order in (jax.grad, jax.hessian, jax.jacfwd):
        near(jax.jit(order(total))(2.0), order(by_hand)(2.0), rtol=1e-6)
    assert jax.vmap(stacked)(jnp.array([2.0, 30.0])).trips.tolist() == [4, 0]
    assert jax.grad(total)(30.0) == 0.0


def test_a_loop_that_is_too_long_is_refused_and_never_cut_short():
    def grow(y):
        return y * 1.5

    text = f"body_fun at {HERE}:\\d+ \\(grow\\) is run 8 times, and max_trips is 3.\n"
    text += "Give max_trips=8 or more, or leave it out."
    for loop in (aot.while_loop, aot.while_loop_stack_output):
        with pytest.raises(CallError, match=f"^{text}$"):
            loop(lambda y: y < 20, grow, 1.0, max_trips=3)

    with pytest.raises(CallError, match=f"{HERE}:\\d+ \\(<lambda>\\) is run 4 times, and max_trips is 3.\n"):
        aot.fori_loop(1, jnp.int32(5), lambda i, y: y * 2, 1.0, max_trips=3)

    def inside(x):
        return aot.while_loop(lambda y: y < 20, grow, x, max_trips=3, memory="stack")

    def stacked(x):
        return aot.while_loop_stack_output(lambda y: y < 20, grow, x, max_trips=3).carries.sum()

    def counted(x):
        return aot.fori_loop(0, jnp.int32(8), lambda i, y: grow(y), x, max_trips=3)

    for loss in (inside, stacked, counted):
        for run in (jax.grad(loss), aot.tape(loss).grad, lambda x, loss=loss: jax.jvp(loss, (x,), (x,))):
            with pytest.raises(CallError, match="is run 8 times, and max_trips is 3"):
                run(1.0)
    assert jax.jit(jax.value_and_grad(inside))(1.0) == (1.5**8, 1.5**8)
    stack = jax.jit(lambda: aot.while_loop_stack_output(lambda y: y < 20, grow, 1.0, max_trips=3))()
    assert (stack.carries.tolist(), int(stack.trips), bool(stack.exceeded)) == ([1.5, 2.25, 3.375], 8, True)


def told(y):
    io_callback(lambda y: None, None, y)
    return y * 2


DICT = {"a": 1.0, "b": np.ones(3, np.float32)}
AT = f"at {HERE}:\\d+ \\(<lambda>\\)"
BOOLEAN = "Return one boolean array of shape \\(\\), such as `jnp.all\\(...\\)` or `x < y` of numbers."
REFUSED = {
    "a part is gone": (
        lambda: aot.while_loop(lambda c: c["a"] < 2, lambda c: {"a": c["a"]}, DICT), TraceError,
        f"body_fun {AT} takes a carry with carry\\['b'\\] and returns one without it.\n"
        "Return a carry of the same structure.",
    ),
    "a part is new": (
        lambda: aot.while_loop(lambda c: c["a"] < 2, lambda c: {**c, "c": 1}, DICT), TraceError,
        f"body_fun {AT} takes a carry without carry\\['c'\\] and returns one with it.\n"
        "Return a carry of the same structure.",
    ),
    "another structure": (
        lambda: aot.while_loop(lambda c: c < 2, lambda c: (c,), 1.0), TraceError,
        f"body_fun {AT} takes a carry without carry\\[0\\] and returns one with it.\n"
        "Return a carry of the same structure.",
    ),
    "another shape": (
        lambda: aot.while_loop(lambda c: c["a"] < 2, lambda c: {**c, "b": c["b"][:2]}, DICT), TraceError,
        f"body_fun {AT} takes carry\\['b'\\] as float32\\[3\\] and returns it as float32\\[2\\].\n"
        "Return it as float32\\[3\\], or start with init\\['b'\\] as float32\\[2\\].",
    ),
    "another dtype": (
        lambda: aot.fori_loop(0, 3, lambda i, y: y.astype(jnp.float16), jnp.ones(2)), TraceError,
        f"body_fun {AT} takes carry as float32\\[2\\] and returns it as float16\\[2\\].\n"
        "Return it as float32\\[2\\], or start with init as float16\\[2\\].",
    ),
    "many booleans": (
        lambda: aot.while_loop(lambda y: y < 2, lambda y: y, jnp.ones(3)), TraceError,
        f"cond_fun {AT} returns bool\\[3\\], not one boolean.\n{BOOLEAN}",
    ),
    "no boolean": (
        lambda: aot.while_loop(lambda y: 1, lambda y: y, 1.0), TraceError,
        f"cond_fun {AT} returns int32\\[\\], not one boolean.\n{BOOLEAN}",
    ),
    "two booleans": (
        lambda: aot.while_loop(lambda y: (y < 2, y), lambda y: y, 1.0), TraceError,
        f"cond_fun {AT} returns PyTreeDef\\(\\(\\*, \\*\\)\\), not one boolean.\n{BOOLEAN}",
    ),
    "no function": (
        lambda: aot.while_loop(3, lambda y: y, 1.0), TraceError,
        "cond_fun is 3, which cannot be called.\nPass a function of the carry.",
    ),
    "no array": (
        lambda: aot.while_loop(lambda c: True, lambda c: c, {"a": "x"}), TraceError,
        "init\\['a'\\] is of type str, not an array.\nCarry arrays and numbers only; close over everything else.",
    ),
    "bounds": (
        lambda: aot.fori_loop(0.0, 3, lambda i, y: y, 1.0), CallError,
        "lower and upper are of type float32.\nGive integers.",
    ),
    "max_trips": (
        lambda: aot.while_loop(lambda y: y < 2, lambda y: y, 1.0, max_trips=-1), CallError,
        "max_trips is -1.\nGive a whole number of trips, or leave it out.",
    ),
    "more trips than are counted": (
        lambda: aot.while_loop(lambda y: y < 2, lambda y: y, 1.0, max_trips=2**31), CallError,
        "max_trips is 2147483648.\nGive at most 2147483647: trips are int32.",
    ),
    "no rows": (
        lambda: aot.while_loop_stack_output(lambda y: y < 2, lambda y: y, 1.0, max_trips=None), CallError,
        "max_trips is None.\nGive a whole number of trips.",
    ),
    "a wrapped body": (
        lambda: aot.while_loop(lambda y: y < 2, jax.jit(jax.checkpoint(lambda y: (y,))), 1.0), TraceError,
        f"body_fun {AT} takes a carry without carry\\[0\\] and returns one with it.\n"
        "Return a carry of the same structure.",
    ),
    "effect": (
        lambda: jax.grad(lambda x: aot.while_loop(lambda y: y < 20, told, x))(3.0), DerivativeError,
        f"body_fun at {HERE}:\\d+ \\(told\\) has the effect IO, in {HERE}:\\d+ \\(told\\); so the loop has no "
        "derivative.\nSteps would be run again. Return the value in the carry, and have the effect after the loop.\n-"
        "(.|\n)*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_place_and_cure(case):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=f"^{text}$"):
        call()


CURE = (
    "Give a number of checkpoints (an int), bytes (a text such as '64MiB'), 'stack' or 'sqrt' (both with max_trips), "
    "or leave memory out."
)
MEMORIES = {
    "many": f"memory is 'many', not a number and its unit.\n{CURE}",
    "7XB": f"memory is '7XB', whose unit 'XB' is unknown.\n{CURE}",
    "50%": f"memory is '50%', which is no number of bytes.\n{CURE}",
    "device": f"memory is 'device', which is no number of bytes.\n{CURE}",
    2.5: f"memory is 2.5, of type float.\n{CURE}",
    True: f"memory is True, of type bool.\n{CURE}",
    0: "memory is 0 checkpoints.\nGive at least 1; with one checkpoint, every step starts again from the first.",
    2**31: "memory is 2147483648 checkpoints.\nGive at most 2147483647, as many as a loop can make trips.",
    "7B": "memory is '7B', and one carry takes 4 bytes.\n"
    "Give at least '8B', for one checkpoint and the carry that the reverse sweep works on.",
    "stack": "memory='stack' needs to know how long the loop may run.\n"
    "Give max_trips, the most trips that the loop makes; a number of checkpoints needs none.",
}


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
def test_memory_that_says_nothing_is_refused(memory):
    with pytest.raises(BudgetError) as caught:
        aot.while_loop(lambda y: y < 2, lambda y: y, 1.0, memory=memory)
    assert str(caught.value) == MEMORIES[memory]


def test_the_smallest_memory_that_is_named_works():
    def power(x):
        return aot.fori_loop(0, jnp.int32(5), lambda i, y: y * x, x, memory="16B")

    assert jax.grad(power)(2.0) == 6 * 2.0**5
    with pytest.raises(BudgetError, match=r"'15B', and one carry takes 8 bytes\.\nGive at least '16B'"):
        aot.fori_loop(0, jnp.int32(5), lambda i, y: y, 1.0, memory="15B")


def test_the_loop_of_the_unrolled_oracle_is_the_masked_scan():
    near(masked(jnp.ones(4), jnp.eye(4), 0), np.ones(4))


def test_a_stack_for_which_there_is_no_memory_is_told():
    def half(x):
        return x / 2

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        aot.while_loop_stack_output(lambda x: x[0, 0] > 1, half, jnp.ones((2**10, 2**10)), max_trips=2**31 - 1)
    name = f"body_fun at {__file__}:{half.__code__.co_firstlineno} (half)"
    assert f"The stack of {name} has 2147483647 rows of 4.19 MB: max_trips." in caught.value.__notes__
