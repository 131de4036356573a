"""The hybrid of the embedded model: what it keeps, packed questions, transfer, training, resumption."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3_5ForCausalLM

from blendrag.demo import demo_model_path
from blendrag_lab.synthetic.samples import SampleWriter
from lab.training import hybrid, train
from lab.training.curriculum import SHALLOW, STAGES
from lab.training.hybrid import FULL, HybridRun, hybrid_of, masks, pack
from lab.training.train import collate


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


@pytest.fixture
def made(llama: LlamaForCausalLM) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    return hybrid_of(llama).eval()


@torch.no_grad()
def test_a_hybrid_keeps_what_is_no_attention(llama, made):
    assert len(made.model.layers) == SHALLOW
    assert [i for i, kind in enumerate(made.config.layer_types) if kind == "full_attention"] == [
        *FULL
    ]
    hidden = torch.randn(1, 3, llama.config.hidden_size)
    for new, old in zip(made.model.layers, llama.model.layers, strict=False):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            torch.testing.assert_close(getattr(new, norm)(hidden), getattr(old, norm)(hidden))
        assert torch.equal(new.mlp(hidden), old.mlp(hidden))
    torch.testing.assert_close(made.model.norm(hidden), llama.model.norm(hidden))
    assert torch.equal(made.lm_head.weight, llama.model.embed_tokens.weight)


@torch.no_grad()
def test_packed_questions_are_answered_as_if_each_were_alone(made, tokenizer):
    writer = SampleWriter(tokenizer)
    samples = [STAGES[-3].make(random.Random(seed), writer) for seed in (1, 2)]
    batch = collate(samples, tokenizer.pad_token_id, torch.float32, made.device)
    alone = []
    for sample in samples:
        for question in sample.questions[:3]:
            ids = [*sample.tokens, *question.tokens]
            asked = range(sample.question_position, sample.question_position + len(question.tokens))
            positions = torch.tensor([[*sample.positions, *asked]])
            logits = made(input_ids=torch.tensor([ids]), position_ids=positions).logits[0]
            alone.append(logits[len(sample.tokens) :])
    pack(made)
    packed = made(batch.tokens, masks(batch), batch.positions, use_cache=False).logits.flatten(0, 1)
    n = len(samples[0].questions)
    questions = (*batch.questions[:3], *batch.questions[n : n + 3])
    found = torch.cat([packed[list(question)] for question in questions])
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-3, atol=1e-3)


def test_a_run_transfers_layers_then_trains_all_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid, "TRANSFER_STEPS", 2)
    monkeypatch.setattr(train, "STAGES", [replace(s, tokens_per_step=512) for s in STAGES])
    run = HybridRun(tmp_path, seed=0, resume=False)
    start = {name: weight.clone() for name, weight in run.model.state_dict().items()}

    def changed() -> set[str]:
        now = run.model.state_dict()
        return {name for name in start if not torch.equal(now[name], start[name])}

    run.train(minutes=1, steps=2)
    moved = changed()
    assert moved == {name for name in start if "linear_attn" in name or "self_attn" in name}
    run.train(minutes=1, steps=4)
    assert changed() == set(start)
    resumed = HybridRun(tmp_path, seed=0, resume=True)
    assert resumed.progress == run.progress
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, run.model.state_dict()[name]), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3_5_text"
