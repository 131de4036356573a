"""Several prompts laid one behind another for one forward, and what came out of it for each.

Owns the arithmetic of places and the replay: a prompt that was prefilled with others goes on as if its own
first forward had just been run, so that whatever follows (sampling, stop strings, processors) is the
model's own and knows nothing of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import BlendRequest, Fusion
from blendrag.fusor.pack import Pack
from blendrag.fusor.packed_rows import Place
from blendrag.model.adapter import ModelAdapter


@dataclass(frozen=True)
class Prompt:
    """One of several prompts to be prefilled together."""

    ids: torch.Tensor
    """``[1, N]``"""
    request: BlendRequest
    new_tokens: int = 0
    """Room for its answer."""
    check: Callable[[], None] | None = None
    """Called before each layer; raises to leave the others alone."""

    @property
    def capacity(self) -> int:
        """Tokens that its cache holds without growing."""
        return self.request.prompt_tokens + self.new_tokens + 1


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV is in ``cache``, all of it; the buffers are shared with those beside it."""

    cache: BlendCache
    fusion: Fusion
    output: Any
    """What the decoder would have returned: of ``last_hidden_state`` the last row, ``[1, 1, D]``."""

    @contextmanager
    def replayed(self, base: nn.Module) -> Iterator[BlendCache]:
        """Within this context the decoder's first forward is this prefill, done before.

        Yields the cache, empty until then: what asks how long the prompt in it is takes it for new.
        """
        tokens = self.fusion.prompt_tokens
        self.cache.show(0)
        with replayed(base, self.output, lambda: self.cache.show(tokens)):
            yield self.cache


class Packing:
    """The places of ``prompts``, their fusions and the input of one forward."""

    def __init__(self, adapter: ModelAdapter, prompts: Sequence[Prompt]) -> None:
        """Raises what a policy raises that cannot choose layer 0's tokens."""
        capacities = [prompt.capacity for prompt in prompts]
        lengths = [prompt.request.prompt_tokens for prompt in prompts]
        ids_at = accumulate(lengths[:-1], initial=0)
        keys_at = accumulate(capacities[:-1], initial=0)
        places = [Place(*at) for at in zip(ids_at, keys_at, strict=True)]
        self.cache = BlendCache(adapter.layout, sum(capacities), adapter.device)
        self._caches = [
            self.cache.part(place.keys_at, capacity)
            for place, capacity in zip(places, capacities, strict=True)
        ]
        fusions = [
            Fusion(prompt.request, cache, adapter.repositioner)
            for prompt, cache in zip(prompts, self._caches, strict=True)
        ]
        self.pack = Pack(fusions, self.cache, places, [prompt.check for prompt in prompts])
        self.ids = torch.cat([prompt.ids for prompt in prompts], dim=1)  # [1, ΣN]
        positions = [torch.arange(length, device=adapter.device) for length in lengths]
        self.position_ids = torch.cat(positions)[None]

    def outcomes(self, out: Any) -> list[Prefilled | Exception]:
        """What became of each prompt; ``out`` is the decoder's output, ``None`` if nobody was left."""
        failures = self.pack.failures
        rows = {} if out is None else {m: i for i, m in enumerate(self.pack.finished)}
        return [
            failures[member] if member in failures else self._prefilled(out, member, rows[member])
            for member in range(len(self._caches))
        ]

    def _prefilled(self, out: Any, member: int, row: int) -> Prefilled:
        cache = self._caches[member]
        cache.end_fusion()
        hidden = out.last_hidden_state[:, row : row + 1]  # [1, 1, D]
        output = type(out)(last_hidden_state=hidden, past_key_values=cache)
        return Prefilled(cache, self.pack.fusions[member], output)


@contextmanager
def replayed(
    base: nn.Module, output: Any, before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within this context this thread's first forward of ``base`` returns ``output``, after ``before()``.

    Forwards after it are the module's own, as are other threads', and every forward once the context
    is left.
    """
    own, stock, owner = vars(base).get("forward"), base.forward, threading.get_ident()

    def restore() -> None:
        if own is not None:
            base.forward = own
        else:
            vars(base).pop("forward", None)

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return stock(*args, **kwargs)
        restore()
        before()
        return output

    base.forward = forward
    try:
        yield
    finally:
        restore()
