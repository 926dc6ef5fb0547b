"""Under the conventions of PyTorch, gradients of JAX's functions are PyTorch's, but where a reason says why not."""

import jax
import pytest

from benchmarks.derivatives.agreement import PYTORCH, REASONS, groups, reason_of
from benchmarks.derivatives.cases import families
from programs import EVERY_PROGRAM

#: Functions with a choice of their own, by family; all functions with JOINTCUT_EVERY_PROGRAM.
CHOSEN = {
    "activations": ("celu", "relu", "relu6", "hard_tanh", "leaky_relu"),
    "cumulative": ("cummax along 0", "cummin along 1"),
    "elementwise": (
        "abs",
        "arctan2",
        "clip",
        "clip to arrays",
        "fmax",
        "fmin",
        "maximum",
        "sign complex",
        "sinc",
        "xlogy",
    ),
    "linalg": ("lstsq 3 x 3", "lstsq 4 x 2", "svdvals 3 x 3"),
    "powers": ("power",),
    "reductions": ("median", "amax", "std"),
}


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def chosen():
    """The functions with their committed figures."""
    for family in families():
        found = groups(family)
        assert {group.case.name for group in found} >= set(CHOSEN.get(family, ())), f"{family} has no such functions"
        for group in found:
            if EVERY_PROGRAM or group.case.name in CHOSEN.get(family, ()):
                yield pytest.param(group, id=f"{group.family}: {group.case.name}, {len(group.names)} probes")


@pytest.mark.parametrize("group", list(chosen()))
def test_gradients_at_probes_are_those_of_pytorch_but_for_a_reason(group):
    for name, agrees in zip(group.names, group.agreeing(PYTORCH), strict=True):
        assert agrees or reason_of(group.case, name), (group.case.name, name)


def test_reasons_name_probes_that_there_are():
    """Whether a gradient differs may hang on the version of JAX."""
    probes = {(group.case.name, name) for family in families() for group in groups(family) for name in group.names}
    assert set(REASONS) <= probes and all(REASONS.values())
