"""Structured output: by a call where the model calls tools, by JSON in plain text elsewhere."""

from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from llm_standard_tests.base import LLMTests


class Place(BaseModel):
    """A place and who built it."""

    name: str
    year: int = Field(description="When it was built.")
    builders: list[str] = []


PLACE = PromptTemplate("Tell me about the {thing} as a Place.")
EXPECTED = Place(name="harbour", year=1874, builders=["the company"])
QUESTION = PLACE.format(thing="harbour")


class LLMStructuredTests(LLMTests):
    """The model must describe the harbour as EXPECTED, in a call of ``Place`` or in JSON."""

    def test_structured_predict(self) -> None:
        assert self.made().structured_predict(Place, PLACE, thing="harbour") == EXPECTED

    async def test_astructured_predict(self) -> None:
        assert await self.made().astructured_predict(Place, PLACE, thing="harbour") == EXPECTED

    def test_a_structured_llm_completes_and_chats(self) -> None:
        structured = self.made().as_structured_llm(Place)
        assert structured.complete(QUESTION).raw == EXPECTED
        response = structured.chat([ChatMessage(role="user", content=QUESTION)])
        assert response.raw == EXPECTED
        assert Place.model_validate_json(response.message.content or "") == EXPECTED

    async def test_a_structured_llm_achats(self) -> None:
        structured = self.made().as_structured_llm(Place)
        response = await structured.achat([ChatMessage(role="user", content=QUESTION)])
        assert response.raw == EXPECTED

    def test_what_does_not_fit_is_an_error(self) -> None:
        class Ship(BaseModel):
            """A ship, and the model knows none."""

            tonnage: int

        with pytest.raises(ValueError):
            self.made().structured_predict(Ship, PLACE, thing="harbour")


class LLMStructuredStreamTests(LLMTests):
    """LlamaIndex streams structured output of models that call tools."""

    def test_stream_structured_predict(self) -> None:
        *_, last = self.made().stream_structured_predict(Place, PLACE, thing="harbour")
        assert Place.model_validate(last.model_dump()) == EXPECTED

    async def test_astream_structured_predict(self) -> None:
        stream = await self.made().astream_structured_predict(Place, PLACE, thing="harbour")
        last = [partial async for partial in stream][-1]
        assert Place.model_validate(last.model_dump()) == EXPECTED
