"""The two forwards that distillation compares: a full prefill, and one over KV as a store would hold it.

::

    teacher   head + chunks + question   stock, one causal prefill; then its greedy answer
    student   head                stock
              first chunk         stock, directly behind the prefix, as it is stored for beginnings of prompts
              each other chunk    with the writer, directly behind the prefix; where chunks are encoded after
                                  similar ones, the mean of that and behind prefix and similar chunks, which
                                  are stock; keys move to their places
              all other tokens    stock, over that KV

All questions of a prompt share its chunks: their rows are in one forward, and none sees another question.
Several prompts may share a forward, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from blendrag.engine.kv_validity import BEHIND_SHARE
from blendrag.model.adapter import ModelAdapter
from blendrag.text.prompt import Segment
from blendrag_lab.distillation.prompts import ChunkPrompt

#: The group of tokens that every question's rows see, and that of padding, which none sees.
SHARED, PADDING = -1, -2
#: Prompts whose answers are decoded in one batch; more if a GPU has the memory.
TEACHER_BATCH = 4
#: Keys and values of one layer, each ``[B, Hkv, n, D]``.
LayerKV = tuple[torch.Tensor, torch.Tensor]


class Places(NamedTuple):
    """Where tokens stand: positions ``[…, n]``, and the number of their question ``[…, n]``,
    :data:`SHARED` or :data:`PADDING`."""

    positions: torch.Tensor
    groups: torch.Tensor

    def plus(self, other: Places) -> Places:
        return Places(
            torch.cat((self.positions, other.positions), dim=-1),
            torch.cat((self.groups, other.groups), dim=-1),
        )

    def cut(self, at: int) -> tuple[Places, Places]:
        """The first ``at`` places, and the others."""
        parts = slice(at), slice(at, None)
        first, rest = (Places(self.positions[..., p], self.groups[..., p]) for p in parts)
        return first, rest


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
    ) -> None:
        self.adapter, self._stock = adapter, stock
        self._prefix_ids = tuple(prefix_ids)
        self._answer_tokens = answer_tokens
        self.encode_batch = 0
        """Chunks whose activations are held at a time, which takes another forward; 0 holds those of all
        chunks."""
        self.teacher_batch = TEACHER_BATCH
        """Prompts whose answers are decoded in one batch."""
        self.student_batch = 1
        """Prompts whose students run in one forward, which keeps a GPU busy and takes memory for each."""
        self._heads: dict[tuple[int, ...], list[LayerKV]] = {}
        eos = adapter.model.generation_config.eos_token_id
        self.ends = {*eos} if isinstance(eos, list | tuple) else {eos}

    # -- teacher ------------------------------------------------------------------------------------

    @torch.no_grad()
    def teachers(self, prompts: Sequence[ChunkPrompt]) -> list[list[Target]]:
        """Full prefill of every question of each prompt and its greedy answer, decoded in one batch."""
        with self._stock():
            begun = [self._begun(prompt) for prompt in prompts]
            parts = [[[part] for part in logits] for _, _, logits in begun]
            answers: list[list[list[int]]] = [[[] for _ in prompt.tails] for prompt in prompts]
            going = [(b, q) for b, prompt in enumerate(prompts) for q in range(len(prompt.tails))]
            cache, keys = self._joined([(cache, keys) for cache, keys, _ in begun])
            del begun
            while True:
                last = torch.stack([parts[b][q][-1][-1] for b, q in going]).argmax(-1).tolist()
                for (b, q), token in zip(going, last, strict=True):
                    answers[b][q].append(token)
                going = [(b, q) for b, q in going if not self._is_over(answers[b][q])]
                if not going:
                    break
                logits, keys = self._next(prompts, answers, going, keys, cache)
                for b, q in going:
                    parts[b][q].append(logits[b, q][None])
        return [
            [Target(tuple(a), torch.cat(p)) for a, p in zip(*each, strict=True)]
            for each in zip(answers, parts, strict=True)
        ]

    def _begun(self, prompt: ChunkPrompt) -> tuple[DynamicCache, Places, Sequence[torch.Tensor]]:
        """KV of a prompt with all its tails, its places, and the logits ``[T, V]`` of each tail."""
        cache = self.adapter.prefill_at(prompt.shared_ids)
        keys = self._shared(range(prompt.end))
        rows = self._tail_places(prompt, [()] * len(prompt.tails))
        logits = self._logits([i for tail in prompt.tails for i in tail], rows, keys, cache)
        return cache, keys.plus(rows), logits.split([len(tail) for tail in prompt.tails])

    def _joined(self, begun: Sequence[tuple[DynamicCache, Places]]) -> tuple[DynamicCache, Places]:
        """One cache of several prompts, padded at the end, and the places ``[B, n]`` of its tokens."""
        places, longest = self._padded([places for _, places in begun])
        if len(begun) == 1:
            return begun[0][0], places
        joined = DynamicCache()
        for number, layers in enumerate(zip(*(cache.layers for cache, _ in begun), strict=True)):
            pairs = [(layer.keys, layer.values) for layer in layers]
            keys, values = (
                torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[-2])) for part in parts])
                for parts in zip(*pairs, strict=True)
            )
            joined.update(keys, values, number)
        return joined, places

    def _next(
        self,
        prompts: Sequence[ChunkPrompt],
        answers: Sequence[Sequence[Sequence[int]]],
        going: Sequence[tuple[int, int]],
        keys: Places,
        cache: DynamicCache,
    ) -> tuple[torch.Tensor, Places]:
        """Logits ``[B, Q, V]`` behind the last tokens of the answers that go on, and the places of all."""
        shape = len(prompts), max(len(prompt.tails) for prompt in prompts)
        ids, at, groups = ([[fill] * shape[1] for _ in prompts] for fill in (0, 0, PADDING))
        for b, q in going:
            said, prompt = answers[b][q], prompts[b]
            ids[b][q], groups[b][q] = said[-1], q
            at[b][q] = prompt.end + len(prompt.tails[q]) + len(said) - 1
        rows = Places(self._tensor(at), self._tensor(groups))
        keys = keys.plus(rows)
        return self._run(self._tensor(ids), rows, keys, cache), keys

    def _is_over(self, answer: Sequence[int]) -> bool:
        return len(answer) >= self._answer_tokens or answer[-1] in self.ends

    # -- student ------------------------------------------------------------------------------------

    def students(
        self,
        prompts: Sequence[ChunkPrompt],
        answers: Sequence[Sequence[Sequence[int]]],
        writes: bool = True,
    ) -> list[list[torch.Tensor]]:
        """Logits of the rows of :attr:`Target.logits` over stored KV, for each question of each prompt.

        ``writes``: whether chunks are encoded with the writer.
        """
        kv, keys = self.stored(prompts, writes)
        cache = DynamicCache()
        for layer, (layer_keys, values) in enumerate(kv):
            cache.update(layer_keys, values, layer)
        asked, lengths = [], []
        for prompt, given in zip(prompts, answers, strict=True):
            said = [tuple(answer[:-1]) for answer in given]
            ids = [i for _, i in prompt.between]
            ids += [i for t, more in zip(prompt.tails, said, strict=True) for i in (*t, *more)]
            rows = self._shared([at for at, _ in prompt.between])
            asked.append((self._tensor(ids), rows.plus(self._tail_places(prompt, said))))
            lengths.append([len(t) + len(more) for t, more in zip(prompt.tails, said, strict=True)])
        rows, longest = self._padded([places for _, places in asked])
        padded = torch.stack([F.pad(ids, (0, longest - len(ids))) for ids, _ in asked])
        with self._stock():
            logits = self._run(padded, rows, keys.plus(rows), cache)
        begins = [len(prompt.between) for prompt in prompts]
        return [
            list(each[begin : begin + sum(sizes)].split(sizes))
            for each, begin, sizes in zip(logits, begins, lengths, strict=True)
        ]

    def deviations(
        self,
        prompts: Sequence[ChunkPrompt],
        targets: Sequence[Sequence[Target]],
        writes: bool = True,
    ) -> list[list[Deviation]]:
        """How far the student is from the teacher, for each question of each prompt."""
        answers = [[target.answer for target in each] for each in targets]
        found = self.students(prompts, answers, writes)
        return [
            [_deviation(target, logits) for target, logits in zip(*pair, strict=True)]
            for pair in zip(targets, found, strict=True)
        ]

    def stored(self, prompts: Sequence[ChunkPrompt], writes: bool) -> tuple[list[LayerKV], Places]:
        """KV of heads and chunks at their places, ``[B, Hkv, n, D]``, and these places ``[B, n]``.

        The chunks of all prompts are encoded in one batch, or in batches of :attr:`encode_batch`.
        """
        heads = list(dict.fromkeys(prompt.head for prompt in prompts))
        begins = [self._head(head) for head in heads]
        firsts = [(n, prompt.chunks[0]) for n, prompt in enumerate(prompts)]
        others = [
            (n, chunk, context)
            for n, prompt in enumerate(prompts)
            for chunk, context in zip(prompt.chunks[1:], prompt.contexts[1:], strict=True)
        ]
        others.sort(key=lambda each: len(each[1].ids))
        numbered = [*firsts, *((n, chunk) for n, chunk, _ in others)]
        with torch.no_grad():
            alone = self._placed([chunk for _, chunk in firsts], [()] * len(firsts), writes=False)
        mixed = self._mixed([c for _, c, _ in others], [before for *_, before in others], writes)
        encoded = [
            (torch.cat((first[0], other[0]), dim=-2), torch.cat((first[1], other[1]), dim=-2))
            for first, other in zip(alone, mixed, strict=True)
        ]
        # where each prompt's tokens stand among those of all heads, then of all chunks
        sources: list[list[int]] = [[] for _ in prompts]
        places: list[list[int]] = [[] for _ in prompts]
        first = dict(zip(heads, _starts([len(head) for head in heads]), strict=True))
        for n, prompt in enumerate(prompts):
            sources[n] += range(first[prompt.head], first[prompt.head] + len(prompt.head))
            places[n] += range(len(prompt.head))
        begin = sum(map(len, heads))
        starts = _starts([len(chunk.ids) for _, chunk in numbered])
        for (n, chunk), start in zip(numbered, starts, strict=True):
            sources[n] += range(begin + start, begin + start + len(chunk.ids))
            places[n] += range(chunk.position, chunk.end)
        padded, longest = self._padded([self._shared(each) for each in places])
        # padding repeats tokens of its own prompt: gradients of one that all share would queue up on a GPU
        filled = [[each[i % len(each)] for i in range(longest)] for each in sources]
        index, shape = self._tensor(filled).flatten(), (len(prompts), longest)
        layers: list[LayerKV] = []
        for layer in range(len(begins[0])):
            keys, values = (
                torch.cat([*(head[layer][n] for head in begins), part], dim=-2)
                .index_select(-2, index)
                .unflatten(-2, shape)[0]
                .transpose(0, 1)
                for n, part in enumerate(encoded[layer])
            )
            layers.append((keys, values))
        return layers, padded

    def _mixed(
        self, chunks: Sequence[Segment], contexts: Sequence[tuple[int, ...]], writes: bool
    ) -> list[LayerKV]:
        """KV of ``chunks`` as a store would hold it, at their places, as :meth:`_placed` returns it."""
        encoded = self._placed(chunks, [()] * len(chunks), writes)
        if not any(contexts):
            return encoded
        behind = self._placed(chunks, contexts, writes)
        return [
            (keys.lerp(more_keys, BEHIND_SHARE), values.lerp(more_values, BEHIND_SHARE))
            for (keys, values), (more_keys, more_values) in zip(encoded, behind, strict=True)
        ]

    def _placed(
        self, chunks: Sequence[Segment], contexts: Sequence[tuple[int, ...]], writes: bool
    ) -> list[LayerKV]:
        """KV of ``chunks``, one after the other, each ``[1, Hkv, n, D]``, encoded behind the prefix and its
        context and moved to its place."""
        size = self.encode_batch or len(chunks)
        encoded = []
        for start in range(0, len(chunks), size):
            before, places_before = self._before(contexts[start : start + size])
            with self._in_own_precision() if writes else self._stock():
                encoded.append(self._encoded(chunks[start : start + size], before, places_before))
        skip = len(self._prefix_ids)
        at = [p for chunk in chunks for p in range(chunk.position, chunk.end)]
        own = [
            skip + len(context) + n
            for chunk, context in zip(chunks, contexts, strict=True)
            for n in range(len(chunk.ids))
        ]
        repositioner = self.adapter.repositioner
        tables = repositioner.tables(self._tensor(at) - self._tensor(own))
        layers: list[LayerKV] = []
        for layer in range(len(encoded[0])):
            parts = [torch.cat([each[layer][part] for each in encoded], dim=-2) for part in (0, 1)]
            turning = repositioner.part(layer)
            parts[turning] = repositioner.rotated(parts[turning], layer, tables)
            layers.append((parts[0], parts[1]))
        return layers

    def _padded(self, places: Sequence[Places]) -> tuple[Places, int]:
        """Places ``[B, n]`` of several prompts, padded at the end, and ``n``."""
        longest = max(len(each.positions) for each in places)
        padded = [
            (F.pad(at, (0, longest - len(at))), F.pad(of, (0, longest - len(of)), value=PADDING))
            for at, of in places
        ]
        return Places(*(torch.stack(both) for both in zip(*padded, strict=True))), longest

    @torch.no_grad()
    def _before(self, contexts: Sequence[tuple[int, ...]]) -> tuple[list[LayerKV], Places]:
        """Stock KV of the prefix and each of ``contexts``, ``[C, Hkv, n, D]``, and its places ``[C, n]``."""
        skip, longest = len(self._prefix_ids), max(map(len, contexts))
        prefix = self._head(self._prefix_ids) if self._prefix_ids else []
        expanded = [
            (keys.expand(len(contexts), -1, -1, -1), values.expand(len(contexts), -1, -1, -1))
            for keys, values in prefix
        ]
        places, _ = self._padded([self._shared(range(skip + len(ids))) for ids in contexts])
        if not longest:
            return expanded, places
        ids = self._tensor([[*each, *([0] * (longest - len(each)))] for each in contexts])  # [C, n]
        prefix_places, rows = places.cut(skip)
        with self._stock():
            cache = self._run_base(ids, rows, prefix_places.plus(rows), expanded)
        return [(layer.keys, layer.values) for layer in cache.layers], places

    def _encoded(
        self, chunks: Sequence[Segment], before: Sequence[LayerKV], places: Places
    ) -> list[LayerKV]:
        """KV of ``chunks``, one after the other, each ``[1, Hkv, n, D]``, behind what is ``before`` each."""
        longest = max(len(chunk.ids) for chunk in chunks)
        padded = [[*chunk.ids, *([chunk.ids[-1]] * (longest - len(chunk.ids)))] for chunk in chunks]
        ids = self._tensor(padded)  # [C, L]
        lengths = self._tensor([len(chunk.ids) for chunk in chunks])
        inside = torch.arange(longest, device=ids.device)[None] < lengths[:, None]  # [C, L]
        begins = (places.groups == SHARED).sum(-1, keepdim=True)  # [C, 1]
        positions = begins + torch.arange(longest, device=ids.device)
        rows = Places(positions, torch.full_like(positions, SHARED))
        skip = places.positions.shape[-1]

        def encode(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache = self._run_base(ids, rows, places.plus(rows), before)
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

    @property
    def prefix_tokens(self) -> int:
        """Tokens that every chunk is encoded behind."""
        return len(self._prefix_ids)

    def encoded_probe(self, tokens: int, context_tokens: int = 0) -> Any:
        """KV of a chunk of ``tokens`` tokens behind others, with all that its backward needs."""
        vocabulary = self.adapter.model.get_input_embeddings().num_embeddings
        ids = tuple(7 * i % vocabulary for i in range(tokens + context_tokens))
        before, places = self._before([ids[tokens:]])
        with self._in_own_precision():
            return self._encoded([Segment("", ids[:tokens], 0)], before, places)

    def _in_own_precision(self) -> AbstractContextManager[Any]:
        """The float32 weights of the writer are multiplied in the model's dtype."""
        dtype, device = self.adapter.layout.torch_dtype, self.adapter.device
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype)

    @torch.no_grad()
    def _head(self, ids: tuple[int, ...]) -> list[LayerKV]:
        """Stock KV of the beginning of a prompt."""
        if ids not in self._heads:
            with self._stock():
                cache = self.adapter.prefill_at(ids)
            self._heads[ids] = [(layer.keys, layer.values) for layer in cache.layers]
        return self._heads[ids]

    # -- rows ---------------------------------------------------------------------------------------

    def _logits(self, ids: Sequence[int], rows: Places, keys: Places, cache: Any) -> torch.Tensor:
        """Logits ``[n, V]`` of ``rows``, which see ``keys`` and each other."""
        rows, keys = (Places(at[None], of[None]) for at, of in (rows, keys))
        return self._run(self._tensor(ids)[None], rows, keys.plus(rows), cache)[0]

    def _run(self, ids: torch.Tensor, rows: Places, keys: Places, cache: Any) -> torch.Tensor:
        """Logits ``[B, n, V]`` of ``ids`` at ``rows``, which see ``keys``, themselves among these."""
        with self.adapter.own_tables():
            out = self.adapter.model(
                input_ids=ids,
                position_ids=rows.positions,
                past_key_values=cache,
                use_cache=True,
                attention_mask=self._masks(rows, keys),
            )
        logits: torch.Tensor = out.logits
        return logits

    def _run_base(
        self, ids: torch.Tensor, rows: Places, keys: Places, before: Sequence[LayerKV]
    ) -> DynamicCache:
        """The KV ``before`` and that of ``ids`` ``[C, n]`` at ``rows``, which see ``keys``."""
        cache = DynamicCache()
        for layer, parts in enumerate(before):
            cache.update(*parts, layer)
        with self.adapter.own_tables():
            self.adapter.stack.base(
                input_ids=ids,
                position_ids=rows.positions,
                past_key_values=cache,
                use_cache=True,
                attention_mask=self._masks(rows, keys),
            )
        return cache

    def _masks(self, rows: Places, keys: Places) -> Any:
        """As a model takes them: one, or one for each kind of its layers."""
        masks = {
            kind: self._mask(rows, keys, window)
            for kind, window in self.adapter.stack.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, rows: Places, keys: Places, window: Any) -> torch.Tensor:
        """Additive ``[B, 1, rows, keys]``. A row sees at least what all rows see before it."""
        at, group = rows.positions[..., None], rows.groups[..., None]
        seen = keys.positions[:, None] <= at
        seen &= (keys.groups[:, None] == SHARED) | (keys.groups[:, None] == group)
        if window is not None:
            seen &= keys.positions[:, None] >= window.first_seen(at)
        dtype = self.adapter.layout.torch_dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

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
        return torch.tensor(values, dtype=torch.long, device=self.adapter.device)


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each of several parts begins that follow each other."""
    return list(accumulate(lengths, initial=0))[:-1]


def _deviation(target: Target, student: torch.Tensor) -> Deviation:
    teacher, student = target.logits, student[-len(target.logits) :]
    expected, found = (t.log_softmax(-1, dtype=torch.float32) for t in (teacher, student))
    share = expected.exp()
    # a model may give tokens a logit of -inf, and the difference of two is not a number
    kl = (share * (expected - found).where(share > 0, 0.0)).sum(-1)  # [T + A - 1]
    answer = len(target.answer)
    agrees = teacher[-answer:].argmax(-1) == student[-answer:].argmax(-1)
    return Deviation(kl[:-answer], kl[-answer:], agrees)
