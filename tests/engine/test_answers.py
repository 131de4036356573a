"""From a prompt to its answer: what the engine reuses and computes, and the metrics of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tiny
from blendrag.config import Mode
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.engine.generation import Generation
from blendrag.engine.request import RagPrompt, Request
from blendrag.engine.roads import BlendedRoad
from blendrag.engine.stream import AnswerStream
from blendrag.fusor.selection import Blending
from blendrag.planning.controller import Controller
from blendrag.planning.plan import MODE_FULL, Plan
from blendrag.store.identity import chunk_key, learned_namespace
from blendrag.text.chunking import chunk_id_of
from blendrag.text.matches import Match
from blendrag.text.prompt import Segment, SegmentedPrompt
from blendrag.text.rendered import Rendered

MODES = ("blend", "reuse", "prefix", "full")
RAW = {"apply_chat_template": False}


def blended_and_full(
    engine: BlendEngine, prompt: Any, **options: Any
) -> tuple[Answer, Answer, float]:
    """Answers at ratio 1 and of mode full, and the largest difference of their first logits."""
    expected, full = tiny.first_logits(engine, prompt, Options(mode="full", **options))
    logits, blended = tiny.first_logits(engine, prompt, Options(mode="blend", ratio=1.0, **options))
    return blended, full, tiny.difference(logits, expected)


def assert_adds_up(answer: Answer, ends_with_chunk: bool = False) -> None:
    """Counts and times are consistent; the last token of a prompt is always computed."""
    m = answer.metrics
    assert m.prompt_tokens == m.reused_tokens + m.fresh_tokens
    assert 0.0 <= m.ratio <= 1.0
    assert 0.0 <= m.charged_ratio <= 1.0
    assert 0.0 < m.ttft_s <= m.total_s
    assert m.load_s >= 0.0
    loaded = [c for c in m.chunks if c.outcome in ("blended", "reused")]
    tokens = sum(c.tokens for c in loaded) - bool(ends_with_chunk and loaded)
    assert m.recomputed_tokens == round(m.ratio * tokens)
    assert abs(sum(c.recomputed_tokens for c in loaded) - m.recomputed_tokens) <= len(loaded)
    assert all(c.reason for c in m.chunks)
    assert all(c.source.startswith("doc") for c in m.chunks)


# -- equal to the unmodified model --------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(1,), (3, 3), (0, 1, 2, 3)])
def test_ratio_one_equals_full_prefill(engine, numbers):
    blended, full, difference = blended_and_full(engine, tiny.prompt(engine, *numbers))
    assert blended.metrics.reused_tokens > 0
    assert difference < 1e-3
    assert blended.text == full.text
    assert blended.metrics.ratio == blended.metrics.charged_ratio == 1.0


def test_mode_full_is_a_stock_prefill(engine):
    text = tiny.prompt(engine, 1, 2)
    ids = torch.tensor([engine.segments(text).ids])
    expected = tiny.stock(engine.adapter.model, ids)[0, -1]
    logits, answer = tiny.first_logits(engine, text, Options(mode="full"))
    assert tiny.difference(logits, expected) < 1e-4
    assert answer.metrics.reused_tokens == 0
    assert answer.metrics.prompt_tokens == ids.shape[1]
    assert {c.outcome for c in answer.metrics.chunks} == {"computed"}
    assert (answer.metrics.new_tokens, answer.finish_reason) == (6, "length")


def test_beams_over_a_stored_lead_and_a_chunk_of_one_token_equal_stock(engine):
    adapter, used = engine.adapter, engine.kv_namespace
    namespace = adapter.identity.namespace
    lead, chunk = tuple(tiny.random_ids(20, seed=4)[0].tolist()), (77,)
    learned = learned_namespace(namespace, "scope")
    used.store.put(learned, chunk_key(learned, (), lead), adapter.encode((), lead))
    plan = SegmentedPrompt((Segment("", lead, 0), Segment("", chunk, len(lead), "c", chunk)))

    def answer(mode: Mode, controller: Controller | None) -> Answer:
        options = Options(generate_kwargs={"num_beams": 2})
        request = Request(plan, options, mode, Blending.of("hkvd"), 6, 0.0, sequences=2)
        stream = AnswerStream(adapter.tokens.tokenizer, (), 0.0)
        with (
            adapter.lock,
        ):
            full = Plan.computed(plan, MODE_FULL)
            made = controller.plan(plan, mode, request.blending, reserve=2) if controller else full
            planner = Mock(plan=lambda *given: made)
            return Generation(BlendedRoad(used.model, planner, request, stream), stream).run()

    blended = answer(
        "blend",
        Controller(adapter, used.store, namespace, used.corpus.prefix_ids, 8, scope="scope"),
    )
    assert blended.metrics.reused_tokens == len(lead) - 1  # one to blend, one to begin with
    assert blended.texts == answer("full", None).texts


def known(text: str, chunks: Sequence[str]) -> RagPrompt:
    """A prompt with its chunks given, so that the last of them is not taken for the question."""
    starts = [text.index(chunk) for chunk in chunks]
    matches = [
        Match(chunk_id_of(chunk), start, start + len(chunk), complete=True)
        for chunk, start in zip(chunks, starts, strict=True)
    ]
    return RagPrompt(text, tuple(matches), (len(text), len(text)))


@pytest.mark.parametrize("count", [1, 4])
def test_the_last_token_of_a_prompt_that_ends_with_a_chunk_is_computed(engine, count):
    chunks = tiny.chunk_texts(engine, 2)[:count]
    text = known("\n\n".join(chunks), chunks)
    for mode in MODES:
        answer = engine.generate(text, Options(mode=mode, **RAW))
        assert answer.metrics.fresh_tokens > 0
        assert_adds_up(answer, ends_with_chunk=True)
    blended, _, difference = blended_and_full(engine, text, **RAW)
    assert difference < 1e-3
    assert count > 1 or blended.metrics.fresh_tokens == 1
    beams = {"ratio": 1.0, "generate_kwargs": {"num_beams": 4, "num_return_sequences": 2}, **RAW}
    full, blended = (engine.generate(text, Options(mode=m, **beams)) for m in ("full", "blend"))
    assert full.texts == blended.texts
    assert len(blended.texts) == 2
    assert blended.metrics.fresh_tokens >= 2  # one is blended, and one begins decoding


def test_a_chunk_cut_off_at_its_tail_is_reused_up_to_the_cut(engine):
    whole = tiny.chunk_texts(engine, 1)[0]
    text = f"{tiny.LEAD}{whole[: len(whole) * 2 // 3]}… and more\n\nWhat?"
    answer, _, difference = blended_and_full(engine, text)
    (chunk,) = answer.metrics.chunks
    assert chunk.outcome == "blended"
    assert "tail cut off" in chunk.reason
    assert 0 < chunk.tokens < len(engine.kv_namespace.model.text_ids(whole))
    assert difference < 1e-3
    assert_adds_up(answer)


def test_the_kv_of_a_part_is_that_of_its_tokens_in_the_chunk(engine):
    """Behind the text that it was encoded behind, what is loaded is what a full prefill computes."""
    whole = tiny.chunk_texts(engine, 1)[0]
    head = whole.index(" ", len(whole) // 3)
    text = f"{tiny.BOS}{whole}\n\nWhat?"
    at = len(tiny.BOS)

    match = Match(chunk_id_of(whole), at + head, at + len(whole), complete=False, head=head)
    prompt = Rendered(text, chunks=(match,))
    expected, _ = tiny.first_logits(engine, prompt, Options(mode="full"))
    logits, answer = tiny.first_logits(engine, prompt, Options(mode="reuse"))
    (chunk,) = answer.metrics.chunks
    stored = engine.kv_namespace.model.text_ids(whole)
    assert chunk.outcome == "reused"
    assert f"a part: tokens {len(stored) - chunk.tokens + 1} to {len(stored)} of" in chunk.reason
    assert chunk.tokens > len(stored) // 2
    assert tiny.difference(logits, expected) < 1e-3
    blended, _, difference = blended_and_full(engine, prompt)
    assert difference < 1e-3
    assert_adds_up(blended)


def test_a_conversation_is_blended_in_every_turn(engine):
    messages = [{"role": "user", "content": tiny.prompt(engine, 1)}]
    for content in ("And then?", tiny.prompt(engine, 2)):
        answer, _, difference = blended_and_full(engine, messages)
        assert difference < 1e-3
        assert answer.metrics.reused_tokens > 0
        assert_adds_up(answer)
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": content},
        ]
    assert blended_and_full(engine, messages)[2] < 1e-3
    engine.drain()
    plan = engine.segments(messages)
    reused = engine.generate(messages, Options(ratio=0.1)).metrics.reused_tokens
    assert reused <= len(plan.leading_ids) + sum(len(chunk.ids) for chunk in plan.chunks)


# -- exact prefixes -----------------------------------------------------------------------------


def test_a_chunk_after_the_corpus_prefix_is_exact_in_every_reusing_mode(engine):
    first = tiny.chunk_texts(engine, 3)[0]
    text = f"<|bos|>{first}\n\nWhat did they build?"
    expected, full = tiny.first_logits(engine, text, Options(mode="full", **RAW))
    for mode in ("prefix", "reuse", "blend"):
        logits, answer = tiny.first_logits(engine, text, Options(mode=mode, **RAW))
        assert tiny.difference(logits, expected) < 1e-4, mode
        assert answer.text == full.text
        (chunk,) = answer.metrics.chunks
        assert chunk.outcome == "exact"
        assert chunk.recomputed_tokens == 0
        assert answer.metrics.recomputed_tokens == 0
        assert answer.metrics.reused_tokens == chunk.tokens
        assert answer.metrics.ratio == answer.metrics.charged_ratio == 0.0


def test_a_chunk_after_another_prefix_or_another_chunk_is_not_exact(engine):
    first, second = tiny.chunk_texts(engine, 3)[:2]
    text = f"<|start|>{first}\n\nWhat?"  # as long as BOS
    for mode, outcome in (("reuse", "reused"), ("prefix", "computed")):
        (chunk,) = engine.generate(text, Options(mode=mode, **RAW)).metrics.chunks  # type: ignore[arg-type]
        assert chunk.outcome == outcome
    answer, _, difference = blended_and_full(engine, f"<|bos|>{first}{second}\n\nWhat?", **RAW)
    assert [c.outcome for c in answer.metrics.chunks] == ["exact", "blended"]
    assert difference < 1e-3


def test_a_leading_part_that_comes_back_is_stored_as_an_exact_prefix(engine):
    lead = "You are an expert on ships and the town of Place. Read carefully.\n\n"
    text = lead + tiny.prompt(engine, 1).removeprefix(tiny.LEAD)
    leading = engine.segments(text).leading_ids
    found = []
    for _ in range(3):
        assert (tiny.stored_kv(engine, leading, (), Options().scope) is None) == (len(found) < 2)
        found.append(tiny.first_logits(engine, text, Options(mode="reuse")))
        engine.drain()
    (_, _), (before, first), (after, second) = found
    assert second.metrics.reused_tokens == first.metrics.reused_tokens + len(leading)
    assert tiny.difference(before, after) < 1e-4
    kv = tiny.stored_kv(engine, leading, (), Options().scope)
    assert kv is not None
    alone = engine.adapter.encode((), leading).layers
    assert all(torch.equal(mine, other) for mine, other in zip(kv.layers, alone, strict=True))
    expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
    logits, prefix = tiny.first_logits(engine, text, Options(mode="prefix"))
    assert prefix.metrics.reused_tokens == len(leading)
    assert tiny.difference(logits, expected) < 1e-4


# -- metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "ratio", "charged"),
    [
        ("hkvd", 0.15, (1 + 3 * 0.15) / 4),
        ("boundary(4)", 0.15, None),
        ("reuse", 0, 0),
        ("full", 1, 1),
    ],
)
def test_metrics_add_up(engine, policy, ratio, charged):
    for generate in ({}, {"num_beams": 2}):
        options = Options(policy=policy, ratio=0.15, generate_kwargs=generate)
        answer = engine.generate(tiny.prompt(engine, 1, 2), options)
        assert_adds_up(answer)
        m = answer.metrics
        assert m.policy == policy
        if charged is None:
            assert m.recomputed_tokens == 4 * len(m.chunks)
            assert m.charged_ratio == pytest.approx(m.ratio)
        else:
            assert m.ratio == pytest.approx(ratio, abs=1 / sum(c.tokens for c in m.chunks))
            assert m.charged_ratio == pytest.approx(charged, abs=1e-2)


def test_padding_of_a_sequence_that_ended_early_is_not_counted(tmp_path):
    model = tiny.llama()
    model.generation_config.eos_token_id = list(range(3, 200))
    model.generation_config.pad_token_id = 599
    with tiny.engine(model, tmp_path / "s") as engine:
        outputs: list[torch.Tensor] = []
        generate = model.generate
        model.generate = lambda *a, **kw: outputs.append(generate(*a, **kw)) or outputs[-1]
        torch.manual_seed(3)
        options = Options(
            temperature=1.0, max_new_tokens=40, generate_kwargs={"num_return_sequences": 6}
        )
        answer = engine.generate("hello there", options)
        (output,) = outputs
        prompt_tokens = len(engine.segments("hello there").ids)
        new = output[:, prompt_tokens:]
        assert (new[0] == 599).any()  # the first sequence was padded up to a longer one
        assert answer.finish_reason == "stop"
        assert answer.metrics.new_tokens == int((new != 599).sum())

        short = engine.generate("hello there", options, max_new_tokens=3)
        rows = outputs[-1][:, prompt_tokens:].tolist()
        ended = ["stop" if any(3 <= token < 200 for token in row) else "length" for row in rows]
        assert list(short.finish_reasons) == ended
        assert set(ended) == {"stop", "length"}
