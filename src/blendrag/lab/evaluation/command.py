"""``blendrag eval``: the arena from the command line. Parses, runs, prints; heavy imports inside.

Owns the options and where the journal of an interrupted run lies: in ``--out``, which is kept, else
in the cache directory until the run is whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import say
from blendrag.lab.evaluation import lists
from blendrag.lab.evaluation.eval_dataset import SYNTHETIC, Asked, make_dataset

if TYPE_CHECKING:
    from blendrag.config import KVEncoding
    from blendrag.lab.evaluation.arena import Arena
    from blendrag.lab.evaluation.cases import Dataset
    from blendrag.lab.evaluation.rows import Row
    from blendrag.lab.evaluation.ways import Way

#: Contexts of generated documents, or records of a file.
CONTEXTS, QUICK_CONTEXTS = 20, 4
#: Of a generated context.
QUICK_QUESTIONS = 10


@reporting
def evaluate(
    dataset: Annotated[
        str,
        typer.Option(
            help="synthetic, or a JSON or JSON lines file of {question, answers, ctxs}, "
            "{context, input, answers} or, with --store, {question, answers}."
        ),
    ] = SYNTHETIC,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Hub id or directory of a causal LM, or demo. [default: that of --store, else demo]",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: policies, full, reuse, prefix, map-reduce, map-rerank. "
            "[default: full, prefix, reuse and every policy]",
            show_default=False,
        ),
    ] = None,
    schedules: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated names, or one vector of numbers; repeatable. "
            "[default: the engine's for a model that is not calibrated]",
            show_default=False,
        ),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(help="r in [0, 1]; repeatable. [default: the engine's]", show_default=False),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="KV store whose calibration the schedule calibrated means, and among whose documents "
            "chunks are looked up for {question, answers}.",
            show_default=False,
        ),
    ] = None,
    encode_prefix: Annotated[
        str, typer.Option(help="Chunks encoded behind the corpus's prefix: on, off or on,off.")
    ] = "on",
    seed: Annotated[int, typer.Option(min=0, help="Of the questions and the bootstrap.")] = 1,
    split: Annotated[str, typer.Option(help="Of the generated dataset.")] = "test",
    contexts: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Contexts, or records of a file. [default: {CONTEXTS}]", show_default=False
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most questions of a generated context. [default: all]", show_default=False
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a prompt.")] = 6,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=64,
            max=4096,
            help="Largest chunk. [default: 64 generated, 512 of a file]",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Keep every answer in this file of JSON lines; what it holds is not asked again.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few questions: under three minutes on two cores."),
    ] = False,
    embedder: Annotated[
        str | None,
        typer.Option(help="sentence-transformers model, or minilm-offline.", show_default=False),
    ] = None,
    encoding: options.Encoding = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: Annotated[bool, typer.Option("--json", help="A list of rows on stdout.")] = False,
    verbose: options.Verbose = False,
) -> int:
    """Compare policies by what they answer at equal r (--ratio); what each is charged for that, the
    entry layer included, and takes stands beside it. Interrupted, it goes on where it was.
    """
    begin(verbose, "nothing was asked yet; repeat the command")
    ways = _ways(policies, schedules, ratio, encode_prefix)
    asked = Asked(
        name=dataset,
        split=split,
        seed=seed,
        contexts=contexts or (QUICK_CONTEXTS if quick else CONTEXTS),
        questions=questions or (QUICK_QUESTIONS if quick else None),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        embedder=embedder,
        store=store,
    )
    kept_as = cast("KVEncoding | None", encoding)
    arena = _arena(ways, asked, model, dtype, device, max_new_tokens, kept_as, trust_remote_code)
    rows = _run(arena, out)
    if json:
        output.print_json([row.as_dict() for row in rows])
    else:
        from blendrag.lab.evaluation.report import print_rows

        print_rows(rows)
    _say_notes(arena.dataset, rows, in_words=not json)
    return DONE


def _say_notes(dataset: Dataset, rows: Sequence[Row], in_words: bool) -> None:
    from blendrag.lab.evaluation.notes import few_questions, lone_chunks, reuse_suffices

    few = few_questions(dataset) if in_words else ""
    for note in (lone_chunks(dataset), few, reuse_suffices(rows)):
        if note:
            say("note", note)


def _arena(
    ways: Sequence[Way],
    asked: Asked,
    model: str | None,
    dtype: str | None,
    device: str | None,
    max_new_tokens: int | None,
    encoding: KVEncoding | None,
    trust_remote_code: bool,
) -> Arena:
    from blendrag.config import absolute_model, settings
    from blendrag.lab.evaluation.arena import Arena
    from blendrag.lab.evaluation.ways import look_up
    from blendrag.model.loading import load_adapter, load_tokens

    if asked.store is not None:
        model = options.model_for(model, asked.store, trust_remote_code=trust_remote_code)
    name = absolute_model(model or settings().model)
    dataset = make_dataset(asked, load_tokens(name, trust_remote_code))
    dtype, device = dtype or settings().dtype, device or settings().device
    adapter = load_adapter(name, dtype, device, trust_remote_code=trust_remote_code)
    adapter.require_blendable()
    kept_as = encoding or settings().kv_encoding
    ways = look_up(
        ways, asked.store or settings().store, adapter.identity.encoded(kept_as).namespace
    )
    return Arena(adapter, dataset, ways, asked.seed, max_new_tokens, kept_as)


def _run(arena: Arena, out: Path | None) -> list[Row]:
    from blendrag.cli.progress import QuestionProgress
    from blendrag.lab.evaluation.journal import Journal, drop_without_lines

    path = out if out is not None else _cache() / f"eval-{arena.digest}.jsonl"
    with QuestionProgress() as progress:

        def watch(done: int, total: int) -> None:
            kept = f"{done} of {total} questions are kept in {path}; repeat the command to go on"
            interrupt.expect(kept, grace_s=10.0)
            progress(done, total)

        try:
            rows = arena.run(Journal(path), watch)
        except BaseException:
            if out is None:
                drop_without_lines(path)
            raise
    if out is None:
        path.unlink(missing_ok=True)
    return rows


def _ways(
    policies: str | None, schedules: list[str] | None, ratios: list[str] | None, prefix: str
) -> tuple[Way, ...]:
    from blendrag.config import settings
    from blendrag.lab.evaluation.ways import default_policies, make_ways

    named = lists.given("--policies", None if policies is None else [policies])
    return make_ways(
        named or default_policies(),
        lists.schedules(schedules) or (_uncalibrated(settings().schedule),),
        [lists.ratio(text) for text in lists.given("--ratio", ratios)] or (settings().fixed_ratio,),
        [lists.is_on(text) for text in lists.given("--encode-prefix", [prefix])],
    )


def _uncalibrated(schedule: str) -> str:
    """What the engine's default means where nothing was calibrated: the same rows in any store."""
    from blendrag.config import UNCALIBRATED_SCHEDULE
    from blendrag.fusor.selection import Schedule

    return UNCALIBRATED_SCHEDULE if Schedule.parse(schedule).is_open else schedule


def _cache() -> Path:
    """Where what must outlive this process, but no longer than its run, is kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "blendrag"
