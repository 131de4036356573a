"""The model of an engine: its weights, tokenizers and fusor, each loaded on first use.

Owns loading, and what is known of a model without its weights. Does not know stores or corpora.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from blendrag.config import Settings, absolute_model
from blendrag.engine.opened import OpenedParts, opened
from blendrag.engine.worker import CLOSED
from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor
from blendrag.model.adapter import ModelAdapter
from blendrag.model.loading import (
    load_adapter,
    load_tokens,
    model_signature,
    precision_signature,
    resolve_device,
)
from blendrag.model.sharing import loaded_once
from blendrag.model.tokens import Tokens


class ModelParts(OpenedParts):
    """A model given by name, loaded, or as its adapter."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        lora: str | None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self._given_model = absolute_model(model) if isinstance(model, str | Path) else model
        self._given_tokenizer = tokenizer
        self.settings = settings
        self._lora = lora
        self.trust_remote_code = trust_remote_code
        self._closed = False

    @property
    def model_name(self) -> str:
        given = self._given_model
        if isinstance(given, str):
            return given
        return given.model_id if isinstance(given, ModelAdapter) else self.adapter.model_id

    @property
    def is_loaded(self) -> bool:
        """Whether the model's weights are in memory."""
        return "adapter" in self.__dict__ or not isinstance(self._given_model, str)

    @opened
    def adapter(self) -> ModelAdapter:
        given, settings = self._given_model, self.settings
        if isinstance(given, ModelAdapter):
            return given
        if isinstance(given, str):
            self._refuse_closed()
            load = partial(
                load_adapter,
                given,
                settings.dtype,
                settings.device,
                self._lora,
                self.trust_remote_code,
            )
            return loaded_once(self._loaded_as(given), load)
        if self._given_tokenizer is None:
            raise InvalidInputError(
                f"a loaded {type(given).__name__} needs its tokenizer too: "
                "BlendEngine(model, tokenizer=…)"
            )
        return ModelAdapter(given, self._given_tokenizer)

    def _loaded_as(self, name: str) -> Hashable:
        """What tells two loaded models of the same name apart."""
        s, lora = self.settings, self._lora
        files = model_signature(name), model_signature(absolute_model(lora)) if lora else ""
        where = str(resolve_device(s.device))
        return name, lora and absolute_model(lora), files, s.dtype, where, self.trust_remote_code

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidInputError(CLOSED)

    def close(self) -> None:
        """Let go of a model that was loaded by its name: the last engine to do so frees it. Idempotent."""
        self._closed = True
        if isinstance(self._given_model, str):
            for part in ("adapter", "fusor"):
                self.__dict__.pop(part, None)

    @opened
    def tokens(self) -> Tokens:
        """The model's tokenizers, without its weights where those are not loaded yet."""
        if not self.is_loaded:
            return load_tokens(self._given_model, self.trust_remote_code)
        return self.adapter.tokens

    @opened
    def fusor(self) -> Fusor:
        return Fusor(self.adapter)

    @opened
    def _ids_of_text(self) -> Any:
        @lru_cache(maxsize=4096)
        def ids_of(text: str) -> tuple[int, ...]:
            return tuple(self.tokens.encode_text(text))

        return ids_of

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of chunk text, remembered for the chunks used most recently."""
        ids: tuple[int, ...] = self._ids_of_text(text)
        return ids

    def signature(self) -> str:
        """Signature of the checkpoint's files and of how they are loaded; empty if unknown."""
        given, s = self._given_model, self.settings
        files = model_signature(given) if isinstance(given, str) and not self._lora else ""
        if not files:
            return ""
        dtype = s.dtype
        if not s.device.startswith("cuda"):  # whether there is one is not asked before it is needed
            dtype = precision_signature(dtype, resolve_device(s.device))
        return f"{files}|{dtype}|{s.device}|{torch.__version__}|{transformers.__version__}"
