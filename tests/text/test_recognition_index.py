"""Known chunks are found in any prompt; what is found is always what stands there."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.text import recognition
from blendrag.text.chunking import canonical
from blendrag.text.matches import MIN_LETTERS, Match, is_recognisable, letters_in
from blendrag.text.recognition import MAX_COMPARED, ChunkHashes, ChunkIndex, PrefixSums, row_of

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
    for chunk_id, text in texts.items():
        index.add(chunk_id, text)
    return index


def index_of_rows(rows: Iterable[Sequence[Any]], texts: dict[str, str]) -> ChunkIndex:
    index = ChunkIndex(texts.__getitem__)
    for row in rows:
        index.add_row(ChunkHashes(*row))
    return index


def found(index: ChunkIndex, prompt: str) -> list[tuple[str, str, bool]]:
    return [(m.chunk_id, prompt[m.start : m.end], m.complete) for m in index.find(prompt)]


def test_chunks_are_found_between_any_other_text() -> None:
    index = index_of(a=PROSE, b=OTHER, c=CJK)
    prompt = f"<|user|>\nsource: x.md {OTHER}\n\n---{CJK}。{PROSE}Question: who?"
    assert found(index, prompt) == [("b", OTHER, True), ("c", CJK, True), ("a", PROSE, True)]


def test_the_same_chunk_twice_is_two_matches() -> None:
    matches = index_of(a=PROSE).find(PROSE + PROSE)
    assert matches == [
        Match("a", 0, len(PROSE), True),
        Match("a", len(PROSE), 2 * len(PROSE), True),
    ]


def test_of_chunks_that_contain_each_other_the_longest_wins() -> None:
    index = index_of(whole=PROSE, head=PROSE[:91], middle=PROSE[40:112], tail=PROSE[97:])
    assert found(index, f"x {PROSE} y") == [("whole", PROSE, True)]
    assert [m.chunk_id for m in index.find(f"x {PROSE[:130]} y")] == ["head"]


def test_a_chunk_with_its_tail_cut_off_is_found_as_far_as_it_goes() -> None:
    index = index_of(a=PROSE, b=OTHER)
    prompt = f"{PROSE[:100]}\n\n{OTHER}"
    assert found(index, prompt) == [("a", PROSE[:100], False), ("b", OTHER, True)]


def test_a_cut_chunk_never_runs_into_the_whole_one_that_follows() -> None:
    first = PROSE + OTHER + " and more that the prompt does not show."
    index = index_of(first=first, second=OTHER)
    assert found(index, PROSE + OTHER) == [("first", PROSE, False), ("second", OTHER, True)]


def test_too_little_of_a_cut_chunk_is_computed_instead() -> None:
    index = index_of(short=PROSE, long=OTHER * 4)
    assert index.find(PROSE[:63] + "…") == []
    assert index.find(OTHER[: len(OTHER) - 10] + "…") == [], "under a quarter of the chunk"


def test_a_chunk_with_its_head_cut_off_is_computed() -> None:
    assert index_of(a=PROSE).find(PROSE[1:]) == []


def test_a_chunk_of_too_few_letters_is_not_matched_as_prose_may_hold_it_by_chance() -> None:
    enough = "The law of nations is written down in no single place."
    fewer = "the rules of international law that we all know of"
    assert letters_in(enough) + 6 >= MIN_LETTERS > letters_in(fewer)
    texts = {"enough": f"{enough} So it is.", "fewer": fewer, "rule": "-" * 200, "CJK": CJK[:18]}
    index = index_of(**texts)
    prompt = f"{texts['enough']} and {fewer}\n{texts['rule']}\n{texts['CJK']}"
    assert [m.chunk_id for m in index.find(prompt)] == ["enough", "CJK"]
    assert len(index) == 4
    assert [is_recognisable(text) for text in texts.values()] == [True, False, False, True]
    loose = [m.chunk_id for m in index.find(prompt, strict=False)]
    assert loose == ["enough", "fewer", "rule", "CJK"]


def test_matches_begin_and_end_at_word_boundaries() -> None:
    text = PROSE[: PROSE.index(".")]
    index = index_of(a=text)
    for before, after in (
        ("", ""),
        ("(", ")"),
        ("\n", "."),
        ("他说", "。"),
        ("-", "'"),
        ("\\n", "\\n"),
    ):
        assert found(index, f"{before}{text}{after}") == [("a", text, True)]
    for before, after in (("x", ""), ("", "s"), ("1", ""), ("", "\u0301"), ("é", ""), ("", "ями")):
        assert [m.complete for m in index.find(f"{before}{text}{after}")] in ([], [False])
    assert index_of(a=CJK).find(f"说{CJK}说"), "no spaces between words, no boundaries"
    thai = "ประภาคารเก่าตั้งอยู่บนหน้าผาและมีคนเฝ้าคอยจุดตะเกียงทุกเย็นก่อนพระอาทิตย์ตก" * 2
    assert index_of(a=thai).find(f"และ{thai}และ")


def test_a_cut_tail_ends_with_the_last_whole_word() -> None:
    index = index_of(a=f"{PROSE} It concerns international law.")
    cut = f"{PROSE} It concerns international"
    assert found(index, f"{PROSE} It concerns internationals") == [("a", cut[:-13], False)]
    assert found(index, f"{cut}…") == [("a", cut, False)]


def test_only_what_is_searched_is_matched() -> None:
    index = index_of(a=PROSE, b=OTHER)
    prompt = f"{PROSE}{PROSE}|{OTHER}"
    half = len(PROSE)
    assert [m.start for m in index.find(prompt, [(half, 2 * half)])] == [half]
    assert index.find(prompt, [(1, half + 40), (2 * half + 3, len(prompt))]) == []
    assert index.find(prompt, []) == []
    cut = index.find(prompt, [(half, half + 120)])
    assert [(m.start, m.complete) for m in cut] == [(half, False)]
    assert cut[0].end <= half + 120


def test_a_chunk_across_two_others_takes_neither_from_the_prompt() -> None:
    """It is longer than each of them; together they cover more."""
    across = f"{PROSE[20:]}\n\n{OTHER[:150]}"
    index = index_of(a=PROSE, b=OTHER, across=across)
    assert len(across) > max(len(PROSE), len(OTHER))
    assert [m.chunk_id for m in index.find(f"{PROSE}\n\n{OTHER}")] == ["a", "b"]
    assert [m.chunk_id for m in index.find(f"x {across}")] == ["across"]


def test_a_chunk_is_known_without_its_outer_white_space() -> None:
    assert found(index_of(a=f"\n {PROSE} \n"), f"|{PROSE}|") == [("a", PROSE, True)]


def test_discarded_chunks_are_not_found() -> None:
    index = index_of(a=PROSE, b=PROSE[:114])
    index.discard("a")
    index.discard("unknown")
    assert found(index, PROSE) == [("b", PROSE[:114], True)]
    index.discard("b")
    assert index.find(PROSE) == []
    assert len(index) == 0


def test_rows_survive_as_plain_numbers() -> None:
    texts = {"a": PROSE, "b": OTHER, "c": "sixteen letters!"}
    rows = json.loads(json.dumps(list(index_of(**texts).rows())))
    assert all(0 <= row[1] < 2**63 and 0 <= row[3] < 2**63 for row in rows)
    again = index_of_rows(rows, texts)
    prompt = f"{OTHER} {PROSE} sixteen letters!"
    assert again.find(prompt) == index_of(**texts).find(prompt) != []


def reference_hash(text: str) -> int:
    base, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    value = sum((ord(c) + 1) * pow(base, i, 1 << 64) for i, c in enumerate(text)) & mask
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & mask
    return (value ^ (value >> 33)) >> 1


def test_hashes_are_the_same_in_every_release() -> None:
    text = PROSE + CJK
    row = row_of("a", text)
    heads = tuple(reference_hash(text[:level]) for level in (64, 128, 256))
    assert 256 <= len(text) < 512
    assert row == ("a", reference_hash(PROSE[:32]), len(text), reference_hash(text), heads)
    short = row_of("b", PROSE[:30])
    assert short == ("b", reference_hash(PROSE[:16]), 30, reference_hash(PROSE[:30]), ())
    assert row_of("c", PROSE[:14]) == ("c", 0, 14, reference_hash(PROSE[:14]), ())
    assert row.anchor_hash == 7630423335740412062


def test_a_chunk_that_is_gone_or_whose_hash_lies_matches_nothing() -> None:
    row = row_of("a", PROSE)
    assert index_of_rows([row], {}).find(PROSE) == []
    assert index_of_rows([row], {"a": OTHER}).find(PROSE) == []


def test_escaped_chunks_are_noticed_and_not_matched() -> None:
    text = PROSE[:70] + '\n"' + PROSE[70:] + "\n\té" + OTHER
    index = index_of(a=text)
    for prompt in (repr([text]), json.dumps({"context": text}), json.dumps(text + "\U0001f600")):
        assert not any(match.complete for match in index.find(prompt))
        assert index.looks_escaped(prompt)
    assert not index.looks_escaped(text)
    assert not index.looks_escaped(r"a question about \n and \t")


def test_a_header_shared_by_thousands_of_chunks_hides_none_of_them() -> None:
    words = PROSE.split()
    rng = random.Random(0)
    texts = {
        f"c{i}": "=" * 40 + f" All rights reserved. {i} " + " ".join(rng.choices(words, k=60))
        for i in range(3000)
    }
    index = index_of(**texts)
    wanted = [f"c{i}" for i in range(5, 3000, 300)]
    prompt = "\n\n".join(texts[chunk_id] for chunk_id in wanted)
    assert [m.chunk_id for m in index.find(prompt)] == wanted


@pytest.mark.parametrize("unit", ["界", "ab ", "="])
def test_a_prompt_and_a_corpus_that_repeat_themselves_take_bounded_work(unit: str) -> None:
    """Work counted, not timed: places compared by hash, texts fetched and DP spans."""
    texts = {f"c{i}": canonical((unit * i)[:i]) for i in range(16, 1500)}
    fetched: list[str] = []

    def text_of(chunk_id: str) -> str:
        fetched.append(chunk_id)
        return texts[chunk_id]

    index = ChunkIndex(text_of)
    index.add_rows([row_of(chunk_id, text) for chunk_id, text in texts.items()])
    index.add("legit", PROSE)
    texts["legit"] = PROSE
    prompt = f"{unit * (20_000 // len(unit))}\n\n{PROSE}\n\n{unit * 3000}"
    compared = []
    hashes = PrefixSums.hashes

    def counted(self: PrefixSums, starts: Any, lengths: Any) -> Any:
        compared.append(len(starts))
        return hashes(self, starts, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixSums, "hashes", counted)
        with tiny.counted(recognition, "common_prefix") as cut:
            matches = index.find(prompt)
    assert "legit" in [m.chunk_id for m in matches], "whatever else repeats itself round it"
    assert sum(compared) < 20 * len(prompt) + 8 * MAX_COMPARED
    assert len(fetched) == len(set(fetched)) <= len(texts)
    assert len(cut) <= recognition.MAX_TAIL_CUT_STARTS * recognition.MAX_TAIL_CUT_CANDIDATES


def test_twenty_thousand_chunks_are_searched_in_milliseconds() -> None:
    rng = random.Random(1)
    texts = {f"c{i}": f"{rng.random()} " + PROSE * 8 for i in range(20_000)}
    rows = [row_of(chunk_id, text) for chunk_id, text in texts.items()]
    index = index_of_rows(rows, texts)
    prompt = "\n\n".join(texts[f"c{i}"] for i in range(0, 20_000, 1250))[:25_000]
    seconds = []
    for _ in range(10):
        started = time.process_time()
        assert len(index.find(prompt)) >= 10
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.02


PIECES = st.lists(st.text(alphabet="ab界 \n", min_size=0, max_size=90), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(PIECES, st.lists(st.integers(0, 7), max_size=6), st.integers(0, 40))
def test_every_match_is_what_stands_there(pieces: list[str], order: list[int], cut: int) -> None:
    texts = {f"c{i}": canonical(piece) for i, piece in enumerate(pieces)}
    index = index_of(**texts)
    prompt = "|".join(texts[f"c{i % len(pieces)}"] for i in order)
    prompt = prompt[: len(prompt) - cut]
    end = 0
    for match in index.find(prompt):
        text = texts[match.chunk_id]
        assert match.start >= end
        end = match.end
        assert text.startswith(prompt[match.start : match.end])
        assert match.complete == (match.end - match.start == len(text))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="abcdefgh界é\U0001f600", min_size=50, max_size=90), max_size=5))
def test_distinct_chunks_set_apart_are_all_found(pieces: list[str]) -> None:
    texts = {f"c{i}": f"{i}{piece}{'letters ' * 7}" for i, piece in enumerate(pieces)}
    prompt = "|".join(["", *map(canonical, texts.values()), ""])
    assert [m.chunk_id for m in index_of(**texts).find(prompt)] == list(texts)


@pytest.mark.parametrize("prompt", ["", "x", "\ud800" * 40, "\0" * 100])
def test_odd_prompts_hold_no_chunk(prompt: str) -> None:
    assert index_of(a=PROSE).find(prompt) == []
