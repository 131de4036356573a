"""Engines with stores of their own over one remote tier."""

from __future__ import annotations

import struct
from concurrent.futures import Future

import pytest

import tiny
from blendrag.engine import planner
from blendrag.engine.background_writer import Job
from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.planning import controller
from blendrag.planning.controller import blended_s
from blendrag.planning.measure import prefill_token_s
from blendrag.store.remote.objects import RemoteObjects
from blendrag.store.remote.tier import RemoteTier

pytest.importorskip("obstore")


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def machine(bucket, tmp_path):
    def make(name, **more):
        given = {"ram_bytes": 0, "remote": f"file://{bucket}", "prefix_text": tiny.BOS} | more
        return tiny.engine(tiny.shared_llama(), tmp_path / name, **given)

    return make


pytestmark = pytest.mark.usefixtures("slow_prefill")


def ingest(engine):
    return engine.ingest([tiny.document(0)]).whole()


def ask(engine, **options):
    return engine.generate(tiny.prompt(engine, 0), **options)


def tiers(answer):
    return {chunk.tier for chunk in answer.metrics.chunks}


def test_kv_that_one_machine_computed_is_loaded_by_another(machine):
    with machine("one") as one, machine("two") as two, machine("alone", remote=None) as alone:
        ingest(alone)
        assert ingest(one).chunks_computed > 1
        assert ingest(two).chunks_computed == 0
        expected = []
        real = two.store.remote.open_all
        two.store.remote.open_all = lambda *args: expected.append(args[0]) or real(*args)
        first = ask(two)
        assert len(expected[-1]) == len(first.metrics.chunks)
        assert tiers(first) == {"remote"}
        assert first.text == ask(alone).text
        two.store.drain()
        assert tiers(ask(two)) == {"disk"}


def test_an_ingest_looks_for_each_chunk_in_the_remote_once(machine, monkeypatch):
    asked, real = [], RemoteTier.found

    def found(tier, namespace, keys, durable=False):
        asked.extend(keys)
        return real(tier, namespace, keys, durable)

    monkeypatch.setattr(RemoteTier, "found", found)
    monkeypatch.setattr(RemoteTier, "claim", lambda *entries: set())  # which looks again at the end
    with machine("one") as one:
        ingest(one)
        keys = tiny.chunk_keys(one, 0)
        assert [asked.count(key) for key in keys] == [1] * len(keys)


def test_a_chunk_that_is_wrong_in_the_remote_is_computed(machine, bucket):
    with machine("one") as one, machine("two") as two:
        ingest(one)
        ingest(two)
        for key in tiny.chunk_keys(two, 0)[:1]:
            (path,) = bucket.rglob(f"{key}.kv")
            path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", 1e30))
        chunks = ask(two).metrics.chunks
        assert not chunks[0].tier
        # the others may be on disk by the time that the prompt is loaded again without the first
        assert {chunk.tier for chunk in chunks[1:]} <= {"remote", "disk"}
        assert "failed verification" in chunks[0].reason
        ask(two)
        two.drain()  # encodes what was missed, which replaces the object
    # the engine's thread put it, and closing waits for its copies
    assert path.read_bytes()[-4:] != struct.pack("<f", 1e30)


def test_a_remote_that_fails_between_layers_is_computed_around_with_a_note(machine, monkeypatch):
    with machine("one") as one, machine("two") as two:
        ingest(one)
        ingest(two)

        def read(self, name, offset, length):
            failed = Future()
            failed.set_exception(OSError("unplugged"))
            return failed

        two.open()
        monkeypatch.setattr(RemoteObjects, "read_range", read)
        answer = ask(two)
        assert tiers(answer) == {""}
        assert any("unplugged" in note for note in answer.metrics.notes)
        assert answer.text == ask(two, mode="full").text


def test_kv_that_this_machine_does_not_compute_is_not_used(machine, monkeypatch):
    with machine("one") as one:
        ingest(one)
    monkeypatch.setattr("blendrag.engine.kv_validity._alike", lambda *args: False)
    with machine("two") as two, pytest.raises(StoreUnavailableError, match="does not compute"):
        ingest(two)


def test_a_store_filled_before_it_got_the_remote_does_not_mix_kernels(machine, bucket, monkeypatch):
    with machine("one") as one:
        ingest(one)
    there = sorted(bucket.rglob("*.kv"))
    with machine("two", remote=None) as two:
        ingest(two)
        assert tiers(ask(two)) == {"disk"}
    monkeypatch.setattr(
        "blendrag.engine.kv_validity._alike", lambda now, reader, *_: reader.tier != "remote"
    )
    with machine("two") as two:
        answer = ask(two)
        assert tiers(answer) == {""}
        told = answer.metrics.notes.index(planner.UNTRUSTED.text)
        assert "does not compute on this machine" in answer.metrics.notes[told + 1]
        two.drain()
        for number in (0, 1):
            with pytest.raises(StoreUnavailableError, match="does not compute on this machine"):
                two.ingest([tiny.document(number)])
    assert sorted(bucket.rglob("*.kv")) == there


