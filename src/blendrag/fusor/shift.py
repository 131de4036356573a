"""Moves stored KV by the mean error of recomputed tokens (AgentKVShift).

Chunks were encoded without the text that is before them now, so part of the error is the same for all tokens
of a chunk, and part for all of a prompt. The recomputed tokens show it: fresh minus stored. In each layer and
KV head, every other token is moved by :data:`GAIN` times the mean error of its chunk. Tokens that a policy
chose for a reason err unlike the others, so that random ones among them, the *probes*, count more. Few tokens
give a noisy mean: a chunk's is drawn towards the prompt's, and that one towards 0, each as if
:data:`PRIOR_TOKENS` more probes had it.
Keys are compared and moved as they were before rotation, relative to the start of their chunk.
"""

from __future__ import annotations

import torch

from blendrag.fusor.rows import Rows
from blendrag.fusor.selection import PromptGeometry
from blendrag.model.positions import Repositioner

PRIOR_TOKENS = 12
#: How many probes all tokens together count for that are none.
CHOSEN_TOKENS = 24
#: The whole mean is too much for some prompts: where an answer copies a passage, moved keys can hide it.
GAIN = 0.7


class ChunkShift:
    """The shift of one prompt's blended chunks. Exact chunks and fresh tokens stay."""

    def __init__(
        self, geometry: PromptGeometry, probes: torch.Tensor, repositioner: Repositioner
    ) -> None:
        """``probes`` ``[p]``: random tokens among those that are recomputed."""
        device = probes.device
        spans = geometry.chunk_spans
        self._hull = slice(spans[0][0], spans[-1][1])
        self._chunks = len(spans)
        chunk_of = torch.full((geometry.prompt_tokens,), self._chunks)
        index = torch.zeros(geometry.prompt_tokens, dtype=torch.long)
        for chunk, (start, end) in enumerate(spans):
            chunk_of[start:end] = chunk
            index[start:end] = torch.arange(end - start)
        self._chunk_of, self._index = chunk_of.to(device), index.to(device)
        """``[N]``: the chunk of each token, the number of chunks for others, and the token's index in it."""
        self._probes, self._repositioner = probes, repositioner
        self._forth = repositioner.tables(self._index[self._hull])
        self._chosen: torch.Tensor | None = None

    def move_(
        self,
        layer: int,
        rows: Rows,
        chosen: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor],
        loaded: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Move ``loaded`` K and V ``[Hkv, N, D]`` by ``fresh`` ones ``[Hkv, S, D]`` of ``rows``, among which
        are the chunk tokens ``chosen`` ``[n]``. These are moved, too: their fresh KV replaces it."""
        if chosen is not self._chosen:
            self._look_up(rows, chosen)
        for part, (new, old) in enumerate(zip(fresh, loaded, strict=True)):
            turns = part == self._repositioner.part(layer)
            errors = new[:, self._at].float() - old[:, chosen].float()  # [Hkv, n, D]
            if turns:
                self._repositioner.rotate_(errors, layer, self._back)
            heads, _, width = errors.shape
            errors *= self._weights
            sums = errors.new_zeros((heads, self._chunks + 1, width))
            sums.index_add_(1, self._chosen_chunks, errors)
            prompt_mean = errors.sum(1, keepdim=True) / (self._weights.sum() + PRIOR_TOKENS)
            means = GAIN * (sums + PRIOR_TOKENS * prompt_mean) / self._chunk_weights
            means[:, -1] = 0  # of tokens in no blended chunk
            moved = means[:, self._chunk_of[self._hull]]  # [Hkv, hull, D]
            if turns:
                self._repositioner.rotate_(moved, layer, self._forth)
            old[:, self._hull] += moved  # added up in float32

    def _look_up(self, rows: Rows, chosen: torch.Tensor) -> None:
        """What layers with the same tokens share."""
        self._chosen = chosen
        self._at = torch.searchsorted(rows.positions, chosen)
        self._chosen_chunks = self._chunk_of[chosen]
        self._back = self._repositioner.tables(-self._index[chosen])
        is_probe = torch.isin(chosen, self._probes)
        others = chosen.numel() - self._probes.numel()
        weights = torch.where(is_probe, 1.0, min(1.0, CHOSEN_TOKENS / max(1, others)))
        in_chunks = weights.new_full((self._chunks + 1,), PRIOR_TOKENS)
        in_chunks.index_add_(0, self._chosen_chunks, weights)
        self._weights = weights[:, None]  # [n, 1]
        self._chunk_weights = in_chunks[:, None]  # [chunks + 1, 1]
