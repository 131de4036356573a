"""One engine for all wrappers of the same names, so that an LLM and a retriever load the model once.

Shared engines live until :func:`close_shared_engines` or the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blendrag.config import absolute_model, settings
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine


class EngineName(NamedTuple):
    """What tells two shared engines apart."""

    model: str
    store: Path
    dtype: str
    device: str
    embedder: str
    trust_remote_code: bool


_engines: dict[EngineName, BlendEngine] = {}
#: Engines of the process that this one was forked from. Their threads and locks do not work here.
_inherited: dict[EngineName, BlendEngine] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
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
    """The engine of these names in this process; ``None`` takes blendrag's settings. Loads no model yet."""
    return engine_of(engine_name(model, store, dtype, device, embedder, trust_remote_code))


def engine_name(*given: Any) -> EngineName:
    """The name with all defaults filled in and absolute directories, from the fields in their order."""
    from blendrag.corpus.recorded_model import model_for

    model, store, dtype, device, embedder, trust_remote_code = given
    defaults = settings()
    root = Path(store or defaults.store).expanduser().resolve()
    return EngineName(
        absolute_model(model_for(model or None, root, bool(trust_remote_code))),
        root,
        dtype or defaults.dtype,
        device or defaults.device,
        embedder or defaults.embedder,
        bool(trust_remote_code),
    )


def engine_of(name: EngineName) -> BlendEngine:
    """The shared engine of that name, created if there is none or it was closed. Loads no model yet.

    Raises :class:`InvalidInputError` in a fork of the process that created it.
    """
    from blendrag.engine import BlendEngine

    with _lock:
        if name in _inherited:
            raise InvalidInputError(
                f"the engine of {name.model!r} was created before this process ({os.getpid()}) was "
                "forked, and cannot be used in both; start processes by spawn"
            )
        if name not in _engines or _engines[name].closed:
            _engines[name] = BlendEngine(
                name.model,
                name.store,
                dtype=name.dtype,
                device=name.device,
                # a corpus remembers its embedder: the default must not contradict it
                embedder=None if name.embedder == settings().embedder else name.embedder,
                trust_remote_code=name.trust_remote_code,
            )
        return _engines[name]


def close_engine_of(name: EngineName) -> None:
    """Close the shared engine of that name, if there is one; :func:`engine_of` creates it again."""
    with _lock:
        engine = _engines.pop(name, None)
    if engine is not None:
        engine.close()


def check_given(engine: Any, **names: Any) -> None:
    """Raise :class:`InvalidInputError` unless ``engine`` is an engine and no name was given with it."""
    from blendrag.engine import BlendEngine

    named = ", ".join(name for name, value in names.items() if value is not None)
    if named:
        raise InvalidInputError(
            f"engine= and {named}= were both given; leave {named} out, the engine has its own"
        )
    if not isinstance(engine, BlendEngine):
        raise InvalidInputError(
            f"engine={engine!r} is a {type(engine).__name__}, expected a BlendEngine, which cannot be "
            "serialised; give it again, or model= and store= instead"
        )


def close_shared_engines() -> None:
    """Close every shared engine; later calls create new ones."""
    for name in list(_engines):
        close_engine_of(name)


atexit.register(close_shared_engines)
