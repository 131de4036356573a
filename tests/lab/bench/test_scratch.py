"""Scratch directories of benches: gone in the end, those of killed processes too, those in use never."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blendrag.lab.bench import auto
from blendrag.lab.bench.geometry import bench_adapter
from blendrag.lab.bench.ingest import IngestWorkload, run_ingest
from blendrag.lab.bench.recognise import RecogniseWorkload, run_recognise
from blendrag.lab.bench.scratch import PREFIX, scratch
from blendrag.lab.bench.store import StoreWorkload, run_store
from blendrag.lab.bench.tiers import ON_DISK, tier_store
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import Workload

#: Make a scratch directory with a file in it, say which, and do what a second Ctrl-C does.
KILLED = """
import os, sys
from pathlib import Path
from blendrag.lab.bench.scratch import scratch
with scratch(Path(sys.argv[1])) as made:
    (made / "kv").write_bytes(b"kv")
    print(made, flush=True)
    os._exit(130)
"""


def killed(parent: Path) -> Path:
    """What a process that was killed has left in ``parent``."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(parent)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 130, ended.stderr
    return Path(ended.stdout.strip())


def used(parent: Path) -> list[Path]:
    """In ``parent``, after an hours-long bench has begun: its directory is as old."""
    made = next(parent.glob(f"{PREFIX}*"))
    (made / "kv").write_bytes(b"kv")
    os.utime(made, (0, 0))
    return [made / "kv"]


def in_tiers() -> None:
    with tier_store(ON_DISK):
        pass


def in_ingest() -> None:
    run_ingest(bench_adapter("tiny", None, "auto", "cpu"), IngestWorkload(1, 64, 0))


def in_store() -> None:
    run_store(StoreWorkload(2, 2, 16, chunks=1, chunk_tokens=16, rows=100, rounds=1))


def in_recognise() -> None:
    run_recognise(RecogniseWorkload(20, 4000, 1))


def test_it_is_empty_and_gone_in_the_end_with_all_that_was_written(tmp_path: Path) -> None:
    with scratch(tmp_path) as made:
        assert made.parent == tmp_path
        assert list(made.iterdir()) == []
        (made / "store").mkdir()
        (made / "store" / "kv").write_bytes(b"kv")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    left = killed(tmp_path)
    assert (left / "kv").is_file()
    with scratch(tmp_path) as made:
        assert list(tmp_path.iterdir()) == [made]
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_use_stays_however_old_it_is(tmp_path: Path) -> None:
    with scratch(tmp_path):
        files = used(tmp_path)
        with scratch(tmp_path):
            pass
        assert all(path.is_file() for path in files)


def test_what_is_in_use_by_another_process_stays(tmp_path: Path) -> None:
    waits = KILLED.replace("os._exit(130)", "sys.stdin.read()")
    process = subprocess.Popen(
        [sys.executable, "-c", waits, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with scratch(tmp_path):
            pass
        assert (theirs / "kv").is_file()
    finally:
        process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_benchs_stays(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "kv").write_bytes(b"kv")
    (tmp_path / f"{PREFIX}link").symlink_to(others)
    (tmp_path / f"{PREFIX}file").write_bytes(b"kv")
    (tmp_path / f"{PREFIX}new").mkdir()  # its owner is about to lock it
    before = sorted(tmp_path.rglob("*"))
    with scratch(tmp_path):
        pass
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("bench", [in_tiers, in_ingest, in_store, in_recognise])
def test_every_bench_that_writes_sweeps_before_it(
    bench: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = killed(tmp_path)
    bench()
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_profile_is_measured_where_what_was_left_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(auto.Measure, "profile", lambda self, conditions, root: seen.append(root))
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(ON_DISK) as there, torch.inference_mode():
        bench = TtftBench(adapter, Workload(2, 32, 8), there.store)
    left = killed(tmp_path)
    auto.measure_profile(bench, lambda text: None)
    assert [root.parent for root in seen] == [tmp_path]
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []
