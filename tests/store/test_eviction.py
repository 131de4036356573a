import time

import pytest

from blendrag.errors import InvalidInputError, StoreFullError, StoreUnavailableError


def stored(lab, store, numbers):
    return [number for number in numbers if lab.has(store, number)]


def test_the_least_recently_put_goes_first(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(5):
        lab.put(store, number)
    assert stored(lab, store, range(5)) == [2, 3, 4]
    assert store.stats().evictions == 2


def test_an_entry_that_was_read_stays(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    assert lab.is_right(store, 0)
    lab.put(store, 3)
    assert stored(lab, store, range(4)) == [0, 2, 3]


def test_uses_outlive_the_process_that_made_them(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    lab.open(store, 0).close()
    store.close()
    again = make_store(limit_bytes=3 * lab.entry_bytes)
    lab.put(again, 3)
    assert stored(lab, again, range(4)) == [0, 2, 3]


@pytest.mark.parametrize("shift_s", [-86400.0, 86400.0])
def test_a_clock_set_by_a_day_has_no_effect(lab, make_store, monkeypatch, shift_s):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    for number in range(3, 5):
        lab.put(store, number)
    assert stored(lab, store, range(5)) == [2, 3, 4]
    assert all(lab.is_right(store, number) for number in (2, 3, 4))


def test_the_limit_holds_at_every_moment(lab, make_store, root):
    store = make_store(limit_bytes=int(3.5 * lab.entry_bytes))
    for number in range(12):
        lab.put(store, number)
        on_disk = sum(path.stat().st_size for path in lab.payloads(root))
        assert on_disk == store.stats().size_bytes <= store.limit_bytes


def test_what_was_put_within_a_scope_is_not_evicted_for_what_follows(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    lab.put(store, 0)
    with store.pin_scope():
        for number in (1, 2, 3):
            lab.put(store, number)
        assert stored(lab, store, range(4)) == [1, 2, 3]
        with pytest.raises(StoreFullError, match="--disk-bytes") as caught:
            lab.put(store, 4)
        assert caught.value.needed_bytes == lab.entry_bytes
        assert all(lab.is_right(store, number) for number in (1, 2, 3))
    lab.put(store, 4)
    assert stored(lab, store, range(5)) == [2, 3, 4]


def test_a_scope_protects_what_was_there_already(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    with store.pin_scope() as scope:
        scope.protect(lab.namespace, lab.key(0))
        lab.put(store, 1)  # there already: pinned all the same
        lab.put(store, 3)
        assert stored(lab, store, range(4)) == [0, 1, 3]


def test_scopes_nest_and_end_apart(lab, make_store):
    store = make_store(limit_bytes=2 * lab.entry_bytes)
    with store.pin_scope():
        lab.put(store, 0)
        with store.pin_scope():
            lab.put(store, 1)
            with pytest.raises(StoreFullError):
                lab.put(store, 2)
        with pytest.raises(StoreFullError):
            lab.put(store, 2)
    lab.put(store, 2)
    assert stored(lab, store, range(3)) == [1, 2]


def test_a_smaller_limit_is_reached_by_recover(lab, make_store, root):
    store = make_store()
    for number in range(5):
        lab.put(store, number)
    store.close()
    smaller = make_store(limit_bytes=2 * lab.entry_bytes)
    smaller.recover()
    assert stored(lab, smaller, range(5)) == [3, 4]
    assert len(lab.payloads(root)) == 2


@pytest.mark.parametrize("before_put", [False, True])
def test_a_pinned_entry_is_never_evicted_by_any_store_at_any_time(lab, make_store, before_put):
    store, other = (make_store(limit_bytes=3 * lab.entry_bytes) for _ in range(2))
    if before_put:
        store.pin(lab.namespace, lab.key(0))
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    for number in range(1, 5):
        lab.put(other, number)
    assert stored(lab, store, range(5)) == [0, 3, 4]
    store.close()
    other.close()
    again = make_store(limit_bytes=2 * lab.entry_bytes)
    again.recover()
    lab.put(again, 5)
    assert stored(lab, again, range(6)) == [0, 5]
    assert lab.is_right(again, 0)


def test_a_pinned_entry_that_was_deleted_is_like_any_other(lab, make_store, root):
    store = make_store(limit_bytes=2 * lab.entry_bytes)
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    assert store.delete(lab.namespace, lab.key(0))
    assert list((root / "pinned").iterdir()) == []
    for number in range(3):
        lab.put(store, number)
    assert stored(lab, store, range(3)) == [1, 2]


def test_a_pinned_entry_that_was_quarantined_is_pinned_when_it_is_put_again(lab, make_store):
    store = make_store(limit_bytes=2 * lab.entry_bytes)
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    lab.file(store, 0).write_bytes(b"no payload")
    assert lab.open(store, 0) is None
    for number in range(3):
        lab.put(store, number)
    assert stored(lab, store, range(3)) == [0, 2]


def test_when_only_pinned_entries_are_left_the_store_is_full(lab, make_store):
    store = make_store(limit_bytes=lab.entry_bytes)
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    with pytest.raises(StoreFullError, match="--disk-bytes"):
        lab.put(store, 1)
    assert lab.is_right(store, 0)


def test_only_a_key_of_a_store_that_can_be_written_is_pinned(lab, make_store, root):
    with pytest.raises(InvalidInputError, match="no key"):
        make_store().pin(lab.namespace, "../../format")
    with pytest.raises(StoreUnavailableError, match="read-only"):
        make_store(read_only=True).pin(lab.namespace, lab.key(1))
    assert list((root / "pinned").iterdir()) == []
