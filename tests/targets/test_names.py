"""A target is named as people name the device, and what cannot be is refused with the cure."""

import logging
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jointcut import aot
from jointcut.aot.options import compilers
from jointcut.partition.errors import TargetError
from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.targets import ATTAINED, CHIPS, chip_of

ARGS = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3


@aot.function
def loss(w, v, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ v) ** 2)


def refused(call, *args, **kwargs):
    with pytest.raises(TargetError) as error:
        call(*args, **kwargs)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("name", "platform", "count", "topology"),
    [
        ("h100", "cuda", 1, "1x1x1"),
        ("H100x8", "cuda", 8, "1x1x8"),
        ("a100-80gb", "cuda", 1, "1x1x1"),
        ("a100-80gbx4", "cuda", 4, "1x1x4"),
        ("mi300x", "rocm", 1, "1x1x1"),
        ("mi300xx8", "rocm", 8, "1x1x8"),
        ("v5e-4", "tpu", 4, "2x2"),
        ("v5p-8", "tpu", 4, "2x2x1"),
        ("v6e-8", "tpu", 8, "2x4"),
    ],
)
def test_a_name_says_which_devices_and_how_many(name, platform, count, topology):
    target = aot.target(name)
    assert (target.name, target.platform, target.count, target.topology) == (name.lower(), platform, count, topology)
    assert pickle.loads(pickle.dumps(target)) == target == aot.Target.from_json(target.to_json())
    assert aot.target(target) is target


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_a_chip_has_the_figures_of_its_data_sheet(chip):
    rates = chip.rates
    assert isinstance(rates, Roofline)
    assert rates.full_flops_per_s < rates.flops_per_s <= rates.half_flops_per_s
    assert 2e10 < chip.memory_bytes < 3e11 or chip.platform == "tpu"
    assert chip.source.split("'s ")[0] in ("NVIDIA", "AMD", "Google Cloud")
    assert chip_of(chip.kind) is chip
    assert chip_of(chip.kind + " something") is chip
    assert chip.platform == "tpu" or f"memory_bandwidth: {round(rates.bytes_per_s / ATTAINED['memory'])}" in (
        chip.configuration
    )


def test_a_kind_that_nobody_knows_is_no_chip():
    assert chip_of("NVIDIA GeForce GTX 1080") is None
    assert chip_of("TPU v5 lite") is CHIPS["v5e"]
    assert chip_of("TPU v5") is CHIPS["v5p"]


def test_it_says_what_it_is():
    assert str(aot.target("h100")) == "h100: NVIDIA H100 80GB HBM3, 84.9 GB"
    assert str(aot.target("v5e-4")) == "v5e-4: 4 x TPU v5 lite, 17.2 GB each"


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (
            "h1000",
            [
                "target 'h1000' is unknown.",
                "Known names: 'a100-80gb', 'b200', 'h100', 'h100x8', 'h200', 'l4', 'mi300x', 'v5e-4', 'v5p-8', "
                "'v6e-8'. Did you mean 'h100'?",
            ],
        ),
        (
            "v5e-3",
            [
                "target 'v5e-3' is no slice that is known.",
                "Those of v5e: v5e-1, v5e-4, v5e-8, v5e-16, v5e-32, v5e-64, v5e-128, v5e-256.",
            ],
        ),
        (8, ["target is a int.", "Give a name, such as 'h100'."]),
    ],
)
def test_what_names_no_device_is_refused(given, lines):
    assert refused(aot.target, given) == lines
    assert refused(aot.function, loss, target=given) == lines


@pytest.mark.parametrize("name", ["h100x0", "h100-8", "v5ex4", "x8", ""])
def test_a_count_of_another_kind_is_refused(name):
    assert refused(aot.target, name)[0].startswith(f"target {name!r} is ")


