"""A prompt of two chunks between fresh tokens, and what tests of the fusor see of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import tiny
from blendrag.fusor import BlendCache
from blendrag.fusor.loader import LoadedSpan
from blendrag.model import ModelAdapter

N = 150
LAYERS = 4
IDS = tiny.random_ids(N)
#: fresh 0-10, chunk 10-70, fresh 70-74, chunk 74-130, fresh 130-150
CHUNKS = ((10, 70), (74, 130))
EVERYWHERE = torch.cat([torch.arange(a, b) for a, b in CHUNKS])
CANDIDATES = len(EVERYWHERE)
FRESH = N - CANDIDATES


def exact_spans(adapter: ModelAdapter, noise: float = 0.0) -> list[LoadedSpan]:
    """KV of the chunks in their true context, stored at position 1; ``noise`` makes it useless."""
    return [tiny.span(adapter, IDS, a, b, stored_at=1, noise=noise) for a, b in CHUNKS]


@contextmanager
def rows_through(modules: Sequence[torch.nn.Module]) -> Iterator[list[list[int]]]:
    """Rows of each forward of each module."""
    seen: list[list[int]] = [[] for _ in modules]
    with ExitStack() as hooks:
        for module, rows in zip(modules, seen, strict=True):

            def note(module: Any, args: Any, rows: list[int] = rows) -> None:
                rows.append(args[0].shape[1])

            hooks.enter_context(module.register_forward_pre_hook(note))
        yield seen


def assert_same_kv(one: BlendCache, other: BlendCache, tolerance: float = 1e-3) -> None:
    for a, b in zip(one.layers, other.layers, strict=True):
        assert a.keys.shape == b.keys.shape
        assert tiny.difference(a.keys.cpu(), b.keys.cpu()) < tolerance
        assert tiny.difference(a.values.cpu(), b.values.cpu()) < tolerance


def assert_untouched(adapter: ModelAdapter) -> None:
    """No hook, replaced forward or other attention is left on the model."""
    for module in adapter.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)
    assert adapter.stack.config._attn_implementation == "sdpa"
