"""Number types are strict in every test; warnings are errors by pyproject.

JAX's own checks take two fifths of the time of a test. They are on where jaxprs are written and where each program of
the corpus is run once; with JOINTCUT_EVERY_PROGRAM they are on in every test. XLA makes code in one piece, since each
worker has one core, and with little optimisation, here and in the processes that tests start: tests ask what programs
mean and what memory they take, which that does not change, and not how fast they run. With JAX 0.10 it also makes the
code of fusions in its older way, which takes half the time; the second Python of `.ci/run` has the newer way.

JAX makes a new MLIR context for each program that it lowers, which is half of the lowering of a small one. Here some
programs in a row share one: a program does not depend on what else its context holds.

Where tests ask what programs compute, XLA compiles a text once for a process: many tests make the same small programs,
and plain JAX's beside them. Names and source lines are not of the text. So where tests may read these, in reports and
with `compiled_anew`, and for what calls Python back, it compiles each program.

Rates are those of `rates.json`, here and in the processes that tests start: no plan hangs on how busy the machine is.
No test finds a plan that another searched for, and no stage is shown but where a test asks for it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

from jointcut.aot.planning.budgets import searches
from jointcut.aot.planning.budgets.rates_file import VARIABLE as RATES
from jointcut.aot.progress.progress import VARIABLE as PROGRESS

EVERYTHING = "JOINTCUT_EVERY_PROGRAM" in os.environ
HERE = Path(__file__).parent
WRITING = ("emit", "hold", "inner_loops", "segments", "split", "zeros")
CHECKED = (HERE / "laws/test_equal_to_vjp.py", *(HERE / f"partition/test_{name}.py" for name in WRITING))
COMPUTING = ("aot", "behaviours", "derivatives", "laws", "loops", "partition", "tape", "wrappers")
jax.config.update("jax_numpy_dtype_promotion", "strict")
os.environ[RATES] = str(HERE / "rates.json")
os.environ[PROGRESS] = "0"
PROGRAMS_OF_A_CONTEXT = 32  # so that what they hold, such as large constants, goes with it
PROGRAMS_AT_HAND = 1_000  # those that were used last
FLAGS = "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
FLAGS += " --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)


def shared_contexts(make: Callable[[], Any]) -> Callable[[], Any]:
    """Give out what `make` makes several times, to each thread its own."""
    own = threading.local()

    def context() -> Any:
        left = getattr(own, "left", 0)
        if not left:
            own.context, left = make(), PROGRAMS_OF_A_CONTEXT
        own.left = left - 1
        return own.context

    return context


def compiled_once(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    """Give out again what `compile_and_load` made of the same text for the same devices with the same options."""
    made: dict[bytes, Any] = {}

    def compiled(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, *rest: Any) -> Any:
        text = str(module)
        if callbacks or "callback" in text:
            return compile_and_load(backend, module, devices, options, callbacks, *rest)
        key = sha256(repr((text, devices, options.SerializeAsString())).encode()).digest()
        program = made.pop(key, None) or compile_and_load(backend, module, devices, options, callbacks, *rest)
        made[key] = program
        if len(made) > PROGRAMS_AT_HAND:
            del made[next(iter(made))]
        return program

    return compiled


mlir.make_ir_context = shared_contexts(mlir.make_ir_context)
COMPILED_EACH = compiler.backend_compile_and_load
COMPILED_ONCE = compiled_once(COMPILED_EACH)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rest, before `-m` and `-k` choose among all that was collected."""
    import rest  # which makes the corpus: after all that is set above

    rest.mark(items)
    config.stash[rest.IN_MAKE_TEST] = rest.in_make_test(items)


def pytest_collection_finish() -> None:
    """Leave what is loaded by now, libraries and tests, out of every later search for garbage, and search less often.

    That spares a twenty-fifth of the time. Tests that ask what stays alive search for garbage themselves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def nothing_found_before():
    """Forget the plans that other tests searched for."""
    searches.forget()


@pytest.fixture(autouse=True)
def texts_compiled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Compile each text once in the folders whose tests ask what programs compute."""
    path = request.path.relative_to(HERE)
    if (path.parts[0] in COMPUTING or path.name.endswith("_benchmark.py")) and path.parent.name != "report":
        monkeypatch.setattr(compiler, "backend_compile_and_load", COMPILED_ONCE)


@pytest.fixture
def compiled_anew(texts_compiled_once, monkeypatch: pytest.MonkeyPatch):
    """Compile each program, for a test that reads names or source lines of what XLA made."""
    monkeypatch.setattr(compiler, "backend_compile_and_load", COMPILED_EACH)


@pytest.fixture(autouse=True)
def checks_of_jax(request: pytest.FixtureRequest):
    """Let JAX check each jaxpr where they are the matter of the test."""
    checked = EVERYTHING or request.path in CHECKED
    with jax.enable_checks(checked):
        yield
