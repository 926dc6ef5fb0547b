"""Cheaper forms of values: masks as bits, masks from results, carried values from the step before.

Where they can stand in the corpus they are forced on, whether they pay or not. Run op by op, the halves return the bits
that they return without. (Compiled, XLA may fuse other ops together, as under any other plan.)
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.partition.lower import verify
from jointcut.partition.plans import planfile
from jointcut.partition.plans.problem import Problem
from jointcut.partition.plans.saved import in_cheaper_forms
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.program.graph import Form
from jointcut.partition.program.jax import jaxprs, runtime
from jointcut.partition.program.roles import Role
from jointcut.partition.search.best import RATES
from jointcut.partition.search.forms import before, bits, indices, results
from jointcut.partition.search.forms.choose import formed, not_slower
from jointcut.partition.search.forms.written import Rewriting
from jointcut.partition.search.mincut import min_cut, save_all
from jointcut.partition.split import halved
from programs import CORPUS, EVERY_PROGRAM, named

# ----------------------------------------------------------------------------------------------- more programs

KEY = jax.random.key(0)
WEIGHT = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)) / 4, jnp.float32)
INPUTS = jnp.asarray(np.random.default_rng(1).standard_normal((6, 4, 16)), jnp.float32)
START = jnp.full((4, 16), 0.1)


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0)


def layers(weight, x):
    """Dropout that a residual stream computes again."""
    for key in jax.random.split(KEY, 2):
        x = x + dropped(key, jnp.sin(x @ weight) @ weight)
    return jnp.sum(x * x)


def of_odd_width(weight, x):
    return jnp.sum(dropped(KEY, jnp.sin(x @ weight)[..., :13] @ weight[:13, :11]) ** 2)


def dropout_in_steps(weight, x):
    keys = jax.random.split(KEY, len(x))
    return jnp.sum(lax.scan(lambda h, now: (dropped(now[0], jnp.tanh(h @ weight + now[1])), None), START, (keys, x))[0])


def rectified(weight, x):
    """A recurrent layer whose states the layer above reads: they are kept, and its masks are not."""

    def step(h, x):
        h = jax.nn.relu(h @ weight + x)
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, START, x)[1] @ weight))


def in_both_loops(weight, x, reverse=False):
    """The same in an outer loop: the states before each step are not kept either."""

    def step(h, x):
        h = jax.nn.relu(h @ weight + x)
        return h, h

    def epoch(h, _):
        h, states = lax.scan(step, h, x, reverse=reverse)
        return h, jnp.sin(states @ weight)

    return jnp.sum(lax.scan(epoch, START, None, length=3)[1])


def returned(weight, x):
    """The result of relu6 leaves the function, so that it costs nothing, and its input need not be kept."""
    y = jax.nn.relu6(x @ weight)
    return jnp.sum(y @ weight), y


def recurrent(weight, x, reverse=False, emits=False):
    """A textbook layer, whose carried state is the result of a tanh; the first state is an argument, or a literal."""

    def step(states, x):
        h, c = jnp.tanh(states[0] @ weight + x), jnp.sin(states[1] * x)
        return (h, c), h * 2 if emits else None

    (h, c), ys = lax.scan(step, (START, jnp.zeros((4, 16))), x, reverse=reverse)
    return jnp.sum(h * c) + (jnp.sum(ys**2) if emits else 0.0)


OURS = {
    "recurrent": (recurrent, False),
    "recurrent in reverse": (partial(recurrent, reverse=True), False),
    "recurrent with results": (partial(recurrent, emits=True), False),
    "layers": (layers, False),
    "of_odd_width": (of_odd_width, False),
    "dropout_in_steps": (dropout_in_steps, False),
    "rectified": (rectified, False),
    "in_both_loops": (in_both_loops, False),
    "in_both_loops_in_reverse": (partial(in_both_loops, reverse=True), False),
    "returned": (returned, True),
}


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.fixture
def small(monkeypatch):
    """Masks and indices of any size are packed."""
    for module in (bits, indices):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)


def graph_of(function, *args, **options):
    traced = aot.function(function, **options).trace(*args)
    return traced, traced.program.graph


def forced(graph):
    """The graph with every form that can stand in it, whether it pays or not."""
    for module in (results, bits, indices, before):
        problem, new = Problem.of(graph), Rewriting(graph)
        module.write(new, problem, save_all(problem), list(module.candidates(problem)))
        graph = new.finished()
    problem, new = Problem.of(graph), Rewriting(graph)
    before.write(new, problem, save_all(problem), list(before.candidates(problem, False)))
    return new.finished()


def op_by_op(closed, *args):
    """Evaluate a jaxpr op by op, its loops step by step, so that XLA fuses nothing."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(v):
        return v.val if isinstance(v, jaxprs.Literal) else env[v]

    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "scan":
            made = in_steps(jaxprs.scan_layout(eqn), eqn.params["reverse"], given)
        else:
            inputs = [jaxprs.fresh(v.aval) for v in eqn.invars]
            made = runtime.evaluate(
                jaxprs.build(inputs, eqn.outvars, [jaxprs.rebound(eqn, inputs, eqn.outvars)]), *given
            )
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def in_steps(scan, reverse, given):
    a, b = scan.num_consts, scan.num_consts + scan.num_carry
    carry, rows = given[a:b], [None] * scan.length
    body = jaxprs.ClosedJaxpr(scan.body, [])
    for i in sorted(range(scan.length), reverse=reverse):
        out = op_by_op(body, *given[:a], *carry, *(x[i] for x in given[b:]))
        carry, rows[i] = out[: b - a], out[b - a :]
    return [*carry, *map(jnp.stack, zip(*rows, strict=True))]


