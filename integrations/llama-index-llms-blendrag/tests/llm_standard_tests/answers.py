"""What an LLM answers: whole and streamed, with and without an event loop, and what comes with it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock
from llama_index.core.llms import LLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate

from llm_standard_tests.base import MESSAGES, QUESTION, LLMTests, all_ways, text_of

ASKED = PromptTemplate("Where is the {thing}?")


class LLMAnswerTests(LLMTests):
    """Answers are compared with one another, so that any deterministic model will do."""

    @property
    def returns_usage(self) -> bool:
        return True

    @property
    def returns_logprobs(self) -> bool:
        return True

    # -- the eight ways -------------------------------------------------------------------------

    def test_complete(self, llm: LLM) -> None:
        assert llm.complete(QUESTION).text

    def test_chat(self, llm: LLM) -> None:
        response = llm.chat(MESSAGES)
        assert response.message.role == MessageRole.ASSISTANT
        assert response.message.content

    async def test_acomplete(self, llm: LLM) -> None:
        assert (await llm.acomplete(QUESTION)).text == llm.complete(QUESTION).text

    async def test_achat(self, llm: LLM) -> None:
        assert (await llm.achat(MESSAGES)).message == llm.chat(MESSAGES).message

    def test_stream_complete(self, llm: LLM) -> None:
        responses = list(llm.stream_complete(QUESTION))
        assert len(responses) > 1
        assert responses[-1].text == llm.complete(QUESTION).text

    def test_stream_chat(self, llm: LLM) -> None:
        responses = list(llm.stream_chat(MESSAGES))
        assert len(responses) > 1
        assert responses[-1].message == llm.chat(MESSAGES).message

    async def test_astream_complete(self, llm: LLM) -> None:
        responses = [r async for r in await llm.astream_complete(QUESTION)]
        assert [r.text for r in responses] == [r.text for r in llm.stream_complete(QUESTION)]

    async def test_astream_chat(self, llm: LLM) -> None:
        responses = [r async for r in await llm.astream_chat(MESSAGES)]
        assert [r.delta for r in responses] == [r.delta for r in llm.stream_chat(MESSAGES)]

    async def test_a_completion_and_a_user_message_are_answered_alike(self, llm: LLM) -> None:
        answers = {text_of(response) for response in (await all_ways(llm)).values()}
        assert len(answers) == 1

    def test_deltas_add_up_to_the_text_so_far(self, llm: LLM) -> None:
        so_far = ""
        for response in llm.stream_chat(MESSAGES):
            so_far += response.delta or ""
            assert response.message.content == so_far
            assert response.message.role == MessageRole.ASSISTANT

    def test_predict_formats_a_template(self, llm: LLM) -> None:
        assert llm.predict(ASKED, thing="harbour") == llm.complete(QUESTION).text

    async def test_apredict_formats_a_template(self, llm: LLM) -> None:
        assert await llm.apredict(ASKED, thing="harbour") == llm.complete(QUESTION).text

    async def test_stream_and_astream_format_a_template(self, llm: LLM) -> None:
        whole = llm.predict(ASKED, thing="harbour")
        assert "".join(llm.stream(ASKED, thing="harbour")) == whole
        assert "".join([p async for p in await llm.astream(ASKED, thing="harbour")]) == whole

    def test_predict_takes_a_template_of_messages(self, llm: LLM) -> None:
        template = ChatPromptTemplate(message_templates=MESSAGES)
        assert llm.predict(template) == llm.chat(MESSAGES).message.content

    # -- messages -------------------------------------------------------------------------------

    def test_the_system_message_is_read(self, llm: LLM) -> None:
        assert self.prompt_tokens(llm.chat(MESSAGES)) > self.prompt_tokens(llm.chat(MESSAGES[1:]))

    def test_the_system_prompt_is_the_system_message_of_predict(self, llm: LLM) -> None:
        briefly = self.made(system_prompt="Be brief.")
        assert briefly.predict(PromptTemplate(QUESTION)) == llm.chat(MESSAGES).message.content

    def test_all_turns_are_read(self, llm: LLM) -> None:
        turns = [*MESSAGES, llm.chat(MESSAGES).message, ChatMessage(role="user", content="Why?")]
        assert self.prompt_tokens(llm.chat(turns)) > self.prompt_tokens(llm.chat(turns[:2]))

    def test_two_user_messages_in_a_row_are_answered(self, llm: LLM) -> None:
        assert llm.chat([*MESSAGES, MESSAGES[1]]).message.content

    def test_a_message_in_several_blocks_is_answered(self, llm: LLM) -> None:
        blocks = [TextBlock(text="Where is"), TextBlock(text="the harbour?")]
        assert llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content

    def test_an_empty_message_among_others_is_answered(self, llm: LLM) -> None:
        assert llm.chat([ChatMessage(role="system", content=""), MESSAGES[1]]).message.content

    def test_an_answer_of_its_own_is_a_message_to_send_back(self, llm: LLM) -> None:
        answer = list(llm.stream_chat(MESSAGES))[-1].message
        assert llm.chat([*MESSAGES, answer, MESSAGES[1]]).message.content

    def test_messages_are_not_modified(self, llm: LLM) -> None:
        before = [message.model_copy(deep=True) for message in MESSAGES]
        llm.chat(MESSAGES)
        assert before == MESSAGES

    @pytest.mark.parametrize("text", ["Où est-ce ?", "港はどこですか。", "أين الميناء؟", "🚢?"])
    def test_any_script_is_read(self, llm: LLM, text: str) -> None:
        assert llm.complete(text).text

    # -- options --------------------------------------------------------------------------------

    def test_max_tokens_of_a_call(self, llm: LLM) -> None:
        response = llm.chat(MESSAGES, **{self.max_tokens_param: 2})
        assert self.usage(response)["completion_tokens"] == 2
        assert llm.chat(MESSAGES).message.content.startswith(response.message.content)

    async def test_stop_in_every_way_of_asking(self, llm: LLM) -> None:
        whole = llm.complete(QUESTION).text
        stop = whole[2:4]
        for response in (await all_ways(llm, stop=[stop])).values():
            assert text_of(response) == whole[: whole.index(stop)]

    def test_stop_across_tokens(self, llm: LLM) -> None:
        pieces = [r.delta or "" for r in llm.stream_complete(QUESTION)]
        stop = pieces[0][-1:] + pieces[1][:1]
        whole = "".join(pieces)
        assert llm.complete(QUESTION, stop=[stop]).text == whole[: whole.index(stop)]

    def test_sampling_with_a_seed_is_repeatable(self, llm: LLM) -> None:
        drawn = {llm.complete(QUESTION, temperature=3.0, seed=5).text for _ in range(3)}
        assert len(drawn) == 1

    def test_an_option_that_does_not_exist_is_refused(self, llm: LLM) -> None:
        with pytest.raises(self.refusal):
            llm.chat(MESSAGES, no_such_option=1)

    # -- what comes with an answer --------------------------------------------------------------

    async def test_usage_in_every_way_of_asking(self, llm: LLM) -> None:
        if not self.returns_usage:
            pytest.skip("this LLM reports no usage")
        found = [self.usage(response) for response in (await all_ways(llm)).values()]
        assert all(usage == found[0] for usage in found)
        total = found[0]["prompt_tokens"] + found[0]["completion_tokens"]
        assert found[0]["total_tokens"] == total > found[0]["completion_tokens"] > 0

    async def test_logprobs_in_every_way_of_asking(self, llm: LLM) -> None:
        if not self.returns_logprobs:
            pytest.skip("this LLM reports no log probabilities")
        for response in (await all_ways(llm, logprobs=True)).values():
            assert response.logprobs is not None
            assert "".join(place[0].token for place in response.logprobs) == text_of(response)
            assert all(place[0].logprob <= 0 for place in response.logprobs)
        assert llm.chat(MESSAGES).logprobs is None

    def test_logprobs_of_the_likeliest(self, llm: LLM) -> None:
        if not self.returns_logprobs:
            pytest.skip("this LLM reports no log probabilities")
        places = llm.chat(MESSAGES, logprobs=True, top_logprobs=3).logprobs or []
        assert places
        for place in places:
            assert 3 <= len(place) <= 4
            assert bytes(place[0].bytes).decode() == place[0].token

    # -- many at once ---------------------------------------------------------------------------

    async def test_many_at_once_on_an_event_loop(self, llm: LLM) -> None:
        questions = [f"Where is Place{i}?" for i in range(4)]
        expected = [llm.complete(question).text for question in questions]
        found = await asyncio.gather(*(llm.acomplete(question) for question in questions))
        assert [response.text for response in found] == expected

    def test_many_at_once_on_threads(self, llm: LLM) -> None:
        questions = [f"Where is Place{i}?" for i in range(4)]
        expected = [llm.complete(question).text for question in questions]
        with ThreadPoolExecutor(4) as pool:
            assert [r.text for r in pool.map(llm.complete, questions)] == expected

    # -- inside ---------------------------------------------------------------------------------

    def usage(self, response: Any) -> dict[str, int]:
        """Token counts where LlamaIndex's token counter looks for them."""
        kept = ("prompt_tokens", "completion_tokens", "total_tokens")
        return {name: response.raw["usage"][name] for name in kept}

    def prompt_tokens(self, response: ChatResponse) -> int:
        return self.usage(response)["prompt_tokens"]
