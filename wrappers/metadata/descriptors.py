"""Describe every array that enters or leaves a program.

Each array has a name, which holds its kind and position, and most have a path in the user's arguments or results. The
descriptors follow the order of the inputs and outputs of the programs. They correspond to `AOTInput` and `AOTOutput` of
PyTorch's `aot_export_module`:

    inference   (inputs)              -> (outputs)
    joint       (inputs, tangents)    -> (outputs, gradients)
    forward     (inputs)              -> (outputs, saved residuals)
    backward    (residuals, tangents) -> (gradients)

Inputs are the constants that the function closes over, then the leaves of its arguments. A residual is a saved result,
an output or an input of the forward; its name says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

import jax
import jax.core

from jointcut.partition.errors import ArtefactError, CallError, message
from jointcut.partition.program.sizes import names, number
from jointcut.wrappers.metadata.schemas import SubclassMeta
from jointcut.wrappers.record import aligned, read_dtype

Size = int | str  # the size of a dimension: a number, or the text of an expression such as "b" or "2*b"

#: The cure for a signature.json that contradicts itself or its files.
CURE = "Export again; signature.json is not made to be edited."


@dataclass(frozen=True)
class Described:
    """One array: its name, shape (symbolic sizes as text) and dtype."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    weak_type: bool

    def __str__(self) -> str:
        """`primals_1: float32[b,128]`."""
        return f"{self.name}: {self.type}"

    @property
    def type(self) -> str:
        """`float32[b,128]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def aval(self) -> jax.core.ShapedArray:
        """The JAX type, with 1 for each symbolic size."""
        shape = tuple(d if isinstance(d, int) else 1 for d in self.shape)
        return jax.core.ShapedArray(shape, read_dtype(self.dtype, self.name), weak_type=self.weak_type)

    @classmethod
    def like(cls, aval: Any, **rest: Any) -> Self:
        """Return the description of an object with shape and dtype."""
        shape = tuple(map(size_of, aval.shape))
        dtype = "float0" if aval.dtype == jax.dtypes.float0 else str(aval.dtype)
        return cls(shape=shape, dtype=dtype, weak_type=bool(getattr(aval, "weak_type", False)), **rest)

    @classmethod
    def read(cls, item: Any, where: str) -> Self:
        """Return the description in a JSON object; raises `ArtefactError` if it holds none."""
        hints = get_type_hints(cls)
        if not isinstance(item, dict) or set(item) != set(hints):
            what = f"is no description of an array: it must have {', '.join(hints)}."
            raise ArtefactError(message(where, what, CURE))
        fields = {name: as_tuple(item[name]) for name in hints}
        for name, value in fields.items():
            if not _has_type(value, hints[name]):
                raise ArtefactError(message(f"{where}[{name!r}]", f"is {value!r}, not what belongs there.", CURE))
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Input(Described):
    """A leading input of `inference` and `forward`.

    Attributes:
        kind: `constant` (closed over, its value in `constants.npz`), `buffer` (an array of an object that the function
            writes), `parameter` (a leaf of the arguments in `argnums`), or `user_input`.
        path: `args[0]['w']`; `constant 0` for a constant.
        keys: the path as keys: `("args", 0, "w")`; empty for a constant.
        sharding: its sharding as text; None if it had none.
    """

    kind: str
    path: str
    keys: tuple[Size, ...]
    sharding: str | None


@dataclass(frozen=True)
class Output(Described):
    """A result of the function.

    Attributes:
        kind: `output`; `aux` for the second result with `has_aux`; or `state` for an array that the function writes to
            an object of its arguments (an NNX module), the new value of an input of the kind `buffer`.
        path: `result['loss']`; for a state, the path of its input.
        keys: the path as keys.
    """

    kind: str
    path: str
    keys: tuple[Size, ...]


@dataclass(frozen=True)
class ResidualInput(Described):
    """A leading input of `backward`, which comes from the forward.

    Attributes:
        kind, index: its position: `index` among the `saved` results, the `output` or the `input` arrays of the forward.
        bytes: the bytes of the array; symbolic sizes count as the sizes that the plan was made for.
        op, scope, source: the operation that makes it, its name stack, and the user's line.
        reason: the reason why it is saved rather than recomputed.
    """

    kind: str
    index: int
    bytes: int
    op: str
    scope: str
    source: str
    reason: str


@dataclass(frozen=True)
class Tangent(Described):
    """A trailing input of `backward`: the cotangent of the output `of`."""

    of: str


@dataclass(frozen=True)
class GradientOutput(Described):
    """A result of `backward`: the gradient of the input `of`, whose path is `path`.

    `part` is `whole`; the sparse gradient of a table has the parts `rows` and `places`.
    """

    of: str
    path: str
    part: str


@dataclass(frozen=True)
class Descriptors:
    """The arrays of a joint program, and of its halves once it is cut, each in the order of the programs.

    Attributes:
        inputs: the arrays that the function closes over, then its arguments; an array passed twice is one input.
        outputs: the results of the function.
        tangents: the cotangents that the backward takes; empty for inference, like gradients and residuals.
        gradients: the results of the backward.
        forward_ops: the number of leading equations of the joint program that belong to the forward.
        residuals: the arrays that the backward takes from the forward; empty before the cut.
        metadata: the records of the call; None inside a transformation, which has flat arrays and no trees.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    tangents: tuple[Tangent, ...]
    gradients: tuple[GradientOutput, ...]
    forward_ops: int
    residuals: tuple[ResidualInput, ...] = ()
    metadata: SubclassMeta | None = None

    def __str__(self) -> str:
        """Return a line for each array: its name, its type, and where it belongs."""
        groups = {
            "inputs": [(each, f"{each.kind} {each.path}") for each in self.inputs],
            "outputs": [(each, f"{each.kind} {each.path}") for each in self.outputs],
            "residuals": [(each, f"{each.op or each.kind} {each.source}".rstrip()) for each in self.residuals],
            "tangents": [(each, f"of {each.of}") for each in self.tangents],
            "gradients": [(each, f"of {each.path}{_part(each)}") for each in self.gradients],
        }
        lines = []
        for title, rows in groups.items():
            lines += [title, *aligned([(each.name, each.type, words) for each, words in rows])] if rows else []
        return "\n".join(lines)


