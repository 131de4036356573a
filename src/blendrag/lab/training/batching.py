"""Packed batches: many questions behind one context, each blind to the others, in one forward pass.

Owns: the padding, the question rows' mask and the attention function that uses it. Context rows
attend causally without a mask, which saves most of the quadratic cost; question rows see the real
context tokens and their own question so far. The positions of every question start where the
context ends, so one question alone looks exactly the same to the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from blendrag.lab.training.samples import Sample

ATTENTION = "blendrag_demo_packed"  # registered below, chosen by `attn_implementation`


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [B, Tc + Tq]
    positions: Tensor  # [B, Tc + Tq]
    mask: Tensor  # [B, 1, Tq, Tc + Tq], additive
    rows: Tensor  # [N] flat indices of the tokens that predict a supervised one
    targets: Tensor  # [N]
    first: Tensor  # [n_questions] where in `targets` each question's answer begins
    kinds: tuple[str, ...]  # of the questions


def collate(samples: Sequence[Sample], pad: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Contexts are padded on the right; what is padded there is hidden from the question rows by
    the mask.
    """
    n_context = max(len(s.tokens) for s in samples)
    n_asked = max(sum(len(q.tokens) for q in s.questions) for s in samples)
    width = n_context + n_asked
    tokens = torch.full((len(samples), width), pad)
    positions = torch.zeros((len(samples), width), dtype=torch.long)
    visible = torch.zeros((len(samples), n_asked, width), dtype=torch.bool)
    rows: list[int] = []
    targets: list[int] = []
    first: list[int] = []
    for b, sample in enumerate(samples):
        tokens[b, : len(sample.tokens)] = torch.tensor(sample.tokens)
        positions[b, : len(sample.tokens)] = torch.tensor(sample.positions)
        at = 0
        for asked in sample.questions:
            n, start = len(asked.tokens), n_context + at
            tokens[b, start : start + n] = torch.tensor(asked.tokens)
            positions[b, start : start + n] = torch.arange(n) + sample.question_position
            visible[b, at : at + n, : len(sample.tokens)] = True
            visible[b, at : at + n, start : start + n] = torch.ones(n, n, dtype=torch.bool).tril()
            rows += [b * width + start + i - 1 for i in range(asked.answer_at, n)]
            first.append(len(targets))
            targets += asked.tokens[asked.answer_at :]
            at += n
        visible[b, at:, 0] = True  # padding rows must see something, or their softmax is NaN
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[
        :, None
    ]
    return Batch(
        tokens.to(device),
        positions.to(device),
        mask.to(device),
        torch.tensor(rows).to(device),
        torch.tensor(targets).to(device),
        torch.tensor(first).to(device),
        tuple(asked.kind for sample in samples for asked in sample.questions),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """query, key, value [B, H, Tc + Tq, D] → [B, Tc + Tq, H, D]; `attention_mask` covers the
    last Tq rows only.
    """
    n_context = query.shape[2] - attention_mask.shape[2]
    context = scaled_dot_product_attention(
        query[:, :, :n_context],
        key[:, :, :n_context],
        value[:, :, :n_context],
        is_causal=True,
        scale=scaling,
    )
    asked = scaled_dot_product_attention(
        query[:, :, n_context:], key, value, attn_mask=attention_mask.to(query.dtype), scale=scaling
    )
    return torch.cat((context, asked), dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, packed_attention)
