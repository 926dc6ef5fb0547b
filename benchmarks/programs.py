"""List the programs that are measured."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax

from benchmarks import corpus, gpt


@dataclass(frozen=True)
class Program:
    """A loss of (parameters, batch, key) with an option `remat`, to be differentiated by its parameters."""

    name: str
    title: str
    loss: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)


def gpt_program(name: str, config: gpt.Config, rows: int) -> Program:
    """A training step of a GPT on real text."""
    text = corpus.load(megabytes=1.0)
    parameters = gpt.init(jax.random.key(0), config)
    batch = corpus.batch(text, rows, config.context, seed=0)
    sizes = asdict(config) | {"rows": rows, "parameters": sum(p.size for p in jax.tree.leaves(parameters))}
    depth = f"{config.layers} blocks {'in a scan' if config.scan else 'unrolled'}"
    title = f"{depth}, width {config.width}, batch {rows}x{config.context}, dropout {config.dropout}"
    loss = partial(gpt.loss, config=config)
    return Program(name, title, loss, (parameters, batch, jax.random.key(1)), sizes)


def gpt_scan(small: bool) -> Program:
    """A GPT that loops over its layers."""
    config = gpt.Config(layers=1, width=16, heads=2, context=16) if small else gpt.Config()
    return gpt_program("gpt-scan", config, rows=2 if small else 8)


def gpt_unrolled(small: bool) -> Program:
    """The same GPT, its layers written one after the other."""
    config = gpt.Config(layers=1, width=16, heads=2, context=16, scan=False) if small else gpt.Config(scan=False)
    return gpt_program("gpt-unrolled", config, rows=2 if small else 8)


PROGRAMS: dict[str, Callable[[bool], Program]] = {"gpt-scan": gpt_scan, "gpt-unrolled": gpt_unrolled}
