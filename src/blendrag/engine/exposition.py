"""Counters as Prometheus text, format 0.0.4, for a server's ``/metrics``: those of a store here.

Every sample of a store has its path as a label, so that several can be told apart after scraping.
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from blendrag.store.base import StoreStats

#: ``name{labels} value`` or ``name value``.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_FAMILY = re.compile(r"# (?:HELP|TYPE) (\S+) ")
#: ``name: (help text, field of the statistics)``, for the store as a whole; all are counters.
_TOTALS = {
    "misses_total": ("Chunks asked for that no tier had.", "misses"),
    "puts_total": ("Chunks written to disk.", "puts"),
    "quarantines_total": ("Payloads quarantined after a failed check.", "quarantined"),
    "promotions_total": ("Chunks taken from disk into memory.", "promotions"),
    "queue_drops_total": (
        "Chunks left on disk because too many waited for promotion.",
        "queue_drops",
    ),
    "uploads_total": ("Chunks copied to the remote tier.", "uploads"),
    "remote_failures_total": (
        "Times the remote tier did not answer or gave damaged bytes.",
        "remote_failures",
    ),
}
#: The same for each tier; names that end in ``_total`` are counters, others gauges.
_BY_TIER = {
    "hits_total": ("Chunks found, by the tier that served them.", "hits"),
    "read_bytes_total": ("Bytes of layers read, by tier.", "read_bytes"),
    "evictions_total": ("Chunks dropped to make room, by tier.", "evictions"),
    "entries": ("Chunks held now, by tier.", "entries"),
    "bytes": ("Bytes held now, by tier.", "size_bytes"),
    "limit_bytes": ("Bytes that may be held, by tier.", "limit_bytes"),
}


def exposition(stats: StoreStats, store: str, passages: int = 0, tokens: int = 0) -> str:
    """``stats`` of the store at path ``store``, as text that ends with a newline.

    ``passages``, ``tokens``: what was learned from prompts.
    """
    label = f'store="{_escaped(store)}"'
    of_store = f"{{{label}}}"
    lines = []
    for name, (text, field) in _TOTALS.items():
        lines += family(f"store_{name}", text, {of_store: getattr(stats, field)})
    for name, (text, field) in _BY_TIER.items():
        samples = {
            f'{{{label},tier="{tier.tier}"}}': getattr(tier, field)
            for tier in stats.tiers
            if name.endswith("_total") or tier.tier != "remote"  # what it holds is not counted
        }
        lines += family(f"store_{name}", text, samples)
    learned = "Passages learned from prompts.", "Tokens of these passages."
    lines += family("store_learned_passages_total", learned[0], {of_store: passages})
    lines += family("store_learned_tokens_total", learned[1], {of_store: tokens})
    return "".join(f"{line}\n" for line in lines)


def family(name: str, text: str, samples: Mapping[str, float], kind: str = "") -> list[str]:
    """The lines of one metric family; ``samples`` by what follows the name."""
    kind = kind or ("counter" if name.endswith("_total") else "gauge")
    described = [f"# HELP blendrag_{name} {text}", f"# TYPE blendrag_{name} {kind}"]
    return described + [f"blendrag_{name}{labels} {value}" for labels, value in samples.items()]


def _escaped(path: str) -> str:
    """As the value of a label, and in UTF-8 whatever bytes a path is made of."""
    valid = path.encode("utf-8", "backslashreplace").decode("utf-8")
    return valid.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def joined(texts: Iterable[tuple[str, str]]) -> str:
    """Several expositions as one; each has a label for its samples, such as ``replica="1"``, or none."""
    families: dict[str, tuple[dict[str, None], list[str]]] = {}
    for label, text in texts:
        described: dict[str, None] = {}
        samples: list[str] = []
        for line in text.splitlines():
            if found := _FAMILY.match(line):
                described, samples = families.setdefault(found[1], ({}, []))
                described[line] = None
            elif sample := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (label, sample[2])))
                samples.append(f"{sample[1]}{f'{{{labels}}}' * bool(labels)} {sample[3]}")
    lines = (line for described, samples in families.values() for line in (*described, *samples))
    return "".join(f"{line}\n" for line in lines)
