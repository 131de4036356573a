"""A store whose chunks were encoded with a writer: ingest, questions, other engines."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import writers
from blendrag.config import settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.unused_writers import remove_unused_writers
from blendrag.engine import BlendEngine, Options
from blendrag.engine.background_writer import Job
from blendrag.engine.kv_namespace import opened_namespace
from blendrag.engine.library import Entry
from blendrag.engine.rendering import build_rag_prompt
from blendrag.engine.request import RagPrompt
from blendrag.engine.store_writer import kept_writer
from blendrag.errors import ModelLoadError
from blendrag.model.writer import MARK, WEIGHTS, Writer, mark_as_writer
from blendrag.planning.controller import EXACT_PREFIX, NOT_ALONE
from blendrag.store import maintenance, writer_files
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import chunk_key

NUMBERS = (0, 1)
Damage = Callable[[Path], object]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writer, and a store that was ingested with it."""
    base = tmp_path_factory.mktemp("writers")
    folder = writers.writer(tiny.llama(), base / "given")
    with tiny.engine(tiny.shared_llama(), base / "store", writer=str(folder)) as engine:
        ingest(engine)
    return base


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "given", tmp_path / "given"))


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


def ingest(engine: BlendEngine) -> None:
    engine.ingest([tiny.document(number) for number in NUMBERS]).whole()


def ask(engine: BlendEngine, **options: Any) -> tuple[torch.Tensor, int]:
    """Logits of the first token, and how many tokens were reused."""
    logits, answer = tiny.first_logits(engine, tiny.prompt(engine, *NUMBERS), Options(**options))
    return logits, answer.metrics.reused_tokens


def test_chunks_are_stored_as_the_writer_encodes_them(root: Path, folder: Path) -> None:
    made = writers.with_lora(tiny.llama())
    with tiny.engine(tiny.shared_llama(), root) as engine:
        used = engine.kv_namespace
        for text in tiny.chunk_texts(engine, 0):
            ids = used.model.text_ids(text)
            stored = tiny.stored_kv(engine, ids)
            expected = writers.by_peft(made, used.corpus.prefix_ids, ids)
            assert stored is not None
            for one, other in zip(stored.layers, expected.layers, strict=True):
                assert (one - other).abs().max() < 1e-5
    assert writer_files.kept_in(root) == [Writer.load(folder).fingerprint]


def test_chunks_are_encoded_with_the_weights_that_the_model_has_now(root: Path) -> None:
    def changed(model: Any) -> Any:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight.mul_(1.5)
        return model

    model = tiny.llama()
    with tiny.engine(model, root) as engine:
        engine.ingest([tiny.document(7)]).whole()
        changed(model)
        engine.ingest([tiny.document(8)]).whole()
        used = engine.kv_namespace
        ids = used.model.text_ids(tiny.chunk_texts(engine, 8)[0])
        stored = tiny.stored_kv(engine, ids)
        expected = writers.by_peft(
            writers.with_lora(changed(tiny.llama())), used.corpus.prefix_ids, ids
        )
    assert stored is not None
    for one, other in zip(stored.layers, expected.layers, strict=True):
        assert (one - other).abs().max() < 5e-5


