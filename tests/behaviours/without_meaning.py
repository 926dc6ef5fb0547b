"""What PyTorch's tests claim and JAX has no words for, each with the reason."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """Why a behaviour of PyTorch's tests has no meaning in JAX."""

    group: str
    behaviour: str
    why: str


_PURE = "Arrays of JAX cannot be written to; what can is a jax.Ref, which has a type and nothing to change about it."
_DENSE = "Arrays of JAX have no strides: their layout is the compiler's affair, and no program can see it."
_OWN = "Arrays of JAX have no storage that another could share: a view is an array of its own, made by an op."
_STATIC = "Sizes are static in a jaxpr: another shape is another trace, and there is no symbol to save or return."
_NO_MODE = "JAX has no grad mode: a derivative is taken by a transformation, or stopped by stop_gradient."
_NO_STATE = "Precision is not a state of the program in JAX: casts are ops, in the forward and in the backward."
_XLA = "XLA owns buffers and launches: an executable takes arrays, and nothing of its calls is seen in Python."
_DENSE_TAPE = "Cotangents of JAX are dense arrays; sparse gradients of tables are an option of aot.function."
_FORWARD = "A custom_vjp has no forward mode in JAX, with or without a tape."

WITHOUT_MEANING: tuple[Reason, ...] = (
    Reason("plain I/O", "an op writes its input under the hood and returns it (squeeze_ and the like)", _PURE),
    Reason("input mutation", "a non-contiguous input is written", _DENSE),
    Reason("input mutation", "the storage of an input is resized, then written, or freed", _OWN),
    Reason("input mutation", "set_ gives an input the storage of another, good, bad or without effect", _OWN),
    Reason("input mutation", "set_ steals the view chain of an input", _OWN),
    Reason("input mutation", "the metadata of an input is changed (transpose_, unsqueeze_, as_strided_)", _PURE),
    Reason("input mutation", "data and metadata of one input are changed", _PURE),
    Reason("input mutation", "a view of an input is written, and the write shows in the base", _OWN),
    Reason("input mutation", "mutation under inference mode, or of inference tensors", _NO_MODE),
    Reason("input mutation", "a leaf tensor is written under no_grad", _NO_MODE),
    Reason("input mutation", "version counters are bumped, or kept, by a write", _PURE),
    Reason("input mutation", "requires_grad of an input is switched by the function", _NO_MODE),
    Reason("output aliasing", "as_strided views of inputs and intermediates", _DENSE),
    Reason("output aliasing", "view and inverse-view functions replayed on a base (view_func)", _OWN),
    Reason("output aliasing", "a write to an output shows in the input of which it is a view", _PURE),
    Reason("output aliasing", "multi-output views of which none may be written", _PURE),
    Reason("output aliasing", "an output is a view made under no_grad of an input that requires grad", _NO_MODE),
    Reason("output aliasing", "an intermediate base is returned as an extra output for the sake of its views", _OWN),
    Reason("output aliasing", "grad_fn of an output that is a view (AliasBackward, ViewBackward)", _NO_MODE),
    Reason("output aliasing", "an output that is a view of a custom autograd Function's result", _OWN),
    Reason("output aliasing", "_unsafe_view hides an alias from autograd", _OWN),
    Reason("aliased inputs", "two inputs are overlapping views of one storage, and one is written", _OWN),
    Reason("aliased inputs", "a synthetic base stands for inputs that are views of it, also out of order", _OWN),
    Reason("aliased inputs", "a base that is not differentiable, or of another dtype than its views", _OWN),
    Reason("aliased inputs", "the guard that storages do not overlap", _OWN),
    Reason("backward mutation", "a forward input that is saved for backward is written by the backward", _PURE),
    Reason("backward mutation", "the incoming gradient is written by a custom backward", _PURE),
    Reason(
        "requires_grad mixtures", "the function calls set_grad_enabled, and the mode is restored after it", _NO_MODE
    ),
    Reason("requires_grad mixtures", "an output of an inference graph says that it requires no grad", _NO_MODE),
    Reason("requires_grad mixtures", "detach_ of an input", _PURE),
    Reason("requires_grad mixtures", "non-leaf inputs are detached to save the engine's walk", _NO_MODE),
    Reason("subclasses", "the outer strides of a subclass differ from those of its parts", _DENSE),
    Reason(
        "subclasses",
        "a cotangent is a subclass of another kind than was guessed",
        "A cotangent has the tree of its output: another one is refused.",
    ),
    Reason(
        "subclasses",
        "a subclass that runs code of its own at each op (__torch_dispatch__)",
        "Containers of JAX are opened before tracing: ops see arrays only.",
    ),
    Reason("autocast", "the backward runs under autocast on, off or as in the forward", _NO_STATE),
    Reason("autocast", "the graph changes the autocast state, which is refused", _NO_STATE),
    Reason("autocast", "batch norm under AMP takes a kernel of its own", _NO_STATE),
    Reason("autocast", "an autocast of a custom device type", _NO_STATE),
    Reason("dynamic shapes", "outputs and activations are marked dynamic", _STATIC),
    Reason("dynamic shapes", "symbolic integers are inputs, outputs and saved values", _STATIC),
    Reason("dynamic shapes", "order of tensors before symbolic integers among saved values", _STATIC),
    Reason("dynamic shapes", "unbacked symbolic integers", _STATIC),
    Reason("memory", "saved tensors with and without check of their version", _PURE),
    Reason(
        "misc",
        "generated Python source of the runtime wrappers (list codegen)",
        "Our wrappers are closures over records: there is no source to look at.",
    ),
    Reason(
        "misc",
        "cudagraphs and their static addresses",
        "XLA owns buffers and launches: no program of JAX holds an address.",
    ),
    Reason(
        "misc",
        "a fake device or fake tensors reach the compiled function",
        "Shapes are told by jax.ShapeDtypeStruct, which is refused as an argument of a call.",
    ),
    Reason("saved sizes", "sym_size_int is saved in the place of the tensor", _STATIC),
    Reason("default vs min-cut", "counts on graphs that mix tensors and symbolic integers", _STATIC),
    Reason(
        "preserved randomness",
        "the state of a global generator is saved and set back for the backward",
        "Random numbers of JAX are a pure function of a key: there is no state to set back.",
    ),
    Reason(
        "preserved randomness",
        "seeds and offsets are inputs and outputs of the graph",
        "A key is an argument like any other, and what is split from it a value.",
    ),
    Reason("exact I/O counts", "tangents are made contiguous (transpose, then view)", _DENSE),
    Reason(
        "custom partitioner",
        "its uuid is part of the key of a cache on disk",
        "No cut is kept on disk: a strategy is a function, called once for each trace.",
    ),
    Reason(
        "effectful ops",
        "effect tokens are the first inputs and outputs of the graph",
        "JAX itself threads tokens through a program, and they are no inputs of a jaxpr.",
    ),
    Reason(
        "quantised activations",
        "a pass quantises what is saved, by thresholds",
        "What is saved in fewer bits is the user's choice, by a custom rule: jointcut changes no number.",
    ),
    Reason(
        "metadata of subclass outputs",
        "mutated inputs and intermediate bases stand among the outputs",
        "Writes stay in the program, and no base is returned: the outputs are the user's.",
    ),
    Reason("export refusals", "metadata of an input is changed in an exported graph", _PURE),
    Reason("export refusals", "an input that needs a gradient is written in an exported graph", _PURE),
    Reason(
        "export refusals",
        "duplicate parameters of a module",
        "Parameters are leaves of an argument: a leaf at two places is passed once, and has two gradients.",
    ),
    Reason(
        "export signature",
        "tangents are left out of an exported joint graph",
        "A joint program without cotangents is a forward: trace it without anything to differentiate.",
    ),
    Reason("export joint graph", "functionalisation of in-place ops before export", _PURE),
    Reason(
        "calling convention",
        "slices for saved tensors with version check, without, opaque objects and symbols",
        _STATIC,
    ),
    Reason("tangents", "tangents are coerced to the strides that were guessed", _DENSE),
    Reason(
        "double backward",
        "an error says that double backward is not supported",
        "It is supported here: gradients of a function of ours are differentiated to any order.",
    ),
    Reason(
        "Gradient contract",
        "cotangents of captured temporaries are inputs of df",
        "The executor of TorchScript differentiates temporaries as results of f; JAX differentiates the function.",
    ),
    Reason("captures", "the calling bytecode steals a list of inputs (dynamo_boxed, inputs_aliasing_bytecode_*)", _XLA),
    Reason("captures", "cudagraphs are used or skipped (cudagraphs_*)", _XLA),
    Reason("captures", "fake tensors of two modes meet (mismatch_fake_tensor_mode)", _STATIC),
    Reason(
        "captures",
        "verbosity of a log is read when the mode is entered (verbose_logs_snapshot)",
        "There is no mode and no log: captures are records that can be printed at any time.",
    ),
    Reason("accumulation", "gradients that are sparse tensors (input_buffer_accum, to_sparse_backward)", _DENSE_TAPE),
    Reason(
        "accumulation", "names, sizes and strides of .grad (accumulate_grad_tensor_reference, named_tensor)", _DENSE
    ),
    Reason("hooks", "hooks on views that are written in place (tensor_hooks_inplace, _over_view)", _PURE),
    Reason(
        "hooks",
        "gradients kept on values that are no leaves (retain_grad, retains_grad_*)",
        "Values of JAX have no .grad: a hook on the cotangent hands it to whoever wants to keep it.",
    ),
    Reason(
        "hooks",
        "one hook for several tensors (multi_grad_all_hooks, multi_grad_any_hooks)",
        "A hook around a call sees the gradients of all its arguments: pass what belongs together to one call.",
    ),
    Reason(
        "hooks",
        "callbacks at the end of a backward (callback_graph_break_throws_error, reentrant_with_callbacks_*)",
        "A backward is a call: what shall follow it is written on the next line.",
    ),
    Reason("saved values", "device memory is free while the backward runs (free_activation_memory, _subclass)", _XLA),
    Reason("saved values", "versions of saved tensors (save_tensor_hook_version_counter_not_shared)", _PURE),
    Reason(
        "custom functions",
        "functions in C++ and their attributes (autograd_cpp_node_*)",
        "Rules of JAX are written in Python; foreign code is a call with a custom_vjp around it.",
    ),
    Reason(
        "custom functions",
        "cotangents that are missing instead of zero (dont_materialize_grads, set_materialize_non_diff_grads)",
        "A custom_vjp of JAX gets arrays of zeros.",
    ),
    Reason("custom functions", "dtype of a view's gradient (custom_fn_output_metadata)", _OWN),
    Reason(
        "around the tape",
        "the node that runs, the ids of graph tasks and their order (current_node, current_graph_task_*)",
        "Nodes are no objects of the user's: the captured backward can be printed, with all its ops in order.",
    ),
    Reason("around the tape", "forward mode of custom functions (custom_function_forward_mode_*)", _FORWARD),
    Reason("around the tape", "grad mode inside a reentrant backward (grad_mode_restored_reentrant)", _NO_MODE),
)
