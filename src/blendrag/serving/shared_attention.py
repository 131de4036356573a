"""Decode attention of running requests that share chunks, at whatever positions of their prompts.

ChunkAttention (§3) shares KV between prompts with the same prefix. Here the K and V of a chunk are in memory
once, with keys as stored, that is, rotated for the positions that the chunk was encoded at. A request whose
prompt has the chunk Δ tokens further on rotates its query by -Δ instead: the scores are the same. K and V of
the request's own tokens (recomputed, fresh and generated) are its *overlay*.

1. Chunk first: one call per chunk, with the rows of all requests that hold it. Entries that a request has
   recomputed are masked for its row.
2. Sequence first: one call over all short overlays, and one for each longer overlay.
3. The parts of a row are merged by their log-sum-exp, in float32.

What a step needs besides tensors (which rows hold which chunk, masks, rotary tables) is prepared once for all
layers and kept until a request joins or leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from blendrag.errors import InvalidInputError
from blendrag.fusor.attention import has_fused_kernels, wants_even_rows, with_one_row_more
from blendrag.fusor.rows import aligned_zeros
from blendrag.model.compat import cpu_flash_attention, cuda_attention
from blendrag.model.positions import Repositioner, Rotation, rotary_table
from blendrag.model.windows import Window
from blendrag.store.kv import KVLayout

#: Query rows from which products and a softmax are faster on a CPU than torch's flash attention (2.13), which
#: multiplies bfloat16 no faster than float32.
PRODUCT_ROWS = 48
#: Up to this length, copying overlays for one call is faster than a call for each.
SHORT_TOKENS = 128


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
    def means(self) -> list[torch.Tensor]:
        """The mean key of each layer, ``[Hkv, 1, D]``, in the dtype of the keys."""
        return [kv[0].mean(1, keepdim=True) for kv in self.layers]


@dataclass(frozen=True, eq=False)
class HeldChunk:
    """A shared chunk in the prompt of one request."""

    chunk: SharedChunk
    at: int
    """Prompt position of its first token."""
    stale: torch.Tensor | None = None
    """Bool ``[T]`` on the CPU: entries that its overlay replaces, or that its prompt does not have."""

    @property
    def visible(self) -> int:
        """Entries that the request attends to."""
        return self.chunk.tokens - (0 if self.stale is None else int(self.stale.sum()))


@dataclass(eq=False)
class RunningKV:
    """The KV of one running request: the chunks it holds, and its stretch of the :class:`Overlays`."""

    held: Sequence[HeldChunk]
    start: int
    room: int
    """Tokens that its stretch has room for."""
    positions: list[int]
    """Prompt positions of the tokens in its overlay, ascending up to the newest token."""

    def first_visible(self, window: Window | None) -> int:
        """The first position that the newest token sees."""
        return 0 if window is None else max(0, window.first_seen(self.positions[-1]))


class Overlays:
    """K and V of the requests' own tokens: one buffer per layer, with a contiguous stretch for each request.

    A stretch has room for tokens to be generated, and is copied only when a request outgrows it. If no gap is
    long enough then, the buffers are replaced by longer ones without gaps.
    """

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device | str = "cpu") -> None:
        """``tokens``: most of all requests together when one joins."""
        self.tokens = tokens
        self._requests: list[RunningKV] = []
        """By the start of their stretches."""
        shapes = [layout.layer_shape(i, 0) for i in range(len(layout.layers))]
        self.layers = [torch.empty(s, dtype=layout.torch_dtype, device=device) for s in shapes]

    def join(self, held: Sequence[HeldChunk], positions: Sequence[int], room: int) -> RunningKV:
        """A stretch for tokens at ``positions``, ascending up to the end of the prompt, and ``room`` more.

        Raises :class:`InvalidInputError` if all requests together would need more than :attr:`tokens`.
        """
        request = RunningKV(held, 0, 0, list(positions))
        needed, left = len(positions) + room, self.tokens - self._held
        if needed > left:
            raise InvalidInputError(
                f"the request needs KV for {needed} tokens of its own, and there is room for {left}; wait "
                "until other requests end"
            )
        self.place(request, needed)
        return request

    def place(self, request: RunningKV, room: int) -> None:
        """Give ``request``, which has no stretch, one for ``room`` tokens."""
        start = self._gap(room)
        if start is None:
            self._rebuild(self._held + room)
            start = self._held
        request.start, request.room = start, room
        self._requests.append(request)
        self._requests.sort(key=lambda each: each.start)

    def grow(self, request: RunningKV, room: int) -> None:
        """Make the stretch of ``request`` longer, where it is or elsewhere."""
        following = self._requests[self._requests.index(request) + 1 :]
        end = following[0].start if following else self._length
        if request.start + room > end:
            start = self._gap(room)
            if start is None:
                self._rebuild(self._held + room)
                start = self._held
            for buffer in self.layers:
                kept = buffer.narrow(2, request.start, request.room)
                buffer.narrow(2, start, request.room).copy_(kept)
            request.start = start
            self._requests.sort(key=lambda each: each.start)
        request.room = room

    def leave(self, request: RunningKV) -> None:
        """Free the stretch of ``request``, if it has one."""
        if request in self._requests:
            self._requests.remove(request)
            request.room = 0
        if not self._requests:
            self.layers = [buffer.new_empty(buffer[:, :, :0].shape) for buffer in self.layers]

    @property
    def _length(self) -> int:
        return min(buffer.shape[2] for buffer in self.layers)

    @property
    def _held(self) -> int:
        """Tokens of all stretches."""
        return sum(each.room for each in self._requests)

    def _gap(self, room: int) -> int | None:
        """Where a free stretch of that length begins."""
        at = 0
        for each in self._requests:
            if each.start - at >= room:
                return at
            at = each.start + each.room
        return at if self._length - at >= room else None

    def _rebuild(self, tokens: int) -> None:
        """Copy all stretches, without gaps, to buffers of at least ``tokens``, layer by layer.

        Without memory for them it raises, and the stretches are without gaps in the buffers that there are.
        """
        tokens = max(tokens, min(tokens + tokens // 4, self.tokens))
        starts = [0, *accumulate(each.room for each in self._requests)]
        failure: RuntimeError | None = None
        for i, buffer in enumerate(self.layers):
            made = buffer
            try:
                if failure is None:
                    made = buffer.new_empty((*buffer.shape[:2], tokens, buffer.shape[3]))
            except RuntimeError as exc:
                failure = exc
            for start, each in zip(starts, self._requests, strict=False):
                kept = buffer.narrow(2, each.start, each.room)
                made.narrow(2, start, each.room).copy_(kept.clone() if made is buffer else kept)
            self.layers[i] = made
        for start, each in zip(starts, self._requests, strict=False):
            each.start = start
        if failure is not None:
            raise failure

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
        self._chunk_calls: dict[tuple[str | None, Window | None, int, float], _ChunkCalls] = {}
        self._overlay_calls: dict[Window | None, _OverlayCalls] = {}

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
        self._chunk_calls = {
            key: calls for key, calls in self._chunk_calls.items() if calls.window is None
        }
        self._overlay_calls = {}

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
        window: Window | None = None,
    ) -> torch.Tensor:
        """``query`` ``[R, H, D]`` of the newest tokens over all that their requests see → ``[R, H, D]``.

        ``key`` and ``value`` ``[R, Hkv, D]``: of the same tokens. All are rotated for their prompt positions.
        """
        buffer = self._overlays.layers[layer]  # [2, Hkv, N, D]
        newest = torch.cat((key, value), dim=1).transpose(0, 1)  # [2·Hkv, R, D]
        buffer.flatten(0, 1).index_copy_(1, self._newest, newest)
        rows = query.unflatten(1, (key.shape[1], -1)).transpose(0, 1).contiguous()  # [Hkv, R, G, D]
        if window not in self._overlay_calls:
            self._overlay_calls[window] = _OverlayCalls(self._requests, window, rows)
        own_out, own_lse = self._overlay_calls[window].attend(rows, buffer, scaling)
        chunks = self._chunk_calls_of(layer, window, rows, scaling)
        if not chunks.calls:
            return own_out.flatten(1, 2).to(query.dtype)
        outs, lses = chunks.attend(layer, rows)
        outs.append(own_out.transpose(0, 1).flatten(1, 2).float())
        lses.append(own_lse.transpose(0, 1).flatten(1, 2))
        return chunks.merge(outs, lses, rows).transpose(0, 1).to(query.dtype).flatten(1, 2)

    def _chunk_calls_of(
        self, layer: int, window: Window | None, rows: torch.Tensor, scaling: float
    ) -> _ChunkCalls:
        moves = self._repositioner
        table = moves.table_names[layer] if moves.kinds[layer] == "rotary" else None
        key = (table, window, rows.shape[2], scaling)
        if key not in self._chunk_calls:
            self._chunk_calls[key] = _ChunkCalls(
                self._requests, window, moves, table, rows, scaling
            )
        return self._chunk_calls[key]


class _OverlayCalls:
    """The calls over the overlays of a step, in layers with one window.

    What the requests see of short overlays is gathered for one call. Longer ones have a call each.
    """

    def __init__(
        self, requests: Sequence[RunningKV], window: Window | None, like: torch.Tensor
    ) -> None:
        """``like``: queries ``[Hkv, R, G, D]``."""
        short: list[tuple[int, int, int]] = []
        self._long: list[tuple[int, int, int]] = []
        """Row, start and length of what it sees."""
        for row, request in enumerate(requests):
            hidden = bisect_left(request.positions, request.first_visible(window))
            seen = row, request.start + hidden, len(request.positions) - hidden
            (short if seen[2] <= SHORT_TOKENS else self._long).append(seen)
        self._gathered: torch.Tensor | None = None
        """``[n·T]``: where the tokens of the short ones are, padded to one length."""
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None
        """The rows of the short ones, and the part of each row, if there are both kinds."""
        if short:
            rows, starts, lengths = torch.tensor(short, device=like.device).T
            tokens = torch.arange(int(lengths.max()), device=like.device)
            at = starts[:, None] + tokens.minimum(lengths[:, None] - 1)  # [n, T]
            self._gathered = at.flatten()
            bias = aligned_zeros(len(like) * len(at), at.shape[1], like)
            bias.masked_fill_((tokens >= lengths[:, None]).repeat(len(like), 1), float("-inf"))
            self._bias = bias[None, :, None]  # [1, Hkv·n, 1, T]
            if self._long:
                order = torch.tensor([row for row, _, _ in (*short, *self._long)])
                self._order = rows, order.argsort().to(like.device)

    def attend(
        self, rows: torch.Tensor, buffer: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rows`` ``[Hkv, R, G, D]`` over ``buffer`` ``[2, Hkv, N, D]``: outputs ``[R, Hkv, G, D]`` and
        log-sum-exps ``[R, Hkv, G]``."""
        parts = []
        if self._gathered is not None:
            some = rows if self._order is None else rows.index_select(1, self._order[0])
            heads = some.flatten(0, 1)[None]  # [1, Hkv·n, G, D]
            gathered = buffer.index_select(2, self._gathered)
            keys, values = gathered.view(2, *heads.shape[:2], -1, heads.shape[3])
            out, lse = attend_part(heads, keys, values, self._bias, scaling)
            parts.append(
                (out.view(some.shape).transpose(0, 1), lse.view(some.shape[:3]).transpose(0, 1))
            )
        if self._long:
            keys, values = buffer[:, None]  # [1, Hkv, N, D]
            queries = rows.transpose(0, 1).split(1)  # [1, Hkv, G, D]
            for row, start, length in self._long:
                kv = keys.narrow(2, start, length), values.narrow(2, start, length)
                parts.append(attend_part(queries[row], *kv, scaling=scaling))
        if len(parts) == 1:
            return parts[0]
        outs, lses = (torch.cat(each) for each in zip(*parts, strict=True))
        if self._order is not None:
            outs, lses = (each.index_select(0, self._order[1]) for each in (outs, lses))
        return outs, lses


