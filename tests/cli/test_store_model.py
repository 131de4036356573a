"""Which model a command takes if it is not named: the store's, never the embedded one."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from blendrag.corpus.corpus import Corpus
from blendrag.engine import BlendEngine
from blendrag.engine.kv_writer import KVWriter
from blendrag.errors import CorpusError
from blendrag.frameworks.engines import shared_engine
from cli.commands import QUESTION, ask, ingest_args, invoke, printed, refused, said, save_model


def without_model(args: list[str]) -> list[str]:
    at = args.index("--model")
    return args[:at] + args[at + 2 :]


def test_a_new_store_needs_a_model_and_says_which_ones_there_are(ingest, tmp_path):
    sentence = refused(*without_model(ingest))
    assert f"store {tmp_path / 'store'} names no model yet" in sentence
    assert "--model Qwen/" in sentence
    assert "--model demo is a toy" in sentence
    asked = refused("ask", QUESTION, "--store", tmp_path / "store")
    assert "check the spelling" in asked
    assert "--model MODEL" in asked
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]


def test_a_store_remembers_its_model_from_the_first_moment(
    ingest, model_dir, tmp_path, monkeypatch
):
    def press_ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KVWriter, "write", press_ctrl_c)
        assert invoke(*ingest).exit_code == 130
    assert invoke(*without_model(ingest)).exit_code == 0
    store = tmp_path / "store"
    with Corpus.open(store, read_only=True) as corpus:
        assert corpus.manifest.model == str(model_dir)
    with BlendEngine(store=store) as engine:
        assert engine.model_name == str(model_dir)
    assert shared_engine(store=store).model_name == str(model_dir)
    with pytest.raises(CorpusError, match="check the spelling"):
        shared_engine(store=tmp_path / "stroe")
    assert ask(store)["metrics"]["reused_tokens"] > 0


def test_a_refused_model_answers_in_mode_full_over_what_it_ingested(refused_dir, docs, tmp_path):
    store = tmp_path / "store"
    for _ in range(2):
        fed = refused(*ingest_args(docs, refused_dir, store), status=3)
        assert "use mode full, or prefix" in fed
        assert "; documents stored without KV: 3; for KV, " in fed
    assert printed("store", "stats", "--store", store)["chunks"] == 0
    assert "use mode full" in said(
        invoke("ask", QUESTION, "--store", store, "--max-new-tokens", "2")
    )
    answer = ask(store, "--mode", "full")
    assert answer["metrics"]["mode"] == "full"
    assert any(source["source"].endswith("d2.txt") for source in answer["sources"])


def test_a_store_that_was_ingested_in_another_dtype_says_why_nothing_is_reused(store):
    (note,) = ask(store, "--dtype", "bfloat16")["metrics"]["notes"]
    assert "as the ingest loaded it, not as " in note
    assert "is loaded here (dtype bfloat16, not float32); they are kept" in note
    assert ask(store)["metrics"]["notes"] == []


def test_a_note_names_the_weights_only_if_they_were_replaced_in_place(docs, tmp_path):
    model, store = save_model(tmp_path / "model"), tmp_path / "store"
    assert invoke(*ingest_args(docs, model, store)).exit_code == 0
    assert ask(store)["metrics"]["notes"] == []
    tiny.llama(
        seed=5, num_hidden_layers=3, max_position_embeddings=1024, eos_token_id=639
    ).save_pretrained(model)
    (note,) = ask(store)["metrics"]["notes"]
    assert note.endswith(
        "is loaded here (its weights have changed); they are kept beside the store's, and reused from the "
        "next question on"
    )
    assert invoke(*ingest_args(docs, model, store)).exit_code == 0
    assert ask(store)["metrics"]["notes"] == []


def test_a_note_names_the_tokenizer_if_it_was_replaced_in_place(docs, tmp_path):
    model, store = save_model(tmp_path / "model"), tmp_path / "store"
    assert invoke(*ingest_args(docs, model, store)).exit_code == 0
    save_model(model, None, "windmill")
    sentence = said(invoke("ask", QUESTION, "--store", store, "--max-new-tokens", "2"))
    assert (
        f"was ingested with model {str(model)!r} and another tokenizer than it has now" in sentence
    )


def test_a_store_without_a_record_of_its_model_names_what_may_differ(store):
    (record,) = (store / "verified").glob("*.loaded.json")
    record.unlink()
    (note,) = ask(store, "--dtype", "bfloat16")["metrics"]["notes"]
    assert "(bfloat16: its weights, dtype, attention or adapter differ); they are kept" in note


def test_a_model_that_is_a_file_is_not_called_a_directory(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr("blendrag.model.loading.unpacked_directory", lambda name: tmp_path)
    assert f"'{file}' is a GGUF file but not a loadable causal LM" in refused("verify", file)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    assert f"'{weights}' is a file, expected a directory" in refused("verify", weights)
