"""A tiny Llama that gives scripted answers, with chat templates that render tools and calls.

Inside ``generate`` one logit is raised at each step, so that decoding spells a given reply and then ends.
Everything else is the real model, so tools, structured output, stop strings, logprobs and usage are tested
through the whole engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import chain, repeat
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from blendrag.engine import BlendEngine
from blendrag.model.tokens import Tokens

#: Replies: pairs of a text in the prompt and the reply to it, or a function of the prompt.
Script = Sequence[tuple[str, str]] | Callable[[str], str]

#: How far the logit of the scripted token is above all others.
LIFT = 30.0

#: Renders tools and calls like Qwen's and Hermes' templates.
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


#: Templates that write calls in other ways.
_HEAD = "<|bos|>{% if tools %}{{ tools | tojson }}{% endif %}"
LLAMA = _HEAD + (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MISTRAL = _HEAD + (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id|length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% endfor %}]{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}'
)
XML = LLAMA.replace(
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}',
    "<function={{ m.tool_calls[0].function.name }}>\n</function>",
)


def tokens(template: str | dict[str, str] | None, *special: str) -> Tokens:
    """:func:`tiny.tokenizer` with this chat template and more control tokens."""
    made = tiny.tokenizer()
    if special:
        made.add_special_tokens({"extra_special_tokens": ["<|start|>", *special]})
    made.chat_template = template
    return Tokens(made)


def tokenizer() -> Any:
    """:func:`tiny.tokenizer` with a chat template that renders tools."""
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


class ScriptedLlama(LlamaForCausalLM):
    """Replies with what :attr:`script` has for a prompt, otherwise with :attr:`default`."""

    script: Script = ()
    default: str = "I do not know."
    pause_s: float = 0.0
    """Sleep before each forward of ``generate``, to leave time for an interrupt."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.words: Any = tokenizer()
        self.prompts: list[str] = []
        """Decoded inputs of ``generate``, the newest last."""
        self.forwards = 0
        """Forwards inside ``generate`` of all requests."""
        # hooks run for each request, forwards may be for several
        self.register_forward_pre_hook(self._begin)
        self.register_forward_hook(self._say)

    def reply_to(self, prompt: str) -> str:
        if callable(self.script):
            return self.script(prompt)
        return next((reply for text, reply in self.script if text in prompt), self.default)

    def generate(self, inputs: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        prompt = self.words.decode(inputs[0], skip_special_tokens=False)
        self.prompts.append(prompt)
        words = self.words.encode(self.reply_to(prompt), add_special_tokens=False)
        token = _reply.set(chain(words, repeat(self.words.eos_token_id)))
        try:
            return super().generate(inputs, **kwargs)
        finally:
            _reply.reset(token)

    def _begin(self, *_: Any) -> None:
        if _reply.get() is not None:
            self.forwards += 1
            if self.pause_s:
                time.sleep(self.pause_s)

    def _say(self, module: Any, args: Any, out: Any) -> None:
        reply = _reply.get()
        if reply is not None:  # else the gate, an ingest: the model as it is
            out.logits[:, -1, next(reply)] = out.logits[:, -1].amax(-1) + LIFT


_reply: ContextVar[Iterator[int] | None] = ContextVar("reply", default=None)
"""What is still to be said in this ``generate``."""


def model(script: Script = (), default: str = "I do not know.", seed: int = 0) -> ScriptedLlama:
    """A seeded model with that script."""
    torch.manual_seed(seed)
    given = {**tiny.COMMON, "num_hidden_layers": 2, "initializer_range": 0.2}
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
