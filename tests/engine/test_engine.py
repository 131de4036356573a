"""From prompt to answer: what the engine reuses, computes, counts and never gets wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.config import Mode
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.engine.generation import Generation, answer_of
from blendrag.engine.planner import KVAccess
from blendrag.engine.request import RagPrompt, Request
from blendrag.engine.stream import AnswerStream
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.planning.plan import Action, ReasonCode
from blendrag.store.identity import chunk_key
from blendrag.store.kv import ChunkKV
from blendrag.text.chunking import chunk_id_of
from blendrag.text.matches import Match
from blendrag.text.prompt import PromptPlan, Segment

MODES = ("blend", "reuse", "prefix", "full")
LEAD = "Answer the question from the context.\n\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("engine") / "store") as made:
        report = made.ingest([tiny.document(i) for i in range(4)])
        assert report.failed == 0
        assert report.chunks >= 8
        yield made


def prompt(engine: BlendEngine, *numbers: int, ask: str = "What did the company do?") -> str:
    texts = [text for number in numbers for text in tiny.chunk_texts(engine, number)]
    return LEAD + "\n\n".join(texts) + f"\n\nQuestion: {ask}"


def stored(engine: BlendEngine, ids: tuple[int, ...], prefix: tuple[int, ...]) -> ChunkKV | None:
    """The stored bytes of ``ids`` behind ``prefix``."""
    resources = engine.resources
    namespace = engine.adapter.identity.namespace
    reader = resources.store.open(
        namespace, chunk_key(namespace, prefix, ids), engine.adapter.layout, len(ids)
    )
    if reader is None:
        return None
    layers = []
    for i in range(len(engine.adapter.layout.layers)):
        layers.append(torch.empty(engine.adapter.layout.layer_shape(i, len(ids))))
        reader.read_layer(i, layers[-1])
    reader.close()
    return ChunkKV(engine.adapter.layout, len(ids), layers)


def assert_adds_up(answer: Answer, ends_with_chunk: bool = False) -> None:
    """The identities of the architecture page; a prompt's last token is fresh, chunk or not."""
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


# -- equal to stock -----------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(1,), (2, 0), (3, 3), (0, 1, 2, 3)])
def test_ratio_one_equals_full_prefill(engine: BlendEngine, numbers: tuple[int, ...]) -> None:
    text = prompt(engine, *numbers)
    expected, full = tiny.first_logits(engine, text, Options(mode="full"))
    logits, blended = tiny.first_logits(engine, text, Options(mode="blend", ratio=1.0))
    assert blended.metrics.reused_tokens > 0
    assert tiny.difference(logits, expected) < 1e-3
    assert blended.text == full.text
    assert blended.metrics.ratio == blended.metrics.charged_ratio == 1.0


def test_mode_full_is_a_stock_prefill_of_the_plans_ids(engine: BlendEngine) -> None:
    text = prompt(engine, 1, 2)
    ids = torch.tensor([engine.plan(text).ids])
    expected = tiny.stock(engine.adapter.model, ids)[0, -1]
    logits, answer = tiny.first_logits(engine, text, Options(mode="full"))
    assert tiny.difference(logits, expected) < 1e-4
    assert answer.metrics.reused_tokens == 0
    assert answer.metrics.prompt_tokens == ids.shape[1]
    assert {c.outcome for c in answer.metrics.chunks} == {"computed"}


def test_below_ratio_one_the_answer_is_another_computation(engine: BlendEngine) -> None:
    text = prompt(engine, 1, 2)
    expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
    distances = {}
    for ratio in (0.0, 0.15, 0.6):
        logits, _ = tiny.first_logits(engine, text, Options(mode="blend", ratio=ratio))
        distances[ratio] = tiny.difference(logits, expected)
    assert distances[0.0] > 1e-2
    assert distances[0.6] < distances[0.0]


@pytest.mark.parametrize(
    "generate",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True},
    ],
)
def test_beams_at_ratio_one_equal_stock(engine: BlendEngine, generate: dict[str, Any]) -> None:
    text = prompt(engine, 1, 2)
    answers = [
        engine.generate(text, Options(mode=mode, ratio=1.0, generate=generate, max_new_tokens=12))
        for mode in ("full", "blend")
    ]
    assert answers[1].metrics.reused_tokens > 0
    assert answers[0].texts == answers[1].texts
    assert len(answers[1].texts) == generate.get("num_return_sequences", 1)
    assert_adds_up(answers[1])


