"""The prompts of one call, prefilled in one forward where that is faster.

Each prompt is answered in its turn as if it were alone; its prefill may already be there. A prompt that
cannot be prefilled with others, or that failed there, is prefilled in its turn. The forward itself is
:meth:`Fusor.batched_prefill`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from blendrag.engine.packing_rule import Load, PackingRule
from blendrag.engine.planner import KVAccess, checked
from blendrag.engine.request import Request
from blendrag.engine.stream import AnswerStream
from blendrag.fusor import Fusor, PackedPrompt, Prefilled
from blendrag.fusor.loader import SpanCorruptError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.plan import Plan
from blendrag.planning.profile import Profile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ahead:
    """What was done for a request before its turn. Close it if its turn does not come."""

    namespace: str = ""
    """Whose KV it is; useless once another model is loaded."""
    plan: Plan | None = None
    """Open; ``None`` if the request must be planned again."""
    prefilled: Prefilled | None = None
    """The prompt's KV and last hidden state; ``None`` if it is still to be prefilled."""
    avoid: frozenset[str] = frozenset()
    """Keys of chunks whose bytes failed verification."""
    batch_size: int = 1
    """Prompts in that forward."""

    def close(self) -> None:
        """Close every reader. Idempotent."""
        if self.plan is not None:
            self.plan.close()


NOTHING_AHEAD = Ahead()


class BatchEntry(NamedTuple):
    """A prompt of a batch."""

    request: Request
    stream: AnswerStream


class RequestBatch:
    """The prompts of one call, in order. Used on the worker only."""

    def __init__(self, entries: Sequence[BatchEntry]) -> None:
        self.entries = entries
        self._next = 0
        """The first entry not considered yet."""
        self._ahead: dict[int, Ahead] = {}

    @property
    def may_pack(self) -> bool:
        """Whether there are several prompts and any of them may use stored KV."""
        return len(self.entries) > 1 and any(
            request.mode != "full" and request.prompt.chunks for request, _ in self.entries
        )

    def take(self, number: int, prefill: Callable[[], BatchedPrefill | None]) -> Ahead:
        """What was done ahead for that prompt; prefills it with the following ones if it is faster."""
        batched = prefill() if self.may_pack else None
        if batched is None:
            return NOTHING_AHEAD
        if number >= self._next:
            self._next = number + 1  # even if this fails
            made, self._next = batched(self.entries, number)
            self._ahead.update(made)
        ahead = self._ahead.pop(number, NOTHING_AHEAD)
        if ahead is NOTHING_AHEAD or ahead.namespace == batched.namespace:
            return ahead
        ahead.close()  # weights or adapters changed between the prefill and this turn
        return NOTHING_AHEAD

    def leave(self, number: int) -> None:
        """That prompt's turn is over."""
        self._ahead.pop(number, NOTHING_AHEAD).close()

    def close(self) -> None:
        """Release what no turn took; the worker must be done with it. Idempotent."""
        for number in list(self._ahead):
            self.leave(number)


class _Planned(NamedTuple):
    request: Request
    plan: Plan
    profile: Profile | None
    load: Load


@dataclass(frozen=True)
class BatchedPrefill:
    """Prefills the next prompts of a batch in one forward. Caller holds the model's lock."""

    adapter: ModelAdapter
    fusor: Fusor
    namespace: str
    access: Callable[[Request, Callable[[], None]], KVAccess]
    """See :meth:`Planner.access`."""
    rule: PackingRule

    def __call__(
        self, entries: Sequence[BatchEntry], first: int
    ) -> tuple[Mapping[int, Ahead], int]:
        """What is there now of ``first`` and following prompts, and the first one not considered."""
        chosen: dict[int, _Planned] = {}
        end = len(entries)
        for number in range(first, len(entries)):
            planned = self._planned(entries[number])
            if planned is None:
                if number == first:
                    return {}, number + 1
                continue  # answered alone in its turn
            loads = [each.load for each in chosen.values()]
            if chosen and not self.rule.admits(loads, planned.load, planned.profile):
                planned.plan.close()
                end = number
                break
            chosen[number] = planned
        if len(chosen) == 1:
            return {first: Ahead(self.namespace, chosen[first].plan)}, end
        return self._prefilled(entries, chosen), end

    def _planned(self, entry: BatchEntry) -> _Planned | None:
        """``None`` for a prompt that cannot be prefilled with others; its turn reports why."""
        request, stream = entry
        if request.mode == "full" or stream.done or self._changes_tables(request):
            return None
        with suppress(Exception):
            request = checked(request, self.adapter)
            if request.sequences == 1:
                access = self.access(request, stream.check)
                plan = access.plan()
                try:
                    load = Load.of(plan, request.max_new_tokens, self.adapter)
                except Exception:
                    plan.close()
                    raise
                return _Planned(request, plan, access.profile, load)
        return None

    def _changes_tables(self, request: Request) -> bool:
        """Whether the prompt is so long that all rows of its forward use another rotary table."""
        limit = self.adapter.blend_limit_tokens
        return limit is not None and len(request.prompt.ids) > limit

    def _prefilled(
        self, entries: Sequence[BatchEntry], chosen: Mapping[int, _Planned]
    ) -> dict[int, Ahead]:
        prompts = [
            self._prompt(planned, entries[number].stream) for number, planned in chosen.items()
        ]
        try:
            outcomes = self.fusor.batched_prefill(prompts)
        except Exception as exc:
            log.warning("%d prompts are answered one after another: %s", len(chosen), exc)
            for planned in chosen.values():
                planned.plan.close()
            return {}
        return {
            number: self._ahead(planned.plan, outcome, len(chosen))
            for (number, planned), outcome in zip(chosen.items(), outcomes, strict=True)
        }

    def _prompt(self, planned: _Planned, stream: AnswerStream) -> PackedPrompt:
        ids = torch.tensor([planned.request.prompt.ids], device=self.adapter.device)  # [1, N]
        request = planned.plan.request(ids.shape[1])
        return PackedPrompt(ids, request, planned.request.max_new_tokens, stream.check)

    def _ahead(self, plan: Plan, outcome: Prefilled | Exception, batch_size: int) -> Ahead:
        """A prompt that failed is planned again in its turn, and raises its error there."""
        if isinstance(outcome, Prefilled):
            return Ahead(self.namespace, plan, outcome, batch_size=batch_size)
        plan.close()
        if isinstance(outcome, SpanCorruptError):
            return Ahead(self.namespace, avoid=frozenset({outcome.span.reader.key}))
        log.debug("a prompt left its batch: %s", outcome)
        return Ahead(self.namespace)
