"""Differentiate functions of libraries from PyPI that JAX refuses to differentiate in reverse, for a loop inside them.

    python -m benchmarks.loops libraries

Each program calls a public function of a library as it stands. `jax.grad` is shown to refuse it; value and gradient by
`aot.function` are compared with the jitted program and with central differences of it, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.optimize
from jax import Array, lax
from rich import box
from rich.table import Table

from jointcut import aot

MOST_ERROR = 1e-6
STEP = 1e-5  # of central differences
AT = (1.2, 0.8)  # the two numbers that each program is differentiated with respect to


@dataclass(frozen=True)
class Row:
    """One function: the library that has it, JAX's answer to `jax.grad`, ours, and central differences."""

    library: str
    function: str
    refusal: str
    value: float
    value_error: float
    gradient: list[float]
    differences: list[float]

    @property
    def error(self) -> float:
        """The largest difference of the gradients, relative to the largest entry."""
        pairs = zip(self.gradient, self.differences, strict=True)
        return max(abs(a - b) for a, b in pairs) / max(map(abs, self.differences))

    @property
    def is_reached(self) -> bool:
        """Whether JAX refuses, and our value and gradient are right."""
        return bool(self.refusal) and self.value_error <= MOST_ERROR and self.error <= MOST_ERROR


@dataclass(frozen=True)
class Program:
    """A loss that calls `function` of `library`."""

    library: str
    function: str
    loss: Callable[[Array], Array]


def minimised(x: Array) -> Array:
    """Where BFGS ends, for a quartic that depends on the inputs."""

    def quartic(y: Array) -> Array:
        return (x[0] - y[0]) ** 2 + 0.1 * y[0] ** 4 + (y[1] - y[0] * x[1]) ** 2

    return jnp.sum(jax.scipy.optimize.minimize(quartic, jnp.zeros(2), method="BFGS").x)


def decomposed(x: Array) -> Array:
    """The polar decomposition of a matrix, by QDWH iterations until they stand still."""
    matrix = x[0] * jnp.array([[1.0, 2.0], [0.3, 1.5]]) + x[1] * jnp.array([[0.2, -1.0], [1.0, 0.1]])
    unitary, positive = jax.scipy.linalg.polar(matrix, method="qdwh")
    return jnp.sum(jnp.sin(unitary) * positive)


def rooted(x: Array) -> Array:
    """The inverse fourth root of a matrix, by coupled Newton iterations (as in Shampoo)."""
    import optax

    matrix = x[0] * jnp.array([[2.0, 0.3, 0.1], [0.3, 1.5, 0.2], [0.1, 0.2, 1.0]]) + x[1] * jnp.eye(3)
    return jnp.sum(optax.matrix_inverse_pth_root(matrix, 4)[0] ** 2)


def sampled(x: Array) -> Array:
    """A mean over five steps of the No-U-Turn sampler, whose trees grow in nested loops, for fixed keys."""
    from numpyro.infer.hmc import hmc

    def potential(z: Array) -> Array:
        return 0.5 * jnp.sum((z - x[0]) ** 2 / x[1] ** 2) + 0.1 * jnp.sum(z**4)

    begin, kernel = hmc(potential_fn=potential, algo="NUTS")
    fixed = {"num_warmup": 0, "step_size": 0.2, "adapt_step_size": False, "adapt_mass_matrix": False}
    state = begin(jnp.array([0.3, -0.2, 0.5]), rng_key=jax.random.PRNGKey(0), **fixed)

    def step(state: object, _: None) -> tuple[object, Array]:
        state = kernel(state)
        return state, state.z

    return jnp.mean(lax.scan(step, state, length=5)[1] ** 2)


def integrated(x: Array) -> Array:
    """An adaptive ODE solve whose adjoint is said to be forward mode alone, for which Diffrax runs a plain loop."""
    import diffrax

    found = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: -args[0] * y + jnp.sin(args[1] * t)), diffrax.Tsit5(), 0.0, 3.0, 0.05,
        jnp.array([1.0, 0.5]), x, adjoint=diffrax.ForwardMode(),
        stepsize_controller=diffrax.PIDController(rtol=1e-10, atol=1e-10),
    )  # fmt: skip
    assert found.ys is not None
    return jnp.sum(found.ys**2)


PROGRAMS = (
    Program("jax", "scipy.optimize.minimize (BFGS)", minimised),
    Program("jax", "scipy.linalg.polar (QDWH)", decomposed),
    Program("optax", "matrix_inverse_pth_root", rooted),
    Program("numpyro", "infer.hmc (NUTS)", sampled),
    Program("diffrax", "diffeqsolve (ForwardMode)", integrated),
)


def refusal(function: Callable[[Array], Array], x: Array) -> str:
    """What JAX says to `jax.grad` of a function, nothing where it obeys."""
    try:
        jax.grad(function)(x)
    except ValueError as error:
        return str(error)
    return ""


def differences(function: Callable[[Array], Array], x: Array) -> list[float]:
    """The gradient by central differences of fourth order."""
    run = jax.jit(function)

    def along(way: Array) -> float:
        near, far = (float(run(x + k * STEP * way) - run(x - k * STEP * way)) for k in (1, 2))
        return (8 * near - far) / (12 * STEP)

    return [along(way) for way in jnp.eye(len(x))]


def measure(program: Program) -> Row:
    """The figures of one function."""
    x = jnp.array(AT)
    value, gradient = aot.function(program.loss).value_and_grad(x)
    want = float(jax.jit(program.loss)(x))
    return Row(
        f"{program.library} {version(program.library)}", program.function, refusal(program.loss, x), float(value),
        abs(float(value) - want) / abs(want), [float(g) for g in gradient], differences(program.loss, x),
    )  # fmt: skip


def missing() -> list[str]:
    """The libraries that are not installed."""
    return sorted({p.library for p in PROGRAMS if find_spec(p.library) is None})


def rows() -> list[Row]:
    """The figures of all functions whose library is installed, in float64."""
    absent = missing()
    with jax.enable_x64(True):
        return [measure(p) for p in PROGRAMS if p.library not in absent]


def table_of(rows: list[Row]) -> Table:
    """A line for each function."""
    table = Table(title="Functions that jax.grad refuses", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("library", "function", "jax.grad says"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "gradient", "differences", "error"):
        table.add_column(heading, justify="right")
    for r in rows:
        says = f"“{r.refusal[:40]}…”" if r.refusal else "a gradient"
        pairs = [" ".join(f"{x:.6f}" for x in xs) for xs in (r.gradient, r.differences)]
        cells = (r.library, r.function, says, f"{r.value:.6f}", *pairs, f"{r.error:.0e}")
        table.add_row(*cells, style=None if r.is_reached else "red")
    return table
