"""The counters of all replicas as one Prometheus text; each sample names its replica."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: ``name{labels} value`` or ``name value``.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_FAMILY = re.compile(r"# (?:HELP|TYPE) (\S+) ")


def joined(texts: Mapping[str, str]) -> str:
    """The expositions of replicas, by the replicas' names."""
    families: dict[str, tuple[dict[str, None], list[str]]] = {}
    for replica, text in texts.items():
        described: dict[str, None] = {}
        samples: list[str] = []
        for line in text.splitlines():
            if found := _FAMILY.match(line):
                described, samples = families.setdefault(found[1], ({}, []))
                described[line] = None
            elif sample := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (f'replica="{replica}"', sample[2])))
                samples.append(f"{sample[1]}{{{labels}}} {sample[3]}")
    lines = (line for described, samples in families.values() for line in (*described, *samples))
    return "".join(f"{line}\n" for line in lines)
