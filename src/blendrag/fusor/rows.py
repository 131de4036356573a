"""Which rows a layer computes, and what each of them may see.

Row *s* sees key *j* iff ``pos_j <= pos_s`` and *j* is within the layer's
:class:`~blendrag.model.windows.Window`. A triangular mask aligned bottom-right would let selected rows see
their future. :class:`Rows` are built once per selection and shared by every layer that keeps it. Rows of one
prompt never see another's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch

from blendrag.model.windows import Window

#: About as many rows per attention call on a CPU: with fewer, fewer keys are masked by all of them, but calls
#: cost time.
BLOCK_ROWS = 96
#: The same where most rows of the prompt are computed.
RUN_ROWS = 512
#: Rows of a stripe (:meth:`Rows.stripes`).
STRIPE_ROWS = 512
#: Rows times tokens of the prompt from which stripes are faster than blocks on a GPU.
STRIPED_PRODUCTS = 1 << 26
#: Most memory that the folded biases of a prompt may take.
FOLDED_BYTES = 64 << 20
#: Layer arguments whose rows are kept: a model with windows passes two rotary tables and two masks.
KEPT = 6
#: Rows of a bias begin at multiples of this many elements: GPU kernels need it, and torch would copy the bias
#: for every call.
ALIGNED = 16


class AttentionBlock(NamedTuple):
    """Rows ``[a, b)`` attending keys ``[lo, hi)`` under ``bias`` ``[b-a, hi-lo]`` (0 or -inf).

    Folded, ``bias`` is ``[G·(b-a), hi-lo]``: repeated for the G query heads that share a KV head.
    """

    a: int
    b: int
    lo: int
    hi: int
    bias: torch.Tensor

    def folded(self, sharing: int) -> AttentionBlock:
        """The same for ``sharing`` query heads at a time."""
        rows, keys = self.bias.shape
        bias = _new_bias(sharing, rows, keys, self.bias)
        return self._replace(bias=bias.copy_(self.bias).flatten(0, 1))


class PackPart(NamedTuple):
    """One prompt's rows: ``[a, b)`` of those computed, over keys ``[lo, hi)`` of those in the cache."""

    member: int
    """The prompt's number in its pack."""
    rows: Rows
    a: int
    b: int
    lo: int
    hi: int


At = torch.Tensor | slice
"""Tokens taken from a tensor: their indices ``[S]``, or a contiguous stretch, which is a view."""


def take(value: Any, at: At, dim: int) -> Any:
    """The entries ``at`` of dimension ``dim`` (-1 or -2) of every tensor in ``value``."""
    if isinstance(value, torch.Tensor):
        return value[..., at] if dim == -1 else value[..., at, :]
    if isinstance(value, tuple | list):
        return type(value)(take(each, at, dim) for each in value)
    if isinstance(value, dict):
        return {key: take(each, at, dim) for key, each in value.items()}
    return value


class Gathered:
    """Layer arguments for the rows ``at``, gathered once because layers pass the same objects."""

    def __init__(self, at: torch.Tensor) -> None:
        self._at = at
        self._known: list[tuple[Any, Any]] = []

    def once(self, value: Any, dim: int) -> Any:
        """``take(value, at, dim)``, computed the first time."""
        for known, gathered in self._known:
            if known is value:
                return gathered
        gathered = take(value, self._at, dim)
        self._known.append((value, gathered))
        del self._known[:-KEPT]
        return gathered


