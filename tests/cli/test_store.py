"""``blendrag store``: what its commands print, their exit statuses, bad input, Ctrl-C."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cli.commands import QUESTION, ask, ingest_args, invoke, printed, refused, reused_tokens, said

#: Three documents of three chunks, and the pinned one that identifies the namespace.
CHUNKS = 10


def payloads(store: Path) -> list[Path]:
    return sorted((store / "kv").rglob("*.kv"))


def damage(store: Path, number: int = 0) -> Path:
    """Flip the last bit of an unpinned payload."""
    pinned = {mark.split(".")[1] for mark in os.listdir(store / "pinned")}
    path = [path for path in payloads(store) if path.name.split(".")[0] not in pinned][number]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_stats_names_the_model_counts_and_limits(ingested: Path, model_dir: Path) -> None:
    found = printed("store", "stats", "--store", ingested)
    (namespace,) = found["namespaces"]
    assert namespace["model"] == str(model_dir)
    assert (namespace["dtypes"], namespace["encodings"]) == (["float32"], ["native"])
    assert (namespace["chunks"], namespace["pinned"], namespace["unknown"]) == (CHUNKS, 1, 0)
    assert namespace["size_bytes"] == sum(path.stat().st_size for path in payloads(ingested))
    corpus = found["corpus"]
    assert (corpus["documents"], corpus["chunks"]) == (3, CHUNKS - 1)
    assert corpus["namespace"] == namespace["namespace"]
    assert corpus["size_bytes"] >= (ingested / "corpus" / "corpus.sqlite").stat().st_size
    shown = invoke("store", "stats", "--store", ingested).stdout
    assert f"{CHUNKS} chunks (1 pinned)" in shown
    assert "64.0 GiB (the default)" in shown
    assert "3 documents, 9 chunks" in shown


def test_read_only_reads_a_store_of_another_user_and_changes_nothing(store: Path) -> None:
    damage(store)  # asking would set it aside and encode the chunk again
    if os.geteuid() == 0:
        for path in (store, *store.rglob("*")):
            os.chown(path, 65534, 65534)
        assert "open it with read_only=True (--read-only)" in refused("ask", "x", "--store", store)

    def state() -> dict[Path, tuple[int, int]]:
        """Of every file, but for those that SQLite makes to read a database."""
        files = {path: path.stat() for path in store.rglob("*") if path.is_file()}
        return {
            path: (status.st_size, status.st_mtime_ns)
            for path, status in files.items()
            if not path.name.endswith(("-shm", "-wal"))
        }

    before = state()
    assert printed("search", QUESTION, "--store", store, "--read-only")["chunks"]
    metrics = ask(store, "--read-only")["metrics"]
    assert 0 < metrics["reused_tokens"] < metrics["prompt_tokens"]
    assert state() == before


def test_stats_of_a_store_with_a_broken_or_missing_corpus_still_counts(store: Path) -> None:
    (store / "corpus" / "corpus.sqlite").write_bytes(b"garbage" * 999)
    found = printed("store", "stats", "--store", store)
    assert "not a corpus database" in found["corpus"]["fault"]
    assert found["chunks"] == CHUNKS
    shutil.rmtree(store / "corpus")
    assert printed("store", "stats", "--store", store)["corpus"] is None


def test_check_finds_damage_and_repairs_it(store: Path) -> None:
    good = invoke("store", "check", "--store", store)
    assert (good.exit_code, good.stderr) == (0, "")
    assert "all checksums match" in good.stdout
    damaged = damage(store)
    found = invoke("store", "check", "--store", store)
    assert found.exit_code == 1
    assert said(found).startswith(f"damaged: {damaged.parent.parent.name}/{damaged.name}: layer 2")
    assert "some of it is damaged" in found.stdout
    assert damaged.exists()
    report = printed("store", "check", "--repair", "--store", store, status=1)
    assert report["repaired"]
    assert report["namespaces"][0]["damaged"] == 1
    again = invoke("store", "check", "--repair", "--store", store).stdout
    assert "0 damaged chunks quarantined" in again
    after = printed("store", "check", "--store", store)
    assert after["good"]
    assert after["namespaces"][0]["good"] == CHUNKS - 1


def test_check_finds_and_repairs_a_damaged_corpus(store: Path) -> None:
    with sqlite3.connect(store / "corpus" / "corpus.sqlite") as damaged:
        damaged.execute("UPDATE chunk SET text = replace(text, 'quiet', 'loud') WHERE id = 2")
    damaged.close()
    args = ("ask", QUESTION, "--store", store, "--top-k", "9", "--max-new-tokens", "2")
    assert "row chunk 2" in invoke(*args).stderr
    assert printed("store", "check", "--store", store, status=1)["corpus"]["damaged"] == 1
    repaired = invoke("store", "check", "--store", store, "--repair")
    assert repaired.exit_code == 1
    assert said(repaired).startswith("damaged: ")
    assert "1 fault; the damaged documents were removed: ingest them again" in repaired.stdout
    assert printed("store", "check", "--store", store)["good"]


def test_gc_reaches_a_size_and_names_pinned_chunks(store: Path) -> None:
    size = payloads(store)[0].stat().st_size
    done = printed("store", "gc", "--max-bytes", f"{4 * size}", "--store", store)
    assert done["left_bytes"] <= 4 * size
    assert done["removed"] > 0
    result = invoke("store", "gc", "--max-bytes", "0", "--store", store)
    assert result.exit_code == 0
    assert "1 pinned chunk stays, more than the size asked for" in said(result)
    assert len(payloads(store)) == 1
    shown = invoke("store", "stats", "--store", store).stdout
    assert ": 1 chunk, " in shown
    assert ": 1 chunk (1 pinned), " in shown


def test_clear_asks_and_removes_only_what_the_store_wrote(store: Path) -> None:
    (namespace,) = os.listdir(store / "kv")
    (store / "kv" / "mine.txt").write_text("mine")
    clear = ("store", "clear", "--store", store)
    declined = invoke(*clear, stdin="n\n")
    assert declined.exit_code == 1
    assert f"Remove {CHUNKS} chunks" in declined.stderr
    assert "nothing was removed" in declined.stderr
    silent = invoke(*clear)
    assert silent.exit_code == 2
    assert "add --yes" in silent.stderr
    wrong = refused(*clear, "--namespace", "0g", "--yes")
    assert "matches no namespace" in wrong
    assert namespace[:12] in wrong
    assert len(payloads(store)) == CHUNKS
    assert invoke(*clear, "--namespace", namespace[:5], stdin="y\n").exit_code == 0
    assert payloads(store) == []
    assert (store / "kv" / "mine.txt").read_text() == "mine"
    assert printed("store", "stats", "--store", store)["corpus"]["documents"] == 3
    assert reused_tokens(store) == 0
    assert printed(*clear, "--yes")["left"] == 0


@pytest.mark.slow
def test_exported_kv_is_reused_where_it_is_imported(
    ingested: Path, model_dir: Path, tmp_path: Path
) -> None:
    docs = ingested.parent / "docs"
    archive, elsewhere = tmp_path / "kv.tar", tmp_path / "elsewhere"
    assert printed("store", "export", archive, "--store", ingested)["payloads"] == CHUNKS
    taken = printed("store", "import", archive, "--store", elsewhere, "--disk-bytes", "1GB")
    assert (taken["imported"], taken["pinned"], taken["stopped"]) == (CHUNKS, 1, "")
    again = invoke("store", "import", str(archive), "--store", elsewhere)
    assert f"{CHUNKS} already stored" in again.stdout
    assert printed("store", "stats", "--store", elsewhere)["limit_bytes"] == 10**9
    report = printed(*ingest_args(docs, model_dir, elsewhere))
    assert (report["chunks_computed"], report["chunks_skipped"]) == (0, CHUNKS - 1)
    assert reused_tokens(elsewhere) == reused_tokens(ingested) > 0


def test_export_leaves_out_damage_and_import_reports_a_cut_archive(
    store: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "kv.tar"
    damage(store, 3)
    left = printed("store", "export", archive, "--store", store, status=1)
    assert (left["payloads"], len(left["left_out"])) == (CHUNKS - 1, 1)
    archive.write_bytes(archive.read_bytes()[:-3000])
    result = invoke("store", "import", str(archive), "--store", tmp_path / "new")
    assert result.exit_code == 1
    assert "is incomplete: it ends early" in said(result)


@pytest.mark.parametrize(
    "command",
    [["stats"], ["check"], ["check", "--repair"], ["gc"], ["clear", "--yes"], ["export", "x.tar"]],
)
def test_a_path_without_a_store_is_refused_and_nothing_is_made(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no store at" in refused("store", *command, "--store", tmp_path / "none")
    assert os.listdir(tmp_path) == []


def test_no_command_imports_torch(ingested: Path, tmp_path: Path) -> None:
    commands = [["stats"], ["check"], ["export", str(tmp_path / "x.tar")]]
    code = f"""
