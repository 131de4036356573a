"""Requests as OpenTelemetry spans, read by the SDK's in-memory exporter."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tiny
from blendrag import tracing
from blendrag.errors import InvalidInputError

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

QUESTION = "What did the company of Place0 build?"


@pytest.fixture
def exported(monkeypatch):
    """The exporter of all spans of this test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def last_spans(exporter):
    """By the first word of their name."""
    return {span.name.split()[0]: span for span in exporter.get_finished_spans()}


def parents(spans):
    names = {span.context.span_id: name for name, span in spans.items()}
    return {name: span.parent and names.get(span.parent.span_id) for name, span in spans.items()}


def test_a_question_is_a_tree_of_spans_with_token_counts(engine, exported):
    with trace.get_tracer("app").start_as_current_span("app"):
        answer = engine.ask(QUESTION, max_new_tokens=3, temperature=0.5, seed=7, stop="END")
    spans, m = last_spans(exported), answer.metrics
    assert parents(spans) == {
        "app": None, "ask": "app", "retrieval": "ask", "chat": "ask", "plan": "chat",
        "prefill": "chat", "load": "prefill", "decode": "chat",
    }  # fmt: skip
    assert m.reused_tokens > 0
    chat = spans["chat"]
    model = engine.model_name
    assert chat.name == f"chat {model}"
    assert dict(chat.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "blendrag",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "gen_ai.response.time_to_first_chunk": m.ttft_s,
        "gen_ai.usage.input_tokens": m.prompt_tokens,
        "gen_ai.usage.output_tokens": m.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": m.reused_tokens,
        "blendrag.mode": "blend",
        "blendrag.policy": m.policy,
        "blendrag.ratio": m.ratio,
    }
    assert spans["retrieval"].attributes["gen_ai.retrieval.top_k"] == engine.settings.top_k
    assert spans["plan"].attributes["blendrag.tokens.reused"] == m.reused_tokens
    assert spans["load"].attributes["blendrag.tokens.loaded"] == m.reused_tokens
    assert spans["prefill"].attributes["blendrag.tokens.fresh"] == m.fresh_tokens
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == m.new_tokens
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert chat.start_time <= spans["plan"].start_time <= spans["prefill"].start_time
    assert spans["decode"].end_time <= chat.end_time
    assert QUESTION not in str([span.to_json() for span in spans.values()])


def test_a_search_of_a_vector_store_is_a_retrieval(engine, exported):
    engine.library.search(QUESTION, 3)
    attributes = last_spans(exported)["retrieval"].attributes
    assert attributes["gen_ai.retrieval.top_k"] == 3
    assert attributes["gen_ai.data_source.id"] == str(engine.root)


def test_prompts_of_a_batch_share_the_span_of_their_prefill(engine, exported):
    answers = engine.batch([tiny.prompt(engine, i) for i in (0, 1)], mode="reuse", max_new_tokens=1)
    assert {answer.metrics.batch_size for answer in answers} == {2}
    found = exported.get_finished_spans()
    (load,) = {span.parent.span_id for span in found if span.name == "load"}
    (shared,) = [span for span in found if span.context.span_id == load]
    assert (shared.name, shared.attributes["blendrag.batch_size"]) == ("prefill", 2)


async def test_an_awaited_request_belongs_to_the_callers_span(engine, exported):
    with trace.get_tracer("app").start_as_current_span("app"):
        await engine.agenerate("hi", max_new_tokens=1, apply_chat_template=False)
    spans = last_spans(exported)
    assert parents(spans)["text_completion"] == "app"
    assert "load" not in spans


def test_errors_are_recorded_where_they_happen(engine, exported):
    def explode(*_):
        raise ZeroDivisionError("in a layer")

    hooked = engine.adapter.stack.layers[2].mlp.register_forward_hook(explode)
    with hooked, pytest.raises(ZeroDivisionError):
        engine.generate(tiny.prompt(engine, 0))
    spans = last_spans(exported)
    assert "decode" not in spans
    for name in ("chat", "prefill"):
        assert spans[name].attributes["error.type"] == "ZeroDivisionError"
        assert spans[name].status.status_code is trace.StatusCode.ERROR
        assert spans[name].events[0].attributes["exception.message"] == "in a layer"
    assert spans["plan"].status.is_unset
    with pytest.raises(InvalidInputError):
        engine.generate("")
    assert last_spans(exported)["chat"].attributes["error.type"] == "InvalidInputError"


def test_without_provider_or_package_nothing_is_traced_and_requests_are_answered(
    engine, monkeypatch
):
    assert tracing._tracer() is None  # no provider was set
    monkeypatch.setattr(tracing, "_trace", None)
    monkeypatch.setattr(tracing, "_context", None)
    assert engine.ask(QUESTION, max_new_tokens=2).metrics.reused_tokens > 0
    code = "import sys; sys.modules['opentelemetry'] = None; import blendrag.tracing as t; print(t.current())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
