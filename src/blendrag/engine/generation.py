"""From a request and its road to new tokens and an answer, on the scheduler's thread.

The caller holds the model's lock from the first hook to the last token.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from blendrag import tracing
from blendrag.chat.formats import end_ids
from blendrag.chat.grammar import Constraint
from blendrag.chat.reply import Reply
from blendrag.engine import request_spans as spans
from blendrag.engine.decoding import Penalties, SeededDraws, sampling
from blendrag.engine.explanation import Trace
from blendrag.engine.request import Answer
from blendrag.engine.roads import Prefill, Road
from blendrag.engine.stream import AnswerStream, StopWhenDone, TextSteps, cut_at_stop
from blendrag.errors import BlendragError, InvalidInputError, ModelLoadError
from blendrag.fusor.attention import fast_decoding
from blendrag.fusor.loader import SpanCorruptError
from blendrag.metrics import RequestMetrics, Timeline
from blendrag.model.decode_weights import NATIVE, DecodeWeights
from blendrag.planning.plan import Plan
from blendrag.serving.coroutine import decoding_jointly
from blendrag.serving.kv_budget import KVShare
from blendrag.wording import quoted

_CUT = (
    "the answer was cut after {} tokens, before its form was complete; allow more tokens, or bound texts and "
    "lists in the schema"
)


#: Restarts of a request after chunks failed verification, before it is computed in full.
MAX_RESTARTS = 8


def _ids(given: int | Sequence[int] | None) -> set[int]:
    return set() if given is None else set(given) if isinstance(given, Sequence) else {given}


class Generation:
    """Answers one request: plans over its road, runs ``model.generate``, reads the answer."""

    def __init__(
        self,
        road: Road,
        stream: AnswerStream,
        share: KVShare | None = None,
        weights: DecodeWeights | None = None,
        note: str = "",
    ) -> None:
        """``share``: the request's part of the memory for KV. ``weights``: what decodes, if not the model's
        own; ``note``: why it is the model's own."""
        self._road = road
        self._adapter = adapter = road.adapter
        self._request = request = road.request
        self._stream = stream
        self._share = share
        self._weights = weights if road.decodes_jointly else None
        self._note = note
        self._timeline = Timeline() if request.options.explain else None
        given = request.options.generate_kwargs.get("eos_token_id")
        configured = adapter.model.generation_config.eos_token_id
        self._ends = _ids(configured if given is None else given)
        if given is None and request.form is not None:
            self._ends |= end_ids(adapter.tokens, request.form)
        if stream.hidden is not None:
            tokens = adapter.tokens
            stream.hidden = {*stream.hidden, *tokens.special_among(self._ends), *tokens.turn_ends}

    def run(self) -> Answer:
        """Plan, prefill and generate; again without a chunk whose bytes fail verification.

        Raises :class:`RequestCancelled` and :class:`RequestTimeout`.
        """
        plan, avoid = self._road.ahead.plan, set(self._road.ahead.avoid)
        for restarts_left in reversed(range(MAX_RESTARTS + 1)):
            self._stream.check()
            if plan is None:
                with tracing.span("plan") as add:
                    plan = self._road.plan(avoid, loads=restarts_left > 0)
                    add(partial(spans.planned, plan))
            try:
                with closing(plan):
                    return self._generated(plan)
            except SpanCorruptError as corrupt:
                avoid.add(corrupt.span.reader.key)
                plan = None
        raise AssertionError("the last attempt loads nothing")

    def _generated(self, plan: Plan) -> Answer:
        """Prefill and generate by ``plan``."""
        adapter, road, stream = self._adapter, self._road, self._stream
        with tracing.generation(stream.first_token_at) as (to_prefill, to_decode):
            # around the prefill, which sets another attention in it, and left after it
            with ExitStack() as around:
                if adapter.fuses:
                    around.enter_context(fast_decoding(adapter.stack))
                if road.decodes_jointly:
                    around.enter_context(decoding_jointly(adapter, self._share, self._weights))
                prefill = around.enter_context(road.prefill(plan, self._timeline))
                output = self._generate(prefill)
                if prefill.keep is not None:  # the last token was not computed
                    prefill.keep(tuple(output[0, :-1].tolist()))
            rows = output[:, prefill.ids.shape[1] :].tolist()
            answer = self._answer(plan, prefill, rows)
            to_prefill(partial(spans.prefilled, answer.metrics))
            to_decode(partial(spans.decoded, answer.metrics))
            road.finish(plan)
        return answer

    def _generate(self, prefill: Prefill) -> torch.Tensor:
        ids, cache = prefill.ids, prefill.cache
        request, stream, model = self._request, self._stream, self._adapter.model
        options = request.options

        def prefilled() -> None:
            if prefill.unhook is not None and self._road.decodes_jointly:
                prefill.unhook()
            if prefill.keep is not None:
                prefill.keep(request.prompt.ids)

        kwargs: dict[str, Any] = {"max_new_tokens": request.max_new_tokens}
        kwargs |= sampling(options) | dict(options.generate_kwargs)
        if all(isinstance(end, int) for end in self._ends):  # else transformers says what is wrong
            kwargs["eos_token_id"] = sorted(self._ends) or None
        if processors := self._processors(ids.shape[1]):
            kwargs["logits_processor"] = [*kwargs.get("logits_processor", ()), *processors]
        if cache is not None:
            kwargs["past_key_values"] = cache
            kwargs["use_cache"] = True  # MPT's config says no
        tokenizer = self._adapter.tokens.tokenizer
        if model.generation_config.pad_token_id is None:
            pad = tokenizer.pad_token_id
            kwargs.setdefault("pad_token_id", tokenizer.eos_token_id if pad is None else pad)
        try:
            with ExitStack() as around:
                if stream.likely is not None:
                    around.enter_context(stream.likely.watching(model))
                if options.seed is not None and options.samples:
                    draws = SeededDraws(options.seed, self._adapter.device)
                    around.enter_context(draws.between_forwards(model))
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    stopping_criteria=[StopWhenDone(stream, request.sequences == 1, prefilled)],
                    return_dict_in_generate=False,
                    **kwargs,
                )
        except (ValueError, TypeError, IndexError) as exc:
            if isinstance(exc, BlendragError) or not (options.generate_kwargs or _is_refusal(exc)):
                raise
            if not options.generate_kwargs:
                raise ModelLoadError(
                    f"transformers refuses the generation config of {self._adapter.model_id}: "
                    f"{str(exc).strip()[:200]}; correct its generation_config.json"
                ) from exc
            given = ", ".join(f"{k}={quoted(v)}" for k, v in options.generate_kwargs.items())
            first = str(exc).strip().splitlines()[0]
            raise InvalidInputError(f"transformers refuses {given}: {first}") from exc
        stream.check()
        stream.end()
        return output

    def _processors(self, prompt_tokens: int) -> list[LogitsProcessor]:
        """What changes the logits before a token is chosen; the form of the answer has the last word."""
        request = self._request
        found: list[LogitsProcessor] = []
        if Penalties.wanted(request.options):
            found.append(Penalties(request.options, prompt_tokens))
        form = request.answer_form
        if form is not None and not (form.is_call and request.sequences > 1):
            if request.sequences > 1:
                raise InvalidInputError(
                    f"response_format with {request.sequences} sequences, expected 1; ask once for each"
                )
            reply = self._stream.reply
            found.append(Constraint(form, self._ends, request.form, reply))
        return found

    # -- the answer -----------------------------------------------------------------------------

    def _answer(self, plan: Plan, prefill: Prefill, rows: list[list[int]]) -> Answer:
        """Texts and metrics of the new tokens of each sequence, with end tokens and padding."""
        request, stream = self._request, self._stream
        rows = [self._until_end(row) for row in rows]
        ended = [not self._ends.isdisjoint(row[-1:]) for row in rows]
        ended[0] = ended[0] or stream.stopped_by is not None
        decode = self._adapter.tokens.tokenizer.decode
        replies = [stream.reply.reply if stream.reply is not None else Reply(stream.text)]
        texts = [stream.text]
        if request.sequences > 1:
            replies = [self._reply(row) for row in rows]
            texts = [cut_at_stop(reply.text, request.options.stop) for reply in replies]
            cut = [text != reply.text for text, reply in zip(texts, replies, strict=True)]
            ended = [end or stopped for end, stopped in zip(ended, cut, strict=True)]
        replies = [replace(reply, text=text) for reply, text in zip(replies, texts, strict=True)]
        logprobs = None
        if stream.likely is not None:
            logprobs = stream.likely.of(stream.length, stream.tokens, decode)
        metrics = self._metrics(plan, prefill, sum(len(row) for row in rows))
        if not all(ended):
            metrics = replace(metrics, notes=(*metrics.notes, *self._why_cut(rows, ended[0])))
        reasons = tuple("stop" if end else "length" for end in ended)
        trace = None
        if self._timeline is not None:
            steps = TextSteps(self._adapter.tokens.tokenizer)
            prompt_texts = [steps.add(token) for token in request.prompt.ids]
            layers = len(self._adapter.decoder_layers)
            about = self._timeline, prompt_texts, layers, prefill.recomputed
            trace = Trace.of(plan, prefill.fusion, *about)
        return Answer(texts[0], tuple(texts), reasons, metrics, (), logprobs, trace, tuple(replies))

    def _why_cut(self, rows: Sequence[Sequence[int]], has_ended: bool) -> tuple[str, ...]:
        """A note if the answer has not the length that was asked for, or lacks its main part."""
        request, reply = self._request, self._stream.reply
        new_tokens = max(map(len, rows))
        thinks = reply is not None and reply.ended_thinking and not has_ended
        is_full = request.fills_context and new_tokens == request.max_new_tokens
        if not (thinks or is_full):
            return () if request.answer_form is None else (_CUT.format(new_tokens),)
        while_thinking = " while the model was still thinking" * thinks
        why = "its context is full" if is_full else "raise max_new_tokens to let it go on"
        return (f"the answer was cut after {new_tokens} tokens{while_thinking}: {why}",)

    def _reply(self, row: list[int]) -> Reply:
        """One of several sequences."""
        tokens, hidden = self._adapter.tokens, self._stream.hidden
        if hidden is None:
            return Reply(tokens.tokenizer.decode(row, skip_special_tokens=True))
        text = tokens.decode([index for index in row if index not in hidden])
        return self._request.taken_apart(text)

    def _until_end(self, row: list[int]) -> list[int]:
        """Token ids up to and with the end token, without padding."""
        at = next((i for i, token in enumerate(row) if token in self._ends), len(row))
        return row[: at + 1]

    def _metrics(self, plan: Plan, prefill: Prefill, new_tokens: int) -> RequestMetrics:
        request, stream = self._request, self._stream
        fusion, batch_size = prefill.fusion, prefill.batch_size
        counts = fusion.counts() if fusion is not None else None
        reused, prompt_tokens = plan.reused_tokens, len(request.prompt.ids)
        computed_share = float(request.mode == "full")
        recomputed = round(counts.ratio * counts.candidates) if counts else sum(prefill.recomputed)
        if fusion is None and recomputed:  # runs of a hybrid's chunks
            computed_share = recomputed / sum(s.tokens for s in plan.spans if not s.exact)
        ratio = counts.ratio if counts else computed_share
        policy = schedule = ""
        if fusion is not None and counts and counts.candidates and request.mode == "blend":
            # what ran: a fallback, if the model's attention could not be seen
            policy, schedule = str(fusion.policy), str(fusion.schedule)
        elif fusion is None and plan.spans and plan.chunks and request.mode == "blend":
            policy, schedule = str(plan.blending.policy), str(plan.blending.schedule)
        # a forecast is of a request that is prefilled alone
        predicted = plan.forecast if batch_size == 1 else None
        notes = *request.notes, *stream.notes, *plan.notes, *filter(None, (self._note,))
        return RequestMetrics(
            mode=self._road.mode,
            ttft_s=stream.ttft_s + request.retrieval_s,
            load_s=fusion.loader.load_s if fusion is not None else prefill.load_s,
            total_s=time.perf_counter() - request.asked_at + request.retrieval_s,
            prompt_tokens=prompt_tokens,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            fresh_tokens=prompt_tokens - reused,
            new_tokens=new_tokens,
            ratio=ratio,
            charged_ratio=counts.charged_ratio if counts else computed_share,
            policy=policy,
            schedule=schedule,
            chunks=plan.reports(
                counts.recomputed_per_span if counts else prefill.recomputed,
                request.source_of,
                shows_tiers=not request.options.is_private,
            ),
            notes=tuple(dict.fromkeys(notes)),
            predicted_ttft_s=predicted.ttft_s if predicted else None,
            predicted_load_s=predicted.load_s if predicted else None,
            predicted_compute_s=predicted.compute_s if predicted else None,
            decision=plan.decision if plan.forecast is not None else "",
            batch_size=batch_size,
            opening_s=stream.opening_s + request.embedder_opening_s,
            queued_s=stream.queued_s,
            retrieval_s=request.retrieval_s,
            prefix_tokens=plan.prefix_tokens,
            decode_weights=NATIVE if self._weights is None else self._weights.name,
        )


def _is_refusal(error: BaseException) -> bool:
    """Whether transformers' generation raised ``error`` itself, not the model or a hook."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).parts[-3:-1] == ("transformers", "generation")
