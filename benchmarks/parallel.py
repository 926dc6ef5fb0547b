"""Layers to lay over several devices, and the collectives of a compiled step, for `shards` and `mesh`."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.programs import moe

LAYERS, ROWS, TIME, WIDTH, HEADS, EXPERTS = 6, 64, 64, 64, 4, 8  # rows for all devices
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
Weights = dict[str, Array]
Moves = dict[str, tuple[int, int]]
Shapes = Callable[[int], dict[str, tuple[int, ...]]]


def matrices(width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer of the GPT."""
    square = (width, width)
    return {"qkv": (3, *square), "out": square, "up": (width, 4 * width), "down": (4 * width, width)}


def of_experts(width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer of the mixture of experts."""
    into, out = (EXPERTS, width, 2 * width), (EXPERTS, 2 * width, width)
    square = {"qkv": (3, width, width), "out": (width, width), "router": (width, EXPERTS)}
    return {**square, "gate": into, "up": into, "down": out}


def norm(x: Array) -> Array:
    """Layer norm without weights."""
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def attention(x: Array, w: Weights, heads: int) -> Array:
    """Self-attention on the stream `(rows, time, width)`."""
    q, k, v = ((norm(x) @ w["qkv"][i]).reshape(*x.shape[:2], heads, -1) for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*x.shape[:2], -1) @ w["out"]


def block(x: Array, w: Weights, heads: int = HEADS, whole: Callable[[Array], Array] = lambda x: x) -> Array:
    """Self-attention and an MLP, each added to the stream; `whole` adds up parts of a sum."""
    x = x + whole(attention(x, w, heads))
    return x + whole(jax.nn.gelu(norm(x) @ w["up"]) @ w["down"])


def expert_block(x: Array, w: Weights) -> Array:
    """Self-attention and experts, two for each token, each added to the stream; the balancing loss is left out."""
    x = x + attention(x, w, HEADS)
    return x + moe.experts(w, norm(x), int(1.25 * moe.CHOICES * x.shape[1] / EXPERTS))[0]


def through(layer: Callable[[Array, Weights], Array], weights: Weights | list[Weights], x: Array) -> Array:
    """All layers: in a scan if their weights are stacked, one after the other if they are listed."""
    if isinstance(weights, dict):
        return lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
    for w in weights:
        x = layer(x, w)
    return x


def listed(weights: Weights) -> list[Weights]:
    """The weights of each layer, of stacks."""
    return [jax.tree.map(lambda w, i=i: w[i], weights) for i in range(LAYERS)]


def arguments(width: int = WIDTH, time: int = TIME, shapes: Shapes = matrices) -> tuple[Weights, Array]:
    """Stacked weights of some width, and a batch."""
    *keys, of_batch = jax.random.split(jax.random.key(0), len(shapes(width)) + 1)
    pairs = zip(shapes(width).items(), keys, strict=True)
    weights = {name: 0.1 * jax.random.normal(key, (LAYERS, *shape)) for (name, shape), key in pairs}
    return weights, jax.random.normal(of_batch, (ROWS, time, width))


# ----------------------------------------------------------------------------------------------------- collectives


def moves(text: str) -> Moves:
    """The collectives that a compiled program runs: how many there are of each, and the bytes that they make.

    Those in the body of a loop count as often as the loop runs, where XLA knows it, and else once. On a TPU one that
    runs beside products is written in all their fusions, with one number.
    """
    bodies = {
        name: lines.splitlines()
        for name, lines in re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    }
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", text, re.M)
    found: Moves = {}
    fused = set[str]()

    def walk(name: str, times: int, is_fused: bool = False) -> None:
        for line in bodies[name]:
            match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(", line)
            channel = re.search(r"channel_id=\d+", line) if match and is_fused else None
            if match and not (channel and channel[0] in fused):
                number, total = found.get(match[2], (0, 0))
                found[match[2]] = number + times, total + times * _bytes_made(match[1], bool(match[3]))
                fused.update([channel[0]] if channel else [])
            if re.search(r" [\w-]+-(done|update)\(", line) is None:
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                for inner in _called(line):
                    walk(inner, times * (int(trips[1]) if trips else 1), " fusion(" in line)

    walk(entry, 1)
    return found


def _called(line: str) -> list[str]:
    """The computations that an instruction runs."""
    places = r"(?:calls|body|to_apply|true_computation|false_computation|branch_computations|called_computations)"
    return re.findall(r"[\w.-]+", " ".join(re.findall(rf"{places}=(%?[\w.-]+|\{{.*?\}})", line)))


def _bytes_made(types: str, is_started: bool) -> int:
    """The bytes of results; an instruction that only starts has its operands in front of them, and flags behind."""
    shapes = re.findall(r"([a-z]+\d*\w*)\[([\d,]*)\]", re.sub(r"u32\[\]", "", types) if is_started else types)
    sizes = [prod(int(n) for n in dims.split(",") if n) * _bits(dtype) // 8 for dtype, dims in shapes]
    return sum(sizes[len(sizes) // 2 :] if is_started and len(sizes) > 1 else sizes)


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # a truth


def in_words(moves: Moves) -> str:
    """Collectives as a table shows them."""
    return ", ".join(f"{number} {name} {size / 1e3:.0f} kB" for name, (number, size) in sorted(moves.items()))


def relative_error(got: Any, want: Any) -> float:
    """The largest difference of a leaf, relative to the largest number in it."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
