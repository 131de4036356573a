"""The curriculum: every stage makes samples that answer from what they show, and depth changes
nothing when it comes.
"""

import random

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from blendrag.demo import demo_model_path
from blendrag.lab.training.curriculum import DEEP, DEEP_FROM, SHALLOW, STAGES, Stage
from blendrag.lab.training.geometry import deepened, demo_config
from blendrag.lab.training.samples import Writer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_samples_ask_what_they_show(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> None:
    writer = Writer(tokenizer)
    asked = 0
    for seed in range(10):
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
    assert asked >= 10


def test_stages_end_one_after_the_other() -> None:
    assert [s.until for s in STAGES] == sorted(s.until for s in STAGES)
    assert STAGES[-1].until == 1.0
    assert DEEP_FROM in {s.name for s in STAGES}


def test_a_deepened_model_computes_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(demo_config(tokenizer, SHALLOW))
    deep = deepened(model, DEEP)
    ids = torch.randint(10, 1000, (1, 40))
    assert deep.config.num_hidden_layers == DEEP
    torch.testing.assert_close(deep(ids).logits, model(ids).logits)
    logits = deep(ids).logits
    logits.sum().backward()
    first = deep.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(model.model.norm(first[SHALLOW]), model.model(ids).last_hidden_state)
    grown = deep.model.layers[SHALLOW].self_attn.o_proj.weight.grad
    assert grown is not None
    assert float(grown.abs().max()) > 0  # and it learns
