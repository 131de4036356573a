"""Chat templates that write calls in other ways than :mod:`scripted`'s, and a tokenizer of one."""

from __future__ import annotations

import tiny
from blendrag.model.tokens import Tokens

HEAD = "<|bos|>{% if tools %}{{ tools | tojson }}{% endif %}"
LLAMA = HEAD + (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MISTRAL = HEAD + (
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


def tokens(template: str) -> Tokens:
    made = tiny.tokenizer()
    made.chat_template = template
    return Tokens(made)
