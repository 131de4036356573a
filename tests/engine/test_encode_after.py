"""Chunks that are encoded after similar ones: what is stored, and whose KV it is."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
import writers
from blendrag.config import settings
from blendrag.engine import BlendEngine, Options
from blendrag.engine.background_writer import BackgroundWriter
from blendrag.engine.kv_writer import KVWriter
from blendrag.engine.library import Entry
from blendrag.engine.neighbours import Neighbours
from blendrag.engine.rendering import build_rag_prompt
from blendrag.store import maintenance
from blendrag.store.kv import ChunkKV
from blendrag.text.readers import Document

Ids = tuple[int, ...]
NUMBERS = (0, 1)


def ingest(engine: BlendEngine, *numbers: int) -> Any:
    return engine.ingest([tiny.document(each, 5) for each in numbers or NUMBERS]).whole()


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ingested") / "store"
    with tiny.engine(tiny.shared_llama(), root, encode_after=1) as engine:
        ingest(engine)
    return root


@pytest.fixture
def root(ingested: Path, tmp_path: Path) -> Path:
    """A store whose chunks were encoded after one other."""
    return Path(shutil.copytree(ingested, tmp_path / "store"))


def ask(engine: BlendEngine, **options: Any) -> tuple[torch.Tensor, int]:
    """Logits of the first token, and how many tokens were reused."""
    logits, answer = tiny.first_logits(engine, tiny.prompt(engine, *NUMBERS), Options(**options))
    return logits, answer.metrics.reused_tokens


@contextmanager
def encoded(engine: BlendEngine) -> Iterator[dict[Ids, Ids]]:
    """The context of each chunk that is encoded, by its ids. Fails unless it is encoded once alone, and at
    most once more behind a context; with a writer once more alone."""
    found: dict[Ids, Ids] = {}
    alone = Counter[Ids]()
    adapter, kv = engine.adapter, engine.kv_namespace
    real, probe = adapter.encode, kv.validity._probe_ids()

    def encode(prefix: Sequence[int], ids: Sequence[int], *more: Any, **given: Any) -> ChunkKV:
        if prefix and prefix == kv.corpus.prefix_ids and ids != probe:
            context = tuple(given.get("context_ids", ()))
            alone[tuple(ids)] += not context
            assert not (context and found.get(tuple(ids)))
            found[tuple(ids)] = context or found.get(tuple(ids), ())
        return real(prefix, ids, *more, **given)

    adapter.encode = encode  # type: ignore[method-assign]
    try:
        yield found
    finally:
        adapter.encode = real  # type: ignore[method-assign]
    times = 2 if kv.recipe.writer and not adapter.layout.has_states else 1
    assert alone == dict.fromkeys(found, times)


def ids_of(engine: BlendEngine, text: str) -> Ids:
    return tuple(engine.kv_namespace.model.text_ids(text))


def join(*parts: Ids) -> Ids:
    return tuple(i for part in parts for i in part)


# -- what is stored ---------------------------------------------------------------------------------


def stock(engine: BlendEngine, context: Ids, ids: Ids) -> ChunkKV:
    """KV of ``ids`` in one forward over prefix, ``context`` and chunk, at its place there."""
    made, prefix = engine.adapter, engine.kv_namespace.corpus.prefix_ids
    skip = len(prefix) + len(context)
    with made.lock, torch.inference_mode():
        cache = made.prefill_at([*prefix, *context, *ids])
    layers = [
        shape.joined(layer.keys[0, :, skip:], layer.values[0, :, skip:])
        for shape, layer in zip(made.layout.layers, cache.layers, strict=True)
    ]
    return ChunkKV(made.layout, len(ids), layers)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bloom"])
def test_stored_kv_is_the_mean_of_alone_and_behind_the_neighbours_moved_back(
    family: str, tmp_path: Path
) -> None:
    with tiny.engine(tiny.family(family), tmp_path / "store", encode_after=2) as engine:
        with encoded(engine) as contexts:
            ingest(engine)
        assert contexts
        made = engine.adapter
        for ids, context in contexts.items():
            kv = tiny.stored_kv(engine, ids)
            assert kv is not None
            assert context
            back = made.repositioner.tables(torch.full((len(ids),), -len(context)))
            alone, behind = stock(engine, (), ids), stock(engine, context, ids)
            for i, layer in enumerate(kv.layers):
                there = behind.layers[i]
                turning = made.layout.layers[i].split(there)[made.repositioner.part(i)]
                made.repositioner.rotate_(turning, i, back)  # from where it was
                assert (layer - (alone.layers[i] + 2 * there) / 3).abs().max() < 1e-4


def test_a_hybrid_models_chunks_are_encoded_behind_their_neighbours_only(tmp_path: Path) -> None:
    with tiny.engine(tiny.family("falcon_h1"), tmp_path / "store", encode_after=1) as engine:
        with encoded(engine) as contexts:
            ingest(engine)
        made, prefix = engine.adapter, engine.kv_namespace.corpus.prefix_ids
        for ids, context in contexts.items():
            kv = tiny.stored_kv(engine, ids)
            assert kv is not None
            assert context
            with made.lock:
                behind = made.encode(prefix, ids, context_ids=context)
            assert all(map(torch.equal, kv.layers, behind.layers))


def test_a_writer_is_active_in_the_chunk_and_not_in_its_neighbours(tmp_path: Path) -> None:
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    given: dict[str, Any] = {"writer": str(folder), "encode_after": 1}
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", **given) as engine:
        with encoded(engine) as contexts:
            ingest(engine)
        ids, context = next(iter(contexts.items()))
        prefix = tuple(engine.kv_namespace.corpus.prefix_ids)
        alone, behind = (
            writers.by_peft(writers.with_lora(tiny.llama()), before, ids)
            for before in (prefix, join(prefix, context))
        )
        kv = tiny.stored_kv(engine, ids)
        assert kv is not None
        for layer, *both in zip(kv.layers, alone.layers, behind.layers, strict=True):
            values = (both[0][1] + 2 * both[1][1]) / 3  # which do not move
            assert (layer[1] - values).abs().max() < 1e-5


def test_zero_stores_what_an_engine_without_the_option_stores(tmp_path: Path) -> None:
    files = []
    for name, given in (("none", {}), ("off", {"encode_after": 0})):
        with tiny.engine(tiny.shared_llama(), tmp_path / name, **given) as engine:
            report = ingest(engine)
            assert report.context_tokens == report.embedded == 0
            assert engine.kv_namespace.validity.namespace == engine.adapter.identity.namespace
        found = sorted((tmp_path / name).rglob("*.kv"))
        files.append([(file.name.partition(".")[0], file.read_bytes()) for file in found])
    assert len(files[0]) > 4
    assert files[0] == files[1]


# -- which neighbours -------------------------------------------------------------------------------


def topic(word: str, number: int) -> Document:
    """A document of one chunk that is more like those of the same word, and of a near number."""
    words = [f"{word}{i}" for i in range(12)] + ["near"] * number
    random.Random(number).shuffle(words)
    return Document(source=f"{word}{number}.txt", title="t", text=" ".join(words) + ".")


def contexts_of(engine: BlendEngine, documents: Sequence[Document]) -> dict[str, list[str]]:
    """By the text of each chunk, the texts that it was encoded after, in their order."""
    with encoded(engine) as contexts:
        engine.ingest(documents).whole()
    texts = {ids_of(engine, d.text): d.source for d in DOCUMENTS}
    found = {}
    for ids, context in contexts.items():
        before, rest = [], context
        while rest:
            part = next(each for each in texts if rest[: len(each)] == each)
            before.append(texts[part])
            rest = rest[len(part) :]
        found[texts[ids]] = before
    return found


DOCUMENTS = [topic(word, number) for word in ("ship", "farm") for number in (1, 2, 4)]


def test_a_chunk_is_encoded_after_the_most_similar_ones_the_nearest_last(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=2) as engine:
        contexts = contexts_of(engine, DOCUMENTS)
    embed = tiny.WordEmbedder().embed_query
    for document in DOCUMENTS:
        others = [each for each in DOCUMENTS if each is not document]
        others.sort(key=lambda each, d=document: -float(embed(each.text) @ embed(d.text)))
        assert contexts[document.source] == [others[1].source, others[0].source]
        assert all(name[:4] == document.source[:4] for name in contexts[document.source])


def test_neighbours_were_stored_earlier_or_come_later_in_the_same_ingest(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        assert contexts_of(engine, [DOCUMENTS[0]]) == {"ship1.txt": []}  # there is no other
        found = contexts_of(engine, [DOCUMENTS[3], DOCUMENTS[4], DOCUMENTS[1]])
    assert found == {
        "farm1.txt": ["farm2.txt"],
        "farm2.txt": ["farm1.txt"],
        "ship2.txt": ["ship1.txt"],
    }


def test_an_ingest_of_many_texts_holds_one_group_and_finds_those_of_earlier_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(each.text) for each in DOCUMENTS)
    monkeypatch.setattr("blendrag.engine.ingest.READ_AHEAD_CHARS", longest + 1)  # two documents
    held: list[int] = []
    real = Neighbours.add

    def add(self: Neighbours, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        held.append(len(self._new))

    monkeypatch.setattr(Neighbours, "add", add)
    older = [replace(DOCUMENTS[3], source=DOCUMENTS[0].source)]
    given = [DOCUMENTS[i] for i in (0, 3, 1, 4)]
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        engine.ingest(older).whole()
        held.clear()
        found = contexts_of(engine, given)
    assert held == [1, 2, 1, 2]
    assert found["ship1.txt"] == ["farm1.txt"]  # the other ship is in the next group
    assert found["ship2.txt"] == ["ship1.txt"]
    assert found["farm2.txt"] == ["farm1.txt"]


def test_the_version_that_a_document_replaces_is_no_neighbour(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        engine.ingest([DOCUMENTS[0], DOCUMENTS[3]]).whole()
        changed = replace(DOCUMENTS[1], source=DOCUMENTS[0].source)
        assert contexts_of(engine, [changed]) == {"ship2.txt": ["farm1.txt"]}


def test_equal_texts_are_no_neighbours_of_one_another(tmp_path: Path) -> None:
    twin = replace(DOCUMENTS[0], source="twin.txt", title="other")
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=2) as engine:
        found = contexts_of(engine, [DOCUMENTS[0], twin, DOCUMENTS[3]])
    assert found == {"ship1.txt": ["farm1.txt"], "farm1.txt": ["ship1.txt"]}


@pytest.mark.parametrize("stored", [False, True])
def test_copies_are_no_neighbours_of_one_another(tmp_path: Path, stored: bool) -> None:
    """Such as the next version of a document, or a chunk that overlaps with this one."""
    first, *others = DOCUMENTS[:4]
    words = first.text.split()
    copies = [
        replace(first, source=f"{name}.txt", text=" ".join(text))
        for name, text in (("cut", [*words[4:], *words[:4]]), ("longer", [*words, *words]))
    ]
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        if stored:
            engine.ingest([*copies, *others]).whole()
        with encoded(engine) as contexts:
            engine.ingest([first] if stored else [*copies, first, *others]).whole()
    embed = tiny.WordEmbedder().embed_query
    near = max(others, key=lambda each: float(embed(each.text) @ embed(first.text)))
    assert contexts[ids_of(engine, first.text)] == ids_of(engine, near.text)


def test_an_unchanged_document_is_encoded_after_its_neighbours_without_new_vectors(
    tmp_path: Path,
) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.ingest(DOCUMENTS).whole()
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        with tiny.counted(engine.kv_namespace.corpus.embedder, "embed") as calls:
            found = contexts_of(engine, DOCUMENTS)
        assert not calls
    assert len(found) == len(DOCUMENTS)
    assert all(name[0][:4] == source[:4] for source, name in found.items())


def test_entries_are_encoded_after_similar_ones_or_those_before_them(tmp_path: Path) -> None:
    texts = [each.text for each in DOCUMENTS[:2] + DOCUMENTS[3:5]]
    entries = [Entry(str(i), text) for i, text in enumerate(texts)]
    for embed, expected in ((True, [1, 0, 3, 2]), (False, [1, 0, 1, 2])):
        with tiny.engine(tiny.shared_llama(), tmp_path / str(embed), encode_after=1) as engine:
            with encoded(engine) as contexts:
                engine.library.add(entries, embed=embed)
            for i, other in enumerate(expected):
                assert contexts[ids_of(engine, texts[i])] == ids_of(engine, texts[other])


def test_what_an_ingest_costs_is_reported(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=2) as engine:
        assert engine.dry_run([tiny.document(0)]).encode_after == 2
        with encoded(engine) as contexts:
            report = ingest(engine)
    assert report.context_tokens == sum(map(len, contexts.values())) > report.tokens
    assert report.embedded == report.chunks


@pytest.mark.parametrize(
    ("stored", "given", "similar"),
    [
        ("", "a", 0),  # there is no other
        ("", "ab", 1),
        ("", "abcd", 2),
        ("a", "b", 1),
        ("abc", "d", 2),
        ("a", "A", 0),  # in place of the stored one
        ("ab", "A", 1),
        ("a", "a", 0),  # unchanged, with KV of another namespace
        ("ab", "a", 1),
    ],
)
def test_a_dry_run_counts_the_similar_chunks_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, given: str, similar: int
) -> None:
    """Each letter is a document of one chunk; a capital is another text of the same source."""
    texts = {letter: tiny.sentence(ord(letter)) for letter in stored + given}
    made = {each: Document(f"{each.lower()}.txt", text, "") for each, text in texts.items()}
    monkeypatch.setattr("blendrag.engine.dry_run._timed", lambda call: (1.0, call()))
    seconds = {}
    for after in (0, 2):
        root = tmp_path / str(after)
        if stored:
            with tiny.engine(tiny.shared_llama(), root, encode_after=1) as engine:
                engine.ingest([made[each] for each in stored]).whole()
        with tiny.engine(tiny.shared_llama(), root, encode_after=after) as engine:
            seconds[after] = engine.dry_run([made[each] for each in given]).seconds
            tokens = [len(engine.kv_namespace.model.text_ids(texts[each])) for each in given]
    alone = sum(tokens) / max(tokens)  # seconds of encoding each chunk once
    assert seconds[2] - seconds[0] == pytest.approx((similar + (similar > 0)) * alone)


def test_a_chunk_without_a_vector_is_not_found_as_a_similar_one(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        engine.library.add([Entry("0", tiny.sentence(0))], embed=False)
        assert engine.require_corpus().searchable_ids(9) == set()
        engine.library.add([Entry(str(n), tiny.sentence(n)) for n in (1, 2, 3)])
        assert len(engine.require_corpus().searchable_ids(9)) == 3
        assert len(engine.require_corpus().searchable_ids(2)) == 2


@pytest.mark.parametrize("stage", ["embedded", "chunks_computed"])
def test_an_interrupted_ingest_goes_on(stage: str, tmp_path: Path) -> None:
    def stop(report: Any) -> None:
        if getattr(report, stage):
            raise KeyboardInterrupt

    documents = [tiny.document(each, 5) for each in NUMBERS]
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        report = engine.ingest(documents, stop)
        assert report.interrupted
        assert report.chunks_computed == (stage == "chunks_computed")
        with encoded(engine) as contexts:
            rest = engine.ingest(documents).whole()
        assert rest.chunks_computed == rest.chunks - report.chunks_computed
        assert all(contexts.values())


class Killed(BaseException):
    """As ``kill -9`` does, it leaves what was stored and nothing else."""


@pytest.mark.parametrize("calls", [1, 3])  # before and after the first document is whole
def test_an_ingest_that_is_killed_goes_on_alike_without_options(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [tiny.document(each, 5) for each in NUMBERS]
    real, left = KVWriter.write, calls

    def write(*given: Any) -> None:
        nonlocal left
        real(*given)
        left -= 1
        if not left:
            raise Killed

    with (
        tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine,
        monkeypatch.context() as patch,
    ):
        patch.setattr(KVWriter, "write", write)
        with pytest.raises(Killed):
            engine.ingest(documents)
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        rest = engine.ingest(documents).whole()
        assert engine.manifest.encode_after == 1
    assert rest.chunks_computed == rest.chunks - calls


# -- as far as there is room ------------------------------------------------------------------------


def small(positions: int) -> Any:
    return tiny.llama(max_position_embeddings=positions)


def test_fewer_chunks_precede_one_if_the_model_has_no_room_for_more(tmp_path: Path) -> None:
    size = 560  # for a chunk of 122 tokens, its prefix, and three others
    with tiny.engine(small(size), tmp_path / "store", encode_after=4) as engine:
        with encoded(engine) as contexts:
            ingest(engine)
        prefix = len(engine.kv_namespace.corpus.prefix_ids)
        for ids, context in contexts.items():
            assert context
            assert prefix + len(context) + len(ids) <= size


def test_no_more_others_are_tokenized_than_a_chunk_is_encoded_after(root: Path) -> None:
    others = iter([(1, 2), (3,), (4,)])
    with tiny.engine(tiny.shared_llama(), root, encode_after=2) as engine:
        assert engine.kv_namespace.validity.context(others, 10) == (3, 1, 2)
    assert [*others] == [(4,)]


def test_a_model_without_room_for_any_is_named(tmp_path: Path) -> None:
    with tiny.engine(small(190), tmp_path / "store", encode_after=1) as engine:
        report = engine.ingest([tiny.document(0)])
        assert report.failed == 1
        assert tiny.one_sentence(report.failures[0])
        assert "has no room after another" in report.failures[0]
        assert report.chunks_computed == 0


# -- whose KV it is ---------------------------------------------------------------------------------


def test_an_engine_without_options_goes_on_as_the_store_was_begun(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        assert engine.manifest.encode_after == 1
        assert ask(engine, mode="reuse")[1] > 0
        with encoded(engine) as contexts:
            ingest(engine, 5)
        assert all(contexts.values())


def test_kv_with_and_without_is_kept_apart(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        near, _ = ask(engine, mode="reuse")
    with tiny.engine(tiny.shared_llama(), root, encode_after=0) as engine:
        metrics = engine.generate(tiny.prompt(engine, *NUMBERS)).metrics
        engine.drain()
        assert metrics.reused_tokens == 0
        told = "encode_after 0, not 1); they are kept beside the store's, and reused from the next"
        assert any(told in note for note in metrics.notes)
        alone, reused = ask(engine, mode="reuse")
        assert reused > 0
    with tiny.engine(tiny.shared_llama(), root) as engine:
        again, _ = ask(engine, mode="reuse")
    assert tiny.difference(again, near) < 1e-5
    assert tiny.difference(alone, near) > 1e-3


def test_a_question_that_stores_nothing_is_told_to_load_the_model_as_then(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root, encode_after=0, read_only=True) as engine:
        metrics = engine.generate(tiny.prompt(engine, *NUMBERS)).metrics
    assert any(note.endswith("; load it as then, or ingest again") for note in metrics.notes)


def test_an_ingest_switches_it_off_again(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root, encode_after=0) as engine:
        report = ingest(engine)
        assert report.chunks_computed > 0
        (warning,) = report.warnings
        assert (
            "has KV that was encoded with encode_after 1, and this ingest encodes with encode_after 0"
            in warning
        )
    with tiny.engine(tiny.shared_llama(), root) as engine:
        assert engine.manifest.encode_after == 0
        assert engine.kv_namespace.validity.recipe.is_exact
        assert ask(engine, mode="reuse")[1] > 0


def test_a_variable_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_ENCODE_AFTER", "2")
    settings.cache_clear()
    try:
        with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
            assert engine.kv_namespace.recipe.encode_after == 2
    finally:
        settings.cache_clear()


def test_all_but_the_first_chunk_are_blended(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        texts = [text for number in NUMBERS for text in tiny.chunk_texts(engine, number)]
        prompt = build_rag_prompt("What did the company do?", texts)  # begins with the prefix
        first, *others = engine.generate(prompt, Options(ratio=1.0)).metrics.chunks
        assert first.outcome == "exact"
        assert {chunk.outcome for chunk in others} == {"blended"}
        full, _ = tiny.first_logits(engine, prompt, Options(mode="full"))
        for options in (Options(mode="prefix"), Options(ratio=1.0)):
            found, _ = tiny.first_logits(engine, prompt, options)
            engine.drain()
            assert tiny.difference(found, full) < 1e-4


def test_an_archive_carries_it_to_a_store_that_is_ingested_alike(
    root: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    maintenance.export_archive(root, archive)
    assert maintenance.import_archive(other, archive).is_complete
    with tiny.engine(tiny.shared_llama(), other, encode_after=1) as engine:
        assert ingest(engine).chunks_computed == 0


# -- chunks that a prompt misses --------------------------------------------------------------------


def missed(engine: BlendEngine, **options: Any) -> dict[Ids, Ids]:
    """The contexts in which the chunks of document 1 are encoded, whose KV is lost."""
    tiny.lose_kv(engine, *tiny.chunk_keys(engine, 1))
    with encoded(engine) as contexts:
        engine.generate(tiny.prompt(engine, *NUMBERS), Options(**options))
        engine.drain()
    assert ask(engine, mode="reuse")[1] > 0
    return contexts


def test_a_missing_chunk_is_encoded_after_those_before_it_in_its_prompt(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        texts = [text for number in NUMBERS for text in tiny.chunk_texts(engine, number)]
        chunks = [ids_of(engine, text) for text in texts]
        lost = [ids_of(engine, text) for text in tiny.chunk_texts(engine, 1)]
        assert missed(engine) == {ids: chunks[chunks.index(ids) - 1] for ids in lost}


def test_the_first_chunk_of_a_prompt_is_encoded_after_the_next(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        chunks = [ids_of(engine, text) for text in tiny.chunk_texts(engine, 0)]
        tiny.lose_kv(engine, *tiny.chunk_keys(engine, 0)[:2])
        with encoded(engine) as contexts:
            engine.generate(tiny.prompt(engine, 0))
            engine.drain()
    assert contexts == {chunks[0]: chunks[1]}


def test_a_private_prompt_leaves_nothing_in_kv_of_documents(root: Path) -> None:
    """Not even which chunks it had: they are encoded after those that an ingest would choose."""
    found = []
    for options in ({"tenant": "a"}, {"cache_salt": "b"}):
        with tiny.engine(tiny.shared_llama(), root) as engine:
            found.append(missed(engine, **options))
    with tiny.engine(tiny.shared_llama(), root) as engine:
        tiny.lose_kv(engine, *tiny.chunk_keys(engine, 1))
        with encoded(engine) as contexts:
            ingest(engine)
    assert found == [contexts, contexts]


def test_similar_chunks_are_looked_for_only_for_chunks_that_are_due(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private prompt that waits for nothing looks for none before its answer."""
    looked: list[bool] = []
    is_asked = False
    real_due, real_texts = BackgroundWriter.due_now, Neighbours.texts

    def due_now(*given: Any) -> Any:
        nonlocal is_asked
        is_asked = True
        found = real_due(*given)
        is_asked = False
        return found

    def texts(*given: Any) -> Any:
        looked.append(is_asked)
        return real_texts(*given)

    monkeypatch.setattr(BackgroundWriter, "due_now", due_now)
    monkeypatch.setattr(Neighbours, "texts", texts)
    with tiny.engine(tiny.shared_llama(), root) as engine:
        missed(engine, tenant="a")
    assert looked
    assert not any(looked)


