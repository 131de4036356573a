"""Whatever is wrong is an error object with the right status, and the server goes on."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from blendrag.engine import BlendEngine
from blendrag.model.tokens import Tokens
from blendrag.server import access
from blendrag.server.bodies import ChatBody, CompletionBody, EmbeddingBody, IngestBody
from blendrag.server.service import Limits
from server.live import Live, live

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(served: Live):
    with served.client() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _goes_on(client: httpx.Client):
    """After all that these tests send, an answer is computed."""
    yield
    made = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
    assert made.status_code == 200


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response with that status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (name,) = response.json()
    error: dict[str, Any] = response.json()[name]
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    # of a field, what is expected may be all that there is to say
    of_field = (" must be ", ", expected ", ": expected ", " is not one of ")
    says_what_to_do = error["param"] and any(each in message for each in of_field)
    assert says_what_to_do or "; " in message, message
    assert "Traceback" not in message
    return error


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": None}, "messages", "messages is null, expected a valid list"),
        ({"messages": []}, "messages", "is empty; send at least one"),
        ({"messages": "Hello"}, "messages", 'messages is "Hello", expected a valid list'),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "expected 'system'"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages[0].content",
            "messages[0].content is 7, expected a valid string or a valid list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "messages[0].content[0] is a content part of type 'image_url', expected text",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, None, "empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "lone surrogate"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "expected 'system'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[0].tool_calls[0]",
            "expected a function with a name",
        ),
        ({"temperatur": 1}, "temperatur", "; did you mean temperature?"),
        ({"temperature": "hot"}, "temperature", "temperature 'hot' must be 0, or a number"),
        ({"temperature": -1}, "temperature", "temperature -1"),
        ({"temperature": float("nan")}, "temperature", "nan must be 0, or a number"),
        ({"top_p": 2, "temperature": 1}, "top_p", "top_p 2"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens 0 must be a whole number of at least 1"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens 2.5 must be a whole number"),
        ({"max_tokens": True}, "max_tokens", "True must be a whole number"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages", "context is 4096"),
        ({"n": 0}, "n", "n 0 must be a whole number in [1, 16]"),
        ({"n": 2, "temperature": 0}, "n", "n is 2 with temperature 0"),
        ({"n": 2, "temperature": 1, "logprobs": True}, None, "logprobs of 2"),
        ({"stop": [""]}, "stop", "an empty text"),
        ({"stop": [1]}, "stop[0]", "stop[0] is 1"),
        ({"stop": [str(i) for i in range(33)]}, "stop", "stop has 33 texts, expected at most 32"),
        ({"seed": 2**70}, "seed", "64 bits"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be a whole number in [0, 20]"),
        ({"top_logprobs": 2}, "top_logprobs", "add logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty", "a number in [-2, 2]"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "ids of tokens"),
        ({"logit_bias": {"7": 1000}}, "logit_bias", "[-100, 100]"),
        ({"top_k": -5}, "top_k", "a whole number in [-1, "),
        ({"min_p": 3}, "min_p", "a number in [0, 1]"),
        ({"repetition_penalty": -1}, "repetition_penalty", "above 0"),
        ({"response_format": {"type": "xml"}}, "response_format", "is not one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        (
            {"response_format": {"type": "regex", "regex": "(", "n": 1}},
            "response_format",
            "cannot be compiled",
        ),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": "[]"}, "guided_json", "has no schema"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text has this form"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "cannot be compiled"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "cannot be compiled"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "cannot be compiled"),
        ({"response_format": {}}, "response_format", "is not one of text"),
        ({"response_format": {"type": 3}}, "response_format", "is not one of text"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "Invalid type: x",
        ),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            "response_format",
            "2 forms of the answer (response_format, guided_regex)",
        ),
        (
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs",
            "no argument of a template",
        ),
        ({"structured_outputs": {"xml": ""}}, "structured_outputs", "expected one of json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "2 forms"),
        (
            {"n": 2, "response_format": {"type": "json_object"}},
            "n",
            "send 2 requests",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "support tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tools",
            "support tools",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"blendrag": {"ratio": 2}}, "blendrag.ratio", "blendrag.ratio 2 must be a number in [0, 1]"),
        ({"blendrag": {"ration": 1}}, "blendrag.ration", "; did you mean blendrag.ratio"),
        ({"blendrag": {"timeout": 1}}, "blendrag.timeout", "; did you mean blendrag.timeout_s?"),
        (
            {"blendrag": {"max_new_tokens": 1}},
            "blendrag.max_new_tokens",
            "blendrag.max_new_tokens is not a field of this request; did you mean max_tokens?",
        ),
        ({"blendrag": {"temperature": 1}}, "blendrag.temperature", "; did you mean temperature?"),
        ({"blendrag": {"wheels": 1}}, "blendrag.wheels", "; leave it out"),
        ({"decode_weights": "int8"}, "decode_weights", "option of the server, not of a request; set it"),
        ({"blendrag": {"dtype": "x"}}, "blendrag.dtype", "option of the server, not of a request; set it"),
        ({"mode": "full"}, "mode", "; did you mean blendrag.mode?"),
        ({"max_new_tokens": 1}, "max_new_tokens", "; did you mean max_tokens?"),
        ({"stream_options": {"mode": 1}}, "stream_options.mode", "; leave it out"),
        ({"blendrag": {"mode": "fast"}}, "blendrag.mode", "must be one of blend"),
        ({"blendrag": {"timeout_s": 0}}, "blendrag.timeout_s", "must be a number of seconds above 0"),
        ({"blendrag": {"policy": "best"}}, "blendrag.policy", "best"),
        ({"blendrag": {"schedule": "first:" + "9" * 5000}}, "blendrag.schedule", "expected first:m"),
        ({"blendrag": {"schedule": "first:²"}}, "blendrag.schedule", "expected first:m, m layers"),
        ({"blendrag": {"schedule": "0.5," * 20_000}}, "blendrag.schedule", "has more than 10000 weights"),
        ({"messages": HELLO * 10_001}, "messages", "has 10001 elements, expected at most 10000"),
        ({"stop": ["x"] * 10_001}, "stop", "stop has 10001 elements, expected at most 10000"),
        ({"\ud800": 1}, r"\ud800", r"\ud800 is not a field of this request"),
        ({"a\x1b[2J\n": 1}, r"a\x1b[2J\n", r"a\x1b[2J\n is not a field of this request"),
        ({"documents": [{"title": "x"}]}, "documents[0]", "has no text"),
        ({"documents": ["\ud800"]}, None, "documents[0] holds a lone surrogate"),
        ({"documents": ["x"], "retrieve": True}, "retrieve", "one of them"),
        ({"filters": {"type": "eq"}}, "filters", "without retrieve; add retrieve: true"),
        ({"retrieve": True, "blendrag": {"top_k": 10**18}}, "blendrag.top_k", "at most 1000"),
        ({"retrieve": True, "blendrag": {"top_k": 0}}, "blendrag.top_k", "top_k 0 must be"),
        (
            {"retrieve": True, "messages": [{"role": "assistant", "content": "x"}]},
            "messages",
            "not the user's question",
        ),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(client: httpx.Client, fields, param, said) -> None:
    body = json.dumps({"messages": HELLO, **fields})
    for stream in ("", ', "stream": true'):
        response = client.post(
            CHAT, content=body[:-1] + stream + "}", headers={"Content-Type": "application/json"}
        )
        error = refused(response, 400)
        assert said in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the body is not a JSON object"),
        (b"{", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b'"x"', "the body is not a JSON object"),
        (b'{"messages": "\xff"}', "cannot be read as JSON in UTF-8"),
        (b"[" * 100_000, "cannot be read as JSON in UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "cannot be read as JSON in UTF-8"),
        (b"9" * 2_000_000, "cannot be read as JSON in UTF-8"),
    ],
)
def test_a_body_that_is_no_json_object(client: httpx.Client, content, said) -> None:
    response = client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert said in refused(response, 400)["message"]


def test_another_content_type_is_refused(client: httpx.Client) -> None:
    response = client.post(CHAT, content=b'{"messages": []}', headers={"Content-Type": "text/x"})
    assert "expected application/json" in refused(response, 415)["message"]


def test_bytes_that_are_no_http_are_refused_with_an_error_object(served: Live) -> None:
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=120)) as connection:
        connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        with closing(http.client.HTTPResponse(connection)) as answer:
            answer.begin()
            headers = dict(answer.getheaders())
            assert headers["connection"] == "close"
            response = httpx.Response(answer.status, headers=headers, content=answer.read())
    assert "; send it in HTTP/1.1" in refused(response, 400)["message"]


def test_an_unknown_model_path_or_method(client: httpx.Client) -> None:
    for name in ("gpt-4o", "\ud800"):
        body = json.dumps({"model": name, "messages": HELLO}).encode()
        response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        error = refused(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "nothing at /v1/chat" in refused(client.post("/v1/chat"), 404)["message"]
    assert "GET is not allowed" in refused(client.get(CHAT), 405)["message"]
    response = client.patch("/v1/documents")
    assert refused(response, 405)["message"].endswith("; use DELETE, GET, PUT")
    assert response.headers["allow"] == "DELETE, GET, PUT"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 200_000}]}),
        (CHAT, {"messages": HELLO, "documents": ["word " * 200_000]}),
        (CHAT, {"messages": HELLO, "tools": [{"function": {"name": "word " * 200_000}}]}),
        (
            CHAT,
            {
                "messages": HELLO,
                "tools": [{"function": {"name": "f", "parameters": {"a": ["word"] * 100_000}}}],
            },
        ),
        (
            CHAT,
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "function": {
                                    "name": "f",
                                    "arguments": '{"a": "' + "word " * 200_000 + '"}',
                                }
                            }
                        ],
                    },
                ]
            },
        ),
        (CHAT, {"messages": [{"role": "user", "content": "<a>" * 100_000}], "schema": "s"}),
        ("/v1/completions", {"prompt": "word " * 200_000}),
    ],
)
def test_of_a_prompt_far_over_the_context_only_the_beginning_is_tokenised(
    client: httpx.Client, path, fields, monkeypatch
) -> None:
    lengths, stock = [], Tokens.encode_prompt

    def measured(tokens: Tokens, text: str, begins: bool = True) -> Any:
        lengths.append(len(text))
        return stock(tokens, text, begins)

    monkeypatch.setattr(Tokens, "encode_prompt", measured)
    error = refused(client.post(path, json=fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert "context is 4096 tokens; the prompt has more than" in error["message"]
    assert max(lengths) == 16 * 4096


def test_a_prompt_that_leaves_no_room_is_not_told_to_ask_for_a_shorter_answer(
    client: httpx.Client,
) -> None:
    body = {"prompt": "word " * 4200, "max_tokens": 50}  # the answer would be cut to the room
    error = refused(client.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "which leaves no room for an answer; shorten it" in error["message"]
    assert "max_tokens" not in error["message"]


@pytest.mark.parametrize("path", ["/", "/health"])
def test_head_is_answered_like_get_without_the_body(client: httpx.Client, path: str) -> None:
    got, headed = client.get(path), client.head(path)
    assert (headed.status_code, headed.content) == (200, b"")
    assert headed.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, "token ids"),
        ("/v1/completions", {"prompt": []}, "prompt is empty"),
        ("/v1/completions", {"prompt": ""}, "the prompt is empty"),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}, "stream with 2 prompts"),
        ("/v1/completions", {"prompt": ["a"] * 257}, "257 texts, expected at most 256"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo is not supported"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of is not supported"),
        ("/v1/completions", {"prompt": ["a", ""]}, "the prompt is empty"),
        ("/v1/embeddings", {"input": []}, "input has 0 texts"),
        ("/v1/embeddings", {"input": [[1, 2]]}, "check_embedding_ctx_length=False"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions is not supported"),
        ("/v1/embeddings", {"input": "\ud800"}, "lone surrogate"),
    ],
)
def test_other_endpoints_name_what_is_wrong(client: httpx.Client, path, body, said) -> None:
    response = client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert said in refused(response, 400)["message"]


def test_a_long_body_is_refused_before_it_is_read(small: Live) -> None:
    long = json.dumps({"messages": HELLO, "user": "x" * 1000}).encode()
    given = {"headers": {"Content-Type": "application/json"}}
    with small.client() as client:
        error = refused(client.post(CHAT, content=long, **given), 413)
        assert "larger than 1000 bytes" in error["message"]
        refused(client.post(CHAT, content=iter([long[:600], long[600:]]), **given), 413)


def test_a_body_that_never_ends_is_refused(small: Live, monkeypatch) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.05)
    assert "was not complete" in refused(sent_in_part(small.port), 408)["message"]


def test_answers_are_limited(small: Live) -> None:
    with small.client() as client:
        error = refused(client.post(CHAT, json={"messages": HELLO, "max_tokens": 6}), 400)
        assert "max_tokens is 6, and this server allows at most 5" in error["message"]
        answered = client.post(CHAT, json={"messages": HELLO}).json()
        assert answered["usage"]["completion_tokens"] <= 5


@pytest.fixture(scope="module")
def small(demo_engine: BlendEngine):
    with live(demo_engine, Limits(max_body_bytes=1000, max_tokens=5)) as server:
        yield server


def sent_in_part(port: int) -> httpx.Response:
    """The response to a request whose body never ends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with closing(connection):
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "500")
        connection.endheaders(b"{")
        answer = connection.getresponse()
        return httpx.Response(
            answer.status, headers=dict(answer.getheaders()), content=answer.read()
        )


