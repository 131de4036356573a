"""Fields that clients and other servers have: passed on, ignored where they ask for nothing, else named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

import scripted
import tiny
from server.live import CHAT, HELLO, Live, live

NAME = "unnamed"
COMPLETIONS = "/v1/completions"
THOUGHT, ANSWER = "They mean the works.", "It built ships."
TEXT = f"<think>{THOUGHT}</think>{ANSWER}"
#: A template that shows how it writes reasoning.
TEMPLATE = scripted.TEMPLATE.replace(
    "(m['content'] or '')", "(m['content'] or '').split('</think>')[-1]"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    words = tiny.tokenizer()
    words.chat_template = TEMPLATE
    root = tmp_path_factory.mktemp("fields") / "store"
    given = {"tokenizer": words, "mode": "full", "max_new_tokens": 16}
    with (
        scripted.engine((), root, TEXT, **given) as engine,
        live(engine) as made,
    ):
        yield made


def post(server: Live, fields: dict[str, Any], path: str = CHAT) -> Any:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    with server.client() as client:
        return client.post(path, json={**asked, "max_tokens": 3, **fields})


#: Values that ask for nothing, of requests for chats and for completions.
NEUTRAL: tuple[dict[str, Any], ...] = (
    # OpenAI
    {"model": ""}, {"model": "default"}, {"model": None}, {"n": 1}, {"n": None}, {"seed": None},
    {"stop": ""}, {"stop": []}, {"stop": None},
    {"logit_bias": {}}, {"logit_bias": None}, {"user": "me"}, {"stream_options": None},
    {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": False}},
    {"frequency_penalty": 0, "presence_penalty": 0}, {"temperature": 0, "top_p": 1},
    {"temperature": None, "top_p": None}, {"max_tokens": None}, {"max_tokens": -1},
    {"best_of": 1}, {"best_of": None}, {"echo": False}, {"suffix": None}, {"response_format": None},
    {"prediction": None}, {"prediction": {"type": "content", "content": "It"}},
    # vLLM
    {"ignore_eos": False}, {"min_tokens": 0}, {"skip_special_tokens": True}, {"use_beam_search": False},
    {"spaces_between_special_tokens": True}, {"stop_token_ids": []}, {"stop_token_ids": None},
    {"include_stop_str_in_output": False}, {"length_penalty": 1.0}, {"truncate_prompt_tokens": None},
    {"prompt_logprobs": None}, {"allowed_token_ids": None}, {"bad_words": []}, {"priority": 0},
    {"request_id": "x"}, {"return_tokens_as_token_ids": False}, {"kv_transfer_params": None},
    {"logits_processors": None}, {"repetition_penalty": 1.0}, {"top_k": -1}, {"top_k": 0}, {"min_p": 0.0},
    {"guided_decoding_backend": None}, {"add_special_tokens": False},
    # llama.cpp, Ollama, OpenRouter
    {"typical_p": 1.0}, {"mirostat": 0, "mirostat_mode": 0}, {"tfs_z": 1}, {"top_a": 0}, {"n_probs": 0},
    {"dry_multiplier": 0.0}, {"xtc_probability": 0}, {"dynatemp_range": 0}, {"no_repeat_ngram_size": 0},
    {"keep_alive": "5m"}, {"cache_prompt": True}, {"options": {}}, {"transforms": []}, {"provider": {}},
    {"usage": {"include": True}}, {"grammar": ""}, {"a_field_of_tomorrow": None},
)  # fmt: skip
CHAT_NEUTRAL: tuple[dict[str, Any], ...] = (
    {"audio": None}, {"functions": []}, {"function_call": "none"}, {"web_search_options": {}},
    {"modalities": ["text"]}, {"modalities": None}, {"store": False}, {"metadata": {}}, {"verbosity": "low"},
    {"service_tier": "auto"}, {"parallel_tool_calls": True}, {"tools": []}, {"tools": None},
    {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": None}, {"reasoning_effort": None},
    {"logprobs": False, "top_logprobs": 0}, {"logprobs": None, "top_logprobs": None},
    {"max_tokens": None, "max_completion_tokens": -1}, {"add_generation_prompt": True},
    {"continue_final_message": False}, {"chat_template": None}, {"chat_template_kwargs": {}},
    {"documents": []}, {"include_reasoning": True}, {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 100}}, {"chat_template_content_format": "auto"},
    {"mm_processor_kwargs": None}, {"safety_identifier": "x"}, {"prompt_cache_key": "x"},
    {"response_format": {"type": "text"}},
)  # fmt: skip


def packed(every: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """These fields in few bodies."""
    bodies: list[dict[str, Any]] = []
    for fields in every:
        body = next((each for each in bodies if not each.keys() & fields.keys()), None)
        if body is None:
            bodies.append(body := {})
        body |= fields
    return bodies


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_asks_for_nothing_is_accepted(server: Live, path: str) -> None:
    for fields in packed((*NEUTRAL, *(CHAT_NEUTRAL if path == CHAT else ()))):
        reply = post(server, fields, path)
        assert reply.status_code == 200, (fields, reply.text)


#: Values that would change an answer.
ASKS: tuple[dict[str, Any], ...] = (
    {"mirostat": 2}, {"tfs_z": 0.5}, {"top_a": 0.2}, {"dry_multiplier": 0.8}, {"length_penalty": 2},
    {"use_beam_search": True}, {"skip_special_tokens": False}, {"stop_token_ids": [7]},
    {"include_stop_str_in_output": True}, {"prompt_logprobs": 1}, {"bad_words": ["x"]},
    {"allowed_token_ids": [1]}, {"truncate_prompt_tokens": 5}, {"options": {"num_ctx": 4096}},
    {"format": "json"}, {"logits_processors": ["x"]}, {"n_probs": 5},
)  # fmt: skip
CHAT_ASKS: tuple[dict[str, Any], ...] = (
    {"modalities": ["text", "audio"]}, {"audio": {"voice": "x"}}, {"functions": [{"name": "f"}]},
    {"function_call": {"name": "f"}}, {"web_search_options": {"user_location": "x"}}, {"best_of": 2},
    {"chat_template": "{{ 1 }}"}, {"echo": True},
)  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_not_supported_is_named_in_one_sentence(server: Live, path: str) -> None:
    for fields in (*ASKS, *(CHAT_ASKS if path == CHAT else ())):
        reply = post(server, fields, path)
        assert reply.status_code == 400, (fields, reply.text)
        error, (name,) = reply.json()["error"], fields
        assert error["param"] == name
        expected = f"{name} is {json.dumps(fields[name])}, which this server does not support"
        assert error["message"].startswith(expected)
        assert tiny.one_sentence(error["message"])


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"temperature": 1, "typical_p": 0.5}, {"typical_p": 0.5}),
        ({"typical_p": 0.5}, {"typical_p": 0.5}),
        ({"temperature": 0, "typical_p": 0.5}, {}),
        ({"min_tokens": 2}, {"min_new_tokens": 2}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"ignore_eos": True}, {"eos_token_id": []}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_transformers_can_do_is_passed_on(server: Live, path: str, fields, given) -> None:
    with tiny.counted(server.engine.prompts, "request") as requests:
        reply = post(server, fields, path)
        assert reply.status_code == 200, reply.text
    ((_, options, _),) = requests
    assert dict(options.generate_kwargs) == given


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"typical_p": 0}, "typical_p 0 must be a number in (0, 1]"),
        ({"typical_p": 2}, "typical_p 2 must be a number in (0, 1]"),
        ({"min_tokens": -1}, "min_tokens -1 must be a whole number in [0, "),
        ({"min_tokens": 4}, "min_tokens is 4, expected at most max_tokens, which is 3"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size -1 must be a whole number in [0, "),
        ({"max_tokens": 0}, "max_tokens 0 must be a whole number of at least 1"),
        ({"max_tokens": -2}, "max_tokens -2 must be a whole number of at least 1"),
        ({"temperature": "0.5"}, "temperature '0.5' must be 0, or a number"),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats is true"),
    ],
)
def test_values_out_of_range_are_named(server: Live, fields, said: str) -> None:
    reply = post(server, fields)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


def answer(server: Live, **fields: Any) -> Any:
    return post(server, {"max_tokens": 200, **fields}).json()["choices"][0]


def test_an_answer_that_ignores_its_end_has_the_length_that_was_asked_for(server: Live) -> None:
    long = post(server, {"max_tokens": 40, "ignore_eos": True}).json()
    assert long["usage"]["completion_tokens"] == 40
    assert long["choices"][0]["finish_reason"] == "length"
    ended = post(server, {"max_tokens": 40}).json()
    assert ended["usage"]["completion_tokens"] < 40
    least = post(server, {"max_tokens": 40, "min_tokens": 35}).json()
    assert 35 <= least["usage"]["completion_tokens"] <= 40


def test_an_unknown_path_is_told_the_known_ones(server: Live) -> None:
    with server.client() as client:
        reply = client.post("/v1/responses", json={"input": "Hi"})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message.startswith(
        "there is nothing at /v1/responses; the server has /v1/chat/completions,"
    )
    assert tiny.one_sentence(message)


def test_reasoning_is_left_out_if_nobody_wants_it(server: Live) -> None:
    shown, hidden = answer(server), answer(server, include_reasoning=False)
    assert shown["message"]["content"] == hidden["message"]["content"] == ANSWER
    assert shown["message"]["reasoning_content"] == THOUGHT
    assert "reasoning_content" not in hidden["message"]
    for wants, found in ((True, True), (False, False)):
        fields = {"stream": True, "include_reasoning": wants, "max_tokens": 200}
        assert ("reasoning_content" in post(server, fields).text) is found


def test_thinking_is_switched_as_at_other_servers(server: Live) -> None:
    with tiny.counted(server.engine.prompts, "request") as requests:
        for fields in ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled"}}, {}):
            assert post(server, fields).status_code == 200
    assert [options.enable_thinking for _, options, _ in requests] == [False, True, None]


def test_an_answer_continues_the_last_message_if_asked(server: Live) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "It built"}]
    prompts = server.engine.adapter.model.prompts
    for fields, end in (
        ({"continue_final_message": True, "add_generation_prompt": False}, "assistant\nIt built"),
        ({"continue_final_message": True}, "assistant\nIt built"),
        ({"add_generation_prompt": False}, "It built<|end|>\n"),
        ({"add_generation_prompt": True}, "It built<|end|>\n<|start|>assistant\n"),
        ({}, "It built<|end|>\n<|start|>assistant\n"),
    ):
        assert post(server, {"messages": begun, **fields}).status_code == 200
        assert prompts[-1].endswith(end)
    forced = {"tools": [TOOL], "tool_choice": "required", "messages": begun}
    for fields in ({}, {"messages": begun, "add_generation_prompt": True}, forced):
        refused = post(server, {**fields, "continue_final_message": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "continue_final_message"


# -- stock clients ----------------------------------------------------------------------------------


def search(town: str) -> str:
    """Search for a town."""
    return town


TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 4, "seed": 7}
PENALTIES = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"7": -1}}


def test_the_openai_client_sends_nothing_that_is_refused(server: Live) -> None:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        for given in ({}, {"max_completion_tokens": 4, "n": 2}, *packed((
            SAMPLING, PENALTIES, {"logprobs": True},
            {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}, {"stop": ["x"]},
            {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "user": "me"},
            {"reasoning_effort": "low", "verbosity": "low", "modalities": ["text"]},
            {"prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "x"},
            {"extra_body": {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.05}},
        ))):  # fmt: skip
            assert create(model=NAME, messages=HELLO, **given).choices
            for chunk in create(
                model=NAME,
                messages=HELLO,
                stream=True,
                stream_options={"include_usage": True},
                **given,
            ):
                assert chunk.id
        more = {"logprobs": 1, "echo": False, "best_of": 1, "user": "me"}
        for given in ({}, SAMPLING | PENALTIES | more):
            assert client.completions.create(model=NAME, prompt="Hello", **given).choices


def test_langchain_openai_sends_nothing_that_is_refused(server: Live) -> None:
    where = {"model": NAME, "base_url": server.v1, "api_key": "none", "max_retries": 0}
    for given in ({}, {"n": 2}, *packed((
        SAMPLING, PENALTIES, {"logprobs": True, "top_logprobs": 1}, {"stream_usage": True},
        {"reasoning_effort": "low", "verbosity": "low", "service_tier": "auto", "store": False},
        {"metadata": {"a": "b"}, "stop": ["x"], "extra_body": {"top_k": 4}},
    ))):  # fmt: skip
        llm = ChatOpenAI(**where, **given)
        assert llm.invoke("Hello").id
        assert list(llm.stream("Hello"))
    llm = ChatOpenAI(**where)
    assert llm.bind_tools([search]).invoke("Hello").id
    for choice in ("auto", "none"):
        assert llm.bind_tools([search], tool_choice=choice, strict=True).invoke("Hello").id
    for given in ({}, SAMPLING | PENALTIES | {"best_of": 1, "n": 1, "logprobs": 1}):
        assert OpenAI(**where, **given).invoke("Hello") is not None


def test_openai_like_of_llama_index_sends_nothing_that_is_refused(server: Live) -> None:
    where = {"model": NAME, "api_base": server.v1, "api_key": "none", "max_retries": 0}
    for given in ({}, *packed((
        {"temperature": 0.7, "max_tokens": 4}, {"logprobs": True, "top_logprobs": 2},
        {"reasoning_effort": "low"}, {"additional_kwargs": SAMPLING | PENALTIES},
        {"is_function_calling_model": True}, {"modalities": ["text"]},
    ))):  # fmt: skip
        llm = OpenAILike(**where, **given, is_chat_model=True)
        assert llm.chat([ChatMessage(role="user", content="Hello")]).message
        assert list(llm.stream_chat([ChatMessage(role="user", content="Hello")]))
        assert OpenAILike(
            **where, **{k: v for k, v in given.items() if k == "temperature"}
        ).complete("Hello")
