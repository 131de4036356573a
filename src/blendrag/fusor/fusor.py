"""Blended forwards of an unmodified model.

The caller holds the adapter's lock from :meth:`Fusor.fuse` to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from blendrag.errors import UnsupportedModelError
from blendrag.fusor.attention import serves
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import Fusion
from blendrag.fusor.hooks import hooked, token_arguments
from blendrag.fusor.induction import copying_heads
from blendrag.fusor.pack import NoRowsLeft, Pack, PackedPrompt, Prefilled, replayed
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
        self._copying: tuple[Hashable, Mapping[int, torch.Tensor] | None] = None, None
        if adapter.device.type == "cpu":
            keep_freed_blocks()
        own = attention_name(adapter.stack.config)
        if not fast_attention and own not in MASKABLE:
            raise UnsupportedModelError(
                f"attention implementation {own!r} takes no arbitrary mask; load the model with "
                "attn_implementation='sdpa' or 'eager', or use mode full"
            )

    @property
    def packs(self) -> bool:
        """Whether :meth:`batched_prefill` can be used. A mask would have to span all prompts' keys."""
        return self.fast_attention

    def new_cache(self, prompt_tokens: int, new_tokens: int) -> BlendCache:
        """A cache with room for the prompt and the answer."""
        return BlendCache(self.adapter.layout, prompt_tokens + new_tokens + 1, self.adapter.device)

    def prepare(self) -> None:
        """What is measured once of a model's weights, so that no request waits for it."""
        if self._observes:
            self._copying_heads()

    def _copying_heads(self) -> Mapping[int, torch.Tensor]:
        """Of the weights and adapters that are active now."""
        weights, heads = self._copying
        if heads is None or weights != self.adapter.identified_weights:
            heads = copying_heads(self.adapter)
            self._copying = self.adapter.identified_weights, heads
        return heads

    def _kept_heads(self, request: BlendRequest) -> Mapping[int, torch.Tensor]:
        """By layer, the heads ``[n]`` whose stored keys are not moved."""
        moves = request.blending.policy.moves_others and self._observes
        return self._copying_heads() if moves and request.candidates else {}

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
        """Within this context the model's first forward with ``cache`` is blended, later ones are stock.

        Raises :class:`SpanCorruptError` out of the forward if a chunk's bytes fail verification; the cache is
        then unusable. ``check()`` is called before each layer and may raise to abandon the forward.
        ``last_row_only``: the decoder returns the hidden state of the prompt's last token alone; the last
        layer then costs little more than its K/V.
        """
        repositioner = self.adapter.repositioner_of(request.prompt_tokens)
        kept = self._kept_heads(request)
        fusion = Fusion(request, cache, repositioner, self._force_masks, timeline, check, kept)
        with self._blended(Pack([fusion], cache, last_row_only)):
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

    # -- several prompts ----------------------------------------------------------------------

    @torch.inference_mode()
    def batched_prefill(self, prompts: Sequence[PackedPrompt]) -> list[Prefilled | Exception]:
        """Blended prefill of several prompts in one forward of the decoder, without its LM head.

        Each prompt gets what it would get alone, or the error that it would raise alone
        (:class:`SpanCorruptError`, errors of its check). Raises errors that concern all of them.
        """
        assert self.packs, "see Fusor.packs"
        adapter = self.adapter
        *starts, capacity = accumulate((prompt.capacity for prompt in prompts), initial=0)
        cache = BlendCache(adapter.layout, capacity, adapter.device)
        parts = [cache.part(at, p.capacity) for at, p in zip(starts, prompts, strict=True)]
        fusions = [
            Fusion(
                prompt.request,
                part,
                adapter.repositioner,
                check=prompt.check,
                kept_heads=self._kept_heads(prompt.request),
            )
            for prompt, part in zip(prompts, parts, strict=True)
        ]
        pack = Pack(fusions, cache, last_row_only=True, isolates_errors=True)
        positions = [torch.arange(f.prompt_tokens, device=adapter.device) for f in fusions]
        with adapter.lock, adapter.own_tables(), self._blended(pack):
            try:
                out = adapter.stack.base(
                    input_ids=torch.cat([prompt.ids for prompt in prompts], dim=1),  # [1, ΣN]
                    position_ids=torch.cat(positions)[None],
                    past_key_values=cache,
                    use_cache=True,
                )
                rows = {member: row for row, member in enumerate(pack.finished)}
            except NoRowsLeft:
                out, rows = None, {}

        def outcome(member: int, fusion: Fusion) -> Prefilled | Exception:
            if member in pack.failures:
                return pack.failures[member]
            hidden = out.last_hidden_state[:, rows[member] : rows[member] + 1]  # [1, 1, D]
            output = type(out)(last_hidden_state=hidden, past_key_values=fusion.cache)
            return Prefilled(fusion, output)

        return [outcome(member, fusion) for member, fusion in enumerate(fusions)]

    @torch.inference_mode()
    def first_logits(self, prefilled: Sequence[Prefilled]) -> torch.Tensor:
        """Logits ``[n, V]`` of the first new token of each, by one run of the LM head."""
        hidden = torch.cat([one.output.last_hidden_state for one in prefilled], dim=1)
        output = type(prefilled[0].output)(last_hidden_state=hidden)
        ids = torch.zeros((1, len(prefilled)), dtype=torch.long, device=hidden.device)
        adapter = self.adapter
        with adapter.lock, adapter.uncompiled(), replayed(adapter.stack.base, output):
            logits: torch.Tensor = adapter.model(input_ids=ids, logits_to_keep=0).logits
        return logits[0]

    @contextmanager
    def _blended(self, pack: Pack) -> Iterator[None]:
        found = self.fast_attention, self._observes, self._by_token
        with self.adapter.uncompiled(), hooked(self.adapter.stack, pack, *found):
            yield


def keep_freed_blocks() -> None:
    """Free one large block, so that malloc keeps what a layer frees for the next layer.

    glibc unmaps a large block when it is freed, and mapping it again costs a page fault per page. Once one
    was freed, blocks up to its size come from the heap, of which twice that size stays (mallopt(3),
    ``M_MMAP_THRESHOLD``). No effect with another malloc or fixed thresholds.
    """
    torch.empty(LARGEST_LESSON, dtype=torch.uint8)
