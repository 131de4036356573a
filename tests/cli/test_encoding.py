"""``ingest --encoding``: said once, remembered by the store, refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands import ingest_args, invoke, said, start

QUESTION = "What is the topic of document 2?"


def ask(store: Path) -> dict[str, object]:
    result = invoke("ask", QUESTION, "--store", str(store), "--max-new-tokens", "2", "--json")
    assert result.exit_code == 0, result.stderr
    metrics: dict[str, object] = json.loads(result.stdout)["metrics"]
    return metrics


def payload_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in (store / "kv").rglob("*.kv"))


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_a_store_made_in_an_encoding_is_asked_without_naming_it(
    model_dir: Path, docs: Path, ingested: Path, tmp_path: Path, encoding: str
) -> None:
    store = tmp_path / "store"
    result = invoke(*ingest_args(docs, model_dir, store, "--encoding", encoding, "--json"))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["bytes"] < payload_bytes(store) < payload_bytes(ingested)
    assert ask(store)["reused_tokens"] == ask(ingested)["reused_tokens"]
    again = invoke(*ingest_args(docs, model_dir, store, "--json"))
    assert json.loads(again.stdout)["chunks_computed"] == 0


def test_another_encoding_for_a_store_that_has_one_is_one_sentence(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    result = invoke(*ingest_args(docs, model_dir, store, "--encoding", "int8"))
    assert result.exit_code == 2
    assert "in encoding native, not int8; leave --encoding out" in said(result)
    assert int(str(ask(store)["reused_tokens"])) > 0


def test_an_unknown_encoding_is_refused_before_anything_is_made(
    model_dir: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    result = invoke(*ingest_args(docs, model_dir, store, "--encoding", "zip"))
    assert result.exit_code == 2
    assert "'zip' is not one of native, int8, fp8" in result.stderr
    monkeypatch.setenv("BLENDRAG_KV_ENCODING", "zip")
    result = invoke(*ingest_args(docs, model_dir, store))
    assert result.exit_code == 2
    assert "BLENDRAG_KV_ENCODING=zip" in said(result)
    assert not store.exists()


def test_two_ingests_that_begin_a_store_in_two_encodings_at_once_leave_one(
    model_dir: Path, docs: Path, ingested: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    both = [
        start(*ingest_args(docs, model_dir, store, "--encoding", encoding, "--json"))
        for encoding in ("int8", "fp8")
    ]
    ended = [(process.communicate(timeout=200), process.returncode) for process in both]
    assert sorted(code for _, code in ended) == [0, 2], ended
    for (_, stderr), code in ended:
        if code:
            (line,) = stderr.strip().splitlines()
            assert "encoding" in line
            assert "--store" in line
    assert ask(store)["reused_tokens"] == ask(ingested)["reused_tokens"]
    again = invoke(*ingest_args(docs, model_dir, store, "--json"))
    assert json.loads(again.stdout)["chunks_computed"] == 0
