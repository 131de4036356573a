"""Templates with today's date: stored KV is that of every day, and the prompt shows the day."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import chat_template_utils

import tiny
from blendrag.chat.forcing import call_form
from blendrag.engine import BlendEngine, Options
from blendrag.engine.rendering import daily_part, prefix_token_ids, render
from blendrag.model.bounded_templates import FIXED_MOMENT
from blendrag.model.tokens import Tokens
from blendrag.store.identity import chunk_key

TURNS = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
KNOWN = "<|bos|><|start|>system\nThe town was built in the year 1874.\n"
#: The forms in which templates write the date, and how they write the second day.
FORMS = {
    "a variable with a default": (
        "{% if not date_string is defined %}{% if strftime_now is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}"
        "{% endif %}{% endif %}" + KNOWN + "Today Date: {{ date_string }}\n<|end|>\n",
        "Today Date: 03 Dec 2026\n",
    ),
    "a macro": (
        "{% macro about() %}" + KNOWN + "Current date: {{ strftime_now('%Y-%m-%d') }}\n\nReasoning: medium"
        "<|end|>\n{% endmacro %}{{ about() }}",
        "Current date: 2026-12-03\n",
    ),
    "a day that is calculated": (
        "{% set today = strftime_now('%Y-%m-%d') %}{% set day = today[-2:] | int - 1 %}"
        + KNOWN + "It is {{ today }}, and yesterday was {{ today[:8] }}{{ '%02d' | format(day) }}.<|end|>\n",
        "It is 2026-12-03, and yesterday was 2026-12-02.",
    ),
    "the time of day": (
        KNOWN + "It is {{ strftime_now('%A, %B %d, %Y, %H:%M:%S.%f') }}.<|end|>\n",
        "It is Thursday, December 03, 2026, 07:08:09.",
    ),
}  # fmt: skip
DATED = FORMS["a variable with a default"][0] + TURNS
LOTTERY = (
    KNOWN + "{{ ['Be brief', 'Be polite', 'Be the sister of the founder'] | random }}.<|end|>\n"
)
DAY_1, DAY_2 = datetime(2026, 11, 25, 22, 59, 58), datetime(2026, 12, 3, 7, 8, 9)
ALL = Options(mode="blend", ratio=1.0)


class Clock:
    """transformers' clock; every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.day, self.looks = DAY_1, 0

    def now(self) -> datetime:
        self.looks += 1
        return self.day.replace(microsecond=1000 * self.looks % 1_000_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(chat_template_utils, "datetime", made)
    return made


def tokens_of(template: str) -> Tokens:
    made = tiny.tokenizer()
    made.chat_template = template
    return Tokens(made)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., BlendEngine]:
    """Makes an engine with the dated template over a store of that name."""
    model = tiny.llama()

    def make(name: str = "store", template: str = DATED, **changes: Any) -> BlendEngine:
        return tiny.engine(
            model, tmp_path / name, tokenizer=tokens_of(template).tokenizer, **changes
        )

    return make


def reused(engine: BlendEngine, mode: str) -> int:
    return engine.generate(tiny.prompt(engine, 0), Options(mode=mode)).metrics.reused_tokens


@pytest.mark.parametrize("form", FORMS)
def test_the_head_is_the_same_every_day_and_the_prompt_shows_the_day(clock, form):
    template, shown = FORMS[form]
    tokens, other = tokens_of(template + TURNS), tokens_of(template + TURNS)
    head = prefix_token_ids(tokens)
    clock.day = DAY_2
    assert prefix_token_ids(tokens) == prefix_token_ids(other) == head
    assert "Answer the question" in tokens.decode(head), "chunks are encoded behind the whole head"
    prompt = render("What?", tokens, Options())
    assert shown in prompt.text
    assert prompt.turn is not None
    assert prompt.text[slice(*prompt.turn)] == "What?"
    stock = tokens.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What?"}], tokenize=False
    )
    assert shown in stock
    before = tokens.decode(head[: daily_part(tokens)])
    assert before.startswith(KNOWN), "what precedes the date is exact every day"
    assert "Answer" not in before


def test_the_fixed_date_is_a_moment_like_any_other(clock):
    tokens = tokens_of(DATED)
    clock.day = FIXED_MOMENT
    asked = render(tiny.LEAD + "x", tokens, Options()).text
    assert tuple(tokens.encode_prompt(asked).ids)[
        : len(prefix_token_ids(tokens))
    ] == prefix_token_ids(tokens)


def test_a_template_that_draws_at_random_has_one_head_and_one_text_a_prompt():
    tokens = tokens_of(LOTTERY + TURNS)
    assert len({prefix_token_ids(tokens) for _ in range(20)}) == 1
    made = [render("What?", tokens, Options()) for _ in range(40)]
    assert len({prompt.text for prompt in made}) == 3, "prompts differ, as in transformers"
    assert all(prompt.contents for prompt in made), "contents are found by rendering twice"


