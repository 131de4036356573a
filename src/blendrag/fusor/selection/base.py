"""The contract of a selection policy: which chunk tokens each layer recomputes (CacheBlend §4).

A policy is one class in one file. What it needs are class attributes, read by the fusor and the loading
controller: ``needs_deviation`` costs layer 0 for every candidate and a peek at layer 1, ``needs_attention`` a
scout pass over the fresh tokens. It chooses in one of two ways:

- ``ranks_once``: :meth:`SelectionPolicy.scores` rates every candidate before layer 0, and each layer computes
  the best of them, as many as its budget.
- otherwise :meth:`SelectionPolicy.select` chooses the tokens of each layer among those of the layer before.

Candidates are the tokens of blended chunks. Fresh tokens are always computed, tokens of exact chunks never.
Selected sets are nested, ``S_{l+1} ⊆ S_l``: a token dropped at a layer has no hidden state after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from blendrag.fusor.selection.schedule import Schedule

#: Models of this many layers or more count as deep. Measured were the embedded model (12) and pretrained ones
#: (18 to 30). In most of these comparisons the attention of the last half chose better tokens than that of
#: the middle third, the first half or all layers (docs/quality/tried.md).
DEEP_LAYERS = 16
LAST_HALF = (1 / 2, 1.0)


@dataclass(frozen=True)
class PromptGeometry:
    """Where things are in the prompt. Positions are prompt positions, spans are half-open."""

    prompt_tokens: int
    chunk_spans: tuple[tuple[int, int], ...]
    """Blended chunks: stored KV is loaded, and their tokens are candidates for recompute."""
    query_span: tuple[int, int]
    """Fresh tokens after the last chunk."""


Fetch = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""→ fresh K, fresh V, loaded K (re-positioned), loaded V of some tokens, ``[Hkv, n, D]`` each."""


@dataclass(frozen=True)
class LayerView:
    """What a policy may read when it chooses the tokens of a layer."""

    geometry: PromptGeometry
    tokens: torch.Tensor
    """``[n]`` candidates computed in the layer before, ascending prompt positions."""
    fetch: Fetch | None = None
    """KV of ``tokens`` in the last computed layer, for policies that need it; ``None`` before layer 0."""
    attention: torch.Tensor | None = None
    """``[n]`` float32: attention of the query span to ``tokens``. ``None`` unless the policy needs it."""

    @cached_property
    def deviation(self) -> torch.Tensor:
        """Δ_kv per token ``[n]`` float32 (CacheBlend §4.1): squared differences of K and V, each divided by
        the mean square of what was loaded, so that both count."""
        assert self.fetch is not None, "nothing is computed before layer 0"
        fresh_k, fresh_v, loaded_k, loaded_v = self.fetch()
        return _relative_square(fresh_k, loaded_k) + _relative_square(fresh_v, loaded_v)

    @cached_property
    def value_deviation(self) -> torch.Tensor:
        """The same for V alone ``[n]`` float32."""
        assert self.fetch is not None, "nothing is computed before layer 0"
        _, fresh_v, _, loaded_v = self.fetch()
        return _relative_square(fresh_v, loaded_v)

    @cached_property
    def index_in_chunk(self) -> torch.Tensor:
        """``[n]``: index of each token in its chunk, from 0."""
        starts = self.tokens.new_tensor([start for start, _ in self.geometry.chunk_spans])
        return self.tokens - starts[torch.bucketize(self.tokens, starts, right=True) - 1]


