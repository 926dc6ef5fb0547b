"""Convert the pair of halves to the form of TorchScript's `Gradient`.

With a `Gradient` `g`, gradient number k belongs to `inputs[g.df_output_vjps[k]]`:

    outputs = run(g.f, inputs)  # real outputs, then captured temporaries
    gradients = run(g.df, [
        *(cotangents[i] for i in g.df_input_vjps),
        *(inputs[i] for i in g.df_input_captured_inputs),
        *(outputs[i] for i in g.df_input_captured_outputs),
    ])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jointcut.partition.program.jax import abstract, jaxprs, runtime, user_source
from jointcut.partition.program.places import our_folders
from jointcut.partition.rewrite.simplify import live
from jointcut.partition.rewrite.sparse import is_zero
from jointcut.partition.split import Split
from jointcut.wrappers.record import aligned


@dataclass(frozen=True)
class Gradient:
    """A forward and a backward program, and how to connect their inputs and outputs.

    Attributes:
        f: closed jaxpr `inputs -> (outputs, temporaries)`, with the function's closed-over arrays as constants.
        df: closed jaxpr `(cotangents, captured inputs, captured outputs) -> gradients`, with its constants.
        f_real_outputs: the number of results of `f` that are the function's own; temporaries for `df` follow.
        df_input_vjps: the outputs of `f` whose cotangents are the first inputs of `df`; outputs on which no gradient
            depends are left out. TorchScript also has cotangents of temporaries here, since its executor differentiates
            `f` with them as results; JAX differentiates the function itself.
        df_input_captured_inputs: the inputs of `f` that are the next inputs of `df`.
        df_input_captured_outputs: the outputs and temporaries of `f` that are the last inputs of `df`. An array that is
            an input of `f` is captured as an input; one that is an output is returned only once.
        df_output_vjps: the input of `f` for each gradient. An input whose gradient is always zero is left out; an array
            passed at two places occurs twice.
    """

    f: Any
    df: Any
    f_real_outputs: int
    df_input_vjps: tuple[int, ...]
    df_input_captured_inputs: tuple[int, ...]
    df_input_captured_outputs: tuple[int, ...]
    df_output_vjps: tuple[int, ...]

    def __str__(self) -> str:
        """One line for each kind of input and output of the two programs."""
        f, _ = jaxprs.opened(self.f)
        results = range(len(f.outvars))
        rows = [
            ("f", "takes", _numbered("input", range(len(f.invars)))),
            ("", "gives", _numbered("output", results[: self.f_real_outputs])),
            ("", "", _numbered("temporary", results[self.f_real_outputs :])),
            ("df", "takes", _numbered("cotangent of output", self.df_input_vjps)),
            ("", "", _numbered("input", self.df_input_captured_inputs)),
            ("", "", _numbered("result", self.df_input_captured_outputs, " of f")),
            ("", "gives", _numbered("gradient of input", self.df_output_vjps)),
        ]
        return "\n".join(aligned([row for row in rows if row[1] or row[2]]))

    @cached_property
    def grad_of(self) -> tuple[str, ...]:
        """For each equation of `df` the user's expression that it belongs to, such as `jnp.sin(x)`.

        So TorchScript's `GradOf` names the op of the forward. It is empty if unknown, and for a barrier of ours.
        """
        eqns, ours = jaxprs.opened(self.df)[0].eqns, our_folders()
        is_ours = (user_source.source_of(eqn).startswith(ours) for eqn in eqns)
        return tuple("" if own else user_source.expression_of(eqn) for eqn, own in zip(eqns, is_ours, strict=True))


def _numbered(thing: str, places: Sequence[int], of: str = "") -> str:
    """`inputs 0, 1`; empty if there are none."""
    name = _PLURALS[thing] if len(places) > 1 else thing
    return f"{name} {', '.join(map(str, places))}{of}" if places else ""


_PLURALS = {
    "input": "inputs",
    "output": "outputs",
    "temporary": "temporaries",
    "result": "results",
    "cotangent of output": "cotangents of outputs",
    "gradient of input": "gradients of inputs",
}


def gradient(split: Split, consts: Sequence[Any], carries: Sequence[bool], wanted: Sequence[int]) -> Gradient:
    """Convert the halves of a cut; `consts` are the leading inputs of its forward.

    `carries` says whether each output can carry a cotangent. `wanted` gives the input (not counting `consts`) of each
    gradient.
    """
    backward, _ = jaxprs.opened(split.backward)
    residuals, count = split.halves.residuals, len(consts)
    makers = {v: eqn for eqn in backward.eqns for v in eqn.outvars}
    nonzero = [i for i, v in enumerate(backward.outvars) if not is_zero(v, makers)]
    outvars = [backward.outvars[i] for i in nonzero]
    part = live(backward.eqns, outvars)
    places = [i for i, on in enumerate(carries) if on]
    cotangents = zip(places, backward.invars[len(residuals) :], strict=True)
    vjps = [(i, v) for i, v in cotangents if v in part.read]
    captured: dict[str, list[tuple[int, Any]]] = {"constant": [], "input": [], "output": []}
    for residual, var in zip(residuals, backward.invars, strict=False):
        if var not in part.read:
            continue
        if residual.kind == "input":
            kind = "constant" if residual.index < count else "input"
            captured[kind].append((residual.index - count * (kind == "input"), var))
        else:
            captured["output"].append((residual.index + len(carries) * (residual.kind == "saved"), var))
    invars = [v for _, v in (*vjps, *captured["input"], *captured["output"])]
    constvars = [v for _, v in captured["constant"]]
    eqns = [backward.eqns[i] for i in sorted(part.places)]
    return Gradient(
        f=_closed(split.forward, consts),
        df=_closed(jaxprs.build([*constvars, *invars], outvars, eqns), [consts[i] for i, _ in captured["constant"]]),
        f_real_outputs=len(carries),
        df_input_vjps=tuple(i for i, _ in vjps),
        df_input_captured_inputs=tuple(i for i, _ in captured["input"]),
        df_input_captured_outputs=tuple(i for i, _ in captured["output"]),
        df_output_vjps=tuple(wanted[i] for i in nonzero),
    )


def _closed(open_jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Return a closed jaxpr with its leading inputs as constants."""
    rest = abstract.input_structs(open_jaxpr)[len(consts) :]
    return jax.make_jaxpr(lambda *flat: runtime.evaluate(open_jaxpr, *consts, *flat))(*rest)