class PromptRows:
    """What all :class:`Rows` of one prompt share."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.device = device
        self.planned: Gathered | None = None
        """Gathered rows of all layers, if they are known before layer 0; each layer takes its stretch."""
        self._scalars: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def keys(self) -> torch.Tensor:
        """``[N]``: 0, 1, …"""
        return torch.arange(self.tokens, device=self.device)

    def scalars(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """0 and -inf."""
        if dtype not in self._scalars:
            zero, infinite = torch.tensor([0.0, float("-inf")], dtype=dtype, device=self.device)
            self._scalars[dtype] = zero, infinite
        return self._scalars[dtype]


class Rows:
    """Positions ``[S]`` of one prompt that a layer computes, ascending, out of ``prompt_tokens``."""

    def __init__(
        self,
        positions: torch.Tensor,
        prompt: PromptRows | int,
        force_masks: bool = False,
        is_last: bool = False,
        host: np.ndarray | None = None,
        stretch: slice | None = None,
    ) -> None:
        """``prompt``: what the prompt's rows share, or its number of tokens. ``force_masks``: use biases even
        where all rows are computed. ``is_last``: only the prompt's last token. ``host``: the positions in
        host memory, if known. ``stretch``: where they are among the rows of ``prompt.planned``."""
        if isinstance(prompt, int):
            prompt = PromptRows(prompt, positions.device)
        self.positions = positions
        self.prompt_tokens = prompt.tokens
        self.count = positions.numel()
        self.attended = False
        """Whether :func:`blend_attention` ran over them."""
        self.covers_prompt = self.count == prompt.tokens and not force_masks
        """Whether plain causality describes them."""
        self.at = None if self.covers_prompt else positions
        """The positions, or ``None`` for all."""
        self._prompt = prompt
        self._gathered = Gathered(positions)
        self._is_last = is_last
        self._host = host
        self._stretch = stretch
        self._blocks: dict[tuple[Window | None, torch.dtype, int], list[AttentionBlock]] = {}
        self._stripes: dict[tuple[torch.dtype, int], list[AttentionBlock]] = {}
        self._biases: dict[tuple[int, int, Window | None, torch.dtype, int], torch.Tensor] = {}

    @property
    def parts(self) -> list[PackPart]:
        """These rows as those of the only prompt of a pack."""
        return [PackPart(0, self, 0, self.count, 0, self.prompt_tokens)]

    def first(self, count: int) -> Rows:
        """The first ``count`` of these rows."""
        host = None if self._host is None else self._host[:count]
        return Rows(self.positions[:count], self._prompt, host=host)

    def gather(self, value: Any, dim: int, alone: bool = False) -> Any:
        """``value`` at these rows of ``dim``, computed once while layers pass the same ``value``.

        ``alone``: not for all planned rows at once, which would take too much memory for masks.
        """
        if self._prompt.planned is None or self._stretch is None or alone:
            return self._gathered.once(value, dim)
        return take(self._prompt.planned.once(value, dim), self._stretch, dim)

    @cached_property
    def mask(self) -> torch.Tensor:
        """Boolean mask ``[1, 1, S, N]`` without a window, True = visible: the slow reference."""
        return self._hidden(slice(None), slice(None), None).logical_not_()[None, None]

    def bias(
        self, a: int, b: int, window: Window | None, dtype: torch.dtype, sharing: int = 1
    ) -> torch.Tensor:
        """Rows ``[a, b)`` as one block over all keys, ``[sharing·(b-a), N]``: 0 or -inf."""
        key = (a, b, window, dtype, sharing)
        if key not in self._biases:
            hidden = self._hidden(slice(a, b), slice(None), window)
            self._biases[key] = self._bias(hidden, dtype, sharing)
        return self._biases[key]

    def blocks(
        self, window: Window | None, dtype: torch.dtype, sharing: int = 1
    ) -> list[AttentionBlock]:
        """The attention calls of a layer with that window, the first ones folded for ``sharing``
        query heads per KV head, as many as fit :data:`FOLDED_BYTES`."""
        key = (window, dtype, sharing)
        if key not in self._blocks:
            self._blocks[key] = self._cut(*key)
        return self._blocks[key]

    def stripes(self, dtype: torch.dtype, sharing: int) -> list[AttentionBlock]:
        """The rows as stripes: blocks, folded for ``sharing`` query heads per KV head, whose rows all see the
        keys before ``lo``. None if they are few, or if their positions are only on the device."""
        if self._host is None or self.count * self.prompt_tokens < STRIPED_PRODUCTS:
            return []
        key = (dtype, sharing)
        if key not in self._stripes:
            self._stripes[key] = []
            for a in range(0, self.count, STRIPE_ROWS):
                b = min(a + STRIPE_ROWS, self.count)
                lo, hi = int(self._host[a]), int(self._host[b - 1]) + 1
                hidden = self._hidden(slice(a, b), slice(lo, hi), None)
                bias = self._bias(hidden, dtype, sharing)
                self._stripes[key].append(AttentionBlock(a, b, lo, hi, bias))
        return self._stripes[key]

    def _cut(self, window: Window | None, dtype: torch.dtype, sharing: int) -> list[AttentionBlock]:
        """On a CPU, rows go in small blocks and keys hidden from a whole block are not multiplied. On a GPU
        masking is as fast as multiplying and each call costs a launch: blocks are as large as their biases
        may be, over all keys if the positions are only on the device."""
        n = self.prompt_tokens
        if self._is_last:  # sees every key in its window
            lo = 0 if window is None else max(0, window.first_seen(n - 1))
            seen = torch.zeros((sharing, n - lo), dtype=dtype, device=self.positions.device)
            return [AttentionBlock(0, 1, lo, n, seen)]
        on_cpu = self.positions.device.type == "cpu"
        step = RUN_ROWS if self.count > 0.6 * n else BLOCK_ROWS
        step = ceil(self.count / max(1, round(self.count / step)))  # a short last block costs most
        if not on_cpu:
            step = max(step, FOLDED_BYTES // (sharing * n * dtype.itemsize))
        host = self.positions.numpy() if on_cpu and self._host is None else self._host
        blocks, left = [], FOLDED_BYTES
        for a in range(0, self.count, step):
            b, lo, hi = min(a + step, self.count), 0, n
            if host is not None:
                hi = int(host[b - 1]) + 1
                lo = 0 if window is None else max(0, window.first_seen(int(host[a])))
            left -= sharing * (b - a) * (hi - lo) * dtype.itemsize
            hidden = self._hidden(slice(a, b), slice(lo, hi), window)
            bias = self._bias(hidden, dtype, sharing if left >= 0 else 1)
            blocks.append(AttentionBlock(a, b, lo, hi, bias))
        return blocks

    def _hidden(self, rows: slice, keys: slice, window: Window | None) -> torch.Tensor:
        """``[s, k]``: True where a row must not see a key."""
        at, keys_at = self.positions[rows, None], self._prompt.keys[None, keys]
        hidden = keys_at > at
        if window is not None:
            hidden |= keys_at < window.first_seen(at)
        return hidden

    def _bias(self, hidden: torch.Tensor, dtype: torch.dtype, sharing: int) -> torch.Tensor:
        """``hidden`` ``[s, k]`` as 0 or -inf, ``[sharing·s, k]``, its rows :data:`ALIGNED`."""
        seen, masked = self._prompt.scalars(dtype)
        rows, keys = hidden.shape
        bias = _new_bias(sharing, rows, keys, seen)
        torch.where(hidden.expand(sharing, -1, -1), masked, seen, out=bias)
        return bias.flatten(0, 1)


class PackedRows:
    """The rows of some prompts of a pack, one after another: ``rows`` of each by its number.

    ``token_starts``, ``key_starts``: where each begins among all ``prompt_tokens`` and in the cache.
    """

    def __init__(
        self,
        rows: dict[int, Rows],
        token_starts: Sequence[int],
        key_starts: Sequence[int],
        prompt_tokens: int,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.attended = False
        self.parts: list[PackPart] = []
        self.count = 0
        for member, own in rows.items():
            a, lo = self.count, key_starts[member]
            self.count += own.count
            self.parts.append(PackPart(member, own, a, self.count, lo, lo + own.prompt_tokens))
        self.positions = torch.cat(
            [own.positions + token_starts[member] for member, own in rows.items()]
        )
        """``[ΣS]`` in the sequence of all tokens; rotary positions are each prompt's own."""
        self._gathered = Gathered(self.positions)

    def gather(self, value: Any, dim: int, alone: bool = False) -> Any:
        """:meth:`Rows.gather` for the rows of all prompts."""
        return self._gathered.once(value, dim)

    @property
    def mask(self) -> torch.Tensor:
        """Would span the keys of all prompts; see :attr:`Fusor.packs`."""
        raise NotImplementedError("prompts are packed only if attention takes rows, not masks")


