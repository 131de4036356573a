"""What a fusion is asked to do and what it says it did."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Schedule, SelectionPolicy


@dataclass(frozen=True)
class BlendRequest:
    """What to fuse: the spans loaded from the store and how to choose among their tokens."""

    prompt_tokens: int
    spans: tuple[LoadedSpan, ...]
    """Ascending, disjoint, never covering the last token: its logits are wanted."""
    policy: SelectionPolicy
    schedule: Schedule
    ratio: float
    question_start: int = 0
    """Behind the prompt's last chunk, which may be computed; what is loaded may end before."""

    @property
    def blended(self) -> tuple[LoadedSpan, ...]:
        return tuple(span for span in self.spans if not span.exact)

    @property
    def candidates(self) -> int:
        """N_chunk: tokens of blended chunks."""
        return sum(span.tokens for span in self.blended)


@dataclass(frozen=True)
class FusionCounts:
    """Rows computed, for the metrics and the floor."""

    candidate_rows: tuple[int, ...]
    """Chunk tokens computed in each layer."""
    rows: tuple[int, ...]
    """All rows computed in each layer: fresh ones included, twice where a scout pass was run. Of the last
    layer, rows whose K/V were computed."""
    recomputed_per_span: tuple[float, ...]
    """Mean over layers 1…L-1 of the tokens recomputed in each blended span."""
    candidates: int

    @property
    def ratio(self) -> float:
        """Mean share of chunk tokens recomputed in layers 1…L-1."""
        layers = len(self.candidate_rows) - 1
        if not self.candidates or layers <= 0:
            return 0.0
        return sum(self.candidate_rows[1:]) / (layers * self.candidates)

    @property
    def charged_ratio(self) -> float:
        """Σ_l |chunk tokens computed in layer l| / (L · N_chunk)."""
        if not self.candidates:
            return 0.0
        return sum(self.candidate_rows) / (len(self.candidate_rows) * self.candidates)


class Tally:
    """What each layer computes; added up after the forward, as that costs operators."""

    def __init__(self, layers: int) -> None:
        self.scouted_rows: tuple[int, ...] = ()
        """Rows that a scout pass computed, layer by layer."""
        self.candidates: list[torch.Tensor] = []
        """Tokens of blended chunks that each layer computes ``[n]``."""
        self._layers = layers
        self._rows: list[int] = []

    def add(self, candidates: torch.Tensor, rows: int) -> None:
        """The next layer computes ``rows`` rows, of which these ``[n]`` are tokens of blended chunks."""
        self.candidates.append(candidates)
        self._rows.append(rows)

    def counts(self, request: BlendRequest) -> FusionCounts:
        """All of it."""
        recomputed = np.zeros(request.prompt_tokens)
        for _, run in groupby(self.candidates[1:], key=id):
            same = list(run)
            recomputed[same[0].cpu().numpy()] += len(same)
        scouted = [*self.scouted_rows, *[0] * self._layers]
        layers = max(self._layers - 1, 1)
        return FusionCounts(
            tuple(tokens.numel() for tokens in self.candidates),
            tuple(rows + also for rows, also in zip(self._rows, scouted, strict=False)),
            tuple(float(recomputed[s.start : s.end].sum()) / layers for s in request.blended),
            request.candidates,
        )


def split_tokens(request: BlendRequest) -> tuple[np.ndarray, np.ndarray]:
    """Positions always computed (fresh) and candidates (tokens of blended chunks), ascending, int64."""
    state = np.zeros(request.prompt_tokens, dtype=np.int8)
    for span in request.spans:
        state[span.start : span.end] = 2 if span.exact else 1
    return np.flatnonzero(state == 0), np.flatnonzero(state == 1)


def query_span(request: BlendRequest) -> tuple[int, int]:
    """What asks: the tokens behind the last chunk, loaded or not, at least the prompt's last one."""
    loaded = max((span.end for span in request.spans), default=0)
    computed = min(request.question_start, request.prompt_tokens - 1)
    return (max(loaded, computed), request.prompt_tokens)
