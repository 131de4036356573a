"""KV learned from prompts takes the place of no other KV, makes room for it, and is shared fairly."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from blendrag.errors import StoreFullError
from blendrag.store.disk_writer import RESERVE_BYTES
from blendrag.store.identity import is_learned, learned_namespace
from blendrag.store.maintenance import collect, export_archive


@pytest.fixture
def free(monkeypatch, root):
    """``free(n)``: the disk has so many bytes for this store from now on, less what its payloads take."""

    def allow(size_bytes):
        def statvfs(path):
            used = sum(file.stat().st_size for file in (root / "kv").rglob("*.kv"))
            fields = list(real(path))
            fields[1], fields[4] = 1, max(0, size_bytes - used)  # f_frsize, f_bavail
            return os.statvfs_result(fields)

        monkeypatch.setattr(os, "statvfs", statvfs)

    real = os.statvfs
    return allow


def learn(lab, store, number, scope="a"):
    namespace = learned_namespace(lab.namespace, scope)
    assert is_learned(namespace)
    store.put(namespace, lab.key(number), lab.kv(number))


def learned(lab, store, scope="a", numbers=range(40)):
    namespace = learned_namespace(lab.namespace, scope)
    return [n for n in numbers if store.contains(namespace, lab.key(n))]


def documents(lab, store):
    return [n for n in range(100, 120) if lab.has(store, n)]


def test_no_scope_finds_the_kv_of_another_or_of_a_document(lab, store):
    learn(lab, store, 2)
    assert learned(lab, store) == [2]
    assert learned(lab, store, "b") == []
    assert not lab.has(store, 2)
    names = {learned_namespace(lab.namespace, scope) for scope in "abc"}
    assert len(names) == 3
    assert not any(is_learned(lab.key(n)) for n in range(1000))


def test_learned_kv_takes_a_share_and_the_oldest_is_given_up(lab, make_store):
    store = make_store(12 * lab.entry_bytes)
    for number in range(5):
        learn(lab, store, number)
    assert learned(lab, store) == [2, 3, 4]  # a quarter of twelve


def test_a_scope_keeps_its_part_whatever_another_learns(lab, make_store):
    store = make_store(16 * lab.entry_bytes)  # four may be learned
    for number in (0, 1):
        learn(lab, store, number, "b")
    for number in range(30):
        learn(lab, store, number, "a")
    assert learned(lab, store, "a") == [28, 29]
    assert learned(lab, store, "b") == [0, 1]
    learn(lab, store, 5, "c")
    assert [len(learned(lab, store, scope)) for scope in "abc"] in ([1, 2, 1], [2, 1, 1])


def test_learned_kv_is_given_up_first_and_documents_never_for_it(lab, make_store):
    store = make_store(8 * lab.entry_bytes)
    with store.pin_scope():
        for number in (0, 1):
            learn(lab, store, number)
        for number in range(100, 108):  # an ingest that needs all of it
            lab.put(store, number)
        assert documents(lab, store) == list(range(100, 108))
        assert learned(lab, store) == []
        with pytest.raises(StoreFullError, match="learned from prompts"):
            learn(lab, store, 2)
    with pytest.raises(StoreFullError, match="learned from prompts"):
        learn(lab, store, 2)
    assert documents(lab, store) == list(range(100, 108))


def test_it_counts_against_what_the_disk_has_free(lab, make_store, free):
    store = make_store(1 << 40)
    free(RESERVE_BYTES + 12 * lab.entry_bytes)
    for number in range(6):
        learn(lab, store, number)
    assert learned(lab, store) == [3, 4, 5]
    for number in range(100, 110):
        lab.put(store, number)
    assert len(learned(lab, store)) == 2  # the disk has room for twelve
    free(RESERVE_BYTES + lab.entry_bytes // 2)
    with pytest.raises(StoreFullError):
        learn(lab, store, 7)


def test_a_full_disk_first_gives_up_what_was_learned(lab, make_store, free):
    store = make_store(1 << 40)
    free(1 << 30)
    for number in range(4):
        learn(lab, store, number)
    free(RESERVE_BYTES + 4 * lab.entry_bytes)  # other programs took the rest
    for number in range(100, 104):
        lab.put(store, number)
        assert len(learned(lab, store)) == 103 - number
    with pytest.raises(StoreFullError, match="free some space"):
        lab.put(store, 104)
    assert documents(lab, store) == [100, 101, 102, 103]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_fails_for_space_is_repeated_without_what_was_learned(
    lab, make_store, failing, code
):
    """Quotas are not in what the file system says is free."""
    store = make_store()
    for number in range(3):
        learn(lab, store, number)
    with failing("write", ".part", code, times=2):
        lab.put(store, 100)
    assert lab.is_right(store, 100)
    assert len(learned(lab, store)) == 1
    with failing("write", ".part", code), pytest.raises(StoreFullError):
        learn(lab, store, 5)
    assert len(learned(lab, store)) == 1


def test_what_requests_store_during_an_ingest_does_not_fill_the_store_for_it(lab, make_store):
    store = make_store(4 * lab.entry_bytes)
    with store.pin_scope():
        lab.put(store, 100)
        for number in range(110, 113):
            other = threading.Thread(target=lab.put, args=(store, number))
            other.start()
            other.join()
        for number in range(101, 104):
            lab.put(store, number)
        assert documents(lab, store) == [100, 101, 102, 103]


def test_collecting_a_store_removes_what_was_learned_first(lab, make_store, root):
    store = make_store(40 * lab.entry_bytes)
    for number in range(100, 104):
        lab.put(store, number)
    for number in range(4):
        learn(lab, store, number)
    store.close()
    assert collect(root, 5 * lab.entry_bytes).removed == 3
    store = make_store()
    assert documents(lab, store) == [100, 101, 102, 103]
    assert learned(lab, store) == [3]


def test_the_share_is_the_same_after_the_index_was_rebuilt(lab, make_store, root):
    store = make_store(16 * lab.entry_bytes)
    for number in range(3):
        learn(lab, store, number, "b" if number else "a")
    store.close()
    lab.drop_index(root)
    store = make_store(16 * lab.entry_bytes)
    for number in range(10, 14):
        learn(lab, store, number, "a")
    assert learned(lab, store, "b") == [1, 2]
    assert learned(lab, store, "a") == [12, 13]


def test_an_archive_has_nothing_of_it_unless_it_is_asked_for(lab, make_store, root, tmp_path):
    store = make_store()
    lab.put(store, 100)
    learn(lab, store, 0)
    store.close()
    assert export_archive(root, tmp_path / "a.tar").payloads == 1
    assert export_archive(root, tmp_path / "a.tar", lab.namespace).payloads == 1
    learned_here = learned_namespace(lab.namespace, "a")
    assert export_archive(root, tmp_path / "a.tar", learned_here).payloads == 1
