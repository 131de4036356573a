"""Plain prompts teach an engine their passages: from the third prompt on, their KV is reused."""

import logging
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import tiny
from blendrag.cli.app import app
from blendrag.corpus.documents import LEARNED
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.engine.rendering import build_rag_prompt
from blendrag.errors import StoreFullError
from blendrag.fusor import BlendCache
from blendrag.store.encodings import stored_chunk_bytes

pytestmark = pytest.mark.timeout(120)
TEXTS = [" ".join(tiny.sentence(10 * i + k) for k in range(3)) for i in range(6)]

#: Where requests learn that name no tenant.
SHARED = Options().scope


def allow(monkeypatch, engine, size_bytes):
    """Let KV of learned passages take so many bytes."""
    writer = engine.store.disk._writer
    monkeypatch.setattr(writer, "learned_limit_bytes", lambda written=0: size_bytes)


@pytest.fixture
def engine(tmp_path, request):
    options = getattr(request, "param", {})
    with tiny.engine(tiny.shared_llama(), tmp_path / "kv", learn=True, **options) as made:
        yield made


def prompt(*numbers, question="Who built it?"):
    texts = "\n\n".join(TEXTS[number] for number in numbers)
    return f"{tiny.LEAD}{texts}\n\nQuestion: {question}"


def reused(answer):
    """Reused share of the tokens of passages, which are all but a few of the prompt's."""
    chunks = [chunk for chunk in answer.metrics.chunks if chunk.outcome != "computed"]
    return sum(chunk.tokens for chunk in chunks) / answer.metrics.prompt_tokens


def learned(engine):
    return [entry.text for entry in engine.library.entries(parent=LEARNED)]


def stored_text(engine):
    """Everything in the store's directory, as text."""
    files = [file for file in engine.root.rglob("*") if file.is_file()]
    return b"".join(file.read_bytes() for file in files).decode("utf-8", "replace")


BLEND = Options(ratio=0.2)
ORDERS = ((0, 1, 2), (3, 2, 0, 1), (1, 0, 2), (2, 1, 0))


def answered(engine, text, options=BLEND):
    """The answer to ``text``, and how many rows each layer has computed until then. The engine is held, so
    nothing runs in the background."""
    rows = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[-2]))
        for layer in engine.adapter.decoder_layers
    ]
    pieces = engine.stream(text, options)
    while not pieces.pending.future.done():
        engine.scheduler.step()
    for hook in hooks:
        hook.remove()
    return pieces.answer, sum(rows) / len(hooks)


@pytest.fixture
def held(engine):
    """The engine, held, with a model that is verified, as an engine that was idle has."""
    engine.scheduler.run(engine.kv_namespace.validity.verification)
    with engine.scheduler.held():
        yield engine


def test_a_passage_is_reused_from_its_third_prompt_on(engine):
    shares = []
    for order in ORDERS:
        shares.append(reused(engine.generate(prompt(*order, question=f"Where is {order}?"))))
        engine.drain()
    assert shares[:2] == [0, 0]
    assert min(shares[2:]) > 0.8
    assert sorted(learned(engine)) == sorted(TEXTS[:3])


def test_learning_delays_no_answer_and_the_third_is_faster(held, tmp_path):
    """In rows computed until the answer, where prompts follow each other without a pause."""
    with (
        tiny.engine(tiny.shared_llama(), tmp_path / "other", learn=False) as other,
        other.scheduler.held(),
    ):
        for number, order in enumerate(ORDERS):
            text = prompt(*order, question=f"Where is {order}?")
            (answer, rows), (_, before) = answered(held, text), answered(other, text)
            assert rows <= before
            if number > 1:
                assert rows < 0.85 * before
                assert reused(answer) > 0.8
                assert "as an earlier prompt computed it" in answer.metrics.chunks[0].reason


def test_nothing_is_kept_of_a_model_that_was_not_verified(held, monkeypatch):
    monkeypatch.setattr(type(held.kv_namespace.validity), "is_verified", False)
    for order in ORDERS[:3]:
        answer, _ = answered(held, prompt(*order, question=f"Where is {order}?"))
    assert reused(answer) == 0
    assert [chunk.outcome for chunk in answer.metrics.chunks] == ["computed"] * 3


