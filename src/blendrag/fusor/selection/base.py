"""The contract of a selection policy: which tokens a layer recomputes.

``select(layer, view, budget) -> prompt positions S_layer`` with ``S_{layer+1} ⊆ S_layer``: a token
dropped at a layer has no hidden state after it. Policies see candidates only (tokens of blended
chunks); fresh tokens are always computed, exact ones never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from blendrag.fusor.selection.schedule import Schedule


@dataclass(frozen=True)
class PromptGeometry:
    """Where things are in the prompt; positions are prompt positions, spans half-open."""

    prompt_tokens: int
    chunk_spans: tuple[tuple[int, int], ...]
    """Blended chunks: stored KV loaded, candidates for recompute."""
    query_span: tuple[int, int]
    """Fresh tokens behind the last chunk, loaded or computed."""


@dataclass(frozen=True)
class LayerView:
    """What is cheap to look at when the tokens of ``layer`` are chosen.

    ``tokens`` ``[n]`` are the candidates still alive, ascending. The K/V are those of the last
    computed layer: ``fresh_*`` as just computed, ``loaded_*`` as stored and re-positioned, all
    ``[Hkv, n, D]``. Fetching them is lazy: a policy that does not look pays nothing.
    """

    geometry: PromptGeometry
    tokens: torch.Tensor
    fetch: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    """→ fresh_keys, fresh_values, loaded_keys, loaded_values; layer 0 has none to compare yet"""
    question: torch.Tensor | None = None
    """Attention that the query span pays to ``tokens`` ``[n]`` float32, over the KV as stored; only
    for a policy that asks."""

    @cached_property
    def deviation(self) -> torch.Tensor:
        """Δ_kv per token ``[n]`` float32 (CacheBlend §4.1): squared K and V differences.

        Each is divided by the mean square of the loaded K and V, so that neither drowns the other.
        """
        fresh_k, fresh_v, loaded_k, loaded_v = self.fetch()
        return _relative_square(fresh_k, loaded_k) + _relative_square(fresh_v, loaded_v)

    @cached_property
    def value_deviation(self) -> torch.Tensor:
        """The same of V alone ``[n]`` float32."""
        _, fresh_v, _, loaded_v = self.fetch()
        return _relative_square(fresh_v, loaded_v)


def _relative_square(fresh: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    difference = fresh.float() - loaded.float()  # [Hkv, n, D]
    scale = loaded.float().square().mean().clamp_min(1e-12)
    return difference.square().sum(dim=(0, 2)) / scale


class SelectionPolicy:
    """One way to choose; one file each. ``str`` of it is what :func:`make_policy` reads."""

    name: ClassVar[str]
    looks: bool = False
    """Whether it compares fresh with loaded KV: then layer 0 is computed for every candidate."""
    asks: bool = False
    """Whether it wants the question's attention: a scout pass over the fresh tokens comes first."""
    asked_depth: tuple[float, float] = (0.0, 1.0)
    """Between which shares of the model's depth that attention is added up. The scout pass ends there."""
    damps: bool = False
    """Whether that attention is a sum of square roots: many heads that look a little count for more than
    one that stares, as heads do at tokens that mean nothing."""
    unseen: str = "hkvd"
    """Who decides instead where a model's attention cannot be seen; for a policy that asks."""
    budgeted: bool = True
    """Whether it spends the budget it is given, as the schedule says."""
    ranks_once: bool = False
    """Whether what it sees before layer 0 decides every layer: then it gives each token a :meth:`worth`."""
    schedule: Schedule | None = None
    """The one it follows whatever is asked for; ``None``: the request's."""

    def asked_layers(self, layers: int) -> range:
        """Layers whose attention is added up, out of so many; empty for a policy that does not ask."""
        if not self.asks:
            return range(0)
        first, last = (int(share * layers) for share in self.asked_depth)
        return range(min(first, layers - 1), max(last, 1))

    @property
    def follows_schedule(self) -> bool:
        """Whether the schedule asked for decides how many tokens it recomputes."""
        return self.budgeted and self.schedule is None

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        """Positions ⊆ ``view.tokens``, ascending, to compute in ``layer``.

        Asked for layer 0 as well, with the budget of layer 1, unless it looks: nothing is computed then,
        so there is nothing to compare. A policy that ranks once is not asked: this is what its ranking means.
        """
        if budget >= view.tokens.numel():
            return view.tokens
        return top(self.worth(view, budget), view.tokens, budget)

    def worth(self, view: LayerView, budget: int) -> torch.Tensor:
        """``[n]`` float32: every layer computes the candidates of the highest worth, its budget of them.

        Asked once, before layer 0, of a policy that ranks once; ``budget`` is that of the first layers.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rank tokens once")

    def __str__(self) -> str:
        return self.name


def top(scores: torch.Tensor, tokens: torch.Tensor, budget: int) -> torch.Tensor:
    """The ``budget`` tokens with the highest scores, ascending by position."""
    if budget >= tokens.numel():
        return tokens
    if budget <= 0:
        return tokens[:0]
    chosen = torch.topk(scores, budget, sorted=False).indices
    return tokens[chosen.sort().values]
