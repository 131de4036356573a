"""Chats over the modules of a prompt schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from blendrag.demo import demo_corpus_path
from blendrag.engine import BlendEngine
from server.conftest import ANSWER, QUESTION
from server.live import live


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    text = (demo_corpus_path() / "anna-bell.txt").read_text(encoding="utf-8")
    root: Path = tmp_path_factory.mktemp("schemas")
    with BlendEngine("demo", root / "store", max_new_tokens=12, learn=False) as engine:
        engine.add_schema(
            f'<schema name="people"><user><module name="anna">{text}\n\n</module></user></schema>'
        )
        with (
            live(engine) as served,
            openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as made,
        ):
            yield made


def asked(client: openai.OpenAI, content: str = "", name: str = "people", **more: object):
    content = content or f"<anna/><user>Question: {QUESTION}\nAnswer:</user>"
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        extra_body={"schema": name, **more},
    )


def test_a_chat_imports_modules_and_reuses_them(client) -> None:
    first = asked(client)
    again = asked(client)
    assert ANSWER in again.choices[0].message.content
    assert first.choices[0].message.content == again.choices[0].message.content
    about = again.model_extra["blendrag"]
    assert again.usage.prompt_tokens_details.cached_tokens == about["reused_tokens"] > 50
    assert about["recomputed_tokens"] == 0


@pytest.mark.parametrize(
    ("content", "more", "sentence"),
    [
        ("<anne/>", {}, "did you mean 'anna'"),
        ("<anna/>", {"name": "place"}, "schema 'place' was not added"),
        ("<anna/></prompt>", {}, "messages"),
        ("<anna/>", {"retrieve": True}, "schema and retrieve, expected one of them"),
    ],
)
def test_wrong_imports_get_status_400(content, more, sentence, client) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        asked(client, content, **more)
    assert refused.value.param == ("schema" if "retrieve" in more else "messages")
