"""From a plan to new tokens and an answer, on the worker's thread.

Four ways into ``model.generate``: stock, with a first forward that blends, with a first forward that ran
before in a batch, and in two steps for beams and several sequences. The caller holds the model's lock
from the first hook to the last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from blendrag.engine.decoding import SeededDraws, sampling
from blendrag.engine.request import Answer, Options, Request, TokenLogprob
from blendrag.engine.stream import AnswerStream, StopWhenDone, cut_at_stop
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.fusor import Fusion, Fusor, Prefilled
from blendrag.metrics import RequestMetrics
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import in_this_thread
from blendrag.planning.plan import Plan


class Output(NamedTuple):
    """What ``generate`` returned."""

    new_ids: torch.Tensor
    """``[sequences, n]``, with end tokens and padding."""
    fusion: Fusion | None
    """State of the blended forward; ``None`` if nothing was loaded."""


class Generation:
    """Runs ``model.generate`` for one request."""

    def __init__(
        self,
        adapter: ModelAdapter,
        fusor: Callable[[], Fusor],
        request: Request,
        stream: AnswerStream,
    ) -> None:
        """``fusor`` makes the fusor when it is first needed."""
        self._adapter = adapter
        self._fusor = fusor
        self._request = request
        self._stream = stream

    def run(self, plan: Plan, prefilled: Prefilled | None = None) -> Output:
        """Generate by ``plan``; ``prefilled`` if the prompt was prefilled in a batch.

        Raises :class:`SpanCorruptError` if a chunk's bytes fail verification, :class:`RequestCancelled` and
        :class:`RequestTimeout`.
        """
        stream, request = self._stream, self._request
        stream.check()
        if stream.hidden is not None:
            ends = self._adapter.tokens.special_among(end_ids(request, self._adapter))
            stream.hidden = {*stream.hidden, *ends}
        ids = torch.tensor([request.prompt.ids], device=self._adapter.device)
        if prefilled is not None:
            output, fusion = self._continued(ids, prefilled)
        elif not plan.spans:
            output, fusion = self._stock(ids), None
        elif request.sequences == 1:
            output, fusion = self._blended(ids, plan)
        else:
            output, fusion = self._two_step(ids, plan)
        return Output(output[:, ids.shape[1] :], fusion)

    # -- the ways into generate -----------------------------------------------------------------

    def _stock(self, ids: torch.Tensor) -> torch.Tensor:
        """Nothing is loaded; the request can still be abandoned before each layer."""
        with _checked_layers(self._adapter.decoder_layers, self._stream.check):
            return self._generate(ids)

    def _blended(self, ids: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Fusion]:
        """The first forward in ``generate`` is the fusion."""
        fusor, tokens = self._fusor(), ids.shape[1]
        cache = fusor.new_cache(tokens, self._request.max_new_tokens)
        request, check = plan.request(tokens), self._stream.check
        with fusor.fuse(cache, request, check, last_row_only=True) as fusion:
            return self._generate(ids, cache), fusion

    def _continued(self, ids: torch.Tensor, prefilled: Prefilled) -> tuple[torch.Tensor, Fusion]:
        """The first forward in ``generate`` has already run, in a batch."""
        with prefilled.replayed(self._adapter.stack.base) as cache:
            return self._generate(ids, cache), prefilled.fusion

    def _two_step(self, ids: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Fusion]:
        """Blend all but the last token, repeat the cache per sequence, then an ordinary ``generate``."""
        n = ids.shape[1] - 1
        _, cache, fusion = self._fusor().prefill(
            ids[:, :n], plan.request(n), check=self._stream.check
        )
        cache.batch_repeat_interleave(self._request.sequences)
        return self._generate(ids, cache), fusion

    def _generate(self, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        request, stream = self._request, self._stream
        options = request.options
        kwargs: dict[str, Any] = {"max_new_tokens": request.max_new_tokens}
        kwargs |= sampling(options) | dict(options.generate)
        if cache is not None:
            kwargs["past_key_values"] = cache
        tokenizer = self._adapter.tokens.tokenizer
        if self._adapter.model.generation_config.pad_token_id is None:
            pad = tokenizer.pad_token_id
            kwargs.setdefault("pad_token_id", tokenizer.eos_token_id if pad is None else pad)
        try:
            with self._decoding(options):
                output = self._adapter.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    stopping_criteria=[StopWhenDone(stream, feeds=request.sequences == 1)],
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
    def _decoding(self, options: Options) -> Iterator[None]:
        """Log probabilities and seeded sampling within ``generate``."""
        model = self._adapter.model
        with ExitStack() as stack:
            if self._stream.likely is not None:
                stack.enter_context(self._stream.likely.watching(model))
            if options.seed is not None and options.samples:
                draws = SeededDraws(options.seed, self._adapter.device)
                stack.enter_context(draws.between_forwards(model))
            yield


@contextmanager
def _checked_layers(layers: Sequence[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Call ``check()`` before each layer, so that a stock forward can be abandoned early."""
    hook = in_this_thread(lambda *_: check())
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def end_ids(request: Request, adapter: ModelAdapter) -> set[int]:
    """Tokens that end an answer."""
    eos = request.options.generate.get("eos_token_id", adapter.model.generation_config.eos_token_id)
    return set(eos) if isinstance(eos, list | tuple) else {eos}