def test_beams_over_a_prompt_that_ends_with_a_chunk_equal_stock(engine: BlendEngine) -> None:
    text = "\n\n".join(tiny.chunk_texts(engine, 2))
    answers = [
        engine.generate(
            text,
            Options(mode=mode, ratio=1.0, generate={"num_beams": 2}, apply_chat_template=False),
        )
        for mode in ("full", "blend")
    ]
    assert answers[0].texts == answers[1].texts
    assert answers[1].metrics.fresh_tokens >= 2  # one to blend before, one to begin with


@pytest.mark.parametrize("generate", [{}, {"num_return_sequences": 3}])
def test_sampling_with_a_fixed_seed_at_ratio_one_equals_stock(
    engine: BlendEngine, generate: dict[str, Any]
) -> None:
    text = prompt(engine, 1, 2)
    answers = []
    for mode in ("full", "blend"):
        torch.manual_seed(7)
        options = Options(
            mode=mode, ratio=1.0, temperature=0.8, top_p=0.9, generate=generate, max_new_tokens=10
        )
        answers.append(engine.generate(text, options))
    assert answers[0].texts == answers[1].texts
    assert len(answers[1].texts) == generate.get("num_return_sequences", 1)
    torch.manual_seed(8)
    assert engine.generate(text, options).texts != answers[0].texts


def test_sampling_as_the_checkpoint_says_keeps_its_defaults(tmp_path: Path) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s", max_new_tokens=12) as engine:
        greedy = engine.generate("hello there").text
        torch.manual_seed(3)
        sampled = Options(generate={"do_sample": True})
        assert engine.generate("hello there", sampled).text != greedy
        model.generation_config.top_k = 1  # the likeliest is all there is to draw from
        assert engine.generate("hello there", sampled).text == greedy
        assert engine.generate("hello there", Options(temperature=5.0)).text == greedy


def test_beams_behind_a_stored_lead_over_a_chunk_of_one_token_equal_stock(
    engine: BlendEngine,
) -> None:
    adapter, used = engine.adapter, engine.resources
    namespace = adapter.identity.namespace
    lead, chunk = tuple(tiny.random_ids(20, seed=4)[0].tolist()), (77,)
    used.store.put(namespace, chunk_key(namespace, (), lead), adapter.encode((), lead))
    plan = PromptPlan((Segment("", lead, 0), Segment("", chunk, len(lead), "c", chunk)))

    def answer(mode: Mode, controller: Controller | None) -> Answer:
        options = Options(generate={"num_beams": 2})
        constant = Schedule("constant")
        request = Request(plan, options, mode, "hkvd", constant, 1.0, 6, 0.0, sequences=2)
        stream = AnswerStream(adapter.tokens.tokenizer, (), 0.0)
        with (
            adapter.lock,
            closing(KVAccess(request, adapter, controller, schedule=constant).plan()) as made,
        ):
            output = Generation(adapter, lambda: used.fusor, request, stream).run(made)
            return answer_of(request, made, output, stream, adapter)

    blended = answer("blend", Controller(adapter, used.store, namespace, used.prefix_ids, 8))
    assert blended.metrics.reused_tokens == len(lead) - 1  # one to blend, one to begin with
    assert blended.texts == answer("full", None).texts


def known(text: str, chunks: Sequence[str]) -> RagPrompt:
    """A prompt that may end with a chunk: its chunks are given, else the last were its question."""
    starts = [text.index(chunk) for chunk in chunks]
    matches = [
        Match(chunk_id_of(chunk), start, start + len(chunk), complete=True)
        for chunk, start in zip(chunks, starts, strict=True)
    ]
    return RagPrompt(text, tuple(matches), (len(text), len(text)))


def test_a_prompt_that_ends_with_a_chunk_computes_its_last_token(engine: BlendEngine) -> None:
    chunks = tiny.chunk_texts(engine, 2)
    text = known("\n\n".join(chunks), chunks)
    options = {"apply_chat_template": False}
    expected, _ = tiny.first_logits(engine, text, Options(mode="full", **options))
    for chosen in ({"mode": "blend", "ratio": 1.0}, {"mode": "reuse"}):
        logits, answer = tiny.first_logits(engine, text, Options(**chosen, **options))
        assert answer.metrics.fresh_tokens > 0
        assert_adds_up(answer, ends_with_chunk=True)
        if "ratio" in chosen:
            assert tiny.difference(logits, expected) < 1e-3


