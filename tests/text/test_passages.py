"""What prompts have in common is found, and cut into the passages they were made of."""

import random
from itertools import pairwise

import pytest

import tiny
from blendrag.text.passages import MIN_LETTERS, PromptMemories, PromptMemory, joined, paragraphs

HEAD = "Use the following pieces of context to answer the question at the end.\n\n"
TEXTS = [" ".join(tiny.sentence(10 * i + k) for k in range(3)) for i in range(8)]


def prompt(*numbers, join="\n\n", label=""):
    question = f"{random.choice(['Who', 'When', 'Why'])} {random.random()}?"
    texts = [label.format(at + 1) + TEXTS[number] for at, number in enumerate(numbers)]
    return f"{HEAD}{join.join(texts)}\n\nQuestion: {question}\nAnswer:"


def met(memory, text):
    """The passages in what ``memory`` knows of the whole ``text``."""
    runs = memory.meet(text, [(0, len(text))])
    spans = [s for run in runs for s in paragraphs(text, run)]
    return [text[low:high] for low, high in joined(text, spans, runs)]


def test_nothing_returns_in_a_first_prompt():
    memory = PromptMemory()
    assert met(memory, prompt(0, 1)) == []
    assert met(memory, prompt(2, 3)) == []


@pytest.mark.parametrize(
    "given",
    [{}, {"join": "\n"}, {"join": "\n----------\n"}, {"label": "[{}] "}, {"label": "Source {}:\n"}],
)
def test_texts_that_return_are_found_one_by_one_in_any_order(given):
    memory = PromptMemory()
    met(memory, prompt(0, 1, 2, 3, **given))
    assert met(memory, prompt(2, 1, 5, 3, **given)) == [
        TEXTS[2],
        TEXTS[1],
        TEXTS[3],
    ]


def test_texts_that_follow_each_other_twice_are_cut_at_the_blank_line():
    memory = PromptMemory()
    met(memory, prompt(0, 1, 2))
    assert met(memory, prompt(4, 1, 2)) == [TEXTS[1], TEXTS[2]]


def test_the_instruction_that_begins_both_prompts_is_left_out():
    memory = PromptMemory()
    met(memory, prompt(0, 1))
    assert met(memory, prompt(0, 1)) == [TEXTS[0], TEXTS[1]]


def test_a_text_without_breaks_is_cut_to_the_sentences_that_both_prompts_hold():
    memory = PromptMemory()
    met(memory, f"First, {TEXTS[0]} And {TEXTS[1]} So much for that.")
    found = met(memory, f"Then {TEXTS[1]} But {TEXTS[3]} Who?")
    assert found == [f"{tiny.sentence(11)} {tiny.sentence(12)}"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[{"content": "', '", "score": 0.5}]'),
        ("<document>", "</document>"),
        ("[Document(page_content='", "', metadata={})]"),
        ("Passage (3) ", " (end)"),
    ],
)
def test_a_value_in_markup_is_found_whole(before, after):
    memory = PromptMemory()
    for numbers in ((0, 1), (2, 0)):
        text = "".join(f"{n}{before}{TEXTS[n]}{after}{n}" for n in numbers)
        found = met(memory, text)
    assert len(found) == 1
    assert TEXTS[0] in found[0]


SECRET = "The harbour pays the blue crane from Monday on, as the captain wrote."


@pytest.mark.parametrize("edge", ["", ".", "\n", '"', " and", " </p>", "\n\nQuestion: Who?", ". "])
def test_a_guess_at_a_sentence_finds_nothing_of_it_until_it_is_whole(edge):
    words = SECRET.split()

    def found(text, guess):
        memory = PromptMemory()
        met(memory, f"One:\n{text}")
        return met(memory, f"Two:\n{guess}")

    for count in range(1, len(words)):
        for text in (f"{TEXTS[1]} {SECRET} {TEXTS[2]}", f"{TEXTS[1]}\n{SECRET}"):
            head = " ".join(words[:count])
            right, wrong = head, f"{head[:-1]}#"
            answers = [found(text, f"{TEXTS[1]} {guess}{edge}") for guess in (right, wrong)]
            assert answers[0] == answers[1]
        text, tail = f"{TEXTS[2]} {SECRET} {TEXTS[1]}", " ".join(words[count:])
        answers = [found(text, f"{edge}{guess} {TEXTS[1]}") for guess in (tail, f"#{tail[1:]}")]
        assert answers[0] == answers[1]
    assert found(f"{TEXTS[1]} {SECRET} No.", f"{TEXTS[1]} {SECRET} Yes.") == [
        f"{TEXTS[1]} {SECRET}"
    ]


