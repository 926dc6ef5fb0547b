"""`aot.doctor` tells why a function does not fit into memory, and what it takes with a cure that was compiled."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.call.doctor import subject
from jointcut.aot.call.doctor.causes import rematerialised
from jointcut.aot.call.doctor.equal_rows import hoisted
from jointcut.aot.planning.request import Request
from jointcut.aot.run.compile import ProgramMemory
from jointcut.partition.errors import BudgetError, CallError

pytestmark = pytest.mark.usefixtures("compiled_anew")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


NARROW, WIDE = [struct(64, 64)] * 8, [struct(512, 512)] * 4


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(weights, moments, x):
    value, gradient = jax.value_and_grad(loss)(weights, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
    return jax.tree.map(lambda w, m: w - m, weights, moments), moments, value


def stacked(w, x):
    def body(h, x):
        return jnp.tanh(h @ w) + x, (h, jnp.exp(w), 2.0)

    h, (states, rows, twos) = jax.lax.scan(body, jnp.zeros((8, 64)), x)
    total, _ = jax.lax.scan(lambda sum, pair: (sum + (pair[0] @ pair[1]).sum(), None), jnp.zeros(()), (states, rows))
    return total + jnp.sin(h.sum()) * rows[3].sum() * twos.sum()


def product(x, y):
    return (x @ y).astype(jnp.bfloat16)


def ranks(x):
    return jnp.sort(x[:, None] * x, axis=1)[:, 0]


def update(w, moments, x):
    moments = 0.9 * moments + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return (w - moments).astype(jnp.bfloat16), moments


def summed(w, x):
    h, rows = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w) + x, jnp.exp(w)), jnp.zeros((8, 64)), x)
    return h.sum() + jnp.sin(rows * h.sum()).sum()


def branched(w, x):
    def body(h, x):
        return jax.lax.cond(h.sum() > 0, lambda h: jnp.tanh(h @ jnp.exp(w)), lambda h: h, h) + x, None

    return jax.lax.scan(body, jnp.zeros((8, 64)), x)[0].sum()


def told(found):
    """A text without the numbers of its lines; JAX 0.12 names the sum of two cotangents by its other operand."""
    return re.sub(r"\.py:\d+", ".py", str(found)).replace("add_any", "mul")


def peak(function, *args):
    return ProgramMemory.of(function.lower(*args).compile()).peak_bytes


RESIDUALS = """\
step does not fit: it takes 5.77 MB of 4.00 MB, by XLA's account.
  arguments 786.4 kB, results 262.3 kB, temporaries 4.72 MB
  at the peak of the temporaries, in the backward:
     4.19 MB  8 arrays of tanh at aot/test_doctor.py (loss)
    524.3 kB  1 array of mul at aot/test_doctor.py (loss)
residuals: 4.19 MB at the peak wait from the forward of loss for its backward.
  loss = aot.function(loss, budget="3.86 MB")
  compiled with it: 3.67 MB, which fits"""


def test_residuals_get_a_budget_that_fits():
    found = aot.doctor("4MB").check(step, NARROW, NARROW, struct(2048, 64))
    assert told(found) == RESIDUALS
    lines, start = inspect.getsourcelines(loss)
    (line,) = [start + i for i, text in enumerate(lines) if "tanh" in text]
    assert f"8 arrays of tanh at aot/test_doctor.py:{line} (loss)" in str(found)


def test_a_budget_that_is_told_holds_where_it_is_typed():
    x = struct(2048, 64)
    (cause,) = aot.doctor("4MB").check(jax.jit(jax.value_and_grad(loss)), NARROW, x).causes
    assert cause.cure == 'loss = aot.function(loss, budget="4.00 MB")'
    assert cause.peak_bytes == peak(jax.jit(jax.value_and_grad(aot.function(loss, budget="4.00 MB"))), NARROW, x)
    assert cause.peak_bytes <= 4e6


def test_a_gradient_is_found_wherever_it_was_made():
    gradient, x = jax.grad(loss), struct(2048, 64)

    def update(weights, x):
        return jax.tree.map(jnp.subtract, weights, gradient(weights, x))

    for function in (gradient, jax.jit(gradient), update, partial(update), aot.function(loss)):
        (cause,) = aot.doctor("4.5MB").check(function, NARROW, x).causes
        assert (cause.name, cause.peak_bytes <= 4.5e6) == ("residuals", True)
    before = jax.grad(loss)(*jax.tree.map(lambda s: jnp.ones(s.shape), (NARROW, x)))
    assert isinstance(before, list)


def test_the_budget_of_a_function_of_ours_is_told_as_an_option():
    (cause,) = aot.doctor("4MB").check(aot.function(loss), NARROW, struct(2048, 64)).causes
    assert cause.cure == 'budget="4.00 MB" in the aot.function of loss'


DONATION = """\
step does not fit: it takes 16.8 MB of 14.0 MB, by XLA's account.
  arguments 8.42 MB, results 8.39 MB, temporaries 0 B
