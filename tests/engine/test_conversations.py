"""Conversations behind a system prompt compute each token once, whatever layers the model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny
from blendrag.config import settings
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import RequestCancelled, UnsupportedModelError
from blendrag.model import continuation, linear_layers
from integrity import check_tree

pytestmark = pytest.mark.timeout(120)
NEW_TOKENS = 4
SYSTEM = "You answer questions about the company and its ships. " * 12
#: One of each kind of running state: delta rule, convolution, Mamba 2 beside attention, recurrent gates,
#: lightning attention, several convolutions, and what each layer of ZAYA keeps.
KINDS = ("qwen3_5", "lfm3", "falcon_h1", "recurrent_gemma", "minimax", "inkling", "zaya")
HYBRIDS = [name for name in KINDS if hasattr(transformers, tiny.HYBRIDS[name][1])]
#: Their attention is latent, with sinks, with shared KV.
MOVABLE = ["deepseek_v3", "gpt_oss", "gemma3n"]
Messages = list[dict[str, str]]


def words(engine: BlendEngine) -> dict[int, float]:
    """A bias that lets the model answer in words only, which are the same tokens in the next prompt."""
    said = (" company", " ships", " town", " built", " river", " works")
    encode = engine.tokens.tokenizer.encode
    return {encode(word, add_special_tokens=False)[0]: 100.0 for word in said}


def options(engine: BlendEngine, **changes: Any) -> Options:
    given = {"mode": "prefix", "max_new_tokens": NEW_TOKENS, "logit_bias": words(engine), **changes}
    return Options(**given)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.shared("qwen3_5"), tmp_path / "store") as made:
        yield made
        assert_in_order(made)


def assert_in_order(engine: BlendEngine) -> None:
    tree = engine.prefixes.tree
    if tree is not None:
        check_tree(tree)
        assert not any(node.users for _, node in tree.nodes())


def assert_kept_as_prefilled(engine: BlendEngine) -> None:
    """All KV in the tree is that of a plain prefill."""
    tree, adapter = engine.prefixes.tree, engine.adapter
    leaves = [node for _, node in tree.nodes() if not node.children]
    assert leaves
    for leaf in leaves:
        path = [*leaf.path()][::-1]
        with torch.inference_mode():
            cache = adapter.prefill_at([token for node in path for token in node.ids])
        for i, (shape, stock) in enumerate(zip(adapter.layout.layers, cache.layers, strict=True)):
            kept = [node.chunk.layers[i][:, :, : len(node.ids)] for node in path]
            computed = shape.joined(stock.keys[0], stock.values[0])
            assert tiny.difference(torch.cat(kept, 2), computed) < 1e-3


@contextmanager
def watched(engine: BlendEngine) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Rows of each forward of the model, and the logits of its last row."""
    rows: list[int] = []
    logits: list[torch.Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if tiny.is_background():
            return
        rows.append(kwargs["input_ids"].shape[1])
        logits.append(out.logits[0, -1].float())

    hook = engine.adapter.model.register_forward_hook(look, with_kwargs=True)
    try:
        yield rows, logits
    finally:
        hook.remove()


def asked(engine: BlendEngine, messages: Messages, **changes: Any) -> tuple[Answer, int, float]:
    """The answer, rows that the model computed for it, and the largest difference from stock logits."""
    given = options(engine, **changes)
    ids = torch.tensor([engine.segments(messages, given).ids])
    with watched(engine) as (rows, ours):
        answer = engine.generate(messages, given)
    with torch.inference_mode():
        stock = engine.adapter.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None,
            sequence_bias=[[[token], bias] for token, bias in words(engine).items()],
        )  # fmt: skip
    theirs = [step[0].float() for step in stock.logits]
    decode = engine.tokens.tokenizer.decode
    assert answer.text == decode(stock.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    pairs = zip(ours[-NEW_TOKENS:], theirs, strict=True)
    return answer, sum(rows), max(tiny.difference(a, b) for a, b in pairs)


def conversation(
    engine: BlendEngine, turns: int = 5, system: str = SYSTEM, **changes: Any
) -> list[tuple[Answer, int, float]]:
    messages, found = [{"role": "system", "content": system}], []
    for turn in range(turns):
        question = f"Question {turn}: what did the company build in {1870 + turn}?"
        messages.append({"role": "user", "content": question})
        found.append(asked(engine, messages, **changes))
        messages.append({"role": "assistant", "content": found[-1][0].text})
    return found


def tokens_of(turns: Sequence[tuple[Answer, int, float]]) -> int:
    """Those of the last prompt and its answer; the last token of an answer is never computed."""
    metrics = turns[-1][0].metrics
    return metrics.prompt_tokens + metrics.new_tokens - 1


def system_of(name: str) -> str:
    """Long where tokens behind a state are computed one by one, which a short prompt is not worth."""
    return SYSTEM * (4 if name in tiny.IN_STEPS else 1)


@pytest.mark.parametrize("name", [*HYBRIDS, *MOVABLE])
def test_a_conversation_computes_each_token_once_and_answers_as_stock(name, tmp_path):
    """Rows of the model are counted: this fails if a turn, or its answer, is computed again."""
    with tiny.engine(tiny.shared(name), tmp_path) as made:
        if name in MOVABLE:
            made.verify()  # the gate runs the model, too
        turns = conversation(made, 2, system=system_of(name))
        assert_in_order(made)
    assert sum(rows for _, rows, _ in turns) == tokens_of(turns)
    largest_logit = 12  # of all turns, about
    assert max(differs for _, _, differs in turns) < 1e-4 * largest_logit
    for answer, _, _ in turns[1:]:
        assert answer.metrics.reused_tokens == answer.metrics.prefix_tokens > 180
        assert answer.metrics.fresh_tokens < 45


def test_in_bfloat16_a_conversation_differs_by_noise_only(tmp_path):
    model = tiny.family("falcon_h1", initializer_range=0.2).bfloat16()
    with tiny.engine(model, tmp_path) as made:
        reused, largest = 0, 0.0
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"What did it build in {1870 + turn}?"})
            given = options(made)
            ids = torch.tensor([made.segments(messages, given).ids])
            with watched(made) as (_, ours):
                answer = made.generate(messages, given)
            theirs = tiny.stock(model, ids)[0, -1]
            first = ours[-NEW_TOKENS]
            largest = max(largest, tiny.difference(first, theirs) / float(theirs.abs().max()))
            reused += answer.metrics.reused_tokens
            messages.append({"role": "assistant", "content": answer.text})
    assert reused > 300
    assert largest < 6e-2


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_beyond_the_original_length_of_a_rotary_table_prompts_are_computed_whole(kind, tmp_path):
    """Keys before the length are rotated by another table then."""
    length = 212
    rope = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    if kind == "dynamic":
        given = {"max_position_embeddings": length, "rope_parameters": {**rope, "factor": 8.0}}
    else:
        factors = {"factor": 8.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope |= {"original_max_position_embeddings": length, **factors}
        given = {"rope_parameters": rope}
    with tiny.engine(tiny.family("qwen3_5", initializer_range=0.2, **given), tmp_path) as made:
        rotary = made.adapter.continuation.rotary
        messages = [{"role": "system", "content": SYSTEM}]
        reused = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"What is it in {1870 + turn}?"})
            ids = torch.tensor([made.segments(messages, options(made)).ids])
            with watched(made) as (_, ours):
                answer = made.generate(messages, options(made))
            rotary.max_seq_len_cached = 0  # else of the longest sequence so far
            theirs = tiny.stock(made.adapter.model, ids)[0, -1]
            assert tiny.difference(ours[-NEW_TOKENS], theirs) < 1e-3
            reused.append(answer.metrics.reused_tokens > 0)
            assert (ids.shape[1] > length) == (turn > 0)
            messages.append({"role": "assistant", "content": answer.text})
        assert reused == [False, False, False]
        again = messages[:2]
        assert made.generate(again, options(made)).metrics.reused_tokens > 150


