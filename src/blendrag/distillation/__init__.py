"""Distil a writer: a LoRA that encodes chunks so that answers over stored KV come near a full prefill's."""

from blendrag.distillation.adapt import AdaptReport, TrainingCorpus, adapt
from blendrag.distillation.trainer import Progress, Recipe, Score

__all__ = ["AdaptReport", "Progress", "Recipe", "Score", "TrainingCorpus", "adapt"]