def test_corpora_with_different_prefixes_share_a_remote(machine):
    with machine("one") as one, machine("two", prefix_text="Some other beginning. ") as two:
        assert ingest(one).chunks_computed > 1
        assert ingest(two).chunks_computed > 1
    with machine("three", prefix_text="Some other beginning. ") as three:
        assert ingest(three).chunks_computed == 0


def test_an_ingest_that_began_while_the_remote_was_down_is_completed_later(machine, bucket):
    moved = bucket.rename(bucket.with_name("unmounted"))
    bucket.mkdir(mode=0o500)
    with machine("one") as one:
        _ = one.store  # which finds the remote working
        bucket.rmdir()
        bucket.write_text("no directory")
        with pytest.raises(StoreUnavailableError, match="not copied"):
            ingest(one)
    bucket.unlink()
    moved.rename(bucket)
    with machine("one") as one:
        ingest(one)
    with machine("two") as two:
        assert ingest(two).chunks_computed == 0


def test_the_worker_does_not_wait_for_copies_to_a_slow_remote(machine, bucket, monkeypatch):
    with machine("one") as one:
        ingest(one)
        for key in tiny.chunk_keys(one, 0):
            one.store.delete(one.adapter.identity.namespace, key)
            next(bucket.rglob(f"{key}.kv")).unlink()
        with monkeypatch.context() as behind:
            behind.setattr(type(one.store), "is_behind", True)
            ask(one)
            one.drain()
        assert tiers(ask(one)) == {""}
        one.drain()
        assert tiers(ask(one)) == {"disk"}


def test_what_is_encoded_before_an_answer_is_not_looked_for_in_the_remote(machine, monkeypatch):
    with machine("one") as one:
        one.open()
        asked = []
        monkeypatch.setattr(
            RemoteTier, "found", lambda self, *wanted: asked.append(wanted) or set()
        )
        background = one.background
        for ids in (range(5, 25), range(30, 50)):  # with the first, the probe is looked for
            asked.clear()
            todo = [Job(tuple(ids), one.manifest.prefix_ids, None)]
            assert one.scheduler.run(lambda todo=todo: background.encode_first(todo, int)) == 1
        assert not asked


def test_an_ingest_ends_when_the_remote_takes_nothing(machine, bucket):
    with machine("one") as one:
        _ = one.store
        bucket.rename(bucket.with_name("gone"))
        bucket.write_text("")
        with pytest.raises(StoreUnavailableError, match="were not copied to remote"):
            ingest(one)
        assert not one.corpus.has_documents


def test_a_bad_remote_is_refused_before_anything_is_stored(machine):
    with (
        machine("one", remote="ftp://x") as engine,
        pytest.raises(InvalidInputError, match="is no object store"),
    ):
        ingest(engine)


def test_what_a_slow_remote_holds_is_computed_now_and_kept_for_the_next_prompt(
    machine, monkeypatch
):
    with machine("one") as one, machine("two") as two:
        ingest(one)
        ingest(two)
        monkeypatch.setattr(
            two.planner, "measured_token_s", 1e-9
        )  # computes faster than any remote
        answer = ask(two)
        assert tiers(answer) == {""}
        assert all("faster here than reading it" in c.reason for c in answer.metrics.chunks)
        assert any("the remote is slower than computing" in note for note in answer.metrics.notes)
        assert answer.text == ask(two, mode="full").text
        two.store.drain()
        assert tiers(ask(two)) == {"disk"}


@pytest.mark.parametrize(
    ("loading_s", "policy", "tier"),
    [(50.0, "query", "remote"), (70.0, "query", ""), (85.0, "random", "remote")],
)
def test_what_is_read_from_the_remote_is_faster_than_computing_it(
    machine, monkeypatch, loading_s, policy, tier
):
    """Computing takes 100 s, recomputing 30 s: at the same time as loading only without a scout pass."""
    with machine("one") as one, machine("two") as two:
        ingest(one)
        ingest(two)
        chunk_tokens = sum(c.tokens for c in ask(one).metrics.chunks)
        monkeypatch.setattr(controller, "expected_load_s", lambda readers: loading_s)
        monkeypatch.setattr(two.planner, "measured_token_s", 100 / chunk_tokens)
        assert tiers(ask(two, policy=policy, ratio=0.3)) == {tier}


@pytest.mark.parametrize("scouted_share", [0.0, 0.5, 1.0])
def test_blending_takes_as_long_as_loading_and_recomputing_if_both_cannot_overlap(scouted_share):
    assert blended_s(0.0, 3.0, scouted_share) == 3.0
    assert blended_s(8.0, 3.0, scouted_share) == 8.0 + max(0.0, 3.0 - 8.0 * (1 - scouted_share))


def test_the_time_of_a_token_is_measured(machine):
    with machine("one") as one:
        ingest(one)
        assert 0 < prefill_token_s(one.adapter) < 1
