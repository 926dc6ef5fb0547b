"""A table makes each thing once, whichever thread asks, and keeps no more than it may."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jointcut.wrappers.table import Table


def test_what_two_threads_ask_for_at_once_is_made_once():
    table, made = Table(), []

    def make():
        time.sleep(0.02)
        made.append(object())
        return made[-1]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: table.of("key", make), range(8)))
    assert len(made) == 1 and set(map(id, found)) == {id(made[0])}


def test_threads_that_want_other_things_do_not_wait():
    table, started, go_on = Table(), threading.Event(), threading.Event()

    def slowly():
        started.set()
        assert go_on.wait(10)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(table.of, "a", slowly)
        assert started.wait(10)
        assert table.of("b", lambda: "fast") == "fast"
        go_on.set()
        assert slow.result() == "slow"


def test_no_more_are_kept_than_may_be_while_threads_fill_it():
    table = Table(most=3)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: table.of(i % 50, lambda: i % 50), range(4000))) == [i % 50 for i in range(4000)]
    assert len(table) == 3 == len(list(table))


def test_what_fails_is_made_again_and_what_is_not_to_be_kept_is_not():
    table, tries = Table(), []

    def fails_first():
        tries.append(1)
        if len(tries) == 1:
            raise KeyError("once")
        return len(tries)

    with pytest.raises(KeyError):
        table.of("key", fails_first)
    assert table.of("key", fails_first, keeps=lambda made: made > 2) == 2
    assert len(table) == 0
    assert table.of("key", fails_first) == 3 == table.of("key", fails_first)


def test_what_asks_for_itself_while_it_is_made_does_not_wait_for_itself():
    table = Table()
    assert table.of("key", lambda: table.of("key", lambda: 1) + 1) == 2


def test_a_copy_begins_with_nothing():
    table = Table(most=7)
    table.of("key", object)
    for again in (copy.copy(table), copy.deepcopy(table)):
        assert (len(again), len(table)) == (0, 1)
