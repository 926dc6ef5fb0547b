"""Define the records of a function's inputs and outputs.

The records and their names follow AOTAutograd's schemas. JAX's arrays cannot be written, share no storage and have no
`.grad`, so half of PyTorch's cases cannot occur. Only a `jax.Ref` can be written. Each record lists the PyTorch fields
that are not needed, with the reason.

An *input* is a leaf of the caller's arguments, an *output* a leaf of the result, in the order of `jax.tree.leaves`. The
leaves of a container (`SubclassCreationMeta`) are adjacent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jointcut.partition.program.jax import meshes
from jointcut.wrappers.metadata.view_meta import ViewMeta
from jointcut.wrappers.record import Record, aligned, choice

_SHOWN = 40  # lines of inputs or outputs that fit on a screen


@choice
class MutationType(enum.Enum):
    """Whether an input is written, and where."""

    NOT_MUTATED = 1
    MUTATED_IN_GRAPH = 2
    """The compiled program writes it; XLA updates the buffer in place."""
    MUTATED_OUT_GRAPH = 3
    """The program is pure: the new state is an extra result, which is written back after the call."""


@choice
class OutputType(enum.Enum):
    """The way in which an output shares its value with an input, or with another output.

    PyTorch's other members cannot occur. A JAX array that is a view of another has its own buffer, so no intermediate
    is returned for its views (`alias_of_intermediate_save_as_output`). Nothing hides a view from autograd
    (`unsafe_view_alias`).
    """

    non_alias = 1
    alias_of_input = 2
    """A view (reshape, transpose, broadcast, slice, split, squeeze, reverse) of an input."""
    is_input = 3
    """An input, unchanged: the same array object is returned."""
    alias_of_intermediate = 4
    """A view of an inner value; another output is a view of the same value."""
    alias_of_intermediate_base_is_user_output = 5
    """A view of another output; without view steps, the same array as an earlier output."""
    custom_function_view = 6
    """A view of an input by a function with its own derivative: the view steps give its value, not its gradient."""


SOURCES = {"input": OutputType.is_input, "output": OutputType.alias_of_intermediate_base_is_user_output}
"""The types of outputs that are handed back, by `TensorAlias.source`."""


@dataclass(frozen=True)
class PlainTensorMeta(Record):
    """A plain array: its position among the flat arrays, and its type.

    Attributes:
        unwrapped_idx: its position among the flat arrays; None if it is none of them.
        shape, dtype, weak_type: its type; a random key has a key dtype.
        sharding: its sharding as text, or None if the caller did not place it.
        of_input: the position of the input that it is, if it is no flat array: the indices in a sparse gradient. An
            array that is neither is a zero of the type `float0`.

    PyTorch's `memory_format` is not needed: JAX's arrays are dense, and XLA chooses their layout.
    """

    unwrapped_idx: int | None
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    sharding: str | None = None
    of_input: int | None = None

    def creation_fn(self, all_args: Sequence[Any], inputs: Sequence[Any] = ()) -> Any:
        """Return the array: one of all flat arrays `all_args`, one of the `inputs`, or a zero."""
        if self.unwrapped_idx is not None:
            return all_args[self.unwrapped_idx]
        return np.zeros(self.shape, jax.dtypes.float0) if self.of_input is None else inputs[self.of_input]

    def __str__(self) -> str:
        """`float32[128,64]`."""
        weak = "~" if self.weak_type else ""
        name = "float0" if self.dtype == jax.dtypes.float0 else self.dtype.name
        return f"{weak}{name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class SubclassCreationMeta(Record):
    """An array-like container: its flat arrays, and how to build it from them.

    A container is an object of a registered pytree class that acts as an array (see `arguments.containers`). Nodes
    inside a container, such as a tuple, are described like containers.

    Attributes:
        flat_tensor_start_idx: position of its first flat array; None if it has none.
        arg_count: number of its flat arrays, including the arrays of inner containers.
        attrs: its parts by name, in order: plain arrays and containers.
        meta: the auxiliary data that its class gave to JAX (PyTorch: from `__tensor_flatten__`).
        original_subclass_type: its class.

    Not needed: `original_subclass` (the class makes a new one), `outer_size`, `outer_stride`,
    `included_subclass_symints` (sizes are static and part of `meta`), `memory_format` (see `PlainTensorMeta`).
    """

    flat_tensor_start_idx: int | None
    arg_count: int
    attrs: tuple[tuple[str, PlainTensorMeta | SubclassCreationMeta], ...]
    meta: Any
    original_subclass_type: type

    @classmethod
    def of(cls, kind: type, meta: Any, attrs: Sequence[tuple[str, Meta]]) -> SubclassCreationMeta:
        """Return the record of a container of a class, with its auxiliary data and its parts."""
        positions = [plain.unwrapped_idx for _, part in attrs for plain in plain_metas(part)]
        flat = [position for position in positions if position is not None]
        return cls(min(flat, default=None), len(flat), tuple(attrs), meta, kind)

    def creation_fn(self, all_args: Sequence[Any], inputs: Sequence[Any] = ()) -> Any:
        """Build the container from its arrays among all flat arrays `all_args`, and among the `inputs`."""
        parts = [part.creation_fn(all_args, inputs) for _, part in self.attrs]
        leaves, registry = [jax.tree.structure(0)] * len(parts), jax.tree_util.default_registry
        node = (self.original_subclass_type, self.meta)
        tree = jax.tree_util.PyTreeDef.from_node_data_and_children(registry, node, leaves)
        return jax.tree.unflatten(tree, parts)

    def __str__(self) -> str:
        """`BCOO(data: float32[3], indices: int32[3,2])`."""
        return f"{self.original_subclass_type.__name__}({', '.join(f'{name}: {part}' for name, part in self.attrs)})"


Meta = PlainTensorMeta | SubclassCreationMeta


def plain_meta(index: int | None, aval: Any, of_input: int | None = None) -> PlainTensorMeta:
    """Return the type of one array, or of a reference's content, at a position among the flat arrays."""
    inner = getattr(aval, "inner_aval", aval)
    sharding = getattr(inner, "sharding", None)
    shown = str(sharding) if meshes.is_explicit(sharding) else None
    weak = bool(getattr(inner, "weak_type", False))
    return PlainTensorMeta(index, tuple(inner.shape), inner.dtype, weak, shown, of_input)


