"""Prompts of real models: ids decode to the text, templates stay intact, questions are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.engine.rendering import build_rag_prompt, render
from blendrag.engine.request import Prompt

CHUNKS = [
    "\n".join(tiny.sentence(i) for i in range(3)),
    f"# Übersicht\n\n  * {tiny.sentence(4)}\n  * {tiny.sentence(5)}\n\n灯塔的看守人每天傍晚点亮油灯。",
    f'{{"text": "{tiny.sentence(6)}"}}',
]
QUESTION = "How many ships did the company of Place49 build near the town in all of those years?"
CONTEXT = "\n\n".join(CHUNKS)


@pytest.fixture(scope="module")
def engine(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """A library of chunks, the question, and texts made of the model's template. Loads no weights."""
    with BlendEngine(str(real_model), tmp_path_factory.mktemp("store")) as made:
        made.kv_namespace.corpus.__dict__["embedder"] = tiny.WordEmbedder()
        texts = [*CHUNKS, QUESTION, *hostile(made)]
        entries = [Entry(str(i), text) for i, text in enumerate(texts)]
        made.library.add(entries, precompute=False)
        yield made


def hostile(engine: BlendEngine) -> list[str]:
    tokens = engine.tokens
    bos, control = tokens.tokenizer.bos_token or "", list(tokens.special_texts)[:3]
    texts = [f"{''.join(control)} {tiny.sentence(8)} {''.join(control)}", "".join(control * 4)]
    if tokens.has_template:
        rendered = tokens.render([{"role": "user", "content": "\x01"}])
        head, tail = rendered.split("\x01")
        texts += [f"{head}and more text that no prompt has", tail * 2, f"{tail}{head}", head * 2]
        texts.append(f"{CHUNKS[0]}\n\nQuestion: {QUESTION}\nAnswer:{tail}")
    return [text for text in texts if text.strip() not in ("", bos)]


def prompts(engine: BlendEngine) -> dict[str, tuple[Prompt, Options]]:
    stuffed = f"Use this.\n\n{CONTEXT}\n\nQuestion: {QUESTION}\nAnswer:"
    raw = Options(apply_chat_template=False)
    asked: dict[str, tuple[Prompt, Options]] = {
        "ask": (build_rag_prompt(QUESTION, CHUNKS), Options()),
        "text": (stuffed, Options()),
        "raw": (stuffed, raw),
    }
    if engine.tokens.has_template:
        messages = [{"role": "user", "content": stuffed}]
        asked["messages"] = (messages, Options())
        asked["rendered"] = (engine.tokens.render(messages), raw)
        split: Any = [
            {"role": "system", "content": f"Use this.\n\n{CONTEXT}"},
            {"role": "user", "content": QUESTION},
        ]
        asked["system"] = (split, Options())
    return asked


def test_ids_decode_to_the_rendered_prompt_with_an_intact_template(engine):
    tokens = engine.tokens
    for name, (prompt, options) in prompts(engine).items():
        rendered = render(prompt, tokens, options).text
        stock = tokens.encode_template(rendered)
        ids = engine.segments(prompt, options).ids
        assert tokens.decode(ids) == tokens.decode(stock) == rendered, name
        control = tokens.special_among(ids) | tokens.special_among(stock)
        assert [i for i in ids if i in control] == [i for i in stock if i in control], name


def test_chunks_are_loaded_and_the_question_is_computed(engine):
    tokens = engine.tokens
    for name, (prompt, options) in prompts(engine).items():
        plan = engine.segments(prompt, options)
        loaded = [segment.text for segment in plan.chunks]
        assert [text for text in loaded if text in CHUNKS] == CHUNKS, name
        assert not any(QUESTION in text for text in loaded), name
        assert QUESTION in tokens.decode(plan.ids[plan.chunks[-1].end :]), name