class _Call(NamedTuple):
    """A chunk, attended by the rows that hold it."""

    chunk: SharedChunk
    pairs: list[tuple[int, HeldChunk]]
    """The rows, and where they hold it."""
    first: int
    """Entries before this one are hidden from all rows."""
    bias: torch.Tensor | None
    """``[n·G, T-first]``: 0 or -inf."""

    def kv(self, layer: int) -> tuple[torch.Tensor, ...]:
        """K and V ``[Hkv, T-first, D]``."""
        return self.chunk.layers[layer][:, :, self.first :].unbind()


class _ChunkCalls:
    """The calls over chunks, in layers with one rotary table, window and scaling."""

    def __init__(
        self,
        requests: Sequence[RunningKV],
        window: Window | None,
        repositioner: Repositioner,
        table: str | None,
        like: torch.Tensor,
        scaling: float,
    ) -> None:
        """``table``: name of the rotary table, ``None`` in position-free layers. ``like``: queries
        ``[Hkv, R, G, D]``."""
        self.window = window
        self._scaling = scaling
        sharing, device = like.shape[2], like.device
        self.calls: list[_Call] = []
        holders: dict[SharedChunk, list[tuple[int, HeldChunk]]] = {}
        for row, request in enumerate(requests):
            for held in request.held:
                holders.setdefault(held.chunk, []).append((row, held))
        for chunk, holding in holders.items():
            hidden = torch.stack([_hidden(held, requests[row], window) for row, held in holding])
            seen = ~hidden.all(1)  # flash attention would give the other rows a log-sum-exp of 0
            if not seen.any():
                continue
            hidden = hidden[seen]  # [n, T]
            first = int(hidden.all(0).logical_not().nonzero()[0])
            pairs = [pair for pair, is_seen in zip(holding, seen.tolist(), strict=True) if is_seen]
            self.calls.append(_Call(chunk, pairs, first, _bias(hidden[:, first:], like)))
        self.calls.sort(key=lambda call: len(call.pairs), reverse=True)
        self._sizes = [len(call.pairs) * sharing for call in self.calls]
        """Query rows of each call, ``n·G``."""
        self._multiplied = 0
        """The calls for :func:`multiply_parts`, which are the first ones."""
        if device.type == "cpu" and _multiplies(like.dtype):
            self._multiplied = sum(size >= PRODUCT_ROWS for size in self._sizes)
        self._kv: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        pairs = [pair for call in self.calls for pair in call.pairs]
        own = [row for row, _ in pairs]
        self._rows_of_pairs: torch.Tensor | None = None
        """``None`` if every call has all rows in order, so that nothing needs to be gathered."""
        if own != [*range(len(requests))] * len(self.calls):
            self._rows_of_pairs = torch.tensor(own, device=device)
            self._parts, self._absent = _parts_of_rows([*own, *range(len(requests))], device)
        self._rotation: Rotation | None = None
        if table is not None and pairs:
            back = [held.chunk.start - held.at for _, held in pairs]  # -Δ
            tables = rotary_table(repositioner.rotary, table, torch.tensor(back, device=device))
            cos, sin, half = Rotation.of(repositioner.apply, tables, like.shape[3])
            cos, sin = cos[:, None] * scaling, sin[:, None] * scaling  # [P, 1, D]
            if self._rows_of_pairs is None:
                cos, sin = (each.unflatten(0, (-1, len(requests))) for each in (cos, sin))
            self._rotation = Rotation(cos, sin, half)

    def turn(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` ``[Hkv, R, G, D]`` for all calls, scaled, rotated by -Δ: ``[Hkv, P·G, D]``, float32."""
        rows = rows.float()
        if self._rotation is None:
            turned = self._of_pairs(rows * self._scaling)
            if self._rows_of_pairs is None:
                turned = turned.repeat(1, len(self.calls), 1, 1, 1)
        else:
            cos, sin, half = self._rotation
            turned = self._of_pairs(rows) * cos
            turned.addcmul_(self._of_pairs(rows @ half), sin)
        return turned.reshape(len(rows), -1, rows.shape[3])

    def _of_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """``[Hkv, R, G, D]`` → ``[Hkv, P, G, D]``, or ``[Hkv, 1, R, G, D]`` if every call has all rows."""
        if self._rows_of_pairs is None:
            return rows[:, None]
        return rows.index_select(1, self._rows_of_pairs)

    def attend(
        self, layer: int, rows: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """``rows`` ``[Hkv, R, G, D]``: outputs ``[Hkv, n·G, D]`` and log-sum-exps ``[Hkv, n·G]`` of the
        calls in their order."""
        if layer not in self._kv:
            self._kv[layer] = [call.kv(layer) for call in self.calls]
        turned, count = self.turn(rows), self._multiplied
        queries = turned.split(self._sizes, dim=1)
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        if count:
            rounded = turned.to(rows.dtype).split(self._sizes, dim=1)
            means = [call.chunk.means[layer] for call in self.calls[:count]]
            biases = [call.bias for call in self.calls[:count]]
            some = queries[:count], rounded[:count], self._kv[layer][:count]
            outs, lse = multiply_parts(*some, means, biases)
            lses.append(lse)
        for i in range(count, len(self.calls)):
            keys, values = self._kv[layer][i]
            out, lse = attend_part(queries[i][None], keys[None], values[None], self.calls[i].bias)
            outs.append(out[0])
            lses.append(lse[0])
        return outs, lses

    def merge(
        self, outs: list[torch.Tensor], lses: list[torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """Outputs ``[Hkv, n·G, D]`` and log-sum-exps ``[Hkv, n·G]`` of the calls and then of the overlays →
        the shape of ``like``, ``[Hkv, R, G, D]``."""
        heads, count, sharing, width = like.shape
        out = torch.cat(outs, dim=1).view(heads, -1, sharing, width)
        lse = torch.cat(lses, dim=1).view(heads, -1, sharing)
        if self._rows_of_pairs is not None:
            out = out.index_select(1, self._parts)
            lse = lse.index_select(1, self._parts) + self._absent
        weights = lse.view(heads, -1, count, sharing, 1).softmax(1)  # [Hkv, S, R, G, 1]
        return (out.view(*weights.shape[:4], width) * weights).sum(1)


def _parts_of_rows(rows: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows``: the row of each part. The parts of each row, padded to S: ``[S·R]``, and 0 or, where there is
    none, -inf: ``[S·R, 1]``."""
    parts: dict[int, list[int]] = {}
    for part, row in enumerate(rows):
        parts.setdefault(row, []).append(part)
    lists = [torch.tensor(parts[row]) for row in sorted(parts)]
    padded = pad_sequence(lists, padding_value=-1).flatten().to(device)
    absent = torch.zeros(len(padded), device=device).masked_fill_(padded < 0, float("-inf"))
    return padded.clamp_min(0), absent[:, None]


def _hidden(held: HeldChunk, request: RunningKV, window: Window | None) -> torch.Tensor:
    """``[T]``: entries of a chunk that the request's newest token does not see."""
    tokens = held.chunk.tokens
    hidden = torch.zeros(tokens, dtype=torch.bool) if held.stale is None else held.stale
    before = request.first_visible(window) - held.at
    return hidden if before <= 0 else hidden | (torch.arange(tokens) < before)


def _bias(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """``hidden`` ``[n, T]`` as ``[n·G, T]``, 0 or -inf; ``None`` if nothing is hidden."""
    if not hidden.any():
        return None
    hidden = hidden.repeat_interleave(like.shape[2], 0).to(like.device)
    rows, tokens = hidden.shape
    return aligned_zeros(rows, tokens, like).masked_fill_(hidden, float("-inf"))


def attend_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None = None,
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` ``[B, Hkv, M, D]`` over ``keys`` and ``values`` ``[B, Hkv, T, D]``: outputs ``[B, Hkv, M,
    D]`` and log-sum-exps ``[B, Hkv, M]``, float32. T is not 0, and each row sees a key."""
    if query.device.type == "cpu" and query.shape[2] < PRODUCT_ROWS:
        query, rows = query.to(keys.dtype), query.shape[2]
        if wants_even_rows(query) and (bias is None or rows == 1):
            query = with_one_row_more(query)
        out, lse = cpu_flash_attention(query, keys, values, attn_mask=bias, scale=scaling)
        return out[:, :, :rows], lse[:, :, :rows]
    if has_fused_kernels(keys, values):
        return cuda_attention(query.to(keys.dtype), keys, values, bias, scaling)
    query = query.float() if scaling == 1.0 else query.float() * scaling
    scores = query @ keys.float().mT  # [B, Hkv, M, T]
    if bias is not None:
        scores += bias
    highest = scores.amax(-1)
    weights = torch.softmax(scores, -1, out=scores)
    lse = highest - weights.amax(-1).log_()
    if query.device.type == "cpu":
        values = values.float()
    return weights.to(values.dtype) @ values, lse


def multiply_parts(
    queries: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
    kv: Sequence[tuple[torch.Tensor, ...]],
    means: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Attention of several parts by products in bfloat16, the fastest way on a CPU that has them.

    Scores are rounded to bfloat16. Those of keys less their mean are smaller and lose less; the query times
    the mean is added to the log-sum-exp, in float32.

    Args:
        queries: of each part, ``[Hkv, M, D]``, scaled, float32.
        rounded: the same in bfloat16.
        kv: keys and values ``[Hkv, T, D]``.
        means: of the keys, ``[Hkv, 1, D]``.
        biases: ``[M, T]``.

    Returns the outputs of each part, ``[Hkv, M, D]``, and the log-sum-exps of all, ``[Hkv, …]``.
    """
    outs, found = [], []
    parts = zip(queries, rounded, kv, means, biases, strict=True)
    for exact, query, (keys, values), mean, bias in parts:
        centred = (keys - mean).mT
        scores = query @ centred if bias is None else torch.baddbmm(bias, query, centred)
        bits = scores.view(torch.int16)  # reduced far faster than bfloat16 (torch 2.13)
        most, least = bits.amax(-1), bits.amin(-1)
        torch.softmax(scores, -1, out=scores)
        found.append((most, least, bits.amax(-1), (exact @ mean.float().mT)[..., 0]))
        outs.append(scores @ values)
    most, least, top, shift = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
    # as integers, numbers are in order if one is positive, and in reverse order if all are negative
    highest = torch.where(most >= 0, most, least).view(rounded[0].dtype)
    return outs, shift + highest - top.view(highest.dtype).float().log_()


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
        repositioner.rotate_(kv[repositioner.part(layer)], layer, repositioner.tables(offsets))
        seen = tokens if held.stale is None else tokens[~held.stale]
        parts.append(kv[:, :, seen.to(kv.device)])
        positions += (held.at + seen).tolist()
    order = torch.tensor(positions).argsort()
    return torch.cat(parts, dim=2)[:, :, order.to(parts[0].device)], sorted(positions)
