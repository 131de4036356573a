"""A model that says what a test wants, and is a real one in everything else.

:class:`ScriptedLlama` runs a tiny Llama, KV, hooks and all, and only inside ``generate`` lifts one
logit at each step, so that decoding spells a given reply and then ends. So tools, structured output,
stop strings, logprobs and usage are tested through the whole engine. The tokenizer's chat template
renders tools and calls as Qwen's and Hermes' do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from blendrag.engine import BlendEngine

#: What to say to a prompt: the reply beside the first text found in it, or a function of it.
Script = Sequence[tuple[str, str]] | Callable[[str], str]

#: By how much the logit of the scripted token stands above all others.
LIFT = 30.0

TEMPLATE = """<|bos|>
{%- if tools %}<|start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif -%}
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>
{% elif messages[0]['role'] == 'system' %}<|start|>system
{{ messages[0]['content'] }}<|end|>
{% endif %}
{%- for m in messages %}
{%- if m['role'] in ('user', 'assistant') or (m['role'] == 'system' and not loop.first) %}
{{- '<|start|>' + m['role'] + '\n' + (m['content'] or '') }}
{%- for call in m['tool_calls'] or [] %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor %}
{{- '<|end|>\n' }}
{%- elif m['role'] == 'tool' %}
{{- '<|start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""


def tokenizer() -> Any:
    """:func:`tiny.tokenizer` with a chat template that knows tools."""
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


class ScriptedLlama(LlamaForCausalLM):
    """Says what :attr:`script` has for a prompt, otherwise :attr:`default`."""

    script: Script = ()
    default: str = "I do not know."
    pause_s: float = 0.0
    """Slept before each forward of ``generate``, so that there is time to interrupt."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.words: Any = tokenizer()
        self.prompts: list[str] = []
        """What ``generate`` was given, decoded, the newest last."""
        self.forwards = 0
        """Forwards inside ``generate`` so far, of all requests."""
        self._reply: list[int] | None = None
        self._said = 0

    def reply_to(self, prompt: str) -> str:
        if callable(self.script):
            return self.script(prompt)
        return next((reply for text, reply in self.script if text in prompt), self.default)

    def generate(self, inputs: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        prompt = self.words.decode(inputs[0], skip_special_tokens=False)
        self.prompts.append(prompt)
        words = self.words.encode(self.reply_to(prompt), add_special_tokens=False)
        self._reply, self._said = [*words, self.words.eos_token_id], 0
        try:
            return super().generate(inputs, **kwargs)
        finally:
            self._reply = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._reply is None:  # the gate, an ingest: the model as it is
            return super().forward(*args, **kwargs)
        self.forwards += 1
        if self.pause_s:
            time.sleep(self.pause_s)
        out = super().forward(*args, **kwargs)
        token = self._reply[min(self._said, len(self._reply) - 1)]
        out.logits[:, -1, token] = out.logits[:, -1].amax(-1) + LIFT
        self._said += 1
        return out


def model(script: Script = (), default: str = "I do not know.", seed: int = 0) -> ScriptedLlama:
    """A seeded model with that script."""
    torch.manual_seed(seed)
    given = {**tiny.COMMON, "initializer_range": 0.2}
    made = ScriptedLlama(LlamaConfig(**given)).eval()
    made.script, made.default = script, default
    return made


def engine(
    script: Script, root: Any, default: str = "I do not know.", **changes: Any
) -> BlendEngine:
    """An engine whose answers are scripted; up to 200 new tokens, so that replies fit."""
    given = {"tokenizer": tokenizer(), "max_new_tokens": 200, **changes}
    return tiny.engine(model(script, default), root, **given)


def call(name: str, **arguments: Any) -> str:
    """How this model writes a call of a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
