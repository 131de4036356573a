"""Prompts of schemas in chains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendLLM, ChatBlend, SchemaPromptTemplate

SCHEMA = (
    '<schema name="travel">Plans for the town. <module name="plan">A trip of <param name="days" len="9"/> '
    "days along the river, past the harbour.</module></schema>"
)
PROMPT = '<prompt schema="travel"><plan days="{days}"/>{question}</prompt>'
GIVEN = {"days": 'two "or" 3', "question": "What did the company <do>?"}


@pytest.mark.parametrize("wrapper", [BlendLLM, ChatBlend])
def test_a_chain_over_a_schema_reuses_its_modules(
    wrapper: Any, own: BlendEngine, seen: Any
) -> None:
    own.add_schema(SCHEMA)
    own.encode_schema("travel")
    expected = own.generate(
        pml='<prompt schema="travel"><plan days="two &quot;or&quot; 3"/>What did the company &lt;do&gt;?'
        "</prompt>"
    )
    assert expected.metrics.reused_tokens > 15
    chain = SchemaPromptTemplate.from_template(PROMPT) | wrapper(engine=own) | StrOutputParser()
    assert chain.invoke(GIVEN, {"callbacks": [seen]}) == expected.text
    assert seen.metrics[-1]["reused_tokens"] == expected.metrics.reused_tokens
    assert "".join(chain.stream(GIVEN)) == expected.text
    assert asyncio.run(chain.ainvoke(GIVEN)) == expected.text
    assert chain.batch([GIVEN, GIVEN]) == [expected.text] * 2


def test_text_that_looks_like_a_prompt_of_a_schema_is_text(own: BlendEngine) -> None:
    own.add_schema(SCHEMA)
    text = PROMPT.format(days="two", question="What?")
    assert BlendLLM(engine=own).invoke(text) == own.generate(text).text
    with pytest.raises(InvalidInputError, match="among 2 messages, expected it alone"):
        ChatBlend(engine=own).invoke(
            [*SchemaPromptTemplate.from_template(text).invoke({}).to_messages(), ("user", "What?")]
        )


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (3, "template 3: .* expected variables as in {name}"),
        ("{a", "expected '}' before end of string, expected variables"),
        ('{"a": 1}', "write {{ and }} for braces in text"),
        ("{}", "{} in a template, expected variables as in {name}"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        SchemaPromptTemplate.from_template(template)
