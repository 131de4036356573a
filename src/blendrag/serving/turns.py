"""Calls that take turns on one thread, so that requests decode their tokens together.

A request runs unchanged in a greenlet: ``model.generate`` with its sampling, stop strings, logits processors
and seed. Where it would decode a token, the other requests run until they would, too; then one forward
computes the tokens of all (:mod:`blendrag.serving.decode_step`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from blendrag.model.adapter import ModelAdapter
from blendrag.serving.decode_step import DecodeStep, decoded_together

log = logging.getLogger(__name__)


class Turn(greenlet):
    """One call. Its context is its own, as a thread's is."""

    def __init__(self, turns: Turns, call: Callable[[], None]) -> None:
        super().__init__(call)
        self.gr_context = copy_context()
        self.turns = turns
        self.adapter: ModelAdapter | None = None
        """Whose tokens it decodes by turns."""
        self.step: DecodeStep | None = None
        """What it waits for; ``None`` if that must be computed alone."""

    def wait(self, step: DecodeStep | None) -> Any:
        """Let the other calls run. Returns what the forward of ``step`` would; ``None`` if it has not run."""
        self.step = step
        assert self.parent is not None
        with torch.inference_mode(False):  # modes are the thread's: others begin without this one's
            return self.parent.switch()


class Turns:
    """Runs calls by turns, all on the thread that uses it."""

    def __init__(self) -> None:
        self._waiting: list[Turn] = []
        self._patched = 0
        """How many of them take turns on the model."""

    def __len__(self) -> int:
        """How many calls have begun and not ended."""
        return len(self._waiting)

    def start(self, call: Callable[[], None]) -> None:
        """Run ``call``, which raises nothing, until it ends or has a token to decode."""
        turn = Turn(self, call)
        turn.switch()
        self._keep(turn)

    def step(self) -> None:
        """Decode a token of every call, and run each until it ends or has another one to decode."""
        turns, self._waiting = self._waiting, []
        steps = [turn.step for turn in turns if turn.step is not None]
        outputs: dict[int, Any] = {}
        if len(steps) > 1:
            try:
                together = decoded_together(steps)
                outputs = {id(step): out for step, out in zip(steps, together, strict=True)}
            except Exception as exc:
                log.warning("%d requests decode one after another: %s", len(steps), exc)
        for turn in turns:
            turn.switch(outputs.get(id(turn.step)))
            self._keep(turn)

    def _keep(self, turn: Turn) -> None:
        if not turn.dead:
            self._waiting.append(turn)

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
        output = turn.wait(DecodeStep.of(turn.adapter, stock, kwargs))
        return stock(**kwargs) if output is None else output

    return forward


def is_turn() -> bool:
    """Whether the caller runs in :class:`Turns`."""
    return isinstance(getcurrent(), Turn)


@contextmanager
def taking_turns(adapter: ModelAdapter) -> Iterator[None]:
    """Within this context, the tokens that ``adapter.model`` decodes for this call are computed with those of
    the other calls of its :class:`Turns`. Caller holds the adapter's lock."""
    turn = getcurrent()
    if not isinstance(turn, Turn):
        yield
        return
    with turn.turns.shared(adapter.model):
        turn.adapter = adapter
        try:
            yield
        finally:
            turn.adapter = None
