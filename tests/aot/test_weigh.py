"""What a program takes is known before XLA makes code for it, and is what the compiled program takes."""

import tempfile
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jointcut import aot
from jointcut.aot.run import weigh as weighing
from jointcut.aot.run.compile import ProgramMemory
from jointcut.aot.run.weigh import begin, weigh
from jointcut.partition.program.jax import runtime
from oracle import loss
from programs import CORPUS, EVERY_PROGRAM, OF_EACH_KIND

X = jnp.ones((64, 48))


def deep(x):
    for _ in range(4):
        x = jnp.sin(x @ x.T) @ x
    return jnp.sum(x)


def scattering(x, labels):
    return jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(jnp.sin(x)), labels[:, None], 1))


def looped(x):
    return jnp.sum(jax.lax.scan(lambda c, _: (jnp.sin(c @ x.T @ x), jnp.sum(c)), x, length=5)[0])


LABELS = jnp.zeros(64, int)
LOWERED = {
    "a step": lambda: jax.jit(jax.value_and_grad(deep)).lower(X),
    "scatters": lambda: jax.jit(jax.value_and_grad(scattering)).lower(X, LABELS),
    "a loop": lambda: jax.jit(jax.value_and_grad(looped)).lower(X),
    "an argument given away": lambda: jax.jit(lambda x, y: (jnp.sin(x) @ x.T @ x, y), donate_argnums=0).lower(X, X),
    "an argument nobody reads": lambda: jax.jit(lambda x, y: jnp.sin(x), keep_unused=True).lower(X, X),
    "no op": lambda: jax.jit(lambda x: x).lower(X),
    "a constant": lambda: jax.jit(lambda x: x + np.arange(48.0)).lower(X),
    "a callback": lambda: jax.jit(lambda x: jax.pure_callback(np.sin, X, x) @ x.T).lower(X),
    "a print": lambda: jax.jit(lambda x: jax.debug.print("{}", x, ordered=True) or x @ x.T @ x).lower(X),
}
TRACED = [program for program in CORPUS if program.name != "integers_to_differentiate"]  # that one cannot be traced
EVERY = [program for program in TRACED if EVERY_PROGRAM or program.name in OF_EACH_KIND]


def compiled(lowered):
    return ProgramMemory.of(lowered.compile())


@pytest.fixture
def no_code(monkeypatch):
    """A context in which no program is compiled for its account."""

    @contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(ProgramMemory, "of", lambda *_: pytest.fail("a program was compiled"))
            yield

    return context


@pytest.mark.parametrize("name", LOWERED)
def test_a_program_takes_what_it_was_weighed_at(name, no_code):
    lowered = LOWERED[name]()
    with no_code():
        weighed = weigh(lowered)
    assert weighed == compiled(lowered)
    assert (weighed.alias_bytes > 0) == (name == "an argument given away")


@pytest.mark.parametrize("program", EVERY, ids=lambda program: program.name)
def test_a_cut_program_takes_what_it_was_weighed_at(program, no_code):
    with program.precision():
        function = aot.function(loss(program, program.function), argnums=program.argnums)
        lowered = function.trace(*program.args).partition().jits.lowered("step")
        with no_code():
            weighed = weigh(lowered)
        assert weighed == compiled(lowered)


def test_a_program_that_was_weighed_is_compiled_and_run_as_any_other():
    function = jax.jit(deep)
    lowered = function.lower(X)
    text = lowered.as_text()
    weigh(lowered)
    assert lowered.as_text() == text
    assert lowered.compile()(X) == function(X) == deep(X)


def test_several_are_weighed_at_once_and_one_program_by_several():
    lowered = [jax.jit(deep).lower(jnp.ones((n, 48))) for n in (16, 32, 64)]
    begun = [begin(each) for each in [*lowered, *lowered]]
    assert [future.result() for future in begun] == [*map(compiled, lowered)] * 2


@pytest.mark.parametrize("name", ["_ASSIGNMENT", "_REPORT"])
def test_where_xla_does_not_write_a_file_the_program_is_compiled_for_its_account(name, monkeypatch):
    monkeypatch.setattr(weighing, name, "*-another-name.txt")
    lowered = jax.jit(deep).lower(X)
    assert weighing._assigned(lowered) is None
    assert weigh(lowered) == compiled(lowered)


def test_where_there_is_nowhere_to_write_the_program_is_compiled_for_its_account(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    lowered = jax.jit(deep).lower(X)
    assert weighing._assigned(lowered) is None
    assert weigh(lowered) == compiled(lowered)


TEXT = """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 x @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 8, page 0, parameter 1, shape |f32[2]| at ShapeIndex {}:
allocation 2: size 16, page 0, output shape is |(f32[16], f32[])|, maybe-live-out:
allocation 3: size 4, constant:
allocation 4: size 1024, page 0, preallocated-temp:
 value: <7 call @0> (size=0,offset=1024): u8[0,7919]{1,0}
 value: <8 add @0> (size=500,offset=512): f32[125]{0}
 value: <9 mul @0> (size=512,offset=0): f32[128]{0}
"""


def test_an_account_adds_up_to_the_total_that_xla_reports():
    assert weighing._account(TEXT, "Total bytes: 1116 (1.1KiB)\n") == ProgramMemory(72, 80, 1012, 64)
    cut_off = TEXT[: TEXT.index("allocation 4")]  # the disk was full
    assert weighing._account(cut_off, "Total bytes: 1116 (1.1KiB)\n") is None
    assert weighing._account(TEXT, "") is None
    assert weighing._account("", "") is None


def of_nobody(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("some_function_of_nobody", shape, has_side_effect=True)(x)


def test_an_error_of_making_code_is_found_where_the_program_is_compiled():
    lowered = jax.jit(of_nobody).lower(X)
    assert weigh(lowered).argument_bytes == X.nbytes
    with pytest.raises(jax.errors.JaxRuntimeError, match="some_function_of_nobody"):
        lowered.compile()


def test_another_error_than_that_of_the_call_is_raised(monkeypatch):
    monkeypatch.setattr(runtime, "calling", lambda lowered, *_: lowered)
    with pytest.raises(jax.errors.JaxRuntimeError, match="some_function_of_nobody"):
        weigh(jax.jit(of_nobody).lower(X))
