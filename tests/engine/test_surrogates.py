"""Text that is no valid Unicode is refused in a sentence wherever it comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.errors import InvalidInputError
from blendrag.text.readers import Document

BAD = "a \udcff b, as bytes that are not UTF-8 become on a command line"
RAW = Options(apply_chat_template=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("store")) as made:
        made.ingest([tiny.document(1, 2)])
        yield made


@pytest.mark.parametrize(
    "way",
    [
        lambda e: e.generate(BAD),
        lambda e: e.generate(BAD, RAW),
        lambda e: e.generate([{"role": "user", "content": BAD}]),
        lambda e: e.generate([{"role": BAD, "content": "Who?"}]),
        lambda e: e.generate("Who?", Options(opening=BAD)),
        lambda e: e.ask(BAD),
        lambda e: e.retrieve(BAD),
        lambda e: e.library.add([Entry("i", BAD)]),
        lambda e: e.library.add([Entry(BAD, tiny.sentence(4))]),
        lambda e: e.library.add([Entry("i", tiny.sentence(5), title=BAD)]),
        lambda e: e.library.get([BAD]),
        lambda e: e.library.delete([BAD]),
        lambda e: e.resources.tokens.encode_text(BAD),
    ],
)
def test_a_lone_surrogate_is_refused(engine: BlendEngine, way: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInputError, match="lone surrogate") as error:
        way(engine)
    assert tiny.one_sentence(str(error.value))


@pytest.mark.parametrize("field", ["source", "title", "text"])
def test_a_document_with_a_lone_surrogate_is_named_and_the_next_is_ingested(
    engine: BlendEngine, field: str
) -> None:
    good = {"source": f"{field}.txt", "title": "x", "text": tiny.sentence(9)}
    report = engine.ingest([Document(**{**good, field: BAD}), Document(**good)])
    assert (report.failed, report.documents) == (1, 1)
    assert "lone surrogate" in report.failures[0]
