"""An interatomic potential of continuous-filter convolutions, as in SchNet, trained on energies and on forces.

Forces are the energy's derivative by the positions, so the loss holds a gradient and its own gradient takes second
derivatives. The batch is one graph: molecules side by side, an edge for each ordered pair of near atoms.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.programs.layers import init_linear, linear
from benchmarks.programs.program import Program, Size, Wrap, identity

Params = dict[str, Any]
Graph = dict[str, Array]  # species and molecule of each atom (atoms), sender and receiver of each edge (edges)

CUTOFF, SPACING, JITTER = 5.0, 1.6, 0.15  # ångström
FORCE_WEIGHT = 10.0


@dataclass(frozen=True)
class Config:
    """Molecules in a batch, atoms in each, chemical elements, radial functions, width and number of interactions."""

    molecules: int
    atoms: int
    elements: int
    radial: int
    width: int
    layers: int


SIZES: dict[Size, Config] = {
    "tiny": Config(molecules=2, atoms=5, elements=3, radial=6, width=8, layers=2),
    "small": Config(molecules=32, atoms=21, elements=4, radial=24, width=64, layers=3),
    "medium": Config(molecules=64, atoms=48, elements=10, radial=50, width=128, layers=6),
    "large": Config(molecules=512, atoms=48, elements=10, radial=50, width=128, layers=6),
}


def init(key: Array, config: Config) -> Params:
    """Draw the parameters."""
    element_key, hidden_key, energy_key, *keys = jax.random.split(key, config.layers + 3)
    return {
        "elements": jax.random.normal(element_key, (config.elements, config.width)),
        "interactions": [init_interaction(k, config) for k in keys],
        "hidden": init_linear(hidden_key, config.width, config.width // 2),
        "energy": init_linear(energy_key, config.width // 2, 1),
    }


def init_interaction(key: Array, config: Config) -> Params:
    """Draw one interaction: the filter's two layers, the atoms' layer before and the two after."""
    keys: Any = jax.random.split(key, 5)
    width = config.width
    return {
        "radial": init_linear(keys[0], config.radial, width),
        "filter": init_linear(keys[1], width, width),
        "send": width**-0.5 * jax.random.normal(keys[2], (width, width)),
        "receive": init_linear(keys[3], width, width),
        "update": init_linear(keys[4], width, width),
    }


def smooth(x: Array) -> Array:
    """The softplus that passes through the origin: it has all derivatives."""
    return jax.nn.softplus(x) - float(np.log(2.0))


def interact(p: Params, x: Array, radial: Array, fade: Array, graph: Graph) -> Array:
    """One interaction: atoms (atoms, width) take in their neighbours, filtered by what lies between them.

    `radial` (edges, functions) describes the distance along each edge, `fade` (edges) falls to zero at the cutoff.
    """
    filters = linear(p["filter"], smooth(linear(p["radial"], radial))) * fade[:, None]
    messages = (x @ p["send"])[graph["sender"]] * filters
    gathered = jax.ops.segment_sum(messages, graph["receiver"], num_segments=len(x))
    return x + linear(p["update"], smooth(linear(p["receive"], gathered)))


def energies(params: Params, positions: Array, graph: Graph, molecules: int, block: Wrap = identity) -> Array:
    """The energy of each molecule (molecules) from the positions of all atoms (atoms, 3)."""
    between = positions[graph["receiver"]] - positions[graph["sender"]]
    distance = jnp.sqrt(jnp.sum(between * between, axis=-1))
    functions = params["interactions"][0]["radial"]["w"].shape[0]
    centres = jnp.linspace(0.0, CUTOFF, functions, dtype=distance.dtype)
    radial = jnp.exp(-(((distance[:, None] - centres) * (functions / CUTOFF)) ** 2) / 2)
    fade = jnp.where(distance < CUTOFF, (jnp.cos(distance * (np.pi / CUTOFF)) + 1.0) / 2, 0.0)
    x = params["elements"][graph["species"]]
    for p in params["interactions"]:
        x = block(interact)(p, x, radial, fade, graph)
    per_atom = linear(params["energy"], smooth(linear(params["hidden"], x)))[:, 0]
    return jax.ops.segment_sum(per_atom, graph["molecule"], num_segments=molecules)


def loss(
    params: Params, positions: Array, graph: Graph, energy: Array, force: Array, block: Wrap = identity
) -> tuple[Array, dict[str, Array]]:
    """Squared error of the energy per atom and of the forces, and the root mean square of each.

    `energy` is (molecules), `positions` and `force` (atoms, 3). `block` wraps each interaction.
    """

    def total(positions: Array) -> tuple[Array, Array]:
        predicted = energies(params, positions, graph, len(energy), block)
        return jnp.sum(predicted), predicted

    slope, predicted = jax.grad(total, has_aux=True)(positions)
    energy_error = jnp.mean(((predicted - energy) * (len(energy) / len(positions))) ** 2)
    force_error = jnp.mean((-slope - force) ** 2)
    errors = {"energy": jnp.sqrt(energy_error), "force": jnp.sqrt(force_error)}
    return energy_error + FORCE_WEIGHT * force_error, errors


def morse(positions: Array, graph: Graph, molecules: int) -> Array:
    """The reference: a Morse potential between near atoms, its energy for each molecule."""
    between = positions[graph["receiver"]] - positions[graph["sender"]]
    well = jnp.exp(-1.5 * (jnp.sqrt(jnp.sum(between * between, axis=-1)) - SPACING))
    return jax.ops.segment_sum(0.1 * (well * well - 2 * well), graph["molecule"][graph["sender"]], molecules)


def cluster(atoms: int) -> np.ndarray:
    """The `atoms` points of a cubic lattice that are nearest to the origin."""
    line = np.arange(-4, 5)
    points = np.stack(np.meshgrid(line, line, line), axis=-1).reshape(-1, 3)
    nearest = np.argsort(np.sum(points**2, axis=1), kind="stable")[:atoms]
    return SPACING * points[nearest].astype(np.float32)


def program(size: Size) -> Program:
    """One step on shaken clusters of random elements, labelled by a Morse potential."""
    config = SIZES[size]
    keys: Any = jax.random.split(jax.random.key(0), 3)
    shape = (config.molecules, config.atoms, 3)
    positions = cluster(config.atoms) + JITTER * jax.random.normal(keys[1], shape)
    apart = jnp.linalg.norm(positions[:, :, None] - positions[:, None, :], axis=-1)
    molecule, one, other = np.nonzero(np.asarray((apart > 0) & (apart < CUTOFF)))
    graph = {
        "species": jax.random.randint(keys[2], (config.molecules * config.atoms,), 0, config.elements),
        "molecule": jnp.repeat(jnp.arange(config.molecules), config.atoms),
        "sender": jnp.asarray(molecule * config.atoms + other),
        "receiver": jnp.asarray(molecule * config.atoms + one),
    }
    flat = positions.reshape(-1, 3)
    energy = morse(flat, graph, config.molecules)
    force = -jax.grad(lambda x: jnp.sum(morse(x, graph, config.molecules)))(flat)
    count = f"{config.molecules} molecules of {config.atoms} atoms, {len(one)} edges"
    title = f"{config.layers} interactions of width {config.width}, {count}"
    arguments = (init(keys[0], config), flat, graph, energy, force)
    sizes = asdict(config) | {"edges": len(one)}
    return Program("forces", title, loss, arguments, has_aux=True, places=("block",), sizes=sizes)
