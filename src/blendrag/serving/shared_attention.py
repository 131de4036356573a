"""Decode attention of running requests that share chunks, at whatever positions of their prompts.

ChunkAttention (§3) shares KV between prompts with the same prefix. Here the K and V of a chunk are in memory
once, with keys as stored, that is, rotated for the positions that the chunk was encoded at. A request whose
prompt has the chunk Δ tokens further on rotates its query by -Δ instead: the scores are the same. K and V of
the request's own tokens (recomputed, fresh and generated) are its *overlay*.

1. Chunk first: one call per chunk, with the rows of all requests that hold it. Entries that a request has
   recomputed are masked for its row.
2. Sequence first: one call per request over its overlay.
3. The parts of a row are merged by their log-sum-exp, in float32.

What a step needs besides tensors (which rows hold which chunk, masks, rotary tables) is prepared once for all
layers and kept until a request joins or leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from blendrag.errors import InvalidInputError
from blendrag.model.positions import Repositioner, apply_rotary, rotary_table
from blendrag.store.kv import KVLayout

#: Query rows from which products and a softmax are faster on a CPU than torch's flash attention (2.13), which
#: multiplies bfloat16 no faster than float32.
PRODUCT_ROWS = 48


@dataclass(frozen=True, eq=False)
class SharedChunk:
    """A chunk's KV, in memory once for all requests."""

    layers: Sequence[torch.Tensor]
    """``[2, Hkv, T, D]`` each, keys first."""
    start: int
    """The position that the first key is rotated for."""

    @property
    def tokens(self) -> int:
        return self.layers[0].shape[2]

    @cached_property
    def views(self) -> list[tuple[torch.Tensor, ...]]:
        """K and V ``[1, Hkv, T, D]`` of each layer."""
        return [layer.unsqueeze(1).unbind() for layer in self.layers]


@dataclass(frozen=True, eq=False)
class HeldChunk:
    """A shared chunk in the prompt of one request."""

    chunk: SharedChunk
    at: int
    """Prompt position of its first token."""
    stale: torch.Tensor | None = None
    """Bool ``[T]`` on the CPU: entries hidden from the request, because its overlay has these tokens or its
    prompt does not."""


@dataclass(eq=False)
class RunningKV:
    """The KV of one running request: the chunks it holds, and its stretch of the :class:`Overlays`."""

    held: Sequence[HeldChunk]
    start: int
    room: int
    """Tokens that its stretch has room for."""
    positions: list[int]
    """Prompt positions of the tokens in its overlay, ascending up to the newest token."""

    def first_visible(self, window: int | None) -> int:
        """The first position that the newest token sees."""
        return 0 if window is None else max(0, self.positions[-1] - window + 1)


