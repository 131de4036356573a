"""Options that several benches share, and how they say what is under way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blendrag.config import DEFAULT_POLICY, UNCALIBRATED_SCHEDULE
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

if TYPE_CHECKING:
    from blendrag.lab.bench.workload import Workload
    from blendrag.model import ModelAdapter

Geometry = Annotated[
    str | None, typer.Option(help="Random weights of a known shape, e.g. qwen2.5-0.5b.")
]
Model = Annotated[str | None, typer.Option(help="Hub id, directory, or demo.")]
Count = Annotated[int, typer.Option(min=1)]
Size = Annotated[int | None, typer.Option(min=1, help="Of a KV; not beside --geometry.")]
CorpusTokens = Annotated[
    int,
    typer.Option(min=MIN_CHUNK_TOKENS, max=MAX_CHUNK_TOKENS, help="Largest chunk of an ingest."),
]
#: Its help is of :class:`blendrag.lab.bench.cli.command.BenchCommand`.
Policy = Annotated[str, typer.Option()]
Schedule = Annotated[
    str, typer.Option(help="constant, linear, geometric[:g], first:m or one per layer.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Tier = Annotated[
    str, typer.Option(help="memory, disk, cold (page cache dropped) or a throughput, e.g. 0.5GB/s.")
]
Encoding = Annotated[str, typer.Option(help="How KV is stored: native, int8 or fp8.")]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio r in [0, 1].")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the result into this PNG.", show_default=False)
]


@dataclass(frozen=True)
class Timed:
    """The model to time."""

    geometry: Geometry = None
    model: Model = None
    dtype: Dtype = "auto"
    device: Device = "auto"

    def adapter(self) -> ModelAdapter:
        """Raises :class:`InvalidInputError` and what loading a model raises."""
        from blendrag.lab.bench.geometry import bench_adapter

        return bench_adapter(self.geometry, self.model, self.dtype, self.device)


@dataclass(frozen=True)
class Work:
    """The prompt, how it is blended, and how its KV is stored."""

    chunks: Count = 6
    chunk_tokens: Count = 512
    question_tokens: Count = 32
    policy: Policy = DEFAULT_POLICY
    schedule: Schedule = UNCALIBRATED_SCHEDULE
    encoding: Encoding = "native"

    def at(self, ratio: float, rounds: int = 1) -> Workload:
        from blendrag.lab.bench.workload import Workload

        return Workload(**asdict(self), ratio=ratio, rounds=rounds)


def status(text: str) -> Any:
    """Says on stderr what is under way."""
    return Console(stderr=True).status(text)
