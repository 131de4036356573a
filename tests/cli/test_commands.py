"""Each command with valid input: results on stdout, notes on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands import QUESTION, ask, ingest_args, invoke, refused, reused_tokens, said

# -- ingest and remove ----------------------------------------------------------------------------


def test_dry_run_predicts_the_ingest_and_repeating_an_ingest_computes_nothing(
    ingest: list[str], tmp_path: Path
) -> None:
    args = [*ingest, "--json"]
    plan = json.loads(invoke(*args, "--dry-run").stdout)
    assert plan | {"documents": 3, "chunks": 9, "failed": 0} == plan
    assert plan["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]
    first = json.loads(invoke(*args).stdout)
    assert first | {"documents": 3, "chunks": 9, "chunks_computed": 9, "failed": 0} == first
    assert first["bytes"] == plan["bytes"] > 0
    assert first["tokens_per_s"] > 0
    again = json.loads(invoke(*args).stdout)
    assert again | {"chunks": 9, "chunks_computed": 0, "chunks_skipped": 9, "bytes": 0} == again
    shown = invoke(*ingest).stdout
    assert shown.startswith("3 documents (3 unchanged), 9 chunks: 0 computed, 9 already stored")
    assert invoke(*ingest, "--dry-run").stdout.startswith("3 documents, 9 chunks, ")


def test_a_store_among_the_documents_is_not_ingested(
    model_dir: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(docs)
    for _ in range(2):
        result = invoke(*ingest_args(Path("."), model_dir, Path("blendrag-store"), "--json"))
        fields = json.loads(result.stdout)
        assert (fields["documents"], fields["skipped"]) == (3, [])


def test_a_prefix_file_is_the_prefix_of_every_chunk(ingest: list[str], tmp_path: Path) -> None:
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("<|bos|><|start|>user\nAnswer the question from the context.\n\n")
    args = [*ingest, "--prefix-file", str(prefix)]
    assert invoke(*args).exit_code == 0
    (chunk,) = ask(tmp_path / "store", "--top-k", "1")["metrics"]["chunks"]
    assert chunk["outcome"] == "exact"
    prefix.write_text("another")
    assert "another prefix" in refused(*args)


def test_a_store_remembers_its_encoding(ingest: list[str], ingested: Path, tmp_path: Path) -> None:
    def payload_bytes(store: Path) -> int:
        return sum(path.stat().st_size for path in (store / "kv").rglob("*.kv"))

    store = tmp_path / "store"
    invoke(*ingest, "--encoding", "int8")
    assert payload_bytes(store) < payload_bytes(ingested)
    assert reused_tokens(store) == reused_tokens(ingested) > 0
    assert json.loads(invoke(*ingest, "--json").stdout)["chunks_computed"] == 0


def test_remove_forgets_documents_and_names_unknown_paths(store: Path) -> None:
    docs = Path(ask(store)["sources"][0]["source"]).parent
    args = ("remove", "--store", str(store))
    missing = str(docs / "missing.txt")
    removed = invoke(*args, missing, str(docs / "d1.txt"), "--json")
    assert removed.exit_code == 1
    assert json.loads(removed.stdout) == {"documents": 1, "failed": [missing]}
    assert said(removed).startswith(f"failed: {missing} is not in the corpus")
    left = ask(store, "--top-k", "9")["sources"]
    assert {Path(s["source"]).name for s in left} == {"d0.txt", "d2.txt"}
    assert "is not in the corpus" in refused(*args, str(docs / "d1.txt"))
    both = invoke(*args, str(docs), str(docs / "d0.txt"))
    assert (both.exit_code, both.stdout) == (0, "2 documents removed\n")


# -- ask and verify -------------------------------------------------------------------------------


def test_ask_in_json_prints_one_object_and_nothing_else(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "6", "--json")
    result = invoke(*args, "--schedule", "constant")
    assert (result.exit_code, result.stderr) == (0, "")
    fields = json.loads(result.stdout)
    assert {"answer", "metrics", "sources"} <= fields.keys()
    assert fields["metrics"]["reused_tokens"] > 0
    assert fields["metrics"]["new_tokens"] == 6
    assert [s for s in fields["sources"] if s["source"].endswith("d2.txt")]


def test_ask_prints_the_answer_and_metrics_on_stderr(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "6")
    shown = invoke(*args)
    answer = ask(ingested, "--max-new-tokens", "6")["answer"]
    assert shown.stdout == f"{answer}\n"
    metrics, note = shown.stderr.splitlines()[-2:]
    assert metrics.startswith("metrics: first token after ")
    assert note.startswith("note: no schedule is calibrated for this model and policy")
    chosen = said(invoke(*args, "--policy", "query", "--schedule", "0.4,0.2"))
    assert chosen.endswith("mode blend, query at ratio 0.15, schedule 0.4,0.2")
    for more in (("--policy", "boundary(3)"), ("--mode", "reuse")):  # these follow no schedule
        assert "schedule" not in said(invoke(*args, *more))


def test_modes_policies_and_schedules_can_be_chosen(ingested: Path) -> None:
    def metrics(options: str) -> dict[str, Any]:
        fields: dict[str, Any] = ask(ingested, *options.split())["metrics"]
        return fields

    assert metrics("--mode full")["reused_tokens"] == 0
    assert metrics("--mode reuse")["recomputed_tokens"] == 0
    blend = metrics("--policy hkvd --schedule constant --ratio 0.5 --top-k 2")
    assert (blend["policy"], blend["schedule"], len(blend["chunks"])) == ("hkvd", "constant", 2)
    assert blend["ratio"] == pytest.approx(0.5, abs=0.05)
    auto = metrics("--ratio auto --min-ratio 0.4 --policy random")
    assert auto["ratio"] == pytest.approx(0.4, abs=0.05)


def test_verify_passes_a_llama(model_dir: Path) -> None:
    result = invoke("verify", str(model_dir), "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert fields["verdict"] == "blendable"
    assert fields["layers"] == ["rotary"] * 3
    assert fields["max_logit_diff"] < 1e-4
    assert fields["subset_logit_diff"] < 1e-4
    assert fields["perturbed_logit_diff"] > 1e-2
    assert fields["greedy_equal"] is True
    shown = invoke("verify", str(model_dir)).stdout
    assert "greedy continuation equal to stock: yes" in shown
