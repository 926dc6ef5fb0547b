"""Counts follow the mathematics: what one equation computes and moves, and what is inside it."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

from jointcut.partition.prices.counts import PER_ELEMENT, RANDOM_NUMBER, Work, counted
from jointcut.partition.prices.flops import flops, is_fused, jaxpr_flops, moved_bytes, work
from jointcut.partition.program.jax import jaxprs
from jointcut.partition.program.primitives import WEIGHTS

SMALL = st.integers(1, 5)
F32 = 4


def traced(function, *shapes, dtype=np.float32):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def equation(function, *shapes, dtype=np.float32, name=None):
    """The only equation of a function, or the only one of a primitive in it or in the call that it is."""
    eqns = jaxprs.opened(traced(function, *shapes, dtype=dtype))[0].eqns
    inner = [e for eqn in eqns for jaxpr in jaxprs.inner_jaxprs(eqn) for e in jaxpr.eqns]
    (eqn,) = [eqn for eqn in (*eqns, *inner) if eqn.primitive.name == name] if name else eqns
    return eqn


def operations(eqn):
    """What an equation computes, without weights."""
    return work(eqn).products + work(eqn).others


# ---------------------------------------------------------------- products


@settings(max_examples=40, deadline=None)
@given(st.lists(SMALL, min_size=1, max_size=5, unique=True), st.data())
def test_a_product_takes_two_flops_for_each_combination_of_its_indices(sizes, data):
    """Each index is a batch, is contracted, or is free in one operand: the count is the product of them all."""
    letters = "abcde"[: len(sizes)]
    places = {c: data.draw(st.sampled_from(["batch", "contracted", "left", "right"])) for c in letters}
    batch = [c for c in letters if places[c] == "batch"]
    contracted = [c for c in letters if places[c] == "contracted"]
    lhs = data.draw(st.permutations([c for c in letters if places[c] != "right"]))
    rhs = data.draw(st.permutations([c for c in letters if places[c] != "left"]))
    size = dict(zip(letters, sizes, strict=True))
    where = [[axes.index(c) for c in chosen] for chosen in (contracted, batch) for axes in (lhs, rhs)]
    numbers = ((where[0], where[1]), (where[2], where[3]))
    eqn = equation(lambda a, b: lax.dot_general(a, b, numbers), *([size[c] for c in axes] for axes in (lhs, rhs)))
    assert flops(eqn) == work(eqn).products == 2 * math.prod(sizes)


@settings(max_examples=60, deadline=None)
@given(*[SMALL] * 4)
def test_a_product_without_its_equation_is_counted_from_its_shapes(b, m, k, n):
    """Exact for the products of layers and of attention, unless sizes that mean different things agree."""
    plain = equation(lambda x, w: x @ w, (b, m, k), (k, n))
    assert counted("dot_general", [(b, m, k), (k, n)], [(b, m, n)]).products == pytest.approx(flops(plain))
    batch = (7, 9)
    scores = equation(
        lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), (*batch, m, k), (*batch, n, k), name="dot_general"
    )
    guess = counted("dot_general", [(*batch, m, k), (*batch, n, k)], [(*batch, m, n)])
    assert guess.products == pytest.approx(flops(scores))


def pairs(length, taps, outs, low, stride, apart, step):
    """Pairs of an output and a tap that meet an element, one by one."""
    places = {i * apart for i in range(length)}
    return sum(o * stride + t * step - low in places for o in range(outs) for t in range(taps))


CONVOLUTION = {
    "length": st.integers(1, 9),
    "taps": st.integers(1, 4),
    "stride": st.integers(1, 3),
    "padding": st.tuples(st.integers(0, 4), st.integers(0, 4)),
    "apart": st.integers(1, 4),
    "step": st.integers(1, 3),
    "groups": st.integers(1, 3),
}


@settings(max_examples=80, deadline=None)
@given(batch=SMALL, channels=SMALL, features=SMALL, **CONVOLUTION)
def test_a_convolution_counts_products_with_elements_and_none_with_zeros_between_them(
    batch, channels, features, length, taps, stride, padding, apart, step, groups
):
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride,), [padding], lhs_dilation=(apart,), rhs_dilation=(step,), feature_group_count=groups
        )

    eqn = equation(convolve, (batch, channels * groups, length), (features * groups, channels, taps))
    outs = eqn.outvars[0].aval.shape[-1]
    met = pairs(length, taps, outs, padding[0], stride, apart, step)
    assert operations(eqn) == 2 * batch * features * groups * channels * met


@settings(max_examples=30, deadline=None)
@given(batch=SMALL, channels=st.integers(2, 5), features=SMALL, **{**CONVOLUTION, "apart": st.just(1)})
def test_a_convolution_and_both_its_gradients_take_the_same_products(
    batch, channels, features, length, taps, stride, padding, apart, step, groups
):
    """They are the three derivatives of one trilinear form, written with dilations and with groups of batches."""
    x, kernel = (batch, channels * groups, length), (features * groups, channels, taps)
    whole = length + sum(padding) - (taps - 1) * step - 1
    if whole < 0 or padding[0] >= (taps - 1) * step + 1 or padding[1] >= (taps - 1) * step + 1:
        return  # nothing comes out, or JAX writes the gradient with negative padding

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride,), [padding], rhs_dilation=(step,), feature_group_count=groups
        )

    def gradients(x, kernel):
        y, back = jax.vjp(convolve, x, kernel)
        return back(y)

    eqns = jaxprs.opened(traced(gradients, x, kernel))[0].eqns
    counts = [operations(eqn) for eqn in eqns if eqn.primitive.name == "conv_general_dilated"]
    assert len(counts) == 3
    assert counts == [counts[0]] * 3


def as_nhwc(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


CONVOLVED = {
    "padded": ({"window_strides": (1, 1), "padding": "SAME"}, (2, 9, 8, 3), (3, 3, 3, 5)),
    "strided": ({"window_strides": (2, 3), "padding": "VALID"}, (2, 9, 8, 3), (3, 3, 3, 5)),
    "dilated": ({"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 3)}, (2, 9, 8, 3), (3, 3, 3, 5)),
    "transposed": (
        {"window_strides": (1, 1), "padding": [(1, 2), (2, 1)], "lhs_dilation": (2, 2)}, (2, 9, 8, 3), (3, 3, 3, 5),
    ),
    "in groups": (
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}, (2, 9, 8, 6), (3, 3, 3, 4),
    ),
    "in groups of batches": (
        {"window_strides": (1, 1), "padding": "SAME", "batch_group_count": 2}, (4, 9, 8, 3), (3, 3, 3, 6),
    ),
    "with a border cut off": ({"window_strides": (1, 1), "padding": [(-1, 2), (0, -2)]}, (2, 9, 8, 3), (3, 3, 3, 5)),
}  # fmt: skip
MULTIPLIED = {
    "ij,jk->ik": ((3, 5), (5, 7)),
    "bij,bjk->bik": ((2, 3, 5), (2, 5, 7)),
    "abij,kij->abk": ((2, 3, 4, 5), (7, 4, 5)),
    "i,i->": ((9,), (9,)),
    "i,j->ij": ((3,), (4,)),
}
PRODUCTS = {name: (partial(as_nhwc, **options), *shapes) for name, (options, *shapes) in CONVOLVED.items()}
PRODUCTS |= {name: (partial(jnp.einsum, name), *shapes) for name, shapes in MULTIPLIED.items()}


@pytest.mark.parametrize("name", PRODUCTS)
def test_xla_counts_as_many_flops_in_a_product(name):
    function, *shapes = PRODUCTS[name]
    figures = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)).cost_analysis()
    assert jaxpr_flops(traced(function, *shapes)) == figures["flops"]


def test_numbers_with_scales_are_multiplied_as_others_are():
    shapes = (4, 64), (64, 8)
    operands = (jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in shapes)
    scales = (jax.ShapeDtypeStruct(shape, jnp.float8_e8m0fnu) for shape in [(4, 2), (2, 8)])
    closed = jax.make_jaxpr(lambda x, y, s, t: lax.scaled_dot(x, y, lhs_scale=s, rhs_scale=t))(*operands, *scales)
    assert work(jaxprs.opened(closed)[0].eqns[0]) == Work(products=2 * 4 * 64 * 8)


@pytest.mark.parametrize("layout", [0, 1])
def test_attention_in_a_kernel_of_cudnn_s_is_two_products(layout):
    batch, heads, queries, keys, width = 2, 3, 5, 7, 4
    shapes = [(batch, n, heads, width) if layout == 0 else (batch, heads, n, width) for n in (queries, keys, keys)]
    done = counted("dot_product_attention_fwd_wrapper", shapes, shapes[:1], {"layout": layout})
    assert done == Work(products=2 * 2 * batch * heads * queries * keys * width)


def test_each_row_of_a_ragged_product_meets_the_matrix_of_its_own_group_only():
    def ragged(x, w):
        return lax.ragged_dot(x, w, np.array([2, 3, 1], np.int32))

    assert flops(equation(ragged, (6, 4), (3, 4, 5))) == 2 * 6 * 4 * 5


def test_a_depthwise_convolution_is_no_matrix_product():
    def convolve(groups):
        return lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=groups)

    deep, wide = equation(convolve(4), (1, 4, 9), (4, 1, 3)), equation(convolve(2), (1, 4, 9), (4, 2, 3))
    assert work(deep).products == 0 < work(wide).products
    assert flops(deep) == 2 * 4 * 7 * 3 * WEIGHTS["conv_general_dilated"]


def test_a_complex_product_takes_four_real_ones():
    shapes = (3, 4), (4, 5)
    real, both = (equation(jnp.dot, *shapes, dtype=dtype) for dtype in (np.float32, np.complex64))
    assert flops(both) == 4 * flops(real)


# ---------------------------------------------------------------- everything else

FACTORED = {
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), 1 / 3),
    "lu": (lambda x: lax.linalg.lu(x), 2 / 3),
    "qr": (lambda x: lax.linalg.qr(x), 8 / 3),
    "triangular_solve": (lambda x: lax.linalg.triangular_solve(x, x), 1),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False), 22),
    "svd, values alone": (lambda x: lax.linalg.svd(x, compute_uv=False), 8 / 3),
}


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("n", [1, 6, 10])
def test_factorisations_are_cubic_in_the_side_and_linear_in_the_number(name, n):
    function, factor = FACTORED[name]
    name = name.split(",")[0]
    assert flops(equation(function, (n, n), name=name)) == pytest.approx(factor * n**3)
    assert flops(equation(function, (3, 2, n, n), name=name)) == pytest.approx(6 * factor * n**3)


@pytest.mark.parametrize("factor", [lax.linalg.lu, lax.linalg.svd], ids=lambda factor: factor.__name__)
def test_a_tall_matrix_takes_less_than_a_square_one_and_as_much_as_a_flat_one(factor):
    tall, flat, square = (flops(equation(factor, shape)) for shape in [(9, 4), (4, 9), (9, 9)])
    assert tall == flat < square


def test_factors_of_a_tall_matrix_take_what_the_textbook_says():
    m, n = 9, 4
    expected = {
        lax.linalg.lu: n * n * (m - n / 3),
        lambda x: lax.linalg.qr(x, full_matrices=False): 4 * n * n * (m - n / 3),
        lambda x: lax.linalg.qr(x): 2 * n * n * (m - n / 3) + 4 * (m * m * n - m * n * n + n**3 / 3),
        lambda x: lax.linalg.svd(x, full_matrices=False): 6 * m * n * n + 20 * n**3,
        lambda x: lax.linalg.svd(x, compute_uv=False): 2 * m * n * n + 2 * n**3,
        lambda x: lax.linalg.svd(x): 4 * m * m * n + 22 * n**3,
    }
    for function, count in expected.items():
        assert flops(equation(function, (m, n))) == pytest.approx(count)


@pytest.mark.parametrize("columns", [1, 5])
def test_reflections_take_as_long_as_what_they_are_applied_to_is_wide(columns):
    eqn = equation(lambda a, t, c: lax.linalg.ormqr(a, t, c), (8, 3), (3,), (8, columns))
    assert flops(eqn) == pytest.approx(columns * 4 * (8 * 3 - 3 * 3 / 2))


def test_a_fourier_transform_of_real_numbers_takes_half():
    complexes = equation(lambda x: lax.fft(x, "FFT", (8, 16)), (3, 8, 16), dtype=np.complex64)
    reals = equation(lambda x: lax.fft(x, "RFFT", (8, 16)), (3, 8, 16))
    back = equation(lambda x: lax.fft(x, "IRFFT", (8, 16)), (3, 8, 9), dtype=np.complex64)
    assert flops(complexes) == 3 * 5 * 128 * 7
    assert flops(reals) == flops(back) == flops(complexes) / 2


@pytest.mark.parametrize("axis", [0, 1])
def test_a_sort_compares_along_its_rows(axis):
    eqn = equation(lambda x: lax.sort(x, dimension=axis), (4, 64))
    assert work(eqn).others == 256 * math.log2((4, 64)[axis])
    assert work(eqn).weighted == WEIGHTS["sort"] * work(eqn).others


def test_the_best_k_take_fewer_comparisons_than_a_sort():
    few, many = (work(equation(lambda x, k=k: lax.top_k(x, k), (4, 64))).others for k in (8, 64))
    assert (few, many) == (256 * 3, work(equation(lambda x: lax.sort(x), (4, 64))).others)


WINDOW = {"window_dimensions": (2, 3), "window_strides": (1, 1), "padding": "VALID"}

OTHERS = {
    "elementwise": (lambda x: x + x, 48),
    "a reduction": (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), 48),
    "a reduction of two operations": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a * b + 1, (0,)), 2 * 48),
    "a reduction of two arrays": (
        lambda x: lax.reduce((x, x), (np.float32(0),) * 2, lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)),
        2 * 48,
    ),
    "a reduction by exp": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: jnp.exp(a) * b, (0,)),
        48 * (1 + WEIGHTS["exp"]),
    ),
    "a cumulative sum": (lambda x: lax.cumsum(x, axis=1), 48 * 3),
    "a reduction of windows": (lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 3), (1, 1), "VALID"), 5 * 6 * 6),
    "movement": (lambda x: x.T, 0),
    "a bit pattern": (lambda x: lax.bitcast_convert_type(x, np.int32), 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_most_else_takes_one_flop_for_each_element_that_it_meets(name):
    function, count = OTHERS[name]
    assert flops(equation(function, (6, 8))) == count


def test_a_scatter_takes_one_flop_for_each_update_that_it_computes_with():
    rows = np.array([1, 5, 2])
    assert flops(equation(lambda x, y: x.at[rows].add(y), (9, 4), (3, 4), name="scatter-add")) == 12
    assert flops(equation(lambda x, y: x.at[rows].set(y), (9, 4), (3, 4), name="scatter")) == 0
    assert flops(equation(lambda x: x.at[rows].apply(jnp.sin), (9, 4), name="scatter")) == 12 * WEIGHTS["sin"]


def test_a_reduction_of_complex_numbers_takes_four_times_as_long():
    def reduced(x):
        return lax.reduce(x, x.dtype.type(0), lambda a, b: a * b + a, (0,))

    real, both = (equation(reduced, (6, 8), dtype=dtype) for dtype in (np.float32, np.complex64))
    assert flops(both) == 4 * flops(real)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16, np.uint8])
def test_a_narrow_random_number_takes_as_long_as_a_wide_one(dtype):
    """JAX makes a block of 64 bits for each, and drops what it does not need."""
    eqns = jaxprs.opened(jax.make_jaxpr(lambda key: jax.random.bits(key, (3, 5), dtype))(jax.random.key(0)))[0].eqns
    assert flops(eqns[-1]) == RANDOM_NUMBER * 15


@pytest.mark.parametrize("name", ["exp", "tanh", "digamma", "sqrt"])
def test_a_transcendental_function_has_its_weight_and_is_one_operation_to_people(name):
    function = getattr(lax, name)
    assert flops(equation(function, (4, 5))) == 20 * WEIGHTS[name] > 20
    assert jaxpr_flops(traced(function, (4, 5))) == 20


# ---------------------------------------------------------------- what is inside


def layer(x):
    return jnp.tanh(x @ x)


LAYER = (4, 4)

CALLS = {
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "custom_jvp": jax.custom_jvp(layer),
    "custom_vjp": jax.custom_vjp(layer),
    "two deep": jax.jit(jax.checkpoint(layer)),
}
CALLS["custom_jvp"].defjvp(lambda x, t: (layer(*x), layer(*t)))
CALLS["custom_vjp"].defvjp(lambda x: (layer(x), x), lambda x, t: (t,))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_counts_what_is_inside(name):
    alone, called = traced(layer, LAYER), equation(CALLS[name], LAYER)
    assert jaxpr_flops(traced(CALLS[name], LAYER)) == jaxpr_flops(alone)
    assert flops(called) == sum(flops(eqn) for eqn in jaxprs.opened(alone)[0].eqns)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 9))
def test_a_scan_counts_and_moves_its_body_once_per_trip(length):
    def steps(x):
        return lax.scan(lambda c, _: (jnp.sort(layer(c)), None), x, length=length)[0]

    eqn, once = (
        equation(steps, LAYER),
        equation(lambda x: lax.scan(lambda c, _: (jnp.sort(layer(c)), None), x, length=1)[0], LAYER),
    )
    assert work(eqn) == work(once).times(length)
    assert moved_bytes(eqn) == length * moved_bytes(once)


def test_branches_count_the_most_of_each_kind_of_work():
    def branch(i, x):
        return lax.switch(i, [lambda x: x @ x, jnp.tanh, jnp.negative], x)

    closed = jax.make_jaxpr(branch)(1, np.ones(LAYER, np.float32))
    (cond,) = [eqn for eqn in jaxprs.opened(closed)[0].eqns if eqn.primitive.name == "cond"]
    assert work(cond) == Work(products=128, others=16, weighted=16 * WEIGHTS["tanh"])


def test_a_branch_counts_as_its_dearest_and_a_while_as_one_trip():
    def branch(x):
        return lax.cond(True, layer, jnp.tanh, x)

    def loop(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 9, layer, x)

    once = jaxpr_flops(traced(layer, LAYER))
    assert jaxpr_flops(traced(branch, LAYER)) - once in (0, 1)  # the index is a number or a conversion
    assert jaxpr_flops(traced(loop, LAYER)) == once + 16 + 1


def test_of_a_linear_solve_one_of_its_programs_runs():
    def solved(a, b):
        return lax.custom_linear_solve(lambda x: a @ x, b, lambda _, y: lax.linalg.lu(a)[0] @ y, symmetric=True)

    n = 5
    assert jaxpr_flops(traced(solved, (n, n), (n,))) == pytest.approx(2 / 3 * n**3 + 2 * n * n)


def kernel(x, out):
    out[...] = jnp.exp(x[...])


def test_a_kernel_says_itself_what_it_computes_or_it_is_unknown():
    shape = jax.ShapeDtypeStruct((8,), np.float32)
    told = pl.CostEstimate(flops=1000, transcendentals=8, bytes_accessed=64)
    silent = equation(lambda x: pl.pallas_call(kernel, out_shape=shape, interpret=True)(x), (8,))
    speaking = equation(lambda x: pl.pallas_call(kernel, out_shape=shape, interpret=True, cost_estimate=told)(x), (8,))
    foreign = equation(jax.ffi.ffi_call("nowhere", shape), (8,))
    assert flops(silent) is flops(foreign) is None
    assert (moved_bytes(silent), moved_bytes(foreign)) == (64, 64)
    assert flops(speaking) == 1000 + 8 * WEIGHTS["exp"]
    assert moved_bytes(speaking) == 64


def test_a_program_with_an_unknown_kernel_counts_the_rest():
    shape = jax.ShapeDtypeStruct((8,), np.float32)
    assert jaxpr_flops(traced(lambda x: jax.ffi.ffi_call("nowhere", shape)(x) + x, (8,))) == 8


# ---------------------------------------------------------------- bytes


def test_an_equation_moves_what_it_reads_and_what_it_writes():
    assert moved_bytes(equation(lambda x, y: x @ y, (3, 5), (5, 7))) == F32 * (15 + 35 + 21)
    assert moved_bytes(equation(lax.sort, (3, 5))) == 2 * F32 * 15
    assert moved_bytes(equation(lambda x: x + x, (3, 5))) == 3 * F32 * 15


def test_what_picks_elements_reads_those_and_their_indices_only():
    eqn = equation(lambda x: lax.slice(x, (10,), (13,)), (1000,))
    assert moved_bytes(eqn) == 2 * F32 * 3
    rows = equation(lambda x: x.at[np.array([3, 1])].get(mode="clip"), (1000, 4), name="gather")
    assert moved_bytes(rows) == 2 * F32 * 8 + F32 * 2


def test_a_cumulative_sum_passes_over_its_rows_as_often_as_they_can_be_halved():
    assert moved_bytes(equation(lambda x: lax.cumsum(x, axis=1), (3, 16))) == 4 * 2 * F32 * 48
    assert moved_bytes(equation(lambda x: lax.cumsum(x, axis=0), (3, 16))) == 2 * 2 * F32 * 48


def test_a_call_moves_what_it_is_given_and_what_cannot_be_fused_inside():
    fused = equation(jax.jit(lambda x: jnp.exp(jnp.sin(x) * 2)), (4, 4))
    assert moved_bytes(fused) == 2 * F32 * 16
    products = equation(jax.jit(lambda x: jnp.tanh(x @ x) @ x), (4, 4))
    assert moved_bytes(products) == 2 * 3 * F32 * 16


def test_movement_in_order_is_fused_and_movement_out_of_order_is_not():
    assert all(map(is_fused, ["exp", "reshape", "broadcast_in_dim", "slice", "pad"]))
    assert not any(map(is_fused, ["transpose", "concatenate", "gather", "reduce_sum", "dot_general", "an_unknown_op"]))


# ---------------------------------------------------------------- shapes instead of an equation

FROM_SHAPES = {
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (4, 4)),
    "cumsum": (lambda x: lax.cumsum(x, axis=1), (4, 8)),
    "exp": (jnp.exp, (4, 8)),
    "fft": (lambda x: lax.fft(x, "RFFT", (8,)), (4, 8)),
    "sort": (lambda x: lax.sort(x), (4, 8)),
    "top_k": (lambda x: lax.top_k(x, 2), (4, 8)),
    "transpose": (lambda x: x.T, (4, 8)),
    "reduce_window_max": (lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2), "VALID"), (4, 8)),
}


@pytest.mark.parametrize("name", FROM_SHAPES)
def test_shapes_alone_say_as_much_as_the_equation_where_they_decide(name):
    function, shape = FROM_SHAPES[name]
    eqn = equation(function, shape, name=name)
    writes = [v.aval.shape for v in eqn.outvars]
    assert counted(name, [shape], writes) == work(eqn)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted({*WEIGHTS, *PER_ELEMENT})),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), max_size=4),
    read=st.integers(0, 3),
)
def test_any_shapes_give_a_finite_count(name, shapes, read):
    done = counted(name, shapes[:read], shapes[read:])
    assert all(math.isfinite(count) and count >= 0 for count in (done.products, done.others, done.weighted))
