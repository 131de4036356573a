"""The store bench: its figures, and that every way does the work that its time is reported for."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from blendrag.store.encodings.codec import Staging
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.payload import frame
from blendrag.store.payload_files import PayloadFiles
from blendrag.store.tiered import KVStore, open_store
from blendrag_lab.bench.rounds import MeasuredNothingError, silent
from blendrag_lab.bench.store import (
    PromptBuffers,
    StoreResult,
    decode,
    measure_misses,
    measure_puts,
    measure_reads,
    measure_remote_reads,
    miss,
    new_key,
    putting_ways,
    random_chunk,
    reading_ways,
    store,
    store_table,
)

STORE = "blendrag_lab.bench.store"
READS = ("store", "raw preadv", "torch.load", "safe_open")
TOKENS = 16
measured = partial(store, "tiny", TOKENS, 2, rows=50, rounds=1)
LAYOUT = KVLayout((LayerShape(2, 16),) * 2, "bfloat16")
CHUNK = random_chunk(LAYOUT, TOKENS, 0)


@pytest.fixture(scope="module", autouse=True)
def _few_gets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{STORE}.GETS", 5)
        yield


@pytest.fixture(scope="module")
def result() -> StoreResult:
    return measured()


@pytest.fixture
def kv_store(tmp_path: Path) -> Iterator[KVStore]:
    with contextlib.closing(open_store(tmp_path / "store", 0, None)) as opened:
        yield opened


@contextlib.contextmanager
def doing_nothing() -> Iterator[None]:
    """Rounds whose work is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{STORE}.seconds_of", lambda work: 0.0)
        yield


def test_every_part_has_rows_for_the_store_and_its_baselines(result):
    rows = {(row.part, row.way): row for row in result.rows}
    assert rows.keys() == {
        *(("warm read", way) for way in (*READS, "memory tier")),
        *(("cold read", way) for way in READS),
        *(("put", way) for way in ("store", "write+fsync+rename")),
        *(("decode", way) for way in ("int8", "read saved by int8")),
        ("miss", "store"),
    }
    assert all(row.ms.low > 0 for row in result.rows)
    assert result.layer_bytes == 2 * 2 * TOKENS * 16 * 2
    for part, baseline in (
        ("warm read", "raw preadv"), ("cold read", "raw preadv"), ("put", "write+fsync+rename"),
    ):  # fmt: skip
        slower = rows[part, "store"].ms.median / rows[part, baseline].ms.median
        assert rows[part, "store"].speed == pytest.approx(1 / slower)
    saved_ms = rows["decode", "read saved by int8"].ms.median
    assert rows["decode", "int8"].speed == pytest.approx(
        saved_ms / rows["decode", "int8"].ms.median
    )
    shown = store_table(result).rows
    assert [row[:2] for row in shown] == [[row.part, row.way] for row in result.rows]


def test_every_way_reads_the_chunks_bit_for_bit_and_doing_nothing_is_an_error(tmp_path):
    prompt = PromptBuffers({new_key(): random_chunk(LAYOUT, TOKENS, seed) for seed in range(2)})
    with reading_ways(tmp_path, prompt) as ways:
        assert list(ways) == [*READS, "memory tier"]
        for name, (opened, _) in ways.items():
            before = len(os.listdir("/proc/self/fd"))
            prompt.fill(name, opened)
            for layer, buffer in enumerate(prompt.buffers):
                expected = [chunk.layers[layer] for chunk in prompt.chunks.values()]
                assert torch.equal(buffer, torch.cat(expected, dim=2)), name
            # What is in the buffers from before does not count.
            with doing_nothing(), pytest.raises(MeasuredNothingError, match="has other bytes"):
                prompt.fill(name, opened)
            assert len(os.listdir("/proc/self/fd")) == before, name


