"""A chat template renders as in transformers, or ends: no hostile one hangs or fills the memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

import tiny
from blendrag.chat.forcing import call_form
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.model import bounded_templates
from blendrag.model.tokens import Tokens

USER = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"a": 1}}}},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowance that is exceeded at once."""
    monkeypatch.setattr(bounded_templates, "MAX_BYTES", 1 << 20)


def tokens_with(template: str) -> Tokens:
    made = tiny.tokenizer()
    made.chat_template = template
    return Tokens(made)


def nested(body: str, depth: int = 3) -> str:
    """``body``, 10¹⁵ times."""
    return "{% for i in range(100000) %}" * depth + body + "{% endfor %}" * depth


def doubling(expression: str, start: str = "'aaaaaaaaaa'") -> str:
    """``expression`` of ``ns.a``, put into it sixty times."""
    return (
        f"{{% set ns = namespace(a={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.a = {expression} %}}{{% endfor %}}{{{{ ns.a | length }}}}"
    )


LONG = "{% set a = 'a' * 100000 %}"
ENDLESS = {
    "nested loops": nested("x"),
    "loops without output": nested(""),
    "a loop that keeps nothing": "{% for i in range(100000) %}{% for j in range(100000) if false %}"
    "{% endfor %}{% endfor %}",
    "filters over a range": nested("{{ range(100000) | select('none') | list }}", 1),
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long list": "{{ (10**10 * [1]) | length }}",
    "concatenation": doubling("ns.a ~ ns.a"),
    "many concatenated": f"{LONG}{{{{ {' ~ '.join('a' * 200)} }}}}",
    "addition": doubling("ns.a + ns.a"),
    "replace": doubling("ns.a.replace('a', 'aaaa')"),
    "the filter replace": doubling("ns.a | replace('a', 'aaaa')"),
    "join": doubling("ns.a.join([ns.a, ns.a, ns.a])"),
    "the filter join": doubling("[ns.a, ns.a] | join(ns.a)"),
    "%": doubling("'%s%s' % (ns.a, ns.a)"),
    "format": doubling("'{0}{0}'.format(ns.a)"),
    "the filter format": doubling("'%s%s' | format(ns.a, ns.a)"),
    "a block": "{% set ns = namespace(a='aaaaaaaaaa') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = x %}{% endfor %}",
    "a list in itself": doubling("[ns.a, ns.a]") + "{{ ns.a }}",
    "JSON of a list in itself": doubling("[ns.a, ns.a]") + "{{ ns.a | tojson }}",
    "comparison of lists": doubling("[ns.a, ns.a]") + "{{ ns.a == [ns.a] }}",
    "tabs": "{{ ('\\t' * 50000).expandtabs(100000) | length }}",
    "indentation": "{{ ('\\n' * 50000) | indent(100000) | length }}",
    "the same output": LONG + nested("{{ a }}", 1),
    "searching": LONG + nested("{{ 'b' in a }}", 1),
    "finding": LONG + nested("{{ a.find('b') }}", 1),
    "comparing": LONG + nested("{{ a == a }}", 1),
    "testing": LONG + nested("{% if 'b' is in a %}{% endif %}", 1),
    "cutting": LONG + nested("{% set b = a[1:] %}", 1),
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "a wide number of the filter": "{{ '%1000000000d' | format(1) }}",
    "a width among the values": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field": "{{ '{:>10000000000}'.format(1) }}",
    "a wide field in a field": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "a power": "{{ 10**10000000000 }}",
    "squares": doubling("ns.a * ns.a", "9"),
    "padding": "{{ 'a'.rjust(10**10) }}",
    "centring": "{{ 'a' | center(10**10) }}",
    "batches": "{{ [1] | batch(100000000, 'x') | list | length }}",
    "invented text": "{{ lipsum(n=1000000) }}",
    "itself": "x" * (bounded_templates.MAX_TEMPLATE_CHARS + 1),
}  # fmt: skip


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_not_end_is_refused(template: str) -> None:
    made = tokens_with(template)
    with pytest.raises(Exception) as caught:
        made.render(USER)
    assert tiny.one_sentence(str(caught.value))
    assert not isinstance(caught.value, MemoryError)
    assert not made.has_tools
    assert call_form(made) is None


def test_a_request_is_told_that_the_template_does_not_end(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    made = tiny.engine(tiny.llama(), tmp_path, tokenizer=tokenizer)
    with made:
        tokenizer.chat_template = ENDLESS["nested loops"]
        with tiny.refuses("the chat template refuses these messages .*: it makes more than"):
            made.generate("hello", Options(mode="full"))


FAIR = [
    tiny.CHAT_TEMPLATE,
    "{% for m in messages %}{{ m.role | upper ~ ': ' ~ m['content'][:3] }}\n{% endfor %}",
    "{% for t in tools or [] %}{{ t | tojson(indent=2) }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ loop.index }}"
    "{{ k }}{{ v | string }}{% endfor %}{% endfor %}",
    "{% macro say(m) %}{{ '%s=%s' % (m.role, m.content) }}{{ '{:>6}'.format(m.role) }}{% endmacro %}"
    "{% set ns = namespace(text='') %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.text = ns.text + say(m) %}{% endfor %}{{ ns.text | trim }}{{ messages | length * 2 }}",
    "{% generation %}{{ messages | map(attribute='content') | join(', ') | indent(2) }}{% endgeneration %}",
    "{% set x %}{{ messages[-1]['content'].split('l') | reject('equalto', 'he') | list }}{% endset %}{{ x }}"
    "{% for m in messages %}{% break %}{% endfor %}{{ 'a' if tools is defined and tools else 2**10 % 7 }}",
]


@pytest.mark.parametrize("template", FAIR)
@pytest.mark.parametrize("given", [{}, {"tools": [TOOL]}])
def test_every_other_template_renders_as_in_transformers(
    template: str, given: dict[str, Any]
) -> None:
    made = tokens_with(template)
    for messages in (USER, [*USER, {"role": "assistant", "content": "<b>é</b>"}, *USER] * 3):
        expected = made.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **given
        )
        assert made.render(messages, **given) == expected


def test_renderings_of_others_are_left_alone() -> None:
    made = tokens_with("{% for i in range(10000) %}x{% endfor %}")
    with pytest.raises(InvalidInputError):
        made.render(USER)
    stock = made.tokenizer.apply_chat_template(USER, tokenize=False)
    assert stock == "x" * 10000
    compiled = chat_template_utils._compile_jinja_template(made.template_text)
    assert type(compiled.environment).__module__ == "jinja2.sandbox"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ raise_exception.__globals__['__builtins__'].open('MARK', 'w') }}",
        "{{ (messages | map(attribute='__class__.__init__.__globals__') | list)[0] }}",
        "{{ messages | attr('__class__') | attr('mro') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include 'MARK' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str, tmp_path: Path) -> None:
    marker = tmp_path / "was run"
    made = tokens_with(template.replace("MARK", str(marker)))
    rendered = ""
    with suppress(Exception):  # most raise, of jinja's own kinds
        rendered = made.render(USER)
    assert "<class" not in rendered
    assert not marker.exists()


def test_an_engine_of_a_model_whose_template_never_ends_opens(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = ENDLESS["addition"]
    with BlendEngine(tiny.llama(), tmp_path, tokenizer=tokenizer) as engine:
        assert not engine.tokens.has_tools
        plain = Options(mode="full", apply_chat_template=False, max_new_tokens=2)
        assert engine.generate("hello", plain).metrics.new_tokens