def run(graph, traced, primals):
    """Outputs and gradients, op by op, for random cotangents."""
    draws = np.random.default_rng(0)
    shapes = [v.aval for v in traced.program.closed.jaxpr.invars[len(primals) :]]
    cotangents = [jnp.asarray(draws.standard_normal(a.shape), a.dtype) for a in shapes]
    halves = halved(Problem.of(graph), "min_cut").halves
    results = op_by_op(halves.forward, *primals)
    count = len(graph.role_outputs(Role.OUTPUT))
    residuals = verify.routed(halves.residuals, primals, results, count)
    return [*results[:count], *op_by_op(halves.backward, *residuals, *cotangents)]


def gives_the_same_bits(function, args, **options):
    traced, graph = graph_of(function, *args, **options)
    with_forms = forced(graph)
    if with_forms.forms:
        primals = [*traced.consts, *jax.tree.leaves(args)]
        for got, want in zip(run(with_forms, traced, primals), run(graph, traced, primals), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    return [form.kind for form in with_forms.forms]


WITH_FORMS = {
    "convolutions": results.KIND,
    "dropout_network": bits.KIND,
    "largest_entries": indices.KIND,
    "mixture_of_experts": indices.KIND,
}
ASKED = [p.name for p in CORPUS if "grad" not in p.lacks] if EVERY_PROGRAM else list(WITH_FORMS)


@pytest.mark.parametrize("name", ASKED)
def test_forms_forced_on_in_the_corpus_give_the_same_bits(name, small):
    program = named(name)
    with program.precision():
        function = partial(program.function, **program.kwargs)
        kinds = gives_the_same_bits(function, program.args, argnums=program.argnums, has_aux=program.has_aux)
    assert name not in WITH_FORMS or WITH_FORMS[name] in kinds


@pytest.mark.parametrize("name", OURS)
def test_forms_forced_on_in_our_programs_give_the_same_bits(name, small):
    function, has_aux = OURS[name]
    assert gives_the_same_bits(function, (WEIGHT, INPUTS), has_aux=has_aux)


# ------------------------------------------------------------------------------------------------ what they save


def kept(function, has_aux=False):
    """Bytes that the minimum cut keeps without forms and with them, and the forms."""
    _, graph = graph_of(function, WEIGHT, INPUTS, has_aux=has_aux)
    with_forms = formed(graph)
    return min_cut(graph).bytes_saved, min_cut(with_forms).bytes_saved, list(in_cheaper_forms(with_forms.forms))


def test_masks_are_kept_as_bits(small):
    """Two masks of 6 x 4 x 16, and one of which the last axis is no multiple of eight: 11 elements take two bytes."""
    assert kept(layers)[2] == ["a mask as bits: 2 values, 672 B less"]
    plain, with_forms, _ = kept(of_odd_width)
    assert plain - with_forms == 6 * 4 * (11 - 2)


def test_masks_in_the_steps_of_a_loop_are_kept_as_bits(small):
    plain, with_forms, told = kept(dropout_in_steps)
    assert plain - with_forms == 6 * 4 * (16 - 2) and told == ["a mask as bits: 1 value, 336 B less"]


def test_a_small_mask_stays_as_it_is():
    assert kept(layers)[2] == []


def test_a_layer_of_states_keeps_no_masks(small):
    """States of 4 x 16 floats, those before each step, and a cosine; without forms, also a mask."""
    plain, with_forms, told = kept(rectified)
    size = 6 * 4 * 16
    assert (plain, with_forms) == (size * (4 + 4 + 4 + 1), size * (4 + 4 + 4))
    assert told == ["a mask from the result: 1 value, 384 B less"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_layer_of_states_in_a_loop_keeps_its_states_alone(reverse, small):
    """But for the three from which the inner loop starts."""
    plain, with_forms, told = kept(partial(in_both_loops, reverse=reverse))
    size, starts = 3 * 6 * 4 * 16, 3 * 4 * 16
    assert plain - with_forms == size * (4 + 1) - starts * 4
    assert told == [
        "a mask from the result: 1 value, 1.15 kB less",
        "a carried value from the step before: 1 value, 3.84 kB less",
    ]


def test_a_result_that_leaves_the_function_gives_the_mask(small):
    plain, with_forms, told = kept(returned, has_aux=True)
    assert (plain, with_forms) == (6 * 4 * 16, 0) and told == ["a mask from the result: 2 values, 384 B less"]


def test_a_program_without_such_values_stays_the_same_graph():
    _, graph = graph_of(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w), WEIGHT, INPUTS)
    assert formed(graph) is graph


def ordered(weight, x):
    h = x @ weight
    return jnp.sum(jnp.tanh(jnp.take_along_axis(h, jnp.argsort(jnp.sin(h), axis=-1), axis=-1)) ** 2)


def ordered_in_steps(weight, x):
    def step(h, now):
        best, places = lax.top_k(h @ weight + now, 16)
        return jnp.take_along_axis(jnp.sin(h), places[:, ::-1], axis=-1) * best, None

    return jnp.sum(lax.scan(step, START, x)[0])


@pytest.mark.parametrize(("function", "count"), [(ordered, 6 * 4 * 16), (ordered_in_steps, 6 * 4 * 16)])
def test_places_on_an_axis_are_kept_in_a_byte_with_the_same_bits(function, count, small):
    plain, with_forms, told = kept(function)
    assert plain - with_forms == count * 3 and told == ["an index in fewer bytes: 1 value, 1.15 kB less"]
    assert indices.KIND in gives_the_same_bits(function, (WEIGHT, INPUTS))


# -------------------------------------------------------------------------------------------------- their parts


X300 = np.zeros((4, 300), np.float32)


@pytest.mark.parametrize(
    ("function", "range_", "dtype"),
    [
        (lambda x: jnp.argmax(x, axis=0), (0, 3), "uint8"),
        (lambda x: jnp.argsort(x, axis=1)[:, ::-1].T, (0, 299), "uint16"),
        (lambda x: lax.top_k(x, 7)[1] - 300, (-300, -1), "int16"),
        (lambda x: lax.top_k(x, 7)[1] * 200, (0, 59800), "uint16"),
        (lambda x: jnp.where(x > 0, jnp.arange(300), -1), (-1, 299), "int16"),
        (lambda x: lax.rem(jnp.minimum(jnp.argsort(x), 100), 90), (0, 89), "uint8"),
        (lambda x: jnp.clip(jnp.argsort(x), 10, 20).astype(jnp.int16), (10, 20), "uint8"),
        (lambda x: jnp.concatenate([jnp.argmin(x, axis=0), jnp.arange(5)]), (0, 4), "uint8"),
        (lambda x: x.astype(jnp.int32), None, None),
        (lambda x: jnp.argsort(x) * 10_000_000, None, None),
        (lambda x: jnp.cumsum(jnp.argsort(x), axis=1), None, None),
    ],
)
def test_ranges_are_known_where_the_program_tells_them(function, range_, dtype):
    _, graph = graph_of(function, X300, argnums=())
    found = indices.ranges(graph).get(graph.role_outputs(Role.OUTPUT)[0])
    assert found == range_ and (found is None or found.dtype == dtype)


@pytest.mark.parametrize("shape", [(8,), (3, 9), (2, 5, 16), (1, 23), (0, 8)])
def test_bits_give_the_mask_back(shape):
    mask = jnp.asarray(np.random.default_rng(0).random(shape) < 0.5)
    packed = bits.pack_mask(mask)
    assert packed.dtype == jnp.uint8 and packed.shape == (*shape[:-1], -(-shape[-1] // 8))
    np.testing.assert_array_equal(bits._unpacking(shape[-1])(packed), mask)


POINTS = np.array([-np.inf, -2, -1, -0.0, 0.0, 1e-45, 0.5, 1, 2, 6, 7, np.inf, np.nan], np.float32)


@pytest.mark.parametrize("low", [-np.inf, -1.0, 0.0])
@pytest.mark.parametrize("high", [0.0, 1.0, np.inf])
@pytest.mark.parametrize("number", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gt", "lt", "ge", "le"])
def test_where_a_comparison_of_the_result_is_said_to_agree_it_does(name, number, low, high):
    """And where it is said not to, it does not, for some number."""
    compare = {"gt": np.greater, "lt": np.less, "ge": np.greater_equal, "le": np.less_equal}[name]
    clipped = np.minimum(np.maximum(POINTS, np.float32(low)), np.float32(high))
    agrees = np.array_equal(compare(POINTS, np.float32(number)), compare(clipped, np.float32(number)))
    assert agrees == results._agree(name, number, low, high)


@pytest.mark.parametrize(
    ("function", "bounds"),
    [
        (jax.nn.relu, (0.0, np.inf)),
        (jax.nn.relu6, (0.0, 6.0)),
        (lambda x: lax.clamp(-1.0, x, 2.0), (-1.0, 2.0)),
        (lambda x: jax.jit(lambda x: lax.min(lax.max(x, 1.0), 3.0))(x), (1.0, 3.0)),
        (lambda x: jax.jit(lambda x: lax.max(lax.max(x, 1.0), 0.0))(x), (1.0, np.inf)),
        (jnp.abs, None),
        (jax.nn.softplus, None),
    ],
)
def test_the_bounds_of_a_function_are_read_from_its_equation(function, bounds):
    equation = jax.make_jaxpr(function)(jnp.float32(0.0)).eqns[0]
    assert results._bounds(equation) == bounds


# ------------------------------------------------------------------------------------------------ as users see it


def test_the_plan_and_the_report_name_the_forms_and_files_keep_them(small):
    cut = aot.function(layers).trace(WEIGHT, INPUTS).partition("min_cut")
    line = "a mask as bits: 2 values, 672 B less"
    assert line in str(cut.plan).splitlines() and line in cut.explain(measure=False).bounds
    assert cut.plan.forms[0] == Form("a mask as bits", cut.plan.forms[0].value, cut.plan.forms[0].source, 336)
    again = planfile.loads(planfile.dumps(cut.plan, cut.split.graph), cut.split.graph)
    assert again == cut.plan and again.forms == cut.plan.forms


def test_what_plain_jax_keeps_has_no_forms(small):
    cut = aot.function(layers).trace(WEIGHT, INPUTS).partition("save_all")
    assert cut.plan.forms == () and any(s.dtype == "bool" for s in cut.plan.saved)


@pytest.mark.parametrize("name", ["layers", "rectified", "in_both_loops_in_reverse", "returned"])
def test_gradients_are_those_of_jax(name, small):
    function, has_aux = OURS[name]
    cut = aot.function(function, has_aux=has_aux)
    is_jax(cut.value_and_grad(WEIGHT, INPUTS), function, has_aux)


def test_gradients_are_those_of_jax_within_a_budget(small):
    is_jax(aot.function(rectified, budget=0.0).value_and_grad(WEIGHT, INPUTS), rectified)


def test_gradients_are_those_of_jax_inside_of_jit(small):
    got = jax.jit(jax.value_and_grad(aot.function(dropout_in_steps)))(WEIGHT, INPUTS)
    is_jax(got, dropout_in_steps)


def is_jax(got, function, has_aux=False):
    want = jax.jit(jax.value_and_grad(function, has_aux=has_aux))(WEIGHT, INPUTS)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


# -------------------------------------------------------------------------------------------------- what they cost


SLOW = Roofline(flops_per_s=1e11, elementwise_per_s=1e9, bytes_per_s=1e10)  # 0.6 ns to pack an element, 0.18 ns spared


def test_a_form_that_is_slower_by_the_given_rates_is_left_out_unless_there_is_a_budget(small):
    plain, slow = (aot.function(layers, cost=cost).trace(WEIGHT, INPUTS) for cost in (None, SLOW))
    assert {form.kind for form in plain.graph.forms} == {bits.KIND} and not slow.graph.forms
    under_a_budget = aot.function(layers, cost=SLOW, budget=1.0).trace(WEIGHT, INPUTS)
    cuts = slow.partition(), slow.partition(budget=1.0), under_a_budget.partition()
    assert [{form.kind for form in cut.split.graph.forms} for cut in cuts] == [set(), {bits.KIND}, {bits.KIND}]
    want = jax.value_and_grad(layers)(WEIGHT, INPUTS)
    for cut in cuts[:2]:
        got = cut.compile().value_and_grad(WEIGHT, INPUTS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_no_form_is_slower_by_the_rates_of_a_cpu_and_of_a_gpu(small):
    """Of memory that the program has already, too; an int64 in a byte, an int32 in two, and a mask of an odd width."""
    h100 = Roofline(flops_per_s=4.9e14, elementwise_per_s=3.4e13, bytes_per_s=3.4e12)
    _, graph = graph_of(of_odd_width, WEIGHT, INPUTS)
    masks = [bits.work(value) for value in bits.candidates(Problem.of(graph))]
    assert masks == [(bits.ADDITIONS * (6 * 4 * 11), 6 * 4 * (11 - 2))]
    few, many = bits.ADDITIONS * 100, indices.ADDITIONS * 100
    for rates in (RATES["cpu"], RATES["cpu"].within(0), h100):
        assert all(not_slower(rates, *work) for work in (masks[0], (few, 87), (many, 700), (many, 200)))
    assert not not_slower(SLOW, *masks[0])
