"""Know the accelerators that programs are planned for: their memory and their rates.

The figures of a chip come from its maker's data sheet, named in `source`: without sparsity, and for links both ways
together. A program attains a share of them, `ATTAINED`. XLA multiplies float32 in TF32 on NVIDIA's and AMD's GPUs, and
in bfloat16 on TPUs, unless a higher precision is asked for.

The configuration of a GPU that is not there has the names and figures of XLA's `GpuTargetConfigProto`. XLA has a file
of these for most chips (`xla/backends/gpu/target_config/specs`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from jointcut.partition.prices.cost import Roofline
from jointcut.partition.prices.flops import products
from jointcut.partition.program.graph import Graph, Op

#: The shares of a data sheet's figures that programs attain. On an H100 a large product in TF32 reaches 0.8 of its
#: peak, and a loop over elements 0.85 of the memory's rate. By the cycles that XLA:TPU tells, products reach 0.8, too.
ATTAINED = {"products": 0.8, "elementwise": 0.75, "memory": 0.85, "links": 0.8}

_CONFIGURATION = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: {warp} shared_memory_per_block: {block}
  shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {optin} {capability}
  registers_per_core_limit: {registers} registers_per_block_limit: {registers}
}}
platform_name: "{platform}" {library} device_description_str: "{kind}"
"""


@dataclass(frozen=True)
class Accelerator(Roofline):
    """The rates of a GPU or TPU; `flops_per_s` is the rate of products of float32 at JAX's default precision.

    Attributes:
        half_flops_per_s: the same for operands of 16 bits or fewer.
        full_flops_per_s: the same for float32 at the highest precision.
        double_flops_per_s: the same for float64.
        link_bytes_per_s: bytes from other devices to one; None where they come by way of the host.
    """

    half_flops_per_s: float = 1.0
    full_flops_per_s: float = 1.0
    double_flops_per_s: float = 1.0
    link_bytes_per_s: float | None = None

    @property
    def moved_per_s(self) -> float:
        """Bytes a second from other devices to one, by the links or by way of the host."""
        rate = self.link_bytes_per_s or self.host_bytes_per_s
        assert rate is not None, "an accelerator has a link to its host"
        return rate

    def product_rate(self, graph: Graph, op: Op) -> float:
        """The flops per second of an op's products, by the types of their operands and their precision."""
        if op.payload is None:
            return self._rate({graph.values[v].dtype for v in op.inputs})
        parts = [
            (
                count,
                self._rate({str(getattr(v.aval, "dtype", "")) for v in eqn.invars}, str(eqn.params.get("precision"))),
            )
            for eqn, count in products(op.payload)
        ]
        return sum(count for count, _ in parts) / sum(count / rate for count, rate in parts)

    def _rate(self, types: Set[str], precision: str = "") -> float:
        """The flops per second of a product of operands of some types."""
        if types & {"float64", "complex128"}:
            return self.double_flops_per_s
        if types and all(_is_half(name) for name in types):
            return self.half_flops_per_s
        return self.full_flops_per_s if "HIGHEST" in precision else self.flops_per_s


