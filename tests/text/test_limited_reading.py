"""Files are read in children: a hostile file costs one sentence, and nothing is left of a child."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from blendrag.errors import UnreadableDocumentError
from blendrag.text import limited_reading, readers
from blendrag.text.limited_reading import ReaderChild, ReaderPool
from blendrag.text.reader_process import LARGEST, SMALLEST, limits_of

from . import hostile_files


@pytest.fixture
def pool():
    made = ReaderPool()
    yield made
    made.close()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "the-good.md"
    path.write_text("# Title\n\nWords.")
    return path


def sentence(pool: ReaderPool, path: Path) -> str:
    _, failure = pool.read(path)
    assert failure is not None
    assert str(failure).startswith(f"{path}: ")
    return failure.reason


def test_a_child_reads_as_this_process_does(tmp_path: Path, pool: ReaderPool) -> None:
    contents = hostile_files.good_files(lambda number: f"Wörter of file {number}. " * 9)
    for name, content in (next(contents) for _ in range(6)):
        path = tmp_path / name
        path.write_bytes(content)
        assert pool.read(path) == ([*readers.open_documents(path).documents], None)
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "a", "year": 1.5, "new": true, "tags": ["x"]}\n[]\n{"text": "b"}')
    documents, failure = pool.read(lines)
    assert [each.text for each in documents] == ["a", "b"]
    day = documents[0].metadata["file_date"]
    assert documents[0].metadata == {
        "year": 1.5,
        "new": True,
        "tags": ["x"],
        "file_date": day,
    }
    assert failure is not None
    assert "line 2 is not an object" in str(failure)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("span.docx", "a cell spans 300,000,000 columns"),
        ("bomb.docx", "unpacks to 3 parts of 28.6 MiB, expected at most"),
        ("media-bomb.docx", "unpacks to 4 parts"),
        ("parts.docx", "unpacks to 20,003 parts"),
        ("nested.docx", "cannot be read as DOCX"),
        ("entities.docx", "cannot be read as DOCX"),
        ("external.docx", "without text"),
        ("loop.pdf", "cannot be read as PDF"),
        (
            "id.jsonl",
            r"line 1 is refused: its id has 84,000 characters \('x{80}'…\), expected at most",
        ),
        ("title.jsonl", "its title has 84,000 characters"),
        (
            "metadata.jsonl",
            "its metadata takes 2,000,013 bytes as JSON, expected at most 1,048,576",
        ),
        ("nested.jsonl", "line 1 is not valid JSON"),
        ("number.jsonl", "line 1 is not valid JSON"),
        ("surrogate.jsonl", "line 1 contains a lone surrogate"),
    ],
)
def test_a_hostile_file_costs_one_sentence_and_the_next_one_is_read(
    tmp_path: Path, good: Path, name: str, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(hostile_files.HOSTILE[name]())
    with pytest.raises(UnreadableDocumentError, match=reason) as caught:
        list(limited_reading.read_documents(path))
    assert "\n" not in str(caught.value)
    assert [each.title for each in limited_reading.read_documents(good)] == ["Title"]


def test_a_page_that_is_shown_100_000_times_is_refused(tmp_path: Path, pool: ReaderPool) -> None:
    pytest.importorskip("pypdf")
    path = tmp_path / "pages.pdf"
    path.write_bytes(hostile_files.pdf("x", kids="3 0 R " * 101))
    assert "it shows one page 101 times" in sentence(pool, path)


def test_deep_html_is_read_in_linear_time_and_deeper_html_refused(
    tmp_path: Path, pool: ReaderPool
) -> None:
    path = tmp_path / "cells.html"
    path.write_text("<html><table>" + "<td>x" * 15_000)
    (document,), failure = pool.read(path)
    assert failure is None
    assert document.text.count("x") == 15_000
    path.write_text("<div>" * 100_002)
    assert "nests tags more than 100,000 deep" in sentence(pool, path)


@pytest.mark.parametrize("name", ["headings.md", "line.txt", "title.html", "heading.md"])
def test_odd_files_are_read(tmp_path: Path, pool: ReaderPool, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(hostile_files.ODD[name]())
    (document,), failure = pool.read(path)
    assert failure is None
    assert 0 < len(document.title) <= 1024


def test_one_child_reads_all_files_until_it_dies(good: Path, pool: ReaderPool) -> None:
    (document,), _ = pool.read(good)
    (child,) = pool._idle
    assert pool.read(good) == ([document], None)
    assert pool._idle == [child]
    os.kill(child.process.pid, signal.SIGKILL)
    assert pool.read(good) == ([document], None)
    (other,) = pool._idle
    assert other is not child
    assert child.process.returncode == -signal.SIGKILL  # waited for, no zombie


def test_a_child_that_hangs_is_ended_and_replaced(
    good: Path, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.read(good)
    (child,) = pool._idle
    os.kill(child.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(limited_reading, "START_S", 0.01)
    assert "takes more than 1 s to read" in sentence(pool, good)
    assert child.process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert pool.read(good)[1] is None


def test_a_child_that_sends_a_reply_bit_by_bit_is_ended_once_its_time_is_over(
    good: Path, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os\nwhile True: os.write(0, b'x' * 1000)"
    monkeypatch.setattr(limited_reading, "_command", lambda: [sys.executable, "-c", code])
    monkeypatch.setattr(limited_reading, "MAX_REPLY_BYTES", 4 << 20)
    clock = SimpleNamespace(monotonic=count().__next__)  # a second passes at each look
    monkeypatch.setattr(limited_reading, "time", clock)
    assert "takes more than 120 s to read" in sentence(pool, good)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGSEGV, r"ended the process that read it \(signal 11\); save it again"),
        (signal.SIGPROF, "takes more than 4 s to read, the limit for its size; split it"),
        (signal.SIGKILL, r"ended the process that read it \(signal 9\)"),
    ],
)
def test_a_child_that_dies_in_a_file_says_how(
    good: Path, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    receive = ReaderChild._receive

    def dies(child: ReaderChild, *given):
        reply = receive(child, *given)
        if "documents" in reply[0]:
            os.kill(child.process.pid, number)
            child.process.wait()
            raise EOFError
        return reply

    monkeypatch.setattr(ReaderChild, "_receive", dies)
    assert re.match(reason, sentence(pool, good))


def test_the_limit_of_time_holds_where_this_process_ignores_its_signal(
    good: Path, pool: ReaderPool
) -> None:
    signals = {signal.SIGPROF}
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        pool.read(good)
    finally:
        signal.signal(signal.SIGPROF, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    (child,) = pool._idle
    os.kill(child.process.pid, signal.SIGPROF)
    assert child.process.wait(60) == -signal.SIGPROF


def test_ctrl_c_ends_the_child_at_once(
    good: Path, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.read(good)
    (child,) = pool._idle

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(ReaderChild, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.read(good)
    assert child.process.returncode is not None
    assert pool._idle == []


def test_replies_that_are_too_large_end_the_child(
    good: Path, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good.write_text("words " * 100_000)
    monkeypatch.setattr(limited_reading, "MAX_REPLY_BYTES", 1000)
    assert "holds more than 1000 bytes of text" in sentence(pool, good)
    assert pool._idle == []


def test_threads_read_at_the_same_time(tmp_path: Path, pool: ReaderPool) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_text(f"Text {number}")
    found: dict[int, list[str]] = {}

    def read(thread: int) -> None:
        found[thread] = [pool.read(path)[0][0].text for path in paths[thread::3]]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {t: [f"Text {n}" for n in range(t, 12, 3)] for t in range(3)}
    assert 1 <= len(pool._idle) <= 3


SCRIPT = """\
import os, sys
from pathlib import Path
from blendrag.text import limited_reading
print("began", flush=True)
path = Path(sys.argv[1])
(document,) = limited_reading.read_documents(path)
(child,) = limited_reading._POOL._idle
print(document.title, child.process.pid, flush=True)
if sys.argv[2] == "fork":
    if (pid := os.fork()) == 0:
        (same,) = limited_reading.read_documents(path)
        os._exit(same != document or child in limited_reading._POOL._idle)
    sys.exit(os.waitpid(pid, 0)[1])
