"""What commands say before and while they work: bytes and seconds that come true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from blendrag.cli import progress
from blendrag.engine import ingest as ingesting
from blendrag.engine.kv_writer import KVWriter
from blendrag.fusor import gate
from blendrag.store.durable import readable_size
from cli.commands import ingest_args, invoke, printed, refused, write_documents


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (431_000, "420.9 KiB"),
     (1_234_567, "1.2 MiB"), (1.9 * 2**30, "1.9 GiB"), (3 * 2**50, "3072.0 TiB")],
)  # fmt: skip
def test_sizes_are_readable(size_bytes, text):
    assert readable_size(size_bytes) == text


def test_a_dry_run_of_an_unchanged_corpus_says_zero_bytes(store, model_dir, ingested, tmp_path):
    docs = ingested.parent / "docs"
    plan = printed(*ingest_args(docs, model_dir, store, "--dry-run"))
    assert plan | {"documents": 3, "documents_unchanged": 3, "bytes": 0, "seconds": 0} == plan
    write_documents(tmp_path / "more", documents=4)
    args = ingest_args(tmp_path / "more", model_dir, store)
    plan = printed(*args, "--dry-run")  # three other paths with the same texts, one new text
    done = printed(*args)
    assert plan["bytes"] == done["bytes"] > 0
    assert done["chunks_computed"] == 3
    shown = invoke(*args, "--dry-run").stdout
    assert shown.startswith("4 documents (4 unchanged), 12 chunks, ")
    assert ": 0 bytes of new KV, about 0.0 s; " in shown


def test_a_dry_run_checks_settings_and_leaves_the_store_alone(store, ingest):
    ingest[ingest.index("--store") + 1] = str(store)
    ingest[ingest.index("64")] = "128"
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*.kv")}
    assert "holds chunks of 64 tokens, not 128" in refused(*ingest, "--dry-run")
    ingest[ingest.index("128")] = "64"
    assert invoke(*ingest, "--dry-run", "--disk-bytes", "5GiB").exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("*.kv")}
    assert "64.0 GiB (the default)" in invoke("store", "stats", "--store", store).stdout


def test_a_dry_run_counts_the_gate_until_it_has_run(ingest, empty_cache, monkeypatch):
    monkeypatch.setattr(gate, "expected_s", lambda *_: 1e6)
    assert printed(*ingest, "--dry-run")["seconds"] > 1e6
    assert invoke(*ingest).exit_code == 0
    (Path(ingest[1]) / "new.txt").write_text("A text that is new.")
    assert printed(*ingest, "--dry-run")["seconds"] < 1e5


def write_pages(folder: Path, documents: int) -> None:
    """HTML with more markup than text, the last page as long as all others."""
    for path in write_documents(folder, documents).glob("*.txt"):
        texts = path.read_text().split("\n\n")
        texts *= documents if path.stem == f"d{documents - 1}" else 1
        page = "".join(f"<p class='{'wide ' * 40}'>{i} {text}" for i, text in enumerate(texts))
        (folder / f"{int(path.stem[1:]):02}.html").write_text(page)
        path.unlink()


@pytest.mark.parametrize("resumed", [False, True])
def test_the_time_left_is_right_after_a_tenth_of_the_work(
    model_dir, tmp_path, monkeypatch, resumed
):
    docs, store, now = tmp_path / "docs", tmp_path / "store", [0.0]
    if resumed:  # an earlier run did a half
        write_pages(docs, 12)
        assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    write_pages(docs, 24)
    write = KVWriter.write

    def write_slowly(*args: Any) -> None:
        now[0] += 10.0 if now[0] else 100.0  # the first loads the model
        write(*args)

    monkeypatch.setattr(KVWriter, "write", write_slowly)
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1.0)
    told = invoke(*ingest_args(docs, model_dir, store)).stderr
    lines = re.findall(
        r"progress: (\d+) chunks?, .* of [\d.]+ KiB read(?:, about (.*) left)?", told
    )
    work = len(lines)
    assert work > 72
    for done, (chunks, left) in enumerate(lines, start=1):
        if work / 10 <= done < work:
            expected_s = 10 * (work - done)
            assert expected_s / 1.5 <= seconds_of(left) <= expected_s * 1.5, (chunks, left)


def seconds_of(duration: str) -> float:
    number, unit = duration.split()
    minutes, _, seconds = number.rpartition(":")
    assert unit in ("s", "min")
    return 60 * float(minutes or 0) + float(seconds)


def test_ingest_says_what_it_will_take_on_disk_if_that_is_much(ingest, monkeypatch):
    monkeypatch.setattr(ingesting, "ANNOUNCED_BYTES", 10_000)
    told = invoke(*ingest)
    (said,) = [line for line in told.stderr.splitlines() if line.startswith("warning: the KV of ")]
    assert " of text takes about " in said
    assert " per token; the disk has " in said
    size = re.search(r"takes about ([\d.]+) KiB", said)
    stored = re.search(r"; ([\d.]+) KiB encoded in", told.stdout)
    assert size is not None
    assert stored is not None
    assert 0.8 < float(size[1]) / float(stored[1]) < 1.25
