"""Blending inside an unmodified model: forward pre-hooks on its decoder layers, and a cache.

Owns the hooks. They shrink each layer's arguments to the rows the fusion selects, serve exactly one
forward of one sequence, and are gone afterwards, whatever happens. Hooks are global to the model:
the caller holds the adapter's lock from :meth:`Fusor.fuse` to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import NAME, ROWS_KEYWORD, implementation, serves
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import BlendRequest, Fusion
from blendrag.fusor.narrow import narrow_kwargs, refuse_positional
from blendrag.fusor.rows import Rows
from blendrag.fusor.scout import scouting
from blendrag.model.adapter import ModelAdapter
from blendrag.timeline import Timeline

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
        self.fast_attention = serves(adapter.stack) if fast_attention is None else fast_attention
        self._force_masks = force_masks
        own = adapter.stack.config._attn_implementation
        if not self.fast_attention and own not in MASKABLE:
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
    ) -> Iterator[Fusion]:
        """Within this context the model's first forward with ``cache`` is blended, later ones stock.

        Caller holds the adapter's lock. Raises :class:`SpanCorruptError` out of the forward when a
        chunk's bytes are not what was put; the cache is then unusable. ``check()`` is called before
        each layer and may raise to abandon the forward. ``timeline`` is told what is done when.
        """
        fusion = Fusion(request, cache, self.adapter.repositioner, self._force_masks, timeline)
        with ExitStack() as armed:
            armed.callback(fusion.loader.close)
            cache.merge = fusion.merge
            armed.callback(_disarm, cache)
            if self.fast_attention:
                armed.enter_context(implementation(self.adapter.stack, NAME))
            for index, layer in enumerate(self.adapter.stack.layers):
                hook = _LayerHook(fusion, index, not self.fast_attention, check)
                armed.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if timeline is not None:
                    end = _LayerEnd(timeline, index)
                    armed.callback(layer.register_forward_hook(end).remove)
            if fusion.scouts:
                before = self.adapter.stack.base.register_forward_pre_hook(
                    self._scout_hook(fusion), with_kwargs=True
                )
                armed.callback(before.remove)
            done = self.adapter.stack.base.register_forward_hook(lambda *_: armed.close())
            armed.callback(done.remove)
            fusion.loader.start()
            yield fusion

    def _scout_hook(self, fusion: Fusion) -> Callable[..., None]:
        """Runs the decoder once over stored KV before the blended forward."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with fusion.scouting() as scout, scouting(self.adapter.stack, scout):
                module.forward(*args, **kwargs)

        return hook

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
        rows computed in the last layer (0: all of them), or of the rows at these indices.
        """
        cache = self.new_cache(request.prompt_tokens, new_tokens)
        with self.adapter.lock, self.fuse(cache, request, check, timeline) as fusion:
            out = self.adapter.model(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        return out.logits, cache, fusion


class _LayerHook:
    """Forward pre-hook of one decoder layer."""

    def __init__(
        self, fusion: Fusion, index: int, masked: bool, check: Callable[[], None] | None
    ) -> None:
        self._fusion = fusion
        self._index = index
        self._masked = masked
        self._check = check

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._check is not None:
            self._check()
        if self._fusion.timeline is not None:
            self._fusion.timeline.enter(self._index)
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[0] != 1:
            raise UnsupportedModelError(
                f"a batch of {hidden.shape[0]} sequences cannot be blended in one forward; "
                "blend one prompt at a time"
            )
        refuse_positional(args[1:], self._fusion.request.prompt_tokens)

        def arguments(
            rows: Rows, indices: torch.Tensor | None
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            masked = self._masked or self._fusion.is_scouting
            narrowed = narrow_kwargs(kwargs, rows, masked)
            if not masked:
                narrowed[ROWS_KEYWORD] = rows
            states = hidden if indices is None else hidden[:, indices]
            if args:
                return (states, *args[1:]), narrowed
            narrowed["hidden_states"] = states
            return args, narrowed

        def peek(rows: Rows) -> None:
            peek_args, peek_kwargs = arguments(rows, None)
            module.forward(*peek_args, **peek_kwargs)

        return arguments(*self._fusion.enter_layer(self._index, peek))


class _LayerEnd:
    """Forward hook of one decoder layer: its span of a timeline ends here."""

    def __init__(self, timeline: Timeline, index: int) -> None:
        self._timeline = timeline
        self._index = index

    def __call__(self, *args: Any) -> None:
        self._timeline.leave(self._index)


def _disarm(cache: BlendCache) -> None:
    cache.merge = None