donation: the results are of the types of weights (4.19 MB) and moments (4.19 MB), and take memory of their own.
  step = jax.jit(step, donate_argnums=(0, 1))
  compiled with it: 10.6 MB, which fits"""


def test_arguments_that_results_could_replace_are_donated():
    found = aot.doctor("14MB").check(step, WIDE, WIDE, struct(16, 512))
    assert told(found) == DONATION
    donated = jax.jit(step, donate_argnums=(0, 1))
    assert found.causes[0].peak_bytes == peak(donated, WIDE, WIDE, struct(16, 512))
    one = jax.jit(step, donate_argnums=0)
    (cause,) = aot.doctor("13MB").check(one, WIDE, WIDE, struct(16, 512)).causes
    assert cause.peak_bytes == found.causes[0].peak_bytes
    assert cause.cure == "step = jax.jit(step, donate_argnums=(0, 1))"
    assert "moments (4.19 MB), and" in cause.evidence


def test_arguments_of_a_gradient_are_not_donated():
    assert aot.doctor("1MB").check(jax.grad(loss), WIDE, struct(16, 512)).causes == ()


IN_VAIN = """\
product does not fit: it takes 3.67 MB of 2.00 MB, by XLA's account.
  arguments 2.10 MB, results 524.3 kB, temporaries 1.05 MB
  at the peak of the temporaries, in the forward:
     1.05 MB  1 array of dot_general at aot/test_doctor.py (product)
donation: 1.05 MB were donated in vain: no result is left with the type of x, float32[512,512].
  Return an array of this type, or don't donate this one.
one array: 1.05 MB of 1.05 MB of temporaries at the peak are one array, of dot_general at aot/test_doctor.py (product).
  No cure was tried. If nothing needs all of it at once, compute some rows at a time, as by jax.lax.map."""


def test_what_was_donated_in_vain_is_told():
    found = aot.doctor("2MB").check(jax.jit(product, donate_argnums=0), struct(512, 512), struct(512, 512))
    assert told(found) == IN_VAIN


BOTH = """\
step does not fit: it takes 41.9 MB of 31.0 MB, by XLA's account.
  arguments 12.6 MB, results 8.39 MB, temporaries 21.0 MB
  at the peak of the temporaries, in the backward:
     16.8 MB  4 arrays of tanh at aot/test_doctor.py (loss)
     4.19 MB  1 array of mul at aot/test_doctor.py (loss)
residuals: 16.8 MB at the peak wait from the forward of loss for its backward.
  loss = aot.function(loss, budget=0.0)
  compiled with it: 37.7 MB, still too much
donation: the results are of the types of weights (4.19 MB) and moments (4.19 MB), and take memory of their own.
  step = jax.jit(step, donate_argnums=(0, 1))
  compiled with it: 34.6 MB, still too much
