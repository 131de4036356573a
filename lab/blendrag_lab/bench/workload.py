"""What benches measure: a prompt of random chunks and a question, and the ways to its first token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any

import torch
import typer

from blendrag.cli.output import count
from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE, Mode
from blendrag.errors import InvalidInputError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.composer import ComposedPrompt, Composer
from blendrag.fusor.fusion import Fusion
from blendrag.fusor.request import FusionCounts
from blendrag.fusor.selection import Blending, Schedule, policy_names
from blendrag.model import ModelAdapter
from blendrag.planning.controller import Controller
from blendrag.planning.plan import Plan
from blendrag.store.base import Probe
from blendrag.store.encodings import ENCODINGS, stored_chunk_bytes
from blendrag.store.identity import NATIVE_ENCODING, chunk_key
from blendrag.store.kv import ChunkKV
from blendrag.text.prompt import Segment, SegmentedPrompt
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import Count, Ratio, Rounds, machine_of, without_place
from blendrag_lab.bench.rounds import Tick, milliseconds
from blendrag_lab.bench.tiers import BenchTier, TierStore, tier_store

#: The prefix that chunks are encoded after. The prompt starts with a chunk, so no chunk is exact.
PREFIX_IDS = (1,)
#: Room for the answer in a blended cache, in tokens.
NEW_TOKENS = 32
#: Options of a prefill that computes only the question.
REUSE: dict[str, Any] = {"mode": "reuse", "policy": "reuse", "ratio": 0.0}


@dataclass(frozen=True)
class Workload:
    """A prompt of chunks and a question, how it is blended, and how its KV is stored."""

    chunks: Count = 6
    chunk_tokens: Count = 512
    question_tokens: Count = 32
    ratio: Ratio = 0.15
    policy: Annotated[str, typer.Option(help=f"{policy_names()}.")] = DEFAULT_POLICY
    schedule: Annotated[
        str, typer.Option(help="constant, linear, geometric[:g], first:m or one per layer.")
    ] = DEFAULT_SCHEDULE
    rounds: Rounds = 5
    encoding: Annotated[
        str, typer.Option("--kv-encoding", help="How KV is stored: native or int8.")
    ] = NATIVE_ENCODING

    @property
    def chunks_end(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.chunks_end + self.question_tokens

    def check(self, adapter: ModelAdapter) -> None:
        """Raise :class:`InvalidInputError` if this cannot be measured on the model."""
        if self.encoding not in ENCODINGS:
            raise InvalidInputError(
                f"kv_encoding {self.encoding!r} is not one of {', '.join(ENCODINGS)}; choose one of them"
            )
        if self.prompt_tokens > adapter.context_tokens:
            raise InvalidInputError(
                f"a prompt of {self.prompt_tokens} tokens exceeds the context of "
                f"{adapter.context_tokens}; take fewer or shorter chunks"
            )


@dataclass(frozen=True, kw_only=True)
class BlendResult:
    """What results of benches that blend say about their run."""

    machine: str
    model: str
    policy: str
    schedule: str
    ratio: float
    tier: str
    encoding: str
    rounds: int

    @property
    def about(self) -> str:
        """The run in words."""
        return (
            f"{self.model}, policy {self.policy} at r = {self.ratio:.3g}, schedule {self.schedule}, "
            f"{self.encoding} KV from {self.tier}, {count(self.rounds, 'round')}"
        )


def conditions(adapter: ModelAdapter, workload: Workload, tier: str) -> dict[str, Any]:
    return {
        "machine": machine_of(adapter),
        "model": without_place(adapter.model_id),
        "policy": workload.policy,
        "schedule": str(Schedule.parse(workload.schedule)),
        "ratio": workload.ratio,
        "tier": tier,
        "encoding": workload.encoding,
        "rounds": workload.rounds,
    }


def whole_numbers(text: str, what: str, example: str) -> list[int]:
    """``"1,2,4"`` → numbers; raises :class:`InvalidInputError`, which calls them ``what``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InvalidInputError(
            f"{what} {text!r}: expected comma-separated whole numbers of 1 or more, such as {example}"
        )
    return [int(part) for part in parts]


def parse_ratios(text: str) -> list[float]:
    """``"0.1,0.5"`` → numbers in [0, 1]; raises :class:`InvalidInputError`."""
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0.0 <= ratio <= 1.0 for ratio in ratios):
        raise InvalidInputError(f"ratio {text!r}: expected comma-separated numbers in [0, 1]")
    return ratios


def random_ids(adapter: ModelAdapter) -> Callable[[int], tuple[int, ...]]:
    """A function that returns so many further random ids."""
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    return lambda n: tuple(torch.randint(2, vocab, (n,), generator=generator).tolist())


def random_prompt(adapter: ModelAdapter, workload: Workload) -> SegmentedPrompt:
    workload.check(adapter)
    next_ids, segments = random_ids(adapter), list[Segment]()
    for number in range(workload.chunks):
        ids = next_ids(workload.chunk_tokens)
        segments.append(Segment("", ids, number * len(ids), f"chunk-{number}", ids))
    question = next_ids(workload.question_tokens)
    return SegmentedPrompt((*segments, Segment("", question, workload.chunks_end)))


