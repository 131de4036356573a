"""The report of a training, and the writer's card (``README.md`` of its directory)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag import __version__
from blendrag.store import regular_files
from blendrag_lab.distillation.trainer import Ending, Progress, Recipe, Score
from blendrag_lab.distillation.writer import public_name

NO_HELP = "Do not use it yet: held-out answers are farther from full prefill with it than without."
HEADER = ("", "questions", "mean KL", "median KL", "first token's KL", "agreement", "recovered")


@dataclass(frozen=True)
class AdaptReport:
    """Held-out prompts before and after, and how the writer was trained."""

    model: str
    out: Path
    recipe: Recipe
    encode_after: int
    """Similar chunks that each chunk was encoded after."""
    groups: int
    passages: int
    questions: int
    before: Score
    after: Score
    best_step: int
    progress: Progress
    ending: Ending

    @property
    def ingest_options(self) -> str:
        """How chunks are encoded as in training, besides the writer."""
        return f" --encode-after {self.encode_after}" if self.encode_after else ""

    @property
    def recovered(self) -> float:
        """Share of the mean KL that the writer removes."""
        return self.after.recovered(self.before)

    @property
    def helps(self) -> bool:
        """Whether answers to held-out questions are nearer to full prefill with the writer than without."""
        return self.after.typical_kl < self.before.typical_kl

    def tasks(self) -> dict[str, tuple[Score, Score]]:
        """Before and after, for each task."""
        names = sorted(set(self.before.tasks))
        return {name: (self.before.only(name), self.after.only(name)) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": public_name(self.model),
            "recipe": asdict(self.recipe),
            "encode_after": self.encode_after,
            "material": {
                "groups": self.groups, "passages": self.passages, "questions": self.questions,
            },
            "steps": self.progress.step,
            "best_step": self.best_step,
            "seconds": self.progress.seconds,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "recovered": self.recovered,
            "losses": self.progress.losses,
            "skipped_steps": self.progress.skipped,
            "ended": str(self.ending),
            "measured": [
                {
                    "step": step, "typical_kl": score.typical_kl, "mean_kl": score.mean_kl,
                    "agreement": score.agreement,
                }
                for step, score in self.progress.scores
                if score is not None
            ],
        }  # fmt: skip


def rows_of(report: AdaptReport) -> Iterator[tuple[str, ...]]:
    """Rows of the table under :data:`HEADER`: without and with the writer, then by task."""
    yield _row("without", report.before)
    yield _row("with the writer", report.after, report.before)
    tasks = report.tasks()
    if len(tasks) > 1:
        for name, (before, after) in tasks.items():
            label = name or "documents"
            yield _row(f"{label}: without", before)
            yield _row(f"{label}: with", after, before)


def _row(name: str, score: Score, before: Score | None = None) -> tuple[str, ...]:
    gained = ""
    if before is not None and before.mean_kl > 0:
        gained = f"{score.recovered(before):.2f}"
    figures = (score.mean_kl, score.median_kl, score.first_kl, score.agreement)
    return (name, str(score.questions), *(f"{figure:.3f}" for figure in figures), gained)


def _named(model_id: str) -> str:
    """What a reader on another machine gives to ``--model``."""
    name = public_name(model_id)
    return name if name == model_id or "/" in name else "MODEL"


def write_card(report: AdaptReport) -> None:
    """Replace the text of the card that peft wrote; its header stays."""
    path = report.out / "README.md"
    given = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = given.split("---\n", 2)
    header = f"---\n{parts[1]}---\n" if len(parts) == 3 and not parts[0].strip() else ""
    header = header.replace(report.model, public_name(report.model))
    regular_files.replace(path, f"{header}{_text(report)}".encode())


def _text(report: AdaptReport) -> str:
    recipe, progress = report.recipe, report.progress
    model = public_name(report.model)
    skipped = f", {progress.skipped} of them skipped for want of a finite loss"
    skipped *= bool(progress.skipped)
    after = f" Each chunk was encoded after the {report.encode_after} most similar ones."
    after *= bool(report.encode_after)
    table = [HEADER, ("---",) * len(HEADER), *rows_of(report)]
    given = f"--model {_named(report.model)} --writer DIRECTORY{report.ingest_options}"
    use = f"    blendrag ingest DOCUMENTS {given}" if report.helps else NO_HELP
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"""
# A writer for {model}

A LoRA that blendrag activates only while it encodes a chunk of a document. The model that reads the
question and answers is unchanged: load this directory as a writer, never as an adapter for answering.

{use}

Distilled from the model's own full prefill by `blendrag adapt` (blendrag {__version__}): rank {recipe.rank},
{progress.step} steps of {recipe.batch} prompts in {progress.seconds / 60:.0f} min{skipped}; learning rate
{recipe.learning_rate:g}, seed {recipe.seed}; {report.passages} passages in {report.groups} groups,
{report.questions} questions.{after} Training ended because {report.ending}; the best writer was that of step
{report.best_step}.

Held-out prompts, nothing recomputed; KL from full prefill in nats per answer token:

{lines}
"""
