"""``blendrag schema``: prompt schemas (Prompt Cache): encode their modules, answer prompts of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.ask import print_answer, say_metrics
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import count, duration, print_json, say
from blendrag.cli.progress import StatusLine

if TYPE_CHECKING:
    from blendrag.engine import SchemaPrompt, SchemaReport

app = typer.Typer(
    name="schema",
    help="Prompts that are assembled from the known parts of a schema.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The schema: <schema name=…>.", show_default=False)
]


@app.command()
@reporting
def encode(
    context: typer.Context,
    file: File,
    model: options.Model = None,
    store: options.Store = None,
    encoding: options.Encoding = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Compute and store the KV of every module that is not stored yet."""
    begin(verbose, "modules that were encoded are kept")
    with options.engine_for(context) as engine:
        name = engine.add_schema(file)
        with StatusLine(f"encoding the modules of {name}"):
            report = engine.encode_schema(name)
    print_json({"schema": name, **asdict(report)}) if json else _say_report(name, report)
    return DONE


@app.command()
@reporting
def run(
    context: typer.Context,
    file: File,
    prompt: Annotated[
        str,
        typer.Argument(help="<prompt schema=…>…, or a file of it.", show_default=False),
    ],
    model: options.Model = None,
    store: options.Store = None,
    positions: Annotated[
        str,
        typer.Option(help="schema: fixed, nothing recomputed; blend: as in any other prompt."),
    ] = "schema",
    mode: options.Mode = None,
    policy: options.Policy = None,
    ratio: options.AutoRatio = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    ram_bytes: options.RamBytes = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer a prompt of a schema; the answer streams to stdout. Modules are encoded at their first use."""
    begin(verbose, "the answer was abandoned; the store is intact")
    asked = options.request_options(context)
    with options.engine_for(context) as engine:
        engine.add_schema(file, positions)  # type: ignore[arg-type]
        answer = print_answer(engine.stream(_prompt(prompt), asked), silent=json)
        if json:
            print_json({"answer": answer.text, "metrics": answer.metrics.as_dict()})
        else:
            say_metrics(answer.metrics)
        interrupt.expect("the answer is complete; some modules are not precomputed yet")
        engine.drain()
    return DONE


def _prompt(given: str) -> SchemaPrompt:
    """A prompt from the command line: markup, or the name of a file."""
    from blendrag.engine import SchemaPrompt
    from blendrag.engine.schemas import MAX_MARKUP_BYTES

    if given.lstrip().startswith("<"):
        return SchemaPrompt(given)
    text = options.read_text("PROMPT", Path(given), MAX_MARKUP_BYTES, "<prompt schema=…>")
    return SchemaPrompt(text, given)


def _say_report(name: str, report: SchemaReport) -> None:
    stored = report.modules - report.encoded
    say(
        "encoded",
        f"{count(report.encoded, 'module')} of {name} ({report.tokens:,} tokens) in "
        f"{duration(report.seconds)}; {stored:,} stored before",
    )
    if report.collected:
        say("deleted", f"{count(report.collected, 'state')} of earlier versions of the schema")
    for note in report.notes:
        say("note", note)
