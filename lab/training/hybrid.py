"""Makes a hybrid of the embedded model: `python -m lab.training.hybrid --out DIR --seed 0 --minutes 52`.

The first half of the embedded model, which was trained to answer by itself, with gated delta layers (Qwen3.5)
in place of four of its six attention layers, as in The Mamba in the Llama (Wang et al. 2024). For
`TRANSFER_STEPS` each layer learns to add to the embedded model's activations what the attention in its place
adds (LoLCATs, Zhang et al. 2024, §3.2). From then on the answers of stage `STAGE` train all weights.

A recurrent layer cannot hide the questions of a batch from one another with a mask. It runs over the contexts
first, then over every question from the state that its context left behind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from blendrag.demo import demo_model_path
from lab.training.curriculum import SHALLOW, STAGES
from lab.training.train import ATTENTION, Batch, TrainingProgress, TrainingRun, main

#: Layers of full attention: the embedded model answers a little worse if all others see 24 tokens only.
FULL = (3, 5)
TRANSFER_STEPS = 80
STAGE = "prompts"
#: Tokens that a linear layer computes at once, fewer than by default: a question has about 20.
BLOCK_TOKENS = 32


def hybrid_of(llama: LlamaForCausalLM) -> Qwen3_5ForCausalLM:
    """A hybrid of the first `SHALLOW` layers of `llama`."""
    config = llama.config
    heads, width = config.num_attention_heads, config.head_dim
    made = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=SHALLOW,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=width,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=width,
            linear_value_head_dim=width,
            layer_types=[
                "full_attention" if i in FULL else "linear_attention" for i in range(SHALLOW)
            ],
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={**config.rope_parameters, "partial_rotary_factor": 1.0},
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=True,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    )
    given = {k: v for k, v in llama.state_dict().items() if "self_attn" not in k}
    for name in given:
        if name.endswith("norm.weight"):  # here the weight is added to 1
            given[name] = given[name] - 1
    made.load_state_dict(given, strict=False)  # all but attention, and no layers after these
    with torch.no_grad():
        for new, old in zip(made.model.layers, llama.model.layers, strict=False):
            projections = old.self_attn.q_proj, old.self_attn.k_proj, old.self_attn.v_proj
            query, key, value = (projection.weight for projection in projections)
            if new.block_type == "full_attention":
                _fill_attention(new.self_attn, query, key, value, old.self_attn.o_proj.weight)
            else:
                _fill_linear(new.linear_attn, torch.cat((query, key, value)))
                new.linear_attn.out_proj.weight.copy_(old.self_attn.o_proj.weight)
    return made


def _fill_attention(layer: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Gates of one half, which the output projection undoes; logits have the scale of the normed heads."""
    gated = layer.q_proj.weight.view(-1, 2, layer.head_dim, query.shape[1])  # [H, 2, D, hidden]
    gated[:, 0] = query.view(-1, layer.head_dim, query.shape[1])
    gated[:, 1] = 0
    layer.k_proj.weight.copy_(key)
    layer.v_proj.weight.copy_(value)
    layer.o_proj.weight.copy_(2 * out)
    layer.q_norm.weight.fill_(0.5)
    layer.k_norm.weight.fill_(0.5)


def _fill_linear(layer: Any, projections: Tensor) -> None:
    """Convolutions that pass the last token on; heads that forget within one to some hundreds of tokens."""
    layer.in_proj_qkv.weight.copy_(projections)
    layer.conv1d.weight[..., -1] += 1
    layer.A_log.copy_(torch.linspace(-6, 0, layer.num_v_heads))


