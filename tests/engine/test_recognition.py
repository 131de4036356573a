"""However chunk text reaches a prompt, what is recognised is what the stored KV was computed from."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.engine import Options
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


WAYS = {
    "alone": "{}",
    "at the end": "Answer from this context:\n\n{}",
    "between blank lines": "Context:\n\n{}\n\nQuestion: who?",
    "behind metadata": "Context:\nfile_path: a/b.md\npage_label: 3\n\n{}\n\nQuestion: who?",
    "in a document prompt": "<doc id=7 title='A {{x}}'>{}</doc>",
    "in a citation": "Source 1:\n{}\n\nSource 2:\nnothing",
    "with white space collapsed to one": "Context: {} Question: who?",
    "with other white space at its ends": "Context:\r\n\t \u00a0{}\u3000\n\n\n\nQuestion",
    "without any white space": "context:{}question:",
}


@pytest.mark.parametrize("text", [PLAIN, PAGES, CJK, HEBREW, ARABIC, BIDI])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_chunk_is_recognised_in_any_prompt_format(way: str, text: str) -> None:
    for given_text in (text, f"\n\n  {text} \t\n"):
        prompt = way.replace("{}", text.strip()).replace("{{", "{").replace("}}", "}")
        assert recognised({"a": given_text}, prompt) == [("a", True)]


@pytest.mark.parametrize("text", [PLAIN, PAGES, CJK, HEBREW + ARABIC])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.99])
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
        assert len(segment.ids) >= kept - 3, "but for the tokens around the cut"


def test_a_chunk_whose_head_is_cut_off_is_computed() -> None:
    assert recognised({"a": PLAIN}, f"Context: …{PLAIN[20:]}") == []


def test_the_same_chunk_twice_is_reused_twice() -> None:
    prompt = f"{PLAIN}\n\n{PLAIN}{PLAIN}"
    assert recognised({"a": PLAIN}, prompt) == [("a", True)] * 3


def test_the_larger_of_two_nested_chunks_is_taken() -> None:
    texts = {"page": PLAIN, "head": PLAIN[:200], "middle": PLAIN[120:280], "tail": PLAIN[-150:]}
    assert recognised(texts, f"x {PLAIN} y") == [("page", True)]
    alone = "\n\n".join(texts[name] for name in ("tail", "middle", "head"))
    assert recognised(texts, alone) == [("tail", True), ("middle", True), ("head", True)]


def test_chunks_that_share_text_at_their_ends_are_both_taken_where_both_stand() -> None:
    texts = {"first": PLAIN[:300], "second": PLAIN[220:]}  # as splitters cut with an overlap
    joined = f"{texts['first']}\n\n{texts['second']}"
    assert recognised(texts, joined) == [("first", True), ("second", True)]
    (taken,) = plan_over(index_of(texts), texts, f"x {PLAIN} y").chunks
    assert taken.complete, "of the text they were cut out of, one; the rest has lost its head"


def test_nothing_is_recognised_where_nothing_is_known() -> None:
    assert recognised({}, f"Context: {PLAIN}") == []
    assert recognised({"b": CJK}, f"Context: {PLAIN}") == []
    assert not index_of({}).looks_escaped(json.dumps(PAGES), [])


# -- thousands alike --------------------------------------------------------------------------------

BOILERPLATE = (
    "Copyright Harbour Office. All rights reserved. This page is confidential and may not be shared "
    "with anybody outside of the office. Printed for the archive on the second floor, room 12. "
)


def near_duplicates(count: int, words: int = 60) -> dict[str, str]:
    rng = random.Random(7)
    vocabulary = PLAIN.split()
    texts = {}
    for i in range(count):
        body = " ".join(rng.choices(vocabulary, k=words))
        texts[f"c{i}"] = f"{BOILERPLATE}{body} {i}."
    return texts


@pytest.fixture(scope="module")
def alike() -> dict[str, str]:
    return near_duplicates(4000)


@pytest.fixture(scope="module")
def index_of_alike(alike: dict[str, str]) -> ChunkIndex:
    return index_of(alike)


def test_of_thousands_with_one_head_the_right_one_is_taken(
    alike: dict[str, str], index_of_alike: ChunkIndex
) -> None:
    wanted = [f"c{i}" for i in range(3, 4000, 250)]
    prompt = "\n\n".join(f"page: 3\n\n{alike[chunk_id]}" for chunk_id in wanted)
    plan = plan_over(index_of_alike, alike, prompt)
    assert [(s.chunk_id, s.complete) for s in plan.chunks] == [(name, True) for name in wanted]


def test_of_thousands_with_one_head_the_right_one_is_taken_with_its_tail_cut_off(
    alike: dict[str, str], index_of_alike: ChunkIndex
) -> None:
    wanted = [f"c{i}" for i in range(3, 4000, 250)]
    prompt = "\n\n".join(alike[chunk_id][:400] + "…" for chunk_id in wanted)
    plan = plan_over(index_of_alike, alike, prompt)
    assert [s.chunk_id for s in plan.chunks] == wanted
    assert all(len(s.text) >= 400 for s in plan.chunks)


def test_a_head_alone_is_not_taken_for_a_chunk(
    alike: dict[str, str], index_of_alike: ChunkIndex
) -> None:
    for chunk in plan_over(index_of_alike, alike, f"{BOILERPLATE * 5} Nothing else.").chunks:
        assert not chunk.complete
        assert BOILERPLATE.startswith(chunk.text.strip())


# -- as it is asked of an engine --------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("store")) as made:
        texts = {"plain": PLAIN, "pages": PAGES}
        made.library.add([Entry(name, text) for name, text in texts.items()])
        yield made


def reused_texts(engine: Any, *messages: dict[str, str]) -> tuple[list[str], tuple[str, ...]]:
    prompt = list(messages)
    answer = engine.generate(prompt, Options(mode="reuse", max_new_tokens=1))
    reused = [c for c in answer.metrics.chunks if c.outcome not in ("missing", "computed")]
    assert len(reused) == len(answer.metrics.chunks)
    texts = [segment.text for segment in engine.plan(prompt).chunks]
    assert bool(texts) == bool(answer.metrics.reused_tokens)
    return texts, answer.metrics.notes


def test_tool_output_is_recognised_as_text_and_as_json_that_changes_nothing(engine: Any) -> None:
    ask = {"role": "user", "content": "Who built ships?"}
    for content in (PLAIN, f"[1] {PLAIN}\n\n[2] {PAGES}", json.dumps({"result": PLAIN})):
        texts, notes = reused_texts(engine, ask, {"role": "tool", "content": content})
        assert texts == [text for text in (PLAIN, PAGES) if text in content]
        assert notes == ()


@pytest.mark.parametrize("content", [json.dumps([{"text": PAGES}]), repr([PLAIN, PAGES])])
def test_escaped_tool_output_is_answered_with_one_note_of_the_cause(
    engine: Any, content: str
) -> None:
    ask = {"role": "user", "content": "Who built ships?"}
    texts, notes = reused_texts(engine, ask, {"role": "tool", "content": content})
    assert PAGES not in texts
    assert texts == ([PLAIN] if PLAIN in content else [])
    (note,) = notes
    assert "escaped" in note
    assert tiny.one_sentence(note)


# -- whatever comes ---------------------------------------------------------------------------------

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


@settings(max_examples=250, deadline=None)
@given(prompts())
def test_recognised_tokens_equal_those_of_the_stored_kv(
    drawn: tuple[list[str], str],
) -> None:
    pieces, prompt = drawn
    texts = {f"c{i}": text for i, text in enumerate(pieces)}
    plan_over(index_of(texts), texts, prompt)


@settings(max_examples=120, deadline=None)
@given(prompts(), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=30))
def test_an_index_changed_step_by_step_equals_one_built_at_once(
    drawn: tuple[list[str], str], changes: list[tuple[bool, int]]
) -> None:
    pieces, prompt = drawn
    texts = {f"c{i}": text for i, text in enumerate(pieces)}
    grown = ChunkIndex(lambda chunk_id: canonical(texts[chunk_id]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition, "RECENT", 2)  # so that chunks move on to the others soon
        for is_added, number in changes:
            if is_added and f"c{number}" in texts:
                grown.add(f"c{number}", texts[f"c{number}"])
            else:
                grown.discard(f"c{number}")
            there = {chunk_id: texts[chunk_id] for chunk_id in grown.ids()}
            whole = [m for m in grown.find(prompt) if m.complete]
            assert whole == [m for m in index_of(there).find(prompt) if m.complete]
            assert len(grown) == len(there)
