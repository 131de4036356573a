"""The shape of the demo model, and how it grows deeper while it learns.

Owns: width, heads and rotary base; the weights of a deeper model that computes the same. Does not know:
data, optimiser, when to grow.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from blendrag.lab.training.curriculum import DEEP


def demo_config(tokenizer: PreTrainedTokenizerBase, layers: int = DEEP) -> LlamaConfig:
    """Layers of width 160. A large rotary base, so that positions far beyond the trained ones
    stay near the known.
    """
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def deepened(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model that computes the same with `layers` layers, a multiple of what `model` has: behind
    the last one copies of all that add nothing yet (stacked on top as by Gong et al. 2019, silent as
    in LLaMA Pro, §3.2).
    """
    settings = {k: v for k, v in model.config.to_dict().items() if k != "layer_types"}
    config = LlamaConfig(**settings | {"num_hidden_layers": layers})
    deep = LlamaForCausalLM(config)
    shallow = model.config.num_hidden_layers
    weights = {k: v for k, v in model.state_dict().items() if ".layers." not in k}
    for name, weight in model.model.layers.state_dict().items():
        index, rest = name.split(".", 1)
        for copy in range(layers // shallow):
            silent = copy and rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            key = f"model.layers.{int(index) + copy * shallow}.{rest}"
            weights[key] = torch.zeros_like(weight) if silent else weight.clone()
    deep.load_state_dict(weights)
    return deep.to(model.device)