class Overlays:
    """K and V of the requests' own tokens: one buffer per layer, with a contiguous stretch for each request.

    A stretch has room for the tokens to be generated, so nothing is copied as a request grows.
    """

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device | str = "cpu") -> None:
        """``tokens``: of all requests together."""
        self.tokens = tokens
        shapes = [layout.layer_shape(i, tokens) for i in range(len(layout.layers))]
        self.layers = [torch.empty(s, dtype=layout.torch_dtype, device=device) for s in shapes]
        self._free = [(0, tokens)]  # start and length of each free stretch, ascending

    def join(self, held: Sequence[HeldChunk], positions: Sequence[int], room: int) -> RunningKV:
        """A stretch for tokens at ``positions``, ascending up to the end of the prompt, and ``room`` more.

        Raises :class:`InvalidInputError` if no free stretch is long enough.
        """
        needed = len(positions) + room
        for i, (start, length) in enumerate(self._free):
            if length >= needed:
                self._free[i] = (start + needed, length - needed)
                return RunningKV(held, start, needed, list(positions))
        longest = max((length for _, length in self._free), default=0)
        raise InvalidInputError(
            f"the request needs KV for {needed} tokens of its own, and there is room for {longest}; wait "
            "until other requests end"
        )

    def leave(self, request: RunningKV) -> None:
        """Free the stretch of ``request``."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (request.start, request.room)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def view(self, layer: int, request: RunningKV) -> torch.Tensor:
        """Its K and V, ``[2, Hkv, n, D]``: where a prefill writes them."""
        return self.layers[layer].narrow(2, request.start, len(request.positions))


class SharedAttention:
    """Decode attention of ``requests``, one row each, until one joins or leaves.

    For every new token: :meth:`advance`, then :meth:`attend` in every layer.
    """

    def __init__(
        self, requests: Sequence[RunningKV], overlays: Overlays, repositioner: Repositioner
    ) -> None:
        self._requests = requests
        self._overlays = overlays
        self._repositioner = repositioner
        self._kinds: dict[tuple[str | None, int | None, int], _LayerKind] = {}

    def advance(self) -> None:
        """Give every request a place for its next token.

        Raises :class:`InvalidInputError` if one has no room left.
        """
        for request in self._requests:
            if len(request.positions) == request.room:
                raise InvalidInputError(
                    f"a request has used its room for {request.room} tokens; end it, or let it join with more"
                )
        for request in self._requests:
            request.positions.append(request.positions[-1] + 1)
        newest = [request.start + len(request.positions) - 1 for request in self._requests]
        self._newest = torch.tensor(newest, device=self._overlays.layers[0].device)
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind.window is None}
        for kind in self._kinds.values():
            kind.place_overlays(self._overlays.tokens)

    def retract(self) -> None:
        """Undo :meth:`advance` after a step that failed."""
        for request in self._requests:
            request.positions.pop()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """``query`` ``[R, H, D]`` of the newest tokens over all that their requests see → ``[R, H, D]``.

        ``key`` and ``value`` ``[R, Hkv, D]`` are those of the same tokens. All three are rotated for their
        prompt positions.
        """
        keys, values = self._overlays.layers[layer].unsqueeze(1)  # [1, Hkv, N, D]
        keys.index_copy_(2, self._newest, key.transpose(0, 1)[None])
        values.index_copy_(2, self._newest, value.transpose(0, 1)[None])
        rows = query.unflatten(1, (key.shape[1], -1))  # [R, Hkv, G, D]
        kind = self._kind(layer, window, rows)
        parts = []
        if kind.calls:
            turned = kind.turn(rows, scaling).split(kind.sizes, dim=2)
            for (chunk, first, bias), q in zip(kind.calls, turned, strict=True):
                k, v = chunk.views[layer]
                if first:
                    k, v = k[:, :, first:], v[:, :, first:]
                parts.append(attend_part(q, k, v, bias))
        keys_of, values_of = (buffer.split(kind.splits, dim=2) for buffer in (keys, values))
        for q, at in zip(rows.split(1), kind.overlays, strict=True):
            parts.append(attend_part(q, keys_of[at], values_of[at], scaling=scaling))
        return kind.merge(parts, rows)

    def _kind(self, layer: int, window: int | None, rows: torch.Tensor) -> _LayerKind:
        moves = self._repositioner
        table = moves.table_names[layer] if moves.kinds[layer] == "rotary" else None
        key = (table, window, rows.shape[2])
        if key not in self._kinds:
            self._kinds[key] = _LayerKind(self._requests, window, moves, table, rows)
            self._kinds[key].place_overlays(self._overlays.tokens)
        return self._kinds[key]


class _Call(NamedTuple):
    """A chunk, attended by the rows that hold it."""

    chunk: SharedChunk
    first: int
    """Entries before this one are hidden from all rows."""
    bias: torch.Tensor | None
    """``[n·G, T-first]``: 0 or -inf."""


class _LayerKind:
    """What all layers with one rotary table and window share in a step."""

    def __init__(
        self,
        requests: Sequence[RunningKV],
        window: int | None,
        repositioner: Repositioner,
        table: str | None,
        like: torch.Tensor,
    ) -> None:
        """``table``: name of the rotary table, ``None`` in position-free layers. ``like``: queries
        ``[R, Hkv, G, D]``."""
        self._requests = requests
        self.window = window
        sharing, device = like.shape[2], like.device
        self.calls: list[_Call] = []
        self.sizes: list[int] = []
        """Query rows of each call, ``n·G``."""
        holders: dict[SharedChunk, list[tuple[int, HeldChunk]]] = {}
        for row, request in enumerate(requests):
            for held in request.held:
                holders.setdefault(held.chunk, []).append((row, held))
        pairs: list[tuple[int, HeldChunk]] = []
        for chunk, holding in holders.items():
            hidden = torch.stack([_hidden(held, requests[row], window) for row, held in holding])
            seen = ~hidden.all(1)  # flash attention would give the other rows a log-sum-exp of 0
            if not seen.any():
                continue
            hidden = hidden[seen]  # [n, T]
            first = int(hidden.all(0).logical_not().nonzero()[0])
            self.calls.append(_Call(chunk, first, _bias(hidden[:, first:], like)))
            self.sizes.append(len(hidden) * sharing)
            pairs += [pair for pair, is_seen in zip(holding, seen.tolist(), strict=True) if is_seen]
        own = [row for row, _ in pairs]
        self._held = torch.tensor(own, dtype=torch.long, device=device)
        self._table = None
        if table is not None and pairs:
            back = [held.chunk.start - held.at for _, held in pairs]  # -Δ
            offsets = torch.tensor(back, device=device)
            self._apply = repositioner.apply
            self._table = rotary_table(
                repositioner.rotary, table, offsets.repeat_interleave(sharing)
            )
        # parts are the pairs, then the overlays
        parts: list[list[int]] = [[] for _ in requests]
        for part, row in enumerate([*own, *range(len(requests))]):
            parts[row].append(part)
        lists = [torch.tensor(of_row) for of_row in parts]
        padded = pad_sequence(lists, batch_first=True, padding_value=-1).to(device)  # [R, S]
        self._parts = padded.clamp_min(0).flatten()
        absent = torch.zeros(padded.shape, device=device).masked_fill_(padded < 0, float("-inf"))
        self._absent = absent[..., None]  # [R, S, 1]

    def place_overlays(self, tokens: int) -> None:
        """Find the visible stretch of each overlay; buffers of ``tokens`` are split there."""
        self.splits: list[int] = []
        self.overlays = [0] * len(self._requests)
        """The number of each request's stretch among the splits."""
        end = 0
        for row in sorted(range(len(self._requests)), key=lambda row: self._requests[row].start):
            request = self._requests[row]
            hidden = bisect_left(request.positions, request.first_visible(self.window))
            self.splits += [request.start + hidden - end, len(request.positions) - hidden]
            self.overlays[row] = len(self.splits) - 1
            end = request.start + len(request.positions)
        self.splits.append(tokens - end)

    def turn(self, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        """``rows`` ``[R, Hkv, G, D]`` for all calls, scaled, rotated by -Δ: ``[1, Hkv, P·G, D]``, float32."""
        turned = (rows.float() * scaling).transpose(0, 1).index_select(1, self._held).flatten(1, 2)
        if self._table is not None:
            turned = apply_rotary(self._apply, turned, self._table)
        return turned[None]

    def merge(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor
    ) -> torch.Tensor:
        """Outputs ``[1, Hkv, n·G, D]`` and log-sum-exps ``[1, Hkv, n·G]`` of all parts → ``[R, H, D]``."""
        count, heads, sharing, width = rows.shape
        outs = torch.cat([out for out, _ in parts], dim=2).view(heads, -1, sharing, width)
        if self.calls:
            lses = torch.cat([lse for _, lse in parts], dim=2).view(
                heads, -1, sharing
            )  # [Hkv, P, G]
            of_row = lses.index_select(1, self._parts).view(heads, count, -1, sharing)
            weights = (of_row + self._absent).softmax(2)  # [Hkv, R, S, G]
            outs = outs.index_select(1, self._parts).view(*weights.shape, width)
            outs = (outs * weights[..., None]).sum(2)  # [Hkv, R, G, D]
        return outs.transpose(0, 1).flatten(1, 2).to(rows.dtype)


def _hidden(held: HeldChunk, request: RunningKV, window: int | None) -> torch.Tensor:
    """``[T]``: entries of a chunk that the request's newest token does not see."""
    tokens = held.chunk.tokens
    hidden = torch.zeros(tokens, dtype=torch.bool) if held.stale is None else held.stale
    before = request.first_visible(window) - held.at
    return hidden if before <= 0 else hidden | (torch.arange(tokens) < before)


def _bias(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """``hidden`` ``[n, T]`` as ``[n·G, T]``, 0 or -inf; ``None`` if nothing is hidden."""
    if not hidden.any():
        return None
    bias = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(like.shape[2], 0).to(like.device)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None = None,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` ``[1, Hkv, M, D]`` over ``keys`` and ``values`` ``[1, Hkv, T, D]``: outputs ``[1, Hkv, M,
    D]`` and log-sum-exps ``[1, Hkv, M]``, float32. T is not 0, and each row sees a key."""
    if query.device.type == "cpu" and query.shape[2] < PRODUCT_ROWS:
        return _flash(query.to(keys.dtype), keys, values, attn_mask=bias, scale=scaling)
    query = query.float() if scaling == 1.0 else query.float() * scaling
    scores = torch.bmm(query[0], keys[0].float().transpose(1, 2))  # [Hkv, M, T]
    if bias is not None:
        scores += bias
    highest = scores.amax(-1)
    weights = torch.softmax(scores, -1, out=scores)
    lse = highest - weights.amax(-1).log_()
    if query.device.type == "cpu" and not _multiplies(keys.dtype):
        values = values.float()
    return torch.bmm(weights.to(values.dtype), values[0])[None], lse[None]


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of ``dtype``."""
    features = torch.cpu.get_capabilities()
    return dtype == torch.bfloat16 and any(features.get(f"{isa}_bf16") for isa in ("avx512", "amx"))


def private_kv(
    request: RunningKV, layer: int, overlays: Overlays, repositioner: Repositioner
) -> tuple[torch.Tensor, list[int]]:
    """The K and V that the request would keep alone, ``[2, Hkv, n, D]``, and their positions: keys rotated,
    stale entries left out. The reference for :class:`SharedAttention`."""
    parts, positions = [overlays.view(layer, request)], list(request.positions)
    for held in request.held:
        kv = held.chunk.layers[layer].clone()
        tokens = torch.arange(kv.shape[2])
        offsets = torch.full_like(tokens, held.at - held.chunk.start, device=kv.device)
        repositioner.rotate_(kv[0], layer, repositioner.tables(offsets))
        seen = tokens if held.stale is None else tokens[~held.stale]
        parts.append(kv[:, :, seen.to(kv.device)])
        positions += (held.at + seen).tolist()
    order = torch.tensor(positions).argsort()
    return torch.cat(parts, dim=2)[:, :, order.to(parts[0].device)], sorted(positions)
