"""Calls that take turns on one thread, so that requests decode their tokens together.

A request runs unchanged in a greenlet: ``model.generate`` with its sampling, stop strings, logits processors
and seed. Where it would decode a token, the other requests run until they would, too; then one forward
computes the tokens of all (:mod:`blendrag.serving.decode_step`). A prefill pauses between two layers to let
the others decode (:func:`pause`). A call whose answer has no room for its next token gets more, or waits
(:mod:`blendrag.serving.kv_budget`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.overrides import _len_torch_function_stack

from blendrag.corpus.embedding_turns import EmbeddingTurns
from blendrag.model.adapter import ModelAdapter
from blendrag.serving.chunk_pool import ChunkPool, LoadedPrompt, RequestKV
from blendrag.serving.decode_step import DecodeStep, can_join, decoded_together
from blendrag.serving.kv_budget import KVBudget, KVShare

log = logging.getLogger(__name__)

#: A prefill computes this many times as long as the others decoded before it lets them decode again, so they
#: delay its first token by a sixth, and by the step that runs when it arrives.
PREFILL_PER_STEP = 6


class Turn(greenlet):
    """One call. Its context is its own, as a thread's is."""

    def __init__(self, turns: Turns, call: Callable[[], None]) -> None:
        super().__init__(call)
        self.gr_context = copy_context()
        self.turns = turns
        self.adapter: ModelAdapter | None = None
        """Whose tokens it decodes by turns."""
        self.loaded: LoadedPrompt | None = None
        """Its prompt, if parts of it were loaded."""
        self.kv: RequestKV | None = None
        """Its KV, from the first token that can be decoded with others."""
        self.step: DecodeStep | None = None
        """What it waits for; ``None`` if that must be computed alone."""
        self.is_paused = False
        """Whether it waits between two layers of a prefill."""
        self.share: KVShare | None = None
        """What it holds of the memory."""

    @property
    def has_room(self) -> bool:
        """Whether its next token can be decoded at once."""
        return self.share is None or self.share.has_room

    @property
    def is_aside(self) -> bool:
        """Whether its KV is elsewhere while it waits."""
        return self.share is not None and self.share.is_aside

    @property
    def may_be_put_aside(self) -> bool:
        """Whether its KV is all that it needs to go on later, and takes memory of the others."""
        if self.share is None or self.is_aside or self.is_paused or self.step is None:
            return False
        return self.kv is not None and not (self.kv.running is None and self.kv.cache.is_part)

    def wait(self, step: DecodeStep | None, is_paused: bool = False) -> Any:
        """Let the other calls run. Returns what the forward of ``step`` would; ``None`` if it has not run."""
        self.step, self.is_paused = step, is_paused
        assert self.parent is not None
        with torch.inference_mode(False):  # modes are the thread's: others begin without this one's
            return self.parent.switch()


