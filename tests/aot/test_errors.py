"""Each mistake that a user can make gets a message with the place, the cause and the cure, of JAX's own type."""

from __future__ import annotations

import collections
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jointcut import aot
from jointcut.partition import Plan
from jointcut.partition.errors import (
    CallError,
    DerivativeError,
    JointcutError,
    PlanError,
    StrategyError,
    TraceError,
)

W = jnp.ones((3, 2))
X = jnp.ones((4, 3))


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]))


def scaled(w, by):
    return jnp.sum(w) * by


def raised(kind, also, run, *args, **kwargs):
    """The error that a call raises, which is of `kind` and of all types in `also`."""
    with pytest.raises(JointcutError) as caught:
        run(*args, **kwargs)
    assert type(caught.value) is kind
    for other in also:
        assert isinstance(caught.value, other)
    return caught.value


def same_type_as_jax(error, run, *args, **kwargs):
    """Whether code that catches what JAX raises for the same mistake catches this too."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        run(*args, **kwargs)
    return isinstance(error, caught.type)


# ---------------------------------------------------------------- arguments

WAYS_IN = ("__call__", "value_and_grad", "grad", "vjp", "trace")


@pytest.mark.parametrize("way", ["__call__", "vjp", "jit"])
def test_what_is_no_array_reaches_the_function_which_is_told_where_it_fails(way):
    function = aot.function(loss)
    call = (
        jax.jit(lambda x: function({"w": "three"}, x))
        if way == "jit"
        else partial(getattr(function, way), {"w": "three"})
    )
    with pytest.raises(TypeError, match=r"unsupported operand") as caught:
        call(X)
    told = "This happened while jointcut traced loss. It passes on what is no array as it is: args[0]['w'] is a str."
    assert told in caught.value.__notes__


@pytest.mark.parametrize("way", ["value_and_grad", "grad", "trace"])
@pytest.mark.parametrize(("given", "dtype"), [(3, "int32"), (True, "bool"), (np.ones((3, 2), np.int8), "int8")])
def test_an_integer_to_differentiate(way, given, dtype):
    error = raised(TraceError, [], getattr(aot.function(loss), way), {"w": given}, X)
    some = "Say which arrays are differentiated, as filter=lambda x: x.dtype == jnp.float32"
    assert str(error) == (
        f"args[0]['w'] is {dtype}: value_and_grad differentiates floating-point arguments.\n"
        f"{'Leave it out of argnums=0' if given is True else some}, convert it, or use vjp."
    )
    assert same_type_as_jax(error, jax.grad(loss), {"w": given}, X)
    error = raised(TraceError, [], getattr(aot.function(jnp.sum), way), given)
    assert str(error) == (
        f"args[0] is {dtype}: value_and_grad differentiates floating-point arguments.\n"
        "Leave it out of argnums=0, convert it, or use vjp."
    )


@pytest.mark.parametrize("way", ["explain", "trace", "grad"])
def test_no_arguments_at_all(way):
    error = raised(TraceError, [], getattr(aot.function(loss), way))
    assert str(error) == (
        "argnums=0 needs at least 1 positional argument, but got 0.\nPass the arguments of the function."
    )


def test_an_integer_to_differentiate_in_jax_grad_is_jaxs_own_error():
    with pytest.raises(TypeError, match=r"grad requires real- or complex-valued inputs .* but got int32"):
        jax.grad(aot.function(loss))({"w": jnp.ones((3, 2), int)}, X)


def test_missing_and_superfluous_arguments_are_pythons_own_errors():
    with pytest.raises(TypeError, match=re.escape("loss() missing 1 required positional argument: 'x'")):
        aot.function(loss).value_and_grad({"w": W})
    with pytest.raises(TypeError, match=re.escape("loss() takes 2 positional arguments but 3 were given")):
        aot.function(loss).value_and_grad({"w": W}, X, X)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(("argnums", "needed"), [(2, 3), ((0, 5), 6)])
def test_argnums_out_of_range(argnums, needed):
    error = raised(TraceError, [], aot.function(loss, argnums=argnums).value_and_grad, {"w": W}, X)
    assert str(error) == (
        f"argnums={argnums} needs at least {needed} positional arguments, but got 2.\n"
        "Pass it by position, or change argnums."
    )
    assert same_type_as_jax(error, jax.value_and_grad(loss, argnums), {"w": W}, X)


def test_a_differentiated_argument_passed_by_keyword():
    error = raised(TraceError, [], aot.function(loss).grad, params={"w": W}, x=X)
    assert str(error) == (
        "argnums=0 needs at least 1 positional argument, but got 0.\nPass it by position, or change argnums."
    )
    assert same_type_as_jax(error, jax.grad(loss), params={"w": W}, x=X)


@pytest.mark.parametrize("argnums", ["params", 1.0, (0, "x"), True])
def test_argnums_that_are_no_integers(argnums):
    error = raised(TraceError, [TypeError], aot.function, loss, argnums=argnums)
    held = argnums[1] if isinstance(argnums, tuple) else argnums
    assert str(error) == (
        f"argnums holds {held!r}, not an integer.\nGive the position of an argument, or a tuple of positions."
    )


@pytest.mark.parametrize("static", [1, (1,), (0, 1)])
def test_an_argument_both_static_and_differentiated(static):
    error = raised(TraceError, [TypeError], aot.function, scaled, argnums=1, static_argnums=static)
    assert str(error) == (
        "argnums and static_argnums both name position 1.\n"
        "Take it out of one of the two: a static argument is a Python value and has no gradient."
    )


@pytest.mark.parametrize("decorate", [aot.function, aot.function(argnums=0)], ids=["bare", "with options"])
def test_something_that_is_no_function(decorate):
    error = raised(TraceError, [], decorate, 3)
    assert str(error) == (
        "aot.function was given a int, not a function.\n"
        "Pass a function: aot.function(f), or @aot.function above its definition."
    )
    assert same_type_as_jax(error, jax.jit, 3)


@pytest.mark.parametrize("way", ["__call__", "value_and_grad", "vjp"])
def test_a_static_argument_without_hash_by_position(way):
    error = raised(CallError, [], getattr(aot.function(scaled, static_argnums=1), way), W, [2.0])
    assert str(error) == (
        "args[1] is static but a list, which has no hash.\n"
        "Pass a tuple instead of a list, a frozen dataclass instead of a dict, or make it dynamic."
    )


def test_a_static_argument_without_hash_by_name():
    error = raised(CallError, [], aot.function(scaled, static_argnames="by").value_and_grad, W, by={"a": 1})
    assert str(error) == (
        "kwargs['by'] is static but a dict, which has no hash.\n"
        "Pass a tuple instead of a list, a frozen dataclass instead of a dict, or make it dynamic."
    )


# ---------------------------------------------------------------- strategies

KNOWN = "Known names: 'best', 'min_cut', 'save_all'."
WELCOME = "A function Graph -> Plan is welcome as well."


@pytest.mark.parametrize(
    ("name", "hint"), [("min-cut", " Did you mean 'min_cut'?"), ("greedy", ""), (None, "")], ids=str
)
def test_an_unknown_strategy(name, hint):
    error = raised(StrategyError, [ValueError], aot.function, loss, strategy=name)
    assert str(error) == f"strategy {name!r} is unknown.\n{KNOWN}{hint} {WELCOME}"


def test_an_unknown_strategy_at_the_stage():
    error = raised(StrategyError, [ValueError], aot.function(loss).trace({"w": W}, X).partition, "saveall")
    assert str(error) == f"strategy 'saveall' is unknown.\n{KNOWN} Did you mean 'save_all'? {WELCOME}"


def returns_a_list(graph):
    return [v.id for v in graph.values]


def test_a_strategy_that_returns_no_plan():
    error = raised(StrategyError, [ValueError], aot.function(loss, strategy=returns_a_list).grad, {"w": W}, X)
    assert str(error) == (
        "strategy returns_a_list returned list, not a Plan.\n"
        "Return Plan.of(graph, saved=[...]) from jointcut.partition."
    )


def test_what_a_strategy_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        aot.function(loss).trace({"w": W}, X).partition(lambda graph: 1 // 0)


def looped(x):
    return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 3)[0] ** 2)


def test_a_plan_that_does_not_close():
    traced = aot.function(looped).trace(X)
    error = raised(PlanError, [ValueError], traced.partition, lambda graph: Plan.of(graph, []))
    lines = str(error).split("\n")
    assert re.fullmatch(
        r"%\d+:float32\[4,3\] \(loop at \S*test_errors.py:\d+ \(looped\)\) "
        r"is neither saved nor can it be recomputed\.",
        lines[0],
    )
    assert lines[1].startswith("Save it, or save what the backward computes from it. It is not recomputed because ")


def test_a_plan_that_saves_a_gradient():
    traced = aot.function(loss).trace({"w": W}, X)
    last = len(traced.graph.values) - 1
    error = raised(PlanError, [ValueError], traced.partition, lambda graph: Plan.of(graph, [last]))
    assert str(error) == (
        f"plan.saved[%{last}] does not exist in the forward.\n"
        "Save values of the forward only: see Graph.values and Value.maker."
    )


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("way", ["value_and_grad", "grad"])
@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda x: x * 2, "float32[4,3]"),
        (lambda x: jnp.argmax(x), "int32[]"),
        (lambda x: jnp.sum(x).astype(jnp.complex64), "complex64[]"),
        (lambda x: (jnp.sum(x), jnp.sum(x)), "float32[], float32[]"),
        (lambda x: None, "nothing"),
    ],
    ids=["no scalar", "integer", "complex", "pair", "None"],
)
def test_a_loss_that_is_no_real_number(way, function, returned):
    error = raised(TraceError, [], getattr(aot.function(function), way), X)
    assert str(error) == (
        f"<lambda> returned {returned}: value_and_grad needs a real scalar.\n"
        "Reduce it to one real number (jnp.mean, jnp.sum), return extras as aux with has_aux=True, or use vjp."
    )
    assert same_type_as_jax(error, jax.value_and_grad(function), X)


def test_a_loss_that_is_no_real_number_inside_jit():
    error = raised(TraceError, [TypeError], jax.jit(aot.function(lambda x: x * 2).value_and_grad), X)
    assert str(error).startswith("<lambda> returned float32[4,3]: value_and_grad needs a real scalar.\n")


# ---------------------------------------------------------------- compiled programs

SIGNATURE = "Trace and compile for this signature too, or call the function itself, which does so by need."


@pytest.fixture(scope="module")
def compiled():
    return aot.function(loss).trace({"w": W}, X).partition().compile()


@pytest.mark.parametrize("way", ["value_and_grad", "forward"])
@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        (({"w": jnp.ones((3, 5))}, X), {}, "args[0]['w'] is float32[3,5], but float32[3,2] was traced."),
        (({"w": W}, X.astype(jnp.bfloat16)), {}, "args[1] is bfloat16[4,3], but float32[4,3] was traced."),
        (({"w": W, "b": W}, X), {}, "The arguments hold args[0]['b'], which was not there when traced."),
        (({}, X), {}, "The arguments lack args[0]['w'], which was there when traced."),
        (({"w": W},), {}, "The arguments lack args[1], which was there when traced."),
        (({"w": W}, X, X), {}, "The arguments hold args[2], which was not there when traced."),
        (({"w": W},), {"x": X}, "The arguments hold kwargs['x'], which was not there when traced."),
    ],
    ids=["shape", "dtype", "more leaves", "fewer leaves", "missing", "superfluous", "by keyword"],
)
def test_a_call_that_a_compiled_program_was_not_made_for(compiled, way, args, kwargs, complaint):
    error = raised(CallError, [], getattr(compiled, way), *args, **kwargs)
    assert str(error) == f"{complaint}\n{SIGNATURE}"
    plain = jax.jit(loss).lower({"w": W}, X).compile()
    assert same_type_as_jax(error, plain, *args, **kwargs)


def test_a_compiled_program_called_with_something_else_than_arrays(compiled):
    error = raised(CallError, [TypeError], compiled.value_and_grad, {"w": "three"}, X)
    assert str(error) == (
        "The arguments have a str at args[0]['w'], where an array was traced.\n"
        "Trace and compile for this signature too, or call the function itself, which does so by need."
    )


@pytest.mark.parametrize("executables", [0, 3, "1"])
def test_a_wrong_number_of_executables(executables):
    cut = aot.function(loss).trace({"w": W}, X).partition()
    error = raised(CallError, [], cut.compile, executables=executables)
    assert str(error) == f"executables is {executables!r}.\nGive 1, 2, or nothing."


# ---------------------------------------------------------------- cotangents

COTANGENT = "Give a cotangent with the structure, shapes and dtypes of the output (float0 or zeros for integers)."


@pytest.fixture(scope="module")
def pullback():
    return aot.function(lambda w: {"a": w * 2, "n": jnp.arange(3)}).vjp(W)[1]


FLOAT0 = np.zeros(3, jax.dtypes.float0)


@pytest.mark.parametrize("cotangent", [(W, FLOAT0), {"a": W}, None], ids=["tuple", "part", "None"])
def test_a_cotangent_of_another_structure(pullback, cotangent):
    error = raised(CallError, [], pullback, cotangent)
    given = jax.tree.structure(cotangent)
    assert str(error) == (
        f"The cotangent has the structure {given}, the output PyTreeDef({{'a': *, 'n': *}}).\n{COTANGENT}"
    )


def test_a_cotangent_of_another_shape(pullback):
    error = raised(CallError, [], pullback, {"a": jnp.ones(3), "n": FLOAT0})
    assert re.fullmatch(
        r"cotangent\['a'\] is float32\[3\], the output float32\[3, ?2\]\.\n" + re.escape(COTANGENT), str(error)
    )


def test_a_cotangent_of_another_dtype(pullback):
    error = raised(CallError, [], pullback, {"a": W.astype(jnp.bfloat16), "n": FLOAT0})
    assert re.fullmatch(
        r"cotangent\['a'\] is bfloat16\[3, ?2\], the output float32\[3, ?2\]\.\n" + re.escape(COTANGENT), str(error)
    )


# ---------------------------------------------------------------- inside the function

NOTE = (
    "This happened while jointcut traced {}. A traced value has a shape and a dtype but no number yet. {} "
    "What decides and is a Python value can be passed as such: static_argnums."
)


def branches(x):
    return x if x > 0 else -x


def counts(x):
    return jnp.sum(jnp.ones(int(x))) * x


def leaves_for_numpy(x):
    return jnp.asarray(np.asarray(x))


def transformed(way, function):
    made = aot.function(function)
    return {"jax.grad": lambda: jax.grad(made), "jax.jit": lambda: jax.jit(made)}.get(way, lambda: getattr(made, way))()


@pytest.mark.parametrize("way", ["value_and_grad", "grad", "vjp", "trace", "jax.grad", "jax.jit"])
@pytest.mark.parametrize(
    ("function", "kind", "cure"),
    [
        (
            branches,
            jax.errors.TracerBoolConversionError,
            "Choose between values with jnp.where, between branches with jax.lax.cond.",
        ),
        (
            counts,
            jax.errors.ConcretizationTypeError,
            "Do not convert it to a Python number, nor keep it outside the function.",
        ),
        (leaves_for_numpy, jax.errors.TracerArrayConversionError, "Compute with jax.numpy in the place of numpy."),
    ],
)
def test_a_traced_value_used_as_a_python_value(way, function, kind, cure):
    with pytest.raises(kind) as caught:
        transformed(way, function)(1.0)
    assert caught.type is kind
    assert caught.value.__notes__.count(NOTE.format(function.__name__, cure)) == 1


def test_a_tracer_kept_out_of_sight_is_noticed_where_it_is_used():
    """What the function does not lead to (here: what a deque holds) is not looked at."""
    kept = collections.deque()

    def keeps(x):
        kept.append(x * 2)
        return x * 3

    aot.function(keeps).value_and_grad(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="had a side effect"):
        kept[0] + 1

    def reads(x):
        return x * kept[0]

    with pytest.raises(jax.errors.UnexpectedTracerError, match="had a side effect"):
        aot.function(reads).value_and_grad(1.0)


def test_nothing_of_ours_leaks_a_tracer():
    made = aot.function(loss)
    with jax.checking_leaks():
        made.value_and_grad({"w": W}, X)
        made.vjp({"w": W}, X)[1](1.0)
        jax.grad(made)({"w": W}, X)


opaque_p = Primitive("opaque")
opaque_p.def_impl(lambda x: x)
opaque_p.def_abstract_eval(lambda x: x)


def opaque_loss(x):
    return jnp.sum(opaque_p.bind(x) * 2)


@pytest.mark.parametrize("way", ["value_and_grad", "grad", "vjp", "trace", "jax.grad"])
def test_a_primitive_without_derivative(way):
    error = raised(DerivativeError, [TypeError], transformed(way, opaque_loss), X)
    line = opaque_loss.__code__.co_firstlineno + 1
    assert str(error) == (
        f"opaque_loss cannot be differentiated at {__file__}:{line} (opaque_loss): "
        "Differentiation rule for 'opaque' not implemented\n"
        "Give it a derivative with jax.custom_vjp, or keep it out of the path by lax.stop_gradient."
    )
    assert same_type_as_jax(error, jax.grad(opaque_loss), X)
    assert isinstance(error.__cause__, NotImplementedError)


def called_back(x):
    return jnp.sum(jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


CALLED_BACK = {
    "plainly": called_back,
    "in jit": lambda x: jax.jit(called_back)(x),
    "in a scan": lambda x: lax.scan(lambda c, _: (c * called_back(x * c), None), x[0, 0], None, length=2)[0],
    "in a branch": lambda x: lax.cond(x[0, 0] > 0, called_back, jnp.sum, x),
    "in a checkpoint": lambda x: jax.checkpoint(called_back)(x),
}


@pytest.mark.parametrize("way", ["grad", "vjp", "trace", "jax.grad"])
@pytest.mark.parametrize("function", CALLED_BACK.values(), ids=CALLED_BACK)
def test_a_callback_without_derivative_is_told_with_its_line(way, function):
    error = raised(DerivativeError, [ValueError], transformed(way, function), X)
    line = called_back.__code__.co_firstlineno + 1
    assert str(error) == (
        f"{function.__name__} cannot be differentiated at {__file__}:{line} (called_back): {error.__cause__}\n"
        "Give it a derivative with jax.custom_vjp, or keep it out of the path by lax.stop_gradient."
    )
    assert "callbacks do not support JVP" in str(error.__cause__)
    assert same_type_as_jax(error, jax.grad(function), X)


def test_what_the_function_raises_comes_through():
    def refuses(x):
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        aot.function(refuses).value_and_grad(X)
    with pytest.raises(LookupError, match="no such layer"):
        jax.jit(aot.function(refuses))(X)