# -- the answer -----------------------------------------------------------------------------------


def answer_of(
    request: Request,
    plan: Plan,
    output: Output,
    stream: AnswerStream,
    adapter: ModelAdapter,
    batch_size: int = 1,
) -> Answer:
    """Texts and metrics of what was generated."""
    ends = end_ids(request, adapter)
    rows = [_until_end(row, ends) for row in output.new_ids.tolist()]
    texts, finish_reason = _texts(request, stream, rows, ends, adapter)
    new_tokens = sum(len(row) for row in rows)
    metrics = _metrics(request, plan, output.fusion, stream, new_tokens, batch_size)
    logprobs = _logprobs(stream, texts[0], adapter)
    return Answer(texts[0], tuple(texts), finish_reason, metrics, logprobs=logprobs)


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """Token ids up to and with the end token, without padding."""
    at = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: at + 1]


def _texts(
    request: Request,
    stream: AnswerStream,
    rows: Sequence[Sequence[int]],
    ends: set[int],
    adapter: ModelAdapter,
) -> tuple[Sequence[str], str]:
    """The text of each sequence, and the finish reason of the first."""
    ended = bool(ends & set(rows[0][-1:]))
    if request.sequences == 1:
        stopped = stream.stopped_by is not None
        return [stream.text], "stop" if stopped or ended else "length"
    decode, stop = adapter.tokens.tokenizer.decode, request.options.stop
    cut = [cut_at_stop(decode(row, skip_special_tokens=True), stop) for row in rows]
    return [text for text, _ in cut], "stop" if cut[0][1] or ended else "length"


def _logprobs(
    stream: AnswerStream, text: str, adapter: ModelAdapter
) -> tuple[TokenLogprob, ...] | None:
    if stream.likely is None:
        return None
    return stream.likely.of(text, stream.tokens, adapter.tokens.tokenizer.decode)


def _metrics(
    request: Request,
    plan: Plan,
    fusion: Fusion | None,
    stream: AnswerStream,
    new_tokens: int,
    batch_size: int,
) -> RequestMetrics:
    counts = fusion.counts() if fusion is not None else None
    reused, prompt_tokens = plan.reused_tokens, len(request.prompt.ids)
    computed_share = float(request.mode == "full")
    ratio = counts.ratio if counts else computed_share
    blended = request.mode == "blend" and counts is not None and counts.candidates > 0
    # a forecast is of a request that is prefilled alone
    predicted = plan.forecast if batch_size == 1 else None
    return RequestMetrics(
        mode=request.mode,
        ttft_s=stream.ttft_s,
        load_s=fusion.loader.load_s if fusion is not None else 0.0,
        total_s=time.perf_counter() - request.asked_at,
        prompt_tokens=prompt_tokens,
        reused_tokens=reused,
        recomputed_tokens=round(ratio * counts.candidates) if counts else 0,
        fresh_tokens=prompt_tokens - reused,
        new_tokens=new_tokens,
        ratio=ratio,
        charged_ratio=counts.charged_ratio if counts else computed_share,
        policy=_policy_used(request, fusion) if blended else "",
        schedule=str(fusion.schedule) if blended and fusion is not None else "",
        chunks=plan.reports(counts.recomputed_per_span if counts else (), request.source_of),
        notes=(*request.notes, *plan.notes),
        predicted_ttft_s=predicted.ttft_s if predicted else None,
        predicted_load_s=predicted.load_s if predicted else None,
        predicted_compute_s=predicted.compute_s if predicted else None,
        decision=plan.decision if plan.forecast is not None else "",
        batch_size=batch_size,
    )


def _policy_used(request: Request, fusion: Fusion | None) -> str:
    """The requested policy, unless the model's attention could not be seen and the fallback was used."""
    if fusion is None or fusion.policy is fusion.request.policy:
        return request.policy
    return str(fusion.policy)
