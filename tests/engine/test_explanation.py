"""One answer as a page: the state of each token, the chunks' reasons, the timeline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import tiny
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import InvalidInputError
from blendrag.metrics import COMPUTE, LOAD, SELECT

EXPLAINED = Options(policy="hkvd", ratio=0.3, max_new_tokens=2, explain=True)
MARKUP = '<script>alert("x")</script> & <b>bold</b>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(
        tiny.llama(), tmp_path_factory.mktemp("explained"), prefix_text=tiny.BOS
    ) as made:
        made.ingest([tiny.document(i) for i in range(3)])
        yield made


@pytest.fixture(scope="module")
def answer(engine: BlendEngine) -> Answer:
    return engine.generate(tiny.prompt(engine, 0, 1, 2) + MARKUP, EXPLAINED)


def test_every_token_has_the_state_that_the_metrics_count(answer):
    trace, metrics = answer.explain().trace, answer.metrics
    assert len(trace.texts) == len(trace.recomputed) == metrics.prompt_tokens
    assert sum(end - start for start, end in trace.reused) == metrics.reused_tokens
    assert sum(trace.recomputed) == pytest.approx(metrics.recomputed_tokens, abs=1)
    assert 0 < sum(map(bool, trace.recomputed)) < metrics.reused_tokens
    for chunk, (start, end) in zip(metrics.chunks, trace.chunks, strict=True):
        assert end - start == chunk.tokens
        assert sum(trace.recomputed[start:end]) == pytest.approx(chunk.recomputed_tokens, abs=0.51)
    assert MARKUP in "".join(trace.texts)


def test_ranges_are_the_tokens_in_order_with_state_layers_and_chunk(answer):
    trace, metrics = answer.explain().trace, answer.metrics
    ranges = list(trace.ranges())
    assert [text for each in ranges for text in each.texts] == list(trace.texts)
    assert [each.start for each in ranges[1:]] == [e.start + len(e.texts) for e in ranges[:-1]]
    loaded = [each for each in ranges if each.state != "computed"]
    assert sum(len(each.texts) for each in loaded) == metrics.reused_tokens
    for each in ranges:
        share = trace.recomputed[each.start]
        assert (each.state == "recomputed") == (share > 0) == (each.layers > 0)
        assert each.layers == (1 + share * (trace.layers - 1) if share else 0)
    for number, (start, end) in enumerate(trace.chunks, start=1):
        inside = [each for each in ranges if each.chunk == number]
        assert inside[0].start == start
        assert sum(len(each.texts) for each in inside) == end - start


def test_characters_of_several_tokens_are_whole(engine):
    text = "été 日本語 🙂"
    trace = engine.generate(text, EXPLAINED).explain().trace
    assert text in "".join(trace.texts)
    assert "" in trace.texts


def test_the_timeline_has_loading_selecting_and_computing_of_each_layer(answer):
    spans = answer.explain().trace.spans
    layers = {what: {s.layer for s in spans if s.what == what} for what in (LOAD, COMPUTE, SELECT)}
    assert layers[COMPUTE] == {0, 1, 2, 3}
    assert layers[LOAD] >= {1, 2, 3}  # layer 0 is computed for all tokens, so it need not be loaded
    assert layers[SELECT]


def test_the_page_shows_the_prompt_and_refers_to_nothing_outside(answer):
    page = answer.explain().page("Who & what?")
    assert "<title>Who &amp; what?</title>" in page
    assert "<b>native</b>decode weights" in page
    assert not re.search(r"<script|<link|<img|https?:|@import|url\(", page)

    class Text(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.inside = "", False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.inside = tag == "span"

        def handle_data(self, data: str) -> None:
            self.seen += data * self.inside

    text = Text()
    text.feed(page[page.index("<h3>Prompt</h3>") :])
    assert text.seen.strip() == "".join(answer.explain().trace.texts).strip()
    for state in ("reused", "recomputed in", "computed"):
        assert f'title="{state}' in page
    for chunk in answer.metrics.chunks:
        assert chunk.reason in page


def test_names_of_files_and_reasons_are_text(answer):
    chunks = [
        replace(chunk, source=f"/docs/{MARKUP}", reason=MARKUP) for chunk in answer.metrics.chunks
    ]
    metrics = replace(answer.metrics, chunks=tuple(chunks), notes=(MARKUP,))
    page = replace(answer.explain(), text=MARKUP, metrics=metrics).page(MARKUP)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4 + len(chunks)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert re.search(r"\.blendrag \{[^}]*overflow-wrap: anywhere", page)  # long words fit, too
    assert page.index(f'content="{policy}"') < page.index("<title>")  # a browser runs nothing


def test_a_notebook_shows_the_page_without_its_head(answer):
    shown = answer.explain()._repr_html_()
    assert shown.startswith('<div class="blendrag">')
    assert shown in answer.explain().page()


@pytest.mark.parametrize("mode", ["full", "prefix", "reuse"])
def test_every_mode_can_be_explained(engine, mode):
    options = Options(mode=mode, max_new_tokens=1, explain=True)  # type: ignore[arg-type]
    answer = engine.generate(tiny.prompt(engine, 0, 1), options)
    trace = answer.explain().trace
    assert not any(trace.recomputed)
    assert bool(trace.spans) == bool(trace.reused) == (mode == "reuse")  # no chunk is a prefix here
    assert "<h3>Prompt</h3>" in answer.explain().page()


def test_prompts_of_a_batch_are_explained_without_a_timeline(engine):
    prompts = [tiny.prompt(engine, 0, 1), tiny.prompt(engine, 1, 2)]
    for answer in engine.batch(prompts, EXPLAINED):
        trace = answer.explain().trace
        assert sum(trace.recomputed) == pytest.approx(answer.metrics.recomputed_tokens, abs=1)


def test_the_beginning_of_a_prompt_is_counted_and_shown(engine):
    text = "Answer from the notes of the company, and say where you read it. "
    text += tiny.prompt(engine, 0, 1)
    first = engine.generate(text, EXPLAINED)
    again = engine.generate(text, EXPLAINED)
    engine.drain()  # stores a beginning that was seen twice
    again = engine.generate(text, EXPLAINED)
    assert first.metrics.prefix_tokens == 0 < again.metrics.prefix_tokens
    chunks = sum(chunk.tokens for chunk in again.metrics.chunks)
    assert again.metrics.prefix_tokens + chunks == again.metrics.reused_tokens
    row = "(the prompt's beginning)"
    assert row in again.explain().page()
    assert row not in first.explain().page()


def test_an_answer_without_a_trace_says_how_to_get_one(engine):
    answer = engine.generate("hello", Options(max_new_tokens=1))
    with pytest.raises(InvalidInputError, match=r"ask again with explain=True"):
        answer.explain()


def test_the_page_of_a_question_names_its_sources(engine):
    answer = engine.ask("What did the company of Place0 build?", options=EXPLAINED)
    page = answer.explain().page()
    assert all(source.title in page for source in answer.sources)
