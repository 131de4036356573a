"""Quieter libraries, a model and a checkpoint of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import tiny
from blendrag.fusor import Fusor
from blendrag.model import ModelAdapter

transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    """A Llama of four layers, two KV heads for four heads."""
    return tiny.adapter(tiny.llama())


@pytest.fixture(scope="module")
def fusor(adapter: ModelAdapter) -> Fusor:
    made = Fusor(adapter)
    assert made.fast_attention
    return made


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Directory of that model, to be loaded by name."""
    directory = tmp_path / "model"
    tiny.llama().save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return str(directory)
