"""A published corpus is followed by other machines, and never names KV that is not there."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blendrag.corpus.corpus import Corpus, check_corpus
from blendrag.corpus.documents import LEARNED, Entry, NewEntry
from blendrag.corpus.shared import collection, sharing, snapshots
from blendrag.corpus.shared.collection import clear_remote, collect_remote
from blendrag.corpus.shared.sharing import Keys, Published, follow, may_follow, publish
from blendrag.corpus.shared.snapshots import MANIFESTS, PARTS, POINTER
from blendrag.errors import BlendragError, CorpusError, InvalidInputError, StoreUnavailableError
from blendrag.store.remote import claims
from blendrag.store.remote.claims import CLAIMS, MARK
from blendrag.store.remote.objects import Listed
from blendrag.store.remote.root import RemoteRoot
from corpus.small_corpus import MANIFEST, chunk_of, put, text_of, vector_of
from lab.soak import interleavings
from store.s3 import Server, environment

pytest.importorskip("obstore")

SECRET = "a secret of all machines"
NAMESPACE = "0" * 64


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def remote(bucket: Path) -> Iterator[RemoteRoot]:
    with RemoteRoot(f"file://{bucket}", SECRET, 5.0) as opened:
        yield opened


def key_of(text: str) -> str:
    return chunk_of(text).chunk_id


def write_kv(bucket: Path, key: str, data: bytes = b"KV") -> Path:
    path = bucket / "kv" / NAMESPACE / key[:2] / f"{key}.kv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fill(root: Path, numbers: object = range(5)) -> None:
    with Corpus.open(root, create=True) as corpus:
        corpus.begin(MANIFEST)
        for i in numbers:  # type: ignore[attr-defined]
            put(corpus, i)


def put_entry(corpus: Corpus, entry_id: str, text: str, parent: str = "p") -> None:
    entry = Entry(entry_id, f" {text} ", {"n": 1}, parent, "Title")
    vector = np.zeros(0) if parent == LEARNED else vector_of(text)
    corpus.entries.put([NewEntry(entry, chunk_of(text), f"digest {text}", vector)])


def share(root: Path, remote: RemoteRoot, bucket: Path) -> Published:
    """Publish with the KV of all chunks."""

    def durable(keys: Keys) -> frozenset[str]:
        for key in keys.keys:
            write_kv(bucket, key)
        return keys.keys

    return publish(root, remote, all_keys, durable)


def all_keys(manifest: object, texts: object) -> Keys:
    return Keys(NAMESPACE, frozenset(key_of(text) for text in texts))  # type: ignore[attr-defined]


def content(root: Path) -> object:
    """Everything of a corpus that answers depend on."""
    with Corpus.open(root) as corpus:
        columns = "SELECT title, digest, metadata FROM document WHERE source = ?"
        documents = [
            (s, corpus.chunks_of(s), corpus.file.rows(columns, s)) for s in corpus.sources()
        ]
        found = [
            [(c.text, c.source, d) for c, d in corpus.nearest(vector_of(text_of(i, 1)), 4)]
            for i in range(5)
        ]
        entries = sorted(corpus.entries.all(), key=lambda entry: entry.id)
        return documents, found, entries, corpus.manifest


# -- publish and follow ------------------------------------------------------------------------------


def test_a_follower_has_the_corpus_that_was_published(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one)
    with Corpus.open(one) as corpus:
        put_entry(corpus, "id 1", "an entry with a text of its own that is long enough to be found")
    done = share(one, remote, bucket)
    assert (done.serial, done.documents, done.named, done.missing) == (1, 6, 16, 0)
    followed = follow(two, remote)
    assert followed is not None
    assert (followed.serial, followed.added, followed.chunks) == (1, 6, 16)
    assert content(two) == content(one)
    assert check_corpus(two).is_good


def test_only_what_has_changed_is_written_and_read(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PART_BYTES", 500)
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, range(20))
    first = share(one, remote, bucket)
    whole = follow(two, remote)
    assert not share(one, remote, bucket).changed
    with Corpus.open(one) as corpus:
        put(corpus, 33)
        corpus.remove_source("doc3.md")
    second = share(one, remote, bucket)
    assert second.changed
    assert second.uploaded_bytes < 0.7 * first.uploaded_bytes
    followed = follow(two, remote)
    assert whole is not None
    assert followed is not None
    assert (followed.added, followed.removed) == (1, 1)
    assert followed.read_bytes < 0.5 * whole.read_bytes
    assert content(two) == content(one)
    again = follow(two, remote)
    assert again is not None
    assert not again.changed


def test_random_changes_are_followed(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a corpus that follows from nothing; indexes that are open are kept up to date."""
    chance = random.Random(5)
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, [])
    with Corpus.open(two, create=True) as reader:
        for step in range(8):
            monkeypatch.setattr(sharing, "PART_BYTES", chance.choice([300, 1000, 1 << 20]))
            with Corpus.open(one) as corpus:
                for _ in range(4):
                    number = chance.randrange(12)
                    if chance.random() < 0.4:
                        corpus.remove_source(f"doc{number}.md")
                    else:
                        put(corpus, number)
                put_entry(corpus, f"id {step % 3}", f"{text_of(step, 9)}")
            share(one, remote, bucket)
            follow(two, remote)
            follow(tmp_path / str(step), remote)
            assert content(two) == content(tmp_path / str(step)) == content(one)
            texts = {
                chunk.text for source in reader.sources() for chunk in reader.chunks_of(source)
            }
            assert set(reader.chunk_index.ids()) == {key_of(text) for text in texts}
            nearest = reader.nearest(vector_of(text_of(1, 1)), 50)
            assert {c.text for c, _ in nearest} == texts
    assert check_corpus(two).is_good


