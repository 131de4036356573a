"""An ingest whose stages run one after another in this process; Ray is in ``test_ingest.py``."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
import writers
from blendrag.errors import StoreFullError
from blendrag.store import writer_files
from blendrag.store.remote import claims
from blendrag.store.remote.root import RemoteRoot
from blendrag_ray import ingest as distributed
from blendrag_ray import ingest_stages
from blendrag_ray.ingest_stages import EmbedChunks, EncodeChunks, read_file
from lab.soak.ray_stores import digests, engine, payloads, rows, save_model, write_documents


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def docs(tmp_path):
    return write_documents(tmp_path / "docs", 3)


def inline(change=lambda plan: plan, batch=4):
    """The stages in this process, with two encoders in turn."""

    def compute(plan, files):
        plan = change(plan)
        embed, encoders = EmbedChunks(plan), [EncodeChunks(plan), EncodeChunks(plan)]
        chunks = [each for file in files for row in read_file(file) for each in embed(row)]
        for i in range(0, len(chunks), batch):
            some = chunks[i : i + batch]
            columns = {name: np.array([row[name] for row in some], object) for name in some[0]}
            done = encoders[i // batch % 2](columns)
            yield from (
                dict(zip(done, values, strict=True)) for values in zip(*done.values(), strict=True)
            )

    return compute


def ingest(made, paths, compute=None, **more):
    return distributed.ingest(made.kv_namespace, compute or inline(), 2, paths, **more)


def test_the_corpus_is_that_of_one_process(model, docs, tmp_path):
    with engine(model, tmp_path / "one") as one, engine(model, tmp_path / "many") as many:
        reports = one.ingest([docs]).whole(), ingest(many, [docs]).whole()
        for name in ("documents", "chunks", "chunks_computed", "tokens", "bytes", "done_bytes"):
            assert len({getattr(report, name) for report in reports}) == 1, name
        assert not many.kv_namespace.model.is_loaded
        assert many.corpus.manifest == one.corpus.manifest
    assert digests(tmp_path / "many") == digests(tmp_path / "one")
    assert rows(tmp_path / "many") == rows(tmp_path / "one")


def test_workers_encode_with_the_writer_of_the_driver(model, docs, tmp_path):
    writer = str(writers.writer(tiny.llama(), tmp_path / "writer"))
    with (
        engine(model, tmp_path / "one", writer=writer) as one,
        engine(model, tmp_path / "many", writer=writer) as many,
    ):
        one.ingest([docs]).whole()
        ingest(many, [docs]).whole()
        assert many.corpus.manifest == one.corpus.manifest
        assert many.corpus.manifest.writer
    assert digests(tmp_path / "many") == digests(tmp_path / "one")
    assert writer_files.kept_in(tmp_path / "many") == writer_files.kept_in(tmp_path / "one")


def test_workers_encode_chunks_after_others_of_their_batch(model, docs, tmp_path):
    with (
        engine(model, tmp_path / "one", encode_after=1) as one,
        engine(model, tmp_path / "many", encode_after=1) as many,
    ):
        here, there = one.ingest([docs]).whole(), ingest(many, [docs], inline(batch=99)).whole()
        assert here.context_tokens == there.context_tokens > 0
        assert many.corpus.manifest == one.corpus.manifest
        assert many.corpus.manifest.encode_after == 1
    # the whole corpus is one batch, so that its neighbours are those of one process
    assert digests(tmp_path / "many") == digests(tmp_path / "one")


def test_the_number_of_threads_does_not_change_kv(adapter):
    ids, found = [7 * i % 600 + 20 for i in range(300)], []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with adapter.lock:
                found.append(adapter.encode((0,), ids))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, found[0].layers, found[1].layers))


def test_a_second_run_computes_what_is_missing_and_embeds_what_changed(
    model, docs, tmp_path, monkeypatch
):
    with engine(model, tmp_path / "s") as made:
        first = ingest(made, [docs]).whole()
        kept = payloads(tmp_path / "s")
        (docs / "d0001.txt").write_text(tiny.document(7).text)
        (docs / "d0002.txt").unlink()
        loads = []
        real = ingest_stages.IngestPlan.open
        monkeypatch.setattr(
            ingest_stages.IngestPlan, "open", lambda p: loads.append(real(p)) or loads[-1]
        )
        second = ingest(made, [docs]).whole()
        assert 0 < second.chunks_computed < first.chunks_computed
        assert (second.documents, second.documents_unchanged) == (2, 1)
        assert second.gone == [str(docs / "d0002.txt")]
        loads.clear()
        third = ingest(made, [docs], prune=True).whole()
        assert (third.chunks_computed, third.documents_unchanged, third.pruned) == (0, 2, 1)
        assert not any(each.model.is_loaded for each in loads)
        now = payloads(tmp_path / "s")
    assert all(kept[key] == now[key] for key in kept.keys() & now.keys())


def test_an_unchanged_table_keeps_its_chunks_with_their_headers(model, tmp_path):
    table = tmp_path / "parts.csv"
    table.write_text("sku,name\n" + "".join(f"P-{i},part {i}\n" for i in range(100)))
    with engine(model, tmp_path / "s") as made:
        first = ingest(made, [table]).whole()
        assert first.chunks > 3
        second = ingest(made, [table]).whole()
        assert (second.documents_unchanged, second.chunks_computed) == (1, 0)
        assert second.chunks == first.chunks


def test_after_an_interruption_the_rest_is_computed(model, docs, tmp_path):
    with engine(model, tmp_path / "s") as made:

        def stop(report):
            if report.documents == 1:
                raise KeyboardInterrupt

        first = ingest(made, [docs], watch=stop)
        assert (first.interrupted, first.documents) == (True, 1)
        second = ingest(made, [docs]).whole()
        assert second.documents_unchanged >= 1
        assert 0 < second.chunks_computed < second.chunks


def test_bad_documents_are_named_and_the_others_stored(model, docs, tmp_path):
    (docs / "bad.jsonl").write_text('{"id": "y", "text": "good"}\n{')
    (docs / "bad.html").write_text("<html></html>")
    (docs / "damaged.md").write_bytes("für die Brücke über den Fluss ".encode() + b"\xe9")
    with engine(model, tmp_path / "s") as made:
        report = ingest(made, [docs]).whole()
    assert report.documents == 5
    assert [warning.partition(": ")[0] for warning in report.warnings] == [str(docs / "damaged.md")]
    assert len(report.failures) == report.failed == 2
    assert all(tiny.one_sentence(each) and "bad." in each for each in report.failures)


def test_a_document_that_changed_before_it_was_read_again_is_named(model, docs, tmp_path):
    def changing(plan, files):
        for row in inline()(plan, files):
            is_later = row["source"].endswith("d0001.txt") and row["number"] > 0
            yield row | {"digest": "another"} if is_later else row

    def losing(plan, files):
        for row in inline()(plan, files):
            if not (row["source"].endswith("d0002.txt") and row["number"] == 1):
                yield row

    with engine(model, tmp_path / "s") as made:
        for compute, name in ((changing, "d0001.txt"), (losing, "d0002.txt")):
            (failure,) = ingest(made, [docs], compute).failures
            assert f"{name} changed while it was ingested" in failure
            assert len(made.corpus.documents()) == 2
            made.remove([docs])


def test_a_full_store_ends_the_run_and_evicts_nothing(model, docs, tmp_path):
    with engine(model, tmp_path / "s") as made:
        one = ingest(made, [docs / "d0000.txt"]).whole()
        limit = made.stats().size_bytes + one.bytes // one.chunks
    with engine(model, tmp_path / "s", disk_bytes=limit) as made:
        kept = payloads(tmp_path / "s")
        report = ingest(made, [docs])
        with tiny.refuses("--disk-bytes", StoreFullError):
            report.whole()
        assert kept.items() <= payloads(tmp_path / "s").items()


def test_a_model_whose_kv_cannot_be_reused_is_refused_after_its_texts_are_stored(docs, tmp_path):
    from blendrag.errors import UnsupportedModelError

    tiny.family("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer().save_pretrained(tmp_path / "gpt2")
    with engine(tmp_path / "gpt2", tmp_path / "s") as made:
        with tiny.refuses("documents stored without KV: 3", UnsupportedModelError):
            ingest(made, [docs])
        assert len(made.corpus.documents()) == 3


def test_weights_that_changed_behind_an_equal_signature_are_noticed(model, docs, tmp_path):
    with engine(model, tmp_path / "s") as made:
        ingest(made, [docs]).whole()
        made.kv_namespace.record("ab" * 32, made.corpus.manifest.model_signature)
        (docs / "d0003.txt").write_text(tiny.document(3).text)
        report = ingest(made, [docs]).whole()
        assert report.documents_unchanged == 3
        assert made.corpus.manifest.namespace != "ab" * 32


def claimed(bucket):
    """Keys that a collection leaves alone."""
    with RemoteRoot(f"file://{bucket}", None, 5.0) as remote:
        found = claims.claimed(remote, remote.objects.listing(claims.CLAIMS))
    return {key for keys in found.values() for key in keys}


@pytest.mark.parametrize("after", [0, 1])
def test_workers_that_do_not_see_the_store_write_to_the_remote(
    model, docs, tmp_path, monkeypatch, after
):
    pytest.importorskip("obstore")
    monkeypatch.setattr(ingest_stages.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for name in ("bucket", "tmp"):
        (tmp_path / name).mkdir()

    def apart(plan):
        return replace(plan, place=(0, 0))

    with engine(model, tmp_path / "s") as made, tiny.refuses("no remote"):
        ingest(made, [docs], inline(apart))
    remote = f"file://{tmp_path}/bucket"
    with engine(model, tmp_path / "s", remote=remote, encode_after=after) as made:
        report = ingest(made, [docs], inline(apart)).whole()
        assert report.chunks_computed == report.chunks > 0
        assert not payloads(tmp_path / "s")
        kept = report.chunks * (2 if after else 1)
        assert len(list((tmp_path / "bucket").rglob("*.kv"))) == kept + 2  # probes
        stored = claimed(tmp_path / "bucket")
        assert len(stored) == kept
        shutil.rmtree(tmp_path / "bucket" / "claims")
        assert ingest(made, [docs], inline(apart)).whole().chunks_computed == 0
        assert claimed(tmp_path / "bucket") == stored
        made.generate(tiny.document(0).text, max_new_tokens=2)  # does not wait for a slow remote
        made.store.drain()
        again = made.generate(tiny.document(0).text, max_new_tokens=2)
        assert again.metrics.reused_tokens > 0


def test_a_loaded_model_cannot_be_sent_to_workers(tmp_path):
    with tiny.engine(tiny.llama(), tmp_path / "s") as made, tiny.refuses("hub id or directory"):
        ingest(made, [Path(__file__)])
