"""Benches: ratios of times within one run, from medians of interleaved rounds.

One file per bench has its command, its result, its table and its measurement.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag_lab.bench.options import Bench

#: Benches → their summaries. Listing them imports none of their modules, which need torch.
SUMMARIES = {
    "ttft": "Time to first token of full, prefix, reuse and blend.",
    "answer": "Time to the first and the last token: full, blend, reuse, transformers, llama.cpp.",
    "schema": "Time to first token of a prompt of stored modules: full, blend and schema.",
    "serve": "Whole answers of many requests, one by one and together, against stock transformers.",
    "newcomer": "TTFT of a request that arrives while others decode, and how long those wait.",
    "learning": "TTFT of requests over passages that the engine learns meanwhile, against without.",
    "remote": "Time to first token from a cold remote of several throughputs against full prefill.",
    "overhead": "Operators, Python time and time per layer of a request.",
    "attention": "Decode attention of many requests over shared chunks and over private copies.",
    "grammar": "Milliseconds per token with a JSON schema against without.",
    "cluster": "Routing by resident KV against round robin, on replicas on Ray.",
    "ingest": "Milliseconds to encode a chunk with a writer against without.",
    "search": "Recall and MRR of dense, lexical and hybrid search, and milliseconds per search.",
    "store": "Reads, puts, misses and decoding of the store against raw I/O.",
}
#: Modules that are not called like their benches.
_MODULES = {"ingest": "ingest_rate", "search": "search_quality"}


def _require_ray() -> None:
    """Raise :class:`InvalidInputError` unless blendrag-ray and Ray are installed."""
    try:
        from blendrag_ray import ray_session
    except ImportError as exc:
        raise InvalidInputError(
            "this needs blendrag-ray, which is not installed; pip install 'blendrag[ray]', "
            "or from a checkout ./integrations/blendrag-ray"
        ) from exc
    ray_session.require_ray()


def load_bench(name: str) -> Bench:
    """The bench of that name. Imports torch. Raises :class:`InvalidInputError` if it needs Ray."""
    from blendrag_lab.bench.options import BENCHES

    if name == "cluster":
        _require_ray()
    import_module(f"blendrag_lab.bench.{_MODULES.get(name, name)}")
    return BENCHES[name]