if sys.argv[2] == "die":
    os.kill(os.getpid(), 9)
"""


def run(tmp_path: Path, good: Path, how: str, cwd: Path) -> tuple[int, list[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-P", script, good, how]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", ["end", "die", "fork"])
def test_a_script_without_a_main_guard_reads_files_and_leaves_no_process(
    tmp_path: Path, good: Path, how: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (
        "json",
        "blendrag",
        "bs4",
        "socket",
    ):  # a directory of documents is never imported from
        (folder / f"{name}.py").write_text("open('imported', 'w')")
    status, (began, title, pid) = run(tmp_path, good, how, folder)
    assert (status, began, title) == (-signal.SIGKILL if how == "die" else 0, "began", "Title")
    assert not (folder / "imported").exists()
    gone = threading.Event()
    while is_running(int(pid)):  # it sees that its parent is gone
        gone.wait(0.05)


def test_limits_grow_with_the_file_up_to_the_largest() -> None:
    kinds = ("PDF", "DOCX", "XLSX", "HTML", "JSON lines", "Markdown", "text")
    for kind in kinds:
        small, large, huge = (limits_of(kind, size) for size in (0, 10**6, 10**12))
        assert small == SMALLEST
        assert SMALLEST.cpu_s < large.cpu_s < LARGEST.cpu_s
        assert SMALLEST.memory_bytes < large.memory_bytes < 10**9
        assert huge == LARGEST


def test_a_child_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, blendrag.text.reader_process; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