def zero_meta(aval: Any) -> PlainTensorMeta:
    """Return the type of the gradient or the cotangent of an array that has none: a zero of the type `float0`."""
    return PlainTensorMeta(None, tuple(aval.shape), jax.dtypes.float0)


def plain_metas(meta: Meta) -> list[PlainTensorMeta]:
    """Return the plain arrays of a container, or the array itself."""
    if isinstance(meta, PlainTensorMeta):
        return [meta]
    return [plain for _, part in meta.attrs for plain in plain_metas(part)]


@dataclass(frozen=True)
class InputAliasInfo(Record):
    """One input: its path, and its uses.

    Attributes:
        path: its path for the caller, such as `args[0]['w']`.
        is_read: whether the forward or the backward reads it. A `jax.Ref` that is only written is not read.
        requires_grad: whether it is differentiated.
        mutates_data: whether the forward writes it: a `jax.Ref`, or an array of an NNX module.
        mutates_in_backward: whether it is a `jax.Ref` that the backward writes.
        is_reference: whether it is a `jax.Ref`.
        keep_input_mutations: whether the compiled program itself writes it. This is so for a `jax.Ref`; an array
            written to an object leaves the program as a result.
        is_donated: whether its argument is in `donate_argnums` or `donate_argnames`.
        duplicate_of: position of the first input that is the same array, or None.
        consumes_key: whether it is a random key that numbers are drawn from.

    A closed-over array is described in the same way; its path is `constant 0`.

    Not needed: `is_leaf` (every differentiated input is one), `mutates_metadata`, `mutates_storage_metadata` and
    `mutation_inductor_storage_resize` (a Ref keeps its shape and dtype), `mutations_hidden_from_autograd` and
    `mutations_under_no_grad_or_inference_mode` (JAX refuses to write a differentiated value into a Ref that is not
    differentiated, so every write is hidden from differentiation).
    """

    path: str
    is_read: bool
    requires_grad: bool
    mutates_data: bool = False
    mutates_in_backward: bool = False
    is_reference: bool = False
    keep_input_mutations: bool = True
    is_donated: bool = False
    duplicate_of: int | None = None
    consumes_key: bool = False

    @property
    def mutation_type(self) -> MutationType:
        """Whether the input is written, and where."""
        if not self.mutates_data:
            return MutationType.NOT_MUTATED
        return MutationType.MUTATED_IN_GRAPH if self.keep_input_mutations else MutationType.MUTATED_OUT_GRAPH

    def __str__(self) -> str:
        """`args[0]: read, differentiated`."""
        return f"{self.path}: {self.words}"

    @property
    def words(self) -> str:
        """The same without the path: `read, differentiated`."""
        words = {
            "a reference": self.is_reference,
            "read": self.is_read,
            "unused": not (self.is_read or self.mutates_data or self.mutates_in_backward),
            "differentiated": self.requires_grad,
            "written": self.mutates_data,
            "written in the backward": self.mutates_in_backward,
            "donated": self.is_donated,
            f"the same array as input {self.duplicate_of}": self.duplicate_of is not None,
            "a random key that is drawn from": self.consumes_key,
        }
        return ", ".join(word for word, holds in words.items() if holds)


