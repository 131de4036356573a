"""The curriculum, and the training script at a tiny size: growth, interruption, resumption."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from blendrag_lab.synthetic.samples import SampleWriter
from lab.training import train
from lab.training.curriculum import DEEP, DEEP_FROM, SHALLOW, STAGES
from lab.training.train import (
    ATTENTION,
    EXIT_WEIGHT,
    Batch,
    TrainingRun,
    collate,
    deepened,
    demo_config,
)

STEPS = 4
#: Steps before the model grows.
GROWS_AFTER = 2


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_samples_show_what_they_ask(stage, tokenizer):
    writer = SampleWriter(tokenizer)
    asked = 0
    for seed in range(6):
        sample = stage.make(random.Random(seed), writer)
        assert len(sample.tokens) == len(sample.positions) == len(sample.chunks)
        assert sample.positions == sorted(sample.positions)
        for question in sample.questions:
            asked += 1
            answer = question.tokens[question.answer_at :]
            assert answer
            if question.kind != "unanswerable":
                known = set(sample.tokens) | set(question.tokens[: question.answer_at])
                assert known | {writer.end} >= set(answer)
    assert asked >= 6


def test_stages_end_one_after_the_other():
    assert [s.until for s in STAGES] == sorted(s.until for s in STAGES)
    assert STAGES[-1].until == 1.0
    assert DEEP_FROM in {s.name for s in STAGES}


def test_a_deepened_model_computes_the_same_and_learns(tokenizer):
    torch.manual_seed(0)
    model = LlamaForCausalLM(demo_config(tokenizer, SHALLOW))
    deep = deepened(model, DEEP)
    ids = torch.randint(10, 1000, (1, 40))
    logits = deep(ids).logits
    torch.testing.assert_close(logits, model(ids).logits)
    logits.sum().backward()
    grown = deep.model.layers[SHALLOW].self_attn.o_proj.weight.grad
    assert grown is not None
    assert float(grown.abs().max()) > 0


@torch.no_grad()
def test_packed_questions_are_answered_as_if_each_were_alone(tokenizer):
    torch.manual_seed(0)
    config = demo_config(tokenizer, 2)
    config.initializer_range = 0.2
    model = LlamaForCausalLM(config).eval()
    writer = SampleWriter(tokenizer)
    samples = [STAGES[-3].make(random.Random(seed), writer) for seed in (1, 2)]
    batch = collate(samples, tokenizer.pad_token_id, torch.float32, model.device)
    alone = []
    for sample in samples:
        for question in sample.questions:
            ids = [*sample.tokens, *question.tokens]
            asked = range(sample.question_position, sample.question_position + len(question.tokens))
            positions = torch.tensor([[*sample.positions, *asked]])
            logits = model(input_ids=torch.tensor([ids]), position_ids=positions).logits[0]
            alone.append(logits[len(sample.tokens) + question.answer_at - 1 : -1])
    model.set_attn_implementation(ATTENTION)
    packed = model(batch.tokens, batch.mask, batch.positions, use_cache=False)
    torch.testing.assert_close(
        packed.logits.flatten(0, 1)[batch.rows], torch.cat(alone), rtol=1e-3, atol=1e-3
    )


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> None:
    """Two stages of a few hundred tokens a step, the second of them deep; the shipped tokenizer."""
    (deep,) = (stage for stage in STAGES if stage.name == DEEP_FROM)
    first = replace(STAGES[0], until=(GROWS_AFTER - 1) / STEPS, move_on_at=2.0)
    last = replace(deep, until=1.0, move_on_at=2.0)
    made = tuple(replace(stage, tokens_per_step=256) for stage in (first, last))
    monkeypatch.setattr(train, "STAGES", made)
    monkeypatch.setattr(train, "train_tokenizer", lambda seed: tokenizer)


class Interrupted(TrainingRun):
    """Stopped as by Ctrl-C during the last of ``steps``."""

    steps = 0

    def train_step(self, batch: Batch, rate: float) -> tuple[float, list[bool]]:
        if self.progress.step + 1 == self.steps:
            self.stop()
        return super().train_step(batch, rate)


@pytest.mark.usefixtures("_tiny")
def test_an_interrupted_and_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = TrainingRun(tmp_path / "whole", seed=0, resume=False)
    whole.train(minutes=1, steps=STEPS)
    assert (whole.progress.step, whole.progress.stage, whole.progress.layers) == (STEPS, 1, DEEP)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert kept.dtype == torch.bfloat16
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(kept.state_dict()[name], weight.bfloat16())
    for after in (GROWS_AFTER - 1, GROWS_AFTER):
        run = Interrupted(tmp_path / str(after), seed=0, resume=False)
        run.steps = after
        run.train(minutes=1, steps=STEPS)
        assert run.progress.step == after
        assert run.progress.layers == (SHALLOW if after < GROWS_AFTER else DEEP)
        resumed = TrainingRun(tmp_path / str(after), seed=0, resume=True)
        assert resumed.progress == run.progress
        resumed.train(minutes=1, steps=STEPS)
        assert resumed.progress.last_loss == whole.progress.last_loss
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole.model.state_dict()[name]), name


@pytest.mark.usefixtures("_tiny")
def test_a_deep_model_is_also_supervised_after_its_first_half(tmp_path):
    """The second half adds nothing at first, so both losses are equal."""
    run = TrainingRun(tmp_path, seed=0, resume=False)
    batch = run.make_batch(random.Random(0), 1)
    shallow, _ = run.train_step(batch, rate=0.0)
    run.adopt(deepened(run.model, DEEP))
    deep, _ = run.train_step(batch, rate=0.0)
    assert deep == pytest.approx((1 + EXIT_WEIGHT) * shallow)
