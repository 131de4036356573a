"""``blendrag ask`` and ``chat``: print answers while they are generated."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, by_its_option, reporting
from blendrag.cli.output import (
    duration,
    echo,
    print_json,
    say,
    shown_pages,
    shown_sources,
    write_piece,
    write_thought,
)
from blendrag.cli.progress import StatusLine
from blendrag.cli.served import (
    NotServed,
    ServedAnswer,
    ServedPieces,
    ServedSource,
    StoreServer,
    is_announced,
    pieces,
    server_of,
)
from blendrag.errors import BlendragError, check_question, check_unicode
from blendrag.text.excerpts import excerpts

if TYPE_CHECKING:
    from blendrag.corpus.filters import Filter
    from blendrag.corpus.retriever import RetrievedChunk
    from blendrag.engine import Answer, BlendEngine, Options
    from blendrag.engine.answers import AnswerIterator
    from blendrag.metrics import RequestMetrics

#: Longest schedule that is printed in full.
SCHEDULE_CHARS = 60
#: Seconds; a shorter opening is not mentioned.
WORTH_TELLING_S = 0.1
#: Seconds; shorter imports are not mentioned.
LONG_IMPORT_S = 1.0
#: How a conversation is ended.
_KEYS = "Ctrl-C ends an answer, Ctrl-D the conversation"
#: Characters shown of each source.
EXCERPT_CHARS = 80


@reporting
@options.takes(*options.ENGINE, "read_only", *options.REQUEST, max_new_tokens=options.ANSWER_TOKENS)
def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    explain: Annotated[
        Path | None,
        options.optional(
            "Write an HTML page: each token's state, each chunk's reason, a timeline."
        ),
    ] = None,
    only: options.Only = None,
    where: options.Where = None,
    sources: options.Sources = True,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Answer a question over the ingested documents. The answer streams to stdout."""
    begin(verbose, "the answer was abandoned; the store is intact")
    check_question(question)
    if explain is not None:
        options.require_place("--explain", explain, ".html")
    top_k = context.params["top_k"]
    if explain is None and (served := pieces(context, question)) is not None:
        told = print_answer(served, silent=json)
        _show(context, question, told, sources, json)
        return DONE
    chosen = options.filter_of(only, where)
    options.require_documents(context.params["store"], chosen)
    began = time.perf_counter()
    request = options.request_options(context, explain=explain is not None)
    imported_s = time.perf_counter() - began
    with options.engine_for(context) as engine:
        answer = print_answer(
            engine.ask_stream(question, top_k, request, filter=chosen), silent=json
        )
        _show(context, question, answer, sources, json)
        if imported_s >= LONG_IMPORT_S and not json:
            took = f"importing torch and transformers took {duration(imported_s)}"
            took += f", opening the model {duration(answer.metrics.opening_s)}"
            advice = "; with blendrag serve running over the store, blendrag ask waits for neither"
            say("note", took if is_announced(context) else took + advice)
        if explain is not None:
            explain.write_text(answer.explain().page(question), encoding="utf-8")
        interrupt.expect("the answer is complete; some chunks are not precomputed yet")
        engine.drain()  # store KV of chunks that had none, for the next question
    return DONE


@reporting
@options.takes(*options.ENGINE, "read_only", *options.REQUEST, max_new_tokens=options.ANSWER_TOKENS)
def chat(
    context: typer.Context,
    only: options.Only = None,
    where: options.Where = None,
    sources: options.Sources = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each answer.")
    ] = False,
    verbose: options.Verbose = False,
) -> int:
    """Ask questions one after another. Each is read in the light of those before; the model is opened once.

    Ctrl-C ends an answer, Ctrl-D the conversation. Questions may also come from a file: chat < questions.txt
    """
    begin(verbose, "the conversation was not begun")
    with suppress(ImportError):
        import readline  # noqa: F401  # lets input() edit lines
    with ExitStack() as held:
        conversation = _Conversation(context, held, options.filter_of(only, where), sources, json)
        conversation.begin()
        with interrupt.left_to_caller():
            while (question := read_question()) is not None:
                if question.strip():
                    conversation.turn(question)
        interrupt.expect("some chunks are not precomputed yet")
        conversation.drain()
    return DONE


