"""Which chunks of a hybrid model's prompt are computed again: whole ones, by the question's attention.

A first version. A token alone cannot be recomputed in a layer with a running state, but a whole chunk can: it
is computed behind the composed state of its beginning, and so sees what precedes it. The chunks are those to
whose tokens the question pays most attention on average, summed over the layers of attention (ProphetKV). If
the attention cannot be seen, they are those nearest to the question.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.fusor.loader import LoadedSpan


def chosen_chunks(
    spans: Sequence[LoadedSpan], ratio: float, attention: torch.Tensor | None
) -> set[int]:
    """Numbers of the ``spans`` to compute: in order of rank, while that comes nearer to ``ratio`` of their
    tokens. Exact ones are left alone. ``attention`` ``[N]``: what the question pays to each token.
    """
    candidates = [number for number, span in enumerate(spans) if not span.exact]
    budget = ratio * sum(spans[number].tokens for number in candidates)

    def rank(number: int) -> float:
        span = spans[number]
        if attention is None:
            return float(span.start)
        return float(attention[span.start : span.end].mean())

    chosen, computed = set[int](), 0
    for number in sorted(candidates, key=rank, reverse=True):
        if computed + spans[number].tokens / 2 > budget:
            break
        chosen.add(number)
        computed += spans[number].tokens
    return chosen
