"""Describe every primitive in one table.

A line of `TABLE` holds words of `WORDS` and, where one operation does not take as long as one addition, the number of
additions that do. The sets below are read from the table. Nothing is assumed of a primitive without a line: it counts
as heavy. Effects are not in the table: each equation tells its own.
"""

from __future__ import annotations

#: The primitive of `checkpoint_name`.
NAME = "name"

#: Tracing puts this name on the name stack of equations under the user's `jax.checkpoint`.
CHECKPOINT_SCOPE = "jax.checkpoint"

#: The primitive of a barrier: a reader of one of its results waits for all of them.
BARRIER = "optimization_barrier"

#: The primitive that makes random bits of a key.
DRAWN = "random_bits"

#: The primitive of a region under `jax.checkpoint`.
REGION = "remat2"

#: An op of JAX's newer kind, such as a region under `jax_remat3`.
HIGH = "call_hi_primitive"

WORDS: dict[str, str] = {
    "elementwise": "one instruction or a short polynomial for each element (not a series, as `lgamma` is)",
    "dear": "a polynomial or more for each element: XLA does not compute it again within the loop of each reader",
    "moves": "copies, repeats or picks elements, or derives keys from keys",
    "renames": "gives the same bytes another name",
    "repeats": "repeats its operand, which is smaller: a barrier on the result is better put on the operand",
    "reorders": "takes elements from several arrays or in another order: a product behind it reads a copy",
    "picks": "reads no more of its first operand than it returns",
    "anywhere": "reads elements from anywhere, so that the cache does not help",
    "updates": "writes into an operand if nothing reads that later",
    "reduces": "reads more than it returns: saving is cheap, and running it again breaks a fusion in two",
    "cumulates": "sums up along a dimension, or the like, and keeps all partial results",
    "sorts": "orders the elements of a row",
    "windows": "looks at windows that slide over an array",
    "scatters": "puts updates in their places",
    "by_body": "does to elements what the program inside says, and counts as much work as that program",
    "multiplies": "a matrix product or a convolution, or made of these",
    "packs": "brings operands into the layout that its kernel likes",
    "solves": "linear algebra, by elimination or reflections",
    "transforms": "a Fourier transform",
    "series": "a series or an iteration for each element",
    "draws": "makes random numbers, or keys for others",
    "communicates": "talks to other devices, which must all take part",
    "calls": "a call that stays closed for the sake of its derivative; it is as cheap or heavy as the ops inside",
    "opens": "a call that may be replaced by the ops inside",
    "loops": "runs the program inside several times",
    "body": "holds programs that are rewritten with the one around them",
    "opaque": "a kernel whose work is unknown, unless it has a `cost_estimate`",
}

