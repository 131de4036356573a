"""Engines that publish their corpus in a remote, and others that follow it."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

import tiny
import writers
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.shared import sharing, snapshots
from blendrag.corpus.shared.collection import collect_remote
from blendrag.engine import Filter, publishing
from blendrag.engine.publishing import Follower
from blendrag.errors import CorpusError, InvalidInputError, StoreUnavailableError
from blendrag.planning.controller import NOT_ALONE
from blendrag.store import writer_files
from blendrag.store.remote import claims
from store.s3 import Process, environment

pytest.importorskip("obstore")


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def machine(bucket, tmp_path):
    def make(name, **more):
        given = {"ram_bytes": 0, "remote": f"file://{bucket}"} | more
        return tiny.engine(tiny.shared_llama(), tmp_path / name, prefix_text=tiny.BOS, **given)

    return make


pytestmark = pytest.mark.usefixtures("slow_prefill")


def ask(engine, number):
    return engine.generate(tiny.prompt(engine, number))


def tiers(answer):
    return {chunk.tier for chunk in answer.metrics.chunks}


def test_a_machine_that_follows_gets_the_writer_and_encodes_with_it(machine, tmp_path):
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    with machine("one", writer=str(folder)) as one, machine("two") as two:
        one.ingest([tiny.document(0)])
        one.publish()
        two.follow()
        assert two.manifest.writer == one.manifest.writer
        assert tiers(ask(two, 0)) == {"remote"}
        assert writer_files.kept_in(two.root) == writer_files.kept_in(one.root)
        assert not two.kv_namespace.validity.trouble
        (kept,) = (two.root / writer_files.DIRECTORY).iterdir()
        whole = kept.read_bytes()
        for damage in (kept.unlink, lambda: kept.write_bytes(whole[:-3] + b"xyz")):
            damage()
            two.follow()  # the snapshot is the same
            assert kept.read_bytes() == whole


def test_following_reads_a_whole_writer_once(machine, tmp_path, monkeypatch):
    folder, reads, read = writers.writer(tiny.llama(), tmp_path / "writer"), [], writer_files.read
    with machine("one", writer=str(folder)) as one, machine("two") as two:
        one.ingest([tiny.document(0)])
        one.publish()
        monkeypatch.setattr(
            writer_files, "read", lambda *given: reads.append(given) or read(*given)
        )
        for _ in range(3):
            two.follow()
    assert [root for root, _ in reads] == [two.root]


def test_a_machine_that_follows_encodes_after_as_many_chunks(machine):
    with machine("one", encode_after=2) as one, machine("two") as two:
        one.ingest([tiny.document(i) for i in range(2)]).whole()
        one.publish()
        two.follow()
        assert two.manifest.encode_after == 2
        answer = two.generate(tiny.prompt(two, 0, 1))
        assert answer.metrics.reused_tokens > 0


def test_a_collection_keeps_the_writer_of_the_published_corpus(machine, bucket, tmp_path):
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    with machine("one", writer=str(folder)) as one:
        one.ingest([tiny.document(0)])
        one.publish()
    with snapshots.remote_root(one.settings) as remote:
        collect_remote(remote, -3600.0)
    with machine("two") as two:
        two.follow()
        assert writer_files.kept_in(two.root) == writer_files.kept_in(one.root)


def test_a_writer_that_is_lost_or_damaged_is_not_published(machine, tmp_path):
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    with machine("one", writer=str(folder)) as one:
        one.ingest([tiny.document(0)])
        (kept,) = (one.root / writer_files.DIRECTORY).iterdir()
        whole = kept.read_bytes()
        for damaged in (b"", whole[:-3] + b"xyz"):
            kept.write_bytes(damaged)
            with tiny.refuses("is damaged.*ingest again", CorpusError):
                one.publish()
        kept.unlink()
        with tiny.refuses("cannot be read.*ingest again", CorpusError):
            one.publish()


def test_a_machine_that_follows_loads_the_kv_of_the_one_that_published(machine):
    with machine("one") as one, machine("two") as two, machine("alone", remote=None) as alone:
        for engine in (one, alone):
            engine.ingest([tiny.document(0)])
        done = one.publish()
        assert (done.serial, done.documents, done.missing) == (1, 1, 0)
        assert done.named == done.chunks + 2  # and the probes
        assert two.follow().added == 1
        answer = ask(two, 0)
        assert tiers(answer) == {"remote"}
        assert answer.text == ask(alone, 0).text


def test_a_machine_that_follows_filters_by_the_same_metadata(machine):
    texts = [replace(tiny.document(n, paragraphs=1), metadata={"tags": [str(n)]}) for n in (0, 1)]
    with machine("one") as one, machine("two") as two:
        one.ingest(texts)
        one.publish()
        two.follow()
        found = two.retrieve("ships", filter=Filter.where("tags=1"))
        assert {chunk.source for chunk in found} == {texts[1].source}


def test_publishing_copies_what_only_this_machine_has(machine, bucket):
    with machine("one") as one:
        one.ingest([tiny.document(0)])
        lost = sorted(bucket.rglob("*.kv"))[:2]  # as after a collection
        for path in lost:
            path.unlink()
        assert one.publish().missing == 0
        assert all(path.exists() for path in lost)
        lost[0].unlink()
        one.store.disk.delete(lost[0].parts[-3], lost[0].stem)
        again = one.publish()
        assert (again.serial, again.missing) == (2, 1)


def test_a_snapshot_is_not_published_while_its_kv_cannot_be_copied(machine, bucket):
    with machine("one") as one:
        one.ingest([tiny.document(0)])
        kv = bucket / "kv"
        kv.rename(bucket / "moved")
        kv.write_text("no directory")
        with pytest.raises(StoreUnavailableError):
            one.publish()
        assert not (bucket / snapshots.POINTER).exists()


def test_a_running_engine_follows_without_failing_a_request(machine):
    with machine("one") as one, machine("two") as two:
        one.ingest([tiny.document(0)])
        one.publish()
        two.follow()
        two.open()
        with closing(Follower(two.kv_namespace, every_s=0.05)):
            running = two.stream(tiny.prompt(two, 0), max_new_tokens=40)
            next(running)
            one.ingest([tiny.document(1)])
            one.remove([tiny.document(0).source])
            assert one.publish().serial == 2
            until = time.monotonic() + 120
            while two.corpus.sources() != [tiny.document(1).source]:
                assert time.monotonic() < until
                time.sleep(0.02)
            assert "".join(running)
            assert tiers(ask(two, 1)) == {"remote"}
            assert not ask(two, 0).metrics.chunks


def test_following_goes_on_after_a_full_disk(machine, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with machine("one") as one, machine("two") as two:
        one.ingest([tiny.document(0)])
        one.publish()
        real, until = sharing.follow, time.monotonic() + 120
        monkeypatch.setattr(sharing, "follow", full)
        with closing(Follower(two.kv_namespace, every_s=0.02)):
            while "No space left" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.02)
            monkeypatch.setattr(sharing, "follow", real)
            while two.corpus is None or not two.corpus.has_documents:
                assert time.monotonic() < until
                time.sleep(0.02)


def test_following_ends_with_the_engine_although_the_remote_is_stopped(
    machine, bucket, monkeypatch
):
    asked, real = threading.Event(), sharing.follow

    def follow(*args, **kwargs):
        asked.set()
        return real(*args, **kwargs)

    with closing(Process()) as process, machine("two") as two:
        for name, value in environment(process.port).items():
            monkeypatch.setenv(name, value)
        settings = replace(two.settings, remote="s3://bucket/prefix")
        monkeypatch.setattr(two.kv_namespace.corpus, "settings", settings)
        monkeypatch.setattr(sharing, "follow", follow)
        with process.suffering("frozen"):
            follower = Follower(two.kv_namespace, every_s=0.01)
            assert asked.wait(60)
            follower.close()
            assert not follower._thread.is_alive()
            assert "blendrag-remote" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("lost", ["parts", "manifests"])
def test_a_server_whose_first_following_failed_does_not_serve_an_empty_corpus(
    machine, bucket, tmp_path, lost
):
    from blendrag.cli.serve import _follow

    with machine("one") as one:
        one.ingest([tiny.document(0)])
        one.publish()
    root = tmp_path / "two"
    params = {"store": root, "remote": f"file://{bucket}", "read_only": None}
    context = SimpleNamespace(params=params)
    (bucket / "corpus" / lost).rename(bucket / "gone")
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="is missing"):
            _follow(context)
    (bucket / "gone").rename(bucket / "corpus" / lost)
    assert _follow(context)
    with Corpus.open(root) as corpus:
        assert corpus.sources() == [tiny.document(0).source]


def test_a_follower_that_was_killed_when_it_made_its_corpus_follows(machine, bucket, tmp_path):
    with machine("one") as one:
        one.ingest([tiny.document(0)])
        one.publish()
        (tmp_path / "two" / "corpus").mkdir(parents=True)
        (tmp_path / "two" / "corpus" / "corpus.sqlite").touch()
        assert sharing.may_follow(tmp_path / "two")
        assert not sharing.holds_corpus(tmp_path / "two")
        assert publishing.follow(tmp_path / "two", one.settings).added == 1


@pytest.mark.parametrize("recipe", [{}, {"encode_after": 1}])
def test_kv_of_a_removed_document_is_collected(machine, bucket, recipe):
    with machine("one", **recipe) as one, machine("two") as two:
        one.ingest([tiny.document(0), tiny.document(1)])
        one.publish()
        one.remove([tiny.document(0).source])
        done = one.publish()
        with snapshots.remote_root(one.settings) as remote:
            assert collect_remote(remote, 3600).removed == 0
            collected = collect_remote(remote, 0)
        assert collected.removed > 0
        assert len(list(bucket.rglob("*.kv"))) == done.named == collected.left
        two.follow()
        answer = ask(two, 1)
        assert tiers(answer) == {"remote"}
        assert NOT_ALONE not in answer.metrics.chunks[0].reason


@pytest.fixture
def removed(machine, bucket):
    """An engine whose first document was removed, and whose KV is old."""
    with machine("one") as one:
        one.ingest([tiny.document(0), tiny.document(1)])
        one.remove([tiny.document(0).source])
        one.publish()
        for path in bucket.rglob("*.kv"):
            os.utime(path, (1, 1))
        yield one


def test_kv_that_an_ingest_found_is_not_collected_before_it_is_published(removed):
    assert removed.ingest([tiny.document(0)]).chunks_computed == 0
    with snapshots.remote_root(removed.settings) as remote:
        assert collect_remote(remote, 3600).removed == 0
    assert removed.publish().missing == 0


def test_an_ingest_says_so_if_kv_that_it_found_is_collected_meanwhile(removed, bucket, monkeypatch):
    real = claims.claim

    def claim(*args):
        for key in tiny.chunk_keys(removed, 0):
            for path in bucket.rglob(f"{key}.kv"):  # an ingest that fails claims once more
                path.unlink()
        real(*args)

    with monkeypatch.context() as collecting:
        collecting.setattr(claims, "claim", claim)
        with pytest.raises(StoreUnavailableError, match=r"no longer in remote .* run this again"):
            removed.ingest([tiny.document(0)])
    assert removed.ingest([tiny.document(0)]).chunks_computed > 0
    assert removed.publish().missing == 0


def test_an_ingest_says_so_while_a_collection_runs(removed, bucket):
    (bucket / claims.MARK).write_bytes(b"a collection")
    with pytest.raises(StoreUnavailableError, match="is being collected"):
        removed.ingest([tiny.document(0)])


def test_publishing_needs_a_remote_and_documents(machine):
    with machine("one", remote=None) as one:
        one.ingest([tiny.document(0)])
        with pytest.raises(InvalidInputError, match="no remote was named"):
            one.publish()
    with machine("two") as two, pytest.raises(Exception, match="ingest first"):
        two.publish()