def read_question() -> str | None:
    """The next line of stdin; empty after Ctrl-C, ``None`` at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except KeyboardInterrupt:
        echo()
        return ""
    except EOFError:
        if sys.stdin.isatty():
            echo()
        return None


@dataclass
class _Conversation:
    """Questions and answers, by the running server of the store, or else by an engine."""

    context: typer.Context
    held: ExitStack
    """Closes the engine."""
    chosen: Filter | None
    sources: bool
    json: bool
    server: StoreServer | None = None
    engine: BlendEngine | None = None
    request: Options | None = None
    history: list[tuple[str, str]] = field(default_factory=list)
    shown_notes: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Find the server, or open the model. Refuses what no question can be asked with."""
        options.require_documents(self.context.params["store"], self.chosen)
        if (server := server_of(self.context)) is not None:
            try:
                server.check()
            except NotServed as why:
                server.not_used(why)
            else:
                self.server = server
                say("note", f"answered by the server of this store at {server.record.url}; {_KEYS}")
                return
        self._open()

    def _open(self) -> BlendEngine:
        self.request = options.request_options(self.context)
        engine = self.held.enter_context(options.engine_for(self.context))
        engine.require_corpus()
        began = time.perf_counter()
        with StatusLine("opening the model"):
            engine.open_retrieval()
            engine.open()
        opened = f"{engine.adapter.model_id} in {duration(time.perf_counter() - began)}"
        say("note", f"opened {opened}; {_KEYS}")
        self.engine = engine
        return engine

    def drain(self) -> None:
        if self.engine is not None:
            self.engine.drain()

    def turn(self, question: str) -> None:
        """Answer one question and add it to the history, whose oldest turns go if the context is full.

        What the model thought is no part of it: chat templates leave the reasoning of earlier answers out.
        """
        said: list[str] = []
        try:
            check_unicode(question, "the question")
            pieces = self._pieces(question)
            self._forget(pieces.left_out)
            answer = print_answer(pieces, said, silent=self.json)
            if isinstance(pieces, ServedPieces):
                self._forget(pieces.left_out)
            _show(self.context, question, answer, self.sources, self.json, self.shown_notes)
        except KeyboardInterrupt:
            say("note", "the answer was ended")
        except BlendragError as error:
            say("error", str(by_its_option(error, self.context.params)))
            return
        if said:
            self.history.append((question, "".join(said).strip()))

    def _pieces(self, question: str) -> AnswerIterator | ServedPieces:
        if self.server is not None:
            try:
                return self.server.ask(question, self.history)
            except NotServed as why:
                if (error := why.error_here(self.context.params)) is not None:
                    raise error from why
                self.server.not_used(why)
                self.server = None
        engine = self.engine or self._open()
        assert self.request is not None
        top_k, history = self.context.params["top_k"], self.history
        return engine.ask_stream(
            question, top_k, self.request, filter=self.chosen, history=history, trim_history=True
        )

    def _forget(self, turns: int) -> None:
        """Remove the oldest turns, which the prompt was without."""
        if turns:
            del self.history[:turns]
            which = "turn is" if turns == 1 else f"{turns} turns are"
            say("note", f"the model's context is full: the oldest {which} left out from now on")


def _show(
    context: typer.Context,
    question: str,
    answer: Answer | ServedAnswer,
    sources: bool,
    json: bool,
    shown_notes: set[str] | None = None,
) -> None:
    if json:
        print_json(_fields(answer))
        return
    if sources:
        say_sources(answer.sources, question)
    say_answer(answer, options.most_tokens(context), shown_notes)


@overload
def print_answer(
    pieces: AnswerIterator, said: list[str] | None = None, silent: bool = False
) -> Answer: ...
@overload
def print_answer(
    pieces: ServedPieces, said: list[str] | None = None, silent: bool = False
) -> ServedAnswer: ...
def print_answer(
    pieces: AnswerIterator | ServedPieces, said: list[str] | None = None, silent: bool = False
) -> Answer | ServedAnswer:
    """Print pieces on stdout as they come, and add those of the answer to ``said``; reasoning is dim."""
    from blendrag.chat.reply import Reasoning

    said = [] if said is None else said
    pieces.with_reasoning = not silent
    thinks, space = False, ""
    try:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                thought = f"{space}{piece}".rstrip()
                space = f"{space}{piece}"[len(thought) :]
                write_thought(thought)
                thinks = True
                continue
            if thinks:
                write_thought("\n\n")
                thinks = False
            said.append(piece)
            if not silent:
                write_piece(piece)
    finally:
        pieces.close()
        if thinks:
            write_thought("\n")
        if said and not silent:
            echo()
    return pieces.answer