@pytest.mark.parametrize("mode", ["blend", "prefix"])
def test_a_model_that_the_gate_refuses_gets_a_cache_of_its_own(mode, tmp_path):
    """Moshi sees a window because its cache drops what is before it."""
    config = {
        "head_dim": 16,
        "ffn_dim": 64,
        "sliding_window": tiny.WINDOW,
        "initializer_range": 0.2,
    }
    model = tiny.build(("MoshiForCausalLM", "MoshiConfig", config))
    with tiny.engine(model, tmp_path) as made:
        assert made.adapter.refusal is None
        for answer, _, differs in conversation(made, 2, mode=mode):
            assert differs < 1e-3
            assert answer.metrics.reused_tokens == 0


@pytest.mark.parametrize("mode", ["blend", "prefix"])
def test_a_turn_over_chunks_keeps_the_turns_before_it_exact(mode, tmp_path):
    """What was blended is not kept."""
    with tiny.engine(tiny.shared_llama(), tmp_path, prefix_text=tiny.BOS) as made:
        made.ingest([tiny.document(0)])
        before = conversation(made, 2, mode=mode)
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Question 0: what did the company build in 1870?"},
            {"role": "assistant", "content": before[0][0].text},
            {"role": "user", "content": tiny.prompt(made, 0)},
        ]
        over = made.generate(messages, options(made, mode=mode))
        assert over.metrics.prefix_tokens > 190
        messages += [
            {"role": "assistant", "content": over.text},
            {"role": "user", "content": "And in 1999?"},
        ]
        after = made.generate(messages, options(made, mode=mode, ratio=1.0))
        assert after.metrics.prefix_tokens > 190
        assert after.metrics.prefix_tokens < over.metrics.prompt_tokens
        exact = made.generate(messages, options(made, mode="full"))
        assert after.text == exact.text
        assert_in_order(made)
        assert_kept_as_prefilled(made)


