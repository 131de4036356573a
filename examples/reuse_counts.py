"""Models and counters that both frameworks' halves of reuse_table.py share."""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blendrag import BlendEngine
from blendrag.demo import demo_corpus_path, demo_questions
from blendrag.text.chunking import chunk_id_of

QUESTIONS = [question.text for question in demo_questions()[:3]]
LOADED = {"exact", "blended", "reused"}
#: Pages longer than the frameworks' default passages, and questions about them.
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [DOCS / name for name in ("store.md", "serving.md", "schemas.md", "controller.md")]
PAGE_QUESTIONS = [
    "What happens when a stored file is damaged?",
    "How many requests may wait?",
    "Which ratio is chosen?",
]


class Counts:
    """For one question: the retrieved chunks, and how many tokens of each were loaded."""

    def __init__(self, engine):
        self._engine = engine
        self.retrieved = {}
        self.loaded = Counter()
        self.notes = []

    def was_retrieved(self, text):
        tokens = len(self._engine.tokens.encode_text(text.strip()))
        self.retrieved[chunk_id_of(text)] = tokens

    def was_answered(self, chunks, notes):
        self.notes += notes if self.retrieved else ()
        loaded = Counter()  # a passage may be cut into parts of one chunk
        for chunk in chunks:
            if chunk["outcome"] in LOADED:
                loaded[chunk["chunk_id"]] += chunk["tokens"]
        self.loaded |= loaded  # the larger count of each

    def tokens(self):
        """Loaded tokens and retrieved tokens."""
        retrieved = sum(self.retrieved.values())
        return min(self.loaded.total(), retrieved), retrieved


def share_of(counts: list[Counts]) -> tuple[float, str]:
    """The share of retrieved tokens that was loaded, and the reason if it is not all."""
    loaded, retrieved = (sum(n) for n in zip(*(c.tokens() for c in counts), strict=True))
    notes = dict.fromkeys(note for c in counts for note in c.notes)
    return loaded / retrieved, "; ".join(notes) if loaded < retrieved else ""


@contextmanager
def demo_engine(
    chunk_tokens: int | None = None, documents: Sequence[Path] | None = None
) -> Iterator[BlendEngine]:
    """The embedded model over ``documents``; by default those of its own corpus."""
    if documents is None:
        documents = [demo_corpus_path()]
    with (
        tempfile.TemporaryDirectory() as store,
        BlendEngine("demo", store, chunk_tokens=chunk_tokens, embedder="minilm-offline") as engine,
    ):
        if documents:
            engine.ingest(documents)
        yield engine


@contextmanager
def tooled_engine(script: Callable[[str], str], chunk_tokens: int) -> Iterator[BlendEngine]:
    """A model whose replies are given by ``script``: the embedded model does not support tools."""
    scripted = scripted_models()
    with (
        tempfile.TemporaryDirectory() as store,
        scripted.engine(script, store, chunk_tokens=chunk_tokens) as engine,
    ):
        engine.ingest([demo_corpus_path()])
        yield engine


def scripted_models():
    """The test module that makes models with given replies."""
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    import scripted

    return scripted


def question_in(prompt: str) -> str:
    """The last message of a prompt of such a model."""
    return prompt.rpartition("<|start|>user\n")[2].partition("<|end|>")[0]


if __name__ == "__main__":
    raise SystemExit("This is a part of reuse_table.py: python examples/reuse_table.py")