def test_a_prompt_that_is_one_chunk_and_nothing_else_is_answered(engine: BlendEngine) -> None:
    chunk = tiny.chunk_texts(engine, 2)[0]
    text = known(chunk, [chunk])
    for mode in MODES:
        answer = engine.generate(text, Options(mode=mode, apply_chat_template=False))
        assert_adds_up(answer, ends_with_chunk=True)
    expected, _ = tiny.first_logits(engine, text, Options(mode="full", apply_chat_template=False))
    logits, answer = tiny.first_logits(
        engine, text, Options(mode="blend", ratio=1.0, apply_chat_template=False)
    )
    assert answer.metrics.fresh_tokens == 1
    assert tiny.difference(logits, expected) < 1e-3


def test_a_chunk_cut_off_at_its_tail_is_reused_as_far_as_it_goes(engine: BlendEngine) -> None:
    whole = tiny.chunk_texts(engine, 1)[0]
    text = f"{LEAD}{whole[: len(whole) * 2 // 3]}… and more\n\nWhat?"
    expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
    logits, answer = tiny.first_logits(engine, text, Options(mode="blend", ratio=1.0))
    (chunk,) = answer.metrics.chunks
    assert chunk.outcome == "blended"
    assert "tail cut off" in chunk.reason
    assert 0 < chunk.tokens < len(engine.resources.text_ids(whole))
    assert tiny.difference(logits, expected) < 1e-3
    assert_adds_up(answer)


def test_a_prompt_without_known_chunks_is_an_ordinary_prefill(engine: BlendEngine) -> None:
    for mode in MODES:
        answer = engine.generate("Nothing of this was ever ingested.", Options(mode=mode))
        assert answer.metrics.reused_tokens == 0
        assert answer.metrics.chunks == ()
        assert any("no known chunk" in note for note in answer.metrics.notes)
        assert_adds_up(answer)


# -- exact prefixes -----------------------------------------------------------------------------


def test_a_chunk_behind_the_corpus_prefix_is_exact_in_every_reusing_mode(
    engine: BlendEngine,
) -> None:
    first = tiny.chunk_texts(engine, 3)[0]
    text = f"<|bos|>{first}\n\nWhat did they build?"
    options = {"apply_chat_template": False}
    expected, full = tiny.first_logits(engine, text, Options(mode="full", **options))
    for mode in ("prefix", "reuse", "blend"):
        logits, answer = tiny.first_logits(engine, text, Options(mode=mode, **options))
        assert tiny.difference(logits, expected) < 1e-4, mode
        assert answer.text == full.text
        (chunk,) = answer.metrics.chunks
        assert chunk.outcome == "exact"
        assert chunk.recomputed_tokens == 0
        assert answer.metrics.recomputed_tokens == 0
        assert answer.metrics.reused_tokens == chunk.tokens
        assert answer.metrics.ratio == answer.metrics.charged_ratio == 0.0


def test_a_chunk_at_the_right_position_behind_another_prefix_is_not_exact(
    engine: BlendEngine,
) -> None:
    first = tiny.chunk_texts(engine, 3)[0]
    text = f"<|start|>{first}\n\nWhat did they build?"  # one token, as BOS is, but another
    answer = engine.generate(text, Options(mode="reuse", apply_chat_template=False))
    assert [c.outcome for c in answer.metrics.chunks] == ["reused"]
    answer = engine.generate(text, Options(mode="prefix", apply_chat_template=False))
    assert [c.outcome for c in answer.metrics.chunks] == ["computed"]


def test_the_second_chunk_is_never_exact(engine: BlendEngine) -> None:
    a, b = tiny.chunk_texts(engine, 3)[:2]
    text = f"<|bos|>{a}{b}\n\nWhat?"
    answer = engine.generate(text, Options(mode="blend", apply_chat_template=False))
    assert [c.outcome for c in answer.metrics.chunks] == ["exact", "blended"]
    expected, _ = tiny.first_logits(engine, text, Options(mode="full", apply_chat_template=False))
    logits, _ = tiny.first_logits(
        engine, text, Options(mode="blend", ratio=1.0, apply_chat_template=False)
    )
    assert tiny.difference(logits, expected) < 1e-3


