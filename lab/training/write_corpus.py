"""Writes the demo corpus: `python -m lab.training.write_corpus --out src/blendrag/demo --seed 11`.

The documents (`corpus/`) are of the test split. The questions are drawn by seed among those that the
retrieved chunks can answer, whatever a model answers.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import AutoTokenizer

from blendrag.corpus.retriever import RetrievedChunk
from blendrag.demo import Question, demo_model_path
from blendrag.demo.tour import CHUNK_TOKENS, EMBEDDER, TOP_K
from blendrag.engine import BlendEngine
from blendrag_lab.synthetic.generator import GeneratedDocument, Shape, documents
from blendrag_lab.synthetic.questions import ask, measure_of

KINDS = ["person"] * 10 + ["organisation"] * 6 + ["place"] * 6 + ["product"] * 4 + ["event"] * 4
N_QUESTIONS = {"coreference": 7, "direct": 3, "two-hop": 2}
# Numbers of retrieved chunks: that of the tour, and a larger one.
TOP_KS = (TOP_K, 10)


def write(seed: int) -> tuple[GeneratedDocument, ...]:
    """Documents of two paragraphs, each as long as a chunk."""
    measure = measure_of(AutoTokenizer.from_pretrained(demo_model_path()))
    rng = random.Random(f"corpus/{seed}")
    shape = Shape((2, 3), CHUNK_TOKENS, measure)
    return documents(rng, "test", KINDS, [shape] * len(KINDS))


def answerable(
    questions: Sequence[Question], corpus: Sequence[GeneratedDocument], written: Path
) -> list[Question]:
    """Questions that a reader of the retrieved chunks can answer, for each of `TOP_KS`."""
    by_id = {document.doc_id: document for document in corpus}
    with (
        tempfile.TemporaryDirectory() as store,
        BlendEngine("demo", store, chunk_tokens=CHUNK_TOKENS, embedder=EMBEDDER) as engine,
    ):
        engine.ingest([written]).whole()
        return [
            question
            for question in questions
            if all(_is_clear(question, by_id, engine.retrieve(question.text, k)) for k in TOP_KS)
        ]


def _is_clear(
    question: Question, corpus: dict[str, GeneratedDocument], chunks: Sequence[RetrievedChunk]
) -> bool:
    """Whether the needed paragraphs are there, each document's in one piece, and no paragraph follows
    that says "she" of another person and would be taken for theirs."""
    texts = [chunk.text.strip() for chunk in chunks]
    naming = {document.paragraphs[0] for document in corpus.values()}
    for doc_id, index in question.needs:
        document = corpus[doc_id]
        if document.paragraphs[index] not in texts:
            return False
        at = [texts.index(p) for p in document.paragraphs if p in texts]
        following = at[-1] + 1
        if at != list(range(at[0], following)) or not naming.issuperset(texts[following:][:1]):
            return False
    return True


def draw(
    questions: Sequence[Question], rng: random.Random, asked: Mapping[str, int]
) -> list[Question]:
    """As many of each kind as `asked` says; two about one document only if there are no others."""
    drawn: list[Question] = []
    for kind, n in asked.items():
        of_kind = [q for q in questions if q.kind == kind]
        left = rng.sample(of_kind, len(of_kind))
        for _ in range(min(n, len(left))):
            left.sort(key=lambda q: sum(d.document_id == q.document_id for d in drawn))
            drawn.append(left.pop(0))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo corpus and its questions.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    corpus = write(args.seed)
    folder = args.out / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.txt"):
        stale.unlink()
    for document in corpus:
        (folder / f"{document.doc_id}.txt").write_text(document.text + "\n", encoding="utf-8")
    rng = random.Random(args.seed)
    questions = answerable(ask(rng, corpus, 1000), corpus, folder)
    shown = draw(questions, rng, N_QUESTIONS)
    records = json.dumps([asdict(q) for q in shown], indent=2, ensure_ascii=False)
    (args.out / "questions.json").write_text(records + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
