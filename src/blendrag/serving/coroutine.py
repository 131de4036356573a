"""A call that runs until it would decode a token, and goes on when that was decoded for all.

A request runs unchanged in a greenlet: ``model.generate`` with its sampling, stop strings, logits processors
and seed. Where it would decode a token, it waits; the scheduler computes the tokens of all in one forward
(:mod:`blendrag.serving.decode_step`). A prefill pauses between two layers to let the others decode
(:func:`pause`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from blendrag.corpus.embedding_turns import EmbeddingTurns
from blendrag.model.adapter import ModelAdapter
from blendrag.model.compat import is_in_function_mode
from blendrag.model.decode_weights import DecodeWeights
from blendrag.model.sharing import replaced
from blendrag.serving.chunk_pool import LoadedPrompt, RequestKV
from blendrag.serving.decode_step import DecodeStep, can_join, kv_of
from blendrag.serving.hybrid_rows import HybridKV
from blendrag.serving.kv_budget import KVShare
from blendrag.serving.pending import GaveWay, Pending, never


class CallScheduler(Protocol):
    """What a running call asks of the scheduler that runs it."""

    closed: bool
    embedding: EmbeddingTurns

    @property
    def is_waited_for(self) -> bool: ...
    def is_step_due(self, prefill: Coroutine) -> bool: ...
    def joint_forward(self, model: nn.Module) -> JointForward: ...
    def leave(self, call: Coroutine) -> None: ...
    def put_back(self, pending: Pending[Any]) -> None: ...


class Coroutine(greenlet):
    """One running call. Its context is its own, as a thread's is."""

    def __init__(self, scheduler: CallScheduler, pending: Pending[Any]) -> None:
        # tracebacks of the call keep frames, which must not keep this object and its KV
        super().__init__(lambda _: None if pending.settle() else scheduler.put_back(pending))
        self.gr_context = copy_context()
        self.scheduler = scheduler
        self.pending = pending
        self.adapter: ModelAdapter | None = None
        """The model that decodes its tokens, jointly with those of other calls on it."""
        self.loaded: LoadedPrompt | None = None
        """Its prompt, if parts of it were loaded."""
        self.has_begun = False
        """Whether the model was called: its first forward computes the prompt, perhaps a single token."""
        self.kv: RequestKV | HybridKV | None = None
        """Its KV, from the first token that can be decoded with others."""
        self.step: DecodeStep | None = None
        """What it waits for; ``None`` if that must be computed alone."""
        self.is_paused = False
        """Whether it waits between two layers of a prefill."""
        self.prefill_s = 0.0
        """How long its prefill has computed."""
        self.share: KVShare | None = None
        """What it holds of the memory."""
        self.weights: DecodeWeights | None = None
        """What its tokens are decoded with; ``None``: the model's own weights."""

    @property
    def has_room(self) -> bool:
        return self.share is None or self.share.has_room

    @property
    def is_aside(self) -> bool:
        return self.share is not None and self.share.is_aside

    @property
    def may_be_put_aside(self) -> bool:
        """Whether its KV is all that it needs to go on later, and takes memory of the others."""
        if self.share is None or self.is_aside or self.is_paused or self.step is None:
            return False
        return self.kv is not None and not self.kv.is_part

    def wait(self, step: DecodeStep | None, is_paused: bool = False) -> Any:
        """Let the other calls run. Returns what the forward of ``step`` would; ``None`` if it has not run."""
        self.step, self.is_paused = step, is_paused
        assert self.parent is not None
        with torch.inference_mode(False):  # modes are the thread's: others begin without this one's
            return self.parent.switch()

    def resume(self, output: Any = None) -> None:
        """Go on with ``output``, or with an error, until it waits again or ends."""
        self.is_paused = False
        if isinstance(output, Exception):
            self.throw(output)
        else:
            self.switch(output)


class JointForward:
    """Replaces the forward of a model while calls decode jointly on it."""

    def __init__(self) -> None:
        self._users = 0
        self._patched = ExitStack()

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Within this context, forwards of ``model`` that decode a token wait for those of other calls."""
        if not self._users:
            forward = _waiting_forward(model.forward)
            self._patched.enter_context(replaced(model, "forward", forward))
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._patched.close()


def _waiting_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock``, which is computed jointly where it decodes a token."""

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_dynamo_compiling() else getcurrent()
        if not isinstance(call, Coroutine) or call.adapter is None or args:
            return stock(*args, **kwargs)
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[-1] != 1 or not call.has_begun:  # a prefill
            call.has_begun = True
            return stock(**kwargs)
        if call.share is not None:
            call.share.used += 1
        joins = bool(call.kv and call.kv.running) or can_join(call.adapter, kwargs)
        if joins and call.kv is None:
            call.kv = kv_of(call.adapter, kwargs["past_key_values"], call.loaded)
        weights = call.weights
        output = call.wait(DecodeStep(stock, ids, call.kv, weights) if joins and call.kv else None)
        if output is not None:
            return output
        return stock(**kwargs) if weights is None else weights.decode(stock, **kwargs)

    return forward


def give_way(is_wanted: Callable[[], bool] = never) -> None:
    """End this call if it is in the background and a request waits, or ``is_wanted()``; it is begun again
    later. Let a batch of texts be embedded if one is due. Called before each layer of what nothing may
    pause."""
    call = getcurrent()
    if isinstance(call, Coroutine):
        scheduler = call.scheduler
        if call.pending.is_background and (
            scheduler.is_waited_for or scheduler.closed or is_wanted()
        ):
            raise GaveWay
        call.scheduler.embedding.before_step()


def pause(is_wanted: Callable[[], bool] = never) -> None:
    """Let the other calls decode a token if that is due; a background call ends (:func:`give_way`). Called
    before each layer of a prefill."""
    call = getcurrent()
    if not isinstance(call, Coroutine):
        return
    give_way(is_wanted)
    if not call.scheduler.is_step_due(call):
        return
    # function modes are the thread's, too: the others would draw from this call's seed
    if not is_in_function_mode():
        call.wait(None, is_paused=True)


def pausing(check: Callable[[], None]) -> Callable[[], None]:
    def checked() -> None:
        pause()
        check()

    return checked


def note_loaded(prompt: LoadedPrompt) -> None:
    """Say what of the prompt of this call was loaded, so that it may share that with others."""
    call = getcurrent()
    if isinstance(call, Coroutine):
        call.loaded = prompt


@contextmanager
def decoding_jointly(
    adapter: ModelAdapter, share: KVShare | None = None, weights: DecodeWeights | None = None
) -> Iterator[None]:
    """Within this context, the tokens that ``adapter.model`` decodes for this call are computed with those of
    the other calls of its scheduler, by ``weights``, and ``share`` grows with its answer. Caller holds the
    adapter's lock."""
    call = getcurrent()
    if not isinstance(call, Coroutine):
        yield
        return
    # a processor of a request may ask, too
    around = call.adapter, call.loaded, call.has_begun, call.kv, call.share, call.weights
    call.adapter, call.loaded, call.has_begun, call.kv, call.share, call.weights = (
        adapter, None, False, None, share, weights
    )  # fmt: skip
    with call.scheduler.joint_forward(adapter.model).of(adapter.model):
        try:
            yield
        finally:
            call.scheduler.leave(call)
            call.adapter, call.loaded, call.has_begun, call.kv, call.share, call.weights = around
