"""Say what one look at the function taught us of its inputs and outputs.

The records of AOTAutograd's schemas, under their names, with the meaning that they have in JAX. JAX's arrays cannot be
written to, have no storage to share and no `.grad` of their own, so that half of PyTorch's cases cannot arise; what can
be written to is a `jax.Ref`. Each record says which PyTorch field its own answer to, and why others are not needed.

An *input* is a leaf of the caller's arguments, an *output* a leaf of the result, in the order of `jax.tree.leaves`;
those of a container (`SubclassCreationMeta`) stand side by side.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jointcut.wrappers.metadata.views import ViewMeta
from jointcut.wrappers.record import Record, aligned, choice

_SHOWN = 40  # lines of inputs or outputs that fit on a screen


@choice
class MutationType(enum.Enum):
    """Whether an input is written, and where. Only a `jax.Ref` can be."""

    NOT_MUTATED = 1
    MUTATED_IN_GRAPH = 2
    """The write stays in the compiled program, where XLA updates the buffer in place."""
    MUTATED_OUT_GRAPH = 3
    """The program is pure: the new state is an extra result, and is written back after the call."""


@choice
class OutputType(enum.Enum):
    """The way in which an output shares its value with an input, or with another output.

    PyTorch's other members cannot occur: an intermediate is never returned for the sake of its views
    (`alias_of_intermediate_save_as_output`), since a JAX array that is a view of another has a buffer of its own;
    nothing hides a view from autograd (`unsafe_view_alias`); and a view with its own derivative
    (`custom_function_view`) is traced like any other value.
    """

    non_alias = 1
    alias_of_input = 2
    """A view (reshape, transpose, broadcast, slice, split, squeeze, reverse) of an input."""
    is_input = 3
    """An input, unchanged: the very same array is handed back."""
    alias_of_intermediate = 4
    """A view of a value inside the function of which another output is a view as well."""
    alias_of_intermediate_base_is_user_output = 5
    """A view of another output; or, without a step of a view, the very array that an earlier output is."""


SOURCES = {"input": OutputType.is_input, "output": OutputType.alias_of_intermediate_base_is_user_output}
"""What an output is that is handed back, by the `TensorAlias.source` of its array."""


@dataclass(frozen=True)
class PlainTensorMeta(Record):
    """A plain array: where it stands among the flat ones, and its type.

    Attributes:
        unwrapped_idx: its position among the flat arrays.
        shape, dtype, weak_type: of the array; a random key has a key dtype.
        sharding: how it lies on the devices, as text; None where it was not put anywhere by the caller.

    PyTorch's `memory_format` is not needed: JAX's arrays are dense, and their layout is XLA's affair.
    """

    unwrapped_idx: int
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    sharding: str | None = None

    def __str__(self) -> str:
        """`float32[128,64]`."""
        weak = "~" if self.weak_type else ""
        name = "float0" if self.dtype == jax.dtypes.float0 else self.dtype.name
        return f"{weak}{name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class SubclassCreationMeta(Record):
    """An array-like container: which flat arrays belong to it, and how it is made of them.

    A container is a registered pytree class that stands for an array (`wrappers.containers` says which); what a
    container holds inside, a tuple say, is described in the same way.

    Attributes:
        flat_tensor_start_idx: position of its first array among the flat ones.
        arg_count: how many flat arrays it holds, those of containers inside included.
        attrs: its parts by name, in order: plain arrays and containers.
        meta: its auxiliary data, as its class gave it to JAX (PyTorch: from `__tensor_flatten__`).
        original_subclass_type: its class.

    Not needed: `original_subclass` (the class makes a new one), `outer_size`, `outer_stride`,
    `included_subclass_symints` (sizes are static, and belong to `meta`), `memory_format` (see `PlainTensorMeta`).
    """

    flat_tensor_start_idx: int
    arg_count: int
    attrs: tuple[tuple[str, PlainTensorMeta | SubclassCreationMeta], ...]
    meta: Any
    original_subclass_type: type

    def creation_fn(self, all_args: Sequence[Any]) -> Any:
        """The container made of its arrays among the flat ones `all_args`."""
        parts = []
        for _, part in self.attrs:
            inner = isinstance(part, SubclassCreationMeta)
            parts.append(part.creation_fn(all_args) if inner else all_args[part.unwrapped_idx])
        leaves, registry = [jax.tree.structure(0)] * len(parts), jax.tree_util.default_registry
        node = (self.original_subclass_type, self.meta)
        tree = jax.tree_util.PyTreeDef.from_node_data_and_children(registry, node, leaves)
        return jax.tree.unflatten(tree, parts)

    def __str__(self) -> str:
        """`BCOO(data: float32[3], indices: int32[3,2])`."""
        return f"{self.original_subclass_type.__name__}({', '.join(f'{name}: {part}' for name, part in self.attrs)})"


@dataclass(frozen=True)
class InputAliasInfo(Record):
    """One input: its path, and what happens to it.

    Attributes:
        path: how the caller reaches it, `args[0]['w']`.
        is_read: whether anything reads it, forward or backward; a gradient that is zero needs no input. A `jax.Ref`
            that is only written is not read.
        requires_grad: whether a gradient with respect to it is asked for (`requires_grad`).
        mutates_data: whether the forward writes it (`mutates_data`): a `jax.Ref`, or an array of an NNX module.
        mutates_in_backward: whether it is a `jax.Ref` that the backward writes.
        is_reference: whether it is a `jax.Ref`.
        keep_input_mutations: whether writes stay in the compiled program (`keep_input_mutations`): those to a `jax.Ref`
            in our own programs. What is written to an object leaves the program as a result.
        is_donated: whether its buffer is given up to the program (`donate_argnums`).
        duplicate_of: position of an earlier input that is the same array, None if there is none.
        consumes_key: whether it is a random key that something is drawn from.

    A closed-over array is described in the same way; its path is `constant 0`.

    Not needed: `is_leaf` (every differentiated input is one, nothing hangs on an array), `mutates_metadata`,
    `mutates_storage_metadata` and `mutation_inductor_storage_resize` (a Ref keeps its shape and dtype),
    `mutations_hidden_from_autograd` and `mutations_under_no_grad_or_inference_mode` (JAX itself refuses to write a
    value that is differentiated into a Ref that is not, so that every write is hidden from differentiation).
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
    """One output: its path, and what it shares.

    An output that shares something with a donated input is a new array: that input is gone after the call. Two outputs
    that the function computed twice are two arrays, also where XLA computes them once.

    Attributes:
        path: where it stands in the result, `result['loss']`.
        output_type: what it shares.
        base_idx: the input (`alias_of_input`, `is_input`), the other output (`..._base_is_user_output`), or a number
            that outputs with the same base share (`alias_of_intermediate`); None for `non_alias`.
        view_meta_sequence: the steps from the base to the output, none where it is the base itself.
        requires_grad: whether a gradient flows back from it: it is floating point, outside aux, and the backward reads
            its cotangent. Not so behind `stop_gradient`, `round` or `sign`.

    `dynamic_dims` is not needed (shapes are static in a jaxpr), nor is `raw_type` (a random key has a key dtype).
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
            OutputType.alias_of_intermediate: f"a view of inner value {self.base_idx} ({steps})",
            OutputType.alias_of_intermediate_base_is_user_output: (
                f"a view of output {self.base_idx} ({steps})" if steps else f"the same array as output {self.base_idx}"
            ),
        }
        return shares[self.output_type] + ", carries a gradient" * self.requires_grad

    @property
    def can_be_regenerated(self) -> bool:
        """Whether `regenerated` can make it: not so behind a slice that starts where the program says."""
        return all(view.can_be_replayed for view in self.view_meta_sequence)

    def regenerated(self, base: Any) -> Any:
        """The output made of its base; raises `CallError` where it `can_be_regenerated` by running only."""
        for view in self.view_meta_sequence:
            base = view.replay(base)
        return base


Meta = PlainTensorMeta | SubclassCreationMeta


@dataclass(frozen=True)
class ViewAndMutationMeta(Record):
    """All that one look taught us of a call: PyTorch's record of this name.

    Attributes:
        input_info: one for each input.
        output_info: one for each output.
        subclass_inp_meta: one for each plain array or container among the inputs.
        subclass_fw_graph_out_meta: the same for outputs.
        subclass_tangent_meta: the same for the outputs whose cotangents the backward takes.
        traced_tangents: the type of each flat cotangent that the backward takes: one for each floating-point output
            outside aux, as in `jax.vjp`, also where it reads none of it.
        is_train: whether a backward was traced. Without anything to differentiate there is none.
        constant_info: one for each array that the function closes over; they are leading inputs of every program, and
            stay the same from call to call (`static_input_indices` are the first so many).
        constant_meta: the type of each of them.
        tokens: names of the ordered effects of the forward, whose order the program keeps (`tokens`).
        num_backward_tokens: how many ordered effects the backward has.
        effects: names of all effects of either half.
        bw_donated_idxs: positions of residuals whose buffers the backward may overwrite, None before the cut.

    Not needed: `num_intermediate_bases` (none are returned), `keep_input_mutations` (each input says it of itself),
    symbolic sizes, the grad mode, random states.
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
    def mutated_inp_runtime_indices(self) -> tuple[int, ...]:
        """Inputs that are written back after the call."""
        return self._mutated(MutationType.MUTATED_OUT_GRAPH)

    @property
    def mutated_graph_handled_indices(self) -> tuple[int, ...]:
        """Inputs that the program itself writes."""
        return self._mutated(MutationType.MUTATED_IN_GRAPH)

    def _mutated(self, how: MutationType) -> tuple[int, ...]:
        return tuple(i for i, info in enumerate(self.input_info) if info.mutation_type is how)

    @property
    def aliased_out_indices(self) -> tuple[int, ...]:
        """Outputs that share something with an input or another output."""
        return tuple(i for i, o in enumerate(self.output_info) if o.output_type is not OutputType.non_alias)

    @property
    def handed_back(self) -> dict[int, TensorAlias]:
        """Outputs that stay out of compiled programs, by position: the caller gets an array that is there already."""
        return {
            i: TensorAlias(source, info.base_idx)
            for i, info in enumerate(self.output_info)
            for source, kind in SOURCES.items()
            if info.output_type is kind and info.base_idx is not None and not info.view_meta_sequence
        }

    @property
    def num_constants(self) -> int:
        """How many arrays the function closes over."""
        return len(self.constant_info)

    @property
    def num_outputs(self) -> int:
        """How many outputs the function has."""
        return len(self.output_info)

    def __str__(self) -> str:
        """A line for each array: its number, type, path, and what is known of it; at most a screen."""
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


def plain_metas(meta: Meta) -> list[PlainTensorMeta]:
    """The plain arrays of a container, or the array itself."""
    if isinstance(meta, PlainTensorMeta):
        return [meta]
    return [plain for _, part in meta.attrs for plain in plain_metas(part)]


@dataclass(frozen=True)
class SubclassMeta(Record):
    """How gradients are put back into containers.

    Attributes:
        fw_metadata: what one look taught us.
        grad_input_metas: the arrays and containers of the gradients, with positions among their flat arrays: those of
            the arguments, but for a table whose gradient is wanted as rows. None for inference.
    """

    fw_metadata: ViewAndMutationMeta
    grad_input_metas: tuple[Meta, ...] | None = None


@dataclass(frozen=True)
class TensorAlias(Record):
    """Stands for an output that is handed back as it is, and so kept out of the program.

    Attributes:
        source: `"input"` or `"output"`.
        alias: position of the array among those (PyTorch's holds the tensor; an array in a program's result would be
            copied by XLA).
    """

    source: str
    alias: int
