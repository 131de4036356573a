"""From token ids to text while ``generate`` runs: incremental decoding, stop strings, cancelling.

The worker's thread pushes, the caller's thread pulls. Text that might turn out to be the beginning
of a stop string is held back until it is known not to be.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from blendrag.errors import RequestCancelled

_END = object()


class AnswerStream(BaseStreamer):
    """Streamer of one sequence; iterate for text pieces, ``cancel()`` to abandon."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], started: float) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._decode = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self._started = started
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self.ttft_s = 0.0
        self.stopped_by: str | None = None
        self.text = ""

    # -- worker's side ------------------------------------------------------------------------

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate``: first with the prompt, then with each new token."""
        if value.ndim > 1:  # the prompt; again when a corrupt chunk makes the request start over
            return
        self.mark_first_token()
        for token in value.reshape(-1).tolist():
            piece = self._step(token)
            if piece and self.stopped_by is None:
                self._push(piece)

    def _step(self, token: int) -> str | None:
        """Text that ``token`` completes, if any."""
        try:
            return self._decode.step(self._backend, token)
        except Exception as exc:
            # Bytes that are no UTF-8 may decode otherwise once more of them follow; tokenizers (seen in
            # 0.23) then refuses every further token: DecodeStreamError::InvalidPrefix, a bare
            # Exception (huggingface/tokenizers#1677, vllm-project/vllm#17448). Begin anew from here.
            if not str(exc).startswith("Invalid prefix encountered"):
                raise
            self._decode = DecodeStream(skip_special_tokens=True)
            return self._decode.step(self._backend, token)

    def mark_first_token(self) -> None:
        """Note the time of the first new token; later calls change nothing."""
        if not self.ttft_s:
            self.ttft_s = time.perf_counter() - self._started

    def end(self) -> None:
        """Called by ``generate`` when done; what was held back is text after all."""
        if self.stopped_by is None:
            self._emit(self._held)
        self._held = ""

    def finish(self) -> None:
        """End the iteration; called exactly once, also after an error."""
        self._queue.put(_END)

    def _push(self, piece: str) -> None:
        self._held += piece
        found = [(self._held.find(s), s) for s in self._stop if s in self._held]
        if found:
            at, self.stopped_by = min(found)
            self._emit(self._held[:at])
            self._held = ""
            return
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        self._emit(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]

    def _emit(self, text: str) -> None:
        if text:
            self.text += text
            self._queue.put(text)

    @property
    def done(self) -> bool:
        """Whether generation should stop before its next token."""
        return self._cancelled.is_set() or self.stopped_by is not None

    # -- caller's side ------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the worker to stop at the next layer or token."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise :class:`RequestCancelled` if the caller has gone."""
        if self.cancelled:
            raise RequestCancelled("the request was abandoned; nothing of it is left running")

    def __iter__(self) -> Iterator[str]:
        while (item := self._queue.get()) is not _END:
            yield item


class StopWhenDone(StoppingCriteria):
    """Ends ``generate`` once a stop string was seen or the caller has gone."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        self._stream.mark_first_token()
        rows = input_ids.shape[0]
        return torch.full((rows,), self._stream.done, device=input_ids.device)  # type: ignore[return-value]


def cut_at_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """``text`` up to the first stop string, and whether there was one."""
    found = [text.find(s) for s in stop if s and s in text]
    return (text[: min(found)], True) if found else (text, False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
