"""A store's counters as Prometheus text, format 0.0.4, for a server's ``/metrics``.

Every sample has the store's path as a label, so that several stores can be told apart after scraping.
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from blendrag.store import StoreStats

#: Content type of an HTTP response with such a text.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES_IN_HELP = {"\\": r"\\", "\n": r"\n"}
_ESCAPES_IN_VALUES = {**_ESCAPES_IN_HELP, '"': r"\""}


class Metric(NamedTuple):
    """One metric family; samples are pairs of labels and value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[dict[str, str], int]]


def exposition(stats: StoreStats, store: str) -> str:
    """``stats`` of the store at path ``store``, as text that ends with a newline."""
    return "".join(f"{line}\n" for metric in _metrics(stats) for line in _lines(metric, store))


def _metrics(stats: StoreStats) -> Iterator[Metric]:
    counters = {
        "misses": ("Chunks asked for that no tier had.", stats.misses),
        "puts": ("Chunks written to disk.", stats.puts),
        "quarantines": ("Payloads quarantined after a failed check.",
                        stats.quarantined),
        "promotions": ("Chunks taken from disk into memory.", stats.promotions),
        "queue_drops": ("Chunks left on disk because too many waited for promotion.",
                        stats.queue_drops),
    }  # fmt: skip
    for name, (text, value) in counters.items():
        yield Metric(f"blendrag_store_{name}_total", "counter", text, [({}, value)])
    by_tier = {
        "hits_total": ("counter", "Chunks found, by the tier that served them.", "hits"),
        "read_bytes_total": ("counter", "Bytes of layers read, by tier.", "read_bytes"),
        "evictions_total": ("counter", "Chunks dropped to make room, by tier.", "evictions"),
        "entries": ("gauge", "Chunks held now, by tier.", "entries"),
        "bytes": ("gauge", "Bytes held now, by tier.", "size_bytes"),
        "limit_bytes": ("gauge", "Bytes that may be held, by tier.", "limit_bytes"),
    }
    for name, (kind, text, field) in by_tier.items():
        samples = [({"tier": tier.tier}, int(getattr(tier, field))) for tier in stats.tiers]
        yield Metric(f"blendrag_store_{name}", kind, text, samples)


def _lines(metric: Metric, store: str) -> Iterator[str]:
    yield f"# HELP {metric.name} {_escaped(metric.help, _ESCAPES_IN_HELP)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in metric.samples:
        yield f"{metric.name}{{{_labels({'store': store, **labels}.items())}}} {value}"


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escaped(value, _ESCAPES_IN_VALUES)}"' for name, value in pairs)


def _escaped(text: str, escapes: Mapping[str, str]) -> str:
    """Escaped, and in UTF-8 whatever bytes a path is made of."""
    valid = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(escapes.get(character, character) for character in valid)
