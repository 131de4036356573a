"""``blendrag search``: the chunks that a question finds, without an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from blendrag.cli import options
from blendrag.cli.importing import lasting_imports
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import console, print_json, say, shown_pages, shown_sources
from blendrag.config import settings
from blendrag.errors import check_question
from blendrag.text.excerpts import excerpts
from blendrag.wording import printable_line

if TYPE_CHECKING:
    from blendrag.corpus.retriever import RetrievedChunk

#: Characters shown of each chunk.
EXCERPT_CHARS = 70


@reporting
@options.takes("store", "read_only", "embedder", "trust_remote_code", "top_k", *options.SEARCH)
def search(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
    only: options.Only = None,
    where: options.Where = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Show the passages that a question finds, the best first. Loads no language model."""
    begin(verbose, "the search was abandoned; the store is intact")
    check_question(question)
    from blendrag.corpus.corpus import Corpus
    from blendrag.corpus.embedder import check_embedder, embedder_of
    from blendrag.corpus.reranker import Reranker
    from blendrag.corpus.retriever import Retriever

    given = context.params
    root, trusts = given["store"] or settings().store, bool(given["trust_remote_code"])
    name = given["reranker"] or settings().reranker
    reads_only = bool(given["read_only"])
    # an embedder is imported and loaded when something is looked for
    with Corpus.open(root, read_only=reads_only) as corpus, lasting_imports():
        corpus.require_documents()
        check_embedder(given["embedder"], corpus.manifest, root)
        named = given["embedder"] or settings().embedder
        embedder = embedder_of(corpus.manifest, root, named, trusts)
        reranker = None if name is None else Reranker(name, trusts)
        retriever = Retriever(corpus, embedder, given["search"], reranker)
        found = retriever.retrieve(
            question, given["top_k"] or settings().top_k, filter=options.filter_of(only, where)
        )
    found.sort(key=lambda chunk: chunk.rank)
    if json:
        chunks = [{**chunk.as_dict(), "metadata": chunk.metadata} for chunk in found]
        print_json({"question": question, "chunks": chunks})
    elif found:
        _print(found, question)
    else:
        say(
            "note",
            "nothing was found; use other words, --search hybrid, or a wider --only or --where",
        )
    return DONE


def _print(found: list[RetrievedChunk], question: str) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("score", justify="right")
    for heading in ("document", "place", "text"):
        table.add_column(heading, overflow="fold")
    names = shown_sources(chunk.source for chunk in found)
    texts = excerpts(found, question, EXCERPT_CHARS)
    for chunk, text in zip(found, texts, strict=True):
        name = printable_line(names[chunk.source])
        table.add_row(str(chunk.rank), f"{chunk.score:.3f}", name, _place(chunk), text)
    console(width=160).print(table)


def _place(chunk: RetrievedChunk) -> str:
    return shown_pages(chunk.page_label) or f"{chunk.start}–{chunk.end}"
