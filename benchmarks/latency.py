"""Weigh a GPT in a scan and unrolled, with XLA's scheduler that hides latency and without, on one GPU and on eight.

    python -m benchmarks.latency                        # one H100, then eight: half an hour or so
    python -m benchmarks.latency --targets h100x8 --heads tied
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs import gpt
from benchmarks.programs.layers import init_norm

VOCABULARY, ROWS = 8192, 16
CONFIG = gpt.Config(layers=12, width=512, heads=8, context=512, dropout=0.0)
Params = dict[str, Any]


def init(key: Array, config: gpt.Config) -> Params:
    """The parameters of the GPT, with a vocabulary of words."""
    std = config.width**-0.5
    embed, head = (std * jax.random.normal(key, (VOCABULARY, config.width)) for _ in range(2))
    params = {**gpt.init(key, config), "embed": embed}
    return params if config.tied else params | {"head": head.T}
