"""A corpus that an English embedder does not know is named once; English ones with code are not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import tiny
from blendrag.corpus.languages import MULTILINGUAL, Languages, is_english_only, language_of
from blendrag.engine.library import Entry
from blendrag.text.readers import Document

TEXTS = {
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft begabt "
    "und sollen einander im Geist der Brüderlichkeit begegnen.",
    "French": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de "
    "raison et doivent agir les uns envers les autres.",
    "Spanish": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y deben comportarse "
    "los unos con los otros como hermanos.",
    "Turkish": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana sahiptirler "
    "ve birbirlerine karşı kardeşlik ile hareket ederler.",
    "Vietnamese": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。",
    "Japanese": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "in Cyrillic script": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "in Arabic script": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق",
    "in Devanagari script": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता",
    "English": "All human beings are born free and equal in dignity and rights. They are endowed with reason "
    "and should act towards one another in a spirit of brotherhood.",
    "": "P-0001,part 1,12.50,3.1,24\nP-0002,part 2,99.10,0.4,12\nHans Müller, José Muñoz, Łódź, Zürich",
}  # fmt: skip


@pytest.mark.parametrize("language", TEXTS)
def test_prose_of_a_language_is_known(language: str) -> None:
    assert language_of(TEXTS[language]) == language
    languages = Languages()
    for _ in range(20):
        languages.add(TEXTS[language])
    warning = languages.warning("minilm-offline")
    assert bool(warning) == (language not in ("", "English"))
    if warning:
        assert language in warning
        assert f"--embedder {MULTILINGUAL}" in warning


def test_english_with_code_and_foreign_quotes_is_english() -> None:
    languages = Languages()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        languages.add(path.read_text())
    languages.add(f"{TEXTS['English']}\n" * 30 + TEXTS["German"] + TEXTS["Chinese"])
    languages.add(f"{TEXTS['']}\n" * 30)
    assert languages.warning("minilm-offline") == ""


def test_a_fifth_in_another_language_is_enough_and_short_texts_are_not() -> None:
    languages = Languages()
    languages.add(TEXTS["German"])
    assert not languages.warning("minilm-offline")
    languages.add(f"{TEXTS['English']}\n" * 30)
    languages.add(f"{TEXTS['German']}\n" * 12)
    assert "not English (most of that German)" in languages.warning("minilm-offline")


@pytest.mark.parametrize(
    ("embedder", "expected"),
    [
        ("minilm-offline", True), ("sentence-transformers/all-MiniLM-L6-v2", True),
        ("/models/all-mpnet-base-v2/", True), ("BAAI/bge-small-en-v1.5", True), ("thenlper/gte-base", True),
        ("intfloat/e5-small-v2", True), ("intfloat/multilingual-e5-small", False), (MULTILINGUAL, False),
        ("BAAI/bge-m3", False), ("BAAI/bge-small-zh-v1.5", False), ("/models/ours", False),
    ],
)  # fmt: skip
def test_only_embedders_known_to_be_english_are_warned_of(embedder: str, expected: bool) -> None:
    assert is_english_only(embedder) == expected


def test_an_ingest_warns_once_and_so_do_texts_added_by_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"{number}. {TEXTS['German']}" for number in range(4)]
    documents = [Document(f"{i}.txt", text, "") for i, text in enumerate(texts)]
    with tiny.engine(tiny.llama(), tmp_path / "s", embedder="minilm-offline") as engine:
        (warning,) = engine.dry_run(documents).warnings
        assert engine.ingest(documents).warnings == [warning]
        assert "100% of the new text is not English" in warning
        assert engine.ingest(documents).warnings == engine.dry_run(documents).warnings == []
        with caplog.at_level(logging.WARNING, "blendrag"):
            for text in texts:
                engine.library.add([Entry(text[0], text)])
        warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert [record.getMessage() for record in warned] == [warning]
        assert engine.ingest(documents[:1]).warnings == []
        english = [Document("en.txt", f"{TEXTS['English']}\n" * 30, "")]
        assert engine.ingest(english).warnings == []
        changed = [Document("0.txt", f"{TEXTS['German']}\n" * 2, "")]  # less than a fifth of all
        assert engine.ingest([*english, *changed]).warnings == [warning]
    given = tiny.engine(tiny.llama(), tmp_path / "m", embedder=MULTILINGUAL)
    with given as engine:
        assert engine.ingest(documents).warnings == []
