"""Prompts of schemas: equal to a block-masked forward of the whole prompt, reused, checked, repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from transformers.cache_utils import DynamicCache

import tiny
from blendrag.engine import BlendEngine, Options, SchemaPrompt
from blendrag.engine.generation import MAX_RESTARTS
from blendrag.errors import InvalidInputError, SchemaError
from blendrag.fusor.loader import HeldKV, LoadedSpan, SpanCorruptError
from blendrag.model.structure import find_decoder
from blendrag.schema.concatenation import (
    CachedStretch,
    ConcatenatedPrompt,
    FixedPrompt,
    ModuleCache,
)
from blendrag.schema.markup import parse_prompt
from blendrag.serving.scheduler import Scheduler
from blendrag.store.identity import module_key

SCHEMA = """
<schema name="trip">You plan trips for people near the town.
<module name="plan">A trip of <param name="days" len="4"/> days for <param name="who" len="6"/> people.
<module name="boat">They take the old boat.</module> It begins at the harbour.</module>
<union>
<module name="sea">The sea is blue and the ships are old.</module>
<module name="hill">The hill is high, and the founder of the company built a house on it.</module>
</union>
<module name="food">They eat fish from the river.</module>
<scaffold modules="plan food"/>
Answer in one sentence.</schema>
"""
ORDERS = [
    '<plan days="3" who="two"><boat/></plan><sea/> by night <food/>',
    '<food/><sea/> by night <plan days="3" who="two"><boat/></plan>',
    '<sea/> by night <plan days="3" who="two"><boat/></plan><food/>',
]
ASK = " What did the company do?"


def pml(content: str = ORDERS[0] + ASK) -> str:
    return f'<prompt schema="trip">{content}</prompt>'


@contextmanager
def engine(model: Any, root: Any, schema: str = SCHEMA, positions: Any = "schema", **given: Any):
    with tiny.engine(model, root, **given) as made:
        made.add_schema(schema, positions)
        yield made


class Seen(NamedTuple):
    rows: list[int]
    """Rows of each forward of the decoder."""
    ids: list[list[int]]
    logits: list[torch.Tensor]
    """``[V]`` of each forward's last token."""


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """Forwards over a cache of modules, and the rows of all of the decoder that requests wait for."""
    seen = Seen([], [], [])
    base = find_decoder(model).base

    def look(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(kwargs.get("past_key_values"), ModuleCache):
            seen.ids.append(kwargs["input_ids"][0].tolist())
            seen.logits.append(out.logits[0, -1].clone())

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if not tiny.is_background():
            seen.rows.append(ids.shape[-1])

    hooks = [
        model.register_forward_hook(look, with_kwargs=True),
        base.register_forward_pre_hook(count, with_kwargs=True),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def block_masked(model: Any, prompt: FixedPrompt, answer: list[int]) -> torch.Tensor:
    """Logits ``[n, V]`` of the prompt's last token and of each of the ``answer``, by one forward of the model
    over every token of every block, placeholders included, under an explicit mask: the slow reference."""
    blocks: dict[int, Any] = {}
    used: set[tuple[int, int]] = set()
    tokens: list[
        tuple[int, int, int]
    ] = []  # id, position, block; -1: sees all that is in the prompt
    last = prompt.end - 1
    for part in prompt.parts:
        if isinstance(part, CachedStretch):
            blocks[id(part.block)] = part.block
            used |= {(id(part.block), position) for position in part.positions if position != last}
            if prompt.last_is_cached and part.positions[-1] == last:
                tokens.append((part.ids[-1], last, -1))
        else:
            tokens += zip(part.ids, part.positions, [-1] * len(part.ids), strict=True)
    tokens += [(token, prompt.end + i, -1) for i, token in enumerate(answer)]
    tokens.sort(key=lambda token: token[1])
    for name, block in blocks.items():
        tokens[:0] = zip(block.ids, block.positions, [name] * len(block.ids), strict=True)
    ids, at, of = (torch.tensor(column) for column in zip(*tokens, strict=True))
    held = torch.tensor([(b, p) in used for _, p, b in tokens])
    before = (at < at[:, None]) | (
        (at == at[:, None]) & (torch.arange(len(at)) <= torch.arange(len(at))[:, None])
    )
    fresh = of == -1
    visible = torch.where(fresh[:, None], held | fresh, of == of[:, None]) & before
    near = at[:, None] - at < (getattr(model.config, "sliding_window", None) or 1 << 20)
    if run := getattr(model.config, "attention_chunk_size", None):
        near = at[:, None] // run == at // run
    full, windowed = (
        torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        for seen in (visible, visible & near)
    )
    mask: Any = windowed
    if len(set(getattr(model.config, "layer_types", None) or [""])) > 1:
        mask = dict.fromkeys(model.config.layer_types, windowed) | {"full_attention": full}
    given: dict[str, Any] = {"attention_mask": mask, "past_key_values": DynamicCache()}
    base = model.transformer if hasattr(model, "transformer") else None
    if hasattr(base, "build_alibi_tensor"):
        stock = base.build_alibi_tensor(
            torch.ones(1, int(at.max()) + 1), base.num_heads, torch.float32
        )
        base.build_alibi_tensor = lambda *_, **__: stock[..., at]
    elif hasattr(base, "build_mpt_alibi_tensor"):
        stock = base.build_mpt_alibi_tensor(base.num_heads, int(at.max()) + 1)
        base.build_mpt_alibi_tensor = lambda *_, **__: stock[..., at]
    else:
        given["position_ids"] = at[None]
    try:
        logits = model(input_ids=ids[None], use_cache=True, **given).logits[0]
    finally:
        for name in ("build_alibi_tensor", "build_mpt_alibi_tensor"):
            vars(base).pop(name, None) if base is not None else None
    return logits[-1 - len(answer) :]


def placed(made: BlendEngine, markup: str) -> FixedPrompt:
    return made.schemas["trip"].schema.place(parse_prompt(markup))


#: Positions that are rotated, learned, biases and latent; layers that share KV, see chunks, or a window.
FAMILIES = ("llama", "gpt2", "bloom", "deepseek_v2", "gemma4", "llama4_text", "mistral")


@pytest.mark.parametrize("family", FAMILIES)
def test_concatenated_modules_equal_a_block_masked_forward_in_any_order(family, tmp_path):
    model = tiny.family(family, initializer_range=0.2)
    with engine(model, tmp_path) as made:
        for content in ORDERS:
            for again in range(1 + (content == ORDERS[0])):  # encoded, then loaded
                with watched(model) as seen:
                    answer = made.generate(pml=pml(content + ASK), max_new_tokens=4)
                assert bool(answer.metrics.reused_tokens) == bool(again or content != ORDERS[0])
                new = [ids[0] for ids in seen.ids[1:]]
                expected = block_masked(model, placed(made, pml(content + ASK)), new)
                assert tiny.difference(torch.stack(seen.logits), expected) < 1e-5


def test_a_complete_scaffold_is_encoded_together(tmp_path):
    """Without the text outside of modules, whose states are apart, a scaffold's prompt is a full prefill."""
    model = tiny.llama()
    schema = (
        '<schema name="trip"><module name="a">The old ships of the town.</module>'
        '<module name="b">The founder built them by the river.</module>'
        '<scaffold modules="a b"/></schema>'
    )
    with engine(model, tmp_path, schema) as made, watched(model) as seen:
        made.generate(pml=pml("<a/><b/>" + ASK), max_new_tokens=3)
        whole = made.segments(SchemaPrompt(pml("<a/><b/>" + ASK))).ids
        new = [ids[0] for ids in seen.ids[1:]]
        expected = tiny.stock(model, torch.tensor([[*whole, *new]]))[0, -1 - len(new) :]
        assert tiny.difference(torch.stack(seen.logits), expected) < 1e-5
        seen.logits.clear()
        made.generate(pml=pml("<b/>" + ASK), max_new_tokens=1)
        alone = block_masked(model, placed(made, pml("<b/>" + ASK)), [])
        assert tiny.difference(torch.stack(seen.logits), alone) < 1e-5


def test_stored_modules_are_not_computed_again(tmp_path):
    model = tiny.llama()
    with engine(model, tmp_path) as made:
        report = made.encode_schema("trip")
        assert report.encoded == report.modules == 7
        with watched(model) as seen:
            answer = made.generate(pml=pml(), max_new_tokens=3)
        fresh = answer.metrics.fresh_tokens
        assert seen.rows == [6, 6, 5, 7, fresh, 1, 1]  # attention and arguments are probed before
        assert answer.metrics.prompt_tokens == answer.metrics.reused_tokens + fresh > 3 * fresh
        assert made.encode_schema("trip").encoded == 0
    with engine(model, tmp_path) as made, watched(model) as seen:  # another process
        made.generate(pml=pml(), max_new_tokens=1)
        assert seen.rows[-1] == fresh
        # how tokens are placed and attended, and a probe of 32
        assert sum(seen.rows[:-1]) == 4 + 2 * 6 + 5 + 7 + 32


def test_a_prompt_that_ends_in_a_module_computes_its_last_token(tmp_path):
    model = tiny.llama()
    schema = '<schema name="trip"><module name="a">The old ships of the town.</module></schema>'
    with engine(model, tmp_path, schema) as made, watched(model) as seen:
        answer = made.generate(pml=pml("<a/>"), max_new_tokens=1)
        answer = made.generate(pml=pml("<a/>"), max_new_tokens=1)
        assert answer.metrics.fresh_tokens == 1
        expected = block_masked(model, placed(made, pml("<a/>")), [])
        assert tiny.difference(seen.logits[-1], expected[-1]) < 1e-5


def test_roles_go_through_the_chat_template(tmp_path):
    schema = (
        '<schema name="trip"><system>You plan.</system><user>Read this.\n<module name="a">The ships.'
        "</module></user><assistant>I have.</assistant></schema>"
    )
    messages = [
        {"role": "system", "content": "You plan."},
        {"role": "user", "content": "Read this.\nThe ships."},
        {"role": "assistant", "content": "I have."},
        {"role": "user", "content": "What did the company do?"},
    ]
    with engine(tiny.shared_llama(), tmp_path, schema) as made:
        tokens = made.tokens
        for asked in ("<a/>What did the company do?", "<a/><user>What did the company do?</user>"):
            ids = made.segments(SchemaPrompt(pml(asked))).ids
            assert tokens.decode(ids) == tokens.render(messages)
        # control tokens in an argument or a text stay text
        ids = made.segments(SchemaPrompt(pml("<a/>What &lt;|end|&gt;?"))).ids
        assert ids.count(tokens.tokenizer.eos_token_id) == 4


@pytest.mark.parametrize("positions", ["schema", "blend"])
def test_a_prompt_streams_stops_and_samples_like_any_other(positions, tmp_path):
    with engine(tiny.shared_llama(), tmp_path, positions=positions) as made:
        for content in (ORDERS[0], "<food/>"):
            made.generate(pml=pml(content + ASK), max_new_tokens=1)
            made.drain()
        whole = made.generate(pml=pml(), max_new_tokens=8)
        assert "".join(made.stream(pml=pml(), max_new_tokens=8)) == whole.text
        assert asyncio.run(made.agenerate(pml=pml(), max_new_tokens=8)).text == whole.text
        other = made.generate(pml=pml("<food/>" + ASK), max_new_tokens=8)
        batch = made.batch(
            [SchemaPrompt(pml()), SchemaPrompt(pml("<food/>" + ASK))], max_new_tokens=8
        )
        assert [answer.text for answer in batch] == [whole.text, other.text]
        stopped = made.generate(pml=pml(), max_new_tokens=8, stop=whole.text[1:3])
        assert (stopped.text, stopped.finish_reason) == (whole.text[:1], "stop")
        sampled = [
            made.generate(pml=pml(), max_new_tokens=8, temperature=1.0, seed=3) for _ in "ab"
        ]
        assert sampled[0].text == sampled[1].text
        several = made.generate(pml=pml(), max_new_tokens=4, generate_kwargs={"num_beams": 2})
        assert several.metrics.reused_tokens


def test_modules_are_kept_in_the_encoding_of_the_store(tmp_path):
    model = tiny.llama(max_position_embeddings=512)
    with engine(model, tmp_path, kv_encoding="int8") as made:
        made.encode_schema("trip")
        with watched(model) as seen:
            assert made.generate(pml=pml(), max_new_tokens=1).metrics.reused_tokens
        expected = block_masked(model, placed(made, pml()), [])
        assert 1e-4 < tiny.difference(seen.logits[0], expected[0]) < 1.0


def test_requests_of_schemas_and_others_run_side_by_side(tmp_path):
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.ingest([tiny.document(1)])
        prompts = [
            tiny.prompt(made, 1),
            SchemaPrompt(pml()),
            "What?",
            SchemaPrompt(pml("<hill/>What?")),
        ]
        for _ in range(2):  # the first time, modules are encoded between the tokens of others
            alone = [made.generate(prompt, max_new_tokens=8).text for prompt in prompts]
            together = made.batch(prompts, max_new_tokens=8)
            assert [answer.text for answer in together] == alone
            made.drain()


def test_an_answer_over_modules_explains_itself(tmp_path):
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.encode_schema("trip")
        answer = made.generate(pml=pml(), max_new_tokens=1, explain=True)
        page = answer.explain().page("trip")
        assert "module at the positions of its schema" in page
        states = {chunk.outcome for chunk in answer.metrics.chunks}
        assert states == {"exact"}


def test_a_store_that_cannot_be_written_is_read(tmp_path):
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.ingest([tiny.document(1)])
        expected = made.generate(pml=pml("<sea/>" + ASK), max_new_tokens=4).text
    with engine(tiny.shared_llama(), tmp_path, read_only=True) as made:
        answer = made.generate(pml=pml("<sea/>" + ASK), max_new_tokens=4)
        assert (answer.text, bool(answer.metrics.reused_tokens)) == (expected, True)
        missed = made.generate(pml=pml("<hill/>" + ASK), max_new_tokens=4)
        [note] = missed.metrics.notes
        assert note.startswith("1 module of the schema (")
        assert note.endswith(" tokens) had no KV in the store, encoded for this request")


def test_beams_over_modules_are_those_of_one_sequence(tmp_path):
    model = tiny.llama()
    options = Options(
        max_new_tokens=4, generate_kwargs={"num_return_sequences": 2, "do_sample": True, "top_k": 1}
    )
    with engine(model, tmp_path) as made:
        whole = made.generate(pml=pml(), max_new_tokens=4)
        assert made.generate(SchemaPrompt(pml()), options).texts == (whole.text,) * 2


def test_blend_at_ratio_one_is_a_full_prefill(tmp_path):
    model = tiny.llama()
    with engine(model, tmp_path, positions="blend") as made:
        made.generate(pml=pml(), max_new_tokens=1)
        made.drain()
        for ratio, is_equal in ((1.0, True), (0.0, False)):
            options = Options(ratio=ratio, max_new_tokens=1)
            logits, answer = tiny.first_logits(made, SchemaPrompt(pml()), options)
            assert answer.metrics.reused_tokens
            ids = torch.tensor([made.segments(SchemaPrompt(pml())).ids])
            near = tiny.difference(logits, tiny.stock(model, ids)[0, -1]) < 1e-4
            assert near is is_equal


def test_a_damaged_module_is_encoded_again(tmp_path):
    model = tiny.llama()
    with engine(model, tmp_path, ram_bytes=0) as made:
        made.encode_schema("trip")
        stored = made.schemas.validity.namespace
        expected = made.generate(pml=pml(), max_new_tokens=4)
        for key in list(made.store.keys(stored)):
            if key != made.schemas.validity.probe_key(stored):
                tiny.damage(made, key)
        with watched(model) as seen:
            answer = made.generate(pml=pml(), max_new_tokens=4)
            assert (answer.text, answer.metrics.reused_tokens) == (expected.text, 0)
            new = [ids[0] for ids in seen.ids[-3:]]
            reference = block_masked(model, placed(made, pml()), new)
            assert tiny.difference(torch.stack(seen.logits[-4:]), reference) < 1e-5
        assert made.generate(pml=pml(), max_new_tokens=4).metrics.reused_tokens


def test_modules_of_other_weights_are_not_used(tmp_path):
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.encode_schema("trip")
    model = tiny.llama(seed=1)
    with engine(model, tmp_path) as made, watched(model) as seen:
        assert not made.generate(pml=pml(), max_new_tokens=1).metrics.reused_tokens
        expected = block_masked(model, placed(made, pml()), [])
        assert tiny.difference(seen.logits[0], expected[0]) < 1e-5


def test_modules_that_this_machine_computes_otherwise_are_renewed(tmp_path, monkeypatch):
    model = tiny.llama()
    with engine(model, tmp_path) as made:
        made.encode_schema("trip")
    with engine(model, tmp_path) as made, monkeypatch.context() as patch:
        patch.setattr("blendrag.engine.kv_validity._alike", lambda *_: False)
        assert not made.generate(pml=pml(), max_new_tokens=1).metrics.reused_tokens
        assert made.generate(pml=pml(), max_new_tokens=1).metrics.reused_tokens


def test_a_changed_schema_is_encoded_again_and_its_old_states_are_collected(tmp_path):
    changed = SCHEMA.replace("ships are old", "ships sink")
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.encode_schema("trip")
        entries = made.stats().entries
        made.add_schema(changed)
        report = made.encode_schema("trip")
        assert (report.encoded, report.collected) == (1, 1)
        assert made.stats().entries == entries
    with engine(tiny.shared_llama(), tmp_path, changed.replace("ships sink", "boats sink")) as made:
        assert made.generate(pml=pml(), max_new_tokens=1).metrics.reused_tokens
        assert made.stats().entries == entries


def test_documents_can_be_ingested_beside_modules(tmp_path, caplog):
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.encode_schema("trip")
    with engine(tiny.shared_llama(), tmp_path, prefix_text="Read this.") as made:
        made.ingest([tiny.document(1)])
        assert "but no corpus" not in caplog.text
        assert made.generate(pml=pml(), max_new_tokens=1).metrics.reused_tokens
        assert made.encode_schema("trip").encoded == 0


def test_mode_full_prefills_the_tokens_of_the_prompt(tmp_path):
    model = tiny.llama()
    with engine(model, tmp_path) as made:
        answer = made.generate(pml=pml(), max_new_tokens=4, mode="full")
        ids = torch.tensor([made.segments(SchemaPrompt(pml())).ids])
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert answer.text == made.tokens.tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.metrics.fresh_tokens == answer.metrics.prompt_tokens == ids.shape[1]


def test_parameters_without_an_unknown_token_take_a_space(tmp_path):
    with engine(tiny.shared_llama(), tmp_path) as made:
        assert made.encode_schema("trip").notes == (
            "the tokenizer has no <unk>; ' ' stands for parameters",
        )


def test_wrong_prompts_are_refused(tmp_path):
    with engine(tiny.family("gpt2"), tmp_path, max_new_tokens=6) as made:
        with tiny.refuses("schema 'tripp' was not added .* which has trip .did you mean 'trip'"):
            made.generate(pml='<prompt schema="tripp"><sea/></prompt>')
        with tiny.refuses("<prompt>:1:1: the prompt is empty", SchemaError):
            made.add_schema('<schema name="one"><module name="a">x</module></schema>')
            made.generate(pml='<prompt schema="one"/>')
        with tiny.refuses("<prompt>:2:1: .* expected at most 4,096", SchemaError):
            made.generate(pml=pml("<sea/>\n" + "old ships " * 2000))
        with tiny.refuses("embedded null byte", InvalidInputError):
            made.add_schema("a\0b")
        with tiny.refuses("union", SchemaError):
            made.generate(pml=pml("<sea/><hill/>"))
        with tiny.refuses("neither a prompt nor pml given"):
            made.generate()
        with tiny.refuses("a prompt and pml given"):
            made.generate("What?", pml=pml())
        with tiny.refuses("tools given"):
            made.generate(pml=pml(), tools=[{"type": "function"}])
        with tiny.refuses("positions is 'fixed', expected 'schema' or 'blend'"):
            made.add_schema(SCHEMA, positions="fixed")  # type: ignore[arg-type]
        with tiny.refuses("<schema>:1:1: .* takes .* positions, but the model has 4,096"):
            made.add_schema(f'<schema name="long">{"old ships " * 2000}</schema>')
        notes = made.generate(pml=pml(), max_new_tokens=10_000, stop="e").metrics.notes
        assert any(note.startswith("max_new_tokens 10000 was cut to ") for note in notes)
        with tiny.refuses("a schema that is an int, expected markup"):
            made.add_schema(3)  # type: ignore[arg-type]
        with tiny.refuses("No such file", InvalidInputError):
            made.add_schema(tmp_path / "none.xml")


def test_a_model_that_cannot_be_placed_is_refused(tmp_path):
    with engine(tiny.family("lfm2"), tmp_path) as made:
        with pytest.raises(Exception, match="layers of type 'conv'"):
            made.generate(pml=pml())
        assert made.generate(pml=pml(), mode="full").metrics.prompt_tokens


def in_memory(made: BlendEngine, name: str) -> bool:
    """Whether the stored parts of a module are in the memory tier."""
    block = made.schemas["trip"].schema._own[name].block
    namespace = made.schemas.validity.namespace
    keys = [module_key(namespace, block.ids, block.positions, *each) for each in block.stretches]
    return all(made.store.memory.contains(namespace, key) for key in keys)


def test_siblings_in_a_union_are_read_ahead(tmp_path):
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.encode_schema("trip")
        made.generate(pml=pml("<sea/>" + ASK), max_new_tokens=1)
        made.drain()
        assert in_memory(made, "hill")
        assert not in_memory(made, "boat")


@pytest.mark.parametrize("reason", ["no memory", "a request waits"])
def test_reading_ahead_gives_way(reason, tmp_path, monkeypatch):
    """It evicts nothing from memory, and waits until no request does."""
    with engine(tiny.shared_llama(), tmp_path) as made:
        made.encode_schema("trip")
        memory = made.store.memory
        calls: list[int] = []
        if reason == "no memory":
            monkeypatch.setattr(memory, "has_room", lambda size_bytes: False)
        else:

            def waits(scheduler: Scheduler) -> bool:
                calls.append(1)
                assert len(calls) < 10 or not in_memory(made, "hill")
                return len(calls) < 10

            monkeypatch.setattr(Scheduler, "is_waited_for", property(waits))
        made.generate(pml=pml("<sea/>" + ASK), max_new_tokens=1)
        for _ in range(12):
            made.drain()
        assert in_memory(made, "hill") is (reason != "no memory")
        assert reason == "no memory" or len(calls) >= 10


@pytest.mark.parametrize("content", [ORDERS[0] + ASK, "<sea/>"])  # one token is fresh in the last
def test_a_request_with_fixed_positions_gives_up_stored_modules_that_stay_corrupt(
    content: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny.shared_llama(), tmp_path / "store") as made:
        made.encode_schema("trip")
        expected = made.generate(pml=pml(content))
        prompts: list[ConcatenatedPrompt] = []
        start = ModuleCache.__init__

        def watched_start(
            self: ModuleCache, layout: Any, prompt: ConcatenatedPrompt, *args: Any
        ) -> None:
            prompts.append(prompt)
            start(self, layout, prompt, *args)

        def corrupt(self: ModuleCache, layer: int) -> None:
            for span in prompts[-1].spans:
                if not isinstance(span.reader, HeldKV):
                    raise SpanCorruptError(
                        LoadedSpan(0, 1, HeldKV(Mock(tokens=1)), 0, True), ValueError("changed")
                    )
            load(self, layer)

        load = ModuleCache._load
        monkeypatch.setattr(ModuleCache, "__init__", watched_start)
        monkeypatch.setattr(ModuleCache, "_load", corrupt)
        answer = made.generate(pml=pml(content))
        assert answer.text == expected.text
        assert len(prompts) == MAX_RESTARTS + 1
        assert {chunk.outcome for chunk in answer.metrics.chunks} == {"computed"}
