"""Models of libraries that are no part of the suite, and that nothing was tuned for: one of each library.

They are read only to see how the product does on what it was not made with, so no constant may be chosen by them. Each
file is one model at two sizes, `tiny` for tests and `small` for two cores. Files, in reading order:

- linen_translator: A translator in Flax Linen: an encoder, a decoder that attends to it, and smoothed labels.
- nnx_denoiser: A denoiser in Flax NNX: a U-Net of convolutions that is told how noisy its images are.
- equinox_cde: A neural controlled differential equation in Equinox: a path of measurements steers a hidden state.
- haiku_agent: An actor-critic agent in Haiku: residual convolutions of each frame, an LSTM over time, and V-trace.
- jraph_molecules: A graph network in jraph: batched molecules, whose edges, atoms and totals are updated in rounds.
- transformers_llama: A Llama of HuggingFace's transformers 4, the last with Flax, trained from random weights.
"""

from benchmarks.programs import found
from benchmarks.programs.program import Program, Size

#: Each model by name: its file in this folder, and the function in it that builds one of a given size.
FOUND_IN = {
    "linen-translator": "linen_translator:program",
    "nnx-denoiser": "nnx_denoiser:program",
    "equinox-cde": "equinox_cde:program",
    "haiku-agent": "haiku_agent:program",
    "jraph-molecules": "jraph_molecules:program",
    "transformers-llama": "transformers_llama:program",
}

MODELS = tuple(FOUND_IN)
SIZES: tuple[Size, ...] = ("tiny", "small")


def load(name: str, size: Size = "small") -> Program:
    """Import one model's file and build it; raises as `benchmarks.programs.load` does."""
    return found(__name__, FOUND_IN, name, size)
