"""Residuals in smaller forms: what is kept, what is told of it, and what is refused in which words."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.aot.options import policies
from jointcut.aot.report.gradient_error import relative_error
from jointcut.partition import Plan, Role, diff
from jointcut.partition.errors import PlanError, PolicyError
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.packing.packing import Packings
from jointcut.partition.plans import planfile
from jointcut.partition.search.forms import exact

W = np.linspace(-0.5, 0.5, 5 * 16 * 16, dtype=np.float32).reshape(5, 16, 16)
X = np.linspace(-1, 1, 128 * 16, dtype=np.float32).reshape(128, 16)
ALL = {"*": aot.SAVE_AS("bfloat16")}


def loss(w, x):
    def step(h, w):
        return checkpoint_name(jnp.tanh(h @ w), "hidden") + jnp.sin(h), None

    return jnp.sum(lax.scan(step, checkpoint_name(jnp.tanh(x), "first"), w)[0] ** 2)


def with_policy(policy, **options):
    return aot.function(loss, argnums=(0, 1), policy=policy, **options)


def cut_of(policy, **options):
    return with_policy(policy, **options).trace(W, X).partition()


def text(split):
    return f"{split.schedule}"


def rectified(w, x):
    h = x @ w
    return jnp.sum((jax.nn.relu((h - jnp.mean(h, axis=0)) * 3) @ w) ** 2)


WANT = jax.grad(loss, argnums=(0, 1))(W, X)

# ------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("form", "bytes_each", "error"),
    [("bfloat16", 2, 5e-3), ("float16", 2, 1e-3), ("int8", 1, 1e-2), ("float8_e4m3", 1, 0.1), ("float8_e5m2", 1, 0.2)],
)
def test_a_form_takes_its_bytes_and_gradients_stay_near(form, bytes_each, error):
    exact, cut = cut_of(None), cut_of({"*": aot.SAVE_AS(form)})
    assert cut.plan.values == exact.plan.values
    scales = 0 if bytes_each == 2 else 16 * 4 * 11  # of each step of two stacks, and of one array
    assert cut.plan.bytes_saved == cut.split.residual_bytes == exact.plan.bytes_saved * bytes_each // 4 + scales
    function = with_policy({"*": aot.SAVE_AS(form)})
    gradients = function.grad(W, X)
    assert relative_error(gradients, WANT) < error
    assert [(g.shape, g.dtype) for g in gradients] == [(g.shape, g.dtype) for g in WANT]
    _, pullback = function.vjp(W, X)
    is_in_bits = form == "bfloat16" and jax.default_backend() == "cpu"
    numbers = [
        x for x in pullback.saved if x.dtype == ("uint16" if is_in_bits else FORMS[aot.SAVE_AS(form).dtype].dtype)
    ]
    assert sorted(x.shape for x in numbers) == [(5, 128, 16), (5, 128, 16), (128, 16)]
    np.testing.assert_array_equal(pullback(np.float32(1))[0], gradients[0])


def test_the_loss_is_exact_and_a_step_of_a_loop_stores_its_own():
    cut = cut_of({"hidden": aot.SAVE_AS("int8")})
    v = next(iter(cut.plan.stored))
    assert f"\n        store %{v} as int8\n" in text(cut) and f"\n        restore %{v} from int8\n" in text(cut)
    found, want = (each.compile(2).value_and_grad(W, X)[0] for each in (cut, cut_of(None)))
    np.testing.assert_array_equal(found, want)


def test_forms_work_inside_transformations_and_from_every_way_of_calling(tmp_path):
    function = with_policy(ALL, cache=tmp_path / "cache")
    want = function.grad(W, X)
    assert 0 < relative_error(want, WANT) < 5e-3
    two = np.stack([W, W / 2]), np.stack([X, X])
    found = jax.jit(jax.vmap(jax.grad(with_policy(ALL), argnums=(0, 1))))(*two)
    assert 0 < relative_error(found, jax.vmap(jax.grad(loss, argnums=(0, 1)))(*two)) < 5e-3
    again = with_policy(ALL, cache=tmp_path / "cache")
    loaded = aot.load(function.export(tmp_path / "artefact", W, X))
    symbolic = function.export(tmp_path / "sizes", W, aot.shapes("b, 16", "float32"), sizes={"b": 128})
    for other in (again, loaded, aot.load(symbolic), cut_of(ALL).compile(1), cut_of(ALL).compile(2)):
        np.testing.assert_allclose(other.value_and_grad(W, X)[1][0], want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:CPU alone widens bfloat16")
def test_on_a_cpu_bfloat16_waits_in_its_bits_where_nothing_is_differentiated_again():
    """XLA:CPU would hold the stack of a loop as float32 too."""
    cut = cut_of({"hidden": aot.SAVE_AS("bfloat16")})
    assert cut.split.problem.backend.widens_bfloat16
    dtypes = [str(v.aval.dtype) for v in cut.split.underived.backward.jaxpr.invars]
    assert ("uint16" in dtypes, "bfloat16" in dtypes) == (True, False)
    assert "bfloat16" in [str(v.aval.dtype) for v in cut.split.backward.jaxpr.invars]
    for programs in (1, 2):
        exact = with_policy(None).trace(W, X).partition(plan=exact_plan(cut)).compile(programs)
        made = cut.compile(programs)
        spared = cut.plan.bytes_saved - exact.cut.plan.bytes_saved
        assert made.activation_bytes <= exact.activation_bytes + 0.9 * spared
    value, gradients = cut.compile().value_and_grad(W, X)
    np.testing.assert_array_equal(value, loss(W, X))
    inside = jax.jit(jax.grad(with_policy({"hidden": aot.SAVE_AS("bfloat16")}), (0, 1)))(W, X)
    assert relative_error(gradients, inside) < 1e-6


def exact_plan(cut):
    """The same plan, in which all waits as it is."""
    return cut.storing({}).plan


def test_what_is_offloaded_waits_in_its_form():
    cut = cut_of({"hidden": (aot.MUST_OFFLOAD, aot.SAVE_AS("int8")), "*": aot.SAVE_AS("bfloat16")})
    assert cut.split.halves.host_bytes == cut.plan.bytes_offloaded == 5 * (128 * 16 + 16 * 4)
    assert set(cut.plan.stored.values()) == {"int8", "bfloat16"}
    assert re.search(r"store (%\d+) as int8\n +offload \1\n", text(cut))
    assert re.search(r"fetch (%\d+)\n +restore \1 from int8\n", text(cut))
    assert relative_error(cut.compile().value_and_grad(W, X)[1], WANT) < 1e-2


def test_a_name_goes_before_a_primitive_and_a_demand_of_another_key_holds_too():
    cut = cut_of({"tanh": (aot.MUST_SAVE, aot.SAVE_AS("bfloat16")), "hidden": aot.SAVE_AS("int8"), "*": ALL["*"]})
    assert sorted(cut.plan.stored.values()) == ["bfloat16", "bfloat16", "bfloat16", "int8"]
    assert any("MUST_SAVE by 'tanh'" in s.reason and s.form == "int8" for s in cut.plan.saved)


def test_masks_of_comparisons_are_kept_exactly_as_bits():
    x = np.random.default_rng(0).standard_normal((128, 16), np.float32)
    cut = aot.function(rectified, policy=ALL).trace(W[0], x).partition()
    (mask,) = (s for s in cut.plan.saved if not s.form)
    assert (mask.dtype, mask.shape) == ("uint8", (128, 2)) and exact.EXACT in mask.reason
    assert cut.check_forms(W[0], x).error < 5e-3


def test_under_a_budget_forms_count_with_their_bytes():
    free, tight = cut_of(ALL), cut_of(ALL, budget=0.0)
    assert tight.plan.stored and tight.plan.bytes_saved < free.plan.bytes_saved


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_zeros_infinities_and_values_beyond_the_range_of_a_form(dtype):
    form = FORMS[dtype]
    x = np.zeros((64, 3), np.float32)
    x[0] = 3e38, np.inf, 0
    back = np.asarray(form.unpack(x.dtype, form.pack(x)))
    np.testing.assert_allclose(back[:, 0], x[:, 0], rtol=1e-2)
    assert not back[:, 2].any() and not np.isfinite(back[0, 1])


# --------------------------------------------------------------------------------------------------- what is told


def test_a_plan_with_forms_is_read_back_equal_and_compared():
    cut = cut_of({"hidden": aot.SAVE_AS("int8")})
    document = planfile.dumps(cut.plan, cut.split.graph)
    assert planfile.loads(document, cut.split.graph) == cut.plan
    assert [s["form"] for s in json.loads(document)["saved"] if "form" in s] == ["int8"]
    assert cut_of(None, plan=document).plan.stored == cut.plan.stored
    exact = Plan.of(cut.split.graph, cut.plan.values)
    change = diff(exact, cut.plan)
    assert change.delta_bytes == 5 * (16 * 4 - 3 * 128 * 16) and "as int8, " in str(change)
    wrong = document.replace('"form": "int8"', '"form": "int9"')
    with pytest.raises(PlanError, match=r'form is "int9", not one of "bfloat16", "float16", "float8_e4m3fn"'):
        planfile.loads(wrong, cut.split.graph)


def test_a_plan_with_forms_holds_without_the_policy_and_its_masks_stay_exact():
    x = np.random.default_rng(0).standard_normal((128, 16), np.float32)
    cut = aot.function(rectified, policy=ALL).trace(W[0], x).partition()
    document = planfile.dumps(cut.plan, cut.split.graph)
    function, want = aot.function(rectified, plan=document), jax.grad(rectified)(W[0], x)
    again = function.trace(W[0], x).partition()
    assert again.plan == cut.plan and again.forward.jaxpr.pretty_print() == cut.forward.jaxpr.pretty_print()
    for found in (function.grad(W[0], x), jax.jit(jax.grad(function))(W[0], x)):
        assert 0 < relative_error(found, want) < 5e-3
    exact = aot.function(rectified).trace(W[0], x).partition()
    with pytest.raises(
        PlanError, match=r"plan.stored\[%\d+\] is not there, and the policy says bfloat16 for "
    ) as error:
        cut.traced.partition(plan=planfile.dumps(exact.plan, exact.split.graph))
    assert str(error.value).endswith("\nMake the plan under this policy, or take that key out of it.")


def test_plan_report_and_measure_tell_bytes_and_error():
    cut = cut_of({"hidden": aot.SAVE_AS("int8"), "*": aot.SAVE_AS("bfloat16")})
    lines = [
        "kept as bfloat16: 2 values, 24.6 kB instead of 49.2 kB",
        "kept as int8: 1 value, 10.6 kB instead of 41.0 kB",
    ]
    assert cut.plan.remarks == lines
    report = str(cut.explain(measure=False))
    assert "Kept as int8: 1 value, 10.6 kB instead of 41.0 kB." in report
    checked = cut.check_forms(W, X)
    assert [(row.form, row.values, row.bytes, row.plain_bytes) for row in checked.rows] == [
        ("bfloat16", 2, 24576, 49152),
        ("int8", 1, 10560, 40960),
    ]
    assert checked.error == pytest.approx(relative_error(cut.compile(2).value_and_grad(W, X)[1], WANT), rel=1e-2)
    assert 0 < checked.rows[0].error < 5e-3 and 0 < checked.rows[1].error < 5e-3 and checked.error <= checked.largest
    last = "all: 35.1 kB saved instead of 90.1 kB, relative error of the gradient "
    assert str(checked).splitlines()[-1].startswith(last)
    assert "keeps 3 values in smaller forms, and the policy below keeps them as they are" in str(cut.plan.to_policy())


def test_options_with_forms_have_a_json_form_and_a_short_text():
    options = aot.Options(policy=(("h", aot.SAVE_AS(jnp.int8)),))
    assert aot.Options.from_json(options.to_json()) == options
    assert repr(aot.SAVE_AS("float8_e4m3")) == "aot.SAVE_AS('float8_e4m3fn')"


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_dtype_that_is_no_form_is_refused():
    with pytest.raises(PolicyError) as error:
        aot.SAVE_AS("float8")
    assert str(error.value) == (
        "aot.SAVE_AS 'float8' is no form.\n"
        "Known names: 'bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2', 'int8'. Did you mean 'float16'?"
    )


def test_a_key_that_names_nothing_to_be_made_smaller_is_refused():
    with pytest.raises(PolicyError) as error:
        cut_of({"reduce_sum": aot.SAVE_AS("int8")})
    assert str(error.value) == (
        "policy['reduce_sum'] is SAVE_AS('int8'), and no array that it names is of floats that take fewer bytes so.\n"
        "Name other values, or take a smaller form."
    )


def test_a_dtype_that_the_backend_cannot_store_is_refused(monkeypatch):
    monkeypatch.setattr(policies, "_not_stored", lambda form, backend: "no such type.")
    with pytest.raises(PolicyError) as error:
        cut_of({"hidden": aot.SAVE_AS("float8_e5m2")})
    where, cure = str(error.value).splitlines()
    assert re.fullmatch(
        r"policy: %\d+:5xfloat32\[128,16\] \(\w+ at .*test_save_as.py:\d+ .*\) is SAVE_AS\('float8_e5m2'\), which cpu "
        r"cannot store: no such type\.",
        where,
    )
    assert cure == 'Take another form, such as "bfloat16".'


def test_a_gradient_in_eight_bits_is_not_differentiated_again():
    function = with_policy({"*": aot.SAVE_AS("int8")})
    with pytest.raises(PolicyError) as error:
        jax.grad(lambda w: jnp.sum(jax.grad(function)(w, X) ** 2))(W)
    assert str(error.value) == (
        "A residual float32[128,16] is kept as int8 by the policy, and its gradient is differentiated once more.\n"
        'Keep it as "bfloat16", or differentiate twice a function without that policy.'
    )
    twice = [jax.grad(lambda w, f=f: jnp.sum(jax.grad(f)(w, X) ** 2))(W) for f in (with_policy(ALL), loss)]
    assert relative_error(*twice) < 1e-2


@pytest.mark.parametrize(("form", "error"), [("bfloat16", 5e-3), ("float16", 2e-3)])
def test_second_derivatives_hold_cotangents_of_any_size(form, error):
    """Cotangents of what waits have the dtype of what waits, and float16 ends at 65504."""
    function = with_policy({"*": aot.SAVE_AS(form)})
    found, want = (
        jax.jit(jax.grad(lambda w, scale, f=f: scale * jnp.sum(jax.grad(f)(w, X) ** 2))) for f in (function, loss)
    )
    for scale in (1e-6, 1e6):
        assert relative_error(found(W, scale), want(W, scale)) < error


def test_float16_waits_as_itself_where_nothing_is_differentiated_again():
    cut = cut_of({"hidden": aot.SAVE_AS("float16")})
    halves = cut.split.underived, cut.split.halves
    own, inside = ({str(v.aval.dtype) for v in each.backward.jaxpr.invars} for each in halves)
    assert "float16" in own - inside and "bfloat16" in inside - own
    large = np.array([0.0, -0.0, 1e-7, 6e-8, 65504.0, 1e30, np.inf, np.nan], np.float32)
    forms = [Packings(in_bits=each).named("float16") for each in (False, True)]
    found, want = (each.unpack(jax.typeof(large), each.pack(large)) for each in forms)
    np.testing.assert_array_equal(found, want)


def test_a_plan_that_does_not_follow_the_policy_is_refused():
    plan, cut = cut_of(None).plan, cut_of({"*": aot.SAVE_AS("int8")})
    with pytest.raises(
        PlanError, match=r"plan.stored\[%\d+\] is not there, and the policy says int8 for %\d+:"
    ) as error:
        cut.traced.partition(plan=plan)
    assert str(error.value).endswith(".\nMake the plan under this policy, or take that key out of it.")
    value = cut.split.graph.role_outputs(Role.OUTPUT)[0]
    with pytest.raises(PlanError, match=r"plan.stored\[%\d+\] is int8, and .* would not be smaller so."):
        Plan.of(cut.split.graph, [*plan.values, value], stored={value: "int8"})


def test_no_remark_tells_of_masks_that_are_kept_without_being_asked_for():
    def loss(x):
        return jnp.sum(jnp.where(jnp.isfinite(jnp.max(x, -1, keepdims=True)), jnp.tanh(x) ** 2, 0.0))

    plan = aot.function(loss, policy={"tanh": aot.SAVE_AS("bfloat16")}).trace(jnp.ones((256, 64))).partition().plan
    unread = [c for c in plan.problem.constraints if not c.is_asked and c.value not in plan.values]
    assert unread and all("mask" not in remark for remark in plan.remarks)


# ------------------------------------------------------------------------ loops of an unknown number of trips


def until_small(w, x):
    """The trips depend on floats."""

    def body(carry):
        h, size = carry
        return jnp.tanh(h @ w) + 0.1 * jnp.sin(h), size * 0.7

    start = x, 1.0 + 0 * x.sum()
    return jnp.sum(jnp.sin(lax.while_loop(lambda carry: carry[1] > 0.05, body, start)[0]) ** 2)


def filling(w, x):
    """A buffer of which each step reads a row and writes another."""

    def body(carry):
        i, h, rows = carry
        h = jnp.tanh(h @ w) + 0.1 * rows[jnp.maximum(i - 1, 0)]
        return i + 1, h, rows.at[i].set(h * 2)

    start = 0, x, jnp.zeros((9, *x.shape), x.dtype)
    return jnp.sum(jnp.sin(aot.while_loop(lambda carry: carry[0] < 9, body, start, memory=4)[2]) ** 2)


@pytest.mark.parametrize(("loop", "form", "most"), [(until_small, "int8", 2e-2), (filling, "bfloat16", 5e-3)])
def test_checkpoints_of_a_loop_and_the_arrays_that_it_fills_wait_in_a_form(loop, form, most):
    """The backward runs as many steps as the forward, whatever the stored numbers would make of the condition."""
    w = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) / 4
    x = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    policy = {"while_loop_with_checkpoints": aot.SAVE_AS(form)}
    cut = aot.function(loop, argnums=(0, 1), policy=policy).trace(w, x).partition()
    floats = [s for s in cut.plan.saved if s.dtype == "float32" and len(s.shape) > 1 and s.op in policy]
    assert floats and {s.form for s in floats} == {form}
    run, plain = cut.compile(2), cut.storing({}).compile(2)
    (value, found), (exact, want) = run.value_and_grad(w, x), plain.value_and_grad(w, x)
    assert value == exact
    for a, b in zip(found, want, strict=True):
        assert 0 < np.linalg.norm(a - b) / np.linalg.norm(b) < most
    spared = sum(s.plain_bytes - s.bytes for s in floats)
    assert plain.memory.residual_bytes - run.memory.residual_bytes == pytest.approx(spared, rel=0.02)