def test_a_step_of_a_device_that_is_not_here_is_not_run():
    lines = [
        "loss is planned for h100, and there is no NVIDIA H100 80GB HBM3 here to run it.",
        "Call trace, partition, explain, pareto or export, which need none; or leave the target out.",
    ]
    arrays = [jnp.ones(x.shape) for x in ARGS]
    loss.value_and_grad(*arrays), loss.value_and_grad(*arrays)  # the second call is bound already
    with aot.target("h100"):
        for call in (loss, loss.value_and_grad, loss.grad, loss.vjp):
            assert refused(call, *arrays) == lines
        cut = loss.trace(*ARGS).partition()
    compiled = loss.trace(*ARGS).partition().compile()
    compiled = replace(compiled, cut=cut)
    for call in (compiled.value_and_grad, compiled.vjp, compiled.forward):
        assert refused(call, *arrays) == lines
    loss.value_and_grad(*arrays)


def test_a_missing_compiler_is_an_error_where_it_is_needed(monkeypatch):
    compilers.devices.cache_clear()
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    made = {name: aot.function(loss, target=name).trace(*ARGS).partition() for name in ("l4", "v6e-1", "mi300x")}
    assert refused(made["l4"].compile) == [
        "target l4 needs XLA's compiler for cuda: its plugin is not installed.",
        "Install the plugin that fits jaxlib: pip install 'jointcut[cuda]'.",
    ]
    assert refused(made["v6e-1"].compile) == [
        "target v6e needs XLA's compiler for tpu: libtpu is not installed.",
        "Install the plugin that fits jaxlib: pip install 'jointcut[tpu]'.",
    ]
    assert refused(made["mi300x"].compile)[1] == "Install the plugin that fits jaxlib: pip install 'jointcut[rocm]'."


def test_a_compiler_of_another_version_is_refused(monkeypatch):
    versions = {"libtpu": "0.0.1", "jaxlib": "0.10.2"}
    compilers.devices.cache_clear()
    monkeypatch.setattr(compilers, "find_spec", lambda name: object())
    monkeypatch.setattr(compilers, "version", versions.get)
    monkeypatch.setattr(compilers, "requires", lambda name: ["numpy", 'libtpu==0.0.42.*; extra == "tpu"'])
    assert refused(aot.function(loss, target="v6e-1").trace(*ARGS).partition().compile) == [
        "target v6e needs XLA's compiler for tpu: libtpu is version 0.0.1, and jaxlib asks for 0.0.42.*.",
        "Install the plugin that fits jaxlib: pip install 'jointcut[tpu]'.",
    ]


def test_a_compiler_that_does_not_start_says_why(monkeypatch):
    def locked(*_):
        raise RuntimeError("the library is in use.\nSee its log")

    compilers.devices.cache_clear()
    monkeypatch.setattr(compilers, "_tpus", locked)
    assert refused(aot.function(loss, target="v6e-1").trace(*ARGS).partition().compile) == [
        "target v6e needs XLA's compiler for tpu, which is installed and does not start: the library is in use.",
        "Try it in a new process.",
    ]


def test_a_sharding_on_devices_that_are_here_is_kept(monkeypatch):
    monkeypatch.setitem(CHIPS, "here", replace(CHIPS["h100"], name="here", platform="cpu", kind="cpu"))
    here = aot.target("here")
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    own = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert here.is_here
    assert here.placed(jax.ShapeDtypeStruct((4,), "float32", sharding=own)).sharding is own
    assert here.placed(jax.ShapeDtypeStruct((4,), "float32")).sharding == here.sharding


def test_a_budget_above_the_memory_is_logged(caplog, monkeypatch):
    traced = aot.function(loss, target="l4").trace(*ARGS)
    answer = traced.request.answered("min_cut")
    monkeypatch.setattr(type(traced.request), "within", lambda self, budget, *_: answer)
    with caplog.at_level(logging.WARNING, "jointcut"):
        traced.partition(budget="20GB")
        assert caplog.messages == []
        traced.partition(budget="30GB")
    assert caplog.messages == ["The budget of 30,000,000,000 bytes is more than l4 has: 23,609,475,072 bytes."]
