"""What each command does when all is well: results on stdout, words about them on stderr."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blendrag import __version__
from blendrag.cli.options import model_for, parse_size
from blendrag.cli.output import print_json
from blendrag.engine import BlendEngine
from cli.commands import ingest_args, invoke, said, start, write_documents

QUESTION = "What is the topic of document 2?"


def test_help_imports_neither_torch_nor_transformers_and_takes_under_a_second() -> None:
    code = (
        "import sys\nfrom blendrag.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'faiss'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    times = []
    for _ in range(3):  # another process may take the machine for a moment
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False
        )
        times.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
        assert "ingest" in done.stdout
    assert min(times) < 1.0


def test_version_is_the_packages() -> None:
    assert invoke("--version").stdout.strip() == f"blendrag {__version__}"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("1048576", 1 << 20), ("500MB", 500 * 10**6), ("2GiB", 2 << 30), ("1.5k", 1500),
     ("64 gib", 64 << 30), ("3M", 3 * 10**6)],
)  # fmt: skip
def test_sizes_are_bytes_or_carry_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


def test_ingest_prints_totals_and_repeating_it_does_no_model_work(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    args = ingest_args(docs, model_dir, tmp_path / "store", "--json")
    first = json.loads(invoke(*args).stdout)
    assert first | {"documents": 3, "chunks": 9, "chunks_computed": 9, "failed": 0} == first
    assert first["bytes"] > 0
    assert first["tokens_per_s"] > 0
    again = json.loads(invoke(*args).stdout)
    assert again | {"chunks": 9, "chunks_computed": 0, "chunks_skipped": 9, "bytes": 0} == again


def test_dry_run_counts_and_writes_nothing(model_dir: Path, docs: Path, tmp_path: Path) -> None:
    result = invoke(*ingest_args(docs, model_dir, tmp_path / "store", "--dry-run", "--json"))
    plan = json.loads(result.stdout)
    assert result.exit_code == 0
    assert plan | {"documents": 3, "chunks": 9, "failed": 0} == plan
    assert plan["bytes"] > 0
    assert plan["seconds"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["docs"]


def test_one_chunk_is_not_called_chunks(model_dir: Path, tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", documents=1, paragraphs=1)
    args = ingest_args(docs, model_dir, tmp_path / "store")
    assert invoke(*args, "--dry-run").stdout.startswith("1 document, 1 chunk, ")
    assert invoke(*args).stdout.startswith("1 document (0 unchanged), 1 chunk: 1 computed, ")


def test_dry_run_foretells_the_bytes_of_the_ingest(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    args = ingest_args(docs, model_dir, tmp_path / "store", "--json")
    plan = json.loads(invoke(*args, "--dry-run").stdout)
    assert json.loads(invoke(*args).stdout)["bytes"] == plan["bytes"]


def test_ask_in_json_is_one_object_and_nothing_else(ingested: Path) -> None:
    process = start("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "6", "--json")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    fields = json.loads(stdout)
    assert {"answer", "metrics", "sources"} <= fields.keys()
    assert fields["metrics"]["reused_tokens"] > 0
    assert fields["metrics"]["new_tokens"] == 6
    assert [s for s in fields["sources"] if s["source"].endswith("d2.txt")]
    assert stderr == ""


def test_ask_streams_the_answer_and_sums_up_on_stderr(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "6")
    shown = invoke(*args)
    assert shown.exit_code == 0
    assert shown.stdout == json.loads(invoke(*args, "--json").stdout)["answer"] + "\n"
    metrics, note = shown.stderr.splitlines()[-2:]
    assert metrics.startswith("metrics: first token after ")
    assert note.startswith("note: no schedule is calibrated for this model and policy")
    assert said(invoke(*args, "--schedule", "constant")).startswith("metrics: first token after ")


def test_modes_policies_and_schedules_can_be_chosen(ingested: Path) -> None:
    def metrics(*more: str) -> dict[str, object]:
        args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "2", "--json")
        fields: dict[str, object] = json.loads(invoke(*args, *more).stdout)["metrics"]
        return fields

    assert metrics("--mode", "full")["reused_tokens"] == 0
    assert metrics("--mode", "reuse")["recomputed_tokens"] == 0
    blend = metrics("--mode", "blend", "--schedule", "constant", "--ratio", "0.5", "--top-k", "2")
    assert blend["schedule"] == "constant"
    assert blend["ratio"] == pytest.approx(0.5, abs=0.05)
    assert len(blend["chunks"]) == 2  # type: ignore[arg-type]
    assert metrics("--policy", "boundary(4)")["policy"] == "boundary(4)"
    auto = metrics("--ratio", "auto", "--min-ratio", "0.4", "--policy", "random")
    assert auto["ratio"] == pytest.approx(0.4, abs=0.05)


def test_a_stop_string_ends_the_answer_before_it(ingested: Path) -> None:
    args = ("ask", QUESTION, "--store", str(ingested), "--max-new-tokens", "24", "--json")
    whole = json.loads(invoke(*args).stdout)["answer"]
    stop = whole[len(whole) // 2 :]
    assert json.loads(invoke(*args, "--stop", stop).stdout)["answer"] == whole[: len(whole) // 2]


def test_remove_forgets_a_document_and_its_chunks(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    invoke(*ingest_args(docs, model_dir, store))
    removed = invoke("remove", str(docs / "d1.txt"), "--store", str(store), "--json")
    assert json.loads(removed.stdout) == {"documents": 1, "failed": []}
    fields = json.loads(invoke("ask", QUESTION, "--store", str(store), "--json").stdout)
    assert {Path(s["source"]).name for s in fields["sources"]} == {"d0.txt", "d2.txt"}
    again = invoke("remove", str(docs / "d1.txt"), "--store", str(store))
    assert again.exit_code == 2
    assert "is not in the corpus" in said(again)


def test_remove_goes_on_past_a_path_that_is_not_there(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    store, missing = tmp_path / "store", str(docs / "missing.txt")
    invoke(*ingest_args(docs, model_dir, store))
    args = ("remove", "--store", str(store))
    removed = invoke(*args, missing, str(docs / "d1.txt"), "--json")
    assert removed.exit_code == 1
    assert json.loads(removed.stdout) == {"documents": 1, "failed": [missing]}
    assert said(removed).startswith(f"failed: {missing} is not in the corpus")
    both = invoke(*args, str(docs), str(docs / "d0.txt"))
    assert (both.exit_code, both.stdout) == (0, "2 documents removed\n")


def test_a_store_among_the_documents_is_not_taken_for_some(
    model_dir: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(docs)
    for _ in range(2):
        result = invoke(*ingest_args(Path("."), model_dir, Path("blendrag-store"), "--json"))
        assert result.exit_code == 0
        fields = json.loads(result.stdout)
        assert (fields["documents"], fields["skipped"]) == (3, [])


def test_a_directory_called_demo_does_not_hide_the_embedded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_for("demo", None) == "demo"
    with BlendEngine(model_for("demo", None), tmp_path / "s") as engine:
        assert engine.resources.model_name == "demo"


def test_json_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    nan, infinite = float("nan"), float("inf")
    print_json({"a": nan, "b": [1.5, (infinite,)], "c": {"d": -infinite}, "e": True})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None, "b": [1.5, [None]], "c": {"d": None}, "e": True,
    }  # fmt: skip


@pytest.mark.parametrize("library", ["torchao", "torch.utils._pytree"])
def test_libraries_warn_only_with_verbose(model_dir: Path, library: str) -> None:
    assert invoke("verify", str(model_dir)).exit_code == 0
    assert not logging.getLogger(library).isEnabledFor(logging.WARNING)


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
    assert "blendable" in invoke("verify", str(model_dir)).stdout


def test_a_model_is_the_same_by_relative_and_absolute_path(
    model_dir: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_dir.parent)
    store = tmp_path / "store"
    invoke(*ingest_args(docs, model_dir.name, store))
    again = invoke(*ingest_args(docs, model_dir, store, "--json"))
    assert json.loads(again.stdout)["chunks_computed"] == 0


def test_a_prefix_file_stands_before_every_chunk(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "prefix.txt"
    prefix.write_text("<|bos|>user: Answer the question from the context.\n\n", encoding="utf-8")
    store = tmp_path / "store"
    result = invoke(*ingest_args(docs, model_dir, store, "--prefix-file", str(prefix)))
    assert result.exit_code == 0
    args = ("ask", QUESTION, "--store", str(store), "--top-k", "1", "--max-new-tokens", "1")
    (chunk,) = json.loads(invoke(*args, "--json").stdout)["metrics"]["chunks"]
    assert chunk["outcome"] == "exact"
    prefix.write_text("another", encoding="utf-8")
    other = invoke(*ingest_args(docs, model_dir, store, "--prefix-file", str(prefix)))
    assert other.exit_code == 2
    assert "another prefix" in said(other)


def test_bench_is_handed_its_own_arguments() -> None:
    assert "ttft" in invoke("bench", "--help").stdout
    assert invoke("bench", "no-such-benchmark").exit_code == 2


def test_html_markdown_and_json_lines_are_read_too(model_dir: Path, tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", documents=1)
    (docs / "a.md").write_text("# Heading\n\nSome words under a heading.", encoding="utf-8")
    (docs / "b.html").write_text("<title>T</title><p>A paragraph.</p>", encoding="utf-8")
    (docs / "c.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n', encoding="utf-8")
    result = invoke(*ingest_args(docs, model_dir, tmp_path / "store", "--json"))
    assert json.loads(result.stdout)["documents"] == 5
