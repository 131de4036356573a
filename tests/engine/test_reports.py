"""What a running engine reports: one log line per request, and the store's counters for Prometheus."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.exposition import exposition
from blendrag.engine.request_log import NAMED, log_answer, wording
from blendrag.metrics import ChunkReport, RequestMetrics
from blendrag.store.base import StoreStats, TierStats

# -- log lines ----------------------------------------------------------------------------------


@pytest.fixture
def lines(engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages of level INFO since the test began."""
    engine.drain()
    caplog.set_level(logging.INFO, logger="blendrag")
    caplog.clear()
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith("blendrag.") and r.levelno == logging.INFO
    ]


def test_a_request_is_one_line_with_its_figures(engine, lines):
    m = engine.generate(tiny.prompt(engine, 0), Options(ratio=0.3)).metrics
    (line,) = lines()
    assert m.reused_tokens > 0
    assert f"{m.prompt_tokens} prompt tokens, {m.reused_tokens} reused" in line
    assert f"({m.recomputed_tokens} of them recomputed)" in line
    assert f"{m.fresh_tokens} fresh" in line
    assert f"first token after {m.ttft_s:.3f} s" in line
    assert line.endswith("decode weights native")
    assert "not reused" not in line
    assert "\n" not in line


def test_chunks_that_were_not_reused_are_named_with_the_reason(engine, lines):
    chunks = engine.generate(tiny.prompt(engine, 0), Options(mode="full")).metrics.chunks
    plain = engine.generate("Nothing of this was ingested.").metrics
    assert (plain.chunks, plain.reused_tokens) == ((), 0)
    full, unknown = lines()
    assert f"{len(chunks)} of {len(chunks)} chunks not reused: doc0.txt#" in full
    assert all(chunk.chunk_id[:12] in full for chunk in chunks)
    assert full.count("mode full computes every token") == 1
    assert "no known chunk was recognised" in unknown


async def test_every_kind_of_request_is_logged_once(engine, lines):
    text = tiny.prompt(engine, 0)
    list(engine.stream(text))
    await engine.agenerate(text)
    async for _ in engine.astream(text):
        pass
    engine.batch([text] * 2)
    assert len(lines()) == 5


def test_a_request_without_an_answer_is_logged(engine, lines):
    with engine.scheduler.held():
        waiting = engine.stream(tiny.prompt(engine, 0), Options(timeout_s=600))
        waiting.pending.stream.timeout_s = 0.001
        engine.stream("hello", Options(max_new_tokens=50)).close()
    engine.drain()
    late, gone = sorted(lines(), key=lambda line: "abandoned" in line)
    assert "stopped by its timeout of 0.001 s" in late
    assert "abandoned by its caller" in gone


def test_long_lists_are_cut_and_notes_are_shown():
    metrics = RequestMetrics("blend", 0.1, 0, 0.2, 9, 0, 0, 9, 1, 0, 0, notes=("Mind this",))
    assert wording(metrics).endswith("; Mind this")
    report = ChunkReport("00", "", 5, "computed", 5, "it is new")
    chunks = tuple(replace(report, chunk_id=f"{i:02d}" * 10) for i in range(NAMED + 3))
    line = wording(replace(metrics, chunks=chunks))
    assert "and 3 more (it is new)" in line
    assert line.count("it is new") == 1


