"""The store's counters: counted where things happen, and a text that Prometheus' own parser takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tiny
from blendrag.engine import BlendEngine, Options, kv_writer
from blendrag.engine.exposition import exposition
from blendrag.store import StoreStats
from blendrag.store.base import TierStats
from blendrag.store.identity import chunk_key

STATS = StoreStats(
    entries=7, size_bytes=700, hits=9, misses=2, evictions=1, quarantined=3, puts=8, promotions=4,
    queue_drops=5,
    tiers=(
        TierStats("memory", 3, 300, 1000, 4, 123, 6),
        TierStats("disk", 7, 700, 2**63, 5, 456, 1),
    ),
)  # fmt: skip

#: One line of the text format, stricter than the parser: no spaces or timestamps to forgive.
LINE = re.compile(
    r"# HELP (?P<help>blendrag_store_[a-z_]+) [^\n]+"
    r"|# TYPE (?P<type>blendrag_store_[a-z_]+) (counter|gauge)"
    r'|(?P<name>blendrag_store_[a-z_]+)\{([a-z]+="([^"\\\n]|\\[\\"n])*",?)+\} [0-9]+'
)


def parsed(text: str) -> dict[tuple[str, str | None], float]:
    """Value by sample name and tier, after every line was looked at."""
    assert text.endswith("\n")
    lines = text.removesuffix("\n").split("\n")
    described: list[str] = []
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, line
        if match["help"]:
            assert match["help"] not in described
            described.append(match["help"])
        else:
            assert (match["type"] or match["name"]) == described[-1], line
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    values = {(sample.name, sample.labels.get("tier")): sample.value for sample in samples}
    assert len(values) == len(samples) == sum(not line.startswith("#") for line in lines)
    return values


def test_every_counter_is_a_family_with_help_and_type() -> None:
    text = exposition(STATS, "/data/store")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    kinds = {name.removeprefix("blendrag_store_"): each.type for name, each in families.items()}
    assert kinds == {
        "misses": "counter", "puts": "counter", "quarantines": "counter", "promotions": "counter",
        "queue_drops": "counter", "hits": "counter", "read_bytes": "counter",
        "evictions": "counter", "entries": "gauge", "bytes": "gauge", "limit_bytes": "gauge",
    }  # fmt: skip


def test_every_number_arrives_where_it_belongs() -> None:
    values = parsed(exposition(STATS, "/data/store"))
    short = {(name.removeprefix("blendrag_store_"), tier): v for (name, tier), v in values.items()}
    assert short == {
        ("misses_total", None): 2, ("puts_total", None): 8, ("quarantines_total", None): 3,
        ("promotions_total", None): 4, ("queue_drops_total", None): 5,
        ("hits_total", "memory"): 4, ("hits_total", "disk"): 5,
        ("read_bytes_total", "memory"): 123, ("read_bytes_total", "disk"): 456,
        ("evictions_total", "memory"): 6, ("evictions_total", "disk"): 1,
        ("entries", "memory"): 3, ("entries", "disk"): 7,
        ("bytes", "memory"): 300, ("bytes", "disk"): 700,
        ("limit_bytes", "memory"): 1000, ("limit_bytes", "disk"): 2**63,
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        '/a "quoted" one',
        "/back\\slash",
        "/new\nline",
        '/all \\"\n\\n',
        "/ends with \\",
        "/ümlaut {},=",
    ],
)
def test_a_path_is_escaped_and_comes_back_as_it_was(path: str) -> None:
    text = exposition(STATS, path)
    parsed(text)
    stores = {
        sample.labels["store"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert stores == {path}


def test_a_path_that_is_no_text_still_gives_text() -> None:
    text = exposition(STATS, b"/bytes \xff".decode("utf-8", "surrogateescape"))
    assert text.encode("utf-8")
    parsed(text)


def test_the_page_on_stores_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `blendrag_")]
    named = {name for row in rows for name in re.findall(r"`(?:blendrag_store)?(_[a-z_]+)`", row)}
    named |= {name for row in rows for name in re.findall(r"`blendrag_store(_[a-z_]+)`", row)}
    families = re.findall(r"# TYPE blendrag_store(_[a-z_]+) ", exposition(STATS, "/s"))
    assert named == set(families)


def test_a_store_without_tiers_still_parses() -> None:
    assert len(parsed(exposition(replace(STATS, tiers=()), "/s"))) == 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("engine") / "store") as made:
        assert made.ingest([tiny.document(i) for i in range(2)]).failed == 0
        yield made


def test_an_engine_counts_what_its_queries_did(engine: BlendEngine) -> None:
    before = engine.stats()
    chunks = tiny.chunk_texts(engine, 1)
    text = "\n\n".join(["Answer.", *chunks, "Question: what?"])
    assert before.puts == before.entries > len(chunks)
    for _ in range(2):
        engine.generate(text, Options(mode="blend", ratio=0.2, max_new_tokens=1))
        engine.drain()
        store = engine.resources.store
        store.drain()  # type: ignore[attr-defined]  # promotions
    values = parsed(engine.prometheus())
    stats = engine.stats()
    assert stats.promotions >= len(chunks)
    for tier in stats.tiers:
        hits = values["blendrag_store_hits_total", tier.tier]
        assert hits == tier.hits >= len(chunks), tier.tier
        assert values["blendrag_store_read_bytes_total", tier.tier] == tier.read_bytes > 0
    assert values["blendrag_store_entries", "disk"] == stats.entries
    assert stats.hits == sum(tier.hits for tier in stats.tiers)


def test_the_text_names_the_store_by_its_absolute_path(engine: BlendEngine, tmp_path: Path) -> None:
    root = engine.resources.root.absolute()
    assert f'store="{root}"' in engine.prometheus()


def test_no_more_chunks_wait_to_be_encoded_than_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_writer, "QUEUED_CHUNKS", 2)
    with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
        assert engine.ingest([tiny.document(i) for i in range(2)]).failed == 0
        store, namespace = engine.resources.store, engine.adapter.identity.namespace
        chunks = tiny.chunk_texts(engine, 1)
        prefix = engine.resources.prefix_ids
        keys = [chunk_key(namespace, prefix, engine.resources.text_ids(text)) for text in chunks]
        assert len(keys) > 2
        for key in keys:
            assert store.delete(namespace, key)
        text = "\n\n".join(["Answer.", *chunks, "Question: what?"])
        for there in (2, min(4, len(keys))):
            engine.generate(text, Options(mode="blend", ratio=0.2, max_new_tokens=1))
            engine.drain()
            assert sum(store.contains(namespace, key) for key in keys) == there
