"""How far a blended prompt's KV and attention are from a full prefill's (CacheBlend §4.1).

Owns the two measured quantities of the paper, per layer and token of one prompt:

- KV deviation Δ_kv: how far a chunk token's K and V are from those a full prefill computes;
- attention deviation Δ_attn: the L2 norm of the difference of the forward attention matrices, whose
  rows are the tokens behind the context (the question) and whose columns are the chunk tokens.

Both are relative here, to the size of what full prefill computes in that layer: the paper's absolute
differences cannot be averaged over layers and prompts. Does not know where prompts come from, what is
averaged or drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.gate import HeldKV
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.scout import Observed, Scout, scouting
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.model import ModelAdapter
from blendrag.store.kv import ChunkKV
from blendrag.text.prompt import PromptPlan, Segment


@dataclass(frozen=True)
class Deviation:
    """Distances of one blended prompt from its full prefill; ``n`` chunk tokens, ``L`` layers."""

    kv: np.ndarray
    """``[L, n]``: Δ_kv; 1 is as far as K and V of that layer are long."""
    attention: np.ndarray
    """``[L, n]``: what each chunk token adds to Δ_attn, over heads and rows."""
    ratio: float
    charged_ratio: float

    @property
    def kv_by_layer(self) -> np.ndarray:
        """``[L]``: mean over tokens."""
        return np.asarray(self.kv.mean(axis=1))

    @property
    def attention_by_layer(self) -> np.ndarray:
        """``[L]``: Δ_attn(A_i, A_i^full), the norm over all tokens."""
        return np.asarray(np.sqrt(np.square(self.attention).sum(axis=1)))


@dataclass(frozen=True)
class Prefilled:
    """What one prefill left behind: per layer K and V of the chunk tokens, and A_i."""

    kv: Sequence[torch.Tensor]
    """Each ``[2, Hkv, n, D]``, keys at their prompt positions."""
    attention: Sequence[torch.Tensor]
    """Each ``[H, Q, n]`` float32."""
    ratio: float
    charged_ratio: float


class StoredPrompt:
    """A prompt whose chunks were encoded apart, held against a full prefill of the same tokens.

    Every prefill runs with attention written out, so that its weights can be kept and equal KV gives
    equal numbers. Holds all KV of the prompt in memory. Does not modify the model; takes its lock.
    """

    def __init__(self, adapter: ModelAdapter, plan: PromptPlan, prefix_ids: Sequence[int]) -> None:
        """Encodes the chunks of ``plan`` behind ``prefix_ids``. A chunk that stands exactly behind
        them is exact and no subject here. Raises :class:`InvalidInputError` where no other is."""
        self.adapter = adapter
        self._fusor = Fusor(adapter, fast_attention=False, force_masks=True)
        self._ids = torch.tensor([plan.ids], device=adapter.device)  # [1, N]
        self._spans = tuple(_stored(adapter, plan, tuple(prefix_ids), s) for s in plan.chunks)
        self._blended = tuple(span for span in self._spans if not span.exact)
        if not self._blended:
            raise InvalidInputError(
                f"a prompt of {len(plan.ids)} tokens holds no chunk out of its place, so nothing "
                "deviates; give one with chunks behind other text"
            )
        self.tokens = torch.cat([torch.arange(s.start, s.end) for s in self._blended])
        """``[n]``: prompt positions of the chunk tokens that may deviate."""

    @cached_property
    def full(self) -> Prefilled:
        """The full prefill that everything is measured against."""
        return self._prefill((), "full", Schedule("constant"), 1.0)

    @cached_property
    def reused(self) -> Prefilled:
        """KV as stored and re-positioned, nothing recomputed."""
        return self._prefill(self._spans, "reuse", Schedule("constant"), 0.0)

    def deviation(self, policy: str, schedule: str = "constant", ratio: float = 0.0) -> Deviation:
        """Of a blend by ``policy``; ratio and schedule as in :class:`~blendrag.engine.Options`."""
        if policy == "reuse":
            return self._from_full(self.reused)
        return self._from_full(self._prefill(self._spans, policy, Schedule.parse(schedule), ratio))

    def oracle(self, ratio: float) -> Deviation:
        """The selection of figure 6: in every layer the KV of the ``ratio`` tokens that deviate most
        there is exact. It takes a full prefill to know them, which is what policies must do without.
        """
        count = round(ratio * self.tokens.numel())
        mended = []
        for stored, exact in zip(self.reused.kv, self.full.kv, strict=True):
            layer = stored.clone()  # [2, Hkv, n, D]
            worst = torch.from_numpy(_kv_deviation(stored, exact)).topk(count).indices
            layer[:, :, worst] = exact[:, :, worst]
            mended.append(layer)
        exact_spans = tuple(span for span in self._spans if span.exact)
        spans = sorted((*exact_spans, *self._cut(mended)), key=lambda span: span.start)
        done = self._prefill(tuple(spans), "reuse", Schedule("constant"), 0.0)
        return self._from_full(Prefilled(done.kv, done.attention, ratio, ratio))

    def _cut(self, layers: Sequence[torch.Tensor]) -> list[LoadedSpan]:
        """Spans over ``layers`` of all chunk tokens, whose keys stand where they belong."""
        spans, at = [], 0
        for span in self._blended:
            parts = [layer[:, :, at : at + span.tokens].contiguous() for layer in layers]
            kv = ChunkKV(self.adapter.layout, span.tokens, parts)
            spans.append(LoadedSpan(span.start, span.end, HeldKV(kv), span.start, exact=False))
            at += span.tokens
        return spans

    def _prefill(
        self, spans: tuple[LoadedSpan, ...], policy: str, schedule: Schedule, ratio: float
    ) -> Prefilled:
        n = self._ids.shape[1]
        columns = self.tokens.to(self.adapter.device)
        seen = ForwardAttention(n, n - max(s.end for s in self._spans), columns)
        request = BlendRequest(n, spans, make_policy(policy), schedule, ratio)
        # by its index: asked for as a number, the last row would be the only one to be attended
        last = torch.tensor([-1], device=self.adapter.device)
        with self.adapter.lock, scouting(self.adapter.stack, lambda: [Observed(seen)]):
            _, cache, fusion = self._fusor.prefill(self._ids, request, logits_to_keep=last)
        kv = [buffer[:, :, columns].cpu() for buffer in cache.buffers(n)]
        counts = fusion.counts()
        return Prefilled(kv, seen.matrices(), counts.ratio, counts.charged_ratio)

    def _from_full(self, blended: Prefilled) -> Deviation:
        pairs = zip(blended.kv, self.full.kv, strict=True)
        seen = zip(blended.attention, self.full.attention, strict=True)
        return Deviation(
            np.stack([_kv_deviation(new, exact) for new, exact in pairs]),
            np.stack([_attention_deviation(new, exact) for new, exact in seen]),
            blended.ratio,
            blended.charged_ratio,
        )


class ForwardAttention(Scout):
    """Keeps the forward attention matrix of every layer where a scout adds them up."""

    def __init__(self, prompt_tokens: int, asking: int, columns: torch.Tensor) -> None:
        super().__init__(prompt_tokens, asking, columns.device)
        self._columns = columns
        self._blocks: list[list[torch.Tensor]] = []

    def add(self, weights: torch.Tensor, first_row: int, rows: int) -> None:
        """``weights`` ``[H, s, N]`` are of the rows from ``first_row`` on, out of ``rows``."""
        if len(self._blocks) == self.layers:
            self._blocks.append([])
        skipped = max(0, rows - self._asking - first_row)
        self._blocks[-1].append(weights[:, skipped:, self._columns].cpu())

    def matrices(self) -> list[torch.Tensor]:
        """A_i of each layer, ``[H, Q, n]``; raises :class:`UnsupportedModelError` if none was seen."""
        if not self._blocks:
            raise UnsupportedModelError(
                "this model does not compute attention through transformers' interface, so its weights "
                "cannot be seen; measure another one"
            )
        return [torch.cat(blocks, dim=1) for blocks in self._blocks]


def _stored(
    adapter: ModelAdapter, plan: PromptPlan, prefix_ids: tuple[int, ...], chunk: Segment
) -> LoadedSpan:
    with adapter.lock:
        kv = adapter.encode(prefix_ids, chunk.ids)
    exact = plan.ids[: chunk.position] == prefix_ids
    return LoadedSpan(chunk.position, chunk.end, HeldKV(kv), len(prefix_ids), exact)


def _kv_deviation(new: torch.Tensor, exact: torch.Tensor) -> np.ndarray:
    """Δ_kv ``[n]`` of ``[2, Hkv, n, D]``: distances of K and V, each by its mean length, together.

    The paper takes absolute differences; the order of tokens is that of
    :attr:`~blendrag.fusor.selection.LayerView.deviation`, which policies see.
    """
    squares = (new.float() - exact.float()).square().sum(dim=(1, 3))  # [2, n]
    lengths = exact.float().square().sum(dim=(1, 3)).mean(dim=1, keepdim=True)  # [2, 1]
    deviation: np.ndarray = (squares / lengths.clamp_min(1e-12)).sum(dim=0).sqrt().numpy()
    return deviation


def _attention_deviation(new: torch.Tensor, exact: torch.Tensor) -> np.ndarray:
    """What each column of ``[H, Q, n]`` adds to the norm of the difference, by the norm of A^full."""
    columns = (new - exact).square().sum(dim=(0, 1)).sqrt()  # [n]
    deviation: np.ndarray = (columns / exact.norm().clamp_min(1e-12)).numpy()
    return deviation
