"""Write a transformer and a residual network in JAX and in PyTorch, and cut the latter as PyTorch does.

Both take the same parameters by name, in PyTorch's layouts, and the same batch, and return the mean cross-entropy.
Each is written as its users write it: PyTorch with the functions of `torch.nn.functional`, JAX with those of
`jax.numpy` and `jax.nn`, attention as two products and a softmax. Nothing is random. This file imports PyTorch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import Array, lax
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.utils.flop_counter import flop_registry

EPSILON = 1e-5
LAYOUT = ("NCHW", "OIHW", "NCHW")

Shapes = dict[str, tuple[int, ...]]
Batch = tuple[np.ndarray, np.ndarray]

#: A matrix product or a convolution: its name, the shapes of what it reads, and its flops.
Product = tuple[str, tuple[tuple[int, ...], ...], int]


class Model(Protocol):
    """One network: its parameters, and its loss in both frameworks."""

    @property
    def title(self) -> str:
        """What it is, with its sizes."""
        ...

    def shapes(self) -> Shapes:
        """The shape of each parameter."""
        ...

    def batch(self, draw: np.random.Generator) -> Batch:
        """What the network reads, and the labels."""
        ...

    def jax_loss(self, p: Mapping[str, Array], given: Array, labels: Array) -> Array:
        """The loss in JAX."""
        ...

    def torch_loss(self, p: Mapping[str, Tensor], given: Tensor, labels: Tensor) -> Tensor:
        """The loss in PyTorch."""
        ...


@dataclass(frozen=True)
class Transformer:
    """A causal language model of pre-norm blocks, unrolled, with learned places and GELU (the exact one)."""

    width: int = 128
    heads: int = 4
    blocks: int = 4
    rows: int = 8
    tokens: int = 128
    vocabulary: int = 256

    @property
    def title(self) -> str:
        """What it is, with its sizes."""
        return f"transformer: {self.blocks} blocks of width {self.width}, {self.rows} x {self.tokens} tokens"

    def shapes(self) -> Shapes:
        """The shape of each parameter."""
        d = self.width
        shapes: Shapes = {"embed": (self.vocabulary, d), "places": (self.tokens, d)}
        for i in range(self.blocks):
            for name, fan_in, fan_out in (("qkv", d, 3 * d), ("out", d, d), ("up", d, 4 * d), ("down", 4 * d, d)):
                shapes |= {f"{name}{i}_w": (fan_out, fan_in), f"{name}{i}_b": (fan_out,)}
            shapes |= _norm_shapes(f"first{i}", d) | _norm_shapes(f"second{i}", d)
        return shapes | _norm_shapes("last", d) | {"head_w": (self.vocabulary, d), "head_b": (self.vocabulary,)}

    def batch(self, draw: np.random.Generator) -> Batch:
        """Tokens, and the tokens that follow them."""
        text = draw.integers(0, self.vocabulary, (self.rows, self.tokens + 1))
        return text[:, :-1], text[:, 1:]

    def jax_loss(self, p: Mapping[str, Array], given: Array, labels: Array) -> Array:
        """The loss in JAX."""
        x = p["embed"][given] + p["places"]
        for i in range(self.blocks):
            x = x + self._jax_attention(p, i, _jax_layer_norm(p, f"first{i}", x))
            h = jax.nn.gelu(_jax_linear(p, f"up{i}", _jax_layer_norm(p, f"second{i}", x)), approximate=False)
            x = x + _jax_linear(p, f"down{i}", h)
        return _jax_cross_entropy(_jax_linear(p, "head", _jax_layer_norm(p, "last", x)), labels)

    def _jax_attention(self, p: Mapping[str, Array], i: int, x: Array) -> Array:
        rows, tokens, width = x.shape
        parts = jnp.split(_jax_linear(p, f"qkv{i}", x), 3, axis=-1)
        q, k, v = (a.reshape(rows, tokens, self.heads, -1).swapaxes(1, 2) for a in parts)
        scores = q @ k.swapaxes(-2, -1) * (width // self.heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
        mixed = jax.nn.softmax(scores, axis=-1) @ v
        return _jax_linear(p, f"out{i}", mixed.swapaxes(1, 2).reshape(rows, tokens, width))

    def torch_loss(self, p: Mapping[str, Tensor], given: Tensor, labels: Tensor) -> Tensor:
        """The loss in PyTorch."""
        x = F.embedding(given, p["embed"]) + p["places"]
        for i in range(self.blocks):
            x = x + self._torch_attention(p, i, _torch_layer_norm(p, f"first{i}", x))
            h = F.gelu(_torch_linear(p, f"up{i}", _torch_layer_norm(p, f"second{i}", x)))
            x = x + _torch_linear(p, f"down{i}", h)
        logits = _torch_linear(p, "head", _torch_layer_norm(p, "last", x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _torch_attention(self, p: Mapping[str, Tensor], i: int, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = _torch_linear(p, f"qkv{i}", x).split(width, dim=-1)
        q, k, v = (a.view(rows, tokens, self.heads, -1).transpose(1, 2) for a in parts)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
        mixed = scores.softmax(dim=-1) @ v
        return _torch_linear(p, f"out{i}", mixed.transpose(1, 2).reshape(rows, tokens, width))


@dataclass(frozen=True)
class ResNet:
    """A residual network for small images: a stem, stages of basic blocks, batch norm as in training, a mean.

    Batch norm takes its statistics from the batch and keeps no running ones.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 2
    rows: int = 32
    side: int = 32
    classes: int = 10

    @property
    def title(self) -> str:
        """What it is, with its sizes."""
        depth = 2 * self.blocks * len(self.widths) + 2
        return f"resnet: {depth} layers, {self.rows} images of {self.side} x {self.side}"

    def _layers(self) -> Iterator[tuple[str, int, int, int]]:
        """Each block by name, with its channels before and after and its stride."""
        before = self.widths[0]
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                yield f"stage{stage}_block{block}", before, width, 2 if stage and not block else 1
                before = width

    def shapes(self) -> Shapes:
        """The shape of each parameter."""
        shapes: Shapes = {"stem": (self.widths[0], 3, 3, 3)} | _norm_shapes("stem_norm", self.widths[0])
        for name, before, width, stride in self._layers():
            shapes |= {f"{name}_conv1": (width, before, 3, 3), f"{name}_conv2": (width, width, 3, 3)}
            shapes |= _norm_shapes(f"{name}_norm1", width) | _norm_shapes(f"{name}_norm2", width)
            if stride > 1:
                shapes |= {f"{name}_skip": (width, before, 1, 1)} | _norm_shapes(f"{name}_skip_norm", width)
        return shapes | {"head_w": (self.classes, self.widths[-1]), "head_b": (self.classes,)}

    def batch(self, draw: np.random.Generator) -> Batch:
        """Images and their classes."""
        images = draw.normal(size=(self.rows, 3, self.side, self.side)).astype(np.float32)
        return images, draw.integers(0, self.classes, self.rows)

    def jax_loss(self, p: Mapping[str, Array], given: Array, labels: Array) -> Array:
        """The loss in JAX."""
        x = jax.nn.relu(_jax_batch_norm(p, "stem_norm", _jax_conv(p["stem"], given, 1)))
        for name, _, _, stride in self._layers():
            skip = x
            if stride > 1:
                skip = _jax_batch_norm(p, f"{name}_skip_norm", _jax_conv(p[f"{name}_skip"], x, stride))
            y = jax.nn.relu(_jax_batch_norm(p, f"{name}_norm1", _jax_conv(p[f"{name}_conv1"], x, stride)))
            y = _jax_batch_norm(p, f"{name}_norm2", _jax_conv(p[f"{name}_conv2"], y, 1))
            x = jax.nn.relu(y + skip)
        return _jax_cross_entropy(_jax_linear(p, "head", x.mean(axis=(2, 3))), labels)

    def torch_loss(self, p: Mapping[str, Tensor], given: Tensor, labels: Tensor) -> Tensor:
        """The loss in PyTorch."""
        x = F.relu(_torch_batch_norm(p, "stem_norm", _torch_conv(p["stem"], given, 1)))
        for name, _, _, stride in self._layers():
            skip = x
            if stride > 1:
                skip = _torch_batch_norm(p, f"{name}_skip_norm", _torch_conv(p[f"{name}_skip"], x, stride))
            y = F.relu(_torch_batch_norm(p, f"{name}_norm1", _torch_conv(p[f"{name}_conv1"], x, stride)))
            y = _torch_batch_norm(p, f"{name}_norm2", _torch_conv(p[f"{name}_conv2"], y, 1))
            x = F.relu(y + skip)
        return F.cross_entropy(_torch_linear(p, "head", x.mean(dim=(2, 3))), labels)