TABLE: dict[str, str] = {
    # For each element one instruction or a short polynomial.
    "abs": "elementwise",
    "acos": "elementwise dear 100",
    "acosh": "elementwise dear 50",
    "add": "elementwise",
    "add_any": "elementwise",
    "and": "elementwise",
    "asin": "elementwise dear 100",
    "asinh": "elementwise dear 50",
    "atan": "elementwise dear 100",
    "atan2": "elementwise dear 100",
    "atanh": "elementwise dear 50",
    "bitcast_convert_type": "elementwise 0",
    "cbrt": "elementwise dear 100",
    "ceil": "elementwise",
    "clamp": "elementwise",
    "clz": "elementwise",
    "complex": "elementwise",
    "conj": "elementwise",
    "convert_element_type": "elementwise",
    "copy": "elementwise 0",
    "copy_p": "elementwise renames",
    "cos": "elementwise dear 20",
    "cosh": "elementwise dear 30",
    "div": "elementwise 4",
    "eq": "elementwise",
    "eq_to": "elementwise",
    "erf": "elementwise dear 20",
    "erf_inv": "elementwise dear 50",
    "erfc": "elementwise dear 50",
    "exp": "elementwise dear 20",
    "exp2": "elementwise dear 20",
    "expm1": "elementwise dear 30",
    "floor": "elementwise",
    "ge": "elementwise",
    "gt": "elementwise",
    "imag": "elementwise",
    "integer_pow": "elementwise",
    "is_finite": "elementwise",
    "le": "elementwise",
    "le_to": "elementwise",
    "log": "elementwise dear 20",
    "log1p": "elementwise dear 30",
    "log2": "elementwise dear 20",
    "logistic": "elementwise dear 20",
    "lt": "elementwise",
    "lt_to": "elementwise",
    "max": "elementwise",
    "min": "elementwise",
    "mul": "elementwise",
    "mulhi": "elementwise",
    "name": "elementwise 0",
    "ne": "elementwise",
    "neg": "elementwise",
    "nextafter": "elementwise 4",
    "not": "elementwise",
    "one_minus_square": "elementwise",
    "optimization_barrier": "elementwise renames 0",
    "or": "elementwise",
    "polynomial": "elementwise",
    "population_count": "elementwise",
    "pow": "elementwise dear 100",
    "real": "elementwise",
    "reduce_precision": "elementwise",
    "rem": "elementwise 50",
    "round": "elementwise",
    "rsqrt": "elementwise 10",
    "select_n": "elementwise",
    "shift_left": "elementwise",
    "shift_right_arithmetic": "elementwise",
    "shift_right_logical": "elementwise",
    "sign": "elementwise",
    "sin": "elementwise dear 20",
    "sinh": "elementwise dear 50",
    "sqrt": "elementwise 4",
    "square": "elementwise",
    "stop_gradient": "elementwise 0",
    "sub": "elementwise",
    "tan": "elementwise dear 100",
    "tanh": "elementwise dear 20",
    "xor": "elementwise",
    # Elements copied, repeated or picked, and keys derived from keys.
    "axis_index": "moves",
    "broadcast": "moves repeats",
    "broadcast_in_dim": "moves repeats",
    "broadcast_to": "moves",
    "concatenate": "moves reorders",
    "create_token": "moves",
    "dynamic_slice": "moves picks",
    "dynamic_update_slice": "moves reorders updates",
    "empty": "moves",
    "expand_dims": "moves renames",
    "gather": "moves reorders picks anywhere",
    "iota": "moves",
    "pad": "moves",
    "pvary": "moves",
    "random_clone": "moves",
    "random_fold_in": "moves draws",
    "random_seed": "moves",
    "random_split": "moves draws",
    "random_unwrap": "moves renames",
    "random_wrap": "moves draws renames",
    "reduced_vary_cast": "moves",
    "reduced_vary_cast_p": "moves",
    "reshape": "moves renames",
    "rev": "moves",
    "sharding_constraint": "moves",
    "slice": "moves picks",
    "split": "moves",
    "squeeze": "moves renames",
    "stack": "moves reorders",
    "tile": "moves",
    "transpose": "moves reorders",
    "unstack": "moves",
    "vary_unreduced_cast": "moves",
    "vary_unreduced_cast_p": "moves",
    "zeros_like": "moves",
    # Fewer elements come out than go in.
    "argmax": "reduces",
    "argmin": "reduces",
    "reduce_and": "reduces",
    "reduce_max": "reduces",
    "reduce_min": "reduces",
    "reduce_or": "reduces",
    "reduce_prod": "reduces",
    "reduce_sum": "reduces",
    "reduce_xor": "reduces",
    "reduce": "by_body",
    "cumlogsumexp": "cumulates 50",
    "cummax": "cumulates",
    "cummin": "cumulates",
    "cumprod": "cumulates",
    "cumsum": "cumulates",
    "approx_top_k": "sorts 20",
    "sort": "sorts 200",
    "top_k": "sorts 20",
    "reduce_window": "windows by_body",
    "reduce_window_max": "windows",
    "reduce_window_min": "windows",
    "reduce_window_sum": "windows",
    "select_and_gather_add": "windows",
    "select_and_scatter": "windows 200",
    "select_and_scatter_add": "windows 200",
    "scatter": "scatters updates by_body",
    "scatter-add": "scatters updates",
    "scatter-max": "scatters updates",
    "scatter-min": "scatters updates",
    "scatter-mul": "scatters updates",
    "scatter-sub": "scatters updates",
    "scatter_add": "scatters updates",
    # Products, and linear algebra.
    "conv_general_dilated": "multiplies packs 20",
    "dot_general": "multiplies packs",
    "dot_product_attention_fp8_fwd_wrapper": "multiplies",
    "dot_product_attention_fwd_wrapper": "multiplies",
    "ragged_dot_general": "multiplies",
    "scaled_dot": "multiplies",
    "symmetric_product": "multiplies",
    "cholesky": "solves",
    "cholesky_update": "solves 4",
    "eig": "solves",
    "eigh": "solves",
    "geqp3": "solves",
    "geqrf": "solves",
    "hessenberg": "solves",
    "householder_product": "solves",
    "lu": "solves",
    "ormqr": "solves",
    "qr": "solves",
    "schur": "solves",
    "svd": "solves",
    "triangular_solve": "solves",
    "tridiagonal": "solves",
    "fft": "transforms",
    # For each element a series or an iteration; random numbers.
    "bessel_i0e": "series 50",
    "bessel_i1e": "series 50",
    "digamma": "series 100",
    "igamma": "series 1000",
    "igamma_grad_a": "series 1000",
    "igammac": "series 1000",
    "lgamma": "series 100",
    "polygamma": "series 1000",
    "random_gamma": "series draws 1000",
    "regularized_incomplete_beta": "series 4000",
    "zeta": "series 4000",
    "random_bits": "draws",
    "rng_bit_generator": "draws",
    "threefry2x32": "draws",
    # Among devices.
    "all_gather": "communicates",
    "all_gather_invariant": "communicates",
    "all_gather_reduced": "communicates",
    "all_to_all": "communicates",
    "pbroadcast": "communicates",
    "pgather": "communicates",
    "pmax": "communicates",
    "pmin": "communicates",
    "ppermute": "communicates",
    "psum": "communicates",
    "psum2": "communicates",
    "psum_invariant": "communicates",
    "psum_scatter": "communicates",
    "ragged_all_to_all": "communicates",
    "reduce_scatter": "communicates",
    "unreduced_psum": "communicates",
    "unreduced_reduce_scatter": "communicates",
    # Programs inside, and kernels.
    "closed_call": "calls opens body",
    "core_call": "calls opens body",
    "custom_jvp_call": "calls body",
    "custom_vjp_call": "calls body",
    "custom_vjp_call_jaxpr": "calls",
    "jit": "calls opens body",
    "jointcut_call": "calls body",
    "jointcut_half": "calls opens body",
    "jointcut_waiting": "calls",
    "pjit": "calls opens body",
    "scan": "loops body",
    "while": "loops body",
    "cond": "body",
    "remat2": "body",
    "ffi_call": "opaque",
    "pallas_call": "opaque",
}


