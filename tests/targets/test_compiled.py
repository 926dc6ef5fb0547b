"""XLA's compilers for devices that are not here give the account by which plans are weighed.

They come with JAX's plugins, which the extras `cuda` and `tpu` install, and for these tests `compilers`.
"""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.account import RESULTS, read
from jointcut import aot
from jointcut.aot.options.target import ON_H200, Target
from jointcut.aot.planning.size_search import MOST_COMPILED
from jointcut.aot.report.tabular import of_account
from jointcut.aot.run.compile import BY_LIBRARIES, compiled_unseen
from jointcut.aot.run.runnable import Runnable
from jointcut.partition.errors import BudgetError, RoomError, TargetError
from targeted import installed


def struct(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def scanned(ws, x):
    def step(x, w):
        return x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T), None

    return jnp.mean(lax.scan(step, x, ws)[0] ** 2)


def written_out(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


SCANNED = struct(6, 256, 1024), struct(4096, 256)
WRITTEN_OUT = [struct(512, 512)] * 4, struct(4096, 512)
PROGRAMS = [(scanned, SCANNED), (written_out, WRITTEN_OUT)]


@pytest.fixture(params=["h100", "v5e-1"])
def there(request):
    return installed(request.param)


@pytest.fixture
def h100():
    return installed("h100")


# What a TPU's compiler takes is some seconds for each program, so it gets the two here alone.
@pytest.mark.parametrize(("function", "arguments"), PROGRAMS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_step_is_weighed_by_the_compiler_of_its_target(there, function, arguments):
    traced = aot.function(function, target=there).trace(*arguments)
    compiled = traced.partition().compile()
    plain, sizes = traced.plain_memory, compiled.programs[0].memory_analysis()
    assert compiled.activation_bytes == sizes.temp_size_in_bytes
    assert compiled.activation_bytes <= 1.01 * plain.temp_bytes
    assert sizes.argument_size_in_bytes >= sum(x.size for x in jax.tree.leaves(arguments))
    assert there.platform == "tpu" or compiled.activation_bytes < 0.7 * plain.temp_bytes


def test_both_halves_are_compiled_for_the_target(h100):
    memory = aot.function(scanned, target=h100).trace(*SCANNED).partition().compile(2).memory
    assert memory.step is None
    assert memory.backward.argument_bytes >= memory.residual_bytes > 0


def test_a_budget_is_held_by_its_account(h100):
    traced = aot.function(written_out, target=h100).trace(*WRITTEN_OUT)
    plain = traced.plain_memory.temp_bytes
    try:
        cut = traced.partition(budget=0.6)
    except BudgetError as error:
        assert (error.least_bytes or 0) > 0.6 * plain  # the compiler keeps little of its own accord
    else:
        assert cut.compile().activation_bytes <= 0.6 * plain


def test_the_largest_size_is_held_by_its_account_after_four_compilations(h100, monkeypatch):
    steps, compile_one = [], Runnable.compile
    monkeypatch.setattr(Runnable, "compile", lambda self, count: (steps.append(self), compile_one(self, count))[1])
    ws, batch = SCANNED[0], aot.shapes("b, 256", "float32")
    found = aot.largest(scanned, "b", "200MB", ws, batch, target=h100)
    assert 1 <= len(steps) <= MOST_COMPILED
    assert 170_000_000 <= found.peak_bytes <= 200_000_000
    assert found.cut.compile().peak_bytes == found.peak_bytes


def test_a_step_without_room_on_a_tpu_is_refused_in_words_and_weighed_for_a_report():
    tpu = installed("v5e-1")
    large = [struct(1024, 1024)] * 3, struct(1 << 23, 1024)
    traced = aot.function(written_out, target=tpu).trace(*large)
    with pytest.raises(RoomError) as error:
        traced.partition("min_cut").compile()
    first, second = str(error.value).splitlines()
    told = re.fullmatch(
        r"The step takes ([\d.]+) GB for temporaries, more than XLA finds on v5e-1, which has 17.2 GB a device.", first
    )
    assert told is not None
    assert float(told[1]) > 17.2
    assert second == "Give a budget, such as aot.function(budget='device'), or a smaller batch."
    memory = traced.plain_memory
    assert memory.temp_bytes > tpu.memory_bytes
    assert memory.argument_bytes == 4 * (3 << 20) + (4 << 33)


def test_a_report_speaks_of_the_target(h100):
    report = aot.function(written_out, target=h100).explain(*WRITTEN_OUT)
    text = str(report)
    assert re.search(rf"on {h100.name}, JAX", text)
    assert re.search(rf"[\d.]+ MB fits on {h100.name}, with [\d.]+ GB a device\.", text)
    assert f"imes are by 75% to 85% of the figures of {h100.source}." in text.replace("\n", " ")
    least, most, count = ON_H200
    told = (
        "of the compiled step, as XLA tells it without the device, where it times no kernels: an H200 that timed none"
    )
    told += f" took {least:.2f} to {most:.2f} times as much for {count} programs"
    assert f"The peak is that {told}." in " ".join(text.split())
    assert told in report.html
    assert json.loads(json.dumps(report.to_dict()))["device_bytes"] == h100.memory_bytes


def test_only_a_gpu_that_is_not_here_has_an_account_without_the_device(monkeypatch):
    told = "of the compiled step, as XLA tells it"
    assert of_account(None) == of_account(aot.target("v5e-4")) == told
    assert of_account(aot.target("mi300x")) == f"{told} without the device; how much one takes was not measured"
    assert of_account(aot.target("h100")).startswith(f"{told} without the device, ")
    monkeypatch.setattr(Target, "is_here", True)
    assert of_account(aot.target("h100")) == told


def test_how_far_accounts_without_the_device_were_off_is_what_was_measured():
    found = [row for path in RESULTS.glob("account-h200-jax*.json") for row in read(path).values() if not row.failed]
    shares = [row.share for row in found]
    assert (round(min(shares), 2), round(max(shares), 2), len({row.name for row in found})) == ON_H200


class Lowered:
    """A program that XLA compiles only with libraries."""

    def __init__(self):
        self.asked = []

    def compile(self, compiler_options=None):
        self.asked.append(compiler_options)
        if compiler_options is None:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes")
        return "compiled"


def test_a_product_without_a_kernel_goes_to_libraries():
    lowered = Lowered()
    assert compiled_unseen(lowered) == "compiled"
    assert lowered.asked == [None, BY_LIBRARIES]


def test_what_is_exported_is_for_its_platform(there, tmp_path):
    folder = aot.function(written_out, target=there).export(tmp_path / "artefact", *WRITTEN_OUT)
    assert json.loads((folder / "signature.json").read_text())["platforms"] == [there.platform]


def test_arguments_on_devices_that_only_compile_name_the_target():
    eight = installed("h100x8")
    mesh = eight.mesh((8,), ("data",))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("data",)))
    arguments = [struct(512, 512, sharding=whole)] * 4, struct(8 * 4096, 512, sharding=rows)
    traced = aot.function(written_out).trace(*arguments)
    assert traced.options.target == eight
    one = aot.function(written_out, target="h100").trace(*WRITTEN_OUT)
    eighth = traced.partition().compile().activation_bytes  # of one device
    assert eighth < 2 * one.partition().compile().activation_bytes
    with pytest.raises(TargetError) as error:
        aot.function(written_out, target="h200").trace(*arguments)
    assert str(error.value).splitlines() == [
        "The arguments lie on NVIDIA H100 80GB HBM3, and the target is h200, NVIDIA H200.",
        "Lay them on the target's devices, or leave the target out.",
    ]


