"""One thread is faster than two for models this small, and quieter libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

import tiny
from blendrag.fusor import Fusor
from blendrag.model import ModelAdapter

transformers.utils.logging.set_verbosity_error()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    """A Llama of four layers, two KV heads for four heads."""
    return tiny.adapter(tiny.llama())


@pytest.fixture(scope="module")
def fusor(adapter: ModelAdapter) -> Fusor:
    made = Fusor(adapter)
    assert made.fast_attention
    return made
