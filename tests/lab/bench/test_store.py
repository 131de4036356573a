"""The store benchmark: what it prints, that what it measures is done, and what it says to bad input.

No test here looks at how long anything took: a machine may be slow, a way may not skip its work.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.errors import InvalidInputError
from blendrag.lab.bench import store_misses, store_reads, store_writes
from blendrag.lab.bench.store import StoreWorkload, kv_shape, run_store
from blendrag.lab.bench.store_chunks import Prompt, random_chunk
from blendrag.lab.bench.store_cold import drop
from blendrag.lab.bench.store_decoding import Decodes, measure_decoding
from blendrag.lab.bench.store_misses import fill_index, measure_misses
from blendrag.lab.bench.store_reads import ReadWay, measure_reads, reading_ways
from blendrag.lab.bench.store_rounds import MeasuredNothingError, Way, measure
from blendrag.lab.bench.store_writes import PlainWrites, Puts, measure_puts
from blendrag.planning.tier_times import COLD_SHARE, cached_share
from blendrag.store import open_store
from blendrag.store.encodings.codec import Staging
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.payload_files import PayloadFiles
from blendrag.store.reader import DiskReader
from cli.commands import invoke, said
from lab.bench.lab import measured

SMALL = (
    "--layers", "2", "--heads", "2", "--dim", "16", "--tokens", "32", "--chunks", "2",
    "--rows", "50", "--rounds", "1",
)  # fmt: skip
READS = ("store", "raw preadv", "torch.load", "safe_open")
LAYOUT = KVLayout((LayerShape(2, 16),) * 2, "bfloat16")
TOKENS = 32


def quiet(text: str) -> None:
    """Progress, unseen."""


@pytest.fixture(autouse=True)
def few_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_misses, "GETS", 5)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_misses, "GETS", 5)
        return measured("store", *SMALL)


@pytest.fixture
def prompt() -> Prompt:
    return Prompt([random_chunk(LAYOUT, TOKENS, seed) for seed in range(2)])


@pytest.fixture
def ways(tmp_path: Path, prompt: Prompt) -> Iterator[dict[str, ReadWay]]:
    with reading_ways(tmp_path, prompt) as found:
        yield {way.name: way for way in found}


def rows_of(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["part"], row["way"]): row for row in result["rows"]}


def run_once(way: Way) -> None:
    """One round as the benchmark makes it."""
    try:
        way.prepare()
        way.seconds()
        way.check()
    finally:
        way.finish()


# -- what is printed ------------------------------------------------------------------------------


def test_every_part_has_a_row_for_the_store_and_for_what_it_is_compared_with(
    result: dict[str, Any],
) -> None:
    assert rows_of(result).keys() == {
        *(("warm read", way) for way in (*READS, "memory tier")),
        *(("cold read", way) for way in READS),
        *(("put", way) for way in ("store", "write+fsync+rename")),
        *(("decode", way) for way in ("int8", "read saved by int8", "fp8", "read saved by fp8")),
        ("miss", "store"),
    }
    for row in result["rows"]:
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]


def test_sizes_are_those_of_what_was_asked_for(result: dict[str, Any]) -> None:
    layer_bytes = 2 * 2 * 32 * 16 * 2
    rows = rows_of(result)
    assert result["layer_bytes"] == layer_bytes
    assert rows["warm read", "store"]["size_bytes"] == 2 * 2 * layer_bytes  # chunks, layers
    assert rows["put", "store"]["size_bytes"] == rows["put", "write+fsync+rename"]["size_bytes"]
    assert rows["put", "store"]["size_bytes"] > 2 * layer_bytes  # and a header
    assert (result["index_rows"], result["rounds"], result["threads"]) == (50, 1, 1)
    assert all(load >= 0 for load in result["load_average"])


def test_speeds_are_against_the_yardstick_of_the_same_round(result: dict[str, Any]) -> None:
    rows = rows_of(result)
    for part, yardstick in (
        ("warm read", "raw preadv"), ("cold read", "raw preadv"), ("put", "write+fsync+rename"),
    ):  # fmt: skip
        base = rows[part, yardstick]
        assert base["speed"] == 1.0
        for (its_part, _), row in rows.items():
            if its_part == part:
                assert row["speed"] == pytest.approx(base["ms"] / row["ms"])  # of one round
    for name in ("int8", "fp8"):
        saved = rows["decode", f"read saved by {name}"]
        assert saved["ms"] == pytest.approx(saved["size_bytes"] / 2e9 * 1e3)
        assert rows["decode", name]["speed"] == pytest.approx(
            saved["ms"] / rows["decode", name]["ms"]
        )


def test_targets_say_what_was_measured_what_is_expected_and_whether_it_was_met(
    result: dict[str, Any],
) -> None:
    rows = rows_of(result)
    values = [
        rows["warm read", "store"]["speed"], rows["cold read", "store"]["speed"],
        1 / rows["put", "store"]["speed"], rows["miss", "store"]["ms"],
        1 / rows["decode", "int8"]["speed"], 1 / rows["decode", "fp8"]["speed"],
    ]  # fmt: skip
    assert [target["value"] for target in result["targets"]] == pytest.approx(values)
    assert [target["bound"] for target in result["targets"]] == [0.75, 0.9, 1.3, 0.1, 1.0, 1.0]
    for number, target in enumerate(result["targets"]):
        value, bound = target["value"], target["bound"]
        met = value >= bound if target["at_least"] else value <= bound
        cold = number == 1 and result["cold_cached_share"] > COLD_SHARE
        assert target["met"] is (None if cold else met)


def test_the_table_has_the_rows_and_says_of_each_target_whether_it_was_met() -> None:
    shown = invoke("bench", "store", *SMALL)
    assert shown.exit_code == 0, shown.stderr
    for word in (*READS, "memory tier", "write+fsync+rename", "int8", "miss"):
        assert word in shown.stdout
    assert sum(shown.stdout.count(word) for word in (": met", ": missed", ": not measured")) == 6


def test_the_shape_is_a_geometrys_or_what_the_options_say() -> None:
    assert kv_shape("llama-8b", None, None, None) == (32, 8, 128)
    assert kv_shape(None, 3, None, 64) == (3, StoreWorkload.kv_heads, 64)
    plain = StoreWorkload()
    assert plain.layout.layer_bytes(0, plain.chunk_tokens) == 512 * 1024


def test_what_was_written_is_gone_and_was_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **a: made.append(real(**a)) or made[-1])
    fields = measured("store", *SMALL, "--dir", str(tmp_path))
    assert fields["directory"] == str(tmp_path)
    assert [Path(path).parent for path in made] == [tmp_path]
    assert list(tmp_path.iterdir()) == []


# -- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(("--geometry", "huge"), "geometry 'huge' is not one of"),
     (("--geometry", "tiny", "--heads", "2"), "--geometry says layers, heads and dim"),
     (("--dtype", "int8"), "dtype 'int8' is not one of float32, float16, bfloat16"),
     (("--dir", "/no/such/place"), "--dir /no/such/place is no directory that can be written to"),
     (("--dir", "/proc/version"), "--dir /proc/version is no directory"),
     (("--rows", str(10**12)), "take fewer --rows or --chunks")],
)  # fmt: skip
def test_what_cannot_be_measured_is_one_sentence(wrong: tuple[str, ...], sentence: str) -> None:
    shown = invoke("bench", "store", *wrong, "--json")
    assert shown.exit_code == 2
    assert sentence in said(shown)
    assert shown.stdout == ""


@pytest.mark.parametrize(
    "option", ["--layers", "--heads", "--dim", "--tokens", "--chunks", "--rows"]
)
def test_a_number_out_of_range_names_its_option(option: str) -> None:
    shown = invoke("bench", "store", option, "0")
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1].startswith(f"Error: Invalid value for '{option}'")


# -- a way that does nothing is noticed -------------------------------------------------------------


@pytest.mark.parametrize("name", [*READS, "memory tier"])
@pytest.mark.parametrize("cold", [False, True])
def test_every_way_leaves_the_chunks_in_the_prompt_bit_for_bit(
    ways: dict[str, ReadWay], prompt: Prompt, name: str, cold: bool
) -> None:
    ways[name].cold = cold
    run_once(ways[name])
    assert prompt.holds_all()
    for layer, buffer in enumerate(prompt.buffers):
        expected = torch.cat([chunk.layers[layer] for chunk in prompt.chunks], dim=2)
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("name", [*READS, "memory tier"])
def test_a_way_that_reads_nothing_is_no_measurement(
    ways: dict[str, ReadWay], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(ways[name])  # what is in the buffers from before does not count
    monkeypatch.setattr(ways[name], "run", lambda: None)
    with pytest.raises(MeasuredNothingError, match="left other bytes in the buffers"):
        run_once(ways[name])


def test_a_read_of_all_but_one_layer_is_no_measurement(
    ways: dict[str, ReadWay], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskReader.read_layer

    def first_only(reader: DiskReader, layer: int, out: torch.Tensor) -> None:
        if layer == 0:
            real(reader, layer, out)

    monkeypatch.setattr(DiskReader, "read_layer", first_only)
    with pytest.raises(MeasuredNothingError):
        run_once(ways["store"])


def test_the_stores_row_is_of_verified_reads(ways: dict[str, ReadWay]) -> None:
    (path, *_) = ways["store"].files()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(Exception, match="the bytes are not those that were put"):
        run_once(ways["store"])


def test_every_round_closes_what_it_opened(ways: dict[str, ReadWay]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for way in ways.values():
        run_once(way)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_put_that_stores_nothing_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = random_chunk(LAYOUT, TOKENS, 0)
    with contextlib.closing(open_store(tmp_path / "store", 0, None)) as store:
        puts = Puts(tmp_path, store, chunk)
        run_once(puts)
        monkeypatch.setattr(store, "put", lambda *args: None)
        with pytest.raises(MeasuredNothingError, match="does not come back"):
            run_once(puts)


def test_both_ways_of_writing_sync_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = random_chunk(LAYOUT, TOKENS, 0)
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.closing(open_store(tmp_path / "store", 0, None)) as store:
        for way in (Puts(tmp_path, store, chunk), PlainWrites(tmp_path / "plain", chunk)):
            synced.clear()
            run_once(way)
            assert way.size_bytes in synced
            assert way.size_bytes > chunk.size_bytes


def test_a_plain_write_cut_short_is_no_measurement(tmp_path: Path, monkeypatch: Any) -> None:
    way = PlainWrites(tmp_path / "plain", random_chunk(LAYOUT, TOKENS, 0))
    real = os.write
    monkeypatch.setattr(store_writes.os, "write", lambda fd, data: real(fd, memoryview(data)[:8]))
    with pytest.raises(MeasuredNothingError):
        run_once(way)


def test_a_miss_is_looked_for_in_an_index_of_as_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = store_misses._require
    monkeypatch.setattr(store_misses, "_require", lambda *args: asked.append(args) or real(*args))
    row = measure_misses(tmp_path, 300, LAYOUT, TOKENS, quiet)
    assert (row.part, row.speed) == ("miss", None)
    assert [rows for _, _, rows in asked] == [300]
    with contextlib.closing(open_store(tmp_path, 0, None)) as store:
        assert store.stats().entries == 300


def test_rows_that_are_not_in_the_index_are_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_misses, "fill_index", lambda *args: None)
    with pytest.raises(MeasuredNothingError, match="the index has 1 rows, expected 300"):
        measure_misses(tmp_path, 300, LAYOUT, TOKENS, quiet)


def test_rows_put_in_bulk_are_found_as_those_put_one_by_one(tmp_path: Path) -> None:
    chunk = random_chunk(LAYOUT, TOKENS, 0)
    namespace, key = store_misses.NAMESPACE, store_misses.key_of("present")
    with contextlib.closing(open_store(tmp_path, 0, None)) as store:
        store.put(namespace, key, chunk)
    fill_index(tmp_path / "index", 20, quiet)
    with contextlib.closing(open_store(tmp_path, 0, None)) as store:
        assert store.stats().entries == 21
        names = [row.name for row in store.disk._index.oldest()]
        assert len({name.key for name in names}) == 21
        for name in names:
            assert store.disk._index.get(name.namespace, name.key).name == name


@pytest.mark.parametrize("found", [True, False])
def test_a_get_that_finds_something_or_asks_nobody_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    with contextlib.closing(open_store(tmp_path, 0, None)) as store:
        way = store_misses.Misses(store, LAYOUT, TOKENS)
        run_once(way)
        monkeypatch.setattr(store, "open", lambda *args: object() if found else None)
        with pytest.raises(MeasuredNothingError, match="expected a miss"):
            run_once(way)


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_decoding_that_leaves_a_layer_out_is_no_measurement(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Decodes(random_chunk(LAYOUT, TOKENS, 0), encoding)
    run_once(way)
    real = Staging._decode
    monkeypatch.setattr(Staging, "_decode", lambda self, blocks, out: real(self, blocks[:-1], out))
    with pytest.raises(MeasuredNothingError, match=f"decoded from {encoding} is off by"):
        run_once(way)


def test_what_an_encoding_saves_is_what_its_payload_is_smaller_by(tmp_path: Path) -> None:
    chunk = random_chunk(LAYOUT, 512, 0)
    saved = {row.way: row.size_bytes for row in measure_decoding(chunk, 1, quiet)}
    for encoding in ("int8", "fp8"):
        sizes = []
        for layout in (LAYOUT, LAYOUT.encoded(encoding)):
            with contextlib.closing(
                open_store(tmp_path / encoding / layout.encoding, 0, None)
            ) as store:
                kv = random_chunk(layout, 512, 0)
                store.put(store_misses.NAMESPACE, store_misses.key_of(encoding), kv)
                sizes.append(store.stats().size_bytes)
        assert abs(sizes[0] - sizes[1] - saved[f"read saved by {encoding}"]) < 3 * 4096  # headers


# -- cold is cold -----------------------------------------------------------------------------------


def test_a_file_that_was_dropped_is_not_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert cached_share([path]) == 1.0
    drop([path])
    if cached_share([path]) == 1.0:
        pytest.skip("this file system keeps its pages whatever it is told")
    assert cached_share([path]) == 0.0
    with path.open("rb") as file:
        file.seek(512 << 10)
        file.read(4096)
    assert 0.0 < cached_share([path]) < 1.0


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no tmpfs to write to")
def test_where_the_page_cache_keeps_its_pages_nothing_is_called_cold() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        fields = measured("store", *SMALL, "--dir", directory)
    assert fields["cold_cached_share"] == 1.0
    (cold,) = (target for target in fields["targets"] if target["figure"].startswith("cold read"))
    assert cold["met"] is None


def test_cold_rounds_drop_every_file_before_each_way(
    tmp_path: Path, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[set[Path]] = []
    monkeypatch.setattr(store_reads, "drop", lambda paths: dropped.append(set(paths)))
    rows, share = measure_reads(tmp_path, prompt, 3, quiet)
    assert len(dropped) == 3 * len(READS)
    assert share == 1.0  # nothing was, here
    payloads = set(tmp_path.glob("store/kv/*/*/*.kv"))
    assert len(payloads) == 2
    assert sum(paths == payloads for paths in dropped) == 3 * 3
    assert sum(paths == set(tmp_path.glob("torch/*.pt")) for paths in dropped) == 3
    assert {row.part for row in rows} == {"warm read", "cold read"}


# -- rounds -----------------------------------------------------------------------------------------


class Counted(Way):
    """Notes when it is run."""

    def __init__(self, name: str, notes: list[str], seconds: list[float]) -> None:
        self.name, self._notes, self._seconds = name, notes, iter(seconds)

    def seconds(self) -> float:
        self._notes.append(self.name)
        return next(self._seconds)


def test_rounds_alternate_who_begins_and_the_first_does_not_count() -> None:
    notes: list[str] = []
    slow, fast = Counted("slow", notes, [9, 4, 8, 6]), Counted("fast", notes, [9, 2, 1, 3])
    rows = measure("part", [slow, fast], 3, quiet, "slow")
    assert notes == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert [(row.ms, row.low_ms, row.high_ms) for row in rows] == [
        (6000, 4000, 8000), (2000, 1000, 3000),
    ]  # fmt: skip
    assert [row.speed for row in rows] == [1.0, 2.0]  # of 2, 8 and 2


def test_what_a_way_took_is_given_back_when_it_fails() -> None:
    class Failing(Way):
        name = "failing"
        finished = False

        def run(self) -> None:
            raise OSError("no")

        def finish(self) -> None:
            self.finished = True

    way = Failing()
    with pytest.raises(OSError, match="no"):
        measure("part", [way], 1, quiet)
    assert way.finished


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_500_000))
    with pytest.raises(InvalidInputError, match=r"has 1\.5 MB left, expected"):
        run_store(StoreWorkload(directory=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_puts_take_back_what_they_stored(tmp_path: Path) -> None:
    root = tmp_path / "puts"
    measure_puts(root, random_chunk(LAYOUT, TOKENS, 0), 2, quiet)
    with contextlib.closing(PayloadFiles(root / "store")) as files:
        assert list(files.walk()) == []
    assert list((root / "plain").glob("final")) == []
