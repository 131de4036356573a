"""Blended forwards of an unmodified model.

The caller holds the adapter's lock from :meth:`Fusor.fuse` to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import serves
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import Fusion
from blendrag.fusor.hooks import hooked, token_arguments
from blendrag.fusor.request import BlendRequest
from blendrag.fusor.scout import observes
from blendrag.metrics import Timeline
from blendrag.model.adapter import ModelAdapter
from blendrag.model.compat import attention_name

#: Attention implementations that take any mask, so that any rows can be selected.
MASKABLE = ("sdpa", "eager")
#: The largest block from which glibc's malloc learns, ``4 MiB · sizeof(long)``, less what it adds.
LARGEST_LESSON = (32 << 20) - (64 << 10)


class Fusor:
    def __init__(
        self, adapter: ModelAdapter, fast_attention: bool | None = None, force_masks: bool = False
    ) -> None:
        """``fast_attention=False`` keeps the model's own attention with explicit masks (the reference);
        ``None`` measures whether the fast one serves this model. ``force_masks`` takes the scatter and mask
        path even where all rows are computed (the gate's r = 1.0)."""
        adapter.require_fusing()
        self.adapter = adapter
        if fast_attention is None:
            with adapter.uncompiled():
                fast_attention = serves(adapter.stack)
        self.fast_attention = fast_attention
        with adapter.uncompiled():
            self._observes = fast_attention or observes(adapter.stack)
            self._by_token = token_arguments(adapter.stack)
        self._force_masks = force_masks
        if adapter.device.type == "cpu":
            keep_freed_blocks()
        own = attention_name(adapter.stack.config)
        if not fast_attention and own not in MASKABLE:
            raise UnsupportedModelError(
                f"attention implementation {own!r} takes no arbitrary mask; load the model with "
                "attn_implementation='sdpa' or 'eager', or use mode full"
            )

    def new_cache(self, prompt_tokens: int, new_tokens: int) -> BlendCache:
        """A cache with room for the prompt and the answer."""
        return BlendCache(self.adapter.layout, prompt_tokens + new_tokens + 1, self.adapter.device)

    @contextmanager
    def fuse(
        self,
        cache: BlendCache,
        request: BlendRequest,
        check: Callable[[], None] | None = None,
        timeline: Timeline | None = None,
        last_row_only: bool = False,
    ) -> Iterator[Fusion]:
        """Within this context the model's first forward with ``cache`` is blended, later ones are stock.

        Raises :class:`SpanCorruptError` out of the forward if a chunk's bytes fail verification; the cache is
        then unusable. ``check()`` is called before each layer and may raise to abandon the forward.
        ``last_row_only``: the decoder returns the hidden state of the prompt's last token alone; the last
        layer then costs little more than its K/V.
        """
        repositioner = self.adapter.repositioner_of(request.prompt_tokens)
        how = self._force_masks, timeline, check, last_row_only
        fusion = Fusion(request, cache, repositioner, *how)
        found = self.fast_attention, self._observes, self._by_token
        with self.adapter.uncompiled(), hooked(self.adapter.stack, fusion, *found):
            yield fusion

    @torch.inference_mode()
    def prefill(
        self,
        ids: torch.Tensor,
        request: BlendRequest,
        new_tokens: int = 0,
        logits_to_keep: int | torch.Tensor = 1,
        check: Callable[[], None] | None = None,
        timeline: Timeline | None = None,
    ) -> tuple[torch.Tensor, BlendCache, Fusion]:
        """Blended prefill of ``ids`` ``[1, N]``.

        Returns logits ``[1, n, V]`` of the last ``logits_to_keep`` rows computed in the last layer (0: all of
        them), or of the rows at these indices. With 1, the last layer computes only K/V of other rows.
        """
        cache = self.new_cache(request.prompt_tokens, new_tokens)
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        with (
            self.adapter.lock,
            self.adapter.own_tables(),
            self.fuse(cache, request, check, timeline, last) as fusion,
        ):
            out = self.adapter.model(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=logits_to_keep
            )
        return out.logits, cache, fusion


def keep_freed_blocks() -> None:
    """Free one large block, so that malloc keeps what a layer frees for the next layer.

    glibc unmaps a large block when it is freed, and mapping it again costs a page fault per page. Once one
    was freed, blocks up to its size come from the heap, of which twice that size stays (mallopt(3),
    ``M_MMAP_THRESHOLD``). No effect with another malloc or fixed thresholds.
    """
    torch.empty(LARGEST_LESSON, dtype=torch.uint8)