@dataclass(frozen=True)
class OutputAliasInfo(Record):
    """One output: its path, and the array that it shares.

    An output that would share a donated input is a new array, since the input is gone after the call. A value that the
    function computes twice is two arrays, even if XLA computes it once.

    Attributes:
        path: its place in the result, such as `result['loss']`.
        output_type: the kind of sharing.
        base_idx: position of the input (`alias_of_input`, `is_input`, `custom_function_view`) or of the other output
            (`..._base_is_user_output`); a number common to outputs with one base (`alias_of_intermediate`); None for
            `non_alias`.
        view_meta_sequence: the steps from the base to the output; empty if it is the base itself.
        requires_grad: whether a gradient flows back from it: it is floating point, outside aux, and the backward reads
            its cotangent. False after `stop_gradient`, `round` or `sign`.

    Not needed: `dynamic_dims` (shapes are static in a jaxpr), `raw_type` (a random key has a key dtype).
    """

    path: str
    output_type: OutputType
    base_idx: int | None
    requires_grad: bool
    view_meta_sequence: tuple[ViewMeta, ...] = ()

    def __str__(self) -> str:
        """`result[0]: a new array, carries a gradient`."""
        return f"{self.path}: {self.words}"

    @property
    def words(self) -> str:
        """The same without the path: `a view of input 2 (transpose)`."""
        steps = ", ".join(map(str, self.view_meta_sequence))
        shares = {
            OutputType.non_alias: "a new array",
            OutputType.is_input: f"input {self.base_idx} itself",
            OutputType.alias_of_input: f"a view of input {self.base_idx} ({steps})",
            OutputType.custom_function_view: f"a view of input {self.base_idx} ({steps}) with its own derivative",
            OutputType.alias_of_intermediate: f"a view of inner value {self.base_idx} ({steps})",
            OutputType.alias_of_intermediate_base_is_user_output: (
                f"a view of output {self.base_idx} ({steps})" if steps else f"the same array as output {self.base_idx}"
            ),
        }
        return shares[self.output_type] + ", carries a gradient" * self.requires_grad


