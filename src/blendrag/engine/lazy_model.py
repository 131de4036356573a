"""The model of an engine: tokenizer, context, weights, each loaded on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from blendrag.config import Settings, absolute_model
from blendrag.engine.decode_weights import DecodeWeightsChoice
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.fusor import Fusor
from blendrag.fusor.composer import CHECKS_VERSION, Composer, ComposerChecks
from blendrag.model import measurements
from blendrag.model.adapter import ModelAdapter
from blendrag.model.loading import (
    hub_kwargs,
    load_adapter,
    load_context_tokens,
    load_tokens,
    model_signature,
    precision_signature,
    resolve_device,
)
from blendrag.model.sharing import loaded_once
from blendrag.model.tokens import Tokens
from blendrag.serving.scheduler import CLOSED

T = TypeVar("T")


class opened(cached_property[T]):
    """A part that the first thread to ask opens while others who ask wait.

    ``functools.cached_property`` alone lets two threads open it twice since Python 3.12. Each part has its
    own lock: loading a model does not block the tokenizer or the corpus.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        with vars(instance).setdefault(f"{self.attrname} opens", threading.RLock()):
            return super().__get__(instance, owner)


class LazyModel:
    """A model that is loaded on first use. Loading is thread-safe; the engine orders its use."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        lora: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """``model``: a name, a loaded model (then with its ``tokenizer``) or a :class:`ModelAdapter`."""
        if model_kwargs and not isinstance(model, str | Path):
            raise InvalidInputError(
                f"model_kwargs {', '.join(model_kwargs)} with a loaded {type(model).__name__}, expected the "
                "name of a model; give them to from_pretrained instead"
            )
        self.given = absolute_model(model) if isinstance(model, str | Path) else model
        self._tokenizer = tokenizer
        self._settings = settings
        self._lora = lora
        self._model_kwargs = dict(model_kwargs or {})
        self.trust_remote_code = trust_remote_code
        self._closed = False

    @property
    def name(self) -> str:
        """The name that it was given by, or its id."""
        given = self.given
        if isinstance(given, str):
            return given
        return given.model_id if isinstance(given, ModelAdapter) else self.adapter.model_id

    @property
    def is_loaded(self) -> bool:
        return "adapter" in self.__dict__ or not isinstance(self.given, str)

    @opened
    def adapter(self) -> ModelAdapter:
        given, s = self.given, self._settings
        if isinstance(given, ModelAdapter):
            return given
        if isinstance(given, str):
            if self._closed:
                raise InvalidInputError(CLOSED)
            more = self._lora, self.trust_remote_code, self._model_kwargs
            load = partial(load_adapter, given, s.dtype, s.device, *more)
            return loaded_once(self._loaded_as(given), load)
        if self._tokenizer is None:
            raise InvalidInputError(
                f"a loaded {type(given).__name__} needs its tokenizer too; give both: model=…, tokenizer=…"
            )
        return ModelAdapter(given, self._tokenizer)

    def _loaded_as(self, name: str) -> Hashable:
        """Key under which engines share one loaded model."""
        s, lora = self._settings, self._lora
        files = model_signature(name), model_signature(lora) if lora else ""
        where, more = str(resolve_device(s.device)), repr(sorted(self._model_kwargs.items()))
        return name, lora, files, s.dtype, where, more, self.trust_remote_code

    @opened
    def fusor(self) -> Fusor:
        return Fusor(self.adapter)

    @opened
    def composer(self) -> Composer:
        adapter, what = self.adapter, f"composer {CHECKS_VERSION}"
        key = measurements.key_of(what, adapter.identity.namespace, adapter.device)
        known = measurements.recall(key, ComposerChecks)
        composer = Composer(adapter, known)
        if known is None:
            measurements.remember(key, composer.checks)
        return composer

    @opened
    def decode_weights(self) -> DecodeWeightsChoice:
        wanted = self._settings.decode_weights
        return DecodeWeightsChoice(self.adapter, wanted, lambda: self.decodes_jointly)

    @property
    def decodes_jointly(self) -> bool:
        """Whether tokens of several requests may be decoded together. Those of hybrid models take turns if
        that is measured to give something else."""
        if self.adapter.refusal is not None or self.adapter.is_compiled:
            return False
        if self.adapter.composition is not None:
            return True
        with suppress(UnsupportedModelError):
            return self.fusor.packs
        return False

    @opened
    def tokens(self) -> Tokens:
        """The model's tokenizers; does not load the weights."""
        if not self.is_loaded:
            files = hub_kwargs(self._model_kwargs)
            return load_tokens(self.given, self.trust_remote_code, **files)
        return self.adapter.tokens

    @property
    def context_tokens(self) -> int:
        """The model's context window; does not load the weights."""
        if self.is_loaded:
            return self.adapter.context_tokens
        files = hub_kwargs(self._model_kwargs)
        return load_context_tokens(self.given, self.trust_remote_code, **files)

    @opened
    def text_ids(self) -> Callable[[str], tuple[int, ...]]:
        """Token ids of chunk text; the most recently used are cached."""
        encode = self.tokens.encode_text
        return lru_cache(maxsize=4096)(lambda text: tuple(encode(text)))

    def signature(self) -> str:
        """Signature of the checkpoint's files and of how they are loaded; empty if unknown."""
        given, s = self.given, self._settings
        is_plain = isinstance(given, str) and not self._lora and not self._model_kwargs
        files = model_signature(given) if is_plain else ""
        if not files:
            return ""
        dtype = s.dtype
        if not s.device.startswith("cuda"):  # asking for CUDA here would initialise it
            dtype = precision_signature(dtype, resolve_device(s.device))
        return f"{files}|{dtype}|{s.device}|{torch.__version__}|{transformers.__version__}"

    def close(self) -> None:
        """Free a model that was loaded by name, once the last engine that uses it does so."""
        self._closed = True
        self.__dict__.pop("decode_weights", None)  # holds the model
        if isinstance(self.given, str):
            for part in ("adapter", "fusor", "composer"):
                self.__dict__.pop(part, None)
