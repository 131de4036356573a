"""Moves stored KV by the errors of recomputed tokens (AgentKVShift).

Chunks were encoded without the text that is before them now. Part of the error is the same for all tokens of
a prompt, part for all of a chunk, and part for neighbours. Recomputed tokens show it: fresh minus stored. In
each layer and KV head, the others are moved by :data:`GAIN` times the error that is expected of them: about
the mean of the prompt, that of a Gaussian process over the positions in their chunk (Rasmussen and Williams
2006, 2.2), where what each token has of its own has variance 1. Some tokens err far more than most and would
move the others too far, so errors longer than the median of their chunk are shortened to it. Tokens that a
policy chose for a reason err unlike the others, too: random ones among them, the *probes*, count more.
Keys are compared and moved as they were before rotation, relative to the start of their chunk.
"""

from __future__ import annotations

import torch

from blendrag.fusor.rows import Rows
from blendrag.fusor.selection import PromptGeometry
from blendrag.model.positions import Repositioner

#: A prompt's mean is drawn towards 0 as by this many probes without an error.
PRIOR_PROBES = 12
#: Variance of what tokens of a chunk share, and of what neighbours do; this falls by e every LENGTH tokens.
CHUNK, NEAR, LENGTH = 1 / 12, 1, 48
#: How many probes all tokens together count for that are none.
CHOSEN_TOKENS = 24
GAIN = 0.8
#: Tokens that are moved alike, and the most such segments of a chunk.
SEGMENT, MOST_SEGMENTS = 16, 256


class ChunkShift:
    """The shift of one prompt's blended chunks. Exact chunks and fresh tokens stay."""

    def __init__(
        self, geometry: PromptGeometry, probes: torch.Tensor, repositioner: Repositioner
    ) -> None:
        """``probes`` ``[p]``: random tokens among those that are recomputed."""
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
            lengths = errors.norm(dim=-1, keepdim=True)
            usual = self._medians(lengths[..., 0])[..., None]
            errors *= self._weights * (usual / lengths.clamp(min=1e-9)).clamp_(max=1)
            if turns:
                self._repositioner.rotate_(errors, layer, self._back)
            heads, _, width = errors.shape
            sums = errors.new_zeros((heads, self._of_sum.numel(), width))
            sums.index_add_(1, self._segment_of[chosen], errors)
            expected = (self._smoother @ sums.unflatten(1, self._shape)).flatten(1, 2)
            expected += self._of_sum * sums.sum(1, keepdim=True)
            moved = GAIN * expected[:, self._segment_of[self._hull]]  # [Hkv, hull, D]
            if turns:
                self._repositioner.rotate_(moved, layer, self._forth)
            old[:, self._hull] += moved  # added up in float32

    def _medians(self, lengths: torch.Tensor) -> torch.Tensor:
        """For each of ``lengths`` ``[Hkv, n]`` the median of its chunk."""
        heads, of_chunk = lengths.shape[0], self._shape[0] * self._most
        padded = lengths.new_full((heads, of_chunk), torch.nan)
        padded[:, self._slots] = lengths
        medians = padded.unflatten(1, (-1, self._most)).nanmedian(-1).values
        return medians[:, self._slots // self._most]

    def _look_up(self, rows: Rows, chosen: torch.Tensor) -> None:
        """What layers with the same tokens share."""
        self._chosen = chosen
        self._at = torch.searchsorted(rows.positions, chosen)
        self._back = self._repositioner.tables(-self._index[chosen])
        is_probe = torch.isin(chosen, self._probes)
        others = chosen.numel() - self._probes.numel()
        chunk = self._segment_of[chosen] // self._shape[1]
        counts = torch.bincount(chunk, minlength=self._shape[0])
        self._most = int(counts.max())
        rank = (
            torch.arange(chosen.numel(), device=chosen.device) - (counts.cumsum(0) - counts)[chunk]
        )
        self._slots = chunk * self._most + rank
        weights = torch.where(is_probe, 1.0, min(1.0, CHOSEN_TOKENS / max(1, others)))
        chunks, segments = self._shape
        known = weights.new_zeros(chunks * segments)
        known = known.index_add_(0, self._segment_of[chosen], weights).view(chunks, segments, 1)
        at = torch.arange(segments, device=chosen.device) * self._segment
        shared = CHUNK + NEAR * torch.exp((at[:, None] - at).abs() / -LENGTH)
        own = torch.eye(segments, device=chosen.device)
        # expected = mean + smoother (sums - known mean), where smoother = shared (1 + known shared)^-1
        self._smoother = torch.linalg.solve(own + known * shared, shared, left=False)
        of_mean = 1 - self._smoother @ known
        of_mean[-1] = 0  # of tokens in no blended chunk
        self._of_sum = of_mean.view(-1, 1) / (weights.sum() + PRIOR_PROBES)
        """``[segments of all chunks, 1]``: the share of a prompt's sum that its mean adds."""
        self._weights = weights[:, None]  # [n, 1]