def test_a_forms_renderings_of_a_call_see_one_moment(clock):
    calls = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
        "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    form = call_form(tokens_of(FORMS["the time of day"][0] + calls))
    plain = call_form(tokens_of(KNOWN + calls))
    assert form == plain
    assert plain is not None


def test_keys_of_a_template_without_a_date_are_those_of_earlier_versions():
    tokens = tokens_of(tiny.CHAT_TEMPLATE)
    key = chunk_key("0" * 64, prefix_token_ids(tokens), tokens.encode_text(tiny.sentence(1)))
    assert key == "e1c6c19dbdd1f5bee2a2ce9ad1f950a5f1eaa2976958973cbf3b7d6b6611332b"
    assert daily_part(tokens) == len(prefix_token_ids(tokens))


def test_what_was_ingested_is_reused_on_another_day(clock, opened):
    with opened() as engine:
        assert engine.ingest([tiny.document(0), tiny.document(1)]).chunks_computed > 0
    clock.day = DAY_2
    with opened() as engine:
        again = engine.ingest([tiny.document(0), tiny.document(1), tiny.document(2)])
        assert again.chunks_computed == len(tiny.chunk_texts(engine, 2))
        answer = engine.generate(tiny.prompt(engine, 0), Options(mode="blend", ratio=0.3))
        chunks = [
            len(engine.kv_namespace.model.text_ids(text)) for text in tiny.chunk_texts(engine, 0)
        ]
        assert answer.metrics.reused_tokens >= sum(chunks)
        assert {chunk.outcome for chunk in answer.metrics.chunks} == {"blended"}, "none is exact"
        text = engine.tokens.decode(engine.segments(tiny.prompt(engine, 0)).ids)
        assert "Today Date: 03 Dec 2026" in text


def test_two_machines_share_a_remote_on_two_days(clock, opened, tmp_path):
    (tmp_path / "bucket").mkdir()
    remote = f"file://{tmp_path / 'bucket'}"
    with opened("one", remote=remote) as one:
        one.ingest([tiny.document(0)])
    clock.day = DAY_2
    with opened("two", remote=remote) as two:
        report = two.ingest([tiny.document(0)])
        assert report.chunks_computed == 0
        assert report.chunks_skipped == len(tiny.chunk_texts(two, 0))


def test_the_part_before_the_date_is_reused_on_another_day_in_mode_prefix(clock, opened):
    with opened() as engine:
        engine.ingest([tiny.document(0)])
        before = len(engine.kv_namespace.corpus.undated_ids)
        assert 8 <= before < len(engine.manifest.prefix_ids)
        assert reused(engine, "prefix") == before
    clock.day = DAY_2
    with opened() as engine:
        assert reused(engine, "prefix") == before


def test_mode_prefix_reuses_todays_first_chunk_within_a_day(clock, opened):
    with opened() as engine:
        engine.ingest([tiny.document(0)])
        asked = engine.segments(tiny.prompt(engine, 0))
        end = asked.chunks[0].end
        reused(engine, "prefix")
        assert reused(engine, "prefix") == end
        clock.day = DAY_2
        assert reused(engine, "prefix") == len(engine.kv_namespace.corpus.undated_ids)
        assert reused(engine, "prefix") == end


@pytest.mark.parametrize("options", [Options(mode="prefix"), ALL], ids=lambda each: each.mode)
def test_nothing_of_the_fixed_date_is_taken_for_todays(clock, opened, options):
    """What is reused in mode prefix is exact, and so is everything when all of it is recomputed."""
    with opened() as engine:
        engine.ingest([tiny.document(0)])
        for day in (DAY_1, DAY_2, DAY_2):
            clock.day = day
            text = tiny.prompt(engine, 0)
            got, answer = tiny.first_logits(engine, text, options)
            full, plain = tiny.first_logits(engine, text, Options(mode="full"))
            assert answer.metrics.reused_tokens > 0
            assert tiny.difference(got, full) < 1e-4
            assert answer.text == plain.text


def test_a_corpus_that_was_ingested_behind_a_dated_head_keeps_it(clock, opened, monkeypatch):
    """Stores of versions that wrote the day of the ingest into the head."""
    monkeypatch.setattr("blendrag.engine.rendering.FIXED_MOMENT", DAY_1)
    with opened() as engine:
        engine.ingest([tiny.document(0)])
    monkeypatch.undo()
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DAY_1))
    with opened() as engine:
        assert engine.ingest([tiny.document(0)]).chunks_computed == 0
        answer = engine.generate(tiny.prompt(engine, 0), Options(mode="prefix"))
        assert answer.metrics.chunks[0].outcome == "exact", "it is that day"
        assert torch.isfinite(tiny.first_logits(engine, tiny.prompt(engine, 0), ALL)[0]).all()