both: neither the budget for loss nor the donation suffices, so both were tried together.
  loss = aot.function(loss, budget=0.0), and donate_argnums=(0, 1)
  compiled with it: 30.4 MB, which fits"""


def test_two_cures_are_tried_together_where_neither_suffices(monkeypatch):
    monkeypatch.setattr(Request, "_may_tile", lambda *_: False)  # in blocks of its rows the loss would fit
    found = aot.doctor("31MB").check(step, WIDE, WIDE, struct(2048, 512))
    assert told(found) == BOTH


ONE_ARRAY = """\
ranks does not fit: it takes 4.20 MB of 1.00 MB, by XLA's account.
  arguments 4.10 kB, results 4.10 kB, temporaries 4.19 MB
  at the peak of the temporaries, in the forward:
     4.19 MB  1 array of mul at aot/test_doctor.py (ranks)
one array: 4.19 MB of 4.19 MB of temporaries at the peak are one array, of mul at aot/test_doctor.py (ranks).
  No cure was tried. If nothing needs all of it at once, compute some rows at a time, as by jax.lax.map."""


def test_one_array_that_fills_the_peak_is_told():
    assert told(aot.doctor("1MB").check(ranks, struct(1024))) == ONE_ARRAY


def test_a_stack_of_equal_rows_is_computed_before_the_loop():
    call = jax.value_and_grad(summed), struct(64, 64), struct(100, 8, 64)
    (cause,) = [cause for cause in aot.doctor("2MB").check(*call).causes if cause.name == "equal rows"]
    evidence = "the loop at aot/test_doctor.py (summed) stacks float32[100,64,64], 1.64 MB. Its 100 rows are equal."
    assert (told(cause.evidence), cause.cure) == (evidence, "Compute the row before the loop, and don't stack it.")
    assert cause.peak_bytes is not None
    assert cause.peak_bytes < peak(jax.jit(call[0]), *call[1:]) - 4e6


def test_a_row_that_is_computed_before_the_loop_changes_no_result():
    w, x = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64), jnp.ones((100, 8, 64))
    jitted = jax.jit(jax.value_and_grad(stacked))
    ours = jax.jit(hoisted(jitted.trace(w, x)))(w, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), ours, jitted(w, x))


def test_rows_that_differ_by_a_branch_are_told():
    found = aot.doctor("1MB").check(jax.value_and_grad(branched), struct(64, 64), struct(100, 8, 64))
    (cause,) = [cause for cause in found.causes if cause.name == "equal rows"]
    assert told(cause.evidence) == (
        "the loop at aot/test_doctor.py (branched.<locals>.body) stacks float32[100,64,64], 1.64 MB. Its 100 rows "
        "differ by the branch that a step takes, and by nothing else."
    )
    assert cause.told(1) == [
        f"equal rows: {cause.evidence}",
        "  No cure was tried. Compute what the branches share before the loop, or use jax.numpy.where.",
    ]


GATHERING = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jointcut import aot
def total(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)
rows = NamedSharding(jax.make_mesh((4,), ("rows",)), PartitionSpec("rows"))
w = x = jax.device_put(jnp.ones((512, 512)), rows)
found = aot.doctor("1MB").check(total, w, x)
print("\\n".join(found.causes[-1].told(1)))
"""


def test_a_resharding_that_gathers_whole_arrays_is_told(tmp_path):
    script = tmp_path / "gathering.py"
    script.write_text(GATHERING)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, script], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, check=True
    )
    assert told(run.stdout.decode()).replace(tmp_path.name, "folder") == (
        "gathered arrays: each device gathers 1.05 MB of whole arrays for folder/gathering.py (total).\n"
        "  No cure was tried. See whether operands and result of that line are sharded along the same axis.\n"
    )


def test_rematerialisation_by_xla_is_told():
    text = "ENTRY main {\n  %add.3 = f32[4] add(%a, %b)\n  fusion.1.remat2 = f32[4] fusion(%a)\n}"
    (cause,) = rematerialised(text)
    assert cause.told(1) == [
        "rematerialisation: XLA ran short and computes 1 value again by itself, the first is fusion.1.remat2.",
        "  It chooses late. A budget for the loss chooses before.",
    ]
    assert list(rematerialised("%add.3 = f32[4] add(%a, %b)")) == []