AnyRows = Rows | PackedRows


class LayerRows(NamedTuple):
    """What a layer computes, planned before layer 0."""

    rows: Rows
    among: torch.Tensor
    """Indices of its rows among those of the layer before (layer 0: among all tokens), ``[S]``."""
    chosen: torch.Tensor
    """Those of them that are candidates, ``[n]``."""


def nested_rows(
    prompt: PromptRows,
    always: np.ndarray,
    candidates: np.ndarray,
    rank: np.ndarray,
    budgets: Sequence[int],
    force_masks: bool = False,
) -> list[LayerRows]:
    """The rows of every layer, planned at once: one transfer to the device, no wait for it.

    Layer l computes the positions ``always`` and the ``candidates`` whose ``rank`` (from 0) is below
    ``budgets[l]``. Positions are ascending, budgets non-increasing.
    """
    never = len(candidates)  # tokens of exact chunks keep this
    order = np.full(prompt.tokens, never)
    order[candidates] = rank
    order[always] = -1
    arriving = np.arange(prompt.tokens)
    found: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for budget in dict.fromkeys(budgets):
        among = np.flatnonzero(order[arriving] < min(budget, never))
        arriving = arriving[among]
        found[budget] = arriving, among, arriving[order[arriving] >= 0]
    columns = [np.concatenate(column) for column in zip(*found.values(), strict=True)]
    sent = torch.from_numpy(np.concatenate(columns)).to(prompt.device)
    planned, among_all, chosen_all = sent.split([len(column) for column in columns])
    prompt.planned = Gathered(planned)
    layers: dict[int, LayerRows] = {}
    at = chosen_at = slice(0, 0)
    for budget, (host, _, chosen) in found.items():
        at = slice(at.stop, at.stop + len(host))
        chosen_at = slice(chosen_at.stop, chosen_at.stop + len(chosen))
        rows = Rows(planned[at], prompt, force_masks, host=host, stretch=at)
        layers[budget] = LayerRows(rows, among_all[at], chosen_all[chosen_at])
    return [layers[budget] for budget in budgets]


def _new_bias(sharing: int, rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """``[sharing, rows, keys]``, uninitialised, its rows :data:`ALIGNED`."""
    return like.new_empty((sharing, rows, -(-keys // ALIGNED) * ALIGNED))[:, :, :keys]


def aligned_zeros(rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """``[rows, keys]``, its rows :data:`ALIGNED`."""
    return _new_bias(1, rows, keys, like)[0].zero_()
