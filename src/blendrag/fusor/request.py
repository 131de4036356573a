"""What is fused for one prompt, which of its tokens are chosen, and what was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

import numpy as np
import torch

from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.rows import LayerRows, PromptRows, Rows, nested_rows
from blendrag.fusor.scout import Scout
from blendrag.fusor.selection import Blending, Fetch, LayerView, PromptGeometry, make_policy


@dataclass(frozen=True)
class BlendRequest:
    """The spans loaded from the store, and how to choose among their tokens."""

    prompt_tokens: int
    spans: tuple[LoadedSpan, ...]
    """Ascending, disjoint, never covering the last token, whose logits are needed."""
    blending: Blending
    question_start: int = 0
    """First token after the prompt's last chunk. Loaded spans may end earlier if that chunk is computed."""

    @property
    def blended(self) -> tuple[LoadedSpan, ...]:
        return tuple(span for span in self.spans if not span.exact)

    @property
    def candidates(self) -> int:
        """N_chunk: tokens of blended chunks."""
        return sum(span.tokens for span in self.blended)

    @property
    def geometry(self) -> PromptGeometry:
        """The query span is what follows the last chunk, loaded or computed: at least the last token."""
        loaded = max((span.end for span in self.spans), default=0)
        computed = min(self.question_start, self.prompt_tokens - 1)
        return PromptGeometry(
            self.prompt_tokens,
            tuple((span.start, span.end) for span in self.blended),
            (max(loaded, computed), self.prompt_tokens),
        )


@dataclass(frozen=True)
class FusionCounts:
    """Rows computed, for the metrics and the floor."""

    candidate_rows: tuple[int, ...]
    """Chunk tokens computed in each layer."""
    rows: tuple[int, ...]
    """All rows whose K/V each layer computed, the fresh ones twice if a scout pass ran."""
    recomputed_per_span: tuple[float, ...]
    """Mean over layers 1…L-1 of the tokens recomputed in each blended span."""
    candidates: int

    @classmethod
    def of(
        cls,
        request: BlendRequest,
        recomputed: Sequence[torch.Tensor],
        rows: Sequence[int],
        scouted: Sequence[int],
    ) -> FusionCounts:
        """``recomputed`` are the chunk tokens ``[n]`` that each layer computed, ``rows`` all rows;
        ``scouted`` the rows of each layer of the scout pass."""
        times = np.zeros(request.prompt_tokens)
        for _, run in groupby(recomputed[1:], key=id):
            same = list(run)
            times[same[0].cpu().numpy()] += len(same)
        layers = max(len(recomputed) - 1, 1)
        return cls(
            tuple(tokens.numel() for tokens in recomputed),
            tuple(map(sum, zip_longest(rows, scouted, fillvalue=0))),
            tuple(float(times[s.start : s.end].sum()) / layers for s in request.blended),
            request.candidates,
        )

    @property
    def ratio(self) -> float:
        """Mean share of chunk tokens recomputed in layers 1…L-1."""
        return self._share(self.candidate_rows[1:])

    @property
    def charged_ratio(self) -> float:
        """Σ_l |chunk tokens computed in layer l| / (L · N_chunk)."""
        return self._share(self.candidate_rows)

    def _share(self, counts: Sequence[int]) -> float:
        return sum(counts) / max(1, len(counts) * self.candidates)


class TokenSelector:
    """Which chunk tokens of one prompt each layer computes: its policy with its budgets and what it needs."""

    def __init__(self, request: BlendRequest, layers: int, device: torch.device) -> None:
        state = np.zeros(request.prompt_tokens, dtype=np.int8)
        for span in request.spans:
            state[span.start : span.end] = 2 if span.exact else 1
        self._host = np.flatnonzero(state == 0), np.flatnonzero(state == 1)
        self.always, self.candidates = (torch.from_numpy(at).to(device) for at in self._host)
        """Positions of the fresh tokens, and of those of blended chunks."""
        self.geometry = request.geometry
        blending = request.blending
        self.policy = blending.policy
        self.schedule = self.policy.schedule or blending.schedule
        self._layers = layers
        budgets = self.schedule.counts(blending.fixed_ratio, layers, self.candidates.numel())
        self._budgets = [*budgets[:1], *budgets] if budgets else [self.candidates.numel()]
        """Tokens per layer; layer 0 computes what layer 1 needs."""
        self._attention: torch.Tensor | None = None
        self.probes = self.candidates[:0]
        """The policy's, once the rows are planned: tokens by whose errors stored KV is moved."""

    @property
    def needs_scout(self) -> bool:
        """Whether a scout pass must run before anything is chosen."""
        needed = self.policy.needs_attention and self.candidates.numel() > 0
        return needed and self._attention is None

    @property
    def needs_peek(self) -> bool:
        """Whether layer 1's K/V of all candidates are needed before its tokens are chosen."""
        return self.policy.needs_deviation and self.candidates.numel() > 0 and self._layers > 1

    def new_scout(self, rows: Rows) -> Scout:
        """Observes a scout pass over ``rows``."""
        start, end = self.geometry.query_span
        layers = self.policy.attention_layers(self._layers)
        return Scout(end - start, layers, self.policy.sqrt_attention, rows)

    def use(self, scout: Scout) -> None:
        """Choose by the attention that ``scout`` observed, or by the policy's fallback if it saw none."""
        self._attention = scout.attention
        if self._attention is None:
            self.policy = make_policy(self.policy.fallback)

    def plan(self, prompt: PromptRows, force_masks: bool) -> list[LayerRows]:
        """The rows of all layers if the policy ranks tokens once, else an empty list."""
        if not self.policy.ranks_once or not self.candidates.numel():
            return []
        view = self._view(self.candidates)
        self.probes = self.policy.probes(view, self._budgets[0])
        scores = self.policy.scores(view, self._budgets[0]).cpu().numpy()
        rank = np.empty(len(scores), dtype=np.int64)
        rank[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
        return nested_rows(prompt, *self._host, rank, self._budgets, force_masks)

    def entry(self) -> torch.Tensor:
        """Candidates computed in layer 0: all of them if fresh KV is compared with loaded."""
        if self.policy.needs_deviation:
            return self.candidates
        return self.select(0, self.candidates)

    def select(self, layer: int, tokens: torch.Tensor, fetch: Fetch | None = None) -> torch.Tensor:
        """Tokens of ``layer``, out of the ``tokens`` of the layer before."""
        return self.policy.select(layer, self._view(tokens, fetch), self._budgets[layer])

    def _view(self, tokens: torch.Tensor, fetch: Fetch | None = None) -> LayerView:
        attention = self._attention[tokens] if self._attention is not None else None
        return LayerView(self.geometry, tokens, fetch, attention)