def test_where_no_plan_takes_less_the_doctor_says_so():
    donated = jax.jit(update, donate_argnums=(0, 1))
    found = aot.doctor("1MB").check(donated, struct(512, 512), struct(512, 512), struct(32, 512))
    (cause,) = [cause for cause in found.causes if cause.name == "residuals"]
    assert (cause.cure, cause.note) == ("", "A budget does not help: no plan was found that takes less.")


def test_where_weighing_compiles_a_program_is_compiled_once(monkeypatch):
    compiled, subjects = subject.compiled, []
    monkeypatch.setattr(subject, "can_weigh", lambda goal: False)
    monkeypatch.setattr(subject, "compiled", lambda *args: (subjects.append(args), compiled(*args))[1])
    found = aot.doctor("1MB").check(ranks, struct(1024))
    assert (told(found), len(subjects)) == (ONE_ARRAY, 1)


def test_a_loss_without_its_gradient_is_told_to_be_one():
    hint = "It returns one number. If it is a loss, its gradient takes more: ask about jax.value_and_grad of it."
    x = struct(2048, 64)
    assert str(aot.doctor("1GB").check(loss, NARROW, x)).splitlines()[1:] == [hint]
    assert str(aot.doctor("500kB").check(loss, NARROW, x)).splitlines()[-2:] == ["The doctor knows no cause.", hint]
    for function in (jax.value_and_grad(loss), aot.function(loss), lambda ws, x: (loss(ws, x),) * 2):
        assert hint not in str(aot.doctor("1GB").check(function, NARROW, x))


def test_a_program_that_xla_finds_no_room_for_is_told_by_its_temporaries(monkeypatch):
    def out_of_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory: HLO temporaries (2.0G)")

    monkeypatch.setattr(subject, "can_weigh", lambda goal: False)
    monkeypatch.setattr(subject, "compiled", out_of_room)
    assert told(aot.doctor("1GB").check(ranks, struct(1024))) == (
        "ranks does not fit: it takes 2.15 GB of 1.00 GB, by XLA's account.\n"
        "  arguments 4.10 kB, results 4.10 kB, temporaries 2.15 GB\n"
        "The doctor knows no cause."
    )


# ------------------------------------------------------------------------------------------------------- the block


def new(function):
    """A function of its own, which JAX has not compiled yet."""
    return jax.jit(wraps(function)(lambda *args: function(*args)))


def arrays(*types):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), types)


def test_a_block_in_which_all_fits_says_so_in_a_line(capsys):
    args = arrays(NARROW, NARROW, struct(2048, 64))
    with aot.doctor("1GB") as doctor:
        value = new(step)(*args)[2] + 1
    assert capsys.readouterr().err == "step fits: it takes 5.77 MB of 1.00 GB, by XLA's account.\n"
    assert doctor.diagnoses == ()
    assert value == jax.jit(step)(*args)[2] + 1


def test_a_block_tells_of_each_function_that_does_not_fit_once(capsys):
    args, own = arrays(NARROW, struct(2048, 64)), aot.function(loss)
    sorting = new(ranks)
    with aot.doctor("4MB") as doctor:
        for _ in range(2):
            own.value_and_grad(*args)
            sorting(args[1][:, 0])
    assert [found.name for found in doctor.diagnoses] == ["ranks", "loss"]
    assert capsys.readouterr().err == "\n".join(map(str, doctor.diagnoses)) + "\n"


def test_a_function_that_was_compiled_before_is_not_seen(capsys):
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(4)
    double(x)
    with aot.doctor("1MB"):
        double(x)
    told = "The doctor saw no function compiled in this block. Ask aot.doctor().check(function, *args).\n"
    assert capsys.readouterr().err == told


