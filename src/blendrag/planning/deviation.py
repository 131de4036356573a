"""How far a blended prompt's answer is from full prefill's: KL over its first tokens.

The continuation is full prefill's own greedy one, and the blended prompt is made to say the same
(teacher forcing), so that positions stay comparable after the first difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from blendrag.fusor import Fusor
from blendrag.fusor.selection import Schedule, SelectionPolicy
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.text.prompt import PromptPlan

#: Answer tokens compared.
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Reference:
    """What full prefill says to a prompt; all on the CPU."""

    prompt: PromptPlan
    answer: torch.Tensor
    """Its greedy continuation ``[T]``."""
    log_probs: torch.Tensor
    """``[T, V]`` float32, of the distributions those tokens were taken from."""


@torch.inference_mode()
def reference(adapter: ModelAdapter, prompt: PromptPlan) -> Reference:
    """Full prefill and greedy decoding of ``prompt``. Caller holds the lock."""
    ends = _end_ids(adapter)
    cache = DynamicCache()
    ids = torch.tensor([prompt.ids], device=adapter.device)
    answer: list[int] = []
    rows = []
    while True:
        logits = _logits(adapter, ids, cache, 1)  # [1, V]
        rows.append(logits)
        answer.append(int(logits.argmax()))
        if len(answer) == ANSWER_TOKENS or answer[-1] in ends:
            break
        ids = torch.tensor([answer[-1:]], device=adapter.device)
    return Reference(prompt, torch.tensor(answer), torch.cat(rows).log_softmax(-1))


@torch.inference_mode()
def deviation(
    fusor: Fusor,
    controller: Controller,
    expected: Reference,
    policy: SelectionPolicy,
    schedule: Schedule,
    ratio: float,
) -> float | None:
    """Mean KL(full prefill ‖ blended) per answer token, in nats.

    ``None`` where the prompt holds no chunk to blend. Caller holds the lock. Raises
    :class:`SpanCorruptError`.
    """
    prompt, adapter = expected.prompt, fusor.adapter
    plan = controller.plan(prompt, PlanOptions("blend", policy, lambda _: schedule, ratio))
    try:
        request = plan.request(len(prompt.ids))
        if not request.candidates:
            return None
        ids = torch.tensor([prompt.ids], device=adapter.device)
        logits, cache, _ = fusor.prefill(ids, request, new_tokens=len(expected.answer))
    finally:
        plan.close()
    rows = logits[0].float().cpu()  # [1, V]
    if len(expected.answer) > 1:
        said = expected.answer[None, :-1].to(adapter.device)
        rows = torch.cat((rows, _logits(adapter, said, cache, said.shape[1])))  # [T, V]
    return divergence(expected.log_probs, rows.log_softmax(-1))


def divergence(full: torch.Tensor, blended: torch.Tensor) -> float:
    """Mean KL of ``[T, V]`` log probabilities, in nats per token; infinity where it is not a number."""
    parts = full.exp() * (full - blended)
    parts = parts.masked_fill(full == -math.inf, 0.0)  # what full prefill never says costs nothing
    mean = float(parts.sum(-1).mean())
    return math.inf if math.isnan(mean) else max(0.0, mean)


def _logits(adapter: ModelAdapter, ids: torch.Tensor, cache: Any, keep: int) -> torch.Tensor:
    """``[keep, V]`` float32 on the CPU."""
    out = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
    return out.logits[0].float().cpu()


def _end_ids(adapter: ModelAdapter) -> set[int]:
    eos = adapter.model.generation_config.eos_token_id
    return set(eos) if isinstance(eos, list | tuple) else {eos}


class Sample:
    """The same prompts for every schedule: how far each is from full prefill on them, on average."""

    def __init__(self, of: Callable[[int, Schedule], float], prompts: int) -> None:
        """``of(i, schedule)`` is the deviation of prompt ``i``."""
        self._of = of
        self._order = list(range(prompts))

    def __call__(self, schedule: Schedule, bound: float) -> float:
        """Mean deviation; infinity as soon as it is certain to be above ``bound``.

        Prompts on which the last whole measurement was worst come first: there a bad schedule shows
        soonest.
        """
        prompts = len(self._order)
        seen: dict[int, float] = {}
        for i in self._order:
            seen[i] = self._of(i, schedule)
            if sum(seen.values()) > bound * prompts:
                return float("inf")
        self._order.sort(key=lambda i: -seen[i])
        return sum(seen[i] for i in range(prompts)) / prompts