def those(word: str) -> frozenset[str]:
    """The primitives whose line in the table holds a word."""
    return frozenset(name for name, line in TABLE.items() if word in line.split())


ELEMENTWISE, DEAR, MOVEMENT = those("elementwise"), those("dear"), those("moves")
RENAMING, REPEATING, REORDERING = those("renames"), those("repeats"), those("reorders")
PICKING, ANYWHERE, UPDATING = those("picks"), those("anywhere"), those("updates")
REDUCTIONS, CUMULATIVE, BY_BODY = those("reduces"), those("cumulates"), those("by_body")
PRODUCTS, PACKING, SOLVING = those("multiplies"), those("packs"), those("solves")
DRAWING, COLLECTIVES, OPAQUE = those("draws"), those("communicates"), those("opaque")
CALLS, OPENED, LOOPS, WITH_BODIES = those("calls"), those("opens"), those("loops"), those("body")

#: Primitives that are run again rather than saved.
CHEAP = ELEMENTWISE | MOVEMENT

#: Primitives that XLA computes again within the loop of each reader.
FUSED = ELEMENTWISE - DEAR

#: How many additions take as long as one operation of a primitive, where the number is not one. These are classes, not
#: exact figures. They were measured on XLA:CPU (where one `exp` takes as long as 20 to 40 fused additions); primitives
#: that call the C library there were put lower. A sort compares by branches that a CPU cannot predict. The weight of a
#: convolution is used for depthwise ones only.
WEIGHTS = {name: float(line.split()[-1]) for name, line in TABLE.items() if line.split()[-1].isdecimal()}
