"""Words of any language and identifiers become terms that questions find."""

from __future__ import annotations

import pytest

from blendrag.text.terms import MAX_TERM_CHARS, _parts, query_terms, terms_of


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("ERR_42-7", "err 42 7 err427"),
        ("SKU-00123", "sku 00123 sku00123"),
        ("snake_case __init__", "snake case snakecase init"),
        ("getHTTPServer2", "get http server 2 gethttpserver2"),
        ("os.path.join std::vector", "os path join ospathjoin std vector stdvector"),
        ("Anna's l'été", "anna s annas l ete lete"),
        ("Zürich STRASSE Straße Ærø", "zurich strasse strasse aero"),
        ("ﬁle Ｆｕｌｌ", "file full"),
        ("Москва Йод", "москва иод"),
        ("हिन्दी", "हिन्दी"),
        ("检索", "检 索 检索"),
        ("GPT4模型", "gpt 4 gpt4 模 型 模型"),
        ("ｶﾞﾗｽ", "ガ ラ ス ガラ ラス"),
        ("한국어", "한 국 어 한국 국어"),
        ("ไทย", "ไ ท ย ไท ทย"),
        ("a1b2c3d4e5f6a7", "a1b2c3d4e5f6a7"),
        ("x" * 100, "x" * MAX_TERM_CHARS),
        ("— … 🙂 ' \" * ( ) :", ""),
    ],
)
def test_terms_of_a_text(text: str, terms: str) -> None:
    assert terms_of(text) == terms.split()


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("err_42-7", "After ERR_42-7 the pump stops."),
        ("ERR42-7", "After ERR_42-7 the pump stops."),
        ("get_user_name", "def getUserName(self)"),
        ("user", "def getUserName(self)"),
        ("zurich", "in Zürich"),
        ("模型", "一个模型"),
    ],
)
def test_a_question_shares_a_term_with_the_text_that_names_it(question: str, text: str) -> None:
    assert {*query_terms(question)} & {*terms_of(text)}


def test_a_question_has_each_term_once_and_no_single_sign_of_a_run() -> None:
    assert query_terms("检索 检索 的 the The") == ["检索", "的", "the"]


def test_long_words_are_not_kept_in_memory() -> None:
    _parts.cache_clear()
    assert terms_of("x" * 1000) == ["x" * MAX_TERM_CHARS]
    assert _parts.cache_info().currsize == 0
