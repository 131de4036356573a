"""What ``ask`` sends: passages with their sources, what to do without an answer, where to stop."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scripted
import tiny
from blendrag.demo import demo_model_path
from blendrag.engine import BlendEngine, Filter, Options
from blendrag.engine import prompts as asking
from blendrag.engine.rendering import LEADING
from blendrag.errors import InvalidInputError
from blendrag.model.loading import load_tokens

QUESTION = "Who built the ships near the town?"


def asked(engine: BlendEngine) -> str:
    """The prompt of the newest request."""
    prompts: list[str] = engine.adapter.model.prompts
    return prompts[-1]


def test_a_prompt_names_its_sources_and_says_what_to_do_without_an_answer(tmp_path: Path) -> None:
    with scripted.engine([], tmp_path / "store") as engine:
        engine.ingest([tiny.document(i, paragraphs=2) for i in range(2)]).whole()
        answer = engine.ask(QUESTION, top_k=4)
        assert answer.metrics.chunks[0].outcome == "exact"
        assert {chunk.outcome for chunk in answer.metrics.chunks} <= {"exact", "blended"}
    head, *documents, rest = asked(engine).split("\n\n")
    first, second = (source.source for source in (answer.sources[0], answer.sources[-1]))
    assert first != second
    # the name of a document follows its last passage
    assert [text.split("\n")[1:] for text in documents if "[" in text] == [
        [f"[{first}]"],
        [f"[{second}]"],
    ]
    assert head.endswith(LEADING.strip())
    assert "If the answer is not in the context, say that you do not know." in asked(engine)
    assert rest.startswith(f"Question: {QUESTION}\nAnswer:")


def test_a_system_message_precedes_prompts_that_have_none(tmp_path: Path) -> None:
    own, given = "Answer like a pirate.", "Answer in one word."
    with scripted.engine([], tmp_path / "store", system=own) as engine:
        engine.ingest([tiny.document(i, paragraphs=2) for i in range(2)]).whole()
        answer = engine.ask(QUESTION, top_k=2)
        assert asked(engine).startswith(f"<|bos|><|start|>system\n{own}<|end|>")
        assert LEADING.strip() in asked(engine)
        assert {chunk.outcome for chunk in answer.metrics.chunks} == {"blended"}
        engine.ask(QUESTION, top_k=2, system=given)
        assert asked(engine).startswith(f"<|bos|><|start|>system\n{given}<|end|>")
        engine.generate("Who?", system=given)
        assert asked(engine).startswith(f"<|bos|><|start|>system\n{given}<|end|>")
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
        engine.generate(messages)
        assert asked(engine).startswith("<|bos|><|start|>system\nBe kind.<|end|>")
        assert own not in asked(engine)
        engine.generate("Who?", apply_chat_template=False)
        assert own not in asked(engine)


def test_a_prompt_template_is_put_around_chunks_and_question(tmp_path: Path) -> None:
    template = "Passages:\n{context}\n\nIn Latin, please: {question}!"
    with scripted.engine([], tmp_path / "store", prompt_template=template) as engine:
        engine.ingest([tiny.document(i, paragraphs=2) for i in range(2)]).whole()
        answer = engine.ask(QUESTION, top_k=2)
        prompt = asked(engine)
        assert prompt.partition("user\n")[2].startswith("Passages:\nParagraph ")
        assert f"]\n\nIn Latin, please: {QUESTION}!<|end|>" in prompt
        assert LEADING.strip() not in prompt
        assert len(answer.metrics.chunks) == 2
        engine.ask(QUESTION, top_k=2, prompt_template="{context} {question}")
        assert "Latin" not in asked(engine)
    for wrong in ("{question} {context}", "{context}", "", "{context}{context}{question}"):
        with tiny.refuses("prompt_template"):
            Options(prompt_template=wrong)


def test_a_model_without_a_template_is_told_the_system_message_first(engine: BlendEngine) -> None:
    raw = Options(apply_chat_template=False, system="Answer in one word.")
    prompt, _ = engine.asking.prompt(QUESTION, 2, (), raw)
    rendered = engine.render(prompt, raw)
    assert rendered.text.startswith(f"Answer in one word.\n\n{LEADING}")
    assert len(engine.segments(prompt, raw).chunks) == 2


def test_an_answer_is_over_documents_that_pass_the_filter(tmp_path: Path) -> None:
    with scripted.engine([], tmp_path / "store") as engine:
        texts = [replace(tiny.document(i, paragraphs=2), metadata={"n": i}) for i in range(3)]
        engine.ingest(texts).whole()
        second = Filter.where("n=1")
        assert {s.source for s in engine.ask(QUESTION, filter=second).sources} == {texts[1].source}
        pieces = engine.ask_stream(QUESTION, 1, filter={"type": "gt", "key": "n", "value": 1})
        pieces.close()
        assert [source.source for source in pieces.sources] == [texts[2].source]
        none = Filter.where("n>5")
        assert engine.retrieve(QUESTION, filter=none) == []
        with pytest.raises(InvalidInputError, match=r"filter \('n' > '5' or 5\) leaves no passage"):
            engine.ask(QUESTION, filter=none)
        with pytest.raises(InvalidInputError, match="'m', which no document has"):
            engine.ask_stream(QUESTION, filter=Filter.where("m=1"))


def test_the_embedded_model_keeps_the_prompt_that_it_was_trained_on() -> None:
    assert not load_tokens(str(demo_model_path())).names_sources


def test_without_a_template_an_answer_ends_before_the_model_asks_itself(tmp_path: Path) -> None:
    said = "They did.\nQuestion: Who else?\nAnswer: Nobody."
    with scripted.engine([], tmp_path / "store", said) as engine:
        engine.tokens.tokenizer.chat_template = None
        engine.ingest([tiny.document(0)]).whole()
        assert engine.ask(QUESTION, stop="Nobody").text == "They did."
        assert engine.ask(QUESTION, stop="did").text == "They "
        assert "".join(engine.ask_stream(QUESTION)) == "They did."


def test_opening_the_model_is_no_part_of_the_time_to_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed_s = time.perf_counter, [0.0]

    def slowly(*args: Any) -> Any:
        passed_s[0] += 1000.0
        return tiny.adapter(tiny.llama())

    monkeypatch.setattr(time, "perf_counter", lambda: real() + passed_s[0])

    monkeypatch.setattr("blendrag.engine.lazy_model.load_adapter", slowly)
    monkeypatch.setattr(
        "blendrag.engine.lazy_model.load_tokens", lambda *_: tiny.adapter(tiny.llama()).tokens
    )
    with tiny.engine("some/model", tmp_path / "store") as engine:
        first = engine.generate("What?", max_new_tokens=1).metrics
        second = engine.generate("What?", max_new_tokens=1).metrics
    assert first.opening_s >= 1000.0
    assert 0 < first.ttft_s <= first.total_s < 1000.0
    assert second.opening_s < 1000.0


def test_opening_the_embedder_is_no_part_of_the_time_to_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + passed_s[0])

    class Slow(tiny.WordEmbedder):
        @property
        def dim(self) -> int:  # type: ignore[override]
            passed_s[0] += 1000.0 if passed_s == [0.0] else 0.0
            return 64

    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)])
        engine.kv_namespace.corpus.__dict__["embedder"] = Slow()
        first = engine.ask(QUESTION, max_new_tokens=1).metrics
        second = engine.ask(QUESTION, max_new_tokens=1).metrics
    assert first.opening_s >= 1000.0
    assert 0 < first.retrieval_s < first.ttft_s <= first.total_s < 1000.0
    assert second.opening_s < 1000.0


def test_waiting_for_earlier_requests_is_part_of_the_time_to_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.open()
        with engine.scheduler.held(), monkeypatch.context() as patch:
            waiting = engine.stream("What?", max_new_tokens=1)
            real = time.perf_counter
            patch.setattr(time, "perf_counter", lambda: real() + 1000.0)
            engine.scheduler.step()
        list(waiting)
        metrics = waiting.answer.metrics
    assert 1000.0 <= metrics.queued_s < metrics.ttft_s


def test_what_was_retrieved_is_not_searched_for_in_the_prompt(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(i, paragraphs=2) for i in range(2)]).whole()
        corpus = engine.corpus
        with tiny.counted(corpus, "known_to") as searched:
            answer = engine.ask(QUESTION, top_k=2)
            list(engine.ask_stream(QUESTION, top_k=2))
        assert not searched
        assert len(answer.metrics.chunks) == 2
        removed = answer.sources[0].source
        chunks = engine.retrieve(QUESTION, 2)
        engine.remove([removed])
        prompt = engine.asking.over(QUESTION, chunks, (), Options())
        assert len(engine.segments(prompt).chunks) == sum(c.source != removed for c in chunks)


# -- conversations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [scripted.TEMPLATE, None])
def test_a_question_is_asked_in_the_light_of_those_before(
    tmp_path: Path, template: str | None
) -> None:
    with scripted.engine([], tmp_path / "store") as engine:
        engine.tokens.tokenizer.chat_template = template
        engine.ingest([tiny.document(i, paragraphs=2) for i in range(8)]).whole()
        about = "What did Paragraph 501 tell of Place3507?"
        alone = engine.ask("And when?", top_k=1)
        answer = engine.ask("And when?", top_k=1, history=[(about, "Of 15531 ships.")])
        assert (
            [chunk.source for chunk in answer.sources] == ["doc5.txt"] != [alone.sources[0].source]
        )
        assert answer.metrics.reused_tokens > 0
        prompt = asked(engine)
    told, said, now = (
        prompt.index(text) for text in (about, "Of 15531 ships.", "Question: And when?")
    )
    assert told < said < now
    passage = prompt.index(answer.sources[0].text)
    assert said < passage < now if template else passage < told


def test_an_empty_question_in_a_conversation_is_refused(tmp_path: Path) -> None:
    with scripted.engine([], tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)]).whole()
        for bad in (" ", 5):
            with tiny.refuses("^the question "):
                engine.ask(bad, history=[("Who?", "They.")])  # type: ignore[arg-type]


def test_a_full_conversation_is_rendered_once_for_each_turn_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted.engine([], tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)]).whole()
        turn = ("And when?", "Of ships. " * 40)
        sizes = [
            len(engine.segments(engine.asking.over(QUESTION, (), [turn] * n, Options())).ids)
            for n in (2, 3)
        ]
        chunk = len(engine.kv_namespace.model.text_ids(engine.retrieve(QUESTION, 1)[0].text))
        # two turns fit beside the chunk and a short answer, three do not
        context = (sum(sizes) // 2 + chunk) * 4 // 3
        monkeypatch.setattr(type(engine.kv_namespace.model), "context_tokens", context)
        with tiny.counted(asking, "render") as rendered:
            pieces = engine.ask_stream(QUESTION, 1, history=[turn] * 5, trim_history=True)
        list(pieces)
        assert len(rendered) == pieces.left_out + 1 > 2
        with tiny.counted(asking, "render") as rendered:
            engine.ask(QUESTION, 1)
        assert len(rendered) == 1