def test_cold_rounds_drop_every_file_before_each_way(tmp_path, monkeypatch):
    dropped: list[set[Path]] = []
    monkeypatch.setattr(f"{STORE}.drop_cached", lambda paths: dropped.append(set(paths)))
    rows, share = measure_reads(tmp_path, [CHUNK, CHUNK], 3, silent)
    assert len(dropped) == 3 * len(READS)
    assert share == 1.0  # nothing was dropped here
    payloads = set(tmp_path.glob("store/kv/*/*/*.kv"))
    assert len(payloads) == 2
    assert sum(paths == payloads for paths in dropped) == 3 * 3
    assert sum(paths == set(tmp_path.glob("torch/*.pt")) for paths in dropped) == 3
    assert {row.part for row in rows} == {"warm read", "cold read"}


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no writable tmpfs")
def test_files_are_written_to_dir_and_no_read_is_cold_if_the_page_cache_keeps_its_pages():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        result = measured(directory=Path(directory))
        assert list(Path(directory).iterdir()) == []
    assert result.directory == directory
    assert result.cold_cached_share == 1.0


def test_both_ways_of_writing_sync_the_same_bytes_and_doing_nothing_is_an_error(
    tmp_path, kv_store, monkeypatch
):
    synced: list[int] = []
    real = os.fsync

    def counted(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", counted)
    payload_bytes = frame(LAYOUT, TOKENS).file_bytes
    assert payload_bytes > CHUNK.size_bytes  # and a header
    for once in putting_ways(tmp_path, kv_store, CHUNK).values():
        synced.clear()
        once()
        assert payload_bytes in synced
        with doing_nothing(), pytest.raises((MeasuredNothingError, FileNotFoundError)):
            once()


def test_puts_remove_what_they_stored(tmp_path):
    root = tmp_path / "puts"
    measure_puts(root, CHUNK, 2, silent)
    with contextlib.closing(PayloadFiles(root / "store")) as files:
        assert list(files.walk()) == []
    assert not (root / "final").exists()


def test_a_miss_is_looked_up_in_an_index_of_as_many_rows(tmp_path, monkeypatch):
    (row,) = measure_misses(tmp_path, 300, LAYOUT, TOKENS, silent)
    assert (row.part, row.speed) == ("miss", None)
    with contextlib.closing(open_store(tmp_path, 0, None)) as kv_store:
        names = [name for name, _ in kv_store.disk._index.oldest()]
        assert len({name.key for name in names}) == kv_store.stats().entries == 300
        for name in names[:20]:
            assert kv_store.disk._index.get(name.namespace, name.key) == name
    monkeypatch.setattr(f"{STORE}.fill_index", lambda *args: None)
    with pytest.raises(MeasuredNothingError, match="the index has 0 rows, expected 300"):
        measure_misses(tmp_path / "other", 300, LAYOUT, TOKENS, silent)


@pytest.mark.parametrize("found", [object(), None])
def test_a_get_that_is_no_miss_is_an_error(kv_store, monkeypatch, found):
    miss(kv_store, LAYOUT, TOKENS)
    monkeypatch.setattr(kv_store, "open", lambda *args: found)  # found, or not looked up
    with pytest.raises(MeasuredNothingError, match="expected a miss"):
        miss(kv_store, LAYOUT, TOKENS)


def test_decoding_that_skips_data_is_an_error(monkeypatch):
    decode(CHUNK)
    real = Staging._decode
    monkeypatch.setattr(
        Staging, "_decode", lambda self, layer, blocks, out: real(self, layer, blocks[:-1], out)
    )
    with pytest.raises(MeasuredNothingError, match="decoded from int8 is off by"):
        decode(CHUNK)


def test_reads_of_a_remote_are_compared_with_obstore_alone(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "bucket").mkdir()
    chunks = [random_chunk(LAYOUT, 16, seed) for seed in range(2)]
    url = f"file://{tmp_path}/bucket"
    rows = measure_remote_reads(tmp_path / "local", url, chunks, 2, silent)
    assert [row.way for row in rows] == ["remote tier", "obstore alone"]
    assert rows[1].speed == 1.0
    assert not list((tmp_path / "bucket").rglob("*.kv"))
