"""Models with running states answer over stored chunks, which are composed, and recomputed in runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.config import DEFAULT_RATIO, settings
from blendrag.engine import BlendEngine
from blendrag.engine.lazy_model import LazyModel
from blendrag.errors import UnsupportedModelError
from blendrag.fusor.composer import Composer, ComposerChecks
from blendrag.model.composition import Composition


def engine_over(name: str, root: Path, **changes: Any) -> BlendEngine:
    model = tiny.shared(name)
    return tiny.engine(model, root, prefix_text=tiny.BOS, **changes)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with engine_over("qwen3_5", tmp_path_factory.mktemp("hybrid") / "store", ram_bytes=0) as made:
        made.ingest([tiny.document(i) for i in range(2)]).whole()
        yield made


def test_chunks_are_reused_as_they_are_stored_and_in_any_order(engine):
    rows = []
    engine.generate(tiny.prompt(engine, 1))  # checks the model
    hook = engine.adapter.stack.layers[0].register_forward_pre_hook(
        lambda _, args: None if tiny.is_background() else rows.append(args[0].shape[1])
    )
    metrics = engine.generate(tiny.prompt(engine, 1, 0), ratio=0).metrics
    hook.remove()
    assert rows[0] == metrics.fresh_tokens
    assert {*rows[1:]} == {1}
    assert (metrics.mode, metrics.policy, metrics.ratio) == ("blend", "reuse", 0.0)
    assert {chunk.outcome for chunk in metrics.chunks} == {"reused"}
    assert metrics.reused_tokens > 400
    assert metrics.fresh_tokens < 50
    assert metrics.load_s > 0
    assert not metrics.notes


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "recurrent_gemma"])
def test_a_chunk_behind_the_prefix_that_it_was_encoded_with_is_exact(name, tmp_path):
    with tiny.engine(tiny.shared(name), tmp_path, top_k=1) as made:
        made.ingest([tiny.document(0, paragraphs=2)])
        question = "What did the company of Place7 build?"
        exact, full = (made.ask(question, mode=mode, logprobs=3) for mode in ("blend", "full"))
    assert [chunk.outcome for chunk in exact.metrics.chunks] == ["exact"]
    assert exact.text == full.text
    pairs = zip(exact.logprobs, full.logprobs, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3


@pytest.mark.parametrize("ratio", [None, 0.4])
def test_chunks_are_recomputed_from_their_beginning_on(engine, ratio):
    metrics = engine.generate(tiny.prompt(engine, 0, 1), ratio=ratio).metrics
    assert (metrics.policy, metrics.notes) == ("query", ())
    assert "blended" in {chunk.outcome for chunk in metrics.chunks}
    assert metrics.ratio == pytest.approx(DEFAULT_RATIO if ratio is None else ratio, abs=0.01)
    total = sum(chunk.tokens for chunk in metrics.chunks)
    assert metrics.recomputed_tokens == round(metrics.ratio * total)


def test_at_ratio_1_the_answer_is_that_of_a_full_prefill(engine):
    text = tiny.prompt(engine, 1, 0)
    ours, full = (
        engine.generate(text, logprobs=3, **how) for how in ({"ratio": 1.0}, {"mode": "full"})
    )
    assert (ours.text, ours.metrics.ratio) == (full.text, 1.0)
    pairs = zip(ours.logprobs, full.logprobs, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ratio": "auto"}, "ratio auto is not used"),
        ({"ratio": 0.3, "policy": "random"}, "policy random is not used"),
        ({"policy": "random"}, "policy random is not used"),
        ({"policy": "query+shift"}, "policy query+shift is not used"),
    ],
)
def test_options_that_are_not_used_are_named_in_a_note(engine, given, said):
    (note,) = engine.generate(tiny.prompt(engine, 0), **given).metrics.notes
    assert said in note
    assert tiny.one_sentence(note)


def test_a_part_of_a_chunk_is_computed(engine):
    (text, *_) = tiny.chunk_texts(engine, 0)
    cut = f"{tiny.LEAD}{text[: 2 * len(text) // 3]}\n\nQuestion: What did the company do?"
    (chunk,) = engine.generate(cut).metrics.chunks
    assert chunk.outcome == "computed"
    assert "stored only for all of it" in chunk.reason


def test_several_sequences_are_computed_and_a_note_says_so(engine):
    answer = engine.generate(tiny.prompt(engine, 0), generate_kwargs={"num_beams": 2})
    assert {chunk.outcome for chunk in answer.metrics.chunks} == {"computed"}
    assert "one sequence only" in " ".join(answer.metrics.notes)


def test_a_damaged_record_of_a_state_is_a_miss(tmp_path):
    with engine_over("qwen3_5", tmp_path, ram_bytes=0, ratio=0.0) as made:
        made.ingest([tiny.document(0)])
        text = tiny.prompt(made, 0)
        tiny.damage(made, tiny.chunk_keys(made, 0)[0])
        metrics = made.generate(text).metrics
        assert {chunk.outcome for chunk in metrics.chunks} == {"computed", "reused"}
        for _ in range(2):  # it was quarantined, and is encoded behind the request that misses it
            made.drain()
            again = made.generate(text).metrics
        assert {chunk.outcome for chunk in again.chunks} == {"reused"}


def test_the_predicted_bytes_are_those_that_an_ingest_stores(tmp_path):
    with engine_over("falcon_h1", tmp_path) as made:
        predicted = made.dry_run([tiny.document(0)])
        report = made.ingest([tiny.document(0)])
        layout = made.kv_namespace.layout
    records = layout.size_bytes(0)
    assert predicted.bytes == report.bytes
    assert report.bytes == report.chunks * records + report.tokens * layout.token_bytes


def test_kv_is_encoded_and_states_stay_as_they_are(tmp_path):
    with engine_over("qwen3_5", tmp_path, kv_encoding="int8") as made:
        made.ingest([tiny.document(0)])
        text = tiny.prompt(made, 0)
    with tiny.engine(made.kv_namespace.model.given, tmp_path) as again:  # compares the probe
        metrics = again.generate(text, ratio=0).metrics
        assert {chunk.outcome for chunk in metrics.chunks} == {"reused"}


def test_a_store_is_not_used_where_states_are_computed_otherwise(tmp_path, monkeypatch):
    model = tiny.family("bamba", initializer_range=0.2)
    with tiny.engine(model, tmp_path) as made:
        made.ingest([tiny.document(0)])
    stock = Composition.encode

    def other(self: Composition, *args: Any) -> Any:
        return self.disturbed(stock(self, *args), 0.5)

    monkeypatch.setattr(Composition, "encode", other)
    with tiny.engine(model, tmp_path) as made:
        metrics = made.generate(tiny.prompt(made, 0)).metrics
    assert metrics.reused_tokens == 0
    assert any("computes different KV" in note for note in metrics.notes)


@pytest.mark.usefixtures("empty_cache")
def test_what_a_composer_measures_is_remembered_for_the_model(engine):
    model = engine.adapter.model
    with tiny.counted(Composer, "prefill") as measured:
        first = LazyModel(model, tiny.tokenizer(), settings()).composer
        assert measured
        measured.clear()
        again = LazyModel(model, tiny.tokenizer(), settings()).composer
        assert not measured
    assert again.checks == first.checks == ComposerChecks(True, True, True, {"hidden_states": 1})


def test_an_explained_answer_shows_what_was_reused(engine):
    answer = engine.generate(tiny.prompt(engine, 0), explain=True)
    assert sum(end - start for start, end in answer.trace.reused) == answer.metrics.reused_tokens


def test_an_explained_answer_shows_what_was_recomputed(engine):
    answer = engine.generate(tiny.prompt(engine, 0), ratio=0.4, explain=True)
    shown = {each.state: 0 for each in answer.trace.ranges()}
    for each in answer.trace.ranges():
        shown[each.state] += len(each.texts)
        assert each.layers == (4 if each.state == "recomputed" else 0)
    assert shown["recomputed"] == answer.metrics.recomputed_tokens > 0
    assert shown["recomputed"] + shown["reused"] == answer.metrics.reused_tokens
    assert 'title="recomputed in' in answer.explain().page()


def test_answers_follow_a_schema_and_come_in_pieces_and_batches(engine):
    text = tiny.prompt(engine, 1, 0)
    schema = {"enum": ["ships", "mills"]}
    form = {"type": "json_schema", "json_schema": {"name": "what", "schema": schema}}
    answer = engine.generate(text, response_format=form, max_new_tokens=20)
    assert answer.text.strip() in ('"ships"', '"mills"')
    assert answer.metrics.reused_tokens > 400
    alone = [engine.generate(each).text for each in (text, "Where?")]
    pieces = engine.stream(text)
    assert "".join(pieces) == alone[0]
    assert pieces.answer.metrics.reused_tokens == answer.metrics.reused_tokens
    assert [each.text for each in engine.batch([text, "Where?"])] == alone


def test_prompts_without_chunks_go_on_from_states_in_the_default_mode(engine):
    messages = [{"role": "user", "content": "Tell me about the town of Place. " * 12}]
    first = engine.generate(messages)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And in 1999?"},
    ]
    assert engine.generate(messages).metrics.prefix_tokens > 64


def test_what_recomputes_tokens_is_refused_in_one_sentence(engine):
    with tiny.refuses("only recomputed from their beginning on", UnsupportedModelError):
        engine.profile()
