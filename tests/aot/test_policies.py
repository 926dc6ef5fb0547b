"""What a user may demand of single values, how keys name them, and what is refused in which words."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jointcut import aot
from jointcut.aot.cache.fingerprint import fingerprint
from jointcut.aot.command.cli import main
from jointcut.aot.options.options import validated
from jointcut.aot.options.policies import read_policy
from jointcut.partition import Plan
from jointcut.partition.errors import IdentityError, PlanError, PolicyError
from jointcut.partition.plans import planfile
from jointcut.partition.prices.constraints import constraints_of

POLICIES = jax.checkpoint_policies
W, X = np.full((3, 4, 4), 0.25, np.float32), np.full((2, 4), 0.5, np.float32)
ARGUMENTS = (W, X)
NEWER = {"one_minus_square": "sub"}  # primitives of newer versions of JAX, by what stood there before


def loss(w, x):
    def step(h, w):
        with jax.named_scope("mlp"):
            h = checkpoint_name(jnp.tanh(h @ w), "hidden")
        return h + jnp.sin(h), None

    with jax.named_scope("stack"):
        return jnp.sum(lax.scan(step, x, w)[0] ** 2)


def traced(policy=None, function=loss, w=W, x=X):
    return aot.function(function, policy=policy).trace(w, x)


def saved(policy, strategy="min_cut", function=loss):
    """The ops of what a plan saves, without the carries of the loop."""
    plan = traced(policy, function).partition(strategy).plan
    return sorted(s.op for s in plan.saved if s.op != "loop")


def demanded(policy, function=loss):
    """What is demanded of which ops' results, and by which key."""
    graph = traced(function=function).graph
    found = {(c.reason, graph.maker_of(c.value).name) for c in constraints_of(read_policy(policy), graph)}
    return sorted((reason, NEWER.get(name, name)) for reason, name in found)


def refused(policy, function=loss):
    """The text of the refusal, without the file's name."""
    with pytest.raises(PolicyError) as error:
        traced(policy, function).partition("min_cut")
    return re.sub(r"%\d+:", "%:", re.sub(r" at \S+:\d+ \(.*?\)\)", ")", str(error.value)))


# --------------------------------------------------------------------------------------------- how keys name values


def is_sine(op, value):
    return op.name == "sin" and value.shape == (2, 4)


@pytest.mark.parametrize(
    ("key", "ops"),
    [
        ("hidden", ["name"]),
        ("hid*", ["name"]),
        ("mlp", ["dot_general", "name", "sub"]),
        ("stack/mlp", ["dot_general", "name", "sub"]),
        ("st?ck/[m]lp", ["dot_general", "name", "sub"]),
        ("cos", ["cos"]),
        (is_sine, ["sin"]),
    ],
)
def test_a_key_is_a_name_a_scope_with_those_around_a_primitive_or_a_predicate(key, ops):
    shown = repr(key) if isinstance(key, str) else "is_sine"
    assert demanded({key: aot.MUST_SAVE}) == [(f"MUST_SAVE by {shown}", op) for op in ops]


def test_an_array_and_its_name_are_one_value():
    """Whatever key names it, what reads it reads it by its name; without one of them it is not saved at all."""
    assert saved({"hidden": aot.MUST_SAVE}) == saved({"tanh": aot.MUST_SAVE}) == ["name"]
    assert "name" not in saved({"tanh": aot.MUST_RECOMPUTE}, "save_all")
    assert {op for _, op in demanded({"hidden": aot.MUST_RECOMPUTE})} == {"name", "tanh"}


def test_a_carry_that_is_named_where_a_step_begins_is_saved_once():
    def carried(w, x):
        def step(h, row):
            h = checkpoint_name(h, "start")
            return jnp.tanh(h @ row), None

        return jnp.sum(lax.scan(step, x, w)[0] ** 2)

    plan = traced({"start": aot.MUST_SAVE}, carried).partition("min_cut").plan
    assert [s.reason for s in plan.saved if s.op == "name"] == ["not recomputed: MUST_SAVE by 'start'"]
    assert not [s for s in plan.saved if s.op == "loop" and s.copies == 3]
    assert plan.bytes_saved <= traced(None, carried).partition("min_cut").plan.bytes_saved


