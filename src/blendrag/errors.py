"""Every exception blendrag raises on purpose, and nothing else.

::

    BlendragError
    ├── InvalidInputError        the caller's value is wrong; the message says value, expectation, remedy
    │   ├── InvalidOptionError       one option of a request, which wrappers may know by another name
    │   ├── ContextOverflowError     prompt + new tokens do not fit the model's context
    │   └── UnreadableDocumentError  one input file could not be read; ingest goes on with the next
    ├── ModelError
    │   ├── ModelLoadError           no model at that name, or it cannot be loaded
    │   ├── UnsupportedModelError    the probe cannot vouch for re-using this model's KV
    │   └── IdentityChangedError     weights or adapters changed while KV was being computed
    ├── StoreError
    │   ├── StoreUnavailableError    path is a file, not writable, locked, written by a newer version
    │   ├── StoreFullError           the disk or the byte limit is reached; says how much is needed
    │   └── CorruptKVError           bytes on disk are not the bytes that were put (a miss, never an answer)
    ├── NoThreadError            the system starts no more threads (a RuntimeError)
    ├── CorpusError              texts, vectors and anchors beside the store do not fit together
    ├── RequestTimeout           the request took longer than its timeout, waiting included (a TimeoutError)
    └── RequestCancelled         the caller abandoned the request; no partial state is left

A message is one sentence or two: the value, what was expected, what to do. Foreign errors are
mapped once, where they enter, with ``raise … from exc``.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class BlendragError(Exception):
    """Base of every error this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its message, not made again: a pool's results never arrive after an error that cannot
        be unpickled, and some of these take other arguments than their message."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[BlendragError], args: tuple[Any, ...]) -> BlendragError:
    made = kind.__new__(kind, *args)
    made.args = args  # an OSError, as RequestTimeout is, takes them when it is initialised
    return made


class InvalidInputError(BlendragError, ValueError):
    """A value given by the caller cannot be used."""


def check_unicode(text: str, name: str) -> None:
    """Raise :class:`InvalidInputError` for lone surrogates, which no tokenizer, file or database takes.

    They come from bytes that are not UTF-8: of a file name, of a command line, of broken JSON.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidInputError(
            f"{name} holds a lone surrogate ({text[exc.start]!r}) at character {exc.start}, expected valid "
            "Unicode; decode the bytes it came from as UTF-8, or replace that character"
        ) from exc


class InvalidOptionError(InvalidInputError):
    """An option of a request is out of range, or of the wrong kind."""

    def __init__(self, name: str, wrong: str) -> None:
        self.name = name
        self.wrong = wrong
        super().__init__(f"{name} {wrong}")

    def called(self, name: str) -> InvalidOptionError:
        """The same error for a caller who knows the option by that name."""
        return InvalidOptionError(name, self.wrong)


class ContextOverflowError(InvalidInputError):
    """The prompt and the tokens asked for do not fit the model's context window."""

    def __init__(
        self, prompt_tokens: int, max_new_tokens: int, context_tokens: int, option: str = ""
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.context_tokens = context_tokens
        self.over_tokens = prompt_tokens + max_new_tokens - context_tokens
        by = f" ({option})" if option else ""
        super().__init__(
            f"prompt of {prompt_tokens} tokens plus {max_new_tokens} new tokens is "
            f"{self.over_tokens} over the model's context of {context_tokens}; "
            f"shorten the question, retrieve fewer chunks{by} or ask for fewer new tokens"
        )

    def by(self, option: str) -> ContextOverflowError:
        """The same error for a caller who sets the number of chunks by that option."""
        sizes = self.prompt_tokens, self.max_new_tokens, self.context_tokens
        return ContextOverflowError(*sizes, option)


class UnreadableDocumentError(InvalidInputError):
    """One document cannot be read as text."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = str(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")


class ModelError(BlendragError):
    """Something about the model, not about the request."""


class ModelLoadError(ModelError):
    """No usable model under that name or path."""


class UnsupportedModelError(ModelError):
    """Re-using this model's KV was measured to be wrong, or cannot be measured.

    The model still loads and answers in mode ``full``.
    """


class IdentityChangedError(ModelError):
    """The loaded model is no longer the one whose KV was asked for; nothing was stored."""


class StoreError(BlendragError):
    """Base of the KV store's errors."""


class StoreUnavailableError(StoreError):
    """The store's directory cannot be used as it is."""


class StoreFullError(StoreError):
    """There is no room for what was to be written; nothing already stored was lost."""

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        self.needed_bytes = needed_bytes
        super().__init__(message)


class CorruptKVError(StoreError):
    """A payload is not what was put; the caller treats the chunk as a miss."""


class NoThreadError(BlendragError, RuntimeError):
    """The system starts no more threads; what was asked for was not begun."""

    def __init__(self) -> None:
        super().__init__(
            "the system starts no more threads: a limit on processes, threads or memory is reached; "
            "end other processes or raise the limit (ulimit -u, ulimit -v, pids.max of the container)"
        )


class CorpusError(BlendragError):
    """The corpus directory beside the store cannot be used."""


class RequestTimeout(BlendragError, TimeoutError):
    """The request did not finish within its ``timeout_s``; nothing of it is left running."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(
            f"no answer within the timeout of {timeout_s:g} s, time in the queue included; "
            "allow more, ask for fewer new tokens or send fewer requests at once"
        )


class RequestCancelled(BlendragError):
    """The request was abandoned by its caller."""


#: What torch's allocators and the libraries underneath say; their types are many.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "not enough memory",
    "out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(said in str(error).lower() for said in _NO_MEMORY)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


@contextmanager
def starting_thread() -> Iterator[None]:
    """Raise :class:`NoThreadError` where a thread that is started within cannot be."""
    try:
        yield
    except RuntimeError as exc:
        if is_out_of_threads(exc):
            raise NoThreadError from exc
        raise


#: Codes of SQLite for a write that failed for lack of space, beside SQLITE_FULL.
_FAILED_WRITES = (
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)


def sqlite_code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; ``None`` if Python raised the error and not SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_out_of_space(error: BaseException) -> bool:
    """Whether a disk is full or a limit on what may be written is reached, as the OS or SQLite reports it."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        return sqlite_code(error) == sqlite3.SQLITE_FULL or code in _FAILED_WRITES
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full
