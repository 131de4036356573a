"""Which of one prompt's chunk tokens are computed, layer by layer: its policy, asked with what is known.

Owns the candidates, the budgets of the schedule and what a scout pass saw. Holds no K/V: whoever asks says
how fresh and loaded ones are fetched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from blendrag.fusor.request import BlendRequest, query_span, split_tokens
from blendrag.fusor.scout import Scout
from blendrag.selection import LayerView, PromptGeometry, make_policy

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
        self.always, self.candidates = split_tokens(request, device)
        """Positions of the fresh tokens, and of those of blended chunks."""
        self.policy = request.policy
        self.schedule = self.policy.schedule or request.schedule
        self._layers = layers
        self._budgets = self.schedule.counts(request.ratio, layers, self.candidates.numel())
        self._question: torch.Tensor | None = None

    @property
    def asks(self) -> bool:
        """Whether a scout pass must come before anything is chosen."""
        return self.policy.asks and self.candidates.numel() > 0

    @property
    def peeks(self) -> bool:
        """Whether K/V of layer 1 must be seen of all candidates before its tokens are chosen."""
        return self.policy.looks and self.candidates.numel() > 0 and self._layers > 1

    def new_scout(self) -> Scout:
        """What a scout pass reports to."""
        n = self.geometry.prompt_tokens
        damped = self._layers if self.policy.damps else 0
        return Scout(n, n - self.geometry.query_span[0], self.candidates.device, damped)

    def hear(self, scout: Scout) -> None:
        """Choose by what ``scout`` saw, from now on."""
        if scout.layers:
            self._question = scout.attention
        else:  # attention of this model's own making: nothing was seen
            self.policy = make_policy(self.policy.unseen)

    def entry(self) -> torch.Tensor:
        """Candidates computed in layer 0: all of them where fresh KV is compared with loaded."""
        if self.policy.looks:
            return self.candidates
        budget = self._budgets[0] if self._budgets else self.candidates.numel()
        return self.policy.select(0, self._view(self.candidates, _nothing_yet), budget)

    def tokens(self, layer: int, alive: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        """Those of ``layer``, out of those ``alive`` in the layer before."""
        return self.policy.select(layer, self._view(alive, fetch), self._budgets[layer - 1])

    def _view(self, tokens: torch.Tensor, fetch: Fetch) -> LayerView:
        question = self._question[tokens] if self._question is not None else None
        return LayerView(self.geometry, tokens, fetch, question)


def _nothing_yet() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise RuntimeError("nothing is computed before layer 0: there is no deviation to look at")