def parameters(model: Model, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw all parameters: weights by their fan-in, scales around one, the rest small and not zero."""
    drawn = {}
    for name, shape in model.shapes().items():
        spread = math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
        offset = 1.0 if name.endswith("_scale") else 0.0
        drawn[name] = (offset + spread * draw.normal(size=shape)).astype(np.float32)
    return drawn


def _norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}_scale": (width,), f"{name}_shift": (width,)}


def _jax_linear(p: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ p[f"{name}_w"].T + p[f"{name}_b"]


def _torch_linear(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}_w"], p[f"{name}_b"])


def _jax_layer_norm(p: Mapping[str, Array], name: str, x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + EPSILON)
    return normal * p[f"{name}_scale"] + p[f"{name}_shift"]


def _torch_layer_norm(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}_scale"], p[f"{name}_shift"], EPSILON)


def _jax_batch_norm(p: Mapping[str, Array], name: str, x: Array) -> Array:
    scale, shift = (p[f"{name}_{what}"][:, None, None] for what in ("scale", "shift"))
    centred = x - x.mean(axis=(0, 2, 3), keepdims=True)
    normal = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=(0, 2, 3), keepdims=True) + EPSILON)
    return normal * scale + shift


def _torch_batch_norm(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, p[f"{name}_scale"], p[f"{name}_shift"], training=True, eps=EPSILON)


def _jax_conv(kernel: Array, x: Array, stride: int) -> Array:
    pad = kernel.shape[-1] // 2
    return lax.conv_general_dilated(x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=LAYOUT)


def _torch_conv(kernel: Tensor, x: Tensor, stride: int) -> Tensor:
    return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)


def _jax_cross_entropy(logits: Array, labels: Array) -> Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


class Module(torch.nn.Module):
    """A model as PyTorch's users hold it: its parameters are those of a module, which compilers know to stay."""

    def __init__(self, model: Model, drawn: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.drawn = torch.nn.ParameterDict({name: torch.tensor(a) for name, a in drawn.items()})

    def forward(self, given: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return self.model.torch_loss(dict(self.drawn.items()), given, labels)

    def step(self, batch: Batch, loss_of: Callable[..., Tensor] | None = None) -> tuple[float, dict[str, np.ndarray]]:
        """The loss of a batch and the gradients by name; `loss_of` is this module compiled."""
        loss = (self if loss_of is None else loss_of)(*map(torch.tensor, batch))
        loss.backward()
        return loss.item(), {name: p.grad.numpy() for name, p in self.drawn.items() if p.grad is not None}


#: By size and name: `small` is what is compared, `tiny` is for tests.
MODELS: dict[str, dict[str, Model]] = {
    "small": {"transformer": Transformer(), "resnet": ResNet()},
    "tiny": {
        "transformer": Transformer(width=16, heads=2, blocks=1, rows=4, tokens=32, vocabulary=32),
        "resnet": ResNet(widths=(4, 8), blocks=1, rows=8, side=16),
    },
}

# ------------------------------------------------------------------------------------------------------------- PyTorch


@dataclass
class Capture:
    """One training step of PyTorch at one budget: the products of its graphs, and what its forward hands over."""

    joint: Counter[Product] = field(default_factory=Counter)
    forward: Counter[Product] = field(default_factory=Counter)
    backward: Counter[Product] = field(default_factory=Counter)
    outputs: int = 0
    bytes_saved: int = 0
    loss: float = math.nan
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    def partition(self, joint: GraphModule, inputs: Any, **options: Any) -> Any:
        """Cut as PyTorch does; what it has merged by then in the joint graph is done."""
        halves = min_cut_rematerialization_partition(joint, inputs, **options)
        self.joint, self.outputs = products_of(joint.graph), options["num_fwd_outputs"]
        return halves

    def compile_forward(self, module: GraphModule, _: Any) -> Any:
        """Take the forward as it is, and look at what it returns when it runs."""
        self.forward = products_of(module.graph)

        def run(*inputs: Any) -> Any:
            results = module(*inputs)
            free = storages((*inputs, *results[: self.outputs]))
            saved = storages(results[self.outputs :])
            self.bytes_saved = sum(size for place, size in saved.items() if place not in free)
            return results

        return make_boxed_func(run)

    def compile_backward(self, module: GraphModule, _: Any) -> Any:
        """Take the backward as it is."""
        self.backward = products_of(module.graph)
        return make_boxed_func(module.forward)


def capture(model: Model, drawn: Mapping[str, np.ndarray], batch: Batch, budget: float) -> Capture:
    """Compile a training step at a budget, run it, and note what it does."""
    made, module = Capture(), Module(model, drawn)
    backend = aot_autograd(
        fw_compiler=made.compile_forward,
        bw_compiler=made.compile_backward,
        partition_fn=made.partition,
        decompositions=select_decomp_table(),
    )
    torch.compiler.reset()
    with config.patch(activation_memory_budget=budget):
        compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
        made.loss, made.gradients = module.step(batch, compiled)
    return made


def storages(tensors: Sequence[Any]) -> dict[int, int]:
    """The bytes of each storage that some tensors lie in, by its address."""
    found = (tensor.untyped_storage() for tensor in tensors if hasattr(tensor, "untyped_storage"))
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def products_of(graph: Graph) -> Counter[Product]:
    """The products of a graph, which are what PyTorch's flop counter has a formula for."""
    found: Counter[Product] = Counter()
    for node in graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is not None:
            values = [argument.meta["val"] if hasattr(argument, "meta") else argument for argument in node.args]
            shapes = tuple(tuple(value.shape) for value in values if hasattr(value, "shape"))
            found[str(node.target), shapes, count(*values, **node.kwargs, out_val=node.meta["val"])] += 1
    return found
