"""What waits in files: the same bits, files that are gone afterwards, and what is refused."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jointcut import aot
from jointcut.aot.cache.store import Store
from jointcut.aot.hooks import spilling
from jointcut.aot.run.runnable import Runnable
from jointcut.partition import Plan
from jointcut.partition.errors import ArtefactError, CallError, SpillError, TraceError
from jointcut.partition.lower.reruns import segmentable
from jointcut.wrappers.mark import Mark
from oracle import cotangents
from programs import CORPUS, EVERY_PROGRAM

W = np.linspace(-0.5, 0.5, 6 * 64 * 64, dtype=np.float32).reshape(6, 64, 64)
X = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
BYTES = 106_496  # of two stacks, and of the end of the loop


def loss(w, x):
    def step(h, w):
        return jnp.tanh(h @ w) + jnp.sin(h), None

    return jnp.sum(lax.scan(step, x, w)[0] ** 2)


PLAIN = aot.function(loss)


def left(folder):
    """What is in the folder."""
    return [*folder.iterdir()]


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    if left(tmp_path):
        gc.collect()  # which takes as long as a test
    assert not left(tmp_path)


def sizes(folder):
    """The bytes of each file of arrays in the folder, largest first."""
    return sorted((path.stat().st_size for path in folder.rglob("*.bin")), reverse=True)


# ------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("program", CORPUS[:: 1 if EVERY_PROGRAM else 12], ids=lambda program: program.name)
def test_gradients_have_the_bits_of_the_same_plan_in_memory(program, folder, monkeypatch):
    """Of the same plan with copies in the same places: what XLA fuses is the same then."""
    monkeypatch.setattr(spilling, "LEAST_BYTES", 1)
    bound = partial(program.function, **program.kwargs)
    copied = aot.saved_arrays(lambda x: np.array(x), lambda x: np.array(x))
    with program.precision():
        found, want = (
            aot.function(bound, has_aux=program.has_aux, **how).vjp(*program.args)
            for how in ({"spill": folder}, {"saved_arrays": copied})
        )
        jax.tree.map(np.testing.assert_array_equal, found[0], want[0])
        for seed in (1, 2):  # a pullback can be called again
            given = cotangents(found[0], seed)
            jax.tree.map(np.testing.assert_array_equal, found[1](given), want[1](given))
        del found, want


def test_stacks_of_loops_lie_in_a_file_and_steps_are_equal_to_the_last_bit(folder):
    function = aot.function(loss, spill=folder)
    np.testing.assert_array_equal(function.grad(W, X), PLAIN.vjp(W, X)[1](1.0)[0])
    assert not left(folder)
    _, pullback = function.vjp(W, X)
    assert sizes(folder) == [BYTES] and function.trace(W, X).partition().bytes_spilled == BYTES
    assert sorted(x.nbytes for x in pullback.saved) == [4, 24, 24]
    _, other = function.vjp(W / 2, X)
    assert sizes(folder) == [BYTES, BYTES]
    np.testing.assert_array_equal(pullback(1.0)[0], PLAIN.vjp(W, X)[1](1.0)[0])
    np.testing.assert_array_equal(other(2.0)[0], PLAIN.vjp(W / 2, X)[1](2.0)[0])
    del pullback
    assert sizes(folder) == [BYTES]


@pytest.mark.parametrize("executables", [1, 2])
def test_compiled_steps_spill(executables, folder):
    compiled = aot.function(loss, spill=folder).trace(W, X).partition().compile(executables)
    want = PLAIN.vjp(W, X)[1](1.0)[0]
    np.testing.assert_array_equal(compiled.value_and_grad(W, X)[1], want)
    out, residuals = compiled.forward(W, X)
    assert sizes(folder) == [BYTES]
    np.testing.assert_array_equal(compiled.backward(residuals, jnp.ones_like(out))[0], want)
    del residuals
    with aot.debug():
        np.testing.assert_array_equal(compiled.value_and_grad(W, X)[1], want)


def test_carries_where_segments_start_lie_in_the_file(folder):
    """Of the stacks nothing is kept then but these, and the steps between them run again."""
    traced = aot.function(loss, spill=folder).trace(W, X)
    plan = traced.partition("min_cut").plan
    (loop,) = segmentable(traced.problem, plan)
    cut = traced.partition(plan=Plan.of(traced.problem, plan.values, segments=[(loop, 2)]))
    _, pullback = cut.compile().vjp(W, X)
    assert sizes(folder) == [4 * X.nbytes]  # three starts, and the end of the loop
    assert all(x.nbytes <= 4 for x in pullback.saved)
    np.testing.assert_array_equal(pullback(1.0), PLAIN.vjp(W, X)[1](1.0)[0])


def test_small_arrays_and_policies_and_threads(folder):
    few = np.ones((2, 4), np.float32)
    assert aot.function(lambda x: jnp.sum(jnp.sin(x)), spill=folder).trace(few).partition().bytes_spilled == 0
    function = aot.function(loss, spill=folder, policy={"*": aot.SAVE_AS("bfloat16")})
    alike = aot.function(loss, policy={"*": aot.SAVE_AS("bfloat16")})
    np.testing.assert_array_equal(function.grad(W, X), alike.vjp(W, X)[1](1.0)[0])
    function, found = aot.function(loss, spill=folder), {}

    def run(i):
        found[i] = function.grad(W / i, X)

    threads = [threading.Thread(target=run, args=(i,)) for i in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradient in found.items():
        np.testing.assert_array_equal(gradient, function.grad(W / i, X))


# ------------------------------------------------------------------------------------------------- what is left behind

#: Two processes: one crashes when it has its residuals, the other waits with its own for a line.
CHILD = """
import os, sys, warnings
import jax.numpy as jnp, numpy as np
from jointcut import aot
warnings.simplefilter("ignore", RuntimeWarning)  # of JAX, of which nothing runs yet
is_living = os.fork()
x = np.full((64, 64), 1 / 64, np.float32)
out, pullback = aot.function(lambda x: jnp.sum(jnp.tanh(x @ x)), spill=sys.argv[1]).vjp(x)
if not is_living:
    os._exit(1)
