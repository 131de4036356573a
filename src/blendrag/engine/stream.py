"""From token ids to text while ``generate`` runs: incremental decoding, stop strings, cancelling, timeout.

The scheduler's thread pushes, the caller's thread or event loop pulls.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import StoppingCriteria

from blendrag.chat.reply import Part, Reasoning, ReplyStream
from blendrag.engine.decoding import Likelihoods
from blendrag.errors import RequestCancelled, RequestTimeout

_END = object()


class TextSteps:
    """The text that each token adds to those before it."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = False) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skips = skip_special_tokens
        self._decode = DecodeStream(skip_special_tokens=self._skips)

    def add(self, token: int) -> str:
        """Text that ``token`` completes; empty for the first bytes of a character."""
        try:
            return self._decode.step(self._backend, token) or ""
        except Exception as exc:
            # Invalid UTF-8 may decode differently once more bytes follow; tokenizers 0.23 then refuses every
            # further token with a bare Exception (huggingface/tokenizers#1677, vllm-project/vllm#17448).
            if not str(exc).startswith("Invalid prefix encountered"):
                raise
            self._decode = DecodeStream(skip_special_tokens=self._skips)
            return self._decode.step(self._backend, token) or ""


class AnswerStream:
    """The answer of one request, in pieces of text."""

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        started: float,
        timeout_s: float | None = None,
        hidden: Collection[int] | None = None,
        likely: Likelihoods | None = None,
        reply: ReplyStream | None = None,
    ) -> None:
        """``started``: ``time.perf_counter()``. ``hidden``: ids without text, instead of all control tokens.
        ``likely`` records every token. ``reply`` takes the text apart; without it, all of it is the
        answer."""
        self.hidden = hidden
        self.reply = reply
        self._steps = TextSteps(tokenizer, skip_special_tokens=hidden is None)
        self._stop = stop
        self._held = ""
        self.likely = likely
        self._started = started
        self._queued_at = time.perf_counter()
        self.timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self.cancelled = False
        self.opening_s = 0.0
        """Seconds of opening the model; no part of ``ttft_s``."""
        self.queued_s = 0.0
        """Seconds in the queue; part of ``ttft_s``."""
        self.ttft_s = 0.0
        self.stopped_by: str | None = None
        self.text = ""
        """The answer, without reasoning, tool calls and what follows a stop string."""
        self._cut = 0
        """Characters from the stop string on."""
        self.tokens: list[tuple[int, str]] = []
        """Every new token with the text it added."""
        self.notes: list[str] = []
        """Sentences for the user about what was done for the request, also for a plan that was dropped."""

    # -- scheduler's side ---------------------------------------------------------------------

    def begin(self) -> None:
        """The request has left the queue."""
        self.queued_s = time.perf_counter() - self._queued_at

    def put(self, value: torch.Tensor) -> None:
        """Take the newest token ids ``[n]``."""
        tokens = value.reshape(-1).tolist()
        self.mark_first_token()  # only now is it computed, if the model is on a GPU
        for token in tokens:
            hidden = self.hidden is not None and token in self.hidden
            piece = "" if hidden else self._steps.add(token)
            self.tokens.append((token, piece))
            if self.likely is not None:
                self.likely.note(token)
            if self.stopped_by is not None:
                self._cut += len(piece)
            elif piece:
                self._push(piece)

    def mark_first_token(self) -> None:
        """Record the time to first token; later calls change nothing."""
        if not self.ttft_s:
            self.ttft_s = time.perf_counter() - self._started - self.opening_s

    def first_token_at(self) -> float | None:
        """``time.perf_counter()`` of the first token; ``None`` before."""
        return self._started + self.opening_s + self.ttft_s if self.ttft_s else None

    def end(self) -> None:
        """Generation has ended: emit what was held back."""
        if self.reply is not None:
            self._take(self.reply.finish())
        if self.stopped_by is None:
            self._emit(self._held)
        self._held = ""

    @property
    def length(self) -> int:
        """Characters of all pieces, reasoning and tool calls included, up to a stop string."""
        return sum(len(piece) for _, piece in self.tokens) - self._cut

    def finish(self) -> None:
        """End the iteration; also after an error."""
        self._send(_END)

    def _push(self, piece: str) -> None:
        if self.reply is None:
            self._answer(piece)
        else:
            self._take(self.reply.add(piece))

    def _take(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.kind == "text":
                self._answer(part.text)
            elif part.kind == "reasoning":
                self._send(Reasoning(part.text))

    def _answer(self, piece: str) -> None:
        """Emit text of the answer, but hold back what may be the beginning of a stop string."""
        if self.stopped_by is not None:
            self._cut += len(piece)
            return
        self._held += piece
        found = first_stop(self._held, self._stop)
        if found is not None:
            at, self.stopped_by = found
            self._emit(self._held[:at])
            self._cut += len(self._held) - at
            self._held = ""
            return
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        self._emit(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]

    def _emit(self, text: str) -> None:
        if text:
            self.text += text
            self._send(text)

    def _send(self, item: object) -> None:
        self._queue.put(item)
        if self._wake is not None:
            self._wake()

    @property
    def done(self) -> bool:
        """Whether generation should stop before its next token."""
        return self.cancelled or self.expired or self.stopped_by is not None

    # -- both sides ---------------------------------------------------------------------------

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the timeout, at least 0; ``None`` without a timeout."""
        if self.timeout_s is None:
            return None
        return max(0.0, self._started + self.timeout_s - time.perf_counter())

    @property
    def expired(self) -> bool:
        return self.remaining_s == 0.0

    def too_late(self) -> RequestTimeout:
        assert self.timeout_s is not None
        return RequestTimeout(self.timeout_s)

    def check(self) -> None:
        """Raise :class:`RequestCancelled` if it was abandoned, :class:`RequestTimeout` if it is late."""
        if self.expired:
            raise self.too_late()
        if self.cancelled:
            raise RequestCancelled("the request was abandoned; nothing of it is left running")

    # -- caller's side ------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop computing at the next layer or token, and end the iteration."""
        if not self.cancelled:
            self.cancelled = True
            self._send(_END)

    def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake()`` on the scheduler's thread whenever :meth:`take` has something new."""
        self._wake = wake

    def take(self, block: bool = True) -> str | None:
        """The next piece, of the answer or :class:`Reasoning`; ``None`` at the end and from then on.

        Raises :class:`RequestTimeout`, and :class:`queue.Empty` without ``block``.
        """
        try:
            item = self._queue.get(block, self.remaining_s if block else None)
        except queue.Empty:
            if not block:
                raise
            raise self.too_late() from None
        if item is _END:
            self._queue.put(_END)
            return None
        piece: str = item
        return piece


class StopWhenDone(StoppingCriteria):
    """Passes each new token to the stream, and ends ``generate`` when the stream is done.

    A streamer gets a token only after the stopping criteria, so a stop string would cost one more forward.
    """

    def __init__(
        self, stream: AnswerStream, feeds: bool = True, prefilled: Callable[[], None] | None = None
    ) -> None:
        """``feeds``: the generated sequence is the answer, which it is not with beams. ``prefilled()`` is
        called once the prompt's KV is complete."""
        self._stream = stream
        self._feeds = feeds
        self._prefilled = prefilled

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        if self._feeds and not self._stream.done:  # on mps, transformers stops one forward late
            self._stream.put(input_ids[0, -1:])
        elif not self._stream.ttft_s:
            input_ids[0, -1].item()  # computed only now, if the model is on a GPU
            self._stream.mark_first_token()
        if self._prefilled is not None:  # copies KV, for which the first token does not wait
            self._prefilled()
            self._prefilled = None
        rows = input_ids.shape[0]
        return torch.full((rows,), self._stream.done, device=input_ids.device)  # type: ignore[return-value]


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """``text`` up to the first stop string."""
    found = first_stop(text, stop)
    return text if found is None else text[: found[0]]


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and text of the stop string that completes first, so that tokenisation does not matter."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    return min(found)[1:] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
