"""A prompt begins with BOS once, whichever way it comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import processors

import tiny
from blendrag.engine import BlendEngine, Options

BOS = "<|bos|>"
Ask = Callable[[str], tuple[Any, Options]]

#: Ways in: a question becomes a prompt and how to send it.
WAYS: dict[str, Ask] = {
    "a string": lambda q: (q, Options()),
    "messages": lambda q: ([{"role": "user", "content": q}], Options()),
    "a conversation": lambda q: (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "yes?"},
            {"role": "user", "content": [{"type": "text", "text": q}]},
        ],
        Options(),
    ),
    "raw": lambda q: (q, Options(apply_chat_template=False)),
    "raw with BOS": lambda q: (BOS + q, Options(apply_chat_template=False)),
    "rendered": lambda q: (
        f"{BOS}<|start|>user\n{q}<|end|>\n<|start|>assistant\n",
        Options(apply_chat_template=False),
    ),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """Its tokenizer adds BOS to whatever it is given, and its template writes one."""
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    assert tokenizer("a")["input_ids"][0] == 0
    root = tmp_path_factory.mktemp("bos") / "s"
    with tiny.engine(tiny.llama(), root, tokenizer=tokenizer) as made:
        made.ingest([tiny.document(0)])
        yield made


def ids_seen(engine: BlendEngine, prompt: Any, options: Options) -> list[int]:
    """What ``generate`` is given."""
    with tiny.counted(engine.adapter.model, "generate") as calls:
        engine.generate(prompt, options)
    ids: list[int] = calls[0][0][0].tolist()
    return ids


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_begins_with_bos_once(engine: BlendEngine, way: str, chunks: bool) -> None:
    context = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\n" if chunks else ""
    prompt, options = WAYS[way](f"{context}What?")
    ids = ids_seen(engine, prompt, options)
    assert ids[0] == 0
    assert ids.count(0) == 1
    answer = engine.generate(prompt, options)
    assert (answer.metrics.reused_tokens > 0) == chunks
    assert not any(BOS in note for note in answer.metrics.notes)


def test_a_tokenizer_that_adds_none_gets_none_for_raw_text(tmp_path: Any) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        assert 0 not in ids_seen(engine, "What?", Options(apply_chat_template=False))
        assert ids_seen(engine, "What?", Options()).count(0) == 1


@pytest.mark.parametrize("as_messages", [False, True])
def test_rendered_text_sent_through_the_template_again_is_noted(
    engine: BlendEngine, as_messages: bool
) -> None:
    rendered = f"{BOS}<|start|>user\nWhat?<|end|>\n<|start|>assistant\n"
    prompt = [{"role": "user", "content": rendered}] if as_messages else rendered
    (note,) = [n for n in engine.generate(prompt).metrics.notes if BOS in n]
    assert "apply_chat_template=False" in note
    assert tiny.one_sentence(note)
