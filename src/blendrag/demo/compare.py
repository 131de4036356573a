"""How well policies and schedules answer, side by side: `python -m blendrag.demo.compare`.

Owns: the contexts, questions and table behind the choice of the default policy. Documents are of the
test split; a context is some of them in random order, both paragraphs each, in the demo model's own
prompt form, so that retrieval plays no part. Questions run through the engine, as a user's do.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import track
from rich.table import Table

from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE, DEMO_MODEL, Mode
from blendrag.demo.generator import Corpus, Question, generate_corpus
from blendrag.demo.prompts import CONTEXT, NATIVE, QUESTION
from blendrag.demo.tour import CHUNK_TOKENS, EMBEDDER
from blendrag.engine import BlendEngine, Options
from blendrag.errors import BlendragError

N_DOCUMENTS = 120  # in the corpus; contexts are drawn from it
ASKED = {"coreference": 6, "direct": 3}  # questions of a context


@dataclass(frozen=True)
class Way:
    """One way to answer."""

    mode: Mode
    policy: str | None = None
    schedule: str | None = None
    ratio: float | None = None

    @property
    def options(self) -> Options:
        return Options(
            mode=self.mode,
            policy=self.policy,
            schedule=self.schedule,
            ratio=self.ratio,
            max_new_tokens=6,
        )


@dataclass(frozen=True)
class Row:
    """Share of questions answered exactly, by kind, and what it cost."""

    way: Way
    coreference: float
    direct: float
    charged_ratio: float
    questions: int


def ways(
    policies: Sequence[str], schedules: Sequence[str], ratios: Sequence[float]
) -> tuple[Way, ...]:
    """Full prefill and reuse, then every combination; `boundary(k)` knows neither ratio nor
    schedule.
    """
    made = [Way("full"), Way("reuse")]
    for policy in policies:
        if policy.startswith("boundary"):
            made.append(Way("blend", policy))
            continue
        made += [Way("blend", policy, s, r) for r in ratios for s in schedules]
    return tuple(made)


def compare(
    tried: Sequence[Way],
    model: str = DEMO_MODEL,
    n_contexts: int = 10,
    n_documents: int = 8,
    seed: int = 1,
) -> list[Row]:
    """Asks the same questions in every way. Needs no network; writes a store under the temporary
    directory and removes it.
    """
    corpus = generate_corpus(seed, "test", N_DOCUMENTS)
    asked = list(_questions(corpus, n_contexts, n_documents, seed))
    right: dict[tuple[Way, str], list[bool]] = {}
    charged: dict[Way, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="blendrag-compare-") as root:
        documents = Path(root) / "corpus"
        documents.mkdir()
        for document in corpus.documents:
            (documents / f"{document.doc_id}.txt").write_text(document.text, encoding="utf-8")
        with BlendEngine(
            model, Path(root) / "kv", chunk_tokens=CHUNK_TOKENS, embedder=EMBEDDER
        ) as engine:
            engine.ingest([documents]).whole()
            for prompt, question in track(asked, console=Console(stderr=True)):
                for way in tried:
                    answer = engine.generate(prompt, way.options)
                    correct = answer.text.strip(" .\n") == question.answer
                    right.setdefault((way, question.kind), []).append(correct)
                    charged.setdefault(way, []).append(answer.metrics.charged_ratio)
    return [
        Row(
            way,
            mean(right[way, "coreference"]),
            mean(right[way, "direct"]),
            mean(charged[way]),
            len(asked),
        )
        for way in tried
    ]


def _questions(
    corpus: Corpus, n_contexts: int, n_documents: int, seed: int
) -> Iterator[tuple[str, Question]]:
    """(prompt, question) for `ASKED` of every context."""
    rng = random.Random(f"compare/{seed}")
    ((_, form),) = NATIVE.messages
    for _ in range(n_contexts):
        documents = rng.sample(corpus.documents, n_documents)
        there = {document.doc_id for document in documents}
        context = "\n\n".join(p for document in documents for p in document.paragraphs)
        for kind, n in ASKED.items():
            answered = [
                q for q in corpus.questions if q.document_id in there and q.kind == kind
            ]  # fmt: skip
            for question in rng.sample(answered, n):
                yield form.replace(CONTEXT, context).replace(QUESTION, question.text), question


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers by policy, schedule and ratio.")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--policies", nargs="+", default=[DEFAULT_POLICY, "hkvd", "boundary(4)"])
    parser.add_argument("--schedules", nargs="+", default=[DEFAULT_SCHEDULE, "geometric"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.15, 0.3])
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--documents", type=int, default=8, help="of a context, two chunks each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tried = ways(args.policies, args.schedules, args.ratios)
    try:
        rows = compare(tried, args.model, args.contexts, args.documents, args.seed)
    except BlendragError as exc:
        sys.exit(str(exc))
    if args.json:
        sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n")
        return
    table = Table(title=f"{rows[0].questions} questions, {2 * args.documents} chunks a prompt")
    for column in ("mode", "policy", "schedule", "r", "coreference", "direct", "charged"):
        table.add_column(column)
    for row in rows:
        way = row.way
        table.add_row(
            way.mode, way.policy, way.schedule, "" if way.ratio is None else f"{way.ratio:g}",
            f"{row.coreference:.3f}", f"{row.direct:.3f}", f"{row.charged_ratio:.3f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
