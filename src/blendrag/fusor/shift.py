"""Moves stored KV by the errors of recomputed tokens (AgentKVShift).

Chunks were encoded without the text that is before them now. Part of the error is the same for all tokens of
a prompt, part for all of a chunk, and part for neighbours. Recomputed tokens show it: fresh minus stored. In
each layer and KV head, the others are moved by :data:`GAIN` times the error that is predicted from theirs:
the prompt's mean, and what a Gaussian process over the positions in a chunk (Rasmussen and Williams 2006,
2.2) predicts of the rest. Some tokens err far more than most and would move the others too far, so errors
longer than the median of their chunk are shortened to it. Tokens that a policy chose for a reason err unlike
the others, too: random ones among them, the *probes*, count more.
Keys are compared and moved as they were before rotation, relative to the start of their chunk. Those of heads
that copy (:mod:`blendrag.fusor.induction`) stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blendrag.fusor.rows import Rows
from blendrag.fusor.selection import PromptGeometry
from blendrag.model.positions import Repositioner

#: A prompt's mean is drawn towards 0 as by this many probes without an error.
PRIOR_PROBES = 12
#: Variances, where what a probe has of its own has 1: what all tokens of a chunk share, and what neighbours
#: do, which falls by a factor of e every LENGTH tokens.
CHUNK, NEAR, LENGTH = 1 / 12, 1, 48
#: How many probes all tokens together count for that are none.
CHOSEN_TOKENS = 24
GAIN = 0.8
#: Tokens that are moved alike, and the most such segments of a chunk.
SEGMENT, MOST_SEGMENTS = 16, 64


class ChunkShift:
    """The shift of one prompt's blended chunks. Exact chunks and fresh tokens stay."""

    def __init__(
        self,
        geometry: PromptGeometry,
        probes: torch.Tensor,
        repositioner: Repositioner,
        kept_heads: Mapping[int, torch.Tensor],
    ) -> None:
        """``probes`` ``[p]``: random tokens among those that are recomputed. ``kept_heads``: by layer, the
        heads ``[n]`` whose keys are not moved."""
        device = probes.device
        spans = geometry.chunk_spans
        self._hull = slice(spans[0][0], spans[-1][1])
        longest = max(end - start for start, end in spans)
        self._segment = max(SEGMENT, -(-longest // MOST_SEGMENTS))
        self._shape = len(spans) + 1, -(-longest // self._segment)
        """Chunks, with one more for tokens that are in none, and segments in each."""
        index = torch.zeros(geometry.prompt_tokens, dtype=torch.long)
        segment = torch.full_like(index, len(spans) * self._shape[1])
        for chunk, (start, end) in enumerate(spans):
            index[start:end] = torch.arange(end - start)
            segment[start:end] = chunk * self._shape[1] + index[start:end] // self._segment
        self._index, self._segment_of = index.to(device), segment.to(device)
        """``[N]``: the index of each token in its chunk, and its segment among those of all chunks."""
        self._probes, self._repositioner = probes, repositioner
        self._kept_heads = kept_heads
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
        errors = [
            new.index_select(1, self._at).float().sub_(old.index_select(1, chosen))  # [Hkv, n, D]
            for new, old in zip(fresh, loaded, strict=True)
        ]
        shares = self._shares(torch.cat([each.norm(dim=-1) for each in errors]))
        turning = self._repositioner.part(layer)
        self._repositioner.rotate_(errors[turning], layer, self._back)
        heads = shares.split([len(each) for each in errors])
        flat = [
            each.mul_(share[..., None]).transpose(0, 1).flatten(1)  # [n, Hkv · D]
            for each, share in zip(errors, heads, strict=True)
        ]
        predicted = self._predicted(torch.cat(flat, 1)).split([each.shape[1] for each in flat], 1)
        for part, (moves, old) in enumerate(zip(predicted, loaded, strict=True)):
            by_head = moves.unflatten(1, (len(old), -1)).transpose(0, 1)
            by_head = by_head.to(old.dtype, memory_format=torch.contiguous_format)
            if part == turning and layer in self._kept_heads:
                by_head.index_fill_(0, self._kept_heads[layer], 0)
            moved = by_head.index_select(1, self._segment_of[self._hull])  # [Hkv, hull, D]
            if part == turning:
                self._repositioner.rotate_(moved, layer, self._forth)
            old[:, self._hull] += moved

    def _shares(self, lengths: torch.Tensor) -> torch.Tensor:
        """How much of each error counts, by their ``lengths`` ``[H, n]``: shortened to the (lower) median of
        its head and chunk, and as much as its token."""
        ascending, at = lengths.sort(dim=1)
        by_chunk = self._chunks[at].argsort(dim=1, stable=True)
        usual = ascending.gather(1, by_chunk).index_select(1, self._middles)
        return (usual / lengths.clamp_(min=1e-9)).clamp_(max=1).mul_(self._weights)

    def _predicted(self, errors: torch.Tensor) -> torch.Tensor:
        """``[segments of all chunks, W]`` from those of the chosen tokens ``[n, W]``."""
        sums = errors.new_zeros((len(self._of_sum), errors.shape[1]))
        sums.index_add_(0, self._segments, errors)
        predicted = (self._smoother @ sums.unflatten(0, self._shape)).flatten(0, 1)
        return predicted.addmm_(self._of_sum, sums.sum(0, keepdim=True))

    def _look_up(self, rows: Rows, chosen: torch.Tensor) -> None:
        """What layers with the same tokens share."""
        self._chosen = chosen
        self._at = torch.searchsorted(rows.positions, chosen)
        index, segment = self._index[chosen], self._segment_of[chosen]
        self._segments = segment
        self._back = self._repositioner.tables(-index)
        chunks, segments = self._shape
        self._chunks = segment // segments
        ones = torch.ones_like(self._chunks)
        counts = self._chunks.new_zeros(chunks).index_add_(0, self._chunks, ones)
        middles = counts.cumsum(0) - counts + (counts - 1) // 2
        self._middles = middles[self._chunks]
        """``[n]``: where the median of each token's chunk is, of lengths that are sorted in each chunk."""
        others = chosen.numel() - self._probes.numel()
        self._weights = torch.full_like(
            index, min(1.0, CHOSEN_TOKENS / max(1, others)), dtype=torch.float32
        )
        self._weights[torch.isin(chosen, self._probes)] = 1  # [n]
        known = self._weights.new_zeros(chunks * segments).index_add_(0, segment, self._weights)
        known = known.view(chunks, segments, 1)
        at = torch.arange(segments, dtype=torch.float32, device=chosen.device) * self._segment
        shared = CHUNK + NEAR * torch.exp((at[:, None] - at).abs() / -LENGTH)
        own = torch.eye(segments, dtype=torch.float32, device=chosen.device)
        # predicted = mean + smoother (sums - known mean), where smoother = shared (1 + known shared)^-1
        shared = shared.expand(chunks, -1, -1)
        smoother = torch.linalg.solve_ex(own + known * shared, shared, left=False).result
        of_mean = 1 - smoother @ known
        of_mean[-1] = 0  # of tokens in no blended chunk
        self._smoother = GAIN * smoother  # [chunks, segments, segments]
        self._of_sum = GAIN * of_mean.view(-1, 1) / (self._weights.sum() + PRIOR_PROBES)
        """``[segments of all chunks, 1]``: the share of a prompt's sum that its mean adds."""
