"""Ingest and removal: each piece of work is done once, and the first ingest decides a corpus's settings."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import scripted
import tiny
from blendrag.corpus.corpus import Corpus
from blendrag.engine import BlendEngine, Filter, IngestReport, Options, lazy_model
from blendrag.engine.library import Entry
from blendrag.engine.rendering import build_rag_prompt
from blendrag.errors import (
    BlendragError,
    CorpusError,
    InvalidInputError,
    ModelLoadError,
    StoreUnavailableError,
)
from blendrag.text import chunking, outline, readers
from blendrag.text.readers import Document
from text import hostile_files

DOCUMENTS = [tiny.document(i, 4) for i in range(2)]


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine whose store holds nothing yet."""
    with made(tmp_path) as engine:
        yield engine


def made(root: Path, **changes: Any) -> BlendEngine:
    return tiny.engine(tiny.shared_llama(), root / "s", **changes)


def keys(engine: BlendEngine) -> set[str]:
    return set(engine.store.keys(engine.adapter.identity.namespace))


def probe_key(engine: BlendEngine) -> str:
    return engine.kv_namespace.validity.probe_key(engine.adapter.identity.namespace)


def expected_keys(engine: BlendEngine, *numbers: int) -> set[str]:
    return {probe_key(engine)}.union(*(tiny.chunk_keys(engine, number) for number in numbers))


def reused_share(engine: BlendEngine) -> float:
    options = Options(mode="reuse", max_new_tokens=1)
    metrics = engine.generate(tiny.prompt(engine, 0, 1), options).metrics
    return metrics.reused_tokens / sum(chunk.tokens for chunk in metrics.chunks)


# -- ingest -------------------------------------------------------------------------------------


def test_ingest_stores_the_kv_of_every_chunk_once(empty):
    first = empty.ingest(DOCUMENTS)
    assert keys(empty) == expected_keys(empty, 0, 1)
    assert first.chunks_computed == first.chunks == len(keys(empty)) - 1
    assert (first.documents, first.documents_unchanged) == (2, 0)
    assert first.tokens > 0
    with tiny.counted(empty.adapter, "encode") as calls:
        second = empty.ingest(DOCUMENTS)
    assert calls == []
    assert (second.chunks_computed, second.documents_unchanged) == (0, 2)
    assert second.chunks_skipped == second.chunks == first.chunks
    tiny.lose_kv(empty, tiny.chunk_keys(empty, 0)[0])
    with tiny.counted(empty.kv_namespace.corpus.embedder, "embed") as calls:
        third = empty.ingest([replace(DOCUMENTS[0], metadata={"year": 1871}), DOCUMENTS[1]])
    assert (third.chunks_computed, calls) == (1, [])
    assert keys(empty) == expected_keys(empty, 0, 1)
    (chunk, *_) = empty.retrieve("What did the company of Place0 build?", 1)
    assert chunk.metadata == {"year": 1871}


class NoEmbedder:
    name = "no/embedder"

    @property
    def dim(self) -> int:
        raise ModelLoadError("embedder 'no/embedder' cannot be loaded")


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("what", ["model", "embedder", "remote"])
def test_what_cannot_be_opened_leaves_no_store(tmp_path: Path, what: str, adds: bool) -> None:
    remote = "file:///no/directory" if what == "remote" else None
    engine = made(tmp_path, remote=remote)
    if what == "model":
        engine = BlendEngine("no/model", tmp_path / "s")
    if what == "embedder":
        engine.kv_namespace.corpus.__dict__["embedder"] = NoEmbedder()
    change = partial(engine.ingest, DOCUMENTS)
    if adds:
        change = partial(engine.library.add, [Entry("a", "A text.")])
    with engine, pytest.raises(BlendragError, match=f"no/{what}|no/directory"):
        change()
    assert not (tmp_path / "s").exists()


def test_progress_names_each_step(tmp_path: Path) -> None:
    (tmp_path / "lamp.txt").write_text(DOCUMENTS[0].text)
    steps = list[str]()

    def watch(report: IngestReport) -> None:
        if [report.step] != steps[-1:]:
            steps.append(report.step)

    with made(tmp_path) as engine:
        report = engine.ingest([tmp_path / "lamp.txt"], watch)
    assert steps == [
        "reading lamp.txt",
        "opening the embedder and the model",
        "splitting lamp.txt",
        "opening and checking the model",
        "encoding",
        "embedding",
    ]
    assert (report.step, report.read_bytes) == ("", len(DOCUMENTS[0].text))


