"""Describe every array that enters or leaves an exported pair.

Each has a name, which says what it is and where it stands, and a path, which says how the user reaches it. The order of
the descriptors is the order of the programs' own inputs and outputs (the contract of PyTorch's `aot_export_module`;
its `AOTInput` and `AOTOutput` descriptors say of each position what these records say):

    inference   (inputs)              -> (outputs)
    forward     (inputs)              -> (outputs, saved residuals)
    backward    (residuals, tangents) -> (gradients)

Inputs are the constants that the function closes over, then the leaves of its arguments. A residual is one of the
forward's saved results, one of its outputs, or one of its inputs: its name says which.
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
from jointcut.wrappers.record import read_dtype

Size = int | str  # of a dimension: a number, or the text of an expression such as "b" or "2*b"

#: What to do about a signature.json that contradicts itself or its files.
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
        """The type as JAX has it, with 1 for each size that is not known yet."""
        shape = tuple(d if isinstance(d, int) else 1 for d in self.shape)
        return jax.core.ShapedArray(shape, read_dtype(self.dtype, self.name), weak_type=self.weak_type)

    @classmethod
    def like(cls, aval: Any, **rest: Any) -> Self:
        """The description of something with shape and dtype."""
        shape = tuple(map(size_of, aval.shape))
        dtype = "float0" if aval.dtype == jax.dtypes.float0 else str(aval.dtype)
        return cls(shape=shape, dtype=dtype, weak_type=bool(getattr(aval, "weak_type", False)), **rest)

    @classmethod
    def read(cls, found: Any, where: str) -> Self:
        """The description that a JSON object holds; raises `ArtefactError` where it holds none."""
        hints = get_type_hints(cls)
        if not isinstance(found, dict) or set(found) != set(hints):
            what = f"is no description of an array: it must have {', '.join(hints)}."
            raise ArtefactError(message(where, what, CURE))
        made = {name: as_tuple(found[name]) for name in hints}
        for name, value in made.items():
            if not _has_type(value, hints[name]):
                raise ArtefactError(message(f"{where}[{name!r}]", f"is {value!r}, not what belongs there.", CURE))
        return cls(**made)

    def to_json(self) -> dict[str, Any]:
        """The description as a JSON object."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Input(Described):
    """A leading input of `inference` and `forward`.

    Attributes:
        kind: `constant` (closed over, its value in `constants.npz`), `buffer` (an array of an object that the function
            writes), `parameter` (a leaf of the arguments in `argnums`), or `user_input`.
        path: `args[0]['w']`; `constant 0` for a constant.
        keys: the same taken apart: `("args", 0, "w")`; none for a constant.
        sharding: how it lay on the devices, as text, where it had been put there.
    """

    kind: str
    path: str
    keys: tuple[Size, ...]
    sharding: str | None


@dataclass(frozen=True)
class Output(Described):
    """A result of the function.

    Attributes:
        kind: `output`, `aux` for what `has_aux` sets apart, or `state` for what the function wrote to an object that it
            was given (an NNX module): the value that this input, of the kind `buffer`, has in the next call.
        path: `result['loss']`; for a state that of the input.
        keys: the same taken apart.
    """

    kind: str
    path: str
    keys: tuple[Size, ...]


@dataclass(frozen=True)
class ResidualInput(Described):
    """A leading input of `backward`: something of the forward.

    Attributes:
        kind: `saved`, `output` or `input`, which is also where it is found: among the saved results of the forward, its
            outputs, or its inputs, at `index`.
        bytes: of the array; symbolic sizes count as the sizes that the plan was made for.
        op, scope, source: the operation that makes it, its name stack, and the user's line.
        reason: why it is saved rather than recomputed.
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
class Gradient(Described):
    """A result of `backward`: the gradient of the input `of`, whose path is `path`.

    `part` is `whole`, or `rows` and `places` for a table whose gradient is wanted as a sparse array.
    """

    of: str
    path: str
    part: str


def read_all(kind: type[Described], found: Any, where: str) -> tuple[Any, ...]:
    """The descriptions in a JSON array."""
    if not isinstance(found, list):
        raise ArtefactError(message(where, f"is a {type(found).__name__}, not an array.", CURE))
    return tuple(kind.read(item, f"{where}[{i}]") for i, item in enumerate(found))


def size_of(size: Any) -> Size:
    """A size of JAX's as a number, or as the text of its expression."""
    return size if type(size) is int else str(size)


def fits(got: Sequence[Any], want: Sequence[Size]) -> bool:
    """Whether an array of this shape can stand where a shape is described; any number can where a name is."""
    return len(got) == len(want) and all(isinstance(w, str) or g == w for g, w in zip(got, want, strict=True))


def same_sizes(given: Sequence[tuple[str, Described, Sequence[Any]]]) -> None:
    """Look whether arrays go together, by what each is called, how it is described, and its shape.

    Raises `CallError` where one name of a size is two numbers, or a size is not what follows from the names.
    """
    sizes = [
        (where, size, got)
        for where, described, shape in given
        for size, got in zip(described.shape, shape, strict=True)
        if isinstance(size, str) and type(got) is int
    ]
    known = {size: got for _, size, got in reversed(sizes) if size.isidentifier()}
    for where, size, got in sizes:
        if names(size) <= known.keys() and number(size, known) != got:
            told = ", ".join(f"{name} = {known[name]}" for name in sorted(names(size)))
            what = f"has size {got} where {size} stands, and {told}."
            raise CallError(message(where, what, "Give arrays whose sizes go together."))


#: The attribute by which a box gives the one array that it holds: the variables of Flax have it.
BOXED = "value"


def plain_keys(keys: Sequence[Any]) -> tuple[Size, ...]:
    """A path of JAX's as names and positions: an attribute, a key of a dict and a position are told by what they say.

    Thereby a dict can stand where a module stood whose class is not at hand. A key that shows nothing is left out.
    """
    return tuple(_plain_key(key) for key in keys if str(key))


def _plain_key(key: Any) -> Size:
    for field in ("idx", "name", "key"):
        if hasattr(key, field):
            found = getattr(key, field)
            is_position = isinstance(found, int) and not isinstance(found, bool) and found >= 0
            return found if is_position else str(found)
    return str(key)


def as_tuple(found: Any) -> Any:
    """A JSON array as a tuple, anything else as it is."""
    return tuple(found) if isinstance(found, list) else found


def _has_type(value: Any, hint: Any) -> bool:
    if hint == tuple[Size, ...]:
        return isinstance(value, tuple) and all(_is_size(x) for x in value)
    if hint == str | None:
        return value is None or isinstance(value, str)
    return type(value) is hint and (hint is not int or value >= 0)


def _is_size(x: Any) -> bool:
    return isinstance(x, str) or (type(x) is int and x >= 0)


def plain_tree(items: Sequence[tuple[tuple[Size, ...], Any]]) -> Any:
    """Dicts and tuples that hold leaves at their keys: positions make a tuple, names a dict.

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
    as_name = str if any(isinstance(key, str) for key in groups) else int  # no dict of JAX's can hold both
    return {as_name(key): plain_tree(group) for key, group in groups.items()}
