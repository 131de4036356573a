"""Hybrid models are served as any model: chats, streams, completions and several clients at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import tiny
from server.live import live

SHAPE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = tiny.family("qwen3_5", initializer_range=0.2, **SHAPE)
    with tiny.engine(model, tmp_path_factory.mktemp("hybrid"), prefix_text=tiny.BOS) as engine:
        engine.ingest([tiny.document(0, paragraphs=5)]).whole()
        with live(engine) as server:
            yield server


def asked(served, **more):
    text = tiny.prompt(served.engine, 0)
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}


def test_chats_completions_and_streams_reuse_chunks(served):
    with served.client() as client:
        chat = client.post("/v1/chat/completions", json=asked(served)).raise_for_status().json()
        text = chat["choices"][0]["message"]["content"]
        assert chat["blendrag"]["reused_tokens"] > 100
        with client.stream("POST", "/v1/chat/completions", json=asked(served, stream=True)) as sent:
            lines = [line[6:] for line in sent.iter_lines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(each.get("content") or "" for each in deltas) == text
        given = {"prompt": tiny.prompt(served.engine, 0), "max_tokens": 5}
        made = client.post("/v1/completions", json=given).raise_for_status().json()
        assert made["blendrag"]["reused_tokens"] > 100


def test_clients_at_once_get_what_each_gets_alone(served):
    def answer(number):
        with served.client() as client:
            given = asked(served, max_tokens=4 + number)
            reply = client.post("/v1/chat/completions", json=given).raise_for_status().json()
            return reply["choices"][0]["message"]["content"]

    alone = [answer(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(answer, range(3))] == alone