def test_products_for_weights_are_not_put_off_where_devices_share_a_batch():
    """XLA would run them last, and hold what all layers computed again; see `partition/lower/among/settle`."""
    eight = installed("h100x8")
    whole, rows = (NamedSharding(eight.mesh((8,), ("data",)), PartitionSpec(*axes)) for axes in ((), ("data",)))
    x = struct(8 * 4096, 256, sharding=rows)
    stacked = [struct(8, 256, 1024, sharding=whole), struct(8, 1024, 256, sharding=whole)]
    layers = [(struct(256, 1024, sharding=whole), struct(1024, 256, sharding=whole))] * 8

    def block(x, layer):
        up, down = layer
        return x + jnp.tanh(jax.nn.gelu(x @ up) @ down)

    def unrolled(layers, x):
        for layer in layers:
            x = block(x, layer)
        return jnp.mean(x**2)

    def looped(layers, x):
        return jnp.mean(lax.scan(lambda x, layer: (block(x, layer), None), x, tuple(layers))[0] ** 2)

    cuts = [aot.function(f).trace(*args).partition() for f, args in ((looped, (stacked, x)), (unrolled, (layers, x)))]
    in_scan, written = (cut.compile().activation_bytes for cut in cuts)
    assert written <= 1.1 * in_scan
    sums = [
        program.as_text().count(" all-reduce-start(")
        for program in (
            jax.jit(jax.value_and_grad(looped)).lower(stacked, x).compile(),
            *(cut.jits.compiled("step") for cut in cuts),
        )
    ]
    assert 0 < sums[1] <= sums[0] and sums[2] < len(jax.tree.leaves(layers))  # those of one layer come together
    hides = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_analytical_sol_latency_estimator": False}
    lowered = (cut.jits.lowered("step").compile(compiler_options=hides) for cut in cuts)
    in_scan, written = (program.memory_analysis().temp_size_in_bytes for program in lowered)
    assert written <= 1.1 * in_scan
