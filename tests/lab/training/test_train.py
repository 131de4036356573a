"""The training script at a tiny size: from scratch, into the depths, and on after an interruption."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from blendrag.demo import demo_model_path
from blendrag.lab.training import train
from blendrag.lab.training.batching import Batch
from blendrag.lab.training.curriculum import DEEP, DEEP_FROM, SHALLOW, STAGES
from blendrag.lab.training.geometry import deepened
from blendrag.lab.training.train import EXIT_WEIGHT, Run

STEPS = 6
#: Steps trained before the model grows.
GROWS_AFTER = 3


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of a few hundred tokens a step, the second of them deep; the tokenizer as shipped."""
    (deep,) = (stage for stage in STAGES if stage.name == DEEP_FROM)
    first = replace(STAGES[0], until=(GROWS_AFTER - 1) / STEPS, move_on_at=2.0)
    last = replace(deep, until=1.0, move_on_at=2.0)
    made = tuple(replace(stage, tokens_per_step=256) for stage in (first, last))
    monkeypatch.setattr(train, "STAGES", made)
    monkeypatch.setattr(
        train,
        "train_tokenizer",
        lambda seed: PreTrainedTokenizerFast.from_pretrained(demo_model_path()),
    )


class Interrupted(Run):
    """Stopped as by Ctrl-C in the middle of the last of ``steps``."""

    steps = 0

    def _step(self, batch: Batch, rate: float) -> tuple[float, list[bool]]:
        if self.progress.step + 1 == self.steps:
            self.stop()
        return super()._step(batch, rate)


def trained(out: Path) -> Run:
    run = Run(out, seed=0, resume=False)
    run.train(minutes=1, steps=STEPS)
    return run


def test_from_scratch_it_grows_and_leaves_a_model_that_loads(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert (run.progress.step, run.progress.stage, run.progress.layers) == (STEPS, 1, DEEP)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert kept.config.num_hidden_layers == DEEP
    assert kept.dtype == torch.bfloat16
    for name, weight in run.model.state_dict().items():
        assert torch.equal(kept.state_dict()[name], weight.bfloat16())


@pytest.mark.parametrize("after", [GROWS_AFTER - 1, GROWS_AFTER, GROWS_AFTER + 1])
def test_interrupted_and_resumed_it_ends_with_the_same_weights(tmp_path: Path, after: int) -> None:
    whole = trained(tmp_path / "whole")
    run = Interrupted(tmp_path / "parts", seed=0, resume=False)
    run.steps = after
    run.train(minutes=1, steps=STEPS)
    assert run.progress.step == after
    assert run.progress.layers == (SHALLOW if after < GROWS_AFTER else DEEP)
    resumed = Run(tmp_path / "parts", seed=0, resume=True)
    assert resumed.progress == run.progress
    resumed.train(minutes=1, steps=STEPS)
    assert resumed.progress.last_loss == whole.progress.last_loss
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name


def test_answers_are_read_off_the_first_half_too_once_there_is_a_second(tmp_path: Path) -> None:
    """The second half is silent at first, so that what is read off either of them is the same."""
    run = Run(tmp_path, seed=0, resume=False)
    batch = run._batch(random.Random(0), 1)
    shallow, _ = run._step(batch, rate=0.0)
    run.adopt(deepened(run.model, DEEP))
    deep, _ = run._step(batch, rate=0.0)
    assert deep == pytest.approx((1 + EXIT_WEIGHT) * shallow)