os.wait()
print("ready", flush=True)
sys.stdin.readline()
print(float(pullback(1.0)[0][0, 0]))
"""


def test_what_a_crashed_process_left_is_removed_by_the_next_and_a_living_one_keeps_its_own(folder):
    command, pipes = [sys.executable, "-c", CHILD, str(folder)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as living:
        assert living.stdout.readline() == "ready\n" and len(left(folder)) == 2
        aot.function(loss, spill=folder).grad(W, X)
        assert len(left(folder)) == 1
        said, _ = living.communicate("\n")
    assert abs(float(said) - 2 / np.cosh(1 / 64) ** 2) < 1e-4
    assert not left(folder)  # its process has ended while the pullback was there


def test_only_folders_with_our_mark_are_removed_and_only_our_files_in_them(tmp_path):
    Store.at(tmp_path / "jointcut-cache").put("0" * 64, b"a program")
    (tmp_path / "jointcut-results").mkdir()
    for name, text in (("theirs", b""), ("marked-otherwise", Mark("spill", 2).line), ("mixed", Mark("spill").line)):
        (tmp_path / f"jointcut-{name}").mkdir()
        (tmp_path / f"jointcut-{name}" / "lock").write_bytes(text)
        (tmp_path / f"jointcut-{name}" / "spilled-notes.bin.txt").write_text("mine")
    before = set(tmp_path.rglob("*"))
    aot.function(loss, spill=tmp_path).grad(W, X)
    assert before - {*tmp_path.rglob("*")} == {tmp_path / "jointcut-mixed" / "lock"}


@pytest.fixture
def of_at_most():
    """A limit on the bytes of a file, as a full disk sets one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_folder_is_an_error_before_anything_runs(folder, of_at_most):
    function = aot.function(loss, spill=folder)
    want = function.grad(W, X)
    of_at_most(BYTES - 1)
    with pytest.raises(SpillError) as error:
        function.grad(W, X)
    of_at_most(BYTES)
    assert str(error.value) == (
        f"spill='{folder}' has no room for the 106.5 kB that loss keeps for its backward: File too large.\n"
        "Make room there, or give a folder on a larger disk."
    )
    assert isinstance(error.value, OSError) and not left(folder)
    np.testing.assert_array_equal(function.grad(W, X), want)