def test_another_conversation_reuses_the_system_prompt(engine):
    conversation(engine, 1)
    other = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Where is the town of Place?"},
    ]
    answer, rows, differs = asked(engine, other)
    assert rows == answer.metrics.fresh_tokens + NEW_TOKENS - 1 < 40
    assert differs < 1e-3


def test_a_prompt_is_tokenised_once_more_for_all_ends_of_its_states(engine):
    conversation(engine, 2)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Near the town."},
        {"role": "user", "content": "And the town of Place?"},
    ]
    request = engine.prompts.request(messages, options(engine), 0.0)
    assert len(request.shared_ends) > 1
    with tiny.counted(engine.tokens, "encode_prompt") as encoded:
        assert engine.prefixes.state_ends(request, 0)
    assert len(encoded) == 1


def test_a_prompt_that_parts_from_an_earlier_one_leaves_a_state_there(engine):
    """Nothing says where the common part of rendered prompts ends, until a second one comes."""
    texts = [SYSTEM + f"Number {i} of the ships was built by whom? Answer:" for i in range(3)]
    answers = [engine.generate(text, options(engine, apply_chat_template=False)) for text in texts]
    reused = [answer.metrics.reused_tokens for answer in answers]
    assert reused[:2] == [0, 0]
    assert reused[2] > 150


def test_a_prompt_that_is_asked_again_and_again_computes_one_token(engine):
    text = SYSTEM + "The company built"
    given = {"apply_chat_template": False}
    fresh = [asked(engine, text, **given)[0].metrics.fresh_tokens for _ in range(4)]
    assert fresh[0] == fresh[1] > 150
    assert fresh[2:] == [1, 1]


def test_nothing_is_kept_under_weights_that_it_was_not_computed_with(engine):
    """The owner of the model changed them during the answer, and back."""
    weight = engine.adapter.model.model.layers[0].mlp.up_proj.weight
    message = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is it?"}]
    engine.generate(message, options(engine))
    other = [
        *message,
        {"role": "assistant", "content": "A town."},
        {"role": "user", "content": "?"},
    ]

    def change(module: Any, args: Any) -> None:
        weight.data.mul_(2)
        hook.remove()

    before = weight.detach().clone()
    hook = engine.adapter.model.register_forward_pre_hook(change)
    said = engine.generate(other, options(engine)).text
    weight.data.copy_(before)
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "Where?"}]
    _, _, differs = asked(engine, [*other, *more])
    assert differs < 1e-3


