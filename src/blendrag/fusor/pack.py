"""One or several prompts in one forward: their rows lie one after another in one sequence.

Every projection and MLP runs once over all rows, so weights are read once for all prompts. Each prompt has
its own :class:`Fusion` and cache, and its rows attend to its own keys only. A single prompt is a pack of one.

A prompt that fails, or whose caller has gone, leaves a pack of several: its rows are computed to the end of
the layer under way (of the last layer, to its K/V), and no other prompt sees them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from blendrag.fusor.cache import BlendCache
from blendrag.fusor.fusion import Fusion, Phase
from blendrag.fusor.request import BlendRequest
from blendrag.fusor.rows import AnyRows, PackedRows, Rows
from blendrag.fusor.scout import Observed, Scout, scouting
from blendrag.model.adapter import KVComplete
from blendrag.model.sharing import replaced
from blendrag.model.structure import DecoderStack

Among = torch.Tensor | None
"""Indices of rows among those that arrive at a layer; ``None``: all of them."""
RunLayer = Callable[[AnyRows, Among], None]
"""Runs the layer on rows until its K/V exist."""


class NoRowsLeft(Exception):
    """Ends a forward if no prompt has rows for the next layer. Never leaves the fusor."""


@dataclass(frozen=True)
class PackedPrompt:
    """One of several prompts to prefill in one forward."""

    ids: torch.Tensor
    """``[1, N]``"""
    request: BlendRequest
    new_tokens: int = 0
    """Room for its answer."""
    check: Callable[[], None] | None = None
    """Called before each layer; raises to leave the pack."""

    @property
    def capacity(self) -> int:
        """Tokens that its cache holds without growing."""
        return self.request.prompt_tokens + self.new_tokens + 1


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose forward was run; shares buffers with the rest of its pack. Replayed, it continues as if
    it had just been run, so that sampling, stop strings and processors are the model's own."""

    fusion: Fusion
    output: Any
    """What the decoder would have returned; ``last_hidden_state`` is the last row, ``[1, 1, D]``."""

    @contextmanager
    def replayed(self, base: nn.Module) -> Iterator[BlendCache]:
        """Within this context the decoder's first forward returns this prefill. Yields the cache, empty until
        then, because callers take its length for that of the prompt so far."""
        cache = self.fusion.cache
        cache.show(0)
        with replayed(base, self.output, lambda: cache.show(self.fusion.prompt_tokens)):
            yield cache