def test_an_ingest_that_is_interrupted_while_it_opens_leaves_no_store(tmp_path: Path) -> None:
    def watch(report: IngestReport) -> None:
        if report.step.startswith("opening"):
            raise KeyboardInterrupt

    with made(tmp_path) as engine:
        assert engine.ingest(DOCUMENTS, watch).interrupted
    assert not (tmp_path / "s").exists()


def test_an_uploaded_file_and_one_of_the_working_directory_with_its_name_are_two_documents(
    empty: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "lamp.txt"
    path.write_text("The lamp of the file.")
    uploaded = Document("lamp.txt", "The lamp of the upload.", "lamp", {"file_date": "2026-11-26"})
    for inputs in ([path], [uploaded], [path]):
        empty.ingest(inputs)
        path.write_text("The lamp of the changed file.")
    corpus = empty.require_corpus()
    assert corpus.sources() == [str(path), "lamp.txt"]
    assert corpus.sources_of(tmp_path) == [str(path)]
    assert empty.remove([path.name]) == 1
    assert corpus.sources() == ["lamp.txt"], "a file goes first, and the upload stays"
    assert empty.remove([path.name]) == 1


def test_documents_that_cannot_be_read_leave_no_store(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("no archive")
    with made(tmp_path) as engine:
        report = engine.ingest([tmp_path / "a.docx"])
        assert (report.documents, report.failed) == (0, 1)
    assert not (tmp_path / "s").exists()


def test_a_place_for_no_store_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        BlendEngine("no/model", tmp_path / "file" / "s") as engine,
        pytest.raises(StoreUnavailableError, match="is not a directory"),
    ):
        engine.ingest(DOCUMENTS)


def test_a_changed_document_encodes_its_changed_chunks_and_drops_the_old_ones(empty):
    old = tiny.document(0)
    empty.ingest([old, DOCUMENTS[1]])
    before = set(tiny.chunk_keys(empty, 0))
    changed = replace(old, text=old.text.replace(tiny.sentence(7), tiny.sentence(4321)))
    with tiny.counted(empty.adapter, "encode") as calls:
        report = empty.ingest([changed, DOCUMENTS[1]])
    after = set(tiny.chunk_keys(empty, 0))
    assert after - before
    assert before - after
    assert after & before
    assert report.chunks_computed == len(calls) == len(after - before)
    assert keys(empty) == expected_keys(empty, 0, 1)


def test_a_changed_row_of_a_table_encodes_few_chunks_and_each_is_recognised(empty, tmp_path):
    rows = [f"P-{i:03},part {i},{i * 7 % 90}.5,{i % 5}" for i in range(100)]
    path = tmp_path / "parts.csv"
    path.write_text("\n".join(["sku,name,price,weight", *rows]))
    first = empty.ingest([path])
    rows[50] = "P-050,part 50,1234.75,9"
    path.write_text("\n".join(["sku,name,price,weight", *rows]))
    second = empty.ingest([path])
    assert first.chunks > 12
    assert 1 <= second.chunks_computed <= 3
    assert empty.ingest([path]).chunks_computed == 0
    text = path.read_text()
    chunks = empty.require_corpus().chunks_of(str(path))
    assert "\n".join(text[c.start : c.end] for c in chunks) == text
    (found,) = empty.retrieve("P-050 part 50", 1)
    assert found.text.startswith("sku,name,price,weight\n")
    assert found.text.endswith(text[found.start : found.end])
    pasted = f"{tiny.LEAD}{found.text}\n\nQuestion: What does P-050 cost?"
    assert (
        empty.generate(pasted).metrics.reused_tokens
        >= empty.kv_namespace.corpus.chunker().count(found.text) - 8
    )


def test_ingest_stops_at_a_full_store_and_keeps_what_it_wrote(tmp_path):
    with made(tmp_path / "a") as engine:
        size = engine.ingest(DOCUMENTS[:1]).bytes
    with made(tmp_path / "b", disk_bytes=size * 2) as engine:
        report = engine.ingest([tiny.document(i, 4) for i in range(6)])
        assert report.stopped
        assert tiny.one_sentence(report.stopped)
        assert 1 <= report.documents < 6
        assert expected_keys(engine, *range(report.documents)) <= keys(engine)


def test_an_interrupted_ingest_continues_where_it_stopped(empty):
    def interrupt(totals: Any) -> None:
        if totals.chunks_computed == 3:
            raise KeyboardInterrupt

    first = empty.ingest(DOCUMENTS, interrupt)
    assert first.interrupted
    second = empty.ingest(DOCUMENTS)
    assert not second.interrupted
    assert first.chunks_computed == second.chunks_skipped == 3
    assert second.chunks_computed + 3 == second.chunks
    assert keys(empty) == expected_keys(empty, 0, 1)


# -- removal ------------------------------------------------------------------------------------


def test_a_chunk_shared_by_two_documents_is_kept_for_the_second(empty):
    report = empty.ingest([DOCUMENTS[0], replace(DOCUMENTS[0], source="doc9.txt", title="doc9")])
    assert report.chunks_computed == report.chunks / 2
    before = keys(empty)
    assert empty.remove(["doc0.txt"]) == 1
    assert keys(empty) == before
    assert empty.remove(["doc9.txt"]) == 1
    assert keys(empty) == {probe_key(empty)}


def test_removed_documents_are_computed_as_ordinary_text(empty):
    empty.ingest(DOCUMENTS)
    text = tiny.prompt(empty, 0)
    assert empty.generate(text).metrics.reused_tokens > 0
    empty.drain()
    with pytest.raises(InvalidInputError, match=r"missing\.txt is not in the corpus"):
        empty.remove(["doc0.txt", "missing.txt"])
    assert keys(empty) >= expected_keys(empty, 0, 1)
    empty.remove(["doc0.txt"])
    metrics = empty.generate(text).metrics
    assert (metrics.chunks, metrics.reused_tokens) == ((), 0)
    sources = {c.source for c in empty.retrieve("What did the company of Place0 build?", 50)}
    assert sources == {"doc1.txt"}
    empty.ingest([Document(f"docs/d{i}.txt", tiny.sentence(i), "") for i in range(2)])
    assert empty.remove(["docs", "docs/d0.txt", "docs"]) == 2, "each is counted once"


def test_removal_deletes_kv_of_every_prefix(tmp_path):
    prefix = {"prefix_text": "<|bos|>Answer."}
    with made(tmp_path, **prefix) as engine:
        engine.ingest(DOCUMENTS[:1])
    with made(tmp_path) as engine:
        stored = set(tiny.chunk_keys(engine, 0))
        assert stored <= keys(engine)
        engine.remove(["doc0.txt"])
    with made(tmp_path, **prefix) as engine:
        assert not stored & keys(engine)


def test_a_document_ingested_again_during_its_removal_is_removed(empty, monkeypatch):
    empty.ingest(DOCUMENTS[:1])
    real = Corpus.remove_source

    def ingested_anew_before(corpus: Corpus, source: str) -> list[str]:
        monkeypatch.setattr(Corpus, "remove_source", real)
        empty.ingest([Document(source, tiny.document(5).text, "title")])
        return real(corpus, source)

    monkeypatch.setattr(Corpus, "remove_source", ingested_anew_before)
    assert empty.remove(["doc0.txt"]) == 1
    assert Corpus.remove_source is real
    assert empty.require_corpus().sources() == []
    assert keys(empty) == {probe_key(empty)}


# -- a model given by path ----------------------------------------------------------------------


def test_an_unchanged_corpus_is_recognised_without_loading_the_model(
    checkpoint, tmp_path, monkeypatch
):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded")

    with tiny.engine(checkpoint, tmp_path / "s", tokenizer=None) as engine:
        assert engine.ingest(DOCUMENTS).chunks_computed > 0
        text = tiny.prompt(engine, 0)
        by_path = engine.generate(text, Options(ratio=1.0))
        assert by_path.metrics.reused_tokens > 0
    with made(tmp_path / "loaded") as engine:
        assert engine.generate(text, Options(mode="full")).text == by_path.text
    with tiny.engine(checkpoint, tmp_path / "s", tokenizer=None) as engine:
        monkeypatch.setattr(lazy_model, "load_adapter", refuse)
        report = engine.ingest(DOCUMENTS)
        assert (report.chunks_computed, report.documents_unchanged) == (0, 2)
        with pytest.raises(AssertionError, match="was loaded"):
            engine.ingest([tiny.document(5)])


@pytest.mark.parametrize("change", ["weights", pytest.param("kernel", marks=pytest.mark.slow)])
def test_a_model_that_computes_other_kv_renews_what_is_stored(
    checkpoint, tmp_path, monkeypatch, change
):
    load = lazy_model.load_adapter

    def with_another_kernel(*args: Any) -> Any:  # the same fingerprint, other numbers
        adapter = load(*args)
        adapter.stack.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
        return adapter

    with tiny.engine(checkpoint, tmp_path / "s", tokenizer=None) as engine:
        engine.ingest(DOCUMENTS[:1])
    if change == "weights":
        tiny.llama(seed=4).save_pretrained(checkpoint)
    else:
        monkeypatch.setattr(lazy_model, "load_adapter", with_another_kernel)
    with tiny.engine(checkpoint, tmp_path / "s", tokenizer=None) as engine:
        report = engine.ingest(DOCUMENTS)
        assert report.chunks_computed == report.chunks
        assert keys(engine) == expected_keys(engine, 0, 1)
        assert engine.generate(tiny.prompt(engine, 0)).metrics.reused_tokens > 0


# -- settings -----------------------------------------------------------------------------------


def test_without_encode_prefix_chunks_are_encoded_alone(tmp_path):
    with made(tmp_path, encode_prefix=False) as engine:
        engine.ingest(DOCUMENTS[:1])
        ids = engine.kv_namespace.model.text_ids(tiny.chunk_texts(engine, 0)[0])
        bare = tiny.stored_kv(engine, ids, ())
        assert bare is not None
        alone = engine.adapter.encode((), ids).layers[-1]
        assert tiny.difference(bare.layers[-1], alone) < 1e-5
        assert tiny.difference(bare.layers[-1], engine.adapter.encode((0,), ids).layers[-1]) > 1e-2
        text = tiny.prompt(engine, 0)
        full, _ = tiny.first_logits(engine, text, Options(mode="full"))
        blended, answer = tiny.first_logits(engine, text, Options(mode="blend", ratio=1.0))
        reused, _ = tiny.first_logits(engine, text, Options(mode="reuse"))
        assert {chunk.outcome for chunk in answer.metrics.chunks} == {"blended"}
        assert tiny.difference(blended, full) < 1e-4
        assert tiny.difference(reused, full) > 1e-2
    with made(tmp_path) as engine:
        assert engine.manifest.prefix_ids == (), "the corpus remembers it"
        assert engine.generate(text).metrics.reused_tokens > 0


def test_chunks_are_encoded_after_the_head_of_the_engines_own_prompts(tmp_path):
    with made(tmp_path) as engine:
        engine.ingest(DOCUMENTS[:2])
        head = engine.manifest.prefix_ids
        answer = engine.ask("What did the company of Place0 build?")
        assert len(head) > 1
        asked = engine.segments(build_rag_prompt("What?", tiny.chunk_texts(engine, 1)))
    assert asked.leading_ids == head
    first, *others = [chunk.outcome for chunk in answer.metrics.chunks]
    assert first == "exact"
    assert set(others) == {"blended"}


def before_first_document(engine: BlendEngine, action: Any) -> None:
    """Run ``action`` before ``engine`` writes its first document."""
    corpus = engine.kv_namespace.corpus.create()
    real = corpus.put_document

    def put_document(*args: Any) -> list[str]:
        corpus.put_document = real  # type: ignore[method-assign]
        action()
        return real(*args)

    corpus.put_document = put_document  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ({"chunk_tokens": 64}, {"chunk_tokens": 128}, "chunk_tokens 128 instead of 64"),
        ({"encode_prefix": False}, {}, "prefix_ids"),
        ({}, {"kv_encoding": "int8"}, "encoding 'int8' instead of 'native'"),
        ({"kv_encoding": "int8"}, {"kv_encoding": "int8"}, None),
    ],
)
def test_of_two_first_ingests_with_other_settings_one_is_refused(tmp_path, one, other, error):
    with made(tmp_path, **one) as slow, made(tmp_path, **other) as fast:
        before_first_document(slow, lambda: fast.ingest(DOCUMENTS[:1]).whole())
        if error:
            with pytest.raises(CorpusError, match=error) as caught:
                slow.ingest(DOCUMENTS)
            assert "repeat the command" in str(caught.value)
            assert "\n" not in str(caught.value)
            assert fast.require_corpus().sources() == ["doc0.txt"]
        if error and one:  # settings that were named differ from the store's
            with tiny.refuses("into another store"):
                slow.ingest(DOCUMENTS)
        else:
            assert slow.ingest(DOCUMENTS).whole().chunks > 0
            assert slow.manifest.encoding == other["kv_encoding"]
            assert reused_share(slow) == 1
        fast.ingest(DOCUMENTS).whole()
        assert fast.ingest(DOCUMENTS).chunks_computed == 0
        assert fast.require_corpus().manifest.namespace == fast.kv_namespace.name()
        assert reused_share(fast) == 1


