"""``blendrag ask``: print the answer to a question while it is generated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import print_json, say
from blendrag.cli.plots import require_place
from blendrag.errors import check_unicode

if TYPE_CHECKING:
    from blendrag.engine import Answer
    from blendrag.metrics import RequestMetrics

#: Longest schedule that is printed in full.
SCHEDULE_CHARS = 60


@reporting
def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    model: options.Model = None,
    store: options.Store = None,
    top_k: options.TopK = None,
    mode: options.Mode = None,
    policy: options.Policy = None,
    schedule: options.Schedule = None,
    ratio: options.AutoRatio = None,
    min_ratio: options.MinRatio = None,
    max_new_tokens: Annotated[int | None, options.number("Longest answer.", 1, kind=int)] = None,
    temperature: Annotated[float | None, options.number("0 decodes greedily.", 0)] = None,
    stop: Annotated[
        list[str] | None, options.optional("End the answer before this text; repeatable.")
    ] = None,
    embedder: options.Embedder = None,
    ram_bytes: options.RamBytes = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    explain: Annotated[
        Path | None,
        options.optional(
            "Write an HTML page: each token's state, each chunk's reason, a timeline."
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer a question over the ingested documents; the answer streams to stdout."""
    begin(verbose, "the answer was abandoned; the store is intact")
    check_unicode(question, "the question")
    if explain is not None:
        require_place("--explain", explain, ".html")
    from blendrag.engine import Options

    asked = Options(
        mode=mode,  # type: ignore[arg-type]  # the option's callback allows only modes
        policy=policy,
        schedule=schedule,
        ratio=ratio,
        min_ratio=min_ratio,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop=tuple(stop or ()),
        explain=explain is not None,
    )
    with options.engine_for(context) as engine:
        pieces = engine.ask_stream(question, top_k, asked)
        printed = False
        try:
            for piece in pieces:
                if not json:
                    typer.echo(piece, nl=False)
                    printed = True
        finally:
            pieces.abandon()
            if printed:
                typer.echo()
        answer = pieces.answer
        if json:
            print_json(_fields(answer))
        else:
            say_metrics(answer.metrics)
        if explain is not None:
            explain.write_text(answer.explain().page(question), encoding="utf-8")
        interrupt.expect("the answer is complete; some chunks are not precomputed yet")
        engine.drain()  # store KV of chunks that had none, for the next question
    return DONE


def _fields(answer: Answer) -> dict[str, Any]:
    shown = ("source", "title", "chunk_id", "distance", "text")
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "metrics": answer.metrics.as_dict(),
        "sources": [{name: getattr(source, name) for name in shown} for source in answer.sources],
    }


def say_metrics(metrics: RequestMetrics) -> None:
    """Print one line of figures on stderr, then the decision of ``ratio=auto`` and the notes."""
    predicted = metrics.predicted_ttft_s
    expected = "" if predicted is None else f", {1e3 * predicted:,.0f} predicted"
    how = f", {metrics.policy} at ratio {metrics.ratio:.2f}" if metrics.policy else ""
    say(
        "metrics",
        f"first token after {1e3 * metrics.ttft_s:,.0f} ms{expected} "
        f"(loading {1e3 * metrics.load_s:,.0f} ms), "
        f"{metrics.prompt_tokens} prompt tokens: {metrics.reused_tokens} reused, "
        f"{metrics.recomputed_tokens} of them recomputed, {metrics.fresh_tokens} fresh; "
        f"mode {metrics.mode}{how}{_schedule(metrics)}",
    )
    if metrics.decision:
        say("decision", metrics.decision)
    for note in metrics.notes:
        say("note", note)


def _schedule(metrics: RequestMetrics) -> str:
    """The schedule that ran; a long vector is cut, the JSON has all of it."""
    from blendrag.fusor.selection import make_policy

    if not metrics.policy or not make_policy(metrics.policy).follows_schedule:
        return ""
    text = metrics.schedule
    if len(text) > SCHEDULE_CHARS:
        text = f"{text[:SCHEDULE_CHARS].rpartition(',')[0]},…"
    return f", schedule {text}"
