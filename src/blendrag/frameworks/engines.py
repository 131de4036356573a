"""One engine for all wrappers of the same names, so that an LLM and a retriever load the model once.

Shared engines live until :func:`close_shared_engines` or the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from blendrag.config import ConstructorOptions, EngineOptions, absolute_model, settings
from blendrag.errors import InvalidInputError
from blendrag.signatures import shows
from blendrag.wording import a_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from blendrag.engine import BlendEngine


class EngineArguments(EngineOptions, total=False):
    """The names of a shared engine, or a given one."""

    model: str | Path | PreTrainedModel | None
    store: Path | str | None
    engine: BlendEngine | None


class _Values(dict[str, Any]):
    """Compared and hashed by what it prints, as it may hold dictionaries and configs."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self._text())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Values) and self._text() == other._text()

    def _text(self) -> str:
        return repr(sorted(self.items()))


class EngineName(NamedTuple):
    """What tells two shared engines apart."""

    model: str | PreTrainedModel
    store: Path
    tokenizer: PreTrainedTokenizerBase | None
    options: _Values
    """Those that are not the defaults."""


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


@shows(ConstructorOptions)
def shared_engine(
    model: str | Path | PreTrainedModel | None = None,
    store: Path | str | None = None,
    **options: Unpack[ConstructorOptions],
) -> BlendEngine:
    """The engine of these names in this process; ``None`` takes blendrag's settings. Loads no model yet."""
    return engine_of(engine_name(model, store, **options))


def engine_name(
    model: str | Path | PreTrainedModel | None,
    store: Path | str | None,
    **options: Unpack[ConstructorOptions],
) -> EngineName:
    """The name with absolute directories, and without options that equal the defaults."""
    from blendrag.corpus.recorded_model import model_for

    root = Path(store or settings().store).expanduser().resolve()
    model = model_for(model or None, root, bool(options.get("trust_remote_code")))
    tokenizer = options.pop("tokenizer", None)
    changed = {name: value for name, value in options.items() if not _is_default(name, value)}
    return EngineName(
        absolute_model(model) if isinstance(model, str | Path) else model,
        root,
        tokenizer,
        _Values(changed),
    )


def _is_default(name: str, value: Any) -> bool:
    defaults = {"encode_prefix": True, **vars(settings())}
    return value is None or (value == defaults[name] if name in defaults else not value)


def engine_of(name: EngineName) -> BlendEngine:
    """The shared engine of that name, created if there is none or it was closed. Loads no model yet.

    Raises :class:`InvalidInputError` in a fork of the process that created it.
    """
    from blendrag.engine import BlendEngine

    with _lock:
        if name in _inherited:
            raise InvalidInputError(
                f"the engine of {model_text(name.model)!r} was created before this process "
                f"({os.getpid()}) was forked, and cannot be used in both; start processes by spawn"
            )
        if name not in _engines or _engines[name].closed:
            _engines[name] = BlendEngine(
                name.model, name.store, tokenizer=name.tokenizer, **name.options
            )
        return _engines[name]


def model_text(model: Any) -> str | None:
    """A model's name, or the class of a loaded one."""
    if model is None:
        return None
    return str(model) if isinstance(model, str | Path) else type(model).__name__


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
            f"engine={engine!r} is {a_type(engine)}, expected a BlendEngine, which cannot be "
            "serialised; give it again, or model= and store= instead"
        )


def close_shared_engines() -> None:
    """Close every shared engine; later calls create new ones."""
    for name in list(_engines):
        close_engine_of(name)


atexit.register(close_shared_engines)
