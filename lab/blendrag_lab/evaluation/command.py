"""``blendrag eval``: options → ways and a dataset → the arena → a table or JSON.

Heavy imports are inside functions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import say
from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.config import KVEncoding
    from blendrag.corpus.manifest import Manifest
    from blendrag.engine import IngestReport
    from blendrag_lab.evaluation.arena import Arena
    from blendrag_lab.evaluation.rows import ArenaRow
    from blendrag_lab.evaluation.ways import Way
    from blendrag_lab.synthetic.generator import Split

#: Generated contexts, or records of a file.
CONTEXTS, QUICK_CONTEXTS = 20, 4
#: Questions of a generated context.
QUICK_QUESTIONS = 10


@reporting
@options.takes(
    "model", "writer", "encode_after", "embedder", "kv_encoding", "dtype", "device", "trust_remote_code",
    "max_new_tokens", "prompt_template",
    prompt_template="asks for short answers, or for a summary",
)  # fmt: skip
def evaluate(
    context: typer.Context,
    dataset: Annotated[
        str,
        typer.Option(
            help="synthetic, code, long, tables, chat, or a JSON or JSON lines file of "
            "{question, answers, ctxs}, {context, input, answers} or, with --store, {question, answers}."
        ),
    ] = "synthetic",
    policies: Annotated[
        str | None,
        options.optional(
            "Comma-separated: policies, full, reuse, prefix. "
            "[default: full, prefix, reuse and every policy]"
        ),
    ] = None,
    schedules: Annotated[
        str | None,
        options.optional(
            "Comma-separated names, or one vector of numbers. [default: the engine's]"
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None, options.optional("r in [0, 1]; repeatable. [default: the engine's]")
    ] = None,
    store: Annotated[
        Path | None,
        options.optional(
            "KV store whose calibration the policy calibrated means, and whose documents are "
            "searched for the chunks of {question, answers}."
        ),
    ] = None,
    encode_prefix: Annotated[
        str, typer.Option(help="Chunks encoded after the corpus's prefix: on, off or on,off.")
    ] = "on",
    seed: Annotated[
        int, options.number("Random seed of questions and bootstrap.", 0, kind=int)
    ] = 1,
    split: Annotated[str, typer.Option(help="Split of the generated dataset.")] = "test",
    contexts: Annotated[
        int | None,
        options.number(
            f"Contexts, cases of a task, or records of a file. [default: {CONTEXTS}]", 1, kind=int
        ),
    ] = None,
    questions: Annotated[
        int | None,
        options.number("Most questions of a generated context. [default: all]", 1, kind=int),
    ] = None,
    chunks: Annotated[int, options.number("Chunks of a prompt.", 1, kind=int)] = 6,
    chunk_tokens: Annotated[
        int | None, options.shared("chunk_tokens", "64 of synthetic, else 512")
    ] = None,
    out: Annotated[
        Path | None,
        options.optional(
            "Keep every answer in this file of JSON lines; what it holds is not asked again."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few questions: under three minutes on two cores."),
    ] = False,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            help="Ask through a prompt schema whose modules are the chunks, also in the ways schema "
            "(each encoded alone) and scaffold (encoded together).",
        ),
    ] = False,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity",
            help="Only full prefill answers; the other ways are compared with it by KL and agreement and "
            "have no score. About twice as fast.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a list of rows on stdout.")] = False,
    verbose: options.Verbose = False,
) -> int:
    """Compare the answers of policies at equal r (--ratio). Also says what each is charged for that,
    the entry layer included. With --writer, each is also asked over chunks that the writer encoded, and
    with --encode-after over chunks that were encoded after similar ones. An interrupted run continues where
    it was."""
    begin(verbose, "nothing was asked yet; repeat the command")
    ways = _ways(policies, schedules, ratio, encode_prefix, schema)
    given = context.params
    trusts = bool(given["trust_remote_code"])
    from blendrag.config import DEMO_MODEL, absolute_model, settings
    from blendrag.corpus.recorded_model import model_for
    from blendrag.model.loading import load_adapter, load_tokens
    from blendrag.model.writer import Writer
    from blendrag.store.identity import ChunkRecipe
    from blendrag_lab.evaluation import report
    from blendrag_lab.evaluation.arena import Arena
    from blendrag_lab.evaluation.datasets import (
        FILE_TOKENS,
        GENERATED_TOKENS,
        SYNTHETIC,
        embedder_for,
        open_dataset,
        synthetic_dataset,
    )
    from blendrag_lab.evaluation.tasks import TASKS, make_task
    from blendrag_lab.evaluation.ways import look_up

    if store is not None:
        model = model_for(given["model"], store, trusts)
    else:
        model = given["model"] or settings().model or DEMO_MODEL
    name = absolute_model(model)
    # a bad writer or dataset ends the command before the model loads
    manifest = _manifest(store)
    encoder = _writer(given["writer"], store, manifest, schema)
    writer = None if encoder is None else Writer.load(encoder)
    after = _encode_after(given["encode_after"], manifest)
    if writer is not None and (why := writer.trained_otherwise(after)):
        say("warning", f"{why}; give --encode-after {writer.encode_after}")
    tokens = load_tokens(name, trusts)
    count = contexts or (QUICK_CONTEXTS if quick else CONTEXTS)
    embedder = None
    if after or dataset not in (SYNTHETIC, *TASKS):
        embedder = embedder_for(given["embedder"], store, manifest, trusts)
    if dataset == SYNTHETIC:
        asked = questions or (QUICK_QUESTIONS if quick else None)
        size = chunk_tokens or GENERATED_TOKENS
        made = synthetic_dataset(tokens, seed, cast("Split", split), count, chunks, size, asked)
    elif dataset in TASKS:
        made = make_task(dataset, tokens, seed, count, chunks, chunk_tokens or FILE_TOKENS)
    else:
        assert embedder is not None
        path = Path(dataset)
        made = open_dataset(path, tokens, count, chunks, chunk_tokens, embedder, store)
    adapter = load_adapter(
        name,
        given["dtype"] or settings().dtype,
        given["device"] or settings().device,
        trust_remote_code=trusts,
    )
    adapter.require_blendable()
    of_store = None if manifest is None else manifest.encoding
    kept_as = cast("KVEncoding", given["kv_encoding"] or of_store or settings().kv_encoding)
    recipe = ChunkRecipe("" if writer is None else writer.fingerprint, after)
    identity = adapter.identity.encoded(kept_as).by(recipe)
    ways = look_up(ways, store or settings().store, identity.namespace)
    arena = Arena(
        adapter, made, ways, seed, given["max_new_tokens"], kept_as, schema, encoder, fidelity,
        after, given["prompt_template"] or settings().prompt_template, embedder,
    )  # fmt: skip
    rows = _run(arena, out)
    if json:
        output.print_json([asdict(row) for row in rows])
    else:
        for table in report.tables(rows):
            table.print()
    for note in report.notes(made, rows):
        say("note", note)
    return DONE


def _manifest(store: Path | None) -> Manifest | None:
    """What the documents of ``store`` were ingested with; ``None`` if it has none."""
    from blendrag.corpus.corpus import Corpus
    from blendrag.corpus.database import DIRECTORY

    if store is None or not (store / DIRECTORY).is_dir():
        return None
    with Corpus.open(store, read_only=True) as corpus:
        return corpus.manifest_or_none


def _writer(
    given: Path | None, store: Path | None, manifest: Manifest | None, as_schema: bool
) -> Path | None:
    """The writer that is asked for, else that of ``BLENDRAG_WRITER``, else that of the store's documents."""
    from blendrag.config import settings
    from blendrag.model.writer import NONE
    from blendrag.store.writer_files import path_of

    if as_schema:
        if str(given or NONE) != NONE:
            raise InvalidInputError(
                f"--writer {given} with --schema, whose modules are encoded without one; leave one out"
            )
        return None
    chosen = given or settings().writer
    if chosen is None and store is not None and manifest is not None and manifest.writer:
        chosen = path_of(store, manifest.writer)
    return None if chosen is None or str(chosen) == NONE else Path(chosen)


