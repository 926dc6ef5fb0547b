"""Make sections of kind `graph` as a report would hold them: a toy, a small transformer, and one of 5,000 ops.

The ops are written down forward with shapes and scopes, as a trace would; the backward then follows from them: what it
reads is saved where the op is a matrix product or the input of a block, and else recomputed out of what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

Section = dict[str, Any]
SAVED_OPS = ("dot_general", "gather")
LINEAR = ("add", "sub", "reshape", "transpose", "reduce_sum", "slice", "add_any")
SECONDS_PER_BYTE = 2e-10


@dataclass
class Builder:
    """Collects the columns of one section while ops are written down, one call each."""

    scopes: list[dict[str, Any]] = field(default_factory=lambda: [_scope(None, "loss", "root")])
    names: list[str] = field(default_factory=list)
    node_scopes: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    node_sources: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    saved: list[bool] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    value_sources: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    arguments: dict[str, list[str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    inputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    role: str = "forward"

    def scope(self, parent: int, name: str, kind: str = "module", detail: str = "") -> int:
        """Open a scope inside another, and give its index."""
        self.scopes.append(_scope(parent, name, kind, detail))
        return len(self.scopes) - 1

    def argument(self, label: str, shape: tuple[int, ...]) -> int:
        """Add an argument of the function, and give its value."""
        return self._value(shape, -1, label, self._text(self.sources, ""))

    def op(self, name: str, reads: tuple[int, ...], shape: tuple[int, ...], scope: int, source: str) -> int:
        """Add an op that reads values and makes one, and give that one."""
        node = len(self.names)
        self.names.append(name)
        self.node_scopes.append(scope)
        self.roles.append(self.role)
        self.node_sources.append(self._text(self.sources, source))
        value = self._value(shape, node, "", self.node_sources[-1])
        self.seconds.append(SECONDS_PER_BYTE * self.bytes[value] * (20 if name == "dot_general" else 1))
        self.inputs[node] = reads
        for read in reads:
            if self.makers[read] < 0:
                self.arguments.setdefault(str(node), []).append(self.labels[read])
            else:
                self.edges.append((self.again.get(read, self.makers[read]), node, read))
        return value

    def save(self, value: int, reason: str) -> None:
        """Say that a value is kept for the backward, and why."""
        self.saved[value] = True
        self.reasons[value] = self._text(self.texts, reason)

    def section(self, title: str) -> Section:
        """The section as a page takes it."""
        starts, ends, read = zip(*self.edges, strict=True)
        return {
            "kind": "graph",
            "cut": True,
            "id": "graph",
            "title": title,
            "lead": "Each box is an op, or a scope that opens; each line through the cut is a value that is kept.",
            "scopes": self.scopes,
            "nodes": {
                "name": self.names,
                "scope": self.node_scopes,
                "role": self.roles,
                "source": self.node_sources,
                "seconds": self.seconds,
            },
            "values": {
                "type": self.types,
                "bytes": self.bytes,
                "node": self.makers,
                "label": self.labels,
                "saved": self.saved,
                "reason": self.reasons,
                "source": self.value_sources,
            },
            "edges": {"from": list(starts), "to": list(ends), "value": list(read)},
            "arguments": self.arguments,
            "sources": self.sources,
            "texts": self.texts,
        }

    def _value(self, shape: tuple[int, ...], maker: int, label: str, source: int) -> int:
        self.shapes.append(shape)
        self.types.append(f"float32[{','.join(map(str, shape))}]")
        self.bytes.append(4 * prod(shape))
        self.makers.append(maker)
        self.labels.append(label)
        self.saved.append(False)
        self.reasons.append(-1)
        self.value_sources.append(source)
        return len(self.types) - 1

    def _text(self, table: list[str], text: str) -> int:
        if text not in table:
            table.append(text)
        return table.index(text)


def _scope(parent: int | None, name: str, kind: str, detail: str = "") -> dict[str, Any]:
    return {"parent": parent, "name": name, "kind": kind, "detail": detail}


def _reread(b: Builder, value: int) -> int:
    """What the backward reads in the place of a forward value: itself if it is kept, else an op that runs again."""
    if b.makers[value] < 0 or b.saved[value] or value in b.again:
        return value
    node = b.makers[value]
    if b.names[node] in SAVED_OPS:
        b.save(value, "a matrix product, which nothing may compute twice")
        return value
    for read in b.inputs[node]:
        _reread(b, read)
    b.role = "recomputed"
    b.op(b.names[node], b.inputs[node], b.shapes[value], b.node_scopes[node], b.sources[b.node_sources[node]])
    b.again[value] = len(b.names) - 1
    return value


def _pull(b: Builder, node: int, value: int, cotangent: int, cotangents: dict[int, int]) -> None:
    """Write the backward of one op."""
    name, scope, source = b.names[node], b.node_scopes[node], b.sources[b.node_sources[node]]
    for position, read in enumerate(b.inputs[node]):
        if name in LINEAR and b.shapes[read] == b.shapes[value]:
            pulled = cotangent
        else:
            others = [other for place, other in enumerate(b.inputs[node]) if place != position]
            needed = [] if name in LINEAR else (others or [read])
            kept = tuple(_reread(b, other) for other in needed)
            b.role = "backward"
            back = name if name in ("dot_general", "reshape", "transpose") else "mul"
            pulled = b.op(back, (cotangent, *kept), b.shapes[read], scope, source)
        if read in cotangents:
            b.role = "backward"
            pulled = b.op("add_any", (cotangents[read], pulled), b.shapes[read], scope, source)
        cotangents[read] = pulled


def differentiate(b: Builder, result: int) -> None:
    """Write the backward of all that was written so far, from its result, in reverse."""
    values = {maker: value for value, maker in enumerate(b.makers) if maker >= 0}
    forward = len(b.names)
    b.role = "backward"
    cotangents = {result: b.op("broadcast_in_dim", (), b.shapes[result], 0, "train.py:31 (loss)")}
    for node in reversed(range(forward)):
        if values[node] in cotangents:
            _pull(b, node, values[node], cotangents[values[node]], cotangents)


def toy() -> Section:
    """Sixteen ops, no scopes but one call: small enough to count by hand."""
    b = Builder()
    x, w = b.argument("x", (64, 128)), b.argument("params['w']", (128, 256))
    hidden = b.op("dot_general", (x, w), (64, 256), 0, "toy.py:7 (loss)")
    call = b.scope(0, "silu", "call")
    gate = b.op("logistic", (hidden,), (64, 256), call, "toy.py:8 (loss)")
    active = b.op("mul", (hidden, gate), (64, 256), call, "toy.py:8 (loss)")
    square = b.op("square", (active,), (64, 256), 0, "toy.py:9 (loss)")
    differentiate(b, b.op("reduce_sum", (square,), (), 0, "toy.py:9 (loss)"))
    return b.section("The graph of a toy")


def _norm(b: Builder, x: int, parent: int, name: str, long: bool) -> int:
    """Divide by the root of the mean square, in a scope of its own."""
    scope, shape, source = b.scope(parent, name), b.shapes[x], "layers.py:14 (norm)"
    rows = (*shape[:-1], 1)
    if long:
        mean = b.op("reduce_sum", (x,), rows, scope, source)
        x = b.op("sub", (x, b.op("div", (mean,), rows, scope, source)), shape, scope, "layers.py:15 (norm)")
    square = b.op("square", (x,), shape, scope, "layers.py:16 (norm)")
    root = b.op("rsqrt", (b.op("reduce_sum", (square,), rows, scope, source),), rows, scope, "layers.py:17 (norm)")
    return b.op("mul", (x, root), shape, scope, "layers.py:18 (norm)")


def _attention(b: Builder, x: int, parent: int, heads: int) -> int:
    """Attend, in a scope of its own."""
    scope = b.scope(parent, "attention")
    batch, length, width = b.shapes[x]
    split, scores = (batch, heads, length, width // heads), (batch, heads, length, length)
    parts = []
    for line, name in enumerate("qkv", 30):
        weight = b.argument(f"params['{name}{parent}']", (width, width))
        flat = b.op("dot_general", (x, weight), (batch, length, width), scope, f"layers.py:{line} (attention)")
        parts.append(b.op("reshape", (flat,), split, scope, f"layers.py:{line} (attention)"))
    q, k, v = parts
    logits = b.op("dot_general", (q, k), scores, scope, "layers.py:34 (attention)")
    softmax = b.scope(scope, "softmax", "call")
    top = b.op("exp", (logits,), scores, softmax, "layers.py:35 (attention)")
    total = b.op("reduce_sum", (top,), (*scores[:-1], 1), softmax, "layers.py:35 (attention)")
    weights = b.op("div", (top, total), scores, softmax, "layers.py:35 (attention)")
    mixed = b.op("dot_general", (weights, v), split, scope, "layers.py:36 (attention)")
    joined = b.op("reshape", (mixed,), (batch, length, width), scope, "layers.py:37 (attention)")
    out = b.argument(f"params['out{parent}']", (width, width))
    return b.op("dot_general", (joined, out), (batch, length, width), scope, "layers.py:38 (attention)")


def _mlp(b: Builder, x: int, parent: int, name: str, gelu: bool) -> int:
    """Two products with a curve between them, in a scope of its own."""
    scope = b.scope(parent, name)
    batch, length, width = b.shapes[x]
    wide, source = (batch, length, 4 * width), "layers.py:52 (mlp)"
    hidden = b.op("dot_general", (x, b.argument(f"params['up{scope}']", (width, 4 * width))), wide, scope, source)
    if gelu:
        cube = b.op("integer_pow", (hidden,), wide, scope, "layers.py:54 (gelu)")
        inner = b.op("tanh", (b.op("add", (hidden, cube), wide, scope, "layers.py:54 (gelu)"),), wide, scope, source)
        active = b.op("mul", (hidden, inner), wide, scope, "layers.py:55 (gelu)")
    else:
        active = b.op("tanh", (hidden,), wide, scope, "layers.py:53 (mlp)")
    down = b.argument(f"params['down{scope}']", (4 * width, width))
    return b.op("dot_general", (active, down), (batch, length, width), scope, "layers.py:56 (mlp)")


def _block(b: Builder, x: int, model: int, index: int, experts: int) -> int:
    """One layer: norm, attention, norm, and one or more mlps."""
    scope, shape, source = b.scope(model, f"block_{index}"), b.shapes[x], "model.py:21 (block)"
    b.save(x, "the input of a block, from which much can be recomputed")
    attended = _attention(b, _norm(b, x, scope, "norm_1", experts > 1), scope, heads=8)
    x = b.op("add", (x, attended), shape, scope, source)
    normed = _norm(b, x, scope, "norm_2", experts > 1)
    for expert in range(experts):
        name = "mlp" if experts == 1 else f"expert_{expert}"
        x = b.op("add", (x, _mlp(b, normed, scope, name, experts > 1)), shape, scope, source)
    return x


def _model(layers: int, experts: int, shape: tuple[int, int, int], title: str) -> Section:
    """Embedding, layers, and a loss in a loop over pieces of the batch."""
    b = Builder()
    model = b.scope(0, "transformer")
    embed = b.scope(model, "embed")
    table = b.argument("params['embed']", (4096, shape[-1]))
    x = b.op("gather", (table, b.argument("tokens", shape[:2])), shape, embed, "model.py:11 (embed)")
    for index in range(layers):
        x = _block(b, x, model, index, experts)
    loop = b.scope(model, "scan", "loop", "4 steps")
    head = b.argument("params['head']", (shape[-1], 4096))
    logits = b.op("dot_general", (x, head), (*shape[:2], 4096), loop, "train.py:24 (loss)")
    top = b.op("exp", (logits,), b.shapes[logits], loop, "train.py:25 (loss)")
    log = b.op(
        "log", (b.op("reduce_sum", (top,), shape[:2], loop, "train.py:25 (loss)"),), shape[:2], loop, "train.py:26"
    )
    differentiate(b, b.op("reduce_sum", (log,), (), 0, "train.py:31 (loss)"))
    return b.section(title)


def transformer() -> Section:
    """About 500 ops: six layers, each of five scopes, and a loop."""
    return _model(6, 1, (4, 128, 256), "The graph of a small transformer")


def large() -> Section:
    """About 5,000 ops: 24 layers of several experts each."""
    return _model(24, 6, (8, 512, 768), "The graph of a large transformer")


def flat(count: int = 400) -> Section:
    """One long chain without any scope, five ops to a source line."""
    b = Builder()
    x = b.argument("x", (256, 256))
    for index in range(count // 2):
        reads = (x, b.argument(f"w[{index}]", (256, 256))) if index % 5 == 0 else (x,)
        name = "dot_general" if index % 5 == 0 else "tanh"
        x = b.op(name, reads, (256, 256), 0, f"flat.py:{10 + index // 5} (loss)")
    differentiate(b, b.op("reduce_sum", (x,), (), 0, "flat.py:9 (loss)"))
    return b.section("A graph without scopes")


def report(section: Section) -> dict[str, Any]:
    """A page that holds nothing but one section."""
    return {"format": 1, "title": "loss", "subtitle": "made for a test", "totals": [], "sections": [section]}


SECTIONS: dict[str, Callable[[], Section]] = {"toy": toy, "transformer": transformer, "large": large, "flat": flat}