def stock_prefill(adapter: ModelAdapter, ids: torch.Tensor, **more: Any) -> int:
    """First token after a stock forward over ``ids`` ``[1, N]`` that computes only the last logits."""
    out = adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1, **more)
    return int(out.logits[0, -1].argmax())


class PromptBench:
    """One random prompt over stored chunks, and the ways to its first token."""

    def __init__(self, adapter: ModelAdapter, workload: Workload, there: TierStore) -> None:
        adapter.require_blendable()
        self.adapter, self.workload, self.there = adapter, workload, there
        namespace = adapter.identity.encoded(workload.encoding).namespace
        self.controller = Controller(
            adapter, there.store, namespace, PREFIX_IDS, 1, workload.encoding
        )
        self.prompt = random_prompt(adapter, workload)
        self.prompt_tokens = workload.prompt_tokens
        self.ids = torch.tensor([self.prompt.ids], device=adapter.device)  # [1, N]
        there.store.agrees(namespace, self._probe, create=True)
        for segment in self.prompt.chunks:
            key = chunk_key(namespace, PREFIX_IDS, segment.stored_ids)
            there.store.put(namespace, key, self._encoded(PREFIX_IDS, segment.stored_ids))
        layout = adapter.layout.encoded(workload.encoding)
        self.kv_bytes = workload.chunks * stored_chunk_bytes(layout, workload.chunk_tokens)
        """Size of all chunks as stored."""
        self.state_bytes = workload.chunks * layout.size_bytes(0)
        """Of that, what is stored of running states, which does not grow with a chunk."""

    def _probe(self) -> Probe:
        """What a remote needs before it takes KV. It is not compared: a bench reads only its own KV."""
        kv = self._encoded((), PREFIX_IDS)
        return Probe(kv.layout, kv.tokens, lambda: kv, lambda reader: True)

    def _encoded(self, prefix: Sequence[int], ids: Sequence[int]) -> ChunkKV:
        kv = self.adapter.encode(prefix, ids)
        return replace(kv, layout=kv.layout.encoded(self.workload.encoding))

    @cached_property
    def fusor(self) -> Fusor:
        """Raises :class:`UnsupportedModelError` for a model whose chunks are reused whole."""
        return Fusor(self.adapter)

    @cached_property
    def composer(self) -> Composer:
        """For such a model."""
        return Composer(self.adapter)

    @contextmanager
    def opened(
        self,
        controller: Controller | None = None,
        mode: Mode = "blend",
        policy: str | None = None,
        ratio: Ratio | None = None,
        schedule: str | None = None,
    ) -> Iterator[Plan]:
        """Open every chunk of the prompt in the store, to be blended as the workload says by default."""
        workload = self.workload
        blending = Blending.of(
            policy or workload.policy,
            schedule or workload.schedule,
            workload.ratio if ratio is None else ratio,
            workload.ratio,
        )
        planned = (controller or self.controller).plan(self.prompt, mode, blending)
        with closing(planned) as plan:
            if plan.missing:
                raise InvalidInputError("a bench chunk is no longer in the store; run again")
            yield plan

    def timer(self, way: Callable[..., object], *args: Any, **options: Any) -> Callable[[], float]:
        """Times one call of ``way`` with the KV in its tier, in milliseconds."""

        def timed() -> float:
            self.there.prepare()
            return milliseconds(partial(way, *args, **options), self.adapter.device)

        return timed

    def full(self) -> int:
        return stock_prefill(self.adapter, self.ids)

    def reuse(self) -> int:
        """Load all chunks and compute only the question."""
        if self.adapter.fuses:
            return self.blend(**REUSE)[0]
        return self.compose(0.0)[0]

    def compose(self, ratio: Ratio) -> tuple[int, ComposedPrompt]:
        """The first token of a model whose chunks are reused or recomputed as a whole, about a share
        ``ratio`` of them, and its prefill."""
        with self.opened(**REUSE) as plan:
            prompt = self.composer.prefill(self.ids, plan.spans, ratio, plan.chunks_end)
            with prompt.replayed(self.adapter.stack.base) as cache:
                return stock_prefill(self.adapter, self.ids, past_key_values=cache), prompt

    def blend(self, **options: Any) -> tuple[int, Fusion]:
        """Load all chunks and recompute as the workload says; ``options`` as in :meth:`opened`."""
        with self.opened(**options) as plan:
            return self.prefill(plan.request(self.prompt_tokens))

    def prefill(self, request: BlendRequest) -> tuple[int, Fusion]:
        """The first token of a blended prefill of the prompt."""
        logits, _, fusion = self.fusor.prefill(self.ids, request, NEW_TOKENS)
        return int(logits[0, -1].argmax()), fusion

    def floor_speedup(self, counts: FusionCounts) -> float:
        """L·N over the rows computed in all layers: the speedup that the row counts alone allow."""
        return len(counts.rows) * self.prompt_tokens / sum(counts.rows)


@contextmanager
def prompt_bench(
    timed: TimedModel, workload: Workload, tier: BenchTier, tick: Tick
) -> Iterator[PromptBench]:
    """A prompt whose chunks are in a temporary store of ``tier``."""
    adapter = timed.adapter
    with tier_store(tier) as there:
        tick("encoding the chunks")
        yield PromptBench(adapter, workload, there)
