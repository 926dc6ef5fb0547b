"""The programs that are measured: what people train with JAX, as they write it.

Each file is one program that knows nothing of jointcut, at four sizes: `tiny` for tests, `small` for two cores, `large`
for a GPU, and `medium`, base models with a batch for one TPU of 16 GB. Files, in reading order:

- program: Say what a program of the suite is: a loss, its arguments, and where a user could put `jax.checkpoint`.
- layers: Layers that several programs are made of, in plain JAX; what differs stands in each program's file.
- text: Read real text: the sources of Python's standard library.
- mlp: A multilayer perceptron with layer norm, on a batch of features: the smallest program worth measuring.
- gpt: A byte-level GPT in plain JAX, looped or unrolled.
- vit: A Vision Transformer that classifies images: patches, a class token, pre-norm blocks written one after the other.
- resnet: A residual convolutional network for images: bottleneck blocks, and batch norm that keeps statistics.
- unet: A U-Net that labels each pixel of an image: stages on the way down, and on the way up beside what they left.
- moe: A language model whose blocks send each token to two of many experts, each with room for so many tokens.
- lstm: A byte-level language model of stacked LSTM layers, trained by truncated backpropagation through time.
- gru: An acoustic model: a deep GRU over frames of sound, its layers looped by a scan inside the scan over time.
- mamba: A byte-level language model of selective state-space blocks, as in Mamba, its recurrence an associative scan.
- gnn: A message-passing graph neural network that classifies the nodes of a random sparse graph.
- ode: A neural ordinary differential equation that classifies: a learned flow in classical Runge-Kutta steps.
- vae: A convolutional variational autoencoder of images, deep and residual, trained on the evidence lower bound.
- diffusion: One training step of a diffusion transformer: noise images by random amounts, and predict the noise.
- rollout: Policy search through a differentiable simulator: soft robots of masses and springs learn to run.
- forces: An interatomic potential of continuous-filter convolutions, as in SchNet, trained on energies and on forces.
- maml: Model-agnostic meta-learning: few-shot classifiers are trained by gradient steps, and these are differentiated.
- flax_linen: A BERT-like encoder from Flax Linen's own layers, trained on masked tokens.
- flax_nnx: A ConvNeXt from Flax NNX's own layers, with drop path, on a batch of images.
- equinox_model: A vision transformer from Equinox's own layers, written for one image and vmapped over the batch.
- haiku_resnet: Haiku's own pre-activation ResNet with batch norm, on a batch of small images.
"""

from collections.abc import Mapping
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
    """Import one program's file and build it.

    Raises `ValueError` for an unknown name, `ImportError` where the library of a model is not installed.
    """
    return found(__name__, FOUND_IN, name, size)


def found(folder: str, places: Mapping[str, str], name: str, size: Size) -> Program:
    """Import the file of a program in a folder, and build it; raises as `load` does."""
    if name not in places:
        raise ValueError(f"unknown program {name!r}; there are {', '.join(places)}")
    module, build = places[name].split(":")
    try:
        imported = import_module(f"{folder}.{module}")
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'jointcut[bench]'") from error
    return getattr(imported, build)(size)
