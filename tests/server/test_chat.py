"""Chats through the ``openai`` package."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import openai
import pytest

import scripted
import tiny
from blendrag.server.replies import chat_logprobs
from server.conftest import ANSWER, QUESTION
from server.live import Live, live


@pytest.fixture
def client(served: Live):
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def asked(context: str):
    return [{"role": "user", "content": f"{context}\n\nQuestion: {QUESTION}\nAnswer:"}]


def test_a_chat_is_answered_with_usage_and_what_was_reused(client, asked) -> None:
    made = client.chat.completions.create(model="demo", messages=asked)
    (choice,) = made.choices
    assert ANSWER in choice.message.content
    assert choice.finish_reason == "stop"
    assert made.object == "chat.completion"
    about = made.model_extra["blendrag"]
    cached = made.usage.prompt_tokens_details.cached_tokens
    assert cached == about["reused_tokens"] > 50
    assert 0 < about["recomputed_tokens"] < cached
    assert {chunk["outcome"] for chunk in about["chunks"]} <= {"exact", "blended"}
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_a_stream_has_the_same_text_and_ends_with_usage_if_asked(client, asked) -> None:
    whole = client.chat.completions.create(model="demo", messages=asked)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=asked, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert pieces[-1].model_extra["blendrag"]["reused_tokens"] > 50
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len(pieces) >= 3  # the role, the text, the end


def test_max_tokens_ends_an_answer_and_stop_strings_cut_it(client, asked) -> None:
    short = client.chat.completions.create(model="demo", messages=asked, max_tokens=1)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 1
    other = client.chat.completions.create(model="demo", messages=asked, max_completion_tokens=1)
    assert other.choices[0].message == short.choices[0].message
    cut = client.chat.completions.create(model="demo", messages=asked, stop=["ting"])
    assert cut.choices[0].message.content.strip() == "ska"
    assert cut.choices[0].finish_reason == "stop"


def sampled(client, asked, **more: object):
    made = client.chat.completions.create(
        model="demo", messages=asked, temperature=8.0, max_tokens=8, **more
    )
    return [choice.message.content for choice in made.choices]


def test_a_seed_repeats_a_sample(client, asked) -> None:
    first = sampled(client, asked, seed=1)
    assert sampled(client, asked, seed=1) == first
    assert sampled(client, asked, seed=2) != first
    assert ANSWER in sampled(client, asked, seed=1, top_p=0.0001)[0]


def test_a_salt_reaches_the_engine(client, asked, demo_engine) -> None:
    with tiny.counted(demo_engine.prompts, "request") as requests:
        client.chat.completions.create(
            model="demo", messages=asked, max_tokens=1, extra_body={"cache_salt": "tenant"}
        )
        client.chat.completions.create(model="demo", messages=asked, max_tokens=1)
    assert [options.cache_salt for _, options, _ in requests] == ["tenant", None]


def test_n_answers_are_n_choices(client, asked) -> None:
    texts = sampled(client, asked, seed=1, n=3)
    assert len(set(texts)) == 3
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=asked, temperature=8.0, max_tokens=8, seed=1, n=3, stream=True
        )
    )
    streamed = ["", "", ""]
    for chunk in chunks:
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert sum(choice.finish_reason is not None for c in chunks for choice in c.choices) == 3


def test_log_probabilities_come_whole_and_streamed(client, asked) -> None:
    given = {"model": "demo", "messages": asked, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**given)
    content = whole.choices[0].logprobs.content
    assert "".join(each.token for each in content).startswith(whole.choices[0].message.content)
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)
    assert bytes(content[0].bytes).decode() == content[0].token
    chunks = client.chat.completions.create(**given, stream=True)
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [each.content for each in streamed] == [content]
    plain = client.chat.completions.create(model="demo", messages=asked)
    assert plain.choices[0].logprobs is None


def test_a_request_chooses_how_it_is_blended(client, asked) -> None:
    def about(**blendrag: object):
        made = client.chat.completions.create(
            model="demo", messages=asked, extra_body={"blendrag": blendrag}
        )
        return made.model_extra["blendrag"]

    assert about(mode="full")["reused_tokens"] == 0
    assert about(mode="reuse")["recomputed_tokens"] == 0
    assert about(ratio=0.6)["recomputed_tokens"] > about(ratio=0.2)["recomputed_tokens"]
    assert about(ratio=0)["recomputed_tokens"] == 0


def test_parts_and_roles_of_messages_are_read(client, asked) -> None:
    (message,) = asked
    parts = [{"type": "text", "text": message["content"]}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    made = client.chat.completions.create(model="demo", messages=messages)
    assert ANSWER in made.choices[0].message.content


def test_completions_take_the_prompt_as_it_is(client, context: str) -> None:
    prompt = f"<|bos|><|user|>{context}\n\nQuestion: {QUESTION}\nAnswer:<|end|><|assistant|>"
    made = client.completions.create(model="demo", prompt=prompt, logprobs=2)
    (choice,) = made.choices
    assert ANSWER in choice.text
    likely = choice.logprobs
    assert "".join(likely.tokens).startswith(choice.text)
    assert likely.text_offset[0] == 0
    assert len(likely.tokens) == len(likely.token_logprobs) == len(likely.top_logprobs)
    assert made.model_extra["blendrag"]["reused_tokens"] > 50
    *chunks, last = client.completions.create(
        model="demo", prompt=prompt, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert last.usage == made.usage


def test_several_prompts_are_several_choices(client) -> None:
    prompts = ["<|bos|><|user|>One", "<|bos|><|user|>Two"]
    made = client.completions.create(model="demo", prompt=prompts, max_tokens=3)
    alone = [client.completions.create(model="demo", prompt=p, max_tokens=3) for p in prompts]
    assert [choice.text for choice in made.choices] == [each.choices[0].text for each in alone]
    assert made.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    assert len(made.model_extra["blendrag"]) == 2


def test_models_are_listed_and_looked_up(client) -> None:
    language, embedder = client.models.list()
    assert language.id == "demo"
    assert client.models.retrieve(embedder.id) == embedder
    assert client.models.retrieve("demo").model_extra["max_model_len"] == 4096
    with pytest.raises(openai.NotFoundError, match="not served here; expected 'demo'"):
        client.models.retrieve("gpt-4o")


def test_the_schema_of_requests_is_served(served: Live) -> None:
    with served.client() as client:
        schema = client.get("/openapi.json").json()
    fields = schema["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "documents", "retrieve", "blendrag"} <= set(fields)


def test_log_probabilities_that_are_not_finite_are_numbers_of_json(served: Live) -> None:
    answer = served.engine.generate("Hello", logprobs=1, max_new_tokens=1)
    (chosen,) = answer.logprobs
    banned = replace(chosen, logprob=math.nan, top=(("x", -math.inf),))
    (content,) = chat_logprobs(replace(answer, logprobs=(banned,)))["content"]
    assert content["logprob"] == content["top_logprobs"][0]["logprob"] == -9999.0


# -- arguments of the chat template ---------------------------------------------------------------


def test_a_requests_template_arguments_go_before_those_of_the_server(tmp_path: Path) -> None:
    closed = "<think>\n\n</think>\n\n"
    with (
        scripted.engine([], tmp_path / "store", mode="full", enable_thinking=False) as engine,
        live(engine) as served,
        served.client() as client,
    ):
        engine.tokens.tokenizer.chat_template = scripted.TEMPLATE + (
            "{% if enable_thinking is defined and not enable_thinking %}"
            f"{{{{ {closed!r} }}}}{{% endif %}}"
        )

        def is_closed(**body: object) -> bool:
            asked = [{"role": "user", "content": "Hi"}]
            response = client.post("/v1/chat/completions", json={"messages": asked, **body})
            assert response.status_code == 200, response.text
            return str(engine.adapter.model.prompts[-1]).endswith(closed)

        assert is_closed()
        assert not is_closed(chat_template_kwargs={"enable_thinking": True})
        assert not is_closed(enable_thinking=True)
        assert is_closed(reasoning_effort="none")
        assert is_closed(reasoning_effort="low"), "the template does not read it"
        unknown = {"messages": [{"role": "user", "content": "Hi"}]}
        unknown["chat_template_kwargs"] = {"enable_thoughts": True}
        response = client.post("/v1/chat/completions", json=unknown)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs"
        assert "did you mean enable_thinking?" in response.json()["error"]["message"]