def test_of_several_keys_a_must_goes_first_then_the_more_particular_then_the_first():
    name, scope, sine = {"hidden": aot.MUST_SAVE}, {"mlp": aot.MUST_RECOMPUTE}, {is_sine: aot.PREFER_SAVE}
    assert ("MUST_SAVE by 'hidden'", "name") in demanded(scope | name)
    assert ("MUST_RECOMPUTE by 'mlp'", "name") in demanded({"hidden": aot.PREFER_SAVE} | scope)
    assert ("PREFER_SAVE by is_sine", "sin") in demanded({"sin": aot.PREFER_RECOMPUTE} | sine)
    both = {"stack": aot.PREFER_SAVE, "cos": aot.PREFER_RECOMPUTE}
    assert ("PREFER_SAVE by 'stack'", "cos") in demanded(both)
    assert ("PREFER_RECOMPUTE by 'cos'", "cos") in demanded(dict(reversed(both.items())))


def test_names_in_the_branches_of_a_conditional_count():
    def branched(w, x):
        y = lax.cond(x[0, 0] > 0, lambda x: checkpoint_name(jnp.tanh(x), "inner") ** 2, jnp.sin, x @ w[0])
        return jnp.sum(jnp.exp(y))

    def kept(policy):
        return {s.op for s in traced(policy, branched).partition("min_cut").plan.saved}

    assert "name" in kept({"inner": aot.MUST_SAVE})
    assert not {"name", "tanh"} & kept({"inner": aot.MUST_RECOMPUTE})
    assert "Names: 'inner'." in refused({"iner": aot.MUST_SAVE}, branched)


# --------------------------------------------------------------------------------------------- what they come to


def test_a_preference_holds_where_nothing_forbids_it_and_else_says_what_it_would_have_cost():
    assert "cos" in saved({"cos": aot.PREFER_SAVE}) and "cos" not in saved(None)
    assert "name" not in saved({"hidden": aot.PREFER_RECOMPUTE})
    plan = traced({"dot_general": aot.PREFER_RECOMPUTE, "sin": aot.PREFER_SAVE}).partition("min_cut").plan
    assert plan.bytes_saved >= plan.bound_bytes, "the bound allows what is preferred, however heavy"
    planner = traced({"cos": aot.PREFER_SAVE}).planner
    assert planner.plan(planner.front.choices[-1], "front").overruled == ()
    small = planner.plan(planner.front.choices[0], "front")
    (row,) = small.overruled
    line = str(planner.graph.origin_of(planner.graph.maker_of(row.value))[1])
    want = f"overruled PREFER_SAVE by 'cos': 3 x float32[2, 4] cos {line}; saving it would have kept 96 B more"
    assert want in str(small).splitlines()
    assert small.seconds >= small.bound_seconds
    kept = traced({"cos": aot.PREFER_RECOMPUTE}).partition("save_all").plan
    assert "it keeps 96 B; computing it again would have run 1 op again, with what that reads" in str(kept)


def test_a_plan_says_which_must_it_has_no_use_for():
    """Nothing reads the loss."""
    plan = traced({"reduce_sum": aot.MUST_SAVE}).partition("min_cut").plan
    (line,) = (line for line in plan.summary() if line.startswith("MUST_SAVE by 'reduce_sum': none is saved, "))
    assert line.endswith("as the backward reads none of these values and computes nothing from them")
    for key in ("hidden", "dot_general"):
        assert not any("none is saved" in line for line in traced({key: aot.MUST_SAVE}).partition().plan.summary())


def test_what_must_be_saved_is_though_something_computed_from_it_would_do():
    """Beside masks that are kept exactly, nothing but the mask would be read of what goes into a relu."""

    def function(w, x):
        h = checkpoint_name(jnp.sin(x) @ w[0], "z1")
        return jnp.sum(jnp.sin(jax.nn.relu(h)))

    for policy in ({"z1": aot.MUST_SAVE}, {"z1": aot.MUST_SAVE, "sin": aot.SAVE_AS("float8_e4m3fn")}):
        for strategy in ("min_cut", "save_all"):
            assert "name" in saved(policy, strategy, function)
    assert "name" in [s.op for s in traced({"z1": aot.MUST_SAVE}, function).partition(budget=0.0).plan.saved]


