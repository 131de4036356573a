"""The loop: draw prompts, compare teacher and student, step; measure on held-out prompts; keep the best.

Step i draws its prompts from (seed, i) alone, so a run that is resumed goes on as if it had not stopped.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blendrag.errors import InvalidInputError, ModelError
from blendrag.store.durable import sync_directory, whole_file
from blendrag_lab.distillation.forwards import Deviation, Forwards, Target
from blendrag_lab.distillation.material import Material
from blendrag_lab.distillation.prompts import ChunkPrompt
from blendrag_lab.distillation.writer import TrainedWriter

#: Number of the objective. Raise it with every change of how prompts are drawn, of teacher, student, loss or
#: score that may come without a new version of the package: a run is not continued under another number.
OBJECTIVE = 2
#: Weight of the tail's tokens before the answer in the loss.
QUESTION_WEIGHT = 0.2
WARMUP_SHARE, FINAL_RATE = 0.05, 0.1
BETAS, MAX_GRADIENT_NORM = (0.9, 0.98), 1.0
CHECKPOINT = "checkpoint.pt"
#: Seconds of training that a run which is killed loses at most, and the step that it was in.
CHECKPOINT_EVERY_S = 60.0
#: Steps in a row whose loss or gradient is not finite, after which training ends.
MAX_SKIPPED = 5
#: KL in nats below which differences hardly count in :attr:`Score.typical_kl`.
TYPICAL_FLOOR = 0.01


@dataclass(frozen=True)
class Recipe:
    """How to train; equal recipes on equal material give equal writers on one machine."""

    steps: int = 200
    batch: int = 4
    """Prompts of a step."""
    questions: int = 3
    """Most questions of a prompt. They share its chunks, so that more cost little."""
    rank: int = 16
    learning_rate: float = 5e-4
    answer_tokens: int = 24
    held_out: int = 32
    """Questions that are never trained on and decide which writer is kept; at most two a prompt."""
    measure_every: int = 20
    """Steps between two measurements on them."""
    patience: int = 4
    """Measurements without a better one before training ends."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "steps", "batch", "questions", "rank", "answer_tokens", "held_out", "measure_every", "patience",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if not 0.0 < self.learning_rate <= 1.0:
            raise InvalidInputError(
                f"learning_rate is {self.learning_rate:g}, expected a number in (0, 1]"
            )


@dataclass(frozen=True)
class Score:
    """How far answers over stored KV are from full prefill's; KL in nats per answer token."""

    questions: int
    mean_kl: float
    median_kl: float
    """Median of the means of questions."""
    first_kl: float
    """Mean of the first token."""
    agreement: float
    """Share of tokens that full prefill would choose, too; mean over questions."""
    kls: tuple[float, ...] = field(repr=False)
    agreements: tuple[float, ...] = field(repr=False)
    first_kls: tuple[float, ...] = field(repr=False)
    tasks: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, found: Sequence[Deviation], tasks: Sequence[str]) -> Score:
        return cls.over(
            [float(each.answer.mean()) for each in found],
            [float(each.agrees.float().mean()) for each in found],
            [float(each.answer[0]) for each in found],
            tasks,
        )

    @classmethod
    def over(
        cls,
        kls: Sequence[float],
        agreements: Sequence[float],
        first_kls: Sequence[float],
        tasks: Sequence[str],
    ) -> Score:
        """From the figures of each question."""
        return cls(
            len(kls),
            statistics.fmean(kls),
            statistics.median(kls),
            statistics.fmean(first_kls),
            statistics.fmean(agreements),
            tuple(kls),
            tuple(agreements),
            tuple(first_kls),
            tuple(tasks),
        )

    @property
    def typical_kl(self) -> float:
        """Geometric mean over questions of KL + :data:`TYPICAL_FLOOR`, less the floor.

        Chooses the best writer. The mean of a few questions follows the one that is farthest off; here each
        counts by the share of its KL that is gone.
        """
        if not all(map(math.isfinite, self.kls)):
            return math.nan
        logs = [math.log(max(kl, 0.0) + TYPICAL_FLOOR) for kl in self.kls]
        return math.exp(statistics.fmean(logs)) - TYPICAL_FLOOR

    def recovered(self, before: Score) -> float:
        """Share of the mean KL ``before`` that is gone."""
        return 1 - self.mean_kl / before.mean_kl if before.mean_kl > 0 else 0.0

    def only(self, task: str) -> Score:
        """The score of the questions of one task."""
        found = [n for n, each in enumerate(self.tasks) if each == task]
        kls, agreements, firsts = (
            [values[n] for n in found] for values in (self.kls, self.agreements, self.first_kls)
        )
        return Score.over(kls, agreements, firsts, [task] * len(found))


