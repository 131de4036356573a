"""How an LLM behaves when things go wrong or are given up: one sentence, no hang, the model is free."""

from __future__ import annotations

import asyncio
import time

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    VideoBlock,
)
from llama_index.core.llms import LLM

from llm_standard_tests.base import MESSAGES, QUESTION, LLMTests

#: Within this the model must be free again, and nothing here may take longer.
SOON_S = 5.0
BLOCKS = [
    ImageBlock(url="http://localhost/x.png"),
    AudioBlock(url="http://localhost/x.wav"),
    VideoBlock(url="http://localhost/x.mp4"),
    DocumentBlock(url="http://localhost/x.pdf", title="x"),
]


class LLMConductTests(LLMTests):
    """``long_params`` make an answer that takes long, so that there is time to give it up."""

    @property
    def long_params(self) -> dict[str, int]:
        """Arguments of a call whose answer takes many seconds."""
        return {self.max_tokens_param: 3000}

    @property
    def long_question(self) -> str:
        return QUESTION

    @pytest.fixture
    def long_messages(self) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=self.long_question)]

    # -- what cannot be used --------------------------------------------------------------------

    @pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.block_type)
    async def test_content_it_cannot_read_is_named(self, llm: LLM, block: ImageBlock) -> None:
        messages = [ChatMessage(role="user", blocks=[block])]
        with pytest.raises(self.refusal, match=block.block_type):
            llm.chat(messages)
        with pytest.raises(self.refusal, match=block.block_type):
            await llm.achat(messages)

    async def test_no_messages_are_refused(self, llm: LLM) -> None:
        with pytest.raises(self.refusal):
            llm.chat([])
        with pytest.raises(self.refusal):
            list(llm.stream_chat([]))
        with pytest.raises(self.refusal):
            await llm.achat([])

    @pytest.mark.parametrize("texts", [[""], [" \n", ""]], ids=["one", "two"])
    async def test_messages_that_say_nothing_are_refused(self, llm: LLM, texts: list[str]) -> None:
        messages = [ChatMessage(role="user", content=text) for text in texts]
        with pytest.raises(self.refusal, match="empty"):
            llm.chat(messages)
        with pytest.raises(self.refusal, match="empty"):
            list(llm.stream_chat(messages))
        with pytest.raises(self.refusal, match="empty"):
            await llm.achat(messages)
        with pytest.raises(self.refusal, match="empty"):
            _ = [response async for response in await llm.astream_chat(messages)]

    async def test_an_empty_completion_is_refused(self, llm: LLM) -> None:
        with pytest.raises(self.refusal):
            llm.complete(" ")
        with pytest.raises(self.refusal):
            await llm.acomplete("")

    async def test_too_long_a_prompt_says_by_how_many_tokens(self, llm: LLM) -> None:
        prompt = "harbour " * llm.metadata.context_window
        with pytest.raises(self.refusal, match=r"\d+ over"):
            llm.complete(prompt)
        with pytest.raises(self.refusal, match=r"\d+ over"):
            [r async for r in await llm.astream_complete(prompt)]

    def test_an_error_leaves_it_usable(self, llm: LLM) -> None:
        with pytest.raises(self.refusal):
            llm.complete("harbour " * llm.metadata.context_window)
        assert llm.complete(QUESTION).text

    # -- what is given up -----------------------------------------------------------------------

    def test_a_stream_left_early_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        for _ in llm.stream_chat(long_messages, **self.long_params):
            break
        self.answers_soon(llm)

    def test_a_closed_stream_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        stream = llm.stream_chat(long_messages, **self.long_params)
        next(stream)
        stream.close()
        assert list(stream) == []
        self.answers_soon(llm)

    async def test_an_async_stream_left_early_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        stream = await llm.astream_chat(long_messages, **self.long_params)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        # LlamaIndex wraps the stream and leaves closing it to the event loop, which must turn for that
        assert await asyncio.wait_for(llm.achat(MESSAGES, **{self.max_tokens_param: 2}), SOON_S)

    async def test_a_cancelled_task_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        task = asyncio.create_task(llm.achat(long_messages, **self.long_params))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        self.answers_soon(llm)

    async def test_a_timeout_ends_it_and_frees_the_model(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        for ask in (llm.chat, lambda *a, **k: list(llm.stream_chat(*a, **k))):
            with pytest.raises(TimeoutError):
                ask(long_messages, timeout=0.2, **self.long_params)
        with pytest.raises(TimeoutError):
            await llm.achat(long_messages, timeout=0.2, **self.long_params)
        self.answers_soon(llm)

    async def test_an_exhausted_stream_stays_exhausted(self, llm: LLM) -> None:
        stream = llm.stream_chat(MESSAGES)
        assert list(stream)
        assert list(stream) == []
        awaited = await llm.astream_chat(MESSAGES)
        assert [response async for response in awaited]
        assert [response async for response in awaited] == []

    # -- event loops ----------------------------------------------------------------------------

    async def test_sync_calls_work_inside_a_running_loop(self, llm: LLM) -> None:
        assert llm.complete(QUESTION).text
        assert list(llm.stream_chat(MESSAGES))

    def test_it_serves_one_event_loop_after_another(self, llm: LLM) -> None:
        answers = {asyncio.run(llm.acomplete(QUESTION)).text for _ in range(2)}
        assert answers == {llm.complete(QUESTION).text}

    async def test_the_event_loop_turns_while_the_model_works(
        self, llm: LLM, long_messages: list[ChatMessage]
    ) -> None:
        turns = 0
        began = time.perf_counter()
        task = asyncio.create_task(llm.achat(long_messages, timeout=0.5, **self.long_params))
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        elapsed = time.perf_counter() - began
        assert isinstance(task.exception(), TimeoutError)
        assert turns > elapsed / 0.01 / 5

    # -- inside ---------------------------------------------------------------------------------

    def answers_soon(self, llm: LLM) -> None:
        began = time.perf_counter()
        assert llm.chat(MESSAGES, **{self.max_tokens_param: 2})
        assert time.perf_counter() - began < SOON_S
