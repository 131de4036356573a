"""Distil a writer: a LoRA that encodes chunks so that answers over stored KV come near a full prefill's."""

from blendrag.distillation.adapt import TrainingCorpus, adapt
from blendrag.distillation.report import AdaptReport
from blendrag.distillation.trainer import Progress, Recipe, Score

__all__ = ["AdaptReport", "Progress", "Recipe", "Score", "TrainingCorpus", "adapt"]
