"""``blendrag schema``: check and show prompt schemas, encode their modules, answer prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from blendrag.cli import interrupt, options
from blendrag.cli.ask import print_answer, say_answer
from blendrag.cli.groups import SuggestingGroup
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import console, count, duration, echo, print_json, say
from blendrag.cli.progress import StatusLine
from blendrag.errors import SchemaError

if TYPE_CHECKING:
    from blendrag.engine import SchemaReport
    from blendrag.schema.encoding import TokenizedSchema
    from blendrag.schema.layout import CountTokens, Layout

app = typer.Typer(
    name="schema",
    cls=SuggestingGroup,
    help="Prompts that are assembled from the known parts of a schema.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The schema: <schema name=…>.", show_default=False)
]
Prompt = Annotated[
    str, typer.Argument(help="<prompt schema=…>…, or a file of it.", show_default=False)
]
CountedModel = Annotated[
    str | None,
    options.optional("Count in tokens of this model: hub id, directory or demo.", "--model", "-m"),
]


@app.command()
@reporting
def check(
    file: File,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompts of the schema: <prompt schema=…>…, or files of it.",
            show_default=False,
        ),
    ] = None,
    model: CountedModel = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Check a schema, and prompts against it. With --model also lengths and the model's context."""
    begin(verbose, "nothing was changed", loads_torch=model is not None)
    counted = _counted(file, model, trust_remote_code)
    schema = counted.layout.schema
    wrong = [
        error
        for number, given in enumerate(prompts or (), start=1)
        for error in _wrong_with(given, counted, f"<prompt {number}>")
    ]
    _raise_all(wrong)
    found = {"schema": schema.name, "modules": len(schema.modules), "prompts": len(prompts or ())}
    if json:
        print_json({**found, "length": counted.layout.tokens, "unit": counted.unit})
        return DONE
    checked = f", {count(len(prompts), 'prompt')}" if prompts else ""
    echo(f"{schema.name}: {count(len(schema.modules), 'module')}{checked}, no errors")
    if model is None:
        say("note", "lengths were not checked; name a --model")
    elif counted.layout.tokens > counted.context_tokens:
        say(
            "note",
            f"the schema takes {counted.layout.tokens:,} positions, the context of {model} has "
            f"{counted.context_tokens:,}; use positions=blend, or shorten it",
        )
    return DONE


