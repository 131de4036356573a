"""Writes the demo corpus: `python -m blendrag.demo.write_corpus --out src/blendrag/demo/corpus
--seed 11`.

Owns: which documents and questions the demo shows. Documents are of the test split, names no model
was trained on. Questions are drawn by seed among those whose chunks a retriever finds; what a model
answers plays no part.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from blendrag.demo.generator import Corpus, Document, Question, generate_corpus

N_DOCUMENTS = 30
N_QUESTIONS = {"coreference": 8, "direct": 4}
TOP_K = 6


def retrievable(corpus: Corpus, embedder: str, top_k: int = TOP_K) -> list[Question]:
    """Questions whose nearest `top_k` paragraphs hold the answer and the naming paragraph.

    A paragraph is embedded behind the title that its file name gives, as blendrag's retriever does.
    """
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(embedder, device="cpu")
    owners = [(d.doc_id, i) for d in corpus.documents for i in range(len(d.paragraphs))]
    texts = [f"{d.doc_id.replace('-', ' ')}\n{p}" for d in corpus.documents for p in d.paragraphs]
    asked = [q.text for q in corpus.questions]
    chunks, questions = (
        np.asarray(model.encode(t, normalize_embeddings=True)) for t in (texts, asked)
    )
    found = []
    for question, scores in zip(corpus.questions, questions @ chunks.T, strict=True):
        nearest = {owners[i] for i in np.argsort(-scores)[:top_k]}
        needed = {
            (question.document_id, i) for i in range(2 if question.kind == "coreference" else 1)
        }
        if needed <= nearest:
            found.append(question)
    return found


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


def write(out: Path, documents: Sequence[Document], questions: Sequence[Question]) -> None:
    """Replaces the corpus in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.txt"):
        stale.unlink()
    for document in documents:
        (out / f"{document.doc_id}.txt").write_text(document.text + "\n", encoding="utf-8")
    records = json.dumps([asdict(q) for q in questions], indent=2, ensure_ascii=False)
    (out / "questions.json").write_text(records + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo corpus and its questions.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--embedder", required=True, help="sentence-transformers model: a name or a directory"
    )
    args = parser.parse_args()
    corpus = generate_corpus(args.seed, "test", N_DOCUMENTS)
    questions = draw(retrievable(corpus, args.embedder), random.Random(args.seed))
    write(args.out, corpus.documents, questions)


if __name__ == "__main__":
    main()
