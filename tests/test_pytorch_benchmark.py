"""The comparison with PyTorch's memory budget runs, and what it claims holds, on networks of the smallest size.

Without PyTorch only the door is tested: the file is imported, and says what is missing.
"""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks import pytorch

# PyTorch warns of its own deprecated parts while it is imported and while it compiles.
quietly = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def models():
    pytest.importorskip("torch")
    from benchmarks import pytorch_models

    return pytorch_models


def test_without_pytorch_the_benchmark_says_what_to_install_and_fails(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks.pytorch"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        pytorch.main()
    assert stopped.value.code == pytorch.MISSING  # a text: Python prints it, and exits with 1


def test_a_cut_that_computes_less_than_its_program_is_refused():
    product = ("dot_general", ((2, 3), (3, 4)), 48)
    with pytest.raises(RuntimeError, match="lack products"):
        pytorch.Taken.of(0, Counter(), Counter([product]))
    assert pytorch.Taken.of(8, Counter({product: 3}), Counter([product])) == pytorch.Taken(8, 2, 96)


@quietly
@pytest.mark.parametrize("name", pytorch.NETWORKS)
def test_no_row_saves_more_bytes_than_pytorch_for_no_more_products(models, name, monkeypatch):
    # Op by op it takes 8 s for a network, and the tests of `partition` do so for many programs.
    monkeypatch.setattr(pytorch, "verify_meaning", lambda *_: None)
    outcome = pytorch.compare(name, models.MODELS["tiny"][name], budgets=(1.0, 0.1))
    default, least = outcome.rows
    assert all(row.holds for row in outcome.rows)
    assert all(row.same_number.products <= row.torch.products for row in outcome.rows)
    assert all(row.same_bytes.bytes_saved <= row.torch.bytes_saved for row in outcome.rows)
    assert all(row.same_bytes.flops <= row.torch.flops for row in outcome.rows)
    # The budget reached PyTorch: it gave up bytes for products, and by default it computes none again.
    assert default.torch.products == default.jointcut.products == 0
    assert least.torch.products > 0 and least.torch.bytes_saved < default.torch.bytes_saved / 2
    assert pytorch.summary([outcome]).startswith("in 2 of 2 rows")


@quietly
def test_networks_that_differ_are_not_compared(models):
    @dataclass(frozen=True)
    class Louder(models.ResNet):
        def torch_loss(self, p, given, labels):
            return 1.001 * super().torch_loss(p, given, labels)

    model = Louder(widths=(4,), blocks=1, rows=2, side=8)
    draw = np.random.default_rng(0)
    with pytest.raises(RuntimeError, match=r"PyTorch and JAX differ in the loss: by 0\.001 of its norm"):
        pytorch.check_agreement(model, models.parameters(model, draw), model.batch(draw))
