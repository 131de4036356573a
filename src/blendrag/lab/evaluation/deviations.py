"""Deviations of generated prompts as JSON: ``python -m blendrag.lab.evaluation.deviations``.

Owns how a case becomes a prompt whose chunks are known, and this command's options. The prompt is the
one the arena asks; one question of each context is enough, as its chunks are what deviates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging

from blendrag.config import DEMO_MODEL, absolute_model
from blendrag.engine import Options
from blendrag.engine.rendering import render
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.lab.evaluation.cases import Case, Dataset, by_context
from blendrag.lab.evaluation.deviation import StoredPrompt
from blendrag.lab.evaluation.deviation_report import DeviationReport, measure
from blendrag.lab.evaluation.synthetic import synthetic_dataset
from blendrag.lab.evaluation.wording import Wording, wording_for
from blendrag.model import ModelAdapter, load_adapter
from blendrag.model.tokens import Tokens
from blendrag.text.matches import Match
from blendrag.text.prompt import PromptPlan, make_plan


def plan_of(tokens: Tokens, wording: Wording, case: Case) -> PromptPlan:
    """The prompt of ``case``, cut at its chunks.

    Raises :class:`InvalidInputError` where the chat template does not leave chunks as they are.
    """
    rendered = render(wording.prompt(case.chunks, case.question), tokens, Options()).text
    found, at = [], 0
    for number, chunk in enumerate(case.chunks):
        start = rendered.find(chunk.strip(), at)
        if start < 0:
            raise InvalidInputError(
                f"chunk {number} of {case.case_id} is not in the rendered prompt as it was given; "
                "take a model whose chat template leaves text alone"
            )
        at = start + len(chunk.strip())
        found.append(Match(str(number), start, at, complete=True))

    def encode_chunk(chunk_id: str) -> tuple[int, ...]:
        return tuple(tokens.encode_text(case.chunks[int(chunk_id)].strip()))

    return make_plan(rendered, found, tokens, encode_chunk)


def stored_prompts(adapter: ModelAdapter, dataset: Dataset) -> Iterator[StoredPrompt]:
    """One prompt of every context, its chunks encoded behind the model's default prefix."""
    wording = wording_for(adapter.tokens.tokenizer, dataset.metric)
    prefix_ids = adapter.tokens.default_prefix_ids()
    for cases in by_context(dataset.cases):
        yield StoredPrompt(adapter, plan_of(adapter.tokens, wording, cases[0]), prefix_ids)


def run(args: argparse.Namespace) -> DeviationReport:
    """Measure what the options ask for, with a bar on stderr."""
    adapter = load_adapter(absolute_model(args.model), args.dtype, args.device)
    dataset = synthetic_dataset(
        adapter.tokens, args.seed, args.split, args.contexts, args.chunks, args.chunk_tokens, 1
    )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prompts", total=args.contexts)
        return measure(
            stored_prompts(adapter, dataset),
            args.policies.split(","),
            args.schedules.split(","),
            args.ratio,
            lambda: progress.advance(task),
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m blendrag.lab.evaluation.deviations",
        description="KV and attention deviation of generated prompts, one JSON object.",
    )
    made.add_argument("--model", default=DEMO_MODEL)
    made.add_argument("--dtype", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--split", default="test")
    made.add_argument("--contexts", type=int, default=8)
    made.add_argument("--chunks", type=int, default=6)
    made.add_argument("--chunk-tokens", type=int, default=64)
    made.add_argument("--policies", default="hkvd", help="comma-separated")
    made.add_argument("--schedules", default="constant", help="comma-separated families")
    made.add_argument("--ratio", type=float, action="append", required=True, help="repeatable")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report; exit status 2 and one sentence for what cannot be measured."""
    args = parser().parse_args(arguments)
    logging.disable_progress_bar()  # transformers draws one for loading weights
    try:
        report = run(args)
    except BlendragError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(json.dumps(report.as_dict()) + "\n")


if __name__ == "__main__":
    main()
