"""``blendrag ask``: a question over the corpus, the answer as it comes. Parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.starting import begin, engine_for
from blendrag.cli.status import DONE, reporting


@reporting
def ask(
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    model: options.Model = None,
    store: options.Store = None,
    top_k: Annotated[int | None, options.unset("Chunks to retrieve.", min=1)] = None,
    mode: options.Mode = None,
    policy: Annotated[str | None, options.unset("Which tokens mode blend recomputes.")] = None,
    schedule: Annotated[
        str | None,
        options.unset(
            "constant, linear, geometric[:g], first:m, calibrated or one ratio per layer."
        ),
    ] = None,
    ratio: options.AutoRatio = None,
    min_ratio: Annotated[
        float | None,
        options.unset(
            "The least that --ratio auto takes.", min=0.0, max=1.0, callback=options.finite
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, options.unset("Longest answer.", min=1)] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, callback=options.finite, help="0 decodes greedily.", show_default=False
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, options.unset("End the answer before this text; repeatable.")
    ] = None,
    embedder: options.Embedder = None,
    ram_bytes: options.RamBytes = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer a question over the ingested documents; the answer streams to stdout."""
    begin(verbose, "the answer was abandoned; the store is intact")
    options.text_argument(question, "the question")
    engine = engine_for(
        model,
        store,
        embedder=embedder,
        ram_bytes=ram_bytes,
        dtype=dtype,
        device=device,
        lora=lora,
        trust_remote_code=trust_remote_code,
    )
    from blendrag.engine import Options

    asked = Options(
        mode=mode,  # type: ignore[arg-type]  # one of Mode, by its callback
        policy=policy,
        schedule=schedule,
        ratio=ratio,
        min_ratio=min_ratio,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop=tuple(stop or ()),
    )
    with engine:
        pieces = engine.ask_stream(question, top_k, asked)
        shown = False
        try:
            for piece in pieces:
                if not json:
                    typer.echo(piece, nl=False)
                    shown = True
        finally:
            pieces.abandon()
            if shown:
                typer.echo()
        answer = pieces.answer
        if json:
            output.print_json(output.answer_fields(answer))
        else:
            output.say_metrics(answer.metrics)
        interrupt.expect("the answer is complete; some chunks are not precomputed yet")
        engine.drain()  # chunks that had no KV get theirs, for the next question
    return DONE