def test_the_kv_of_a_removed_document_is_removed_for_all_recipes(root: Path) -> None:
    for after in (0, 2):
        with tiny.engine(tiny.shared_llama(), root, encode_after=after) as engine:
            ingest(engine)
    with tiny.engine(tiny.shared_llama(), root) as engine:
        before = {each.namespace: each.chunks for each in maintenance.survey(root).namespaces}
        engine.remove_sources([tiny.document(1, 5).source])
        kept = {each.namespace: each.chunks for each in maintenance.survey(root).namespaces}
    removed = sorted(before[each] - kept[each] for each in before)
    assert removed[0] > 0
    assert removed == [removed[0], 2 * removed[0], 2 * removed[0]]  # recipes keep two of each chunk


def test_a_learned_passage_is_in_no_kv_of_documents(root: Path) -> None:
    passage = "\n\n".join(tiny.sentence(900 + i) for i in range(3))
    with tiny.engine(tiny.shared_llama(), root, learn=True) as engine:
        first = tiny.chunk_texts(engine, 1)[0]
        for question in ("What was built?", "Who built it?"):
            engine.generate(f"{passage}\n\n{question}")
            engine.drain()
        tiny.lose_kv(engine, *tiny.chunk_keys(engine, 1)[:2])
        with encoded(engine) as contexts:
            answer = engine.generate(f"{passage}\n\n{first}\n\nAnd when?")
            engine.drain()
        assert len(answer.metrics.chunks) > 1
        assert contexts[ids_of(engine, first)] == ()


@pytest.mark.parametrize("after", [0, 1])
def test_learned_passages_name_others_only_if_they_are_encoded_after_them(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passages = [" ".join(tiny.sentence(10 * i + k) for k in range(3)) for i in range(2)]
    with tiny.engine(
        tiny.shared_llama(), tmp_path / "store", learn=True, encode_after=after
    ) as engine:
        jobs: list[Any] = []
        monkeypatch.setattr(engine.background, "queue", jobs.extend)
        for question in ("What was built?", "Who built it?"):
            engine.generate("\n\n".join([tiny.LEAD, *passages, question]))
        learned = [job for job in jobs if job.scope is not None and not job.is_exact]
    assert learned
    assert all(bool(job.others) == bool(after) for job in learned)


def test_vectors_of_another_embedder_are_compared_as_given(tmp_path: Path) -> None:
    entries = [Entry(str(i), DOCUMENTS[i].text) for i in (0, 1, 3)]
    vectors = np.eye(3, dtype=np.float32) + np.float32([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", encode_after=1) as engine:
        with encoded(engine) as contexts:
            engine.library.add(entries, vectors, embedder="mine")
        assert contexts[ids_of(engine, entries[0].text)] == ids_of(engine, entries[2].text)
