"""Whatever could change a compilation from outside counts, and what could not does not."""

from __future__ import annotations

import functools

import jax
from jax.sharding import AxisType

from jointcut.aot.cache import environment as environments
from jointcut.aot.cache.environment import environment
from jointcut.aot.cache.fingerprint import fingerprint


@functools.cache
def mesh():
    return jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "precision of products": lambda: jax.default_matmul_precision("highest"),
    "generator": lambda: jax.default_prng_impl("rbg"),
    "partitionable draws": lambda: jax.threefry_partitionable(False),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "checks for NaN": lambda: jax.debug_nans(True),
    "checks for infinities": lambda: jax.debug_infs(True),
    "device": lambda: jax.default_device(jax.devices()[0]),
    "mesh": lambda: jax.set_mesh(mesh()),
}


def test_every_setting_that_changes_programs_counts():
    keys = {"nothing": fingerprint(**environment())}
    for name, setting in SETTINGS.items():
        with setting():
            keys[name] = fingerprint(**environment())
    assert len(set(keys.values())) == len(keys)
    assert fingerprint(**environment()) == keys["nothing"]


def test_settings_of_logging_do_not_count():
    before = fingerprint(**environment())
    with jax.log_compiles(True):
        assert fingerprint(**environment()) == before


def test_what_compilers_read_counts(monkeypatch, tmp_path):
    environment()  # which remembers what was set at first
    keys = [fingerprint(**environment())]
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_enable_fast_math=true")
    settings = [("XLA_FLAGS", "--xla_a=1"), ("XLA_FLAGS", "--xla_a=2"), ("LIBTPU_INIT_ARGS", "--a"), ("NPROC", "7")]
    for name, value in [*settings, ("XLA_FLAGS", str(flags))]:
        monkeypatch.setenv(name, value)
        keys.append(fingerprint(**environment()))
    flags.write_text("--xla_cpu_enable_fast_math=false")
    keys.append(fingerprint(**environment()))
    assert len(set(keys)) == len(keys)


def test_what_compilers_read_before_it_was_changed_counts_too(monkeypatch):
    keys = []
    for first in ("--xla_a=1", "--xla_a=2"):
        environments._first_variables.cache_clear()
        monkeypatch.setenv("XLA_FLAGS", first)
        environment()
        monkeypatch.setenv("XLA_FLAGS", "--xla_a=2")
        keys.append(fingerprint(**environment()))
    environments._first_variables.cache_clear()
    assert keys[0] != keys[1]


def test_a_change_of_any_source_file_counts(tmp_path):
    folder = tmp_path / "package"
    (folder / "inner").mkdir(parents=True)
    one, two = folder / "one.py", folder / "inner" / "two.py"
    found = []

    def look():
        found.append(environments.sources([folder]))

    one.write_text("a = 1\n")
    two.write_text("b = 1\n")
    look()
    one.write_text("a = 2\n")
    look()
    one.write_text("a = 1\nb = 1\n")
    two.write_text("")
    look()
    one.rename(folder / "three.py")
    look()
    assert len(set(found)) == len(found)
    (folder / "notes.txt").write_text("no source")
    assert environments.sources([folder]) == found[-1]


def test_the_processor_counts_and_its_present_state_does_not(tmp_path):
    text = "processor : 0\nmodel name : A\nflags : sse avx\ncpu MHz : {}\n"

    def cpu(name, written):
        (tmp_path / name).write_text(written)
        return environments.cpu(str(tmp_path / name))

    first = cpu("first", text.format(1000))
    assert cpu("clock", text.format(2000)) == first
    assert cpu("two", text.format(1) + text.format(2)) == first
    assert cpu("flags", text.format(1000).replace("avx", "avx avx2")) != first
    assert environments.cpu(str(tmp_path / "none"))[:3] == first[:3]


def test_the_versions_of_what_compiles_count():
    names = [name for name, _ in environments.versions()]
    assert {"jax", "jaxlib", "numpy", "scipy"} <= set(names) and names == sorted(names)
