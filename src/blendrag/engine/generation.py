"""One request on the worker's thread: plan the loads, run ``generate``, measure.

Owns the ways into ``model.generate``: stock, blended in its first forward, and in two steps for beams
and several sequences. Caller holds nothing; this takes the model's lock from first hook to last
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from blendrag.config import Mode
from blendrag.controller import Asked, Controller, Decided, LoadPlan, decide, nothing_loaded, report
from blendrag.engine.decoding import SeededDraws, sampling
from blendrag.engine.stream import AnswerStream, StopWhenDone, cut_at_stop
from blendrag.engine.types import ASSISTED, REFUSED, Answer, Options, TokenLogprob
from blendrag.errors import (
    BlendragError,
    ContextOverflowError,
    InvalidInputError,
    UnsupportedModelError,
)
from blendrag.estimates import Profile
from blendrag.fusor import BlendRequest, Fusion, Fusor
from blendrag.loader import SpanCorruptError
from blendrag.metrics import RequestMetrics
from blendrag.model.adapter import ModelAdapter
from blendrag.prompt import PromptPlan
from blendrag.selection import Schedule, SelectionPolicy, make_policy

#: Restarts of one query after a chunk's bytes failed verification, before it is computed in full.
MAX_RESTARTS = 8


@dataclass(frozen=True)
class Task:
    """A request with nothing left to default."""

    plan: PromptPlan
    mode: Mode
    policy: str
    schedule: Schedule
    ratio: float
    max_new_tokens: int
    options: Options
    started: float
    """``time.perf_counter()`` when the caller asked."""
    source_of: dict[str, str]
    notes: tuple[str, ...]

    why_computed: str = "mode full computes every token"
    """What a chunk's report says when nothing may be loaded."""
    sequences: int = 1
    """Rows ``generate`` runs with: beams or returned sequences."""
    is_auto: bool = False
    """Whether ``ratio`` is only the least, and the loading controller decides."""
    follows_load: bool = False
    """Whether it may bring a schedule, too."""
    profile: Profile | None = None
    """What this machine takes for what, if that was measured."""


