"""Every exception that blendrag raises on purpose, and tests for foreign errors of the system.

::

    BlendragError
    ├── InvalidInputError        the caller's value is wrong
    │   ├── InvalidOptionError       one option of a request
    │   ├── ContextOverflowError     prompt + new tokens do not fit the model's context
    │   ├── SchemaError              a schema, or a prompt of one, is wrong; names file and line
    │   └── UnreadableDocumentError  one input file cannot be read; ingest continues with the next
    ├── ModelError
    │   ├── ModelLoadError           there is no model of that name, or it cannot be loaded
    │   ├── UnsupportedModelError    this model's KV cannot be reused safely; mode full works
    │   └── IdentityChangedError     weights or adapters changed while KV was computed
    ├── StoreError
    │   ├── StoreUnavailableError    the directory is a file, not writable, locked, or of a newer version
    │   ├── StoreFullError           the disk is full or the byte limit is reached
    │   └── CorruptKVError           bytes on disk differ from those that were stored; treated as a miss
    ├── NoThreadError            the system cannot start a thread (a RuntimeError)
    ├── CorpusError              the corpus of a store cannot be used
    ├── RequestTimeout           the request exceeded its timeout, waiting included (a TimeoutError)
    └── RequestCancelled         the caller abandoned the request

A message is one or two sentences: the value, what was expected, what to do. Foreign errors are mapped once,
where they enter, with ``raise … from exc``.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blendrag.wording import a_type, condensed, quoted


class BlendragError(Exception):
    """Base of every error that this package raises on purpose."""

    def __str__(self) -> str:
        """The message; one that repeats a very long value loses its middle."""
        return condensed(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its message: some errors take other arguments, and a process pool hangs on an error that
        cannot be unpickled."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[BlendragError], args: tuple[Any, ...]) -> BlendragError:
    made = kind.__new__(kind, *args)
    made.args = args  # RequestTimeout is an OSError, which takes them in __init__
    return made


class InvalidInputError(BlendragError, ValueError):
    """A value given by the caller cannot be used."""


def check_question(question: str) -> None:
    """Raise :class:`InvalidInputError` for what is no text, or has no words."""
    if not isinstance(question, str):
        raise InvalidInputError(
            f"the question {quoted(question, 60)} is {a_type(question)}, expected a "
            "text; ask in words"
        )
    if not question.strip():
        raise InvalidInputError("the question is empty, expected some words; ask something")
    check_unicode(question, "the question")


def check_unicode(text: str, name: str) -> None:
    """Raise :class:`InvalidInputError` for other types, and for lone surrogates, which no tokenizer, file or
    database accepts.

    They come from bytes that are not UTF-8: in a file name, on a command line, in broken JSON.
    """
    if not isinstance(text, str):
        raise InvalidInputError(
            f"{name} is {quoted(text, 40)}, {a_type(text)}, expected a str; decode bytes, "
            "and leave out documents without text"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidInputError(
            f"{name} holds a lone surrogate ({text[exc.start]!r}) at character {exc.start}, expected valid "
            "Unicode; decode the bytes it came from as UTF-8, or replace that character"
        ) from exc


class InvalidOptionError(InvalidInputError):
    """An option of a request is out of range or has the wrong type."""

    def __init__(self, name: str, wrong: str) -> None:
        self.name = name
        self.wrong = wrong
        super().__init__(f"{name} {wrong}")

    def called(self, name: str) -> InvalidOptionError:
        """The same error, for a caller who knows the option by another name."""
        return InvalidOptionError(name, self.wrong)


class ContextOverflowError(InvalidInputError):
    """The prompt and the new tokens do not fit the model's context window."""

    def __init__(
        self, prompt_tokens: int, max_new_tokens: int, context_tokens: int, option: str = ""
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.context_tokens = context_tokens
        self.over_tokens = prompt_tokens + max_new_tokens - context_tokens
        by = f" ({option})" if option else ""
        is_cut = max_new_tokens == 1  # answers are cut to the room that there is
        new = "one new token" if is_cut else f"{max_new_tokens} new tokens"
        remedy = f"retrieve fewer chunks{by}{'' if is_cut else ' or ask for fewer new tokens'}"
        super().__init__(
            f"prompt of {prompt_tokens} tokens plus {new} is {self.over_tokens} over the model's context "
            f"of {context_tokens}; shorten the question{' or' if is_cut else ','} {remedy}"
        )

    def by(self, option: str) -> ContextOverflowError:
        """The same error, naming the option that sets the number of chunks."""
        sizes = self.prompt_tokens, self.max_new_tokens, self.context_tokens
        return ContextOverflowError(*sizes, option)


class SchemaError(InvalidInputError):
    """The markup of a schema or of a prompt is wrong, or a prompt does not fit its schema.

    ``at`` is the place, as ``file:line:column``.
    """

    def __init__(self, at: object, wrong: str) -> None:
        self.at = str(at)
        self.wrong = wrong
        super().__init__(f"{at}: {wrong}")


class UnreadableDocumentError(InvalidInputError):
    """One document cannot be read as text."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = str(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")


class ModelError(BlendragError):
    """Base of the errors about a model."""


class ModelLoadError(ModelError):
    """There is no usable model of that name."""


class UnsupportedModelError(ModelError):
    """Reusing this model's KV was measured to be wrong, or cannot be measured.

    The model still loads and answers in mode ``full``.
    """


class IdentityChangedError(ModelError):
    """The loaded model changed while KV was computed; nothing wrong was stored."""


class StoreError(BlendragError):
    """Base of the KV store's errors."""


class StoreUnavailableError(StoreError):
    """The store's directory cannot be used."""


class StoreFullError(StoreError):
    """There is no space to write; nothing already stored was lost."""

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        self.needed_bytes = needed_bytes
        super().__init__(message)


class CorruptKVError(StoreError):
    """A payload differs from what was stored; the caller treats the chunk as a miss."""


class NoThreadError(BlendragError, RuntimeError):
    """The system cannot start another thread; nothing was begun."""

    def __init__(self) -> None:
        super().__init__(
            "the system starts no more threads: a limit on processes, threads or memory is reached; "
            "end other processes or raise the limit (ulimit -u, ulimit -v, pids.max of the container)"
        )


class CorpusError(BlendragError):
    """The corpus of a store cannot be used."""


class RequestTimeout(BlendragError, TimeoutError):
    """The request did not finish within ``timeout_s``; it was stopped."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(
            f"no answer within the timeout of {timeout_s:g} s, time in the queue included; "
            "allow more, ask for fewer new tokens or send fewer requests at once"
        )


class RequestCancelled(BlendragError):
    """The request was abandoned by its caller."""


#: Messages of torch's allocators and other libraries, which raise many types.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "not enough memory",
    "out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the machine or of a device ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(said in str(error).lower() for said in _NO_MEMORY)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up; its exception is no :class:`Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def starting_thread() -> Iterator[None]:
    """Raise :class:`NoThreadError` if a thread cannot be started within this context."""
    try:
        yield
    except RuntimeError as exc:
        if is_out_of_threads(exc):
            raise NoThreadError from exc
        raise


#: SQLite's codes, besides SQLITE_FULL, for a write that failed for lack of space.
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
    """Whether a disk, a quota or a file size limit is full, as the OS or SQLite reports it."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        return sqlite_code(error) == sqlite3.SQLITE_FULL or code in _FAILED_WRITES
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full