@pytest.mark.parametrize("demands", [("lt",), ("tanh", "lt"), ("tanh",)], ids="+".join)
@pytest.mark.parametrize("strategy", ["min_cut", "best", "save_all"])
def test_a_mask_of_dropout_that_must_be_saved_waits_as_bits(strategy, demands):
    def function(ws, x):
        for i, w in enumerate(ws):
            keep = jax.random.bernoulli(jax.random.key(i), 0.9, x.shape)
            x = jnp.where(keep, jnp.tanh(x @ w), 0)
        return jnp.sum(x**2)

    ws, x = [jnp.eye(64) / 2] * 3, jnp.ones((128, 64))
    cut = traced(dict.fromkeys(demands, aot.MUST_SAVE), function, ws, x).partition(strategy)
    assert len([s for s in cut.plan.saved if s.op == "tanh"]) == 3 or "tanh" not in demands
    assert len([s for s in cut.plan.saved if s.dtype == "uint8"]) == 3 or "lt" not in demands
    want = jax.grad(function)(ws, x)
    for got, expected in zip(cut.compile().value_and_grad(ws, x)[1], want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_form_gives_way_to_a_demand():
    """Of what a mask is computed from again nothing waits in a smaller form, so it is the same mask."""

    def function(w, x):
        with jax.named_scope("block"):
            h = jax.nn.relu(jnp.sin(x) @ w[0])
        return jnp.sum(jnp.sin(h @ w[1]) @ w[2])

    want = aot.function(function).grad(W, X)
    both = {"block": aot.MUST_RECOMPUTE, "dot_general": aot.SAVE_AS("bfloat16")}
    made = traced(both, function).partition()
    assert [(s.op, s.form) for s in made.plan.saved] == [("dot_general", "bfloat16")]
    np.testing.assert_allclose(made.compile().value_and_grad(W, X)[1], want, rtol=1e-2, atol=1e-3)
    assert "gt" not in saved({"gt": aot.MUST_RECOMPUTE}, None, function)


def test_a_preference_is_a_price_among_the_plans_of_a_budget():
    """Plans that overrule it count as slower, but tell the time that they take."""
    planner = traced({"cos": aot.PREFER_SAVE}).planner
    broken, *_, held = (planner.candidate(planner.plan(choice, "front")) for choice in planner.front.choices)
    assert held.preferred_seconds == 0 < broken.preferred_seconds
    assert broken.step_seconds - broken.preferred_seconds == pytest.approx(planner.step_seconds(broken.plan))


def test_plans_say_by_which_key_and_keep_it_in_their_files():
    cut = traced({"hidden": aot.MUST_SAVE}).partition("min_cut")
    text = planfile.dumps(cut.plan, cut.split.graph)
    assert "not recomputed: MUST_SAVE by 'hidden'" in text
    assert aot.function(loss, plan=text).trace(W, X).partition().plan == cut.plan
    assert "MUST_SAVE by dots_saveable" in str(traced(POLICIES.dots_saveable).partition("min_cut").plan)


def test_partition_takes_a_policy_in_the_place_of_that_of_the_options():
    one = traced({"hidden": aot.MUST_SAVE})
    assert (
        one.partition("min_cut", policy={"hidden": aot.MUST_RECOMPUTE}).plan
        == traced({"hidden": aot.MUST_RECOMPUTE}).partition("min_cut").plan
    )


def test_a_policy_holds_inside_a_transformation():
    function = aot.function(loss, policy={"hiden": aot.MUST_SAVE})
    with pytest.raises(PolicyError, match="the nearest first: Names: 'hidden'"):
        jax.jit(jax.grad(function))(W, X)
    got = jax.jit(jax.grad(aot.function(loss, policy={"hidden": aot.MUST_RECOMPUTE})))(W, X)
    np.testing.assert_allclose(got, jax.grad(loss)(W, X), rtol=1e-6)


def test_options_with_a_policy_are_written_and_tell_programs_apart():
    options = validated(loss, aot.Options(policy={"hidden": aot.MUST_SAVE, is_sine: aot.PREFER_SAVE}))
    assert options.policy == (("hidden", aot.MUST_SAVE), (is_sine, aot.PREFER_SAVE))
    assert aot.Options.from_json(options.to_json()) == options
    of_jax = validated(loss, aot.Options(policy=POLICIES.nothing_saveable))
    assert aot.Options.from_json(of_jax.to_json()) == of_jax
    given = [{"a": aot.MUST_SAVE}, {"a": aot.MUST_RECOMPUTE}, {"b": aot.MUST_SAVE}, POLICIES.dots_saveable]
    given += [POLICIES.save_only_these_names("a"), POLICIES.save_only_these_names("b")]
    assert len({fingerprint(policy=read_policy(policy)) for policy in given}) == len(given)
    with pytest.raises(IdentityError, match="is_sine"):
        fingerprint(policy=read_policy({is_sine: aot.MUST_SAVE}))


def test_a_search_under_one_policy_does_not_answer_another():
    plans = [traced({"hidden": demand}).partition(budget=0.0).plan for demand in (aot.MUST_SAVE, aot.MUST_RECOMPUTE)]
    assert plans[0].values != plans[1].values
    again = traced({"hidden": aot.MUST_SAVE}).partition(budget=0.0)
    assert again.plan == plans[0] and again.plan.is_told


# --------------------------------------------------------------------------------------------- what is refused


def test_a_key_that_names_nothing_is_told_what_there_is():
    assert refused({"hiden": aot.MUST_SAVE}).startswith(
        "policy['hiden'] names no value of the forward.\n"
        "There are, the nearest first: Names: 'hidden'. Scopes: 'stack', 'stack/mlp'. Primitives: 'sin', "
    )
    assert refused({lambda op, value: False: aot.MUST_SAVE}).startswith(
        "policy[test_a_key_that_names_nothing_is_told_what_there_is.<locals>.<lambda>] holds of no value of the "
        "forward.\nIt is given each op and value. Primitives: "
    )


def test_two_musts_of_one_kind_contradict_each_other():
    assert refused({"tanh": aot.MUST_SAVE, "mlp": aot.MUST_RECOMPUTE}) == (
        "policy: %:3xfloat32[2,4] (name) is MUST_SAVE by 'tanh' and MUST_RECOMPUTE by 'mlp'.\n"
        "Make one of them a PREFER, or name the value by a checkpoint_name, which goes before other keys."
    )


def test_a_must_against_a_rule_is_refused():
    @jax.checkpoint
    def inner(x):
        return checkpoint_name(jnp.sin(x), "out") * jnp.cos(x)

    assert refused({"out": aot.MUST_SAVE}, lambda w, x: jnp.sum(inner(x @ w[0]))) == (
        "policy: %:float32[2,4] (name) is MUST_SAVE by 'out', but jax.checkpoint keeps it out.\n"
        "Ask for MUST_RECOMPUTE or nothing there, or take the value out of what forbids it."
    )

    def seen(w, x):
        y = lax.scan(lambda h, row: (h @ row, checkpoint_name(jnp.sin(h), "rows")), x, w)[1]
        return jnp.sum(jnp.exp(y))

    assert (
        refused({"rows": aot.MUST_RECOMPUTE}, seen)
        .splitlines()[0]
        .endswith("is MUST_RECOMPUTE by 'rows', but it is read outside the loop that makes it.")
    )


def test_a_must_on_what_a_closed_op_holds_is_refused_where_it_cannot_hold():
    def function(w, x):
        fixed = lax.stop_gradient(x @ w[0])
        y = lax.cond(x[0, 0] > 0, lambda x: checkpoint_name(jnp.tanh(x), "inner") ** 2, jnp.sin, fixed)
        n = lax.while_loop(lambda h: jnp.sum(h) > 9.0, lambda h: jnp.floor(h) - 1, lax.stop_gradient(x))
        return jnp.sum(x @ w[0] * y * n)

    assert refused({"inner": aot.MUST_SAVE, "cond": aot.MUST_RECOMPUTE}, function) == (
        "policy: %:float32[2,4] (cond) holds a value that is MUST_SAVE by 'inner', and is MUST_RECOMPUTE by 'cond'.\n"
        "Ask for MUST_RECOMPUTE or nothing there, or take the value out of what forbids it."
    )
    assert refused({"floor": aot.MUST_OFFLOAD}, function) == (
        "policy: %:float32[2,4] (while) holds a value that is MUST_OFFLOAD by 'floor', which stays inside.\n"
        "Ask for MUST_SAVE, MUST_RECOMPUTE or nothing there."
    )


def test_a_must_in_a_step_that_is_cut_on_its_own_is_refused():
    def stepped(w, x):
        def step(h):
            return checkpoint_name(jnp.tanh(h @ w[0]), "step")

        return jnp.sum(aot.while_loop(lambda h: jnp.sum(h) > 0.1, step, x))

    assert refused({"step": aot.MUST_SAVE}, stepped).partition(" is ")[2] == (
        "MUST_SAVE by 'step', but in a step of a loop that is cut on its own.\n"
        "Name other values, or ask for a PREFER: no plan chooses what is kept there."
    )
    assert traced({"step": aot.PREFER_SAVE}, stepped).partition().plan.nested


def test_a_plan_that_breaks_a_must_is_refused():
    graph = traced().graph
    values = [
        v for op in graph.ops if op.name in ("name", "loop") for v in op.outputs if graph.values[v].maker == op.id
    ]
    hidden = next(v for v in values if graph.maker_of(v).name == "name")
    plan = Plan.of(graph, [*traced().partition("min_cut").plan.values, hidden])
    with pytest.raises(PlanError, match="is saved by the plan, and may not be: MUST_RECOMPUTE by 'hidden'"):
        traced({"hidden": aot.MUST_RECOMPUTE}).partition(plan=plan)


DEMANDS = (
    "aot.MUST_SAVE, aot.PREFER_SAVE, aot.MUST_RECOMPUTE, aot.PREFER_RECOMPUTE, aot.MUST_OFFLOAD, aot.PREFER_OFFLOAD, "
    "aot.SAVE_AS(dtype) or aot.budget(bytes)"
)
EXAMPLE = '{"attention_out": aot.MUST_SAVE, "dot_general": aot.PREFER_SAVE}'
KEYS = "Give a checkpoint_name, a scope, a primitive, or a function of (op, value)."
JAX = "a policy of jax.checkpoint_policies"


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            ["h"],
            f"policy is a list, not a dict.\nGive a dict such as {EXAMPLE}, or {JAX}.",
        ),
        ({"h": True}, f"policy['h'] is True.\nGive one of {DEMANDS}."),
        ({3: aot.MUST_SAVE}, f"policy has the key 3.\n{KEYS}"),
        ({"": aot.MUST_SAVE}, f"policy has the key ''.\n{KEYS}"),
    ],
)
def test_what_is_no_policy_is_refused_at_once(policy, text):
    with pytest.raises(PolicyError) as error:
        aot.function(loss, policy=policy)
    assert str(error.value) == text


