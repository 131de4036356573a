"""What a request came to: its texts, and what they cost.

Owns how tokens, counts and decisions become an :class:`Answer`. Computes nothing on the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from blendrag.engine.stream import AnswerStream, cut_at_stop
from blendrag.engine.task import Prepared, Task
from blendrag.engine.types import Answer, TokenLogprob
from blendrag.fusor import Fusion
from blendrag.metrics import RequestMetrics
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.plan import Plan


class Outcome:
    """Makes answers of one model's output."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    def answer(
        self,
        prepared: Prepared,
        stream: AnswerStream,
        fusion: Fusion | None,
        new_ids: torch.Tensor,
        batch_size: int = 1,
    ) -> Answer:
        """Of ``new_ids`` ``[sequences, n]``, end tokens and padding included."""
        task = prepared.task
        ends = self.end_ids(task)
        rows = [_until_end(row, ends) for row in new_ids.tolist()]
        texts, finish = self._texts(task, stream, rows, ends)
        new_tokens = sum(len(row) for row in rows)
        metrics = replace(
            _metrics(prepared, stream, fusion), new_tokens=new_tokens, batch_size=batch_size
        )
        # a forecast is of a request that is computed alone
        metrics = _with_forecast(metrics, prepared.plan, batch_size == 1)
        logprobs = self._logprobs(stream, texts[0])
        return Answer(texts[0], tuple(texts), finish, metrics, logprobs=logprobs)

    def _logprobs(self, stream: AnswerStream, text: str) -> tuple[TokenLogprob, ...] | None:
        if stream.likely is None:
            return None
        tokenizer = self._adapter.tokens.tokenizer
        return stream.likely.of(text, stream.tokens, tokenizer.decode)

    def end_ids(self, task: Task) -> set[int]:
        """Tokens that end an answer to ``task``."""
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


def _metrics(prepared: Prepared, stream: AnswerStream, fusion: Fusion | None) -> RequestMetrics:
    task, plan = prepared.task, prepared.plan
    counts = fusion.counts() if fusion is not None else None
    reused = plan.reused_tokens
    prompt_tokens = len(task.plan.ids)
    ratio = counts.ratio if counts else float(task.mode == "full")
    blended = task.mode == "blend" and counts is not None and counts.candidates > 0
    return RequestMetrics(
        mode=task.mode,
        ttft_s=stream.ttft_s,
        load_s=fusion.loader.load_s if fusion is not None else 0.0,
        total_s=time.perf_counter() - task.started,
        prompt_tokens=prompt_tokens,
        reused_tokens=reused,
        recomputed_tokens=round(ratio * counts.candidates) if counts else 0,
        fresh_tokens=prompt_tokens - reused,
        new_tokens=0,
        ratio=ratio,
        charged_ratio=counts.charged_ratio if counts else float(task.mode == "full"),
        policy=_policy_used(task, fusion) if blended else "",
        schedule=str(fusion.schedule) if blended and fusion is not None else "",
        chunks=plan.reports(counts.recomputed_per_span if counts else (), task.source_of),
        notes=task.notes,
    )


def _with_forecast(metrics: RequestMetrics, plan: Plan, is_alone: bool) -> RequestMetrics:
    """Predicted times beside the measured ones, and why."""
    predicted = plan.forecast
    if predicted is None:
        return metrics
    metrics = replace(metrics, decision=plan.decision)
    if not is_alone:
        return metrics
    return replace(
        metrics,
        predicted_ttft_s=predicted.ttft_s,
        predicted_load_s=predicted.load_s,
        predicted_compute_s=predicted.compute_s,
    )


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """Token ids up to the end token, without the padding behind it."""
    at = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: at + 1]


def _policy_used(task: Task, fusion: Fusion | None) -> str:
    """As asked for, unless the model's attention could not be seen and another had to decide."""
    if fusion is None or fusion.policy is fusion.request.policy:
        return task.policy
    return str(fusion.policy)