def test_prompts_of_other_scopes_have_nothing_in_common_and_share_the_room():
    size = len(prompt(0, 1)) + 100
    memories = PromptMemories(max_chars=4 * size)

    def shared(scope, *numbers):
        text = prompt(*numbers)
        return memories.meet(scope, text, [(0, len(text))])

    assert not shared("a", 0, 1)
    assert not shared("b", 0, 1)
    assert shared("a", 1, 0)
    for number in range(2, 8):  # a takes the room, and gives up its own
        shared("a", number, number)
    assert shared("b", 1, 0)
    assert sum(memory.chars for memory in memories._of.values()) <= 4 * size


def test_short_paragraphs_are_joined_and_short_texts_left_out():
    section = f"Ships\n\n{tiny.sentence(1)}\n\n{TEXTS[0]}\n\nThe end."
    memory = PromptMemory()
    met(memory, f"{HEAD}{TEXTS[5]}\n\n{section}")
    assert met(memory, f"Read this.\n\n{section}\n\n{TEXTS[6]}") == [
        f"Ships\n\n{tiny.sentence(1)}\n\n{TEXTS[0]}\n\nThe end."
    ]
    assert sum(map(str.isalnum, tiny.sentence(1))) < MIN_LETTERS
    assert met(memory, f"Only this.\n\n{tiny.sentence(1)}") == []


@pytest.mark.parametrize("join", ["\n\n", "\n"])
def test_a_heading_that_ends_a_text_is_not_joined_to_the_text_that_follows(join):
    texts = [f"{text}\n\n## Part {number}" for number, text in enumerate(TEXTS[:4])]
    memory = PromptMemory()
    met(memory, HEAD + join.join(texts) + "\n\nQuestion: Who?")
    found = met(memory, HEAD + join.join(texts[n] for n in (3, 1, 0, 2)) + "\n\nQuestion: When?")
    assert found == [TEXTS[n] for n in (3, 1, 0, 2)]


def test_runs_lie_within_the_parts_that_are_searched():
    memory = PromptMemory()
    met(memory, prompt(0, 1, 2))
    text = prompt(2, 0, 1)
    within = [(low, low + len(TEXTS[n])) for n in (2, 1) for low in [text.index(TEXTS[n])]]
    runs = memory.meet(text, within)
    assert [(run.start, run.end) for run in runs] == within


def test_the_memory_is_bounded_and_forgets_the_oldest_prompt():
    size = len(prompt(0, 1))
    memory = PromptMemory(max_chars=3 * size)
    met(memory, prompt(0, 1))
    for number in range(2, 8):
        met(memory, prompt(number))
    assert len(memory) < 8
    assert len(memory._hashes) == len(memory._places) < 3 * size / 4
    assert met(memory, prompt(1, 0)) == []
    assert met(memory, prompt(7, 6)) == [TEXTS[7], TEXTS[6]]
    assert memory.meet("x" * 4 * size, [(0, 4 * size)]) == []


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_what_both_prompts_hold(seed):
    """Every run is in an earlier prompt, runs are disjoint, and no long common text is missed."""
    draw = random.Random(seed)
    memory, earlier = PromptMemory(), []
    for _ in range(12):
        text = prompt(*draw.sample(range(8), 4), join=draw.choice(["\n\n", "\n", " "]))
        low = draw.randrange(40)
        runs = memory.meet(text, [(low, len(text))])
        assert all(any(text[r.start : r.end] in old for old in earlier) for r in runs)
        assert all(a.end <= b.start for a, b in pairwise(runs))
        assert not runs or runs[0].start >= low
        for known in TEXTS:
            at = text.find(known, low)
            if at >= 0 and any(known in old for old in earlier):
                covered = sum(max(0, min(r.end, at + len(known)) - max(r.start, at)) for r in runs)
                assert covered == len(known)
        earlier.append(text[low:])