def test_the_leading_part_becomes_an_exact_prefix_once_it_comes_back(
    engine: BlendEngine,
) -> None:
    lead = "You are an expert on ships and the town of Place. Read carefully.\n\n"
    text = lead + prompt(engine, 1)[len(LEAD) :]
    leading = engine.plan(text).leading_ids
    assert stored(engine, leading, ()) is None
    tiny.first_logits(engine, text, Options(mode="reuse"))
    engine.drain()
    assert stored(engine, leading, ()) is None, "seen once only"
    first_logits, first = tiny.first_logits(engine, text, Options(mode="reuse"))
    engine.drain()
    second_logits, second = tiny.first_logits(engine, text, Options(mode="reuse"))
    assert second.metrics.reused_tokens == first.metrics.reused_tokens + len(leading)
    assert tiny.difference(first_logits, second_logits) < 1e-4
    kv = stored(engine, leading, ())
    assert kv is not None
    alone = engine.adapter.encode((), leading)
    for mine, other in zip(kv.layers, alone.layers, strict=True):
        assert torch.equal(mine, other)
    prefix = engine.generate(text, Options(mode="prefix"))
    assert prefix.metrics.reused_tokens == len(leading)
    expected, _ = tiny.first_logits(engine, text, Options(mode="full"))
    logits, _ = tiny.first_logits(engine, text, Options(mode="prefix"))
    assert tiny.difference(logits, expected) < 1e-4


# -- metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["hkvd", "boundary(4)", "reuse", "full"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_metrics_add_up(engine: BlendEngine, policy: str, ratio: float) -> None:
    answer = engine.generate(
        prompt(engine, 1, 2), Options(mode="blend", policy=policy, ratio=ratio)
    )
    assert_adds_up(answer)
    m = answer.metrics
    tokens = sum(c.tokens for c in m.chunks)
    layers = len(engine.adapter.layout.layers)
    if policy == "hkvd":
        assert m.ratio == pytest.approx(ratio, abs=1 / tokens)
        assert m.charged_ratio == pytest.approx((1 + m.ratio * (layers - 1)) / layers)
        assert m.policy == "hkvd"
    elif policy == "full":
        assert m.ratio == m.charged_ratio == 1.0
    elif policy == "reuse":
        assert m.ratio == m.charged_ratio == 0.0
    else:
        assert m.recomputed_tokens == 4 * len(m.chunks)
        assert m.charged_ratio == pytest.approx(m.ratio)


