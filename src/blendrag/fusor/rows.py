"""Which rows a layer computes, and what each of them may see.

A selected row *s* sees key *j* iff ``pos_j <= pos_s`` and, in a sliding-window layer,
``pos_s - pos_j < window``. A triangular mask aligned bottom-right would let selected rows see their
future. Built once per selection and shared by every layer that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

#: Rows per attention call. Fewer rows see fewer keys that all of them mask; more calls cost more.
BLOCK_ROWS = 96
#: In a long contiguous run the calls are big anyway.
RUN_ROWS = 512
#: What the biases of a prompt may take, folded.
FOLDED_BYTES = 64 << 20
#: Arguments of layers of which the rows are kept: a model with windows passes two tables and two masks.
KEPT = 6
#: Elements from one row of a bias to the next are a multiple of this: a GPU's kernels take no other, and
#: torch would copy it for every call.
ALIGNED = 16


class Block(NamedTuple):
    """Rows ``[a, b)`` attending keys ``[lo, hi)`` under ``bias`` ``[b-a, hi-lo]`` (0 or -inf).

    Folded, ``bias`` is ``[G·(b-a), hi-lo]``: for G query heads that share a KV head, one's rows behind
    another's.
    """

    a: int
    b: int
    lo: int
    hi: int
    bias: torch.Tensor

    def folded(self, sharing: int) -> Block:
        """The same for ``sharing`` query heads at a time."""
        rows, keys = self.bias.shape
        bias = _new_bias(sharing, rows, keys, self.bias)
        bias.copy_(self.bias)
        return self._replace(bias=bias.flatten(0, 1))


At = torch.Tensor | slice
"""Which tokens are taken of a tensor: their indices ``[S]``, or a stretch, which is a view."""
Gather = Callable[[Any, At], Any]
"""What an argument of a layer is for some of its tokens."""


class Gathered:
    """Arguments of decoder layers, gathered for some rows once: one layer after another passes the same."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Gather, Any]] = []

    def once(self, value: Any, gather: Gather, at: At) -> Any:
        """``gather(value, at)``, computed the first time."""
        for known, how, gathered in self._known:
            if known is value and how is gather:
                return gathered
        gathered = gather(value, at)
        self._known.append((value, gather, gathered))
        del self._known[:-KEPT]
        return gathered


