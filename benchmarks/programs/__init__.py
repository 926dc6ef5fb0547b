"""The programs that are measured: what people train with JAX, as they write it.

Each file is one program that knows nothing of jointcut, at three sizes: `tiny` for tests, `small` for two cores, `large`
for a GPU. Files, in reading order:

- program: Say what a program of the suite is: a loss, its arguments, and where a user could put `jax.checkpoint`.
- text: Read real text: the sources of Python's standard library.
- mlp: A multilayer perceptron with layer norm, on a batch of features: the smallest program worth measuring.
- gpt: A byte-level GPT in plain JAX, looped or unrolled.
"""

from importlib import import_module

from benchmarks.programs.program import SIZES as SIZES
from benchmarks.programs.program import Program as Program
from benchmarks.programs.program import Size as Size

#: Each program by name: its file, and the function in it that builds one of a given size.
FOUND_IN = {
    "mlp": "mlp:program",
    "gpt-scan": "gpt:scan",
    "gpt-unrolled": "gpt:unrolled",
    "vit": "vit:program",
    "resnet": "resnet:program",
    "unet": "unet:program",
    "moe": "moe:program",
    "lstm": "lstm:program",
    "gru": "gru:program",
    "mamba": "mamba:program",
    "gnn": "gnn:program",
    "ode": "ode:program",
    "vae": "vae:program",
    "diffusion": "diffusion:program",
    "rollout": "rollout:program",
    "forces": "forces:program",
    "maml": "maml:program",
    "flax-linen": "flax_linen:program",
    "flax-nnx": "flax_nnx:program",
    "equinox": "equinox_model:program",
    "haiku-resnet": "haiku_resnet:program",
}

PROGRAMS = tuple(FOUND_IN)


def load(name: str, size: Size = "small") -> Program:
    """Import one program's file and build it; raises `ValueError` for an unknown name."""
    if name not in FOUND_IN:
        raise ValueError(f"unknown program {name!r}; there are {', '.join(PROGRAMS)}")
    module, build = FOUND_IN[name].split(":")
    return getattr(import_module(f"benchmarks.programs.{module}"), build)(size)
