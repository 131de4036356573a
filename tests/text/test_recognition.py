"""Known chunks are found in any prompt, and every match has the text and the tokens of the chunk."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.model.tokens import Tokens
from blendrag.text import recognition
from blendrag.text.chunking import canonical
from blendrag.text.matches import MIN_LETTERS, Match, is_recognisable, letters_in
from blendrag.text.prompt import SegmentedPrompt, segment_prompt
from blendrag.text.recognition import MAX_COMPARED, ChunkIndex, PrefixSums, chunk_hashes

PROSE = (
    "The lighthouse on the northern cape was built in 1871 by a family of masons from the valley. "
    "Its lamp burned whale oil until the harbour master ordered a lens from across the sea."
)
OTHER = (
    "A second keeper arrived in spring with her two brothers, three goats and a box of letters. "
    "Nobody in the village had been told that she could read the weather from the gulls."
)
CJK = "灯塔的看守人每天傍晚点亮油灯。没有人知道那天晚上是谁爬上了楼梯,也没有人问起她从哪里来。" * 2


def index_of(**texts: str) -> ChunkIndex:
    index = ChunkIndex(lambda chunk_id: canonical(texts[chunk_id]))
    index.add({chunk_id: chunk_hashes(text) for chunk_id, text in texts.items()})
    return index


def found(index: ChunkIndex, prompt: str) -> list[tuple[str, str, bool]]:
    return [(m.chunk_id, prompt[m.start : m.end], m.complete) for m in index.find(prompt)]


def names(index: ChunkIndex, prompt: str) -> list[str]:
    return [match.chunk_id for match in index.find(prompt)]


def test_chunks_are_found_between_any_other_text() -> None:
    index = index_of(a=f"\n {PROSE} \n", b=OTHER, c=CJK)
    prompt = f"<|user|>\nsource: x.md {OTHER}\n\n---{CJK}。{PROSE}{PROSE}Question: who?"
    expected = [("b", OTHER, True), ("c", CJK, True), ("a", PROSE, True), ("a", PROSE, True)]
    assert found(index, prompt) == expected


def test_the_longest_of_nested_chunks_wins() -> None:
    index = index_of(whole=PROSE, head=PROSE[:91], middle=PROSE[40:112], tail=PROSE[97:])
    assert found(index, f"x {PROSE} y") == [("whole", PROSE, True)]
    assert names(index, f"x {PROSE[:130]} y") == ["head"]


def test_a_chunk_across_two_others_displaces_neither() -> None:
    """It is longer than each of them, but together they cover more."""
    across = f"{PROSE[20:]}\n\n{OTHER[:150]}"
    index = index_of(a=PROSE, b=OTHER, across=across)
    assert len(across) > max(len(PROSE), len(OTHER))
    assert names(index, f"{PROSE}\n\n{OTHER}") == ["a", "b"]
    assert names(index, f"x {across}") == ["across"]


def test_a_tail_cut_chunk_is_found_up_to_the_cut_or_the_next_chunk() -> None:
    prompt = f"{PROSE[:100]}\n\n{OTHER}"
    index = index_of(a=PROSE, b=OTHER)
    assert found(index, prompt) == [("a", PROSE[:100], False), ("b", OTHER, True)]
    index = index_of(both=f"{PROSE}{OTHER} and more that no prompt shows.", b=OTHER)
    assert found(index, PROSE + OTHER) == [("both", PROSE, False), ("b", OTHER, True)]


def test_a_tail_cut_chunk_ends_with_the_last_whole_word() -> None:
    index = index_of(a=f"{PROSE} It concerns international law.")
    cut = f"{PROSE} It concerns international"
    assert found(index, f"{PROSE} It concerns internationals") == [("a", cut[:-13], False)]
    assert found(index, f"{cut}…") == [("a", cut, False)]


def test_chunks_without_head_or_most_of_their_tail_are_not_matched() -> None:
    index = index_of(short=PROSE, long=OTHER * 4)
    assert index.find(PROSE[1:]) == []
    assert index.find(PROSE[:63] + "…") == []
    assert index.find(OTHER[: len(OTHER) - 10] + "…") == [], "under a quarter of the chunk"


def test_chunks_with_few_letters_are_matched_only_without_strict() -> None:
    enough = "The law of nations is written down in no single place."
    fewer = "the rules of international law that we all know of"
    assert letters_in(enough) + 6 >= MIN_LETTERS > letters_in(fewer)
    texts = {"enough": f"{enough} So it is.", "fewer": fewer, "rule": "-" * 200, "CJK": CJK[:18]}
    index = index_of(**texts)
    prompt = f"{texts['enough']} and {fewer}\n{texts['rule']}\n{texts['CJK']}"
    assert names(index, prompt) == ["enough", "CJK"]
    assert [is_recognisable(text) for text in texts.values()] == [True, False, False, True]
    assert [m.chunk_id for m in index.find(prompt, strict=False)] == list(texts)


def test_matches_begin_and_end_at_word_boundaries() -> None:
    text = PROSE[: PROSE.index(".")]
    index = index_of(a=text)
    for before, after in ("", ""), ("(", ")"), ("\n", "."), ("他说", "。"), ("\\n", "'"):
        assert found(index, f"{before}{text}{after}") == [("a", text, True)]
    for before, after in ("x", ""), ("", "s"), ("1", ""), ("", "\u0301"), ("é", ""), ("", "ями"):
        assert not any(match.complete for match in index.find(f"{before}{text}{after}"))
    thai = "ประภาคารเก่าตั้งอยู่บนหน้าผาและมีคนเฝ้าคอยจุดตะเกียงทุกเย็นก่อนพระอาทิตย์ตก" * 2
    for unspaced, around in (CJK, "说"), (thai, "และ"):
        assert index_of(a=unspaced).find(f"{around}{unspaced}{around}")


def test_only_the_given_spans_are_searched() -> None:
    index = index_of(a=PROSE, b=OTHER)
    prompt = f"{PROSE}{PROSE}|{OTHER}"
    half = len(PROSE)
    assert index.find(prompt, [(half, 2 * half)]) == [Match("a", half, 2 * half, True)]
    assert index.find(prompt, [(1, half + 40), (2 * half + 3, len(prompt))]) == []
    assert index.find(prompt, []) == []
    (cut,) = index.find(prompt, [(half, half + 120)])
    assert (cut.start, cut.complete) == (half, False)
    assert cut.end <= half + 120


def test_discarded_chunks_are_not_found() -> None:
    index = index_of(a=PROSE, b=PROSE[:114])
    index.discard("a")
    index.discard("unknown")
    assert found(index, PROSE) == [("b", PROSE[:114], True)]
    index.discard("b")
    assert index.find(PROSE) == []
    assert len(index) == 0


def reference_hash(text: str) -> int:
    base, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    value = sum((ord(c) + 1) * pow(base, i, 1 << 64) for i, c in enumerate(text)) & mask
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & mask
    return (value ^ (value >> 33)) >> 1


def test_stored_hashes_are_the_same_in_every_release() -> None:
    text = PROSE + CJK
    assert 256 <= len(text) < 512
    for part, levels in (
        (text, {32: 1, 64: 2, 128: 3, 256: 4}),
        (PROSE[:30], {16: 0}),
        ("short", {}),
    ):
        numbers = [len(part), reference_hash(part), *[0] * 11]
        for level, column in levels.items():
            numbers[2 + column] = reference_hash(part[:level])
        assert np.frombuffer(chunk_hashes(part), "<i8").tolist() == numbers
    assert reference_hash(PROSE[:32]) == 7630423335740412062


def test_stored_hashes_restore_the_index() -> None:
    texts = {"a": PROSE, "b": OTHER, "c": "sixteen letters!"}
    again = ChunkIndex(texts.__getitem__)
    again.add({chunk_id: chunk_hashes(text) for chunk_id, text in texts.items()})
    prompt = f"{OTHER} {PROSE} sixteen letters!"
    assert again.find(prompt) == index_of(**texts).find(prompt) != []


@pytest.mark.parametrize("texts", [{}, {"a": OTHER}])
def test_a_chunk_that_is_gone_or_has_another_text_matches_nothing(texts: dict[str, str]) -> None:
    index = ChunkIndex(texts.__getitem__)
    index.add({"a": chunk_hashes(PROSE)})
    assert index.find(PROSE) == []


def test_escaped_chunks_are_noticed_and_not_matched() -> None:
    text = PROSE[:70] + '\n"' + PROSE[70:] + "\n\té" + OTHER
    index = index_of(a=text)
    for prompt in (repr([text]), json.dumps({"context": text}), json.dumps(text + "\U0001f600")):
        matches = index.find(prompt)
        assert not any(match.complete for match in matches)
        assert index.looks_escaped(prompt, matches)
    assert not index.looks_escaped(text, index.find(text))
    assert not index.looks_escaped(r"a question about \n and \t", [])


def test_a_header_shared_by_thousands_of_chunks_hides_none() -> None:
    words = PROSE.split()
    rng = random.Random(0)
    texts = {
        f"c{i}": "=" * 40 + f" All rights reserved. {i} " + " ".join(rng.choices(words, k=60))
        for i in range(2000)
    }
    index = index_of(**texts)
    wanted = [f"c{i}" for i in range(5, 2000, 300)]
    assert names(index, "\n\n".join(texts[chunk_id] for chunk_id in wanted)) == wanted


@pytest.mark.parametrize("unit", ["界", "ab ", "="])
def test_repetitive_prompts_and_corpora_take_bounded_work(unit: str) -> None:
    """Counts positions compared by hash, texts fetched and prefixes compared."""
    texts = {f"c{i}": canonical((unit * i)[:i]) for i in range(16, 1500)} | {"legit": PROSE}
    fetched: list[str] = []

    def text_of(chunk_id: str) -> str:
        fetched.append(chunk_id)
        return texts[chunk_id]

    index = ChunkIndex(text_of)
    index.add({chunk_id: chunk_hashes(text) for chunk_id, text in texts.items()})
    prompt = f"{unit * (20_000 // len(unit))}\n\n{PROSE}\n\n{unit * 3000}"
    compared = []
    hashes = PrefixSums.hashes

    def counted(self: PrefixSums, starts: Any, lengths: Any) -> Any:
        compared.append(len(starts))
        return hashes(self, starts, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixSums, "hashes", counted)
        with tiny.counted(recognition, "common_prefix") as cut:
            assert "legit" in names(index, prompt)
    assert sum(compared) < 20 * len(prompt) + 8 * MAX_COMPARED
    assert len(fetched) == len(set(fetched)) <= len(texts)
    assert len(cut) <= recognition.MAX_TAIL_CUT_STARTS * recognition.MAX_TAIL_CUT_CANDIDATES


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="abcdefgh界é\U0001f600", min_size=50, max_size=90), max_size=5))
def test_separated_chunks_are_all_found(pieces: list[str]) -> None:
    texts = {f"c{i}": f"{i}{piece}{'letters ' * 7}" for i, piece in enumerate(pieces)}
    prompt = "|".join(["", *map(canonical, texts.values()), ""])
    assert names(index_of(**texts), prompt) == list(texts)


@pytest.mark.parametrize("prompt", ["", "x", "\ud800" * 40, "\0" * 100])
def test_odd_prompts_contain_no_chunk(prompt: str) -> None:
    assert index_of(a=PROSE).find(prompt) == []


# -- tokens -----------------------------------------------------------------------------------------

TOKENS = Tokens(tiny.tokenizer())
PAGES = '"Two" paragraphs,\n\n' + "\n\n".join(tiny.sentence(i) for i in range(10, 16))
HEBREW = "מגדלור עתיק עמד על הצוק, ובו שומר זקן שהדליק את המנורה בכל ערב לפני שקיעת החמה. " * 2
ARABIC = "كانت المنارة القديمة تقف على الجرف، وكان حارسها يُشعل المصباح كلَّ مساءٍ قبل الغروب. " * 2
BIDI = f"\u2067{HEBREW.strip()}\u2069 means \u2066{PROSE[:80]}\u2069 here."


def plan_over(texts: Mapping[str, str], prompt: str) -> SegmentedPrompt:
    """The plan, after checking that every recognised chunk has the tokens of that chunk."""

    def stored(chunk_id: str) -> tuple[int, ...]:
        return tuple(TOKENS.encode_text(canonical(texts[chunk_id])))

    plan = segment_prompt(prompt, index_of(**texts).find(prompt), TOKENS, stored)
    for segment in plan.chunks:
        assert segment.chunk_id is not None
        text = canonical(texts[segment.chunk_id])
        assert segment.stored_ids == tuple(TOKENS.encode_text(text))
        assert segment.ids == segment.stored_ids[: len(segment.ids)]
        assert text.startswith(segment.text)
        assert segment.text in prompt
        assert segment.complete == (segment.text == text)
        assert segment.ids  # fewer than stored if a token merges at an end
    assert TOKENS.decode(plan.ids) == TOKENS.decode(TOKENS.encode_template(prompt))
    return plan


WAYS = (
    "{}",
    "Context:\n\n{}\n\nQuestion: who?",
    "Context:\nfile_path: a/b.md\npage_label: 3\n\n{}\n\nQuestion: who?",
    "<doc id=7 title='A {x}'>{}</doc>",
    "Context:\r\n\t \u00a0{}\u3000\n\n\n\nQuestion",
    "context:{}question:",
)


@pytest.mark.parametrize("text", [PROSE, PAGES, CJK, HEBREW, ARABIC, BIDI])
def test_a_chunk_is_recognised_in_any_prompt_format(text: str) -> None:
    for way in WAYS:
        prompt = way.replace("{}", text.strip())
        for given_text in (text, f"\n\n  {text} \t\n"):
            assert [s.chunk_id for s in plan_over({"a": given_text}, prompt).chunks] == ["a"], way


@pytest.mark.parametrize("text", [PROSE, PAGES, CJK, HEBREW + ARABIC])
@pytest.mark.parametrize("share", [0.3, 0.77, 0.99])
def test_a_chunk_with_its_tail_cut_off_is_reused_in_part(text: str, share: float) -> None:
    text = canonical(text)
    texts = {"a": text, "b": tiny.sentence(99)}
    rest = text[: max(64, int(len(text) * share))]
    for ending in ("", "…", "\n\nQuestion: who?"):
        plan = plan_over(texts, f"Context: {rest}{ending}")
        (segment,) = plan.chunks
        assert segment.chunk_id == "a"
        kept = len(TOKENS.encode_text(segment.text))
        assert len(segment.text) >= len(rest.rstrip())
        assert len(segment.ids) >= kept - 3  # tokens around the cut may differ


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
def test_recognised_text_and_tokens_are_those_of_the_chunk(drawn: tuple[list[str], str]) -> None:
    pieces, prompt = drawn
    plan_over({f"c{i}": text for i, text in enumerate(pieces)}, prompt)


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
                grown.add({f"c{number}": chunk_hashes(texts[f"c{number}"])})
            else:
                grown.discard(f"c{number}")
            there = {chunk_id: texts[chunk_id] for chunk_id in grown.ids()}
            whole = [m for m in grown.find(prompt) if m.complete]
            assert whole == [m for m in index_of(**there).find(prompt) if m.complete]
            assert len(grown) == len(there)
