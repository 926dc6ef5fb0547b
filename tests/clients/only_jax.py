"""Train from an artefact with jax.export and signature.json, and nothing else: no jointcut, no model source.

    python only_jax.py FOLDER INPUTS.npz STEPS LEARNING_RATE OUT.npz

INPUTS.npz holds the leaves of the arguments by their paths (`args[0]['w']`), OUT.npz gets the parameters after that
many steps of gradient descent, and the loss of each.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export


def main(folder: pathlib.Path, given: dict, steps: int, rate: float, out: str) -> None:
    signature = json.loads((folder / "signature.json").read_text())
    forward, backward = (program(folder, name) for name in ("forward", "backward"))
    constants = np.load(folder / "constants.npz") if (folder / "constants.npz").exists() else {}
    inputs = [
        typed(constants[f"constant_{i}"], info) if info["kind"] == "constant" else jnp.asarray(given[info["path"]])
        for i, info in enumerate(signature["inputs"])
    ]
    place = {info["name"]: i for i, info in enumerate(signature["inputs"])}
    count, losses = len(signature["outputs"]), []
    for _ in range(steps):
        results = forward(*inputs)
        where = {"input": inputs, "output": results[:count], "saved": results[count:]}
        residuals = [where[r["kind"]][r["index"]] for r in signature["residuals"]]
        tangents = [jnp.ones(t["shape"], t["dtype"]) for t in signature["tangents"]]
        for gradient, value in zip(signature["gradients"], backward(*residuals, *tangents), strict=True):
            inputs[place[gradient["of"]]] -= rate * value
        losses.append(float(results[0]))
    trained = {g["path"]: np.asarray(inputs[place[g["of"]]]) for g in signature["gradients"]}
    np.savez(out, losses=np.array(losses), **trained)


def program(folder: pathlib.Path, name: str):
    data = bytearray((folder / f"{name}.stablehlo").read_bytes())
    return jax.jit(export.deserialize(data).call)


def typed(data: np.ndarray, info: dict) -> jax.Array:
    return jnp.asarray(data.view(jnp.dtype(info["dtype"])).reshape(info["shape"]))


if __name__ == "__main__":
    folder, inputs, steps, rate, out = sys.argv[1:]
    main(pathlib.Path(folder), dict(np.load(inputs)), int(steps), float(rate), out)
    assert "jointcut" not in sys.modules