def _is_half(dtype: str) -> bool:
    return dtype in ("bfloat16", "float16", "int8", "uint8") or dtype.startswith("float8")


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        name: the name that users write, such as `"h100"`.
        platform: `"cuda"`, `"rocm"` or `"tpu"`.
        kind: its `device_kind` in JAX. Kinds that begin with this text are the same chip.
        memory_bytes: the memory of one device.
        rates: the rates that one device attains.
        link_bytes_per_s: the rate to the other devices of the same host or slice, both ways together; None where there
            are none.
        source: the data sheet.
        configuration: the figures that XLA needs for a GPU that is not there.
        counts: the numbers of devices that a TPU has in one slice, with the slice's topology.
    """

    name: str
    platform: str
    kind: str
    memory_bytes: int
    rates: Accelerator
    link_bytes_per_s: float | None
    source: str
    configuration: str = ""
    counts: tuple[tuple[int, str], ...] = ()


def _gpu(
    name: str, kind: str, source: str, teraflops: tuple[float, float, float, float],
    gigabytes: tuple[float, float, float], platform: str = "cuda", capability: str = "", **limits: Any,
) -> Chip:  # fmt: skip
    """A GPU: its teraflops in TF32, 16 bits, float32 and float64, and gigabytes a second of memory, links and host."""
    single, half, full, double = (1e12 * x for x in teraflops)
    memory, links, host = (1e9 * x for x in gigabytes)
    share = ATTAINED
    rates = Accelerator(
        single * share["products"], full / 2 * share["elementwise"], memory * share["memory"], None,
        host * share["links"], half * share["products"], full * share["products"], double * share["products"],
    )  # fmt: skip
    defaults = {"warp": 32, "block": 49152, "threads": 2048, "units": 128, "registers": 65536}
    library = "dnn_version_info { major: 9 minor: 10 patch: 0 } runtime_version { major: 12 minor: 9 patch: 0 }"
    given = defaults | limits | {"bandwidth": round(memory), "kind": kind, "platform": platform.upper()}
    given |= {"capability": capability, "library": library if platform == "cuda" else "dnn_version_info { }"}
    links_per_s = links * share["links"] or None
    rates = replace(rates, link_bytes_per_s=links_per_s and links_per_s / 2)
    return Chip(name, platform, kind, given["memory"], rates, links_per_s, source, _CONFIGURATION.format(**given))


def _cuda(major: int, minor: int = 0) -> str:
    return f"cuda_compute_capability {{ major: {major} minor: {minor} }}"


def _tpu(
    name: str, kind: str, source: str, teraflops: float, gigabytes: tuple[float, float, float], vectors: float,
    counts: tuple[tuple[int, str], ...],
) -> Chip:  # fmt: skip
    """A TPU: its teraflops in bfloat16 and of vectors, gigabytes a second of memory and links, gigabytes of memory."""
    memory, links, size = gigabytes
    products, share = 1e12 * teraflops * ATTAINED["products"], ATTAINED
    rates = Accelerator(
        products, 1e12 * vectors * share["elementwise"], 1e9 * memory * share["memory"], None, 32e9 * share["links"],
        products, products / 6, products / 50, 1e9 * links * share["links"] / 2,
    )  # fmt: skip
    links_per_s = 1e9 * links * share["links"]
    return Chip(name, "tpu", kind, round(size * 2**30), rates, links_per_s, source, counts=counts)


_NVIDIA, _GOOGLE = "NVIDIA's data sheet of the {}", "Google Cloud's documentation of TPU {}"
_HOPPER = {"shared": 233472, "cores": 132, "cache": 52428800, "clock": 1.98, "optin": 232448}

#: The chips, by name.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu(
            "h100", "NVIDIA H100 80GB HBM3", _NVIDIA.format("H100 SXM"), (494.7, 989.4, 66.9, 66.9), (3352.32, 900, 64),
            capability=_cuda(9), memory=84942979072, **_HOPPER,
        ),
        _gpu(
            "h200", "NVIDIA H200", _NVIDIA.format("H200 SXM"), (494.7, 989.4, 66.9, 66.9), (4800, 900, 64),
            capability=_cuda(9), memory=151397597184, **_HOPPER,
        ),
        _gpu(
            "a100-80gb", "NVIDIA A100-SXM4-80GB", _NVIDIA.format("A100 80GB SXM"), (156, 312, 19.5, 19.5),
            (2039.04, 600, 32), capability=_cuda(8), memory=85100068864, shared=167936, cores=108, units=64,
            cache=41943040, clock=1.41, optin=166912,
        ),
        _gpu(
            "b200", "NVIDIA B200", _NVIDIA.format("HGX B200"), (1125, 2250, 75, 37), (7672.32, 1800, 64),
            capability=_cuda(10), memory=191514411008, shared=233472, cores=148, cache=132644864, clock=1.965,
            optin=232448,
        ),
        _gpu(
            "l4", "NVIDIA L4", _NVIDIA.format("L4"), (60, 121, 30.3, 0.47), (300, 0, 32), capability=_cuda(8, 9),
            memory=23609475072, shared=102400, threads=1536, cores=58, cache=50331648, clock=2.04, optin=101376,
        ),
        _gpu(
            "mi300x", "AMD Instinct MI300X", "AMD's data sheet of the Instinct MI300X", (653.7, 1307.4, 163.4, 163.4),
            (5300, 896, 64), "rocm", 'rocm_compute_capability { gcn_arch_name: "gfx942:sramecc+:xnack-" }',
            memory=206158430208, warp=64, block=65536, shared=65536, cores=304, cache=4194304, clock=2.1, optin=65536,
            registers=131072,
        ),
        _tpu(
            "v5e", "TPU v5 lite", _GOOGLE.format("v5e"), 197, (819, 200, 16), 6.1,
            ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16")),
        ),
        _tpu(
            "v5p", "TPU v5", _GOOGLE.format("v5p"), 459, (2765, 600, 95), 14.3,
            ((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4"), (128, "4x4x8")),
        ),
        _tpu(
            "v6e", "TPU v6 lite", _GOOGLE.format("v6e"), 918, (1640, 448, 32), 12.2,
            ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"), (256, "16x16")),
        ),
    )
}  # fmt: skip


def chip_of(kind: str) -> Chip | None:
    """The chip of JAX's name for a kind of device; None where it is not known."""
    found = [chip for chip in CHIPS.values() if kind.startswith(chip.kind)]
    return max(found, key=lambda chip: len(chip.kind), default=None)