def test_settings_that_another_ingest_decides_meanwhile_are_not_taken_for_a_changed_model(
    tmp_path, monkeypatch
):
    with made(tmp_path, kv_encoding="int8") as gave_up:
        gave_up.kv_namespace.corpus.create()  # the settings of an empty store can change
    with made(tmp_path) as slow, made(tmp_path, kv_encoding="int8") as fast:
        assert slow.adapter.layout
        real = slow.store.pin

        def pin(namespace: str, key: str) -> None:
            monkeypatch.undo()
            fast.ingest(DOCUMENTS).whole()
            real(namespace, key)

        monkeypatch.setattr(slow.store, "pin", pin)
        with pytest.raises(CorpusError, match="encoding 'int8' instead of 'native'"):
            slow.ingest(DOCUMENTS)
        assert reused_share(fast) == 1


# -- names and limits ---------------------------------------------------------------------------


LONG = "x" * 84_000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": LONG}, "its source has 84,000 characters ('x"),
        ({"title": LONG}, "its title has 84,000 characters ('x"),
        ({"metadata": {"notes": LONG * 20}}, "its metadata takes 1,680,013 bytes as JSON"),
        ({"title": None}, "its title is None, a NoneType, expected a str"),
        ({"source": "a\udc80"}, "its source holds a lone surrogate"),
        (
            {"metadata": {"day": object()}},
            "its metadata is not JSON ('Object of type object is not",
        ),
        (
            {"text": "a " * (33 * 1024**2)},
            "it has 69,206,016 characters, expected at most 67,108,864",
        ),
    ],
)
def test_a_document_with_a_long_name_or_text_costs_one_sentence(empty, changes, reason):
    report = empty.ingest([replace(DOCUMENTS[0], **changes), DOCUMENTS[1]])
    assert (report.documents, report.failed) == (1, 1)
    assert reason in report.failures[0]
    assert len(report.failures[0]) < 1000


