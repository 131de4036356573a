"""Layers with the same input are found by a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from blendrag.model.decode_weights import linear_layers
from blendrag.model.shared_inputs import shared_inputs

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@pytest.mark.parametrize("is_inference", [False, True])
def test_query_key_and_value_share_an_input_and_gate_and_up(
    is_inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.model.decode_weights.MIN_WEIGHTS", 1)
    model = tiny.llama(num_hidden_layers=2, intermediate_size=64)
    with torch.inference_mode(is_inference):
        found = shared_inputs(model, linear_layers(model))
    kinds = [tuple(name.rpartition(".")[2] for name in names) for names in found]
    assert kinds == [ATTENTION, ("o_proj",), MLP, ("down_proj",)] * 2 + [("lm_head",)]
    assert not any(module._forward_pre_hooks for module in model.modules())


class Layers(nn.Module):
    """Calls its layers as the test says."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.calls = calls

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> None:
        self.calls(self, torch.ones(1, 1, 4))


def written(model: Any, x: torch.Tensor) -> None:
    model.a(x)
    model.b(x.mul_(2))
    model.c(x)


def repeated(model: Any, x: torch.Tensor) -> None:
    for layer in (model.a, model.b, model.c, model.a):
        layer(x)


def failing(model: Any, x: torch.Tensor) -> None:
    model.a(x)
    model.b(x)
    raise ValueError("needs an image")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (written, [("a",), ("b", "c")]),
        (repeated, [("b", "c"), ("a",)]),
        (failing, [("a",), ("b",), ("c",)]),
    ],
)
def test_inputs_that_are_written_and_layers_that_do_not_run_once_are_apart(
    calls: Any, expected: Any
) -> None:
    model = Layers(calls)
    assert shared_inputs(model, dict(model.named_children())) == expected
