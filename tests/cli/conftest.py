"""Models and stores that the tests of commands share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tiny
from cli.commands import ingest_args, invoke, save_model, write_documents


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer, too."""
    return save_model(tmp_path_factory.mktemp("other-llama"), tiny.llama(seed=1), "windmill")


@pytest.fixture(scope="session")
def refused_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt2 learns its positions, so its KV cannot be moved."""
    return save_model(tmp_path_factory.mktemp("tiny-gpt2"), tiny.family("gpt2"))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "docs")


@pytest.fixture(scope="session")
def ingested(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three documents of three chunks, made by the command. For reading only."""
    root = tmp_path_factory.mktemp("ingested")
    docs = write_documents(root / "docs")
    result = invoke(*ingest_args(docs, model_dir, root / "store"))
    assert result.exit_code == 0, result.stderr
    return root / "store"


@pytest.fixture
def store(ingested: Path, tmp_path: Path) -> Path:
    """A copy of that store, for changing. Its documents are in ``ingested.parent / "docs"``."""
    return Path(shutil.copytree(ingested, tmp_path / "store"))