def _encode_after(given: int | None, manifest: Manifest | None) -> int:
    """The number that is asked for, else ``BLENDRAG_ENCODE_AFTER``, else that of the store's documents."""
    from blendrag.config import settings

    chosen = settings().encode_after if given is None else given
    if chosen is None and manifest is not None:
        chosen = manifest.encode_after
    return chosen or 0


def _run(arena: Arena, out: Path | None) -> list[ArenaRow]:
    """Without ``out`` the journal is in the cache directory until the run is complete."""
    from blendrag.cli.output import count
    from blendrag.cli.progress import StatusLine
    from blendrag.config import settings
    from blendrag_lab.evaluation.rows import Journal

    path = out or settings().cache.expanduser() / f"eval-{arena.digest}.jsonl"
    with StatusLine() as line:

        def watch(done: int, total: int) -> None:
            kept = f"{done} of {total} questions are kept in {path}; repeat the command to go on"
            interrupt.expect(kept, grace_s=10.0)
            line.show(f"{done} of {count(total, 'question')}", done, total)

        def watch_ingest(totals: IngestReport) -> None:
            share = f", {totals.work_done / totals.work:.0%} done" if totals.work else ""
            line.show(f"encoding chunks after similar ones{share}")

        rows = arena.run(Journal(path), watch, watch_ingest)
    if out is None:
        path.unlink(missing_ok=True)
    return rows


def _ways(
    policies: str | None,
    schedules: str | None,
    ratios: list[float] | None,
    prefix: str,
    as_schema: bool,
) -> tuple[Way, ...]:
    from blendrag.config import settings
    from blendrag_lab.evaluation.ways import (
        DEFAULT_POLICIES,
        PLACED,
        PREFIX,
        SCHEMA_POLICIES,
        make_ways,
    )

    listed = [settings().schedule] if schedules is None else _listed(schedules)
    with suppress(ValueError):  # numbers are one schedule
        listed = [",".join(str(float(part)) for part in listed)]
    prefixes = _listed(prefix)
    if not {"on", "off"}.issuperset(prefixes):
        raise InvalidInputError(f"--encode-prefix {prefix!r} is not on, off or on,off")
    chosen = SCHEMA_POLICIES if as_schema else DEFAULT_POLICIES
    if policies is not None:
        chosen = tuple(_listed(policies))
    for each in set(chosen).intersection((PREFIX,) if as_schema else PLACED):
        raise InvalidInputError(
            f"--policies {each!r} is not measured {'with' if as_schema else 'without'} --schema; "
            f"{'leave it out' if as_schema else 'add --schema'}"
        )
    return make_ways(
        chosen,
        listed,
        ratios or [settings().fixed_ratio],
        [each == "on" for each in prefixes],
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]