def test_what_was_learned_is_neither_published_nor_replaced(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, [1])
    fill(two, [])
    for root, text in ((one, "private to one " * 9), (two, "private to two " * 9)):
        with Corpus.open(root) as corpus:
            put_entry(corpus, "learned:scope:id", text, LEARNED)
    assert share(one, remote, bucket).named == 3
    follow(two, remote)
    with Corpus.open(two) as corpus:
        assert corpus.sources() == ["doc1.md"]
        assert [entry.text.split()[2] for entry in corpus.entries.all(LEARNED)] == ["two"]
    assert not any(b"private" in path.read_bytes() for path in bucket.rglob("*") if path.is_file())


def test_a_snapshot_names_only_kv_that_is_durable(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    done = publish(tmp_path, remote, all_keys, lambda keys: frozenset(sorted(keys.keys)[:2]))
    assert (done.named, done.missing) == (2, 1)
    found = snapshots.current(remote)
    assert found is not None
    assert len(snapshots.read_keys(remote, found[1])) == 2


def test_new_settings_replace_every_document(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one)
    share(one, remote, bucket)
    follow(two, remote)
    with Corpus.open(one) as corpus:
        corpus.file.rows("SELECT 1")
        for source in corpus.sources():
            corpus.remove_source(source)
        corpus.begin(replace(MANIFEST, encoding="int8"))
        for i in range(5):
            put(corpus, i)
    share(one, remote, bucket)
    with pytest.raises(InvalidInputError, match="start the server again"):
        follow(two, remote, keep_settings=True)
    followed = follow(two, remote)
    assert followed is not None
    assert (followed.added, followed.removed) == (5, 0)
    assert content(two) == content(one)


# -- faults ------------------------------------------------------------------------------------------


def test_a_publisher_that_dies_at_any_moment_changes_nothing_or_all(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one"
    fill(one, [1])
    share(one, remote, bucket)
    with Corpus.open(one) as corpus:
        put(corpus, 2)
    real_put, real_replace, step = remote.objects.put, remote.objects.replace, 0

    class Killed(Exception):
        pass

    def dying(real):  # type: ignore[no-untyped-def]
        def call(*args, **more):  # type: ignore[no-untyped-def]
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            done = real(*args, **more)
            if left == 1 and real is real_replace:
                raise Killed  # after the pointer, before it is noted here
            return done

        return call

    monkeypatch.setattr(remote.objects, "put", dying(real_put))
    monkeypatch.setattr(remote.objects, "replace", dying(real_replace))
    for step in range(1, 30):
        left = step
        with contextlib.suppress(Killed):
            share(one, remote, bucket)
        followed = follow(tmp_path / f"two{step}", remote)
        assert followed is not None
        if followed.serial == 2:
            break
    left = 1000
    share(one, remote, bucket)
    follow(tmp_path / "three", remote)
    assert content(tmp_path / "three") == content(one)


def test_damage_of_any_object_is_refused_and_changes_nothing(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, [1])
    share(one, remote, bucket)
    follow(two, remote)
    before = content(two)
    with Corpus.open(one) as corpus:
        put(corpus, 2)
    share(one, remote, bucket)
    found = snapshots.current(remote)
    assert found is not None
    pointer, snapshot = found
    names = (POINTER, MANIFESTS + pointer.snapshot, *(PARTS + part.name for part in snapshot.parts))
    for name in names:
        path = bucket / name
        good = path.read_bytes()
        for bad in (b"", good[:-3], good[:40] + bytes([good[40] ^ 1]) + good[41:]):
            path.write_bytes(bad)
            with pytest.raises(BlendragError):
                follow(two, remote)
            assert content(two) == before
        path.write_bytes(good)
    follow(two, remote)
    assert content(two) == content(one)


def test_a_corpus_of_somebody_without_the_key_is_not_used(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    """Everything is right but the seal, which only the key gives."""
    fill(tmp_path / "one", [1])
    share(tmp_path / "one", remote, bucket)
    (tmp_path / "evil").mkdir()
    with RemoteRoot(f"file://{tmp_path / 'evil'}", "a key that was guessed", 5.0) as forger:
        fill(tmp_path / "forger", [6])
        share(tmp_path / "forger", forger, tmp_path / "evil")
    for path in (tmp_path / "evil" / "corpus").rglob("*"):
        if path.is_file():
            (bucket / path.relative_to(tmp_path / "evil")).write_bytes(path.read_bytes())
    with pytest.raises(InvalidInputError, match="BLENDRAG_REMOTE_KEY"):
        follow(tmp_path / "two", remote)
    fields = json.loads((bucket / POINTER).read_bytes())
    (bucket / POINTER).write_text(json.dumps(fields | {"seal": ""}))
    with pytest.raises(InvalidInputError, match="BLENDRAG_REMOTE_KEY"):
        follow(tmp_path / "two", remote)


def test_an_old_pointer_is_not_followed(tmp_path: Path, remote: RemoteRoot, bucket: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, [1])
    share(one, remote, bucket)
    old = (bucket / POINTER).read_bytes()
    with Corpus.open(one) as corpus:
        put(corpus, 2)
    share(one, remote, bucket)
    follow(two, remote)
    (bucket / POINTER).write_bytes(old)
    with pytest.raises(InvalidInputError, match="older than the 2"):
        follow(two, remote)


def test_of_machines_that_publish_at_once_one_wins(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    roots = [tmp_path / str(i) for i in range(4)]
    for i, root in enumerate(roots):
        fill(root, [i])
    results: list[object] = []

    def run(root: Path) -> None:
        try:
            results.append(share(root, remote, bucket).serial)
        except InvalidInputError as exc:
            results.append(str(exc))

    threads = [threading.Thread(target=run, args=(root,)) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(1) == 1
    follow(tmp_path / "two", remote)
    assert content(tmp_path / "two") in [content(root) for root in roots]


# -- refusals ----------------------------------------------------------------------------------------


def test_two_corpora_on_one_prefix_are_refused(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path / "one", [1])
    fill(tmp_path / "other", [2])
    share(tmp_path / "one", remote, bucket)
    with pytest.raises(InvalidInputError, match="corpus of another store"):
        share(tmp_path / "other", remote, bucket)
    with pytest.raises(InvalidInputError, match="not of the corpus that remote"):
        follow(tmp_path / "other", remote)
    assert not may_follow(tmp_path / "other")


def test_publishing_goes_on_from_a_store_that_has_followed(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fill(one, [1])
    share(one, remote, bucket)
    follow(two, remote)
    with Corpus.open(two) as corpus:
        put(corpus, 2)
    assert share(two, remote, bucket).serial == 2
    with Corpus.open(one) as corpus:
        put(corpus, 4)
    with pytest.raises(InvalidInputError, match="another machine has published since"):
        share(one, remote, bucket)
    with pytest.raises(InvalidInputError, match="changes that were not published"):
        follow(one, remote)


def test_nothing_published_is_nothing_to_follow(tmp_path: Path, remote: RemoteRoot) -> None:
    assert follow(tmp_path / "two", remote) is None
    assert not (tmp_path / "two").exists()
    assert may_follow(tmp_path / "two")


def test_a_damaged_corpus_is_not_published(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    with Corpus.open(tmp_path) as corpus, corpus.file.writing() as connection:
        connection.execute("UPDATE chunk SET text = 'forged' WHERE id = 1")
    with pytest.raises(CorpusError, match="is damaged"):
        share(tmp_path, remote, bucket)


# -- garbage -----------------------------------------------------------------------------------------


def age(bucket: Path, seconds: float) -> None:
    for path in bucket.rglob("*") if bucket.is_dir() else (bucket,):
        with contextlib.suppress(FileNotFoundError):  # a collection may run
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


class Directory:
    """A remote whose objects a test writes, makes older and lists."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}"

    def write(self, name: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(b"KV")

    def age(self, prefix: str, seconds: float) -> None:
        for name in self.names(prefix):
            then = (self.root / name).stat().st_mtime - seconds
            os.utime(self.root / name, (then, then))

    def names(self, prefix: str) -> set[str]:
        files = (path for path in self.root.rglob("*") if path.is_file())
        names = {str(path.relative_to(self.root)) for path in files}
        return {name for name in names if name.startswith(prefix)}


class Bucket:
    """The same in a local S3 server."""

    url, _prefix = "s3://bucket/prefix", "/bucket/prefix/"

    def __init__(self, server: Server) -> None:
        self._server = server

    def write(self, name: str) -> None:
        self._server.objects[self._prefix + name] = b"KV"
        self._server.written[self._prefix + name] = time.time()

    def age(self, prefix: str, seconds: float) -> None:
        for name in self._server.written:
            if name.startswith(self._prefix + prefix):
                self._server.written[name] -= seconds

    def names(self, prefix: str) -> set[str]:
        names = (name.removeprefix(self._prefix) for name in self._server.objects)
        return {name for name in names if name.startswith(prefix)}


@pytest.fixture(params=["directory", "s3"])
def place(
    request: pytest.FixtureRequest, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Directory | Bucket]:
    if request.param == "directory":
        yield Directory(bucket)
        return
    with Server().running() as server:
        for name, value in environment(server.server_port).items():
            monkeypatch.setenv(name, value)
        yield Bucket(server)


def kv_name(key: str, namespace: str = NAMESPACE) -> str:
    return f"kv/{namespace}/{key[:2]}/{key}.kv"


def test_kv_of_removed_documents_is_collected_after_the_next_publish(
    tmp_path: Path, place: Directory | Bucket
) -> None:
    def durable(keys: Keys) -> frozenset[str]:
        for key in keys.keys:
            place.write(kv_name(key))
        return keys.keys

    with RemoteRoot(place.url, SECRET, 5.0) as remote:
        fill(tmp_path / "one", [1, 2])
        publish(tmp_path / "one", remote, all_keys, durable)
        first, _ = snapshots.current(remote) or pytest.fail("nothing was published")
        with Corpus.open(tmp_path / "one") as corpus:
            corpus.remove_source("doc1.md")
        unpublished, young, elsewhere = (
            kv_name(key_of("of an ingest that runs")),
            kv_name(key_of("of an ingest that has just begun")),
            kv_name(key_of("of another model"), "1" * 64),
        )
        place.write(unpublished)
        place.age("", 1000)
        place.write(young)
        place.write(elsewhere)
        assert collect_remote(remote, 2000).removed == 0
        done = collect_remote(remote, 500)  # still published: only what no snapshot names
        assert (done.removed, done.left, done.young) == (1, 7, 1)
        assert done.other_namespaces == ("1" * 64,)
        assert unpublished not in place.names("kv/")
        publish(tmp_path / "one", remote, all_keys, durable)
        place.age("kv/", 1000)
        place.age(MANIFESTS + first.snapshot, -2000)  # may be of somebody who publishes now
        assert collect_remote(remote, 500).removed == 1
        assert young not in place.names("kv/")
        place.age(MANIFESTS, 4000)
        assert collect_remote(remote, 500).removed == 3
        assert len(place.names(MANIFESTS)) == 1
        follow(tmp_path / "two", remote)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    named = {kv_name(key_of(text_of(2, j))) for j in range(3)}
    assert place.names("kv/") == {*named, elsewhere}


def test_claimed_kv_is_not_collected_within_the_grace_period(
    tmp_path: Path, place: Directory | Bucket
) -> None:
    with RemoteRoot(place.url, SECRET, 5.0) as remote:
        fill(tmp_path / "one", [1])
        publish(tmp_path / "one", remote, all_keys, lambda keys: keys.keys)
        keys = [key_of("found by an ingest"), key_of("found, too"), key_of("not found")]
        for key in keys:
            place.write(kv_name(key))
        place.age("kv/", 1000)
        claims.claim(remote, NAMESPACE, keys[:2])
        done = collect_remote(remote, 500)
        assert (done.removed, done.left, done.young) == (1, 2, 2)
        place.age(CLAIMS, 1000)
        assert collect_remote(remote, 500).removed == 2
        assert not place.names("claims") | place.names("kv/")


def test_nothing_is_collected_beside_a_claim_that_is_not_what_was_written(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    claims.claim(remote, NAMESPACE, [key_of("found by an ingest")])
    next((bucket / "claims").iterdir()).write_bytes(b"")
    age(bucket / "kv", 1000)
    with pytest.raises(StoreUnavailableError, match="is not what an ingest wrote"):
        collect_remote(remote, 500)


def test_kv_of_another_model_is_cleared_by_its_namespace(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    other = bucket / "kv" / ("1" * 64) / "ab" / "some.kv"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"KV")
    assert clear_remote(remote, "11", lambda *found: False) is None
    assert other.exists()
    for wrong, why in (("0", "the published corpus"), ("", "2 namespaces"), ("2", "0 namespaces")):
        with pytest.raises(InvalidInputError, match=why):
            clear_remote(remote, wrong, lambda *found: True)
    assert clear_remote(remote, "11", lambda *found: found == ("1" * 64, 1, 2)) == (1, 2)
    assert len(list(bucket.rglob("*.kv"))) == 3


def test_nothing_is_collected_while_another_collection_runs(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    with pytest.raises(InvalidInputError, match="has no published corpus"):
        collect_remote(remote, 0)
    share(tmp_path, remote, bucket)
    (bucket / MARK).write_bytes(b"another")
    with pytest.raises(StoreUnavailableError, match="is being collected"):
        collect_remote(remote, 0)
    with pytest.raises(StoreUnavailableError, match="is being collected"):
        share(tmp_path, remote, bucket)
    age(bucket, claims.STALE_MARK_S + 1)  # it was killed
    share(tmp_path, remote, bucket)
    collect_remote(remote, 0)
    assert not (bucket / MARK).exists()


def test_a_collection_renews_its_mark_while_it_lists_and_stops_without_it(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    old = write_kv(bucket, key_of("old"))
    age(bucket, 1000)
    monkeypatch.setattr(collection, "RENEW_S", 0.0)
    real, renewed = remote.objects.listing, []

    def listing(prefix: str) -> Iterator[Listed]:
        if prefix == "kv/":
            age(bucket / MARK, 100)
            yield from real(prefix)
            renewed.append(time.time() - (bucket / MARK).stat().st_mtime < 50)
            (bucket / MARK).write_bytes(b"another")
        else:
            yield from real(prefix)

    monkeypatch.setattr(remote.objects, "listing", listing)
    with pytest.raises(StoreUnavailableError, match="collected by another machine too"):
        collect_remote(remote, 500)
    assert renewed == [True]
    assert old.exists()
    assert (bucket / MARK).read_bytes() == b"another"


def test_a_collection_that_was_stopped_for_too_long_removes_nothing(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    old = write_kv(bucket, key_of("old"))
    age(bucket, 1000)
    batches = collection._batches

    def stopped(gone: list[Listed]) -> Iterator[list[Listed]]:
        age(bucket / MARK, claims.STALE_MARK_S)
        yield from batches(gone)

    monkeypatch.setattr(collection, "_batches", stopped)
    with pytest.raises(StoreUnavailableError, match="was stopped for too long"):
        collect_remote(remote, 500)
    assert old.exists()


def test_a_manifest_that_a_collection_removes_is_not_pointed_to(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third snapshot equals the first, whose manifest is old."""
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    with Corpus.open(tmp_path) as corpus:
        put(corpus, 2)
        share(tmp_path, remote, bucket)
        corpus.remove_source("doc2.md")
    age(bucket, 1000)
    batches, failures = collection._batches, []

    def meanwhile(gone: list[Listed]) -> Iterator[list[Listed]]:
        def durable(keys: Keys) -> frozenset[str]:
            for batch in batches(gone):
                remote.objects.delete(*(each.name for each in batch))
            return keys.keys

        (bucket / MARK).rename(bucket / "hidden")  # the collection ends before the publisher looks
        try:
            publish(tmp_path, remote, all_keys, durable)
        except StoreUnavailableError as exc:
            failures.append(str(exc))
        (bucket / "hidden").rename(bucket / MARK)
        return iter(())

    with monkeypatch.context() as patched:
        patched.setattr(collection, "_batches", meanwhile)
        collect_remote(remote, 500)
    assert "was collected while this published" in failures[0]
    assert share(tmp_path, remote, bucket).serial == 3
    assert follow(tmp_path / "two", remote) is not None


# -- clocks, and machines that are stopped -----------------------------------------------------------


def test_a_mark_that_a_wrong_clock_dated_in_the_future_becomes_stale(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    (bucket / MARK).write_bytes(b"of a collection that was killed")
    age(bucket / MARK, -(10 * 365 * 86_400))  # the clock was ten years fast
    with pytest.raises(StoreUnavailableError, match="is being collected"):
        share(tmp_path, remote, bucket)
    age(bucket / MARK, claims.STALE_MARK_S + 1)
    share(tmp_path, remote, bucket)
    collect_remote(remote, 0)


def test_a_mark_of_a_running_collection_stays_its_own_when_it_is_dated_anew(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    old = write_kv(bucket, key_of("old"))
    age(bucket, 1000)
    batches = collection._batches

    def set_back(gone: list[Listed]) -> Iterator[list[Listed]]:
        age(bucket / MARK, -7200)
        with pytest.raises(StoreUnavailableError, match="is being collected"):
            share(tmp_path, remote, bucket)
        yield from batches(gone)

    monkeypatch.setattr(collection, "_batches", set_back)
    assert collect_remote(remote, 500).removed == 1
    assert not old.exists()


@pytest.mark.parametrize("hours", [-30_000, -2, 2, 30_000])
def test_nothing_is_collected_by_a_clock_that_cannot_be_right(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    young = write_kv(bucket, key_of("young"))
    there = collection.time_there
    monkeypatch.setattr(collection, "time_there", lambda remote: there(remote) + 3600 * hours)
    with pytest.raises(StoreUnavailableError, match="set the clocks"):
        collect_remote(remote, 3600)
    assert young.exists()
    monkeypatch.undo()
    assert collect_remote(remote, 3600).young == 1


def test_a_clock_that_is_set_back_during_a_collection_ends_it(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    kv = write_kv(bucket, key_of("written by the right clock"))
    real, ahead = collection.time_there, [1800.0, 0.0]
    clock = lambda remote: real(remote) + (ahead.pop(0) if ahead else 0.0)  # noqa: E731
    monkeypatch.setattr(collection, "time_there", clock)
    with pytest.raises(StoreUnavailableError, match="set the clocks"):
        collect_remote(remote, 600)
    assert kv.exists()


def test_what_a_wrong_clock_dated_in_the_future_is_collected_when_it_is_old(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path, [1])
    share(tmp_path, remote, bucket)
    old = write_kv(bucket, key_of("old"))
    age(old, -(10 * 365 * 86_400))
    assert collect_remote(remote, 500).removed == 0
    age(bucket, 1000)
    assert collect_remote(remote, 500).removed == 1
    assert not old.exists()


def test_a_publisher_that_was_stopped_during_a_collection_does_not_name_what_is_gone(
    tmp_path: Path, place: Directory | Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last look and the pointer, however long the grace period is."""
    with RemoteRoot(place.url, SECRET, 5.0) as remote, RemoteRoot(place.url, SECRET, 5.0) as other:
        fill(tmp_path, [1])
        publish(tmp_path, remote, all_keys, lambda keys: frozenset())
        with Corpus.open(tmp_path) as corpus:
            put(corpus, 2)
        real = remote.objects.replace

        def stopped(*args: object) -> bool:
            place.age("corpus/", 10_000)
            collect_remote(other, 500)
            return real(*args)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(remote.objects, "replace", stopped)
            with pytest.raises(StoreUnavailableError, match="was collected while this published"):
                publish(tmp_path, remote, all_keys, lambda keys: frozenset())
        assert follow(tmp_path / "two", remote) is not None
        assert publish(tmp_path, remote, all_keys, lambda keys: frozenset()).serial == 2
        assert follow(tmp_path / "two", remote) is not None
        assert content(tmp_path / "two") == content(tmp_path)


def test_a_snapshot_whose_parts_are_gone_is_not_published(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    """Parts that have not changed are not written again, so they are looked for."""
    fill(tmp_path, range(9))
    share(tmp_path, remote, bucket)
    with Corpus.open(tmp_path) as corpus, corpus.file.writing():
        settings = replace(corpus.manifest, model="another")
        corpus.file.set_meta("manifest", settings.to_json())
    (part,) = snapshots.current(remote)[1].parts  # type: ignore[index]
    (bucket / PARTS / part.name).unlink()
    with pytest.raises(StoreUnavailableError, match="store publish --again"):
        share(tmp_path, remote, bucket)
    publish(tmp_path, remote, all_keys, lambda keys: keys.keys, again=True)
    assert follow(tmp_path / "two", remote) is not None


def test_a_follower_whose_snapshot_is_replaced_and_collected_follows_the_next(
    tmp_path: Path, place: Directory | Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteRoot(place.url, SECRET, 5.0) as remote:
        one, two = tmp_path / "one", tmp_path / "two"
        fill(one, [1])
        publish(one, remote, all_keys, lambda keys: frozenset())
        real, left = sharing.read_manifest, [2, 3]

        def stopped(remote: RemoteRoot, name: str) -> object:
            if left and name == snapshots.current(remote)[0].snapshot:  # type: ignore[index]
                with monkeypatch.context() as patch, Corpus.open(one) as corpus:
                    patch.setattr(sharing, "read_manifest", real)
                    put(corpus, left.pop())
                    publish(one, remote, all_keys, lambda keys: frozenset())
                    place.age("corpus/", 10_000)
                    collect_remote(remote, 500)
            return real(remote, name)

        monkeypatch.setattr(sharing, "read_manifest", stopped)
        found = follow(two, remote)
        assert found is not None
        assert found.serial == 3
        assert content(two) == content(one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_machines_that_publish_collect_follow_and_ingest_in_any_order_never_see_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """``make soak-remote`` runs more rounds."""
    monkeypatch.setattr(sharing, "AT_A_TIME", 1)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with Server().running() as server:
        for name, value in environment(server.server_port).items():
            monkeypatch.setenv(name, value)
        place = interleavings.Folder(tmp_path / "bucket")
        if kind == "s3":
            place = interleavings.Bucket(server)
        ended = interleavings.attack(place, tmp_path, rounds=2, seed=1)
    assert min(ended[what] for what in ("published", "collected", "removed", "followed")) > 1


@pytest.mark.parametrize("what", ["parts", "manifests"])
def test_what_the_remote_has_damaged_is_published_again(
    tmp_path: Path, remote: RemoteRoot, bucket: Path, what: str
) -> None:
    fill(tmp_path / "one", [1])
    share(tmp_path / "one", remote, bucket)
    for path in (bucket / "corpus" / what).iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(StoreUnavailableError, match="store publish --again"):
        follow(tmp_path / "two", remote)
    publish(tmp_path / "one", remote, all_keys, lambda keys: keys.keys, again=True)
    follow(tmp_path / "two", remote)
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_a_large_object_in_place_of_the_pointer_is_not_read(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    fill(tmp_path / "one", [1])
    share(tmp_path / "one", remote, bucket)
    (bucket / POINTER).write_bytes(bytes(1 << 20))
    with pytest.raises(StoreUnavailableError, match="1,048,576 bytes, expected at most 65,536"):
        follow(tmp_path / "two", remote)


def test_a_snapshot_published_beside_collections_names_only_what_is_there(
    tmp_path: Path, remote: RemoteRoot, bucket: Path
) -> None:
    """Old KV that no snapshot names is published again while collections run."""
    fill(tmp_path / "one", [0])
    share(tmp_path / "one", remote, bucket)
    over, failures = threading.Event(), []

    def collect() -> None:
        while not over.is_set():
            try:
                collect_remote(remote, 500)
            except StoreUnavailableError:
                continue
            except Exception as exc:
                failures.append(exc)
                return

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for i in range(12):
            for j in range(3):
                write_kv(bucket, key_of(text_of(i, j)))
            age(bucket / "kv", 1000)
            with Corpus.open(tmp_path / "one") as corpus:
                for source in corpus.sources():
                    corpus.remove_source(source)
                put(corpus, i)

            def durable(keys: Keys) -> frozenset[str]:
                time.sleep(0.01)
                found = {path.stem for path in (bucket / "kv" / NAMESPACE).rglob("*.kv")}
                time.sleep(0.01)
                return keys.keys & found

            with contextlib.suppress(StoreUnavailableError):
                publish(tmp_path / "one", remote, all_keys, durable)
                found = snapshots.current(remote)
                assert found is not None
                named = snapshots.read_keys(remote, found[1])
                there = {path.stem for path in (bucket / "kv" / NAMESPACE).rglob("*.kv")}
                assert named <= there
    finally:
        over.set()
        thread.join()
    assert failures == []