class Turns:
    """Runs calls by turns, all on the thread that uses it."""

    def __init__(self, budget: KVBudget, embedding: EmbeddingTurns | None = None) -> None:
        """``embedding``: batches that are let in between layers and tokens."""
        self._budget = budget
        self.embedding = embedding or EmbeddingTurns()
        self._turns: list[Turn] = []
        """The calls that have begun and not ended."""
        self._steps_s = 0.0, 0.0
        """How long the last two steps took; one that begins to share chunks takes far longer than others."""
        self._stepped_at = 0.0
        """When it began or, once it has ended, ended."""
        self._patched = 0
        """How many of them take turns on the model."""
        self._own: Any = None
        """What the model's instance had for ``forward`` before."""
        self._pool: ChunkPool | None = None
        self._warned = False

    def __len__(self) -> int:
        """How many calls have begun and not ended."""
        return len(self._turns)

    @property
    def is_paused(self) -> bool:
        """Whether a prefill waits for the others to decode."""
        return any(turn.is_paused for turn in self._turns)

    def start(self, call: Callable[[], None]) -> None:
        """Run ``call``, which raises nothing, until it ends, pauses or has a token to decode."""
        turn = Turn(self, call)
        self._turns.append(turn)
        turn.switch()
        self._forget_if_over(turn)

    def step(self) -> None:
        """Decode a token of every call, and run each until it ends, pauses or has another one to decode."""
        paused = [turn for turn in self._turns if turn.is_paused]
        self._stepped_at = began = time.perf_counter()
        self._decode(self._with_room([turn for turn in self._turns if not turn.is_paused]))
        self._stepped_at = time.perf_counter()
        self._steps_s = self._steps_s[1], self._stepped_at - began
        for turn in paused:
            self._resume(turn)

    def is_due(self, turn: Turn) -> bool:
        """Whether other calls should decode before ``turn`` computes its next layer."""
        waits = any(not other.is_paused for other in self._turns if other is not turn)
        due_s = PREFILL_PER_STEP * min(self._steps_s)
        return waits and time.perf_counter() - self._stepped_at >= due_s

    def _with_room(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Those of ``turns``, the oldest first, that have room for their next token or get it now.

        If memory is short, the newest calls wait, and their KV is put aside if older ones need its place. One
        call always goes on, whatever it takes. A call whose room cannot be allocated fails alone.
        """
        if all(turn.has_room for turn in turns):
            self._budget.is_short = False
            return turns
        ready: list[Turn] = []
        waiting: list[Turn] = []
        failed: dict[Turn, Exception] = {}
        with torch.inference_mode():
            for turn in turns:
                try:
                    # none comes back before one that is older
                    has_room = turn.has_room or (
                        not (turn.is_aside and waiting) and self._get_room(turn)
                    )
                except Exception as exc:  # memory is shorter than its limit says
                    failed[turn] = exc
                else:
                    (ready if has_room else waiting).append(turn)
            while waiting and not ready and not self.is_paused:
                oldest = waiting.pop(0)
                try:
                    self._grow(oldest)
                    ready.append(oldest)
                except Exception as exc:
                    failed[oldest] = exc
        self._budget.is_short = bool(waiting)
        for turn, why in failed.items():
            self._resume(turn, why)
        for turn in waiting:
            try:
                assert turn.share is not None
                turn.share.check()
            except Exception as over:
                self._resume(turn, over)
        return ready

    def _get_room(self, turn: Turn) -> bool:
        """Make room for the next token of ``turn``, from newer calls if need be; ``False``: there is none."""
        assert turn.share is not None
        newer = [*self._turns[self._turns.index(turn) + 1 :]]
        while not self._budget.fits(turn.share.needed_bytes):
            while newer and not newer[-1].may_be_put_aside:
                newer.pop()
            if not newer:
                return False
            try:
                self._put_aside(newer[-1])
            except Exception as exc:  # no place for it, such as a full disk: it stays
                log.warning("the KV of a request could not be put aside: %s", exc)
            newer.pop()
        self._grow(turn)
        return True

    def _grow(self, turn: Turn) -> None:
        """Allocate the room that ``turn`` needs."""
        share, kv = turn.share, turn.kv
        assert share is not None
        before, share.room = share.room, share.needed_room
        left = share.room - share.used + 1
        if share.is_aside:
            assert kv is not None
            self._pool_of(turn).take_back(kv, left)
            share.is_aside = False
        elif kv is not None and turn.step is not None and share.room > before:
            if kv.running is None and kv.cache.is_part:
                share.pinned_tokens = before
            self._pool_of(turn).reserve(kv, left)

    def _put_aside(self, turn: Turn) -> None:
        assert turn.kv is not None
        assert turn.share is not None
        self._pool_of(turn).put_aside(turn.kv)
        turn.share.is_aside = True

    def _decode(self, turns: Sequence[Turn]) -> None:
        steps = {turn: turn.step for turn in turns if turn.step is not None}
        outputs: dict[Turn, Any] = {}
        if len(steps) > 1 or any(step.kv.running for step in steps.values()):
            outputs = self._decoded(steps)
        for turn in turns:
            self._resume(turn, outputs.get(turn))

    def _resume(self, turn: Turn, output: Any = None) -> None:
        turn.is_paused = False
        if isinstance(output, Exception):
            turn.throw(output)
        else:
            turn.switch(output)
        self._forget_if_over(turn)

    def _forget_if_over(self, turn: Turn) -> None:
        if turn.dead:
            self._turns.remove(turn)

    def _decoded(self, steps: dict[Turn, DecodeStep]) -> dict[Turn, Any]:
        """The output of each step that was computed, or its error if it cannot be computed alone."""
        pool = self._pool_of(next(iter(steps)))
        together = list(steps.values())
        try:
            with torch.inference_mode():
                pool.share([step.kv for step in together])
            return dict(zip(steps, decoded_together(together, pool), strict=True))
        except Exception as exc:
            if len(steps) == 1:
                return dict.fromkeys(steps, exc)
            if not self._warned:
                self._warned = True
                log.warning("%d requests decode one after another: %s", len(steps), exc)
        outputs: dict[Turn, Any] = {}
        for turn, step in steps.items():
            if step.kv.running:
                outputs |= self._decoded({turn: step})
        return outputs

    def _pool_of(self, turn: Turn) -> ChunkPool:
        assert turn.adapter is not None
        if self._pool is None or self._pool.adapter is not turn.adapter:
            self._pool = ChunkPool(turn.adapter, self._budget.limit_bytes)
        return self._pool

    def leave(self, turn: Turn) -> None:
        """The call decodes no more tokens."""
        if turn.kv is not None and self._pool is not None:
            self._pool.leave(turn.kv)

    @contextmanager
    def shared(self, model: nn.Module) -> Iterator[None]:
        """Within this context, forwards of ``model`` that decode a token wait for those of other calls."""
        if not self._patched:
            self._own = vars(model).get("forward")
            model.forward = _waiting_forward(model.forward)
        self._patched += 1
        try:
            yield
        finally:
            self._patched -= 1
            if not self._patched:
                if self._own is None:
                    with suppress(AttributeError):
                        del model.forward
                else:
                    model.forward = self._own


def _waiting_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock``, which calls that take turns run together where it decodes a token."""

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        turn = None if torch.compiler.is_dynamo_compiling() else getcurrent()
        if not isinstance(turn, Turn) or turn.adapter is None or args:
            return stock(*args, **kwargs)
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[-1] != 1:  # a prefill
            return stock(**kwargs)
        if turn.share is not None:
            turn.share.used += 1
        joins = bool(turn.kv and turn.kv.running) or can_join(turn.adapter, kwargs)
        if joins and turn.kv is None:
            turn.kv = RequestKV(kwargs["past_key_values"], turn.loaded)
        output = turn.wait(DecodeStep(stock, ids, turn.kv) if joins and turn.kv else None)
        return stock(**kwargs) if output is None else output

    return forward


def let_texts_in() -> None:
    """Let a batch of texts be embedded if one is due. Called before each layer of what nothing may pause."""
    turn = getcurrent()
    if isinstance(turn, Turn):
        turn.turns.embedding.before_step()


def pause() -> None:
    """Let the other calls decode a token if that is due. Called before each layer of a prefill."""
    turn = getcurrent()
    if not isinstance(turn, Turn):
        return
    let_texts_in()
    if not turn.turns.is_due(turn):
        return
    # function modes are the thread's, too: the others would draw from this call's seed
    if not _len_torch_function_stack():
        turn.wait(None, is_paused=True)


def pausing(check: Callable[[], None]) -> Callable[[], None]:
    """``check`` after :func:`pause`."""

    def checked() -> None:
        pause()
        check()

    return checked


def loaded(prompt: LoadedPrompt) -> None:
    """Say what of the prompt of this call was loaded, so that it may share that with others."""
    turn = getcurrent()
    if isinstance(turn, Turn):
        turn.loaded = prompt


@contextmanager
def taking_turns(adapter: ModelAdapter, share: KVShare | None = None) -> Iterator[None]:
    """Within this context, the tokens that ``adapter.model`` decodes for this call are computed with those of
    the other calls of its :class:`Turns`, and ``share`` grows with its answer. Caller holds the adapter's
    lock."""
    turn = getcurrent()
    if not isinstance(turn, Turn):
        yield
        return
    # a processor of a request may ask, too
    around = turn.adapter, turn.loaded, turn.kv, turn.share
    turn.adapter, turn.loaded, turn.kv, turn.share = adapter, None, None, share
    with turn.turns.shared(adapter.model):
        try:
            yield
        finally:
            turn.turns.leave(turn)
            turn.adapter, turn.loaded, turn.kv, turn.share = around