def _part(gradient: GradientOutput) -> str:
    return "" if gradient.part == "whole" else f", {gradient.part}"


def read_all(kind: type[Described], items: Any, where: str) -> tuple[Any, ...]:
    """Return the descriptions in a JSON array."""
    if not isinstance(items, list):
        raise ArtefactError(message(where, f"is a {type(items).__name__}, not an array.", CURE))
    return tuple(kind.read(item, f"{where}[{i}]") for i, item in enumerate(items))


def size_of(size: Any) -> Size:
    """Return a size of a JAX shape as a number, or as the text of its expression."""
    return size if type(size) is int else str(size)


def fits(got: Sequence[Any], want: Sequence[Size]) -> bool:
    """Whether a shape is the described one; any number fits a symbolic size."""
    return len(got) == len(want) and all(isinstance(w, str) or g == w for g, w in zip(got, want, strict=True))


def same_sizes(arrays: Sequence[tuple[str, Described, Sequence[Any]]]) -> None:
    """Compare the symbolic sizes of arrays; each array is given by its place, its description and its shape.

    Raises `CallError` if one symbol has two values, or a size differs from the value of its expression.
    """
    sizes = [
        (where, size, got)
        for where, described, shape in arrays
        for size, got in zip(described.shape, shape, strict=True)
        if isinstance(size, str) and type(got) is int
    ]
    known = {size: got for _, size, got in reversed(sizes) if size.isidentifier()}
    for where, size, got in sizes:
        if names(size) <= known.keys() and number(size, known) != got:
            values = ", ".join(f"{name} = {known[name]}" for name in sorted(names(size)))
            what = f"has size {got} where {size} stands, and {values}."
            raise CallError(message(where, what, "Give arrays whose sizes go together."))


#: The attribute of a box that holds its one array, as in Flax's variables.
BOXED = "value"


def plain_keys(keys: Sequence[Any]) -> tuple[Size, ...]:
    """Return a JAX path as names and positions, without the kinds of its keys; empty keys are left out.

    So a dict can take the place of a module whose class cannot be imported.
    """
    return tuple(_plain_key(key) for key in keys if str(key))


def _plain_key(key: Any) -> Size:
    for field in ("idx", "name", "key"):
        if hasattr(key, field):
            value = getattr(key, field)
            is_position = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            return value if is_position else str(value)
    return str(key)


def as_tuple(value: Any) -> Any:
    """Return a JSON array as a tuple; return any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


def _has_type(value: Any, hint: Any) -> bool:
    if hint == tuple[Size, ...]:
        return isinstance(value, tuple) and all(_is_size(x) for x in value)
    if hint == str | None:
        return value is None or isinstance(value, str)
    return type(value) is hint and (hint is not int or value >= 0)


def _is_size(x: Any) -> bool:
    return isinstance(x, str) or (type(x) is int and x >= 0)


def plain_tree(items: Sequence[tuple[tuple[Size, ...], Any]]) -> Any:
    """Return dicts and tuples with the leaves at their keys: positions make a tuple, names a dict.

    >>> plain_tree([(("loss",), 1), (("parts", 0), 2), (("parts", 1), 3)])
    {'loss': 1, 'parts': (2, 3)}
    """
    if len(items) == 1 and items[0][0] == ():
        return items[0][1]
    groups: dict[Size, list[tuple[tuple[Size, ...], Any]]] = {}
    for keys, leaf in items:
        groups.setdefault(keys[0], []).append((keys[1:], leaf))
    if list(groups) == list(range(len(groups))):
        return tuple(map(plain_tree, groups.values()))
    as_name = str if any(isinstance(key, str) for key in groups) else int  # JAX cannot sort a dict with both
    return {as_name(key): plain_tree(group) for key, group in groups.items()}