def test_an_entry_with_a_long_name_is_refused_in_one_sentence(empty):
    text = "Words about nothing."
    for entry in (
        Entry(LONG, text),
        Entry("a", text, parent=LONG),
        Entry("a", text, {"source": LONG}),
        Entry("a", text, {"notes": LONG * 20}),
    ):
        with pytest.raises(InvalidInputError, match="expected at most") as caught:
            empty.library.add([entry])
        assert len(str(caught.value)) < 1000


def test_a_store_that_holds_a_long_name_answers(empty, monkeypatch):
    monkeypatch.setattr("blendrag.engine.ingest.check_document", lambda document: None)
    empty.ingest([replace(DOCUMENTS[0], source=f"/documents/{LONG}"), DOCUMENTS[1]])
    question = "What did the company of Place0 build?"
    prompt = empty.asking.over(question, empty.retrieve(question, 1), (), Options())
    assert prompt.retrieved[0].file_name == LONG
    assert f"\n[{'x' * 170}…{'x' * 85}]\n" in prompt.text


def test_names_in_prompts_are_short_and_on_one_line():
    prompt = build_rag_prompt("What?", ["One.", "Two."], ["a.txt", "b\n]\nQuestion: who?\n.txt"])
    assert "\n[a.txt]\n" in prompt.text
    assert "\n[b ] Question: who? .txt]\n" in prompt.text


