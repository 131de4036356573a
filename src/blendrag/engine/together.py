"""The prompts of one call, prefilled together where that is faster.

Owns who of a batch goes with whom, and what was computed for those whose turn has not come. Every prompt
is answered on its turn as if it were alone, only that its prefill may be there already; whatever cannot go
with others, or failed beside them, is computed then. What the forward is: :mod:`blendrag.fusor.pack`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from blendrag.engine.packing_rule import Load, PackingRule
from blendrag.engine.preparation import Preparation
from blendrag.engine.stream import AnswerStream
from blendrag.engine.task import Prepared, Task
from blendrag.fusor import Fusor, PackedPrompt, Prefilled
from blendrag.fusor.loader import SpanCorruptError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.controller import Controller

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ahead:
    """What was done for a request before its turn, with others. Whoever has it closes it."""

    namespace: str
    """Whose KV it is: of no use once another model is loaded."""
    prepared: Prepared | None = None
    """Planned and open; ``None`` where that has to be done again."""
    prefilled: Prefilled | None = None
    """Its prompt's KV and last hidden state; ``None`` where that is still to be computed."""
    avoid: frozenset[str] = frozenset()
    """Keys of chunks whose bytes failed verification meanwhile."""
    batch_size: int = 1
    """Prompts of that forward."""

    def close(self) -> None:
        """Release every reader. Idempotent."""
        if self.prepared is not None:
            self.prepared.plan.close()


class Entry(NamedTuple):
    """A prompt of a batch."""

    task: Task
    stream: AnswerStream


class Batch:
    """The prompts of one call, in order. Used on the worker only."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._next = 0
        """The first that was not looked at."""
        self._ahead: dict[int, Ahead] = {}

    @property
    def reuses(self) -> bool:
        """Whether there are several, and stored KV may be used for any."""
        return len(self.entries) > 1 and any(
            task.mode != "full" and task.plan.chunks for task, _ in self.entries
        )

    def take(self, number: int, together: Callable[[], PrefillTogether | None]) -> Ahead | None:
        """What there is of that prompt ahead of its turn; prefills it with those behind it."""
        prefill = together() if self.reuses else None
        if prefill is None:
            return None
        if number >= self._next:
            self._next = number + 1  # also if this fails
            made, self._next = prefill(self.entries, number)
            self._ahead.update(made)
        ahead = self._ahead.pop(number, None)
        if ahead is None or ahead.namespace == prefill.namespace:
            return ahead
        ahead.close()  # the weights or adapters changed between the prompt's prefill and its turn
        return None

    def leave(self, number: int) -> None:
        """That prompt's turn is over, whether it took what there was or not."""
        ahead = self._ahead.pop(number, None)
        if ahead is not None:
            ahead.close()

    def close(self) -> None:
        """Let go of whatever no turn took; the worker must be done with it. Idempotent."""
        for number in list(self._ahead):
            self.leave(number)


@dataclass(frozen=True)
class PrefillTogether:
    """Prefills the prompts that stand next in a batch. Caller holds the model's lock."""

    adapter: ModelAdapter
    fusor: Fusor
    namespace: str
    resolve: Callable[[Task, Callable[[], None]], tuple[Task, Controller | None]]
    """See :meth:`blendrag.engine.stored.Stored.resolve`."""
    rule: PackingRule

    def __call__(self, entries: Sequence[Entry], first: int) -> tuple[Mapping[int, Ahead], int]:
        """What is now there of ``first`` and those behind it, and the first that was not looked at."""
        chosen: dict[int, Prepared] = {}
        loads: list[Load] = []
        behind = len(entries)
        for number in range(first, len(entries)):
            made = self._prepared(entries[number])
            if made is None:
                if number == first:
                    return {}, number + 1
                continue  # answered alone when its turn comes
            prepared, load = made
            if chosen and not self.rule.admits(loads, load, prepared.task.profile):
                prepared.plan.close()
                behind = number
                break
            chosen[number] = prepared
            loads.append(load)
        if len(chosen) == 1:
            return {first: Ahead(self.namespace, chosen[first])}, behind
        return self._prefilled(entries, chosen), behind

    def _prepared(self, entry: Entry) -> tuple[Prepared, Load] | None:
        """``None`` for what cannot be prefilled with others; what is wrong with it is said in its turn."""
        task, stream = entry
        if task.mode == "full" or stream.done or self._changes_tables(task):
            return None
        preparation = Preparation(self.adapter)
        with suppress(Exception):
            task = preparation.checked(task)
            if task.sequences == 1:
                prepared = preparation.prepare(*self.resolve(task, stream.check))
                return prepared, self._load(prepared)
        return None

    def _changes_tables(self, task: Task) -> bool:
        """Whether a prompt is so long that every row of its forward is rotated by another table."""
        limit = self.adapter.blend_limit_tokens
        return limit is not None and len(task.plan.ids) > limit

    def _load(self, prepared: Prepared) -> Load:
        try:
            return Load.of(prepared, self.adapter)
        except Exception:
            prepared.plan.close()
            raise

    def _prefilled(
        self, entries: Sequence[Entry], chosen: Mapping[int, Prepared]
    ) -> dict[int, Ahead]:
        try:
            outcomes = self.fusor.batched_prefill(
                [
                    self._prompt(prepared, entries[number].stream)
                    for number, prepared in chosen.items()
                ]
            )
        except Exception as exc:
            log.warning("%d prompts are answered one after another: %s", len(chosen), exc)
            for prepared in chosen.values():
                prepared.plan.close()
            return {}
        return {
            number: self._ahead(prepared, outcome, len(chosen))
            for (number, prepared), outcome in zip(chosen.items(), outcomes, strict=True)
        }

    def _prompt(self, prepared: Prepared, stream: AnswerStream) -> PackedPrompt:
        task = prepared.task
        ids = torch.tensor([task.plan.ids], device=self.adapter.device)
        return PackedPrompt(
            ids, prepared.plan.request(ids.shape[1]), task.max_new_tokens, stream.check
        )

    def _ahead(self, prepared: Prepared, outcome: Prefilled | Exception, size: int) -> Ahead:
        """Those that failed are prepared again in their turn, and raise again what must be raised."""
        if isinstance(outcome, Prefilled):
            return Ahead(self.namespace, prepared, outcome, batch_size=size)
        prepared.plan.close()
        corrupt = isinstance(outcome, SpanCorruptError)
        avoid = {outcome.span.reader.key} if isinstance(outcome, SpanCorruptError) else set()
        if not corrupt:
            log.debug("a prompt left its batch: %s", outcome)
        return Ahead(self.namespace, avoid=frozenset(avoid))