def test_a_block_looks_on_while_functions_are_transformed(capsys):
    layer, w, x = jax.jit(lambda w, x: jnp.tanh(x @ w)), jnp.ones((8, 8)), jnp.ones((4, 8))
    with aot.doctor("1MB") as doctor:
        gradient = jax.grad(lambda w: layer(w, layer(w, x)).sum())(w)
        rows = jax.vmap(lambda row: layer(w, row))(x)
        jax.jit(layer).lower(w, x).compile()
        jax.jit(lambda x: x + 1)(x)  # the one function that is called
    assert (gradient.shape, rows.shape, doctor.diagnoses) == ((8, 8), (4, 8), ())
    assert "fits: it takes" in capsys.readouterr().err


def test_an_error_of_memory_gets_a_note_and_goes_on(capsys):
    product = jax.jit(lambda x: jnp.sin(x[:, None] * jnp.ones(2**44)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught, aot.doctor("1GB"):
        jax.block_until_ready(product(jnp.ones(4)))
    assert caught.value.__notes__[-1] == (
        "<lambda> does not fit: it takes 281.5 TB of 1.00 GB, by XLA's account.\n"
        "  arguments 16 B, results 281.5 TB, temporaries 0 B\n"
        "The doctor knows no cause."
    )
    assert capsys.readouterr().err == ""


def test_a_function_that_fails_for_want_of_memory_is_told_although_it_would_fit():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught, aot.doctor("1GB"):
        new(step)(*arrays(NARROW, NARROW, struct(2048, 64)))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    note = caught.value.__notes__[-1]
    assert note.startswith("step ran out of memory: it takes 5.77 MB of 1.00 GB, by XLA's account.\n")


def test_another_error_passes_without_a_note(capsys):
    with pytest.raises(ZeroDivisionError) as caught, aot.doctor("1GB"):
        _ = 1 / 0
    assert not hasattr(caught.value, "__notes__")
    assert capsys.readouterr().err == ""


def test_an_argument_of_a_list_of_arguments_is_told_by_its_place():
    def shrink(first, *others):
        return jax.tree.map(lambda w: 0.9 * w, others[1])

    (cause,) = aot.doctor("7MB").check(shrink, struct(4), struct(4), WIDE).causes
    assert cause.evidence == "the results are of the types of others[1] (4.19 MB), and take memory of their own."
    assert cause.cure == "shrink = jax.jit(shrink, donate_argnums=(2,))"


def test_static_and_named_arguments_stay_what_they_are():
    @partial(jax.jit, static_argnums=1, static_argnames="power")
    def powers(weights, kind, x, *, power):
        assert kind == "mean"
        return jax.tree.map(lambda w: w * jnp.mean(x**power), weights)

    (cause,) = aot.doctor("7MB").check(powers, WIDE, "mean", struct(4), power=2).causes
    assert cause.cure == "powers = jax.jit(powers, donate_argnums=(0,))"


def test_memory_has_to_be_known():
    with pytest.raises(BudgetError) as caught:
        aot.doctor()
    assert str(caught.value) == (
        "doctor() asks what the device has, and cpu does not say.\n"
        "Give bytes, as in aot.doctor(memory='24GiB') or --memory 24GiB, or a device that is not here: target='h100'."
    )
    with pytest.raises(BudgetError) as caught:
        aot.doctor(0.5)
    assert str(caught.value) == (
        "memory is 0.5, no number of bytes.\n"
        "Give bytes, as in aot.doctor(memory='24GiB') or --memory 24GiB, or a device that is not here: target='h100'."
    )
    with pytest.raises(BudgetError) as caught:
        aot.doctor("much")
    assert str(caught.value) == (
        "memory is 'much', not a number and its unit.\n"
        "Give bytes, as in aot.doctor(memory='24GiB') or --memory 24GiB, or a device that is not here: target='h100'."
    )


@pytest.mark.parametrize("given", [3, "step", None], ids=str)
def test_what_is_no_function_is_refused(given):
    with pytest.raises(CallError) as caught:
        aot.doctor("7MB").check(given, WIDE)
    assert str(caught.value) == (
        f"check(...) is of type {type(given).__name__}, which cannot be called.\n"
        "Give a function and its arguments: doctor.check(step, params, batch)."
    )
