"""The two forwards that distillation compares: a full prefill, and one over KV as a store would hold it.

::

    teacher   head + chunks + question   stock, one causal prefill; then its greedy answer
    student   head                stock
              each chunk          with the writer, directly behind the prefix; then keys move to their places
              all other tokens    stock, over that KV

All questions of a prompt share its chunks: their rows stand in one forward, each blind to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from blendrag.distillation.prompts import ChunkPrompt
from blendrag.model.adapter import ModelAdapter
from blendrag.text.prompt import Segment

#: The group of tokens that every question's rows see.
SHARED = -1
#: Keys and values of one layer, each ``[B, Hkv, n, D]``.
LayerKV = tuple[torch.Tensor, torch.Tensor]


class Places(NamedTuple):
    """Where tokens stand: positions ``[n]``, and the number of their question ``[n]`` or :data:`SHARED`."""

    positions: torch.Tensor
    groups: torch.Tensor

    def plus(self, other: Places) -> Places:
        return Places(
            torch.cat((self.positions, other.positions)), torch.cat((self.groups, other.groups))
        )


class Target(NamedTuple):
    """What full prefill says to one question."""

    answer: tuple[int, ...]
    """Its greedy continuation."""
    logits: torch.Tensor
    """``[T + A - 1, V]``: of the rows of the tail, then of the answer without its last token. Or only the
    last ``A`` of these, which the answer's tokens are taken from."""


@dataclass(frozen=True)
class Deviation:
    """How far the student is from the teacher on one question."""

    question: torch.Tensor
    """KL in nats of the rows of the tail before the last, ``[T - 1]``; of those that the target has."""
    answer: torch.Tensor
    """KL in nats of the rows that the answer's tokens are taken from, ``[A]``."""
    agrees: torch.Tensor
    """Whether the greedy token is the teacher's, bool ``[A]``."""


