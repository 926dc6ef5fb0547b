"""Write the README of an artefact: how to run an exported pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jointcut.aot.export.contract import Contract
from jointcut.partition.figures import counted
from jointcut.wrappers.metadata.descriptors import Described

_SHOWN = 12  # the most arrays listed of a kind; signature.json lists all


def readme(contract: Contract) -> str:
    """Return the README of an artefact, in Markdown."""
    parts = [_head(contract), _programs(contract)]
    parts += [_listed("Inputs", contract.inputs, lambda i: i.path)]
    parts += [_listed("Outputs", contract.outputs, lambda o: o.path)]
    if contract.is_train:
        parts += [
            _listed("Residuals", contract.residuals, lambda r: f"{r.bytes:,} bytes; {r.reason}"),
            _listed("Tangents", contract.tangents, lambda t: f"the cotangent of {t.of}"),
            _listed("Gradients", contract.gradients, lambda g: f"of {g.of}, {g.path}"),
        ]
    parts += [_with_jointcut(contract), _with_jax(contract), _elsewhere(contract)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _head(contract: Contract) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in sorted(contract.versions.items()))
    lines = [
        f"# {contract.name}",
        "",
        f"A JAX function as programs, exported for {', '.join(contract.platforms)} with {versions}.",
    ]
    if contract.is_train:
        number = len([r for r in contract.residuals if r.kind == "saved"])
        handed = f"{counted(number, 'array')} {'is' if number == 1 else 'are'} handed over"
        lines += [
            f"Forward and backward are two programs. Between them {handed} ({contract.saved_bytes:,} bytes). The other "
            "residuals are inputs and outputs, which the caller holds; everything else is recomputed in the backward.",
        ]
    if contract.sizes:
        sizes = ", ".join(f"{name} = {size}" for name, size in contract.sizes.items())
        lines += [f"Sizes that are names are free. What is handed over was chosen for {sizes}."]
    for static in contract.statics:
        lines += [f"The argument {static.path} was {static.value} when it was exported, and must be again."]
    return "\n".join(lines)


def _programs(contract: Contract) -> str:
    rows = ["| program | takes | gives |", "|---|---|---|"]
    rows += ["| `inference` | the inputs | the outputs |"]
    if contract.is_train:
        rows += ["| `forward` | the inputs | the outputs, then the residuals of kind `saved` |"]
        rows += ["| `backward` | the residuals, then the tangents | the gradients |"]
    text = (
        "Each program is there twice: `.stablehlo` is what `jax.export.deserialize` reads, for every platform above; "
        f"`.mlir` is the same as StableHLO text for {contract.mlir_platform}, for other compilers and for reading. "
        "Arrays go in and out by position, in the order of the lists below and of `signature.json`."
    )
    return "\n".join(["## Programs", "", *rows, "", text])


def _listed(title: str, arrays: Sequence[Described], describe: Callable[[Any], str]) -> str:
    rows = [f"| {a.name} | `{a.type}` | {_cell(describe(a))} |" for a in arrays[:_SHOWN]]
    if len(arrays) > _SHOWN:
        rows += [f"| and {len(arrays) - _SHOWN} more | | |"]
    return "\n".join([f"## {title}", "", "| name | type | |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _with_jointcut(contract: Contract) -> str:
    lines = [
        "## With jointcut",
        "",
        "```python",
        "import jax",
        "from jointcut import aot",
        "",
        'run = aot.load("this/folder")',
    ]
    if contract.is_train:
        lines += ["value, gradients = run.value_and_grad(*arguments)  # where the output is one number"]
        lines += ["out, pullback = run.vjp(*arguments)", "jax.grad(run), jax.jit(run)  # work as well"]
    else:
        lines += ["out = run(*arguments)"]
    return "\n".join([*lines, "```"])


_CONSTANTS = (
    'with jax.numpy.load(folder / "constants.npz") as held:  # bytes; of a key those of jax.random.key_data',
    "    constants = [",
    '        jax.numpy.asarray(held[f"constant_{i}"].view(jax.numpy.dtype(c["dtype"])).reshape(c["shape"]))',
    '        for i, c in enumerate(signature["inputs"])',
    '        if c["kind"] == "constant"',
    "    ]",
)


def _with_jax(contract: Contract) -> str:
    lines = ["## With JAX alone", "", "```python", "import json, pathlib", "import jax", "from jax import export", ""]
    lines += ['folder = pathlib.Path("this/folder")']
    lines += ['signature = json.loads((folder / "signature.json").read_text())', "", "def program(name):"]
    lines += ['    return export.deserialize(bytearray((folder / f"{name}.stablehlo").read_bytes())).call', ""]
    if contract.num_constants:
        lines += _CONSTANTS
    constants = "*constants, " if contract.num_constants else ""
    lines += [f"inputs = [{constants}*leaves]  # leaves: an array for each other input"]
    lines += ['outputs = program("inference")(*inputs)']
    if contract.is_train:
        lines += [
            "",
            'results = program("forward")(*inputs)',
            'count = len(signature["outputs"])',
            'tangents = [jax.numpy.ones(t["shape"], t["dtype"]) for t in signature["tangents"]]  # 1 for a loss',
            'where = {"output": results, "saved": results[count:], "input": inputs}',
            'residuals = [where[r["kind"]][r["index"]] for r in signature["residuals"]]',
            'gradients = program("backward")(*residuals, *tangents)',
        ]
    return "\n".join([*lines, "```"])


def _elsewhere(contract: Contract) -> str:
    return "\n".join(
        [
            "## With another compiler",
            "",
            f"The `.mlir` files are StableHLO with one function `main`, lowered for {contract.mlir_platform}: "
            "IREE, say, compiles them with `iree-compile --iree-input-type=stablehlo`.",
        ]
    )
