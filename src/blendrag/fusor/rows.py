"""Which rows a layer computes, and what each of them may see.

A selected row *s* sees key *j* iff ``pos_j <= pos_s`` and, in a sliding-window layer,
``pos_s - pos_j < window``. A triangular mask aligned bottom-right would let selected rows see their
future. Built once per selection and shared by every layer that keeps it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

#: Rows per attention call. Fewer rows see fewer keys that all of them mask; more calls cost more.
BLOCK_ROWS = 96
#: In a long contiguous run the calls are big anyway.
RUN_ROWS = 512
#: What the biases of a prompt may take, folded.
FOLDED_BYTES = 64 << 20
#: Elements from one row of a bias to the next are a multiple of this: a GPU's kernels take no other, and
#: torch would copy it for every call.
ALIGNED = 16


class Block(NamedTuple):
    """Rows ``[a, b)`` attending keys ``[lo, hi)`` under ``bias`` ``[b-a, hi-lo]`` (0 or -inf).

    Folded, ``bias`` is ``[G·(b-a), hi-lo]``: for G query heads that share a KV head, one's rows behind
    another's.
    """

    a: int
    b: int
    lo: int
    hi: int
    bias: torch.Tensor

    def folded(self, sharing: int) -> Block:
        rows, keys = self.bias.shape
        bias = _new_bias(sharing * rows, keys, self.bias)
        bias.unflatten(0, (sharing, rows)).copy_(self.bias)
        return self._replace(bias=bias)


class Rows:
    """Prompt positions ``[S]`` computed in a layer, ascending, out of ``prompt_tokens`` keys."""

    def __init__(
        self,
        positions: torch.Tensor,
        prompt_tokens: int,
        force_masks: bool = False,
        is_last: bool = False,
    ) -> None:
        """``is_last``: they are the prompt's last token, so that the device need not be asked."""
        self.positions = positions
        self.prompt_tokens = prompt_tokens
        self.count = positions.numel()
        self.attended = False
        """Whether the fast attention really ran over them."""
        self.gathered: list[tuple[Any, Any, Any]] = []
        """Arguments of layers, how rows of them are taken, and what they are for these rows alone."""
        self._force_masks = force_masks
        self._is_last = is_last
        self._blocks: dict[tuple[int | None, torch.dtype, int], list[Block]] = {}
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def covers_prompt(self) -> bool:
        """Whether plain causality describes these rows; never while masks are forced."""
        return self.count == self.prompt_tokens and not self._force_masks

    def blocks(self, window: int | None, dtype: torch.dtype, sharing: int = 1) -> list[Block]:
        """The attention calls of a layer with that sliding window (``None``: full attention).

        Folded where ``sharing`` query heads share a KV head: of a long prompt, as many as take no more
        than :data:`FOLDED_BYTES`.
        """
        key = (window, dtype, sharing)
        if key not in self._blocks:
            blocks = self._cut(window, dtype)
            left = FOLDED_BYTES
            for i, block in enumerate(blocks):
                left -= sharing * block.bias.nbytes
                if sharing == 1 or left < 0:
                    break
                blocks[i] = block.folded(sharing)
            self._blocks[key] = blocks
        return self._blocks[key]

    def mask(self) -> torch.Tensor:
        """The same as one boolean mask ``[1, 1, S, N]``, True = visible: the slow reference."""
        return self.visible(None)

    def visible(self, window: int | None) -> torch.Tensor:
        """:meth:`mask` of a layer with that sliding window."""
        if window not in self._masks:
            keys = torch.arange(self.prompt_tokens, device=self.positions.device)
            rows = self.positions[:, None]
            seen = keys[None, :] <= rows
            if window is not None:
                seen &= rows - keys[None, :] < window
            self._masks[window] = seen[None, None]
        return self._masks[window]

    def _cut(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        if self._is_last:  # sees all that its window lets it
            lo, hi = max(0, self.prompt_tokens - (window or self.prompt_tokens)), self.prompt_tokens
            seen = torch.zeros((1, hi - lo), dtype=dtype, device=self.positions.device)
            return [Block(0, 1, lo, hi, seen)]
        step = RUN_ROWS if self.count > 0.6 * self.prompt_tokens else BLOCK_ROWS
        starts = list(range(0, self.count, step))
        ends = [*starts[1:], self.count]
        edges = torch.tensor([[a, b - 1] for a, b in zip(starts, ends, strict=True)])
        device = self.positions.device
        bounds = self.positions[edges.to(device)].tolist()
        keys = torch.arange(self.prompt_tokens, device=device)
        seen, masked = torch.tensor([0.0, float("-inf")], dtype=dtype, device=device)
        blocks = []
        for a, b, (first, last) in zip(starts, ends, bounds, strict=True):
            lo, hi = (0 if window is None else max(0, first - window + 1)), last + 1
            rows = self.positions[a:b, None]
            hidden = keys[None, lo:hi] > rows
            if window is not None:
                hidden |= rows - keys[None, lo:hi] >= window
            bias = _new_bias(b - a, hi - lo, seen)
            blocks.append(Block(a, b, lo, hi, torch.where(hidden, masked, seen, out=bias)))
        return blocks


def _new_bias(rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """``[rows, keys]``, uninitialised, its rows :data:`ALIGNED`."""
    return like.new_empty((rows, -(-keys // ALIGNED) * ALIGNED))[:, :keys]