def test_a_body_that_nobody_reads_is_not_kept(small: Live) -> None:
    with small.client() as client:
        for path, status in (("/health", 405), ("/nowhere", 404)):
            refused(client.post(path, content=b"x" * 100_000), status)


LONG = "long" * 500_000


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", CHAT, {LONG: 1}),
        ("POST", CHAT, {"model": LONG}),
        ("POST", CHAT, {"temperature": LONG}),
        ("POST", CHAT, {"messages": LONG}),
        ("POST", CHAT, {"messages": [{"role": LONG, "content": "x"}]}),
        ("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("POST", CHAT, {"messages": [{"role": "user", "content": {LONG: LONG}}]}),
        ("POST", CHAT, {"response_format": {"type": LONG}}),
        ("POST", CHAT, {"tool_choice": LONG}),
        ("POST", CHAT, {"tool_choice": "f", "tools": [{"function": {"name": "n" * 900}}] * 50}),
        ("POST", CHAT, {"schema": LONG}),
        *(
            ("POST", CHAT, {"blendrag": {name: LONG}})
            for name in ("mode", "policy", "schedule", "ratio", "timeout_s", LONG)
        ),
        ("POST", "/v1/completions", {"prompt": LONG, "suffix": LONG}),
        ("POST", "/v1/completions", {"prompt": {LONG: 1}}),
        ("POST", "/v1/embeddings", {"input": "x", "encoding_format": LONG}),
        ("GET", f"/v1/models/{LONG[:50_000]}", None),
        ("GET", f"/{LONG[:50_000]}", None),
        (LONG[:50_000], "/health", None),
    ],
)
def test_a_refusal_repeats_the_beginning_of_a_value(
    client: httpx.Client, method: str, path: str, fields: dict[str, Any] | None
) -> None:
    body = None if fields is None else json.dumps({"messages": HELLO, **fields}).encode()
    if fields and path != CHAT:
        body = json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    response = client.request(method, path, content=body, headers=headers)
    assert 400 <= response.status_code < 500
    error = refused(response, response.status_code)
    assert len(error["message"]) <= 1000
    assert len(error["param"] or "") <= 100


