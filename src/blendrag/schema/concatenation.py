"""Cached inference: stored modules one after another, then the tokens that are computed (Prompt Cache §3.4).

The order of the keys in a cache does not matter, so modules are read to where they are concatenated, in the
order of their import. All other tokens of the prompt follow in one forward, each at its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.loader import LayerLoader, LoadedSpan
from blendrag.model.windows import Window
from blendrag.store.base import KVReader
from blendrag.store.kv import KVLayout


@dataclass(frozen=True, eq=False)
class Block:
    """Tokens of the schema that are encoded together: those of a module, or of all modules of a scaffold.

    ``positions`` ascend. Each of ``stretches`` is stored by itself: the tokens between two parameters or
    nested modules. Tokens outside of them are placeholders of parameters.
    """

    name: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    stretches: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CachedStretch:
    """Tokens ``[start, end)`` of a block."""

    block: Block
    start: int
    end: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.block.ids[self.start : self.end]

    @property
    def positions(self) -> tuple[int, ...]:
        return self.block.positions[self.start : self.end]


@dataclass(frozen=True)
class FreshTokens:
    """Tokens of a prompt that are computed."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class FixedPrompt:
    """A prompt whose parts have fixed positions, in reading order."""

    schema: str
    parts: tuple[CachedStretch | FreshTokens, ...]

    @cached_property
    def last_is_cached(self) -> bool:
        """Whether the token at the largest position is cached. It is computed again, for its logits."""
        cached = [p.positions[-1] for p in self.parts if isinstance(p, CachedStretch)]
        fresh = [p.positions[-1] for p in self.parts if isinstance(p, FreshTokens)]
        return max(cached, default=-1) > max(fresh, default=-1)

    @cached_property
    def end(self) -> int:
        """The position of the first new token."""
        return 1 + max((part.positions[-1] for part in self.parts), default=-1)


def tokens_of(prompt: FixedPrompt, readers: Sequence[KVReader | None]) -> ConcatenatedPrompt:
    """``prompt`` over the ``readers`` of its cached stretches, in order; ``None``: computed."""
    spans: list[LoadedSpan] = []
    cached: list[tuple[int, int]] = []
    fresh: list[tuple[int, int]] = []
    given = iter(readers)
    last = prompt.end - 1
    for part in prompt.parts:
        tokens = list(zip(part.positions, part.ids, strict=True))
        reader = next(given) if isinstance(part, CachedStretch) else None
        if reader is None:
            fresh += tokens
            continue
        kept = tokens
        if prompt.last_is_cached and tokens[-1][0] == last:
            kept, fresh = tokens[:-1], [*fresh, tokens[-1]]
        if kept:
            start = len(cached)
            cached += kept
            spans.append(LoadedSpan(start, len(cached), reader, kept[0][0], exact=True))
    fresh.sort(key=lambda token: token[0])
    positions, ids = zip(*(*cached, *fresh), strict=True)
    return ConcatenatedPrompt(tuple(ids), tuple(positions), tuple(spans), len(fresh))


@dataclass(frozen=True)
class ConcatenatedPrompt:
    """A prompt as the cache has it: loaded modules, then ``fresh`` computed tokens by position."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    spans: tuple[LoadedSpan, ...]
    fresh: int
    recomputed: tuple[torch.Tensor, ...] = ()
    """None of what is loaded."""


class ModuleCache(BlendCache):
    """KV of a prompt's modules, which are loaded layer by layer while the first forward computes the rest."""

    def __init__(
        self, layout: KVLayout, prompt: ConcatenatedPrompt, new_tokens: int, device: torch.device
    ) -> None:
        super().__init__(layout, len(prompt.ids) + new_tokens + 1, device)
        self._prompt = prompt.positions
        self._end = 1 + max(prompt.positions)
        self._visible: tuple[int, Window, torch.Tensor] | None = None
        """Indices of what the newest token sees, after its position and the window."""
        loaded = len(prompt.ids) - prompt.fresh
        self._loader: LayerLoader | None = LayerLoader(
            self.buffers(loaded), [prompt.spans] * len(self.layers)
        )
        self.show(loaded)
        self.merge = self._load_and_append

    def start_loading(self) -> None:
        """Begin to load. Raises :class:`NoThreadError`."""
        assert self._loader is not None
        self._loader.start()

    def load(self) -> None:
        """Wait until all is loaded. Raises :class:`SpanCorruptError`."""
        self._load(len(self.layers) - 1)

    def _load(self, layer: int) -> None:
        if self._loader is not None:
            self._loader.synchronize(layer)
            if layer == len(self.layers) - 1:
                self.close()

    def close(self) -> None:
        """Stop loading, and hold the buffers by the layers alone. Idempotent."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
            self.end_fusion()

    @property
    def positions(self) -> Sequence[int]:
        new = self.get_seq_length() - len(self._prompt)
        return (*self._prompt, *range(self._end, self._end + new))

    @property
    def next_position(self) -> int:
        return self._end + self.get_seq_length() - len(self._prompt)

    def visible(self, window: Window) -> torch.Tensor:
        newest = self.next_position - 1
        if self._visible is None or self._visible[:2] != (newest, window):
            seen = torch.tensor(self.positions) >= window.first_seen(newest)
            self._visible = newest, window, seen.nonzero().flatten().to(self.layers[0].device)
        return self._visible[2]

    def _load_and_append(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New K and V of a layer, behind what is loaded of it."""
        self._load(layer)
        return self.layers[layer].update(keys, values)