@app.command()
@reporting
def show(
    file: File,
    model: CountedModel = None,
    svg: Annotated[Path | None, options.optional("Draw the layout into this SVG.")] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Show the parts of a schema as a tree. With positions and lengths, in words or tokens of --model."""
    begin(verbose, "nothing was changed", loads_torch=model is not None)
    from blendrag.schema import drawing

    if svg is not None:
        options.require_place("--svg", svg, ".svg")
    counted = _counted(file, model, trust_remote_code)
    layout, plain = counted.layout, counted.plain
    if svg is not None:
        svg.write_text(drawing.svg(layout, plain), encoding="utf-8")
    parts = list(drawing.outline(layout, plain))
    if json:
        rows = [
            {key: value for key, value in asdict(part).items() if key != "guide"} for part in parts
        ]
        shown = {"schema": layout.schema.name, "length": layout.tokens, "unit": counted.unit}
        print_json({**shown, "parts": rows})
        return DONE
    table = Table(box=None, pad_edge=False)
    table.add_column(Text(layout.schema.name), no_wrap=True)
    for name in ("start", "end", counted.unit):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    for part in parts:
        kind = "" if part.kind in ("text", "role") else f"{part.kind} "
        label = f"<{part.label}>" if part.kind == "role" else part.label
        numbers = (part.start, part.start + part.length, part.length)
        table.add_row(Text(part.guide + kind + label), *(f"{number:,}" for number in numbers))
    console(width=400).print(table)
    for scaffold in layout.schema.scaffolds:
        echo(f"scaffold {' '.join(scaffold.modules)}")
    return DONE


@dataclass(frozen=True)
class _Counted:
    """A schema whose lengths are known."""

    layout: Layout
    count: CountTokens
    unit: str = "words"
    context_tokens: int = 0
    tokenized: TokenizedSchema | None = None

    def plain(self, text: str) -> str:
        return text if self.tokenized is None else self.tokenized.plain(text)


def _counted(file: Path, model: str | None, trust_remote_code: bool) -> _Counted:
    from blendrag.schema.layout import lay_out
    from blendrag.schema.markup import MAX_BYTES, check_schema

    text = options.read_text("FILE", file, MAX_BYTES, "<schema name=…>")
    schema, wrong = check_schema(text, str(file))
    _raise_all(wrong)
    if model is None:
        words = lambda text: len(text.split())  # noqa: E731
        return _Counted(lay_out(schema, words), words)
    from blendrag.model.loading import load_context_tokens, load_tokens
    from blendrag.schema.encoding import TokenizedSchema

    with StatusLine(f"loading the tokenizer of {model}"):
        tokenized = TokenizedSchema(schema, load_tokens(model, trust_remote_code))
        context_tokens = load_context_tokens(model, trust_remote_code)
    return _Counted(tokenized.layout, tokenized.count, "tokens", context_tokens, tokenized)


@app.command()
@reporting
@options.takes(*options.NEW_CORPUS)
def encode(
    context: typer.Context, file: File, json: options.Json = False, verbose: options.Verbose = False
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
@options.takes(*options.NEW_CORPUS, *options.REQUEST, max_new_tokens=options.ANSWER_TOKENS)
def run(
    context: typer.Context,
    file: File,
    prompt: Prompt,
    positions: Annotated[
        str, typer.Option(help="schema: fixed, nothing recomputed; blend: as in any other prompt.")
    ] = "schema",
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer a prompt of a schema; the answer streams to stdout. Modules are encoded at their first use."""
    begin(verbose, "the answer was abandoned; the store is intact")
    from blendrag.engine import SchemaPrompt

    request = options.request_options(context)
    with options.engine_for(context) as engine:
        engine.add_schema(file, positions)  # type: ignore[arg-type]
        answer = print_answer(engine.stream(SchemaPrompt(*_markup(prompt)), request), silent=json)
        if json:
            print_json({"answer": answer.text, "metrics": answer.metrics.as_dict()})
        else:
            say_answer(answer, options.most_tokens(context))
        interrupt.expect("the answer is complete; some modules are not precomputed yet")
        engine.drain()
    return DONE


def _raise_all(wrong: list[SchemaError]) -> None:
    """Print all errors but the last, and raise that one."""
    for error in wrong[:-1]:
        say("error", str(error))
    if wrong:
        raise wrong[-1]


def _wrong_with(given: str, counted: _Counted, name: str) -> list[SchemaError]:
    """All that can be found wrong with a prompt of the schema: one error, or one for each argument."""
    from blendrag.schema.checking import check_context, length_errors, resolve
    from blendrag.schema.markup import parse_prompt

    try:
        prompt = parse_prompt(*_markup(given, name))
        if counted.tokenized is None:
            resolve(counted.layout.schema, prompt)
            return []
        parts = resolve(counted.layout.schema, counted.tokenized.as_chat(prompt))
        if wrong := list(length_errors(parts, counted.count)):
            return wrong
        check_context(parts, counted.layout.place(parts, counted.count), counted.context_tokens)
    except SchemaError as error:
        return [error]
    return []


def _markup(given: str, name: str = "<prompt>") -> tuple[str, str]:
    """The markup of a prompt, and what errors call it: its file, or ``name``."""
    from blendrag.schema.markup import MAX_BYTES

    if given.lstrip("\ufeff \t\r\n").startswith("<"):
        return given, name
    return options.read_text("PROMPT", Path(given), MAX_BYTES, "<prompt schema=…>"), given


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