def test_a_disk_that_fills_while_the_forward_runs_is_an_error(folder, monkeypatch):
    """What segments start from is reserved when it is written, so a forward may find no room."""

    def full(descriptor, start, size):
        if start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spilling.os, "posix_fallocate", full)
    monkeypatch.setattr(Runnable, "bytes_spilled", 8192)
    for executables in (1, 2):
        with pytest.raises(SpillError) as error:
            aot.function(loss, spill=folder).trace(W, X).partition().compile(executables).value_and_grad(W, X)
        assert str(error.value).splitlines() == [
            f"spill='{folder}' has no room for the 106.5 kB that loss keeps for its backward: No space left on device.",
            "Make room there, or give a folder on a larger disk.",
        ]
        assert not left(folder)


def test_folders_that_cannot_be_used_are_refused(folder, monkeypatch):
    with pytest.raises(SpillError) as error:
        aot.function(loss, spill=folder / "none").grad(W, X)
    assert str(error.value) == (
        f"spill='{folder}/none' is no folder.\nMake it first, on a disk with room for what is kept."
    )

    def denied(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkdtemp", denied)
    with pytest.raises(SpillError) as error:
        aot.function(loss, spill=folder).grad(W, X)
    assert str(error.value) == (
        f"spill='{folder}' cannot be written: Permission denied.\nGive a folder that you may write to."
    )


def test_a_file_that_is_gone_is_an_error(folder):
    _, pullback = aot.function(loss, spill=folder).vjp(W, X)
    (file,) = folder.rglob("*.bin")
    file.unlink()
    with pytest.raises(SpillError) as error:
        pullback(1.0)
    assert str(error.value) == (
        f"spill='{folder}' cannot be read back for the backward of loss: No such file or directory.\n"
        "Call the forward again."
    )
    del pullback


# ------------------------------------------------------------------------------------------------- what is refused


def test_gradients_inside_transformations_are_refused(folder):
    function = aot.function(loss, spill=folder)
    for gradient in (jax.jit(function.grad), jax.grad(function), jax.vmap(function.grad, (None, 0))):
        with pytest.raises(CallError) as error:
            gradient(W, X)
        assert str(error.value) == (
            "loss spills to files, and is differentiated inside a transformation (jax.jit, jax.grad, jax.vmap).\n"
            "Call its own value_and_grad, grad or vjp outside of it, or leave spill out."
        )
    np.testing.assert_array_equal(jax.jit(function)(W, X), jax.jit(loss)(W, X))


def test_arguments_on_several_devices_are_refused(folder):
    class Spread:
        class sharding:
            device_set = (1, 2)

    programs = aot.function(loss, spill=folder).trace(W, X).partition().made.jitted.programs
    with pytest.raises(CallError) as error:
        programs.run("forward", [Spread(), X])
    assert str(error.value) == (
        "loss spills to files, and an argument lies on 2 devices.\nPut its arguments on one device, or leave spill out."
    )


def test_options_that_do_not_fit_are_refused(folder, tmp_path):
    for given in (3, ""):
        with pytest.raises(TraceError) as error:
            aot.function(loss, spill=given)
        assert str(error.value) == (
            f"spill is {given!r}, not a folder.\nGive the path of a folder, on a disk with room for what is kept."
        )
    with pytest.raises(TraceError) as error:
        aot.function(loss, spill=folder, saved_arrays=aot.saved_arrays(jnp.asarray, jnp.asarray))
    assert str(error.value) == (
        "saved_arrays and spill are given together.\nGive one of them: pack may itself write to a file."
    )
    with pytest.raises(ArtefactError) as error:
        aot.function(loss, spill=folder).export(tmp_path / "artefact", W, X)
    assert str(error.value) == "loss spills what it keeps to files of this process.\nExport it without spill."
