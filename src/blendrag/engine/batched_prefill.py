"""The prompts of one call, prefilled in one forward where that is faster.

Each prompt is answered in its turn as if it were alone; its prefill may already be there. A prompt that
cannot be prefilled with others, or that failed there, is prefilled in its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from blendrag import tracing
from blendrag.engine.lazy_model import LazyModel
from blendrag.engine.packing_rule import Load, PackingRule
from blendrag.engine.planner import Planner, checked
from blendrag.engine.request import Request
from blendrag.engine.stream import AnswerStream
from blendrag.errors import UnsupportedModelError
from blendrag.fusor import PackedPrompt, Prefilled
from blendrag.fusor.loader import SpanCorruptError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.plan import Plan
from blendrag.serving.coroutine import pausing
from blendrag.serving.kv_budget import KVBudget, KVShare, first_room

log = logging.getLogger(__name__)

#: Running states of a request, and what a joint step keeps of them in case that it fails.
COPIES_OF_STATES = 2


@dataclass(frozen=True)
class Ahead:
    """What was done for a request before its turn. Close it if its turn does not come."""

    namespace: str = ""
    """Whose KV it is; useless once another model is loaded."""
    plan: Plan | None = None
    """Open; ``None`` if the request must be planned again."""
    prefilled: Prefilled | None = None
    """The prompt's KV and last hidden state; ``None`` if it is still to be prefilled."""
    avoid: Collection[str] = ()
    """Keys of chunks whose bytes failed verification."""
    batch_size: int = 1
    """Prompts in that forward."""
    share: KVShare | None = None
    """The memory that :attr:`prefilled` holds."""

    def close(self) -> None:
        """Close every reader. Idempotent."""
        if self.plan is not None:
            self.plan.close()


NOTHING_AHEAD = Ahead()


class BatchEntry(NamedTuple):
    request: Request
    stream: AnswerStream


class _Planned(NamedTuple):
    request: Request
    plan: Plan
    load: Load


class RequestBatch:
    """The prompts of one call, in order. Used on the scheduler's thread only."""

    def __init__(
        self, entries: Sequence[BatchEntry], model: LazyModel, planner: Planner, budget: KVBudget
    ) -> None:
        self.entries = entries
        self._model = model
        self._planner = planner
        self._budget = budget
        self._next = 0
        """The first entry not considered yet."""
        self._ahead: dict[int, Ahead] = {}

    def take(self, number: int) -> Ahead:
        """What was done ahead for that prompt; prefills it with the following ones if it is faster.

        Caller holds the model's lock.
        """
        if not self._may_pack:
            return NOTHING_AHEAD
        namespace = self._planner.namespace
        if number >= self._next:
            self._next = number + 1  # even if this fails
            self._prefill(number, namespace)
        ahead = self._ahead.get(number, NOTHING_AHEAD)
        if ahead.namespace == namespace:
            return self._ahead.pop(number, NOTHING_AHEAD)
        self.leave(number)  # weights or adapters changed between the prefill and this turn
        return NOTHING_AHEAD

    def leave(self, number: int) -> None:
        """That prompt's turn is over."""
        ahead = self._ahead.pop(number, NOTHING_AHEAD)
        ahead.close()
        if ahead.share is not None:
            self._budget.release(ahead.share)

    def share_of(self, number: int) -> KVShare | None:
        """What its KV holds if it was prefilled before its turn."""
        return self._ahead.get(number, NOTHING_AHEAD).share

    @property
    def _may_pack(self) -> bool:
        """Whether there are several prompts, any may use stored KV, and the model can prefill several."""
        if len(self.entries) < 2 or not any(
            request.may_blend and request.prompt.chunks for request, _ in self.entries
        ):
            return False
        with suppress(UnsupportedModelError):
            return self._model.adapter.fuses and self._model.fusor.packs
        return False

    def _prefill(self, first: int, namespace: str) -> None:
        """Prefill the ``first`` and following prompts in one forward."""
        chosen: dict[int, _Planned] = {}
        end = len(self.entries)
        for number in range(first, end):
            planned = self._planned(self.entries[number])
            if planned is None:
                if number == first:
                    return
                continue  # answered alone in its turn
            rule = PackingRule(
                self._model.adapter.device, self._budget.free_bytes, self._planner.profile
            )
            loads = [each.load for each in chosen.values()]
            if chosen and not rule.admits(loads, planned.load):
                planned.plan.close()
                end = number
                break
            chosen[number] = planned
        self._next = end
        if len(chosen) == 1:
            self._ahead[first] = Ahead(namespace, chosen[first].plan)
            return
        try:
            with tracing.span("prefill", lambda: {"blendrag.batch_size": len(chosen)}):
                outcomes = self._model.fusor.batched_prefill(
                    [self._prompt(one, self.entries[i].stream) for i, one in chosen.items()]
                )
        except Exception as exc:
            log.warning("%d prompts are answered one after another: %s", len(chosen), exc)
            for planned in chosen.values():
                planned.plan.close()
            return
        for (number, planned), outcome in zip(chosen.items(), outcomes, strict=True):
            if isinstance(outcome, Prefilled):
                share = share_of(planned.request, self._model.adapter, self.entries[number].stream)
                self._budget.hold(share)
                self._ahead[number] = Ahead(
                    namespace, planned.plan, outcome, batch_size=len(chosen), share=share
                )
                continue
            planned.plan.close()  # planned again in its turn, where it raises its error
            if isinstance(outcome, SpanCorruptError):
                self._ahead[number] = Ahead(namespace, avoid={outcome.span.reader.key})
            log.debug("a prompt left its batch: %s", outcome)

    def _planned(self, entry: BatchEntry) -> _Planned | None:
        """``None`` for a prompt that cannot be prefilled with others; its turn reports why."""
        request, stream = entry
        adapter = self._model.adapter
        limit = adapter.blend_limit_tokens
        if limit is not None and len(request.prompt.ids) > limit:
            return None  # all rows of its forward would use another rotary table
        if not request.may_blend or stream.done:
            return None
        with suppress(Exception):
            request = checked(request, adapter)
            if request.sequences == 1:
                plan = self._planner.plan(request, stream)
                try:
                    load = Load.of(plan, first_room(request.max_new_tokens), adapter)
                except Exception:
                    plan.close()
                    raise
                return _Planned(request, plan, load)
        return None

    def _prompt(self, planned: _Planned, stream: AnswerStream) -> PackedPrompt:
        device = self._model.adapter.device
        ids = torch.tensor([planned.request.prompt.ids], device=device)  # [1, N]
        request = planned.plan.request(ids.shape[1])
        room = first_room(planned.request.max_new_tokens)
        return PackedPrompt(ids, request, room, pausing(stream.check))


def share_of(request: Request, adapter: ModelAdapter, stream: AnswerStream) -> KVShare:
    """The memory that a request needs, whose number of sequences is known."""
    token_bytes, state_bytes = 0, 0
    if adapter.refusal is None:
        token_bytes = adapter.layout.token_bytes
    if adapter.composition is not None:
        state_bytes = COPIES_OF_STATES * adapter.composition.state_bytes
    sizes = len(request.prompt.ids), request.max_new_tokens, request.sequences * token_bytes
    return KVShare(*sizes, stream.check, request.sequences * state_bytes)
