"""The suite that `benchmarks/` measures, at its tiny size: every program's gradient against plain JAX's."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks.programs as suite
from benchmarks.measure import Spread, Timing, machine
from benchmarks.methods import PLAIN, Figures
from benchmarks.programs import PROGRAMS, Program, load
from benchmarks.report import Result, Row, read_results, write_results
from benchmarks.steps import CHECKPOINT, LEAST, ONCE, ways_of
from jointcut import aot

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def norm(tree) -> float:
    """The Euclidean norm; by numpy, since JAX would compile each op for each shape."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree))))


def distance(a, b) -> float:
    """Euclidean norm of the difference of two trees over that of the second."""
    return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b)) / norm(b)


@pytest.fixture(autouse=True)
def as_users_run():
    """As users run them: dtypes are promoted, and JAX does not check each jaxpr, which takes as long as compiling."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(False):
        yield


def plain(program: Program):
    """`jax.value_and_grad`: the loss and its gradient."""
    value, gradient = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))(*program.arguments)
    return (value[0] if program.has_aux else value), gradient


#: One of each kind; `make bench` builds and compares all, and so does this with JOINTCUT_EVERY_PROGRAM. Models of
#: Flax, Haiku and Equinox are trained in `aot/test_training.py`, recurrent loops are programs of the corpus.
KINDS = ("resnet", "gpt-scan", "forces", "maml", "mamba", "gnn", "equinox")
EVERYTHING = "JOINTCUT_EVERY_PROGRAM" in os.environ
CHOSEN = PROGRAMS if EVERYTHING else KINDS


# One test for each program, since building the arguments takes as long as a compilation. One runs in half
# precision too. That a call inside jax.jit answers alike is a law of `laws/test_composition.py`.
@pytest.mark.parametrize("name", CHOSEN)
def test_the_gradient_of_every_program_is_that_of_plain_jax(name):
    source = load(name, "tiny")
    wraps_where_it_says(source)
    for dtype in DTYPES if EVERYTHING or name == "gpt-scan" else ["float32"]:
        program = source.cast(DTYPES[dtype])
        bound = program.tolerance[dtype]
        value, wanted = plain(program)
        result, gradient = aot.function(program.loss, has_aux=program.has_aux).value_and_grad(*program.arguments)
        got = result[0] if program.has_aux else result
        assert jax.tree.map(jax.typeof, gradient) == jax.tree.map(jax.typeof, wanted)
        assert norm(wanted) > 0
        assert distance(gradient, wanted) <= bound, dtype
        assert abs(float(got) - float(value)) <= bound * max(1.0, abs(float(value))), dtype


def wraps_where_it_says(program: Program) -> None:
    """A wrapper goes to each place that the program names, and to no other."""
    for place in ("loss", *program.places):
        calls = []

        def wrap(function, calls=calls):
            calls.append(function)
            return function

        jax.eval_shape(program.wrapped(place, wrap), *program.arguments)
        assert calls, place
    with pytest.raises(ValueError, match=re.escape(f"{program.name} has no nook; it has {('loss', *program.places)}")):
        program.wrapped("nook", lambda f: f)


def test_an_unknown_program_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=re.escape(f"unknown program 'bert'; there are {', '.join(PROGRAMS)}")):
        load("bert")


def test_the_list_of_programs_quotes_the_first_line_of_each_file():
    folder = Path(suite.__file__).parent
    listed = dict(re.findall(r"^- (\w+): (.*)$", suite.__doc__ or "", re.MULTILINE))
    files = {p.stem: p.read_text().split('"""')[1].splitlines()[0] for p in folder.glob("[a-z]*.py")}
    assert listed == files


def measured(name: str) -> Result:
    spread = Spread(0.9, 1.0, 1.25)
    whole = dict.fromkeys(("activation_bytes", "peak_bytes", "saved_bytes", "dots"), 7)
    seconds = dict.fromkeys(("trace_s", "cut_s", "lower_s", "compile_s"), 0.5)
    row = Row(Figures(**whole, **seconds), Timing(spread, spread))
    return Result(name, "of some size", {"width": 3}, {PLAIN: row}, spread)


def test_a_stopped_run_goes_on_with_what_it_has_measured(tmp_path):
    where, path = machine() | {"size": "small"}, tmp_path / "results" / "bench.json"
    assert read_results(where, path) == []
    write_results(where, [measured("mlp"), measured("vit")], [], [], [], path)
    assert read_results(where | {"date": "later"}, path) == [measured("mlp"), measured("vit")]
    assert [p.name for p in path.parent.iterdir()] == ["bench.json"]


def test_figures_of_another_machine_are_not_mixed_in(tmp_path):
    where, path = machine() | {"size": "small"}, tmp_path / "bench.json"
    write_results(where, [measured("mlp")], [], [], [], path)
    refusal = f"{path} was measured with jax {where['jax']}, here it is 9.9: measure all again"
    with pytest.raises(ValueError, match=re.escape(refusal)):
        read_results(where | {"jax": "9.9"}, path)


def test_a_long_loop_takes_a_fraction_of_the_memory_for_one_more_forward():
    ways = ways_of(64)
    plain, checkpoint, once, least = ways.values()
    assert list(ways) == [PLAIN, CHECKPOINT, ONCE, LEAST]
    assert least.temp_bytes <= once.temp_bytes < checkpoint.temp_bytes / 2 < plain.temp_bytes / 2
    assert once.products - plain.products <= 64 == checkpoint.products - plain.products
    for way in ways.values():
        for want, got in zip(jax.tree.leaves(plain.call()), jax.tree.leaves(way.call()), strict=True):
            np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-6)