class Generation:
    """Answers tasks on one model."""

    def __init__(self, adapter: ModelAdapter, fusor: Callable[[], Fusor]) -> None:
        self._adapter = adapter
        self._fusor = fusor

    def run(
        self,
        task: Task,
        controller: Controller | None,
        stream: AnswerStream,
        later: Callable[[LoadPlan], None],
    ) -> Answer:
        """Answer ``task``; ``later(load)`` is told what is worth encoding afterwards.

        Raises :class:`ContextOverflowError`, :class:`InvalidInputError` for a checkpoint that asks for
        assisted decoding and for ``logprobs`` of several sequences, :class:`UnsupportedModelError` in
        any mode but full, :class:`RequestCancelled` and :class:`RequestTimeout`.
        """
        self._check(task)
        self._refuse_assistance()
        task = replace(task, sequences=self._sequences(task.options))
        if task.sequences > 1 and task.options.logprobs is not None:
            raise InvalidInputError(
                f"logprobs of {task.sequences} beams or sequences, expected one sequence; "
                "leave one of the two out"
            )
        if stream.hidden is not None:
            stream.hidden = {
                *stream.hidden,
                *self._adapter.tokens.special_among(self._end_ids(task)),
            }
        avoid: set[str] = set()
        with self._adapter.lock, torch.inference_mode():
            for _ in range(MAX_RESTARTS):
                try:
                    return self._attempt(task, controller, stream, later, frozenset(avoid))
                except SpanCorruptError as corrupt:
                    avoid.add(corrupt.span.reader.key)
            task = replace(task, why_computed="stored KV failed verification again and again")
            return self._attempt(task, None, stream, later, frozenset())

    def _sequences(self, options: Options) -> int:
        """As asked for, else as the checkpoint's own generation config says."""
        config = self._adapter.model.generation_config
        names = ("num_beams", "num_return_sequences")
        return max(int(options.generate.get(n) or getattr(config, n, None) or 1) for n in names)

    def _check(self, task: Task) -> None:
        check_fits(task.plan, task.max_new_tokens, self._adapter)
        if task.mode != "full":
            self._adapter.require_blendable()

    def _refuse_assistance(self) -> None:
        """Of the checkpoint's own generation config; a request's arguments were looked at before."""
        config = self._adapter.model.generation_config
        for name in ASSISTED:
            value = getattr(config, name, None)
            if value is not None and value is not False:
                raise InvalidInputError(
                    f"the generation config of {self._adapter.model_id} sets {name} to {value!r}: "
                    f"{REFUSED[name]}; set model.generation_config.{name} to None"
                )

    def _check_length(self, task: Task) -> None:
        """Keys of a table that changes with the length cannot be mixed with stored ones."""
        tokens, limit = len(task.plan.ids), self._adapter.blend_limit_tokens
        if limit is not None and tokens + task.max_new_tokens > limit:
            raise UnsupportedModelError(
                f"prompt of {tokens} tokens passes {limit}, where {self._adapter.model_id}'s rotary "
                "table changes with the length; use mode full or a shorter prompt"
            )

    def _attempt(
        self,
        task: Task,
        controller: Controller | None,
        stream: AnswerStream,
        later: Callable[[LoadPlan], None],
        avoid: frozenset[str],
    ) -> Answer:
        stream.check()
        load = nothing_loaded(task.plan, task.why_computed)
        if controller is not None:
            reserve = 1 if task.sequences == 1 else 2
            load = controller.plan(task.plan, task.mode, avoid, reserve)
        try:
            load, decided = self._decide(task, load)
            task = _as_decided(task, decided)
            if load.spans:
                self._check_length(task)
            ids = torch.tensor([task.plan.ids], device=self._adapter.device)
            fusion: Fusion | None = None
            if not load.spans:
                with _watched(self._adapter.decoder_layers, stream.check):
                    output = self._generate(task, stream, ids)
            elif task.sequences == 1:
                output, fusion = self._blended(task, stream, ids, load)
            else:
                output, fusion = self._two_step(task, stream, ids, load)
            later(load)
            answer = self._answer(task, stream, load, fusion, output[:, ids.shape[1] :])
            return replace(answer, metrics=_with_forecast(answer.metrics, decided))
        finally:
            load.close()

    def _decide(self, task: Task, load: LoadPlan) -> tuple[LoadPlan, Decided]:
        """What is loaded after all, and how; the time predicted is that since the request began."""
        asked = Asked(
            task.mode, _policy_of(task), task.schedule, task.ratio, task.is_auto, task.follows_load
        )
        if task.profile is None or not task.plan.chunks:
            return load, Decided(task.ratio, task.schedule)
        layout = self._adapter.layout
        load, decided = decide(load, len(task.plan.ids), layout, asked, task.profile)
        if decided.forecast is None:
            return load, decided
        ttft_s = time.perf_counter() - task.started + decided.forecast.ttft_s
        return load, replace(decided, forecast=replace(decided.forecast, ttft_s=ttft_s))

    # -- three ways into generate ---------------------------------------------------------------

    def _blended(
        self, task: Task, stream: AnswerStream, ids: torch.Tensor, load: LoadPlan
    ) -> tuple[torch.Tensor, Fusion]:
        """The first forward inside ``generate`` is the fusion."""
        fusor = self._fusor()
        cache = fusor.new_cache(ids.shape[1], task.max_new_tokens)
        request = self._request(task, load, ids.shape[1])
        with fusor.fuse(cache, request, stream.check) as fusion:
            return self._generate(task, stream, ids, cache), fusion

    def _two_step(
        self, task: Task, stream: AnswerStream, ids: torch.Tensor, load: LoadPlan
    ) -> tuple[torch.Tensor, Fusion]:
        """Blend all but the last token, repeat the cache, then an ordinary ``generate``."""
        fusor = self._fusor()
        n = ids.shape[1] - 1
        request = self._request(task, load, n)
        _, cache, fusion = fusor.prefill(ids[:, :n], request, check=stream.check)
        cache.batch_repeat_interleave(task.sequences)
        return self._generate(task, stream, ids, cache), fusion

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

    # -- what it was --------------------------------------------------------------------------

    def _request(self, task: Task, load: LoadPlan, prompt_tokens: int) -> BlendRequest:
        return BlendRequest(prompt_tokens, load.spans, _policy_of(task), task.schedule, task.ratio)

    def _answer(
        self,
        task: Task,
        stream: AnswerStream,
        load: LoadPlan,
        fusion: Fusion | None,
        new_ids: torch.Tensor,
    ) -> Answer:
        ends = self._end_ids(task)
        rows = [_until_end(row, ends) for row in new_ids.tolist()]
        texts, finish = self._texts(task, stream, rows, ends)
        counts = fusion.counts() if fusion is not None else None
        reused = load.reused_tokens
        ratio = counts.ratio if counts else float(task.mode == "full")
        charged = counts.charged_ratio if counts else float(task.mode == "full")
        prompt_tokens = len(task.plan.ids)
        blended = task.mode == "blend" and counts is not None and counts.candidates > 0
        metrics = RequestMetrics(
            mode=task.mode,
            ttft_s=stream.ttft_s,
            load_s=fusion.loader.load_s if fusion is not None else 0.0,
            total_s=time.perf_counter() - task.started,
            prompt_tokens=prompt_tokens,
            reused_tokens=reused,
            recomputed_tokens=round(ratio * counts.candidates) if counts else 0,
            fresh_tokens=prompt_tokens - reused,
            new_tokens=sum(len(row) for row in rows),
            ratio=ratio,
            charged_ratio=charged,
            policy=_policy_used(task, fusion) if blended else "",
            schedule=str(fusion.schedule) if blended and fusion is not None else "",
            chunks=report(
                load.decisions, counts.recomputed_per_span if counts else (), task.source_of
            ),
            notes=task.notes,
        )
        return Answer(
            texts[0], tuple(texts), finish, metrics, logprobs=self._logprobs(stream, texts[0])
        )

    def _logprobs(self, stream: AnswerStream, text: str) -> tuple[TokenLogprob, ...] | None:
        if stream.likely is None:
            return None
        tokenizer = self._adapter.tokens.tokenizer
        return stream.likely.of(text, stream.tokens, tokenizer.decode)

    def _end_ids(self, task: Task) -> set[int]:
        eos = task.options.generate.get(
            "eos_token_id", self._adapter.model.generation_config.eos_token_id
        )
        return set(eos) if isinstance(eos, list | tuple) else {eos}

    def _texts(
        self, task: Task, stream: AnswerStream, rows: Sequence[Sequence[int]], ends: set[int]
    ) -> tuple[Sequence[str], str]:
        ended = bool(ends & set(rows[0][-1:]))
        if task.sequences == 1:
            stopped = stream.stopped_by is not None
            return [stream.text], "stop" if stopped or ended else "length"
        tokenizer = self._adapter.tokens.tokenizer
        cut = [
            cut_at_stop(tokenizer.decode(row, skip_special_tokens=True), task.options.stop)
            for row in rows
        ]
        return [text for text, _ in cut], "stop" if cut[0][1] or ended else "length"


