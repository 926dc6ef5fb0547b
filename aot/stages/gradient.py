"""Give the pair of halves in the form of TorchScript's `Gradient`, for whoever drives them by hand.

With `g` a `Gradient`, gradient number k belongs to `inputs[g.df_output_vjps[k]]`:

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
from typing import Any

import jax

from jointcut.partition.program import jaxprs
from jointcut.partition.rewrite.simplify import live
from jointcut.partition.rewrite.sparse import is_zero
from jointcut.partition.split import Split
from jointcut.wrappers.record import aligned


@dataclass(frozen=True)
class Gradient:
    """A forward and a backward program, and which of their inputs and outputs belong together.

    Attributes:
        f: closed jaxpr `inputs -> (outputs, temporaries)`. What the function closes over is a constant of the jaxpr.
        df: closed jaxpr `(cotangents, captured inputs, captured outputs) -> gradients`, with the constants it needs.
        f_real_outputs: how many results of `f` are the function's own; temporaries captured for `df` follow.
        df_input_vjps: the outputs of `f` whose cotangents are the first inputs of `df`; an output that no gradient
            depends on is not among them. TorchScript has cotangents of temporaries here as well, since its executor
            differentiates `f` with them as results; JAX differentiates the function itself.
        df_input_captured_inputs: the inputs of `f` that `df` takes next.
        df_input_captured_outputs: the outputs and temporaries of `f` that it takes last. What is an input already is
            captured as one and not returned again, and what is an output is returned once.
        df_output_vjps: the inputs of `f` that the gradients belong to; an input whose gradient is zero by structure is
            left out, and an array that stands at two places of the arguments occurs twice.
    """

    f: Any
    df: Any
    f_real_outputs: int
    df_input_vjps: tuple[int, ...]
    df_input_captured_inputs: tuple[int, ...]
    df_input_captured_outputs: tuple[int, ...]
    df_output_vjps: tuple[int, ...]

    def __str__(self) -> str:
        """A line for all that each program takes and gives, by number."""
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


def _numbered(thing: str, places: Sequence[int], of: str = "") -> str:
    """`inputs 0, 1`; nothing where there are none."""
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
    """The pair of a cut; `consts` are the leading inputs of its forward.

    `carries` says which outputs can carry a cotangent, `wanted` to which input (not counting `consts`) each gradient
    belongs.
    """
    backward, _ = jaxprs.opened(split.backward)
    residuals, count = split.halves.residuals, len(consts)
    makers = {v: eqn for eqn in backward.eqns for v in eqn.outvars}
    given = [i for i, v in enumerate(backward.outvars) if not is_zero(v, makers)]
    ends = [backward.outvars[i] for i in given]
    part = live(backward.eqns, ends)
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
    held = [v for _, v in captured["constant"]]
    eqns = [backward.eqns[i] for i in sorted(part.places)]
    return Gradient(
        f=_closed(split.forward, consts),
        df=_closed(jaxprs.build([*held, *invars], ends, eqns), [consts[i] for i, _ in captured["constant"]]),
        f_real_outputs=len(carries),
        df_input_vjps=tuple(i for i, _ in vjps),
        df_input_captured_inputs=tuple(i for i, _ in captured["input"]),
        df_input_captured_outputs=tuple(i for i, _ in captured["output"]),
        df_output_vjps=tuple(wanted[i] for i in given),
    )


def _closed(open_jaxpr: Any, consts: Sequence[Any]) -> Any:
    """The closed jaxpr whose leading inputs have become its constants."""
    rest = jaxprs.input_structs(open_jaxpr)[len(consts) :]
    return jax.make_jaxpr(lambda *flat: jaxprs.evaluate(open_jaxpr, *consts, *flat))(*rest)
