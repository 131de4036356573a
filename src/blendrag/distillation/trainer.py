"""The loop: draw prompts, compare teacher and student, step; measure on held-out prompts; keep the best.

Step i draws its prompts from (seed, i) alone, so a run that is resumed goes on as if it had not stopped.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from blendrag.distillation.forwards import Deviation, Forwards, Target
from blendrag.distillation.material import Material
from blendrag.distillation.prompts import ChunkPrompt
from blendrag.distillation.writer import TrainedWriter
from blendrag.errors import InvalidInputError, ModelError
from blendrag.store.durable import sync_directory, whole_file

#: Weight of the tail's tokens before the answer in the loss.
QUESTION_WEIGHT = 0.2
WARMUP_SHARE, FINAL_RATE = 0.05, 0.1
BETAS, MAX_GRADIENT_NORM = (0.9, 0.98), 1.0
CHECKPOINT = "checkpoint.pt"


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
    held_out: int = 16
    """Prompts that are never trained on and decide which writer is kept; no more than they have questions."""
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
        if not 0.0 < self.learning_rate < 1.0:
            raise InvalidInputError(
                f"learning_rate is {self.learning_rate}, expected a number between 0 and 1"
            )


@dataclass(frozen=True)
class Score:
    """How far answers over stored KV are from full prefill's; KL in nats per answer token."""

    questions: int
    mean_kl: float
    median_kl: float
    """Of the means of questions."""
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
        self._forwards, self._prompts = forwards, prompts
        self._targets: list[list[Target]] = []
        for number, prompt in enumerate(prompts):
            watch(number, len(prompts))
            found = forwards.teacher(prompt)
            # only what answers are taken from; in float16 a logit of 20 is off by at most 0.01
            kept = [t._replace(logits=t.logits[-len(t.answer) :].half()) for t in found]
            self._targets.append(kept)

    @torch.no_grad()
    def score(self, writes: bool = True) -> Score:
        found, tasks = [], []
        for prompt, targets in zip(self._prompts, self._targets, strict=True):
            given = [t._replace(logits=t.logits.float()) for t in targets]
            found += self._forwards.deviations(prompt, given, writes)
            tasks += [prompt.task] * len(targets)
        return Score.of(found, tasks)


@dataclass(frozen=True)
class Progress:
    """Where a run is. ``losses``: of every step; ``scores``: step and score of every measurement."""

    step: int = 0
    seconds: float = 0.0
    losses: tuple[float, ...] = ()
    scores: tuple[tuple[int, Score], ...] = ()

    @property
    def best(self) -> tuple[int, Score] | None:
        return min(self.scores, key=lambda each: each[1].mean_kl, default=None)


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class _Before:
    """What a step changes, as it was before step number ``step``, counted from 0."""

    step: int
    writer: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


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
    ) -> None:
        """``run_digest``: tells this run from others, whose checkpoints it does not take."""
        self._writer, self._forwards, self._material = writer, forwards, material
        self._held_out, self._recipe, self._out = held_out, recipe, out
        self._digest = run_digest
        self._parameters = list(writer.parameters.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate, betas=BETAS, weight_decay=0.0
        )
        self._best: dict[str, torch.Tensor] | None = None
        self._before: _Before | None = None
        self.progress = Progress()

    # -- the loop -----------------------------------------------------------------------------------

    def run(self, watch: Watch = lambda progress: None) -> Progress:
        """Train to the end, then make the best writer the current one.

        After Ctrl-C the checkpoint holds every finished step, and :class:`KeyboardInterrupt` is raised.
        Raises :class:`ModelError` if the loss is not a number.
        """
        try:
            self._measure_if_due()  # a run may have been interrupted before it
            while not self._is_over:
                self._step()
                self._measure_if_due()
                watch(self.progress)
        except KeyboardInterrupt:
            before = self._before
            if before is not None and before.step == self.progress.step:  # a step was not finished
                self._writer.load(before.writer)
                self._optimizer.load_state_dict(before.optimizer)
            self.save_checkpoint()
            raise
        if self._best is not None:
            self._writer.load(self._best)
        return self.progress

    @property
    def _is_over(self) -> bool:
        done, best = self.progress, self.progress.best
        if done.step >= self._recipe.steps:
            return True
        since = sum(step > best[0] for step, _ in done.scores) if best else 0
        return since >= self._recipe.patience

    def _step(self) -> None:
        began, number, recipe = time.monotonic(), self.progress.step, self._recipe
        rng = random.Random(f"{recipe.seed} {number}")
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for _ in range(recipe.batch):
            prompt = self._material.draw(rng)
            each = self._loss(prompt) / recipe.batch
            each.backward()
            loss += each.item()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        if not math.isfinite(loss) or not bool(torch.isfinite(norm)):
            raise self._not_a_number(f"the loss of step {number + 1}")
        optimizer = deepcopy(self._optimizer.state_dict())
        self._before = _Before(number, self._writer.state(), optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate_at(number, recipe.steps)
        self._optimizer.step()
        took = self.progress.seconds + time.monotonic() - began
        losses = (*self.progress.losses, loss)
        self.progress = replace(self.progress, step=number + 1, seconds=took, losses=losses)

    def _not_a_number(self, what: str) -> ModelError:
        kept = "nothing was kept"
        if self._best is not None:
            kept = f"the writer of the best measurement so far is in {self._out}"
        return ModelError(
            f"{what} is not a number, and training ended; {kept}; take a lower --learning-rate and another "
            "--out"
        )

    def _loss(self, prompt: ChunkPrompt) -> torch.Tensor:
        found = self._forwards.deviations(prompt, self._forwards.teacher(prompt))
        each = [d.answer.mean() + QUESTION_WEIGHT * d.question.mean() for d in found]
        return torch.stack(each).mean()

    def _measure_if_due(self) -> None:
        step, recipe = self.progress.step, self._recipe
        is_due = step > 0 and (step % recipe.measure_every == 0 or step == recipe.steps)
        if not is_due or any(at == step for at, _ in self.progress.scores):
            return
        began, before = time.monotonic(), self.progress.best
        score = self._held_out.score()
        if not math.isfinite(score.mean_kl):
            raise self._not_a_number(f"the KL of held-out prompts after step {step}")
        if before is None or score.mean_kl < before[1].mean_kl:
            self._best = self._writer.state()
            self._writer.save(self._out)
        took = self.progress.seconds + time.monotonic() - began
        # last, so that an interrupted measurement is made again
        scores = (*self.progress.scores, (step, score))
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

    def resume(self) -> bool:
        """Go on from the checkpoint; ``False`` without one.

        Raises :class:`InvalidInputError` for that of another run, and for a damaged one.
        """
        path = self._out / CHECKPOINT
        if not path.exists():
            return False
        try:
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
            is_own = state["run"] == self._digest
        except Exception as exc:  # torch and pickle raise all kinds
            raise InvalidInputError(
                f"checkpoint {path} is damaged ({type(exc).__name__}), expected one that this command wrote; "
                "remove it to begin anew"
            ) from exc
        if not is_own:
            raise InvalidInputError(
                f"checkpoint {path} is of a run with another model, material or recipe; take another --out, "
                "or remove it to begin anew"
            )
        self._writer.load(state["writer"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._best = state["best"]
        saved = state["progress"]
        scores = tuple((step, Score(**score)) for step, score in saved["scores"])
        self.progress = Progress(**{**saved, "scores": scores})
        return True


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate: a linear warm-up, then a cosine to :data:`FINAL_RATE`."""
    warm = max(1, round(WARMUP_SHARE * steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warm) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)
