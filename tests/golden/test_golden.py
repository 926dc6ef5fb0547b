"""The partitioner makes of every program what the committed digests say (see `golden`)."""

from __future__ import annotations

import jax
import pytest

import golden

pytestmark = pytest.mark.skipif(
    jax.__version__ != golden.JAX_VERSION, reason=f"digests are of what JAX {golden.JAX_VERSION} traces"
)


@pytest.mark.parametrize("name", golden.names())
def test_a_program_is_cut_as_its_digests_say(name):
    changed = golden.changes(name, golden.digests(name))
    cure = "If that is meant, say why in the commit, and write the digests anew with `make golden`."
    assert not changed, "\n".join([*changed, cure])


def test_every_digest_is_of_a_program():
    assert {key.rsplit("/", 2 - key.endswith("/graph"))[0] for key in golden.kept()} == set(golden.names())


def test_a_text_that_differs_is_told_with_its_first_line(monkeypatch):
    before, after = golden.Text.of("a\nb\nc"), golden.Text.of("a\nd")
    monkeypatch.setattr(golden, "kept", lambda: {"toy/min_cut/plan": before, "toy/graph": after})
    told = golden.changes("toy", {"toy/min_cut/plan": after, "toy/0.3/plan": after})
    assert told == [
        "toy/graph: is gone",
        "toy/0.3/plan: is new",
        "toy/min_cut/plan: differs from line 2 on; it had 3 lines, and has 2",
    ]