class SelectionPolicy:
    """One way to choose tokens. ``str(policy)`` is what :func:`make_policy` parses."""

    name: ClassVar[str]
    k: int | None = None
    """Tokens at the head of each chunk, if the policy takes such a number: ``boundary(16)``."""
    needs_deviation: bool = False
    needs_attention: bool = False
    attention_depth: tuple[float, float] = (0.0, 1.0)
    """Part of the model's depth whose attention is summed. The scout pass ends there."""
    deep_attention_depth: tuple[float, float] | None = None
    """The same for models of :data:`DEEP_LAYERS` or more, if it differs."""
    sqrt_attention: bool = False
    """Whether square roots of attention are summed: a token that many heads attend to a little then ranks
    above one that a single head attends to a lot, as heads do for tokens without meaning."""
    depth: tuple[int, int] | None = None
    """The same in percent, if the policy's name says so: ``query(50-100)``."""
    fallback: str = "hkvd"
    """The policy used instead when the model's attention cannot be observed."""
    budgeted: bool = True
    """Whether the ratio decides how many tokens it recomputes; else :meth:`fixed_count` does."""
    ranks_once: bool = False
    moves_others: bool = False
    """Whether stored KV that it does not recompute is moved by the errors of its :meth:`probes`."""
    schedule: Schedule | None = None
    """A fixed schedule; ``None``: the request's."""

    def __init__(self, k: int | None = None, depth: tuple[int, int] | None = None) -> None:
        if k is not None:
            self.k = k
        self.depth = depth

    @property
    def follows_schedule(self) -> bool:
        """Whether the request's schedule decides how much each layer recomputes."""
        return self.budgeted and self.schedule is None

    def attention_layers(self, layers: int) -> range:
        """Layers of an L-layer model whose attention is summed; empty if it needs no attention."""
        if not self.needs_attention:
            return range(0)
        if self.depth is not None:
            first, last = (percent * layers // 100 for percent in self.depth)
        else:
            deep = self.deep_attention_depth if layers >= DEEP_LAYERS else None
            first, last = (int(share * layers) for share in deep or self.attention_depth)
        first = min(first, layers - 1)
        return range(first, max(last, first + 1))

    def layer_counts(
        self, schedule: Schedule, ratio: float, candidates: int, layers: int, chunks: int
    ) -> list[int]:
        """Tokens recomputed in layers 1…``layers``-1, given ``candidates`` tokens in ``chunks`` chunks."""
        if self.budgeted:
            return (self.schedule or schedule).counts(ratio, layers, candidates)
        return [self.fixed_count(candidates, chunks)] * (layers - 1)

    def fixed_count(self, candidates: int, chunks: int) -> int:
        """Tokens recomputed in every layer, of a policy that is not budgeted."""
        raise NotImplementedError(f"{type(self).__name__} recomputes as many tokens as its budget")

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        """Positions ⊆ ``view.tokens``, ascending, to compute in ``layer``.

        Called for layer 0 too, with the budget of layer 1, unless the policy needs deviations. Not called for
        a policy that ranks once; this default is what its ranking means.
        """
        if budget >= view.tokens.numel():
            return view.tokens
        return top(self.scores(view, budget), view.tokens, budget)

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        """``[n]`` float32; each layer computes the candidates that score highest.

        ``budget``: that of layers 0 and 1.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rank tokens once")

    def probes(self, view: LayerView, budget: int) -> torch.Tensor:
        """Random tokens ``[p]`` among the best ``budget``, of a policy that :attr:`moves_others` by their
        errors (:mod:`blendrag.fusor.shift`) and ranks once."""
        return view.tokens[:0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SelectionPolicy) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        if self.depth is not None:
            return f"{self.name}({self.depth[0]}-{self.depth[1]})"
        return self.name if self.k is None else f"{self.name}({self.k})"


def top(scores: torch.Tensor, tokens: torch.Tensor, budget: int) -> torch.Tensor:
    """The ``budget`` tokens with the highest scores, ascending by position."""
    chosen = torch.topk(scores, min(budget, tokens.numel()), sorted=False).indices
    return tokens[chosen.sort().values]


def _relative_square(fresh: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    difference = fresh.float() - loaded.float()  # [Hkv, n, D]
    scale = loaded.float().square().mean().clamp_min(1e-12)
    return difference.square().sum(dim=(0, 2)) / scale
