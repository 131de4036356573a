"""``SchemaPromptTemplate``: prompts that import the modules of a prompt schema (Prompt Cache)."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate

from blendrag.frameworks.schema_prompts import MARKED, filled, variables_of


class SchemaPromptTemplate(BasePromptTemplate):
    """Makes prompts of a schema that the model's engine has; ``{variables}`` are text, never markup.

    Example:
        ```python
        llm.engine.add_schema("travel.xml")
        prompt = SchemaPromptTemplate(
            '<prompt schema="travel"><plan days="{days}"/>{question}</prompt>'
        )
        llm.predict(prompt, days="three", question="What should I see?")
        ```

    Only :class:`BlendLLM` understands such prompts.
    """

    template: str

    def __init__(self, template: str, **given: Any) -> None:
        super().__init__(
            template=template,  # type: ignore[call-arg]
            template_vars=variables_of(template),
            metadata=given.pop("metadata", {}),
            kwargs=given.pop("kwargs", {}),
            output_parser=given.pop("output_parser", None),
            **given,
        )

    def partial_format(self, **kwargs: Any) -> SchemaPromptTemplate:
        return self.model_copy(update={"kwargs": {**self.kwargs, **kwargs}})

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        return filled(self.template, self._map_all_vars({**self.kwargs, **kwargs}))

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        markup = str(self.format(**kwargs))
        return [
            ChatMessage(role=MessageRole.USER, content=markup, additional_kwargs={MARKED: True})
        ]

    def get_template(self, llm: BaseLLM | None = None) -> str:
        return self.template