def test_a_refusal_repeats_the_beginning_of_a_header(client: httpx.Client) -> None:
    response = client.post(CHAT, content=b"{}", headers={"Content-Type": LONG[:50_000]})
    assert len(refused(response, 415)["message"]) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [0] * 9000},
        {"messages": [{}] * 9000},
        {"messages": [{"role": "user", "content": [0] * 9000}]},
        {"messages": [{"role": "user", "tool_calls": [{}] * 9000}]},
        {"messages": HELLO, "tools": [{}] * 9000},
        {"messages": HELLO, "documents": [0] * 9000},
        {"messages": HELLO, "stop": [0] * 9000},
        {"messages": HELLO, **{f"k{i}": 0 for i in range(9000)}},
        {"messages": HELLO, "blendrag": {f"k{i}": 0 for i in range(9000)}},
    ],
)
def test_a_body_has_few_errors_however_long_it_is(fields: dict[str, Any]) -> None:
    """pydantic takes minutes to list many, and the server would answer nobody meanwhile."""
    with pytest.raises(ValidationError) as raised:
        ChatBody.model_validate(fields)
    assert raised.value.error_count() <= 3


def test_lists_of_other_bodies_have_few_errors_too() -> None:
    many: list[Any] = [{}, "a", 0, [1], [{}]] * 1000
    for model, fields in (
        (CompletionBody, {"prompt": many}),
        (EmbeddingBody, {"input": [[{}] * 9000] * 1000}),
        (IngestBody, {"documents": [{}] * 9000}),
        (IngestBody, {"documents": [{"source": "a", "text": "b",
                                     "metadata": {str(i): [] for i in range(9000)}}]}),
    ):  # fmt: skip
        with pytest.raises(ValidationError) as raised:
            model.model_validate(fields)
        assert raised.value.error_count() <= 20


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("request_text", "said"),
    [
        (f"{HEAD}Content-Length: 5\r\n{CHUNKED}\r\n0\r\n\r\n", "Content-Length and a Transfer-Encoding"),
        (f"{HEAD}{CHUNKED}Content-Length: 5\r\n\r\n0\r\n\r\n", "Content-Length and a Transfer-Encoding"),
        (f"{HEAD.replace('1.1', '1.0')}{CHUNKED}\r\n0\r\n\r\n", "HTTP/1.0 with a Transfer-Encoding"),
        (f"{HEAD}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}", "Invalid HTTP request"),
        (f"{HEAD}Content-Length: +2\r\n\r\n{{}}", "Invalid HTTP request"),
        (f"{HEAD}Content-Length: {'9' * 30}\r\n\r\n{{}}", "Invalid HTTP request"),
        (f"{HEAD}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "Invalid HTTP request"),
        (f"{HEAD}{CHUNKED}{CHUNKED}\r\n0\r\n\r\n", "Invalid HTTP request"),
        (f"{HEAD}{CHUNKED}\r\nzz\r\n{{}}\r\n0\r\n\r\n", "Invalid HTTP request"),
        ("GET http://x/v1/models HTTP/1.1\r\nHost: x\r\n\r\n", "expected a path"),
        ("CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", "expected a path"),
        ("GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "Invalid HTTP request"),
    ],
)  # fmt: skip
def test_a_request_that_a_proxy_may_read_otherwise_is_refused_and_its_connection_closed(
    served: Live, request_text: str, said: str
) -> None:
    follows = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall((request_text + follows).encode())
        got = b"".join(iter(lambda: connection.recv(65536), b""))
    assert got.startswith(b"HTTP/1.1 400 ")
    assert said in got.decode()
    assert b"200 OK" not in got


def test_a_body_that_is_no_http_leaves_no_error_in_the_log(
    served: Live, caplog: pytest.LogCaptureFixture
) -> None:
    for head in (HEAD, HEAD.replace("application/json", "text/plain")):
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
            connection.sendall(f"{head}{CHUNKED}\r\nzz\r\n".encode())
            got = b"".join(iter(lambda: connection.recv(65536), b""))
        assert got.startswith(b"HTTP/1.1 4")
    with served.client() as client:  # all that was logged before is there
        assert client.get("/health").status_code == 200
    assert "Exception" not in caplog.text