def test_kept_kv_is_what_the_prefill_computed_and_counts_as_reused(held, monkeypatch):
    """Moved to where chunks are stored and back. Without exact prefixes in memory, which would go first."""
    monkeypatch.setattr(type(held.prefixes), "may_use", lambda *_: False)
    for order in ORDERS[:2]:
        text = prompt(*order, question=f"Where is {order}?")
        answered(held, text)
    answer, _ = answered(held, text, Options(mode="reuse", logprobs=0))
    full, _ = answered(held, text, Options(mode="full", logprobs=0))
    outcomes = [chunk.outcome for chunk in answer.metrics.chunks]
    assert outcomes.count("reused") == 3
    assert "exact" not in outcomes
    for one, other in zip(answer.logprobs, full.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_mode_prefix_uses_no_kept_kv(engine, monkeypatch):
    monkeypatch.setattr(type(engine.prefixes), "may_use", lambda *_: False)
    engine.verify()
    engine.library.add([Entry(str(n), TEXTS[n]) for n in (0, 1)], precompute=False)
    again = build_rag_prompt("Where is it?", [TEXTS[0], TEXTS[1]])
    with engine.scheduler.held():
        answered(engine, build_rag_prompt("Who built it?", [TEXTS[1], TEXTS[0]]))
        exact, _ = answered(engine, again, Options(mode="prefix"))
        blended, _ = answered(engine, again)
    assert [chunk.outcome for chunk in exact.metrics.chunks] == ["computed"] * 2
    assert [chunk.outcome for chunk in blended.metrics.chunks] == ["blended"] * 2


def test_kept_kv_goes_with_the_last_document_that_has_its_text(engine):
    engine.verify()
    engine.library.add([Entry(str(n), TEXTS[n]) for n in (0, 1)], precompute=False)
    with engine.scheduler.held():
        answered(engine, build_rag_prompt("Who built it?", [TEXTS[1], TEXTS[0]]))
        assert len(engine.store.memory.recent_keys(9)) == 2
        engine.library.delete(["0"])
        assert len(engine.store.memory.recent_keys(9)) == 1


def test_kv_is_kept_of_no_token_that_merged_with_the_text_after_its_chunk(held):
    for numbers in ((0, 1), (1, 0)):
        answered(held, prompt(*numbers, question=f"Where is {numbers}?"))
    request = held.prompts.request(prompt(0, 1), Options(), 0.0)
    first, *_ = request.prompt.chunks
    merged = replace(first, ids=first.ids[:-2])
    cache = BlendCache(held.adapter.layout, first.end, held.adapter.device)
    cache.show(first.end)
    for buffer in cache.buffers(first.end):
        buffer.zero_()
    look_up = held.planner.kept.lookup(held.kv_namespace.validity.namespace, SHARED)
    assert held.store.memory.delete(*look_up(first)[:2])
    with held.adapter.lock:
        held.planner.kept.keep(request, [merged], cache)
    assert look_up(first).tokens == len(first.ids) - 2
    answer, _ = answered(held, prompt(2, 0, 1))
    reasons = [chunk.reason for chunk in answer.metrics.chunks if chunk.chunk_id == first.chunk_id]
    assert "as an earlier prompt computed it" in reasons[0]
    assert answer.metrics.fresh_tokens >= 2


def test_what_a_tenants_prompt_computed_is_used_for_no_other(held):
    for tenant in ("a", "a", "b", "b"):
        answered(held, prompt(0, 1, question="Who?"), Options(tenant=tenant))
    answer, _ = answered(held, prompt(0, 1, question="Who?"), Options(tenant="c"))
    assert not answer.metrics.chunks


def test_what_was_learned_is_told_and_counted(engine):
    engine.generate(prompt(0, 1))
    second = engine.generate(prompt(1, 0, question="When?")).metrics
    tokens = sum(len(engine.kv_namespace.model.text_ids(text)) for text in TEXTS[:2])
    assert second.learned_tokens == tokens
    assert second.notes[-1].startswith(f"2 passages ({tokens:,} tokens) were in an earlier prompt")
    assert 'blendrag_store_learned_passages_total{store="' in engine.prometheus()
    assert f"}} {tokens}\n" in engine.prometheus()
    third = engine.generate(prompt(0, 1, question="Why?")).metrics
    assert third.learned_tokens == 0
    assert {chunk.source for chunk in third.chunks} == {LEARNED}


def test_a_single_passage_is_told_as_one(engine):
    engine.generate(prompt(0, 1))
    note = engine.generate(prompt(2, 0, question="When?")).metrics.notes[-1]
    assert re.match(r"1 passage \(\d+ tokens\) was in an earlier prompt", note), note


def test_a_stored_passage_is_encoded_alone_and_full_recompute_is_a_stock_prefill(engine):
    for order in ((0, 1, 2), (2, 0, 1)):
        engine.generate(prompt(*order, question=f"Where is {order}?"))
        engine.drain()
    ids = engine.kv_namespace.model.text_ids(TEXTS[1])
    kv, alone = (
        tiny.stored_kv(engine, ids, scope=SHARED),
        engine.adapter.encode(engine.manifest.prefix_ids, ids),
    )
    assert all((a == b).all() for a, b in zip(kv.layers, alone.layers, strict=True))
    text = prompt(1, 2, 0)
    full, answer = tiny.first_logits(engine, text, Options(mode="full", max_new_tokens=2))
    assert [chunk.outcome for chunk in answer.metrics.chunks] == ["computed"] * 3
    blend, answer = tiny.first_logits(
        engine, text, Options(mode="blend", ratio=1.0, max_new_tokens=2)
    )
    assert reused(answer) > 0.8
    assert tiny.difference(full, blend) < 1e-3
    plain = tiny.tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    stock = tiny.tokenizer()(plain, add_special_tokens=False, return_tensors="pt").input_ids
    assert tiny.difference(full, tiny.stock(engine.adapter.model, stock)[0, -1]) < 1e-3


def test_it_can_be_turned_off(tmp_path, caplog):
    with tiny.engine(tiny.shared_llama(), tmp_path / "kv", learn=False) as made:
        answers = [made.generate(prompt(0, 1, question=f"Where is {n}?")) for n in range(4)]
    assert not any(answer.metrics.chunks for answer in answers)  # what begins alike is reused
    assert not (tmp_path / "kv").exists()
    assert "learned" not in caplog.text


def test_modes_that_reuse_nothing_learn_nothing(engine):
    for n in range(3):
        engine.generate(prompt(0, 1, question=f"Where is {n}?"), Options(mode="full"))
    assert learned(engine) == []


def test_nothing_of_a_prompt_that_was_seen_once_is_written(engine):
    engine.generate(prompt(0, 1, question="Where is the xylophone?"))
    engine.generate(prompt(1, 2, question="Where is the zeppelin?"))
    engine.drain()
    written = stored_text(engine)
    assert TEXTS[1] in written
    assert not any(text in written for text in (TEXTS[0], TEXTS[2], "xylophone", "zeppelin"))


def test_instruction_question_and_replies_are_not_learned(engine):
    """They are computed, or reused as an exact prefix, however often they return."""
    rules = "Use only what the documents say, and answer in one short sentence. " * 4
    reply = "The company built ships near the town, and it moved to the harbour later. " * 3
    question = "In which year and for which company were the ships near the harbour built? " * 2
    messages = [
        {"role": "system", "content": f"{rules}\n\n{TEXTS[0]}\n\n{TEXTS[1]}"},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": question},
    ]
    for _ in range(3):
        answer = engine.generate(messages)
        engine.drain()
    assert sorted(learned(engine)) == sorted(TEXTS[:2])
    assert [chunk.outcome for chunk in answer.metrics.chunks] == ["exact"] * 2
    for _ in range(2):
        answer = engine.generate(messages)
        engine.drain()
    tokens = sum(chunk.tokens for chunk in answer.metrics.chunks)
    assert answer.metrics.reused_tokens > tokens + 50  # with the instruction before them


def test_a_system_prompt_before_known_chunks_stays_an_exact_prefix(engine):
    engine.ingest([tiny.document(50)])
    rules = "\n\n".join(f"Rule {n}: {tiny.sentence(n)} {tiny.sentence(-n)}" for n in range(4))
    context = "\n\n".join(tiny.chunk_texts(engine, 50))
    for question in ("Who?", "Where?", "When?", "Why?"):
        user = f"{context}\n\nQuestion: {question}"
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": user}]
        metrics = engine.generate(messages).metrics
        engine.drain()
    assert learned(engine) == []
    assert metrics.reused_tokens > sum(chunk.tokens for chunk in metrics.chunks) + 200


def test_a_system_prompt_before_learned_passages_is_an_exact_prefix(engine):
    rules = (
        "You answer questions of sailors, who know their craft and want a short and exact answer in "
        "their own words, without any preface.\n\n"
        "Use nothing but the passages of the user's message, and name the one that you have used, so "
        "that everybody can read it again.\n\n"
        "Where no passage holds the answer, say so at once; nobody wants a guess about a harbour, "
        "however good it may sound."
    )
    for order in ((0, 1), (1, 0), (0, 1), (1, 0), (0, 1)):
        messages = [{"role": "system", "content": rules}]
        messages += [{"role": "user", "content": prompt(*order, question=f"Where is {order}?")}]
        metrics = engine.generate(messages).metrics
        engine.drain()
    assert sorted(learned(engine)) == sorted(TEXTS[:2])
    assert metrics.prefix_tokens > len(engine.kv_namespace.model.text_ids(rules))


def test_learned_passages_outlive_the_engine(engine):
    for n in range(2):
        engine.generate(prompt(0, 1, question=f"Where is {n}?"))
    engine.drain()
    root = engine.root
    engine.close()
    listed = CliRunner().invoke(app, ["list", "--store", str(root)]).output
    assert "0 documents, 2 passages learned from prompts" in listed
    with tiny.engine(tiny.shared_llama(), root, learn=True) as other:
        assert reused(other.generate(prompt(1, 0))) > 0.8
        assert len(other.library) == 0
        assert other.library.delete_parents([LEARNED])
        assert reused(other.generate(prompt(1, 0))) == 0


def test_they_do_not_bind_the_settings_of_a_corpus(engine):
    for n in range(2):
        engine.generate(prompt(0, 1, question=f"Where is {n}?"))
    root = engine.root
    engine.close()
    with tiny.engine(tiny.shared_llama(), root, chunk_tokens=64, prefix_text=tiny.BOS) as other:
        other.ingest([tiny.document(1)])
        assert other.manifest.chunk_tokens == 64
        engine_prompt = tiny.prompt(other, 1)
        assert reused(other.generate(engine_prompt)) > 0.8


@pytest.mark.parametrize("engine", [{}, {"encode_after": 1}], indirect=True)
def test_their_kv_is_bounded_and_the_least_recently_used_are_forgotten(engine, monkeypatch):
    for order in ((0, 1), (1, 0), (0, 2), (0, 2, 3)):  # 1 is used longest ago
        engine.generate(prompt(*order, question=f"Where is {order}?"))
        engine.drain()
    assert sorted(learned(engine)) == sorted(TEXTS[n] for n in (0, 1, 2))
    layout, ids = (
        engine.kv_namespace.layout,
        [engine.kv_namespace.model.text_ids(TEXTS[n]) for n in (0, 1, 2)],
    )
    size_bytes = sum(stored_chunk_bytes(layout, len(each)) for each in ids)
    size_bytes *= engine.kv_namespace.recipe.variants
    allow(monkeypatch, engine, int(1.2 * size_bytes))
    engine.generate(prompt(0, 3, 2))
    engine.drain()
    assert sorted(learned(engine)) == sorted(TEXTS[n] for n in (0, 2, 3))
    assert (
        tiny.stored_kv(engine, engine.kv_namespace.model.text_ids(TEXTS[1]), scope=SHARED) is None
    )
    allow(monkeypatch, engine, 0)
    for _ in range(2):
        engine.generate(prompt(4, 5))
    assert learned(engine) == []


@pytest.mark.parametrize("error", [StoreFullError, RuntimeError])
def test_an_error_ends_learning_and_fails_no_request(error, engine, monkeypatch, caplog):
    def full(*args):
        raise error("the disk is full")

    monkeypatch.setattr(type(engine.kv_namespace.corpus), "create", full)
    for _ in range(3):
        assert engine.generate(prompt(0, 1)).metrics.learned_tokens == 0
    assert caplog.text.count("learns no more passages from prompts: the disk is full") == 1


def test_a_store_without_chunks_is_told_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="blendrag")
    with tiny.engine(tiny.shared_llama(), tmp_path / "kv", learn=True) as made:
        made.generate("Hello.")
        made.generate(prompt(2), mode="prefix")  # reuses conversations, and no chunk
        assert "holds no chunks" not in caplog.text
        first, second = made.generate(prompt(0)), made.generate(prompt(1))
    assert caplog.text.count("holds no chunks") == 1
    (note,) = first.metrics.notes
    assert f"store {tmp_path / 'kv'} holds no chunks" in note
    for remedy in ("BlendVectorStore.from_documents(pieces, …)", "BlendPrecompute", "learn=False"):
        assert remedy in note
    assert tiny.one_sentence(note)
    assert second.metrics.notes == ()
    with tiny.engine(tiny.shared_llama(), tmp_path / "other", learn=False) as made:
        (note,) = made.generate(prompt(0)).metrics.notes
    assert "BlendPrecompute" in note
    assert "learn" not in note
    with BlendEngine(
        tiny.llama(), tmp_path / "kv", tokenizer=tiny.tokenizer(), max_new_tokens=6
    ) as made:
        made.ingest([tiny.document(1)])
        assert "holds no chunks" not in str(made.generate(prompt(0)).metrics.notes)
