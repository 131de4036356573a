"""Shared by all tests: no network, quiet libraries, one thread, nothing unpickled, and ``tiny`` importable
from every folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import unpickling


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Faster than two for models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_configure() -> None:
    """Before any test module is imported, and for all of them, those of the plugs included."""
    unpickling.arm()


@pytest.fixture(autouse=True)
def _nothing_is_unpickled() -> Iterator[None]:
    """Fails the test in which something was, even if the exception was swallowed."""
    with unpickling.nothing_is_unpickled():
        yield