def test_new_tokens_and_finish_reason_are_those_of_the_answer(engine: BlendEngine) -> None:
    text = prompt(engine, 1)
    answer = engine.generate(text, Options(mode="full", max_new_tokens=12))
    assert answer.metrics.new_tokens == 12
    assert answer.finish_reason == "length"
    stop = answer.text[3:6]
    assert len(stop) == 3
    stopped = engine.generate(text, Options(mode="full", max_new_tokens=12, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == answer.text[: answer.text.index(stop)]
    assert stopped.metrics.new_tokens <= 12


def test_a_single_stop_string_is_one_text_not_its_letters() -> None:
    assert Options(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert Options(stop=["END", "STOP"]).stop == ("END", "STOP")  # type: ignore[arg-type]


def test_a_returned_sequence_that_ended_early_is_finished_and_its_padding_is_no_token(
    tmp_path: Path,
) -> None:
    model = tiny.llama()
    model.generation_config.eos_token_id = list(range(3, 200))
    model.generation_config.pad_token_id = 599
    with tiny.engine(model, tmp_path / "s") as engine:
        outputs: list[torch.Tensor] = []
        generate = model.generate

        def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
            outputs.append(generate(*args, **kwargs))
            return outputs[-1]

        model.generate = spy
        torch.manual_seed(3)
        options = Options(temperature=1.0, max_new_tokens=40, generate={"num_return_sequences": 6})
        answer = engine.generate("hello there", options)
        (output,) = outputs
        new = output[:, len(engine.plan("hello there").ids) :]
        assert (new[0] == 599).any()  # the first sequence was padded up to a longer one
        assert answer.finish_reason == "stop"
        assert answer.metrics.new_tokens == int((new != 599).sum())


# -- what is written, and when ------------------------------------------------------------------


def test_a_known_chunk_without_kv_is_computed_and_encoded_alone_for_the_next_time(
    tmp_path: Path,
) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(i) for i in range(2)])
        text = prompt(engine, 0, 1)
        chunks = [engine.resources.text_ids(t) for t in tiny.chunk_texts(engine, 1)]
        namespace, prefix = engine.adapter.identity.namespace, engine.resources.prefix_ids
        for ids in chunks:
            assert engine.resources.store.delete(namespace, chunk_key(namespace, prefix, ids))
        first = engine.generate(text, Options(mode="blend", ratio=0.3))
        outcomes = [c.outcome for c in first.metrics.chunks]
        assert outcomes[-len(chunks) :] == ["computed"] * len(chunks)
        assert "blended" in outcomes
        assert "encoded after the answer" in first.metrics.chunks[-1].reason
        assert_adds_up(first)
        engine.drain()
        second = engine.generate(text, Options(mode="blend", ratio=0.3))
        assert "computed" not in [c.outcome for c in second.metrics.chunks]
        for ids in chunks:  # encoded alone: not the KV of the query's context
            kv = stored(engine, ids, prefix)
            assert kv is not None
            alone = engine.adapter.encode(prefix, ids)
            for mine, other in zip(kv.layers, alone.layers, strict=True):
                assert torch.equal(mine, other)
            in_context = tiny.kv_between(
                engine.adapter, list(engine.plan(text).ids), *span_of(engine, text, ids)
            )
            assert tiny.difference(in_context.layers[-1][1], kv.layers[-1][1]) > 1e-2


def span_of(engine: BlendEngine, text: str, ids: tuple[int, ...]) -> tuple[int, int]:
    segment = next(s for s in engine.plan(text).chunks if s.stored_ids == ids)
    return segment.position, segment.end


def test_queries_write_nothing_but_what_was_missing(engine: BlendEngine) -> None:
    namespace = engine.adapter.identity.namespace
    text = prompt(engine, 0, 2)
    engine.generate(text)
    engine.drain()
    before = set(engine.resources.store.keys(namespace))
    bytes_before = [
        stored(engine, segment.stored_ids, engine.resources.prefix_ids)
        for segment in engine.plan(text).chunks
    ]
    for mode in MODES:
        engine.generate(text, Options(mode=mode))
    engine.drain()
    assert set(engine.resources.store.keys(namespace)) == before
    for segment, kv in zip(engine.plan(text).chunks, bytes_before, strict=True):
        again = stored(engine, segment.stored_ids, engine.resources.prefix_ids)
        assert kv is not None
        assert again is not None
        assert all(torch.equal(a, b) for a, b in zip(kv.layers, again.layers, strict=True))


def test_a_conversation_of_several_turns_is_not_exact(engine: BlendEngine) -> None:
    messages = [{"role": "user", "content": prompt(engine, 1)}]
    for turn in range(3):
        full_logits, _ = tiny.first_logits(engine, messages, Options(mode="full"))
        logits, answer = tiny.first_logits(engine, messages, Options(mode="blend", ratio=1.0))
        assert tiny.difference(logits, full_logits) < 1e-3
        assert answer.metrics.reused_tokens > 0
        assert_adds_up(answer)
        blended = engine.generate(messages, Options(mode="blend", ratio=0.1))
        engine.drain()
        leading = len(engine.plan(messages).leading_ids)
        chunk_tokens = sum(len(c.ids) for c in engine.plan(messages).chunks)
        assert blended.metrics.reused_tokens <= leading + chunk_tokens
        messages = [
            *messages,
            {"role": "assistant", "content": blended.text},
            {"role": "user", "content": f"And then, in turn {turn}?"},
        ]
    with_new_chunk = [*messages[:-1], {"role": "user", "content": prompt(engine, 2)}]
    logits, answer = tiny.first_logits(engine, with_new_chunk, Options(mode="blend", ratio=1.0))
    expected, _ = tiny.first_logits(engine, with_new_chunk, Options(mode="full"))
    assert tiny.difference(logits, expected) < 1e-3


# -- corruption ---------------------------------------------------------------------------------


def payload_of(engine: BlendEngine, root: Path, ids: tuple[int, ...]) -> Path:
    namespace = engine.adapter.identity.namespace
    key = chunk_key(namespace, engine.resources.prefix_ids, ids)
    (file,) = [p for p in root.rglob("*") if p.is_file() and p.name.startswith(key)]
    return file


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_corrupt_chunk_is_computed_and_the_answer_is_as_if_it_were_missing(
    tmp_path: Path, sequences: int
) -> None:
    root = tmp_path / "store"
    options = Options(
        mode="blend", ratio=0.3, max_new_tokens=8,
        generate={"num_beams": sequences} if sequences > 1 else {},
    )  # fmt: skip
    with tiny.engine(tiny.llama(), root, ram_bytes=0) as engine:
        engine.ingest([tiny.document(i) for i in range(3)])
        text = prompt(engine, 0, 1)
        victim = engine.resources.text_ids(tiny.chunk_texts(engine, 0)[1])
        file = payload_of(engine, root, victim)
        data = bytearray(file.read_bytes())
        data[-100] ^= 0x40  # a late layer: earlier ones were already blended when it is met
        file.write_bytes(bytes(data))
        pieces = engine.stream(text, options) if sequences == 1 else None
        streamed = "".join(pieces) if pieces else None
        corrupt = pieces.answer if pieces else engine.generate(text, options)
        reasons = {c.reason for c in corrupt.metrics.chunks if c.outcome == "computed"}
        assert len(reasons) == 1
        assert "verification" in reasons.pop()
        if streamed is not None:
            assert streamed == corrupt.text
        assert corrupt.metrics.new_tokens <= 8 * sequences
        assert corrupt.metrics.ttft_s > 0
        assert_adds_up(corrupt)
        engine.drain()
        # now it is missing: quarantined, and not yet encoded again
        namespace = engine.adapter.identity.namespace
        key = chunk_key(namespace, engine.resources.prefix_ids, victim)
        engine.resources.store.delete(namespace, key)
        missing = engine.generate(text, options)
        assert [c.outcome for c in missing.metrics.chunks].count("computed") == 1
        assert missing.texts == corrupt.texts
        engine.drain()
        again = engine.generate(text, options)
        assert "computed" not in [c.outcome for c in again.metrics.chunks]


def test_a_corrupt_key_is_not_opened_again_in_the_same_request(
    engine: BlendEngine,
) -> None:
    plan = engine.plan(prompt(engine, 1))
    used = engine.resources
    namespace = engine.adapter.identity.namespace
    controller = Controller(engine.adapter, used.store, namespace, used.prefix_ids, 8)
    keys = [
        chunk_key(engine.adapter.identity.namespace, controller.prefix_ids, segment.stored_ids)
        for segment in plan.chunks
    ]
    options = PlanOptions("reuse", make_policy("reuse"), lambda _: Schedule("constant"), 0.0)
    made = controller.plan(plan, options, frozenset(keys[:1]))
    made.close()
    first, *others = made.chunks
    assert (first.action, first.reason.code) == (Action.COMPUTE, ReasonCode.CORRUPT)
    assert "verification" in first.reason.text
    assert others
    assert all(chunk.action is Action.BLEND for chunk in others)


def test_stored_kv_is_not_used_if_the_machine_computes_other_kv(tmp_path: Path) -> None:
    root = tmp_path / "store"
    model = tiny.llama()
    with tiny.engine(model, root) as engine:
        engine.ingest([tiny.document(0)])
        assert engine.generate(prompt(engine, 0)).metrics.reused_tokens > 0
    with tiny.engine(model, root) as engine:
        # another kernel: the same fingerprint, other numbers
        handle = engine.adapter.stack.layers[1].mlp.register_forward_hook(
            lambda module, args, out: out * 1.5
        )
        try:
            expected, _ = tiny.first_logits(engine, prompt(engine, 0), Options(mode="full"))
            logits, answer = tiny.first_logits(engine, prompt(engine, 0), Options(mode="reuse"))
        finally:
            handle.remove()
        assert answer.metrics.reused_tokens == 0
        assert any("ingest again" in note for note in answer.metrics.notes)
        assert torch.equal(logits, expected)
