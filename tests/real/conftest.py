"""Tests on real pretrained models: ``make test-real MODELS=DIR``.

DIR holds Hugging Face model directories. Without the environment variable ``TEST_MODELS``, which
names DIR, pytest collects nothing here, so ``make test`` needs no model.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendrag.model import ModelAdapter
from blendrag.model.loading import load_adapter

MODELS = os.environ.get("TEST_MODELS", "")
FOUND = sorted(file.parent for file in Path(MODELS).glob("*/config.json")) if MODELS else []
#: A test on a model of 1.5B parameters takes minutes on a CPU.
TIMEOUT_S = 3600

if MODELS and not FOUND:
    raise pytest.UsageError(
        f"TEST_MODELS={MODELS!r} holds no model; expected a directory with NAME/config.json"
    )
collect_ignore_glob = [] if MODELS else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use all threads, because these models are large. Overrides the fixture for tiny models."""


@pytest.fixture(autouse=True, scope="session")
def _few_greedy_tokens() -> None:
    """As many as outside of tests. Overrides the fixture for tiny models."""


@pytest.fixture(scope="session", params=FOUND, ids=lambda directory: directory.name)
def real_model(request: pytest.FixtureRequest) -> Path:
    """The directory of each model in turn."""
    return request.param


@pytest.fixture(scope="session", params=["bfloat16", "float32"])
def real_dtype(request: pytest.FixtureRequest) -> str:
    """The dtype of ``real_adapter``.

    For one dtype only: ``@pytest.mark.parametrize("real_dtype", ["float32"], indirect=True)``.
    """
    return request.param


@pytest.fixture(scope="session")
def real_adapter(real_model: Path, real_dtype: str) -> Iterator[ModelAdapter]:
    """``real_model`` in ``real_dtype``, loaded once for consecutive tests and freed after them."""
    adapter = load_adapter(str(real_model), real_dtype, "cpu")
    yield adapter
    del adapter
    gc.collect()