class Forwards:
    """Both forwards of one model. ``stock()`` is a context in which the writer is not active."""

    def __init__(
        self,
        adapter: ModelAdapter,
        prefix_ids: Sequence[int],
        stock: Callable[[], AbstractContextManager[Any]],
        answer_tokens: int,
        encode_batch: int = 0,
    ) -> None:
        """``encode_batch``: chunks whose activations are held at a time, which takes another forward;
        0 holds those of all chunks of a prompt."""
        self._adapter, self._stock = adapter, stock
        self._prefix_ids = tuple(prefix_ids)
        self._answer_tokens = answer_tokens
        self.encode_batch = encode_batch
        self._heads: dict[tuple[int, ...], list[LayerKV]] = {}
        eos = adapter.model.generation_config.eos_token_id
        self._ends = {*eos} if isinstance(eos, list | tuple) else {eos}

    # -- teacher ------------------------------------------------------------------------------------

    @torch.no_grad()
    def teacher(self, prompt: ChunkPrompt) -> list[Target]:
        """Full prefill of every question and its greedy answer."""
        with self._stock():
            cache = self._adapter.prefill_at(prompt.shared_ids)
            keys = self._shared(range(prompt.end))
            rows = self._tail_places(prompt, [()] * len(prompt.tails))
            ids = [i for tail in prompt.tails for i in tail]
            found = self._logits(ids, rows, keys, cache)
            parts = [[part] for part in found.split([len(tail) for tail in prompt.tails])]
            keys = keys.plus(rows)
            answers: list[list[int]] = [[] for _ in prompt.tails]
            going = list(range(len(prompt.tails)))
            while True:
                for n in going:
                    answers[n].append(int(parts[n][-1][-1].argmax()))
                going = [n for n in going if not self._is_over(answers[n])]
                if not going:
                    break
                at = [prompt.end + len(prompt.tails[n]) + len(answers[n]) - 1 for n in going]
                rows = Places(self._tensor(at), self._tensor(going))
                keys = keys.plus(rows)
                step = self._logits([answers[n][-1] for n in going], rows, keys, cache, True)
                for n, logits in zip(going, step, strict=True):
                    parts[n].append(logits[None])
        return [Target(tuple(a), torch.cat(p)) for a, p in zip(answers, parts, strict=True)]

    def _is_over(self, answer: Sequence[int]) -> bool:
        return len(answer) >= self._answer_tokens or answer[-1] in self._ends

    # -- student ------------------------------------------------------------------------------------

    def student(
        self, prompt: ChunkPrompt, answers: Sequence[Sequence[int]], writes: bool = True
    ) -> list[torch.Tensor]:
        """Logits of the rows of :attr:`Target.logits` over stored KV, for each question.

        ``writes``: whether chunks are encoded with the writer.
        """
        kv, places = self.stored(prompt, writes)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(kv):
            cache.update(keys, values, layer)
        said = [tuple(answer[:-1]) for answer in answers]
        asked = self._tail_places(prompt, said)
        ids = [i for _, i in prompt.between]
        rows = self._shared([at for at, _ in prompt.between]).plus(asked)
        ids += [i for tail, more in zip(prompt.tails, said, strict=True) for i in (*tail, *more)]
        with self._stock():
            logits = self._logits(ids, rows, places, cache)
        lengths = [len(t) + len(more) for t, more in zip(prompt.tails, said, strict=True)]
        return list(logits[len(prompt.between) :].split(lengths))

    def deviations(
        self, prompt: ChunkPrompt, targets: Sequence[Target], writes: bool = True
    ) -> list[Deviation]:
        answers = [target.answer for target in targets]
        found = self.student(prompt, answers, writes)
        return [_deviation(target, logits) for target, logits in zip(targets, found, strict=True)]

    def stored(self, prompt: ChunkPrompt, writes: bool) -> tuple[list[LayerKV], Places]:
        """KV of head and chunks at their places, ``[1, Hkv, n, D]``, and these places."""
        chunks = sorted(prompt.chunks, key=lambda chunk: len(chunk.ids))
        size = self.encode_batch or len(chunks)
        batches = [chunks[at : at + size] for at in range(0, len(chunks), size)]
        head = self._head(prompt.head)
        prefix = self._head(self._prefix_ids) if self._prefix_ids else None
        with self._in_own_precision() if writes else self._stock():
            encoded = [self._encoded(batch, prefix) for batch in batches]
        skip = len(self._prefix_ids)
        at = [p for chunk in chunks for p in range(chunk.position, chunk.end)]
        own = [skip + n for chunk in chunks for n in range(len(chunk.ids))]
        positions = self._tensor(at)
        repositioner = self._adapter.repositioner
        tables = repositioner.tables(positions - self._tensor(own))
        layers: list[LayerKV] = []
        for layer, start in enumerate(head):
            parts = [torch.cat([each[layer][part] for each in encoded], dim=-2) for part in (0, 1)]
            turning = repositioner.part(layer)
            parts[turning] = repositioner.rotated(parts[turning], layer, tables)
            keys, values = (torch.cat(both, dim=-2) for both in zip(start, parts, strict=True))
            layers.append((keys, values))
        return layers, self._shared([*range(len(prompt.head)), *at])

    def _encoded(self, chunks: Sequence[Segment], prefix: list[LayerKV] | None) -> list[LayerKV]:
        """KV of ``chunks``, one after the other, each ``[1, Hkv, n, D]`` at positions behind the prefix."""
        longest = max(len(chunk.ids) for chunk in chunks)
        padded = [[*chunk.ids, *([chunk.ids[-1]] * (longest - len(chunk.ids)))] for chunk in chunks]
        ids = self._tensor(padded)  # [C, L]
        lengths = self._tensor([len(chunk.ids) for chunk in chunks])
        inside = torch.arange(longest, device=ids.device)[None] < lengths[:, None]  # [C, L]
        skip = len(self._prefix_ids)

        def encode(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache = DynamicCache()
            for layer, parts in enumerate(prefix or ()):
                keys, values = (part.expand(len(ids), -1, -1, -1) for part in parts)
                cache.update(keys, values, layer)
            positions = skip + torch.arange(longest, device=ids.device)[None]
            with self._adapter.own_tables():
                self._adapter.stack.base(
                    input_ids=ids,
                    position_ids=positions.expand(len(ids), -1),
                    past_key_values=cache,
                    use_cache=True,
                )
            return tuple(
                part[:, :, skip:].transpose(1, 2)[inside].transpose(0, 1)[None]  # [1, Hkv, n, D]
                for layer in cache.layers
                for part in (layer.keys, layer.values)
            )

        if self.encode_batch and torch.is_grad_enabled():
            flat = checkpoint(encode, ids, use_reentrant=False, preserve_rng_state=False)
        else:
            flat = encode(ids)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def encoded_probe(self, tokens: int) -> Any:
        """KV of a chunk of ``tokens`` tokens, with all that its backward needs."""
        vocabulary = self._adapter.model.get_input_embeddings().num_embeddings
        ids = tuple(7 * i % vocabulary for i in range(tokens))
        prefix = self._head(self._prefix_ids) if self._prefix_ids else None
        with self._in_own_precision():
            return self._encoded([Segment("", ids, 0)], prefix)

    def _in_own_precision(self) -> AbstractContextManager[Any]:
        """The float32 weights of the writer are multiplied in the model's dtype."""
        dtype, device = self._adapter.layout.torch_dtype, self._adapter.device
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype)

    @torch.no_grad()
    def _head(self, ids: tuple[int, ...]) -> list[LayerKV]:
        """Stock KV of the beginning of a prompt."""
        if ids not in self._heads:
            with self._stock():
                cache = self._adapter.prefill_at(ids)
            self._heads[ids] = [(layer.keys, layer.values) for layer in cache.layers]
        return self._heads[ids]

    # -- rows ---------------------------------------------------------------------------------------

    def _logits(
        self, ids: Sequence[int], rows: Places, keys: Places, cache: Any, added: bool = False
    ) -> torch.Tensor:
        """Logits ``[n, V]`` float32 of ``rows``, which see ``keys`` and each other. ``added``: whether
        ``keys`` has the rows already."""
        seen = keys if added else keys.plus(rows)
        stack = self._adapter.stack
        masks = {kind: self._mask(rows, seen, window) for kind, window in stack.windows.items()}
        with self._adapter.own_tables():
            out = self._adapter.model(
                input_ids=self._tensor(ids)[None],
                position_ids=rows.positions[None],
                past_key_values=cache,
                use_cache=True,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def _mask(self, rows: Places, keys: Places, window: Any) -> torch.Tensor:
        """Additive ``[1, 1, rows, keys]``."""
        at, group = rows.positions[:, None], rows.groups[:, None]
        seen = keys.positions[None] <= at
        seen &= (keys.groups[None] == SHARED) | (keys.groups[None] == group)
        if window is not None:
            seen &= keys.positions[None] >= window.first_seen(at)
        dtype = self._adapter.layout.torch_dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]

    def _tail_places(self, prompt: ChunkPrompt, said: Sequence[Sequence[int]]) -> Places:
        """Places of every tail and what was answered to it."""
        lengths = [len(t) + len(more) for t, more in zip(prompt.tails, said, strict=True)]
        return Places(
            self._tensor([prompt.end + i for length in lengths for i in range(length)]),
            self._tensor([n for n, length in enumerate(lengths) for _ in range(length)]),
        )

    def _shared(self, positions: Sequence[int]) -> Places:
        at = self._tensor(list(positions))
        return Places(at, torch.full_like(at, SHARED))

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._adapter.device)


def _deviation(target: Target, student: torch.Tensor) -> Deviation:
    teacher, student = target.logits, student[-len(target.logits) :]
    expected, found = teacher.log_softmax(-1), student.log_softmax(-1)
    share = expected.exp()
    # a model may give tokens a logit of -inf, and the difference of two is not a number
    kl = (share * (expected - found).where(share > 0, 0.0)).sum(-1)  # [T + A - 1]
    answer = len(target.answer)
    agrees = teacher[-answer:].argmax(-1) == student[-answer:].argmax(-1)
    return Deviation(kl[:-answer], kl[-answer:], agrees)