class HeldOut:
    """Prompts with what full prefill says to them, computed once."""

    def __init__(
        self,
        forwards: Forwards,
        prompts: Sequence[ChunkPrompt],
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._forwards = forwards
        self._answered: list[tuple[Sequence[ChunkPrompt], list[list[Target]]]] = []
        total, done = sum(len(prompt.tails) for prompt in prompts), 0
        watch(done, total)
        for several, targets in answered(forwards, prompts):
            done += sum(map(len, targets))
            watch(done, total)
            # only what answers are taken from; in float16 a logit of 20 is off by at most 0.01
            kept = [
                [t._replace(logits=t.logits[-len(t.answer) :].half()) for t in each]
                for each in targets
            ]
            self._answered.append((several, kept))

    @torch.no_grad()
    def score(self, writes: bool = True) -> Score:
        found, tasks = [], []
        for several, targets in self._answered:
            given = [[t._replace(logits=t.logits.float()) for t in each] for each in targets]
            for prompt, each in zip(
                several, self._forwards.deviations(several, given, writes), strict=True
            ):
                found += each
                tasks += [prompt.task] * len(each)
        return Score.of(found, tasks)


def answered(
    forwards: Forwards, prompts: Sequence[ChunkPrompt]
) -> Iterator[tuple[Sequence[ChunkPrompt], list[list[Target]]]]:
    """``prompts``, as many at a time as students run in one forward, with what full prefill says to them."""
    size = forwards.student_batch
    at_once = max(1, forwards.teacher_batch // size) * size
    for at in range(0, len(prompts), at_once):
        several = prompts[at : at + at_once]
        targets = forwards.teachers(several)
        for n in range(0, len(several), size):
            yield several[n : n + size], targets[n : n + size]


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    step: int = 0
    seconds: float = 0.0
    losses: tuple[float | None, ...] = ()
    """The loss of each step; ``None`` for one skipped because its loss or gradient was not finite."""
    scores: tuple[tuple[int, Score | None], ...] = ()
    """Step and score of every measurement; ``None`` for one that was not finite."""

    @property
    def best(self) -> tuple[int, Score] | None:
        found = [(step, score) for step, score in self.scores if score is not None]
        return min(found, key=lambda each: each[1].typical_kl, default=None)

    @property
    def skipped(self) -> int:
        """Steps that changed nothing."""
        return self.losses.count(None)


class Ending(StrEnum):
    """Why training ended."""

    STEPS = "all steps are done"
    PATIENCE = "held-out prompts gained no more"
    NOT_FINITE = f"{MAX_SKIPPED} steps in a row had no finite loss"


Watch = Callable[[Progress], None]


class Trainer:
    """One run over ``material``, whose files are in ``out``."""

    def __init__(
        self,
        writer: TrainedWriter,
        forwards: Forwards,
        material: Material,
        held_out: HeldOut,
        recipe: Recipe,
        out: Path,
        run_digest: str,
        is_begun: bool = False,
    ) -> None:
        """``run_digest``: tells this run from others, whose checkpoints it does not take. ``is_begun``:
        ``writer`` has weights of an earlier run, which are measured before the first step."""
        self._writer, self._forwards, self._material = writer, forwards, material
        self._held_out, self._recipe, self._out = held_out, recipe, out
        self._digest, self._is_begun = run_digest, is_begun
        self._parameters = list(writer.parameters.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate, betas=BETAS, weight_decay=0.0
        )
        self._best: dict[str, torch.Tensor] | None = None
        self._saved_s = 0.0
        self.progress = Progress()

    # -- the loop -----------------------------------------------------------------------------------

    def run(self, watch: Watch = lambda progress: None) -> Progress:
        """Train to the end, then make the best writer the current one.

        After Ctrl-C the checkpoint holds every finished step, and :class:`KeyboardInterrupt` is raised.
        Raises :class:`ModelError` if no writer could be measured.
        """
        try:
            self._measure_if_due()  # a run may have been interrupted before it
            while self.ending is None:
                self.step()
                self._measure_if_due()
                if self.progress.seconds - self._saved_s >= CHECKPOINT_EVERY_S:
                    self.save_checkpoint()
                watch(self.progress)
        except KeyboardInterrupt:
            self.save_checkpoint()
            raise
        if self._best is None:
            what = (
                "the KL of held-out prompts" if self.progress.scores else "the loss of every step"
            )
            raise ModelError(
                f"{what} is not a number, and training ended after {self.progress.step} steps; nothing was "
                "kept; take a lower --learning-rate or another --dtype, and another --out"
            )
        self._writer.load(self._best)
        return self.progress

    @property
    def ending(self) -> Ending | None:
        """Why training is over, if it is."""
        done, best = self.progress, self.progress.best
        if done.step >= self._recipe.steps:
            return Ending.STEPS
        last = done.losses[-MAX_SKIPPED:]
        if last.count(None) == MAX_SKIPPED:
            return Ending.NOT_FINITE
        since = sum(best is None or step > best[0] for step, _ in done.scores)
        return Ending.PATIENCE if since >= self._recipe.patience else None

    def step(self) -> None:
        """One step, which changes nothing if its loss or gradient is not finite."""
        began, number, recipe = time.monotonic(), self.progress.step, self._recipe
        rng = random.Random(f"{recipe.seed} {number}")
        self._optimizer.zero_grad(set_to_none=True)
        losses = []
        for prompts, targets in answered(
            self._forwards, [self._material.draw(rng) for _ in range(recipe.batch)]
        ):
            found = self._forwards.deviations(prompts, targets)
            each = [torch.stack([_loss_of(one) for one in several]).mean() for several in found]
            loss = torch.stack(each).sum() / recipe.batch
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        total, size = torch.stack((torch.stack(losses).sum(), norm)).tolist()
        is_finite = math.isfinite(total) and math.isfinite(size)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate_at(number, recipe.steps)
        with uninterrupted():
            if is_finite:
                self._optimizer.step()
            took = self.progress.seconds + time.monotonic() - began
            kept = (*self.progress.losses, total if is_finite else None)
            self.progress = replace(self.progress, step=number + 1, seconds=took, losses=kept)

    def _measure_if_due(self) -> None:
        step = self.progress.step
        is_due = step % self._recipe.measure_every == 0 or self.ending is not None
        is_trained = self.progress.skipped < step or self._is_begun
        if not is_due or not is_trained or any(at == step for at, _ in self.progress.scores):
            return
        began, before = time.monotonic(), self.progress.best
        score = self._held_out.score()
        is_finite = math.isfinite(score.typical_kl)
        if is_finite and (before is None or score.typical_kl < before[1].typical_kl):
            self._best = self._writer.state()
            self._writer.save(self._out)
        took = self.progress.seconds + time.monotonic() - began
        # last, so that an interrupted measurement is made again
        scores = (*self.progress.scores, (step, score if is_finite else None))
        self.progress = replace(self.progress, scores=scores, seconds=took)
        self.save_checkpoint()

    # -- checkpoints --------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        state = {
            "run": self._digest,
            "progress": asdict(self.progress),
            "writer": self._writer.state(),
            "optimizer": self._optimizer.state_dict(),
            "best": self._best,
        }
        target = self._out / CHECKPOINT
        temporary = target.with_suffix(f".{os.getpid()}")
        temporary.unlink(missing_ok=True)
        with whole_file(temporary, target) as fd, os.fdopen(os.dup(fd), "wb") as file:
            torch.save(state, file)
            file.flush()
        sync_directory(self._out)
        self._saved_s = self.progress.seconds

    def resume(self, saved: Checkpoint) -> None:
        self._writer.load(saved.weights)
        self._optimizer.load_state_dict(saved.optimizer)
        self._best, self.progress = saved.best, saved.progress
        self._saved_s = self.progress.seconds


class Checkpoint(NamedTuple):
    """Where an interrupted run goes on."""

    progress: Progress
    weights: dict[str, torch.Tensor]
    """The writer's."""
    optimizer: dict[str, Any]
    best: dict[str, torch.Tensor] | None
    """The weights of the best writer that was measured."""


def read_checkpoint(out: Path, run_digest: str) -> Checkpoint | None:
    """The checkpoint in ``out``, if there is one.

    Raises :class:`InvalidInputError` for that of another run, and for a damaged one.
    """
    path = out / CHECKPOINT
    if not path.exists():
        return None
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        is_own = state["run"] == run_digest
        saved = state["progress"] if is_own else {"scores": ()}
        scores = tuple((step, score and Score(**score)) for step, score in saved["scores"])
        progress = Progress(**{**saved, "scores": scores})
        found = Checkpoint(progress, state["writer"], state["optimizer"], state["best"])
    except Exception as exc:  # torch and pickle raise all kinds
        raise InvalidInputError(
            f"checkpoint {path} is damaged or of another version of blendrag ({type(exc).__name__}); "
            "remove it to start over, or take another --out"
        ) from exc
    if not is_own:
        raise InvalidInputError(
            f"checkpoint {path} is of a run with another model, material, recipe or version of blendrag; "
            "take another --out, or remove it to start over"
        )
    return found


def _loss_of(found: Deviation) -> torch.Tensor:
    loss = found.answer.mean()
    if found.question.numel():  # the mean of nothing is not a number
        loss = loss + QUESTION_WEIGHT * found.question.mean()
    return loss


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C within this context takes effect at its end. Only the main thread gets it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    requests: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: requests.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if requests:
            signal.raise_signal(signal.SIGINT)


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate: a linear warm-up, then a cosine to :data:`FINAL_RATE`."""
    warm = max(1, round(WARMUP_SHARE * steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warm) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)
