"""Run both halves of an artefact with IREE on the CPU, from its files alone: neither JAX nor jointcut.

    python with_iree.py FOLDER INPUTS.npz OUT.npz

INPUTS.npz holds the leaves of the arguments by their paths (`args[0]['w']`), OUT.npz gets the outputs by their paths
and the gradients by those of the arguments that they belong to.
"""

import json
import pathlib
import sys

import iree.compiler
import iree.runtime
import numpy as np


def main(folder: pathlib.Path, given: dict, out: str) -> None:
    signature = json.loads((folder / "signature.json").read_text())
    inputs = [np.asarray(given[info["path"]]) for info in signature["inputs"]]
    results = program(folder / "forward.mlir")(*inputs)
    count = len(signature["outputs"])
    where = {"input": inputs, "output": results[:count], "saved": results[count:]}
    residuals = [where[r["kind"]][r["index"]] for r in signature["residuals"]]
    tangents = [np.ones(t["shape"], t["dtype"]) for t in signature["tangents"]]
    gradients = program(folder / "backward.mlir")(*residuals, *tangents)
    named = zip(signature["gradients"], gradients, strict=True)
    shown = zip(signature["outputs"], results[:count], strict=True)
    np.savez(out, **{o["path"]: x for o, x in shown}, **{g["path"]: x for g, x in named})


def program(path: pathlib.Path):
    """The compiled program: a function of arrays that returns a list of arrays."""
    compiled = iree.compiler.compile_str(
        path.read_text(),
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    module = iree.runtime.load_vm_flatbuffer(compiled, driver="local-sync")

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        results = module.main(*arrays)
        results = results if isinstance(results, list | tuple) else [results]
        return [np.asarray(x) for x in results]

    return run


if __name__ == "__main__":
    folder, inputs, out = sys.argv[1:]
    main(pathlib.Path(folder), dict(np.load(inputs)), out)
    assert "jax" not in sys.modules