class PromptRows:
    """What all rows of one prompt share: the numbers of its keys, and what is gathered for planned rows.

    ``planned`` ``[ΣS]`` are the positions of all layers' rows, where these are known before layer 0: then
    the arguments of layers are gathered once for all of them, and each layer takes its stretch.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.device = device
        self.planned: torch.Tensor | None = None
        self.gathered = Gathered()
        self._keys: torch.Tensor | None = None
        self._scalars: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def keys(self) -> torch.Tensor:
        """``[N]``: 0, 1, …"""
        if self._keys is None:
            self._keys = torch.arange(self.tokens, device=self.device)
        return self._keys

    def scalars(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """0 and -inf."""
        if dtype not in self._scalars:
            zero, infinite = torch.tensor([0.0, float("-inf")], dtype=dtype, device=self.device)
            self._scalars[dtype] = zero, infinite
        return self._scalars[dtype]


class Rows:
    """Prompt positions ``[S]`` computed in a layer, ascending, out of ``prompt_tokens`` keys."""

    def __init__(
        self,
        positions: torch.Tensor,
        prompt: PromptRows | int,
        force_masks: bool = False,
        is_last: bool = False,
        host: np.ndarray | None = None,
        stretch: slice | None = None,
    ) -> None:
        """``prompt`` is what the rows of one prompt share, or its number of tokens.

        ``is_last``: they are the prompt's last token. ``host``: the positions where asking the device for
        them costs nothing. ``stretch``: where they lie in ``prompt.planned``.
        """
        if isinstance(prompt, int):
            prompt = PromptRows(prompt, positions.device)
        self.positions = positions
        self.prompt_tokens = prompt.tokens
        self.count = positions.numel()
        self.attended = False
        """Whether the fast attention really ran over them."""
        self._prompt = prompt
        self._gathered = Gathered()
        self._force_masks = force_masks
        self._is_last = is_last
        self._host = host
        self._stretch = stretch
        self._blocks: dict[tuple[int | None, torch.dtype, int], list[Block]] = {}
        self._masks: dict[int | None, torch.Tensor] = {}
        self._biases: dict[tuple[int, int, int | None, torch.dtype, int], torch.Tensor] = {}

    def gather(self, value: Any, how: Gather, alone: bool = False) -> Any:
        """``how(value, at)`` of these rows, computed once for as many layers as pass the same ``value``.

        ``alone``: not for all planned rows at once, as that would take too much memory.
        """
        if self._stretch is None or alone:
            return self._gathered.once(value, how, self.positions)
        assert self._prompt.planned is not None
        planned = self._prompt.gathered.once(value, how, self._prompt.planned)
        return how(planned, self._stretch)

    @property
    def covers_prompt(self) -> bool:
        """Whether plain causality describes these rows; never while masks are forced."""
        return self.count == self.prompt_tokens and not self._force_masks

    def blocks(self, window: int | None, dtype: torch.dtype, sharing: int = 1) -> list[Block]:
        """The attention calls of a layer with that sliding window (``None``: full attention).

        Folded where ``sharing`` query heads share a KV head: of a long prompt, as many as take no more
        than :data:`FOLDED_BYTES`.
        """
        key = (window, dtype, sharing)
        if key not in self._blocks:
            self._blocks[key] = self._cut(window, dtype, sharing)
        return self._blocks[key]

    def mask(self) -> torch.Tensor:
        """The same as one boolean mask ``[1, 1, S, N]``, True = visible: the slow reference."""
        return self.visible(None)

    def visible(self, window: int | None) -> torch.Tensor:
        """:meth:`mask` of a layer with that sliding window."""
        if window not in self._masks:
            hidden = self._hidden(slice(None), slice(None), window)
            self._masks[window] = hidden.logical_not_()[None, None]
        return self._masks[window]

    def bias(
        self, a: int, b: int, window: int | None, dtype: torch.dtype, sharing: int = 1
    ) -> torch.Tensor:
        """Rows ``[a, b)`` as one block over all keys, ``[sharing·(b-a), N]``: 0 or -inf."""
        key = (a, b, window, dtype, sharing)
        if key not in self._biases:
            hidden = self._hidden(slice(a, b), slice(None), window)
            self._biases[key] = self._bias(hidden, dtype, sharing)
        return self._biases[key]

    def _cut(self, window: int | None, dtype: torch.dtype, sharing: int) -> list[Block]:
        n = self.prompt_tokens
        if self._is_last:  # sees all that its window lets it
            lo = max(0, n - (window or n))
            seen = torch.zeros((sharing, n - lo), dtype=dtype, device=self.positions.device)
            return [Block(0, 1, lo, n, seen)]
        blocks = []
        left = FOLDED_BYTES
        for a, b, lo, hi in self._edges(window, dtype, sharing):
            left -= sharing * (b - a) * (hi - lo) * dtype.itemsize
            folds = sharing if left >= 0 else 1
            hidden = self._hidden(slice(a, b), slice(lo, hi), window)
            blocks.append(Block(a, b, lo, hi, self._bias(hidden, dtype, folds)))
        return blocks

    def _edges(
        self, window: int | None, dtype: torch.dtype, sharing: int
    ) -> list[tuple[int, int, int, int]]:
        """Rows ``[a, b)`` and keys ``[lo, hi)`` of each attention call.

        On a CPU, rows in small blocks: of the keys that all rows of a block are hidden from, none is
        multiplied. A GPU masks them as fast as it multiplies, and each call costs a launch: blocks as large
        as their biases may be, over all keys where the device would have to be asked which are seen.
        """
        n, on_cpu = self.prompt_tokens, self.positions.device.type == "cpu"
        step = RUN_ROWS if self.count > 0.6 * n else BLOCK_ROWS
        if not on_cpu:
            step = max(step, FOLDED_BYTES // (sharing * n * dtype.itemsize))
        host = self.positions.numpy() if on_cpu and self._host is None else self._host
        edges = []
        for a in range(0, self.count, step):
            b = min(a + step, self.count)
            lo, hi = 0, n
            if host is not None:
                hi = int(host[b - 1]) + 1
                lo = 0 if window is None else max(0, int(host[a]) - window + 1)
            edges.append((a, b, lo, hi))
        return edges

    def _hidden(self, rows: slice, keys: slice, window: int | None) -> torch.Tensor:
        """``[s, k]``: True where a row must not see a key."""
        at, keys_at = self.positions[rows, None], self._prompt.keys[None, keys]
        hidden = keys_at > at
        if window is not None:
            hidden |= at - keys_at >= window
        return hidden

    def _bias(self, hidden: torch.Tensor, dtype: torch.dtype, sharing: int) -> torch.Tensor:
        """``hidden`` ``[s, k]`` as 0 or -inf, ``[sharing·s, k]``, its rows :data:`ALIGNED`."""
        seen, masked = self._prompt.scalars(dtype)
        rows, keys = hidden.shape
        bias = _new_bias(sharing, rows, keys, seen)
        torch.where(hidden.expand(sharing, -1, -1), masked, seen, out=bias)
        return bias.flatten(0, 1)


def _new_bias(sharing: int, rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """``[sharing, rows, keys]``, uninitialised, its rows :data:`ALIGNED`."""
    return like.new_empty((sharing, rows, -(-keys // ALIGNED) * ALIGNED))[:, :, :keys]


class LayerRows(NamedTuple):
    """What a layer computes, planned before layer 0."""

    rows: Rows
    among: torch.Tensor
    """Indices of its rows among those of the layer before, or of the prompt ``[S]``."""
    chosen: torch.Tensor
    """Those of them that are candidates ``[n]``."""


def nested_rows(
    prompt: PromptRows,
    always: np.ndarray,
    candidates: np.ndarray,
    rank: np.ndarray,
    budgets: Sequence[int],
    force_masks: bool = False,
) -> list[LayerRows]:
    """The rows of every layer, planned at once.

    Layer l computes the positions ``always`` and the ``candidates`` whose ``rank`` (from 0) is below
    ``budgets[l]``; positions are ascending, budgets do not rise. One transfer to the device, no wait for it.
    """
    order = np.full(prompt.tokens, len(candidates))  # neither always computed nor a candidate
    order[candidates] = rank
    order[always] = -1
    arriving = np.arange(prompt.tokens)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for budget in dict.fromkeys(budgets):
        among = np.flatnonzero(order[arriving] < min(budget, len(candidates)))
        arriving = arriving[among]
        found.append((arriving, among, arriving[order[arriving] >= 0]))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    sent = torch.from_numpy(np.concatenate(columns)).to(prompt.device)
    prompt.planned, among_all, alive_all = sent.split([len(column) for column in columns])
    layers: dict[int, LayerRows] = {}
    start = alive_start = 0
    for budget, (host, _, alive) in zip(dict.fromkeys(budgets), found, strict=True):
        at = slice(start, start + len(host))
        alive_at = slice(alive_start, alive_start + len(alive))
        rows = Rows(prompt.planned[at], prompt, force_masks, host=host, stretch=at)
        layers[budget] = LayerRows(rows, among_all[at], alive_all[alive_at])
        start, alive_start = at.stop, alive_at.stop
    return [layers[budget] for budget in budgets]
