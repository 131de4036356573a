"""Prompts beyond the original length of LongRoPE and dynamic tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.fusor import gate
from blendrag.model.length_tables import own_tables
from blendrag.store.identity import kv_namespace

LIMIT = 300
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0], "factor": 4.0, "original_max_position_embeddings": LIMIT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
BLEND = Options(mode="blend", ratio=0.3)
ALL = Options(mode="blend", ratio=1.0)
FULL = Options(mode="full")


def longrope(family: str = "llama") -> Any:
    more = {"original_max_position_embeddings": LIMIT} if family == "phi3" else {}
    return tiny.family(
        family,
        initializer_range=0.2,
        rope_parameters=LONGROPE,
        max_position_embeddings=1200,
        **more,
    )


@pytest.fixture(params=["llama", "phi3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(tmp_path, family):
    with tiny.engine(longrope(family), tmp_path / "store") as made:
        made.ingest([tiny.document(i, 5) for i in range(4)])
        yield made


def long_prompt(engine: BlendEngine, *documents: int, ask: str = "What did the company do?") -> str:
    text = tiny.prompt(engine, *(documents or (0, 1, 2)), ask=ask)
    assert len(engine.segments(text).ids) > LIMIT
    return text


def stock_text(model: Any, engine: BlendEngine, prompt: str, new_tokens: int) -> str:
    """What transformers answers with this model."""
    ids = torch.tensor([engine.segments(prompt).ids])
    end = engine.adapter.tokens.tokenizer.eos_token_id
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
            pad_token_id=end, eos_token_id=end,
        )  # fmt: skip
    text = engine.adapter.tokens.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return str(text).rstrip("\ufffd")


def test_kv_of_the_table_for_long_prompts_passes_the_gate_at_that_length(family, monkeypatch):
    """Moved, with a fifth of the rows recomputed, it reproduces a stock prefill."""
    adapter = tiny.adapter(longrope(family))
    assert adapter.has_long_table
    ids = tiny.random_ids(LIMIT + 40)
    monkeypatch.setattr(gate, "_gate_prompt", lambda adapter: ids)
    found = gate.verify(adapter)
    assert found.blendable, found.reason
    assert found.prompt_tokens > LIMIT


def test_a_chunk_for_long_prompts_is_encoded_as_at_their_beginning(family):
    adapter = tiny.adapter(longrope(family))
    ids = tiny.random_ids(LIMIT + 40)[0].tolist()
    own = tiny.kv_between(adapter, ids, 20, 60)
    with torch.inference_mode():
        whole = adapter.prefill_at(ids)
    exact = [torch.stack((x.keys[0, :, 20:60], x.values[0, :, 20:60])) for x in whole.layers]
    made = adapter.encode(ids[:20], ids[20:60], is_long=True)
    assert max(map(tiny.difference, made.layers, exact)) < 1e-4
    assert max(map(tiny.difference, own.layers, exact)) > 1e-2, "the other table differs"
    again = tiny.kv_between(adapter, ids, 20, 60)
    assert max(map(tiny.difference, again.layers, own.layers)) == 0, "no hook stays"


def test_a_chunk_for_long_prompts_is_moved_back_from_behind_others_by_their_table(family):
    adapter = tiny.adapter(longrope(family))
    ids = tiny.random_ids(90)[0].tolist()
    there = adapter.encode(ids[:50], ids[50:], is_long=True)
    made = adapter.encode(ids[:20], ids[50:], is_long=True, context_ids=ids[20:50])
    turn = adapter.repositioner_of(LIMIT + 1)
    tables = turn.tables(torch.full((40,), 30))
    for i, (one, other) in enumerate(zip(made.layers, there.layers, strict=True)):
        assert (one[0] - other[0]).abs().max() > 1e-3
        moved = one.clone()
        turn.rotate_(moved[0], i, tables)
        assert (moved - other).abs().max() < 1e-4


def test_long_prompts_are_answered_and_blended_from_the_second_one_on(engine):
    text = long_prompt(engine)
    first = engine.generate(text, BLEND)
    assert first.metrics.reused_tokens == 0
    assert any("rotary table" in note for note in first.metrics.notes)
    engine.drain()
    short = engine.generate(tiny.prompt(engine, 0), BLEND).metrics
    assert short.reused_tokens > 0
    second = engine.generate(text, BLEND)
    assert second.metrics.reused_tokens > 0
    assert not second.metrics.notes
    assert "computed" not in {chunk.outcome for chunk in second.metrics.chunks}
    full, plain = tiny.first_logits(engine, text, FULL)
    again, answer = tiny.first_logits(engine, text, ALL)
    assert answer.metrics.reused_tokens > 0
    assert tiny.difference(again, full) < 1e-4
    assert answer.text == plain.text


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_kv_of_one_table_is_not_loaded_for_the_other(engine):
    text = long_prompt(engine)
    for _ in range(2):
        engine.generate(text, BLEND)
        engine.drain()
    used = engine.kv_namespace
    long = kv_namespace(used.validity.namespace, scope=None, is_long=True)
    chunks = sum(len(tiny.chunk_texts(engine, i)) for i in range(3))
    assert len(list(used.store.keys(long))) == chunks
    engine.remove(["doc0.txt"])
    assert len(list(used.store.keys(long))) < chunks, "it goes with its document"


def near_limit(engine: BlendEngine, number: int = 0) -> str:
    """A prompt whose answer passes the limit soon."""
    text = tiny.prompt(engine, 0, ask=f"Where {number} was it built in the year? " * 9)
    assert LIMIT - 40 < len(engine.segments(text).ids) < LIMIT - 10
    return text


@pytest.mark.parametrize(
    ("family", "options"), [("llama", FULL), ("phi3", ALL)], indirect=["family"]
)
def test_an_answer_that_passes_the_limit_is_that_of_transformers(engine, family, options):
    prompt = near_limit(engine)
    tokens = len(engine.segments(prompt).ids)
    new_tokens = LIMIT - tokens + 20
    answer = engine.generate(prompt, options, max_new_tokens=new_tokens)
    assert (answer.metrics.reused_tokens > 0) == (options.mode == "blend")
    assert answer.text.rstrip("\ufffd") == stock_text(longrope(family), engine, prompt, new_tokens)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_requests_on_both_sides_of_the_limit_decode_together_as_alone(engine):
    near, other = near_limit(engine), near_limit(engine, 1)  # they share a chunk
    prompts = [long_prompt(engine), near, tiny.prompt(engine, 1), other]
    engine.generate(prompts[0], BLEND)
    engine.drain()
    alone = [engine.generate(text, BLEND, max_new_tokens=50).text for text in prompts]
    streams = [engine.stream(text, BLEND, max_new_tokens=50) for text in prompts]
    assert ["".join(stream) for stream in streams] == alone


def dynamic() -> Any:
    return tiny.llama(rope_parameters=DYNAMIC, max_position_embeddings=LIMIT)


@pytest.fixture
def scaled(tmp_path):
    with tiny.engine(dynamic(), tmp_path / "store") as made:
        made.ingest([tiny.document(i, 5) for i in range(4)])
        yield made


def test_the_context_of_a_dynamic_table_is_the_original_length_times_its_factor(scaled):
    assert scaled.adapter.context_tokens == 4 * LIMIT
    assert scaled.adapter.blend_limit_tokens == LIMIT


def test_prompts_beyond_the_length_of_a_dynamic_table_are_computed_with_a_note(scaled):
    for text in (long_prompt(scaled), long_prompt(scaled, 0, 1, 2, 3), long_prompt(scaled)):
        answer = scaled.generate(text, BLEND, max_new_tokens=6)
        assert answer.metrics.reused_tokens == 0
        assert any("rotary table" in note for note in answer.metrics.notes)
        assert {chunk.outcome for chunk in answer.metrics.chunks} == {"computed"}
        assert answer.text.rstrip("\ufffd") == stock_text(dynamic(), scaled, text, 6), (
            "whatever came before"
        )
    assert scaled.generate(tiny.prompt(scaled, 0), BLEND).metrics.reused_tokens > 0


ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": LIMIT, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
SCALING = [
    ("Ministral3ForCausalLM", "Ministral3Config", {"head_dim": 16, "rope_parameters": ROPE}),
    ("Llama4ForCausalLM", "Llama4TextConfig", {**tiny.RUNS, "floor_scale": LIMIT + 2}),
]


@pytest.mark.parametrize("classes", SCALING, ids=("ministral3", "llama4"))
def test_prompts_beyond_the_length_where_queries_are_scaled_are_computed_with_a_note(
    classes, tmp_path
):
    """The values of chunks that were encoded before it would differ there."""
    model = tiny.build(classes, initializer_range=0.2)
    with tiny.engine(model, tmp_path) as made:
        assert (made.adapter.refusal, made.adapter.blend_limit_tokens) == (None, LIMIT)
        made.ingest([tiny.document(i, 5) for i in range(4)])
        assert made.generate(tiny.prompt(made, 0), BLEND).metrics.reused_tokens > 0
        text = long_prompt(made, 0, 1, 2, 3)
        answer = made.generate(text, BLEND, max_new_tokens=6)
        assert answer.metrics.reused_tokens == 0
        assert any("queries are scaled by their position" in n for n in answer.metrics.notes)
        assert answer.text == made.generate(text, mode="full", max_new_tokens=6).text


def test_streams_of_a_dynamic_table_do_not_change_each_others(scaled):
    prompts = [long_prompt(scaled), tiny.prompt(scaled, 0), long_prompt(scaled, 0, 1, 2, 3)]
    alone = [stock_text(dynamic(), scaled, text, 10) for text in prompts]
    ways = (FULL, ALL, FULL)
    streams = [
        scaled.stream(text, way, max_new_tokens=10) for text, way in zip(prompts, ways, strict=True)
    ]
    pieces: list[list[str]] = [[] for _ in streams]
    for _ in range(20):
        for stream, kept in zip(streams, pieces, strict=True):
            kept.append(next(stream, ""))
    assert ["".join(kept).rstrip("\ufffd") for kept in pieces] == alone


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_several_sequences_of_a_long_prompt_are_computed_with_a_note(engine):
    text = long_prompt(engine)
    answer = engine.generate(text, Options(mode="blend", generate_kwargs={"num_beams": 2}))
    assert answer.metrics.reused_tokens == 0
    assert any("several sequences" in note for note in answer.metrics.notes)
    plain = engine.generate(text, Options(mode="full", generate_kwargs={"num_beams": 2}))
    assert answer.text == plain.text


def test_the_hook_of_a_dynamic_table_goes_with_its_context():
    rotary = dynamic().model.rotary_emb
    with own_tables(rotary):
        assert rotary._forward_pre_hooks
    assert not rotary._forward_pre_hooks
