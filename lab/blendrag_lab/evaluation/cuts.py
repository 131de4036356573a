"""How documents are cut: ``python -m blendrag_lab.evaluation.cuts TOKENIZER_DIRECTORY PATH…``.

Counts what a reader of a single chunk would miss. Headings are found by markdown-it and definitions of Python
by ``ast``, not by the code under test.
"""

from __future__ import annotations

import ast
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from blendrag.errors import UnreadableDocumentError
from blendrag.text.chunking import Chunk, Chunker
from blendrag.text.readers import Document, open_documents, scan_inputs
from blendrag.text.tables import tables_of
from blendrag_lab.tables import ResultTable, table

#: A chunk with fewer tokens of its document is a crumb.
CRUMB_TOKENS = 40


@dataclass
class Cuts:
    """Counts over the documents of one folder."""

    folder: str
    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    crumbs: int = 0
    """Chunks of documents with several that have fewer than :data:`CRUMB_TOKENS` tokens of the text."""
    under_headings: int = 0
    headless: int = 0
    """Chunks of Markdown that do not contain the heading of the section they begin in."""
    definitions: int = 0
    cut_definitions: int = 0
    """Functions and classes of Python that would fit in a chunk and are in several."""
    rows: int = 0
    cut_rows: int = 0
    """Rows of tables, of at most half a chunk, that are in several chunks."""

    def add(self, document: Document, chunker: Chunker) -> None:
        chunks = chunker.split(document.text, document.source)
        text, suffix = document.text, Path(document.source).suffix
        self.documents += 1
        self.chunks += len(chunks)
        self.tokens += sum(chunk.tokens for chunk in chunks)
        own = [chunker.count(text[chunk.start : chunk.end]) for chunk in chunks]
        self.crumbs += sum(tokens < CRUMB_TOKENS for tokens in own) * (len(chunks) > 1)
        if suffix == ".md":
            headings = list(_headings(text))
            for chunk in chunks:
                at = bisect_right(headings, chunk.start, key=lambda each: each[0]) - 1
                self.under_headings += at >= 0
                self.headless += at >= 0 and headings[at][1] not in chunk.text
        ends = [chunk.end for chunk in chunks]
        for start, end in _definitions(text) if suffix == ".py" else ():
            if chunker.count(text[start:end]) <= 3 * chunker.chunk_tokens // 4:
                self.definitions += 1
                self.cut_definitions += not _is_whole(chunks, ends, start, end)
        for found in tables_of(text, document.source):
            for start, end in found.spans():
                if chunker.count(text[start:end]) <= chunker.chunk_tokens // 2:
                    self.rows += 1
                    self.cut_rows += not _is_whole(
                        chunks, ends, start, start + len(text[start:end].rstrip())
                    )


def _is_whole(chunks: Sequence[Chunk], ends: Sequence[int], start: int, end: int) -> bool:
    """Whether one chunk holds ``text[start:end]``."""
    at = bisect_left(ends, end)
    return at < len(chunks) and chunks[at].start <= start


def _headings(text: str) -> Iterator[tuple[int, str]]:
    """Where each heading of Markdown begins, and its text on one line."""
    from markdown_it import MarkdownIt

    starts = [*accumulate(map(len, text.splitlines(keepends=True)), initial=0)]
    tokens = MarkdownIt().parse(text)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open" and opening.level == 0 and opening.map and inline.content:
            yield starts[opening.map[0]], " ".join(inline.content.split())[:60]


def _definitions(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each function and class of Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    starts = [
        *accumulate(map(len, text.split("\n")), lambda total, size: total + size + 1, initial=0)
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.end_lineno
        ):
            start, end = starts[node.lineno - 1], starts[node.end_lineno] - 1
            yield start + len(text[start:end]) - len(text[start:end].lstrip()), end


def measured(folder: Path, chunker: Chunker) -> Cuts:
    cuts = Cuts(str(folder))
    for path in scan_inputs([folder]).files:
        try:
            for document in open_documents(path).documents:
                cuts.add(document, chunker)
        except UnreadableDocumentError:
            continue
    return cuts


def report(cuts: Sequence[Cuts]) -> ResultTable:
    return table(
        [
            ("folder", lambda each: each.folder),
            ("documents", lambda each: f"{each.documents:,}"),
            ("chunks", lambda each: f"{each.chunks:,}"),
            ("tokens", lambda each: f"{each.tokens:,}"),
            (f"under {CRUMB_TOKENS} tokens", lambda each: f"{each.crumbs:,}"),
            ("without heading", lambda each: f"{each.headless:,} of {each.under_headings:,}"),
            ("definitions cut", lambda each: f"{each.cut_definitions:,} of {each.definitions:,}"),
            ("rows cut", lambda each: f"{each.cut_rows:,} of {each.rows:,}"),
        ],
        cuts,
    )


def main(tokenizer: str, *folders: str) -> None:
    from tokenizers import Tokenizer

    chunker = Chunker(Tokenizer.from_file(f"{tokenizer}/tokenizer.json"), 512)
    report([measured(Path(folder), chunker) for folder in folders]).print()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