def _as_decided(task: Task, decided: Decided) -> Task:
    return replace(
        task,
        ratio=decided.ratio,
        schedule=decided.schedule,
        notes=(*task.notes, *decided.notes),
    )


def _with_forecast(metrics: RequestMetrics, decided: Decided) -> RequestMetrics:
    """Predicted times beside the measured ones."""
    predicted = decided.forecast
    if predicted is None:
        return metrics
    return replace(
        metrics,
        predicted_ttft_s=predicted.ttft_s,
        predicted_load_s=predicted.load_s,
        predicted_compute_s=predicted.compute_s,
        decision=decided.reason,
    )


def check_fits(plan: PromptPlan, max_new_tokens: int, adapter: ModelAdapter) -> None:
    """Raise :class:`ContextOverflowError` for a prompt without room for its answer."""
    tokens = len(plan.ids)
    if tokens + max_new_tokens > adapter.context_tokens:
        raise ContextOverflowError(tokens, max_new_tokens, adapter.context_tokens)


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """Token ids up to the end token, without the padding behind it."""
    at = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: at + 1]


def _policy_of(task: Task) -> SelectionPolicy:
    if task.mode == "reuse":
        return make_policy("reuse")
    if task.mode == "prefix":  # every loaded span is exact: there are no candidates to choose among
        return make_policy("full")
    return make_policy(task.policy)


def _policy_used(task: Task, fusion: Fusion | None) -> str:
    """As asked for, unless the model's attention could not be seen and another had to decide."""
    if fusion is None or fusion.policy is fusion.request.policy:
        return task.policy
    return str(fusion.policy)


@contextmanager
def _watched(layers: Sequence[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Call ``check()`` before each layer of a stock forward, so that it can be abandoned early."""
    hooks = [layer.register_forward_pre_hook(lambda *_: check()) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
