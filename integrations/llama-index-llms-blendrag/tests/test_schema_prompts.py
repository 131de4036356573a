"""Prompts of schemas with LlamaIndex."""

from __future__ import annotations

import asyncio

import pytest

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import BlendLLM, SchemaPromptTemplate

SCHEMA = (
    '<schema name="travel">Plans for the town. <module name="plan">A trip of <param name="days" len="9"/> '
    "days along the river, past the harbour.</module></schema>"
)
PROMPT = '<prompt schema="travel"><plan days="{days}"/>{question}</prompt>'


def test_a_template_of_a_schema_reuses_its_modules(own: BlendEngine) -> None:
    own.add_schema(SCHEMA)
    own.encode_schema("travel")
    expected = own.generate(
        pml='<prompt schema="travel"><plan days="two &quot;or&quot; 3"/>What did the company &lt;do&gt;?'
        "</prompt>"
    )
    llm = BlendLLM(engine=own)
    template = SchemaPromptTemplate(PROMPT).partial_format(days='two "or" 3')
    question = "What did the company <do>?"
    assert llm.predict(template, question=question) == expected.text
    assert "".join(llm.stream(template, question=question)) == expected.text
    assert asyncio.run(llm.apredict(template, question=question)) == expected.text
    (message,) = template.format_messages(question=question)
    answer = llm.chat([message])
    assert answer.raw["blendrag"]["reused_tokens"] == expected.metrics.reused_tokens > 15
    whole = llm.complete(template.format(question=question))
    assert whole.text == expected.text
    assert llm.complete(str(template.format(question=question))).text != expected.text


def test_a_variable_without_a_value_is_named() -> None:
    with pytest.raises(InvalidInputError, match="no value for days of the template, expected days"):
        SchemaPromptTemplate(PROMPT).format(question="What?")
