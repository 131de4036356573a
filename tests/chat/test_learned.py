"""Templates whose markup nobody knows: how they write calls and reasoning is learned from a rendering."""

from __future__ import annotations

import pytest

import scripted
from blendrag.chat.learned import format_of
from blendrag.chat.reply import ReplyStream

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the corpus.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
        },
    },
}
_TURNS = (
    "<|bos|>{{ tools }}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}THINKS{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_EACH = "{% for c in m.tool_calls %}"
_ARGUMENTS = "{% for k, v in c.function.arguments.items() %}"
_AS_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_RUN = (
    _EACH + '<run name="{{ c.function.name }}">' + _ARGUMENTS + '<arg name="{{ k }}">{{ v }}</arg>'
    "{% endfor %}</run>{% endfor %}"
)
CALLS = {
    "JSON in tags": _EACH + f"<acme>{_AS_JSON}</acme>" + "{% endfor %}",
    "a list in brackets": f"[[CALLS]][{_EACH}{_AS_JSON}"
    "{% if not loop.last %}, {% endif %}{% endfor %}][[/CALLS]]",
    "a name in tokens": f"<|tcs|>{_EACH}<|tc:b|>{{{{ c.id }}}}<|tc:n|>{{{{ c.function.name }}}}<|tc:a|>"
    "{{ c.function.arguments | tojson }}<|tc:e|>{% endfor %}<|/tcs|>",
    "XML": f"<acme:tools>{_RUN}</acme:tools>",
    "XML without tags around it": _RUN,
    "plain signs": _EACH
    + "@@{{ c.function.name }} {{ c.function.arguments | tojson }}@@end\n{% endfor %}",
    "Python": f"<|py|>[{_EACH}{{{{ c.function.name }}}}({_ARGUMENTS}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|/py|>",
}


@pytest.mark.parametrize("name", CALLS)
def test_what_an_unknown_template_writes_is_taken_apart(name):
    thinks = "<|mull|>{{ m.reasoning_content }}<|/mull|>"
    tokens = scripted.tokens(_TURNS.replace("THINKS", thinks).replace("CALLS", CALLS[name]))
    given = [{"q": 'say "x" or </run> and\n日本', "n": 3}, {"q": "y", "n": 4}]
    calls = [
        {"type": "function", "id": f"abcdefgh{i}", "function": {"name": "search", "arguments": a}}
        for i, a in enumerate(given)
    ]
    user = {"role": "user", "content": "find"}
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    asked = tokens.render([user], tools=[SEARCH])
    whole = tokens.render(
        [user, {**answer, "tool_calls": calls}], tools=[SEARCH], add_generation_prompt=False
    )
    said = whole.removeprefix(asked).partition("<|end|>")[0]
    for size in (len(said), 1, 5):
        stream = ReplyStream(format_of(tokens), [SEARCH])
        for at in range(0, len(said), size):
            stream.add(said[at : at + size])
        stream.finish()
        reply = stream.reply
        assert (reply.text.strip(), reply.reasoning) == ("I look.", "Hm.")
        assert [call.arguments for call in reply.calls] == given
        assert reply.invalid == ()


def test_calls_that_no_reader_understands_stay_text():
    odd = _EACH + "<<{{ c.function.name }}>>{% endfor %}"
    form = format_of(scripted.tokens(_TURNS.replace("THINKS", "").replace("CALLS", odd)))
    stream = ReplyStream(form, [SEARCH])
    stream.add("I look.<<search>>")
    stream.finish()
    assert stream.reply.text == "I look.<<search>>"


def test_a_form_that_knows_its_reasoning_is_not_learned_again():
    harmony = (
        "<|bos|>{{ tools }}{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "<|start|>assistant{% endif %}"
        "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    stream = ReplyStream(format_of(scripted.tokens(harmony)), [SEARCH])
    stream.add(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    stream.finish()
    assert (stream.reply.text, stream.reply.reasoning) == ("Yes.", "Hm.")