def test_an_engine_without_options_uses_the_writer_of_the_store(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        with_writer, reused = ask(engine, mode="reuse")
        assert reused > 0
        tiny.lose_kv(engine, *tiny.chunk_keys(engine, 0))
        ask(engine)
        engine.drain()  # encodes them again
        again, reused_again = ask(engine, mode="reuse")
    assert reused_again >= reused  # the beginning is stored, too, when it is seen again
    assert tiny.difference(again, with_writer) < 1e-5


def test_kv_with_and_without_a_writer_is_kept_apart(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root, writer="none") as engine:
        _, reused = ask(engine, mode="reuse")
        assert reused == 0
        engine.drain()
        stock, reused_stock = ask(engine, mode="reuse")
        assert reused_stock > 0  # computed for the store, which has both now
    with tiny.engine(tiny.shared_llama(), root) as engine:
        with_writer, reused_with = ask(engine, mode="reuse")
    assert reused_with > 0
    assert tiny.difference(stock, with_writer) > 1e-3


# -- only the first chunk is exact ---------------------------------------------------------


def behind_the_head(engine: BlendEngine) -> RagPrompt:
    """A prompt whose first chunk directly follows the prefix that chunks were encoded with."""
    texts = [text for number in NUMBERS for text in tiny.chunk_texts(engine, number)]
    return build_rag_prompt("What did the company do?", texts)


@pytest.mark.parametrize("recipe", [{}, {"encode_after": 1}, {"writer": "none", "encode_after": 1}])
def test_the_first_chunk_of_a_prompt_is_exact_and_those_behind_it_are_blended(
    root: Path, recipe: dict[str, Any]
) -> None:
    with tiny.engine(tiny.shared_llama(), root, **recipe) as engine:
        if recipe:
            ingest(engine)
        answer = engine.generate(behind_the_head(engine), Options(ratio=1.0))
        first, *others = answer.metrics.chunks
        alone = build_rag_prompt("What did the company do?", tiny.chunk_texts(engine, 0)[:1])
        full, _ = tiny.first_logits(engine, alone, Options(mode="full"))
        reused, only = tiny.first_logits(engine, alone, Options(mode="reuse"))
    assert first.reason == EXACT_PREFIX.text
    assert {chunk.outcome for chunk in others} == {"blended"}
    assert only.metrics.reused_tokens > 0
    assert tiny.difference(reused, full) < 1e-4


def test_the_first_chunk_is_as_without_a_writer_behind_another_beginning_too(root: Path) -> None:
    found = {}
    for writer in ("", "none"):
        with tiny.engine(
            tiny.shared_llama(), root, **({"writer": writer} if writer else {})
        ) as engine:
            ingest(engine)
            for number in (1, 2):
                text = "\n\n".join(tiny.chunk_texts(engine, 0)[:number])
                asked = f"Another beginning.\n\n{text}\n\nWhat did the company do?"
                logits, answer = tiny.first_logits(engine, asked, Options(mode="reuse"))
                assert [chunk.outcome for chunk in answer.metrics.chunks] == ["reused"] * number
                found[writer, number] = logits
    assert tiny.difference(found["", 1], found["none", 1]) < 1e-6
    assert tiny.difference(found["", 2], found["none", 2]) > 1e-3


def test_a_chunk_behind_the_prefix_is_the_models_own_though_another_is_in_the_prefix(
    tmp_path: Path, folder: Path
) -> None:
    """The latter is the first one, then."""
    with tiny.engine(tiny.shared_llama(), tmp_path / "other") as engine:
        ingest(engine)
        in_prefix, *texts = (tiny.chunk_texts(engine, n)[k] for n, k in ((0, 0), (1, 0), (1, 1)))
    prefix = f"{tiny.BOS}Follow these rules.\n\n{in_prefix}\n\n"
    given = Options(apply_chat_template=False, ratio=1.0)
    with tiny.engine(
        tiny.shared_llama(), tmp_path / "store", writer=str(folder), prefix_text=prefix
    ) as engine:
        ingest(engine)

        asked = "\n\n".join([f"{prefix}{texts[0]}", texts[1], "Where?"])
        full, _ = tiny.first_logits(engine, asked, replace(given, mode="full"))
        for options in (given, replace(given, mode="prefix", ratio=None)):
            found, answer = tiny.first_logits(engine, asked, options)
            engine.drain()
            assert tiny.difference(found, full) < 1e-4
            assert EXACT_PREFIX.text in {chunk.reason for chunk in answer.metrics.chunks}


RECIPES = [{}, {"writer": "none", "encode_after": 1}]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("lost", [0, 1])
def test_one_lost_kv_of_a_chunk_is_computed_again(
    root: Path, recipe: dict[str, Any], lost: int
) -> None:
    documents = [tiny.document(number) for number in NUMBERS]
    with tiny.engine(tiny.shared_llama(), root, **recipe) as engine:
        planned = engine.dry_run(documents)
        report = engine.ingest(documents).whole()
        assert planned.bytes == report.bytes == (2 * sizes(engine) if recipe else 0)
        key = tiny.chunk_keys(engine, 0)[lost]
        engine.library.add([Entry("own", tiny.chunk_texts(engine, 0)[0])])
        assert engine.library.has_kv(["own"]) == {"own": True}
        tiny.lose_kv(engine, key)
        assert engine.library.has_kv(["own"]) == {"own": False}
        planned = engine.dry_run(documents)
        report = engine.ingest(documents).whole()
        assert report.chunks_computed == 1
        assert planned.bytes == report.bytes == sizes(engine, 1)
        assert engine.library.has_kv(["own"]) == {"own": True}


def sizes(engine: BlendEngine, most: int | None = None) -> int:
    """Bytes of one KV of each chunk."""
    texts = [text for number in NUMBERS for text in tiny.chunk_texts(engine, number)]
    tokens = [len(engine.kv_namespace.model.text_ids(text)) for text in texts[:most]]
    return sum(stored_chunk_bytes(engine.kv_namespace.layout, each) for each in tokens)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_first_chunk_whose_own_kv_is_lost_is_blended_until_it_is_encoded(
    root: Path, recipe: dict[str, Any]
) -> None:
    with tiny.engine(tiny.shared_llama(), root, **recipe) as engine:
        if recipe:
            ingest(engine)
        tiny.lose_kv(engine, tiny.chunk_keys(engine, 0)[1])
    with tiny.engine(tiny.shared_llama(), root, read_only=True, **recipe) as engine:
        for _ in range(2):
            first, *_ = engine.generate(
                behind_the_head(engine), Options(mode="reuse")
            ).metrics.chunks
            engine.drain()
            assert first.outcome == "reused"
            assert NOT_ALONE in first.reason
    with tiny.engine(tiny.shared_llama(), root, **recipe) as engine:
        ids = engine.kv_namespace.model.text_ids(tiny.chunk_texts(engine, 0)[0])
        with tiny.counted(engine.adapter, "encode") as encoded:
            for expected in ("reused", "exact"):
                first, *_ = engine.generate(
                    behind_the_head(engine), Options(mode="reuse")
                ).metrics.chunks
                engine.drain()
                assert first.outcome == expected
        assert [each[1] for each in encoded].count(ids) == 1  # not by the recipe


@pytest.mark.parametrize("times", [1, 3])
def test_mode_prefix_answers_as_a_full_prefill(root: Path, times: int) -> None:
    """Also once the beginning of the prompt is kept."""
    with tiny.engine(tiny.shared_llama(), root) as engine:
        prompt = behind_the_head(engine)
        full, _ = tiny.first_logits(engine, prompt, Options(mode="full"))
        for _ in range(times):
            found, answer = tiny.first_logits(engine, prompt, Options(mode="prefix"))
            engine.drain()
            assert tiny.difference(found, full) < 1e-4
        assert all(chunk.outcome != "blended" for chunk in answer.metrics.chunks)
        assert answer.metrics.reused_tokens > 0


def test_everything_recomputed_gives_the_logits_of_a_full_prefill(root: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        full, _ = ask(engine, mode="full")
        for _ in range(2):  # then the beginning comes from the store
            found, reused = ask(engine, ratio=1.0)
            engine.drain()
            assert reused > 0
            assert tiny.difference(found, full) < 1e-4


def test_a_beginning_with_the_ids_of_a_chunk_is_kept_apart_from_it(
    tmp_path: Path, folder: Path
) -> None:
    """Without a prefix both are encoded behind nothing."""
    ids = tiny.random_ids(40)[0].tolist()
    given = {"writer": str(folder), "encode_prefix": False}
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", **given) as engine:
        ingest(engine)
        kv = engine.kv_namespace
        namespace, is_exact = kv.validity.namespace, kv.validity.recipe.is_exact
        within, (beginning,) = Job(tuple(ids), None, "scope").places(namespace, is_exact)
        assert Job(tuple(ids), (), "scope").places(namespace, is_exact) == (
            within,
            (chunk_key(within, (), ids), beginning),  # it is also the first chunk's KV
        )


def test_modules_of_prompt_schemas_are_encoded_by_the_model_alone(root: Path) -> None:
    markup = '<schema name="s"><module name="m">A town of ten ships.</module></schema>'
    asked = '<prompt schema="s"><m/>What was built?</prompt>'
    answers = []
    for given in ({}, {"writer": "none"}):
        with tiny.engine(tiny.shared_llama(), root, **given) as engine:
            engine.add_schema(markup)
            answers.append(engine.generate(pml=asked))
    assert answers[0].text == answers[1].text
    assert answers[1].metrics.reused_tokens > 0  # what the other engine stored


# -- whose writer it is -----------------------------------------------------------------------------


def test_another_writer_is_named_in_a_note(root: Path, folder: Path, tmp_path: Path) -> None:
    other = writers.writer(tiny.llama(), tmp_path / "other", seed=1)
    own, others = (Writer.load(each).fingerprint[:12] for each in (folder, other))
    for given, says in (
        (str(other), f"writer {others}, not {own})"),
        ("none", f"none, not {own})"),
    ):
        with tiny.engine(tiny.shared_llama(), root, writer=given, read_only=True) as engine:
            notes = engine.generate(tiny.prompt(engine, 0)).metrics.notes
        assert any(says in note for note in notes), notes


def test_an_ingest_with_another_writer_changes_that_of_the_store(
    root: Path, tmp_path: Path
) -> None:
    other = writers.writer(tiny.llama(), tmp_path / "other", seed=1)
    with tiny.engine(tiny.shared_llama(), root, writer=str(other)) as engine:
        ingest(engine)
    for given, fingerprint in (({}, Writer.load(other).fingerprint), ({"writer": "none"}, "")):
        with tiny.engine(tiny.shared_llama(), root, **given) as engine:
            ingest(engine)
            assert engine.manifest.writer == fingerprint
            _, reused = ask(engine, mode="reuse")
            assert reused > 0


def test_an_ingest_says_that_kv_of_another_writer_is_kept_apart(root: Path, tmp_path: Path) -> None:
    other = writers.writer(tiny.llama(), tmp_path / "other", seed=1)
    (first,), documents = writer_files.kept_in(root), [tiny.document(number) for number in NUMBERS]
    for given, now in (
        (str(other), f"with writer {Writer.load(other).fingerprint[:12]}"),
        ("none", "without a writer"),
    ):
        with tiny.engine(tiny.shared_llama(), root, writer=given) as engine:
            before = f"has KV that was encoded with writer {first[:12]}"
            says = f"{before}, and this ingest encodes {now}; both are kept"
            (warning,) = engine.dry_run(documents).warnings
            assert says in warning
            assert f"--namespace {engine.manifest.namespace[:12]} removes the old" in warning
    with tiny.engine(tiny.shared_llama(), root, writer=str(other)) as engine:
        (warning,) = engine.ingest(documents).warnings
        assert f"writer {first[:12]}" in warning
        assert not engine.ingest(documents).warnings  # it is the corpus's by now


def test_an_ingest_says_that_a_writer_was_trained_on_chunks_encoded_otherwise(
    tmp_path: Path,
) -> None:
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    mark_as_writer(folder, "a model", encode_after=1)
    told = "was trained with encode_after 1, and chunks are encoded with encode_after 0"
    for after, expected in ((0, True), (1, False)):
        engine = tiny.engine(
            tiny.shared_llama(), tmp_path / f"kv{after}", writer=str(folder), encode_after=after
        )
        with engine:
            report = engine.ingest([tiny.document(7)]).whole()
        assert any(told in warning for warning in report.warnings) == expected
    kept = Writer.from_bytes(Writer.load(folder).to_bytes(), "the copy")
    assert kept.encode_after == 1


def test_it_is_also_said_of_the_writer_of_a_store_when_encode_after_is_given(root: Path) -> None:
    told = "was trained with encode_after 0, and chunks are encoded with encode_after 1"
    documents = [tiny.document(number) for number in NUMBERS]
    with tiny.engine(tiny.shared_llama(), root, encode_after=1) as engine:
        (warning,) = [each for each in engine.ingest(documents).warnings if told in each]
        assert "; ingest with encode_after 0 (--encode-after 0), or" in warning
    with tiny.engine(tiny.shared_llama(), root) as engine:
        assert not engine.ingest(documents).warnings  # it was said
    (fingerprint,) = writer_files.kept_in(root)
    writer_files.remove(root, fingerprint)
    with tiny.engine(tiny.shared_llama(), root, encode_after=1) as engine:
        assert not engine.ingest(documents).warnings  # they need no writer


def test_a_writer_that_does_not_say_was_trained_on_chunks_encoded_alone(tmp_path: Path) -> None:
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    (folder / MARK).write_text('{"model": "a model"}')
    with tiny.engine(
        tiny.shared_llama(), tmp_path / "kv", writer=str(folder), encode_after=1
    ) as engine:
        (warning,) = engine.ingest([tiny.document(7)]).warnings
    assert "was trained with encode_after 0, and" in warning


def test_two_engines_with_different_writers_share_a_model_and_a_store(
    root: Path, folder: Path, tmp_path: Path
) -> None:
    model = tiny.llama()
    other = writers.writer(model, tmp_path / "other", seed=1)
    ids = tiny.random_ids(24)[0].tolist()
    with (
        tiny.engine(model, root, writer=str(folder)) as one,
        tiny.engine(model, root, writer=str(other)) as two,
        ThreadPoolExecutor(2) as threads,
    ):

        def encoded(engine: BlendEngine) -> list[torch.Tensor]:
            validity = engine.kv_namespace.validity
            return [
                torch.cat(
                    [layer.flatten() for layer in validity.encode_chunk(name, ids, ()).layers]
                )
                for name in [validity.namespace] * 6
            ]

        ran = [threads.submit(encoded, engine) for engine in (one, two)]
        for job, seed in zip(ran, (0, 1), strict=True):
            expected = writers.by_peft(writers.with_lora(tiny.llama(), seed), (), ids)
            wanted = torch.cat([layer.flatten() for layer in expected.layers])
            assert all((found - wanted).abs().max() < 1e-5 for found in job.result())


def test_a_directory_that_changes_while_an_engine_runs_is_not_read_again(
    tmp_path: Path, folder: Path
) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", writer=str(folder)) as engine:
        first = engine.kv_namespace.writer.fingerprint
        shutil.rmtree(folder)
        writers.writer(tiny.llama(), folder, seed=1)
        ingest(engine)
        assert engine.manifest.writer == first
        assert ask(engine, mode="reuse")[1] > 0
    assert writer_files.kept_in(tmp_path / "store") == [first]
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", writer=str(folder)) as engine:
        assert engine.kv_namespace.writer.fingerprint != first


def test_what_is_learned_without_a_writer_leaves_that_of_the_store(
    root: Path, folder: Path
) -> None:
    passage = "\n\n".join(tiny.sentence(900 + i) for i in range(6))
    with tiny.engine(tiny.shared_llama(), root, writer="none", learn=True) as engine:
        learned = 0
        for question in ("What was built?", "Who built it?", "And when?"):
            learned += engine.generate(f"{passage}\n\n{question}").metrics.learned_tokens
            engine.drain()
        assert learned
    with tiny.engine(tiny.shared_llama(), root) as engine:
        assert engine.manifest.writer == Writer.load(folder).fingerprint
        assert ask(engine, mode="reuse")[1] > 0


def test_a_variable_names_the_writer(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLENDRAG_WRITER", str(folder))
    settings.cache_clear()
    try:
        with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
            assert engine.kv_namespace.writer.fingerprint == Writer.load(folder).fingerprint
    finally:
        settings.cache_clear()


def test_another_process_is_sent_the_writer(root: Path, tmp_path: Path) -> None:
    """Workers of an ingest on Ray have no store of the driver, and no files of the writer."""
    with tiny.engine(tiny.shared_llama(), root) as engine:
        kv = engine.kv_namespace
        options = {"tokenizer": tiny.tokenizer(), "writer": kv.writer.sent()}
        there = opened_namespace(
            tiny.llama(), tmp_path / "worker", kv.settings, options, engine.manifest
        )
        assert there.validity.namespace == kv.validity.namespace
        there.writer.keep()
        there.close()
    assert writer_files.kept_in(tmp_path / "worker") == writer_files.kept_in(root)


def test_an_archive_carries_the_writer(root: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    assert maintenance.export_archive(root, archive).writers == 1
    report = maintenance.import_archive(other, archive)
    assert (report.is_complete, report.writers) == (True, 1)
    (fingerprint,) = writer_files.kept_in(other)
    assert Writer.load(writer_files.path_of(other, fingerprint)).fingerprint == fingerprint


def test_an_ingest_that_finds_imported_kv_records_its_writer(
    root: Path, folder: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    maintenance.export_archive(root, archive)
    maintenance.import_archive(other, archive)
    assert {each.writer for each in maintenance.survey(other).namespaces} == {None}
    with tiny.engine(tiny.shared_llama(), other, writer=str(folder)) as engine:
        assert engine.ingest([tiny.document(number) for number in NUMBERS]).chunks_computed == 0
    (fingerprint,) = writer_files.kept_in(root)
    assert {each.writer for each in maintenance.survey(other).namespaces} == {fingerprint}


def test_an_archive_leaves_out_a_writer_that_cannot_be_read(root: Path, tmp_path: Path) -> None:
    (fingerprint,) = writer_files.kept_in(root)
    file = writer_files.path_of(root, fingerprint)
    file.unlink()
    file.mkdir()
    report = maintenance.export_archive(root, tmp_path / "kv.tar")
    assert report.writers == 0
    assert report.payloads > 0
    assert [each.partition(":")[0] for each in report.left_out] == [
        writer_files.member_of(fingerprint)
    ]


@pytest.mark.parametrize("damage", [Path.unlink, flip, lambda file: file.write_bytes(b"")])
def test_an_import_replaces_a_damaged_writer(root: Path, tmp_path: Path, damage: Damage) -> None:
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    maintenance.export_archive(root, archive)
    maintenance.import_archive(other, archive)
    (fingerprint,) = writer_files.kept_in(root)
    file = writer_files.path_of(other, fingerprint)
    damage(file)
    report = maintenance.import_archive(other, archive)
    assert (report.is_complete, report.writers) == (True, 1)
    assert file.read_bytes() == writer_files.read(root, fingerprint)


@pytest.mark.parametrize("damage", [flip, lambda file: file.write_bytes(b"")])
def test_an_archive_leaves_out_a_damaged_writer(root: Path, tmp_path: Path, damage: Damage) -> None:
    (fingerprint,) = writer_files.kept_in(root)
    damage(writer_files.path_of(root, fingerprint))
    report = maintenance.export_archive(root, tmp_path / "kv.tar")
    assert report.writers == 0
    assert report.payloads > 0
    (left_out,) = report.left_out
    assert left_out.startswith(f"{writer_files.member_of(fingerprint)}: the writer is damaged")
    assert maintenance.import_archive(tmp_path / "other", tmp_path / "kv.tar").is_complete


def test_an_import_rejects_a_damaged_writer_and_keeps_a_whole_one(
    root: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "kv.tar", tmp_path / "other"
    maintenance.export_archive(root, archive)
    (fingerprint,) = writer_files.kept_in(root)
    whole = writer_files.read(root, fingerprint)
    archive.write_bytes(archive.read_bytes().replace(whole[-64:], bytes(64)))
    report = maintenance.import_archive(other, archive)
    assert (report.is_complete, report.writers, report.stopped) == (False, 0, "")
    assert report.imported > 0
    (rejected,) = report.rejected
    assert rejected.startswith(f"{writer_files.member_of(fingerprint)}: the writer is damaged")
    assert writer_files.kept_in(other) == []
    report = maintenance.import_archive(root, archive)  # which has it
    assert (report.is_complete, report.writers) == (True, 1)
    assert writer_files.read(root, fingerprint) == whole


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
)
def test_the_file_of_a_writer_is_verified_for_every_dtype(folder: Path, dtype: str) -> None:
    like = getattr(torch, dtype)
    given = Writer.load(folder)
    parts = {
        name: part._replace(down=part.down.to(like), up=part.up.to(like))
        for name, part in given.parts.items()
    }
    made = Writer(parts, "a model")
    data = made.to_bytes()
    assert writer_files.is_whole(data, made.fingerprint)
    assert Writer.from_bytes(data, "the copy").fingerprint == made.fingerprint
    assert writer_files.is_whole(data, given.fingerprint) == (dtype == "float32")


def test_a_writer_is_whole_if_an_engine_would_take_it(root: Path) -> None:
    (fingerprint,) = writer_files.kept_in(root)
    file = writer_files.path_of(root, fingerprint)
    data = replace(kept_writer(root, fingerprint), model_id="someone/model").to_bytes()
    generator, seen = random.Random(1), set()
    header = generator.sample(range(8 + int.from_bytes(data[:8], "little")), 60)
    for place in [*header, *generator.sample(range(len(data)), 10), data.index(b"someone/model")]:
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        file.write_bytes(changed)
        try:
            is_taken = kept_writer(root, fingerprint) is not None
        except ModelLoadError:
            is_taken = False
        assert writer_files.has_whole(root, fingerprint) == is_taken, place
        seen.add(is_taken)
    assert seen == {True, False}  # the name of the model changes no KV


# -- writers that nothing needs any more --------------------------------------------------------------


def chunks_of(root: Path, fingerprint: str) -> int:
    """Chunks of the namespaces of a writer, without those that are never evicted."""
    found = maintenance.survey(root).namespaces
    return sum(each.chunks - each.pinned for each in found if each.writer == fingerprint)


@pytest.fixture
def both(root: Path, tmp_path: Path) -> tuple[str, str]:
    """Fingerprints of the first writer of the store, and of the one that took its place."""
    (first,) = writer_files.kept_in(root)
    other = writers.writer(tiny.llama(), tmp_path / "other", seed=1)
    with tiny.engine(tiny.shared_llama(), root, writer=str(other)) as engine:
        ingest(engine)
        return first, engine.manifest.writer


def clear_chunks(root: Path, fingerprint: str) -> None:
    """As an eviction does, which leaves what is pinned."""
    for each in maintenance.survey(root).namespaces:
        if each.writer == fingerprint:
            maintenance.clear(root, each.namespace)


def test_a_survey_says_which_writer_encoded_a_namespace(
    root: Path, both: tuple[str, str], tmp_path: Path
) -> None:
    with tiny.engine(tiny.shared_llama(), root, writer="none") as engine:
        ask(engine)
        engine.drain()  # stock KV of the same chunks
    found = maintenance.survey(root)
    assert {each.writer for each in found.namespaces} >= {*both, ""}
    assert {each.writer for each in found.writers} == {*both}
    for each in found.writers:
        assert each.size_bytes == writer_files.path_of(root, each.writer).stat().st_size


def test_a_writer_stays_while_there_is_kv_of_it_or_the_corpus_names_it(
    root: Path, both: tuple[str, str]
) -> None:
    first, second = both
    assert chunks_of(root, first)
    assert remove_unused_writers(root) == ()
    clear_chunks(root, second)  # the corpus needs it to encode them again
    assert remove_unused_writers(root) == ()
    clear_chunks(root, first)
    assert remove_unused_writers(root) == (first,)
    assert writer_files.kept_in(root) == [second]
    with tiny.engine(tiny.shared_llama(), root) as engine:
        ingest(engine)
        assert ask(engine, mode="reuse")[1] > 0


def test_no_writer_is_removed_while_some_kv_may_be_of_any(
    root: Path, both: tuple[str, str]
) -> None:
    """As KV that was imported, or stored by an earlier version."""
    first, _ = both
    (unnamed,) = {e.namespace for e in maintenance.survey(root).namespaces if e.writer == first}
    (root / "verified" / f"{unnamed}.loaded.json").unlink()
    assert None in {each.writer for each in maintenance.survey(root).namespaces}
    assert remove_unused_writers(root) == ()


def test_a_writer_that_an_ingest_is_about_to_name_is_there_afterwards(
    root: Path, both: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although gc looked just before, when the corpus named another one."""
    first, _ = both
    clear_chunks(root, first)
    named = Corpus.set_manifest

    def collected(corpus: Corpus, manifest: Manifest) -> None:
        if manifest.writer == first:
            assert writer_files.is_kept(root, first)
            writer_files.remove(root, first)
        named(corpus, manifest)

    monkeypatch.setattr(Corpus, "set_manifest", collected)
    with tiny.engine(tiny.shared_llama(), root, writer=str(folder)) as engine:
        ingest(engine)
    assert writer_files.is_kept(root, first)


def test_a_dry_run_names_the_writer(root: Path, folder: Path) -> None:
    with tiny.engine(tiny.shared_llama(), root) as engine:
        assert engine.dry_run([tiny.document(7)]).writer == Writer.load(folder).fingerprint


# -- a writer that is lost or wrong -----------------------------------------------------------------


@pytest.mark.parametrize("damage", [Path.unlink, flip, lambda file: file.write_bytes(b"")])
def test_stored_kv_is_used_although_its_writer_is_lost(root: Path, damage: Damage) -> None:
    (fingerprint,) = writer_files.kept_in(root)
    damage(writer_files.path_of(root, fingerprint))
    with tiny.engine(tiny.shared_llama(), root) as engine:
        _, reused = ask(engine, mode="reuse")
        assert reused > 0
        keys = tiny.chunk_keys(engine, 0)
        tiny.lose_kv(engine, *keys)
        answer = engine.generate(tiny.prompt(engine, *NUMBERS))
        engine.drain()
        assert answer.metrics.reused_tokens > 0
        assert any("computed and not stored: writer" in note for note in answer.metrics.notes)
        assert not engine.store.where(engine.kv_namespace.validity.namespace, keys)


def test_beginnings_of_prompts_are_stored_although_the_writer_is_lost(root: Path) -> None:
    """The model alone encodes them."""
    (fingerprint,) = writer_files.kept_in(root)
    writer_files.remove(root, fingerprint)
    before = {*root.rglob("*.kv")}
    with tiny.engine(tiny.shared_llama(), root) as engine:
        full, _ = ask(engine, mode="full")
        for _ in range(2):  # a beginning is stored when it comes back
            found, _ = ask(engine, ratio=1.0)
            engine.drain()
        assert {*root.rglob("*.kv")} - before
    with tiny.engine(tiny.shared_llama(), root) as engine:
        found, reused = ask(engine, ratio=1.0)
        assert reused > 0
        assert tiny.difference(found, full) < 1e-4


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_machine_that_computes_other_kv_uses_none_of_a_writer(root: Path, is_lost: bool) -> None:
    (fingerprint,) = writer_files.kept_in(root)
    if is_lost:
        writer_files.path_of(root, fingerprint).unlink()
    model, before = tiny.llama(), sorted(root.rglob("*.kv"))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    with tiny.engine(model, root) as engine:
        answer = engine.generate(tiny.prompt(engine, *NUMBERS))
        assert answer.metrics.reused_tokens == 0
        assert any("computes different KV" in note for note in answer.metrics.notes)
        if is_lost:
            with tiny.refuses("is missing.*--writer.*or none", ModelLoadError):
                ingest(engine)
            assert sorted(root.rglob("*.kv")) == before
        else:
            ingest(engine)
            assert ask(engine, mode="reuse")[1] > 0


def test_a_chunk_is_encoded_with_the_writer_of_its_namespace(root: Path, tmp_path: Path) -> None:
    """Although another engine's ingest changes the writer of the corpus just then."""
    other = writers.writer(tiny.llama(), tmp_path / "other", seed=1)
    with tiny.engine(tiny.shared_llama(), tmp_path / "second", writer=str(other)) as second:
        ingest(second)
    shutil.copytree(tmp_path / "second" / "writers", root / "writers", dirs_exist_ok=True)
    with tiny.engine(tiny.shared_llama(), root) as engine:
        kv = engine.kv_namespace
        first, corpus = kv.writer.fingerprint, kv.corpus.current
        assert corpus is not None
        corpus.set_manifest(replace(corpus.manifest, writer=Writer.load(other).fingerprint))
        ids = tiny.random_ids(12)[0].tolist()
        with kv.writer.active(engine.adapter, first, 0, len(ids)):
            found = engine.adapter.encode((), ids)
    expected = writers.by_peft(writers.with_lora(tiny.llama()), (), ids)
    for one, wanted in zip(found.layers, expected.layers, strict=True):
        assert (one - wanted).abs().max() < 1e-5


def test_chunks_are_not_exact_for_a_request_that_began_with_the_writer(root: Path) -> None:
    """Although an ingest takes it from the corpus just then."""
    with tiny.engine(tiny.shared_llama(), root) as engine:
        kv = engine.kv_namespace
        namespace, corpus = kv.validity.namespace, kv.corpus.current
        assert corpus is not None
        corpus.set_manifest(replace(corpus.manifest, writer=""))
        assert kv.validity.recipe_of(namespace).writer
        assert kv.validity.recipe_of(kv.validity.namespace).is_exact


def test_a_writer_of_the_store_that_does_not_fit_the_model_is_named_in_a_note(root: Path) -> None:
    with tiny.engine(tiny.llama(hidden_size=64), root) as engine:
        engine.generate(tiny.prompt(engine, 0))
        engine.drain()  # nothing can be encoded
        notes = engine.generate(tiny.prompt(engine, 0)).metrics.notes
        assert any("not stored: writer" in n and "for this model, or none" in n for n in notes)


def test_an_ingest_without_its_writer_says_what_to_do_and_loses_nothing(
    root: Path, folder: Path
) -> None:
    (fingerprint,) = writer_files.kept_in(root)
    writer_files.path_of(root, fingerprint).unlink()
    with tiny.engine(tiny.shared_llama(), root) as engine:
        with tiny.refuses("is missing.*--writer.*or none", ModelLoadError):
            engine.ingest([tiny.document(9)])
        assert ask(engine, mode="reuse")[1] > 0
    with tiny.engine(tiny.shared_llama(), root, writer=str(folder)) as engine:
        engine.ingest([tiny.document(9)]).whole()
    assert writer_files.kept_in(root) == [fingerprint]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "there is no writer"),
        (lambda folder: (folder / MARK).unlink(), "not trained as a writer"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "damaged"),
    ],
)
def test_a_writer_that_cannot_be_read_is_refused_before_anything_is_stored(
    root: Path, tmp_path: Path, damage: Damage, says: str
) -> None:
    other = writers.writer(tiny.llama(), tmp_path / "other", seed=1)
    damage(other)
    before = sorted(root.rglob("*.kv"))
    for run in (lambda engine: engine.ingest([tiny.document(9)]), BlendEngine.open):
        with (
            tiny.refuses(says, ModelLoadError),
            tiny.engine(tiny.shared_llama(), root, writer=str(other)) as engine,
        ):
            run(engine)
    assert sorted(root.rglob("*.kv")) == before
    with tiny.engine(tiny.shared_llama(), root) as engine:
        assert ask(engine, mode="reuse")[1] > 0


def test_a_writer_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with tiny.refuses("there is no writer 'nosuch'", ModelLoadError):
        BlendEngine("demo", tmp_path / "store", writer="nosuch")
    assert not (tmp_path / "store").exists()


def test_a_writer_of_another_model_is_refused_when_the_model_is_opened(
    root: Path, tmp_path: Path
) -> None:
    other = writers.writer(tiny.llama(hidden_size=64), tmp_path / "other")
    with tiny.engine(tiny.shared_llama(), root, writer=str(other)) as engine:
        for call in (engine.open, lambda: engine.ingest([tiny.document(0)])):
            with tiny.refuses("does not fit", ModelLoadError):
                call()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_refused_writer_leaves_no_new_store(is_damaged: bool, tmp_path: Path) -> None:
    folder = writers.writer(tiny.llama(hidden_size=64), tmp_path / "other")
    if is_damaged:
        (folder / WEIGHTS).write_bytes(b"")
    with tiny.engine(tiny.shared_llama(), tmp_path / "store", writer=str(folder)) as engine:
        calls: list[Callable[[], object]] = [
            lambda: engine.ingest([tiny.document(0)]),
            lambda: engine.library.add([Entry("one", tiny.sentence(1))]),
            engine.open,
            engine.profile,
        ]
        for call in calls:
            with tiny.refuses(
                "damaged.*copy the writer again" if is_damaged else "does not fit", ModelLoadError
            ):
                call()
    assert not (tmp_path / "store").exists()
