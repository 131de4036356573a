"""Errors of blendrag are raised through query and chat engines and agents, never an empty answer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import (
    ChatMessage,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from pydantic import BaseModel

import scripted
import tiny
from blendrag.errors import ContextOverflowError, InvalidInputError
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

#: LlamaIndex keeps conversations in SQLite on a thread, which may outlive the loop of a test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

#: As Gemma 2: no system role, and roles that alternate.
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|bos|>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"
)
SENTENCE = "^the chat template refuses these messages .*: Nothing is supported$"
MODES = ["compact", "refine", "tree_summarize", "simple_summarize", "accumulate"]
CHATS: dict[str, Callable[[Any, Any], Any]] = {
    "condense": lambda llm, found: CondensePlusContextChatEngine.from_defaults(found, llm=llm),
    "context": lambda llm, found: ContextChatEngine.from_defaults(found, llm=llm),
    "simple": lambda llm, _: SimpleChatEngine.from_defaults(llm=llm, system_prompt="Be brief."),
    "question": lambda llm, found: CondenseQuestionChatEngine.from_defaults(
        RetrieverQueryEngine.from_args(found, llm=llm), llm=llm
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tiny.tokenizer()
    made.chat_template = STRICT
    model = scripted.model(default="It built ships.")
    with tiny.engine(model, tmp_path_factory.mktemp("s") / "s", tokenizer=made) as engine:
        engine.ingest([tiny.document(1)])
        yield engine


@pytest.fixture
def broken(built: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its template refuses everything."""
    template = "{{ raise_exception('Nothing is supported') }}"
    monkeypatch.setattr(built.tokens.tokenizer, "chat_template", template)
    return built


@pytest.fixture
def found(built: Any) -> BlendRetriever:
    return BlendRetriever(engine=built)


@pytest.mark.parametrize("mode", MODES)
async def test_a_query_engine_works_with_a_strict_template(
    built: Any, found: Any, mode: Any
) -> None:
    engine = RetrieverQueryEngine.from_args(found, llm=BlendLLM(engine=built), response_mode=mode)
    assert "It built ships." in str(engine.query("What did it build?"))
    assert "It built ships." in str(await engine.aquery("What did it build?"))


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_a_chat_engine_works_with_a_strict_template(built: Any, found: Any, chat: Any) -> None:
    engine = chat(BlendLLM(engine=built), found)
    assert str(engine.chat("What did it build?")) == "It built ships."
    assert "".join(engine.stream_chat("And then?").response_gen) == "It built ships."


@pytest.mark.parametrize(
    ("mode", "streaming"), [*((m, False) for m in MODES), *((m, True) for m in MODES[:-1])]
)
async def test_a_query_engine_raises_the_error(
    broken: Any, found: Any, mode: Any, streaming: bool
) -> None:
    engine = RetrieverQueryEngine.from_args(
        found, llm=BlendLLM(engine=broken), response_mode=mode, streaming=streaming
    )
    with pytest.raises(InvalidInputError, match=SENTENCE):
        engine.query("What?").get_response()  # type: ignore[union-attr]
    with pytest.raises(InvalidInputError, match=SENTENCE):
        await (await engine.aquery("What?")).get_response()  # type: ignore[union-attr]


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
async def test_a_chat_engine_raises_the_error(broken: Any, found: Any, chat: Any) -> None:
    engine = chat(BlendLLM(engine=broken), found)
    with pytest.raises(InvalidInputError, match=SENTENCE):
        engine.chat("What?")
    with pytest.raises(InvalidInputError, match=SENTENCE):
        await engine.achat("What?")
    with pytest.raises(InvalidInputError, match=SENTENCE):
        list(engine.stream_chat("What?").response_gen)


async def test_an_agent_raises_the_error(broken: Any) -> None:
    def look(query: str) -> str:
        """Look."""
        return query

    agent = ReActAgent(tools=[look], llm=BlendLLM(engine=broken))
    with pytest.raises(InvalidInputError, match=SENTENCE):
        await agent.run("What?")


def test_structured_output_ends_with_one_call(tmp_path: Any) -> None:
    class Town(BaseModel):
        town: str

    said = ' {"town": "Lund"}}\n</tool_call>' + scripted.call("Town", town="Ystad") * 3
    with scripted.engine([], tmp_path / "store", default=said, mode="full") as engine:
        llm = BlendLLM(engine=engine).as_structured_llm(Town)
        assert llm.complete("Which town?").raw == Town(town="Lund")
        all_said = engine.tokens.encode_prompt(said, begins=False).ids
        assert engine.adapter.model.forwards < len(all_said) / 2


def test_an_answer_that_was_cut_before_its_call_ended_says_so(tmp_path: Any) -> None:
    class Town(BaseModel):
        name: str

    with scripted.engine([], tmp_path / "store", max_new_tokens=5) as engine:
        llm = BlendLLM(engine=engine).as_structured_llm(Town)
        with pytest.raises(InvalidInputError, match=r"cut before a call .* larger max_new"):
            llm.complete("Which town?")


def test_a_stream_whose_request_is_wrong_raises_before_its_first_piece(broken: Any) -> None:
    with pytest.raises(InvalidInputError, match=SENTENCE):
        BlendLLM(engine=broken).stream_chat([ChatMessage("What?")])


def test_an_error_keeps_its_class_fields_and_cause_but_is_no_value_error(built: Any) -> None:
    llm = BlendLLM(engine=built)
    with pytest.raises(ContextOverflowError) as raised:
        llm.predict(PromptTemplate("town " * 9000))
    error = raised.value
    assert not isinstance(error, ValueError)
    assert error.over_tokens > 0
    assert isinstance(error.__cause__, ContextOverflowError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.over_tokens) == (str(error), error.over_tokens)


FOREIGN = "chatcmpl-tool-0123456789abcdef"


@pytest.mark.parametrize("arguments", ['{"town": "Öre', {"town": "Öre"}])
def test_a_history_of_another_model_is_answered(built: Any, arguments: Any) -> None:
    call = ToolCallBlock(tool_call_id=FOREIGN, tool_name="find", tool_kwargs=arguments)
    thought = ThinkingBlock(content="I look.")
    history = [
        ChatMessage("Be brief.", role="developer"),
        ChatMessage("Where?"),
        ChatMessage(role="assistant", blocks=[thought, TextBlock(text="So."), call]),
        ChatMessage("Hill", role="tool", additional_kwargs={"tool_call_id": FOREIGN}),
        ChatMessage("And?"),
    ]
    assert BlendLLM(engine=built).chat(history).message.content == "It built ships."
    prompt = built.adapter.model.prompts[-1]
    assert 'So.\n<tool_call>\n{"name": "find", "arguments": {"town": "Öre"}}' in prompt
    assert "Hill\n</tool_response>\n\nAnd?<|end|>" in prompt
    assert "I look." not in prompt
