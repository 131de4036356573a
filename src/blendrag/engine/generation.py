"""From a plan to new tokens and an answer, on the scheduler's thread.

Six ways into ``model.generate``: stock, with a first forward that blends, with a first forward that ran
before in a batch, in two steps for beams and several sequences, behind a beginning that a model goes on from
whose KV cannot be moved, and over modules at fixed positions. The
caller holds the model's lock from the first hook to the last token.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from blendrag.chat.formats import end_ids
from blendrag.chat.grammar import Constraint
from blendrag.chat.reply import Reply
from blendrag.engine.decoding import Penalties, SeededDraws, sampling
from blendrag.engine.exact_prefixes import ExactPrefixes, goes_on
from blendrag.engine.explanation import Trace
from blendrag.engine.request import Answer, Request
from blendrag.engine.stream import AnswerStream, StopWhenDone, TextSteps, cut_at_stop
from blendrag.errors import BlendragError, InvalidInputError, ModelLoadError, UnsupportedModelError
from blendrag.fusor import BlendCache, Fusion, Fusor, Prefilled
from blendrag.fusor.attention import fast_decoding
from blendrag.metrics import RequestMetrics, Timeline
from blendrag.model.adapter import ModelAdapter
from blendrag.model.placement import PlacedModel
from blendrag.model.sharing import before_layers
from blendrag.planning.plan import Plan
from blendrag.schema.concatenation import ConcatenatedPrompt, ModuleCache
from blendrag.serving.coroutine import decoding_jointly, note_loaded, pausing
from blendrag.serving.kv_budget import KVShare, first_room
from blendrag.serving.prefix_tree import PrefixReader
from blendrag.wording import quoted

_CUT = (
    "the answer was cut after {} tokens, before its form was complete; allow more tokens, or bound texts and "
    "lists in the schema"
)


def _ids(given: int | Sequence[int] | None) -> set[int]:
    return set() if given is None else set(given) if isinstance(given, Sequence) else {given}


class Generation:
    """Runs ``model.generate`` for one request."""

    def __init__(
        self,
        adapter: ModelAdapter,
        fusor: Callable[[], Fusor],
        request: Request,
        stream: AnswerStream,
        prefixes: ExactPrefixes | None = None,
        share: KVShare | None = None,
    ) -> None:
        """``fusor`` makes the fusor when it is first needed. ``prefixes`` keeps what later prompts may begin
        with. ``share``: the request's part of the memory for KV."""
        self._adapter = adapter
        self._fusor = fusor
        self._request = request
        self._stream = stream
        self._prefixes = prefixes
        self._share = share
        self._first_room = first_room(request.max_new_tokens)
        self._check = pausing(stream.check)
        self._timeline = Timeline() if request.options.explain else None
        given = request.options.generate_kwargs.get("eos_token_id")
        configured = adapter.model.generation_config.eos_token_id
        self._ends = _ids(configured if given is None else given)
        if given is None and request.form is not None:
            self._ends |= end_ids(adapter.tokens, request.form)

    def run(self, plan: Plan, prefilled: Prefilled | None = None, batch_size: int = 1) -> Answer:
        """Generate by ``plan``; ``prefilled`` if the prompt was prefilled with others of its batch.

        Raises :class:`SpanCorruptError` if a chunk's bytes fail verification, :class:`RequestCancelled` and
        :class:`RequestTimeout`.
        """
        stream, request = self._stream, self._request
        stream.check()
        if stream.hidden is not None:
            tokens = self._adapter.tokens
            stream.hidden = {*stream.hidden, *tokens.special_among(self._ends), *tokens.turn_ends}
        ids = torch.tensor([request.prompt.ids], device=self._adapter.device)
        fusion: Fusion | None = None
        adapter = self._adapter
        # around the fusion, which sets another attention in it, and left after it
        with ExitStack() as around:
            around.enter_context(adapter.own_tables())
            if adapter.refusal is None:
                around.enter_context(fast_decoding(adapter.stack))
            if self._decodes_jointly:
                around.enter_context(decoding_jointly(adapter, self._share))
            if prefilled is not None:  # the first forward in generate has already run, in a batch
                fusion = prefilled.fusion
                note_loaded(fusion)
                with prefilled.replayed(adapter.stack.base) as cache:
                    output = self._generate(ids, cache, self._kept(plan, cache))
            elif goes_on(request, adapter):
                output = self._continued(ids, plan)
            elif not plan.spans:  # can still be abandoned before each layer
                cache = None
                own = adapter.model.generation_config.cache_implementation is None
                if self._decodes_jointly and request.sequences == 1 and own:
                    cache = self._fusor().new_cache(ids.shape[1], self._first_room)
                with before_layers(adapter.decoder_layers, self._check):
                    output = self._generate(ids, cache, self._kept(plan, cache))
            elif request.sequences == 1:
                output, fusion = self._blended(ids, plan)
            else:
                output, fusion = self._two_step(ids, plan)
        return self._answer(plan, fusion, output[:, ids.shape[1] :].tolist(), batch_size)

    def run_placed(self, plan: Plan, prompt: ConcatenatedPrompt, model: PlacedModel) -> Answer:
        """Generate for a prompt whose modules are loaded to fixed positions.

        Raises :class:`SpanCorruptError`, :class:`RequestCancelled` and :class:`RequestTimeout`.
        """
        stream, request, adapter = self._stream, self._request, self._adapter
        stream.check()
        ids = torch.tensor([prompt.ids], device=adapter.device)
        cache = ModuleCache(model.layout, prompt, self._first_room, adapter.device)
        with ExitStack() as around:
            around.callback(cache.close)
            cache.start_loading()
            if adapter.refusal is None:
                around.enter_context(fast_decoding(adapter.stack))
            if self._decodes_jointly:
                around.enter_context(decoding_jointly(adapter, self._share))
                note_loaded(prompt)
            around.enter_context(model.uncompiled())
            around.enter_context(model.placed(cache, prompt.positions))
            around.enter_context(before_layers(model.decoder.layers, self._check))
            if request.sequences > 1:
                cache.load()
                cache.batch_repeat_interleave(request.sequences)
            output = self._generate(ids, cache)
        return self._answer(plan, None, output[:, ids.shape[1] :].tolist(), 1)

    @property
    def _decodes_jointly(self) -> bool:
        """Whether tokens may be decoded together with those of other requests."""
        adapter = self._adapter
        if adapter.refusal is not None or adapter.is_compiled:
            return False
        with suppress(UnsupportedModelError):
            return self._fusor().packs
        return False

    def _blended(self, ids: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Fusion]:
        """The first forward in ``generate`` is the fusion."""
        fusor, tokens = self._fusor(), ids.shape[1]
        cache = fusor.new_cache(tokens, self._first_room)
        request, line = plan.request(tokens), self._timeline
        with fusor.fuse(cache, request, self._check, line, last_row_only=True) as fusion:
            note_loaded(fusion)
            return self._generate(ids, cache, self._kept(plan, cache)), fusion

    def _two_step(self, ids: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Fusion]:
        """Blend all but the last token, repeat the cache per sequence, then an ordinary ``generate``."""
        n = ids.shape[1] - 1
        _, cache, fusion = self._fusor().prefill(
            ids[:, :n], plan.request(n), check=self._check, timeline=self._timeline
        )
        cache.batch_repeat_interleave(self._request.sequences)
        return self._generate(ids, cache), fusion

    def _kept(self, plan: Plan, cache: BlendCache | None) -> Callable[[], None] | None:
        """Keeps what later prompts may begin with of what ``plan`` put into ``cache``."""
        if self._prefixes is None or cache is None:
            return None
        return partial(self._prefixes.keep, self._request, plan, cache)

    def _continued(self, ids: torch.Tensor, plan: Plan) -> torch.Tensor:
        """An ordinary ``generate`` behind the beginning that was joined. States are kept on the way."""
        going, prefixes = self._adapter.continuation, self._prefixes
        assert going is not None
        assert prefixes is not None
        prompt, span = self._request.prompt.ids, plan.leading_span
        cache, at = going.new_cache(), 0
        if span is not None:
            assert isinstance(span.reader, PrefixReader)
            assert span.reader.state is not None
            cache, at = going.restore(span.reader.state, span.reader), span.end
        keep = partial(prefixes.keep_state, self._request)
        with before_layers(self._adapter.decoder_layers, self._check):
            for end in prefixes.state_ends(self._request, at):
                going.forward(ids[:, at:end], cache, at)
                keep(prompt[:end], cache)
                at = end
            if going.in_steps and 0 < at < len(prompt) - 1:
                going.forward(ids[:, at:-1], cache, at)
            output = self._generate(ids, cache, partial(keep, prompt, cache))
        keep(tuple(output[0, :-1].tolist()), cache)
        return output

    def _generate(
        self, ids: torch.Tensor, cache: Any = None, prefilled: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """``prefilled()`` is called once ``cache`` holds the prompt's KV."""
        request, stream, model = self._request, self._stream, self._adapter.model
        options = request.options
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

    def _answer(
        self, plan: Plan, fusion: Fusion | None, rows: list[list[int]], batch_size: int
    ) -> Answer:
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
        metrics = self._metrics(plan, fusion, sum(len(row) for row in rows), batch_size)
        if not all(ended):
            metrics = replace(metrics, notes=(*metrics.notes, *self._why_cut(rows, ended[0])))
        reasons = tuple("stop" if end else "length" for end in ended)
        trace = None
        if self._timeline is not None:
            steps = TextSteps(self._adapter.tokens.tokenizer)
            prompt_texts = [steps.add(token) for token in request.prompt.ids]
            trace = Trace.of(plan, fusion, self._timeline, prompt_texts)
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

    def _metrics(
        self, plan: Plan, fusion: Fusion | None, new_tokens: int, batch_size: int
    ) -> RequestMetrics:
        request, stream = self._request, self._stream
        counts = fusion.counts() if fusion is not None else None
        reused, prompt_tokens = plan.reused_tokens, len(request.prompt.ids)
        computed_share = float(request.mode == "full")
        ratio = counts.ratio if counts else computed_share
        policy = schedule = ""
        if fusion is not None and counts and counts.candidates and request.mode == "blend":
            # what ran: a fallback, if the model's attention could not be seen
            policy, schedule = str(fusion.policy), str(fusion.schedule)
        # a forecast is of a request that is prefilled alone
        predicted = plan.forecast if batch_size == 1 else None
        return RequestMetrics(
            mode=request.mode if request.placed is None else "schema",
            ttft_s=stream.ttft_s + request.retrieval_s,
            load_s=fusion.loader.load_s if fusion is not None else 0.0,
            total_s=time.perf_counter() - request.asked_at + request.retrieval_s,
            prompt_tokens=prompt_tokens,
            reused_tokens=reused,
            recomputed_tokens=round(ratio * counts.candidates) if counts else 0,
            fresh_tokens=prompt_tokens - reused,
            new_tokens=new_tokens,
            ratio=ratio,
            charged_ratio=counts.charged_ratio if counts else computed_share,
            policy=policy,
            schedule=schedule,
            chunks=plan.reports(
                counts.recomputed_per_span if counts else (),
                request.source_of,
                shows_tiers=not request.options.is_private,
            ),
            notes=(*request.notes, *plan.notes),
            predicted_ttft_s=predicted.ttft_s if predicted else None,
            predicted_load_s=predicted.load_s if predicted else None,
            predicted_compute_s=predicted.compute_s if predicted else None,
            decision=plan.decision if plan.forecast is not None else "",
            batch_size=batch_size,
            opening_s=stream.opening_s,
            queued_s=stream.queued_s,
            retrieval_s=request.retrieval_s,
            prefix_tokens=plan.prefix_tokens,
        )


def _is_refusal(error: BaseException) -> bool:
    """Whether transformers' generation raised ``error`` itself, not the model or a hook."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).parts[-3:-1] == ("transformers", "generation")
