"""One engine for many wrappers, and the two ways to listen to it.

Wrappers of the same :class:`EngineName` (model, store, dtype, device, embedder, trust_remote_code, those
left out at their defaults) get the same :class:`BlendEngine`, so that an LLM and a retriever load the
model once.
What is made here lives until :func:`close_shared_engines` or the end of the process.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blendrag.config import absolute_model, settings
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.engine import Answer, BlendEngine, Options, Prompt

T = TypeVar("T")


class EngineName(NamedTuple):
    """What tells two shared engines apart; nothing is left to default."""

    model: str
    store: Path
    dtype: str
    device: str
    embedder: str
    trust_remote_code: bool


_engines: dict[EngineName, BlendEngine] = {}
#: Of the process that this one was forked from: their threads, locks and connections are not for here.
_inherited: dict[EngineName, BlendEngine] = {}
_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    _inherited.update(_engines)
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def shared_engine(
    model: str | None = None,
    store: Path | str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    embedder: str | None = None,
    trust_remote_code: bool | None = None,
) -> BlendEngine:
    """The process's engine of that name; ``None`` takes blendrag's settings. Loads no model yet."""
    return engine_of(engine_name(model, store, dtype, device, embedder, trust_remote_code))


def engine_name(
    model: str | None = None,
    store: Path | str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    embedder: str | None = None,
    trust_remote_code: bool | None = None,
) -> EngineName:
    """The name in full: ``None`` takes blendrag's settings, and directories are absolute."""
    defaults = settings()
    return EngineName(
        absolute_model(model or defaults.model),
        Path(store or defaults.store).expanduser().resolve(),
        dtype or defaults.dtype,
        device or defaults.device,
        embedder or defaults.embedder,
        bool(trust_remote_code),
    )


def engine_of(name: EngineName) -> BlendEngine:
    """The process's engine of that name, made anew if it was closed. Loads no model yet.

    Raises :class:`InvalidInputError` in a fork of the process that made it.
    """
    from blendrag.engine import BlendEngine

    with _making:
        if name in _inherited:
            raise InvalidInputError(
                f"the engine of {name.model!r} was made in the process that this one ({os.getpid()}) was "
                "forked from, and cannot be used in both; start processes by spawn, or do without them"
            )
        if name not in _engines or _engines[name].closed:
            _engines[name] = BlendEngine(
                name.model,
                name.store,
                dtype=name.dtype,
                device=name.device,
                # a corpus remembers its own: a default that nobody asked for must not be held against it
                embedder=None if name.embedder == settings().embedder else name.embedder,
                trust_remote_code=name.trust_remote_code,
            )
        return _engines[name]


def close_engine_of(name: EngineName) -> None:
    """Close the process's engine of that name, if there is one; :func:`engine_of` makes it anew."""
    with _making:
        engine = _engines.pop(name, None)
    if engine is not None:
        engine.close()


def choose_engine(engine: BlendEngine | None, **names: Any) -> BlendEngine:
    """The engine given, or else :func:`shared_engine` of ``names``.

    Raises :class:`InvalidInputError` for both, and for an ``engine`` of another type.
    """
    if engine is None:
        return shared_engine(**names)
    check_given(engine, **names)
    return engine


def check_given(engine: Any, **names: Any) -> None:
    """Raise :class:`InvalidInputError` unless ``engine`` is an engine, and all that was given."""
    from blendrag.engine import BlendEngine

    named = ", ".join(name for name, value in names.items() if value is not None)
    if named:
        raise InvalidInputError(
            f"engine= and {named}= were both given; leave {named} out, the engine has its own"
        )
    if not isinstance(engine, BlendEngine):
        raise InvalidInputError(
            f"engine={engine!r} is a {type(engine).__name__}, expected a BlendEngine, which cannot be "
            "written down: give it again, or model= and store= instead"
        )


def context_tokens(engine: BlendEngine) -> int:
    """The model's context window, from its config where its weights are not loaded yet."""
    from blendrag.model.loading import load_context_tokens

    resources = engine.resources
    if resources.is_loaded:
        return resources.adapter.context_tokens
    return load_context_tokens(resources.model_name, resources.trust_remote_code)


def close_shared_engines() -> None:
    """Close every engine made by :func:`shared_engine`; later calls make new ones."""
    with _making:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.close()


atexit.register(close_shared_engines)


class Piece(NamedTuple):
    """Some text of an answer; the last piece brings the whole answer with its metrics."""

    text: str
    answer: Answer | None = None


def stream_pieces(engine: BlendEngine, prompt: Prompt, options: Options) -> Iterator[Piece]:
    """An answer piece by piece. Leaving the loop early stops generation."""
    pieces = engine.stream(prompt, options)
    streamed = False
    try:
        for text in pieces:
            streamed = True
            yield Piece(text)
        yield _last(pieces.answer, streamed)
    finally:
        pieces.close()


async def astream_pieces(
    engine: BlendEngine, prompt: Prompt, options: Options
) -> AsyncGenerator[Piece, None]:
    """:func:`stream_pieces` without blocking the event loop."""
    streamed = False
    async with aclosing(engine.astream(prompt, options)) as pieces:
        async for text in pieces:
            streamed = True
            yield Piece(text)
        yield _last(pieces.answer, streamed)


def _last(answer: Answer, streamed: bool) -> Piece:
    # beams and several sequences are not streamed by transformers: all their text comes at the end
    return Piece("" if streamed else answer.text, answer)


async def agenerate(engine: BlendEngine, prompt: Prompt, options: Options) -> Answer:
    """``engine.agenerate``: whatever is opened on first use is opened off the event loop."""
    return await engine.agenerate(prompt, options)


async def to_thread(call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """``asyncio.to_thread`` that raises :class:`NoThreadError` where the system starts no thread."""
    from blendrag.engine.answers import in_pool

    context = contextvars.copy_context()
    return await in_pool(partial(context.run, call, *args, **kwargs))


def warm(engine: BlendEngine) -> None:
    """Open tokenizer and corpus, which planning a request needs. Loads no named model's weights."""
    _ = engine.resources.tokens, engine.resources.corpus
