"""``blendrag adapt``: train a writer for one model on one corpus, from material to report.

::

    corpus_of         groups of passages and questions           store, documents or records
    split             groups to train on, groups held out
    with_questions    questions by the model itself
    Trainer.run       the loop, with checkpoints
    AdaptReport       held-out prompts before and after
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from blendrag import __version__
from blendrag.config import of_variable
from blendrag.corpus.embedder import Embedder
from blendrag.engine.neighbours import Neighbours
from blendrag.errors import InvalidInputError, ModelError
from blendrag.model.adapter import ModelAdapter
from blendrag.model.writer import Writer
from blendrag.store import regular_files
from blendrag_lab.distillation.forwards import Forwards
from blendrag_lab.distillation.material import (
    MIN_PROMPT_CHUNKS,
    Group,
    Material,
    Similar,
    split,
    with_questions,
)
from blendrag_lab.distillation.memory import needs_of
from blendrag_lab.distillation.prompts import ChunkPrompt
from blendrag_lab.distillation.questions import ask_model, question_in
from blendrag_lab.distillation.report import AdaptReport, write_card
from blendrag_lab.distillation.trainer import (
    CHECKPOINT,
    OBJECTIVE,
    HeldOut,
    Progress,
    Recipe,
    Score,
    Trainer,
    read_checkpoint,
)
from blendrag_lab.distillation.writer import TrainedWriter

REPORT = "report.json"
QUESTIONS = "questions.json"
VECTORS = "vectors.npz"
#: Questions for each prompt that is trained on, and the most of all; what is missing is made by the model.
QUESTIONS_PER_PROMPT, MAX_QUESTIONS = 2, 300
#: Most questions of a held-out prompt, and prompts drawn for each that has questions of its own.
HELD_OUT_QUESTIONS, HELD_OUT_DRAWS = 2, 4
#: Passages between two lines of progress.
EMBEDDED_AT_ONCE = 256
#: About the most tokens between two chunks, with the name of a document, and of a question with what is
#: around it.
SEPARATING_TOKENS, TAIL_TOKENS = 16, 128


@dataclass(frozen=True)
class TrainingCorpus:
    """What to train on, and how its chunks are stored."""

    groups: tuple[Group, ...]
    prefix_ids: tuple[int, ...]
    """What chunks are encoded behind."""
    chunk_tokens: int
    top_k: int
    encode_after: int = 0
    """Similar chunks that each chunk is encoded after, which ``embedder`` finds."""
    embedder: Embedder | None = None


#: ``watch(text, done, total)`` for what precedes and follows the loop.
Say = Callable[[str, int, int | None], None]
#: Unit vectors of passages, by the name of the document and the text.
Vectors = Mapping[tuple[str, str], np.ndarray]


def adapt(
    adapter: ModelAdapter,
    corpus: TrainingCorpus,
    recipe: Recipe,
    out: Path,
    say: Say = lambda text, done, total: None,
    note: Callable[[str], None] = lambda text: None,
    watch: Callable[[Progress, Score], None] = lambda progress, before: None,
    start: Writer | None = None,
) -> AdaptReport:
    """Train a writer and save it in ``out``; goes on from a checkpoint there.

    ``start``: a writer of this model and the recipe's rank, whose weights training begins with; it is kept
    if none becomes better. ``note`` gets sentences, ``watch`` the progress and the score before training
    after every step. Holds the model's lock. Raises :class:`InvalidInputError`,
    :class:`UnsupportedModelError`, :class:`ModelError`, and :class:`KeyboardInterrupt` with everything
    finished so far in ``out``.
    """
    adapter.require_fusing()
    require_unfinished(out)
    _require_fitting_prompts(adapter, corpus, recipe)
    train, held = split(corpus.groups, recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    with adapter.lock, torch.inference_mode(False):
        writer = TrainedWriter(adapter, recipe.rank, recipe.seed, corpus.encode_after)
        try:
            digest = run_digest(adapter, corpus, recipe, start, sorted(writer.parameters))
            if (saved := read_checkpoint(out, digest)) is not None:
                note(f"going on after step {saved.progress.step} of {recipe.steps}")
            if start is not None:
                writer.begin_with(start)
            with writer.stock():
                train, held = _asked(adapter, train, held, recipe, out, digest, say)
            forwards = Forwards(adapter, corpus.prefix_ids, writer.stock, recipe.answer_tokens)
            sizes = corpus.top_k, recipe.questions, corpus.chunk_tokens
            vectors: Vectors = {}
            if corpus.encode_after:
                assert corpus.embedder is not None
                vectors = _vectors(corpus.embedder, (*train, *held), out, digest, say)
            similar = partial(_similar, adapter, corpus, vectors)
            material = Material(adapter.tokens, train, *sizes, similar(train))
            needs = needs_of(adapter, writer, forwards, material, recipe)
            note(str(needs))
            forwards.encode_batch = needs.encode_batch
            forwards.teacher_batch = needs.teacher_batch
            forwards.student_batch = needs.student_batch
            held_material = Material(adapter.tokens, held, *sizes, similar((*train, *held)))
            prompts = held_out_prompts(held_material, recipe)
            if (number := sum(len(prompt.tails) for prompt in prompts)) < recipe.held_out:
                note(
                    f"only {number} of {recipe.held_out} held-out questions could be made, so the best "
                    "writer is chosen less surely; add documents or questions"
                )
            held_out = HeldOut(forwards, prompts, partial(say, "answering held-out questions"))
            before = held_out.score(writes=False)
            if not math.isfinite(before.typical_kl):
                raise ModelError(
                    f"{adapter.model_id} does not compute numbers for held-out prompts, with full prefill or "
                    "over stored KV; take another --dtype"
                )
            trainer = Trainer(
                writer, forwards, material, held_out, recipe, out, digest, start is not None
            )
            if saved is not None:
                trainer.resume(saved)
            progress = trainer.run(lambda progress: watch(progress, before))
            assert progress.best is not None
            assert trainer.ending is not None
            step, after = progress.best
            passages = sum(len(group.passages) for group in train)
            asked = sum(len(group.asked) for group in train)
            material_sizes = len(train), passages, asked
            report = AdaptReport(
                *(adapter.model_id, out, recipe, corpus.encode_after, *material_sizes),
                *(before, after, step, progress, trainer.ending),
            )
            _finish(writer, report)
            return report
        finally:
            writer.close()


def _finish(writer: TrainedWriter, report: AdaptReport) -> None:
    """Write the writer, its card and the report; remove what only an interrupted run needs."""
    writer.save(report.out)
    write_card(report)
    text = json.dumps(report.as_dict(), indent=1)
    regular_files.replace(report.out / REPORT, text.encode())
    for name in (CHECKPOINT, QUESTIONS, VECTORS):
        (report.out / name).unlink(missing_ok=True)


def require_unfinished(out: Path) -> None:
    """Raise :class:`InvalidInputError` for the directory of a finished run."""
    if (out / REPORT).exists():
        raise InvalidInputError(
            f"{out} holds a finished writer, expected a new directory or one of an interrupted run; take "
            "another --out, or remove it"
        )


def _require_fitting_prompts(adapter: ModelAdapter, corpus: TrainingCorpus, recipe: Recipe) -> None:
    if corpus.top_k < MIN_PROMPT_CHUNKS:
        raise InvalidInputError(
            f"--top-k is {corpus.top_k}{of_variable('top_k', corpus.top_k)}, expected {MIN_PROMPT_CHUNKS} or "
            "more, because a writer is trained on prompts of several chunks; raise it"
        )
    limit = adapter.encoded_alike()
    chunks = corpus.top_k * (corpus.chunk_tokens + SEPARATING_TOKENS)
    longest = len(corpus.prefix_ids) + chunks + TAIL_TOKENS + recipe.answer_tokens
    if longest > limit:
        raise InvalidInputError(
            f"prompts of {corpus.top_k} chunks of {corpus.chunk_tokens} tokens take up to {longest} tokens, "
            f"and {adapter.model_id} takes {limit}; train with fewer chunks (--top-k) or shorter ones "
            "(--chunk-tokens)"
        )


def run_digest(
    adapter: ModelAdapter,
    corpus: TrainingCorpus,
    recipe: Recipe,
    start: Writer | None,
    trained: Sequence[str],
) -> str:
    """Tells this run from others. ``trained``: names of the trained weights."""
    texts = [[(each.name, each.text) for each in group.passages] for group in corpus.groups]
    asked = [[each.question for each in group.asked] for group in corpus.groups]
    embedder = corpus.embedder.name if corpus.encode_after and corpus.embedder else ""
    parts = [
        __version__, OBJECTIVE, adapter.identity.tensors_fingerprint, repr(recipe), texts, asked,
        corpus.prefix_ids, corpus.chunk_tokens, corpus.top_k, start.fingerprint if start else "",
        trained, corpus.encode_after, embedder,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _vectors(
    embedder: Embedder, groups: Sequence[Group], out: Path, digest: str, say: Say
) -> Vectors:
    """The vector of each passage, which an interrupted run finds in ``out``."""
    places = [*dict.fromkeys((each.name, each.text) for group in groups for each in group.passages)]
    rows = _kept_vectors(out / VECTORS, digest)
    if rows is None:
        parts = []
        for at in range(0, len(places), EMBEDDED_AT_ONCE):
            say("embedding passages", at, len(places))
            names, texts = zip(*places[at : at + EMBEDDED_AT_ONCE], strict=True)
            parts.append(embedder.embed(texts, names))
        rows = np.concatenate(parts)  # [passages, dim]
        data = io.BytesIO()
        np.savez(data, run=np.array(digest), vectors=rows)
        regular_files.replace(out / VECTORS, data.getvalue())
    return dict(zip(places, rows, strict=True))


def _kept_vectors(path: Path, digest: str) -> np.ndarray | None:
    try:
        with np.load(path) as kept:
            return kept["vectors"] if kept["run"] == digest else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _similar(
    adapter: ModelAdapter, corpus: TrainingCorpus, vectors: Vectors, groups: Sequence[Group]
) -> Similar | None:
    """What finds, among the passages of ``groups``, those that one is encoded after; ``None`` if all are
    encoded alone."""
    if not corpus.encode_after:
        return None
    found = dict.fromkeys(passage for group in groups for passage in group.passages)
    neighbours = Neighbours(None, corpus.encode_after)
    titled = [(passage.name, passage.chunk) for passage in found]
    neighbours.add(titled, [vectors[each.name, each.text] for each in found], replaces="")
    sizes = corpus.encode_after, len(corpus.prefix_ids), adapter.encoded_alike()
    return Similar(adapter.tokens, neighbours, *sizes)


def _asked(
    adapter: ModelAdapter,
    train: Sequence[Group],
    held: Sequence[Group],
    recipe: Recipe,
    out: Path,
    digest: str,
    say: Say,
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Groups with questions by the model, which an interrupted run finds in ``out``."""
    known = _kept_questions(out / QUESTIONS, digest)

    def ask(texts: Sequence[str]) -> list[str]:
        new = [text for text in dict.fromkeys(texts) if text not in known]

        def asking(done: int, total: int) -> None:
            say("asking the model for questions", done, total)

        try:
            for text, question in ask_model(adapter, new, asking):
                known[text] = question or question_in(text)
        finally:  # those that are finished survive Ctrl-C
            kept = {"run": digest, "questions": known}
            regular_files.replace(out / QUESTIONS, json.dumps(kept).encode())
        return [known[text] for text in texts]

    most = min(MAX_QUESTIONS, QUESTIONS_PER_PROMPT * recipe.steps * recipe.batch)
    return (
        with_questions(train, most, ask, recipe.seed),
        with_questions(held, recipe.held_out, ask, recipe.seed),
    )


def _kept_questions(path: Path, digest: str) -> dict[str, str]:
    try:
        kept = json.loads(path.read_bytes())
        return dict(kept["questions"]) if kept["run"] == digest else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def held_out_prompts(material: Material, recipe: Recipe) -> list[ChunkPrompt]:
    """Prompts with ``recipe.held_out`` different questions, or as many as draws find."""
    rng = random.Random(f"{recipe.seed} held out")
    few = replace(material, questions=HELD_OUT_QUESTIONS)
    found: list[ChunkPrompt] = []
    seen: set[str] = set()
    for _ in range(HELD_OUT_DRAWS * recipe.held_out):
        prompt = few.draw(rng, is_short=False)
        new = [n for n, question in enumerate(prompt.questions) if question not in seen]
        new = new[: recipe.held_out - len(seen)]
        if new:
            asked = tuple(prompt.questions[n] for n in new)
            tails = tuple(prompt.tails[n] for n in new)
            found.append(replace(prompt, tails=tails, questions=asked))
            seen.update(asked)
        if len(seen) == recipe.held_out:
            break
    return found
