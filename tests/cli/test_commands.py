"""Each command with valid input: results on stdout, notes on stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from blendrag.cli import progress
from blendrag.cli.ask import say_metrics, say_sources
from blendrag.cli.search import _place
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine import BlendEngine
from blendrag.metrics import RequestMetrics
from blendrag.text.readers import Document
from cli.commands import (
    QUESTION,
    ask,
    ingest_args,
    invoke,
    printed,
    refused,
    said,
    write_documents,
)


def test_dry_run_predicts_the_ingest_and_repeating_an_ingest_computes_nothing(
    ingest: list[str], tmp_path: Path
) -> None:
    plan = printed(*ingest, "--dry-run")
    assert plan | {"documents": 3, "chunks": 9, "failed": 0} == plan
    assert plan["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["docs"]
    first = printed(*ingest)
    assert first | {"documents": 3, "chunks": 9, "chunks_computed": 9, "failed": 0} == first
    assert first["bytes"] == plan["bytes"] > 0
    assert first["tokens_per_s"] > 0
    assert 0 < first["encoding_s"] < first["seconds"]
    again = printed(*ingest)
    assert again | {"chunks": 9, "chunks_computed": 0, "chunks_skipped": 9, "bytes": 0} == again
    shown = invoke(*ingest).stdout
    assert shown.startswith("3 documents (3 unchanged), 9 chunks: 0 computed, 9 already stored")


def test_a_prefix_and_an_encoding_are_those_of_every_chunk(
    ingest: list[str], tmp_path: Path
) -> None:
    prefix, store = tmp_path / "prefix.txt", tmp_path / "store"
    prefix.write_text("<|bos|><|start|>user\nAnswer the question from the context.\n\n")
    args = [*ingest, "--prefix-file", str(prefix)]
    assert invoke(*args, "--kv-encoding", "int8").exit_code == 0
    (chunk,) = ask(store, "--top-k", "1")["metrics"]["chunks"]
    assert chunk["outcome"] == "exact"
    (namespace,) = printed("store", "stats", "--store", store)["namespaces"]
    assert namespace["encodings"] == ["int8"]
    assert printed(*args)["chunks_computed"] == 0  # the store remembers its encoding
    prefix.write_text("another")
    assert "another prefix" in refused(*args)


def test_list_tells_a_file_from_an_upload_of_its_name(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lamp.txt"
    file.write_text("The lamp of the file.")
    with BlendEngine(store=store) as engine:
        engine.ingest([file, Document("lamp.txt", "The lamp of the upload.", "lamp", {})])
    listed = invoke("list", "--store", store).stdout.splitlines()
    assert {each.split(": ")[0] for each in listed if "lamp" in each} == {str(file), "lamp.txt"}


def test_remove_forgets_documents_and_names_unknown_paths(store: Path) -> None:
    docs = Path(ask(store)["sources"][0]["source"]).parent
    args = ("remove", "--store", store)
    missing = str(docs / "missing.txt")
    removed = invoke(*args, missing, docs / "d1.txt", "--json")
    assert removed.exit_code == 1
    assert json.loads(removed.stdout) == {"documents": 1, "failed": [missing]}
    assert said(removed).startswith(f"failed: {missing} is not in the corpus")
    left = ask(store, "--top-k", "9")["sources"]
    assert sorted(each["rank"] for each in left) == [*range(1, len(left) + 1)]
    assert {Path(s["source"]).name for s in left} == {"d0.txt", "d2.txt"}
    assert "is not in the corpus" in refused(*args, docs / "d1.txt")
    both = invoke(*args, docs, docs / "d0.txt")
    assert (both.exit_code, both.stdout) == (0, "2 documents removed\n")


def test_ask_and_chat_search_only_what_is_chosen(ingested: Path) -> None:
    def sources(*options: str) -> set[str]:
        return {Path(each["source"]).name for each in ask(ingested, *options)["sources"]}

    assert sources("--top-k", "9", "--only", "d1.*") == {"d1.txt"}
    assert sources("--top-k", "9", "--only", "d1.*", "--only", "docs/d0.txt") == {
        "d0.txt",
        "d1.txt",
    }
    assert sources("--top-k", "9", "--where", "file_name!=d1.txt") == {"d0.txt", "d2.txt"}
    chosen = ("--only", "*.txt", "--where", "title=d2")
    assert sources("--top-k", "9", *chosen) == {"d2.txt"}
    chatted = invoke(
        "chat",
        "--store",
        ingested,
        "--json",
        *chosen,
        "--max-new-tokens",
        "2",
        stdin="What is it?\n",
    )
    (answer,) = map(json.loads, chatted.stdout.splitlines())
    assert {Path(each["source"]).name for each in answer["sources"]} == {"d2.txt"}


@pytest.mark.parametrize("command", [("ask", QUESTION), ("chat",)])
def test_a_filter_that_cannot_match_is_refused(ingested: Path, command: tuple[str, ...]) -> None:
    def refusal(*options: str) -> str:
        return refused(*command, "--store", str(ingested), *options)

    assert "--where 'year' is no condition, expected FIELD=VALUE" in refusal("--where", "year")
    assert "--only '/' is no pattern" in refusal("--only", "/")
    said_of_field = refusal("--where", "titel=x")
    assert (
        "--where names the field 'titel', which no document has; did you mean title"
        in said_of_field
    )
    if command[0] == "ask":
        assert "--only ('source' glob 'no/') leaves no passage" in refusal("--only", "no/")


def test_ask_in_json_prints_one_object_and_nothing_else(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", ingested, "--max-new-tokens", "6", "--json")
    result = invoke(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    fields = json.loads(result.stdout)
    assert {"answer", "metrics", "sources"} <= fields.keys()
    assert fields["metrics"]["reused_tokens"] > 0
    assert fields["metrics"]["new_tokens"] == 6
    assert [s for s in fields["sources"] if s["source"].endswith("d2.txt")]


def test_ask_prints_the_answer_and_metrics_on_stderr(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", ingested, "--max-new-tokens", "6")
    shown = invoke(*args)
    answer = ask(ingested, "--max-new-tokens", "6")["answer"]
    assert shown.stdout == f"{answer}\n"
    *_, metrics, cut = shown.stderr.splitlines()
    assert metrics.startswith("metrics: first token after ")
    assert cut == "note: the answer was cut at --max-new-tokens 6; more let it go on"
    args += ("--no-sources",)
    chosen = said(invoke(*args, "--policy", "query", "--schedule", "0.4,0.2"))
    assert chosen.endswith(
        "mode blend, query at ratio 0.30, schedule 0.4,0.2; decode weights native"
    )
    zero = said(invoke(*args, "--ratio", "0"))
    assert zero.endswith("mode blend at ratio 0, which recomputes nothing; decode weights native")
    for more in (("--policy", "boundary(3)"), ("--mode", "reuse")):  # these follow no schedule
        assert "schedule" not in said(invoke(*args, *more))


def test_the_line_of_metrics_tells_the_beginning_of_the_prompt_from_chunks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_metrics(RequestMetrics("blend", 0, 0, 0, 100, 90, 15, 10, 1, 0.3, 0.3, prefix_tokens=40))
    assert ": 90 reused (40 before the first chunk), 15 of them recom" in capsys.readouterr().err


def test_ask_shows_file_place_score_and_passage_of_its_sources(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", ingested, "--max-new-tokens", "2", "--top-k", "2")
    sources = ask(ingested, "--top-k", "2")["sources"]
    first, second = sorted(sources, key=lambda source: -source["score"])
    *lines, metrics, _ = invoke(*args).stderr.splitlines()
    for line, source in zip(lines, (first, second), strict=True):
        place = f"{source['source']}, characters {source['start']} to {source['end']}"
        assert line.startswith(f"source: {place}, score {source['score']:.2f}: Paragraph ")
        assert line.endswith(" …")
    assert metrics.startswith("metrics: ")
    assert said(invoke(*args, "--no-sources")).startswith("metrics: ")


def test_a_source_in_a_pdf_is_shown_with_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    source = RetrievedChunk("id", "Lit.", "a.pdf", "a", 5, 9, 0.5, {}, 0.9, 1, page=3)
    say_sources([source], "Is it lit?")
    assert capsys.readouterr().err.startswith(
        "source: a.pdf, page 3, characters 5 to 9, score 0.90:"
    )


def test_ask_explains_the_answer_in_a_page(ingested: Path, tmp_path: Path) -> None:
    args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "2", "--explain")
    page = tmp_path / "answer.html"
    assert invoke(*args, str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert escape(QUESTION) in text
    assert "Layer by layer" in text
    for place in (tmp_path / "missing" / "a.html", tmp_path / "a.png"):
        assert "expected a file that ends in .html" in refused(*args, str(place))


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


def test_verify_passes_a_llama_and_explains_its_figures(model_dir, monkeypatch):
    fields = printed("verify", model_dir)
    assert fields["verdict"] == "blendable"
    assert fields["layers"] == ["rotary"] * 3
    assert fields["max_logit_diff"] < 1e-4
    assert fields["subset_logit_diff"] < 1e-4
    assert fields["perturbed_logit_diff"] > 1e-2
    assert fields["greedy_equal"] is True
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    result = invoke("verify", model_dir)
    shown = result.stdout
    assert "progress: checking on a prompt of 96 tokens, about " in result.stderr
    assert "3 rotary (stored keys of rotary layers are rotated" in shown
    assert "(at most 0.000" in shown
    assert "wrong KV would be noticed" in shown
    assert "the next 32 tokens are those of the model without blendrag: yes" in shown


def test_search_shows_what_a_question_finds_without_a_model(ingested: Path) -> None:
    found = printed("search", QUESTION, "--store", ingested, "--top-k", "3")
    assert [chunk["rank"] for chunk in found["chunks"]] == [1, 2, 3]
    assert Path(found["chunks"][0]["source"]).name == "d2.txt"
    assert {"score", "page", "start", "end", "distance", "text"} < found["chunks"][0].keys()
    shown = invoke("search", QUESTION, "--store", ingested, "--search", "lexical").stdout
    assert shown.split()[:5] == ["rank", "score", "document", "place", "text"]
    assert "d2.txt" in shown.splitlines()[1]
    only = printed("search", QUESTION, "--store", ingested, "--only", "d1.txt")
    assert {Path(chunk["source"]).name for chunk in only["chunks"]} == {"d1.txt"}
    nothing = invoke("search", "qqq", "--store", ingested, "--search", "lexical")
    assert not nothing.stdout
    assert "nothing was found; use other words" in nothing.stderr


def test_a_line_end_in_the_name_of_a_file_ends_no_row_of_a_table(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    docs = write_documents(tmp_path / "docs", 1, 1)
    (docs / "d0.txt").rename(docs / "d0\n   1  1.000  other.txt")
    assert invoke(*ingest_args(docs, model_dir, tmp_path / "store")).exit_code == 0
    _, row = invoke("search", QUESTION, "--store", tmp_path / "store").stdout.splitlines()
    assert r"docs/d0\n   1  1.000  other.txt " in row


def test_list_search_and_ask_show_files_by_their_path_from_the_working_directory(
    ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ingested.parent)
    args = (QUESTION, "--store", ingested)
    listed = invoke("list", "--store", ingested).stdout
    assert listed.startswith("docs/d0.txt: 3 chunks")
    found = invoke("search", *args).stdout.splitlines()[1]
    assert found.split()[2] == "docs/d2.txt"
    told = invoke("ask", *args, "--max-new-tokens", "1").stderr
    assert told.startswith("source: docs/d2.txt, characters ")


@pytest.mark.parametrize("group", ["", "store", "schema", "cache", "models"])
def test_help_says_of_each_command_what_it_does_in_a_whole_sentence(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = invoke(*group.split(), "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert commands
    assert [line for line in commands if not line.endswith(".") or line.endswith("...")] == []


def test_search_shows_the_page_of_a_chunk_that_has_one() -> None:
    chunk = RetrievedChunk("id", "text", "a.pdf", "a", 40, 90, None, {}, 1.0, 1)
    assert _place(chunk) == "40–90"
    assert _place(replace(chunk, page=3)) == "page 3"