def test_a_state_that_is_disturbed_is_noticed(engine):
    conversation(engine, 1)
    torch.manual_seed(0)
    for _, node in engine.prefixes.tree.nodes():
        for kept in node.states.values():
            for layer in kept.state.cache.layers:
                for held in getattr(layer, "recurrent_states", {}).values():
                    with torch.inference_mode():
                        held += 3 * held.std() * torch.randn(held.shape)
    other = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is it?"}]
    ids = torch.tensor([engine.segments(other, options(engine)).ids])
    with watched(engine) as (_, ours):
        assert engine.generate(other, options(engine)).metrics.reused_tokens
    assert tiny.difference(ours[-NEW_TOKENS], tiny.stock(engine.adapter.model, ids)[0, -1]) > 1e-2


def test_a_state_is_a_copy_that_no_request_changes(engine):
    first = conversation(engine, 3)
    again = conversation(engine, 3)
    assert [a.text for a, _, _ in first] == [a.text for a, _, _ in again]
    assert max(differs for _, _, differs in again) < 1e-3
    assert all(answer.metrics.fresh_tokens < 45 for answer, _, _ in again)


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"cache_salt": "pepper"}], ids=lambda each: next(iter(each))
)
def test_nothing_is_shared_between_tenants_or_salts(engine, other):
    conversation(engine, 1, tenant="a")
    (theirs,) = conversation(engine, 1, **other)
    (own,) = conversation(engine, 1, tenant="a")
    assert theirs[0].metrics.reused_tokens == 0 < own[0].metrics.reused_tokens


def test_nothing_is_reused_after_the_weights_changed(engine):
    conversation(engine, 1)
    with torch.no_grad():
        engine.adapter.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    (after,) = conversation(engine, 1)
    assert after[0].metrics.reused_tokens == 0
    assert after[2] < 1e-3


def test_requests_of_several_callers_answer_as_alone(engine):
    prompts = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {i}?"}]
        for i in range(4)
    ]
    full = [engine.generate(each, options(engine, mode="full")).text for each in prompts]
    answers = engine.batch(prompts, options(engine))
    assert [answer.text for answer in answers] == full
    assert all(answer.metrics.reused_tokens for answer in answers[1:])


