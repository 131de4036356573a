"""One engine for all wrappers of the same names, so that an LLM and a retriever load the model once.

Shared engines live until :func:`close_shared_engines` or the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from blendrag.config import absolute_model, settings
from blendrag.errors import InvalidInputError
from blendrag.signatures import shows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from blendrag.engine import BlendEngine


class EngineOptions(TypedDict, total=False):
    """How a shared engine loads its model; :class:`~blendrag.frameworks.fields.EngineFields` has more."""

    tokenizer: PreTrainedTokenizerBase | None
    dtype: str | None
    device: str | None
    device_map: str | dict[str, Any] | None
    model_kwargs: dict[str, Any] | None
    embedder: str | None
    trust_remote_code: bool | None
    learn: bool | None


class EngineArguments(EngineOptions, total=False):
    """The names of a shared engine, or a given one."""

    model: str | Path | PreTrainedModel | None
    store: Path | str | None
    engine: BlendEngine | None


class _Kwargs(dict[str, Any]):
    """Compared and hashed by what it prints, as it may hold dictionaries and configs."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self._text())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kwargs) and self._text() == other._text()

    def _text(self) -> str:
        return repr(sorted(self.items()))


class EngineName(NamedTuple):
    """What tells two shared engines apart."""

    model: str | PreTrainedModel
    store: Path
    tokenizer: PreTrainedTokenizerBase | None
    dtype: str
    device: str
    device_map: _Kwargs
    model_kwargs: _Kwargs
    embedder: str
    trust_remote_code: bool
    learn: bool


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


@shows(EngineOptions)
def shared_engine(
    model: str | Path | PreTrainedModel | None = None,
    store: Path | str | None = None,
    **options: Unpack[EngineOptions],
) -> BlendEngine:
    """The engine of these names in this process; ``None`` takes blendrag's settings. Loads no model yet."""
    return engine_of(engine_name(model, store, **options))


def engine_name(
    model: str | Path | PreTrainedModel | None,
    store: Path | str | None,
    **options: Unpack[EngineOptions],
) -> EngineName:
    """The name with all defaults filled in and absolute directories."""
    from blendrag.corpus.recorded_model import model_for

    defaults = settings()
    root = Path(store or defaults.store).expanduser().resolve()
    trust_remote_code = bool(options.get("trust_remote_code"))
    model = model_for(model or None, root, trust_remote_code)
    return EngineName(
        absolute_model(model) if isinstance(model, str | Path) else model,
        root,
        options.get("tokenizer"),
        options.get("dtype") or defaults.dtype,
        options.get("device") or defaults.device,
        _Kwargs({"device_map": options.get("device_map")}),
        _Kwargs(options.get("model_kwargs") or {}),
        options.get("embedder") or defaults.embedder,
        trust_remote_code,
        defaults.learn if (learn := options.get("learn")) is None else learn,
    )


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
                name.model,
                name.store,
                tokenizer=name.tokenizer,
                dtype=name.dtype,
                device=name.device,
                model_kwargs=name.model_kwargs,
                device_map=name.device_map["device_map"],
                # a corpus remembers its embedder: the default must not contradict it
                embedder=None if name.embedder == settings().embedder else name.embedder,
                trust_remote_code=name.trust_remote_code,
                learn=name.learn,
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
            f"engine={engine!r} is a {type(engine).__name__}, expected a BlendEngine, which cannot be "
            "serialised; give it again, or model= and store= instead"
        )


def close_shared_engines() -> None:
    """Close every shared engine; later calls create new ones."""
    for name in list(_engines):
        close_engine_of(name)


atexit.register(close_shared_engines)
