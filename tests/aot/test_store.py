"""What a store returns is what was put there, whoever writes at the same time, is killed, or meddles."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.storm import PROCESSES, storm
from benchmarks.storm_worker import ROOT, key_of
from jointcut.aot.cache import folder as sharing
from jointcut.aot.cache import store as storing
from jointcut.aot.cache.store import Store
from jointcut.partition.errors import CacheError, JointcutError

ROUNDS = 20  # `python -m benchmarks.storm` runs 200
MUTATIONS = 2_000
HEAD_BYTES = 88
A, B, C, D, E = (key_of(letter) for letter in "ABCDE")
UNWRITTEN = "The program runs on, and compiles again what it would have found there."
REMOVED = "It is removed, and made again."

once = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.at(tmp_path / "cache")


def path_of(store: Store, key: str) -> Path:
    return store.folder / f"{key}.entry"


def names(store: Store) -> set[str]:
    return {path.name for path in store.folder.iterdir()}


def told(caplog) -> list[str]:
    assert all(record.levelno == logging.WARNING and record.name == "jointcut" for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


# ------------------------------------------------------------------------------------------------- put and get


@once
@given(
    st.dictionaries(st.binary(max_size=8).map(lambda b: key_of(b.hex())), st.tuples(st.binary(), st.text()), max_size=4)
)
def test_what_is_put_is_found_by_this_store_and_by_the_next(kept):
    with TemporaryDirectory() as folder:
        store = Store.at(folder)
        assert all(store.put(key, payload, label) for key, (payload, label) in kept.items())
        for reader in (store, Store.at(Path(folder))):
            assert all(reader.get(key) == payload for key, (payload, _) in kept.items())
            assert {entry.key: entry.label for entry in reader.entries()} == {
                k: label for k, (_, label) in kept.items()
            }
            assert sum(entry.nbytes for entry in reader.entries()) == reader.total_bytes
        assert reader.clear() == len(kept) and not reader.entries() and reader.total_bytes == 0


def test_a_label_that_utf8_cannot_hold_is_spelt_out(store):
    assert store.put(A, b"", label="f\udcff")
    (entry,) = store.entries()
    assert entry.label == "f\\udcff"


def test_what_was_never_put_is_not_there_and_nothing_is_told(store, caplog):
    assert store.get(A) is None and store.entries() == () and store.clear() == 0
    assert not told(caplog)


@pytest.mark.parametrize("key", ["", "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61, "g" * 64])
def test_only_a_hexadecimal_sha256_is_a_key(store, key):
    text = f"key is {key!r}, not 64 digits of lower-case hexadecimal.\nGive hashlib.sha256(...).hexdigest()."
    for call in (lambda: store.get(key), lambda: store.put(key, b"")):
        with pytest.raises(CacheError) as caught:
            call()
        assert str(caught.value) == text
    assert isinstance(caught.value, JointcutError) and isinstance(caught.value, ValueError)


def test_the_secret_is_in_no_text_of_the_store(store):
    assert repr(store) == f"Store(folder={store.folder!r}, max_bytes={10 * 2**30})"


def test_the_store_is_loaded_without_jax():
    ask = "from benchmarks.storm_worker import load_store; load_store(); import sys; print('jax' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=True, capture_output=True, text=True)
    assert answer.stdout == "False\n"


# --------------------------------------------------------------------------------------------------- the model


class LeastRecentlyUsed(RuleBasedStateMachine):
    """A store against an ordered dictionary that forgets its first."""

    keys = st.sampled_from((A, B, C, D, E))
    max_bytes = 1_000

    @initialize()
    def begin(self):
        self.place = TemporaryDirectory()
        self.clock = itertools.count(10**18, 1_000_000)
        storing.time = SimpleNamespace(time_ns=lambda: next(self.clock))
        self.store = Store.at(self.place.name, self.max_bytes)
        self.model: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def teardown(self):
        storing.time = time
        if hasattr(self, "place"):
            self.place.cleanup()

    def size(self, key: str) -> int:
        payload, label = self.model[key]
        return HEAD_BYTES + len(label.encode()) + len(payload)

    @rule(key=keys, length=st.integers(0, 1_000), label=st.sampled_from(("", "f", "ünï")))
    def put(self, key, length, label):
        payload = random.Random(length).randbytes(length)
        fits = HEAD_BYTES + len(label.encode()) + length <= self.max_bytes
        assert self.store.put(key, payload, label) == fits
        if fits:
            self.model[key] = payload, label
            self.model.move_to_end(key)
            while sum(map(self.size, self.model)) > self.max_bytes:
                self.model.popitem(last=False)

    @rule(key=keys)
    def get(self, key):
        assert self.store.get(key) == self.model.get(key, (None,))[0]
        if key in self.model:
            self.model.move_to_end(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def spoil(self, data):
        key = data.draw(st.sampled_from(sorted(self.model)))
        path = path_of(self.store, key)
        path.write_bytes(path.read_bytes() + b"!")
        assert self.store.get(key) is None
        del self.model[key]

    @rule()
    def open_again(self):
        self.store = Store.at(self.place.name, self.max_bytes)

    @rule()
    def clear(self):
        assert self.store.clear() == len(self.model)
        self.model.clear()

    @invariant()
    def same(self):
        if hasattr(self, "store"):
            expected = [(key, self.model[key][1], self.size(key)) for key in reversed(self.model)]
            entries = self.store.entries()
            assert [(entry.key, entry.label, entry.nbytes) for entry in entries] == expected
            assert self.store.total_bytes == sum(size for _, _, size in expected) <= self.max_bytes
            assert names(self.store) - {"key", "lock"} == {f"{entry.key}.entry" for entry in entries}


LeastRecentlyUsed.TestCase.settings = settings(once, max_examples=40, stateful_step_count=15)
test_entries_go_in_the_order_of_their_last_use = LeastRecentlyUsed.TestCase


def test_an_entry_that_is_too_large_is_declined_once_and_what_was_there_stays(tmp_path, caplog):
    store = Store.at(tmp_path, 200)
    assert store.put(A, b"a" * 112) and not store.put(A, b"b" * 113) and not store.put(B, b"b" * 113)
    assert not store.put(B, b"b" * 113)
    assert store.get(A) == b"a" * 112 and names(store) == {"key", "lock", f"{A}.entry"}
    what = "takes 201 bytes, more than the 200 that the cache may take.\nIt is not kept. Allow the cache more."
    assert told(caplog) == [f"cache entry {path_of(store, key)} {what}" for key in (A, B)]


def test_what_was_just_put_stays_though_the_clock_was_set_back(tmp_path, monkeypatch):
    store = Store.at(tmp_path, 300)
    clock = iter((30, 20, 10))
    monkeypatch.setattr(storing, "time", SimpleNamespace(time_ns=lambda: 10**18 + next(clock)))
    for key in (A, B, C):
        assert store.put(key, bytes(100))
        assert key in {entry.key for entry in store.entries()}
    assert [entry.key for entry in store.entries()] == [C]


def test_another_process_of_a_tighter_bound_may_evict_while_we_read(tmp_path):
    wide, tight = Store.at(tmp_path), Store.at(tmp_path, 300)
    assert wide.put(A, b"a" * 100) and wide.put(B, b"b" * 100) and wide.get(A)
    with path_of(wide, B).open("rb") as held:
        assert tight.put(C, b"c" * 100)
        assert held.read().endswith(b"b" * 100)
    assert wide.get(B) is None and wide.get(C) == b"c" * 100 and wide.get(A) is None


# ---------------------------------------------------------------------------------------------------- meddlers


def mutations(draw: random.Random, good: bytes, others: list[bytes]):
    """A bit flipped in each byte of the head, then whatever chance makes of the file; endless."""
    for place in range(HEAD_BYTES):
        yield flipped(good, 8 * place + draw.randrange(8))
    yield from others
    while True:
        yield draw.choice(
            (
                lambda: flipped(good, draw.randrange(8 * len(good))),
                lambda: good[: draw.randrange(len(good))],
                lambda: good + draw.randbytes(draw.randrange(1, 50)),
                lambda: good[: (cut := draw.randrange(len(good)))] + draw.randbytes(len(good) - cut),
                lambda: good.replace(b"label", bytes(draw.sample(b"label", 5)), 1),
                lambda: draw.randbytes(draw.randrange(2 * len(good))),
                lambda: draw.choice(others)[:HEAD_BYTES] + good[HEAD_BYTES:],
                lambda: good[:HEAD_BYTES] + draw.choice(others)[HEAD_BYTES:],
                lambda: longer_label(good, draw.choice((-1, 1))),
            )
        )()


def flipped(text: bytes, bit: int) -> bytes:
    changed = bytearray(text)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def longer_label(text: bytes, by: int) -> bytes:
    """The same bytes, of which the head says that more, or fewer, belong to the label."""
    payload_bytes, label_bytes = struct.unpack_from("<QI", text, 12)
    return text[:12] + struct.pack("<QI", payload_bytes - by, label_bytes + by) + text[24:]


def test_no_entry_is_returned_that_somebody_changed_moved_or_brought(tmp_path, caplog):
    store, foreign = Store.at(tmp_path / "ours"), Store.at(tmp_path / "theirs")
    draw = random.Random(0)
    payload, path = draw.randbytes(100), path_of(store, A)
    assert store.put(A, payload, "label") and store.put(B, draw.randbytes(100), "label")
    assert store.put(C, payload, "label") and foreign.put(A, payload, "label")
    good = path.read_bytes()
    others = [path_of(store, B).read_bytes(), path_of(store, C).read_bytes(), path_of(foreign, A).read_bytes()]
    changed = (text for text in mutations(draw, good, others) if text != good)
    for text in itertools.islice(changed, MUTATIONS):
        path.write_bytes(text)
        assert all(entry.label == "label" for entry in store.entries())
        assert store.get(A) is None
        is_newer = text.startswith(b"jointcut") and len(text) >= HEAD_BYTES and int.from_bytes(text[8:12], "little") > 1
        assert path.exists() == is_newer
    assert len(told(caplog)) == 1
    path.write_bytes(good)
    assert store.get(A) == payload


def with_version(good: bytes, version: int) -> bytes:
    return good[:8] + struct.pack("<I", version) + good[12:]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda good: good[:87], f"is cut off after 87 bytes.\n{REMOVED}"),
        (lambda good: b"J" + good[1:], f"does not begin as an entry does.\n{REMOVED}"),
        (lambda good: with_version(good, 0), f"has format 0, and this is format 1.\n{REMOVED}"),
        (
            lambda good: with_version(good, 2),
            "has format 2, and this is format 1.\nIt stays for the newer jointcut that wrote it.",
        ),
        (lambda good: good[:-1], f"has 1,092 bytes, and says that it has 1,093.\n{REMOVED}"),
        (lambda good: good + b"0", f"has 1,094 bytes, and says that it has 1,093.\n{REMOVED}"),
        (lambda good: good.replace(b"label", b"lebal"), f"is not signed with this folder's key.\n{REMOVED}"),
        (lambda good: good[:-1] + b"0", f"holds another payload than was written.\n{REMOVED}"),
    ],
)
def test_a_refused_entry_is_told_of_once_and_removed_unless_it_is_newer(store, caplog, spoil, text):
    path = path_of(store, A)
    for _ in range(3):
        assert store.put(A, 1000 * b"1", "label") and store.get(A)
        path.write_bytes(spoil(path.read_bytes()))
        assert store.get(A) is None
        assert path.exists() == ("newer" in text)
    assert told(caplog) == [f"cache entry {path} {text}"]


def test_the_entries_of_a_copied_folder_are_refused_without_its_key(tmp_path, caplog):
    ours = Store.at(tmp_path / "ours")
    assert ours.put(A, b"a")
    shutil.copytree(ours.folder, tmp_path / "copy", ignore=lambda *_: ["key"])
    (tmp_path / "copy").chmod(0o700)
    copy = Store.at(tmp_path / "copy")
    assert copy.entries() == () and copy.get(A) is None and ours.get(A) == b"a"
    assert told(caplog) == [f"cache entry {path_of(copy, A)} is not signed with this folder's key.\n{REMOVED}"]


def test_an_entry_that_cannot_be_read_is_as_one_that_is_not_there(store, caplog):
    path_of(store, A).mkdir()
    assert store.get(A) is None and store.get(A) is None and not store.put(A, b"a") and store.put(B, b"b")
    assert [entry.key for entry in store.entries()] == [B]
    assert told(caplog) == [
        f"cache entry {path_of(store, A)} cannot be read: Is a directory.\nIt is made again.",
        f"cache entry {path_of(store, A)} cannot be written: Is a directory.\n{UNWRITTEN}",
    ]


def test_a_good_entry_that_comes_while_a_bad_one_is_refused_stays(store, monkeypatch):
    path_of(store, A).write_bytes(b"bad")
    refuse = Store._refuse

    def late(self, *args):
        assert Store.at(store.folder).put(A, b"good")
        refuse(self, *args)

    monkeypatch.setattr(Store, "_refuse", late)
    assert store.get(A) is None and store.get(A) == b"good"


def test_a_store_whose_folder_was_made_anew_harms_nothing_there(store, caplog):
    shutil.rmtree(store.folder)
    assert store.get(A) is None and store.entries() == () and store.total_bytes == 0 and not store.put(A, b"old")
    new = Store.at(store.folder)
    assert new.put(A, b"new") and not store.put(A, b"old") and not store.put(B, b"old")
    assert store.get(A) is None and new.get(A) == b"new" and names(new) == {"key", "lock", f"{A}.entry"}
    assert told(caplog) == [
        f"cache entry {path_of(store, A)} cannot be written: No such file or directory.\n{UNWRITTEN}",
        f"cache entry {path_of(store, A)} is not signed with this folder's key.\n{REMOVED}",
    ]


# ----------------------------------------------------------------------------------------------- whom to trust


def refusal(folder: Path) -> str:
    with pytest.raises(CacheError) as caught:
        Store.at(folder)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o775, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_until_it_is_mended(tmp_path, mode):
    folder = tmp_path / "a cache"
    folder.mkdir()
    folder.chmod(mode)
    assert refusal(folder) == (
        f"cache folder {folder} has mode {mode:04o}, so that others may write to it.\n"
        f"If nobody has done so: chmod go-w '{folder}'"
    )
    assert not list(folder.iterdir())
    folder.chmod(mode & ~0o022)
    assert Store.at(folder).put(A, b"a")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o640, 0o604, 0o666])
def test_a_key_that_others_may_read_or_change_is_refused_until_it_is_mended(store, mode):
    key = store.folder / "key"
    key.chmod(mode)
    assert refusal(store.folder) == (
        f"cache file {key} has mode {mode:04o}, so that others may read or change it.\n"
        f"If nobody has done so: chmod 600 {key}"
    )
    key.chmod(0o600)
    assert Store.at(store.folder).put(A, b"a")


def test_what_belongs_to_somebody_else_is_refused(store, monkeypatch):
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert refusal(store.folder) == (
        f"cache folder {store.folder} belongs to user {owner}, and you are user {owner + 1}.\n"
        "Give a folder of your own."
    )
    monkeypatch.setattr(sharing, "trust_folder", lambda _: None)
    monkeypatch.setattr(storing, "trust_folder", lambda _: None)
    assert refusal(store.folder).startswith(
        f"cache file {store.folder / 'lock'} holds a name that a cache gives, and is"
    )
    monkeypatch.setattr(storing, "claim", lambda _: None)
    assert refusal(store.folder).startswith(f"cache file {store.folder / 'key'} belongs to user {owner}, and you are")


def test_where_users_have_no_numbers_nobody_is_asked_who_he_is(store, monkeypatch):
    store.folder.chmod(0o777)
    monkeypatch.delattr(os, "getuid")
    assert Store.at(store.folder).put(A, b"a")


def test_a_link_to_a_folder_of_our_own_is_as_good_as_the_folder(store, tmp_path):
    (tmp_path / "link").symlink_to(store.folder)
    assert Store.at(tmp_path / "link").put(A, b"a") and store.get(A) == b"a"


def test_a_new_folder_is_its_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        store = Store.at(tmp_path / "deep" / "cache")
        assert store.put(A, b"a")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (store.folder, *store.folder.iterdir())}
    assert modes == {"cache": 0o700, "key": 0o600, "lock": 0o600, f"{A}.entry": 0o600}


def test_a_key_of_the_wrong_length_is_refused(store):
    for text in (b"", b"1" * 31, b"1" * 33):
        (store.folder / "key").write_bytes(text)
        assert refusal(store.folder) == (
            f"cache file {store.folder / 'key'} is no key: it does not have 32 bytes.\n"
            "Remove it; the entries are then made again."
        )


@pytest.mark.parametrize(
    ("name", "text"), [("lock", b"1234"), ("key", b"my key"), (f"{A}.entry", b"mine"), ("writing-01ab.tmp", b"")]
)
def test_files_of_somebody_elses_under_the_names_of_a_cache_are_left_and_the_folder_is_refused(name, text, tmp_path):
    (tmp_path / name).write_bytes(text)
    what = "holds a name that a cache gives, and is not of a cache of this version and user."
    assert refusal(tmp_path) == f"cache file {tmp_path / name} {what}\nGive a folder that does not exist yet."
    assert (tmp_path / name).read_bytes() == text


def test_a_cache_of_before_there_were_marks_is_one(store):
    store.put(A, b"a")
    (store.folder / "lock").write_bytes(b"")
    assert Store.at(store.folder).get(A) == b"a" and (store.folder / "lock").read_bytes()


def test_a_folder_that_cannot_be_made_or_written_is_refused_at_once(tmp_path, monkeypatch):
    cure = "Give a folder that you may write to, on a file system that has locks."
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "cache", "Not a directory")):
        assert refusal(folder) == f"cache folder {folder} cannot be used: {why}.\n{cure}"
    monkeypatch.setattr(os, "open", failing(errno.EROFS))
    assert refusal(tmp_path) == f"cache folder {tmp_path} cannot be used: Read-only file system.\n{cure}"


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_bound_is_positive(tmp_path, max_bytes):
    with pytest.raises(CacheError) as caught:
        Store.at(tmp_path / "cache", max_bytes)
    assert str(caught.value) == f"max_bytes is {max_bytes}.\nGive a positive number of bytes."
    assert not (tmp_path / "cache").exists()


# ----------------------------------------------------------------------------------------------- a bad disk day


def failing(number: int):
    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("step", ["open", "fsync", "replace", "utime"])
def test_a_put_that_the_disk_declines_changes_nothing_and_is_told_once(store, monkeypatch, caplog, number, step):
    assert store.put(A, b"a")
    before = names(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing(number))
        assert not store.put(A, b"b") and not store.put(B, b"b")
        assert store.get(A) == b"a" and names(store) == before
    reason = f"cannot be written: {os.strerror(number)}.\n{UNWRITTEN}"
    assert told(caplog) == [f"cache entry {path_of(store, A)} {reason}"]
    assert store.put(B, b"b") and store.get(B) == b"b"


FULL = """
import logging, resource, sys
from benchmarks.storm_worker import key_of, load_store
logging.basicConfig(format="%(message)s", stream=sys.stdout)
store = load_store().Store.at(sys.argv[1])
small, large = key_of("small"), key_of("large")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
print([store.put(small, bytes(5_000)), store.put(large, bytes(20_000)), store.put(large, bytes(10**7))])
print(store.get(small) == bytes(5_000), store.get(large), sorted(path.name for path in store.folder.iterdir()))
"""


def test_a_file_that_the_system_cuts_off_is_not_kept(tmp_path):
    small, large = key_of("small"), key_of("large")
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert answer.stdout == (
        f"cache entry {tmp_path / large}.entry cannot be written: File too large.\n{UNWRITTEN}\n"
        f"[True, False, False]\nTrue None {sorted([f'{small}.entry', 'key', 'lock'])}\n"
    )
    assert not answer.stderr


def test_a_lock_that_is_never_given_back_stops_nobody_for_long(store, monkeypatch, caplog):
    assert store.put(A, b"a")
    monkeypatch.setattr(sharing, "_PATIENCE_S", 0.01)
    path_of(store, B).write_bytes(b"bad")
    with sharing.locked(store.folder):
        assert not store.put(C, b"c") and store.get(A) == b"a" and store.get(B) is None
        assert Store.at(store.folder).get(A) == b"a"
        with pytest.raises(CacheError) as caught:
            store.clear()
    why = "Another process holds the lock and does not go on"
    assert str(caught.value) == f"cache folder {store.folder} cannot be cleared: {why}.\nRemove the folder yourself."
    assert told(caplog) == [
        f"cache entry {path_of(store, C)} cannot be written: {why}.\n{UNWRITTEN}",
        f"cache entry {path_of(store, B)} is cut off after 3 bytes.\n{REMOVED}",
    ]
    assert names(store) == {"key", "lock", f"{A}.entry", f"{B}.entry"}
    assert store.get(B) is None and not path_of(store, B).exists()


# ------------------------------------------------------------------------------------------------------ a crowd


def test_a_draft_is_swept_when_its_writer_is_dead_and_never_before(store):
    with sharing.draft(store.folder) as (_, live):
        dead = store.folder / "writing-0123.tmp"
        dead.write_bytes(b"half an en")
        stranger = store.folder / "writing-notes.txt"
        stranger.touch()
        Store.at(store.folder)
        assert live.exists() and not dead.exists() and stranger.exists()
        dead.touch()
        assert store.clear() == 0
        assert live.exists() and not dead.exists() and stranger.exists()
    assert names(store) == {"key", "lock", stranger.name}


def test_of_two_that_make_the_key_at_once_one_makes_it_for_both(tmp_path, monkeypatch):
    others: list[Store] = []
    exists = Path.exists

    def answer_late(path: Path, **how) -> bool:
        is_asked = path.name == "key" and path.parent == tmp_path
        if not is_asked or others or exists(path):
            return exists(path, **how)
        monkeypatch.undo()
        others.append(Store.at(tmp_path))
        return False

    monkeypatch.setattr(Path, "exists", answer_late)
    store = Store.at(tmp_path)
    assert store.put(A, b"a") and others[0].get(A) == b"a" and names(store) == {"key", "lock", f"{A}.entry"}


def test_writers_that_are_killed_at_any_moment_lose_nothing_that_was_reported(tmp_path):
    tally = storm(tmp_path, ROUNDS)
    assert not tally.faults
    assert tally.counts["killed"] == ROUNDS * PROCESSES
    assert tally.counts["keys reported"] > 0 and tally.counts["hits"] > 0 and tally.counts["killed in a put"] > 0
