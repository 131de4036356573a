"""``blendrag eval``: what it prints and refuses, and how it continues after Ctrl-C."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
import writers
from blendrag.cli.progress import StatusLine
from blendrag.config import settings
from blendrag.corpus.corpus import Corpus
from blendrag.model.writer import mark_as_writer
from blendrag.planning.calibrate import Calibration, calibrations
from blendrag_lab.evaluation import ways
from blendrag_lab.evaluation.ways import Way
from cli.commands import ingest_args, invoke, refused, save_model, write_documents
from embedding_once import each_text_is_embedded_once

ROW = {
    "dataset", "seed", "policy", "schedule", "encode_prefix", "ratio", "charged_ratio", "kind", "n",
    "score", "pgr", "pgr_low", "pgr_high", "kl", "ttft_ms",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _each_text_is_embedded_once() -> Iterator[None]:
    with each_text_is_embedded_once():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    return str(save_model(folder, tiny.llama(num_hidden_layers=3, eos_token_id=639)))


def small(model: str, *more: str) -> list[str]:
    return [
        "eval", "--model", model, "--chunks", "2", "--contexts", "1", "--questions", "2",
        "--max-new-tokens", "3", *more,
    ]  # fmt: skip


def rows(*args: str) -> list[dict[str, Any]]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def set_embedder(store: Path, name: str) -> None:
    """Have the corpus of ``store`` say that its vectors are of that embedder."""
    with Corpus.open(store) as corpus:
        manifest = replace(corpus.manifest, embedder=name)
        corpus.file.set_meta("manifest", manifest.to_json())


def test_json_is_a_list_of_rows_by_policy_and_kind(model):
    found = rows(
        *small(model, "--policies", "full,reuse,hkvd,query", "--ratio", "0.15", "--seed", "123")
    )
    assert all(set(row) >= ROW for row in found)
    assert [(row["policy"], row["kind"]) for row in found] == [
        (policy, kind)
        for policy in ("none", "full", "reuse", "hkvd", "query")
        for kind in ("all", *dict.fromkeys(r["kind"] for r in found if r["kind"] != "all"))
    ]
    assert {(row["dataset"], row["seed"]) for row in found} == {("synthetic", 123)}
    assert {row["ratio"] for row in found if row["policy"] == "hkvd"} == {0.15}
    assert not list(settings().cache.rglob("*.jsonl"))  # a complete run leaves nothing
    charged = {row["policy"]: row["charged_ratio"] for row in found if row["kind"] == "all"}
    assert charged["hkvd"] > 1.2 * charged["query"]  # equal r is not equal cost


def test_every_dimension_can_be_listed(model):
    found = rows(
        *small(model, "--policies", "query", "--ratio", "0.1", "--ratio", "0.2", "--contexts", "1",
               "--questions", "1", "--schedules", "linear,geometric:0.5", "--encode-prefix", "on,off")
    )  # fmt: skip
    fields = ("ratio", "encode_prefix", "schedule")
    ways = {tuple(r[field] for field in fields) for r in found if r["policy"] == "query"}
    assert ways == set(itertools.product((0.1, 0.2), (True, False), ("linear", "geometric:0.5")))


def test_a_list_of_numbers_is_one_schedule(model):
    how = ("--contexts", "1", "--questions", "1", "--schedules", "0.4,0.1")
    found = rows(*small(model, "--policies", "query", *how))
    assert {row["schedule"] for row in found if row["policy"] == "query"} == {"0.4,0.1"}


def test_a_file_is_asked_over_its_own_passages_or_an_ingested_corpus(model, tmp_path):
    store, docs = tmp_path / "store", write_documents(tmp_path / "docs")
    assert invoke(*ingest_args(docs, model, store)).exit_code == 0
    asked = tmp_path / "own.jsonl"
    bare = {"question": "What is topic 7?", "answers": ["x"]}
    whole = {**bare, "ctxs": [{"title": "", "text": tiny.sentence(i)} for i in range(4)]}
    asked.write_text(f"{json.dumps(bare)}\n{json.dumps(whole)}\n", encoding="utf-8")
    args = ["eval", "--dataset", str(asked), "--policies", "reuse", "--max-new-tokens", "2"]
    found = rows(  # --model is the store's
        *args, "--store", str(store), "--chunks", "3", "--embedder", "minilm-offline"
    )
    fields = ("dataset", "metric", "n", "n_chunks", "chunk_tokens")
    assert {tuple(row[field] for field in fields) for row in found} == {("own", "f1", 2, 3, 64)}
    sentence = refused(*args, "--model", model)
    assert "has no text context, but the fields question, answers; expected" in sentence
    assert "or {question, answers} with --store" in sentence


def test_prompts_are_worded_by_the_option_or_the_environment(model, tmp_path, monkeypatch):
    out = tmp_path / "kept.jsonl"
    args = small(model, "--policies", "full", "--questions", "1", "--out", str(out))

    def kept(*more: str) -> int:
        rows(*args, *more)
        return len(out.read_text().splitlines())

    short = kept()
    worded = kept("--prompt-template", "{context} So: {question}")
    assert worded == 2 * short  # asked anew
    monkeypatch.setenv("BLENDRAG_PROMPT_TEMPLATE", "{context} So: {question}")
    assert kept() == worded
    assert kept("--prompt-template", "{context} Then: {question}") == 3 * short


def test_a_task_is_in_the_rows_and_in_every_kept_answer(model, tmp_path):
    out = tmp_path / "kept.jsonl"
    task = (
        "--dataset",
        "tables",
        "--chunk-tokens",
        "128",
        "--policies",
        "reuse",
        "--out",
        str(out),
    )
    assert {(row["dataset"], row["metric"]) for row in rows(*small(model, *task))} == {
        ("tables", "f1")
    }
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(one["dataset"], one["model"]) for one in kept} == {("tables", model)}
    assert {one["kind"] for one in kept} <= {"look-up", "comparison"}
    assert "expected synthetic, code, long, tables, chat, or a JSON" in refused(
        *small(model, "--dataset", "coed")
    )
    assert "take fewer --chunks" in refused(*small(model, *task, "--chunks", "60"))


def test_a_writer_is_compared_with_none_and_a_store_brings_its_own(model, tmp_path):
    given = tiny.llama(num_hidden_layers=3, eos_token_id=639)
    writer, store = str(writers.writer(given, tmp_path / "w")), tmp_path / "store"
    docs = write_documents(tmp_path / "docs")
    assert invoke(*ingest_args(docs, model, store, "--writer", writer)).exit_code == 0
    asked = tmp_path / "own.jsonl"
    asked.write_text('{"question": "What is topic 7?", "answers": ["x"]}\n', encoding="utf-8")
    args = (
        "eval", "--dataset", str(asked), "--store", str(store), "--policies", "reuse",
        "--max-new-tokens", "2", "--embedder", "minilm-offline", "--fidelity",
    )  # fmt: skip
    of_store, of_option, without = (
        {row["policy"]: row["token_kl"] for row in rows(*args, *more) if row["kind"] == "all"}
        for more in ((), ("--writer", writer), ("--writer", "none"))
    )
    assert list(of_store) == ["none", "full", "reuse", "reuse+writer"]
    assert of_store == of_option
    assert without == {name: of_store[name] for name in ("none", "full", "reuse")}


def test_similar_chunks_are_as_many_as_the_option_the_environment_or_the_store_says(
    model, tmp_path, monkeypatch
):
    store, docs = tmp_path / "store", write_documents(tmp_path / "docs", documents=1)
    assert invoke(*ingest_args(docs, model, store, "--encode-after", "2")).exit_code == 0
    args = small(model, "--policies", "reuse", "--fidelity", "--questions", "1")

    def ways(*more: str) -> list[str]:
        found = rows(*args, *more)
        return [row["policy"] for row in found if row["kind"] == "all"][2:]

    kept = ("--store", str(store))
    assert ways(*kept) == ["reuse", "reuse+after2"]
    assert ways(*kept, "--encode-after", "0") == ["reuse"]
    monkeypatch.setenv("BLENDRAG_ENCODE_AFTER", "1")
    assert ways(*kept) == ways() == ["reuse", "reuse+after1"]
    assert ways("--encode-after", "0") == ["reuse"]


def test_similar_chunks_are_found_with_the_embedder_that_is_named_or_set_or_the_stores(
    model, tmp_path, monkeypatch
):
    store, docs = tmp_path / "store", write_documents(tmp_path / "docs", documents=1)
    assert invoke(*ingest_args(docs, model, store)).exit_code == 0
    set_embedder(store, "no/stores")
    asked = small(model, "--policies", "reuse", "--encode-after", "1")
    kept = ("--store", str(store))
    assert "embedder 'no/option'" in refused(*asked, "--embedder", "no/option")
    assert "embedder 'no/stores'" in refused(*asked, *kept)
    assert "was embedded with 'no/stores'" in refused(*asked, *kept, "--embedder", "no/option")
    monkeypatch.setenv("BLENDRAG_EMBEDDER", "no/setting")
    assert "embedder 'no/setting'" in refused(*asked)


def test_passages_are_chosen_by_the_embedder_of_the_store_unless_its_vectors_were_given(
    model, tmp_path
):
    store, docs = tmp_path / "store", write_documents(tmp_path / "docs", documents=1)
    assert invoke(*ingest_args(docs, model, store)).exit_code == 0
    bare = {"question": "What of Place7?", "answers": ["x"]}
    passages = [{"title": "", "text": tiny.sentence(i)} for i in range(4)]

    def args(record: dict[str, Any]) -> list[str]:
        (asked := tmp_path / "own.json").write_text(json.dumps([record]), encoding="utf-8")
        return small(model, "--policies", "reuse", "--dataset", str(asked), "--store", str(store))

    set_embedder(store, "no/stores")
    assert "embedder 'no/stores'" in refused(*args({**bare, "ctxs": passages}))
    set_embedder(store, "given:own")
    assert rows(*args({**bare, "ctxs": passages}))
    assert "were given by the application" in refused(*args(bare))


def test_the_calibration_of_a_store_with_a_writer_is_looked_up(model, tmp_path, monkeypatch):
    given = tiny.llama(num_hidden_layers=3, eos_token_id=639)
    writer, store = str(writers.writer(given, tmp_path / "w")), tmp_path / "store"
    docs = write_documents(tmp_path / "docs", documents=1)
    assert invoke(*ingest_args(docs, model, store, "--writer", writer)).exit_code == 0
    asked: list[str] = []

    def spy(found: Sequence[Way], root: Path, namespace: str) -> Sequence[Way]:
        asked.append(namespace)
        return found

    monkeypatch.setattr(ways, "look_up", spy)
    for more in ((), ("--writer", "none")):
        args = small(model, "--policies", "reuse", "--store", str(store), "--fidelity", *more)
        rows(*args, "--contexts", "1", "--questions", "1")
    with Corpus.open(store, read_only=True) as corpus:
        assert asked[0] == corpus.manifest.namespace != asked[1]


def test_the_calibration_of_a_store_is_found_as_it_encodes_chunks(model, tmp_path):
    store, docs = tmp_path / "store", write_documents(tmp_path / "docs", documents=1)
    encoded = ("--encode-after", "1", "--kv-encoding", "int8")
    assert invoke(*ingest_args(docs, model, store, *encoded)).exit_code == 0
    with Corpus.open(store, read_only=True) as corpus:
        namespace = corpus.manifest.namespace
    found = Calibration("boundary(4)", "query", "boundary(4)", 0.1, 8, 0.0, 1.0, 1.0, 1.0, 0.0)
    calibrations(store, namespace).keep(found)
    args = small(model, "--policies", "calibrated", "--ratio", "0.1", "--questions", "1")
    made = rows(*args, "--store", str(store))
    chosen = {row["policy"]: row["chosen_by"] for row in made if row["kind"] == "all"}
    assert chosen["calibrated"] == chosen["calibrated+after1"] == "boundary(4)"


def test_a_writer_that_cannot_be_used_is_one_sentence(model, tmp_path):
    other = writers.writer(tiny.llama(hidden_size=96), tmp_path / "other")
    reuse = small(model, "--policies", "reuse")
    assert "there is no writer" in refused(*reuse, "--writer", str(tmp_path / "gone"))
    assert "does not fit" in refused(*reuse, "--writer", str(other))
    schema = [*reuse, "--schema", "--writer"]
    assert "with --schema, whose modules are encoded without one" in refused(*schema, str(other))
    assert rows(*schema, "none")


def test_a_writer_that_was_trained_with_another_encode_after_is_a_warning(model, tmp_path):
    given = tiny.llama(num_hidden_layers=3, eos_token_id=639)
    writer = writers.writer(given, tmp_path / "writer")
    mark_as_writer(writer, "a model", encode_after=1)
    args = small(model, "--policies", "reuse", "--fidelity", "--writer", str(writer))
    warnings = []
    for after in ("0", "1"):
        result = invoke(*args, "--encode-after", after)
        assert result.exit_code == 0, result.stderr
        warnings += [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    (warning,) = warnings
    assert "was trained with encode_after 1, and chunks are encoded with encode_after 0" in warning
    assert warning.endswith("; give --encode-after 1")


def test_tables_and_notes_are_printed(model):
    result = invoke(*small(model, "--policies", "full,reuse", "--chunks", "1"))
    assert result.exit_code == 0, result.stderr
    assert "PGR" in result.stdout
    assert "reuse" in result.stdout
    (alone,) = (line for line in result.stderr.splitlines() if line.startswith("note: "))
    assert alone.startswith("note: prompts of one chunk alone: 2 of 2")


@pytest.mark.parametrize(
    ("record", "sentence"),
    [({"prompt": "x"}, "expected {question, answers, ctxs}"),
     ({"question": "why " * 3000, "answers": ["z"], "ctxs": [tiny.sentence(1)]}, "the prompt of"),
     ({"question": "x", "answers": ["z"], "ctxs": ["Yes.", " "]}, "45 letters or more")],
)  # fmt: skip
def test_a_bad_dataset_is_one_sentence(model, tmp_path, record, sentence):
    (tmp_path / "bad.json").write_text(json.dumps([record]), encoding="utf-8")
    assert sentence in refused(*small(model, "--dataset", str(tmp_path / "bad.json")))


def test_encoding_after_similar_chunks_shows_its_progress(model, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(StatusLine, "show", lambda line, text, *given: shown.append(text))
    rows(
        *small(model, "--policies", "reuse", "--encode-after", "1", "--embedder", "minilm-offline")
    )
    encoding = [text for text in shown if text.endswith("% done")]
    assert encoding[0] == "encoding chunks after similar ones, 0% done"
    assert encoding[-1] == "encoding chunks after similar ones, 100% done"
    assert shown[-1] == "2 of 2 questions"


def test_ctrl_c_says_how_to_continue_and_the_same_command_does(model, tmp_path, monkeypatch):
    def show(line: StatusLine, text: str, *given: Any) -> None:
        if text == "2 of 100 questions":
            raise KeyboardInterrupt

    out = tmp_path / "kept.jsonl"
    args = small(model, "--policies", "full", "--out", str(out), "--json", "--contexts", "50")
    with monkeypatch.context() as patch:
        patch.setattr(StatusLine, "show", show)
        interrupted = invoke(*args)
    assert interrupted.exit_code == 130
    last = interrupted.stderr.strip().splitlines()[-1]
    assert last.startswith("interrupted: ")
    assert f"of 100 questions are kept in {out}; repeat the command to go on" in last
    kept = out.read_text()
    rows(*small(model, "--policies", "full", "--out", str(out), "--contexts", "2"))
    found = out.read_text()
    assert found.startswith(kept)
    assert found.count("\n") == max(8, kept.count("\n"))  # nothing is asked twice