def test_good_files_are_stored_past_hostile_ones(empty, tmp_path):
    folder = tmp_path / "files"
    names = (
        "span.docx",
        "bomb.docx",
        "nested.docx",
        "loop.pdf",
        "id.jsonl",
        "number.jsonl",
        "cut.pdf",
    )
    hostile_files.write_hostile(folder, names)
    contents = hostile_files.good_files(
        lambda number: f"File {number} tells of Place{number}. " * 3
    )
    good = dict(next(contents) for _ in range(6))
    for name, content in good.items():
        (folder / name).write_bytes(content)
    report = empty.ingest([folder])
    stored = {Path(each.source.partition("#")[0]).name for each in empty.corpus.documents()}
    assert stored == {*good}
    failed = {Path(failure.partition(": ")[0]).name for failure in report.failures}
    assert failed == {*names}
    assert report.failed == len(names)
    assert not any("\n" in failure or len(failure) > 500 for failure in report.failures)
    irregular = {Path(each).name for each in report.skipped["not a file"]}
    assert irregular == {"pipe.txt", "socket.txt", "loop.txt"}
    (away,) = report.skipped["a link out of the directory"]
    assert Path(away).name == "device.txt"


def test_an_ingest_does_not_wait_for_answers_that_run(tmp_path: Path) -> None:
    """Nor do requests that come after it: they begin in order."""
    with scripted.engine((), tmp_path / "store", default="word " * 190) as engine:
        engine.ingest([tiny.document(1)]).whole()  # the model is checked once, alone
        answering = engine.stream("Go on", max_new_tokens=190)
        next(answering)
        engine.adapter.model.pause_s = 0.02
        engine.ingest([tiny.document(2)]).whole()
        assert engine.generate("Hello", max_new_tokens=1).metrics.new_tokens == 1
        assert not answering.pending.future.done()
        answering.close()
        meanwhile = stored_layers(engine, 2)
    with scripted.engine((), tmp_path / "alone") as engine:
        engine.ingest([tiny.document(2)]).whole()
        for one, other in zip(meanwhile, stored_layers(engine, 2), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def stored_layers(engine: BlendEngine, number: int) -> list[torch.Tensor]:
    ids = [engine.kv_namespace.model.text_ids(text) for text in tiny.chunk_texts(engine, number)]
    found = [tiny.stored_kv(engine, each) for each in ids]
    return [layer for kv in found if kv is not None for layer in kv.layers]


def test_documents_cut_in_an_earlier_way_are_reused_and_cut_again_at_their_next_ingest(
    empty: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Document(
        "guide.md", f"# Guide\n\n## Lamps\n\n{'The lamp was lit at dusk. ' * 60}", "Guide"
    )
    with monkeypatch.context() as earlier:
        earlier.setattr(chunking, "outline_of", lambda text, source: outline.Outline())
        earlier.setattr(readers, "CHUNKING_REVISION", 1)
        cut = empty.ingest([guide, DOCUMENTS[0]]).chunks
    assert all(not each.text.startswith("Guide >") for each in empty.retrieve("lamp", cut))
    again = empty.ingest([guide, DOCUMENTS[0]])
    assert (again.documents, again.documents_unchanged) == (2, 0)
    assert again.chunks_skipped  # cut as before, so their KV is still right
    assert again.chunks_computed
    assert any(each.text.startswith("Guide > Lamps\n\n") for each in empty.retrieve("lamp", cut))
    assert empty.ingest([guide]).documents_unchanged == 1


def test_the_page_of_a_chunk_is_known_in_every_answer(empty: BlendEngine, tmp_path: Path) -> None:
    writer, path = pytest.importorskip("pypdf").PdfWriter(), tmp_path / "lamp.pdf"
    for page in (1, 2, 3):
        count = 20 if page == 1 else 3
        lines = [f"Lamp {n} of page {page} is lit at dusk" for n in range(count)]
        writer.append(io.BytesIO(hostile_files.pdf(*lines)))
    writer.write(path)
    report = empty.ingest([path, DOCUMENTS[0]])
    assert not report.failures
    found = empty.retrieve("lamp", report.chunks)
    pages = [each.page for each in found if each.source == str(path)]
    assert pages == sorted(pages)
    assert {each.page for each in found if each.source != str(path)} == {None}
    assert {name for each in found for name in each.metadata} == {"file_date"}
    labels = [each.page_label for each in found if each.source == str(path)]
    assert {*labels} == {"1", "1–2", "3"}  # a passage is on two pages
    both = next(each for each in found if each.page_label == "1–2").as_dict()
    assert (both["page"], both["last_page"]) == (1, 2)
    for chosen, on in (
        ("page=2", {"1–2"}),
        ("page>1", {"1–2", "3"}),
        ("page_label=2", {"1–2"}),
        ("page_label=1–2", {"1–2"}),
    ):
        on_page = empty.retrieve("lamp", report.chunks, filter=Filter.where(chosen))
        assert {each.page_label for each in on_page} == on
    hits = empty.library.search("lamp", 9, filter=Filter.where("page=2"))
    assert {hit.entry.metadata["page_label"] for hit in hits} == {"1–2"}
    others = empty.retrieve("lamp", report.chunks, filter=~Filter.where("page=2"))
    assert len(others) == len(found) - labels.count("1–2")
    unpaged = Filter.parse({"type": "is_empty", "key": "page"})
    assert {each.page for each in empty.retrieve("lamp", 9, filter=unpaged)} == {None}
    with pytest.raises(InvalidInputError, match="'page' with 'two', but it holds numbers"):
        empty.retrieve("lamp", filter=Filter.where("page=two"))
