"""One request on the worker's thread: plan the loads, run ``generate``, measure.

Owns the ways into ``model.generate``: stock, blended in its first forward, prefilled with others before,
and in two steps for beams and several sequences. Caller holds nothing; this takes the model's lock from
first hook to last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from blendrag.engine.decoding import SeededDraws, sampling
from blendrag.engine.options import Options
from blendrag.engine.outcome import Outcome
from blendrag.engine.preparation import Preparation
from blendrag.engine.stream import AnswerStream, StopWhenDone
from blendrag.engine.task import Prepared, Task
from blendrag.engine.together import Ahead
from blendrag.engine.types import Answer
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.fusor import Fusion, Fusor, Prefilled
from blendrag.fusor.loader import SpanCorruptError
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import in_this_thread
from blendrag.planning.controller import Controller
from blendrag.planning.plan import Plan, Reason, ReasonCode

#: Restarts of one query after a chunk's bytes failed verification, before it is computed in full.
MAX_RESTARTS = 8
CORRUPT_AGAIN = Reason(ReasonCode.CORRUPT, "stored KV failed verification again and again")


class Generation:
    """Answers tasks on one model."""

    def __init__(self, adapter: ModelAdapter, fusor: Callable[[], Fusor]) -> None:
        self._adapter = adapter
        self._fusor = fusor
        self._outcome = Outcome(adapter)
        self._preparation = Preparation(adapter)

    def run(
        self,
        task: Task,
        controller: Controller | None,
        stream: AnswerStream,
        later: Callable[[Plan], None],
        ahead: Ahead | None = None,
    ) -> Answer:
        """Answer ``task``; ``later(plan)`` is told what is worth encoding afterwards.

        What :meth:`Preparation.checked` raises, and :class:`RequestCancelled` and :class:`RequestTimeout`.
        """
        task = self._preparation.checked(task)
        if stream.hidden is not None:
            ends = self._adapter.tokens.special_among(self._outcome.end_ids(task))
            stream.hidden = {*stream.hidden, *ends}
        avoid = set(ahead.avoid if ahead is not None else ())
        compiled = nullcontext() if task.mode == "full" else self._adapter.uncompiled()
        with self._adapter.lock, compiled, torch.inference_mode():
            if ahead is not None and ahead.prepared is not None:
                with _noting_corrupt(avoid):
                    return self._attempt(
                        ahead.prepared, stream, later, ahead.prefilled, ahead.batch_size
                    )
            for _ in range(MAX_RESTARTS):
                stream.check()
                prepared = self._preparation.prepare(task, controller, frozenset(avoid))
                with _noting_corrupt(avoid):
                    return self._attempt(prepared, stream, later)
            task = replace(task, why_computed=CORRUPT_AGAIN)
            return self._attempt(self._preparation.prepare(task, None), stream, later)

    # -- the ways into generate -----------------------------------------------------------------

    def _attempt(
        self,
        prepared: Prepared,
        stream: AnswerStream,
        later: Callable[[Plan], None],
        prefilled: Prefilled | None = None,
        batch_size: int = 1,
    ) -> Answer:
        """Closes the loads of ``prepared``."""
        task, plan = prepared.task, prepared.plan
        try:
            stream.check()
            ids = torch.tensor([task.plan.ids], device=self._adapter.device)
            fusion: Fusion | None = None
            if prefilled is not None:
                output, fusion = self._continued(task, stream, ids, prefilled)
            elif not plan.spans:
                with _watched(self._adapter.decoder_layers, stream.check):
                    output = self._generate(task, stream, ids)
            elif task.sequences == 1:
                output, fusion = self._blended(prepared, stream, ids)
            else:
                output, fusion = self._two_step(prepared, stream, ids)
            later(plan)
            new_ids = output[:, ids.shape[1] :]
            return self._outcome.answer(prepared, stream, fusion, new_ids, batch_size)
        finally:
            plan.close()

    def _blended(
        self, prepared: Prepared, stream: AnswerStream, ids: torch.Tensor
    ) -> tuple[torch.Tensor, Fusion]:
        """The first forward inside ``generate`` is the fusion."""
        fusor = self._fusor()
        cache = fusor.new_cache(ids.shape[1], prepared.task.max_new_tokens)
        asked = prepared.plan.request(ids.shape[1])
        with fusor.fuse(cache, asked, stream.check, last_row_only=True) as fusion:
            return self._generate(prepared.task, stream, ids, cache), fusion

    def _continued(
        self, task: Task, stream: AnswerStream, ids: torch.Tensor, prefilled: Prefilled
    ) -> tuple[torch.Tensor, Fusion]:
        """The first forward inside ``generate`` was run before, with others'."""
        with prefilled.replayed(self._adapter.stack.base) as cache:
            return self._generate(task, stream, ids, cache), prefilled.fusion

    def _two_step(
        self, prepared: Prepared, stream: AnswerStream, ids: torch.Tensor
    ) -> tuple[torch.Tensor, Fusion]:
        """Blend all but the last token, repeat the cache, then an ordinary ``generate``."""
        n = ids.shape[1] - 1
        request = prepared.plan.request(n)
        _, cache, fusion = self._fusor().prefill(ids[:, :n], request, check=stream.check)
        cache.batch_repeat_interleave(prepared.task.sequences)
        return self._generate(prepared.task, stream, ids, cache), fusion

    def _generate(
        self, task: Task, stream: AnswerStream, ids: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        options = task.options
        kwargs: dict[str, Any] = {"max_new_tokens": task.max_new_tokens}
        kwargs |= sampling(options) | dict(options.generate)
        if cache is not None:
            kwargs["past_key_values"] = cache
        tokenizer = self._adapter.tokens.tokenizer
        config = self._adapter.model.generation_config
        if config.pad_token_id is None:
            pad = tokenizer.pad_token_id
            kwargs.setdefault("pad_token_id", tokenizer.eos_token_id if pad is None else pad)
        try:
            with self._decoding(options, stream):
                output = self._adapter.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    stopping_criteria=[StopWhenDone(stream, feeds=task.sequences == 1)],
                    return_dict_in_generate=False,
                    **kwargs,
                )
        except (ValueError, TypeError) as exc:
            if isinstance(exc, BlendragError) or not options.generate:
                raise
            given = ", ".join(f"{k}={v!r}" for k, v in options.generate.items())
            first = str(exc).strip().splitlines()[0]
            raise InvalidInputError(f"transformers refuses {given}: {first}") from exc
        stream.check()
        stream.end()
        return output

    @contextmanager
    def _decoding(self, options: Options, stream: AnswerStream) -> Iterator[None]:
        """What watches or steers every step of ``generate``."""
        with ExitStack() as around:
            if stream.likely is not None:
                around.enter_context(stream.likely.watching(self._adapter.model))
            if options.seed is not None and options.samples:
                draws = SeededDraws(options.seed, self._adapter.device)
                around.enter_context(draws.between_forwards(self._adapter.model))
            yield


@contextmanager
def _noting_corrupt(avoid: set[str]) -> Iterator[None]:
    """A chunk whose bytes are not what was put ends the attempt within and is added to ``avoid``."""
    try:
        yield
    except SpanCorruptError as corrupt:
        avoid.add(corrupt.span.reader.key)


@contextmanager
def _watched(layers: Sequence[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Call ``check()`` before each layer of a stock forward, so that it can be abandoned early."""
    hook = in_this_thread(lambda *_: check())
    hooks = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