def test_nothing_is_printed_unless_logging_is_set_up(capfd, monkeypatch):
    """A library that writes to stderr disturbs every program that uses it."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_answer(RequestMetrics("full", 0, 0, 0, 1, 0, 0, 1, 1, 1, 1))
    assert capfd.readouterr() == ("", "")


# -- counters -----------------------------------------------------------------------------------


STATS = StoreStats(
    entries=7, size_bytes=700, hits=9, misses=2, evictions=1, quarantined=3, puts=8, promotions=4,
    queue_drops=5,
    uploads=9, remote_failures=10, tiers=(
        TierStats("memory", 3, 300, 1000, 4, 123, 6),
        TierStats("disk", 7, 700, 2**63, 5, 456, 1),
    ),
)  # fmt: skip


def parsed(text: str) -> dict[tuple[str, str | None], float]:
    """Value by sample name and tier."""
    assert text.endswith("\n")
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    values = {(sample.name, sample.labels.get("tier")): sample.value for sample in samples}
    assert len(values) == len(samples) == sum(line[0] != "#" for line in text.splitlines())
    return values


def test_every_counter_is_exported_with_help_and_type():
    text = exposition(STATS, "/data/store", passages=3, tokens=900)
    values = {
        (name.removeprefix("blendrag_store_"), tier): value
        for (name, tier), value in parsed(text).items()
    }
    assert values == {
        ("misses_total", None): 2, ("puts_total", None): 8, ("quarantines_total", None): 3,
        ("promotions_total", None): 4, ("queue_drops_total", None): 5,
        ("uploads_total", None): 9, ("remote_failures_total", None): 10,
        ("hits_total", "memory"): 4, ("hits_total", "disk"): 5,
        ("read_bytes_total", "memory"): 123, ("read_bytes_total", "disk"): 456,
        ("evictions_total", "memory"): 6, ("evictions_total", "disk"): 1,
        ("entries", "memory"): 3, ("entries", "disk"): 7,
        ("bytes", "memory"): 300, ("bytes", "disk"): 700,
        ("limit_bytes", "memory"): 1000, ("limit_bytes", "disk"): 2**63,
        ("learned_passages_total", None): 3, ("learned_tokens_total", None): 900,
    }  # fmt: skip
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    gauges = {f"blendrag_store_{name}" for name in ("entries", "bytes", "limit_bytes")}
    assert {name for name, each in families.items() if each.type == "gauge"} == gauges
    assert len(parsed(exposition(replace(STATS, tiers=()), "/s"))) == 9


@pytest.mark.parametrize("path", ['/all \\"\n\\n', "/ends \\", "/ümlaut {},="])
def test_the_path_of_the_store_is_escaped(path):
    text = exposition(STATS, path)
    parsed(text)
    families = text_string_to_metric_families(text)
    assert {sample.labels["store"] for f in families for sample in f.samples} == {path}
    odd = exposition(STATS, path + b"\xff".decode("utf-8", "surrogateescape"))
    assert odd.encode("utf-8")
    parsed(odd)


def test_the_page_on_stores_names_every_family():
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `blendrag_")]
    named = {name for row in rows for name in re.findall(r"`(?:blendrag_store)?(_[a-z_]+)`", row)}
    named |= {name for row in rows for name in re.findall(r"`blendrag_store(_[a-z_]+)`", row)}
    families = re.findall(r"# TYPE blendrag_store(_[a-z_]+) ", exposition(STATS, "/s"))
    assert named == set(families)


def test_an_engine_counts_what_its_queries_did(tmp_path):
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        engine.ingest([tiny.document(1)])
        chunks = len(tiny.chunk_texts(engine, 1))
        before = engine.stats()
        assert before.puts == before.entries > chunks
        for _ in range(2):
            engine.generate(tiny.prompt(engine, 1), Options(ratio=0.2, max_new_tokens=1))
            engine.drain()
            engine.store.drain()  # type: ignore[attr-defined]  # promotions
        text, stats = engine.prometheus(), engine.stats()
    values = parsed(text)
    assert f'store="{(tmp_path / "s").absolute()}"' in text
    assert stats.promotions >= chunks
    for tier in stats.tiers:
        hits = values["blendrag_store_hits_total", tier.tier]
        assert hits == tier.hits >= chunks, tier.tier
        assert values["blendrag_store_read_bytes_total", tier.tier] == tier.read_bytes > 0
    assert values["blendrag_store_entries", "disk"] == stats.entries
    assert stats.hits == sum(tier.hits for tier in stats.tiers)
