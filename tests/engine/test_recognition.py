"""Chunk text in any prompt format is recognised with the tokens from which the stored KV was computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.model.tokens import Tokens
from blendrag.text import recognition
from blendrag.text.chunking import canonical
from blendrag.text.prompt import PromptPlan, make_plan
from blendrag.text.recognition import ChunkIndex

TOKENS = Tokens(tiny.tokenizer())
PLAIN = " ".join(tiny.sentence(i) for i in range(6))
PAGES = '"Two" paragraphs,\n\n' + "\n\n".join(tiny.sentence(i) for i in range(10, 16))
CJK = "灯塔的看守人每天傍晚点亮油灯。没有人知道那天晚上是谁爬上了楼梯,也没有人问起她从哪里来。" * 2
HEBREW = "מגדלור עתיק עמד על הצוק, ובו שומר זקן שהדליק את המנורה בכל ערב לפני שקיעת החמה. " * 2
ARABIC = "كانت المنارة القديمة تقف على الجرف، وكان حارسها يُشعل المصباح كلَّ مساءٍ قبل الغروب. " * 2
BIDI = f"\u2067{HEBREW.strip()}\u2069 means \u2066{PLAIN[:80]}\u2069 here."


def index_of(texts: Mapping[str, str]) -> ChunkIndex:
    index = ChunkIndex(lambda chunk_id: canonical(texts[chunk_id]))
    for chunk_id, text in texts.items():
        index.add(chunk_id, text)
    return index


def plan_over(index: ChunkIndex, texts: Mapping[str, str], prompt: str) -> PromptPlan:
    """The plan, after checking that every recognised chunk has the tokens of that chunk."""

    def stored(chunk_id: str) -> tuple[int, ...]:
        return tuple(TOKENS.encode_text(canonical(texts[chunk_id])))

    plan = make_plan(prompt, index.find(prompt), TOKENS, stored)
    for segment in plan.chunks:
        assert segment.chunk_id is not None
        text = canonical(texts[segment.chunk_id])
        assert segment.stored_ids == tuple(TOKENS.encode_text(text))
        assert segment.ids == segment.stored_ids[: len(segment.ids)]
        assert text.startswith(segment.text)
        assert segment.text in prompt
        if segment.complete:
            assert segment.text == text
            assert segment.ids  # fewer than stored if a token merges at an end
    assert TOKENS.decode(plan.ids) == TOKENS.decode(TOKENS.encode_template(prompt))
    return plan


def recognised(texts: Mapping[str, str], prompt: str) -> list[tuple[str | None, bool]]:
    plan = plan_over(index_of(texts), texts, prompt)
    return [(segment.chunk_id, segment.complete) for segment in plan.chunks]


WAYS = (
    "{}",
    "Context:\n\n{}\n\nQuestion: who?",
    "Context:\nfile_path: a/b.md\npage_label: 3\n\n{}\n\nQuestion: who?",
    "<doc id=7 title='A {x}'>{}</doc>",
    "Context:\r\n\t \u00a0{}\u3000\n\n\n\nQuestion",
    "context:{}question:",
)


@pytest.mark.parametrize("text", [PLAIN, PAGES, CJK, HEBREW, ARABIC, BIDI])
def test_a_chunk_is_recognised_in_any_prompt_format(text: str) -> None:
    for way in WAYS:
        prompt = way.replace("{}", text.strip())
        for given_text in (text, f"\n\n  {text} \t\n"):
            assert recognised({"a": given_text}, prompt) == [("a", True)], way


@pytest.mark.parametrize("text", [PLAIN, PAGES, CJK, HEBREW + ARABIC])
@pytest.mark.parametrize("share", [0.3, 0.77, 0.99])
def test_a_chunk_with_its_tail_cut_off_is_reused_in_part(text: str, share: float) -> None:
    text = canonical(text)
    texts = {"a": text, "b": tiny.sentence(99)}
    rest = text[: max(64, int(len(text) * share))]
    for ending in ("", "…", "\n\nQuestion: who?"):
        plan = plan_over(index_of(texts), texts, f"Context: {rest}{ending}")
        (segment,) = plan.chunks
        assert segment.chunk_id == "a"
        kept = len(TOKENS.encode_text(segment.text))
        assert len(segment.text) >= len(rest.rstrip())
        assert len(segment.ids) >= kept - 3  # tokens around the cut may differ


def test_repeated_and_overlapping_chunks_are_all_recognised() -> None:
    assert recognised({"a": PLAIN}, f"{PLAIN}\n\n{PLAIN}{PLAIN}") == [("a", True)] * 3
    texts = {"first": PLAIN[:300], "second": PLAIN[220:]}  # as splitters cut with an overlap
    joined = f"{texts['first']}\n\n{texts['second']}"
    assert recognised(texts, joined) == [("first", True), ("second", True)]
    (taken,) = plan_over(index_of(texts), texts, f"x {PLAIN} y").chunks
    assert taken.complete


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("library")) as made:
        made.library.add([Entry("plain", PLAIN), Entry("pages", PAGES)])
        yield made


@pytest.mark.parametrize(
    ("content", "found", "is_escaped"),
    [
        (PLAIN, [PLAIN], False),
        (f"[1] {PLAIN}\n\n[2] {PAGES}", [PLAIN, PAGES], False),
        (json.dumps({"result": PLAIN}), [PLAIN], False),
        (json.dumps([{"text": PAGES}]), [], True),
        (repr([PLAIN, PAGES]), [PLAIN], True),
    ],
)
def test_tool_output_is_recognised_unless_escapes_change_it(
    library: BlendEngine, content: str, found: list[str], is_escaped: bool
) -> None:
    prompt = [{"role": "user", "content": "Who?"}, {"role": "tool", "content": content}]
    metrics = library.generate(prompt, Options(mode="reuse", max_new_tokens=1)).metrics
    assert [segment.text for segment in library.plan(prompt).chunks] == found
    assert all(chunk.outcome in ("reused", "exact") for chunk in metrics.chunks)
    assert bool(found) == bool(metrics.reused_tokens)
    assert ["escaped" in note for note in metrics.notes] == [True] * is_escaped
    assert all(tiny.one_sentence(note) for note in metrics.notes)


LETTERS = "ab界é א\n"
HEADS = st.sampled_from(["", "ab" * 20, "界é" * 40, "a" * 70])
TEXTS = st.lists(
    st.builds(str.__add__, HEADS, st.text(LETTERS, min_size=8, max_size=150)), max_size=9
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[str], str]:
    """Texts, and a prompt of parts of them: whole, cut at either end, one run into another."""
    texts = draw(TEXTS)
    parts = []
    for text in draw(st.lists(st.sampled_from([*texts, "ab"]), max_size=7)):
        low = draw(st.sampled_from([0, 0, 0, 1, 5]))
        high = draw(st.sampled_from([len(text), len(text), len(text), 70, 100]))
        parts.append(text[low:high] + draw(st.sampled_from(["", "", "\n\n", "|", " "])))
    return texts, "".join(parts)


@settings(max_examples=150, deadline=None)
@given(prompts())
def test_recognised_tokens_equal_those_of_the_stored_kv(
    drawn: tuple[list[str], str],
) -> None:
    pieces, prompt = drawn
    texts = {f"c{i}": text for i, text in enumerate(pieces)}
    plan_over(index_of(texts), texts, prompt)


@settings(max_examples=80, deadline=None)
@given(prompts(), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=30))
def test_an_index_changed_step_by_step_equals_one_built_at_once(
    drawn: tuple[list[str], str], changes: list[tuple[bool, int]]
) -> None:
    pieces, prompt = drawn
    texts = {f"c{i}": text for i, text in enumerate(pieces)}
    grown = ChunkIndex(lambda chunk_id: canonical(texts[chunk_id]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition, "RECENT", 2)  # chunks are moved to the main table soon
        for is_added, number in changes:
            if is_added and f"c{number}" in texts:
                grown.add(f"c{number}", texts[f"c{number}"])
            else:
                grown.discard(f"c{number}")
            there = {chunk_id: texts[chunk_id] for chunk_id in grown.ids()}
            whole = [m for m in grown.find(prompt) if m.complete]
            assert whole == [m for m in index_of(there).find(prompt) if m.complete]
            assert len(grown) == len(there)
