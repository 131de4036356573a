"""Chat templates that write calls and reasoning as those of known models do."""

from __future__ import annotations

import scripted

_HERMES = (
    """{"name": "{{ call['function']['name'] }}", """
    """"arguments": {{ call['function']['arguments'] | tojson }}}"""
)
#: Thinking models: the template closes thinking that is turned off, or opens thinking.
QWEN3 = scripted.TEMPLATE.replace(
    "'\n' + (m['content'] or '')",
    "'\n' + ('<think>\n\n</think>\n\n' if m['role'] == 'assistant' and loop.last else '')"
    " + (m['content'] or '')",
).replace(
    "{{ '<|start|>assistant\n' }}",
    "{{ '<|start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
QWQ = scripted.TEMPLATE.replace(
    "{{ '<|start|>assistant\n' }}", "{{ '<|start|>assistant\n<think>\n' }}"
)
CODER = scripted.TEMPLATE.replace(
    _HERMES,
    "<function={{ call['function']['name'] }}>\n"
    "{% for k, v in call['function']['arguments'].items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>",
)
GLM = scripted.TEMPLATE.replace(
    _HERMES,
    "{{ call['function']['name'] }}{% for k, v in call['function']['arguments'].items() %}"
    "\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}",
).replace("<tool_call>\n{{ call", "<tool_call>{{ call")
_TURNS = "<|bos|>{{ tools }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
_END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
PHI = (
    _TURNS
    + "{% for c in m.tool_calls or [] %}<|tool_call|>[{{ c.function | tojson }}]<|/tool_call|>{% endfor %}"
    + _END.replace("assistant", "assistant\n")
)
GRANITE = _TURNS + "{# <|tool_call|> #}" + _END.replace("assistant", "assistant\n")
HARMONY = (
    "<|bos|>{{ tools }}{% for m in messages %}{% if m.tool_calls %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
KIMI = (
    _TURNS
    + "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    + _END.replace("assistant", "assistant\n")
)
#: Ends a turn in another way after a call than after an answer.
COMMAND = (
    _TURNS.replace("{{ m.content }}", "{{ m.content or '' }}")
    + "{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}"
    + """{{ '\n    {"tool_call_id": "' + loop.index0|string + '", "tool_name": "' + c.function.name }}"""
    + """", "parameters": {{ c.function.arguments | tojson }}}{{ '' if loop.last else ',' }}{% endfor %}"""
    + "{{ '\n]<|END_ACTION|><|END_OF_TURN|><|NEXT|>' }}{% else %}<|end|>{% endif %}"
    + _END.replace("<|end|>", "").replace("assistant", "assistant\n")
)
R1 = (
    _TURNS.replace("{{ m.content }}", "{{ m.content or '' }}")
    + "{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    + "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    + _END.replace("assistant", "assistant<think>\n")
)
ODD = (
    _TURNS
    + "{% for c in m.tool_calls or [] %}<<{{ c.function.name }}>>{% endfor %}"
    + _END.replace("assistant", "assistant\n")
)