import sys
from blendrag.cli.app import app
for command in {commands!r}:
    try:
        app(["store", *command, "--store", {str(ingested)!r}])
    except SystemExit as leaving:
        assert not leaving.code, (command, leaving.code)
    assert not {{"torch", "transformers"}} & set(sys.modules), command
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "function", "words"),
    [
        (["check"], "integrity.verify", "nothing was changed"),
        (["gc", "--max-bytes", "0"], "space._evict_batch", "the rest of the store is intact"),
        (["export", "FILE"], "archive._add", "FILE was not written"),
        (["import", "FILE"], "archive._take", "what was imported is kept"),
    ],
)
def test_ctrl_c_is_one_sentence_and_the_store_is_intact(
    command: list[str],
    function: str,
    words: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C before the third payload."""
    archive, target = str(tmp_path / "kv.tar"), store
    if command[0] == "import":
        assert printed("store", "export", archive, "--store", store)["payloads"] == CHUNKS
        target = tmp_path / "target"
    args = ["store", *(archive if each == "FILE" else each for each in command)]
    args += ["--store", target]
    module, name = function.split(".")
    owner, calls = import_module(f"blendrag.store.maintenance.{module}"), []
    work = getattr(owner, name)

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return work(*given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        patch.setattr("blendrag.store.maintenance.space.BATCH", 1)
        assert words.replace("FILE", archive) in refused(*args, status=130)
    report = printed("store", "check", "--store", target)
    assert report["good"]
    assert report["index"] == "sound"
    left = report["namespaces"][0]["good"]
    assert left == CHUNKS if command[0] in ("check", "export") else 0 < left < CHUNKS
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    assert invoke(*args).exit_code == 0
