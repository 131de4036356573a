"""Blending inside an unmodified model: forward pre-hooks on its decoder layers, and a cache.

Owns when the hooks are there. They shrink each layer's arguments to the rows the fusion selects, serve
exactly one forward, and are gone afterwards, whatever happens. They act on the forward that is given the
fusion's cache and on no other, in whatever thread. The caller holds the adapter's lock from
:meth:`Fusor.fuse` to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import NAME, implementation, serves
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import BlendRequest, Fusion
from blendrag.fusor.hooks import (
    Blending,
    LayerEnd,
    LayerHook,
    carries,
    is_under_way,
    under_way,
)
from blendrag.fusor.malloc import keep_freed_blocks
from blendrag.fusor.pack import NobodyLeft
from blendrag.fusor.pack_scout import scouting_together
from blendrag.fusor.packing import Packing, Prefilled, Prompt, replayed
from blendrag.fusor.scout import Scouted, scouting
from blendrag.metrics import Timeline
from blendrag.model.adapter import ModelAdapter

#: Attention implementations that take an arbitrary mask, so that any rows can be selected.
MASKABLE = ("sdpa", "eager")


class Fusor:
    """Runs blended forwards on one model."""

    def __init__(
        self,
        adapter: ModelAdapter,
        fast_attention: bool | None = None,
        force_masks: bool = False,
    ) -> None:
        """``fast_attention=False`` keeps the model's own attention with explicit masks (the
        reference); ``None`` measures whether the fast one serves this model. ``force_masks`` takes
        the scatter and mask path even where all rows are computed (the gate's r = 1.0)."""
        adapter.require_blendable()
        self.adapter = adapter
        if fast_attention is None:
            with adapter.uncompiled():
                fast_attention = serves(adapter.stack)
        self.fast_attention = fast_attention
        self._force_masks = force_masks
        if adapter.device.type == "cpu":
            keep_freed_blocks()
        own = adapter.stack.config._attn_implementation
        if not self.fast_attention and own not in MASKABLE:
            raise UnsupportedModelError(
                f"attention implementation {own!r} takes no arbitrary mask; load the model with "
                "attn_implementation='sdpa' or 'eager', or use mode full"
            )

    @property
    def packs(self) -> bool:
        """Whether :meth:`batched_prefill` can be used: a mask would have to span all prompts' keys."""
        return self.fast_attention

    def new_cache(self, prompt_tokens: int, new_tokens: int) -> BlendCache:
        """A cache with room for the prompt and the answer."""
        return BlendCache(self.adapter.layout, prompt_tokens + new_tokens + 1, self.adapter.device)

    # -- one prompt ---------------------------------------------------------------------------

    @contextmanager
    def fuse(
        self,
        cache: BlendCache,
        request: BlendRequest,
        check: Callable[[], None] | None = None,
        timeline: Timeline | None = None,
        last_row_only: bool = False,
    ) -> Iterator[Fusion]:
        """Within this context the model's first forward with ``cache`` is blended, later ones stock.

        Caller holds the adapter's lock. Raises :class:`SpanCorruptError` out of the forward when a
        chunk's bytes are not what was put; the cache is then unusable. ``check()`` is called before
        each layer and may raise to abandon the forward. ``timeline`` is told what is done when.
        ``last_row_only``: the decoder returns the hidden state of the prompt's last token alone, for which
        the last layer costs little more than its K/V.
        """
        fusion = Fusion(
            request, cache, self.adapter.repositioner, self._force_masks, timeline, last_row_only
        )

        @contextmanager
        def scout_pass() -> Iterator[None]:
            with fusion.scouting() as scout, scouting(self.adapter.stack, scout):
                yield

        with self._armed(fusion, cache, scout_pass, check):
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
        """Blended prefill of ``ids`` ``[1, N]``; logits ``[1, n, V]`` of the last ``logits_to_keep``
        rows computed in the last layer (0: all of them), or of the rows at these indices. With 1, the
        last layer computes no other row beyond its K/V.
        """
        cache = self.new_cache(request.prompt_tokens, new_tokens)
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        with self.adapter.lock, self.fuse(cache, request, check, timeline, last) as fusion:
            out = self.adapter.model(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        return out.logits, cache, fusion

    # -- several prompts ----------------------------------------------------------------------

    @torch.inference_mode()
    def batched_prefill(self, prompts: Sequence[Prompt]) -> list[Prefilled | Exception]:
        """Blended prefill of several prompts in one forward of the decoder, its LM head left out.

        Each gets what it would get alone, or what would be raised alone (:class:`SpanCorruptError`, its
        check's own errors): an error of one is no other's. Raises what concerns all of them.
        """
        assert self.packs, "see Fusor.packs"
        packing = Packing(self.adapter, prompts)
        pack, cache = packing.pack, packing.cache

        @contextmanager
        def scout_pass() -> Iterator[None]:
            with pack.scouting() as scouts, scouting_together(self.adapter.stack, scouts):
                yield

        base = self.adapter.stack.base
        with self.adapter.lock, self._armed(pack, cache, scout_pass):
            try:
                out = base(
                    input_ids=packing.ids,
                    position_ids=packing.position_ids,
                    past_key_values=cache,
                    use_cache=True,
                )
            except NobodyLeft:
                out = None
        return packing.outcomes(out)

    @torch.inference_mode()
    def first_logits(self, prefilled: Sequence[Prefilled]) -> torch.Tensor:
        """Logits ``[n, V]`` of the first new token of each, by one run of the LM head."""
        hidden = torch.cat([one.output.last_hidden_state for one in prefilled], dim=1)
        output = type(prefilled[0].output)(last_hidden_state=hidden)
        ids = torch.zeros((1, len(prefilled)), dtype=torch.long, device=hidden.device)
        adapter = self.adapter
        with adapter.lock, adapter.uncompiled(), replayed(adapter.stack.base, output):
            logits: torch.Tensor = self.adapter.model(input_ids=ids, logits_to_keep=0).logits
        return logits[0]

    # -- the hooks ----------------------------------------------------------------------------

    @contextmanager
    def _armed(
        self,
        blending: Blending,
        cache: BlendCache,
        scouting_pass: Callable[[], AbstractContextManager[None]],
        check: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Within this context the decoder's first forward is ``blending``'s."""
        stack = self.adapter.stack
        with self.adapter.uncompiled(), ExitStack() as armed:
            armed.callback(blending.close)
            cache.merge = blending.merge
            armed.callback(cache.end_fusion)
            for index, layer in enumerate(stack.layers):
                hook = LayerHook(blending, cache, index, not self.fast_attention, check)
                armed.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if blending.timeline is not None:
                    end = LayerEnd(blending.timeline, cache, index)
                    armed.callback(layer.register_forward_hook(end).remove)

            def begin(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
            ) -> None:
                if kwargs is None or not carries(cache, args, kwargs):
                    return
                armed.enter_context(under_way(cache))
                if self.fast_attention:
                    armed.enter_context(implementation(stack, NAME))
                if blending.scouts:  # over stored KV, before the blended forward
                    with scouting_pass(), suppress(Scouted):
                        module.forward(*args, **kwargs)

            def finish(*_: Any) -> None:
                if is_under_way(cache):
                    armed.close()

            before = stack.base.register_forward_pre_hook(begin, with_kwargs=True)
            armed.callback(before.remove)
            armed.callback(stack.base.register_forward_hook(finish).remove)
            blending.start()
            yield
