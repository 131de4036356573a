"""The order of use after a recovery: what was unknown before what was written later, all else as it was."""

from __future__ import annotations

import os

import pytest

from blendrag.store import maintenance

_SECOND = 10**9


@pytest.fixture
def dated(lab, make_store):
    """``dated({1: 10, 2: 20}, used=[2, 1])``: written at these seconds, then used in this order."""

    def make(written, used):
        store = make_store()
        for number, written_s in written.items():
            lab.put(store, number)
            date(lab, store, number, written_s)
        for number in used:
            lab.open(store, number).close()
        store.flush_recency()
        return store

    return make


def date(lab, store, number, written_s):
    os.utime(lab.file(store, number), ns=(written_s * _SECOND,) * 2)


def forget(lab, store, *numbers):
    """Files without a row, as a crash leaves them; or a power cut, of what had been evicted."""
    store._index.drop(store.find(lab.namespace, lab.key(number)) for number in numbers)


def order(lab, store, numbers):
    """Of use, as the index has it."""
    known = {lab.key(number): number for number in numbers}
    return [known[row.name.key] for row in store._index.oldest()]


def test_uses_of_known_chunks_are_kept_in_order_around_one_that_is_back(lab, dated):
    store = dated({1: 10, 2: 20, 3: 30, 4: 40, 9: 25}, used=[1, 3, 4, 2])
    forget(lab, store, 9)
    store.recover()
    assert order(lab, store, (1, 2, 3, 4, 9)) == [1, 9, 3, 4, 2]


def test_what_a_crash_left_just_now_moves_nothing_else(lab, dated):
    store = dated({1: 10, 2: 20, 3: 30, 8: 50, 9: 40}, used=[3, 1, 2])
    forget(lab, store, 8, 9)
    store.recover()
    assert order(lab, store, (1, 2, 3, 8, 9)) == [3, 1, 2, 9, 8]


def test_of_two_written_in_one_tick_the_known_one_stays_longer(lab, dated):
    store = dated({1: 10, 2: 20, 9: 20}, used=[1, 2])
    forget(lab, store, 9)
    store.recover()
    assert order(lab, store, (1, 2, 9)) == [1, 9, 2]


def test_several_that_are_back_go_each_before_what_was_written_later(lab, dated):
    store = dated({1: 10, 2: 30, 3: 50, 7: 5, 8: 20, 9: 60}, used=[1, 2, 3])
    forget(lab, store, 9, 8, 7)
    store.recover()
    assert order(lab, store, (1, 2, 3, 7, 8, 9)) == [7, 1, 8, 2, 3, 9]


def test_more_rows_than_are_read_at_once_keep_their_order_behind_one_that_is_back(lab, dated):
    numbers = list(range(1, 251))
    store = dated({**{n: 100 + n for n in numbers}, 999: 0}, used=[])
    forget(lab, store, 999)
    store.recover()
    assert order(lab, store, [*numbers, 999]) == [999, *numbers]
    assert store.stats().entries == 251


@pytest.mark.parametrize("written_s", [-(10**11), 10**11])
def test_a_file_dated_beyond_all_numbers_of_the_index_is_recovered(lab, dated, root, written_s):
    """More nanoseconds than SQLite can count; anybody may touch a file."""
    store = dated({1: 10, 2: 20}, used=[])
    date(lab, store, 2, written_s)
    forget(lab, store, 2)
    store.recover()
    assert order(lab, store, (1, 2)) == ([1, 2] if written_s > 0 else [2, 1])
    assert maintenance.check(root).is_good