def say_answer(
    answer: Answer | ServedAnswer, most_tokens: int | None, shown_notes: set[str] | None = None
) -> None:
    """Print the figures on stderr; also if ``most_tokens`` cut the answer."""
    metrics = answer.metrics
    if isinstance(answer, ServedAnswer):  # whether its policy follows it would take torch to say
        metrics = replace(metrics, schedule="")
    if answer.finish_reason != "length" or metrics.new_tokens != most_tokens:
        say_metrics(metrics, shown_notes)
        return
    notes = tuple(note for note in metrics.notes if not note.startswith("the answer was cut"))
    say_metrics(replace(metrics, notes=notes), shown_notes)  # what follows names the options
    if answer.reasoning and not answer.text:
        wrong, remedy = " while the model was still thinking", ", or --no-thinking makes it shorter"
    else:
        wrong = remedy = ""
    say(
        "note",
        f"the answer was cut at --max-new-tokens {most_tokens}{wrong}; more let it go on{remedy}",
    )


def _fields(answer: Answer | ServedAnswer) -> dict[str, Any]:
    return {
        "answer": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "metrics": answer.metrics.as_dict(),
        "sources": [source.as_dict() for source in answer.sources],
    }


def say_sources(sources: Sequence[RetrievedChunk | ServedSource], question: str) -> None:
    """Print the file, place, score and best line of each passage on stderr, the best first."""
    names = shown_sources(source.source for source in sources)
    texts = excerpts(sources, question, EXCERPT_CHARS)
    ranked = sorted(zip(sources, texts, strict=True), key=lambda each: each[0].rank)
    for source, text in ranked:
        pages = shown_pages(source.page_label)
        place = f"{names[source.source]}{', ' * bool(pages)}{pages}"
        say(
            "source",
            f"{place}, characters {source.start} to {source.end}, score {source.score:.2f}: {text}",
        )


def say_metrics(metrics: RequestMetrics, shown_notes: set[str] | None = None) -> None:
    """Print one line of figures on stderr, then the decision of ``ratio=auto`` and the notes, except for
    ``shown_notes``."""
    predicted = metrics.predicted_ttft_s
    expected = "" if predicted is None else f", {1e3 * predicted:,.0f} predicted"
    opened = f" once the model was open ({metrics.opening_s:,.1f} s)"
    opened *= metrics.opening_s >= WORTH_TELLING_S
    prefix = f" ({metrics.prefix_tokens} before the first chunk)" * bool(metrics.prefix_tokens)
    policy = f", {metrics.policy} at ratio {metrics.ratio:.2f}" if metrics.policy else ""
    if metrics.policy == "reuse":
        policy = " at ratio 0, which recomputes nothing"
    say(
        "metrics",
        f"first token after {1e3 * metrics.ttft_s:,.0f} ms{expected} "
        f"(loading {1e3 * metrics.load_s:,.0f} ms){opened}, "
        f"{metrics.prompt_tokens} prompt tokens: {metrics.reused_tokens} reused{prefix}, "
        f"{metrics.recomputed_tokens} of them recomputed, {metrics.fresh_tokens} fresh; "
        f"mode {metrics.mode}{policy}{_schedule(metrics)}; decode weights {metrics.decode_weights}",
    )
    if metrics.decision:
        say("decision", metrics.decision)
    shown_notes = set() if shown_notes is None else shown_notes
    for note in metrics.notes:
        if note not in shown_notes:
            say("note", note)
            shown_notes.add(note)


def _schedule(metrics: RequestMetrics) -> str:
    """The schedule that ran; a long vector is cut, the JSON has all of it."""
    if not (metrics.policy and metrics.schedule):
        return ""
    from blendrag.fusor.selection import make_policy

    if not make_policy(metrics.policy).follows_schedule:
        return ""
    text = metrics.schedule
    if len(text) > SCHEDULE_CHARS:
        text = f"{text[:SCHEDULE_CHARS].rpartition(',')[0]},…"
    return f", schedule {text}"
