"""Layers that go on from a running state for a single token only, given several tokens.

The forwards of some layers ignore the state when they get several tokens (Jamba, transformers 5.23), but each
token alone is computed behind any state, and single tokens can be a batch. So a block of tokens runs as such
a batch, four times:

1. for what each token gives to the convolutions. This tells the inputs that they hold before each token;
2. from a state of zero, for the ``B`` of each token;
3. from a large state, for its ``A``. ``A · before + B``, in order, tells the state before each token;
4. from these states, for the outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from blendrag.model.linear_layers import LinearLayer, RunningStates, joined, with_states
from blendrag.model.sharing import replaced

#: Tokens of a batch: there is a state for each.
BLOCK_TOKENS = 64
#: The large state, in units of the largest number that a token adds: its rounding is that of ``A``.
PROBE = 2.0**12


@contextmanager
def going_on(layers: Sequence[LinearLayer]) -> Iterator[None]:
    """Within this context ``layers``, whose maps are decays, go on with several tokens, too."""
    with ExitStack() as patched:
        for layer in layers:
            forward = _in_blocks(layer, layer.mixer.forward)
            patched.enter_context(replaced(layer.mixer, "forward", forward))
        yield


def _in_blocks(layer: LinearLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((each for each in given if isinstance(each, Cache)), None)
        if cache is None:
            return forward(*args, **kwargs)
        before = layer.held(cache)
        tokens = next(t.shape[1] for t in given if isinstance(t, torch.Tensor) and t.ndim == 3)
        if tokens == 1 or not any(bool(s.any()) for states in before for s in states):
            return forward(*args, **kwargs)
        outputs = []
        for start in range(0, tokens, BLOCK_TOKENS):
            rows = slice(start, min(start + BLOCK_TOKENS, tokens))
            output, before = _Block(layer, forward, cache, args, kwargs, rows).run(before)
            outputs.append(output)
        layer.put(cache, before)
        return joined(outputs)

    return run


@dataclass(frozen=True)
class _Block:
    """Some tokens of one call of a layer's module."""

    layer: LinearLayer
    forward: Callable[..., Any]
    cache: Cache
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: slice

    def run(self, before: RunningStates) -> tuple[Any, RunningStates]:
        """The output of the tokens (``[1, n, D]``, or a tuple that begins with it) behind the states
        ``before``, and the states after them."""
        n = self.rows.stop - self.rows.start
        of_each = [s.expand(n, *s.shape[1:]) for s in before.recurrent]
        zeros = [torch.zeros_like(s) for s in of_each]
        held_inputs = [s.expand(n, *s.shape[1:]) for s in before.conv]
        _, after = self._single(zeros, held_inputs)
        # the inputs that each convolution holds before, between and after the tokens, [C, w + n]
        inputs = [
            torch.cat((old[0], new[..., -1].T), -1)
            for old, new in zip(before.conv, after.conv, strict=True)
        ]
        windows = [
            every.unfold(-1, old.shape[-1], 1)[:, :n].transpose(0, 1)  # [n, C, w]
            for every, old in zip(inputs, before.conv, strict=True)
        ]
        added = self._single(zeros, windows)[1].recurrent
        large = [torch.full_like(b, PROBE * (float(b.abs().max()) or 1.0)) for b in added]
        probed = self._single(large, windows)[1].recurrent
        states = [
            _in_order(old[0], (p.float() - b.float()) / size.float(), b)
            for old, p, b, size in zip(before.recurrent, probed, added, large, strict=True)
        ]
        output, after = self._single(states, windows)
        conv = (every[None, :, n:] for every in inputs)
        states_after = RunningStates(tuple(s[-1:] for s in after.recurrent), tuple(conv))
        if isinstance(output, tuple):
            return (output[0].transpose(0, 1), *output[1:]), states_after
        return output.transpose(0, 1), states_after

    def _single(
        self, recurrent: Sequence[torch.Tensor], conv: Sequence[torch.Tensor]
    ) -> tuple[Any, RunningStates]:
        """The output of each token ``[n, 1, D]`` behind its own states, and its states after it."""
        scratch = with_states(
            self.cache, self.layer.place, RunningStates(tuple(recurrent), tuple(conv))
        )

        def as_batch(value: Any) -> Any:
            if value is self.cache:
                return scratch
            if isinstance(value, tuple):
                return tuple(map(as_batch, value))
            is_rows = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == 1
            return value[:, self.rows].transpose(0, 1) if is_rows else value

        kwargs = {k: as_batch(v) for k, v in self.kwargs.items() if k != "attention_mask"}
        if "attention_mask" in self.kwargs:
            kwargs["attention_mask"] = None
        output = self.forward(*map(as_batch, self.args), **kwargs)
        return output, self.layer.held(scratch)


def _in_order(state: torch.Tensor, a: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The states before each token ``[n, …]``, of which the first is ``state``."""
    before = [state.float()]
    for decay, each in zip(a[:-1], added[:-1].float(), strict=True):
        before.append(decay * before[-1] + each)
    return torch.stack(before).to(state.dtype)
