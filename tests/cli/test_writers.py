"""``--writer``: an ingest with it, and commands over the store that need no option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
import writers
from blendrag.model.writer import Writer
from blendrag.store import writer_files
from cli.commands import ingest_args, invoke, printed, refused, reused_tokens, write_documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.llama(num_hidden_layers=3, max_position_embeddings=1024, eos_token_id=639)
    return writers.writer(model, tmp_path_factory.mktemp("writer"))


def test_a_store_that_was_ingested_with_a_writer_needs_no_option(
    model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    fingerprint, store = Writer.load(folder).fingerprint, tmp_path / "store"
    args = ingest_args(write_documents(tmp_path / "docs"), model_dir, store)
    args += ["--writer", str(folder)]
    assert printed(*args, "--dry-run")["writer"] == fingerprint
    assert invoke(*args).exit_code == 0
    assert printed("store", "stats", "--store", store)["corpus"]["writer"] == fingerprint
    shown = invoke("store", "stats", "--store", store).stdout
    assert f"encoded with writer {fingerprint[:12]}" in shown
    assert reused_tokens(store) > 0


def test_stats_name_the_writer_of_each_namespace_and_gc_removes_unused_ones(
    model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    fingerprint, store = Writer.load(folder).fingerprint, tmp_path / "store"
    args = ingest_args(write_documents(tmp_path / "docs"), model_dir, store)
    for given in (str(folder), "none"):
        assert invoke(*args, "--writer", given).exit_code == 0
    found = printed("store", "stats", "--store", store)
    assert {each["writer"] for each in found["namespaces"]} == {fingerprint, ""}
    (kept,) = found["writers"]
    assert (kept["writer"], kept["needed"]) == (fingerprint, True)
    assert f", writer {fingerprint[:12]}: " in invoke("store", "stats", "--store", store).stdout
    assert printed("store", "gc", "--store", store)["writers"] == []

    assert printed("store", "gc", "--max-bytes", "0", "--store", store, "--json")["left"] > 0
    assert printed("store", "stats", "--store", store)["writers"] == []


def test_stats_say_that_a_writer_is_not_needed(
    model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    args = ingest_args(write_documents(tmp_path / "docs"), model_dir, store)
    assert invoke(*args, "--writer", "none").exit_code == 0
    writer = Writer.load(folder)
    writer_files.write(store, writer.fingerprint, writer.to_bytes())
    shown = invoke("store", "stats", "--store", store).stdout
    assert "not needed any more; blendrag store gc removes it" in shown
    assert "; 1 unused writer removed" in invoke("store", "gc", "--store", store).stdout
    assert not printed("store", "gc", "--store", store)["writers"]


def test_a_store_whose_chunks_were_encoded_after_others_needs_no_option(
    model_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    args = ingest_args(write_documents(tmp_path / "docs"), model_dir, store)
    assert printed(*args, "--dry-run")["encode_after"] == 0
    assert printed(*args, "--encode-after", 2, "--dry-run")["encode_after"] == 2
    report = printed(*args, "--encode-after", 2)
    assert report["context_tokens"] > 0
    shown = invoke("store", "stats", "--store", store).stdout
    assert "each encoded after 2 other chunks" in shown
    assert printed("store", "stats", "--store", store)["corpus"]["encode_after"] == 2
    assert reused_tokens(store) > 0
    assert printed(*args)["chunks_computed"] == 0


def test_stats_name_the_model_and_encode_after_of_each_namespace(
    model_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    args = ingest_args(write_documents(tmp_path / "docs"), model_dir, store)
    for after in (0, 1, 2):
        assert invoke(*args, "--encode-after", after).exit_code == 0
    found = printed("store", "stats", "--store", store)["namespaces"]
    assert sorted(each["encode_after"] for each in found) == [0, 1, 2]
    assert [each["model"] for each in found] == 3 * [str(model_dir)]
    shown = invoke("store", "stats", "--store", store).stdout
    for after, words in (
        (0, ""),
        (1, ", each after 1 similar chunk"),
        (2, ", each after 2 similar chunks"),
    ):
        (namespace,) = (each["namespace"] for each in found if each["encode_after"] == after)
        assert f"  {namespace[:12]}  {model_dir}, float32, native{words}: " in shown

    damaged = {"model_id": 3, "writer": [], "encode_after": "2"}
    for each in found:
        record = store / "verified" / f"{each['namespace']}.loaded.json"
        record.write_text(json.dumps({"loaded": [{"identity": damaged}]}))
    unknown = printed("store", "stats", "--store", store)["namespaces"]
    assert {(each["writer"], each["encode_after"]) for each in unknown} == {(None, None)}
    shown = invoke("store", "stats", "--store", store).stdout
    assert shown.count("model unknown") == 2  # the corpus names that of its own


def test_none_goes_back_to_no_writer(
    model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    args = ingest_args(write_documents(tmp_path / "docs"), model_dir, store)
    assert invoke(*args, "--writer", str(folder)).exit_code == 0
    assert printed(*args, "--writer", "none", "--dry-run")["writer"] == ""
    monkeypatch.setenv("BLENDRAG_WRITER", "none")
    assert printed(*args, "--dry-run")["writer"] == ""
    assert invoke(*args).exit_code == 0
    assert printed("store", "stats", "--store", store)["corpus"]["writer"] is None


def test_verify_says_whether_a_writer_fits(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    found = printed("verify", model_dir, "--writer", folder)
    assert found["writer"]["fingerprint"] == Writer.load(folder).fingerprint
    assert "fits this model" in invoke("verify", model_dir, "--writer", folder).stdout
    other = writers.writer(tiny.llama(hidden_size=64), tmp_path / "other")
    assert "does not fit" in refused("verify", model_dir, "--writer", other)
    assert "not the directory of a writer" in refused("verify", model_dir, "--writer", tmp_path)