def test_a_cancelled_request_leaves_what_was_complete(engine):
    message = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is it?"}]
    layers = list(engine.adapter.decoder_layers)
    calls: list[int] = []

    def cancel(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == len(layers) + 1:  # in the part behind the system prompt
            pieces.close()

    hooks = [layer.register_forward_pre_hook(cancel) for layer in layers]
    with engine.scheduler.held():
        pieces = engine.stream(message, options(engine))
    assert isinstance(pieces.pending.future.exception(60), RequestCancelled)
    for each in hooks:
        each.remove()
    assert len(calls) <= len(layers) + 2  # it stopped at the next layer
    answer, _, differs = asked(engine, message)
    assert 0 < answer.metrics.reused_tokens < answer.metrics.prompt_tokens - 3
    assert differs < 1e-3


@pytest.mark.parametrize(
    "generate", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str
)
def test_beams_and_several_sequences_are_computed_in_full(engine, generate):
    conversation(engine, 1)
    message = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is it?"}]
    ours = engine.generate(message, options(engine, generate_kwargs=generate))
    full = engine.generate(message, options(engine, generate_kwargs=generate, mode="full"))
    assert ours.texts == full.texts
    assert ours.metrics.reused_tokens == 0


def test_a_cache_that_the_generation_config_names_is_its_own(engine, monkeypatch):
    conversation(engine, 1)
    message = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is it?"}]
    full = engine.generate(message, options(engine, mode="full"))
    config = engine.adapter.model.generation_config
    monkeypatch.setattr(config, "cache_implementation", "dynamic")
    answer = engine.generate(message, options(engine))
    assert answer.text == full.text
    assert answer.metrics.reused_tokens == 0


def test_states_and_kv_stay_within_half_of_the_budget(tmp_path, monkeypatch):
    budget = 1_200_000
    allowed = replace(settings(), batch_bytes=budget)
    monkeypatch.setattr("blendrag.engine.engine.settings", lambda: allowed)
    with tiny.engine(tiny.shared("qwen3_5"), tmp_path) as made:
        for number in range(5):
            conversation(made, 2, system=f"{number} {SYSTEM}")
            assert made.prefixes.size_bytes <= budget // 2
            assert_in_order(made)
        assert made.prefixes.size_bytes > budget // 4
        (latest, _) = conversation(made, 2, system=f"4 {SYSTEM}")
        assert latest[0].metrics.reused_tokens
        made.prefixes.shrink(0)
        assert made.prefixes.size_bytes == 0


@pytest.fixture
def not_composed(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BlendEngine]:
    """Over a model whose chunks are not composed, because no state is told exactly enough."""
    monkeypatch.setattr(linear_layers, "TOLERANCE", {torch.float32: 0.0})
    with tiny.engine(tiny.family("qwen3_5", initializer_range=0.2), tmp_path) as made:
        yield made


def test_chunks_are_computed_and_the_reason_is_said_in_plain_words(not_composed):
    engine = not_composed
    with tiny.refuses("no linear function of the state before it", UnsupportedModelError):
        engine.ingest([tiny.document(0)])
    assert "no linear function" in engine.verify().reason
    text = tiny.prompt(engine, 0)
    answer = engine.generate(text, options(engine))
    assert answer.text == engine.generate(text, options(engine, mode="full")).text
    assert {chunk.outcome for chunk in answer.metrics.chunks} == {"computed"}
    assert all("no linear function" in chunk.reason for chunk in answer.metrics.chunks)
    (note,) = (note for note in answer.metrics.notes if "no linear function" in note)
    assert note.startswith("chunks are reused only in the same beginning: ")
    assert tiny.one_sentence(note)
    with tiny.refuses("use mode full, or prefix", UnsupportedModelError):
        engine.generate(text, options(engine, mode="blend"))


def test_chunks_in_an_exact_beginning_are_reused(engine):
    engine.ingest([tiny.document(0)])
    texts = [tiny.prompt(engine, 0, ask=f"What is {i}?") for i in range(3)]
    answers = [engine.generate(text, options(engine)) for text in texts]
    last = answers[-1].metrics
    assert {chunk.outcome for chunk in last.chunks} == {"exact"}
    assert last.prefix_tokens + sum(chunk.tokens for chunk in last.chunks) == last.reused_tokens
    assert answers[-1].text == engine.generate(texts[-1], options(engine, mode="full")).text


def test_a_model_that_goes_on_wrongly_answers_in_mode_full_only(tmp_path, monkeypatch):
    tiny.forget_states(monkeypatch)
    adapter = tiny.adapter(tiny.family("qwen3_5", initializer_range=0.2))
    assert adapter.continuation is None
    assert (adapter.refusal or "").endswith("use mode full")
    with tiny.engine(adapter.model, tmp_path) as made:
        with pytest.raises(UnsupportedModelError, match=r"use mode full$"):
            made.generate("What is it?", mode="prefix")
        assert made.generate("What is it?", mode="full").metrics.new_tokens


@pytest.mark.usefixtures("empty_cache")
def test_the_check_refuses_what_it_cannot_see(monkeypatch):
    monkeypatch.setattr(continuation, "_disturb", lambda tensor, size: None)
    adapter = tiny.adapter(tiny.family("qwen3_5", initializer_range=0.2))
    assert adapter.continuation is None


def test_tokens_behind_a_state_are_computed_one_by_one_only_if_they_are_few(tmp_path):
    with tiny.engine(tiny.shared("jamba"), tmp_path) as made:
        going = made.adapter.continuation
        assert going.in_steps
        assert going.is_worthwhile(960, 1000)
        assert not going.is_worthwhile(500, 1000)
        short = conversation(made, 2)
    assert [answer.metrics.reused_tokens for answer, _, _ in short] == [0, 0]


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_models_whose_keys_cannot_be_moved_reuse_conversations_too(name, tmp_path):
    with tiny.engine(tiny.family(name, initializer_range=0.2), tmp_path) as made:
        turns = conversation(made, 2)
        assert_in_order(made)
    assert sum(rows for _, rows, _ in turns) == tokens_of(turns)
    assert max(differs for _, _, differs in turns) < 1e-3
