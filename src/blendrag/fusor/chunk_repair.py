"""Which tokens of a hybrid model's chunks are computed again: runs from a chunk's beginning.

A single token cannot be recomputed in a layer with a running state, because the state before it is not
stored. That before a chunk is known, as it was composed. So a run is computed from there up to a token that
the question attends to, and sees what precedes the chunk. The state after the chunk is what its record makes
of the one before it, unless all of the chunk is computed.

Tokens are ranked as in policy ``query``: by the attention that the question pays to them, summed over the
layers of attention (ProphetKV). If it cannot be seen, those nearest to the question come first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.fusor.loader import LoadedSpan


def computed_runs(
    spans: Sequence[LoadedSpan], ratio: float, attention: torch.Tensor | None
) -> dict[int, int]:
    """How many tokens of some of the ``spans`` are computed, by the span's number: up to each token in order
    of rank, while all runs are within ``ratio`` of the spans' tokens. A run that would pass that is left out.
    Exact spans are left alone. ``attention`` ``[N]``: what the question pays to each token.
    """
    candidates = [(number, span) for number, span in enumerate(spans) if not span.exact]
    left = round(ratio * sum(span.tokens for _, span in candidates))
    if attention is None:
        attention = torch.arange(1 + max(span.end for span in spans))
    ends = [(number, n + 1) for number, span in candidates for n in range(span.tokens)]
    attended = torch.cat([attention[span.start : span.end] for _, span in candidates])
    runs: dict[int, int] = {}
    for at in attended.argsort(descending=True, stable=True).tolist():
        if not left:
            break
        number, end = ends[at]
        more = end - runs.get(number, 0)
        if 0 < more <= left:
            runs[number], left = end, left - more
    return runs