# --------------------------------------------------------------------------------------------- where it is told


def test_a_report_tells_what_was_overruled():
    report = traced({"cos": aot.PREFER_RECOMPUTE}).partition("save_all").explain(measure=False)
    (row,) = report.to_dict()["overruled"]
    assert (row["demand"], row["reason"], row["bytes"]) == ("PREFER_RECOMPUTE", "PREFER_RECOMPUTE by 'cos'", 96)
    assert any(remark.startswith("overruled PREFER_RECOMPUTE by 'cos'") for remark in report.remarks)
    musts = traced({"cos": aot.MUST_RECOMPUTE}).partition("save_all").explain(measure=False)
    assert not musts.is_plain and "cut by save_all, but for what must not be" in str(musts)


def test_the_command_line_takes_a_policy():
    def said(*policy):
        options = [part for rule in policy for part in ("--policy", rule)]
        example = ["explain", f"{__name__}:loss", "--example", f"{__name__}:ARGUMENTS", "--strategy", "min_cut"]
        return CliRunner().invoke(main, [*example, "--no-compile", "--json", *options])

    rows = json.loads(said("hidden=must_recompute").stdout)["saved"]
    assert "dot_general" in [row["op"] for row in rows] and "name" not in [row["op"] for row in rows]
    both = said("hidden=MUST_SAVE", "hidden=SAVE_AS:bfloat16")
    assert "as bfloat16, not recomputed: MUST_SAVE by 'hidden'" in both.stdout
    assert "'hidden=keep' is no key=demand. Known names: 'BUDGET:300MiB', 'MUST_OFFLOAD'" in said("hidden=keep").stderr
    assert said("hiden=MUST_SAVE").exit_code == 2
