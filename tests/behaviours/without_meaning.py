"""What PyTorch's tests claim and JAX has no words for, each with the reason."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """Why a behaviour of PyTorch's tests has no meaning in JAX."""

    group: str
    behaviour: str
    why: str


WITHOUT_MEANING: tuple[Reason, ...] = ()
