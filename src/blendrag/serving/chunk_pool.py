"""Chunks that running requests share: in memory once, whatever their places in the prompts.

A request begins with KV of its own, as its prefill left it. Once others hold the same chunks, what it has of
them unchanged is dropped, and the rest becomes its overlay (:mod:`blendrag.serving.shared_attention`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

from blendrag.errors import CorruptKVError, InvalidInputError, is_out_of_memory
from blendrag.fusor.cache import BlendCache
from blendrag.fusor.loader import LoadedSpan
from blendrag.model.adapter import ModelAdapter
from blendrag.serving.kv_pool import KVPool
from blendrag.serving.prefix_tree import PrefixReader
from blendrag.serving.set_aside import SetAside
from blendrag.serving.shared_attention import (
    HeldChunk,
    Overlays,
    RunningKV,
    SharedAttention,
    SharedChunk,
)

#: A request shares its chunks if others hold so many of the tokens that it took unchanged.
MIN_SHARED_TOKENS = 128
#: Shorter chunks are copied to overlays: that takes less time than a call for each.
MIN_CHUNK_TOKENS = 32


class LoadedPrompt(Protocol):
    """A prompt of which parts were loaded from the store."""

    @property
    def spans(self) -> Sequence[LoadedSpan]:
        """Those parts, by the tokens of its cache, that are there as they are stored."""

    @property
    def recomputed(self) -> Sequence[torch.Tensor]:
        """The loaded tokens that each layer computed all the same; ``[n]`` each."""


@dataclass(eq=False)
class RequestKV:
    """The KV of one running request: in its cache, or, once it shares chunks, in a pool."""

    cache: BlendCache
    loaded: LoadedPrompt | None = None
    """``None`` if all of the prompt was computed."""
    running: RunningKV | None = None
    """Its place in the pool; then ``cache`` is empty."""
    aside: SetAside | None = None
    """What of it was moved away; then neither holds any."""

    @property
    def is_part(self) -> bool:
        """Whether its cache shares buffers with others."""
        return self.running is None and self.cache.is_part

    @property
    def next_position(self) -> int:
        """The position of the token that is decoded next."""
        return self.running.positions[-1] + 1 if self.running else self.cache.next_position


class ChunkPool(KVPool[RequestKV]):
    """The chunks and overlays of the running requests of one model."""

    def __init__(self, adapter: ModelAdapter, limit_bytes: int) -> None:
        """``limit_bytes``: the most for all overlays together, which stay allocated."""
        super().__init__(adapter)
        self._limit_tokens = max(1, limit_bytes // adapter.layout.size_bytes(1))
        moves, shapes = adapter.repositioner, adapter.layout.layers
        self._keeps_apart = "latent" in moves.kinds or any(shape.value_dim for shape in shapes)
        """Whether requests share nothing, because the layers' KV is not K and V of one shape."""
        self._overlays: Overlays | None = None
        self._chunks: WeakValueDictionary[str, SharedChunk] = WeakValueDictionary()
        self._considered: set[int | str] = set()
        """Requests and chunks when it was last decided who shares."""
        self._attention: tuple[list[RunningKV], SharedAttention] | None = None

    def share(self, requests: Sequence[RequestKV]) -> None:
        """Let those of ``requests`` share chunks that have some in common, with each other or with requests
        that share already. Their caches are emptied."""
        if self._keeps_apart:
            return
        alone = [one for one in requests if one.loaded is not None and one.running is None]
        if not alone or (len(requests) == 1 and not self._chunks):
            self._considered = set()
            return
        state: set[int | str] = {*map(id, alone), *self._chunks.keys()}
        if state == self._considered:
            return
        self._considered = state
        holders = Counter(self._chunks.keys())
        for one in alone:
            holders.update({part.key for part in self._parts(one)})
        for one in alone:
            one.running = self._moved(one, holders)
        self._prepared = None

    def reserve(self, request: RequestKV, room: int) -> None:
        if request.running is None:
            request.cache.reserve(request.cache.get_seq_length() + room)
        else:
            assert self._overlays is not None
            self._overlays.grow(request.running, len(request.running.positions) + room)

    def put_aside(self, request: RequestKV) -> None:
        self._prepared = None
        request.aside = SetAside(self._own(request))
        if request.running is None:
            request.cache.release()
        else:
            assert self._overlays is not None
            self._overlays.leave(request.running)
            self._attention = None

    def take_back(self, request: RequestKV, room: int) -> None:
        assert request.aside is not None
        tokens = request.aside.tokens
        if request.running is None:
            request.cache.reserve(tokens + room)
            request.cache.show(tokens)
        else:
            assert self._overlays is not None
            self._overlays.place(request.running, tokens + room)
        request.aside.restore(self._own(request))
        request.aside = None

    def _own(self, request: RequestKV) -> list[torch.Tensor]:
        """The KV that no other request holds, ``[2, Hkv, n, D]`` a layer."""
        if request.running is None:
            return request.cache.buffers(request.cache.get_seq_length())
        assert self._overlays is not None
        layers = range(len(self.adapter.layout.layers))
        return [self._overlays.view(layer, request.running) for layer in layers]

    def leave(self, request: RequestKV) -> None:
        self._prepared = None
        if request.running is not None:
            assert self._overlays is not None
            self._overlays.leave(request.running)
            request.running = self._attention = None

    def attention(self, requests: Sequence[RequestKV]) -> SharedAttention | None:
        """The attention of those that share chunks, the same until they change; ``None`` if none does."""
        running = [one.running for one in requests if one.running is not None]
        if not running or self._overlays is None:
            return None
        if self._attention is None or self._attention[0] != running:
            made = SharedAttention(running, self._overlays, self.adapter.repositioner)
            self._attention = running, made
        return self._attention[1]

    def _moved(self, request: RequestKV, holders: Counter[str]) -> RunningKV | None:
        """The request's place in the pool, or ``None``: it keeps its cache."""
        cache = request.cache
        positions = torch.tensor(cache.positions)
        length = len(positions)
        computed = torch.zeros(length, dtype=torch.bool)
        assert request.loaded is not None
        for tokens in {id(tokens): tokens for tokens in request.loaded.recomputed}.values():
            computed[tokens.cpu()] = True
        own, dropped = torch.ones(length, dtype=torch.bool), 0  # what the overlay keeps
        parts = list(self._parts(request))
        for part in parts:
            own[part.at : part.end] = kept = computed[part.at : part.end]
            if holders[part.key] > 1:
                dropped += part.end - part.at - int(kept.sum())
        if dropped < MIN_SHARED_TOKENS:
            return None
        try:  # chunks that nobody else holds go to the pool, too, for those who come later
            held = [self._held(part, int(positions[part.at]), computed) for part in parts]
            tokens = own.nonzero().flatten()
            tokens = tokens[positions[tokens].argsort(stable=True)]
            running = self._joined(held, positions[tokens].tolist(), cache.room)
        except (CorruptKVError, InvalidInputError):  # damaged since it was read, or no room
            return None
        except RuntimeError as exc:
            if not is_out_of_memory(exc):
                raise
            return None
        at = tokens.to(self.adapter.device)
        assert self._overlays is not None
        for layer, buffer in enumerate(cache.buffers(length)):
            torch.index_select(buffer, 2, at, out=self._overlays.view(layer, running))
        cache.release()
        return running

    def _joined(self, held: Sequence[HeldChunk], positions: list[int], room: int) -> RunningKV:
        if self._overlays is None:
            layout, device = self.adapter.layout, self.adapter.device
            self._overlays = Overlays(layout, self._limit_tokens, device)
        return self._overlays.join(held, positions, room)

    def _held(self, part: _ChunkPart, position: int, computed: torch.Tensor) -> HeldChunk:
        """``position``: where its first token is. ``computed`` ``[N]``: tokens computed in any layer."""
        chunk = self._chunks.get(part.key)
        if chunk is None:
            self._chunks[part.key] = chunk = part.chunk or self._read(part.span)
        stale = torch.ones(chunk.tokens, dtype=torch.bool)
        stale[: part.end - part.at] = computed[part.at : part.end]
        return HeldChunk(chunk, position, stale if stale.any() else None)

    def _parts(self, request: RequestKV) -> Iterator[_ChunkPart]:
        """What of the prompt can be shared."""
        for span in request.loaded.spans if request.loaded is not None else ():
            if isinstance(span.reader, PrefixReader):  # in memory already: not copied
                for key, chunk in span.reader.parts():
                    if chunk.start < span.end:
                        end = min(span.end, chunk.start + chunk.tokens)
                        yield _ChunkPart(key, chunk.start, end, span, chunk)
            elif (
                span.tokens >= MIN_CHUNK_TOKENS and not span.first
            ):  # a chunk is held from its beginning on
                yield _ChunkPart(span.reader.key, span.start, span.end, span)

    def _read(self, span: LoadedSpan) -> SharedChunk:
        layout, tokens = self.adapter.layout, span.reader.tokens
        layers = []
        for layer in range(len(layout.layers)):
            kv = torch.empty(layout.layer_shape(layer, tokens), dtype=layout.torch_dtype)
            span.reader.read_layer(layer, kv)
            layers.append(kv.to(self.adapter.device))
        return SharedChunk(layers, span.stored_position)


class _ChunkPart(NamedTuple):
    """Tokens ``[at, end)`` of a cache whose KV others may hold, too."""

    key: str
    at: int
    end: int
    span: LoadedSpan
    chunk: SharedChunk | None = None
    """What holds it, if that is in memory; may have more tokens after its end."""
