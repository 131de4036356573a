"""What commands say before and while they work: bytes and seconds that come true."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendrag.cli import progress
from blendrag.cli.progress import TimeLeft
from blendrag.corpus.embedder import Embedder
from blendrag.engine import ingest as ingesting
from blendrag.engine.kv_writer import KVWriter
from blendrag.fusor import gate
from blendrag.store.durable import readable_size
from blendrag.text.chunking import Chunk
from cli.commands import ingest_args, invoke, printed, refused, write_documents
from clocks import Clock


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
    told = refused(*ingest, "--dry-run")
    assert "holds chunks of 64 tokens, not 128; use that, or ingest into another store" in told
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


def test_a_dry_run_of_a_long_ingest_names_the_document_that_takes_most_of_it(
    ingest, empty_cache, monkeypatch
):
    monkeypatch.setattr(gate, "expected_s", lambda *_: 1e6)
    assert "note:" not in invoke(*ingest, "--dry-run").stderr
    log = Path(ingest[1]) / "server.log"
    log.write_text("\n".join(f"request {number} was answered" for number in range(200)))
    note = "server.log has more than half of the tokens; --exclude leaves files out\n"
    assert note in invoke(*ingest, "--dry-run").stderr
    assert printed(*ingest, "--dry-run")["largest"] == str(log)
    assert "note:" not in invoke(*ingest, "--dry-run", "--exclude", "*.log").stderr
    monkeypatch.setattr(gate, "expected_s", lambda *_: 0.0)
    assert "note:" not in invoke(*ingest, "--dry-run").stderr


def write_pages(folder: Path, documents: int) -> None:
    """HTML with more markup than text, the last page as long as all others."""
    for path in write_documents(folder, documents).glob("*.txt"):
        texts = path.read_text().split("\n\n")
        texts *= documents if path.stem == f"d{documents - 1}" else 1
        page = "".join(f"<p class='{'wide ' * 40}'>{i} {text}" for i, text in enumerate(texts))
        (folder / f"{int(path.stem[1:]):02}.html").write_text(page)
        path.unlink()


@pytest.fixture
def embeds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts have the same vector, which takes no time."""

    def pooled(self: Embedder, encode: Any, windows: list[Any], *how: Any) -> np.ndarray:
        return np.full((len(windows), self.dim), self.dim**-0.5, np.float32)

    monkeypatch.setattr(Embedder, "_pooled", pooled)


@pytest.mark.usefixtures("embeds_at_once")
@pytest.mark.parametrize("resumed", [False, True])
def test_the_time_left_is_right_after_a_tenth_of_the_work(
    model_dir, tmp_path, monkeypatch, resumed
):
    docs, store, now = tmp_path / "docs", tmp_path / "store", [0.0]
    if resumed:  # an earlier run did a half
        write_pages(docs, 8)
        assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    write_pages(docs, 16)
    write = KVWriter.write

    def write_slowly(*args: Any) -> None:
        now[0] += 10.0 if now[0] else 100.0  # the first loads the model
        write(*args)

    monkeypatch.setattr(KVWriter, "write", write_slowly)
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1.0)
    told = invoke(*ingest_args(docs, model_dir, store)).stderr
    lines = re.findall(
        r"progress: encoding; \d+% done, (\d+) chunks?, [\d,]+ tokens/s(?:, about (.*) left)?\n",
        told,
    )
    work = len(lines)
    assert work > 48
    for done, (chunks, left) in enumerate(lines, start=1):
        if work / 10 <= done < work:
            expected_s = 10 * (work - done)
            assert expected_s / 1.5 <= seconds_of(left) <= expected_s * 1.5, (chunks, left)


def seconds_of(duration: str) -> float:
    number, unit = duration.split()
    minutes, _, seconds = number.rpartition(":")
    assert unit in ("s", "min")
    return 60 * float(minutes or 0) + float(seconds)


@pytest.mark.parametrize("more", [(), ("--encode-after", "1")])
def test_ingest_says_what_it_will_take_on_disk_if_that_is_much(ingest, monkeypatch, more):
    monkeypatch.setattr(ingesting, "ANNOUNCED_BYTES", 10_000)
    told = invoke(*ingest, *more)
    (said,) = [line for line in told.stderr.splitlines() if line.startswith("note: the KV to be ")]
    assert " per token; the disk has " in said
    size = re.search(r"takes about ([\d.]+) KiB", said)
    stored = re.search(r"; ([\d.]+) KiB encoded in", told.stdout)
    assert size is not None
    assert stored is not None
    assert 0.8 < float(size[1]) / float(stored[1]) < 1.25


def test_the_time_left_follows_a_speed_that_changes_early() -> None:
    at, left = Clock(), TimeLeft()
    for done in range(1001):
        told_s = left.seconds(at(), done, 1000 - done)
        if 100 <= done < 1000:
            assert told_s is not None
            assert (1000 - done) / 1.5 <= told_s <= 1.5 * (1000 - done), done
        at.now += 60.0 if done == 0 else 5.0 if done < 20 else 1.0  # opens the model, is disturbed


def test_the_time_left_begins_anew_with_other_work() -> None:
    at, left = Clock(), TimeLeft()
    for step_s in (100.0, 1.0):
        for done in range(4):
            told_s = left.seconds(at(), done, 4 - done)
            at.now += step_s
        assert told_s == step_s


@pytest.mark.usefixtures("embeds_at_once")
def test_an_ingest_of_mixed_sizes_tells_its_time_by_tokens_that_are_not_stored(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crumbs and long documents in a random order, a third of them stored before, each text twice."""
    docs, store, at = tmp_path / "docs", tmp_path / "store", Clock()
    rng = random.Random(5)
    sizes = [rng.choice((1, 2, 3, 20, 60)) for _ in range(24)]
    for number, paragraphs in enumerate(sizes):
        words = (f"word{number} {rng.getrandbits(40)} said {i}." for i in range(paragraphs))
        text = "\n\n".join(words)
        for copy in ("", "again"):
            write_text(docs / f"{rng.random()}{copy}.md", f"{text}\n\n" if copy else text)
        if number % 3 == 0:  # their bytes are no work
            write_text(tmp_path / "first" / f"{number}.md", text)
    assert invoke(*ingest_args(tmp_path / "first", model_dir, store)).exit_code == 0
    write, done_s, told = KVWriter.write, list[float](), list[tuple[float, float]]()

    def write_slowly(writer: KVWriter, chunk: Chunk, *args: Any) -> None:
        took_s = (chunk.tokens + 20.0) / 100 + 300.0 * (not done_s)  # the first opens the model
        at.now += took_s
        done_s.append(took_s)
        write(writer, chunk, *args)

    show = progress.TimeLeft.seconds

    def noted(self: TimeLeft, now: float, done: float, left: float) -> float | None:
        if (said := show(self, now, done, left)) is not None:
            told.append((sum(done_s), said))
        return said

    monkeypatch.setattr(KVWriter, "write", write_slowly)
    monkeypatch.setattr("rich.console.monotonic", at)
    monkeypatch.setattr(progress.TimeLeft, "seconds", noted)
    assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    whole_s, first_s = sum(done_s), done_s[0]
    assert len(done_s) > 40
    late = [(done, said) for done, said in told if first_s + (whole_s - first_s) / 10 <= done]
    assert len(late) > 30
    for done, said in late:
        left_s, little_s = whole_s - done, whole_s / 50
        assert left_s / 1.5 - little_s <= said <= left_s * 1.5 + little_s, (done, said)


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
