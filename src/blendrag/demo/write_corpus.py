"""Writes the demo corpus: `python -m blendrag.demo.write_corpus --out src/blendrag/demo --seed 11`.

Owns: which documents and questions the demo shows, in `corpus/` and `questions.json` of `--out`.
Documents are of the test split, names no model was trained on. Questions are drawn by seed among those
that the retrieved chunks can answer; what a model answers plays no part.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blendrag.demo.generator import Corpus, Document, Question, generate_corpus
from blendrag.demo.tour import CHUNK_TOKENS, EMBEDDER, TOP_K
from blendrag.engine import BlendEngine
from blendrag.retriever.retriever import RetrievedChunk

N_DOCUMENTS = 30
N_QUESTIONS = {"coreference": 8, "direct": 4}
# What the tour and what a reader of the README asks for.
TOP_KS = (6, TOP_K)


def answerable(corpus: Corpus, written: Path) -> list[Question]:
    """Questions that a reader of the chunks retrieved can answer, for every `TOP_KS`."""
    documents = {document.doc_id: document for document in corpus.documents}
    with (
        tempfile.TemporaryDirectory() as store,
        BlendEngine(store=store, chunk_tokens=CHUNK_TOKENS, embedder=EMBEDDER) as engine,
    ):
        engine.ingest([written]).whole()
        return [
            question
            for question in corpus.questions
            if all(
                _is_clear(question, documents, engine.retrieve(question.text, top_k))
                for top_k in TOP_KS
            )
        ]


def _is_clear(
    question: Question, documents: dict[str, Document], chunks: Sequence[RetrievedChunk]
) -> bool:
    """Whether the paragraphs needed are there, in one piece, and none follows that says "she" of
    somebody else and would be taken for theirs.
    """
    texts = [chunk.text.strip() for chunk in chunks]
    paragraphs = documents[question.document_id].paragraphs
    needed = paragraphs[: 2 if question.kind == "coreference" else 1]
    if not set(needed) <= set(texts):
        return False
    last = max(texts.index(paragraph) for paragraph in paragraphs if paragraph in texts)
    naming = {document.paragraphs[0] for document in documents.values()}
    return last + 1 == len(texts) or texts[last + 1] in naming


def draw(questions: Sequence[Question], rng: random.Random) -> list[Question]:
    """As many of each kind as `N_QUESTIONS` says, no two about one document as long as there are
    others.
    """
    drawn: list[Question] = []
    for kind, n in N_QUESTIONS.items():
        left = rng.sample(
            [q for q in questions if q.kind == kind], sum(q.kind == kind for q in questions)
        )
        while n and left:
            left.sort(key=lambda q: sum(d.document_id == q.document_id for d in drawn))
            drawn.append(left.pop(0))
            n -= 1
    return drawn


def write_documents(out: Path, documents: Sequence[Document]) -> None:
    """Replaces the documents in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.txt"):
        stale.unlink()
    for document in documents:
        (out / f"{document.doc_id}.txt").write_text(document.text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo corpus and its questions.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    corpus = generate_corpus(args.seed, "test", N_DOCUMENTS)
    write_documents(args.out / "corpus", corpus.documents)
    questions = draw(answerable(corpus, args.out / "corpus"), random.Random(args.seed))
    records = json.dumps([asdict(q) for q in questions], indent=2, ensure_ascii=False)
    (args.out / "questions.json").write_text(records + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