@dataclass(frozen=True)
class ViewAndMutationMeta(Record):
    """All inputs and outputs of a traced call: PyTorch's record of this name.

    Attributes:
        input_info: a record of each input.
        output_info: a record of each output.
        subclass_inp_meta: the types of the inputs: plain arrays and containers.
        subclass_fw_graph_out_meta: the types of the outputs.
        subclass_tangent_meta: the types of the cotangents that the backward takes, with positions among
            `traced_tangents`. Parts of a container that carry no cotangent, such as indices, are zeros (`float0`).
        traced_tangents: the type of each flat cotangent that the backward takes: one for each floating-point output
            outside aux, as in `jax.vjp`, even if the backward does not read it.
        is_train: whether a backward was traced; false if nothing is differentiated.
        constant_info: a record of each array that the function closes over. They are leading inputs of every program,
            and the same in each call (in PyTorch, `static_input_indices`).
        constant_meta: the type of each of these arrays.
        tokens: names of the kinds of ordered effects of the forward: JAX threads one token for each kind.
        num_backward_tokens: number of kinds of ordered effects of the backward.
        effects: names of all effects of either half.
        bw_donated_idxs: positions of residuals whose buffers the backward may overwrite, or None before the cut.

    Not needed: `num_intermediate_bases` (none are returned), `keep_input_mutations` (a field of each input), symbolic
    sizes, the grad mode, random states.
    """

    input_info: tuple[InputAliasInfo, ...]
    output_info: tuple[OutputAliasInfo, ...]
    subclass_inp_meta: tuple[Meta, ...]
    subclass_fw_graph_out_meta: tuple[Meta, ...]
    subclass_tangent_meta: tuple[Meta, ...]
    traced_tangents: tuple[PlainTensorMeta, ...]
    is_train: bool
    constant_info: tuple[InputAliasInfo, ...] = ()
    constant_meta: tuple[PlainTensorMeta, ...] = ()
    tokens: tuple[str, ...] = ()
    num_backward_tokens: int = 0
    effects: tuple[str, ...] = ()
    bw_donated_idxs: tuple[int, ...] | None = None

    @property
    def handed_back(self) -> dict[int, TensorAlias]:
        """Outputs that compiled programs do not return, by position: the caller gets an existing array."""
        return {
            i: TensorAlias(source, info.base_idx)
            for i, info in enumerate(self.output_info)
            for source, kind in SOURCES.items()
            if info.output_type is kind and info.base_idx is not None and not info.view_meta_sequence
        }

    @property
    def num_constants(self) -> int:
        """Number of arrays that the function closes over."""
        return len(self.constant_info)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the function."""
        return len(self.output_info)

    def __str__(self) -> str:
        """Return a line for each array: its number, type, path and properties; long lists are cut."""
        lines = ["training: forward and backward" if self.is_train else "inference: nothing is differentiated"]
        lines += [f"effects: {', '.join(self.effects)}"] * bool(self.effects)
        if self.constant_info:
            lines += ["constants", *_lines(self.constant_info, self.constant_meta)]
        lines += ["inputs", *_lines(self.input_info, self.subclass_inp_meta)]
        return "\n".join([*lines, "outputs", *_lines(self.output_info, self.subclass_fw_graph_out_meta)])


def _lines(infos: Sequence[InputAliasInfo | OutputAliasInfo], metas: Sequence[Meta]) -> list[str]:
    plain = {m.unwrapped_idx: str(m) for meta in metas for m in plain_metas(meta)}
    rows = [(str(i), plain.get(i, ""), info.path, info.words) for i, info in enumerate(infos[:_SHOWN])]
    return aligned(rows) + [f"  and {len(infos) - _SHOWN} more"] * (len(infos) > _SHOWN)


@dataclass(frozen=True)
class SubclassMeta(Record):
    """The metadata of a call, and the containers of its gradients.

    Attributes:
        fw_metadata: the metadata of the call.
        grad_input_metas: the types of the gradients of `value_and_grad`, with positions among the results of the
            backward. The indices of a sparse array are an input. None for inference.
    """

    fw_metadata: ViewAndMutationMeta
    grad_input_metas: tuple[Meta, ...] | None = None


@dataclass(frozen=True)
class TensorAlias(Record):
    """An output that is handed back to the caller and not returned by the program, since XLA would copy it.

    Attributes:
        source: `"input"` or `"output"`.
        alias: position of the array among the inputs or outputs (PyTorch's record holds the tensor).
    """

    source: str
    alias: int
