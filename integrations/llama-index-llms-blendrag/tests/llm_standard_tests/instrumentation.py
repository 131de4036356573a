"""What LlamaIndex is told while an LLM works: callbacks, events, spans, token counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, TokenCountingHandler
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import LLM
from pydantic import Field

from llm_standard_tests.base import MESSAGES, QUESTION, LLMTests, all_ways, text_of


class Heard(BaseCallbackHandler):
    """What a callback handler is told, in order."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.told: list[tuple[str, dict[str, Any]]] = []

    def on_event_start(self, event_type: CBEventType, payload: Any = None, **kw: Any) -> str:
        if event_type == CBEventType.LLM:
            self.told.append(("start", payload))
        return str(kw.get("event_id", ""))

    def on_event_end(self, event_type: CBEventType, payload: Any = None, **kw: Any) -> None:
        if event_type == CBEventType.LLM:
            self.told.append(("end", payload))

    def start_trace(self, trace_id: str | None = None) -> None: ...

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None: ...


class Events(BaseEventHandler):
    """Events of LLMs, in order."""

    seen: list[Any] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.seen.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.seen]


@pytest.fixture
def events() -> Iterator[Events]:
    dispatcher, handler = get_dispatcher(), Events()
    dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.event_handlers.remove(handler)


class LLMInstrumentationTests(LLMTests):
    @pytest.fixture
    def heard(self) -> Heard:
        return Heard()

    @pytest.fixture
    def told(self, heard: Heard) -> LLM:
        return self.made(callback_manager=CallbackManager([heard]))

    async def test_callbacks_of_every_way_of_asking(self, told: LLM, heard: Heard) -> None:
        for response in (await all_ways(told)).values():
            (start, asked), (end, answered) = heard.told[:2]
            del heard.told[:2]
            assert (start, end) == ("start", "end")
            assert {EventPayload.PROMPT, EventPayload.MESSAGES} & set(asked)
            named = {EventPayload.RESPONSE, EventPayload.COMPLETION}
            (said,) = (answered[name] for name in named if name in answered)
            assert text_of(said) == text_of(response)
        assert heard.told == []

    def test_callbacks_are_told_of_errors(self, told: LLM, heard: Heard) -> None:
        with pytest.raises(self.refusal):
            told.complete(" ")
        (_, _), (end, payload) = heard.told
        assert end == "end"
        assert isinstance(payload[EventPayload.EXCEPTION], Exception)

    def test_the_token_counter_counts(self, llm: LLM) -> None:
        counter = TokenCountingHandler(tokenizer=str.split)
        usage = self.made(callback_manager=CallbackManager([counter])).chat(MESSAGES).raw["usage"]
        assert counter.prompt_llm_token_count == usage["prompt_tokens"]
        assert counter.completion_llm_token_count == usage["completion_tokens"]

    def test_events_of_a_chat(self, llm: LLM, events: Events) -> None:
        response = llm.chat(MESSAGES)
        assert [n for n in events.names() if n.startswith("LLM")] == [
            "LLMChatStartEvent",
            "LLMChatEndEvent",
        ]
        assert events.seen[-1].response == response

    def test_events_of_a_streamed_chat(self, llm: LLM, events: Events) -> None:
        responses = list(llm.stream_chat(MESSAGES))
        assert events.names().count("LLMChatInProgressEvent") == len(responses)
        assert events.names()[-1] == "LLMChatEndEvent"

    async def test_events_of_a_completion(self, llm: LLM, events: Events) -> None:
        await llm.acomplete(QUESTION)
        assert events.names()[0] == "LLMCompletionStartEvent"
        assert events.names()[-1] == "LLMCompletionEndEvent"

    def test_events_stand_in_the_span_of_their_call(self, llm: LLM, events: Events) -> None:
        for ask in (lambda: llm.chat(MESSAGES), lambda: list(llm.stream_chat(MESSAGES))):
            events.seen.clear()
            ask()
            assert len({event.span_id for event in events.seen}) == 1
            assert events.seen[0].span_id

    def test_events_can_be_written_down(self, llm: LLM, events: Events) -> None:
        llm.chat(MESSAGES)
        assert all(event.model_dump(mode="json") for event in events.seen)
