"""Describe every primitive in one table.

A line of `TABLE` holds words of `WORDS`. If one operation does not take as long as one addition, it also holds how many
additions do. The sets below are read from the table. Nothing is assumed of a primitive without a line: it counts as
heavy. Effects are not in the table: each equation tells its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from jointcut.partition.program.jax.own_primitives import WHILE as WHILE

SCAN, COND = "scan", "cond"  # JAX's control flow, with `WHILE`

#: The primitive of the product of two sparse matrices, and the name on the name stack of the ops that replace it.
SPARSE_PRODUCT, SPARSE_SCOPE = "bcoo_spdot_general", "sparse_product"

#: The primitive of `checkpoint_name`.
NAME = "name"

#: Tracing puts this name on the name stack of equations under the user's `jax.checkpoint`.
CHECKPOINT_SCOPE = "jax.checkpoint"

#: The primitives of a cast, and of a barrier: a reader of one of its results waits for all of them.
CONVERSION, BARRIER = "convert_element_type", "optimization_barrier"

#: The primitives that make a reference, that read it, and that read it for the last time.
MAKES_REFERENCE, READS_REFERENCE, FREEZES_REFERENCE = "new_ref", "get", "freeze"

#: The primitives that make random bits from a key, and of a region under `jax.checkpoint`.
DRAWN, REGION = "random_bits", "remat2"

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
    "unparted": "XLA gathers its operand on each device, along whatever axis it works",
    "totals": "adds up over devices, or the like: all of them get the whole result, so its bytes pass each link twice",
    "calls": "a call that stays closed for the sake of its derivative; it is as cheap or heavy as the ops inside",
    "opens": "a call that may be replaced by the ops inside",
    "loops": "runs the program inside several times",
    "body": "holds programs that are rewritten with the one around them",
    "opaque": "a kernel whose work is unknown, unless it has a `cost_estimate`",
    "linear": "linear in all operands together: its result for sums is the sum of its results for each",
    "bilinear": "linear in each of its first two operands, given the others",
    "linear_first": "linear in its first operand, given the others",
    "zero": "makes zeros of zeros, without being linear",
    "sums": "adds to its first operand, or subtracts from it",
    "adds": "adds two arrays",
    "same": "gives the numbers of its operand, in another shape or dtype",
    "identity": "gives its operand back",
    "keeps": "its results are elements of its first operand",
    "rounds": "gives the numbers nearest to its operand in another dtype",
    "reshapes": "gives the same bytes another shape",
    "undone": "moves elements in a way that can be undone",
    "finds": "gives the place of an element",
    "compares": "tells something of each number",
    "orders": "tells which of two numbers is larger",
    "jumps": "makes integers of floats, or numbers that jump",
    "zeroes": "may put zeros between other elements",
    "masks": "makes a mask of masks, numbers and truth values",
    "by_result": "its derivative reads its own result",
    "decomposes": "gives vectors and values of a matrix: its derivative divides by differences of the values",
    "attends": "a kernel of attention",
    "indexes": "takes elements from other places, which XLA does in the loop of a reader",
    "branches": "XLA's code for it branches",
    "library": "XLA:CPU may leave it to a library of kernels",
    "misled": "other operands than its own could mislead or harm it",
    "as_given": "code of a user, a loop that might not end, a solver that may fail: never run on other operands",
    "calls_back": "calls a function of Python",
    "refers": "makes, reads or writes a reference",
    "puts": "puts arrays on other devices, or tells which they are",
    "jits": "a function under `jax.jit`",
    "ruled": "has a derivative that its user wrote",
    "encloses": "runs the one program inside once, and stays as it is",
    "fills": "gives an array that somebody fills",
}

TABLE: dict[str, str] = {
    # For each element one instruction or a short polynomial.
    "abs": "elementwise zero masks library",
    "acos": "elementwise dear 100",
    "acosh": "elementwise dear 50",
    "add": "elementwise linear sums adds masks library",
    "add_any": "elementwise linear sums adds library",
    "and": "elementwise",
    "asin": "elementwise dear zero 100",
    "asinh": "elementwise dear zero 50",
    "atan": "elementwise dear zero 100",
    "atan2": "elementwise dear 100",
    "atanh": "elementwise dear zero 50",
    "bitcast_convert_type": "elementwise zero 0",
    "cbrt": "elementwise dear by_result 100",
    "ceil": "elementwise zero library",
    "clamp": "elementwise",
    "clz": "elementwise",
    "complex": "elementwise linear",
    "conj": "elementwise linear",
    "convert_element_type": "elementwise linear same rounds jumps masks library",
    "copy": "elementwise linear same identity keeps masks 0",
    "copy_p": "elementwise renames linear",
    "cos": "elementwise dear library 20",
    "cosh": "elementwise dear 30",
    "div": "elementwise linear_first masks library 4",
    "eq": "elementwise compares",
    "eq_to": "elementwise",
    "erf": "elementwise dear zero library 20",
    "erf_inv": "elementwise dear by_result 50",
    "erfc": "elementwise dear 50",
    "exp": "elementwise dear by_result library 20",
    "exp2": "elementwise dear by_result 20",
    "expm1": "elementwise dear zero by_result library 30",
    "floor": "elementwise zero library",
    "ge": "elementwise compares orders",
    "gt": "elementwise compares orders",
    "imag": "elementwise linear",
    "integer_pow": "elementwise library",
    "is_finite": "elementwise compares",
    "le": "elementwise compares orders",
    "le_to": "elementwise",
    "log": "elementwise dear library 20",
    "log1p": "elementwise dear zero library 30",
    "log2": "elementwise dear 20",
    "logistic": "elementwise dear by_result 20",
    "lt": "elementwise compares orders",
    "lt_to": "elementwise",
    "max": "elementwise zero masks by_result library",
    "min": "elementwise zero masks by_result library",
    "mul": "elementwise bilinear masks library",
    "mulhi": "elementwise",
    "name": "elementwise linear identity keeps 0",
    "ne": "elementwise compares",
    "neg": "elementwise linear masks library",
    "nextafter": "elementwise 4",
    "not": "elementwise",
    "one_minus_square": "elementwise",
    "optimization_barrier": "elementwise renames 0",
    "or": "elementwise",
    "polynomial": "elementwise",
    "population_count": "elementwise",
    "pow": "elementwise dear by_result library 100",
    "real": "elementwise linear",
    "reduce_precision": "elementwise zero rounds",
    "rem": "elementwise 50",
    "round": "elementwise zero library",
    "rsqrt": "elementwise by_result library 10",
    "select_n": "elementwise zeroes masks",
    "shift_left": "elementwise",
    "shift_right_arithmetic": "elementwise",
    "shift_right_logical": "elementwise",
    "sign": "elementwise zero jumps masks library",
    "sin": "elementwise dear zero library 20",
    "sinh": "elementwise dear zero 50",
    "sqrt": "elementwise by_result library 4",
    "square": "elementwise zero library",
    "stop_gradient": "elementwise identity masks 0",
    "sub": "elementwise linear sums masks library",
    "tan": "elementwise dear zero by_result library 100",
    "tanh": "elementwise dear zero by_result library 20",
    "xor": "elementwise",
    # Elements copied, repeated or picked, and keys derived from keys.
    "axis_index": "moves misled",
    "broadcast": "moves repeats",
    "broadcast_in_dim": "moves repeats linear same keeps",
    "broadcast_to": "moves",
    "concatenate": "moves reorders linear indexes branches",
    "create_token": "moves",
    "dynamic_slice": "moves picks linear_first keeps indexes",
    "dynamic_update_slice": "moves reorders updates zeroes indexes branches",
    "empty": "moves",
    "expand_dims": "moves renames keeps reshapes",
    "gather": "moves reorders picks anywhere linear_first indexes",
    "iota": "moves indexes",
    "pad": "moves linear zeroes indexes",
    "pvary": "moves linear identity",
    "random_clone": "moves",
    "random_fold_in": "moves draws",
    "random_seed": "moves",
    "random_split": "moves draws",
    "random_unwrap": "moves renames",
    "random_wrap": "moves draws renames",
    "reduced_vary_cast": "moves",
    "reduced_vary_cast_p": "moves",
    "reshape": "moves renames linear same keeps reshapes undone",
    "rev": "moves linear keeps undone indexes",
    "sharding_constraint": "moves linear",
    "slice": "moves picks linear keeps indexes",
    "split": "moves linear",
    "squeeze": "moves renames linear same keeps reshapes undone",
    "stack": "moves reorders linear",
    "tile": "moves linear indexes",
    "transpose": "moves reorders linear keeps undone indexes",
    "unstack": "moves linear",
    "vary_unreduced_cast": "moves",
    "vary_unreduced_cast_p": "moves",
    "zeros_like": "moves",
    # Fewer elements come out than go in.
    "argmax": "reduces finds jumps",
    "argmin": "reduces finds jumps",
    "reduce_and": "reduces",
    "reduce_max": "reduces keeps by_result library",
    "reduce_min": "reduces keeps by_result library",
    "reduce_or": "reduces",
    "reduce_prod": "reduces by_result",
    "reduce_sum": "reduces linear masks library",
    "reduce_xor": "reduces",
    "reduce": "by_body",
    "cumlogsumexp": "cumulates 50",
    "cummax": "cumulates keeps",
    "cummin": "cumulates keeps",
    "cumprod": "cumulates",
    "cumsum": "cumulates linear",
    "approx_top_k": "sorts jumps 20",
    "sort": "sorts jumps 200",
    "top_k": "sorts jumps unparted 20",
    "reduce_window": "windows by_body",
    "reduce_window_max": "windows",
    "reduce_window_min": "windows",
    "reduce_window_sum": "windows linear",
    "select_and_gather_add": "windows linear_first",
    "select_and_scatter": "windows 200",
    "select_and_scatter_add": "windows linear_first zeroes 200",
    "scatter": "scatters updates by_body zeroes",
    "scatter-add": "scatters updates sums zeroes",
    "scatter-max": "scatters updates",
    "scatter-min": "scatters updates",
    "scatter-mul": "scatters updates linear_first",
    "scatter-sub": "scatters updates sums",
    "scatter_add": "scatters updates",
    # Products, and linear algebra.
    "conv_general_dilated": "multiplies packs bilinear 20",
    "dot_general": "multiplies packs bilinear",
    "dot_product_attention_fp8_fwd_wrapper": "multiplies attends",
    "dot_product_attention_fwd_wrapper": "multiplies attends",
    "ragged_dot_general": "multiplies bilinear",
    "scaled_dot": "multiplies",
    "symmetric_product": "multiplies",
    "cholesky": "solves by_result as_given",
    "cholesky_update": "solves 4",
    "eig": "solves",
    "eigh": "solves by_result decomposes",
    "geqp3": "solves",
    "geqrf": "solves",
    "hessenberg": "solves",
    "householder_product": "solves",
    "lu": "solves",
    "ormqr": "solves",
    "qr": "solves by_result",
    "schur": "solves",
    "svd": "solves by_result decomposes",
    "triangular_solve": "solves by_result as_given",
    "tridiagonal": "solves",
    "tridiagonal_solve": "solves as_given",
    "custom_linear_solve": "solves as_given",
    "fft": "transforms linear",
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
    "all_gather": "communicates linear",
    "all_gather_invariant": "communicates",
    "all_gather_reduced": "communicates",
    "all_to_all": "communicates linear",
    "pbroadcast": "communicates",
    "pgather": "communicates",
    "pmax": "communicates totals",
    "pmin": "communicates totals",
    "ppermute": "communicates linear",
    "psum": "communicates totals linear",
    "psum2": "communicates totals",
    "psum_invariant": "communicates totals linear",
    "psum_scatter": "communicates",
    "ragged_all_to_all": "communicates",
    "reduce_scatter": "communicates linear",
    "unreduced_psum": "communicates",
    "unreduced_reduce_scatter": "communicates",
    # Programs inside, and kernels.
    "closed_call": "calls opens body",
    "core_call": "calls opens body",
    "custom_jvp_call": "calls body ruled",
    "custom_vjp_call": "calls body ruled",
    "custom_vjp_call_jaxpr": "calls",
    "jit": "calls opens body jits",
    "jointcut_call": "calls body",
    "jointcut_half": "calls opens body",
    "jointcut_waiting": "calls",
    "pjit": "calls opens body jits",
    "scan": "loops body",
    "while": "loops body misled as_given",
    "cond": "body misled",
    "remat2": "body encloses",
    "checkpoint": "encloses",
    "shard_map": "encloses",
    "ffi_call": "opaque misled",
    "pallas_call": "opaque",
    # References, functions of Python, devices.
    "addupdate": "refers",
    "freeze": "refers",
    "get": "refers",
    "new_ref": "refers",
    "swap": "refers",
    "debug_callback": "calls_back",
    "debug_print": "calls_back",
    "io_callback": "calls_back",
    "pure_callback": "calls_back misled as_given",
    "device_put": "puts linear",
    "platform_index": "puts",
    "reshard": "puts linear",
    "empty2": "fills",
}


@dataclass(frozen=True)
class Primitive:
    """The facts of one primitive: words of `WORDS`, and the additions that take as long as one operation of it."""

    name: str
    words: frozenset[str]
    additions: float = 1.0

    @classmethod
    def of(cls, name: str, line: str) -> Primitive:
        """Read a line of the table."""
        *words, last = line.split()
        return cls(name, frozenset(words), float(last)) if last.isdecimal() else cls(name, frozenset([*words, last]))


#: Every primitive of the table, by name.
PRIMITIVES = {name: Primitive.of(name, line) for name, line in TABLE.items()}


def those(word: str) -> frozenset[str]:
    """The primitives whose lines hold a word of `WORDS`."""
    return frozenset(primitive.name for primitive in PRIMITIVES.values() if word in primitive.words)


ELEMENTWISE, DEAR, MOVEMENT, CUMULATIVE = those("elementwise"), those("dear"), those("moves"), those("cumulates")
RENAMING, REPEATING, REORDERING = those("renames"), those("repeats"), those("reorders")
PICKING, ANYWHERE, UPDATING, SCATTERS = those("picks"), those("anywhere"), those("updates"), those("scatters")
REDUCTIONS, BY_BODY, SERIES, TRANSFORMS = those("reduces"), those("by_body"), those("series"), those("transforms")
PRODUCTS, PACKING, SOLVING, ATTENTION = those("multiplies"), those("packs"), those("solves"), those("attends")
DRAWING, COLLECTIVES, OPAQUE, MISLED = those("draws"), those("communicates"), those("opaque"), those("misled")
CALLS, OPENED, LOOPS, WITH_BODIES = those("calls"), those("opens"), those("loops"), those("body")
JITS, RULED, ENCLOSING, AS_GIVEN = those("jits"), those("ruled"), those("encloses"), those("as_given")
LINEAR, BILINEAR, LINEAR_FIRST = those("linear"), those("bilinear"), those("linear_first")
SUMS, ADDING, SAME_NUMBERS, IDENTITY = those("sums"), those("adds"), those("same"), those("identity")
KEEPING, ROUNDING, RESHAPING, UNDONE = those("keeps"), those("rounds"), those("reshapes"), those("undone")
COMPARING, ORDERS, JUMPING, MASKS = those("compares"), those("orders"), those("jumps"), those("masks")
MAKES_ZEROS, BY_RESULT, DECOMPOSING = those("zeroes"), those("by_result"), those("decomposes")
INDEXING, BRANCHING, LIBRARY, TOTALS = those("indexes"), those("branches"), those("library"), those("totals")
CALLING_BACK, UNPARTED = those("calls_back"), those("unparted")

#: Reductions whose results for parts are joined by one more; primitives that make zeros from zeros.
FOLDS, ZERO_OF_ZEROS = REDUCTIONS - those("finds"), LINEAR | those("zero")

#: Primitives that are run again rather than saved; those that give a part of a value, or the value in another order.
CHEAP, VIEWS = ELEMENTWISE | MOVEMENT, RENAMING | {"slice", "transpose"}

#: Primitives that XLA computes again within the loop of each reader.
FUSED = ELEMENTWISE - DEAR

#: The number of additions that take as long as one operation of a primitive, where it is not one. These are classes.
#: They were measured on XLA:CPU (one `exp` takes 20 to 40 fused additions); calls of the C library were put lower. A
#: sort compares by branches that a CPU cannot predict. The weight of a convolution is used only for depthwise ones.
WEIGHTS = {name: primitive.additions for name, primitive in PRIMITIVES.items() if primitive.additions != 1.0}