@dataclass(frozen=True)
class Packing:
    """Where contexts and questions are in the flat tokens of a batch. Padding is the index after the last."""

    contexts: Tensor  # [B, Tc], padded on the left, where a state is still zero
    questions: Tensor  # [N, q], padded on the right
    context_of: Tensor  # [N] the row of each question's context

    @classmethod
    def of(cls, batch: Batch) -> "Packing":
        width, padding, device = batch.tokens.shape[1], batch.tokens.numel(), batch.tokens.device
        longest, most = max(map(len, batch.contexts)), max(map(len, batch.questions))
        return cls(
            torch.tensor([[padding] * (longest - len(c)) + [*c] for c in batch.contexts]).to(
                device
            ),
            torch.tensor([[*q] + [padding] * (most - len(q)) for q in batch.questions]).to(device),
            torch.tensor([q.start // width for q in batch.questions]).to(device),
        )


@dataclass
class LayerStates:
    """The part of a cache that a gated delta layer uses. Unlike that of transformers it overwrites nothing,
    which a gradient would need."""

    conv: Tensor | None = None  # [B, channels, width of the convolution]
    recurrent: Tensor | None = None  # [B, H, D, D]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int) -> Tensor:
        """`inputs` [B, channels, T] → the same after those of the state."""
        whole = inputs if self.conv is None else torch.cat((self.conv, inputs), dim=-1)
        self.conv = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent: Tensor, layer_idx: int) -> None:
        self.recurrent = recurrent

    def rows(self, rows: Tensor) -> "LayerStates":
        assert self.conv is not None
        assert self.recurrent is not None
        return LayerStates(self.conv[rows], self.recurrent[rows])


def packed_linear(
    forward: Callable[..., Tensor], hidden_states: Tensor, attention_mask: Packing, **_: Any
) -> Tensor:
    """hidden_states [B, Tc + Tq, D] → the same, through a gated delta layer's `forward`."""
    flat = hidden_states.flatten(0, 1)
    flat = torch.cat((flat, flat.new_zeros(1, flat.shape[-1])))  # [B·(Tc + Tq) + 1, D]
    packing, states = attention_mask, LayerStates()
    run = partial(forward, chunk_size=BLOCK_TOKENS)
    contexts = run(flat[packing.contexts], cache_params=states)
    questions = run(flat[packing.questions], cache_params=states.rows(packing.context_of))
    out = torch.zeros_like(flat)
    for rows, computed in ((packing.contexts, contexts), (packing.questions, questions)):
        out = out.index_copy(0, rows.flatten(), computed.flatten(0, 1))
    return out[:-1].view_as(hidden_states)


def pack(model: PreTrainedModel) -> None:
    """Let `model` take the `masks` of a batch."""
    model.set_attn_implementation(ATTENTION)
    for layer in model.get_decoder().layers:
        if layer.block_type == "linear_attention":
            layer.linear_attn.forward = partial(packed_linear, layer.linear_attn.forward)


def masks(batch: Batch) -> dict[str, Any]:
    """What the model takes for its attention mask, by kind of layer."""
    return {"full_attention": batch.mask, "linear_attention": Packing.of(batch)}


class HybridRun(TrainingRun):
    """Trains a hybrid of the embedded model."""

    tokens_share = 0.5

    def new_tokenizer(self, seed: int) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(demo_model_path())

    def new_progress(self, seed: int) -> TrainingProgress:
        (stage,) = (i for i, stage in enumerate(STAGES) if stage.name == STAGE)
        return TrainingProgress(seed=seed, stage=stage)

    def new_model(self) -> PreTrainedModel:
        given = LlamaForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
        given.model.layers = given.model.layers[:SHALLOW]
        given.set_attn_implementation(ATTENTION)
        self.teacher = given.to(self.device).requires_grad_(False)
        return hybrid_of(given)

    def adopt(self, model: PreTrainedModel) -> None:
        super().adopt(model)
        pack(model)

    def move_on(self, done: float) -> None:
        """The stage stays; what the transfer left as it was starts slowly."""
        if self.progress.step == TRANSFER_STEPS:
            self.progress.warm_from = TRANSFER_STEPS

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.progress.step < TRANSFER_STEPS:
            return self._transfer(batch)
        out = self.model.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=masks(batch),
            use_cache=False,
        )
        logits = self.read(out.last_hidden_state, batch)
        return cross_entropy(logits.float(), batch.targets), logits

    def _transfer(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """→ (how far the layers are from the embedded model's over its activations, its logits)."""
        seen: list[tuple[dict[str, Any], Tensor]] = []
        hooks = [
            layer.self_attn.register_forward_hook(
                lambda module, args, given, out: seen.append((given, out[0])), with_kwargs=True
            )
            for layer in self.teacher.model.layers
        ]
        try:
            out = self.teacher.model(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                attention_mask=batch.mask,
                use_cache=False,
            )
        finally:
            for hook in hooks:
                hook.remove()
        mask = masks(batch)
        rows = torch.tensor([i for each in (*batch.contexts, *batch.questions) for i in each])
        losses = []
        for layer, (given, added) in zip(self.model.model.layers, seen, strict=True):
            how = {"attention_mask": mask[layer.block_type]}
            if layer.block_type == "full_attention":
                how["position_embeddings"] = given["position_embeddings"]
                mine = layer.self_attn(given["hidden_states"], **how)[0]
            else:
                mine = layer.linear_attn(given["hidden_states"], **how)
            found, expected = (t.flatten(0, 1)[rows] for t in (mine, added))
            losses.append(mse_loss(found, expected) / expected.var())
        return torch.stack(losses).mean(), self.read(out.last_hidden_state, batch)


if __name__ == "__main__":
    main(HybridRun, "Train a hybrid of the embedded model.")