class Pack:
    """The fusions of the prompts in one forward, and the phase it is in."""

    def __init__(
        self,
        fusions: Sequence[Fusion],
        cache: BlendCache,
        last_row_only: bool,
        isolates_errors: bool = False,
    ) -> None:
        """``cache`` holds the buffers of all fusions. ``last_row_only``: the last layer returns only the
        output of each prompt's last token. ``isolates_errors``: an error of one prompt is kept in
        ``failures`` and the others go on."""
        self.fusions = fusions
        self.cache = cache
        self.phase = Phase.BLEND
        self.timeline = fusions[0].timeline if len(fusions) == 1 else None
        self.failures: dict[int, Exception] = {}
        """Why prompts left, by their number."""
        *self._token_starts, self.prompt_tokens = accumulate(
            (fusion.prompt_tokens for fusion in fusions), initial=0
        )
        """Where each prompt begins in the sequence that the model is given, and its length."""
        self._key_starts = [fusion.cache.start for fusion in fusions]
        self._keys_end = self._key_starts[-1] + fusions[-1].prompt_tokens
        self._last_row_only = last_row_only
        self._isolates_errors = isolates_errors
        self._rows: AnyRows | None = None
        """The rows whose K/V come next."""
        self._arriving: dict[int, tuple[int, int]] = {}
        """Where each prompt's rows begin and end among those that arrive at the next layer."""
        self._scouts: dict[int, Scout] = {}

    @contextmanager
    def _errors_of(self, member: int) -> Iterator[None]:
        """Errors raised within concern this prompt alone."""
        try:
            yield
        except Exception as exc:
            if not self._isolates_errors:
                raise
            # its frames hold this pack, and with it all buffers, until garbage is collected
            self.failures[member] = exc.with_traceback(None)
            self.fusions[member].close()

    def _present(self, layer: int) -> list[int]:
        """Prompts whose rows arrive and that need ``layer``."""
        over = [member for member, scout in self._scouts.items() if scout.ends_before(layer)]
        return [m for m in self._arriving if m not in self.failures and m not in over]

    @property
    def finished(self) -> list[int]:
        """The prompts whose last rows went through the last layer, in order."""
        assert self._rows is not None
        return [part.member for part in self._rows.parts]

    # -- the scout pass -----------------------------------------------------------------------

    @property
    def needs_scout(self) -> bool:
        return any(f.needs_scout for i, f in enumerate(self.fusions) if i not in self.failures)

    @contextmanager
    def scout_pass(self, stack: DecoderStack) -> Iterator[None]:
        """A forward within computes the fresh tokens of the prompts that need a scout, then they choose."""
        self.phase = Phase.SCOUT
        if self.timeline is not None:
            self.timeline.pass_name = "scout"
        for member, fusion in enumerate(self.fusions):
            if fusion.needs_scout:
                with self._errors_of(member):
                    self._scouts[member] = fusion.begin_scout()
        scouts = self._scouts
        try:
            with scouting(stack, self._observed), suppress(NoRowsLeft):
                yield
        finally:
            self.phase, self._rows, self._scouts = Phase.BLEND, None, {}
            if self.timeline is not None:
                self.timeline.pass_name = ""
        for member, scout in scouts.items():
            if member not in self.failures:
                with self._errors_of(member):
                    self.fusions[member].end_scout(scout)

    def _observed(self) -> list[Observed]:
        assert self._rows is not None
        return [
            Observed(self._scouts[member], slice(a, b), slice(lo, hi))
            for member, _, a, b, lo, hi in self._rows.parts
        ]

    # -- before a layer -----------------------------------------------------------------------

    def check(self, layer: int) -> None:
        """Whether prompts are abandoned before ``layer``; called before :meth:`enter_layer`."""
        if layer == 0:
            self._arriving = {
                member: (start, start + self.fusions[member].prompt_tokens)
                for member, start in enumerate(self._token_starts)
                if self.phase is not Phase.SCOUT or member in self._scouts
            }
        for member in self._present(layer):
            with self._errors_of(member):
                self.fusions[member].check()

    def enter_layer(self, layer: int, run: RunLayer) -> tuple[AnyRows, Among]:
        """Rows of ``layer``; ``run`` runs it before that, if its K/V are needed first."""
        self._peek(layer, run)
        if layer >= len(self.cache.layers):  # attends to KV of an earlier layer, and computes none
            assert self._rows is not None
            return self._rows, None
        rows, among = self._selected(layer)
        is_last = layer == len(self.cache.layers) - 1  # of those with KV
        if is_last and self._last_row_only and self.phase is Phase.BLEND:
            rows, among = self._keep_last_rows(layer, rows, among, run)
        self._arriving = {part.member: (part.a, part.b) for part in rows.parts}
        return rows, among

    def _peek(self, layer: int, run: RunLayer) -> None:
        """One peek for all prompts that need one."""
        if self.phase is Phase.SCOUT:
            return
        peeking = [m for m in self._present(layer) if self.fusions[m].needs_peek(layer)]
        if not peeking:
            return
        rows = self._packed({member: self.fusions[member].rows for member in peeking})
        self._run_to_kv(Phase.PEEK, run, rows, self._among_arriving(dict.fromkeys(peeking)))
        for member in peeking:
            if member not in self.failures:
                with self._errors_of(member):
                    self.fusions[member].end_peek()

    def _selected(self, layer: int) -> tuple[AnyRows, Among]:
        rows, indices = dict[int, Rows](), dict[int, Among]()
        for member in self._present(layer):
            with self._errors_of(member):
                rows[member], indices[member] = self.fusions[member].enter_layer(self.phase, layer)
        return self._packed(rows), self._among_arriving(indices)

    def _keep_last_rows(
        self, layer: int, rows: AnyRows, among: Among, run: RunLayer
    ) -> tuple[AnyRows, Among]:
        """After the K/V of all rows of the last layer, only each prompt's last row goes on."""
        self._run_to_kv(Phase.LAST_KV, run, rows, among)
        self.phase = Phase.LAST_ROW
        present = self._present(layer)
        last = self._packed({member: self.fusions[member].keep_last_row() for member in present})
        ends = [self._arriving[member][1] - 1 for member in present]
        if len(ends) == 1:  # no transfer to the device
            return last, last.positions.new_full((1,), ends[0])
        return last, torch.tensor(ends).to(last.positions.device, non_blocking=True)

    def _run_to_kv(self, phase: Phase, run: RunLayer, rows: AnyRows, among: Among) -> None:
        before, self.phase = self.phase, phase
        with suppress(KVComplete):
            run(rows, among)
        self.phase = before

    def _packed(self, rows: dict[int, Rows]) -> AnyRows:
        if not rows:
            raise NoRowsLeft
        if self._rows is None or {part.member: part.rows for part in self._rows.parts} != rows:
            if len(self.fusions) == 1:
                self._rows = rows[0]
            else:
                starts = self._token_starts, self._key_starts
                self._rows = PackedRows(rows, *starts, self.prompt_tokens)
        return self._rows

    def _among_arriving(self, indices: dict[int, Among]) -> Among:
        """Each prompt's indices among its own rows, as indices among all rows that arrive."""
        if len(indices) == len(self._arriving) and all(own is None for own in indices.values()):
            return None
        device = self.cache.layers[0].buffer.device
        found = []
        for member, own in indices.items():
            start, end = self._arriving[member]
            if own is None:
                own = torch.arange(end - start, device=device)
            found.append(own + start if start else own)
        return found[0] if len(found) == 1 else torch.cat(found)

    # -- inside a layer -----------------------------------------------------------------------

    def merge(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give every prompt its fresh K/V, of ``[1, Hkv, ΣS, D]``; returns the K and V to attend to: views of
        the buffers of all prompts ``[1, Hkv, C, D]``."""
        assert self._rows is not None
        for member, _, a, b, _, _ in self._rows.parts:
            if member not in self.failures:
                with self._errors_of(member):
                    fresh = keys[0, :, a:b], values[0, :, a:b]
                    self.fusions[member].take_kv(self.phase, layer, *fresh)
        if self.phase in (Phase.PEEK, Phase.LAST_KV):
            raise KVComplete
        buffer = self.cache.layers[layer].buffer[..., : self._keys_end, :]  # [2, 1, Hkv, C, D]
        return self.cache.shapes[layer].split(buffer)


def output_like(output: Any, cache: Any, **fields: Any) -> Any:
    """A model's output of the class of ``output`` with these ``fields``, and with ``cache`` if that has one
    (RecurrentGemma's has none)."""
    held = {name: cache for name in ("past_key_values",) if name in output}
    return type(output)(**fields, **held)


@contextmanager
def replayed(
    base: nn.Module, output: Any, before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within this context this thread's first forward of ``base`` returns ``output``, after ``before()``.

    Later forwards and those of other threads are the module's own.
    """
    stock, owner = base.forward, threading.get_ident()
    with ExitStack() as patched:

        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return stock(*args, **kwargs)
            patched.close()
            before()
            return output

        patched.enter_context(replaced(base, "forward", forward))
        yield
