"""``SchemaPromptTemplate``: prompts that import the modules of a prompt schema (Prompt Cache)."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate

from blendrag.frameworks.schema_prompts import MARKED, SchemaMarkup, filled, variables_of


class SchemaPromptValue(PromptValue):
    """A prompt in markup, as text or as one message."""

    pml: str

    def to_string(self) -> str:
        return SchemaMarkup(self.pml)

    def to_messages(self) -> list[BaseMessage]:
        return [HumanMessage(self.pml, additional_kwargs={MARKED: True})]


class SchemaPromptTemplate(BasePromptTemplate[str]):
    """Makes prompts of a schema that the model's engine has; ``{variables}`` are text, never markup.

    Example:
        ```python
        llm.engine.add_schema("travel.xml")
        prompt = SchemaPromptTemplate.from_template(
            '<prompt schema="travel"><plan days="{days}"/>{question}</prompt>'
        )
        chain = prompt | llm
        chain.invoke({"days": "three", "question": "What should I see?"})
        ```

    Only :class:`BlendLLM` and :class:`ChatBlend` understand such prompts.
    """

    template: str

    @classmethod
    def from_template(cls, template: str, **given: Any) -> SchemaPromptTemplate:
        """A template of ``<prompt schema="…">…</prompt>`` with variables in braces."""
        return cls(template=template, input_variables=variables_of(template), **given)

    def format(self, **kwargs: Any) -> str:
        return filled(self.template, self._merge_partial_and_user_variables(**kwargs))

    def format_prompt(self, **kwargs: Any) -> PromptValue:
        return SchemaPromptValue(pml=str(self.format(**kwargs)))

    async def aformat_prompt(self, **kwargs: Any) -> PromptValue:
        return self.format_prompt(**kwargs)
