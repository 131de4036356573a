"""Which of one prompt's chunk tokens are computed, layer by layer: its policy, asked with what is known.

Owns the candidates, the budgets of the schedule and what a scout pass saw. Holds no K/V: whoever asks says
how fresh and loaded ones are fetched.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from blendrag.fusor.request import BlendRequest, query_span, split_tokens
from blendrag.fusor.rows import LayerRows, PromptRows, Rows, nested_rows
from blendrag.fusor.scout import Scout
from blendrag.fusor.selection import LayerView, PromptGeometry, make_policy

Fetch = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""Fresh K and V, loaded K and V of the tokens that are asked about, ``[Hkv, n, D]`` each."""


class Choice:
    """Made once per request."""

    def __init__(self, request: BlendRequest, layers: int, device: torch.device) -> None:
        self.geometry = PromptGeometry(
            request.prompt_tokens,
            tuple((s.start, s.end) for s in request.blended),
            query_span(request),
        )
        self._host = split_tokens(request)
        self.always, self.candidates = (torch.from_numpy(at).to(device) for at in self._host)
        """Positions of the fresh tokens, and of those of blended chunks."""
        self.policy = request.policy
        self.schedule = self.policy.schedule or request.schedule
        self._layers = layers
        budgets = self.schedule.counts(request.ratio, layers, self.candidates.numel())
        self._budgets = [*budgets[:1], *budgets] if budgets else [self.candidates.numel()]
        """Tokens of layer 0, which computes what layer 1 needs, and of those after it."""
        self._attention: torch.Tensor | None = None

    @property
    def needs_attention(self) -> bool:
        """Whether a scout pass must come before anything is chosen."""
        return self.policy.needs_attention and self.candidates.numel() > 0

    @property
    def peeks(self) -> bool:
        """Whether K/V of layer 1 must be seen of all candidates before its tokens are chosen."""
        return self.policy.needs_deviation and self.candidates.numel() > 0 and self._layers > 1

    def new_scout(self, rows: Rows) -> Scout:
        """What a scout pass over ``rows`` reports to."""
        n = self.geometry.prompt_tokens
        return Scout(
            n,
            n - self.geometry.query_span[0],
            self.candidates.device,
            self.policy.attention_layers(self._layers),
            self.policy.sqrt_attention,
            rows,
        )

    def hear(self, scout: Scout) -> None:
        """Choose by what ``scout`` saw, from now on."""
        if scout.layers:
            self._attention = scout.attention
        else:  # attention of this model's own making: nothing was seen
            self.policy = make_policy(self.policy.fallback)

    def plan(self, prompt: PromptRows, force_masks: bool) -> list[LayerRows]:
        """The rows of all layers, where the policy ranks tokens once; else none."""
        if not self.policy.ranks_once or not self.candidates.numel():
            return []
        view = self._view(self.candidates, _nothing_yet)
        worth = self.policy.worth(view, self._budgets[0]).cpu().numpy()
        rank = np.empty(len(worth), dtype=np.int64)
        rank[np.argsort(-worth, kind="stable")] = np.arange(len(worth))
        return nested_rows(prompt, *self._host, rank, self._budgets, force_masks)

    def entry(self) -> torch.Tensor:
        """Candidates computed in layer 0: all of them where fresh KV is compared with loaded."""
        if self.policy.needs_deviation:
            return self.candidates
        return self.tokens(0, self.candidates, _nothing_yet)

    def tokens(self, layer: int, alive: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        """Those of ``layer``, out of those ``alive`` in the layer before."""
        return self.policy.select(layer, self._view(alive, fetch), self._budgets[layer])

    def _view(self, tokens: torch.Tensor, fetch: Fetch) -> LayerView:
        attention = self._attention[tokens] if self._attention is not None else None
        return LayerView(self.geometry, tokens, fetch, attention)


def _nothing_yet() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise RuntimeError("nothing is computed before layer 0: there is no deviation to look at")
